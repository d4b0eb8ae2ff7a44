"""Training windows: pairs (start, end) of rows of the log, gathered into packed batches.

``cut_windows`` chooses the windows, a model declares by ``BatchRequirements`` what it needs, and a
``WindowGatherer`` makes batches by index, on the device that holds the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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

    The target of an input is the interaction in the row after it. For example, a window with start
    2, first 3 and end 5 has the inputs in rows 2, 3 and 4 of the log. The targets of the inputs 3
    and 4 are the interactions in rows 4 and 5; input 2 is context only.

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
        """[windows] number of targets.

        For example, a window has its inputs in the rows 2, 3 and 4 of the log (``end`` is 5), and
        ``first`` is 3: only the inputs from row 3 on have a target, the interaction in the row
        after them. So its targets are in the rows 4 and 5, which are two. If ``is_target`` is false
        for row 4, there is one.
        """
        if self.is_target is None:
            return self.end - self.first

        # Count the rows that may be targets from ``first_target`` up to ``target_end``, excluded:
        # num_before[r] is how many there are before row r of the log.
        first_target, target_end = self.first + 1, self.end + 1
        num_before = np.concatenate(([0], np.cumsum(self.is_target)))
        return num_before[target_end] - num_before[first_target]

    def with_targets(self, is_target: np.ndarray) -> Windows:
        """Return the windows with fewer targets: only interactions where ``is_target`` is true.

        The inputs of a window stay the same. Windows that are left without a target are dropped.

        Args:
            is_target: [interactions] bool, which interactions may be targets.
        """
        # ``num_targets`` of the windows with this mask counts the targets that each has left.
        masked = replace(self, is_target=is_target)
        kept = masked.num_targets > 0
        # The windows that are kept read the same inputs: where these start and end does not change,
        # nor does ``first``, the first input whose target belongs to the window.
        return Windows(self.start[kept], self.end[kept], self.first[kept], is_target)


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
            - ``sliding``: windows of L inputs, of which only the newest ``stride`` have a target
              (in a user's oldest window all). The inputs before them are context, which the model
              reads without learning a target after it. Training costs L / stride times as much;
            - ``prefix``: windows of up to L inputs, of which only the newest has a target.
        stride: new targets per window under ``sliding``; L // 2 when None. Else it is not read.

    Returns:
        Rows of the log: where each window starts and ends, and its first input with a target.

    Raises:
        UsageError: if the stride is too small or too large.
    """
    # Inputs of each user: all interactions but the newest, which is only a target. From here on
    # user_end[u] is the end of these inputs.
    is_trainable = user_end - user_start >= 2
    user_start, user_end = user_start[is_trainable], user_end[is_trainable] - 1
    num_inputs = user_end - user_start

    # The number of windows of each user. From one of them to the next older one, all rows move back
    # by ``step``. This is also how many targets a window has, except a user's oldest.
    if mode == "last":
        step, num_windows = max_length, np.ones_like(num_inputs)
    elif mode == "prefix":
        step, num_windows = 1, num_inputs
    else:
        # The oldest window has up to ``max_length`` targets, and each of the others has ``step``.
        step = max_length if mode == "chunk" else _read_stride(stride, max_length)
        num_left = np.maximum(num_inputs - max_length, 0)
        num_windows = 1 + np.ceil(num_left / step).astype(np.int64)

    # From here on there is an entry for each window: its user, and its age, which is 0 for the
    # user's newest window. ``gather_index`` counts from 0 for each user: if two users have 3
    # windows and 1, ``user`` is [0, 0, 0, 1] and ``age`` is [0, 1, 2, 0].
    user = np.repeat(np.arange(len(num_windows)), num_windows)
    age = gather_index(np.zeros_like(num_windows), num_windows)

    # For example, ``sliding`` with max_length 4 and stride 2 gives a user with the 7 inputs 0 to 6
    # these windows (the inputs before ``first`` are context):
    #     age 0: inputs 3 4 5 6, start 3, end 7, first 5, targets of the inputs 5 and 6
    #     age 1: inputs 1 2 3 4, start 1, end 5, first 3, targets of the inputs 3 and 4
    #     age 2: inputs 0 1 2,   start 0, end 3, first 0, targets of all three: it is the oldest
    end = user_end[user] - age * step
    start = np.maximum(end - max_length, user_start[user])
    is_oldest = age == num_windows[user] - 1
    return Windows(start, end, first=np.where(is_oldest, start, end - step))


