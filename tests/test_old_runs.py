"""Run folders that earlier versions wrote load, are resumed and recommend as they did there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import recbole_pos
from recbole_pos.errors import CheckpointError
from recbole_pos.experiment.folder import RunFolder

DATA = Path(__file__).parent / "data"
SAMPLES = Path(__file__).parent.parent / "dataset"
# 0.1: TORoPE with [to_rope, kernel] on toyshop, finished. 0.2: PosSASRec, killed; the weights of
# its best epoch are in a file of their own.
RUNS = {"run-0.1": "third_epoch.json", "run-0.2-killed": "next_epoch.json"}


@pytest.fixture(params=RUNS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder, with the sample data where they are on this machine."""
    return _copy(request.param, tmp_path)


def _copy(name: str, place: Path) -> Path:
    folder = Path(shutil.copytree(DATA / name, place / name))
    config = (folder / "config.yaml").read_text()
    assert "data_path: dataset\n" in config
    (folder / "config.yaml").write_text(
        config.replace("data_path: dataset\n", f"data_path: {SAMPLES}\n")
    )
    return folder


def test_it_has_the_weights_it_had(tmp_path: Path) -> None:
    folder = _copy("run-0.1", tmp_path)
    made = recbole_pos.load(folder)
    found = made.trainer.evaluate(made.loaders["test"], load_best_model=False)
    want = json.loads((folder / "result.json").read_text())["test"]
    assert {name: found[name] for name in want} == want


def test_it_recommends_what_it_recommended(old: Path) -> None:
    want = pd.read_csv(old / "recommendations.csv", dtype=str)
    found = recbole_pos.recommend(old, users=list(dict.fromkeys(want.iloc[:, 0])), k=3)
    found = found.iloc[: len(want)].reset_index(drop=True)
    names = [name for name in want if name != "score"]
    assert found[names].astype(str).equals(want[names])
    scores = want["score"].astype(float).to_numpy()
    assert abs(found["score"].to_numpy() - scores).max() < 1e-5


def test_it_resumes_where_it_stopped(old: Path) -> None:
    want = json.loads((old / RUNS[old.name]).read_text())
    before = len((old / "metrics.jsonl").read_text().splitlines())
    recbole_pos.run(resume=old, config_dict={"epochs": before + 1}, verbose=False)
    *_, line = map(json.loads, (old / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert line["valid"] == pytest.approx(want["valid"], abs=1e-5)


def test_best_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    """They move with the checkpoint; without them, or with others, it is refused."""
    folder = _copy("run-0.2-killed", tmp_path)
    there = RunFolder(shutil.copytree(folder, tmp_path / "there"))
    (best,) = there.path.glob("checkpoint.pt.best-*")
    assert recbole_pos.load(there.path).model
    best.write_bytes(there.checkpoint.read_bytes())
    with pytest.raises(CheckpointError):
        recbole_pos.load(there.path)
    best.unlink()
    with pytest.raises(CheckpointError):
        recbole_pos.load(there.path)
