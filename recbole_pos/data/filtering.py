"""RecBole's filters of interactions, users and items, on codes of names instead of the names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from recbole_pos.data.loading import AtomicTables
from recbole_pos.data.splits import filter_sessions, read_session_filter
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

# What RecBole makes of an option such as "[5,inf);(0,2]": bracket, low, high, bracket.
Intervals = list[tuple[str, float, float, str]]


class FilteredTables(AtomicTables):
    """Tables of which lines are left out, by RecBole's options and ``session_filter``.

    Each filter gives the lines that RecBole's gives, in their order in the file.
    """

    def _data_filtering(self) -> None:
        try:
            super()._data_filtering()
        except UsageError:
            raise
        except ValueError as error:  # "Some feat is empty", or an interval that cannot be read
            raise UsageError(
                f"filtering {shown(self.dataset_name)} failed or left no interaction: {error} See "
                "session_filter, user_inter_num_interval, item_inter_num_interval and val_interval"
            ) from error

    def _keep(self, table: str, mask: np.ndarray) -> None:
        """Keep the lines of a table (``inter``, ``user``, ``item``) where ``mask`` is true."""
        if not mask.all():
            feat = getattr(self, f"{table}_feat")
            setattr(self, f"{table}_feat", feat.take(np.flatnonzero(mask)))

    def _filter_nan_user_or_item(self) -> None:
        for field, table in ((self.uid_field, "user"), (self.iid_field, "item")):
            for name in (table, "inter"):
                feat = getattr(self, f"{name}_feat")
                if feat is None:
                    continue
                nameless = feat[field].isna().to_numpy()
                if nameless.any():
                    lines = (feat.index[nameless] + 2).tolist()
                    self.logger.warning(
                        f"In {name}_feat, line {lines}, {field} do not exist, so they will be "
                        "removed."
                    )
                    self._keep(name, ~nameless)

    def _remove_duplication(self) -> None:
        """``rm_copies``; RecBole's ``rm_dup_inter``, but equal times keep their order."""
        if self.config["rm_copies"]:
            same = self.inter_feat.duplicated([self.uid_field, self.iid_field, self.time_field])
            self._keep("inter", ~same.to_numpy())
        keep = self.config["rm_dup_inter"]
        if keep is None:
            return
        order = np.argsort(self.inter_feat[self.time_field].to_numpy(), kind="stable")
        pairs = self.inter_feat[[self.uid_field, self.iid_field]].iloc[order]
        kept = np.empty(len(order), dtype=bool)
        kept[order] = ~pairs.duplicated(keep=keep).to_numpy()
        self._keep("inter", kept)

    def _filter_inter_by_user_or_item(self) -> None:
        if self.config["filter_inter_by_user_or_item"] is not True:
            return
        for field, feat in ((self.uid_field, self.user_feat), (self.iid_field, self.item_feat)):
            if feat is not None:
                self._keep("inter", self.inter_feat[field].isin(feat[field]).to_numpy())

    def _filter_by_inter_num(self) -> None:
        """RecBole's, after ``session_filter``: before ids, so that what is dropped has none."""
        least, before = read_session_filter(self.config["session_filter"]), self.inter_feat
        if max(least) > 1:
            self.inter_feat = filter_sessions(before, self.uid_field, self.iid_field, least)
            for table, field in (("user", self.uid_field), ("item", self.iid_field)):
                feat = getattr(self, f"{table}_feat")
                if feat is not None:
                    left = self.inter_feat[field].unique()
                    dropped = before[field].unique()
                    dropped = dropped[~dropped.isin(left)]
                    self._keep(table, ~feat[field].isin(dropped).to_numpy())
        self._filter_by_count()

    def _filter_by_count(self) -> None:
        """Leave out users and items with too few or too many events, until none is left."""
        sides = []
        for table, field in (("user", self.uid_field), ("item", self.iid_field)):
            intervals = self._parse_intervals_str(self.config[f"{table}_inter_num_interval"])
            if intervals and len(intervals) > 1:
                self.logger.warning("More than one interval of interaction number are given!")
            feat = getattr(self, f"{table}_feat")
            names = None if feat is None else feat[field]
            sides.append(_Side.of(self.inter_feat[field], names, intervals))
        if all(side.intervals is None for side in sides):
            return
        kept = np.ones(len(self.inter_feat), dtype=bool)
        while any([side.find() for side in sides]):
            dropped = sides[0].wrong_events | sides[1].wrong_events
            kept[kept] = ~dropped
            for side in sides:
                side.leave_out(dropped)
        self._keep("inter", kept)
        for side, table in zip(sides, ("user", "item"), strict=True):
            if side.rows is not None:
                self._keep(table, side.kept)


@dataclass
class _Side:
    """Users or items: the events that each has, and who is left out for their number.

    Attributes:
        codes: [events left] who each is of.
        counts: [names + 1] events of each; the last, of none, are those of names without one.
        rows: [lines of the table] their names as codes, -1 without events; None without a table.
        kept: [lines of the table] bool.
        intervals: numbers that are allowed; None for any.
        wrong: [names + 1] bool, who is left out now.
    """

    codes: np.ndarray
    counts: np.ndarray
    rows: np.ndarray | None
    kept: np.ndarray
    intervals: Intervals | None
    wrong: np.ndarray

    @classmethod
    def of(cls, events: pd.Series, table: pd.Series | None, intervals: Intervals | None) -> _Side:
        """From the names of events, and those of the lines of a table."""
        names = events.cat.categories
        codes = events.cat.codes.to_numpy()
        rows = None
        if table is not None:
            rows = names.get_indexer(table.cat.categories)[table.cat.codes.to_numpy()]
        counts = np.bincount(codes, minlength=len(names) + 1)
        kept = np.ones(0 if rows is None else len(rows), dtype=bool)
        return cls(codes, counts, rows, kept, intervals, np.zeros(len(counts), dtype=bool))

    def find(self) -> bool:
        """Tell who is left out now, and whether anybody is; lines of the table are."""
        self.wrong[:] = False
        if self.intervals:
            allowed = _within(self.counts, self.intervals)
            self.wrong = (self.counts > 0) & ~allowed
        if self.rows is None:
            return bool(self.wrong.any())
        # RecBole's rule for lines of the table, whose names need not have events: the first number
        least = self.intervals[0][1] if self.intervals else -1
        few = self.kept & (self.counts[self.rows] < least)
        self.wrong[self.rows[few]] = True
        self.wrong[-1] = False
        found = bool(self.wrong.any() or few.any())
        self.kept &= ~(few | self.wrong[self.rows])
        return found

    @property
    def wrong_events(self) -> np.ndarray:
        """[events left] bool, those of who is left out."""
        return self.wrong[self.codes]

    def leave_out(self, dropped: np.ndarray) -> None:
        """Events ([events left] bool) are gone."""
        self.counts -= np.bincount(self.codes[dropped], minlength=len(self.counts))
        self.codes = self.codes[~dropped]


def _within(numbers: np.ndarray, intervals: Intervals) -> np.ndarray:
    """Whether each number lies in one of the intervals."""
    inside = np.zeros(len(numbers), dtype=bool)
    for left, low, high, right in intervals:
        above = numbers >= low if left == "[" else numbers > low
        inside |= above & (numbers <= high if right == "]" else numbers < high)
    return inside
