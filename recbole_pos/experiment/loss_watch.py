"""The losses of an epoch, read when they are there: no step waits for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LATE = 4  # steps that are on their way while an older loss is read; more keep more batches alive


@dataclass(frozen=True)
class Step:
    """One step whose loss is on its way.

    Attributes:
        number: number of the batch in its epoch.
        batch: what it was computed from, to explain a loss that is not a number.
        targets: how many, the weight of the loss in the mean of the epoch.
        loss: scalar of the CPU, or a number; valid once ``ready``.
        ready: an event of the device behind the copy; None where there is nothing to wait for.
    """

    number: int
    batch: Any
    targets: int
    loss: Tensor | float
    ready: torch.cuda.Event | None = None

    def value(self) -> float:
        """Return the loss; waits for steps up to this one, not for later ones."""
        if self.ready is not None:
            self.ready.synchronize()
        return float(self.loss)


class LossWatch:
    """Adds up the losses of an epoch and stops it at one that is not a number.

    A loss on a device is copied without waiting and read ``LATE`` steps later, when the device is
    long past it; one that is on the CPU is read at once.

    Args:
        refuse: called with a step and its loss where this is not finite; it raises.
    """

    def __init__(self, refuse: Callable[[Step, float], None]) -> None:
        self.refuse = refuse
        self.total, self.targets = 0.0, 0
        self._waiting: deque[Step] = deque()

    def add(self, loss: Tensor | float, number: int, batch: Any, targets: int) -> None:
        """The loss of a step, before its gradient is made."""
        late, ready = 0, None
        if isinstance(loss, Tensor) and loss.device.type != "cpu":
            late, on_gpu = LATE, loss.is_cuda
            loss = loss.to("cpu", non_blocking=True)  # into pinned memory
            if on_gpu:
                ready = torch.cuda.Event()
                ready.record()
        self._waiting.append(Step(number, batch, targets, loss, ready))
        self._read(late)

    def mean(self) -> float:
        """Of all steps; waits for the last of them."""
        self._read(0)
        return self.total / max(self.targets, 1)

    def _read(self, late: int) -> None:
        """All but the newest ``late``."""
        while len(self._waiting) > late:
            step = self._waiting.popleft()
            value = step.value()
            if not math.isfinite(value):
                self.refuse(step, value)
            self.total += value * step.targets
            self.targets += step.targets
