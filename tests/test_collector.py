"""What the evaluator is given is what RecBole's own collector gives it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL
from recbole.evaluator import Collector

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.evaluation import TOPK, TargetCollector


@pytest.mark.parametrize("metrics", [["Recall", "MRR", "NDCG"], ["GAUC"], ["Hit", "ItemCoverage"]])
def test_batches_are_collected_as_by_recbole(tiny: Path, metrics: list[str]) -> None:
    """With ties, with rows in any order, and with rows of several targets, which are RecBole's."""
    given = {**SMALL, "data_path": str(tiny), "metrics": metrics, "topk": [3, 5]}
    given |= {"valid_metric": "GAUC" if metrics == ["GAUC"] else f"{metrics[0]}@3"}
    config = PosConfig("PosSASRec", "tiny", None, given)
    found = []
    for kind in (TargetCollector, Collector):
        torch.manual_seed(0)
        collector = kind(config)
        for rows, items in ((4, 9), (1, 9), (6, 9)):
            scores = torch.randint(0, 4, (rows, items)).float()
            scores[:, 0] = -torch.inf
            collector.eval_batch_collect(
                scores, None, torch.randperm(rows), torch.randint(1, items, (rows,))
            )
        several = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 8])
        collector.eval_batch_collect(torch.randn(2, 9), None, *several)
        found.append(collector.get_data_struct()._data_dict)
    ours, other = found
    assert set(ours) == set(other) and ours
    for key, value in ours.items():
        assert value.dtype == other[key].dtype and torch.equal(value, other[key])


@pytest.mark.parametrize("metrics", [["NDCG", "MRR"], ["GAUC"]])
def test_metrics_are_those_of_recbole(tiny: Path, metrics: list[str]) -> None:
    given = {**SMALL, "data_path": str(tiny), "metrics": metrics, "topk": [3]}
    given["valid_metric"] = "GAUC" if metrics == ["GAUC"] else "NDCG@3"
    made = prepare(PosConfig("PosSASRec", "tiny", None, given))
    ours = made.trainer.evaluate(made.loaders["valid"], load_best_model=False)
    made.trainer.eval_collector = Collector(made.config)
    other = made.trainer.evaluate(made.loaders["valid"], load_best_model=False)
    assert dict(ours) == dict(other) and np.isfinite(list(ours.values())).all()


def test_gauc_chooses_the_best_epoch(tiny: Path, tmp_path: Path) -> None:
    given = {**SMALL, "data_path": str(tiny), "metrics": ["GAUC"], "valid_metric": "GAUC"}
    done = recbole_pos.run(
        "PosSASRec", "tiny", None, {**given, "epochs": 2}, run_dir=tmp_path / "run", verbose=False
    )
    assert set(done.test) == {"gauc"} and 0 < done.test["gauc"] < 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"] == done.test


def test_the_matrix_of_targets_is_left_out(tiny: Path, monkeypatch) -> None:
    """Unless a row has several."""
    asked = []
    monkeypatch.setattr(
        Collector, "eval_batch_collect", lambda self, *_: asked.append(self.register.need(TOPK))
    )
    given = {**SMALL, "data_path": str(tiny)}
    collector = TargetCollector(PosConfig("PosSASRec", "tiny", None, given))
    for rows in ([0, 1], [1, 0], [0, 0], [0]):
        collector.eval_batch_collect(
            torch.randn(2, 30), None, torch.tensor(rows), torch.ones(len(rows)).long()
        )
    assert asked == [False, False, True, True]
