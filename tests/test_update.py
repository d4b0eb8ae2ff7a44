"""Updates: training resumes from the weights of a run on data that have grown."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_log, train, wait, write_atomic
from test_grown import grow
from test_trainer import assert_same

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.warm_start import fill_new_items
from recbole_pos.serve.holder import ModelHolder


def update(folder: Path, name: str = "new", new_items: str | None = None, **options: Any) -> Path:
    more = {"run_dir": folder / name, "new_items": new_items, "verbose": False}
    recbole_pos.update(folder / "old", options, **more)
    return folder / name


def vectors(run_dir: Path) -> dict[str, np.ndarray]:
    return dict(zip(*recbole_pos.Recommender.load(run_dir).item_vectors(), strict=True))


@pytest.mark.parametrize("model", ["PosSASRec", "AttrFormer"])
def test_starts_with_the_weights_of_each_name(tmp_path, model) -> None:
    """Nothing is learned at this rate, so every name still has its vector; lines are shuffled."""
    log = make_log()
    train(write_atomic(log, tmp_path), tmp_path / "old", model)
    before = recbole_pos.load(tmp_path / "old").model.state_dict()
    write_atomic(grow(log, shuffle=True), tmp_path)
    made = recbole_pos.load(update(tmp_path, epochs=1, learning_rate=1e-30, stopping_step=1))
    assert made.dataset.field2id_token["item_id"][-1] == "a new item"
    assert made.dataset.field2token_id["user_id"]["no one"]
    for name, weight in made.model.state_dict().items():
        known = weight[tuple(map(slice, before[name].shape))]
        torch.testing.assert_close(known, before[name], rtol=0, atol=1e-12)


def test_an_updated_run_is_a_run(tmp_path) -> None:
    """It resumes, recommends what is new, and can be updated itself; its folder knows the ids."""
    log = make_log()
    train(write_atomic(log, tmp_path), tmp_path / "old")
    grown = grow(log, shuffle=False)
    write_atomic(grown, tmp_path)
    new = update(tmp_path, epochs=1)
    (tmp_path / "old").rename(tmp_path / "away")
    assert recbole_pos.run(resume=new, config_dict={"epochs": 2}, verbose=False).epochs == 2
    found = recbole_pos.recommend(new, k=len(log["item_id"].unique()))
    assert "a new item" in set(found["item_id"]) and "no one" in set(found["user_id"])
    new.rename(tmp_path / "old")
    more = pd.DataFrame({"user_id": ["u5"], "item_id": ["another"], "timestamp": [3e9]})
    write_atomic(pd.concat((grown, more)), tmp_path)
    assert {"a new item", "another"} <= set(vectors(update(tmp_path, "third", epochs=1)))


def test_new_items_from_their_attribute(tmp_path) -> None:
    log = make_log()
    items = pd.DataFrame({"item_id:token": sorted(log["item_id"].unique())})
    items["kind:token"] = [f"k{number % 3}" for number in range(len(items))]
    file = write_atomic(log, tmp_path) / "tiny" / "tiny.item"
    items.to_csv(file, sep="\t", index=False)
    load_col = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "kind"]}
    train(tmp_path, tmp_path / "old", "FPARec", load_col=load_col)
    old = vectors(tmp_path / "old")
    write_atomic(grow(log, shuffle=False), tmp_path)
    items.loc[len(items)] = ("a new item", "k1")
    items.to_csv(file, sep="\t", index=False)
    new = vectors(update(tmp_path, epochs=1, learning_rate=1e-30, new_items="kind"))
    alike = [name for name, kind in items.iloc[:-1].itertuples(index=False) if kind == "k1"]
    expected = np.mean([old[name] for name in alike], axis=0)
    np.testing.assert_allclose(new["a new item"], expected, rtol=1e-5)
    with pytest.raises(UsageError, match="kinds"):
        update(tmp_path, "third", epochs=1, new_items="kinds")


def test_means_of_shared_tokens() -> None:
    """Against loops."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 7, (30, 3)))
    tokens[0] = 0
    tokens[29] = 8  # no one else's
    start = torch.randn(30, 4, dtype=torch.float64)
    found = start.clone()
    fill_new_items(found, 20, tokens)
    assert torch.equal(found[:20], start[:20]) and torch.equal(found[29], start[29])
    for new in range(20, 29):
        means = []
        for token in set(tokens[new].tolist()) - {0}:
            having = [start[i] for i in range(20) if token in tokens[i].tolist()]
            if having:
                means.append(sum(having) / len(having))
        torch.testing.assert_close(found[new], sum(means) / len(means) if means else start[new])


