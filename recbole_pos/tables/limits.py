"""How much memory this process may use, and how much of it reading a dataset may take."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]B)", re.IGNORECASE)


def read_limit(value: Any) -> int:
    """Return the bytes of ``memory_limit``.

    ``auto`` is half of the free memory, divided by the processes that torchrun has started here.
    """
    if value in (None, "auto"):
        return get_free_memory() // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if match := _SIZE.fullmatch(str(value)):
        return int(float(match[1]) * _UNITS[match[2].upper()])
    raise UsageError(
        f"memory_limit: expected auto or a size such as 4GB or 500MB, found {shown(value)}"
    )


def get_memory_limit() -> int:
    """Return the bytes that the machine and its container allow this process to use."""
    limits = [psutil.virtual_memory().total]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError):
            text = (Path("/sys/fs/cgroup") / file).read_text(encoding="ascii").strip()
            if text.isdigit():  # else "max"
                limits.append(int(text))
    return min(limits)


def get_free_memory() -> int:
    """Return about how many more bytes this process may use."""
    used = psutil.Process().memory_info().rss
    return max(min(psutil.virtual_memory().available, get_memory_limit() - used), 0)
