"""Content vectors of items, made elsewhere: files of names and numbers, put in the order of ids.

``.npy`` files are mapped and ``.parquet`` files read in parts, so that memory holds only the rows
of known items, once.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap
from pyarrow import compute

from recbole_pos.errors import UsageError
from recbole_pos.files import name_write_errors, write_text
from recbole_pos.values import short, shown

KEPT = "item_vectors.npy"  # in the folder of a run
_LARGEST = 16_384  # numbers of a vector; statistics need memory for the square of them
_BLOCK = 1 << 24  # numbers that are copied at a time
_scratch: list[tempfile.TemporaryDirectory] = []  # folder of vectors from memory, until exit


class VectorFile(NamedTuple):
    """A file of item vectors, opened to be read once.

    Attributes:
        names: [rows] names of items, each once.
        size: numbers of a vector.
        blocks: (rows [r], vectors [r, size]) in the order of the file; empty rows are skipped.
    """

    path: Path
    names: pd.Index
    size: int
    blocks: Iterable[tuple[np.ndarray, np.ndarray]]


def open_files(source: Any, item_field: str) -> list[VectorFile]:
    """Open the files of ``item_vectors``: one, or several by name.

    Raises:
        UsageError: if one cannot be read, or holds something else than vectors with names.
    """
    files = []
    for path in map(Path, source.values() if isinstance(source, Mapping) else [source]):
        if path.suffix not in (".npy", ".parquet"):
            raise UsageError(f"item_vectors: {path}: expected a file .npy or .parquet")
        with _reading(path):
            file = _open_matrix(path) if _is_matrix(path) else _open_lists(path, item_field)
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


def _open_matrix(path: Path) -> VectorFile:
    """Open a matrix and its names."""
    values, names = np.load(path, mmap_mode="r"), path.with_suffix(".txt")
    if values.ndim != 2 or values.dtype.kind not in "fiu":
        raise UsageError(
            f"item_vectors: {path}: expected a matrix of numbers [items, size], found "
            f"{list(values.shape)} of {values.dtype}"
        )
    with _reading(names):
        text = names.read_text(encoding="utf-8-sig")
    lines = text.removesuffix("\n").split("\n") if text else []
    if len(lines) != len(values):
        raise UsageError(
            f"item_vectors: {names} has {len(lines):,} names, one a line, and {path.name} "
            f"{len(values):,} rows; they must be as many"
        )
    step = max(1, _BLOCK // max(values.shape[1], 1))
    parts = (np.arange(n, min(n + step, len(values))) for n in range(0, len(values), step))
    blocks = ((rows, values[rows[0] : rows[-1] + 1]) for rows in parts)
    return VectorFile(path, pd.Index(lines), values.shape[1], blocks)


def _open_lists(path: Path, item_field: str) -> VectorFile:
    """Open a table with a column of names and one of lists."""
    file = pq.ParquetFile(path, memory_map=True)
    schema = file.schema_arrow
    lists = [field.name for field in schema if _is_vector(field.type)]
    others = [field.name for field in schema if field.name not in lists]
    key = item_field if item_field in others else (others or [""])[0]
    if len(lists) != 1 or (len(others) != 1 and key != item_field):
        raise UsageError(
            f"item_vectors: {path}: expected a column of names ({item_field}) and one of lists of "
            f"numbers, found {', '.join(f'{field.name}: {field.type}' for field in schema)}"
        )
    names = file.read([key]).column(0).cast(pa.string())
    if names.null_count:
        raise UsageError(f"item_vectors: {path}: {names.null_count:,} rows have no {key}")
    blocks = _read_lists(path, file, lists[0])
    first = list(itertools.islice(blocks, 1))
    size = first[0][1].shape[1] if first else 0
    return VectorFile(path, pd.Index(names.to_pandas()), size, itertools.chain(first, blocks))


def _read_lists(
    path: Path, file: pq.ParquetFile, column: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ``blocks`` of a column of lists."""
    begin, size = 0, 0
    for batch in file.iter_batches(max(1, _BLOCK // 1024), columns=[column]):
        lists = batch.column(0)
        sizes = compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(sizes)
        if len(rows):
            size = size or int(sizes[rows[0]])
            if (wrong := sizes[rows] != size).any():
                row = rows[wrong.argmax()]
                raise UsageError(
                    f"item_vectors: {path}, row {begin + row + 1:,}: the vector has "
                    f"{sizes[row]:,} numbers, others have {size:,}; all must have as many"
                )
            flat = lists.filter(pa.array(sizes > 0)).flatten()
            yield begin + rows, flat.to_numpy(zero_copy_only=False).reshape(-1, size)
        begin += len(batch)


def read_vectors(
    source: Any, names: np.ndarray, item_field: str, out: Path | None = None
) -> tuple[np.ndarray, list[str]]:
    """Read the vectors of items, concatenated if ``item_vectors`` names several files.

    Args:
        source: ``item_vectors``: a path, or paths by name.
        names: [n] names of items by id; the first is padding.
        item_field: name of the column of names, in parquet.
        out: a .npy file to write the vectors to; they are in memory if None.

    Returns:
        [n, size] float32 vectors, zeros where no file has the name; and a sentence on each file.

    Raises:
        UsageError: if a file cannot be read, a number is not finite, or no item has a vector.
    """
    files, notices, begin = open_files(source, item_field), [], 0  # begin: first column of a file
    shape = len(names), sum(file.size for file in files)
    values: np.ndarray
    if out is None:
        values = np.zeros(shape, np.float32)
    else:
        values = open_memmap(out, "w+", np.float32, shape)
    for file in files:
        place = pd.Index(names).get_indexer(file.names)
        place[place == 0] = -1  # padding is no item
        found = 0
        with _reading(file.path):
            for rows, vectors in file.blocks:
                ids = place[rows]
                with np.errstate(over="ignore"):  # the next lines report overflow
                    part, ids = vectors[ids >= 0].astype(np.float32), ids[ids >= 0]
                if not np.isfinite(part).all():
                    name = names[ids[(~np.isfinite(part)).any(1).argmax()]]
                    raise UsageError(
                        f"item_vectors: {file.path}: the vector of {shown(name)} has a number that "
                        "is not finite, or too large for float32"
                    )
                values[ids, begin : begin + file.size] = part
                found += len(ids)
        if not found:
            raise UsageError(
                f"item_vectors: {file.path}: none of its {len(file.names):,} names is of an item "
                f"(they are such as {shown(list(file.names[:1]))}, items such as {shown(names[1])})"
            )
        begin += file.size
        items, unknown = len(names) - 1, int((place < 0).sum()) - ("[PAD]" in file.names)
        text = f"{file.path.name}: {file.size:,} numbers for {found:,} of {items:,} items"
        if found < items:
            text += f"; {items - found:,} have none, and zeros in place of it"
        if unknown:
            text += f"; {unknown:,} names of the file are of no item"
        notices.append(f"item_vectors: {text}")
    return values, notices


def read_new_vectors(
    source: Any, known: Mapping[str, int], item_field: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return [k] names and [k, size] float32 vectors of the items that are not ``known`` yet."""
    named = (name for file in open_files(source, item_field) for name in file.names)
    new = [name for name in dict.fromkeys(named) if name and name not in known and name != "[PAD]"]
    if not new:
        raise UsageError(
            "item_vectors: all items of the file are known to the model already; give vectors of "
            "new ones"
        )
    vectors, _ = read_vectors(source, np.array(["[PAD]", *new], dtype=object), item_field)
    return np.array(new, dtype=object), vectors[1:]


def keep_vectors(source: Any, names: np.ndarray, item_field: str, folder: Path) -> None:
    """Write the vectors of a run's items into its folder, as :func:`read_vectors` reads them.

    The folder can then be moved.
    """
    file = folder / KEPT
    if make_absolute(source) == str(file.resolve()):  # a resumed run reads its own file
        return
    with name_write_errors(file):
        read_vectors(source, names, item_field, part := folder / f".{KEPT}.part")
        write_text(file.with_suffix(".txt"), "".join(f"{name}\n" for name in names))
        os.replace(part, file)


def to_files(value: Any) -> Any:
    """Write vectors from memory into a temporary file, which lasts as long as the process.

    ``value`` is a DataFrame with a column of names and one of lists, or of numbers with the names
    as its index; or (names, matrix); or any of these by name. Paths are returned as they are.
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
    return _for_each(source, lambda path: path and str(Path(path).resolve()))


def file_names(source: Any) -> Any:
    """Return what is left of paths where the folders of this machine mean nothing."""
    return _for_each(source, lambda path: path and Path(path).name)


def content_digest(source: Any) -> Any:
    """Return the digest of the files of vectors, the same in any folder; by name for a mapping.

    A path without a file is returned as text.
    """

    def digest(path: Any) -> str:
        files = [Path(path)]
        if _is_matrix(path):
            files.append(Path(path).with_suffix(".txt"))
        digests = [_digest_file(str(f), f.stat().st_mtime_ns) for f in files if f.is_file()]
        return "".join(digests) or str(path)

    return _for_each(source, digest)


def _for_each(source: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``change`` of a path, or of each of paths by name."""
    if isinstance(source, Mapping):
        return {name: change(path) for name, path in source.items()}
    return change(source)


def _is_matrix(path: Any) -> bool:
    """Return whether vectors are a matrix, with its names in a text file beside it."""
    return Path(path).suffix == ".npy"


@lru_cache
def _digest_file(path: str, changed: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:16]


def _is_vector(kind: pa.DataType) -> bool:
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return lists and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


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
