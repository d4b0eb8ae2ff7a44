"""Successive evaluation under a global temporal split, through datasets, loaders and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, write_atomic
from recbole.data.dataloader import FullSortEvalDataLoader
from recbole.data.utils import create_samplers

import recbole_pos
from recbole_pos.data.dataset import PosDataset, PosSequentialDataset
from recbole_pos.data.loaders import Needs, training_loader
from recbole_pos.errors import UsageError
from recbole_pos.model.models import BUILTIN_GENERAL, BUILTIN_SEQUENTIAL

NUMBERS = [0.7, 0.85]
GT = {"split": {"GT": NUMBERS}}
PLAIN = [m for m in BUILTIN_SEQUENTIAL if m not in ("SASRecF", "GRU4RecF", "FDSA")]  # no attributes


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
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same events, but an item is called l<number> after the first boundary."""
    frame = late_log()
    after = frame.timestamp > edges(frame)[0]
    frame["item_id"] = np.where(after, "l", "e") + frame.item_id.str[1:]
    return str(write_atomic(frame, tmp_path_factory.mktemp("told")))


def brute_force(target: str, cold_items: str) -> dict[str, list[tuple]]:
    """(user, item, time, past items) of each held-out target."""
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


@pytest.mark.parametrize("cold_items", ["keep", "drop"])
@pytest.mark.parametrize("target", ["all", "last", "first"])
def test_all_models_have_the_same_targets(experiment, late, target, cold_items) -> None:
    options = {**GT, "target": target, "cold_items": cold_items}
    rows = brute_force(target, cold_items)
    want = {phase: [row[:3] for row in found] for phase, found in rows.items()}
    assert len({user for user, *_ in want["test"]} & {"t", "w"}) == 2
    assert "one" not in {user for user, *_ in want["test"]}
    for model in ("FPARec", "SASRec", "Pop", "BPR", "ItemKNN"):
        made = experiment(model, data_path=late, eval_args=options)
        assert targets_of(made) == want, model
        assert made.dataset.split.summary["targets"]["test"] == len(want["test"])


@pytest.mark.parametrize("split", [{"GT": NUMBERS}, {"RS": [6, 2, 2]}])
def test_random_targets_are_the_same_for_models_and_seeds(experiment, late, split) -> None:
    options = {"split": split, "target": "random"}
    want = targets_of(experiment("FPARec", data_path=late, eval_args=options))
    for model, seed in (("FPARec", 5), ("SASRec", 6), ("BPR", 7)):
        assert targets_of(experiment(model, data_path=late, eval_args=options, seed=seed)) == want
    # other fields and another order of the users change nothing
    other = {"load_col": {"inter": ["timestamp", "item_id", "user_id"]}}
    assert targets_of(experiment("Pop", data_path=late, eval_args=options, **other)) == want


@pytest.mark.parametrize("cold_items", ["keep", "drop"])
def test_histories_hold_everything_before_the_target(experiment, late, cold_items) -> None:
    """Held-out events included; and mask_history leaves out exactly these items."""
    options = {**GT, "cold_items": cold_items}
    want = {row[:3]: row[3] for found in brute_force("all", cold_items).values() for row in found}
    made = experiment("SASRec", data_path=late, eval_args=options)
    general = experiment("Pop", data_path=late, eval_args=options)
    for phase in ("valid", "test"):
        seen = 0
        for experiment_, is_general in ((made, False), (general, True)):
            tokens = experiment_.dataset.field2id_token
            trainer = experiment_.trainer
            trainer.tot_item_num = experiment_.dataset.item_num
            trainer.eval_log = experiment_.dataset.log
            if is_general:
                trainer.fit(experiment_.loaders["train"], saved=False, verbose=False)
            for batch in experiment_.loaders[phase]:
                rows, scores, _, items = trainer._full_sort_batch_eval(batch)
                for row, item in enumerate(items.tolist()):
                    user = tokens["user_id"][rows["user_id"][row]]
                    name = tokens["item_id"][item]
                    past = want[user, name, rows["timestamp"][row].item()]
                    hidden = torch.where(scores[row] == -torch.inf)[0].numpy()
                    if is_general:
                        assert set(tokens["item_id"][hidden]) == {"[PAD]", *past} - {name}
                    else:
                        assert hidden.tolist() == [0]
                        history = rows["item_id_list"][row, : rows["item_length"][row]]
                        assert tuple(tokens["item_id"][history.numpy()]) == past[-12:]
                    seen += 1
        assert seen == 2 * sum(
            len(v) for k, v in brute_force("all", cold_items).items() if k == phase
        )


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


