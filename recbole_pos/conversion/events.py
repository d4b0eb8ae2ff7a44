"""The interactions that are kept, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import Cells, encode, read_whole_ids
from recbole_pos.conversion.source import Source, is_list
from recbole_pos.conversion.times import ROW_ORDER, Times, read_times
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_ORDER_NOTE = "order of the rows of each user, no time"
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd multipliers of a 64-bit hash
# What an id cannot have: line ends, NUL, and the name of RecBole's padding.
_UNWRITABLE = "[\r\n\x00]|^\\[PAD\\]$"


@dataclass
class Events:
    """Interactions in the order of their lines.

    Attributes:
        rows: [events] int64 row of the source of each interaction.
        seconds: [events] float64 times in seconds since 1970.
        forms: number of rows by the form of their times.
        dropped: rows of the source that are left out, by reason.
    """

    rows: np.ndarray
    user: Cells
    item: Cells
    seconds: np.ndarray
    forms: Counter[str]
    dropped: dict[str, np.ndarray] = field(default_factory=dict)

    def keep(self, wanted: np.ndarray, reason: str) -> None:
        """Keep the ``wanted`` interactions ([events] bool), and drop the others for ``reason``."""
        if wanted.all():
            return
        before = self.dropped.get(reason, np.empty(0, np.int64))
        self.dropped[reason] = np.sort(np.concatenate((before, self.rows[~wanted])))
        rows = np.flatnonzero(wanted)
        self.rows, self.seconds = self.rows[rows], self.seconds[rows]
        self.user, self.item = self.user[rows], self.item[rows]

    def keep_core(self, min_user: int, min_item: int) -> None:
        """Drop users and items with fewer interactions, repeatedly until none has fewer."""
        before = -1
        while len(self.rows) != before:
            before = len(self.rows)
            for role, least in (("user", min_user), ("item", min_item)):
                codes = getattr(self, role).codes
                self.keep(
                    np.bincount(codes)[codes] >= least, f"{role} with under {least} interactions"
                )
                if not len(self.rows):
                    raise UsageError(
                        f"no interaction is left of users with {min_user} and items with "
                        f"{min_item}; "
                        "lower min_user, min_item or core"
                    )


def read_events(source: Source, roles: Mapping[str, str], date_format: str | None) -> Events:
    """Read the interactions of a source, without the rows that have no user, item or time."""
    columns = source.columns
    for name in roles.values():
        if name in columns and is_list(columns[name].type):
            raise UsageError(
                f"{source.path}: {name} holds lists, expected an interaction a row: pandas makes "
                "them by frame.explode([item, time])"
            )
    user, item = (
        read_whole_ids(encode(columns[roles[role]], roles[role])) for role in ("user", "item")
    )
    when = columns.get(roles["time"])
    if when is None:  # ROW_ORDER
        if date_format:
            raise UsageError(f"date_format: with --time {ROW_ORDER} there are no dates to read")
        times = Times(_rank_rows(user.codes), Counter({_ORDER_NOTE: source.rows}))
        when = pa.chunked_array([pa.array(times.seconds)])
    else:
        times = read_times(when, roles["time"], date_format)
    events = Events(np.arange(source.rows), user, item, times.seconds, times.forms)
    if np.isnan(times.seconds).any() or not (user.codes.all() and item.codes.all()):
        no_time = when.is_null().to_numpy()
        blank = no_time & (user.codes == 0) & (item.codes == 0)
        events.keep(~blank[events.rows], "empty line")
        events.keep(events.user.codes > 0, f"no user ({roles['user']})")
        events.keep(events.item.codes > 0, f"no item ({roles['item']})")
        events.keep(~no_time[events.rows], f"no time ({roles['time']})")
        events.keep(~np.isnan(events.seconds), f"time cannot be read ({roles['time']})")
    for role in ("user", "item"):
        cells = getattr(events, role)
        wrong = pc.match_substring_regex(cells.values, _UNWRITABLE).to_numpy(zero_copy_only=False)
        if wrong.any():
            events.keep(~wrong[cells.codes], f"{role} with a line break, or called [PAD]")
    if not len(events.rows):
        why = ", ".join(f"{reason}: {len(rows):,} rows" for reason, rows in events.dropped.items())
        text = when.drop_null()
        example = f"; {roles['time']} is written as {shown(text[0].as_py())}" if len(text) else ""
        raise UsageError(
            f"{source.path}: no row is an interaction ({why}){example}. See --user, --item, --time "
            "and "
            "--date_format"
        )
    return events


def _rank_rows(codes: np.ndarray) -> np.ndarray:
    """Return [rows] float64 number of earlier rows of the same user, which serves as time."""
    rows = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    place = np.empty(len(codes))
    place[rows] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place


def find_copies(events: Events) -> np.ndarray:
    """Return [events] bool, which events are exact copies (user, item, time) of an earlier one."""
    pair = events.user.codes.astype(np.uint64) << np.uint64(32)
    pair |= events.item.codes.astype(np.uint64)
    # hashes of equal events are equal, and others hardly ever: only events with equal hashes are
    # compared below
    mixed = pair * np.uint64(_ODD[0]) ^ events.seconds.view(np.uint64) * np.uint64(_ODD[1])
    ordered = np.sort(mixed)
    rows = np.flatnonzero(np.isin(mixed, ordered[1:][ordered[1:] == ordered[:-1]]))
    seconds = events.seconds
    rows = rows[np.lexsort((rows, seconds[rows], pair[rows]))]
    earlier, later = rows[:-1], rows[1:]
    is_copy = np.zeros(len(mixed), dtype=bool)
    is_same = (pair[later] == pair[earlier]) & (seconds[later] == seconds[earlier])
    is_copy[later[is_same]] = True
    return is_copy
