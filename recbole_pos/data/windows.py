"""Histories over the log of interactions: (start, end) pairs of rows, never copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.utils import ModelType
from torch import Tensor

from recbole_pos.data.interactions import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.values import Options

# Field of gathered rows with the row of their target in the log.
TARGET_EVENT = "target_event"
ALL_ITEMS, WITHOUT_SEEN = "all items", "items not in the user's past"


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
        if self.is_target is None:
            return self.end - self.first
        num_before = np.concatenate(([0], np.cumsum(self.is_target)))
        return num_before[self.end + 1] - num_before[self.first + 1]

    def with_targets(self, is_target: np.ndarray) -> Windows:
        """Return the windows with targets in ``is_target`` ([interactions] bool), and no others."""
        restricted = Windows(self.start, self.end, self.first, is_target)
        is_kept = restricted.num_targets > 0
        return Windows(self.start[is_kept], self.end[is_kept], self.first[is_kept], is_target)


def training_windows(
    user_start: np.ndarray, user_end: np.ndarray, max_length: int, mode: str, stride: int | None
) -> Windows:
    """Cut each user's training interactions into windows.

    Args:
        user_start, user_end: [users] user u trains on rows user_start[u] : user_end[u] of the log.
        max_length: most inputs of a window, L.
        mode: ``last`` (the most recent window only, as SASRec's code), ``chunk`` (windows of L
            targets, end to end, counted from the newest), ``sliding`` (``stride`` new targets a
            window, up to L - stride inputs of context before them, at L / stride times the cost) or
            ``prefix`` (one target a window). Except under last, every interaction but a user's
            first is a target exactly once.
        stride: new targets per window under ``sliding``; L // 2 when None.
    """
    if mode == "sliding":
        stride = max(max_length // 2, 1) if stride is None else stride
        if not 1 <= stride <= max_length:
            raise UsageError(
                f"window_stride: expected 1 to MAX_ITEM_LIST_LENGTH ({max_length}), found {stride}"
            )
    elif stride is not None:
        raise UsageError(f"window_stride is only read under train_windows: sliding, not {mode}")
    else:
        stride = 1 if mode == "prefix" else max_length
    is_trainable = user_end - user_start >= 2
    user_start, user_end = user_start[is_trainable], user_end[is_trainable] - 1  # of the inputs
    num_inputs = user_end - user_start
    if mode == "last":
        num_windows = np.ones_like(num_inputs)
    elif mode == "prefix":
        num_windows = num_inputs
    else:  # the oldest window of a user holds the remaining targets, up to L
        num_windows = -(-np.maximum(num_inputs - max_length, 0) // stride) + 1  # rounded up
    user = np.repeat(np.arange(len(num_windows)), num_windows)
    age = gather_index(np.zeros_like(num_windows), num_windows)  # 0 is the newest of a user
    end = user_end[user] - age * stride
    start = np.maximum(end - max_length, user_start[user])
    is_oldest = age == num_windows[user] - 1
    return Windows(start, end, np.where(is_oldest, start, end - stride))


def gather_index(start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the ranges start[w] .. start[w] + lengths[w] - 1, concatenated: [sum(lengths)]."""
    offsets = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(start - offsets, lengths)


