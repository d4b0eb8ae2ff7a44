"""Schedules of the learning rate, and a moving average of weights."""

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

PER_STEP = ("cosine", "linear")  # schedules that need the number of steps of the whole training


def schedule_epoch(
    optimizer: Optimizer, config: Options, epoch: int, done: int, total: int
) -> LambdaLR:
    """Make the learning rate schedule of an epoch, and set the rate of its first step.

    The rate depends only on the numbers of step and epoch, so a resumed run has the same rates, to
    the bit.

    Args:
        optimizer: the optimiser whose rates are set.
        config: configuration of the run: ``learning_rate``, ``lr_scheduler`` and their options.
        epoch: number of the epoch, from 0.
        done, total: number of steps before the epoch; of all epochs, for schedules ``PER_STEP``.
    """
    name, warmup = config["lr_scheduler"], config["warmup_steps"]
    decay_epochs, decay_rate = config["lr_decay_step"], config["lr_decay_rate"]

    def compute_factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if name in PER_STEP:
            passed = min((step - warmup) / max(total - warmup, 1), 1.0)
            return (1 + math.cos(math.pi * passed)) / 2 if name == "cosine" else 1 - passed
        return float(decay_rate ** (epoch // decay_epochs if decay_epochs else 0))

    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config["learning_rate"]
    return LambdaLR(optimizer, compute_factor, last_epoch=done - 1)


class WeightAverage:
    """The exponential moving average of a model's trained parameters.

    After step t, counted from 1, w' = d w' + (1 - d) w with d = min(decay, t / (9 + t)), so that
    the initial weights are soon forgotten.

    Args:
        model: the model whose parameters are averaged.
        decay: the largest d, below 1.

    Attributes:
        weights: the average of each parameter, by name.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone() for name, p in self._own.items()}

    def update(self, step: int) -> None:
        """Update the average with the parameters after a step, counted from 1."""
        with torch.no_grad():
            parameters: Any = list(self._own.values())
            part = 1 - min(self.decay, step / (9 + step))
            torch._foreach_lerp_(list(self.weights.values()), parameters, part)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the model have the average for its parameters, in a ``with`` block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._own.items():
            current: Tensor = parameter.data
            parameter.data, self.weights[name] = self.weights[name], current
