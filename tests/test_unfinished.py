"""An unfinished run says so; an update can be repeated, whatever ended it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL, make_log, wait, write_atomic
from test_grown import grow
from test_trainer import assert_same

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.folder import RunFolder


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and data that have grown since."""
    folder = tmp_path_factory.mktemp("shop")
    log = make_log()
    given = {**SMALL, "data_path": str(write_atomic(log, folder)), "epochs": 1}
    recbole_pos.run("FPARec", "tiny", None, given, run_dir=folder / "live", verbose=False)
    write_atomic(grow(log, shuffle=False), folder)
    return folder


@pytest.fixture
def here(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(shop / "live", tmp_path / "live")
    shutil.copytree(shop / "tiny", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(epochs: int = 20) -> list[str]:
    command = ["update", "live", "--run_dir", "next", "--data_path=.", "--quiet"]
    return [*command, f"--epochs={epochs}", "--stopping_step=1000"]


def forked(act: Callable[[], Any], until: Callable[[], Any] = lambda: False) -> tuple[int, str]:
    """The exit code and stderr of a process from this one; killed at that moment."""

    def child() -> None:
        warnings.resetwarnings()  # as they are without pytest
        warnings.showwarning = lambda text, kind, *place: sys.stderr.write(
            warnings.formatwarning(text, kind, *place[:2])
        )
        with open("stderr", "w") as sys.stderr:
            code = act()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        wait(lambda: until() or not process.is_alive())
    finally:
        process.kill()
        process.join()
    return process.exitcode or 0, Path("stderr").read_text()


def start(here: Path, until: Callable[[], Any]) -> None:
    """An update in a process that is killed at that moment."""
    forked(lambda: main(words()), until)


def epochs(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def stop(folder: Path) -> None:
    """As a run is that was killed before its test."""
    for name in ("result.json", "test_ranks.parquet"):
        (folder / name).unlink()


def test_the_same_line_again_after_kills_at_any_moment(here: Path) -> None:
    """Of one that began, is in the middle, and has trained; it ends as one never stopped."""
    folder = here / "next"
    start(here, folder.exists)
    start(here, (folder / "config.yaml").exists)
    start(here, lambda: epochs(folder) >= 3)
    start(here, lambda: epochs(folder) >= 9)
    start(here, lambda: epochs(folder) >= 20 and (folder / "test_ranks.parquet").exists())
    assert main(words()) == 0
    before = (folder / "result.json").read_bytes()
    assert main(words()) == 0  # nothing is left to do
    assert (folder / "result.json").read_bytes() == before
    folder.rename(here / "killed")
    assert main(words()) == 0
    assert_same(folder, here / "killed")


def test_it_begins_again_if_the_data_have_grown(here: Path) -> None:
    assert main(words(2)) == 0
    stop(here / "next")
    grown = grow(make_log(), shuffle=False)
    more = {"user_id": "u5", "item_id": "another", "timestamp": 3e9}
    grown.loc[len(grown)] = more
    write_atomic(grown, here)
    assert main(words(2)) == 0
    names = recbole_pos.Recommender.load("next", ".").items
    assert "another" in names and epochs(here / "next") == 2
    grown.loc[len(grown)] = {**more, "item_id": "one more"}
    write_atomic(grown, here)
    assert main(words(2)) == 2  # a finished run is never removed
    assert (here / "next" / "result.json").is_file()


def test_what_is_left_between_removing_and_beginning(here: Path) -> None:
    assert main(words(2)) == 0
    RunFolder("next").checkpoint.unlink()
    (here / "next" / "result.json").unlink()
    assert main(words(2)) == 0 and epochs(here / "next") == 2


def test_another_run_in_the_folder_is_left_alone(here: Path, capsys: Any) -> None:
    shutil.copytree("live", "next")
    stop(here / "next")
    assert main(words(2)) == 2
    assert "next holds a run already" in capsys.readouterr().err
    shutil.rmtree("next")
    assert main(words(2)) == 0
    stop(here / "next")
    assert main(words(3)) == 2
    assert "epochs" in capsys.readouterr().err


def test_nothing_begins_from_a_half_trained_run(here: Path, capsys: Any) -> None:
    stop(here / "live")
    assert main(words(2)) == 2
    assert "`recbole-pos run --resume live`" in capsys.readouterr().err
    assert not (here / "next").exists()


@pytest.mark.parametrize("more", [False, True])
def test_an_unfinished_run_says_so_once_and_how_to_finish_it(here: Path, more: bool) -> None:
    """Killed the first time, or while it was trained further."""
    if more:
        write_atomic(make_log(), here)
        assert main(["run", "--resume", "live", "--epochs=2", "--data_path=.", "--quiet"]) == 0
        result = json.loads(Path("live/result.json").read_text())
        Path("live/result.json").write_text(json.dumps({**result, "epochs": 1}))
    else:
        stop(here / "live")
    words = "recommend live --data_path . --users u9 -k 2".split()
    code, printed = forked(lambda: main(words))
    assert code == 0
    reported = [line for line in printed.splitlines() if "recbole-pos run --resume live" in line]
    assert len(reported) == 1 and reported[0].startswith("warning: ")
    with pytest.warns(RunWarning):
        recbole_pos.load("live", data_path=".")
    from recbole_pos.serve.holder import ModelHolder

    with pytest.warns(RunWarning):
        assert "--resume live" in ModelHolder("live", ".").load().about["unfinished"]


def test_a_run_without_an_epoch_says_so(here: Path, capsys: Any) -> None:
    for name in ("checkpoint.pt", "result.json"):
        (here / "live" / name).unlink()
    assert main(["recommend", "live"]) == 2
    assert "recbole-pos run --resume live" in capsys.readouterr().err


def test_a_finished_run_says_nothing(here: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        recbole_pos.load("live", data_path=".")


def test_an_interrupted_fit_keeps_its_weights(here: Path) -> None:
    """A loaded model evaluates its best weights, also after they were changed in memory."""
    write_atomic(make_log(), here)
    made = recbole_pos.load("live", data_path=".")
    with torch.no_grad():
        made.model.item_embedding.weight.zero_()
    found = made.trainer.evaluate(made.loaders["test"])
    assert found == json.loads(Path("live/result.json").read_text())["test"]
    with pytest.raises(UsageError):
        recbole_pos.update("nowhere")
