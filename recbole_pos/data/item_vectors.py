"""Content vectors of items, made elsewhere: a file of names and numbers, put in the order of ids.

``.npy`` files are mapped and ``.parquet`` files read in parts, so that memory holds only the rows
of known items, once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import header_data_from_array_1_0, open_memmap, write_array_header_1_0
from pyarrow import compute

from recbole_pos.data.atomic_files import is_list_type
from recbole_pos.errors import UsageError
from recbole_pos.files import TemporaryFolder, atomic_write, digest_file, write_text
from recbole_pos.values import short, shown

KEPT = "item_vectors.npy"  # name of the file of vectors in the folder of a run
_BLOCK_NUMBERS = 1 << 24  # how many numbers of vectors are copied at a time


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


def open_vectors(source: str | Path, item_field: str) -> VectorFile:
    """Open a file of content vectors of items, the option ``item_vectors``.

    Args:
        source: path of a .npy file, which has its names in a .txt file beside it, or of a .parquet
            file.
        item_field: name of the column of names, in parquet.

    Returns:
        The open file, with its names and the size of a vector; its blocks can be read once.

    Raises:
        UsageError: if it cannot be read, or holds something else than vectors with names.
    """
    # Opening reads names and sizes only; the vectors are read when the blocks are iterated. An
    # error of reading becomes a UsageError that names the file (``_explain_read_errors``).
    path = Path(source)
    with _explain_read_errors(path):
        is_matrix = path.suffix == ".npy"
        file = _open_matrix(path) if is_matrix else _open_lists(path, item_field)
    if file.names.has_duplicates:
        repeated = file.names[file.names.duplicated()][0]
        raise UsageError(f"item_vectors: {path}: {shown(repeated)} has more than one vector")
    return file


def _open_matrix(path: Path) -> VectorFile:
    """Open a matrix of vectors in a .npy file, and the names of its rows in a .txt file beside it.

    Raises:
        UsageError: if it is no matrix of numbers, or there are not as many names as rows.
    """
    # The matrix is mapped, not read: each block is read from disk when it is copied.
    values = open_memmap(path, mode="r")
    names_file = path.with_suffix(".txt")
    with _explain_read_errors(names_file):
        text = names_file.read_text(encoding="utf-8-sig")
    names = text.removesuffix("\n").split("\n") if text else []
    is_matrix = values.ndim == 2 and values.dtype.kind in "fiu"  # floats or whole numbers
    if not is_matrix or len(values) != len(names):
        raise UsageError(
            f"item_vectors: {path}: expected a matrix of numbers with {len(names):,} rows, one for "
            f"each line of {names_file.name}, found {list(values.shape)} of {values.dtype}"
        )

    # Blocks of whole rows, with about ``_BLOCK_NUMBERS`` numbers each: pairs of the numbers of the
    # rows and their vectors, made one by one as the caller iterates.
    num_rows, size = values.shape
    step = max(1, _BLOCK_NUMBERS // max(size, 1))
    starts = range(0, num_rows, step)
    blocks = ((np.arange(i, min(i + step, num_rows)), values[i : i + step]) for i in starts)
    return VectorFile(path, pd.Index(names), size, blocks)


def _open_lists(path: Path, item_field: str) -> VectorFile:
    """Open a parquet table with a column of item names and one of vectors, which are lists.

    Args:
        path: the file.
        item_field: the column of names; it may have another name if there is no other column
            besides the vectors.

    Returns:
        The open file, of which the names are read, and the vectors as its blocks are iterated.

    Raises:
        UsageError: if not exactly one column has lists, or it is not clear which has the names.
    """
    file = pq.ParquetFile(path, memory_map=True)
    schema = file.schema_arrow
    list_columns = [column.name for column in schema if is_list_type(column.type)]
    other_columns = [column.name for column in schema if column.name not in list_columns]
    has_names = len(other_columns) == 1 or item_field in other_columns
    if len(list_columns) != 1 or not has_names:
        raise UsageError(
            f"item_vectors: {path}: expected a column of names ({item_field}) and one of lists of "
            f"numbers, found {', '.join(f'{column.name}: {column.type}' for column in schema)}"
        )
    name_column = item_field if item_field in other_columns else other_columns[0]
    names = file.read([name_column]).column(0).cast(pa.string()).to_pandas()

    # The size that all vectors must have: that of the longest among the first 1,024 rows. Where
    # these are all empty or missing (0 or None), read on. ``_read_lists`` refuses another size.
    batches = file.iter_batches(1024, columns=list_columns)
    sizes = (compute.max(compute.list_value_length(batch.column(0))).as_py() for batch in batches)
    size = next(filter(None, sizes), 0)
    blocks = _read_lists(path, file, list_columns[0], size)
    return VectorFile(path, pd.Index(names), size, blocks)


def _read_lists(
    path: Path, file: pq.ParquetFile, column: str, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the vectors in a column of lists, block by block; rows without a vector are skipped.

    Args:
        path: the file, for messages.
        file: the open file.
        column: name of the column.
        size: numbers that every vector must have.

    Yields:
        rows: [r] numbers of the rows in the file, from 0.
        vectors: [r, size] their vectors.

    Raises:
        UsageError: if a vector has another size; the message counts rows from 1.
    """
    # A block has _BLOCK_NUMBERS numbers, if a vector has 1,024 of them.
    first_row = 0
    for batch in file.iter_batches(max(1, _BLOCK_NUMBERS // 1024), columns=[column]):
        lists = batch.column(0)
        sizes = compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        is_wrong = (sizes != size) & (sizes > 0)
        if is_wrong.any():
            row = is_wrong.argmax()
            raise UsageError(
                f"item_vectors: {path}, row {first_row + row + 1:,}: the vector has "
                f"{sizes[row]:,} numbers, others have {size:,}; all must have as many"
            )
        # All lists that are left have ``size`` numbers, so together they are a matrix.
        flat = lists.filter(pa.array(sizes > 0)).flatten().to_numpy(zero_copy_only=False)
        yield first_row + np.flatnonzero(sizes), flat.reshape(-1, max(size, 1))
        first_row += len(batch)


def read_vectors(
    source: str | Path, names: np.ndarray, item_field: str
) -> tuple[np.ndarray, list[str]]:
    """Read the vectors of a dataset's items from a file, and put them in the order of ids.

    Args:
        source: the file, .npy or .parquet, which the option ``item_vectors`` names.
        names: [n] names of items by id; the first is padding.
        item_field: name of the column of names, in parquet.

    Returns:
        vectors: [n, size] float32, zeros for padding and for items that the file does not have.
        notices: a sentence if items have no vector, or names of the file are no items; else empty.

    Raises:
        UsageError: if the file cannot be read, a number is not finite, or no item has a vector.
    """
    # Opening the file reads its names; copying reads the vectors, and writes them into the rows of
    # their items.
    file = open_vectors(source, item_field)
    vectors = np.zeros((len(names), file.size), np.float32)
    num_found = _copy_vectors(file, names, vectors)  # number of items that have a vector

    # Say how many items have no vector, and how many names of the file are no items.
    num_items = len(names) - 1
    num_unknown = int((~file.names.isin(names[1:]) & (file.names != "[PAD]")).sum())
    if num_found == num_items and not num_unknown:
        return vectors, []

    notice = f"{file.path.name}: {file.size:,} numbers for {num_found:,} of {num_items:,} items"
    if num_found < num_items:
        notice += f"; {num_items - num_found:,} have none, and zeros in place of it"
    if num_unknown:
        notice += f"; {num_unknown:,} names of the file are of no item of the dataset"
    return vectors, [f"item_vectors: {notice}"]


def _copy_vectors(file: VectorFile, item_names: np.ndarray, vectors: np.ndarray) -> int:
    """Copy the vectors of a file to the rows of their items.

    Args:
        file: the open file, of which vectors of unknown names are passed over.
        item_names: [n] names of items by id; the first is padding.
        vectors: [n, size] float32, written in place.

    Returns:
        How many items have a vector.

    Raises:
        UsageError: if a number of an item is not finite in float32, or no item has a vector.
    """
    # For each row of the file the id of its item, -1 for names that are no items.
    id_by_row = pd.Index(item_names).get_indexer(file.names)
    id_by_row[id_by_row == 0] = -1  # id 0 is padding, which is no item
    num_found = 0
    with _explain_read_errors(file.path):
        for rows, block in file.blocks:
            ids = id_by_row[rows]
            is_known = ids >= 0
            ids = ids[is_known]
            # No warning of numpy where a number is too large: it becomes infinite and is refused.
            with np.errstate(over="ignore"):
                values = block[is_known].astype(np.float32)
            is_finite = np.isfinite(values).all(1)
            if not is_finite.all():
                name = item_names[ids[is_finite.argmin()]]
                raise UsageError(
                    f"item_vectors: {file.path}: the vector of {shown(name)} has a number that is "
                    "not finite, or too large for float32"
                )
            vectors[ids] = values
            num_found += len(ids)
    if not num_found:
        raise UsageError(
            f"item_vectors: {file.path}: none of its {len(file.names):,} names, such as "
            f"{shown(list(file.names[:1]))}, is of an item that needs a vector"
        )
    return num_found


def read_new_vectors(
    source: str | Path, known: Mapping[str, int], item_field: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of items that a model does not know yet.

    Args:
        source: the file of vectors.
        known: names of the items that the model knows (as keys).
        item_field: name of the column of names, in parquet.

    Returns:
        names: [k] names of the new items.
        vectors: [k, size] float32.

    Raises:
        UsageError: if the file cannot be read, or the model knows all of its items.
    """
    # ``read_vectors`` takes names by id, of which the first is padding; so the new names get one in
    # front, and its row of zeros is cut off.
    excluded = {*known, "", "[PAD]"}
    names = [name for name in open_vectors(source, item_field).names if name not in excluded]
    vectors, _ = read_vectors(source, np.array(["[PAD]", *names], dtype=object), item_field)
    return np.array(names, dtype=object), vectors[1:]


def keep_vectors(source: Any, names: np.ndarray, item_field: str, folder: Path) -> None:
    """Write the content vectors of a run's items into its folder, so that it needs no other file.

    Written are ``item_vectors.npy``, a row for each id, and ``item_vectors.txt``, its names.

    Args:
        source: the file of vectors, which the option ``item_vectors`` names.
        names: [items] names of items by id.
        item_field: name of the column of names, in parquet.
        folder: folder of the run.
    """
    file = folder / KEPT  # item_vectors.npy
    if make_absolute(source) == str(file.resolve()):  # a resumed run reads its own file
        return
    # The names are written first: a run that is killed in between has no file of vectors, and reads
    # ``source`` again when it is resumed.
    vectors, _notices = read_vectors(source, names, item_field)
    write_text(file.with_suffix(".txt"), "".join(f"{name}\n" for name in names))
    # Write what ``np.save`` writes: the header of a .npy file, and the numbers. ``np.save`` itself
    # does not say why a write fails, such as that the disk is full.
    with atomic_write(file, text=False) as opened:
        write_array_header_1_0(opened, header_data_from_array_1_0(vectors))
        opened.write(vectors)


def to_file(value: Any) -> Any:
    """Write content vectors from memory into a temporary file, which lasts as long as the process.

    Args:
        value: a DataFrame with a column of names and one of lists; a DataFrame of numbers with the
            names as its index; or (names, matrix), where the matrix may be a tensor.

    Returns:
        The path of the file as text. A value of another kind is returned as it is; if it is a path,
        then as text.

    Raises:
        UsageError: if names and rows are not as many, or the frame cannot be written.
    """
    if not isinstance(value, (pd.DataFrame, tuple, list)) or not len(value):
        return str(value) if isinstance(value, Path) else value

    # A frame with a column of objects has names and lists. ``KEPT`` is item_vectors.npy. It gets a
    # folder of its own in that of all vectors from memory, which the end of the process removes.
    path = Path(tempfile.mkdtemp(dir=_temporary_folder().path)) / KEPT
    if isinstance(value, pd.DataFrame) and len(value.select_dtypes(object).columns):
        path = path.with_suffix(".parquet")
        with _explain_read_errors(path):  # such as rows of several types
            value.to_parquet(path, index=False)
        return str(path)

    # All else is names and a matrix.
    pair = (value.index, value) if isinstance(value, pd.DataFrame) else tuple(value)
    has_rows = len(pair) == 2 and all(hasattr(part, "__len__") for part in pair)
    if not has_rows or len(pair[0]) != len(pair[1]):
        raise UsageError(
            "item_vectors: expected a DataFrame, (names, matrix) with a row for each name, or a "
            f"file; found {shown(value)}"
        )
    names, matrix = [str(name) for name in pair[0]], pair[1]
    if hasattr(matrix, "detach"):  # a tensor, of any type, on any device
        matrix = matrix.detach().float().cpu()
    np.save(path, np.asarray(matrix))
    path.with_suffix(".txt").write_text("".join(f"{name}\n" for name in names), "utf-8")
    return str(path)


@cache
def _temporary_folder() -> TemporaryFolder:
    """Return the folder of vectors from memory, which is removed when the process ends."""
    return TemporaryFolder()


def make_absolute(source: Any) -> Any:
    """Return a path as an absolute one, for processes in another folder; None stays None."""
    return str(Path(source).resolve()) if source else source


def digest_content(source: str | Path) -> str:
    """Return a digest (short hash) of the content of a file of vectors, whatever its path.

    Args:
        source: the file; of a .npy file the digest covers its names in the .txt file, too.

    Returns:
        The digest; the path itself, as text, if there is no such file.
    """
    # ``_digest_file`` caches digests by the time of change, so that no file is read twice.
    path = Path(source)
    files = [path, path.with_suffix(".txt")] if path.suffix == ".npy" else [path]
    digests = [_digest_file(file, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return "".join(digests) or str(source)


@lru_cache
def _digest_file(path: Path, modified: int) -> str:
    """Return the digest of a file, cached by its time of change ``modified``."""
    return digest_file(path)[:16]


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading, in a ``with`` block, into a UsageError that names the file.

    A UsageError passes unchanged: it names the file already.

    Args:
        path: the file, for the message.
    """
    # A UsageError is a ValueError, too, so its clause must come first.
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, OverflowError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or short(str(error).partition("\n")[0])
        raise UsageError(f"item_vectors: {path} cannot be read: {reason}") from error
