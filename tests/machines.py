"""Processes of Ray that are watched, slowed down or killed; two machines, one of which dies."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from conftest import wait
from ray.cluster_utils import Cluster

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
    """Workers that take their time for an epoch, and note it."""

    def act(trainer: Any, epoch: int, train: Callable[[], Any]) -> Any:
        import os
        import time

        import ray

        line, config = train(), trainer.config
        node = ray.get_runtime_context().get_node_id()
        about = "-".join(map(str, (*config["position"], config["seed"], config["learning_rate"])))
        with open(file, "a") as stream:
            stream.write(f"{about} {epoch} {node} {os.getpid()}\n")
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
