"""RecBole's models over the view of a dataset: they learn and rank as over RecBole's own class."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, write_atomic
from own_models import MODULE

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.recbole_view import make_views, read_view
from recbole_pos.experiment.build import read_dataset
from recbole_pos.model.models import RECBOLE_GENERAL

# Loss of the first epoch, and NDCG@20 of the test, of each model when its dataset was a subclass of
# RecBole's, which loaded the same files.
RECORDED = {
    "SASRec": (3.7193, 0.1602),
    "GRU4Rec": (3.6924, 0.1511),
    "BERT4Rec": (3.6884, 0.2390),
    "SRGNN": (3.6752, 0.1589),
    "NARM": (3.6864, 0.1708),
    "STAMP": (3.6889, 0.1066),
    "GCSAN": (3.7019, 0.1686),
    "FPMC": (0.6871, 0.1190),
    "SASRecF": (3.7267, 0.1255),
    "LightSANs": (3.7345, 0.1689),
    "FEARec": (3.7361, 0.1771),
    "CORE": (8.7197, 0.1016),
    "GRU4RecF": (3.7225, 0.1548),
    "FDSA": (3.7285, 0.2260),
    "NextItNet": (7.8137, 0.1347),
    "Caser": (3.6902, 0.0703),
    "SHAN": (3.8492, 0.1429),
    "HGN": (3.6889, 0.1058),
    "SINE": (3.7361, 0.1233),
    "RepeatNet": (4.2580, 0.2153),
    "NPE": (5.3557, 0.1575),
    "FOSSIL": (7.7973, 0.1757),
    "Pop": (0.0000, 0.1655),
    "ItemKNN": (0.0000, 0.1917),
    "BPR": (0.6928, 0.2074),
}
WITH_ATTRIBUTES = ("SASRecF", "GRU4RecF", "FDSA")
COMMON = ("GRU4Rec", "SASRec", "BERT4Rec", "SASRecF", "FPMC", "BPR", "ItemKNN")  # one of each kind
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
    if model in WITH_ATTRIBUTES:
        given |= {"load_col": {"inter": INTER, "item": "*"}, "selected_features": ["class"]}
    if model == "SASRecF":
        given |= {"selected_features": ["class", "price"], "numerical_features": ["price"]}
    return given


@pytest.mark.parametrize(
    "model", [m if m in COMMON else pytest.param(m, marks=pytest.mark.long) for m in RECORDED]
)
def test_models_train_evaluate_and_are_saved(folder: Path, tmp_path: Path, model: str) -> None:
    """With the loss and the metrics of before, up to the rounding of another processor."""
    given, run = options_of(model, folder), tmp_path / "run"
    result = recbole_pos.run(model, "tiny", None, given, run_dir=run, verbose=False)
    loss, ndcg = RECORDED[model]
    first_epoch = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first_epoch["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-4)
    assert result.test["ndcg@20"] == pytest.approx(ndcg, abs=0.03)
    assert result.candidates.startswith("items not" if model in RECBOLE_GENERAL else "all items")
    loaded = recbole_pos.load(run)
    again = loaded.trainer.evaluate(loaded.loaders["test"], load_best_model=False)
    assert dict(again) == result.test


def test_a_custom_model_in_recboles_form_does(folder: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "markov_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"data_path": str(folder), "epochs": 2, "MAX_ITEM_LIST_LENGTH": 12}
    given |= {"plugins": ["markov_of_mine"]}
    run = tmp_path / "run"
    result = recbole_pos.run("Markov", "tiny", None, given, run_dir=run, verbose=False)
    loaded = recbole_pos.load(run)
    assert dict(loaded.trainer.evaluate(loaded.loaders["test"], False)) == result.test


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


def test_what_recbole_asks_of_a_dataset(folder: Path) -> None:
    """Numbers of ids and values, words for tables, and its own summary."""
    view = read_view(PosConfig("SASRecF", "tiny", None, options_of("SASRecF", folder)))
    train, _, test = view.build()
    assert (view.phase, train.phase, test.phase) == (None, "train", "test")
    assert view.num("item_id") == len(view.get_item_feature()) == view.item_num
    assert (view.num("class"), view.num("price"), view.field2seqlen["class"]) == (5, 2, 2)
    assert view.item_feat["price"].shape == (view.item_num, 2)
    assert {source.value for source in view.field2source.values()} >= {"user_id", "item_id", "item"}
    assert train.inter_matrix("csr").sum() < view.inter_matrix("csr").sum() == len(view.data.log)
    assert "The number of users" in str(view)
