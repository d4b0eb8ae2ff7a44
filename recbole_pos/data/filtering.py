"""RecBole's filters of interactions, users and items, on codes of names instead of the names."""

from __future__ import annotations

import numpy as np

from recbole_pos.data.loading import AtomicTables
from recbole_pos.data.splits import filter_sessions, read_session_filter
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

# What RecBole makes of an option such as "[5,inf);(0,2]": bracket, low, high, bracket.
Intervals = list[tuple[str, float, float, str]]


class FilteredTables(AtomicTables):
    """Tables that leave out lines by RecBole's options and ``session_filter``.

    Each filter keeps the same lines as RecBole's, in their order in the file.
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
            scratch = self.scratch if table == "inter" else None
            kept = scratch.keep(feat, mask) if scratch else feat.take(np.flatnonzero(mask))
            setattr(self, f"{table}_feat", kept)

    def _filter_nan_user_or_item(self) -> None:
        """Leave out lines without a user or item, with RecBole's warning."""
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
        """Leave out exact copies (``rm_copies``) and repeated pairs (RecBole's ``rm_dup_inter``).

        RecBole may reorder interactions with equal times; here they keep their order.
        """
        if self.config["rm_copies"]:
            copies = self.inter_feat.duplicated([self.uid_field, self.iid_field, self.time_field])
            self._keep("inter", ~copies.to_numpy())
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
        """Apply ``session_filter``, then RecBole's intervals of numbers of interactions.

        Names get their ids later, so that dropped ones get none.
        """
        least, before = read_session_filter(self.config["session_filter"]), self.inter_feat
        if max(least) > 1:
            self.inter_feat = filter_sessions(before, self.uid_field, self.iid_field, least)
            for table, field in (("user", self.uid_field), ("item", self.iid_field)):
                feat = getattr(self, f"{table}_feat")
                if feat is not None:
                    remaining = self.inter_feat[field].unique()
                    dropped = before[field].unique()
                    dropped = dropped[~dropped.isin(remaining)]
                    self._keep(table, ~feat[field].isin(dropped).to_numpy())
        self._filter_by_count()

    def _filter_by_count(self) -> None:
        """Leave out users and items with too few or too many interactions.

        Each round lowers the counts of the others, so it repeats until nothing is left out.
        """
        tables, fields = ("user", "item"), (self.uid_field, self.iid_field)
        intervals, rows = [], []
        for table, field in zip(tables, fields, strict=True):
            allowed = self._parse_intervals_str(self.config[f"{table}_inter_num_interval"])
            if allowed and len(allowed) > 1:
                self.logger.warning("More than one interval of interaction number are given!")
            intervals.append(allowed)
            lines = np.empty(0, dtype=np.int64)  # codes of the table's names, -1 without events
            if (feat := getattr(self, f"{table}_feat")) is not None:
                names = feat[field].cat
                places = self.inter_feat[field].cat.categories.get_indexer(names.categories)
                lines = places[names.codes.to_numpy()]
            rows.append(lines)
        if intervals == [None, None]:
            return
        codes = [self.inter_feat[field].cat.codes.to_numpy() for field in fields]
        kept = np.ones(len(self.inter_feat), dtype=bool)
        stays = [np.ones(len(lines), dtype=bool) for lines in rows]
        has_changed = True
        while has_changed:
            has_changed, dropped = False, np.zeros(len(codes[0]), dtype=bool)
            for side, allowed in enumerate(intervals):
                names = self.inter_feat[fields[side]].cat.categories
                counts = np.bincount(codes[side], minlength=len(names) + 1)  # last: for code -1
                wrong = (counts > 0) & ~_within(counts, allowed)
                # RecBole applies the lower bound also to names of the table without interactions
                least = allowed[0][1] if allowed else -1
                few = stays[side] & (counts[rows[side]] < least)
                wrong[rows[side][few]] = True
                wrong[-1] = False
                has_changed |= bool(wrong.any() or few.any())
                stays[side] &= ~(few | wrong[rows[side]])
                dropped |= wrong[codes[side]]
            kept[kept] = ~dropped
            codes = [column[~dropped] for column in codes]
        self._keep("inter", kept)
        for table, mask in zip(tables, stays, strict=True):
            self._keep(table, mask)


def _within(numbers: np.ndarray, intervals: Intervals | None) -> np.ndarray:
    """Return [n] bool: whether each number lies in an interval; all do if there is none."""
    if not intervals:
        return np.ones(len(numbers), dtype=bool)
    inside = np.zeros(len(numbers), dtype=bool)
    for left, low, high, right in intervals:
        above = numbers >= low if left == "[" else numbers > low
        inside |= above & (numbers <= high if right == "]" else numbers < high)
    return inside
