"""Training windows: pairs (start, end) of rows of the log, gathered into packed batches.

``cut_windows`` chooses the windows, a model declares by ``BatchRequirements`` what it needs, and a
``WindowGatherer`` makes batches by index, on the device that holds the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from recbole.data.interaction import Interaction
from torch import Tensor

from recbole_pos.data.interactions import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features, SequenceBatch, map_tensors

# Field of RecBole's rows with the row of their target in the log.
TARGET_EVENT = "target_event"
# Share of a GPU's free memory that interactions and windows may take.
MEMORY_SHARE = 0.5
T = TypeVar("T")


@dataclass(frozen=True)
class Windows:
    """Training windows for models that learn from all positions at once.

    The target of an input is the next interaction of the log.

    Attributes:
        start, end: [windows] the inputs of window w are rows start[w] : end[w] of the log.
        first: [windows] first input with a target; earlier ones are context.
        is_target: [interactions] bool, which may be targets; None for all.
    """

    start: np.ndarray
    end: np.ndarray
    first: np.ndarray
    is_target: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """[windows] number of inputs."""
        return self.end - self.start

    @cached_property
    def num_targets(self) -> np.ndarray:
        """[windows] number of targets."""
        # Inputs are the rows start .. end - 1, and those from ``first`` on have a target.
        if self.is_target is None:
            return self.end - self.first
        # The targets of the inputs first .. end - 1 are the rows after them, first + 1 .. end.
        num_before = np.concatenate(([0], np.cumsum(self.is_target)))
        return num_before[self.end + 1] - num_before[self.first + 1]

    def with_targets(self, is_target: np.ndarray) -> Windows:
        """Return the windows that have a target where ``is_target`` ([interactions] bool) is true.

        Only such interactions are targets of the returned windows, whose rows stay as they are.
        """
        restricted = Windows(self.start, self.end, self.first, is_target)
        is_kept = restricted.num_targets > 0
        return Windows(self.start[is_kept], self.end[is_kept], self.first[is_kept], is_target)


def cut_windows(
    user_start: np.ndarray, user_end: np.ndarray, max_length: int, mode: str, stride: int | None
) -> Windows:
    """Cut each user's training interactions into windows of at most ``max_length`` inputs.

    The target of an input is the interaction after it. For example, a user with the interactions
    [10, 11, 12, 13, 14] has the inputs [10, 11, 12, 13]; with ``max_length`` 3, ``chunk`` makes
    the windows [11, 12, 13] and [10], newest first.

    Args:
        user_start, user_end: [users] user u trains on rows user_start[u] : user_end[u] of the log.
        max_length: most inputs of a window, L.
        mode: which windows a user gets. Except under ``last``, every interaction but a user's
            first is a target exactly once.

            - ``last``: only the window of the newest inputs, as SASRec's code does;
            - ``chunk``: windows of L targets, end to end, counted from the newest;
            - ``sliding``: windows with ``stride`` new targets each, before which up to L - stride
              inputs are context (read, without a target); training costs L / stride times as much;
            - ``prefix``: windows of one target each.
        stride: new targets per window under ``sliding``; L // 2 when None. Else it is not read.

    Returns:
        Rows of the log: where each window starts and ends, and its first input with a target.

    Raises:
        UsageError: if the stride is too small or too large.
    """
    # ``stride`` becomes the number of new targets in each window, except in a user's oldest one.
    if mode == "sliding":
        stride = max(max_length // 2, 1) if stride is None else stride
        if not 1 <= stride <= max_length:
            raise UsageError(
                f"window_stride: expected 1 to MAX_ITEM_LIST_LENGTH ({max_length}), found {stride}"
            )
    else:
        stride = 1 if mode == "prefix" else max_length

    # The inputs of a user are all interactions but the newest, which is only a target.
    is_trainable = user_end - user_start >= 2
    user_start, user_end = user_start[is_trainable], user_end[is_trainable] - 1
    num_inputs = user_end - user_start
    if mode == "last":
        num_windows = np.ones_like(num_inputs)
    elif mode == "prefix":
        num_windows = num_inputs
    else:  # the oldest window learns all its targets, up to L; each other one ``stride`` of them
        num_windows = -(-np.maximum(num_inputs - max_length, 0) // stride) + 1  # rounded up

    # Windows of a user from the newest to the oldest; each ends a stride before the newer one.
    user = np.repeat(np.arange(len(num_windows)), num_windows)
    age = gather_index(np.zeros_like(num_windows), num_windows)  # 0 is the newest of a user
    end = user_end[user] - age * stride
    start = np.maximum(end - max_length, user_start[user])
    is_oldest = age == num_windows[user] - 1
    # The oldest window learns from all its inputs, each other one from the newest ``stride``.
    return Windows(start, end, np.where(is_oldest, start, end - stride))


def gather_index(start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return consecutive numbers from each start, as many as its length, one range after the other.

    For example, starts [7, 2] and lengths [2, 3] give [7, 8, 2, 3, 4].

    Args:
        start: [n] int64, first number of each range.
        lengths: [n] int64, how many numbers each range has.

    Returns:
        [sum(lengths)] int64.
    """
    offsets = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(start - offsets, lengths)


