"""Metrics of one's own: as plain loops compute them, in validation, tests and evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recbole_pos
from recbole_pos.config import plugins
from recbole_pos.config.metrics import CUSTOM
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.evaluation import EVENT, ITEMS, RANK

DATASETS = Path(__file__).parent.parent / "dataset"
OPTIONS = {
    **{"data_path": str(DATASETS), "epochs": 2, "hidden_size": 8, "inner_size": 8},
    **{"MAX_ITEM_LIST_LENGTH": 10, "load_col": {"inter": ["user_id", "item_id", "timestamp"]}},
}
OPTIONS["load_col"] = {**OPTIONS["load_col"], "item": ["item_id", "brand"]}


def same_brand(lists: Any, targets: Any, brand: Any) -> Any:
    """A hit within the same brand."""
    return (brand[lists] == brand[targets][:, None]).any(1)


def mean_rank(ranks: Any) -> float:
    return float(ranks.mean())


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register two metrics for a test; a process that trains for another cannot import them."""
    monkeypatch.setattr(plugins, "_allowed", plugins._allowed.copy())
    recbole_pos.register_metric("same_brand", same_brand)
    recbole_pos.register_metric("mean_rank", mean_rank, bigger=False)
    yield
    CUSTOM.clear()


def test_a_metric_is_there_for_everything(registered: None, tmp_path: Path) -> None:
    """Validation stops by it, the test has it, evaluate computes it again from the weights."""
    names = {"metrics": ["NDCG", "same_brand", "mean_rank"], "topk": [1, 5]}
    options = {**OPTIONS, **names, "valid_metric": "same_brand@5"}
    folder = tmp_path / "run"
    run = recbole_pos.run("FPARec", "toyshop", None, options, run_dir=folder, verbose=False)
    computed = ["ndcg@1", "ndcg@5", "same_brand@1", "same_brand@5", "mean_rank"]
    assert list(run.test) == list(run.best_valid) == computed
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line)["valid"]["same_brand@5"] for line in lines]
    assert run.best_valid["same_brand@5"] == max(scores)

    experiment = recbole_pos.load(folder)
    experiment.trainer.evaluate(experiment.loaders["test"])
    found = experiment.trainer.eval_collector.last
    dataset = experiment.loaders["test"]._dataset
    brand = dataset.item_feat["brand"].tolist()
    hits = []
    for items, event in zip(found.get(ITEMS).tolist(), found.get(EVENT).tolist(), strict=True):
        wanted = brand[int(dataset.log.items[event])]
        hits.append(any(brand[item] == wanted for item in items[:5]))
    assert run.test["same_brand@5"] == pytest.approx(np.mean(hits), abs=1e-6)
    assert run.test["mean_rank"] == pytest.approx(
        float(found.get(RANK).double().mean()) + 1, abs=1e-6
    )

    again = recbole_pos.evaluate(folder, metrics=["same_brand"], topk=[5])
    assert again == {"same_brand@5": run.test["same_brand@5"]}


def test_a_lower_value_may_be_better(registered: None) -> None:
    options = {**OPTIONS, "metrics": ["mean_rank"], "valid_metric": "mean_rank"}
    assert not PosConfig("FPARec", "toyshop", None, options)["valid_metric_bigger"]


def test_other_processes_know_it(registered: None) -> None:
    packed = pack("FPARec")
    CUSTOM.clear()  # as in a process that has just started
    unpack(packed)
    assert CUSTOM["same_brand"].arguments == ["lists", "targets", "brand"]


def test_what_cannot_be_a_metric_is_refused(registered: None, tmp_path: Path) -> None:
    for name in ("ndcg", "hit at 5"):
        with pytest.raises(UsageError, match="register_metric: found the name"):
            recbole_pos.register_metric(name, mean_rank)
    recbole_pos.register_metric("by_price", lambda ranks, price: ranks)
    options = {**OPTIONS, "metrics": ["NDCG", "by_price"]}
    with pytest.raises(UsageError, match="by_price asks for price, which is neither"):
        recbole_pos.run("FPARec", "toyshop", None, options, run_dir=tmp_path, verbose=False)
