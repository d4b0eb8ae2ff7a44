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

from recbole_pos.errors import TrainingError
from recbole_pos.tuning import tune

pytestmark = pytest.mark.long
FAST = {**SMALL, "stopping_step": 100}
SPACE = "learning_rate: {loguniform: [1e-4, 1e-2]}\nn_layers: {choice: [1, 2]}\n"


Epochs = list[tuple[int, str, int]]  # number, node and process of each


def each_epoch(act: Callable[[Any, int, Callable[[], Any]], Any]) -> dict[str, Callable[[], None]]:
    """A runtime environment whose workers call ``act(trainer, epoch, train)`` for each epoch."""

    def hook() -> None:
        import recbole_pos  # noqa: F401
        from recbole_pos.experiment.trainer import PosTrainer

        train = PosTrainer._train_epoch

        def _train_epoch(self, loader, epoch, **kwargs):
            return act(self, epoch, lambda: train(self, loader, epoch, **kwargs))

        PosTrainer._train_epoch = _train_epoch

    return {"worker_process_setup_hook": hook}


def slow_epochs(file: Path) -> dict[str, Callable[[], None]]:
    def act(trainer: Any, epoch: int, train: Callable[[], Any]) -> Any:
        import os
        import time

        import ray

        line, config = train(), trainer.config
        node = ray.get_runtime_context().get_node_id()
        with open(file, "a") as stream:
            stream.write(f"{config['learning_rate']} {epoch} {node} {os.getpid()}\n")
        time.sleep(0.4)
        return line

    return each_epoch(act)


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


def went_on(log: Path, node: str, last: int) -> None:
    """Both machines trained; what ran on the dead one went on from its last checkpoint."""
    epochs = trained(log)
    assert len({n for es in epochs.values() for _, n, _ in es}) == 2
    moved = [es for es in epochs.values() if len({n for _, n, _ in es}) > 1]
    assert moved
    for es in moved:
        first, second = ([e for e, n, _ in es if (n == node) == there] for there in (True, False))
        assert 1 <= second[0] <= first[-1] + 1
        assert sorted({*first, *second}) == list(range(last))


def run(folder: Path, tiny: Path, epochs: int, space: str = SPACE, **more: Any) -> Any:
    (folder / "space.yaml").write_text(space)
    given = {**FAST, "data_path": str(tiny), "epochs": epochs}
    options = {"searcher": "random", "scheduler": "none", "run_dir": folder / "out", **more}
    return tune("FPARec", "tiny", folder / "space.yaml", [], given, verbose=False, **options)


@pytest.fixture
def two_machines(no_ray: None) -> Iterator[Any]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_node_of_a_search_is_killed(two_machines, tiny: Path, tmp_path: Path) -> None:
    log, last = tmp_path / "log", 8
    with killed(two_machines, log, after=3) as node:
        found = run(tmp_path, tiny, last, seed=3, num_samples=4)
    went_on(log, node, last)
    assert [trial.state for trial in found.trials] == ["finished"] * 4
    assert [list(trial.curve) for trial in found.trials] == [list(range(last))] * 4


def test_a_trial_whose_process_always_dies_is_no_result(no_ray, tiny: Path, tmp_path: Path) -> None:
    """In the process of another trial at first; resumed where it can live, it is trained."""
    log, cure = tmp_path / "log", tmp_path / "cure"

    def act(trainer: Any, epoch: int, train: Any) -> Any:
        import os
        import signal

        layers = trainer.config["n_layers"]
        with open(log, "a") as stream:
            stream.write(f"{layers} {os.getpid()}\n")
        if layers == 2 and not cure.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return train()

    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init("local", num_cpus=2, runtime_env=each_epoch(act), **options)
    try:
        space = "n_layers: {choice: [1, 2, 3]}\n"
        with pytest.raises(TrainingError) as error:
            run(tmp_path, tiny, 1, space, searcher="grid", max_concurrent=1)
        assert "1 of 3 trials" in str(error.value)
        assert not (tmp_path / "out" / "test.json").exists()
        pids = defaultdict(list)
        for layers, pid in map(str.split, log.read_text().splitlines()):
            pids[layers].append(pid)
        assert len(pids["2"]) == 4 and pids["2"][0] == pids["1"][0]  # a process used again
        cure.touch()
        found = tune(resume=tmp_path / "out", verbose=False)
    finally:
        ray.shutdown()
    assert [trial.state for trial in found.trials] == ["finished"] * 3 and found.test
    assert [line.split()[0] for line in log.read_text().splitlines()].count("1") == 1


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
    # a shell lets what it starts in the background ignore the signal, the tests as well
    heed = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stopped = subprocess.Popen(again, **pipes)
    finally:
        signal.signal(signal.SIGINT, heed)
    wait(lambda: len(_done(folder)) > len(done))
    stopped.send_signal(signal.SIGTERM)  # which ends in what Ctrl-C does
    error = stopped.communicate(timeout=PATIENCE)[1]
    wait(lambda: not _processes(folder))
    assert stopped.returncode == 143 and f"tune --resume {folder}`" in error
    assert "Traceback" not in error and "trials.csv has the trials so far" in error, error
    states = [row.split(",")[1] for row in (folder / "trials.csv").read_text().splitlines()[1:]]
    assert set(states) <= {"finished", "unfinished"} and states.count("finished") >= len(done)
    finished = subprocess.run(again, capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (folder / "trials.csv").read_text().count(",finished,") == 6
    after = _done(folder)
    assert after.items() >= done.items()  # what had ended is as it was
    assert begun <= set(after)  # and what had begun was resumed, with the same options
    assert json.loads((folder / "test.json").read_text())["test"]


def _done(folder: Path) -> dict[str, float]:
    """When the trials that have ended were last trained, by their numbers."""
    done = [path.parent for path in folder.glob("runs/*/result.json")]
    return {run.name: (run / "metrics.jsonl").stat().st_mtime for run in done}


def _processes(folder: Path) -> list[psutil.Process]:
    """Those that the search in a folder has started, by what they inherit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OF_SEARCH") == str(folder):
                found.append(process)
    return found