# --- batches ---


@dataclass(frozen=True)
class BatchRequirements:
    """What a model declares about the batches it learns from.

    Attributes:
        windows: whether it can learn from packed windows, a target at every position.
        causal: whether every interaction has a state of its own, made from those up to it; else a
            window has one target, after its newest interaction.
        times: whether windows carry times.
        seconds: seconds in one unit of the time field; batches have times in seconds.
        max_length: n of batches, most interactions that the model is built for.
        requests: whether they carry the time of the newest input's target, too.
        log_rows: whether windows carry the rows of their interactions in the log.
        linked: whether all windows of a user come in one batch, one after the other, oldest first.
        prepare: computes on the host what depends on the values of a batch (sizes, row numbers),
            since reading them from a device would wait for it; None if the model needs nothing.
            Batches for a device are prepared one ahead; on a CPU the model prepares its batches
            itself.
        pack: turns RecBole's rows into the model's batch on the host, for the same reason: the
            number of interactions depends on their values.
    """

    windows: bool = False
    causal: bool = True
    times: bool = False
    seconds: float = 1
    max_length: int = 0
    requests: bool = False
    log_rows: bool = False
    linked: bool = False
    prepare: Callable[[SequenceBatch], SequenceBatch] | None = None
    pack: Callable[[Interaction], SequenceBatch | Interaction] | None = None


