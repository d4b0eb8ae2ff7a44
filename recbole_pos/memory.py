"""Keeps freed memory in the process: page faults of large fresh tensors cost 1.3-1.5x on CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Tell glibc's malloc to serve large blocks from the heap and to keep what is freed.

    By default every block above 32 MB is mapped anew from the kernel, which zeroes each page on
    first touch, step after step. Does nothing without glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
