"""The interactions that are kept, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.cells import Cells, encode, read_ids
from recbole_pos.conversion.source import EMPTY_LINE, Source
from recbole_pos.conversion.times import ROW_ORDER, Times, read_times
from recbole_pos.data.location import UNWRITABLE
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_ORDER_NOTE = "order of the rows of each user, no time"
_HASH_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd, of a 64-bit hash


@dataclass
class InteractionTable:
    """Interactions in the order of their rows.

    Attributes:
        rows: [interactions] int64 row of each in the source.
        user, item: [interactions] names of the user and the item of each.
        seconds: [interactions] float64 time of each in seconds since 1970.
        forms: form of times -> number of rows.
        dropped: reason -> rows of the source that are left out.
    """

    rows: np.ndarray
    user: Cells
    item: Cells
    seconds: np.ndarray
    forms: Counter[str]
    dropped: dict[str, np.ndarray] = field(default_factory=dict)

    def keep(self, mask: np.ndarray, reason: str) -> None:
        """Keep interactions where ``mask`` ([interactions] bool) is true; drop others by reason."""
        if mask.all():
            return
        dropped = self.dropped.get(reason, np.empty(0, np.int64))
        self.dropped[reason] = np.sort(np.concatenate((dropped, self.rows[~mask])))
        kept = np.flatnonzero(mask)
        self.rows, self.seconds = self.rows[kept], self.seconds[kept]
        self.user, self.item = self.user[kept], self.item[kept]

    def keep_core(self, min_user: int, min_item: int) -> None:
        """Drop users and items with fewer interactions until none has fewer; refuse to drop all."""
        num_before = -1
        while len(self.rows) != num_before:
            num_before = len(self.rows)
            for role, minimum in (("user", min_user), ("item", min_item)):
                codes = getattr(self, role).codes
                has_enough = np.bincount(codes)[codes] >= minimum
                self.keep(has_enough, f"{role} with under {minimum} interactions")
                if not len(self.rows):
                    raise UsageError(
                        f"no interaction is left of users with {min_user} and items with "
                        f"{min_item}; lower min_user, min_item or core"
                    )


def read_interactions(
    source: Source, roles: Mapping[str, str], date_format: str | None
) -> InteractionTable:
    """Read the interactions of a source; drop rows that are none, and refuse to drop all."""
    columns = source.columns
    for name in roles.values():
        if name in columns and pa.types.is_large_list(columns[name].type):
            raise UsageError(
                f"{source.path}: {name} holds lists, expected an interaction a row: pandas makes "
                "them by frame.explode([item, time])"
            )
    user, item = (read_ids(encode(columns[roles[role]], roles[role])) for role in ("user", "item"))
    time_column = columns.get(roles["time"])
    if time_column is None:  # ROW_ORDER
        if date_format:
            raise UsageError(f"date_format: with --time={ROW_ORDER} there are no dates to read")
        # of each row among those of its user, which serves as time
        ranks = pd.Series(user.codes).groupby(user.codes).cumcount().to_numpy(np.float64)
        times = Times(ranks, Counter({_ORDER_NOTE: source.num_rows}))
        time_column = pa.chunked_array([pa.array(times.seconds)])
    else:
        times = read_times(time_column, roles["time"], date_format)
    table = InteractionTable(np.arange(source.num_rows), user, item, times.seconds, times.forms)
    _drop_incomplete(table, roles, time_column.is_null().to_numpy())
    if not len(table.rows):
        reasons = ", ".join(
            f"{reason}: {len(rows):,} rows" for reason, rows in table.dropped.items()
        )
        known = time_column.drop_null()
        example = f"; {roles['time']} is written as {shown(known[0].as_py())}" if len(known) else ""
        raise UsageError(
            f"{source.path}: no row is an interaction ({reasons}){example}. See --user, --item, "
            "--time and --date_format"
        )
    return table


def _drop_incomplete(
    table: InteractionTable, roles: Mapping[str, str], has_no_time: np.ndarray
) -> None:
    """Drop rows without user, item or time (``has_no_time``: it is empty), or with a wrong name."""
    is_blank = has_no_time & (table.user.codes == 0) & (table.item.codes == 0)
    table.keep(~is_blank, EMPTY_LINE)
    table.keep(table.user.codes > 0, f"no user ({roles['user']})")
    table.keep(table.item.codes > 0, f"no item ({roles['item']})")
    table.keep(~has_no_time[table.rows], f"no time ({roles['time']})")
    table.keep(~np.isnan(table.seconds), f"time cannot be read ({roles['time']})")
    for role in ("user", "item"):
        cells = getattr(table, role)
        matches = pc.match_substring_regex(cells.values, UNWRITABLE)
        is_unwritable = matches.to_numpy(zero_copy_only=False)[cells.codes]
        table.keep(~is_unwritable, f"{role} with a line break, or called [PAD]")


def find_copies(table: InteractionTable) -> np.ndarray:
    """Return [interactions] bool, true for copies (same user, item, time) of an earlier one."""
    user, item, seconds = table.user.codes, table.item.codes, table.seconds
    pairs = user.astype(np.uint64) << np.uint64(32) | item.astype(np.uint64)
    # copies have equal hashes, other interactions hardly ever; only equal hashes are compared
    pair_factor, time_factor = map(np.uint64, _HASH_FACTORS)
    hashes = pairs * pair_factor ^ seconds.view(np.uint64) * time_factor
    ordered = np.sort(hashes)
    rows = np.flatnonzero(np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]]))
    is_copy = np.zeros(len(seconds), dtype=bool)
    is_copy[rows] = pd.DataFrame({"pair": pairs[rows], "time": seconds[rows]}).duplicated()
    return is_copy
