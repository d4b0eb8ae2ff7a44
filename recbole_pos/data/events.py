"""EventLog: every interaction once, in flat arrays sorted by user and time."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.scratch import Scratch

PART_EVENTS = 1 << 22  # about how many events a part of a log has that is processed in parts
PART = "given part"  # column of the given part, by which a user's events are sorted before time
KIND = "of target_events"  # column of whether an interaction may be a target; without it all may


@dataclass(frozen=True)
class EventLog:
    """Interactions sorted by user, (given part,) time, and their order in the file.

    Attributes:
        fields: name -> [events] or [events, s] tensor, one entry per interaction field.
        offsets: [users + 1] int64; the interactions of user u are offsets[u] : offsets[u + 1].
    """

    fields: dict[str, Tensor]
    offsets: np.ndarray
    user_field: str
    item_field: str
    time_field: str

    @classmethod
    def build(
        cls,
        fields: dict[str, Tensor],
        users: int,
        user_field: str,
        item_field: str,
        time_field: str,
        scratch: Scratch | None = None,
    ) -> EventLog:
        """Sort the columns of an interaction table.

        Args:
            fields: columns in file order, taken out one by one so that memory holds each once; the
                time column must be exact (float64 or int64). ``PART`` may be among them.
            users: number of user ids, padding included.
            user_field, item_field, time_field: names of these columns.
            scratch: disk space to sort on, where the columns do not fit into memory.

        Raises:
            TypeError: if times are float32, whose step is 64-128 s for seconds since 1970.
        """
        user, time = fields[user_field], fields[time_field]
        if time.dtype not in (torch.float64, torch.int64):
            raise TypeError(f"{time_field} must be float64 or int64, found {time.dtype}")
        if scratch is not None:
            offsets = _sort_on_disk(fields, users, user_field, time_field, scratch)
            return cls(fields, offsets, user_field, item_field, time_field)
        counts = np.bincount(user.numpy(), minlength=users)
        # stable: file order breaks ties; many files are sorted by time already
        is_sorted = bool((time[1:] >= time[:-1]).all())
        by_time = None if is_sorted else torch.argsort(time, stable=True)
        user = user.to(torch.int32)
        if PART in fields:
            user = user * 3 + fields[PART]  # sorts by user, then by one of three parts
        user = user if by_time is None else user[by_time]
        order = torch.argsort(user, stable=True)
        order = order if by_time is None else by_time[order]
        del user, time, by_time
        columns = {}
        for name in list(fields):
            column = fields.pop(name)
            if name == user_field:  # the sorted users follow from the counts
                columns[name] = torch.repeat_interleave(torch.from_numpy(counts))
            else:
                columns[name] = column.index_select(0, order)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return cls(columns, offsets, user_field, item_field, time_field)

    def in_parts(self) -> Iterator[tuple[slice, EventLog]]:
        """Yield parts of whole users, as their slice of events and log, to save memory."""
        low = np.flatnonzero(np.diff(self.offsets[:-1] // PART_EVENTS, prepend=-1))
        for first, end in itertools.pairwise([*low.tolist(), len(self.offsets) - 1]):
            offsets = self.offsets[first : end + 1]
            place = slice(int(offsets[0]), int(offsets[-1]))
            fields = {name: column[place] for name, column in self.fields.items()}
            yield place, replace(self, fields=fields, offsets=offsets - offsets[0])

    def keep(self, mask: np.ndarray) -> EventLog:
        """Return the log of the interactions where ``mask`` ([events] bool) is true."""
        events = torch.from_numpy(np.flatnonzero(mask))
        before = np.concatenate(([0], np.cumsum(mask)))
        fields = {name: column.index_select(0, events) for name, column in self.fields.items()}
        return replace(self, fields=fields, offsets=before[self.offsets])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def users(self) -> Tensor:
        """[events] int64 user of each event."""
        return self.fields[self.user_field]

    @property
    def items(self) -> Tensor:
        """[events] int64 item of each event."""
        return self.fields[self.item_field]

    @property
    def times(self) -> Tensor:
        """[events] float64 time of each event, exact."""
        return self.fields[self.time_field]

    @property
    def lengths(self) -> np.ndarray:
        """[users] int64 number of events of each user."""
        return np.diff(self.offsets)

    @property
    def starts(self) -> np.ndarray:
        """[events] int64 index of the first event of each event's user."""
        return np.repeat(self.offsets[:-1], self.lengths)

    @property
    def has_history(self) -> np.ndarray:
        """[events] bool: all events but the oldest of each user."""
        mask = np.ones(len(self), dtype=bool)
        mask[self.offsets[:-1][self.lengths > 0]] = False
        return mask

    @property
    def possible_targets(self) -> np.ndarray:
        """[events] bool: events that have a history and that ``KIND`` allows as targets."""
        allowed = self.fields[KIND].numpy() if KIND in self.fields else True
        return self.has_history & allowed

    def count_targets(self) -> tuple[np.ndarray, np.ndarray]:
        """Return [events] int64 all possible targets of an event's user, and those up to it."""
        before = np.concatenate(([0], np.cumsum(self.possible_targets)))
        first, end = (np.repeat(x, self.lengths) for x in (self.offsets[:-1], self.offsets[1:]))
        return before[end] - before[first], before[1:] - before[first]

    @property
    def ranks(self) -> np.ndarray:
        """[events] int64 0 for the oldest event of a user, 1 for the next, ..."""
        return np.arange(len(self)) - self.starts


def _sort_on_disk(
    fields: dict[str, Tensor], users: int, user_field: str, time_field: str, scratch: Scratch
) -> np.ndarray:
    """Sort the columns in ``fields`` as ``EventLog.build`` does; return the offsets of users.

    The first pass distributes events to ranges of users that fit into memory (``scratch``); the
    second sorts each range.
    """
    columns = {name: column.numpy() for name, column in fields.items()}
    user, counts = columns[user_field], np.zeros(users, dtype=np.int64)
    for rows in scratch.blocks(len(user)):
        counts += np.bincount(user[rows], minlength=users)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    _, first, part = np.unique(offsets[:-1] // scratch.rows, return_index=True, return_inverse=True)
    ends = np.append(offsets[first], len(user))
    free = ends[:-1].copy()  # where the next event of each range goes
    result = {name: scratch.empty(column.shape, column.dtype) for name, column in columns.items()}
    for rows in scratch.blocks(len(user)):
        target = part[user[rows]]
        order = np.argsort(target, kind="stable")
        sizes = np.bincount(target, minlength=len(free))
        place = np.arange(len(order)) + np.repeat(free - (np.cumsum(sizes) - sizes), sizes)
        free += sizes
        for name, column in columns.items():
            result[name][place] = column[rows][order]
    for begin, end in itertools.pairwise(ends.tolist()):
        range_ = {name: column[begin:end] for name, column in result.items()}
        keys = [range_[name] for name in (time_field, PART, user_field) if name in range_]
        order = np.lexsort(keys)  # stable: the order of the file breaks ties
        for column in range_.values():
            column[:] = column[order]
        scratch.release()
    fields.update({name: torch.from_numpy(column) for name, column in result.items()})
    return offsets


def read_only(column: np.ndarray) -> Tensor:
    """Return a tensor over a read-only array of pandas or Ray, without torch's warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(column)
