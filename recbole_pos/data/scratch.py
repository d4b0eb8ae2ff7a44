"""Columns on disk in place of memory, where interactions do not fit into it: ``memory_limit``.

A column lies in a mapped file without a name: it is gone with the process, however that ends, and
its room on the disk is taken before anything is written into it. What there is memory for stays in
memory, since the system keeps it there.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
# Memory that reading and sorting take at their peak: for a byte of text, for a cell of parquet.
_OF_TEXT, _OF_CELL = 3, 24
_MOST_ROWS, _OF_ROW = 1 << 22, 256  # rows worked on at a time, and bytes of memory that one needs


def read_limit(value: Any) -> int | None:
    """Return the bytes of ``memory_limit``; None for auto.

    Raises:
        UsageError: for anything else.
    """
    if value in (None, "auto"):
        return None
    if found := _SIZE.fullmatch(str(value)):
        return int(float(found[1]) * _UNITS[found[2].upper()])
    raise UsageError(
        f"memory_limit: expected auto or a size such as 4GB or 500MB, found {shown(value)}"
    )


def memory() -> int:
    """Return the bytes that this process may have: of the machine, its container, its own limit."""
    limits = [psutil.virtual_memory().total]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (Path("/sys/fs/cgroup") / file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdigit() else []
    try:
        import resource
    except ImportError:  # not on Windows
        return min(limits)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(limits if limit == resource.RLIM_INFINITY else [*limits, limit])


def free_memory() -> int:
    """Return the bytes that this process may still take, about."""
    used = psutil.Process().memory_info().rss
    return max(min(psutil.virtual_memory().available, memory() - used), 0)


class Scratch:
    """Room on a disk for columns.

    Args:
        folder: on that disk.
        limit: bytes of memory to do with, about; at least some hundred kilobytes are used.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
        self.rows = min(max(limit // _OF_ROW, 1 << 10), _MOST_ROWS)
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    @classmethod
    def where_needed(cls, config: Options, files: Iterable[Path]) -> Scratch | None:
        """Return None where reading and sorting the files takes no more memory than it may."""
        there = [file for file in files if file.is_file()]
        limit = read_limit(config["memory_limit"])
        limit = free_memory() // 2 if limit is None else limit
        return cls(there[0].parent, limit) if sum(map(_memory_for, there)) > limit else None

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array on disk, of zeros.

        Raises:
            StorageError: if there is no room for it.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self.refused(size), tempfile.TemporaryFile(dir=self.folder) as file:
            if size and hasattr(os, "posix_fallocate"):  # a full disk would end the process later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return self._map(file, dtype).reshape(shape)

    def _map(self, file: Any, dtype: Any) -> np.ndarray:
        if not os.fstat(file.fileno()).st_size:
            return np.empty(0, dtype)
        mapped = mmap.mmap(file.fileno(), 0)
        self._maps.add(mapped)
        return np.frombuffer(mapped, dtype)

    def release(self) -> None:
        """Let the system have the memory of all columns; they are read from disk if looked at."""
        for mapped in self._maps:
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def blocks(self, rows: int) -> Iterator[slice]:
        """Yield the rows of a table, some after others; what was looked at is released."""
        for start in range(0, rows, self.rows):
            yield slice(start, min(start + self.rows, rows))
            self.release()

    def keep(self, table: pd.DataFrame, mask: np.ndarray) -> pd.DataFrame:
        """Return the rows of a table where ``mask`` is true, on disk; lists stay in memory."""
        count, index = int(np.count_nonzero(mask)), table.index
        kinds = {name: column.dtype for name, column in table.items() if column.dtype == "category"}
        columns = {
            name: (column.cat.codes if name in kinds else column).to_numpy()
            for name, column in table.items()
        }
        kept = {name: self.empty(count, c.dtype) for name, c in columns.items() if c.dtype != "O"}
        kept |= {name: np.empty(count, "O") for name in columns if name not in kept}
        lines, at = self.empty(count, np.int64), 0
        for rows in self.blocks(len(table)):
            chosen = rows.start + np.flatnonzero(mask[rows])
            for name, column in columns.items():
                kept[name][at : at + len(chosen)] = column[chosen]
            lines[at : at + len(chosen)] = index[chosen]
            at += len(chosen)
        made = {n: as_categories(kept[n], kinds[n]) if n in kinds else kept[n] for n in columns}
        return pd.DataFrame(made, index=pd.Index(lines, copy=False), copy=False)

    @contextmanager
    def refused(self, size: int = 0) -> Iterator[None]:
        """Within, a disk that is full, or refuses, is named."""
        try:
            yield
        except OSError as error:
            full = size and error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise StorageError(
                f"memory_limit: {self.folder}: "
                f"{f'no room for {size:,} bytes' if full else error.strerror}: columns that do not "
                "fit into memory are kept there while they are sorted; make room, or raise "
                "memory_limit"
            ) from error


class ColumnWriter:
    """A column of numbers or names, block by block.

    Attributes:
        names: of which a name's place is its code.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.scratch, self.names = scratch, dict[str, int]()
        with scratch.refused():
            self.file: Any = tempfile.TemporaryFile(dir=scratch.folder)
        self.dtype: Any = np.float64

    def add(self, column: Any) -> int:
        """Write a block: floats, or a dictionary of names; returns its length."""
        if isinstance(column, pa.DictionaryArray):
            self.dtype, names = np.int32, self.names
            codes = [names.setdefault(name, len(names)) for name in column.dictionary.to_pylist()]
            column = np.array([*codes, -1], np.int32)[column.indices.fill_null(-1).to_numpy()]
        with self.scratch.refused():
            self.file.write(np.ascontiguousarray(column).data)
        return len(column)

    def close(self) -> np.ndarray:
        """Return the whole, mapped: numbers, or codes of names (-1 for none)."""
        with self.scratch.refused(), self.file:
            self.file.flush()
            return self.scratch._map(self.file, self.dtype)


def as_categories(codes: np.ndarray, kinds: Any) -> pd.Categorical:
    """Codes that are known to be right as a column of names; none is copied or looked at."""
    return pd.Categorical.from_codes(codes, dtype=kinds, validate=False)


def _memory_for(file: Path) -> int:
    """Bytes that reading and sorting a table take, about; one that cannot be read takes none."""
    if not file.name.endswith(PARQUET):
        return _OF_TEXT * file.stat().st_size
    try:
        about = parquet.read_metadata(file)
    except (OSError, pa.ArrowException):
        return 0
    return _OF_CELL * int(about.num_rows) * int(about.num_columns)
