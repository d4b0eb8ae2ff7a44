"""A training batch of packed windows: what a model declares about it, how it is gathered and moved.

Windows are gathered by index, on the device that holds the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from recbole.data.interaction import Interaction
from torch import Tensor

from recbole_pos.data.events import EventLog
from recbole_pos.data.windows import Windows
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features

ROOM = 0.5  # share of a GPU's free memory that a log may take
T = TypeVar("T")


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


class WindowGatherer:
    """Items, times and windows on a device, where batches are gathered from them.

    The host knows the size of a batch from its own copy of the windows: nothing is read from the
    device.
    """

    def __init__(
        self,
        log: EventLog,
        windows: Windows,
        requirements: BatchRequirements,
        device: torch.device,
        features: Features,
    ) -> None:
        self.windows, self.requirements, self.device = windows, requirements, device
        self.items = log.items.to(device)
        self.times = log.times.to(device) if requirements.times else None
        columns = (windows.start, windows.end, windows.first)
        self.start, self.end, self.first = (torch.from_numpy(x).to(device) for x in columns)
        self.features = features.map(*[lambda column: column.to(device)] * 2)
        self.users = log.users[torch.from_numpy(windows.start)].to(device)
        self.is_target = None
        if windows.is_target is not None:
            self.is_target = torch.from_numpy(windows.is_target).to(device)

    def gather(self, batch: np.ndarray, index: Tensor | None = None) -> SequenceBatch:
        """Return [b] windows as one packed batch; ``index`` are they on the device, if copied."""
        windows = self.windows
        host_lengths = windows.end[batch] - windows.start[batch]
        m, k = int(host_lengths.sum()), int(windows.counts[batch].sum())
        if index is None:
            index = torch.from_numpy(batch).to(self.device)
        start, end, first = self.start[index], self.end[index], self.first[index]
        lengths = end - start
        event = ranges(start, lengths, m)
        trained, positions = event, None
        if k < m:  # some events are context
            total = int((windows.end[batch] - windows.first[batch]).sum())
            positions = ranges(first - start + lengths.cumsum(0) - lengths, end - first, total)
            if self.is_target is not None:  # sorting keeps k on the host; a mask would synchronise
                is_context = (~self.is_target[event[positions] + 1]).byte()
                positions = positions[is_context.argsort(stable=True)[:k]]
            trained = event[positions]
        return SequenceBatch(
            items=self.items[event],
            lengths=lengths,
            width=int(host_lengths.max()),
            targets=self.items[trained + 1],
            positions=positions,
            times=None if self.times is None else self.times[event],
            at=self.times[end] if self.times is not None and self.requirements.requests else None,
            events=event if self.requirements.events else None,
            features=self.features.map(lambda x: x[event], lambda x: x[self.users[index]]),
        )


def ranges(start: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return [total] int64: the ranges start[w] .. start[w] + lengths[w] - 1, concatenated.

    ``total`` is the sum of ``lengths``, known on the host so that no device is waited for.
    """
    shift = start - (lengths.cumsum(0) - lengths)
    steps = torch.arange(total, device=start.device)
    return steps + shift.repeat_interleave(lengths, output_size=total)


def fits_on_device(
    device: torch.device, wanted: str, log: EventLog, windows: Windows, features: Features
) -> bool:
    """Return whether the data are copied to the device of a model once, before training.

    Raises:
        UsageError: if ``wanted`` (``data_on_device``) is always, and the GPU has no room.
    """
    if device.type != "cuda" or wanted == "never":
        return device.type != "cpu" and wanted != "never"
    columns: list[Any] = [log.items, log.times, windows.start, windows.end, windows.first]
    columns += [*features.events.values(), *features.users.values()]
    size, free = sum(column.nbytes for column in columns), torch.cuda.mem_get_info(device)[0]
    if wanted == "always" and size > free:
        raise UsageError(
            f"data_on_device: always: items and times take {size / 2**30:.1f} GiB, and the GPU has "
            f"{free / 2**30:.1f} GiB free; auto makes batches on the host where they do not fit"
        )
    return wanted == "always" or size <= ROOM * free


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield items in order, the next one computed in a thread while the caller uses the current."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, iterator, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, iterator, None)
            yield item
