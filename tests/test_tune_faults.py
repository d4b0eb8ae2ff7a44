"""Searches that lose a machine, or the driver. Real raylets, ``kill -9``."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import PATIENCE, SCRIPT, SMALL, wait
from ray.cluster_utils import Cluster

from recbole_pos.tuning import tune

pytestmark = pytest.mark.long
FAST = {**SMALL, "stopping_step": 100}
SPACE = "learning_rate: {loguniform: [1e-4, 1e-2]}\nn_layers: {choice: [1, 2]}\n"


def slow_epochs(file: Path) -> Callable[[], None]:
    """A function that makes the epochs of a process slow, and lets it note them with its node."""

    def hook() -> None:
        import os
        import time

        import ray

        import recbole_pos  # noqa: F401
        from recbole_pos.experiment.trainer import PosTrainer

        train = PosTrainer._train_epoch

        def _train_epoch(self, loader, epoch, **kwargs):
            line = train(self, loader, epoch, **kwargs)
            node = ray.get_runtime_context().get_node_id()
            with open(file, "a") as stream:
                stream.write(f"{self.config['learning_rate']} {epoch} {node} {os.getpid()}\n")
            time.sleep(0.4)
            return line

        PosTrainer._train_epoch = _train_epoch

    return hook


def read_epochs(file: Path) -> list[tuple[str, int, str, int]]:
    """Learning rate of the trial, number, node and process of each epoch."""
    lines = file.read_text().splitlines() if file.exists() else []
    epochs = [line.split() for line in lines]
    return [(rate, int(epoch), node, int(process)) for rate, epoch, node, process in epochs]


@pytest.fixture
def two_machines(no_ray: None) -> Iterator[Any]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_node_of_a_search_is_killed(two_machines, tiny: Path, tmp_path: Path) -> None:
    """Both machines train; what ran on the dead one resumes from its last checkpoint."""
    log, num_epochs = tmp_path / "log", 8
    (tmp_path / "space.yaml").write_text(SPACE)
    environment = {"worker_process_setup_hook": slow_epochs(log)}
    ray.init(two_machines.address, runtime_env=environment, log_to_driver=False)
    other = next(iter(two_machines.worker_nodes))
    dead = other.node_id

    def kill() -> None:  # a machine takes its processes along
        wait(lambda: any(epoch > 1 for _, epoch, node, _ in read_epochs(log) if node == dead))
        os.kill(other.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        for process in {process for _, _, node, process in read_epochs(log) if node == dead}:
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    given = {**FAST, "data_path": str(tiny), "epochs": num_epochs}
    options = {"searcher": "random", "scheduler": "none", "seed": 3, "num_samples": 4}
    options |= {"run_dir": tmp_path / "out", "verbose": False}
    found = tune("FPARec", "tiny", tmp_path / "space.yaml", [], given, **options)
    killer.join()
    assert [(trial.state, trial.epochs) for trial in found.trials] == [("finished", num_epochs)] * 4
    before, after = defaultdict(list), defaultdict(list)  # of each trial, on the dead node or not
    for rate, epoch, node, _ in read_epochs(log):
        (before if node == dead else after)[rate].append(epoch)
    moved = before.keys() & after.keys()
    assert moved
    for rate in moved:
        assert 1 <= after[rate][0] <= before[rate][-1] + 1
        assert sorted({*before[rate], *after[rate]}) == list(range(num_epochs))


def test_the_driver_is_killed_and_the_search_resumed(tiny: Path, tmp_path: Path) -> None:
    space, folder = tmp_path / "space.yaml", tmp_path / "out"
    space.write_text(SPACE)
    options = {**FAST, "data_path": tiny, "epochs": 25, "space": space, "num_samples": 6}
    options |= {"max_concurrent": 2, "scheduler": "none", "run_dir": folder}
    command = [sys.executable, str(SCRIPT), "tune"]
    words = ["-m", "FPARec", "-d", "tiny", *(f"--{key}={value}" for key, value in options.items())]
    env = {**os.environ, "OF_SEARCH": str(folder), "PYTHONPATH": str(SCRIPT.parent)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    process = subprocess.Popen([*command, *words], **pipes)
    ended = 0
    for line in process.stdout:  # type: ignore[union-attr]
        ended += line.startswith("[")
        if ended == 2:
            break
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait(lambda: not any(map(_is_of_a_search, psutil.process_iter())))
    assert not (folder / "test.json").exists()
    done = _read_epochs_of_ended(folder)
    begun = {path.parent.name for path in folder.glob("runs/*/checkpoint.pt")}
    assert len(done) >= 2
    again = [*command, "--resume", str(folder)]
    finished = subprocess.run(again, capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (folder / "trials.csv").read_text().count(",finished,") == 6
    after = _read_epochs_of_ended(folder)
    assert after.items() >= done.items()  # what had ended is as it was
    assert begun <= set(after)  # and what had begun was resumed, with the same options
    assert json.loads((folder / "test.json").read_text())["test"]


def _read_epochs_of_ended(folder: Path) -> dict[str, str]:
    """The epochs, with their times, of the trials that have ended, by their numbers."""
    ended = [path.parent for path in folder.glob("runs/*/result.json")]
    return {run.name: (run / "metrics.jsonl").read_text() for run in ended}


def _is_of_a_search(process: psutil.Process) -> bool:
    """Whether the search of the test has started a process, by what it inherits."""
    with suppress(psutil.Error):
        return "OF_SEARCH" in process.environ()
    return False
