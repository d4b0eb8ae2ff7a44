"""Splits in time, by interaction and by session, through datasets, loaders, models and runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, write_atomic
from recbole.data.dataloader import FullSortEvalDataLoader
from recbole.data.utils import create_samplers
from recbole.trainer import Trainer
from test_session_models import CUT, session_log

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.recbole_view import read_view
from recbole_pos.data.splits import TEST, TRAIN, VALID
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.model.models import RECBOLE_GENERAL

NUMBERS = [0.7, 0.85]
GT = {"split": {"GT": NUMBERS}}
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


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_atomic(late_log(), tmp_path_factory.mktemp("late")))


def name_targets(made: Any, users: Any, items: Any, times: Any) -> list[tuple]:
    """(user, item, time) of targets, sorted, of which the ids are given."""
    tokens = made.dataset.field2id_token
    names = tokens["user_id"][users], tokens["item_id"][items]
    return sorted(zip(*names, times.tolist(), strict=True))


def targets_of(made: Any) -> dict[str, list[tuple]]:
    """The targets that a model is tested on, from its loaders."""
    found = {}
    for phase in ("valid", "test"):
        batches = [interaction for interaction, *_ in made.loaders[phase]]
        fields = ("user_id", "item_id", "timestamp")
        columns = [np.concatenate([batch[field] for batch in batches]) for field in fields]
        found[phase] = name_targets(made, *columns)
    return found


def split_targets(made: Any) -> dict[str, list[tuple]]:
    """The held-out targets of the split, which test_splits.py counts."""
    log, split, found = made.dataset.log, made.dataset.split, {}
    for phase, part in (("valid", VALID), ("test", TEST)):
        at = np.flatnonzero(split.is_target & (split.part == part))
        found[phase] = name_targets(made, log.users[at], log.items[at], log.times[at])
    return found


@pytest.mark.parametrize(
    ("log_of", "options"),
    [
        (late_log, {"split": {"GT": NUMBERS}, "target": "last", "cold_items": "drop"}),
        (session_log, CUT["eval_args"]),
    ],
)
def test_models_share_targets(experiment, tmp_path: Path, log_of: Callable, options: dict) -> None:
    """Whatever the seed, other fields and another order of the users."""
    given = {"data_path": str(write_atomic(log_of(), tmp_path)), "eval_args": options}
    want = split_targets(experiment("FPARec", **given))
    users = {user for user, *_ in want["test"]}
    assert log_of is session_log or ({"t", "w"} <= users and "one" not in users)
    other = {"load_col": {"inter": ["timestamp", "item_id", "user_id"]}}
    for model, more in (("FPARec", {}), ("SASRec", {"seed": 5}), ("SPop", {}), ("ItemKNN", other)):
        made = experiment(model, **given, **more)
        assert targets_of(made) == want, model
        assert made.dataset.split.summary["targets"]["test"] == len(want["test"])


@pytest.mark.parametrize(
    ("model", "mask"), [("SASRec", False), ("SASRec", True), ("Pop", False), ("Pop", True)]
)
def test_histories_hold_everything_before_the_target(experiment, late, model, mask) -> None:
    """Held-out events included; and mask_history leaves out exactly these items."""
    made, seen = experiment(model, data_path=late, eval_args=GT, mask_history=mask), 0
    log, trainer = made.dataset.log, made.trainer
    trainer.tot_item_num, trainer.eval_collector.dataset = made.dataset.item_num, made.dataset
    if model == "Pop":
        trainer.fit(made.loaders["train"], saved=False, verbose=False)
    places = zip(log.users.tolist(), log.items.tolist(), log.times.tolist(), strict=True)
    place = {row: at for at, row in enumerate(places)}
    for batch in (batch for phase in ("valid", "test") for batch in made.loaders[phase]):
        rows, scores, _, items = trainer._full_sort_batch_eval(batch)
        targets = zip(rows["user_id"].tolist(), items.tolist(), rows["timestamp"].tolist())  # noqa: B905
        for row, target in enumerate(targets):
            past = log.items[log.offsets[target[0]] : place[target]].tolist()
            hidden = torch.where(scores[row] == -torch.inf)[0].tolist()
            assert set(hidden) == {0} | (set(past) if mask else set())
            if model == "SASRec":
                history = rows["item_id_list"][row, : rows["item_length"][row]]
                assert history.tolist() == past[-12:]
            seen += 1
    assert seen == sum(map(len, split_targets(made).values()))


def trained_items(made: Any) -> set[int]:
    """Every item that any path of training shows."""
    train = made.loaders["train"]
    data = train._dataset
    shown = [[*data.item_counter], data.inter_matrix("coo").col, data.inter_feat["item_id"]]
    for batch in train:
        if hasattr(batch, "targets"):
            shown += [batch.targets, batch.items]
        else:
            shown += [batch[column].flatten() for column in batch.columns if "item_id" in column]
    if not train.packed and train._sampler is not None:
        shown += [list(used) for used in train._sampler.used_ids]
        shown.append([*getattr(train._sampler, "prob", {})])
    return {int(item) for items in shown for item in items} - {0}


@pytest.mark.parametrize(
    ("log_of", "model", "options"),
    [
        (late_log, "PosSASRec", {"train_windows": "sliding", "MAX_ITEM_LIST_LENGTH": 5}),
        (late_log, "SASRec", {}),
        (session_log, "FPMC", {**POPULAR, "train_fraction": "1/2"}),
        (session_log, "Pop", {"train_neg_sample_args": None}),
        (late_log, "BPR", POPULAR),
    ],
)
def test_training_sees_nothing_that_is_held_out(
    experiment, tmp_path: Path, log_of: Callable, model: str, options: dict
) -> None:
    """Every event has an item of its own here; all of training but the first are targets."""
    frame = log_of().assign(item_id=lambda log: [f"i{n}" for n in range(len(log))])
    given = {"eval_args": GT} if log_of is late_log else CUT
    made = experiment(model, data_path=str(write_atomic(frame, tmp_path)), **given, **options)
    log, part = made.dataset.log, made.dataset.part
    assert trained_items(made) == set(log.items[part == TRAIN].tolist())
    firsts = 0 if model in RECBOLE_GENERAL else len(set(log.users[part == TRAIN].tolist()))
    assert made.loaders["train"].num_targets == (part == TRAIN).sum() - firsts


def test_leave_one_out_equals_recboles_general_loader(experiment) -> None:
    """With the past masked: the results of RecBole's loader and trainer, where scores differ."""
    made = experiment("BPR", rm_dup_inter="first")  # RecBole ranks targets that were seen before
    made.trainer.fit(made.loaders["train"], made.loaders["valid"], saved=False, verbose=False)
    parts = read_view(made.config).build()
    samplers = create_samplers(made.config, parts[0], parts)
    for phase, part, sampler in list(zip(made.loaders, parts, samplers, strict=True))[1:]:
        recboles = FullSortEvalDataLoader(made.config, part, sampler)
        assert not recboles.is_sequential
        want = Trainer(made.config, made.model).evaluate(recboles, load_best_model=False)
        assert made.trainer.evaluate(made.loaders[phase], load_best_model=False) == want
        assert len(recboles.uid_list) == len(made.loaders[phase]._dataset) > 30


def test_one_pass_of_filtering_by_hand(tmp_path: Path) -> None:
    """c loses z and is short, so v is rare in the end; y is rare once d, of one event, is gone."""
    events = {"a": "xw", "b": "xw", "c": "vz", "g": "vx", "d": "y", "h": "yx"}
    rows = [(session, item) for session, items in events.items() for item in items]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id"])
    folder = write_atomic(frame.assign(timestamp=range(len(rows))), tmp_path)
    given = {"data_path": str(folder), "session_filter": {"item": 2, "session": 2}}
    dataset = read_dataset(PosConfig("SASRec", "tiny", None, given))
    users, items = (dataset.field2id_token[field] for field in ("user_id", "item_id"))
    left = list(zip(users[dataset.log.users], items[dataset.log.items], strict=True))
    assert left == [row for row in rows if row[0] in "abg"]
    assert set(items[1:]) == set("xwv") and len(users) == 4  # what was dropped has no id
    config = PosConfig("SASRec", "tiny", None, {**given, "session_filter": {"item": 9}})
    with pytest.raises(UsageError, match="session_filter"):
        read_dataset(config)
