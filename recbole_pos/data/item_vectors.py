"""Content vectors of items, made elsewhere: files of names and numbers, put in the order of ids.

``.npy`` files are mapped and ``.parquet`` files read in parts, so that of a file only the rows that
are kept are in memory, once.
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
_LARGEST = 16_384  # numbers of a vector, of whose pairs there are statistics
_BLOCK = 1 << 24  # numbers that are copied at a time
_scratch: list[tempfile.TemporaryDirectory] = []  # of vectors from memory; gone with the process


@dataclass(frozen=True)
class VectorFile:
    """One file.

    Attributes:
        path: of it.
        names: [rows] of items, each once.
        size: numbers of a vector.
    """

    path: Path
    names: pd.Index
    size: int

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (rows [r], vectors [r, size]) from the first row on; rows without one are skipped.

        Raises:
            UsageError: if a vector has another size.
        """
        raise NotImplementedError


class NpyFile(VectorFile):
    """A matrix, and its names in a text file beside it."""

    @classmethod
    def open(cls, path: Path) -> NpyFile:
        """Read names and the header."""
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
        """Read names and the size of the first vector."""
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
            found = cls(path, pd.Index(names.to_pandas()), 0)
            sizes = (len(vectors[0]) for _, vectors in found._lists(file, lists[0]))
            return cls(path, found.names, next(sizes, 0))

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with _reading(self.path), pq.ParquetFile(self.path, memory_map=True) as file:
            column = next(f.name for f in file.schema_arrow if _is_vector(f.type))
            yield from self._lists(file, column)

    def _lists(self, file: pq.ParquetFile, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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
    """Vectors in the order of some names.

    Attributes:
        values: [names, size] float32; zeros where no file has the name.
        notices: what was found and what was not, a sentence a file.
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
        source: ``item_vectors``: a path, or paths by name, whose vectors are put side by side.
        names: [n] of items, in the order wanted; the first is padding.
        item_field: what a column of names is called.
        out: a .npy file that gets the vectors; they are in memory if None.

    Raises:
        UsageError: if a file cannot be read, a number is not finite, or no item has a vector.
    """
    files = open_files(source, item_field)
    shape, notices, begin = (len(names), sum(file.size for file in files)), [], 0
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
            known = place[rows] >= 0
            ids = place[rows[known]]
            with np.errstate(over="ignore"):
                part = vectors[known].astype(np.float32)
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


def read_new(
    source: Any, known: Mapping[str, int], item_field: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read names [k] and vectors [k, size] of the items that are not known yet.

    Raises:
        UsageError: if all are, or as :func:`read_vectors`.
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
    """Write the vectors of a run's items into its folder, so that it can be moved."""
    file = folder / KEPT
    if absolute(source) == str(file.resolve()):  # of a run that goes on
        return
    with writing(file):
        read_vectors(source, names, item_field, part := folder / f".{KEPT}.part")
        write_text(file.with_suffix(".txt"), "".join(f"{name}\n" for name in names))
        os.replace(part, file)


def to_files(value: Any) -> Any:
    """Write vectors from memory into a file of this process, and return its path.

    Args:
        value: a DataFrame with a column of names and one of lists, or of numbers with the names as
            its index; or (names, matrix). What is a path already, or paths by name, stays.

    Raises:
        UsageError: if names and rows are not as many.
    """
    if isinstance(value, Mapping):
        return {name: to_files(one) for name, one in value.items()}
    if not isinstance(value, (pd.DataFrame, tuple, list)) or not len(value):
        return str(value) if isinstance(value, Path) else value
    if not _scratch:
        _scratch.append(tempfile.TemporaryDirectory(prefix="recbole_pos_"))
    path = Path(tempfile.mkdtemp(dir=_scratch[0].name)) / KEPT
    if isinstance(value, pd.DataFrame) and len(value.select_dtypes(object).columns):
        value.to_parquet(path := path.with_suffix(".parquet"), index=False)
        return str(path)
    both = (value.index, value) if isinstance(value, pd.DataFrame) else tuple(value)
    if len(both) != 2 or len(both[0]) != len(both[1]):
        raise UsageError("item_vectors: expected names and a matrix with a row for each of them")
    np.save(path, np.asarray(both[1]))
    path.with_suffix(".txt").write_text("".join(f"{name}\n" for name in both[0]), "utf-8")
    return str(path)


def absolute(source: Any) -> Any:
    """Return paths from the root, for processes that work in another folder."""
    if isinstance(source, Mapping):
        return {name: absolute(path) for name, path in source.items()}
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
    """Turn what numpy and Arrow raise about a file into a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, OverflowError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or short(str(error).partition("\n")[0])
        raise UsageError(f"item_vectors: {path} cannot be read: {why}") from error
