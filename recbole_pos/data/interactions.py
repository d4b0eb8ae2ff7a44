"""EventLog: every interaction once, in arrays sorted by user and time; and checks of its times.

``sort_interactions`` makes the log of the columns of a file, ``check_clock`` looks whether the time
field holds clock times, for models that read it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.tables.storage import Storage, trim_heap
from recbole_pos.values import SECONDS, shown

# About how many interactions a chunk has, where a log is processed chunk by chunk: few enough that
# a table of their pairs of user and item stays in the cache of a processor.
CHUNK_INTERACTIONS = 1 << 17
YEAR = 365.25 * 86400  # seconds
_NUM_PARTS = 3  # training, validation and test


@dataclass(frozen=True)
class EventLog:
    """Interactions sorted by user, (given part,) time, and their order in the file.

    Attributes:
        fields: name -> [interactions] or [interactions, s] tensor, one per interaction field.
        offsets: [users + 1] int64; the interactions of user u are offsets[u] : offsets[u + 1].
    """

    fields: dict[str, Tensor]
    offsets: np.ndarray
    user_field: str
    item_field: str
    time_field: str

    def iterate_chunks(self) -> Iterator[tuple[slice, EventLog]]:
        """Yield the log in chunks of whole users, so that work on a chunk needs little memory.

        Yields:
            rows: the rows of the chunk in this log.
            log: the log of these rows only, with the chunk's users numbered from 0 in ``offsets``.
        """
        # CHUNK_INTERACTIONS is about how many interactions a chunk has.
        for first, end in _cut_users(self.offsets, CHUNK_INTERACTIONS):
            offsets = self.offsets[first : end + 1]
            rows = slice(int(offsets[0]), int(offsets[-1]))
            if rows.start == rows.stop:  # the users of this chunk have no interactions
                continue
            fields = {name: column[rows] for name, column in self.fields.items()}
            yield rows, replace(self, fields=fields, offsets=offsets - offsets[0])

    def keep(self, mask: np.ndarray) -> EventLog:
        """Return the log of the interactions where ``mask`` ([interactions] bool) is true."""
        if mask.all():
            return self
        # A user's new offset is how many rows are kept before the user's first row.
        rows = torch.from_numpy(np.flatnonzero(mask))
        num_before = np.concatenate(([0], np.cumsum(mask)))
        fields = {name: column.index_select(0, rows) for name, column in self.fields.items()}
        return replace(self, fields=fields, offsets=num_before[self.offsets])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def users(self) -> Tensor:
        """[interactions] int64 user of each."""
        return self.fields[self.user_field]

    @property
    def items(self) -> Tensor:
        """[interactions] int64 item of each."""
        return self.fields[self.item_field]

    @property
    def times(self) -> Tensor:
        """[interactions] float64 time of each, exact."""
        return self.fields[self.time_field]

    @property
    def lengths(self) -> np.ndarray:
        """[users] int64 number of interactions of each user."""
        return np.diff(self.offsets)

    @property
    def starts(self) -> np.ndarray:
        """[interactions] int64 row of the oldest interaction of the same user."""
        return np.repeat(self.offsets[:-1], self.lengths)

    def find_users(self, rows: np.ndarray) -> np.ndarray:
        """Return the user of each row [n] int64, without reading the column of users from disk."""
        return np.searchsorted(self.offsets, rows, side="right") - 1

    @property
    def ranks(self) -> np.ndarray:
        """[interactions] int64 0 for the oldest of a user, 1 for the next, ..."""
        return np.arange(len(self)) - self.starts

    @property
    def has_history(self) -> np.ndarray:
        """[interactions] bool: all but the oldest of each user."""
        mask = np.ones(len(self), dtype=bool)
        mask[self.offsets[:-1][self.lengths > 0]] = False
        return mask

    def count_targets(self, is_possible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many possible targets the user of each interaction has.

        For example, a user with [False, True, True] has the numbers [2, 2, 2] and [0, 1, 2]. A user
        after this one with [True, False] has [1, 1] and [1, 1].

        Args:
            is_possible: [interactions] bool, which interactions may be targets.

        Returns:
            num_targets: [interactions] int64, targets of the interaction's user in all.
            num_until: [interactions] int64, those of them up to the interaction, itself included.
        """
        # num_before[r] counts the targets in all rows before r, of all users. With the user of the
        # example: [0, 0, 1, 2]; with the second one: [0, 0, 1, 2, 3, 3].
        num_before = np.concatenate(([0], np.cumsum(is_possible)))

        # The user of each interaction has the rows start up to end, excluded: of the two users
        # start is [0, 0, 0, 3, 3], end [3, 3, 3, 5, 5]. Targets before ``start`` are of others.
        start = np.repeat(self.offsets[:-1], self.lengths)
        end = np.repeat(self.offsets[1:], self.lengths)
        num_of_others = num_before[start]
        return num_before[end] - num_of_others, num_before[1:] - num_of_others


