"""What happens to learning rate and weights from step to step: schedules, and a moving average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recbole_pos.values import Options

PER_STEP = ("cosine", "linear")  # schedules that need the number of all steps


def schedule_epoch(
    optimizer: Optimizer, config: Options, epoch: int, done: int, total: int
) -> LambdaLR:
    """Return the schedule of an epoch, with the learning rate of its first step set.

    The rate of a step is a function of its number and its epoch only, so a resumed run has the same
    rates, to the bit.

    Args:
        optimizer: whose rates are set.
        config: ``learning_rate``, ``lr_scheduler`` and what that reads.
        epoch: from 0 on.
        done: steps before it.
        total: steps of all epochs; read by schedules ``PER_STEP``.
    """
    kind, warmup = config["lr_scheduler"], config["warmup_steps"]
    every, rate = config["lr_decay_step"], config["lr_decay_rate"]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if kind in PER_STEP:
            passed = min((step - warmup) / max(total - warmup, 1), 1.0)
            return (1 + math.cos(math.pi * passed)) / 2 if kind == "cosine" else 1 - passed
        return float(rate ** (epoch // every if every else 0))

    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config["learning_rate"]
    return LambdaLR(optimizer, factor, last_epoch=done - 1)


class WeightAverage:
    """The exponential moving average of a model's trained parameters.

    After step t, counted from 1, w' = d w' + (1 - d) w with d = min(decay, t / (9 + t)), so that
    fresh weights are soon forgotten.

    Attributes:
        weights: the average of each parameter, by name.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone() for name, p in self._own.items()}

    def update(self, step: int) -> None:
        """Take in the parameters after a step."""
        with torch.no_grad():
            own: Any = list(self._own.values())
            part = 1 - min(self.decay, step / (9 + step))
            torch._foreach_lerp_(list(self.weights.values()), own, part)

    @contextmanager
    def used(self) -> Iterator[None]:
        """The model has the average for its parameters in here."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._own.items():
            kept: Tensor = parameter.data
            parameter.data, self.weights[name] = self.weights[name], kept
