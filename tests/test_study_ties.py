"""What the order of events at one time decides, and targets in bins."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from recbole_pos.errors import UsageError
from recbole_pos.study.bins import all_masks, labels, masks
from recbole_pos.study.plan import Ties
from recbole_pos.study.ties import count_ties, dropped_users


def _by_hand(user: np.ndarray, time: np.ndarray, item: np.ndarray) -> tuple[int, int, int, float]:
    """Every order that keeps the times, tried."""
    users, test, valid, expected = 0, 0, 0, 0.0
    for one in np.unique(user):
        mine = np.flatnonzero(user == one)
        if len(mine) < 3:
            continue
        kept = mine[np.argsort(time[mine], kind="stable")]
        orders = [
            order
            for order in itertools.permutations(mine)
            if (np.diff(time[list(order)]) >= 0).all()
        ]
        users += 1
        test += len({item[order[-1]] for order in orders}) > 1
        valid += len({item[order[-2]] for order in orders}) > 1
        expected += np.mean([item[order[-1]] != item[kept[-1]] for order in orders])
    return users, test, valid, expected


def test_ties_are_those_of_every_order_tried():
    rng = np.random.default_rng(0)
    for _ in range(30):
        user, time, item = (rng.integers(high, size=30) for high in (8, 4, 4))
        keep = pd.Series(user).groupby(user).cumcount().to_numpy() < 6
        user, time, item = user[keep], time[keep], item[keep]
        found = count_ties(user, time, item)
        users, test, valid, expected = _by_hand(user, time, item)
        assert (found.users, found.test, found.valid) == (users, test, valid)
        assert found.expected == pytest.approx(expected)
        many = pd.Series(user).groupby(user).transform("size").to_numpy() >= 3
        assert len(dropped_users(user[many], time[many], item[many])) == test


def test_ties_are_said_in_a_sentence():
    user, time = np.repeat([1, 2], 3), np.array([1, 2, 2, 1, 2, 3])
    item = np.array([5, 6, 7, 5, 6, 7])
    found = count_ties(user, time, item)
    assert found.sentence("shop") == (
        "On shop, 1 of 2 test items (50%) would be others if events at one time stood in another "
        "order; here they stand in the order of the file."
    )
    assert "their order is random, seed 7" in found.sentence("shop", Ties("random", 7))
    assert "left out" in found.sentence("shop", Ties("drop"))
    assert count_ties(user, np.arange(6), item).sentence("shop") == (
        "Test items of shop do not depend on the order of events at one time."
    )
    assert count_ties(user[:2], time[:2], item[:2]).users == 0


def test_bins_are_named_by_what_is_in_them():
    assert labels("history", [5, 15]) == ["history up to 5", "history 6 to 15", "history over 15"]
    assert labels("popularity", [1, 2])[1] == "popularity 2"
    assert labels("age", [3600, 86400, 7 * 86400]) == [
        "age up to 1 hour",
        "age 1 hour to 1 day",
        "age 1 day to 7 days",
        "age over 7 days",
    ]


def test_every_target_is_in_one_bin_of_each_kind():
    targets = pd.DataFrame({"history": [1, 5, 6, 15, 16, 99], "popularity": [0, 1, 2, 3, 0, 9]})
    found = all_masks(targets, {"history": [5, 15], "popularity": [2], "cold": True})
    for bins in found.values():
        assert (np.stack(list(bins.values())).sum(0) == 1).all()
    assert found["history"]["history 6 to 15"].tolist() == [False, False, True, True, False, False]
    assert found["cold"]["cold items"].sum() == 2
    with pytest.raises(UsageError, match="no column age, so there are no bins by age; found hist"):
        masks(targets, "age", [5])
