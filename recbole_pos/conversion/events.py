"""The events that are kept, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import Cells, encode, whole_ids
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.times import Times, read_times
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

ROW_ORDER = "row_order"  # as the name of the time: there is none
ORDER_NOTE = "order of the rows of each user, no time"
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # multipliers that spread what they are given
# What an id cannot have: line ends, NUL, and the name of RecBole's padding.
_UNWRITABLE = "[\r\n\x00]|^\\[PAD\\]$"


@dataclass
class Events:
    """Events in the order of their lines.

    Attributes:
        rows: [events] int64 which row of the source each is.
        user, item: [events] who and what.
        seconds: [events] float64 when.
        times: how times were written.
        dropped: rows of the source that are no events, by reason.
    """

    rows: np.ndarray
    user: Cells
    item: Cells
    seconds: np.ndarray
    times: Times
    dropped: dict[str, np.ndarray] = field(default_factory=dict)

    def keep(self, wanted: np.ndarray, reason: str) -> None:
        """Drop the events that are not wanted, [events] bool."""
        if wanted.all():
            return
        before = self.dropped.get(reason, np.empty(0, np.int64))
        self.dropped[reason] = np.sort(np.concatenate((before, self.rows[~wanted])))
        rows = np.flatnonzero(wanted)
        self.rows, self.seconds = self.rows[rows], self.seconds[rows]
        self.user, self.item = self.user.take(rows), self.item.take(rows)


def read_events(source: Source, roles: Mapping[str, str], date_format: str | None) -> Events:
    """Events of a source, without the lines that have no user, item or time.

    Raises:
        UsageError: if it cannot be told what the times mean, or no line is an event.
    """
    columns = source.columns
    user, item = (whole_ids(encode(columns[roles[role]], roles[role])) for role in ("user", "item"))
    when = columns.get(roles["time"])
    if when is None:  # ROW_ORDER
        if date_format:
            raise UsageError(f"date_format: with --time {ROW_ORDER} there are no dates to read")
        times = Times(_order(user.codes), Counter({ORDER_NOTE: source.rows}))
        when = pa.chunked_array([pa.array(times.seconds)])
    else:
        times = read_times(when, roles["time"], date_format)
    events = Events(np.arange(source.rows), user, item, times.seconds, times)
    for reason, rows in source.rejected.items():
        events.keep(~np.isin(events.rows, rows), reason)
    if np.isnan(times.seconds).any() or not (user.codes.all() and item.codes.all()):
        no_time = when.is_null().to_numpy()
        blank = no_time & (user.codes == 0) & (item.codes == 0)
        events.keep(~blank[events.rows], "empty line")
        events.keep(events.user.codes > 0, f"no user ({roles['user']})")
        events.keep(events.item.codes > 0, f"no item ({roles['item']})")
        events.keep(~no_time[events.rows], f"no time ({roles['time']})")
        events.keep(~np.isnan(events.seconds), f"time cannot be read ({roles['time']})")
    for cells in ("user", "item"):
        values = getattr(events, cells).values
        wrong = pc.match_substring_regex(values, _UNWRITABLE).to_numpy(zero_copy_only=False)
        if wrong.any():
            codes = getattr(events, cells).codes
            events.keep(~wrong[codes], f"{cells} with a line break, or called [PAD]")
    if not len(events.rows):
        why = ", ".join(f"{reason}: {len(rows):,} lines" for reason, rows in events.dropped.items())
        text = when.drop_null()
        example = f"; {roles['time']} is written as {shown(text[0].as_py())}" if len(text) else ""
        raise UsageError(
            f"{source.path}: no line is an event ({why}){example}. See --user, --item, --time and "
            "--date_format"
        )
    return events


def _order(codes: np.ndarray) -> np.ndarray:
    """[rows] float64, how many rows of the same user are above."""
    rows = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    place = np.empty(len(codes))
    place[rows] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place


def find_copies(events: Events) -> np.ndarray:
    """[events] bool, which have user, item and time of an earlier one."""
    pair = events.user.codes.astype(np.uint64) << np.uint64(32)
    pair |= events.item.codes.astype(np.uint64)
    # alike if they are the same, and hardly ever if not: one sort shows that there are none
    mixed = pair * np.uint64(_ODD[0]) ^ events.seconds.view(np.uint64) * np.uint64(_ODD[1])
    ordered = np.sort(mixed)
    alike = ordered[1:][ordered[1:] == ordered[:-1]]
    copies = np.zeros(len(mixed), dtype=bool)
    if not len(alike):
        return copies
    rows = np.flatnonzero(np.isin(mixed, np.unique(alike)))
    order = np.lexsort((rows, events.seconds[rows], pair[rows]))
    rows = rows[order]
    same = (pair[rows][1:] == pair[rows][:-1]) & (
        events.seconds[rows][1:] == events.seconds[rows][:-1]
    )
    copies[rows[1:][same]] = True
    return copies


def count_copied_targets(events: Events) -> int:
    """Return how many users' last events repeat the event before them at the same time."""
    user, users = events.user.codes, len(events.user.values)
    latest = np.full(users, -np.inf)
    np.maximum.at(latest, user, events.seconds)
    rows = np.flatnonzero(events.seconds == latest[user])
    last = np.full(users, -1)
    last[user[rows]] = rows  # of several the last one that is assigned stays
    rows = rows[last[user[rows]] != rows]
    before = np.full(users, -1)
    before[user[rows]] = rows
    both = before >= 0
    return int((events.item.codes[last[both]] == events.item.codes[before[both]]).sum())


def keep_core(events: Events, min_user: int, min_item: int) -> None:
    """Drop users and items with fewer events, again and again until none is left.

    Raises:
        UsageError: if nothing is left.
    """
    before = -1
    while len(events.rows) != before:
        before = len(events.rows)
        for role, cells, least in (
            ("user", "user", min_user),
            ("item", "item", min_item),
        ):
            codes = getattr(events, cells).codes
            events.keep(np.bincount(codes)[codes] >= least, f"{role} with under {least} events")
            if not len(events.rows):
                raise UsageError(
                    f"no event is left of users with {min_user} and items with {min_item}; lower "
                    "min_user, min_item or core"
                )


def in_order(cells: Cells) -> np.ndarray:
    """Codes of the values that stand in some row, in the order in which they first do."""
    first = np.full(len(cells.values), len(cells.codes))
    first[cells.codes[::-1]] = np.arange(len(cells.codes))[::-1]
    first[0] = len(cells.codes)
    return np.argsort(first, kind="stable")[: int((first < len(cells.codes)).sum())]
