"""The record of a search, from which it is resumed, and what may change. No Ray processes."""

from __future__ import annotations

import csv
import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from ray.tune.schedulers import FIFOScheduler

from recbole_pos.cli.main import main
from recbole_pos.config.arguments import SearchArguments
from recbole_pos.errors import UsageError
from recbole_pos.reporter import Reporter
from recbole_pos.runs.worker import reason
from recbole_pos.tuning import search
from recbole_pos.tuning.record import Record, find_best_trial, write_trials
from recbole_pos.tuning.settings import SearchFolder, read_settings, resumed_settings
from recbole_pos.tuning.trials import BEST, CHANGES, Trials


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> SearchFolder:
    """Of a search of two trials that has not begun."""
    given, arguments = {"data_path": str(tiny)}, SearchArguments(num_samples=2)
    settings = read_settings("FPARec", "tiny", None, None, given, arguments)
    return SearchFolder.create(tmp_path_factory.mktemp("search") / "out", settings)


def begun(number: int, **more: Any) -> dict[str, Any]:
    return {"trial": number, "options": {"n_layers": 1}, **more}


def test_a_record_that_was_cut_off_loses_its_last_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    record = Record(file)
    record.add(**begun(0))
    whole = file.read_bytes()
    record.add(0, state="finished")
    cut_off = file.read_bytes()[:-3]
    file.write_bytes(cut_off)
    assert Record(file).trials[0].state == "interrupted" and file.read_bytes() == cut_off
    Record(file).add(**begun(1))
    assert len(Record(file).trials) == 2 and file.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "line",
    ["[]", "[" * 100_000, json.dumps(begun(7)), json.dumps(begun(0, trial="0")), "\udcff",
     json.dumps(begun(0, options=3)), json.dumps(begun(0, state="won")), '{"trial": 0}',
     json.dumps(begun(0, score=math.inf)), json.dumps(begun(0, epoch=1))],
)  # fmt: skip
def test_a_damaged_record_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trials.jsonl"
    file.write_bytes(f"{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as error:
        Record(file)
    assert str(file) in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("damage", ["[" * 100_000, "{}", "\udcff", "[]", '{"total": 60}'])
def test_damaged_settings_are_refused(tmp_path: Path, damage: str) -> None:
    """As are those of version 0.2.0, which kept no record."""
    (tmp_path / "search.json").write_bytes(damage.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=r"search.json is damaged, or of an earlier version"):
        search(resume=tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("model", 1), ("base", []), ("space", {"parameters": {}}), ("num_samples", 0),
     ("space", {"parameters": [{"name": "x", "kind": "k", "values": [1], "where": ""}]}),
     ("metric", None), ("mode", "most"), ("scheduler", []), ("grace_epochs", -1),
     ("searcher", "tpe"), ("seed", math.nan), ("epochs", -1), ("storage", {}),
     ("cpus_per_trial", math.nan), ("gpus_per_trial", -1), ("nproc", True), ("overruled", "x"),
     ("identity", [])],
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
    [{"metric": "mrr@10"}, {"scheduler": "none"}, {"space": "my.yaml"},
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
    record = Record(folder.record)
    for number in (0, 1):
        record.add(**begun(number, state="failed", reason="no heads"))
    assert main(["tune", "--resume", str(folder.path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: all 2 trials failed; the first one: no heads (n_layers 1)")
    assert len(error.splitlines()) == 1 and folder.trials.is_file()
    folder.record.unlink()
    assert main(["tune", "--resume", str(folder.path.parent)]) == 2
    assert "is not the folder of a search" in capsys.readouterr().err


def report(epoch: int, ended: bool = False, **more: Any) -> dict[str, Any]:
    """A report of a trial as Ray hands it on."""
    changes = {"curve": {epoch: epoch / 10}, "score": epoch / 10, "best_epoch": epoch}
    changes |= {"ended": ended, "seconds": 1.0, "parameters": 9, "node": "n", **more}
    return {BEST: epoch / 10, "hostname": "host", CHANGES: json.dumps(changes)}


def begin(folder: SearchFolder, file: Path, count: int) -> Trials:
    """The trials of a search, of which Ray has begun some."""
    trials = Trials(Record(file), folder.read(), Reporter(), room=2)
    assert [trials.suggest(f"t{n}")["number"] for n in range(count)] == list(range(count))
    return trials


def test_how_trials_end(folder: SearchFolder, tmp_path: Path, capsys) -> None:
    """By themselves, by the scheduler, by their own fault or not."""
    trials = begin(folder, tmp_path / "trials.jsonl", 5)
    for number, epoch in enumerate((1, 1, 9)):
        trials.on_trial_result(f"t{number}", report(epoch))
    reasons = ["out of memory [pair.cc:553] at [/lib/a]", "StorageError: no room"]
    for name, state, why in zip(("t2", "t3"), ("failed", "lost"), reasons, strict=True):
        failure = {"hostname": "host", CHANGES: json.dumps({"state": state, "reason": why})}
        trials.on_trial_result(name, failure)
        trials.on_trial_complete(name, failure)
    assert "ended 1 of 2 (1 failed, 1 lost), running 0 (epoch 1), 1 (epoch 1)" in trials.lines()[0]
    trials.on_trial_complete("t0", report(2, ended=True))
    trials.on_trial_complete("t1", report(1))
    trials.on_trial_complete("t4", error=True)
    printed = capsys.readouterr().out
    assert all(f"  {why}\n" in printed for why in reasons)  # brackets are no markup
    states = ["finished", "stopped", "failed", "lost", "lost"]
    for known in (trials.record, Record(tmp_path / "trials.jsonl")):
        assert [trial.state for trial in known.trials] == states
        assert [trial.epochs for trial in known.trials] == [2, 1, 9, 0, 0]
        assert [bool(trial.reason) for trial in known.trials] == [False] * 2 + [True] * 3
        assert [trial.number for trial in known.unfinished] == [3, 4]
        assert find_best_trial(known.trials, "max") is known.trials[0]
    assert [trial.value for trial in trials.source.study.trials] == [0.2, 0.1, None, None, None]
    assert {trial.state.name for trial in trials.source.study.trials} == {"COMPLETE", "FAIL"}


def test_what_is_lost_again_when_resumed_is_failed(folder: SearchFolder, tmp_path: Path) -> None:
    """Else a trial that takes its process down each time would never let a search end."""
    file = tmp_path / "trials.jsonl"
    for state in ("lost", "failed"):
        trials = begin(folder, file, 1)
        assert trials.record.trials[0].state == "interrupted"
        trials.on_trial_complete("t0", error=True)
        assert Record(file).trials[0].state == state
    assert Record(file).trials[0].starts == 2


def test_a_lost_report_is_in_the_next_one(folder: SearchFolder, tmp_path: Path) -> None:
    """The run has a checkpoint of epoch 2, and its report was lost; the table is safe to open."""
    trials = begin(folder, tmp_path / "trials.jsonl", 1)
    trials.on_trial_result("t0", report(1))
    trials.on_trial_result("t0", report(3, curve={"1": 0.1, "2": 0.2, "3": 0.3}))
    trials.on_trial_result("t0", report(4))
    (known,) = Record(tmp_path / "trials.jsonl").trials
    assert known.curve == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4} and known.score == 0.4
    known.options = {"position": ["rope"] * 10_000, "cell": "=1+1"}
    trials.active["t0"] = known
    assert len("".join(trials.lines())) < 500
    write_trials([known], ["cell"], "ndcg@10", tmp_path / "trials.csv")
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
