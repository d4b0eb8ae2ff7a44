"""Searches that lose a machine, a process, or the driver. Real raylets, real ``kill -9``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from conftest import PATIENCE, wait
from machines import each_epoch, killed, went_on

from recbole_pos.errors import TrainingError
from recbole_pos.tuning import search
from recbole_pos.tuning.record import Record

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parent.parent / "run_recbole_pos.py"
FAST = {
    "hidden_size": 16,
    "inner_size": 16,
    "MAX_ITEM_LIST_LENGTH": 12,
    "train_batch_size": 16,
    "stopping_step": 100,
}
SPACE = "learning_rate: {loguniform: [1e-4, 1e-2]}\nn_layers: {choice: [1, 2]}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a space in it."""
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def run(folder: Path, tiny: Path, epochs: int, **more: Any) -> Any:
    given = {**FAST, "data_path": str(tiny), "epochs": epochs}
    options = {"searcher": "random", "scheduler": "none", "run_dir": folder / "out", **more}
    return search("FPARec", "tiny", folder / "space.yaml", [], given, verbose=False, **options)


@contextmanager
def ray_whose_processes_die(log: Path, dies: Callable[[Any, int], bool]) -> Iterator[None]:
    """Within, workers note rank, layers, epoch and process before each epoch, and may die."""

    def act(trainer: Any, epoch: int, train: Callable[[], Any]) -> Any:
        import os
        import signal

        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        with open(log, "a") as stream:
            stream.write(f"{rank} {trainer.config['n_layers']} {epoch} {os.getpid()}\n")
        if dies(trainer, epoch):
            os.kill(os.getpid(), signal.SIGKILL)
        return train()

    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init("local", num_cpus=2, runtime_env=each_epoch(act), **options)
    try:
        yield
    finally:
        ray.shutdown()


def test_a_node_is_killed_in_the_middle(two_machines, tiny: Path, folder: Path) -> None:
    log, last = folder / "log", 8
    with killed(two_machines, log, after=3) as node:
        found = run(folder, tiny, last, seed=3, num_samples=4, storage=str(folder / "storage"))
    went_on(log, node, last)
    assert [trial.number for trial in found.trials] == [0, 1, 2, 3]
    assert [trial.state for trial in found.trials] == ["finished"] * 4
    assert [list(trial.curve) for trial in found.trials] == [list(range(1, last + 1))] * 4


def test_a_trial_whose_processes_always_die_is_failed(no_ray, tiny: Path, folder: Path) -> None:
    """In the process of another trial at first: no result, until they die again on resuming."""
    log = folder / "log"
    (folder / "space.yaml").write_text("n_layers: {choice: [1, 2, 3]}\n")
    with ray_whose_processes_die(log, lambda trainer, _: trainer.config["n_layers"] == 2):
        with pytest.raises(TrainingError) as error:
            run(folder, tiny, 1, searcher="grid", max_concurrent=1)
        assert "1 of 3 trials" in str(error.value) and "2 have ended" in str(error.value)
        assert not (folder / "out" / "test.json").exists()
        pids = defaultdict(list)
        for line in log.read_text().splitlines():
            _, layers, _, pid = line.split()
            pids[layers].append(pid)
        assert len(pids["2"]) == 4 and pids["2"][0] == pids["1"][0]  # a process used again
        found = search(resume=folder / "out", verbose=False)
    assert [t.state for t in found.trials] == ["finished", "failed", "finished"]
    assert [t.options["n_layers"] for t in found.trials] == [1, 2, 3]
    assert [t.score is None for t in found.trials] == [False, True, False]
    assert found.trials[1].reason and found.test
    assert [line.split()[1] for line in log.read_text().splitlines()].count("1") == 1


def test_a_trial_goes_on_when_another_process_of_its_team_dies(
    no_ray, tiny: Path, folder: Path
) -> None:
    log, flag = folder / "log", folder / "flag"

    def dies(trainer: Any, epoch: int) -> bool:  # the second process in its second epoch, once
        import torch.distributed as dist

        is_it = dist.get_rank() == 1 and epoch == 1 and not flag.exists()
        return is_it and flag.touch() is None

    with ray_whose_processes_die(log, dies):
        (trial,) = run(folder, tiny, 4, num_samples=1, nproc=2).trials
    assert flag.exists() and trial.state == "finished", trial.reason
    assert list(trial.curve) == [1, 2, 3, 4]
    epochs = [line.split()[2] for line in log.read_text().splitlines() if line[0] == "0"]
    assert epochs == list("01123")  # from the last checkpoint


def test_the_driver_is_killed_and_the_search_resumed(tiny: Path, folder: Path) -> None:
    space, folder = folder / "space.yaml", folder / "out"
    options = {**FAST, "data_path": tiny, "epochs": 25}
    command = [sys.executable, str(SCRIPT), "tune", "-m", "FPARec", "-d", "tiny"]
    command += [f"--{key}={value}" for key, value in options.items()]
    command += ["--space", str(space), "--num_samples=6", "--max_concurrent=2", "--searcher=optuna"]
    command += ["--scheduler=none", f"--run_dir={folder}"]
    env = {**os.environ, "OF_SEARCH": str(folder), "PYTHONPATH": str(SCRIPT.parent)}
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
    runs = folder / "runs"
    begun = [t for t in record.unfinished if (runs / t.key / "checkpoint.pt").is_file()]
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
    rows = [row.split(",") for row in (folder / "trials.csv").read_text().splitlines()[1:]]
    assert [(int(row[0]), row[4]) for row in rows] == [(n, "25") for n in range(6)]
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    for trial in begun:  # resumed from what was there, not from the start
        curves = [line.get("curve", {}) for line in lines if line["trial"] == trial.number]
        assert sum(list(curve) == ["1"] for curve in curves) <= 1
    for trial in Record(folder / "trials.jsonl").trials:  # what had ended is as it was
        trial.test = None
        assert trial == done.get(trial.number, trial)
    assert {int(line.split()[1]) for line in ended} <= set(done)
    assert np.isfinite(list(json.loads((folder / "test.json").read_text())["test"].values())).all()


def _processes(folder: Path) -> list[psutil.Process]:
    """Those that the search in a folder has started, by what they inherit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OF_SEARCH") == str(folder):
                found.append(process)
    return found


def test_a_driver_killed_before_it_wrote_anything(no_ray, tiny: Path, folder: Path) -> None:
    """Only the settings are there: the search begins."""

    def die(*args: Any) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recbole_pos.tuning.tuning._tuner", die)
        with pytest.raises(ZeroDivisionError):
            run(folder, tiny, 1, num_samples=2)
    assert sorted(os.listdir(folder / "out")) == ["lock", "runs", "search.json"]
    assert not ray.is_initialized()
    found = search(resume=folder / "out", verbose=False)
    assert [trial.state for trial in found.trials] == ["finished"] * 2