def send_to_device(
    batch: SequenceBatch | Interaction, device: torch.device
) -> SequenceBatch | Interaction:
    """Copy a batch from the memory of the host to a device, and return the copy.

    For a GPU the batch is pinned first (locked in memory), so that the copy runs while Python goes
    on.

    Args:
        batch: packed windows (one after the other, without padding), or RecBole's rows.
        device: device of the model.
    """
    # ``map_tensors`` applies a function to every tensor of a mapping of columns.
    if isinstance(batch, SequenceBatch):
        return (batch.pin_memory() if device.type == "cuda" else batch).to(device)
    columns = batch.interaction
    if device.type == "cuda":
        columns = map_tensors(columns, Tensor.pin_memory)
    return Interaction(map_tensors(columns, lambda column: column.to(device, non_blocking=True)))


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
        """Copy interactions, windows and features to the device; times only if required.

        Args:
            log: the interactions; the items of inputs and targets are read from it.
            windows: which rows of the log are the inputs of each window.
            requirements: what the model declares about its batches.
            device: where the copies lie and batches are made.
            features: columns of attributes of interactions and users that batches carry.
        """
        self.log, self.windows, self.requirements, self.device = log, windows, requirements, device
        self.items = log.items.to(device)
        self.times = log.times.to(device) if requirements.times else None
        self.start = torch.from_numpy(windows.start).to(device)
        self.end = torch.from_numpy(windows.end).to(device)
        self.first = torch.from_numpy(windows.first).to(device)
        # ``map_tensors`` applies the function to every column of attributes.
        self.features = map_tensors(features, lambda column: column.to(device))
        self.is_target = None
        if windows.is_target is not None:
            self.is_target = torch.from_numpy(windows.is_target).to(device)

    @cached_property
    def users(self) -> Tensor:
        """[windows] user of each, which only features of users need."""
        return torch.from_numpy(self.log.find_users(self.windows.start)).to(self.device)

    def gather(self, batch: np.ndarray, index: Tensor | None = None) -> SequenceBatch:
        """Return a batch of training windows, packed: all inputs end to end, without padding.

        Nothing is read back from the device, which would wait for it. So all sizes are computed on
        the host, whose copy of the windows says the same.

        Args:
            batch: [b] int64, numbers of the windows, on the host.
            index: the same numbers on the device; copied there if None.

        Returns:
            The batch on the device. Its ``targets`` are the items to predict, and ``queries`` the
            positions in ``items`` from which they are predicted; None if these are all positions.
        """
        # Sizes, on the host.
        windows = self.windows
        host_lengths = windows.end[batch] - windows.start[batch]
        num_inputs = int(host_lengths.sum())
        num_targets = int(windows.num_targets[batch].sum())
        if index is None:
            index = torch.from_numpy(batch).to(self.device)

        # Inputs: the rows of all windows in the log, one window after the other. Those of a window
        # go from ``start`` to ``end``, and the ones from ``first`` on have a target.
        start, end, first = self.start[index], self.end[index], self.first[index]
        lengths = end - start
        rows = concatenate_ranges(start, lengths, num_inputs)

        # Targets: each is the interaction in the row after its input. If not all inputs have one,
        # ``queries`` are the positions of those that do, among all inputs of the batch.
        trained_rows = rows
        queries = None
        if num_targets < num_inputs:
            offsets = lengths.cumsum(0) - lengths  # position of each window's first input
            num_possible = int((windows.end[batch] - windows.first[batch]).sum())
            queries = concatenate_ranges(offsets + first - start, end - first, num_possible)
            # Only some interactions may be targets. A stable sort brings them to the front; an
            # index by a mask would have to read its size from the device.
            if self.is_target is not None:
                is_context = (~self.is_target[rows[queries] + 1]).byte()
                queries = queries[is_context.argsort(stable=True)[:num_targets]]
            trained_rows = rows[queries]

        # Times in seconds: of the inputs and, if required, of the target of each window's newest
        # input, which stands in row ``end``.
        times = at = None
        if self.times is not None:
            seconds = self.requirements.seconds  # times are not multiplied by 1, which would copy
            times = self.times[rows] if seconds == 1 else self.times[rows] * seconds
            if self.requirements.requests:
                at = self.times[end] if seconds == 1 else self.times[end] * seconds
        # Attributes of interactions are taken by row, and those of users by the window's user.
        features = self.features.map(lambda x: x[rows], lambda x: x[self.users[index]])
        return SequenceBatch(
            items=self.items[rows],
            lengths=lengths,
            max_length=self.requirements.max_length,
            width=int(host_lengths.max()),
            targets=self.items[trained_rows + 1],
            queries=queries,
            times=times,
            at=at,
            log_rows=rows if self.requirements.log_rows else None,
            features=features,
        )


def concatenate_ranges(start: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return consecutive numbers from each start, as many as its length, one range after the other.

    For example, starts [7, 2] and lengths [2, 3] give [7, 8, 2, 3, 4].

    Args:
        start: [n] int64, first number of each range, on any device.
        lengths: [n] int64, how many numbers each range has.
        total: sum of ``lengths``, given so that it need not be read from the device.

    Returns:
        [total] int64, on the device of ``start``.
    """
    shift = start - (lengths.cumsum(0) - lengths)
    steps = torch.arange(total, device=start.device)
    return steps + shift.repeat_interleave(lengths, output_size=total)


def fits_on_device(
    device: torch.device, data_on_device: str, log: EventLog, windows: Windows, features: Features
) -> bool:
    """Return whether all training data are to be copied to the device of a model, before training.

    On a GPU they are if they take at most half of its free memory. On a CPU they are there already.

    Args:
        device: device of the model.
        data_on_device: the option of that name: auto, or never.
        log, windows, features: the data that would be copied.
    """
    if data_on_device == "never" or device.type == "cpu":
        return False
    if device.type != "cuda":  # such as a Mac's GPU, which shares the memory of the host
        return True
    # MEMORY_SHARE is one half.
    columns: list[Any] = [log.items, log.times, windows.start, windows.end, windows.first]
    columns += [*features.events.values(), *features.users.values()]
    num_bytes = sum(column.nbytes for column in columns)
    num_free_bytes, _ = torch.cuda.mem_get_info(device)
    return num_bytes <= MEMORY_SHARE * num_free_bytes


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items; while the caller uses one, a thread computes the next.

    No item may be None, which stands for the end.
    """
    # ``next`` runs in the thread, and gives None at the end.
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, iterator, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, iterator, None)
            yield item
