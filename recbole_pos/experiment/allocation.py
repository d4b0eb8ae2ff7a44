"""Sizes against memory: what cannot fit is refused before it is allocated."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from recbole_pos.data.protocols import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, is_whole

# Numbers kept for each weight: itself, its gradient, and what the optimiser keeps.
_COPIES = {"adam": 4, "adamw": 4, "rmsprop": 3, "adagrad": 3, "sgd": 2}
_FACTORIES = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "eye")
}


def memory() -> int:
    """Bytes that this process may have at most: of the machine, its container, its own limit."""
    limits = [sys.maxsize]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
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
    """Bytes that this process may still take, about."""
    used = psutil.Process().memory_info().rss
    return min(psutil.virtual_memory().available, memory() - used)


class Allocations(TorchDispatchMode):
    """While a model is built, refuses what the machine cannot hold: a tensor, or all weights.

    Weights are counted with their gradients and what the optimiser keeps of them, as they become
    part of a module and before they are filled with numbers, or as they are copied.

    Args:
        config: of the run.
        dataset: for its numbers of users and items, by which tables grow.
    """

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__()
        self.config, self.dataset = config, dataset
        self.limit = memory()
        self.copies = _COPIES.get(config["learner"], 2)
        self.bytes = 0

    def __enter__(self) -> Allocations:
        self._hook = register_module_parameter_registration_hook(self._register)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in _FACTORIES:
            sizes = [a for a in args if isinstance(a, (list, tuple))] or [args[:1]]
            if all(is_whole(n) for n in sizes[0]):
                kind = (kwargs or {}).get("dtype") or torch.get_default_dtype()
                self._refuse_above(math.prod(sizes[0]) * kind.itemsize)
        elif func.overloadpacket is torch.ops.aten.clone:  # RecBole's layers are copies of a first
            self._add(args[0], self.copies)
        return func(*args, **(kwargs or {}))

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._add(parameter, self.copies if parameter.requires_grad else 1)

    def _add(self, weights: torch.Tensor, copies: int) -> None:
        self.bytes += weights.numel() * weights.element_size() * copies
        self._refuse_above(self.bytes)

    def _refuse_above(self, wanted: int) -> None:
        if wanted > self.limit:
            raise UsageError(
                f"{self.config['model']} needs {_gib(wanted)} GiB or more for its weights and what "
                f"training keeps of them; {_gib(self.limit)} GiB are all there is. "
                f"{self._largest()}"
            )

    def _largest(self) -> str:
        """Which options made it so: those furthest above their defaults."""
        defaults = getattr(self.config, "internal_config_dict", {})
        above = {
            key: self.config[key] / default
            for key, default in defaults.items()
            if is_whole(default) and default > 0 and is_whole(self.config[key])
            if self.config[key] > default and key != "seed"
        }
        names = sorted(above, key=above.__getitem__, reverse=True)[:3]
        sizes = [f"{key} {self.config[key]:,} (by default {defaults[key]:,})" for key in names]
        data = f"{self.dataset.item_num:,} items and {self.dataset.user_num:,} users"
        return f"Large here are {', '.join(sizes)}; there are {data}" if sizes else f"It has {data}"


def check_scores(config: Options, dataset: Dataset, items: int) -> None:
    """Whether the scores of a batch of evaluation, for so many items at once, fit.

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
