"""Filters and ids on codes of names, against RecBole's own on the names themselves."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recbole.data.dataset import Dataset

from recbole_pos.data.loading import AtomicTables, number_names

INTERVALS = ["[0,inf)", "[2,inf)", "(1,4]", "[3,5);[1,1]", None]


class RecBoleTables(Dataset):
    """RecBole's filters over tables at hand."""

    uid_field, iid_field, time_field = "user", "item", "time"
    logger = logging.getLogger()

    def __init__(self, config: dict[str, Any], **tables: pd.DataFrame | None) -> None:
        self.config, self.told = config, []
        self.inter_feat, self.user_feat, self.item_feat = (
            None if tables[name] is None else tables[name].copy()
            for name in ("inter", "user", "item")
        )

    def lines(self) -> list[list[int] | None]:
        """The lines that are left of each table."""
        feats = (self.inter_feat, self.user_feat, self.item_feat)
        return [None if feat is None else list(feat.index) for feat in feats]


class Ours(AtomicTables, RecBoleTables):
    """The plugin's, over the same."""

    def __init__(self, config: dict[str, Any], **tables: pd.DataFrame | None) -> None:
        made = {name: None if t is None else coded(t) for name, t in tables.items()}
        super().__init__(config, **made)


def coded(table: pd.DataFrame) -> pd.DataFrame:
    return table.astype(dict.fromkeys(set(table) - {"time"}, "category"))


def events(pairs: list[tuple[int, int, int]]) -> pd.DataFrame:
    columns = zip(*pairs, strict=True)
    user, item, time = (np.array(column) for column in columns)
    names = {"user": [f"u{u}" for u in user], "item": [f"i{i}" for i in item]}
    return pd.DataFrame({**names, "time": time.astype(float)})


def table(name: str, start: str, ids: list[int] | None) -> pd.DataFrame | None:
    return None if ids is None else pd.DataFrame({name: [f"{start}{i}" for i in ids]}, dtype=object)


logs = st.lists(st.tuples(*[st.integers(0, 6)] * 2, st.integers(0, 3)), min_size=1, max_size=50)
ids = st.none() | st.lists(st.integers(0, 8), unique=True, max_size=8)


def both(config: dict[str, Any], log: list, users: Any, items: Any) -> tuple[Ours, RecBoleTables]:
    made = {
        "inter": events(log),
        "user": table("user", "u", users),
        "item": table("item", "i", items),
    }
    return Ours(config, **made), RecBoleTables(config, **made)


@settings(max_examples=150, deadline=None)
@given(logs, ids, ids, st.sampled_from(INTERVALS), st.sampled_from(INTERVALS), st.booleans())
def test_counts_of_events_as_recbole(
    log: list, users: Any, items: Any, of_users: str | None, of_items: str | None, known: bool
) -> None:
    config = {
        "user_inter_num_interval": of_users,
        "item_inter_num_interval": of_items,
        "filter_inter_by_user_or_item": known,
        "session_filter": None,
    }
    ours, peer = both(config, log, users, items)
    for one in (ours, peer):
        one._filter_inter_by_user_or_item()
        one._filter_by_inter_num()
    assert ours.lines() == peer.lines()


@settings(deadline=None)
@given(logs, st.sampled_from(["first", "last"]))
def test_an_item_once_a_user(log: list, keep: str) -> None:
    """The oldest or newest event of each pair; of events at one time, by their lines."""
    ours, _ = both({"rm_dup_inter": keep, "rm_copies": False}, log, None, None)
    ours._remove_duplication()
    best: dict[tuple[int, int], tuple[int, int]] = {}
    for line, (user, item, time) in enumerate(log):
        old = best.get((user, item))
        newer = old is None or ((time, line) < old if keep == "first" else (time, line) > old)
        best[user, item] = (time, line) if newer else old
    assert ours.lines()[0] == sorted(line for _, line in best.values())


def test_lines_without_a_user_or_an_item(caplog: pytest.LogCaptureFixture) -> None:
    """Both kinds in one file: exactly these go. RecBole, counting what is left after the first
    kind, drops other lines of the second."""
    log = events([(n % 3, n % 4, n) for n in range(12)])
    log.loc[[2, 5], "user"] = np.nan
    log.loc[[4, 9], "item"] = np.nan
    ours = Ours({}, inter=log, user=None, item=None)
    ours._filter_nan_user_or_item()
    assert ours.lines()[0] == [0, 1, 3, 6, 7, 8, 10, 11]
    assert [record.getMessage() for record in caplog.records] == [
        "In inter_feat, line [4, 7], user do not exist, so they will be removed.",
        "In inter_feat, line [6, 11], item do not exist, so they will be removed.",
    ]


cells = st.lists(st.sampled_from(["a", "b", "c", "dd", None]), min_size=1, max_size=12)


@settings(deadline=None)
@given(cells, cells, st.lists(st.lists(st.sampled_from("abxy"), max_size=3), min_size=1))
def test_ids_by_first_appearance(one: list, other: list, lists: list[list[str]]) -> None:
    """Across columns that share ids, whatever order their categories have."""
    ids: dict[str | None, int] = {None: 0}
    want = [[ids.setdefault(cell, len(ids)) for cell in column] for column in (one, other)]
    wanted_lists = [[ids.setdefault(cell, len(ids)) for cell in cells] for cells in lists]
    columns = [
        pd.Series(pd.Categorical(one, categories=["dd", "c", "b", "a"])),
        pd.Series(other, dtype=object),
        pd.Series([np.array(cells) for cells in lists], dtype=object),
    ]
    names, (first, second, third) = number_names(columns)
    assert names.tolist() == ["[PAD]", *list(ids)[1:]]
    assert [first.tolist(), second.tolist()] == want
    assert [cells.tolist() for cells in third] == wanted_lists
    assert first.dtype == np.int64
