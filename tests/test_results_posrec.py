"""The rows of ``make results-posrec`` can start, and its tables say what runs have found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.yaml_files import read_yaml

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def results(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import results_posrec

    yield results_posrec
    for name in ("results_posrec", "study"):
        sys.modules.pop(name, None)


def rows_of(results: Any, dataset: str) -> tuple[dict, dict, dict]:
    """Preset, studies, and all rows by name, the same in all studies that have one."""
    preset = read_yaml(results.PRESETS / results.DATASETS[dataset])
    plan = results.studies(preset)
    rows: dict[str, dict] = {}
    for found in plan.values():
        for name, options in found.items():
            assert rows.setdefault(name, options) == options, name
    return preset, plan, rows


@pytest.mark.parametrize("dataset", ["diginetica", "yoochoose1_64"])
def test_every_row_is_a_run(results, dataset: str) -> None:
    preset, plan, rows = rows_of(results, dataset)
    assert set(results.PAPER[dataset]) <= set(rows) and set(results.TITLES) == set(plan)
    shared = results.shared_options(preset)
    for options in rows.values():
        given = {**shared, **options}
        config = PosConfig(given.pop("model"), "ml-100k", None, given)
        if "epochs" not in options:  # those that learn do so alike
            assert (config["train_batch_size"], config["weight_decay"]) == (100, 1e-5)
            assert 100 in (config["hidden_size"], config["embedding_size"])
    assert {rows[name]["lambda_2"] for name in plan["lambda_2"]} == {0.25, 0.5, 1.0, 2.0}
    assert rows["PosRec"]["lambda_2"] == (1.0 if dataset == "diginetica" else 0.5)
    assert [o["position"] for o in plan["encodings"].values()] == [[n] for n in results.ENCODINGS]
    for name in ("SR-GNN", "GC-SAN", "FGNN"):
        assert not rows[name].get("anchors") and rows[f"{name}+ANC"]["anchors"]
    assert not rows["PosRec-ANC"]["anchors"] and "anchors" not in rows["PosRec"]
    for name, usual in (("STAMP", "nope"), ("SASRec", "lpe")):
        found = [rows[row]["position"] for row in (name, f"{name}+LDPE")]
        assert found == [[usual], ["ldpe"]]
    paper = {"diginetica": 38.87, "yoochoose1_64": 60.90}[dataset]  # Table 2, R@10
    assert results.PAPER[dataset]["PosRec"][1] == paper


def finish(folder: Path, recall: float) -> None:
    folder.mkdir(parents=True)
    test = {"recall@5": recall / 2, "recall@10": recall, "mrr@5": 0.1, "mrr@10": 0.2}
    phases = {"train": 9, "test": 5}
    split = {"sessions": phases, "targets": phases, "cold_targets": {"test": 1}}
    found = {"test": test, "split": split, "targets_per_second": 1234.4, "peak_rss_mb": 700.2}
    (folder / "result.json").write_text(json.dumps(found))


def test_tables(results, tmp_path: Path) -> None:
    _, plan, _ = rows_of(results, "diginetica")
    study = results.Study("diginetica", tmp_path, {}, 1, 1)
    assert results.page(study, plan, "") == "No run is finished."
    for tag, recall in (("2020", 0.4), ("2021", 0.38), ("2022", 0.3)):
        finish(tmp_path / f"PosRec-{tag}", recall)
    finish(tmp_path / "S-POP-2020", 0.2)
    lines = results.page(study, plan, "").splitlines()
    assert lines[0].startswith("9 training sessions with 9 prefixes; 5 test prefixes, 1 of them")
    assert [line for line in lines if line.startswith("###")] == ["### Table 2"]
    cells = next(line for line in lines if line.startswith("| PosRec")).strip("| ").split(" | ")
    assert cells[1:4] == ["3", "18.00 ± 2.65", "36.00 ± 5.29"]
    assert cells[6:] == ["27.30", "38.87", "15.31", "16.85", "-7.4%", "1,234", "700"]
    finish(tmp_path / "PosRec-ANC-2020", 0.3)
    lines = results.page(study, plan, "1 of 4 epochs").splitlines()
    assert "Scaled down: 1 of 4 epochs" in lines[0] and "paper" not in "".join(lines[2:])
    assert "### Anchors (Figures 5 and 6)" in lines and "### lambda_2 (Figure 13)" not in lines
