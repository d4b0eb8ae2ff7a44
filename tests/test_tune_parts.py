"""Parts of a search by themselves: data of trials, the command line. No Ray processes here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import shop

from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TEST
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.tune import outcome, search
from recbole_pos.tune.data import SharedData
from recbole_pos.tune.outcome import best_of, collect
from recbole_pos.tune.progress import Progress
from recbole_pos.tune.searchers import BEST
from recbole_pos.tune.trial import EARLIER, FAILURE, reason


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
        {"num_samples": 9},
        {"max_concurrent": 2},
        {"metric": "mrr@10"},
        {"scheduler": "none"},
        {"grace_epochs": 1},
        {"searcher": "grid"},
        {"seed": 1},
        {"cpus_per_trial": 2},
        {"gpus_per_trial": 0.5},
        {"nproc": 2},
        {"run_dir": "elsewhere"},
        {"config_dict": {"epochs": 1}},
    ],
)
def test_a_resumed_search_takes_nothing_else(tmp_path: Path, more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(UsageError, match=f"only --address may change, not {name}$"):
        search(resume=tmp_path, config_file_list=[], **{"config_dict": {}, **more})


def options_of(number: int) -> dict[str, Any]:
    return {"number": number, "options": {"learning_rate": number / 100}}


def reports(number: int, epochs: int = 2) -> list[dict[str, Any]]:
    return [{BEST: 0.1, "valid": 0.1, "epoch": epoch, "best_epoch": 0, "hostname": f"host{number}",
             "ended": True, "config": options_of(number)}
            for epoch in range(1, epochs + 1)]  # fmt: skip


@pytest.fixture
def ray_says(monkeypatch):
    """Lets Ray's saved state and its results be made of (number, status, reports, error)."""

    class Grid(list):
        num_errors = num_terminated = 0

    def say(*rows: tuple[int, str, list[dict[str, Any]], Any]) -> Grid:
        trials, results = [], []
        for number, status, told, error in rows:
            path, last = f"/x/trial_{number:05d}", told[-1] if told else {"trial_id": "x"}
            ended = status in ("ERROR", "TERMINATED")
            trials.append(
                SimpleNamespace(
                    config=options_of(number), status=status, path=path, last_result=last,
                    is_finished=lambda ended=ended: ended,
                )
            )  # fmt: skip
            frame = pd.json_normalize(told, sep="/") if told else None
            results.append(
                SimpleNamespace(
                    config=last.get("config"), metrics=last, metrics_dataframe=frame, error=error,
                    path=path,
                )
            )  # fmt: skip
        saved = SimpleNamespace(trials=trials)
        monkeypatch.setattr("ray.tune.ExperimentAnalysis", lambda path: saved)
        monkeypatch.setattr("ray.tune.ResultGrid", lambda analysis: results)
        grid = Grid(results[::-1])  # Ray puts those that it takes up again last
        grid.num_errors = sum(status == "ERROR" for _, status, *_ in rows)
        grid.num_terminated = sum(status == "TERMINATED" for _, status, *_ in rows)
        return grid

    return say


DIED = RuntimeError("worker died")


def test_processes_that_never_start_are_told_of(ray_says) -> None:
    grid = ray_says((0, "ERROR", [], DIED), (1, "ERROR", [], DIED))
    with pytest.raises(TrainingError, match="could not start a process for any of 2.*worker died"):
        collect("/x", grid)
    grid = ray_says((0, "ERROR", [], DIED), (1, "PENDING", [], None))
    assert [trial.state for trial in collect("/x", grid)] == ["failed", "interrupted"]


def test_lost_trials_are_failed_and_not_missing(ray_says) -> None:
    """Also after a resume, where Ray knows neither the options of one nor why."""
    grid = ray_says(
        (0, "TERMINATED", reports(0), None), (1, "ERROR", [], DIED), (2, "ERROR", [], None),
        (3, "ERROR", reports(3, 1), "Failure # 4 (occurred at noon)\nout of luck\n"),
    )  # fmt: skip
    trials = collect("/x", grid)
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert [trial.state for trial in trials] == ["finished"] + ["failed"] * 3
    assert [trial.options["learning_rate"] for trial in trials] == [0.0, 0.01, 0.02, 0.03]
    assert [trial.epochs for trial in trials] == [2, 0, 0, 1]
    assert trials[0].reason == "" and trials[1].reason == "RuntimeError: worker died"
    assert trials[2].reason == "its process was lost" and trials[3].reason == "out of luck"
    assert best_of(trials, "max") is trials[0] and trials[0].result is grid[3]


