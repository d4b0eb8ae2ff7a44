"""Splits in time, by interaction and by session, through datasets, loaders, models and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, write_atomic
from recbole.data.dataloader import FullSortEvalDataLoader
from recbole.data.utils import create_samplers
from session_logs import CUT, file_phases, session_log

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.loaders import BatchRequirements, make_training_loader
from recbole_pos.errors import UsageError
from recbole_pos.model.models import BUILTIN_GENERAL

NUMBERS = [0.7, 0.85]
GT = {"split": {"GT": NUMBERS}}
ALONE = {"train_neg_sample_args": None}  # uniform negatives are of the whole catalogue
POPULAR = {"train_neg_sample_args": {"distribution": "popularity", "sample_num": 1}}


def late_log() -> pd.DataFrame:
    """Ties, users that appear in validation or test only, and one event users there."""
    frame = make_log(seed=3, users=50)
    late = [("v", 150, 6), ("w", 165, 8), ("t", 185, 5), ("one", 199, 1)]
    rows = [
        (user, f"i{(start + place) % 40}", 1.5e9 + min(start + 3 * place, 199))
        for user, start, count in late
        for place in range(count)
    ]
    return pd.concat([frame, pd.DataFrame(rows, columns=frame.columns)], ignore_index=True)


def edges(frame: pd.DataFrame) -> list[float]:
    return np.quantile(frame.timestamp.to_numpy(), NUMBERS).tolist()


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> str:
    """data_path of the late log; it has what the tests are about."""
    frame = late_log()
    first, last = edges(frame)
    begins = frame.groupby("user_id").timestamp.min()
    assert begins["v"] > first and begins["v"] <= last < begins["t"] and begins["w"] > first
    return str(write_atomic(frame, tmp_path_factory.mktemp("late")))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_atomic(session_log(), tmp_path_factory.mktemp("sessions")))


def brute_force(target: str, cold_items: str) -> dict[str, list[tuple]]:
    """(user, item, time, past items) of each held-out target of the late log."""
    frame = late_log()
    first, last = edges(frame)
    trained = set(frame.item_id[frame.timestamp <= first])
    found: dict[str, list[tuple]] = {"valid": [], "test": []}
    for user, group in frame.sort_values("timestamp", kind="stable").groupby("user_id"):
        past: list[str] = []
        mine: dict[str, list[tuple]] = {"valid": [], "test": []}
        for item, time in zip(group.item_id, group.timestamp, strict=True):
            if cold_items == "drop" and item not in trained:
                continue
            if time > first and past:
                mine["valid" if time <= last else "test"].append((user, item, time, tuple(past)))
            past.append(item)
        for phase, rows in mine.items():
            found[phase] += {"all": rows, "last": rows[-1:], "first": rows[:1]}[target]
    return {phase: sorted(rows) for phase, rows in found.items()}


def targets_of(made: Any) -> dict[str, list[tuple]]:
    """(user, item, time) of the rows that a model is tested on, from its loaders."""
    users, items = (made.dataset.field2id_token[name] for name in ("user_id", "item_id"))
    found = {}
    for phase in ("valid", "test"):
        found[phase] = []
        for interaction, _, row, item in made.loaders[phase]:
            assert row.tolist() == list(range(len(interaction)))
            assert torch.equal(item, interaction["item_id"])
            names = users[interaction["user_id"].numpy()], items[item.numpy()]
            found[phase] += zip(*names, interaction["timestamp"].tolist(), strict=True)
        found[phase].sort()
    return found


@pytest.mark.parametrize(
    ("target", "cold_items"), [("all", "keep"), ("last", "drop"), ("first", "keep")]
)
def test_all_models_have_the_same_targets(experiment, late, target, cold_items) -> None:
    options = {**GT, "target": target, "cold_items": cold_items}
    rows = brute_force(target, cold_items)
    want = {phase: [row[:3] for row in found] for phase, found in rows.items()}
    users = {user for user, *_ in want["test"]}
    assert {"t", "w"} <= users and "one" not in users
    for model in ("FPARec", "SASRec", "Pop", "ItemKNN"):
        made = experiment(model, data_path=late, eval_args=options)
        assert targets_of(made) == want, model
        assert made.dataset.split.summary["targets"]["test"] == len(want["test"])


def test_all_models_have_the_same_targets_of_sessions(experiment, sessions: str) -> None:
    """In every session from its second event on, read from a file whose lines are shuffled."""
    frame = session_log()
    phases = file_phases(frame)
    want: dict[str, list[tuple]] = {"valid": [], "test": []}
    for session, group in frame.sort_values("timestamp", kind="stable").groupby("user_id"):
        if phases[session] != "train":
            rows = zip(group.item_id, group.timestamp, strict=True)
            want[phases[session]] += [(session, *row) for row in list(rows)[1:]]
    for model in ("PosSASRec", "SPop", "SRGNN", "BPR"):
        made = experiment(model, data_path=sessions, **CUT)
        assert targets_of(made) == {phase: sorted(rows) for phase, rows in want.items()}, model


@pytest.mark.parametrize("split", [{"GT": NUMBERS}, {"RS": [6, 2, 2]}])
def test_random_targets_are_the_same_for_models_and_seeds(experiment, late, split) -> None:
    options = {"split": split, "target": "random"}
    want = targets_of(experiment("FPARec", data_path=late, eval_args=options))
    for model, seed in (("FPARec", 5), ("BPR", 7)):
        assert targets_of(experiment(model, data_path=late, eval_args=options, seed=seed)) == want
    # other fields and another order of the users change nothing
    other = {"load_col": {"inter": ["timestamp", "item_id", "user_id"]}}
    assert targets_of(experiment("Pop", data_path=late, eval_args=options, **other)) == want


@pytest.mark.parametrize("model", ["SASRec", "Pop"])
def test_histories_hold_everything_before_the_target(experiment, late, model: str) -> None:
    """Held-out events included; and mask_history leaves out exactly these items."""
    want = {row[:3]: row[3] for found in brute_force("all", "keep").values() for row in found}
    made, seen = experiment(model, data_path=late, eval_args=GT), 0
    tokens, trainer = made.dataset.field2id_token, made.trainer
    trainer.tot_item_num, trainer.eval_log = made.dataset.item_num, made.dataset.log
    if model == "Pop":
        trainer.fit(made.loaders["train"], saved=False, verbose=False)
    for batch in (batch for phase in ("valid", "test") for batch in made.loaders[phase]):
        rows, scores, _, items = trainer._full_sort_batch_eval(batch)
        for row, item in enumerate(items.tolist()):
            name = tokens["item_id"][item]
            past = want[
                tokens["user_id"][rows["user_id"][row]], name, rows["timestamp"][row].item()
            ]
            hidden = torch.where(scores[row] == -torch.inf)[0].numpy()
            if model == "Pop":
                assert set(tokens["item_id"][hidden]) == {"[PAD]", *past} - {name}
            else:
                assert hidden.tolist() == [0]
                history = rows["item_id_list"][row, : rows["item_length"][row]]
                assert tuple(tokens["item_id"][history.numpy()]) == past[-12:]
            seen += 1
    assert seen == sum(map(len, brute_force("all", "keep").values()))


def trained_items(made: Any) -> set[str]:
    """Every item that any path of training shows."""
    train = made.loaders["train"]
    data = train._dataset
    tokens = made.dataset.field2id_token["item_id"]
    ids = {*data.item_counter, *data.inter_matrix("coo").col.tolist()}
    ids |= {*data.inter_feat["item_id"].tolist()}
    for batch in train:
        if hasattr(batch, "targets"):
            ids |= {*batch.targets.tolist(), *batch.items.tolist()}
        else:
            columns = [c for c in batch.columns if "item_id" in c]
            ids |= {item for column in columns for item in batch[column].unique().tolist()}
    if not train.packed and train._sampler is not None:
        ids |= {int(item) for used in train._sampler.used_ids for item in used}
        ids |= {int(item) for item in getattr(train._sampler, "prob", {})}
    return set(tokens[sorted(int(i) for i in ids - {0})])


@pytest.mark.parametrize(
    ("protocol", "model", "options"),
    [
        ("GT", "PosSASRec", {"train_windows": "sliding", "MAX_ITEM_LIST_LENGTH": 5}),
        ("ST of recent", "PosSASRec", {"train_windows": "sliding", "MAX_ITEM_LIST_LENGTH": 5}),
        ("ST", "FPARec", {"augmentation": "prefix"}),
        ("GT", "SASRec", {}),
        ("ST of recent", "FPMC", POPULAR),
        ("GT", "Pop", ALONE),
        ("ST", "Pop", ALONE),
        ("GT", "BPR", POPULAR),
    ],
    ids=str,
)
def test_training_sees_nothing_that_is_held_out(
    experiment, tmp_path: Path, protocol: str, model: str, options: dict
) -> None:
    """Neither a later item nor a session of another part; every event but the first is a target."""
    frame, given = (late_log(), {"eval_args": GT}) if protocol == "GT" else (session_log(), CUT)
    early = frame.timestamp <= edges(frame)[0] if protocol == "GT" else None
    if early is None:
        phases = file_phases(frame)
        order = [session for session, phase in phases.items() if phase == "train"]
        if protocol == "ST of recent":
            order, given = order[len(order) // 2 :], {**CUT, "train_fraction": "1/2"}
        early = frame.user_id.isin(order)
    frame["item_id"] = np.where(early, "e", "l") + frame.item_id.str[1:]
    made = experiment(model, data_path=str(write_atomic(frame, tmp_path)), **given, **options)
    assert trained_items(made) == set(frame.item_id[early])
    held_out = targets_of(made)
    assert all(
        i.startswith("l") or protocol != "GT" for rows in held_out.values() for _, i, _ in rows
    )
    firsts = 0 if model in BUILTIN_GENERAL else frame.user_id[early].nunique()
    assert (
        made.loaders["train"].targets == len(made.loaders["train"]._dataset) == early.sum() - firsts
    )
    if model == "Pop":
        made.trainer.fit(made.loaders["train"], saved=False, verbose=False)
        counted = np.flatnonzero(made.model.item_cnt[:, 0].numpy())
        assert all(t[0] == "e" for t in made.dataset.field2id_token["item_id"][counted])


def test_histories_never_cross_sessions(experiment, tmp_path: Path) -> None:
    path = str(write_atomic(session_log(own_items=True), tmp_path))
    made = experiment("PosSASRec", data_path=path, **CUT)
    users, items = (made.dataset.field2id_token[name] for name in ("user_id", "item_id"))
    for part in (loader._dataset for loader in made.loaders.values()):
        rows = part[np.arange(len(part))]
        for user, history, length, item in zip(
            *(rows[f] for f in ("user_id", "item_id_list", "item_length", "item_id")), strict=True
        ):
            names = [*items[history[:length].numpy()], items[item]]
            assert {name.split("_")[0] for name in names} == {users[user]}
    for batch in made.trainer.training_loader(made.loaders["train"]):
        owner, of_target = (
            [items[item].split("_")[0] for item in column]
            for column in (batch.items, batch.targets)
        )
        window = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        assert owner == of_target
        assert len({*zip(owner, window, strict=True)}) == len(batch.lengths)


@pytest.mark.parametrize(("model", "mode"), [("Pop", "valid_and_test"), ("BPR", "test_only")])
def test_leave_one_out_equals_recboles_general_loader(experiment, model: str, mode: str) -> None:
    """Row by row, with the past masked: the results of RecBole's loader, one row per user."""
    made = experiment(model, eval_args={"split": {"LS": mode}})
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], saved=False, verbose=False)
    parts = PosDataset(made.config).build()
    samplers = create_samplers(made.config, parts[0], parts)
    for phase, part, sampler in list(zip(made.loaders, parts, samplers, strict=True))[1:]:
        if made.loaders[phase] is None:
            assert not len(part)
            continue
        recboles = FullSortEvalDataLoader(made.config, part, sampler)
        assert not recboles.is_sequential
        want = made.trainer.evaluate(recboles, load_best_model=False)
        assert made.trainer.evaluate(made.loaders[phase], load_best_model=False) == want
        assert len(recboles.uid_list) == len(made.loaders[phase]._dataset) > 30