def test_what_does_not_fit(tmp_path) -> None:
    train(write_atomic(make_log(), tmp_path), tmp_path / "old")
    old = tmp_path / "old"
    for options, message in (
        ({"hidden_size": 32}, "was trained with hidden_size: 16, this run has 32"),
        ({"init_from": "x"}, "weights come from one run"),
        ({"MAX_ITEM_LIST_LENGTH": 5}, "MAX_ITEM_LIST_LENGTH"),
    ):
        given = {"update_from": str(old), **options}
        with pytest.raises(UsageError, match=message):
            recbole_pos.run(None, None, [str(old / "config.yaml")], given, tmp_path / "new")
    (old / "known.parquet").unlink()
    with pytest.raises(UsageError, match="made by an earlier version"):
        recbole_pos.update(old)


# --- an update can be repeated, whatever ended it; an unfinished run says so ---


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    """A finished run, and data that have grown since."""
    folder = tmp_path_factory.mktemp("shop")
    train(write_atomic(make_log(), folder), folder / "old")
    write_atomic(grow(make_log(), shuffle=False), folder)
    return folder


@pytest.fixture
def here(shop, tmp_path, monkeypatch) -> Path:
    shutil.copytree(shop, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(epochs: int = 20) -> list[str]:
    command = ["update", "old", "--run_dir", "new", "--data_path=.", "--quiet"]
    return [*command, f"--epochs={epochs}", "--stopping_step=1000"]


def kill_update(is_reached: Callable[[], bool]) -> None:
    """Kill an update, in a process forked from this one, at some moment."""
    process = multiprocessing.get_context("fork").Process(target=main, args=(words(),))
    process.start()
    try:
        wait(lambda: is_reached() or not process.is_alive())
    finally:
        process.kill()
        process.join()


def epochs(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def stop(folder: Path) -> None:
    """As a run is that was killed before its test."""
    for name in ("result.json", "test_ranks.parquet"):
        (folder / name).unlink()


def test_the_same_line_again_after_kills_at_any_moment(here) -> None:
    """Of one that began, is in the middle, and has trained; it ends as one never stopped."""
    folder = here / "new"
    kill_update(folder.exists)
    kill_update((folder / "config.yaml").exists)
    kill_update(lambda: epochs(folder) >= 3)
    kill_update(lambda: epochs(folder) >= 20 and (folder / "test_ranks.parquet").exists())
    assert main(words()) == 0
    before = (folder / "result.json").read_bytes()
    assert main(words()) == 0  # nothing is left to do
    assert (folder / "result.json").read_bytes() == before
    folder.rename(here / "killed")
    assert main(words()) == 0
    assert_same(folder, here / "killed")


def test_it_begins_again_if_the_data_have_grown(here) -> None:
    assert main(words(2)) == 0
    stop(here / "new")
    grown = grow(make_log(), shuffle=False)
    grown.loc[len(grown)] = ("u5", "another", 3e9)
    write_atomic(grown, here)
    assert main(words(2)) == 0
    assert "another" in recbole_pos.Recommender.load("new", ".").items and epochs(Path("new")) == 2
    grown.loc[len(grown)] = ("u5", "one more", 3e9)
    write_atomic(grown, here)
    assert main(words(2)) == 2  # a finished run is never removed
    assert Path("new/result.json").is_file()


def test_another_run_in_the_folder_is_left_alone(here, capsys) -> None:
    shutil.copytree("old", "new")
    stop(here / "new")
    assert main(words(2)) == 2
    assert "new holds a run already" in capsys.readouterr().err
    shutil.rmtree("new")
    assert main(words(2)) == 0
    stop(here / "new")
    assert main(words(3)) == 2
    assert "epochs" in capsys.readouterr().err
    Path("new/checkpoint.pt").unlink()  # as between removing and beginning
    assert main(words(2)) == 0 and epochs(here / "new") == 2


@pytest.mark.parametrize("more", [False, True])
def test_an_unfinished_run_says_so_once_and_how_to_finish_it(here, capsys, more) -> None:
    """Killed the first time, or while it was trained further; no update begins from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        recbole_pos.load("old", data_path=".")
    if more:
        write_atomic(make_log(), here)
        assert main(["run", "--resume", "old", "--epochs=2", "--data_path=.", "--quiet"]) == 0
        result = json.loads(Path("old/result.json").read_text())
        Path("old/result.json").write_text(json.dumps({**result, "epochs": 1}))
    else:
        stop(here / "old")
    advice = "recbole-pos run --resume old"
    with pytest.warns(RunWarning, match=advice) as warned:
        assert main("recommend old --data_path . --users u9 -k 2".split()) == 0
    assert len(warned) == 1
    with pytest.warns(RunWarning, match=advice):
        assert advice in ModelHolder("old", ".").load().facts["unfinished"]
    assert main(words(2)) == 2 and not Path("new").exists()
    assert advice in capsys.readouterr().err


def test_a_run_without_an_epoch_says_so(here, capsys) -> None:
    for name in ("checkpoint.pt", "result.json"):
        Path("old", name).unlink()
    assert main(["recommend", "old"]) == 2
    assert "recbole-pos run --resume old" in capsys.readouterr().err
