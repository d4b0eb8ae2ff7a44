"""Evaluation that makes its scores in parts finds what it finds with all of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import SMALL

import recbole_pos
from recbole_pos.experiment import evaluation
from recbole_pos.experiment.evaluation import StreamedScores
from recbole_pos.layers import catalogue

METRICS = ["Hit", "NDCG", "MRR", "ItemCoverage", "AveragePopularity"]


def test_counts_against_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of small whole numbers: many equal scores, and no rounding."""
    monkeypatch.setattr(catalogue, "PART", 7)
    generator = torch.Generator().manual_seed(0)
    states = torch.randint(-2, 3, (6, 3), generator=generator).float()
    vectors = torch.randint(-2, 3, (31, 3), generator=generator).float()
    barred = torch.tensor([0, 0, 5, 5, 5]), torch.tensor([3, 30, 1, 8, 2])
    target = torch.tensor([1, 7, 8, 14, 15, 30])
    scores = StreamedScores(states, vectors, barred)
    best, higher = scores.best(4), scores.higher(target)
    assert max(part.shape[1] for _, part in scores.parts()) == 7
    for row in range(6):
        out = {0} | {int(item) for at, item in zip(*barred, strict=True) if at == row}
        line = [float(sum(a * b for a, b in zip(states[row], v, strict=True))) for v in vectors]
        left = {item: score for item, score in enumerate(line) if item not in out}
        assert higher[row] == sum(score > line[target[row]] for score in left.values())
        wanted = sorted(left.values(), reverse=True)[:4]
        assert [line[item] for item in best[row]] == wanted
        assert len(set(best[row].tolist())) == 4 and not set(best[row].tolist()) & out


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
    given = {**SMALL, "data_path": str(tiny), "epochs": 1, "metrics": METRICS, **options}
    found = {}
    for part in (1 << 15, 5):
        monkeypatch.setattr(catalogue, "PART", part)
        monkeypatch.setattr(evaluation, "PART", part)
        asked: list[int] = []
        best = StreamedScores.best
        monkeypatch.setattr(
            StreamedScores, "best", lambda own, k, to=asked, of=best: (to.append(k), of(own, k))[1]
        )
        folder = tmp_path / str(part)
        metrics = recbole_pos.run(model, "tiny", None, given, run_dir=folder, verbose=False)
        monkeypatch.setattr(StreamedScores, "best", best)
        assert bool(asked) == (part == 5)
        found[part] = metrics, pd.read_parquet(folder / "test_ranks.parquet")
    (whole, ranks), (parts, other) = found.values()
    assert parts.test == pytest.approx(whole.test, abs=1e-6)
    pd.testing.assert_frame_equal(ranks, other)


def test_metrics_of_all_scores_get_them(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "PART", 5)
    monkeypatch.setattr(StreamedScores, "best", None)
    given = {**SMALL, "data_path": str(tiny), "epochs": 1, "metrics": ["NDCG", "GAUC"]}
    assert "gauc" in recbole_pos.run("FPARec", "tiny", None, given, verbose=False).test
