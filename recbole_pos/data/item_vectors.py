"""Content vectors of items, made elsewhere: a file of names and numbers, put in the order of ids.

The file is mapped, so that memory holds only the rows of known items, once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.lib.format import header_data_from_array_1_0, open_memmap, write_array_header_1_0
from pandas.api.types import is_list_like

from recbole_pos.errors import UsageError
from recbole_pos.files import TemporaryFolder, atomic_write, digest_file, write_text
from recbole_pos.values import short, shown

KEPT = "item_vectors.npy"  # name of the file of vectors in the folder of a run
_BLOCK_NUMBERS = 1 << 24  # how many numbers of vectors are copied at a time


class VectorFile(NamedTuple):
    """A file of item vectors, of which only the names are in memory.

    Attributes:
        path: the file.
        names: [rows] names of items, each once.
        vectors: [rows, size] numbers of any type, mapped: they are read from disk when used.
    """

    path: Path
    names: pd.Index
    vectors: np.ndarray


def open_vectors(source: str | Path) -> VectorFile:
    """Open a file of content vectors of items, the option ``item_vectors``.

    Args:
        source: path of a .npy file with a matrix, which has the names of its rows in a .txt file
            beside it.

    Raises:
        UsageError: if a file cannot be read, or does not hold what it should.
    """
    # An error of reading becomes a UsageError that names the file.
    path = Path(source)
    with _explain_read_errors(path):
        vectors = open_memmap(path, mode="r")
    names_file = path.with_suffix(".txt")
    with _explain_read_errors(names_file):
        text = names_file.read_text(encoding="utf-8-sig")
    names = pd.Index(text.removesuffix("\n").split("\n") if text else [])

    is_matrix = vectors.ndim == 2 and vectors.dtype.kind in "fiu"  # floats or whole numbers
    if not is_matrix or len(vectors) != len(names):
        raise UsageError(
            f"item_vectors: {path}: expected a matrix of numbers with {len(names):,} rows, one for "
            f"each line of {names_file.name}, found {list(vectors.shape)} of {vectors.dtype}"
        )
    if names.has_duplicates:
        repeated = names[names.duplicated()][0]
        raise UsageError(f"item_vectors: {path}: {shown(repeated)} has more than one vector")
    return VectorFile(path, names, vectors)


def read_vectors(source: str | Path, names: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Read the vectors of a dataset's items from a file, and put them in the order of ids.

    Args:
        source: the file, which the option ``item_vectors`` names.
        names: [n] names of items by id; the first is padding.

    Returns:
        vectors: [n, size] float32, zeros for padding and for items that the file does not have.
        notices: a sentence if items have no vector, or names of the file are no items; else empty.

    Raises:
        UsageError: if the file cannot be read, a number is not finite, or no item has a vector.
    """
    # Opening the file reads its names; copying reads the vectors, and writes them into the rows of
    # their items.
    file = open_vectors(source)
    size = file.vectors.shape[1]
    vectors = np.zeros((len(names), size), np.float32)
    num_found = _copy_vectors(file, names, vectors)  # number of items that have a vector

    # Say how many items have no vector, and how many names of the file are no items.
    num_items = len(names) - 1
    num_unknown = int((~file.names.isin(names[1:]) & (file.names != "[PAD]")).sum())
    if num_found == num_items and not num_unknown:
        return vectors, []

    notice = f"{file.path.name}: {size:,} numbers for {num_found:,} of {num_items:,} items"
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
    known_rows = np.flatnonzero(id_by_row >= 0)
    if not len(known_rows):
        raise UsageError(
            f"item_vectors: {file.path}: none of its {len(file.names):,} names, such as "
            f"{shown(list(file.names[:1]))}, is of an item that needs a vector"
        )

    # Copy some rows at a time, with about ``_BLOCK_NUMBERS`` numbers.
    num_rows = max(1, _BLOCK_NUMBERS // max(vectors.shape[1], 1))
    for start in range(0, len(known_rows), num_rows):
        rows = known_rows[start : start + num_rows]
        ids = id_by_row[rows]
        # No warning of numpy where a number is too large: it becomes infinite and is refused.
        with np.errstate(over="ignore"):
            values = file.vectors[rows].astype(np.float32)
        is_finite = np.isfinite(values).all(1)
        if not is_finite.all():
            name = item_names[ids[is_finite.argmin()]]
            raise UsageError(
                f"item_vectors: {file.path}: the vector of {shown(name)} has a number that is not "
                "finite, or too large for float32"
            )
        vectors[ids] = values
    return len(known_rows)


def read_new_vectors(source: str | Path, known: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of items that a model does not know yet.

    Args:
        source: the file of vectors.
        known: names of the items that the model knows (as keys).

    Returns:
        names: [k] names of the new items.
        vectors: [k, size] float32.

    Raises:
        UsageError: if the file cannot be read, or the model knows all of its items.
    """
    # ``read_vectors`` takes names by id, of which the first is padding; so the new names get one in
    # front, and its row of zeros is cut off.
    excluded = {*known, "", "[PAD]"}
    names = [name for name in open_vectors(source).names if name not in excluded]
    vectors, _ = read_vectors(source, np.array(["[PAD]", *names], dtype=object))
    return np.array(names, dtype=object), vectors[1:]


def keep_vectors(source: Any, names: np.ndarray, folder: Path) -> None:
    """Write the content vectors of a run's items into its folder, so that it needs no other file.

    Written are ``item_vectors.npy``, a row for each id, and ``item_vectors.txt``, its names.

    Args:
        source: the file of vectors, which the option ``item_vectors`` names.
        names: [items] names of items by id.
        folder: folder of the run.
    """
    file = folder / KEPT  # item_vectors.npy
    if make_absolute(source) == str(file.resolve()):  # a resumed run reads its own file
        return
    # The names are written first: a run that is killed in between has no file of vectors, and reads
    # ``source`` again when it is resumed.
    vectors, _notices = read_vectors(source, names)
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
        UsageError: if it is not a matrix of numbers with a name for each row.
    """
    if not isinstance(value, (pd.DataFrame, tuple, list)) or not len(value):
        return str(value) if isinstance(value, Path) else value
    try:
        names, matrix = _divide_frame(value) if isinstance(value, pd.DataFrame) else value
        if hasattr(matrix, "detach"):  # a tensor, of any type, on any device
            matrix = matrix.detach().float().cpu()
        matrix, lines = np.asarray(matrix), [f"{name}\n" for name in names]
    except (TypeError, ValueError) as error:  # of another form, such as lists of several lengths
        raise UsageError(
            "item_vectors: expected a DataFrame, (names, matrix) with a row for each name, or a "
            f"file; found {shown(value)} ({error})"
        ) from error

    # Write the matrix as item_vectors.npy (``KEPT``), and the names as item_vectors.txt, in a new
    # folder. It lies in the temporary folder of this process, which is removed when that ends.
    folder = Path(tempfile.mkdtemp(dir=_temporary_folder().path))
    path = folder / KEPT
    np.save(path, matrix)
    path.with_suffix(".txt").write_text("".join(lines), "utf-8")

    # Raise an error if this is no matrix of numbers, or has not as many rows as there are names.
    open_vectors(path)
    return str(path)


def _divide_frame(frame: pd.DataFrame) -> tuple[Any, Any]:
    """Return the names in a frame of vectors, and the vectors, [rows, size].

    A frame has one of two forms. In the first, one column has the names and another one the
    vectors, as lists such as [0.1, 0.2]; rows without a name or a vector are left out. In the
    second, the index has the names, and each column has one number of every vector.

    Raises:
        ValueError: if a column has lists, but there are not two columns, one of names and one of
            lists; or if the lists differ in length.
    """
    # The second form has no column of lists.
    objects = frame.select_dtypes(object)
    list_columns = [name for name in objects if objects[name].map(is_list_like).any()]
    if not list_columns:
        return frame.index, frame

    name_columns = frame.columns.difference(list_columns)
    if len(list_columns) != 1 or len(name_columns) != 1:
        raise ValueError("expected one column of names and one of lists")
    frame = frame.dropna()
    return frame[name_columns[0]], np.stack(frame[list_columns[0]].to_list())


@cache
def _temporary_folder() -> TemporaryFolder:
    """Return the folder of vectors from memory, which is removed when the process ends."""
    return TemporaryFolder()


def make_absolute(source: Any) -> Any:
    """Return a path as an absolute one, for processes in another folder; None stays None."""
    return str(Path(source).resolve()) if source else source


def digest_content(source: str | Path) -> str:
    """Return a digest (short hash) of the content of a file, whatever its path.

    Args:
        source: a file; of a .npy file, which has vectors, the digest covers the .txt file, too.

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

    Args:
        path: the file, for the message.
    """
    try:
        yield
    except (OSError, ValueError, EOFError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or short(str(error).partition("\n")[0])
        raise UsageError(f"item_vectors: {path} cannot be read: {reason}") from error