def _cut_users(offsets: np.ndarray, num_rows: int) -> list[tuple[int, int]]:
    """Cut all users into ranges that follow each other, each with about ``num_rows`` interactions.

    For example, users with 3, 2, 2 and 1 interactions, of which the first rows are [0, 3, 5, 7],
    are cut for 4 rows into users 0 to 1, whose first rows are below 4, and users 2 to 3.

    Args:
        offsets: [users + 1] first row of each user, and the number of all rows.
        num_rows: about how many interactions a range has.

    Returns:
        The first user of each range, and the one after its last: [(0, 2), (2, 4)].
    """
    # All users with the same quotient are a range: in the example the quotients are [0, 0, 1, 1].
    # ``np.unique`` gives the first user of each: 0 and 2. A range ends where the next one begins.
    quotients = offsets[:-1] // num_rows
    _, first_users = np.unique(quotients, return_index=True)
    return list(itertools.pairwise([*first_users.tolist(), len(offsets) - 1]))


def sort_interactions(
    fields: dict[str, Tensor],
    num_users: int,
    user_field: str,
    item_field: str,
    time_field: str,
    storage: Storage | None = None,
    given_part: np.ndarray | None = None,
    tie_seed: int | None = None,
) -> tuple[EventLog, np.ndarray]:
    """Sort the columns of a table of interactions by user and time, and return them as a log.

    Args:
        fields: the columns in file order. They are taken out one by one, so that ``fields`` is
            empty at the end, and memory holds each column once. The time must be float64 or int64,
            since float32 has steps of 64 s and more for seconds since 1970.
        num_users: number of user ids, padding included.
        user_field, item_field, time_field: names of these columns.
        storage: space for the sorted columns; memory if None.
        given_part: [interactions] TRAIN, VALID or TEST in file order, if there is a file for each
            part: a user's interactions are then sorted by part before they are by time.
        tie_seed: seed of a random order of a user's interactions at the same time; with None they
            stay in the order of the file.

    Returns:
        log: the sorted interactions.
        order: [interactions] int64, row in the file of each interaction of the log.
    """
    storage = storage or Storage()
    storage.release_pages()  # the sort reads two of the columns

    # Find the order. User u gets the rows offsets[u] up to offsets[u + 1].
    users, times = fields[user_field].numpy(), fields[time_field].numpy()
    if tie_seed is None:
        order, offsets = sort_by_user(users, times, given_part, num_users, storage)
    else:
        # Shuffle all rows first: the sort moves only rows that differ in user, part or time, so
        # that ties stay shuffled.
        rows = np.random.default_rng(tie_seed).permutation(len(users))
        part = None if given_part is None else given_part[rows]
        order, offsets = sort_by_user(users[rows], times[rows], part, num_users, storage)
        order = rows[order]
    del users, times  # so that no name holds a column that is taken out below
    # Return freed memory to the system: the sort leaves 200 MB of gaps at 20 million interactions.
    trim_heap()

    # Put the columns in this order, one after the other. The column of users is not sorted, but
    # made again: each user as many times as the user has rows.
    columns: dict[str, Any] = dict.fromkeys(fields)  # the names, in the order of ``fields``
    del fields[user_field]
    for name in list(fields):
        columns[name] = _sort_column(fields.pop(name), order, storage)
        storage.release_pages()
    sorted_users = storage.store(np.repeat(np.arange(num_users), np.diff(offsets)))
    columns[user_field] = torch.from_numpy(sorted_users)
    return EventLog(columns, offsets, user_field, item_field, time_field), order