ALONE = {"train_neg_sample_args": None}  # uniform negatives are of the whole catalogue
POPULAR = {"train_neg_sample_args": {"distribution": "popularity", "sample_num": 1}}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FPARec", {}),
        ("PosSASRec", {"train_windows": "sliding", "MAX_ITEM_LIST_LENGTH": 5}),
        ("PosSASRec", {"train_windows": "last"}),
        ("PosSASRec", {"augmentation": "prefix"}),
        ("SASRec", {}),
        ("SASRec", {"augmentation": "none"}),
        ("FPMC", POPULAR),
        ("Pop", ALONE),
        ("BPR", POPULAR),
        ("ItemKNN", ALONE),
    ],
    ids=str,
)
@pytest.mark.parametrize("cold_items", ["keep", "drop"])
def test_training_sees_nothing_after_the_first_boundary(
    experiment, told, model, options, cold_items
) -> None:
    made = experiment(model, data_path=told, eval_args={**GT, "cold_items": cold_items}, **options)
    items = trained_items(made)
    assert items and all(item.startswith("e") for item in items)
    if cold_items == "keep":  # all held-out items are late ones here
        held_out = targets_of(made)
        assert all(item.startswith("l") for rows in held_out.values() for _, item, _ in rows)
    else:
        assert made.loaders["valid"] is made.loaders["test"] is None
    if model == "Pop":
        made.trainer.fit(made.loaders["train"], saved=False, verbose=False)
        counted = np.flatnonzero(made.model.item_cnt[:, 0].numpy())
        assert all(t[0] == "e" for t in made.dataset.field2id_token["item_id"][counted])
    if model == "ItemKNN":
        known = np.unique(made.model.pred_mat.tocoo().col)
        assert all(t[0] == "e" for t in made.dataset.field2id_token["item_id"][known])


def test_windows_and_rows_train_on_every_event_up_to_the_boundary(experiment, late) -> None:
    frame = late_log()
    before = frame[frame.timestamp <= edges(frame)[0]]
    want = len(before) - before.user_id.nunique()
    ours = experiment("FPARec", data_path=late, eval_args=GT)
    assert ours.trainer.training_loader(ours.loaders["train"]).targets == want
    assert (
        len(experiment("GRU4Rec", data_path=late, eval_args=GT).loaders["train"]._dataset) == want
    )
    assert len(experiment("Pop", data_path=late, eval_args=GT).loaders["train"]._dataset) == len(
        before
    )


@pytest.mark.parametrize("model", BUILTIN_GENERAL)
@pytest.mark.parametrize("mode", ["valid_and_test", "valid_only", "test_only"])
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split": {"GT": [0.9, 0.8]}}, "each larger"),
        ({"split": {"GT": 0.9}}, "one or two numbers"),
        ({"split": {"GT": [0.9, 0.9001]}}, "no event for validation"),
        ({"split": {"GT": [0.99999]}}, "no event for test"),
        ({"split": {"GT": [0.0001, 0.5]}}, "up to the first boundary"),
        ({**GT, "target": "lst"}, "did you mean last"),
        ({**GT, "cold_items": "remove"}, "keep, drop"),
        ({**GT, "group_by": "none"}, "group_by"),
    ],
    ids=str,
)
def test_wrong_options_say_what_is_wrong(experiment, late, given: dict, message: str) -> None:
    for augmentation in ("all_positions", "none"):
        with pytest.raises(UsageError, match=message):
            experiment("FPARec", data_path=late, eval_args=given, augmentation=augmentation)


def test_popular_negatives_that_no_draw_can_give(tmp_path: Path) -> None:
    """A user with every trained item: RecBole would look for another one forever."""
    rows = [("a", i, float(t)) for t, i in enumerate("xyz")] + [("b", "x", 3.0)]
    rows += [("b", item, 10.0 + t) for t, item in enumerate("wvu")]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])
    options = {
        "data_path": str(write_atomic(frame, tmp_path)),
        "eval_args": {"split": {"GT": [0.5]}},
    }
    config = recbole_pos.config.posconfig.PosConfig("BPR", "tiny", None, {**options, **POPULAR})
    with pytest.raises(UsageError, match="all 3 items that occur in training"):
        training_loader(config, PosDataset(config).build()[0], Needs())


def test_recboles_own_config_gets_the_missing_keys(late, monkeypatch) -> None:
    """It replaces eval_args as a whole, so that target and cold_items may be missing."""
    from recbole.config import Config

    monkeypatch.setattr("sys.argv", ["pytest"])
    given = {"order": "TO", "group_by": "user", "mode": "full", **GT}
    config = Config("FPARec", "tiny", None, {"data_path": late, "eval_args": given})
    dataset = PosSequentialDataset(config)
    assert len(dataset.build()[2]) == len(brute_force("all", "keep")["test"])
