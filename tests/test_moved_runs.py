"""A run folder works wherever it and its data are; given histories need no data at all."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import CROSS_ENTROPY, SMALL, make_log, small, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment import checkpoint

HISTORIES = [["i1", "i2", "i3"], ["i7"], ["nothing known"]]


def train(folder: Path, model: str, **more: Any) -> Path:
    """A run and its data, both moved away from where it was trained."""
    write_atomic(make_log(), folder / "before")
    given = {"data_path": str(folder / "before"), "epochs": 1, **more}
    given |= CROSS_ENTROPY.get(model, {})
    given |= {key: value for key, value in small(model, **given).plain.items() if key in SMALL}
    recbole_pos.run(model, "tiny", None, given, run_dir=folder / "run", verbose=False)
    (folder / "before").rename(folder / "now")
    return (folder / "run").rename(folder / "moved")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("moved"), "PosSASRec", position=["learned"])


@pytest.fixture
def here(moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
        "plot run",
        "inspect attention --checkpoint run --min_events 2",
        "inspect encoding --checkpoint run --length 5",
        "evaluate run",
        "evaluate run --mask_history true",
        "run --resume run --epochs 2 --quiet",
        "update run --run_dir new --epochs 1 --quiet",
        "attach run kernel --run_dir new --epochs 1 --quiet",
    ],
)
def test_every_reader_says_where_to_name_the_data_and_takes_them(
    here: Path, moved: Path, capsys: pytest.CaptureFixture, command: str
) -> None:
    words, data = command.split(), str(moved.parent / "now")
    if "evaluate" not in words or "--mask_history" in words:  # the ranks are in the run
        assert main(words) == 2
        assert "--data_path" in capsys.readouterr().err
    assert main([*words, "--data_path", data]) == 0


def test_what_needs_no_data(here: Path, moved: Path) -> None:
    """The answers are those that are given with the data."""
    data = str(moved.parent / "now")
    assert main("recommend run -k 4 --histories asked.jsonl --out a.parquet".split()) == 0
    assert main([*"recommend run -k 4 --histories asked.jsonl --out b.parquet --data_path".split(),
                 data]) == 0  # fmt: skip
    pd.testing.assert_frame_equal(*(pd.read_parquet(f"{name}.parquet") for name in "ab"))
    assert main("similar run i1 i2".split()) == 0
    with_data = recbole_pos.Recommender.load("run", data)
    with pytest.warns(RunWarning, match="data_path"):
        without = recbole_pos.Recommender.load("run")
    for one, other in zip(with_data.item_vectors(), without.item_vectors(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(UsageError, match="data_path"):
        without.recommend(users=["u9"])


def test_a_model_is_exported_without_data(here: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert main("export run --to out -k 5 --format torch_export".split()) == 0


def test_a_server_answers_histories_without_data(here: Path) -> None:
    from recbole_pos.serve.holder import ModelHolder

    live = ModelHolder("run")
    with pytest.warns(RunWarning):
        loaded = live.load()
    assert loaded.about["items"] == 40 == len(loaded.recommender.items)


@pytest.mark.parametrize(
    ("model", "options", "can"),
    [
        ("SASRec", {}, True),
        ("Pop", {}, True),
        ("FPARec", {}, True),
        ("TORoPE", {"n_heads": 2}, True),
        ("AttrFormer", {"relations": ["time"]}, False),
        ("SessionKNN", {}, False),
    ],
)
def test_models_that_read_more_say_why(
    tmp_path: Path, model: str, options: dict[str, Any], can: bool
) -> None:
    run = train(tmp_path, model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)
        if can:
            history = {"items": ["i1", "i2"], "times": [1.5e9, 1.6e9]}
            found = recbole_pos.Recommender.load(run).recommend(histories=[history], k=3)
            assert len(found) == 3
        else:
            with pytest.raises(UsageError, match="interactions.*data_path"):
                recbole_pos.Recommender.load(run)
    again = recbole_pos.Recommender.load(run, tmp_path / "now")
    assert len(again.recommend(histories=[{"items": ["i1"], "times": [2e9]}], k=3)) == 3


def test_a_run_of_an_earlier_version_needs_the_data_and_says_so(here: Path, moved: Path) -> None:
    """Its table has no counts of items, and its checkpoint no digest of it."""
    file = here / "run" / "checkpoint.pt"
    checkpoint.save(file, {**checkpoint.load(file), "known": None})
    table = pd.read_parquet("run/known.parquet")
    table.loc[table["field"] == "item_id", "events"] = -1
    table.to_parquet("run/known.parquet", index=False)
    with pytest.raises(UsageError, match="popularity.*data_path"):
        recbole_pos.Recommender.load("run")
    assert len(recbole_pos.recommend("run", ["u9"], 3, data_path=moved.parent / "now")) == 3


@pytest.mark.parametrize("column", ["events", "token", "twice", "names", "order"])
def test_a_damaged_table_of_names_is_refused(
    here: Path, capsys: pytest.CaptureFixture, column: str
) -> None:
    table = pd.read_parquet("run/known.parquet").astype({"field": str})
    if column == "twice":
        table = pd.concat([table, table.iloc[-1:]])
    elif column == "names":  # of more items than the model has
        table = pd.concat([table, table.iloc[-1:].assign(token="another", events=1)])
    elif column == "order":  # every weight would be of another item
        table = table.iloc[::-1]
    else:
        table[column] = 0.5
    table.to_parquet("run/known.parquet", index=False)
    assert main("similar run i1".split()) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_other_data_are_refused(here: Path, tmp_path: Path) -> None:
    data = write_atomic(make_log(seed=1), tmp_path / "other")
    assert main(["recommend", "run", "--data_path", str(data)]) == 2
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert main(["evaluate", "run", "--mask_history", "true", "--data_path", str(data)]) == 2
    assert yaml.safe_load(Path("run/config.yaml").read_text()) == config