def _sort_column(column: Tensor, order: np.ndarray, storage: Storage) -> Tensor:
    """Return the rows of a column in the given order, in new space of a storage."""
    sorted_column = storage.empty(tuple(column.shape), column.numpy().dtype)
    # With the default mode "raise" numpy would fill a copy of the output first.
    np.take(column.numpy(), order, axis=0, out=sorted_column, mode="clip")
    return torch.from_numpy(sorted_column)


def sort_by_user(
    users: np.ndarray,
    times: np.ndarray,
    given_part: np.ndarray | None,
    num_users: int,
    storage: Storage,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of interactions by user, then given part, then time.

    A part (training, validation or test) is given where each has a file of its own.

    Ties keep their order. For example, the users [1, 0, 1] at the times [9, 5, 2] give the order
    [1, 2, 0] and the offsets [0, 1, 3].

    Args:
        users: [interactions] int64 user of each row.
        times: [interactions] time of each row.
        given_part: [interactions] int8 TRAIN, VALID or TEST of each row; None if no part is given.
        num_users: number of user ids, padding included.
        storage: space for the order, which also limits how many rows are sorted at a time.

    Returns:
        order: [interactions] int64 rows in that order.
        offsets: [users + 1] int64; user u has the places offsets[u] : offsets[u + 1] in it.
    """
    # ``storage.sorted_rows`` is how many rows memory allows to sort at a time.
    offsets = np.concatenate(([0], np.cumsum(np.bincount(users, minlength=num_users))))
    if len(users) <= storage.sorted_rows:
        return _sort_rows(users, times, given_part), offsets

    # Sort ranges of users one by one. All rows of a user are in one range, so that the sorted
    # ranges follow each other.
    order: np.ndarray = storage.empty(len(users), np.int64)
    for first, end in _cut_users(offsets, storage.sorted_rows):
        rows = np.flatnonzero((users >= first) & (users < end))
        parts = None if given_part is None else given_part[rows]
        in_range = _sort_rows(users[rows], times[rows], parts)
        order[offsets[first] : offsets[end]] = rows[in_range]
    return order, offsets


def _sort_rows(user: np.ndarray, time: np.ndarray, given_part: np.ndarray | None) -> np.ndarray:
    """Return the order of rows by user, then part, then time; ties keep their order.

    Args:
        user: [n] int64.
        time: [n].
        given_part: [n] int8 TRAIN, VALID or TEST; None if no part is given.

    Returns:
        [n] int64 rows in that order.
    """
    # User and part as one number (``_NUM_PARTS`` is 3, and parts are 0, 1 and 2). A sort by time,
    # and then a stable one by this number, which keeps the order of time within a user and part,
    # give the order.
    key = torch.from_numpy(user.astype(np.int32))
    if given_part is not None:
        key = key * _NUM_PARTS + torch.from_numpy(given_part)
    if (time[1:] >= time[:-1]).all():  # many files are sorted by time already
        return torch.argsort(key, stable=True).numpy()
    by_time = torch.argsort(torch.from_numpy(time), stable=True)
    return by_time[torch.argsort(key[by_time], stable=True)].numpy()


def wrap_read_only(column: np.ndarray) -> Tensor:
    """Return a tensor that shares a read-only array of pandas or Ray, without torch's warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(column)


def counts_time(times: np.ndarray, unit: str) -> bool | None:
    """Return whether the numbers of a time field are dates from 1971 to 2100.

    Others, such as running numbers, only say in which order the interactions happened.

    Args:
        times: [n] numbers since 1970.
        unit: their unit, such as seconds.

    Returns:
        True or False; None if there are no times.
    """
    if not len(times):
        return None
    # In years since 1970: SECONDS[unit] is the number of seconds in a unit, YEAR that in a year.
    first, last = (float(time) * SECONDS[unit] / YEAR for time in (times.min(), times.max()))
    return 1 < first and last < 2100 - 1970


def check_clock(
    log: EventLog,
    unit: str,
    instead: str = "take a scheme without time such as rope or learned",
    compares_users: bool = False,
) -> list[str]:
    """Check that the time field holds clock times, before a time-aware model is built.

    Args:
        log: the interactions, sorted by user and time.
        unit: unit of the time field, such as seconds (the option ``timestamp_unit``).
        instead: what the message advises to use where the times are unusable.
        compares_users: whether the model compares only times of different users with each other,
            so that each user may have one time only.

    Returns:
        Warnings to show before training; empty if the times are as they should be.

    Raises:
        UsageError: if no user has two different times; with ``compares_users``, if all times are
            the same.
    """
    # The steps in time between interactions of one user that follow each other: with the users
    # 1, 1, 2 and the times 5, 8, 9 there is one step, 3. Steps of 0 do not count.
    name, times, users = shown(log.time_field), log.times.numpy(), log.users.numpy()
    steps = np.diff(times)[users[1:] == users[:-1]]
    steps = steps[steps != 0]
    distinct = np.unique(times)
    advice = f"set TIME_FIELD to a column of clock times, or {instead}"
    if len(steps) == 0:
        # Each user has one time only. A model that compares users only asks whose time is earlier:
        # two different times are enough for it, and running numbers will do.
        if compares_users and len(distinct) > 1:
            return []
        raise UsageError(
            f"{name} is the same for all interactions of a user: there is no time to learn from; "
            f"{advice}"
        )

    # Running numbers: each of 7, 8, 9 and so on occurs once, or every step is the same.
    first, last = distinct[0], distinct[-1]
    are_row_numbers = len(distinct) == len(times) and len(times) == last - first + 1
    if are_row_numbers or (steps == steps[0]).all():
        return [
            f"{name} looks like a running number, not like clock time: a time-aware model learns "
            f"no more from it than from order; {advice}"
        ]

    # Unlikely dates, as of milliseconds that are read as seconds. ``counts_time`` returns whether
    # all times are between 1971 and 2100.
    if counts_time(times, unit):
        return []
    years = [1970 + time * SECONDS[unit] / YEAR for time in (first, last)]
    return [
        f"{name} reads as {unit} from the year {years[0] // 1:.6g} to {years[1] // 1:.6g}. If it "
        f"counts something else, set timestamp_unit to one of {', '.join(SECONDS)}; if it only "
        f"numbers interactions: {advice}; if it counts from another day than 1970-01-01, its years "
        "do not matter"
    ]


def require_order(log: EventLog, readers: str, instead: str) -> None:
    """Refuse a log in which a user's times fall from one interaction to the next.

    This may happen where the parts of a split are given as files (``benchmark_filename``): a user's
    interactions are then sorted by part first, and a later part may have earlier times.

    Args:
        log: the interactions.
        readers: what needs times that never fall: an option with its value, for the message.
        instead: what the message advises to use instead.
    """
    # A time falls where it is less than that of the row before, of the same user.
    users = log.users.numpy()
    falls = (np.diff(log.times.numpy()) < 0) & (users[1:] == users[:-1])
    if falls.any():
        num_users = len(np.unique(users[1:][falls]))
        raise UsageError(
            f"{shown(log.time_field)}: the times of {num_users:,} users fall from one part of "
            f"benchmark_filename to the next, and {readers} needs times that never fall; give "
            f"parts that follow each other in time, or {instead}"
        )
