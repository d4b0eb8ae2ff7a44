"""A run folder written by version 0.1.0 loads, is resumed and recommends as it did there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import recbole_pos
from recbole_pos.yaml_files import read_yaml

KEPT = Path(__file__).parent / "data" / "run-0.1"  # TORoPE with [to_rope, kernel] on toyshop
SAMPLES = Path(__file__).parent.parent / "dataset"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder, with the sample data where they are on this machine."""
    folder = Path(shutil.copytree(KEPT, tmp_path / "run"))
    config = (folder / "config.yaml").read_text()
    assert "data_path: dataset\n" in config
    (folder / "config.yaml").write_text(
        config.replace("data_path: dataset\n", f"data_path: {SAMPLES}\n")
    )
    return folder


def test_it_has_the_weights_it_had(old: Path) -> None:
    made = recbole_pos.load(old)
    found = made.trainer.evaluate(made.loaders["test"], load_best_model=False)
    want = json.loads((old / "result.json").read_text())["test"]
    assert {name: found[name] for name in want} == want


def test_it_recommends_what_it_recommended(old: Path) -> None:
    want = pd.read_csv(KEPT / "recommendations.csv", dtype=str)
    found = recbole_pos.recommend(old, users=list(dict.fromkeys(want.iloc[:, 0])), k=3)
    found = found.iloc[: len(want)].reset_index(drop=True)
    names = [name for name in want if name != "score"]
    assert found[names].astype(str).equals(want[names])
    scores = want["score"].astype(float).to_numpy()
    assert abs(found["score"].to_numpy() - scores).max() < 1e-5


def test_it_goes_on_where_it_stopped(old: Path) -> None:
    recbole_pos.run(resume=old, config_dict={"epochs": 3}, verbose=False)
    *_, line = map(json.loads, (old / "metrics.jsonl").read_text().splitlines())
    want = json.loads((KEPT / "third_epoch.json").read_text())
    assert line["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert line["valid"] == pytest.approx(want["valid"], abs=1e-5)
    assert read_yaml(old / "config.yaml")["epochs"] == 3