def test_the_end_of_a_trial_may_not_be_in_the_saved_state(ray_says) -> None:
    grid = ray_says((0, "TERMINATED", reports(0), None), (1, "PENDING", [], DIED),
                    (2, "PAUSED", reports(2), None))  # fmt: skip
    assert [t.state for t in collect("/x", grid)] == ["finished", "interrupted", "interrupted"]
    grid.num_errors, grid.num_terminated = 1, 2
    trials = collect("/x", grid)
    assert [trial.state for trial in trials] == ["finished", "failed", "finished"]
    assert trials[1].reason == "RuntimeError: worker died"


@pytest.mark.parametrize("told", [reports(0), [{"hostname": "host0", "config": options_of(0)}]])
def test_a_trial_does_not_take_what_another_in_its_process_told(ray_says, told: list) -> None:
    grid = ray_says((0, "TERMINATED", reports(0), None), (1, "ERROR", told, DIED))
    first, second = collect("/x", grid)
    assert (second.number, second.state, second.score, second.host) == (1, "failed", None, "")
    assert second.options == {"learning_rate": 0.01} and second.curve == {}
    assert (first.score, first.host, list(first.curve)) == (0.1, "host0", [1, 2])


def test_trials_of_a_search_that_is_not_over(ray_says) -> None:
    """A trial that was lost once, and is to be taken up again, has an error too."""
    ray_says((0, "TERMINATED", reports(0), None), (1, "PENDING", reports(1, 1), DIED),
             (2, "RUNNING", [], None))  # fmt: skip
    trials = collect("/x")
    assert [trial.state for trial in trials] == ["finished", "interrupted", "interrupted"]
    assert [trial.reason for trial in trials] == [""] * 3
    assert [trial.epochs for trial in trials] == [2, 1, 0]


def test_progress_does_not_take_what_another_trial_told(ray_says, capsys) -> None:
    ray_says((1, "RUNNING", reports(0), None))
    from ray import tune

    (trial,) = tune.ExperimentAnalysis("/x").trials
    progress = Progress("ndcg@10", "max", 2, every=0.0)
    progress.on_trial_recover(0, [trial], trial)
    progress.on_step_end(0, [trial])
    printed = capsys.readouterr().out
    assert "after epoch 0;" in printed and "1 (epoch 0)" in printed and "best" not in printed


def test_a_reason_is_printed_as_it_is(ray_says, capsys) -> None:
    """Brackets are no markup, which Rich would leave out or refuse."""
    ray_says((1, "TERMINATED", reports(0), None))
    from ray import tune

    (trial,) = tune.ExperimentAnalysis("/x").trials
    reason = "out of memory [pair.cc:553] at [/lib/a] with [rope, kernel]"
    trial.last_result = {FAILURE: reason, "config": {"number": trial.config["number"]}}
    Progress("ndcg@10", "max", 2).on_trial_complete(0, [trial], trial)
    assert f"failed: {reason}" in capsys.readouterr().out


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


def test_a_lost_report_is_told_again_by_the_resumed_trial() -> None:
    """Ray has the checkpoint of epoch 2, and not its report."""
    frame = pd.DataFrame(
        {
            "epoch": [1, 3, 4],
            "valid": [0.1, 0.3, 0.25],
            BEST: [0.1, 0.3, 0.3],
            "config/number": [7, 7, 7],
            EARLIER: [None, '{"1": 0.1, "2": 0.2}', '{"1": 0.1, "2": 0.2, "3": 0.3}'],
        }
    )
    last = {BEST: 0.3, "epoch": 4, "best_epoch": 2, "ended": True, "config": {"number": 7}}
    made = SimpleNamespace(config={"number": 7, "options": {}})
    result = SimpleNamespace(metrics=last, metrics_dataframe=frame, error=None)
    found = outcome._trial(made, result, "TERMINATED")
    assert found.curve == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.25} and list(found.curve) == [1, 2, 3, 4]
    result.metrics_dataframe = frame.drop(columns=EARLIER)  # never resumed
    assert list(outcome._trial(made, result, "TERMINATED").curve) == [1, 3, 4]