def _read_stride(stride: int | None, max_length: int) -> int:
    """Return the option ``window_stride``, which is half of ``max_length`` if it is not set.

    Raises:
        UsageError: if it is below 1 or above ``max_length``.
    """
    if stride is None:
        return max(max_length // 2, 1)
    if not 1 <= stride <= max_length:
        raise UsageError(
            f"window_stride: expected 1 to MAX_ITEM_LIST_LENGTH ({max_length}), found {stride}"
        )
    return stride


def gather_index(start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return consecutive numbers from each start, as many as its length, one range after the other.

    For example, starts [7, 2] and lengths [2, 3] give [7, 8, 2, 3, 4]. (For tensors on a device
    there is :func:`concatenate_ranges`.)

    Args:
        start: [n] int64, first number of each range.
        lengths: [n] int64, how many numbers each range has.

    Returns:
        [sum(lengths)] int64.
    """
    # Where each range begins in the result: [0, 2] in the example. The result is [0, 1, 2, 3, 4],
    # and in each range the difference from its start is added: [7, 7, 0, 0, 0].
    offsets = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(start - offsets, lengths)


def count_from_zero(lengths: np.ndarray) -> np.ndarray:
    """Return int64 0, 1, 2, ... for each length, as many: [2, 3] gives [0, 1, 0, 1, 2]."""
    return gather_index(np.zeros(len(lengths), dtype=np.int64), lengths)


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

        Window w has its inputs in the rows start[w] up to end[w] (excluded) of the log. Those from
        the row first[w] on have a target, the interaction in the row after them. If there is a mask
        ``is_target`` of the interactions, only some of these targets are learned.

        Args:
            log: the interactions; the items of inputs and targets are read from it.
            windows: arrays ``start``, ``end`` and ``first``, [windows], and ``is_target``,
                [interactions] or None. They are kept on the host, too, to compute sizes there.
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

    def gather(self, batch: np.ndarray, numbers: Tensor) -> SequenceBatch:
        """Return a batch of training windows, packed: all inputs end to end, without padding.

        Nothing is read back from the device, since Python would wait for it. So whatever decides
        the size of a tensor is computed from ``self.windows``, the copy of the windows on the host.

        Args:
            batch: [b] int64, numbers of the windows, on the host.
            numbers: the same on the device.

        Returns:
            The batch on the device. Its ``targets`` are the items to predict, and ``queries`` the
            positions in ``items`` from which they are predicted; None if these are all positions.
        """
        # Sizes, from the copy on the host.
        host_lengths = self.windows.lengths[batch]
        num_inputs = int(host_lengths.sum())
        num_targets = int(self.windows.num_targets[batch].sum())

        # ``rows`` [num_inputs]: the row in the log of each input. Those of a window are the rows
        # from ``start`` up to ``end``, ``end`` excluded; those of all windows follow each other.
        start, end = self.start[numbers], self.end[numbers]
        lengths = end - start
        rows = concatenate_ranges(start, lengths, num_inputs)

        # The target of an input is the interaction in the row after it. Not all inputs need to have
        # one: those that do are at the positions ``queries`` of the batch.
        queries, target_rows = None, rows + 1
        if num_targets < num_inputs:
            queries = self._find_queries(batch, numbers, rows)
            target_rows = target_rows[queries]

        # Times of the inputs in seconds, if the model reads them. It may also read when a
        # recommendation is asked for (``at``): at the time of the target of each window's newest
        # input. That input is in row end - 1, so the target is in row ``end``.
        times = at = None
        if self.times is not None:
            times = self.times[rows] * self.requirements.seconds
            if self.requirements.requests:
                at = self.times[end] * self.requirements.seconds
        # ``map`` applies its first function to each attribute of interactions, to take it by row,
        # and its second to each one of users, to take it by the user of the window.
        features = self.features.map(lambda x: x[rows], lambda x: x[self.users[numbers]])
        return SequenceBatch(
            items=self.items[rows],
            lengths=lengths,
            max_length=self.requirements.max_length,
            width=int(host_lengths.max()),
            targets=self.items[target_rows],
            queries=queries,
            times=times,
            at=at,
            log_rows=rows if self.requirements.log_rows else None,
            features=features,
        )

    def _find_queries(self, batch: np.ndarray, numbers: Tensor, rows: Tensor) -> Tensor:
        """Return the positions of a batch from which a target is predicted.

        A position is the place of an input in the batch, which has all windows end to end. An input
        has a target if it passes two tests. First, it is in the row ``first`` of its window or
        later. Second, its target (the interaction in the row after it) may be one: the mask
        ``is_target`` is true, or there is no mask.

        For example, a batch has two windows with 3 inputs each. In the first window the last 2
        inputs pass both tests, in the second the last 1. The positions are [1, 2, 5].

        Args:
            batch: [b] int64, numbers of the windows, on the host. The windows there
                (``self.windows``) give the sizes of the results, since to read a size from the
                device would make Python wait.
            numbers: the same on the device, whose copy of the windows (``self.start``, ``self.end``
                and ``self.first``) gives the positions.
            rows: [inputs] row in the log of each position of the batch.

        Returns:
            [targets] int64, on the device.
        """
        # First test: the positions of the inputs from ``first`` on. In the example, the windows
        # begin at the positions [0, 3] of the batch. They have [1, 2] inputs before ``first``, so
        # their inputs from ``first`` on begin at the positions [1, 5]. These are [2, 1] inputs.
        start, end, first = self.start[numbers], self.end[numbers], self.first[numbers]
        lengths = end - start
        window_position = lengths.cumsum(0) - lengths
        first_position = window_position + (first - start)
        num_possible = int((self.windows.end[batch] - self.windows.first[batch]).sum())  # on host
        possible = concatenate_ranges(first_position, end - first, num_possible)
        if self.is_target is None:
            return possible

        # Second test, by the mask. A stable sort of 0 (passes) and 1 (fails) brings those that pass
        # to the front, in their order; ``num_targets`` says how many these are.
        target_rows = rows[possible] + 1
        fails = (~self.is_target[target_rows]).byte()
        num_targets = int(self.windows.num_targets[batch].sum())
        return possible[fails.argsort(stable=True)[:num_targets]]


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
    # A range begins in the result where the lengths before it end: at [0, 2] in the example. The
    # result is [0, 1, 2, 3, 4], and in each range the difference from its start is added, ``shift``
    # [7, 0], once for each of its numbers: [7, 7, 0, 0, 0].
    shift = start - (lengths.cumsum(0) - lengths)
    steps = torch.arange(total, device=start.device)
    return steps + shift.repeat_interleave(lengths, output_size=total)


def fits_on_device(
    device: torch.device, log: EventLog, windows: Windows, features: Features
) -> bool:
    """Return whether all training data are to be copied to the device of a model, before training.

    On a CPU they need no copy. On a GPU (cuda) they are copied if they take at most half of its
    free memory (``MEMORY_SHARE``). On other devices, such as the GPU of a Mac, which shares the
    memory of the host, they always are.

    Args:
        device: device of the model.
        log, windows, features: the data that would be copied.
    """
    if device.type == "cpu":
        return False
    if device.type != "cuda":
        return True
    columns: list[Any] = [log.items, log.times, windows.start, windows.end, windows.first]
    columns += [*features.events.values(), *features.users.values()]
    num_bytes = sum(column.nbytes for column in columns)
    num_free_bytes, _ = torch.cuda.mem_get_info(device)
    return num_bytes <= MEMORY_SHARE * num_free_bytes


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield the items of an iterator, each computed by a thread while the caller uses the last one.

    Args:
        items: what yields them, such as batches. No item may be None, which stands for the end.
    """
    # ``next(iterator, None)`` runs in the thread, and returns None at the end
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, iterator, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, iterator, None)
            yield item
