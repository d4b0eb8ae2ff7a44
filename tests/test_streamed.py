"""Scores of the catalogue in parts: what is ranked is what all of them at once give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import SMALL

import recbole_pos
from recbole_pos.experiment import evaluation
from recbole_pos.experiment.evaluation import StreamedScores
from recbole_pos.layers import catalogue
from recbole_pos.layers.catalogue import Choice
from recbole_pos.serve.recommender import find_best_items


@pytest.mark.parametrize("items", [5, 255, 300, 3000])
@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("levels", [0, 2, 50])
def test_best_items(items: int, k: int, levels: int, monkeypatch) -> None:
    """In parts whose rests are groups of one, of all, and of columns that are left out; of equal
    scores, of which there are many where there are few levels, the lower ids."""
    monkeypatch.setattr(catalogue, "PART", 2100)
    generator = torch.Generator().manual_seed(items)
    scores = torch.randn(9, items + 1, generator=generator)
    scores = (scores * levels).round() if levels else scores
    barred = torch.randint(9, (4 * items,), generator=generator)
    of_item = torch.randint(1, items + 1, (4 * items,), generator=generator)
    choice = Choice(torch.arange(1, items + 1))
    value, item = find_best_items(lambda some: scores[:, some], choice, k, (barred, of_item))
    scores[:, 0] = -torch.inf
    scores[barred, of_item] = -torch.inf
    want = [x[:, : min(k, items)] for x in scores.sort(dim=1, descending=True, stable=True)]
    np.testing.assert_array_equal(value, want[0].numpy())
    there = value > -np.inf
    np.testing.assert_array_equal(item[there], want[1].numpy()[there])


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("FPARec", {}),
        ("PosSASRec", {"mask_history": True, "position": ["to_rope"]}),
        ("AttrFormer", {"eval_args": {"split": {"GT": [0.6, 0.8]}}}),
    ],
    ids=str,
)
def test_a_run_finds_the_same(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any]
) -> None:
    metrics = ["Hit", "NDCG", "MRR", "ItemCoverage", "AveragePopularity"]
    given = {**SMALL, "data_path": str(tiny), "epochs": 1, "metrics": metrics, **options}
    (tests, ranks), best, calls = ([], []), StreamedScores.find_best, []
    monkeypatch.setattr(
        StreamedScores, "find_best", lambda own, k: (calls.append(k), best(own, k))[1]
    )
    for part in (1 << 15, 5):
        monkeypatch.setattr(catalogue, "PART", part)
        monkeypatch.setattr(evaluation, "PART", part)
        folder = tmp_path / str(part)
        tests.append(recbole_pos.run(model, "tiny", None, given, folder, verbose=False).test)
        ranks.append(pd.read_parquet(folder / "test_ranks.parquet"))
        assert bool(calls) == (part == 5)
    assert tests[1] == pytest.approx(tests[0], abs=1e-6)
    pd.testing.assert_frame_equal(*ranks)


def test_metrics_of_all_scores_get_them(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "PART", 5)
    monkeypatch.setattr(StreamedScores, "find_best", None)
    given = {**SMALL, "data_path": str(tiny), "epochs": 1, "metrics": ["NDCG", "GAUC"]}
    assert "gauc" in recbole_pos.run("FPARec", "tiny", None, given, verbose=False).test
