"""The record of a search, from which it is resumed, and what may change. No Ray processes."""

from __future__ import annotations

import csv
import json
import logging
import math
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import FIFOScheduler

from recbole_pos.cli.main import main
from recbole_pos.config.arguments import SearchArguments
from recbole_pos.errors import UsageError
from recbole_pos.reporter import Reporter
from recbole_pos.runs.worker import reason
from recbole_pos.tuning import search
from recbole_pos.tuning.record import BEST, EARLIER, Record, adopt, find_best_trial, write_trials
from recbole_pos.tuning.settings import SearchFolder, read_settings, resumed_settings
from recbole_pos.tuning.trials import FAILURE, INFRASTRUCTURE, Recorder, _no_stacks


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> SearchFolder:
    """Of a search of two trials that has not begun."""
    given, arguments = {"data_path": str(tiny)}, SearchArguments(num_samples=2)
    settings = read_settings("FPARec", "tiny", None, None, given, arguments)
    return SearchFolder.create(tmp_path_factory.mktemp("search") / "out", settings)


def begun(number: int, **more: Any) -> dict[str, Any]:
    return {"trial": number, "options": {"n_layers": 1}, **more}


def report(epoch: int, ended: bool = False, **more: Any) -> dict[str, Any]:
    given = {"epoch": epoch, "valid": epoch / 10, BEST: epoch / 10, "best_epoch": epoch - 1}
    given |= {"best_valid": {"ndcg@10": epoch / 10}, "ended": ended, "seconds": 1.0}
    return {**given, "parameters": 9, "hostname": "host", "node": "n", "config": {}, **more}


def test_a_record_that_was_cut_off_loses_its_last_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    record = Record(file)
    record.add(begun(0))
    whole = file.read_bytes()
    record.add({"trial": 0, "state": "finished", "reason": ""})
    cut_off = file.read_bytes()[:-3]
    file.write_bytes(cut_off)
    assert Record(file).trials[0].state == "interrupted" and file.read_bytes() == cut_off
    Record(file).add(begun(1))
    assert len(Record(file).trials) == 2 and file.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "[" * 100_000,
        json.dumps(begun(7)),
        json.dumps(begun(0, trial="0")),
        json.dumps(begun(0, options=3)),
        json.dumps(begun(0, state="won", reason="")),
        json.dumps(begun(0, epoch=1)),
        '{"trial": 0, "options": {}, "epoch": 1e999, "valid": 0}',
        "\udcff",
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trials.jsonl"
    file.write_bytes(f"{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as error:
        Record(file)
    assert str(file) in str(error.value) and len(str(error.value)) < 500


def test_a_search_of_0_2_0_is_adopted(tmp_path: Path) -> None:
    """Which kept no record: by what Ray wrote for each trial, and trials.csv of how it ended."""
    of_another = report(1, config={"number": 9})
    for number, reports in enumerate(
        [[report(1), report(2, ended=True)], [{BEST: None, FAILURE: "no heads"}], [report(1)],
         [of_another, report(1)]]
    ):  # fmt: skip
        place = tmp_path / "trials" / f"trial_{number:05d}"
        place.mkdir(parents=True)
        config = {"number": number, "options": {"n_layers": number}}
        (place / "params.json").write_text(json.dumps(config, indent=2))
        lines = [json.dumps({**one, "config": one.get("config") or config}) for one in reports]
        (place / "result.json").write_text("\n".join([*lines, "{cut off"]))
    table = tmp_path / "trials.csv"
    for text, third in (("", "interrupted"), ("2,stopped,\n3,interrupted,\n", "stopped")):
        if text:
            table.write_text(f"trial,state,reason\n{text}")
        record = Record(tmp_path / f"{third}.jsonl")
        adopt(record, str(tmp_path / "trials"), table, tmp_path / "runs")
        states = [trial.state for trial in record.trials]
        assert states == ["finished", "failed", third, "interrupted"]
        assert record.trials[0].curve == {1: 0.1, 2: 0.2} and record.trials[0].best_epoch == 2
        assert record.trials[1].reason == "no heads" and record.trials[3].epochs == 1
        assert [trial.options["n_layers"] for trial in record.trials] == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["[" * 100_000, "{}", '{"space": 1}', "\udcff", "[]"])
