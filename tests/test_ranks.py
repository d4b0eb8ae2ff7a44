"""Where test targets stood: against a loop over users, and the metrics that follow from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import recbole_pos
from recbole_pos.experiment.evaluation import rank_targets

OPTIONS = {"epochs": 1, "show_progress": False, "topk": [1, 3, 7], "valid_metric": "NDCG@3"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("FPARec", {}),
    ("Pop", {}),  # many equal scores
    ("BPR", {"mask_history": False}),
    ("PosSASRec", {"mask_history": True}),
    ("GRU4Rec", {"metrics": ["AveragePopularity", "NDCG"]}),
    ("PosSASRec", {"eval_args": {"split": {"GT": [0.6, 0.8]}}}),
]


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_ranks_equal_a_loop(tiny: Path, tmp_path: Path, model: str, options: dict) -> None:
    given = {**OPTIONS, "data_path": str(tiny), **options}
    recbole_pos.run(model, "tiny", None, given, run_dir=tmp_path / "run", verbose=False)
    table = pd.read_parquet(tmp_path / "run" / "test_ranks.parquet")
    made = recbole_pos.load(tmp_path / "run")
    log, tokens = made.dataset.log, made.dataset.field2id_token
    sold = np.bincount(log.items.numpy()[made.dataset.part == 0], minlength=made.dataset.item_num)
    place = 0
    for rows, _, _, target in made.loaders["test"]:
        with torch.no_grad():
            scores = made.model.full_sort_predict(rows).view(len(rows), -1)
        for line, item, event in zip(scores, target, rows["target_event"], strict=True):
            found = table.iloc[place]
            place += 1
            line[0] = -torch.inf
            history = log.items[int(log.starts[event]) : event]
            if made.config["mask_history"] or (model == "Pop" and not options.get("mask_history")):
                line[[h for h in history.tolist() if h != item]] = -torch.inf
            least, most = int((line > line[item]).sum()), int((line >= line[item]).sum()) - 1
            assert least <= found["rank"] <= max(most, 7)
            assert found["user"] == tokens["user_id"][log.users[event]]
            assert found["item"] == tokens["item_id"][item]
            assert found["history"] == len(history)
            assert found["age"] == log.times[event] - log.times[event - 1]
            assert found["popularity"] == sold[item]
    assert place == len(table)
    test = json.loads((tmp_path / "run" / "result.json").read_text())["test"]
    for k in OPTIONS["topk"]:
        ndcg = np.where(table["rank"] < k, 1 / np.log2(table["rank"] + 2), 0.0).mean()
        assert test[f"ndcg@{k}"] == pytest.approx(ndcg, abs=1e-6)


def test_equal_scores_stand_as_the_metrics_have_them() -> None:
    scores = torch.tensor([[9.0, 5.0, 5.0, 5.0, 1.0]] * 4)
    target = torch.tensor([0, 2, 3, 4])
    best = torch.tensor([[0, 2, 1]] * 4)
    assert rank_targets(scores, target, best).tolist() == [0, 1, 3, 4]
    assert rank_targets(scores, target).tolist() == [0, 1, 1, 4]


@pytest.mark.long
def test_several_processes_rank_as_one(tiny: Path, tmp_path: Path) -> None:
    given = {
        **OPTIONS,
        "data_path": str(tiny),
        "hidden_dropout_prob": 0.0,
        "attn_dropout_prob": 0.0,
    }
    for size in (1, 2):
        folder = tmp_path / str(size)
        recbole_pos.run("FPARec", "tiny", None, given, run_dir=folder, nproc=size, verbose=False)
    one, two = (pd.read_parquet(tmp_path / n / "test_ranks.parquet") for n in ("1", "2"))
    same = ["user", "item", "history", "age", "popularity"]
    assert one[same].equals(two[same])
    assert (one["rank"] - two["rank"]).abs().mean() < 0.5  # rounding