class PrefixRows(Interaction):
    """RecBole's augmented interactions, computed on access: row r is a target and its history.

    In place of RecBole's tensors of [rows, L], memory is O(rows), and little before rows are read.

    Args:
        log: the interactions.
        find_mask: returns [interactions] bool, which interactions have a row.
        max_length: L, histories keep their last L interactions and are padded on the right.
        suffix: appended to a field's name for its history (RecBole's LIST_SUFFIX).
        length_field: name of the field with the length of the history.
        features: columns of interactions in histories, and of users.
    """

    def __init__(
        self,
        log: EventLog,
        find_mask: Callable[[], np.ndarray],
        max_length: int,
        suffix: str,
        length_field: str,
        features: Features | None = None,
    ) -> None:
        """Keep the interactions; a row for each target is computed when it is read."""
        super().__init__({})
        self.log, self.max_length = log, max_length
        self.suffix, self.length_field = suffix, length_field
        self.features = features or Features()
        self.find_mask, self.length = find_mask, int(np.count_nonzero(find_mask()))

    @cached_property
    def target(self) -> Tensor:
        """[rows] int64 row of each target in the log."""
        return torch.from_numpy(np.flatnonzero(self.find_mask()))

    @property
    def columns(self) -> list[str]:
        """Names of all fields of a row."""
        names = list(self.log.fields)
        lists = [name + self.suffix for name in names if name != self.log.user_field]
        return [*names, *lists, self.length_field, *self.features.users]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, index: Any) -> Tensor | Interaction:
        """Return a field of all rows by its name, or rows by a slice or index."""
        if isinstance(index, str):
            if index in self.log.fields:
                return self.log.fields[index][self.target]
            if index == self.length_field:
                return self.target - self._find_start(self.target)
            return self._gather(slice(None))[index]
        return self._gather(index)

    def _gather(self, index: Any) -> Interaction:
        """Return the rows of a slice or of indices; histories are [rows, L], padded at the end."""
        rows = torch.as_tensor(np.arange(self.length)[index] if isinstance(index, slice) else index)
        target = self.target[rows.reshape(-1)]
        start = self._find_start(target)
        fields = {name: column[target] for name, column in self.log.fields.items()}
        history_rows = start[:, None] + torch.arange(self.max_length)  # [n, L]
        is_padding = history_rows >= target[:, None]
        history_rows.masked_fill_(is_padding, 0)
        for name, column in self.log.fields.items():
            if name != self.log.user_field:
                history = self.features.events.get(name, column)[history_rows]
                history[is_padding] = 0
                fields[name + self.suffix] = history
        for name, column in self.features.users.items():
            fields[name] = column[fields[self.log.user_field]]
        fields[self.length_field] = target - start
        fields[TARGET_EVENT] = target
        return Interaction(fields)

    def _find_start(self, target: Tensor) -> Tensor:
        """Return [n] int64 row of the oldest interaction in each target's history."""
        user_start = torch.from_numpy(self.log.offsets)[self.log.users[target]]
        return torch.maximum(user_start, target - self.max_length)


def masks_history(config: Options) -> bool:
    """Return whether seen items are excluded: ``mask_history``, or RecBole's choice if unset.

    RecBole excludes them for all models but sequential ones.
    """
    choice = config["mask_history"]
    return config["MODEL_TYPE"] != ModelType.SEQUENTIAL if choice is None else choice


def describe_candidates(excludes_seen: bool, repeated_targets: str) -> str:
    """Return which items are ranked for a target, in words.

    Args:
        excludes_seen: whether items of the user's past are not ranked.
        repeated_targets: the option of that name.
    """
    if not excludes_seen:
        return ALL_ITEMS
    if repeated_targets == "miss":
        return WITHOUT_SEEN
    return f"{WITHOUT_SEEN}, and the target"


def find_excluded_items(
    log: EventLog, target_event: Tensor, target_items: Tensor, repeated_targets: str
) -> tuple[Tensor, Tensor]:
    """Return the seen items that are not ranked: [n] examples, and [n] items.

    Args:
        target_event, target_items: [b] row in the log, and item, of the target of each example.
        repeated_targets: ``miss`` excludes a target that was seen as well; ``candidate`` ranks it.
    """
    target = target_event.numpy()
    start = log.offsets[log.users.numpy()[target]]
    items = log.items[torch.from_numpy(gather_index(start, target - start))]
    examples = torch.repeat_interleave(torch.from_numpy(target - start))
    if repeated_targets == "miss":
        return examples, items
    is_other = items != target_items[examples]
    return examples[is_other], items[is_other]