def test_damaged_settings_are_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "search.json").write_bytes(damage.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match="search.json is damaged"):
        search(resume=tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("model", 1), ("base", []), ("space", {"parameters": {}}), ("total", 0), ("metric", None),
     ("mode", "most"), ("scheduler", []), ("grace_epochs", -1), ("searcher", "tpe"),
     ("seed", math.nan), ("epochs", -1), ("storage", {}), ("cpus_per_trial", math.nan),
     ("gpus_per_trial", -1), ("nproc", 0), ("overruled", "x"), ("identity", [])],
)  # fmt: skip
def test_settings_of_another_type_are_refused(
    folder: SearchFolder, tmp_path: Path, key: str, value: Any
) -> None:
    """Whatever a file has, it is one line that names what is wrong."""
    good = json.loads(folder.settings.read_text())
    (tmp_path / "search.json").write_text(json.dumps({**good, key: value}))
    with pytest.raises(UsageError, match=key) as error:
        SearchFolder(tmp_path).read()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "more",
    [{"metric": "mrr@10"}, {"scheduler": "none"}, {"seed": 1}, {"space": "my.yaml"},
     {"config_file_list": ["my.yaml"]}, {"config_dict": {"epochs": 1, "data_path": "there"}}],
)  # fmt: skip
def test_a_resumed_search_takes_nothing_that_changes_it(tmp_path: Path, more: dict) -> None:
    """And names what it does take, which is what its other messages advise."""
    (name,) = more
    with pytest.raises(UsageError) as error:
        search(resume=tmp_path, **more)
    allowed, refused = str(error.value).split("leave out ")
    assert refused == repr("epochs" if name == "config_dict" else name)
    assert "--data_path" in allowed and "--storage" in allowed and "--nproc" in allowed


def test_a_scheduler_of_the_users_is_given_again(folder: SearchFolder, tmp_path: Path) -> None:
    """Ray pickles it, and what it pickled is not read."""
    mine, settings = {"scheduler": FIFOScheduler()}, json.loads(folder.settings.read_text())
    for name, given, again in (("FIFOScheduler", mine, {}), ("asha", {}, mine)):
        (tmp_path / "search.json").write_text(json.dumps({**settings, "scheduler": name}))
        with pytest.raises(UsageError, match="scheduler"):
            search(resume=tmp_path, **again)
        arguments = SearchArguments(resume=tmp_path, **given)
        assert resumed_settings(SearchFolder(tmp_path), arguments, {}).scheduler == name


