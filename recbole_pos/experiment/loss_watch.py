"""The losses of an epoch, read a few steps late, so that no step waits for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LATE = 4  # steps between computing a loss and reading it; more steps keep more batches alive


class LossWatch:
    """Sums up the losses of an epoch, and stops it at one that is not finite.

    A loss on a device is copied without waiting and read ``LATE`` steps later, when the copy is
    complete; a loss on the CPU is read at once.

    Args:
        refuse: called with the number of a step, its batch and its loss if the loss is not finite;
            raises an error.
    """

    def __init__(self, refuse: Callable[[int, Any, float], None]) -> None:
        self.refuse = refuse
        self.total_loss = 0.0
        self.num_targets = 0
        # of each step: loss, CUDA event after its copy, step, batch, number of targets
        self._unread: deque[tuple[Tensor | float, Any, int, Any, int]] = deque()

    def add(self, loss: Tensor | float, step: int, batch: Any, num_targets: int) -> None:
        """Add the scalar loss of a step, the mean over its targets, before its gradient is made."""
        num_unread = 0
        copied = None
        if isinstance(loss, Tensor) and loss.device.type != "cpu":
            num_unread = LATE
            is_cuda = loss.is_cuda
            loss = loss.to("cpu", non_blocking=True)  # into pinned memory
            if is_cuda:
                copied = torch.cuda.Event()
                copied.record()
        self._unread.append((loss, copied, step, batch, num_targets))
        self._read_all_but(num_unread)

    def compute_mean(self) -> float:
        """Return the mean loss of a target in all steps, after waiting for the last step."""
        self._read_all_but(0)
        return self.total_loss / max(self.num_targets, 1)

    def _read_all_but(self, num_unread: int) -> None:
        """Read the losses of all steps but the newest ``num_unread``, and add them to the total."""
        while len(self._unread) > num_unread:
            loss, copied, step, batch, num_targets = self._unread.popleft()
            if copied is not None:
                copied.synchronize()
            value = float(loss)
            if not math.isfinite(value):
                self.refuse(step, batch, value)
            self.total_loss += value * num_targets
            self.num_targets += num_targets
