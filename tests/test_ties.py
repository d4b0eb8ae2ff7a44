"""The order of equal times: as in the file, another one, or nothing that depends on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, write_atomic

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.targets import read_ties
from recbole_pos.errors import UsageError


def made(folder: Path, ties: str, model: str = "FPARec", **more: object) -> object:
    eval_args = {"ties": ties, **more}
    config = PosConfig(model, "tiny", None, {"data_path": str(folder), "eval_args": eval_args})
    dataset = (PosDataset if model == "Pop" else PosSequentialDataset)(config)
    dataset.build()
    return dataset


def events(dataset: object) -> pd.DataFrame:
    log, tokens = dataset.log, dataset.field2id_token
    return pd.DataFrame(
        {
            "user": tokens["user_id"][log.users.numpy()],
            "item": tokens["item_id"][log.items.numpy()],
            "time": log.times.numpy(),
            "part": dataset.part,
            "target": dataset.split.is_target,
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = make_log(seed=1, users=80)
    log["timestamp"] = log["timestamp"] // 25 * 25
    return write_atomic(log, tmp_path)


def test_a_random_order_moves_equal_times_alone(folder: Path) -> None:
    filed, one, again, other = (events(made(folder, t)) for t in
                                ("file", "random(1)", "random(1)", "random(2)"))  # fmt: skip
    assert one.equals(again) and not one.equals(other) and not one.equals(filed)
    for found in (one, other):
        assert found[["user", "time", "part"]].equals(filed[["user", "time", "part"]])
        keys = ["user", "time", "item"]
        same = [frame[keys].sort_values(keys, ignore_index=True) for frame in (found, filed)]
        assert same[0].equals(same[1])


@pytest.mark.parametrize("model", ["FPARec", "Pop"])
@pytest.mark.parametrize("split", [{"LS": "valid_and_test"}, {"GT": [0.6, 0.8]}])
def test_drop_leaves_out_what_hangs_on_it(folder: Path, model: str, split: dict) -> None:
    """Against a loop over events; training stays as it is."""
    filed, dropped = (made(folder, t, model, split=split) for t in ("file", "drop"))
    before, after = events(filed), events(dropped)
    assert before.drop(columns="target").equals(after.drop(columns="target"))
    for place, event in before.iterrows():
        alike = before[(before["user"] == event["user"]) & (before["time"] == event["time"])]
        hangs = event["part"] > 0 and alike["item"].nunique() > 1
        assert after["target"][place] == (event["target"] and not hangs)
    tied = dropped.split.summary["tied"]
    assert tied["test"] > 0 and tied["train"] == 0 and "tied" not in filed.split.summary
    summary = dropped.split.summary
    for phase in ("train", "valid", "test"):
        parts = ("dropped", "without_history", "not_chosen", "tied", "targets")
        assert summary["events"][phase] == sum(summary[part][phase] for part in parts)


def test_no_test_metric_changes_without_ties(folder: Path, tmp_path: Path) -> None:
    log = make_log(seed=1)
    log["timestamp"] = np.arange(len(log))
    (tmp_path / "other").mkdir()
    data = write_atomic(log, tmp_path / "other")
    found = [events(made(data, ties)) for ties in ("file", "random(4)", "drop")]
    assert found[0].equals(found[1]) and found[0].equals(found[2])


@pytest.mark.parametrize("wrong", ["fil", "random", "random(-1)", 7, None, "random(1)(2)"])
def test_wrong_values(folder: Path, wrong: object) -> None:
    with pytest.raises(UsageError, match="ties"):
        made(folder, wrong)
    with pytest.raises(UsageError, match="random\\(SEED\\)"):
        read_ties(wrong)
