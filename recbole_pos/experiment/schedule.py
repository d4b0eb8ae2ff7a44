"""Schedules of the learning rate, and a moving average of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recbole_pos.values import Options

PER_STEP = ("cosine", "linear")  # schedules that need the number of steps of the whole training


def compute_learning_rate(config: Options, epoch: int, step: int, num_steps: int) -> float:
    """Return the learning rate of a step; a resumed run has the same rates, to the bit.

    Args:
        config: configuration of the run.
        epoch: number of the epoch, from 0.
        step: number of steps before this one, in all epochs.
        num_steps: number of steps of all epochs; read by schedules in ``PER_STEP``.
    """
    schedule = config["lr_scheduler"]
    warmup = config["warmup_steps"]
    highest = config["learning_rate"]
    if step < warmup:
        return highest * ((step + 1) / (warmup + 1))
    if schedule in PER_STEP:
        progress = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
        if schedule == "cosine":
            return highest * ((1 + math.cos(math.pi * progress)) / 2)
        return highest * (1 - progress)
    decay_epochs = config["lr_decay_step"]
    num_decays = epoch // decay_epochs if decay_epochs else 0
    return highest * float(config["lr_decay_rate"] ** num_decays)


class WeightAverage:
    """The exponential moving average of a model's trained parameters.

    After step t, counted from 1, w' = d w' + (1 - d) w with d = min(decay, t / (9 + t)), so that
    the initial weights are soon forgotten. ``decay`` is below 1.

    Attributes:
        weights: the average of each parameter, by name.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone() for name, p in self._parameters.items()}

    def update(self, step: int) -> None:
        """Update the average with the parameters after a step, counted from 1."""
        with torch.no_grad():
            parameters: Any = list(self._parameters.values())
            share = 1 - min(self.decay, step / (9 + step))  # 1 - d, of the parameters
            torch._foreach_lerp_(list(self.weights.values()), parameters, share)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the model have the averages as its parameters in a ``with`` block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the parameters with their averages, in place."""
        for name, parameter in self._parameters.items():
            parameter.data, self.weights[name] = self.weights[name], parameter.data
