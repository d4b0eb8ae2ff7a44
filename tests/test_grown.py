"""Recommendations from data that have grown since training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, train, write_atomic

import recbole_pos
from recbole_pos.errors import CheckpointError

LATER = 2e9  # seconds, after all of the log


def grow(log: pd.DataFrame, shuffle: bool) -> pd.DataFrame:
    """u5 and u6 come back, two users and an item are new."""
    more = [
        ("u5", "i3", LATER),
        ("u6", "a new item", LATER),
        ("u6", "i4", LATER + 1),
        ("someone", "i7", LATER),
        ("someone", "i3", LATER + 2),
        ("no one", "a new item", LATER),
    ]
    table = pd.DataFrame(more, columns=list(log))
    if not shuffle:
        return pd.concat((log, table), ignore_index=True)
    table = pd.concat((table, log), ignore_index=True)
    return table.sort_values("item_id", kind="stable", ignore_index=True)


def by_user(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {user: table.reset_index(drop=True) for user, table in found.groupby("user_id")}


@pytest.mark.parametrize("model", ["FPARec", "SASRec", "Pop"])
def test_users_without_new_events_get_what_they_got(tmp_path, model) -> None:
    """Also if lines are in another order; of a tie that alone says which event was the later."""
    log = make_log().drop_duplicates(["user_id", "timestamp"])
    run_dir = train(write_atomic(log, tmp_path), tmp_path / "run", model)
    before = by_user(recbole_pos.recommend(run_dir, k=5))
    write_atomic(grow(log, shuffle=True), tmp_path)
    trained = recbole_pos.Recommender.load(run_dir)
    assert vars(trained.growth) == {"users": 2, "events": 4, "items": 1, "skipped": 2}
    after = by_user(recbole_pos.recommend(run_dir, k=5))
    assert set(after) == {*before, "someone", "no one"}
    assert set(after["no one"]["by"]) == {"popularity"}, "whose events the model does not know"
    for user in set(before) - {"u5", "u6"}:
        pd.testing.assert_frame_equal(before[user], after[user], rtol=1e-5)
    if model == "Pop":
        assert set(after["someone"]["by"]) == {"model"}
        return
    histories = [{"id": "someone", "items": ["i7", "i3"], "times": [LATER, LATER + 2]}]
    for user, item in (("u5", "i3"), ("u6", "i4")):
        own = log[log["user_id"] == user].sort_values("timestamp", kind="stable")
        times = [*own["timestamp"], LATER + 1 - (user == "u5")]
        histories.append({"id": user, "items": [*own["item_id"], item], "times": times})
    asked = by_user(trained.recommend(histories=histories, k=5).rename(columns={"id": "user_id"}))
    for user in ("someone", "u5", "u6"):
        assert after[user]["item_id"].tolist() == asked[user]["item"].tolist()
        np.testing.assert_allclose(after[user]["score"], asked[user]["score"], rtol=1e-4)


def test_filters_count_what_was_known(tmp_path) -> None:
    """i0 had too few events for the filter then; that it has enough now changes nothing."""
    log = make_log()
    rare = log["item_id"].value_counts().index[-1]
    least = int(log["item_id"].value_counts().iloc[-1]) + 1
    filters = {"item_inter_num_interval": f"[{least},inf)"}
    run_dir = train(write_atomic(log, tmp_path), tmp_path / "run", "FPARec", **filters)
    before = by_user(recbole_pos.recommend(run_dir, k=5))
    more = pd.DataFrame({"user_id": "u5", "item_id": [rare] * 5, "timestamp": LATER})
    write_atomic(pd.concat((log, more)), tmp_path)
    after = by_user(recbole_pos.recommend(run_dir, k=5))
    assert rare not in set(pd.concat(after.values())["item_id"])
    for user in before:
        pd.testing.assert_frame_equal(before[user], after[user], rtol=1e-5)


DAMAGES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "gone": lambda log: log.drop(index=3),
    "earlier": lambda log: pd.concat((log, pd.DataFrame([("u9", "i1", 1.0)], columns=list(log)))),
    "other item": lambda log: log.assign(item_id=log["item_id"].where(log.index != 3, "i_other")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_known_must_be_there(tmp_path, damage) -> None:
    log = make_log()
    run_dir = train(write_atomic(log, tmp_path), tmp_path / "run", "FPARec")
    write_atomic(DAMAGES[damage](grow(log, shuffle=False)), tmp_path)
    with pytest.raises(CheckpointError, match="have changed since"):
        recbole_pos.recommend(run_dir, k=5)


def test_attributes_may_change(tmp_path, capsys) -> None:
    """Another order of lines changes nothing; nor does a new kind; what has changed is reported."""
    log, file = make_log(), tmp_path / "tiny" / "tiny.item"
    kinds = {item: f"k{number % 3}" for number, item in enumerate(log["item_id"].unique())}

    def write_items(kinds: dict[str, str]) -> None:
        lines = [f"{item}\t{kind}" for item, kind in kinds.items()]
        file.write_text("\n".join(["item_id:token\tkind:token", *lines]) + "\n")

    write_atomic(log, tmp_path)
    write_items(kinds)
    columns = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "kind"]}
    run_dir = train(tmp_path, tmp_path / "run", "AttrFormer", load_col=columns, relations=["kind"])
    one = by_user(recbole_pos.recommend(run_dir, k=5))
    write_atomic(grow(log, shuffle=False), tmp_path)
    write_items({"a new item": "k9", **dict(sorted(kinds.items(), reverse=True))})
    two = by_user(recbole_pos.recommend(run_dir, k=5))
    for user in set(one) - {"u5", "u6"}:
        pd.testing.assert_frame_equal(one[user], two[user], rtol=1e-5)
    write_items({**kinds, next(iter(kinds)): "k9"})
    recbole_pos.serve.recommend.write_recommendations(run_dir, users=["u5"])
    assert "values of kind have changed" in capsys.readouterr().out