def test_all_trials_failed_is_one_cause(folder: SearchFolder, capsys) -> None:
    for number in (0, 1):
        record = Record(folder.record)
        record.add(begun(number))
        record.add({"trial": number, "state": "failed", "reason": "no heads"})
    assert main(["tune", "--resume", str(folder.path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: all 2 trials failed; the first one: no heads (n_layers 1)")
    assert len(error.splitlines()) == 1 and folder.trials.is_file()
    folder.record.unlink()
    assert main(["tune", "--resume", str(folder.path.parent)]) == 2
    assert "is not the folder of a search" in capsys.readouterr().err


def ray_trial(number: int, starts: int = 0) -> Any:
    options = {"learning_rate": number / 100}
    return SimpleNamespace(
        trial_id=f"t{number}", status="RUNNING", pickled_error_file="/nowhere",
        config={"number": number, "options": options, "starts": starts},
    )  # fmt: skip


def recorder(file: Path) -> Recorder:
    return Recorder(Record(file), "ndcg@10", "max", 4, Reporter())


def test_how_trials_end(tmp_path: Path, capsys) -> None:
    """By themselves, by the scheduler, by their own fault or not."""
    seen = recorder(tmp_path / "trials.jsonl")
    trials = [ray_trial(number) for number in range(5)]
    seen.on_step_end(0, trials)
    for trial in trials[:3]:
        seen.on_trial_result(0, trials, trial, report(1))
    seen.on_trial_result(0, trials, trials[0], report(2, ended=True))
    reasons = ["out of memory [pair.cc:553] at [/lib/a]", "StorageError: no room"]
    for trial, why, infrastructure in zip(trials[2:], reasons, (False, True), strict=False):
        failure = {BEST: math.nan, FAILURE: why, INFRASTRUCTURE: infrastructure}
        seen.on_trial_result(0, trials, trial, failure)
    for trial in trials[:4]:
        seen.on_trial_complete(0, trials, trial)
    seen.on_trial_error(0, trials, trials[4])
    printed = capsys.readouterr().out
    assert all(f": {why}\n" in printed for why in reasons)  # brackets are no markup
    assert "2 lost), running 0 (epoch 2)" in seen.lines()[0]
    for known in (seen.record, Record(tmp_path / "trials.jsonl")):
        states = [trial.state for trial in known.trials]
        assert states == ["finished", "stopped", "failed", "lost", "lost"]
        assert [trial.epochs for trial in known.trials] == [2, 1, 1, 0, 0]
        assert [bool(trial.reason) for trial in known.trials] == [False] * 2 + [True] * 3
        assert [trial.number for trial in known.unfinished] == [3, 4]
        assert find_best_trial(known.trials, "max") is known.trials[0]


def test_what_is_lost_again_when_resumed_is_failed(tmp_path: Path) -> None:
    """Else a trial that takes its process down each time would never let a search end."""
    file = tmp_path / "trials.jsonl"
    for starts, state in enumerate(("lost", "failed")):
        seen, trial = recorder(file), ray_trial(0, starts)
        seen.on_step_end(0, [trial])
        assert seen.record.trials[0].state == "interrupted"
        seen.on_trial_recover(0, [trial], trial)
        seen.on_trial_error(0, [trial], trial)
        assert Record(file).trials[0].state == state
    assert Record(file).trials[0].starts == 2


def test_a_lost_report_is_in_the_next_one(tmp_path: Path) -> None:
    """The run has a checkpoint of epoch 2, and its report was lost; the table is safe to open."""
    seen, trial = recorder(tmp_path / "trials.jsonl"), ray_trial(0)
    trial.config["options"] = {"position": ["rope"] * 10_000, "cell": "=1+1"}
    seen.on_trial_result(0, [trial], trial, report(1))
    earlier = json.dumps({"1": 0.1, "2": 0.2})
    seen.on_trial_result(0, [trial], trial, report(3, ended=True, **{EARLIER: earlier}))
    (known,) = Record(tmp_path / "trials.jsonl").trials
    assert list(known.curve.items()) == [(1, 0.1), (2, 0.2), (3, 0.3)] and known.score == 0.3
    assert len("".join(seen.lines())) < 500
    write_trials(seen.record.trials, ["cell"], "ndcg@10", tmp_path / "trials.csv")
    with open(tmp_path / "trials.csv", newline="") as file:
        assert next(csv.DictReader(file))["cell"] == "'=1+1"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")]
)
def test_memory_that_is_not_there_is_said_to_be(error: Exception) -> None:
    assert reason(error).startswith("out of memory")


def test_nothing_answers_at_the_address(no_ray, tmp_path: Path, monkeypatch, capsys) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    arguments = ["-m", "FPARec", "-d", "ml-100k", f"--run_dir={tmp_path / 'out'}"]
    for given in ("auto", address, "-inf"):
        began = time.time()
        assert main(["tune", *arguments, f"--address={given}"]) == 2
        error = capsys.readouterr().err
        assert "--address" in error and error.count("\n") == 1 and time.time() - began < 60
        assert not (tmp_path / "out").exists()


def test_noise_of_a_full_disk_is_left_out() -> None:
    def is_shown(error: Exception) -> bool:
        text = "Saving experiment state to storage at '/x' failed with exception: "
        cause = (type(error), error, None)
        return _no_stacks(logging.LogRecord("ray", logging.ERROR, "", 0, text, (), cause))

    assert is_shown(ValueError("else")) and not is_shown(OSError(28, "No space left on device"))
