"""Whole sessions split in time, and only recent ones trained on, against lists and loops."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_atomic
from hypothesis import given, settings
from hypothesis import strategies as st
from session_logs import CUT, file_phases, session_log
from test_splits_time import ITEMS, LONGEST, Event, rows_of
from test_successive import targets_of, trained_items

import recbole_pos
from recbole_pos.config.options import rule
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.events import EventLog
from recbole_pos.data.splits import PHASES
from recbole_pos.data.targets import Split, make_split
from recbole_pos.errors import UsageError
from recbole_pos.model.models import BUILTIN_GENERAL


def eval_args(value: Any, target: str = "all", cold_items: str = "keep") -> dict[str, Any]:
    fixed = {"order": "TO", "group_by": "user", "split": {"ST": value}}
    return {**fixed, "target": target, "cold_items": cold_items}


def split_of(events: list[Event], options: dict, fraction: Any = None) -> Split:
    """The split of events whose users are numbered in the order of the file, as RecBole does."""
    number = {user: n for n, user in enumerate(dict.fromkeys(e.user for e in events), start=1)}
    columns = {
        "u": torch.tensor([number[e.user] for e in events]),
        "i": torch.tensor([e.item for e in events]),
        "t": torch.tensor([e.time for e in events], dtype=torch.float64),
        "row": torch.arange(len(events)),
    }
    log = EventLog.build(columns, len(number) + 1, "u", "i", "t")
    names = np.array(["", *(f"name{user}" for user in number)])
    return make_split(log, options, names, ITEMS, fraction)


def phases_of(events: list[Event], value: Any, fraction: Any) -> dict[int, str] | None:
    """The phase of each session, old ones missing; None where a part is empty."""
    ends: dict[int, float] = {}
    for event in events:
        ends[event.user] = max(ends.get(event.user, event.time), event.time)
    order = sorted(ends, key=ends.get)  # stable, and a dict keeps the order of the file
    numbers = value if isinstance(value, list) else [value]
    bounds = [int(Decimal(str(n)) * len(order)) if isinstance(n, float) else n for n in numbers]
    names = ["train", "test"] if len(bounds) == 1 else PHASES
    cuts = [0, *bounds, len(order)]
    found = {}
    for name, low, high in zip(names, cuts, cuts[1:], strict=False):
        if low >= high:
            return None
        found.update(dict.fromkeys(order[low:high], name))
    if fraction is not None:
        kept = int(Fraction(fraction) * bounds[0])
        if not kept:
            return None
        for user in order[: bounds[0] - kept]:
            del found[user]
    return found


def brute_force(events: list[Event], phases: dict[int, str], target: str, cold_items: str):
    """{phase: rows} and counts of everything."""
    trained = {e.item for e in events if phases.get(e.user) == "train"}
    counts = defaultdict(Counter)
    rows = {phase: [] for phase in PHASES}
    for user, phase in phases.items():
        mine = [row for row in range(len(events)) if events[row].user == user]
        mine.sort(key=lambda row: (events[row].time, row))
        counts["events"][phase] += len(mine)
        left = [row for row in mine if cold_items == "keep" or events[row].item in trained]
        counts["dropped"][phase] += len(mine) - len(left)
        counts["without_history"][phase] += bool(left)
        found = [(tuple(left[max(0, n - LONGEST) : n]), left[n]) for n in range(1, len(left))]
        if phase != "train":
            found = {"all": found, "first": found[:1], "last": found[-1:]}[target]
        rows[phase] += found
        counts["targets"][phase] += len(found)
        counts["cold_targets"][phase] += sum(events[r].item not in trained for _, r in found)
    return {phase: sorted(found) for phase, found in rows.items()}, counts


logs = st.lists(
    st.builds(Event, st.integers(1, 8), st.integers(1, ITEMS - 1), st.integers(0, 6).map(float)),
    min_size=1,
    max_size=40,
)
whole = st.integers(1, 7)
shares = st.one_of(st.floats(0.01, 0.99), st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]))
cuts = st.one_of(
    whole,
    shares,
    *(st.lists(x, min_size=1, max_size=2, unique=True).map(sorted) for x in (whole, shares)),
)
fractions = st.sampled_from([None, None, "1/2", "1/3", "2/3", "1"])
modes = st.sampled_from([mode for mode in rule("eval_args.target").choices if mode != "random"])


@settings(max_examples=400)
@given(
    events=logs,
    cut=cuts,
    fraction=fractions,
    target=modes,
    cold=st.sampled_from(rule("eval_args.cold_items").choices),
)
def test_session_split_against_brute_force(events, cut, fraction, target, cold) -> None:
    phases = phases_of(events, cut, fraction)
    options = eval_args(cut, target, cold)
    if phases is None:
        with pytest.raises(UsageError, match="leaves none for|is less than one"):
            split_of(events, options, fraction)
        return
    split = split_of(events, options, fraction)
    rows, counts = brute_force(events, phases, target, cold)
    assert rows_of(split) == rows
    for key in ("events", "dropped", "without_history", "targets", "cold_targets"):
        assert split.summary[key] == {phase: counts[key][phase] for phase in PHASES}, key
    sessions = split.summary["sessions"]
    assert {p: sessions[p] for p in PHASES} == {p: list(phases.values()).count(p) for p in PHASES}
    assert sessions["left_out"] == len({e.user for e in events}) - len(phases)
    begins: dict[int, float] = {}
    for event in events:
        begins[event.user] = min(begins.get(event.user, event.time), event.time)
    newest = max(e.time for e in events if phases.get(e.user) == "train")
    held_out = [user for user, phase in phases.items() if phase != "train"]
    assert sessions["overlapping"] == sum(begins[user] < newest for user in held_out)
    # no event of training is later than the end of a held-out session
    assert split.summary["boundaries"][0] == newest
    assert all(max(e.time for e in events if e.user == user) >= newest for user in held_out)


@given(events=logs, cut=cuts, cold=st.sampled_from(rule("eval_args.cold_items").choices))
def test_random_targets_are_one_of_each_held_out_session(events, cut, cold) -> None:
    if phases_of(events, cut, None) is None:
        return
    every = rows_of(split_of(events, eval_args(cut, "all", cold)))
    some = rows_of(split_of(events, eval_args(cut, "random", cold)))
    assert some["train"] == every["train"]
    for phase in PHASES[1:]:
        assert set(some[phase]) <= set(every[phase])
        users = [events[row].user for _, row in some[phase]]
        assert sorted(users) == sorted({events[row].user for _, row in every[phase]})


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_atomic(session_log(), tmp_path_factory.mktemp("sessions")))


def test_all_models_have_the_same_targets(experiment, sessions: str) -> None:
    """In every session from its second event on, read from a file whose lines are shuffled."""
    frame = session_log()
    phases = file_phases(frame)
    want: dict[str, list[tuple]] = {"valid": [], "test": []}
    for session, group in frame.sort_values("timestamp", kind="stable").groupby("user_id"):
        if phases[session] != "train":
            rows = zip(group.item_id, group.timestamp, strict=True)
            want[phases[session]] += [(session, *row) for row in list(rows)[1:]]
    for model in ("PosSASRec", "SPop", "SessionKNN", "SRGNN", "FPMC", *BUILTIN_GENERAL):
        made = experiment(model, data_path=sessions, **CUT)
        found = targets_of(made)
        assert found == {phase: sorted(rows) for phase, rows in want.items()}, model


@pytest.mark.parametrize("fraction", [None, "1/2"])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("PosSASRec", {}),
        ("PosSASRec", {"train_windows": "sliding", "MAX_ITEM_LIST_LENGTH": 4}),
        ("PosSASRec", {"augmentation": "prefix"}),
        ("SRGNN", {}),
        ("SPop", {}),
        ("Pop", {"train_neg_sample_args": None}),
        ("BPR", {"train_neg_sample_args": {"distribution": "popularity", "sample_num": 1}}),
        ("ItemKNN", {"train_neg_sample_args": None}),
    ],
    ids=str,
)
def test_training_sees_no_held_out_session(
    experiment, tmp_path: Path, model: str, options: dict, fraction: str | None
) -> None:
    frame = session_log()
    phases = file_phases(frame)
    order = [session for session, phase in phases.items() if phase == "train"]
    kept = set(order[len(order) // 2 :] if fraction else order)
    early = frame.user_id.isin(kept)
    frame["item_id"] = np.where(early, "e", "l") + frame.item_id.str[1:]
    made = experiment(
        model,
        data_path=str(write_atomic(frame, tmp_path)),
        train_fraction=fraction,
        **CUT,
        **options,
    )
    assert trained_items(made) == set(frame.item_id[early])
    # every prefix is a target once, by windows and by rows
    want = int(early.sum()) - (0 if model in BUILTIN_GENERAL else len(kept))
    if made.config["augmentation"] == "all_positions":
        assert made.trainer.training_loader(made.loaders["train"]).targets == want
    if made.config["augmentation"] != "none":
        assert len(made.loaders["train"]._dataset) == want


@pytest.mark.parametrize("model", ["PosSASRec", "SRGNN", "SPop"])
def test_histories_never_cross_sessions(experiment, tmp_path: Path, model: str) -> None:
    path = str(write_atomic(session_log(own_items=True), tmp_path))
    made = experiment(model, data_path=path, **CUT)
    users, items = (made.dataset.field2id_token[name] for name in ("user_id", "item_id"))
    seen = 0
    for part in (loader._dataset for loader in made.loaders.values()):
        rows = part[np.arange(len(part))]
        for user, history, length, item in zip(
            *(rows[f] for f in ("user_id", "item_id_list", "item_length", "item_id")), strict=True
        ):
            names = [*items[history[:length].numpy()], items[item]]
            assert {name.split("_")[0] for name in names} == {users[user]}
            seen += 1
    assert seen > 100
    if model == "PosSASRec":
        for batch in made.trainer.training_loader(made.loaders["train"]):
            owner, of_target = (
                [items[item].split("_")[0] for item in column]
                for column in (batch.items, batch.targets)
            )
            assert owner == of_target and batch.positions is None
            window = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
            assert len({*zip(owner, window, strict=True)}) == len(batch.lengths)


def test_the_result_says_what_was_split(sessions: str, tmp_path: Path, capsys) -> None:
    options = {"data_path": sessions, "epochs": 1, "train_fraction": "1/4", **CUT}
    result = recbole_pos.run("PosSASRec", "tiny", None, options, run_dir=tmp_path / "run")
    split = json.loads((tmp_path / "run" / "result.json").read_text())["split"]
    assert split == result.split and split["split"] == {"ST": [80, 100]}
    assert {k: split["sessions"][k] for k in (*PHASES, "left_out")} == {
        **{"train": 20, "valid": 20, "test": 20, "left_out": 60}
    }
    assert split["targets"]["test"] == result.test_targets
    shown = capsys.readouterr().out
    assert "of 20 sessions (60 older ones left out)" in shown
    again = recbole_pos.load(tmp_path / "run")  # from its config.yaml
    assert again.dataset.split.summary == split


def test_the_yaml_in_the_guide(tmp_path: Path) -> None:
    """As it stands, and with each of its commented lines instead."""
    guide = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```yaml\n(.*?)```", guide, re.S) if "session_id" in b)
    seen = []
    for line in re.findall(r"# (split: .*?})|# (train_fraction: \S+)", block):
        changed = re.sub(r"  # split.*\n", "", block)
        if line[0]:
            changed = re.sub(r"  split: .*", f"  {line[0]}", changed)
        else:
            changed = changed.replace("# train_fraction", "train_fraction")
        file = tmp_path / "shop.yaml"
        file.write_text(changed)
        config = PosConfig("SPop", "ml-100k", [str(file)])
        seen.append((config["eval_args"]["split"]["ST"], config["train_fraction"]))
    assert seen == [(0.9, None), (186670, None), ([176670, 186670], None), ([0.9, 0.95], "1/64")]
