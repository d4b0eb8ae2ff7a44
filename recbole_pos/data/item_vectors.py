"""Content vectors of items, made elsewhere: files of names and numbers, put in the order of ids.

``.npy`` files are mapped and ``.parquet`` files read in parts, so that memory holds only the rows
of known items, once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute

from recbole_pos.errors import UsageError
from recbole_pos.files import write_text, writing
from recbole_pos.values import short, shown

KEPT = "item_vectors.npy"  # in the folder of a run
_LARGEST = 16_384  # numbers of a vector; statistics need memory for the square of them
_BLOCK = 1 << 24  # numbers that are copied at a time
_scratch: list[tempfile.TemporaryDirectory] = []  # folder of vectors from memory, until exit


@dataclass(frozen=True)
class VectorFile:
    """A file of item vectors.

    Attributes:
        path: path of the file.
        names: [rows] names of items, each once.
        size: numbers of a vector.
    """

    path: Path
    names: pd.Index
    size: int

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (rows [r], vectors [r, size]) in the order of the file; empty rows are skipped.

        Raises:
            UsageError: if a vector has another size, or the file cannot be read.
        """
        raise NotImplementedError


class NpyFile(VectorFile):
    """A matrix, and its names in a text file beside it."""

    @classmethod
    def open(cls, path: Path) -> NpyFile:
        """Read the names, and the header of the matrix.

        Raises:
            UsageError: if a file cannot be read, is no matrix, or names and rows are not as many.
        """
        names = _read_lines(path.with_suffix(".txt"), f"the names of the rows of {path.name}")
        values = _map(path)
        if values.ndim != 2 or values.dtype.kind not in "fiu":
            raise UsageError(
                f"item_vectors: {path}: expected a matrix of numbers [items, size], found "
                f"{list(values.shape)} of {values.dtype}"
            )
        if len(names) != len(values):
            raise UsageError(
                f"item_vectors: {path.with_suffix('.txt')} has {len(names):,} names, one a line, "
                f"and {path.name} {len(values):,} rows; they must be as many"
            )
        return cls(path, pd.Index(names), values.shape[1])

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        values, step = _map(self.path), max(1, _BLOCK // self.size)
        for begin in range(0, len(values), step):
            part = values[begin : begin + step]
            yield np.arange(begin, begin + len(part)), part


class ParquetFile(VectorFile):
    """A column of names and one of lists."""

    @classmethod
    def open(cls, path: Path, item_field: str) -> ParquetFile:
        """Read the names, and the size of the first vector.

        Raises:
            UsageError: if the file cannot be read, or its columns are not names and vectors.
        """
        with _reading(path), pq.ParquetFile(path, memory_map=True) as file:
            schema = file.schema_arrow
            lists = [field.name for field in schema if _is_vector(field.type)]
            others = [field.name for field in schema if field.name not in lists]
            key = item_field if item_field in others else (others or [""])[0]
            if len(lists) != 1 or (len(others) != 1 and key != item_field):
                raise UsageError(
                    f"item_vectors: {path}: expected a column of names ({item_field}) and one of "
                    f"lists of numbers, found {', '.join(f'{f.name}: {f.type}' for f in schema)}"
                )
            names = file.read([key]).column(0).cast(pa.string())
            if names.null_count:
                raise UsageError(f"item_vectors: {path}: {names.null_count:,} rows have no {key}")
            unsized = cls(path, pd.Index(names.to_pandas()), 0)
            sizes = (len(vectors[0]) for _, vectors in unsized._lists(file, lists[0]))
            return cls(path, unsized.names, next(sizes, 0))

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with _reading(self.path), pq.ParquetFile(self.path, memory_map=True) as file:
            column = next(f.name for f in file.schema_arrow if _is_vector(f.type))
            yield from self._lists(file, column)

    def _lists(self, file: pq.ParquetFile, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield rows and vectors of a column of lists, as ``blocks`` does."""
        begin = 0
        for batch in file.iter_batches(batch_size=max(1, _BLOCK // 1024), columns=[column]):
            lists = batch.column(0)
            sizes = compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
            rows = np.flatnonzero(sizes)
            if len(rows):
                size = self.size or int(sizes[rows[0]])
                if (wrong := sizes[rows] != size).any():
                    row = rows[wrong.argmax()]
                    raise UsageError(
                        f"item_vectors: {self.path}: the vector of "
                        f"{shown(self.names[begin + row])} has {sizes[row]:,} numbers, others have "
                        f"{size:,}; all must have as many"
                    )
                flat = lists.filter(pa.array(sizes > 0)).flatten()
                yield begin + rows, flat.to_numpy(zero_copy_only=False).reshape(-1, size)
            begin += len(batch)


@dataclass(frozen=True)
class ItemVectors:
    """Vectors of items in the order of ids.

    Attributes:
        values: [names, size] float32; zeros where no file has the name.
        notices: for each file a sentence on how many items it has vectors of.
    """

    values: np.ndarray
    notices: list[str]


def open_files(source: Any, item_field: str) -> list[VectorFile]:
    """Open the files of ``item_vectors``: one, or several by name.

    Raises:
        UsageError: if one cannot be read, has no names, or a name twice.
    """
    files: list[VectorFile] = []
    for path in map(Path, source.values() if isinstance(source, Mapping) else [source]):
        if path.suffix not in (".npy", ".parquet"):
            raise UsageError(f"item_vectors: {path}: expected a file .npy or .parquet")
        parquet = path.suffix == ".parquet"
        file = ParquetFile.open(path, item_field) if parquet else NpyFile.open(path)
        if file.names.has_duplicates:
            twice = file.names[file.names.duplicated()][0]
            raise UsageError(f"item_vectors: {path}: {shown(twice)} has more than one vector")
        if not 0 < file.size <= _LARGEST:
            raise UsageError(
                f"item_vectors: {path}: vectors have {file.size:,} numbers, expected 1 to "
                f"{_LARGEST:,}"
            )
        files.append(file)
    return files


def read_vectors(
    source: Any, names: np.ndarray, item_field: str, out: Path | None = None
) -> ItemVectors:
    """Read the vectors of items.

    Args:
        source: ``item_vectors``: a path, or paths by name, whose vectors are concatenated.
        names: [n] names of items by id; the first is padding.
        item_field: name of the column of names, in parquet.
        out: a .npy file to write the vectors to; they are in memory if None.

    Raises:
        UsageError: if a file cannot be read, a number is not finite, or no item has a vector.
    """
    files = open_files(source, item_field)
    shape = len(names), sum(file.size for file in files)
    notices, begin = [], 0  # begin: first column of the current file
    values: np.ndarray
    if out is None:
        values = np.zeros(shape, np.float32)
    else:
        values = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    for file in files:
        place = pd.Index(names).get_indexer(file.names)
        place[place == 0] = -1  # padding is no item
        found = 0
        for rows, vectors in file.blocks():
            is_item = place[rows] >= 0
            ids = place[rows[is_item]]
            with np.errstate(over="ignore"):  # the next lines report overflow
                part = vectors[is_item].astype(np.float32)
            if not np.isfinite(part).all():
                name = names[ids[(~np.isfinite(part)).any(1).argmax()]]
                raise UsageError(
                    f"item_vectors: {file.path}: the vector of {shown(name)} has a number that is "
                    "not finite, or too large for float32"
                )
            values[ids, begin : begin + file.size] = part
            found += len(ids)
        if not found:
            raise UsageError(
                f"item_vectors: {file.path}: none of its {len(file.names):,} names is of an item "
                f"(they are such as {shown(file.names[0])}, items such as {shown(names[1])})"
                if len(file.names)
                else f"item_vectors: {file.path} is empty"
            )
        begin += file.size
        text = f"{file.path.name}: {file.size:,} numbers for {found:,} of {len(names) - 1:,} items"
        if missing := len(names) - 1 - found:
            text += f"; {missing:,} have none, and zeros in place of it"
        if unknown := int((place < 0).sum()) - ("[PAD]" in file.names):
            text += f"; {unknown:,} names of the file are of no item"
        notices.append(f"item_vectors: {text}")
    return ItemVectors(values, notices)


def read_new_vectors(
    source: Any, known: Mapping[str, int], item_field: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of items that a model does not know yet.

    Args:
        source: ``item_vectors``: a path, or paths by name.
        known: ids by name of the items that the model knows.
        item_field: name of the column of names, in parquet.

    Returns:
        [k] names and [k, size] float32 vectors.

    Raises:
        UsageError: if all items are known, or as :func:`read_vectors`.
    """
    named = (name for file in open_files(source, item_field) for name in file.names)
    new = [name for name in dict.fromkeys(named) if name and name not in known and name != "[PAD]"]
    if not new:
        raise UsageError(
            "item_vectors: all items of the file are known to the model already; give vectors of "
            "new ones"
        )
    vectors = read_vectors(source, np.array(["[PAD]", *new], dtype=object), item_field).values
    return np.array(new, dtype=object), vectors[1:]


def keep_vectors(source: Any, names: np.ndarray, item_field: str, folder: Path) -> None:
    """Write the vectors of a run's items into its folder, so that the folder can be moved.

    Args:
        source: ``item_vectors``: a path, or paths by name.
        names: [n] names of items by id; the first is padding.
        item_field: name of the column of names, in parquet.
        folder: folder of the run.
    """
    file = folder / KEPT
    if make_absolute(source) == str(file.resolve()):  # a resumed run reads its own file
        return
    with writing(file):
        read_vectors(source, names, item_field, part := folder / f".{KEPT}.part")
        write_text(file.with_suffix(".txt"), "".join(f"{name}\n" for name in names))
        os.replace(part, file)


def to_files(value: Any) -> Any:
    """Write vectors from memory into a temporary file, which lasts as long as the process.

    Args:
        value: a DataFrame with a column of names and one of lists, or of numbers with the names as
            its index; or (names, matrix); or any of these by name.

    Returns:
        the path of the file, or paths by name; values that are paths already are returned.

    Raises:
        UsageError: if names and rows are not as many.
    """
    if isinstance(value, Mapping):
        return {name: to_files(vectors) for name, vectors in value.items()}
    if not isinstance(value, (pd.DataFrame, tuple, list)) or not len(value):
        return str(value) if isinstance(value, Path) else value
    if not _scratch:
        _scratch.append(tempfile.TemporaryDirectory(prefix="recbole_pos_"))
    path = Path(tempfile.mkdtemp(dir=_scratch[0].name)) / KEPT
    if isinstance(value, pd.DataFrame) and len(value.select_dtypes(object).columns):
        value.to_parquet(path := path.with_suffix(".parquet"), index=False)
        return str(path)
    pair = (value.index, value) if isinstance(value, pd.DataFrame) else tuple(value)
    if len(pair) != 2 or len(pair[0]) != len(pair[1]):
        raise UsageError("item_vectors: expected names and a matrix with a row for each of them")
    names, matrix = pair
    np.save(path, np.asarray(matrix))
    path.with_suffix(".txt").write_text("".join(f"{name}\n" for name in names), "utf-8")
    return str(path)


def make_absolute(source: Any) -> Any:
    """Return a path, or paths by name, as absolute ones, for processes in another folder."""
    if isinstance(source, Mapping):
        return {name: make_absolute(path) for name, path in source.items()}
    return source and str(Path(source).resolve())


def _is_vector(kind: pa.DataType) -> bool:
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return lists and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _map(path: Path) -> np.ndarray:
    with _reading(path):
        values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return values


def _read_lines(path: Path, what: str) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"item_vectors: {path} cannot be read, {what}: {error}") from error
    return text.removesuffix("\n").split("\n") if text else []


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of numpy and Arrow into a UsageError, for use in a ``with`` block."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, OverflowError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or short(str(error).partition("\n")[0])
        raise UsageError(f"item_vectors: {path} cannot be read: {why}") from error
