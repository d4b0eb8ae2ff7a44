"""Memory: refuse models that cannot fit, and keep freed memory in the process while it trains."""

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
# Numbers kept for each weight: the weight, its gradient, and the optimiser's state.
_COPIES = {"adam": 4, "adamw": 4, "rmsprop": 3, "adagrad": 3, "sgd": 2}


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let allocations fail beyond the free memory, in a ``with`` block.

    Linux would allow them, and end the process when it uses them. Does nothing on other systems.
    """
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
    """Return whether an error is a failed allocation; on a CPU torch has no class for them."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def require_weights(config: Options, dataset: Dataset, model: nn.Module) -> None:
    """Refuse a model whose weights, gradients and optimiser state exceed the memory.

    Raises:
        UsageError: naming the options that make the model large.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    needed = sum(p.nbytes for p in trained) * _COPIES.get(config["learner"], 2)
    if needed > memory():
        raise explain_no_room(config, dataset, f"needs {_gib(needed)} GiB or more for its weights")


def explain_no_room(config: Options, dataset: Dataset, problem: str) -> UsageError:
    """Return the error about a model too large, naming options far above their defaults.

    Args:
        config: configuration of the run.
        dataset: dataset of the run, whose size is named.
        problem: start of the message, after the model's name.
    """
    defaults = getattr(config, "internal_config_dict", {})
    excess = {
        key: config[key] / default
        for key, default in defaults.items()
        if is_whole(default) and default > 0 and is_whole(config[key])
        if config[key] > default and key != "seed"
    }
    names = sorted(excess, key=excess.__getitem__, reverse=True)[:3]
    sizes = [f"{key} {config[key]:,} (by default {defaults[key]:,})" for key in names]
    data = f"{dataset.item_num:,} items and {dataset.user_num:,} users"
    large = f"Large here are {', '.join(sizes)}; there are {data}" if sizes else f"It has {data}"
    return UsageError(
        f"{config['model']} {problem}, with what training keeps of them; {_gib(memory())} GiB are "
        f"all there is. {large}"
    )


def require_scores(config: Options, dataset: Dataset, items: int) -> None:
    """Refuse an evaluation whose scores of a batch exceed the memory.

    Args:
        config: configuration of the run.
        dataset: the dataset, after ``build``.
        items: number of items that are scored at a time.

    Raises:
        UsageError: naming ``eval_batch_size``.
    """
    held_out = int(np.count_nonzero(dataset.split.is_target & (dataset.part != TRAIN)))
    rows = min(config["eval_batch_size"], held_out)
    needed, limit = rows * items * 4, memory()  # bytes of float32
    if needed > limit:
        raise UsageError(
            f"eval_batch_size: {rows:,} rows of scores for {items:,} items are "
            f"{_gib(needed)} GiB; {_gib(limit)} GiB are all there is. Give a smaller one"
        )


def _gib(size: int) -> str:
    """Return a number of bytes in GiB, with three digits."""
    return f"{size / 2**30:,.3g}"


def keep_freed_memory() -> None:
    """Let glibc's malloc serve blocks up to 32 MB from the heap, and keep the memory they free.

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
    """Return a function of glibc by its name; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None
