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
        prepared: result of ``BatchRequirements.prepare``: dataclasses and tuples of tensors, which
            are copied to a device with the batch.
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
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SequenceBatch:
        """Return the same batch in pinned memory, from which a GPU copies asynchronously."""
        return map_tensors(self, Tensor.pin_memory)


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
        prepare: computes on the host what depends on the values of a batch (sizes and places of its
            parts), since reading them from a device would wait for it; None if the model needs
            nothing. Batches for a device are prepared one ahead; on a CPU the model prepares its
            batches itself.
        pack: turns RecBole's rows into the model's batch on the host, for the same reason: the
            number of events depends on their values.
    """

    windows: bool = False
    causal: bool = True
    times: bool = False
    requests: bool = False
    events: bool = False
    linked: bool = False
    prepare: Callable[[SequenceBatch], SequenceBatch] | None = None
    pack: Callable[[Interaction], SequenceBatch | Interaction] | None = None


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested dataclass, tuple or dict with ``change`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tensors(part, change) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {part.name: getattr(value, part.name) for part in fields(value)}
    return replace(value, **{name: map_tensors(part, change) for name, part in parts.items()})


def send_to_device(
    batch: SequenceBatch | Interaction, device: torch.device
) -> SequenceBatch | Interaction:
    """Return a batch of the host on a device; a GPU copies it asynchronously."""
    if isinstance(batch, SequenceBatch):
        return (batch.pin_memory() if device.type == "cuda" else batch).to(device)
    columns = batch.interaction
    if device.type == "cuda":
        columns = {name: column.pin_memory() for name, column in columns.items()}
    return Interaction({n: column.to(device, non_blocking=True) for n, column in columns.items()})
