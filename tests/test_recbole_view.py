"""RecBole's models over the view of a dataset: they learn and rank as over RecBole's own class."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, write_atomic
from recbole.config import Config
from recbole.data import create_dataset

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.recbole_view import make_views
from recbole_pos.experiment.build import read_dataset
from recbole_pos.model.models import RECBOLE_GENERAL

COMMON = ("GRU4Rec", "SASRec", "BERT4Rec", "SASRecF", "FPMC", "BPR", "ItemKNN")  # one of each kind
OTHERS = (
    *("SRGNN", "NARM", "STAMP", "GCSAN", "LightSANs", "FEARec", "CORE", "GRU4RecF", "FDSA", "Pop"),
    *("NextItNet", "Caser", "SHAN", "HGN", "SINE", "RepeatNet", "NPE", "FOSSIL"),
)
INTER = ["user_id", "item_id", "timestamp"]


def write_shop(path: Path) -> Path:
    """Write a small dataset with classes and prices of items, some of which are missing."""
    folder = write_atomic(make_log(users=40, longest=10), path)
    rng = np.random.default_rng(0)
    items = pd.DataFrame(
        {
            "item_id:token": [f"i{i}" for i in range(40)],
            "class:token_seq": [" ".join(rng.choice(list("abcd"), 2)) for _ in range(40)],
            "price:float": [i / 3 if i % 5 else None for i in range(40)],
        }
    )
    items.to_csv(folder / "tiny" / "tiny.item", sep="\t", index=False)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"))


def options_of(model: str, folder: Path) -> dict[str, Any]:
    """What a model reads: histories but for FPMC, attributes of items where it can."""
    given: dict[str, Any] = {"data_path": str(folder), "topk": [5, 20], "valid_metric": "NDCG@5"}
    if model not in ("Pop", "ItemKNN"):
        given["epochs"] = 2
    if model not in (*RECBOLE_GENERAL, "FPMC"):
        given["MAX_ITEM_LIST_LENGTH"] = 12
    if model in ("SASRecF", "GRU4RecF", "FDSA"):
        given |= {"load_col": {"inter": INTER, "item": "*"}, "selected_features": ["class"]}
    if model == "SASRecF":
        given |= {"selected_features": ["class", "price"], "numerical_features": ["price"]}
    return given


def list_rows(dataset: Any) -> list[list[int]]:
    """Ids of user, item, history and classes, and the length, of each row of a phase."""
    rows, fields = dataset[np.arange(len(dataset))], ("user_id", "item_id", "item_length", "class")
    columns = [rows[field].reshape(len(rows), -1) for field in (*fields, "item_id_list")]
    return sorted(torch.cat(columns, 1).tolist())


def test_rows_and_tables_are_those_of_recboles_class(folder: Path, tmp_path, monkeypatch) -> None:
    """Times are made small, so that they are exact in float32, which RecBole keeps them in."""
    monkeypatch.chdir(tmp_path)  # RecBole writes its log there
    options = options_of("SASRecF", folder)
    views = make_views(read_dataset(PosConfig("SASRecF", "tiny", None, options)))
    stock = {**options, "train_neg_sample_args": None}
    dataset = create_dataset(Config("SASRecF", "tiny", config_dict=stock))
    dataset.inter_feat["timestamp"] -= dataset.inter_feat["timestamp"].min()
    for view, peer in zip(views.values(), dataset.build(), strict=True):
        assert list_rows(view) == list_rows(peer)
        for field in ("item_id", "class", "price"):
            torch.testing.assert_close(view.item_feat[field], peer.item_feat[field])


@pytest.mark.parametrize(
    "model", [*COMMON, *(pytest.param(m, marks=pytest.mark.long) for m in OTHERS)]
)
def test_models_train_evaluate_and_are_saved(folder: Path, tmp_path: Path, model: str) -> None:
    given, run = options_of(model, folder), tmp_path / "run"
    result = recbole_pos.run(model, "tiny", None, given, run_dir=run, verbose=False)
    assert result.candidates.startswith("items not" if model in RECBOLE_GENERAL else "all items")
    loaded = recbole_pos.load(run)
    again = loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)
    assert dict(again) == result.test


def test_a_view_is_pickled_and_names_what_it_lacks(folder: Path) -> None:
    config = PosConfig("SASRecF", "tiny", None, options_of("SASRecF", folder))
    view = make_views(read_dataset(config))["test"]
    rows = np.arange(len(view))
    expected = view[rows].interaction
    view.config, view.data.config = None, {}  # a run has its own, and shared data have none
    copied = pickle.loads(pickle.dumps(view))
    copied.config = config
    found = copied[rows].interaction
    assert found.keys() == expected.keys()
    assert all(torch.equal(column, found[name]) for name, column in expected.items())
    for dataset in (view, copied):
        with pytest.raises(AttributeError, match="'Dataset' object has no attribute 'file_size"):
            _ = dataset.file_size_list
