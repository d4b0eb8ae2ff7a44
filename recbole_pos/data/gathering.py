"""Windows to packed batches, by index, on the device that holds the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.batch import BatchRequirements, SequenceBatch
from recbole_pos.data.events import EventLog
from recbole_pos.data.windows import Windows
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features

ROOM = 0.5  # share of a GPU's free memory that a log may take
T = TypeVar("T")


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
        """Gather windows as one packed batch.

        Args:
            batch: [b] windows, on the host.
            index: the same on the device, if it was copied already.
        """
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

    Args:
        start, lengths: [w] begin and length of each range.
        total: sum of ``lengths``, known on the host so that no device is waited for.
    """
    shift = start - (lengths.cumsum(0) - lengths)
    steps = torch.arange(total, device=start.device)
    return steps + shift.repeat_interleave(lengths, output_size=total)


def lies_on(
    device: torch.device,
    wanted: str,
    log: EventLog,
    windows: Windows,
    features: Features,
) -> bool:
    """Return whether the log should be copied to the device of a model once, before training.

    Args:
        device: device of the model.
        wanted: ``data_on_device``: auto, always or never.
        log, windows, features: the data to copy.

    Raises:
        UsageError: if ``wanted`` is always, and the GPU has no room.
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
