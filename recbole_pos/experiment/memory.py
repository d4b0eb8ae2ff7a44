"""Memory: what cannot fit is refused, and what is freed stays in the process while it trains."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
from torch import nn

from recbole_pos.data.protocols import Dataset
from recbole_pos.data.scratch import free_memory, memory
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, is_whole

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # what glibc allows on 64-bit systems
# Numbers kept for each weight: itself, its gradient, and what the optimiser keeps.
_COPIES = {"adam": 4, "adamw": 4, "rmsprop": 3, "adagrad": 3, "sgd": 2}


@contextmanager
def limited_memory() -> Iterator[None]:
    """Within, taking more than is free is an error, where Linux would end the process later."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = psutil.Process().memory_info().data + free_memory()
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; torch has no kind of error for those of a CPU."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def require_weights(config: Options, dataset: Dataset, model: nn.Module) -> None:
    """Refuse weights that do not fit with their gradients and what the optimiser keeps of them.

    Raises:
        UsageError: naming the options that make them large.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = sum(p.nbytes for p in trained) * _COPIES.get(config["learner"], 2)
    if wanted > memory():
        raise no_room(config, dataset, f"needs {_gib(wanted)} GiB or more for its weights")


def no_room(config: Options, dataset: Dataset, problem: str) -> UsageError:
    """Name the options furthest above their defaults: they made a model too large."""
    defaults = getattr(config, "internal_config_dict", {})
    above = {
        key: config[key] / default
        for key, default in defaults.items()
        if is_whole(default) and default > 0 and is_whole(config[key])
        if config[key] > default and key != "seed"
    }
    names = sorted(above, key=above.__getitem__, reverse=True)[:3]
    sizes = [f"{key} {config[key]:,} (by default {defaults[key]:,})" for key in names]
    data = f"{dataset.item_num:,} items and {dataset.user_num:,} users"
    large = f"Large here are {', '.join(sizes)}; there are {data}" if sizes else f"It has {data}"
    return UsageError(
        f"{config['model']} {problem}, with what training keeps of them; {_gib(memory())} GiB are "
        f"all there is. {large}"
    )


def require_scores(config: Options, dataset: Dataset, items: int) -> None:
    """Refuse scores of a batch of evaluation, for so many items at once, that do not fit.

    Raises:
        UsageError: naming ``eval_batch_size``.
    """
    held_out = int(np.count_nonzero(dataset.split.is_target & (dataset.part != TRAIN)))
    rows = min(config["eval_batch_size"], held_out)
    wanted, limit = rows * items * 4, memory()
    if wanted > limit:
        raise UsageError(
            f"eval_batch_size: {rows:,} rows of scores for {items:,} items are "
            f"{_gib(wanted)} GiB; {_gib(limit)} GiB are all there is. Give a smaller one"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3g}"


def keep_freed_memory() -> None:
    """Tell glibc's malloc to serve blocks up to 32 MB from the heap and to keep what is freed.

    Otherwise large blocks are mapped again from the kernel, which zeroes each page on first touch,
    step after step: 12% of an epoch at window length 200. Holds for the whole process; does nothing
    without glibc.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> None:
    """Return the free pages of glibc's heap to the system.

    Packed batches have other sizes every time, and the heap keeps the gaps between them: an
    AttrFormer on MovieLens-1M that uses 0.6 GB had grown to 4 GB after thirty epochs.
    """
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Any:
    """Return a function of glibc, None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None
