"""A training batch of packed windows, and what a model declares about its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from recbole.data.interaction import Interaction
from torch import Tensor

from recbole_pos.layers.features import Features


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
        at: [b] float64 time of the target of each window's newest event, or None.
        events: [m] int64 place of each input event in the log, or None.
        features: of the input events and their users.
        prepared: what the model has made of the batch on the host, see ``BatchRequirements``;
            dataclasses and tuples of tensors, which go where the batch goes.
    """

    items: Tensor
    lengths: Tensor
    targets: Tensor
    width: int
    positions: Tensor | None = None
    times: Tensor | None = None
    at: Tensor | None = None
    events: Tensor | None = None
    features: Features = field(default_factory=Features)
    prepared: Any = None

    def __len__(self) -> int:
        """Return the number of targets."""
        return self.targets.numel()

    def to(self, device: torch.device) -> SequenceBatch:
        """Return the same batch on a device; of pinned memory, without waiting for the copy."""
        return each_tensor(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SequenceBatch:
        """Return the same batch where a GPU can copy it from by itself."""
        return each_tensor(self, Tensor.pin_memory)


@dataclass(frozen=True)
class BatchRequirements:
    """What a model declares about the batches it learns from.

    Attributes:
        windows: whether it can learn from packed windows, a target at every position.
        causal: whether every event has a state of its own, made from the events up to it; else a
            window has one target, after its newest event.
        times: whether windows carry times.
        requests: whether they carry the time of the newest event's target, too.
        events: whether windows carry the places of events in the log.
        linked: whether all windows of a user come in one batch, one after the other, oldest first.
        prepare: what sizes or places only values tell, made of a batch of windows on the host; None
            for models that need none. A device would be waited for, so batches for one are made on
            the host, and prepared one ahead; on a CPU the model does it itself, in its step.
        pack: rows of RecBole's as the batch that the model makes of them, for the same reason: how
            many of their places hold an event.
    """

    windows: bool = False
    causal: bool = True
    times: bool = False
    requests: bool = False
    events: bool = False
    linked: bool = False
    prepare: Callable[[SequenceBatch], SequenceBatch] | None = None
    pack: Callable[[Interaction], SequenceBatch | Interaction] | None = None


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass, tuple or dict with every tensor in it changed, however deep; others as is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: each_tensor(part, change) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(each_tensor(part, change) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {one.name: getattr(value, one.name) for one in fields(value)}
    return replace(value, **{name: each_tensor(part, change) for name, part in parts.items()})


def sent(made: SequenceBatch | Interaction, device: torch.device) -> SequenceBatch | Interaction:
    """Return a batch of the host on a device, which copies it by itself."""
    if isinstance(made, SequenceBatch):
        return (made.pin_memory() if device.type == "cuda" else made).to(device)
    columns = made.interaction
    if device.type == "cuda":
        columns = {name: column.pin_memory() for name, column in columns.items()}
    return Interaction({n: column.to(device, non_blocking=True) for n, column in columns.items()})
