"""A small log of sessions, split by hand; what is no session, and no fraction of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import write_atomic

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosSequentialDataset
from recbole_pos.data.events import EventLog
from recbole_pos.data.sessions import read_fraction, session_time
from recbole_pos.data.splits import PHASES
from recbole_pos.data.targets import describe
from recbole_pos.errors import UsageError

# session, item, time, in the order of the file; session d is the last to begin in the file, and
# ends with c; e has one event
SMALL = [
    *[("a", "x", 1), ("a", "y", 2), ("a", "x", 3)],
    *[("c", "y", 4), ("b", "z", 3), ("b", "x", 5), ("b", "z", 5)],
    *[("e", "x", 6), ("c", "w", 9), ("c", "x", 9), ("d", "z", 8), ("d", "y", 9)],
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    frame = pd.DataFrame(SMALL, columns=["user_id", "item_id", "timestamp"])
    return str(write_atomic(frame, tmp_path_factory.mktemp("small")))


def small_split(small: str, value: Any, **options: Any) -> PosSequentialDataset:
    given = {"data_path": small, "eval_args": {"split": {"ST": value}}, **options}
    dataset = PosSequentialDataset(PosConfig("SASRec", "tiny", None, given))
    dataset.parts = dataset.build()
    return dataset


def named_rows(dataset: PosSequentialDataset, phase: str) -> list[str]:
    """Rows such as ``xy>x``."""
    tokens = dataset.field2id_token["item_id"]
    part = dataset.parts[PHASES.index(phase)]
    rows = part[np.arange(len(part))]
    return [
        "".join(tokens[history[:length]]) + ">" + tokens[item]
        for history, length, item in zip(
            rows["item_id_list"].numpy(), rows["item_length"], rows["item_id"], strict=True
        )
    ]


def test_a_small_log_by_hand(small: str) -> None:
    """Ends: a 3, b 5, e 6, c and d 9, where c begins earlier in the file."""
    made = small_split(small, [3, 4])
    assert named_rows(made, "train") == ["x>y", "xy>x", "z>x", "zx>z"]
    assert named_rows(made, "valid") == ["y>w", "yw>x"]
    assert named_rows(made, "test") == ["z>y"]
    summary = made.split.summary
    assert summary["sessions"] == {"train": 3, "valid": 1, "test": 1, "left_out": 0} | {
        "overlapping": 1  # c begins at 4, before the last training event
    }
    assert summary["events"] == {"train": 7, "valid": 3, "test": 2}
    assert summary["boundaries"] == [6.0, 9.0]
    assert summary["items_without_training"] == 1 and summary["cold_targets"]["valid"] == 1
    assert describe(summary) == (
        "split ST at time 6 and 9: train 7 events of 3 sessions; valid 2 targets of 3 events of "
        "1 session (1 without history, 1 with a cold item); test 1 targets of 2 events of 1 "
        "session (1 without history)"
    )
    assert named_rows(small_split(small, [0.6, 0.8]), "test") == ["z>y"]
    assert small_split(small, 0.6).split.summary["sessions"]["test"] == 2
    assert named_rows(small_split(small, 4), "test") == ["z>y"]


def test_recent_training_sessions_by_hand(small: str) -> None:
    made = small_split(small, 3, train_fraction="2/3")
    assert named_rows(made, "train") == ["z>x", "zx>z"]
    assert named_rows(made, "test") == ["y>w", "yw>x", "z>y"]
    summary = made.split.summary
    assert summary["sessions"]["left_out"] == 1 and summary["sessions"]["train"] == 2
    assert summary["items_without_training"] == 2  # y was in session a, left out
    assert summary["cold_targets"]["test"] == 2
    assert made.item_num == 5 and len(made.log) == len(SMALL) - 3
    assert "train 4 events of 2 sessions (1 older ones left out)" in describe(summary)
    dropped = {"data_path": small, "eval_args": {"split": {"ST": 3}, "cold_items": "drop"}}
    made = small_split(small, 3, train_fraction=0.67, **{"eval_args": dropped["eval_args"]})
    assert named_rows(made, "test") == []  # w and y go: x and z are left alone in their sessions
    assert made.split.summary["dropped"]["test"] == 3


def test_a_session_of_one_event_is_no_row_unless_filtered(small: str) -> None:
    with_one = small_split(small, [3, 4])
    without = small_split(small, [2, 3], user_inter_num_interval="[2,inf)")
    for phase in PHASES:
        assert named_rows(with_one, phase) == named_rows(without, phase)
    assert without.split.summary["events"]["train"] == 6


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((v, "split.ST: expected fractions") for v in ([], [2, 1], [2, 2], [1, 2, 3], 0, -1, 1.0)),
        *((v, "split.ST: expected") for v in (True, "2", None, [0.5, 3], {"train": 2})),
        (math.nan, "split.ST must be finite"),
        (5, "5 of 5 sessions leaves none for test"),
        ([2, 7], "leaves none for test"),
        (0.1, "leaves none for training"),
        ([0.6, 0.7], "leaves none for validation"),
    ],
    ids=str,
)
def test_wrong_sessions(small: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small_split(small, value)


@pytest.mark.parametrize("value", [0, "x", "1/0", -0.5, 1.5, "3/2", True, [1]], ids=str)
def test_wrong_fractions(small: str, value: Any) -> None:
    with pytest.raises(UsageError, match="train_fraction: expected a number above 0"):
        small_split(small, 3, train_fraction=value)


def test_fractions_are_exact() -> None:
    assert read_fraction("1/64") == read_fraction(0.015625) == read_fraction(" 1/64 ")
    assert read_fraction(0.3) * 10 == 3 and read_fraction(1) == 1
    session = torch.arange(1, 101)
    columns = {"u": session, "i": session, "t": session.double()}
    log = EventLog.build(columns, 101, "u", "i", "t")
    part = session_time(log, [0.29, 0.57])[0]  # 0.29 * 100 is 28.999999999999996 in floats
    assert part.tolist() == [0] * 29 + [1] * 28 + [2] * 43


def test_a_fraction_of_what_has_no_sessions(small: str) -> None:
    with pytest.raises(UsageError, match="needs eval_args.split: {ST: ...}; the split is LS"):
        small_split(small, 3, train_fraction="1/2", eval_args={"split": {"LS": "test_only"}})
    with pytest.raises(UsageError, match="1/4 of 3 training sessions is less than one"):
        small_split(small, 3, train_fraction="1/4")
