"""Parts of a search by themselves: data of trials, the command line. No Ray processes here."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import shop
from recbole_pos.tune.trial import EARLIER, FAILURE, INFRASTRUCTURE, reason

from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.runs.searchers import BEST
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.tune import search
from recbole_pos.tune.record import Record, best_of, write_trials
from recbole_pos.tune.trials import Progress


def test_empty_cells_of_events_are_cut_with_the_log(tmp_path: Path) -> None:
    """And those of items and users are not."""
    whole = shop.open_shop(shop.write(tmp_path, shop.tables()))
    config = PosConfig("AttrFormer", "shop", None, whole.config.external_config_dict)
    part = prepare(config, dataset=SharedData(whole.dataset).dataset(config))
    missing, kept = whole.dataset.missing, whole.dataset.part != TEST
    assert missing["stars"][~kept].any() and missing["stars"][kept].any()
    np.testing.assert_array_equal(part.dataset.missing["stars"], missing["stars"][kept])
    for field in ("price", "age"):
        np.testing.assert_array_equal(part.dataset.missing[field], missing[field])
    part.model.load_state_dict(whole.model.state_dict())
    scores = [dict(e.trainer.evaluate(e.loaders["valid"], load_best_model=False))
              for e in (whole, part)]  # fmt: skip
    assert scores[0] == scores[1]


@pytest.mark.parametrize("seed", [["--seed=5"], ["--seed", "5"]])
def test_the_seed_of_the_command_is_that_of_the_search(seed: list[str], monkeypatch) -> None:
    called: list[dict[str, Any]] = []

    def caught(model: str, dataset: str, space: Any, files: list, given: dict, **own: Any) -> None:
        called.append({"given": given, **own})

    monkeypatch.setattr("recbole_pos.tune.search", caught)
    assert main(["tune", "-m", "FPARec", "-d", "tiny", *seed, "--epochs=3"]) == 0
    assert called[0]["settings"].seed == 5 and called[0]["given"] == {"epochs": 3}


def test_the_seed_of_a_run_is_that_of_training(monkeypatch) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr("recbole_pos.experiment.run.run", lambda *a, **k: called.append(a[3]))
    assert main(["run", "-m", "FPARec", "-d", "tiny", "--seed=5"]) == 0
    assert called == [{"seed": 5}]


@pytest.mark.parametrize(
    "more",
    [
        {"metric": "mrr@10"},
        {"scheduler": "none"},
        {"grace_epochs": 1},
        {"searcher": "grid"},
        {"seed": 1},
        {"run_dir": "elsewhere"},
        {"space": "my.yaml"},
        {"config_file_list": ["my.yaml"]},
        {"config_dict": {"epochs": 1, "data_path": "there"}},
    ],
)
def test_a_resumed_search_takes_nothing_that_changes_it(tmp_path: Path, more: dict) -> None:
    """And names what it does take, which is what its other messages advise."""
    (name,) = more
    with pytest.raises(UsageError) as error:
        search(resume=tmp_path, **more)
    allowed, refused = str(error.value).split("leave out ")
    assert refused == repr("epochs" if name == "config_dict" else name)
    assert "--data_path" in allowed and "--storage" in allowed and "--nproc" in allowed


def ray_trial(number: int, **config: Any) -> Any:
    options = {"learning_rate": number / 100}
    return SimpleNamespace(
        trial_id=f"t{number}", status="RUNNING", pickled_error_file="/nowhere",
        config={"number": number, "options": options, **config},
    )  # fmt: skip


def report(epoch: int, ended: bool = False, **more: Any) -> dict[str, Any]:
    given = {"epoch": epoch, "valid": epoch / 10, BEST: epoch / 10, "best_epoch": epoch - 1}
    given |= {"best_valid": {"ndcg@10": epoch / 10}, "ended": ended, "seconds": 1.0}
    return {**given, "parameters": 9, "hostname": "host", "node": "n", "config": {}, **more}


def progress(file: Path) -> Progress:
    return Progress(Record(file), "ndcg@10", "max", 4, every=0.0)


def test_how_trials_end(tmp_path: Path, capsys) -> None:
    """By themselves, by the scheduler, by their own fault, or by none of theirs."""
    seen = progress(tmp_path / "trials.jsonl")
    trials = [ray_trial(number) for number in range(5)]
    seen.on_step_end(0, trials)
    for trial in trials[:3]:
        seen.on_trial_result(0, trials, trial, report(1))
    seen.on_trial_result(0, trials, trials[0], report(2, ended=True))
    reasons = ["out of memory [pair.cc:553] at [/lib/a]", "StorageError: no room"]
    for trial, why, infrastructure in zip(trials[2:], reasons, (False, True), strict=False):
        told = {BEST: math.nan, FAILURE: why, INFRASTRUCTURE: infrastructure}
        seen.on_trial_result(0, trials, trial, told)
    for trial in trials[:4]:
        seen.on_trial_complete(0, trials, trial)
    seen.on_trial_error(0, trials, trials[4])
    seen.on_step_end(0, trials)
    printed = capsys.readouterr().out
    assert all(f": {why}\n" in printed for why in reasons)  # brackets are no markup
    for known in (seen.record, Record(tmp_path / "trials.jsonl")):
        states = [trial.state for trial in known.trials]
        assert states == ["finished", "stopped", "failed", "lost", "lost"]
        assert [trial.epochs for trial in known.trials] == [2, 1, 1, 0, 0]
        assert [bool(trial.reason) for trial in known.trials] == [False] * 2 + [True] * 3
        assert [trial.number for trial in known.unfinished] == [3, 4]
        assert best_of(known.trials, "max") is known.trials[0]


def test_what_is_lost_again_when_resumed_is_failed(tmp_path: Path) -> None:
    """Else a trial that takes its process down each time would never let a search end."""
    file = tmp_path / "trials.jsonl"
    for earlier, state in (([], "lost"), (["trial_00000"], "failed")):
        seen = progress(file)
        trial = ray_trial(0, **({"earlier": earlier} if earlier else {}))
        seen.on_step_end(0, [trial])
        assert seen.record.trials[0].state == "interrupted"
        seen.on_trial_recover(0, [trial], trial)
        seen.on_trial_error(0, [trial], trial)
        assert Record(file).trials[0].state == state
    assert Record(file).trials[0].folders == ["trial_00000", "trial_00000-1"]


def test_a_lost_report_is_in_the_next_one(tmp_path: Path) -> None:
    """Ray has the checkpoint of epoch 2, and not its report."""
    seen, trial = progress(tmp_path / "trials.jsonl"), ray_trial(0)
    seen.on_trial_result(0, [trial], trial, report(1))
    earlier = json.dumps({"1": 0.1, "2": 0.2})
    seen.on_trial_result(0, [trial], trial, report(3, **{EARLIER: earlier}))
    (known,) = Record(tmp_path / "trials.jsonl").trials
    assert list(known.curve.items()) == [(1, 0.1), (2, 0.2), (3, 0.3)] and known.score == 0.3


def test_a_table_is_safe_to_open_and_lines_are_short(tmp_path: Path, capsys) -> None:
    seen, trial = progress(tmp_path / "trials.jsonl"), ray_trial(0)
    trial.config["options"] = {"position": ["rope"] * 10_000, "cell": "=1+1"}
    seen.on_trial_result(0, [trial], trial, report(1, ended=True))
    seen.on_trial_complete(0, [trial], trial)
    assert len(capsys.readouterr().out) < 500
    write_trials(seen.record.trials, ["cell"], "ndcg@10", tmp_path / "trials.csv")
    with open(tmp_path / "trials.csv", newline="") as file:
        assert next(csv.DictReader(file))["cell"] == "'=1+1"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_memory_that_is_not_there_is_said_to_be(error: Exception) -> None:
    assert reason(error).startswith("out of memory")
