"""A trained model belongs to its data: files that have changed since are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, write_atomic
from shop import open_shop, tables, train, write

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosSequentialDataset
from recbole_pos.data.identity import Vocabulary, compute_identity, describe_changes, extend_log
from recbole_pos.data.interactions import EventLog
from recbole_pos.data.splits import TEST
from recbole_pos.errors import CheckpointError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.experiment.run import load


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on a shop, which is beside it."""
    folder = write(tmp_path_factory.mktemp("shop"), tables())
    train(folder, folder / "run", epochs=1)
    return folder / "run"


def copy_with(trained: Path, folder: Path, *changed: str) -> Path:
    """A copy of the run on a copy of the shop where columns are the other way round."""
    made = tables()
    for name in changed:
        for table in made.values():
            for column in table.columns[table.columns.str.startswith(f"{name}:")]:
                table[column] = table[column].to_numpy()[::-1]
    write(folder, made)
    shutil.copytree(trained, folder / "run")
    config = folder / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(trained.parent), str(folder)))
    return folder / "run"


def test_the_same_files_are_the_same_data(trained: Path, tmp_path: Path) -> None:
    """A number that is missing now is a change: RecBole puts the mean in its place."""
    made = recbole_pos.load(copy_with(trained, tmp_path))
    fields = {"brand", "tags", "price", "weight", "channel", "stars", "country", "age"}
    assert set(made.dataset.identity["fields"]) == fields
    other = open_shop(trained.parent).dataset
    other.missing = {**other.missing, "price": ~other.missing["price"]}
    del other.__dict__["identity"]  # of what it was before
    then, now = made.dataset.identity["fields"], other.identity["fields"]
    assert {field for field in then if then[field] != now[field]} == {"price"}


@pytest.mark.parametrize("changed", [["price", "tags"], ["age"], ["stars"]], ids=str)
def test_changed_attributes_are_refused(trained: Path, tmp_path: Path, changed: list[str]) -> None:
    run = copy_with(trained, tmp_path, *changed)
    assert recbole_pos.Recommender.load(run).changed == changed  # it recommends, and says so
    match = f"the values of {', '.join(changed)}, or the order of "
    with pytest.raises(CheckpointError, match=match):
        load(run)
    with pytest.raises(CheckpointError, match=match):
        recbole_pos.run(resume=run, config_dict={"epochs": 2}, verbose=False)


def identity_of(**change: Any) -> dict[str, Any]:
    """The identity of a tiny dataset, with a change."""
    columns = {"u": (1, 1, 2, 2), "i": (1, 2, 1, 3), "t": (0.0, 1.0, 2.0, 3.0), "tag": (1, 2, 1, 2)}
    columns |= {"part": (0, 0, 0, 2), "names": "abc", "tags": "xy", **change}
    fields = {name: torch.tensor(columns[name]) for name in ("u", "i", "t", "tag")}
    fields["t"] = fields["t"].double()
    tokens = {
        field: np.array(["[PAD]", *columns[f]]) for field, f in (("i", "names"), ("tag", "tags"))
    }
    dataset = SimpleNamespace(
        log=EventLog.build(fields, 4, "u", "i", "t"),
        part=np.array(columns["part"], dtype=np.int8),
        field2id_token=tokens,
        user_feat=None,
        item_feat=None,
        missing={},
    )
    return compute_identity(dataset)


@pytest.mark.parametrize(
    "change",
    [
        {"i": (1, 2, 1, 2)},
        {"u": (1, 1, 1, 2)},
        {"t": (0.0, 1.0, 2.0, 4.0)},
        {"names": "bac"},
        {"part": (0, 0, 2, 2)},
        {"tags": "yx"},
        {"tag": (1, 2, 2, 2)},
    ],
    ids=str,
)
def test_every_part_of_the_data_counts(change: dict[str, Any]) -> None:
    now = identity_of(**change)
    found = describe_changes(identity_of(), now)
    if change.keys() & {"tags", "tag"}:
        assert found == "the values of tag, or the order of their lines,"
        assert describe_changes({**identity_of(), "fields": {"other": "x"}}, now) is None
    else:
        assert found == "items, interactions, their times or what is held out"


def test_later_interactions_are_history_only(tmp_path: Path) -> None:
    """None of them is a target, those of the run stay, and they come last for their user."""
    frame = make_log()
    given = {"data_path": str(write_atomic(frame, tmp_path))}
    config = PosConfig("PosSASRec", "tiny", None, given)
    known = read_dataset(config)
    known.build()
    later = pd.DataFrame({"user_id": ["u9", "new"], "item_id": ["i1", "i2"], "timestamp": 2e9})
    write_atomic(pd.concat([frame, later]), tmp_path)
    grown = PosSequentialDataset(config, Vocabulary.from_dataset(known))
    grown.build()
    assert grown.identity == known.identity
    whole = extend_log(grown, grown.held_out, has_new_users=True)
    assert whole.split.is_target.sum() == known.split.is_target.sum()
    assert len(whole.log) == len(frame) + 2 and whole.user_num == known.user_num + 1
    for user, item in (("u9", "i1"), ("new", "i2")):
        last = whole.log.offsets[whole.field2token_id["user_id"][user] + 1] - 1
        assert whole.log.items[last] == known.field2token_id["item_id"][item]
        assert not whole.split.is_target[last] and whole.part[last] == TEST
