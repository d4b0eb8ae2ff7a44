"""The events that are kept, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from pyarrow import compute as pc

from recbole_pos.conversion.cells import Cells, encode
from recbole_pos.conversion.source import Source
from recbole_pos.conversion.times import Times, read_times
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

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
    user, item = (encode(columns[roles[role]], roles[role]) for role in ("user", "item"))
    when = columns[roles["time"]]
    times = read_times(when, roles["time"], date_format)
    events = Events(np.arange(source.rows), user, item, times.seconds, times)
    if np.isnan(times.seconds).any() or not (user.codes.all() and item.codes.all()):
        no_time = when.is_null().to_numpy()
        blank = no_time & (user.codes == 0) & (item.codes == 0)
        events.keep(~blank, "empty line")
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
