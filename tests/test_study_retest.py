"""Rows that are the trained models of another row, tested otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from small_study import study

import recbole_pos
from recbole_pos.errors import UsageError
from recbole_pos.study.study_file import make_plan
from recbole_pos.study.study_source import Source

ROWS = {
    "RoPE": {"position": ["rope"], "search": {"hidden_dropout_prob": [0.1, 0.4]}},
    "RoPE, past left out": {"retest": "RoPE", "mask_history": True},
}


def test_tested_again_with_the_same_weights(cluster, tiny: Path, tmp_path: Path) -> None:
    """What ``load`` and ``evaluate`` find; nothing is trained, and a known study knows it."""
    here, file = tmp_path / "here", tmp_path / "study.tar.xz"
    found = recbole_pos.compare(study(tiny, rows=ROWS), run_dir=here, pack=file, verbose=False)
    runs = found.runs.set_index(["row", "seed"])
    for seed in (2020, 2021):
        first, again = (here / runs.loc[(row, seed), "path"] for row in ROWS)
        assert (first / "metrics.jsonl").read_bytes() == (again / "metrics.jsonl").read_bytes()
        made = recbole_pos.load(first)
        made.config["mask_history"] = True
        expected = made.trainer.evaluate(made.loaders["test"], load_best_model=False)
        line = runs.loc[("RoPE, past left out", seed)]
        assert {name: line[name] for name in expected} == pytest.approx(dict(expected))
        assert pd.isna(line["seconds"]) and pd.isna(line["epochs"]), "nothing was trained"
        assert line["ndcg@10"] != runs.loc[("RoPE", seed), "ndcg@10"]
    given = {"run_dir": tmp_path / "there", "known": (file,), "report": True, "verbose": False}
    known = recbole_pos.compare(study(tiny, rows=ROWS), **given)
    assert known.pairs.equals(found.pairs) and list(known.pairs["row"]) == ["RoPE, past left out"]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"retest": "C"}, "'C'"),
        ({"retest": ["A"]}, "retest"),
        ({"retest": "B", "mask_history": True}, "circle"),
        ({"retest": "A"}, "mask_history"),
        ({"retest": "A", "mask_history": True, "config_files": ["b.yaml"]}, "config_files"),
        ({"retest": "A", "epochs": 3}, "epochs"),
        ({"retest": "A", "mask_history": True, "search": {"epochs": [1]}}, "search"),
    ],
)
def test_refused(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        make_plan(Source("study", study(tmp_path, rows={"A": {}, "B": row})))


def test_it_is_told_of(cluster, tiny: Path, tmp_path: Path, capsys) -> None:
    """In a dry run, and in the report as what it is."""
    rows = {"NoPE": {"position": ["nope"]}, "masked": {"retest": "NoPE", "mask_history": True}}
    recbole_pos.compare(study(tiny, rows=rows), run_dir=tmp_path / "dry", dry_run=True)
    assert "tested again" in capsys.readouterr().out
    made = study(tiny, rows=rows, seeds=1)
    recbole_pos.compare(made, run_dir=tmp_path / "made", verbose=False)
    report = (tmp_path / "made/report.html").read_text(encoding="utf-8")
    assert "made from the trained models of NoPE: tested with mask_history True." in report
