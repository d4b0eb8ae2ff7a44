"""Searches that lose a machine, a process, or the driver. Real raylets, real ``kill -9``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from conftest import PATIENCE, wait
from machines import killed, went_on

from recbole_pos.errors import TrainingError
from recbole_pos.tuning import search
from recbole_pos.tuning.record import Record

SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"
FAST = {
    "hidden_size": 16,
    "inner_size": 16,
    "MAX_ITEM_LIST_LENGTH": 12,
    "train_batch_size": 16,
    "stopping_step": 100,
}
SPACE = "learning_rate: {loguniform: [1e-4, 1e-2]}\nn_layers: {choice: [1, 2]}\n"


def dies(file: str) -> Callable[[], None]:
    """A function that makes a worker die in a trial of two layers, before it reports."""

    def hook() -> None:
        import os
        import signal

        import recbole_pos  # noqa: F401
        from recbole_pos.experiment.trainer import PosTrainer

        train = PosTrainer._train_epoch

        def _train_epoch(self, *args, **kwargs):
            with open(file, "a") as stream:
                stream.write(f"{self.config['n_layers']} {os.getpid()}\n")
            if self.config["n_layers"] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return train(self, *args, **kwargs)

        PosTrainer._train_epoch = _train_epoch

    return hook


def second_dies(flag: str, log: str) -> Callable[[], None]:
    """A function that makes the second process of a team die in its second epoch, once."""

    def hook() -> None:
        import os
        import signal

        import torch.distributed as dist

        import recbole_pos  # noqa: F401
        from recbole_pos.experiment.trainer import PosTrainer

        train = PosTrainer._train_epoch

        def _train_epoch(self, loader, epoch, **kwargs):
            rank = dist.get_rank()
            with open(log, "a") as stream:
                stream.write(f"{rank} {epoch} {os.getpid()}\n")
            if rank == 1 and epoch == 1 and not os.path.exists(flag):
                open(flag, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return train(self, loader, epoch, **kwargs)

        PosTrainer._train_epoch = _train_epoch

    return hook


@pytest.mark.long
def test_a_node_is_killed_in_the_middle(two_machines, tiny: Path, tmp_path: Path) -> None:
    log, space, last = tmp_path / "log", tmp_path / "space.yaml", 8
    space.write_text(SPACE)
    given = {**FAST, "data_path": str(tiny), "epochs": last}
    options = {"searcher": "random", "seed": 3, "scheduler": "none", "verbose": False}
    with killed(two_machines, log, after=3) as node:
        found = search("FPARec", "tiny", space, [], given, num_samples=4, run_dir=tmp_path / "two",
                       storage=str(tmp_path / "storage"), **options)  # fmt: skip
    went_on(log, node, last)
    assert [trial.number for trial in found.trials] == [0, 1, 2, 3]
    assert [trial.state for trial in found.trials] == ["finished"] * 4
    assert [list(trial.curve) for trial in found.trials] == [list(range(1, last + 1))] * 4


@pytest.mark.long
def test_a_trial_whose_processes_always_die_is_failed(no_ray, tiny: Path, tmp_path: Path) -> None:
    """In the process of another trial at first: no result, until they die again on resuming."""
    log, space = tmp_path / "log", tmp_path / "space.yaml"
    space.write_text("n_layers: {choice: [1, 2, 3]}\n")
    hook = {"worker_process_setup_hook": dies(str(log))}
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=hook)
    given = {**FAST, "data_path": str(tiny), "epochs": 1}
    try:
        with pytest.raises(TrainingError) as error:
            search("FPARec", "tiny", space, [], given, searcher="grid", scheduler="none",
                   run_dir=tmp_path / "out", verbose=False)  # fmt: skip
        assert "1 of 3 trials" in str(error.value) and "2 have ended" in str(error.value)
        assert not (tmp_path / "out" / "test.json").exists()
        pids = defaultdict(list)
        for line in log.read_text().splitlines():
            layers, pid = line.split()
            pids[layers].append(pid)
        assert len(pids["2"]) == 4 and pids["2"][0] == pids["1"][0]  # a process used again
        found = search(resume=tmp_path / "out", verbose=False)
        assert [t.state for t in found.trials] == ["finished", "failed", "finished"]
        assert [t.options["n_layers"] for t in found.trials] == [1, 2, 3]
        assert [t.score is None for t in found.trials] == [False, True, False]
        assert found.trials[1].reason and found.test
        assert [line[0] for line in log.read_text().splitlines()].count("1") == 1
    finally:
        ray.shutdown()


@pytest.mark.long
def test_a_trial_goes_on_when_another_process_of_its_team_dies(
    no_ray, tiny: Path, tmp_path: Path
) -> None:
    log, flag, space = tmp_path / "log", tmp_path / "flag", tmp_path / "space.yaml"
    space.write_text(SPACE)
    hook = {"worker_process_setup_hook": second_dies(str(flag), str(log))}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=hook)
    given = {**FAST, "data_path": str(tiny), "epochs": 4}
    try:
        found = search("FPARec", "tiny", space, [], given, num_samples=1, nproc=2,
                       searcher="random", scheduler="none", run_dir=tmp_path / "out",
                       verbose=False)  # fmt: skip
    finally:
        ray.shutdown()
    (trial,) = found.trials
    assert flag.exists() and trial.state == "finished", trial.reason
    assert list(trial.curve) == [1, 2, 3, 4]
    epochs = [line.split()[1] for line in log.read_text().splitlines() if line[0] == "0"]
    assert epochs == list("01123")  # from the last checkpoint


@pytest.mark.long  # two minutes; test_tune resumes, too
def test_the_driver_is_killed_and_the_search_resumed(tiny: Path, tmp_path: Path) -> None:
    space, folder = tmp_path / "space.yaml", tmp_path / "out"
    space.write_text(SPACE)
    options = {**FAST, "data_path": tiny, "epochs": 25}
    command = [sys.executable, str(SCRIPT), "tune", "-m", "FPARec", "-d", "tiny"]
    command += [f"--{key}={value}" for key, value in options.items()]
    command += ["--space", str(space), "--num_samples=6", "--max_concurrent=2", "--searcher=optuna"]
    command += ["--scheduler=none", f"--run_dir={folder}"]
    root = str(SCRIPT.parent)
    env = {**os.environ, "OF_SEARCH": str(folder), "PYTHONPATH": root}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    ended = []
    for line in process.stdout:  # type: ignore[union-attr]
        if line.startswith("trial ") and " finished " in line:
            ended.append(line)
        if len(ended) == 2:
            break
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait(lambda: not _processes(folder))
    assert len(ended) == 2 and not (folder / "tune.json").exists()
    record = Record(folder / "trials.jsonl")
    done = {trial.number: trial for trial in record.ended}
    assert len(done) >= 2
    begun = [
        trial
        for trial in record.unfinished
        if (folder / "runs" / trial.key / "checkpoint.pt").is_file()
    ]
    again = [sys.executable, str(SCRIPT), "tune", "--resume", str(folder)]
    # a shell lets what it starts in the background ignore the signal, the tests as well
    heed = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stopped = subprocess.Popen(again, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    finally:
        signal.signal(signal.SIGINT, heed)
    wait(lambda: len(Record(folder / "trials.jsonl").ended) > len(done))
    stopped.send_signal(signal.SIGTERM)  # which ends in what Ctrl-C does
    error = stopped.communicate(timeout=PATIENCE)[1].decode()
    wait(lambda: not _processes(folder))
    assert stopped.returncode == 143 and f"tune --resume {folder}`" in error
    assert "Traceback" not in error and "trials.csv has the trials so far" in error, error
    states = [row.split(",")[1] for row in (folder / "trials.csv").read_text().splitlines()[1:]]
    assert set(states) <= {"finished", "interrupted"} and states.count("finished") >= len(done)
    finished = subprocess.run(again, capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = json.loads((folder / "tune.json").read_text())
    assert written["trials"] == 6 and written["states"]["finished"] == 6
    rows = (folder / "trials.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == [0, 1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    for trial in begun:  # resumed from what was there, not from the start
        assert [line.get("epoch") for line in lines if line["trial"] == trial.number].count(1) <= 1
    for trial in Record(folder / "trials.jsonl").trials:  # what had ended is as it was
        assert trial == done.get(trial.number, trial)
    assert {int(line.split()[1]) for line in ended} <= set(done)
    assert all(row.split(",")[4] == "25" for row in rows)
    assert np.isfinite(list(json.loads((folder / "test.json").read_text())["test"].values())).all()


def _processes(folder: Path) -> list[psutil.Process]:
    """Those that the search in a folder has started, by what they inherit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OF_SEARCH") == str(folder):
                found.append(process)
    return found


@pytest.mark.long
def test_a_driver_killed_before_it_wrote_anything(no_ray, tiny: Path, tmp_path: Path) -> None:
    """Only the settings are there: the search begins."""
    space, folder = tmp_path / "space.yaml", tmp_path / "out"
    space.write_text(SPACE)
    given = {**FAST, "data_path": str(tiny), "epochs": 1}
    options = {"searcher": "random", "num_samples": 2, "run_dir": folder, "verbose": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recbole_pos.tuning.tuning._tuner", _die)
        with pytest.raises(ZeroDivisionError):
            search("FPARec", "tiny", space, [], given, **options)
    assert sorted(os.listdir(folder)) == ["lock", "runs", "search.json"]
    assert not ray.is_initialized()
    found = search(resume=folder, verbose=False)
    assert [trial.state for trial in found.trials] == ["finished"] * 2


def _die(*args: Any) -> None:
    raise ZeroDivisionError
