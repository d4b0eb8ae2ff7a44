"""A run folder works wherever it and its data are, and whichever version has written it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_log, train, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import CheckpointError, RunWarning, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.serve.holder import ModelHolder

HISTORIES = [["i1", "i2", "i3"], ["i7"], ["nothing known"]]


def train_elsewhere(folder: Path, model: str, **more: Any) -> Path:
    """A run and its data, both moved away from where it was trained."""
    train(write_atomic(make_log(), folder / "before"), folder / "run", model, **more)
    (folder / "before").rename(folder / "now")
    return (folder / "run").rename(folder / "moved")


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> Path:
    return train_elsewhere(tmp_path_factory.mktemp("moved"), "PosSASRec", position=["learned"])


@pytest.fixture
def here(moved, tmp_path, monkeypatch) -> Path:
    """A working directory with a copy of the run and histories; the data are elsewhere."""
    shutil.copytree(moved, tmp_path / "run")
    lines = [json.dumps({"items": items}) for items in HISTORIES]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "recommend run -k 3",
        "inspect encoding --checkpoint run --length 5",
        "evaluate run",
        "evaluate run --mask_history true",
        "run --resume run --epochs 2 --quiet",
        "update run --run_dir new --epochs 1 --quiet",
        "attach run kernel --run_dir new --epochs 1 --quiet",
    ],
)
def test_every_reader_says_where_to_name_the_data_and_takes_them(
    here, moved, capsys, command
) -> None:
    words = command.split()
    if command != "evaluate run":  # the ranks are in the run
        assert main(words) == 2
        assert "--data_path" in capsys.readouterr().err
    assert main([*words, "--data_path", str(moved.parent / "now")]) == 0


def test_what_needs_no_data(here, moved) -> None:
    """The answers are those that are given with the data."""
    data, words = str(moved.parent / "now"), "recommend run -k 4 --histories asked.jsonl".split()
    assert main([*words, "--out=a.parquet"]) == 0
    assert main([*words, "--out=b.parquet", "--data_path", data]) == 0
    pd.testing.assert_frame_equal(*(pd.read_parquet(f"{name}.parquet") for name in "ab"))
    assert main("similar run i1 i2".split()) == 0
    with_data = recbole_pos.Recommender.load("run", data)
    with pytest.warns(RunWarning, match="data_path"):
        without = recbole_pos.Recommender.load("run")
    for one, other in zip(with_data.item_vectors(), without.item_vectors(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(UsageError, match="data_path"):
        without.recommend(users=["u9"])
    with pytest.warns(RunWarning):
        loaded = ModelHolder("run").load()
    assert loaded.facts["items"] == 40 == len(loaded.recommender.items)
    if importlib.util.find_spec("onnxruntime"):
        assert main("export run --to out -k 5 --format torch_export".split()) == 0


@pytest.mark.parametrize(
    ("model", "options", "needs_data"),
    [
        ("SASRec", {}, False),
        ("Pop", {}, False),
        ("TORoPE", {"n_heads": 2}, False),
        ("AttrFormer", {"relations": ["time"]}, True),
        ("SessionKNN", {}, True),
    ],
)
@pytest.mark.filterwarnings("ignore::recbole_pos.errors.RunWarning")
def test_models_that_read_more_say_why(tmp_path, model, options, needs_data) -> None:
    run = train_elsewhere(tmp_path, model, **options)
    history = {"items": ["i1", "i2"], "times": [1.5e9, 1.6e9]}
    if needs_data:
        with pytest.raises(UsageError, match="interactions.*data_path"):
            recbole_pos.Recommender.load(run)
    for data_path in (tmp_path / "now",) if needs_data else (None, tmp_path / "now"):
        found = recbole_pos.Recommender.load(run, data_path).recommend(histories=[history], k=3)
        assert len(found) == 3


def test_a_run_of_an_earlier_version_needs_the_data_and_says_so(here, moved) -> None:
    """Its table has no counts of items, and its checkpoint no digest of it."""
    file = here / "run" / "checkpoint.pt"
    checkpoint.save(file, {**checkpoint.load(file), "known": None})
    table = pd.read_parquet("run/known.parquet")
    table.loc[table["field"] == "item_id", "events"] = -1
    table.to_parquet("run/known.parquet", index=False)
    with pytest.raises(UsageError, match="popularity.*data_path"):
        recbole_pos.Recommender.load("run")
    assert len(recbole_pos.recommend("run", ["u9"], 3, data_path=moved.parent / "now")) == 3


DAMAGES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "kind of a column": lambda table: table.assign(token=0.5),
    "a name twice": lambda table: pd.concat([table, table.iloc[-1:]]),
    "more items than the model has": lambda table: pd.concat(
        [table, table.iloc[-1:].assign(token="another", events=1)]
    ),
    "order, so every weight would be of another item": lambda table: table.iloc[::-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_of_names_is_refused(here, damage) -> None:
    table = pd.read_parquet("run/known.parquet").astype({"field": str})
    DAMAGES[damage](table).to_parquet("run/known.parquet", index=False)
    assert main("similar run i1".split()) == 2
    Path("run/known.parquet").write_bytes(b"PAR1")
    assert main("similar run i1".split()) == 2


def test_other_data_are_refused(here, tmp_path) -> None:
    data = write_atomic(make_log(seed=1), tmp_path / "other")
    config = Path("run/config.yaml").read_text()
    assert main(["evaluate", "run", "--mask_history", "true", "--data_path", str(data)]) == 2
    assert Path("run/config.yaml").read_text() == config


# --- folders that earlier versions wrote ---

DATA = Path(__file__).parent / "data"
SAMPLES = Path(__file__).parent.parent / "dataset"
# 0.1: TORoPE with [to_rope, kernel] on toyshop, finished. 0.2: PosSASRec, killed; the weights of
# its best epoch are in a file of their own.
RUNS = {"run-0.1": "third_epoch.json", "run-0.2-killed": "next_epoch.json"}


@pytest.fixture
def old(request, tmp_path) -> Path:
    """The folder, with the sample data where they are on this machine."""
    folder = Path(shutil.copytree(DATA / request.param, tmp_path / request.param))
    config = (folder / "config.yaml").read_text()
    moved = config.replace("data_path: dataset\n", f"data_path: {SAMPLES}\n")
    (folder / "config.yaml").write_text(moved)
    return folder


@pytest.mark.parametrize("old", RUNS, indirect=True)
def test_an_old_run_recommends_and_resumes_as_it_did(old) -> None:
    want = pd.read_csv(old / "recommendations.csv", dtype=str)
    found = recbole_pos.recommend(old, users=list(dict.fromkeys(want.iloc[:, 0])), k=3)
    found = found.iloc[: len(want)].reset_index(drop=True)
    names = [name for name in want if name != "score"]
    assert found[names].astype(str).equals(want[names])
    assert found["score"].to_numpy() == pytest.approx(want["score"].astype(float), abs=1e-5)
    if (old / "result.json").exists():
        made = recbole_pos.load(old)
        test = made.trainer.evaluate(made.loaders["test"], load_best_model=False)
        assert test == json.loads((old / "result.json").read_text())["test"]
    next_epoch = json.loads((old / RUNS[old.name]).read_text())
    before = len((old / "metrics.jsonl").read_text().splitlines())
    recbole_pos.run(resume=old, config_dict={"epochs": before + 1}, verbose=False)
    *_, line = map(json.loads, (old / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(next_epoch["loss"], rel=1e-5)
    assert line["valid"] == pytest.approx(next_epoch["valid"], abs=1e-5)


@pytest.mark.parametrize("old", ["run-0.2-killed"], indirect=True)
def test_best_weights_in_a_file_of_their_own(old, tmp_path) -> None:
    """They move with the checkpoint; without them, or with others, it is refused."""
    there = RunFolder(shutil.copytree(old, tmp_path / "there"))
    (best,) = there.path.glob("checkpoint.pt.best-*")
    assert recbole_pos.load(there.path).model
    best.write_bytes(there.checkpoint.read_bytes())
    with pytest.raises(CheckpointError):
        recbole_pos.load(there.path)
    best.unlink()
    with pytest.raises(CheckpointError):
        recbole_pos.load(there.path)
