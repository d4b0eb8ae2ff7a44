"""A run folder works wherever it and its data are, of any version; on other data it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import shop
from conftest import make_log, train, write_atomic

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.dataset import PosSequentialDataset
from recbole_pos.data.identity import Vocabulary, extend_log, keep_known_rows
from recbole_pos.data.splits import TEST
from recbole_pos.errors import CheckpointError, RunWarning, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import read_dataset
from recbole_pos.experiment.folder import RunFolder
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
        loaded = recbole_pos.Recommender.load("run")
    assert loaded.collect_facts()["items"] == 40 == len(loaded.items)
    alone = recbole_pos.Recommender.load("run", data, histories_only=True)
    with pytest.raises(UsageError, match="data_path"):
        alone.recommend(users=["u9"])


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


def test_a_table_of_names_with_damaged_metadata_is_refused(here) -> None:
    file = "run/known.parquet"
    metadata = b'{"index_columns": [], "columns": [5], "column_indexes": []}'
    pq.write_table(pq.read_table(file).replace_schema_metadata({b"pandas": metadata}), file)
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


@pytest.fixture(scope="module")
def shop_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shop.write(tmp_path_factory.mktemp("shop"), shop.tables())
    shop.train(folder, folder / "run", epochs=1)
    return folder / "run"


def copy_with(shop_run: Path, folder: Path, *changed: str) -> Path:
    """A copy of the run on a copy of the shop where columns are the other way round."""
    made = shop.tables()
    for name in changed:
        for table in made.values():
            for column in table.columns[table.columns.str.startswith(f"{name}:")]:
                table[column] = table[column].to_numpy()[::-1]
    shop.write(folder, made)
    shutil.copytree(shop_run, folder / "run")
    config = folder / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(shop_run.parent), str(folder)))
    return folder / "run"


def test_the_same_files_are_the_same_data(shop_run: Path, tmp_path: Path) -> None:
    """A number that is missing now is a change: RecBole puts the mean in its place."""
    made = recbole_pos.load(copy_with(shop_run, tmp_path))
    fields = {"brand", "tags", "price", "weight", "channel", "stars", "country", "age"}
    assert set(made.dataset.identity["fields"]) == fields
    other = shop.open_shop(shop_run.parent).dataset
    other.missing = {**other.missing, "price": ~other.missing["price"]}
    del other.__dict__["identity"]  # of what it was before
    then, now = made.dataset.identity["fields"], other.identity["fields"]
    assert {field for field in then if then[field] != now[field]} == {"price"}


@pytest.mark.parametrize("changed", [["price", "tags"], ["age"], ["stars"]], ids=str)
def test_changed_attributes_are_refused(shop_run: Path, tmp_path: Path, changed: list[str]) -> None:
    run = copy_with(shop_run, tmp_path, *changed)
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
        {"item_id": "xyxzyy"},
        {"item_id": "yxyzxy"},  # the same numbers
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
        dataset.build()
        found.append(dataset.identity["data"])
    assert found[0] != found[1]


def test_later_interactions_are_history_only(tmp_path: Path) -> None:
    """None of them is a target, those of the run stay, and they come last for their user."""
    frame = make_log()
    given = {"data_path": str(write_atomic(frame, tmp_path))}
    config = PosConfig("PosSASRec", "tiny", None, given)
    known = read_dataset(config)
    known.build()
    later = pd.DataFrame({"user_id": ["u9", "new"], "item_id": ["i1", "i2"], "timestamp": 2e9})
    write_atomic(pd.concat([frame, later]), tmp_path)
    grown = PosSequentialDataset(config, Vocabulary.from_dataset(known))
    grown.build()
    assert grown.identity == known.identity
    whole = extend_log(grown, grown.held_out, has_new_users=True)
    assert whole.split.is_target.sum() == known.split.is_target.sum()
    assert len(whole.log) == len(frame) + 2 and whole.user_num == known.user_num + 1
    for user, item in (("u9", "i1"), ("new", "i2")):
        last = whole.log.offsets[whole.field2token_id["user_id"][user] + 1] - 1
        assert whole.log.items[last] == known.field2token_id["item_id"][item]
        assert not whole.split.is_target[last] and whole.part[last] == TEST


def test_lists_of_tokens_are_reduced_to_known_ones_in_linear_time() -> None:
    """Tags, say, of which a catalogue has as many as items."""
    names = np.array(["[PAD]", *(f"n{n}" for n in range(4000))])
    known = Vocabulary({"item_id": names, "tags": names}, np.zeros(1, dtype=np.int64))
    lists = [np.array([name, "new"]) for name in names[1:]]
    table = pd.DataFrame({"item_id": names[1:], "tags": pd.Series(lists, dtype=object)})
    started = process_time()
    kept = keep_known_rows(table, "item_id", known)
    assert process_time() - started < 2
    assert [cell.tolist() for cell in kept["tags"]] == [[name] for name in names[1:]]
