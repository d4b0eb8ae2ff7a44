"""Searches that lose a machine, a process, or the driver. Real raylets, ``kill -9``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


Epochs = list[tuple[int, str, int]]  # number, node and process of each


def slow_epochs(file: Path) -> dict[str, Callable[[], None]]:
    """A runtime environment whose workers note each epoch, and take their time."""

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

    return {"worker_process_setup_hook": hook}


def trained(file: Path) -> dict[str, Epochs]:
    """Run -> epochs it trained, where, and in which process."""
    found = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else []:
        name, epoch, node, pid = line.split()
        found[name].append((int(epoch), node, int(pid)))
    return found


@contextmanager
def killed(cluster: Cluster, log: Path, after: int) -> Iterator[str]:
    """Within, the other machine dies once a run has that many epochs there; its node."""
    ray.init(cluster.address, runtime_env=slow_epochs(log), log_to_driver=False)
    other = next(iter(cluster.worker_nodes))
    node = other.node_id

    def kill() -> None:
        wait(lambda: any(e + 1 >= after for e, n, _ in sum(trained(log).values(), []) if n == node))
        os.kill(other.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        for pid in {pid for _, n, pid in sum(trained(log).values(), []) if n == node}:
            os.kill(pid, signal.SIGKILL)  # a machine takes its processes along

    killer = threading.Thread(target=kill)
    killer.start()
    yield node
    killer.join()


@pytest.fixture
def two_machines(no_ray: None) -> Iterator[Any]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_node_of_a_search_is_killed(two_machines, tiny: Path, tmp_path: Path) -> None:
    """Both machines train; what ran on the dead one goes on from its last checkpoint."""
    log, epochs = tmp_path / "log", 8
    (tmp_path / "space.yaml").write_text(SPACE)
    given = {**FAST, "data_path": str(tiny), "epochs": epochs}
    options = {"searcher": "random", "scheduler": "none", "seed": 3, "num_samples": 4}
    options |= {"run_dir": tmp_path / "out", "verbose": False}
    with killed(two_machines, log, after=3) as dead:
        found = tune("FPARec", "tiny", tmp_path / "space.yaml", [], given, **options)
    assert [trial.state for trial in found.trials] == ["finished"] * 4
    assert [trial.epochs for trial in found.trials] == [epochs] * 4
    runs = trained(log).values()
    assert len({node for run in runs for _, node, _ in run}) == 2
    moved = [run for run in runs if len({node for _, node, _ in run}) == 2]
    assert moved
    for run in moved:
        before = [epoch for epoch, node, _ in run if node == dead]
        after = [epoch for epoch, node, _ in run if node != dead]
        assert 1 <= after[0] <= before[-1] + 1
        assert sorted({*before, *after}) == list(range(epochs))


def test_the_driver_is_killed_and_the_search_resumed(tiny: Path, tmp_path: Path) -> None:
    space, folder = tmp_path / "space.yaml", tmp_path / "out"
    space.write_text(SPACE)
    options = {**FAST, "data_path": tiny, "epochs": 25}
    command = [sys.executable, str(SCRIPT), "tune"]
    words = ["-m", "FPARec", "-d", "tiny", *(f"--{key}={value}" for key, value in options.items())]
    words += ["--space", str(space), "--num_samples=6", "--max_concurrent=2", "--searcher=optuna"]
    words += ["--scheduler=none", f"--run_dir={folder}"]
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
    wait(lambda: not _processes(folder))
    assert not (folder / "test.json").exists()
    done = _done(folder)
    begun = {path.parent.name for path in folder.glob("runs/*/checkpoint.pt")} - set(done)
    assert len(done) >= 2
    again = [*command, "--resume", str(folder)]
    finished = subprocess.run(again, capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (folder / "trials.csv").read_text().count(",finished,") == 6
    after = _done(folder)
    assert after.items() >= done.items()  # what had ended is as it was
    assert begun <= set(after)  # and what had begun was resumed, with the same options
    assert json.loads((folder / "test.json").read_text())["test"]


def _done(folder: Path) -> dict[str, str]:
    """The epochs, with their times, of the trials that have ended, by their numbers."""
    done = [path.parent for path in folder.glob("runs/*/result.json")]
    return {run.name: (run / "metrics.jsonl").read_text() for run in done}


def _processes(folder: Path) -> list[psutil.Process]:
    """Those that the search in a folder has started, by what they inherit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OF_SEARCH") == str(folder):
                found.append(process)
    return found
