"""Columns that are in memory, or in mapped files where they would exceed ``memory_limit``."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np

from recbole_pos.errors import StorageError

# Peak memory of reading and sorting, in bytes: the code of a cell, its id, its place in the log;
# and keys and order of the rows that are sorted at a time.
_BYTES_PER_CELL = 24
_BYTES_PER_SORTED_ROW = 256
_MIN_SORTED_ROWS, _MAX_SORTED_ROWS = 1 << 10, 1 << 22


class Storage:
    """Space for the columns of one dataset while it is read, filtered, numbered and sorted.

    Attributes:
        is_on_disk: whether columns are mapped files. They have no name and vanish with the process,
            however that ends; the system keeps in memory what fits.
        sorted_rows: how many rows are sorted at a time; all of them in memory.
    """

    def __init__(self, num_cells: int = 0, limit: int = 0) -> None:
        """Decide by the number of cells, and by the bytes of memory that they may take."""
        self.is_on_disk = num_cells * _BYTES_PER_CELL > limit
        rows = limit // _BYTES_PER_SORTED_ROW
        rows = min(max(rows, _MIN_SORTED_ROWS), _MAX_SORTED_ROWS)
        self.sorted_rows = rows if self.is_on_disk else np.iinfo(np.int64).max

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array to fill; a StorageError says that the disk has no room for it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not self.is_on_disk or not size:
            return np.empty(shape, dtype)
        folder = tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                if hasattr(os, "posix_fallocate"):  # a full disk would end the process later
                    os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, dtype, "w+", shape=shape)
        except OSError as error:
            raise StorageError(
                f"memory_limit: {folder}: no room for {size:,} bytes ({error.strerror}): columns "
                "that do not fit into memory are kept there while they are sorted; make room, set "
                "TMPDIR to another folder, or raise memory_limit"
            ) from error

    def store(self, column: np.ndarray) -> np.ndarray:
        """Return a column, on disk if this storage is."""
        if not self.is_on_disk or column.dtype == object:
            return column
        stored = self.empty(column.shape, column.dtype)
        stored[...] = column
        return stored
