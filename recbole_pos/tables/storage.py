"""The memory of this process: how much it may take, where columns lie, and what malloc keeps.

Columns lie in memory, or in mapped files where they would exceed ``memory_limit``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from recbole_pos.errors import StorageError, UsageError
from recbole_pos.values import shown

# Peak memory of reading and sorting, in bytes: the code of a cell, its id, its place in the log;
# and keys and order of the rows that are sorted at a time.
_BYTES_PER_CELL = 24
_BYTES_PER_SORTED_ROW = 256
_MIN_SORTED_ROWS, _MAX_SORTED_ROWS = 1 << 10, 1 << 22
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # what glibc allows on 64-bit systems
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]B)", re.IGNORECASE)


class Storage:
    """Space for the columns of one dataset while it is read, filtered, numbered and sorted.

    Attributes:
        is_on_disk: whether columns are mapped files. They have no name and vanish with the process,
            however that ends; the system keeps in memory what fits.
        sorted_rows: how many rows are sorted at a time; all of them in memory.
    """

    def __init__(self, num_cells: int = 0, limit: int = 0) -> None:
        """Decide whether columns are kept in memory or on disk.

        Args:
            num_cells: number of cells of the whole dataset.
            limit: bytes of memory that reading and sorting them may take.
        """
        # On disk if all cells, of 24 bytes each at the peak (``_BYTES_PER_CELL``), would exceed the
        # limit. Then as many rows are sorted at a time as fit into the limit, within two bounds. In
        # memory all rows are sorted at once: the largest int64 stands for any number of rows.
        self.is_on_disk = num_cells * _BYTES_PER_CELL > limit
        rows = min(max(limit // _BYTES_PER_SORTED_ROW, _MIN_SORTED_ROWS), _MAX_SORTED_ROWS)
        self.sorted_rows = rows if self.is_on_disk else np.iinfo(np.int64).max
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # files of living columns

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array with arbitrary values, to be filled, in memory or on disk.

        Args:
            shape: its shape.
            dtype: type of its values.

        Raises:
            StorageError: if the disk has no room for it.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not self.is_on_disk or not size:
            return np.empty(shape, dtype)
        folder = tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                # Take the space now where the system can: if the disk were full at a later write to
                # the mapped file, the system would end the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                column = np.memmap(file, dtype, "w+", shape=shape)
        except OSError as error:
            raise StorageError(
                f"memory_limit: {folder}: no room for {size:,} bytes ({error.strerror}): columns "
                "that do not fit into memory are kept there while they are sorted; make room, set "
                "TMPDIR to another folder, or raise memory_limit"
            ) from error
        self._mapped.add(column._mmap)  # type: ignore[attr-defined]
        return column

    def release_pages(self) -> None:
        """Take columns on disk out of the memory of this process, until they are read again.

        Their values stay in their files, and in the system's cache of files while there is room.
        """
        for file in self._mapped:
            if hasattr(mmap, "MADV_DONTNEED"):  # Linux
                file.madvise(mmap.MADV_DONTNEED)

    def store(self, column: np.ndarray) -> np.ndarray:
        """Return a column as it is, or a copy on disk if columns are kept there."""
        if not self.is_on_disk or column.dtype == object:
            return column
        stored = self.empty(column.shape, column.dtype)
        stored[...] = column
        return stored


def read_limit(value: Any) -> int:
    """Return the number of bytes that the option ``memory_limit`` means.

    Args:
        value: a size such as 4GB; or ``auto`` or None for half of the free memory, divided by the
            number of processes that torchrun has started on this machine.

    Raises:
        UsageError: for anything else.
    """
    # ``_SIZE`` is the pattern of a number and a unit, and ``_UNITS`` has the bytes of each unit.
    if value in (None, "auto"):
        return get_free_memory() // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if match := _SIZE.fullmatch(str(value)):
        return int(float(match[1]) * _UNITS[match[2].upper()])
    raise UsageError(
        f"memory_limit: expected auto or a size such as 4GB or 500MB, found {shown(value)}"
    )


def get_memory_limit() -> int:
    """Return the bytes of memory that the machine and its container allow this process to use.

    It is the smaller of the two: the memory of the machine, and the limit of a container such as
    Docker's, which is in no other figure. The limit of a container stands in a file of its control
    group, of version 2 or 1.
    """
    limits = [psutil.virtual_memory().total]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError):
            text = (Path("/sys/fs/cgroup") / file).read_text(encoding="ascii").strip()
            if text.isdigit():  # without a limit the file says "max"
                limits.append(int(text))
    return min(limits)


def get_free_memory() -> int:
    """Return about how many more bytes this process may use."""
    used = psutil.Process().memory_info().rss
    return max(min(psutil.virtual_memory().available, get_memory_limit() - used), 0)


def keep_freed_memory() -> None:
    """Let glibc's malloc serve blocks up to 32 MB from the heap, and keep the memory they free.

    Otherwise every step maps large blocks from the kernel again, which zeroes each page on first
    touch: 12% of an epoch at window length 200. This changes the whole process, and does nothing
    without glibc.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    _call_glibc("mallopt", _M_TRIM_THRESHOLD, 2**31 - 1)


def trim_heap() -> None:
    """Return the free pages of glibc's heap to the system.

    Packed batches differ in size, and the heap keeps the gaps between them: an AttrFormer
    on MovieLens-1M that uses 0.6 GB had grown to 4 GB after thirty epochs.
    """
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *args: Any) -> None:
    """Call a function of glibc; do nothing with another C library."""
    if sys.platform != "linux":
        return
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*args)
