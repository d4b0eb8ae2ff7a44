"""A training batch of packed windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBatch:
    """Windows of b sequences, packed: m events in all, none of them padding.

    Attributes:
        items: [m] int64 item of each input event.
        lengths: [b] int64 number of input events of each window.
        targets: [k] int64 the item to predict at each trained position.
        width: the largest of ``lengths``, known without asking the device.
        positions: [k] int64 which of the m events have a target, or None for all of them (k = m).
        times: [m] float64 time of each input event, or None.
        events: [m] int64 place of each input event in the log, or None.
    """

    items: Tensor
    lengths: Tensor
    targets: Tensor
    width: int
    positions: Tensor | None = None
    times: Tensor | None = None
    events: Tensor | None = None

    def __len__(self) -> int:
        """The number of targets."""
        return self.targets.numel()

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on a device; of pinned memory, without waiting for the copy."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SequenceBatch:
        """The same batch where a GPU can copy it from by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> SequenceBatch:
        changed: dict[str, Any] = {
            name: change(value) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        return SequenceBatch(**changed)