def test_popular_negatives_that_no_draw_can_give(tmp_path: Path) -> None:
    """A user with every trained item: RecBole would look for another one forever."""
    rows = [("a", i, float(t)) for t, i in enumerate("xyz")] + [("b", "x", 3.0)]
    rows += [("b", item, 10.0 + t) for t, item in enumerate("wvu")]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])
    options = {
        "data_path": str(write_atomic(frame, tmp_path)),
        "eval_args": {"split": {"GT": [0.5]}},
    }
    config = PosConfig("BPR", "tiny", None, {**options, **POPULAR})
    with pytest.raises(UsageError, match="all 3 items that occur in training"):
        make_training_loader(config, PosDataset(config).build()[0], BatchRequirements())


def test_a_run_says_what_was_split(
    late: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame, run = late_log(), tmp_path / "run"
    first, last = edges(frame)
    options = {"data_path": late, "eval_args": GT, "epochs": 1}
    result = recbole_pos.run("BPR", "tiny", None, options, run_dir=run)
    split = json.loads((run / "result.json").read_text())["split"]
    assert split == result.split and split["boundaries"] == [first, last]
    assert split["split"] == {"GT": NUMBERS} and split["target"] == "all"
    assert split["events"]["test"] == int((frame.timestamp > last).sum())
    assert split["targets"]["test"] == result.test_targets
    assert f"split GT at time {repr(first).removesuffix('.0')} and" in capsys.readouterr().out
    made = recbole_pos.load(run)
    assert made.dataset.split.summary == split
    assert dict(made.trainer.evaluate(made.loaders["test"], load_best_model=False)) == result.test


def test_a_split_without_validation(sessions: str, tmp_path: Path, capsys) -> None:
    options = {"data_path": sessions, "eval_args": {"split": {"ST": 80}}, "epochs": 1}
    options["train_fraction"] = "1/4"
    result = recbole_pos.run("Pop", "tiny", None, options, run_dir=tmp_path / "run")
    assert result.valid_targets == 0 and result.best_valid is None and result.test
    assert result.split["events"]["valid"] == 0 and len(result.split["boundaries"]) == 1
    printed = capsys.readouterr().out
    assert "no validation" in printed and "of 20 sessions (60 older ones left out)" in printed


# c loses z and is short, so v is rare in the end; y is rare once d, of one event, is gone
EVENTS = {"a": "xw", "b": "xw", "c": "vz", "g": "vx", "d": "y", "h": "yx"}
CORE = {"user_inter_num_interval": "[2,inf)", "item_inter_num_interval": "[2,inf)"}


def filtered(folder: Path, **options: Any) -> tuple[dict[str, str], PosSequentialDataset]:
    """The items of each session that filters leave."""
    rows = [(session, item) for session, items in EVENTS.items() for item in items]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id"])
    write_atomic(frame.assign(timestamp=range(len(rows))), folder)
    item = pd.DataFrame({"item_id:token": list("vwxyzq"), "size:float": range(6)})
    item.to_csv(folder / "tiny" / "tiny.item", sep="\t", index=False)
    fields = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "size"]}
    given = {"data_path": str(folder), "load_col": fields, **options}
    dataset = PosSequentialDataset(PosConfig("SASRec", "tiny", None, given))
    users, items = (dataset.field2id_token[field] for field in ("user_id", "item_id"))
    found: dict[str, str] = {}
    for user, item in dataset.inter_feat[["user_id", "item_id"]].to_numpy():
        found[users[user]] = found.get(users[user], "") + items[item]
    return found, dataset


def test_one_pass_of_filtering_by_hand(tmp_path: Path) -> None:
    left, made = filtered(tmp_path, session_filter={"item": 2, "session": 2})
    assert left == {"a": "xw", "b": "xw", "g": "vx"}
    # q never had an event, which is RecBole's to keep; what was dropped has no id and no row
    assert set(made.field2id_token["item_id"][1:]) == set("xwvq") and made.user_num == 4
    assert filtered(tmp_path, **CORE)[0] == {"a": "xw", "b": "xw"}
    assert filtered(tmp_path)[0] == EVENTS
    with pytest.raises(UsageError, match="session_filter"):
        filtered(tmp_path, session_filter={"item": 9})
