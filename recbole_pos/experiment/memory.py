"""Memory: refuse what cannot fit, and keep freed memory in the process while it trains."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.tables.storage import get_memory_limit
from recbole_pos.values import Options

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # what glibc allows on 64-bit systems


def is_memory_error(error: BaseException) -> bool:
    """Return whether an error is a failed allocation; on a CPU torch raises a RuntimeError."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def require_scores(config: Options, dataset: Dataset, num_items: int) -> None:
    """Raise a UsageError if the scores of a batch for ``num_items`` items exceed the memory."""
    num_targets = int(np.count_nonzero(dataset.split.is_target & (dataset.part != TRAIN)))
    num_rows = min(config["eval_batch_size"], num_targets)
    num_bytes = 4 * num_rows * num_items  # float32
    if num_bytes > get_memory_limit():
        raise UsageError(
            f"eval_batch_size: {num_rows:,} rows of scores for {num_items:,} items are "
            f"{num_bytes / 2**30:,.3g} GiB, more than the memory; give a smaller one"
        )


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
