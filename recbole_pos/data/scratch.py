"""Columns on disk in place of memory, where interactions do not fit into it: ``memory_limit``.

A column is a mapped file without a name. It vanishes with the process, however that ends, and its
disk space is allocated before anything is written. The system keeps in memory what fits.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
from pyarrow import parquet

from recbole_pos.data.location import PARQUET
from recbole_pos.errors import StorageError, UsageError
from recbole_pos.values import Options, shown

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]B)", re.IGNORECASE)
# Peak memory of reading and sorting, in bytes: for a byte of text, for a cell of parquet.
_PER_TEXT_BYTE, _PER_PARQUET_CELL = 3, 24
_MAX_BLOCK_ROWS, _PER_BLOCK_ROW = 1 << 22, 256  # of rows that are processed at a time


def read_limit(value: Any) -> int | None:
    """Return the bytes of ``memory_limit``; None for auto."""
    if value in (None, "auto"):
        return None
    if match := _SIZE.fullmatch(str(value)):
        return int(float(match[1]) * _UNITS[match[2].upper()])
    raise UsageError(
        f"memory_limit: expected auto or a size such as 4GB or 500MB, found {shown(value)}"
    )


def get_memory_limit() -> int:
    """Return the bytes that machine, container and process limit allow this process to use."""
    limits = [psutil.virtual_memory().total]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError):
            text = (Path("/sys/fs/cgroup") / file).read_text(encoding="ascii").strip()
            if text.isdigit():  # else "max"
                limits.append(int(text))
    with suppress(ImportError):  # not on Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(limit)
    return min(limits)


def get_free_memory() -> int:
    """Return about how many more bytes this process may use."""
    used = psutil.Process().memory_info().rss
    return max(min(psutil.virtual_memory().available, get_memory_limit() - used), 0)


class Scratch:
    """Disk space for columns, in a folder (the temporary one if it cannot be written).

    ``limit`` is about how many bytes of memory to use, at least some hundred kilobytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
        self.block_rows = min(max(limit // _PER_BLOCK_ROW, 1 << 10), _MAX_BLOCK_ROWS)
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    @classmethod
    def where_needed(cls, config: Options, files: Iterable[Path]) -> Scratch | None:
        """Return disk space if reading and sorting the files may exceed the limit, else None."""
        existing = [file for file in files if file.is_file()]
        limit = read_limit(config["memory_limit"])
        limit = get_free_memory() // 2 if limit is None else limit
        needed = sum(map(_estimate_memory, existing))
        return cls(existing[0].parent, limit) if needed > limit else None

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array of zeros on disk, or raise StorageError if it has no space for that."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self.explain_errors(size), tempfile.TemporaryFile(dir=self.folder) as file:
            if size and hasattr(os, "posix_fallocate"):  # a full disk would end the process later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return self.map_file(file, dtype).reshape(shape)

    def store(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of an array on disk."""
        stored = self.empty(array.shape, array.dtype)
        stored[:] = array
        return stored

    def map_file(self, file: Any, dtype: Any) -> np.ndarray:
        """Return the content of an open file as a mapped array."""
        if not os.fstat(file.fileno()).st_size:
            return np.empty(0, dtype)
        mapped = mmap.mmap(file.fileno(), 0)
        self._maps.add(mapped)
        return np.frombuffer(mapped, dtype)

    def release(self) -> None:
        """Free the memory of all columns; the system reads them again when they are used."""
        for mapped in self._maps:
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def iterate_blocks(self, num_rows: int) -> Iterator[slice]:
        """Yield slices that cover ``num_rows`` rows; memory of columns is released after each."""
        for start in range(0, num_rows, self.block_rows):
            yield slice(start, min(start + self.block_rows, num_rows))
            self.release()

    def keep(self, table: pd.DataFrame, mask: np.ndarray) -> pd.DataFrame:
        """Return the rows of a table where ``mask`` ([rows] bool) is true, with their index.

        Numbers and categories are on disk, lists in memory.
        """
        columns: dict[str, Any] = {}
        for name, column in table.items():
            is_names = column.dtype == "category"
            values = (column.cat.codes if is_names else column).to_numpy()
            values = values[mask] if values.dtype == object else self._keep_values(values, mask)
            if is_names:
                values = pd.Categorical.from_codes(values, dtype=column.dtype, validate=False)
            columns[name] = values
        index = pd.Index(self._keep_values(table.index, mask), copy=False)
        return pd.DataFrame(columns, index=index, copy=False)

    def _keep_values(self, column: np.ndarray | pd.Index, mask: np.ndarray) -> np.ndarray:
        """Return the values of a column [rows] where ``mask`` [rows] is true, on disk."""
        selected = self.empty(int(np.count_nonzero(mask)), column.dtype)
        start = 0
        for rows in self.iterate_blocks(len(mask)):
            values = column[rows][mask[rows]]
            selected[start : start + len(values)] = values
            start += len(values)
        return selected

    @contextmanager
    def explain_errors(self, size: int = 0) -> Iterator[None]:
        """Turn errors of the disk into a StorageError, such as no room for ``size`` bytes."""
        try:
            yield
        except OSError as error:
            is_full = size and error.errno in (errno.ENOSPC, errno.EDQUOT)
            problem = f"no room for {size:,} bytes" if is_full else error.strerror
            raise StorageError(
                f"memory_limit: {self.folder}: {problem}: columns that do not fit into memory are "
                "kept there while they are sorted; make room, or raise memory_limit"
            ) from error


class ColumnWriter:
    """Writes a column of numbers or names to disk, block by block; ``names`` are codes by name."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.names: dict[str, int] = {}
        with scratch.explain_errors():
            self.file: Any = tempfile.TemporaryFile(dir=scratch.folder)
        self.dtype: Any = np.float64

    def append(self, column: Any) -> None:
        """Write a block of floats, or of names as a dictionary array."""
        if isinstance(column, pa.DictionaryArray):
            self.dtype = np.int32
            names = self.names
            codes = [names.setdefault(name, len(names)) for name in column.dictionary.to_pylist()]
            column = np.array([*codes, -1], np.int32)[column.indices.fill_null(-1).to_numpy()]
        with self.scratch.explain_errors():
            self.file.write(np.ascontiguousarray(column).data)

    def close(self) -> np.ndarray:
        """Return the whole column, mapped: float64 numbers, or int32 codes of names (-1: none)."""
        with self.scratch.explain_errors(), self.file:
            self.file.flush()
            return self.scratch.map_file(self.file, self.dtype)


def _estimate_memory(file: Path) -> int:
    """Return about how many bytes reading and sorting a table takes; 0 if it cannot be read."""
    if not file.name.endswith(PARQUET):
        return _PER_TEXT_BYTE * file.stat().st_size
    with suppress(OSError, pa.ArrowException):
        metadata = parquet.read_metadata(file)
        return _PER_PARQUET_CELL * int(metadata.num_rows) * int(metadata.num_columns)
    return 0
