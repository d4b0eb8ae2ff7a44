"""A run folder works wherever it and its data are; on other data it is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import shop
from conftest import make_log, train, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data import preparation
from recbole_pos.data.identity import Vocabulary, extend_log
from recbole_pos.data.splits import TEST
from recbole_pos.errors import CheckpointError, RunWarning, UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.experiment.run import load

HISTORIES = [["i1", "i2", "i3"], ["i7"], ["nothing known"]]


def train_elsewhere(folder: Path, model: str, **more: Any) -> Path:
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
        "inspect attention run",
        "evaluate run --mask_history true",
        "run --resume run --epochs 2 --quiet",
        "update run --run_dir new --epochs 1 --quiet",
        "attach run kernel --run_dir new --epochs 1 --quiet",
    ],
)
def test_every_reader_says_where_to_name_the_data(here, moved, capsys, command) -> None:
    words = command.split()
    assert main(words) == 2
    assert "--data_path" in capsys.readouterr().err
    assert main([*words, "--data_path", str(moved.parent / "now")]) == 0


def test_histories_need_no_data(here, moved) -> None:
    """The answers are those that are given with the data."""
    data, words = str(moved.parent / "now"), "recommend run -k 4 --histories asked.jsonl".split()
    assert main([*words, "--out=a.parquet"]) == 0
    assert main([*words, "--out=b.parquet", "--data_path", data]) == 0
    pd.testing.assert_frame_equal(*(pd.read_parquet(f"{name}.parquet") for name in "ab"))
    assert main("similar run i1 i2".split()) == 0
    with pytest.warns(RunWarning, match="data_path"):
        without = recbole_pos.Recommender.load("run")
    alone = recbole_pos.Recommender.load("run", data, histories_only=True)
    for model in (without, alone):
        with pytest.raises(UsageError, match="data_path"):
            model.recommend(users=["u9"])


@pytest.mark.filterwarnings("ignore::recbole_pos.errors.RunWarning")
def test_models_that_read_more_say_why(tmp_path) -> None:
    models = ("SASRec", {}, False), ("AttrFormer", {"relations": ["time"]}, True)
    for model, options, needs_data in (*models, ("SessionKNN", {}, True)):
        folder = tmp_path / model
        run, data = train_elsewhere(folder, model, **options), folder / "now"
        history = {"items": ["i1", "i2"], "times": [1.5e9, 1.6e9]}
        if needs_data:
            with pytest.raises(UsageError, match="interactions.*data_path"):
                recbole_pos.Recommender.load(run)
        for data_path in (data,) if needs_data else (None, data):
            model = recbole_pos.Recommender.load(run, data_path)
            assert len(model.recommend(histories=[history], k=3)) == 3


def test_other_data_are_refused(here, tmp_path) -> None:
    data = write_atomic(make_log(seed=1), tmp_path / "other")
    config = Path("run/config.yaml").read_text()
    assert main(["evaluate", "run", "--mask_history", "true", "--data_path", str(data)]) == 2
    with pytest.raises(CheckpointError, match="other data"):
        recbole_pos.run(resume="run", data_path=str(data), epochs=2, verbose=False)
    assert Path("run/config.yaml").read_text() == config


def test_changed_attributes_are_refused(tmp_path: Path) -> None:
    """Of items and of interactions, in whose columns the values are the other way round."""
    tables, run = shop.tables(), tmp_path / "run"
    shop.train(shop.write(tmp_path, tables), run, epochs=1)
    assert not recbole_pos.Recommender.load(run).changed
    for table in tables.values():
        for column in table.columns[table.columns.str.match("(price|stars|tags):")]:
            table[column] = table[column].to_numpy()[::-1]
    shop.write(tmp_path, tables)
    changed = ["price", "stars", "tags"]
    assert recbole_pos.Recommender.load(run).changed == changed  # it recommends, and says so
    match = f"the values of {', '.join(changed)}, or the order of "
    with pytest.raises(CheckpointError, match=match):
        load(run)
    with pytest.raises(CheckpointError, match=match):
        recbole_pos.run(resume=run, config_dict={"epochs": 2}, verbose=False)


@pytest.mark.parametrize(
    "change",
    [
        {"user_id": "aaaabb"},  # only where a sequence ends
        {"timestamp": [0.0, 1, 2, 3, 4, 6]},
        {"eval_args": {"split": {"GT": [0.5]}}},
    ],
    ids=str,
)
def test_every_part_of_the_data_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    given = {"topk": [1], "valid_metric": "NDCG@1", "eval_args": {"split": {"GT": [0.7]}}}
    columns = {"user_id": "aaabbb", "item_id": "xyxzyx", "timestamp": [0.0, 1, 2, 3, 4, 5]}
    found = []
    for more in ({}, change):
        table = {name: list(more.get(name, values)) for name, values in columns.items()}
        options = {name: more.get(name, value) for name, value in given.items()}
        options["data_path"] = str(write_atomic(pd.DataFrame(table), tmp_path))
        dataset = read_dataset(PosConfig("FPARec", "tiny", None, options))
        found.append(dataset.identity["data"])
    assert found[0] != found[1]


def test_later_interactions_are_history_only(tmp_path: Path) -> None:
    """None of them is a target, those of the run stay, and they come last for their user."""
    frame = make_log()
    given = {"data_path": str(write_atomic(frame, tmp_path))}
    config = PosConfig("PosSASRec", "tiny", None, given)
    known = read_dataset(config)
    later = pd.DataFrame({"user_id": ["u9", "new"], "item_id": ["i1", "i2"], "timestamp": 2e9})
    write_atomic(pd.concat([frame, later]), tmp_path)
    grown = preparation.read_dataset(config, Vocabulary.from_dataset(known), holds_out_later=True)
    assert grown.identity == known.identity
    whole = extend_log(grown, grown.held_out, has_new_users=True)
    assert whole.split.is_target.sum() == known.split.is_target.sum()
    assert len(whole.log) == len(frame) + 2 and whole.user_num == known.user_num + 1
    for user, item in (("u9", "i1"), ("new", "i2")):
        last = whole.log.offsets[whole.field2token_id["user_id"][user] + 1] - 1
        assert whole.log.items[last] == known.field2token_id["item_id"][item]
        assert not whole.split.is_target[last] and whole.part[last] == TEST


# --- folders that are none ---


def test_a_run_folder_that_is_a_file(here, refused) -> None:
    Path("file").write_text("no run")
    for command in ("recommend file", "export file --to out", "update file", "run --resume file"):
        refused(command)


def test_a_damaged_configuration_is_named(here, refused) -> None:
    good = (here / "run" / "config.yaml").read_text()
    for text in ("[1]", good.replace("hidden_size: 16", "hidden_size: sixteen")):
        (here / "run" / "config.yaml").write_text(text)
        refused("recommend run", "config.yaml")
