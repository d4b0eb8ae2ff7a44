"""Training runs in plain processes of this machine, which begin in a tenth of a second.

Ray starts seven processes of its own and imports torch in each worker. Here one server process
imports the package once, and every run is a fork of it. ``cluster.RayRuns`` has the same methods.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from recbole_pos.experiment.device import count_cores
from recbole_pos.files import TemporaryFolder
from recbole_pos.runs import FAILED
from recbole_pos.runs.resources import Resources, count_runs
from recbole_pos.runs.worker import MOST_LOSSES, SharedData, train_run


def can_run_here(address: str | None, gpus: float | None, uses_gpu: bool) -> bool:
    """Return whether runs need nothing of Ray: no cluster, no GPU, and the process is in no Ray.

    Args:
        address: ``--address``.
        gpus: ``--gpus_per_trial``; None if it is not given.
        uses_gpu: whether the configuration leaves GPUs on (``use_gpu``).
    """
    ray = sys.modules.get("ray")
    is_in_ray = ray is not None and ray.is_initialized()
    has_gpu = bool(gpus) or (gpus is None and uses_gpu and torch.cuda.is_available())
    return address is None and not is_in_ray and not has_gpu and os.name == "posix"


def start_server() -> None:
    """Let a server process import the package, in the background, before the first run needs it.

    It imports nothing from the working directory, which may be a stranger's folder; before Python
    3.11 that cannot be switched off, so there each run imports the package by itself.
    """
    if sys.version_info < (3, 11):
        return
    from multiprocessing import forkserver  # Windows has none, and trains on Ray

    forkserver.set_forkserver_preload(["recbole_pos.runs.worker", "torch._dynamo"])
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


class LocalRuns:
    """Runs of this machine, each in a process of its own, on CPUs.

    A run whose process is killed starts again, and so resumes from its last checkpoint, up to
    :data:`MOST_LOSSES` times.
    """

    def __init__(self) -> None:
        """Start the server, unless it runs, and make a folder for the data of runs."""
        start_server()
        self.folder = TemporaryFolder()

    def choose_resources(self, cpus: float, gpus: float | None, uses_gpu: bool) -> Resources:
        """Return the resources of a run; arguments as of ``cluster.choose_resources``."""
        return Resources(cpus)

    def count_concurrent_runs(self, resources: Resources) -> int:
        """Return how many runs this machine trains at a time; a UsageError if it is none."""
        return count_runs([{"CPU": count_cores()}], resources)

    def share(self, data: SharedData) -> MappedData:
        """Return the data for :meth:`start`, written once for all runs."""
        return MappedData(data, self.folder.path)

    def start(self, resources: Resources, *arguments: Any) -> LocalRun:
        """Start ``train_run(*arguments)`` in a process."""
        return LocalRun(arguments)

    def wait(self, runs: Iterable[LocalRun]) -> Iterator[tuple[LocalRun, dict[str, Any]]]:
        """Yield each run that has ended, with what ``train_run`` returned; wait up to a second."""
        by_connection: dict[Any, LocalRun] = {run.connection: run for run in runs}
        for connection in wait(list(by_connection), timeout=1.0):
            run = by_connection[connection]
            facts = run.receive()
            if facts is not None:
                yield run, facts

    def cancel(self, runs: Iterable[LocalRun]) -> None:
        """End the processes of runs."""
        for run in runs:
            run.process.kill()

    def stop(self) -> None:
        """Do nothing: processes end with their runs, and the server with this process."""


class LocalRun:
    """A run in a process.

    Attributes:
        process: the process.
        connection: the pipe on which it sends the facts of the run.
        arguments: pickled arguments of ``train_run``.
        num_lost: how many processes of this run were killed.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        """Start the run; ``arguments`` are those of ``train_run``."""
        # by value, since a process cannot import what a script or a notebook defines
        self.arguments, self.num_lost = cloudpickle.dumps(arguments), 0
        self.connection: Connection
        self._start()

    def _start(self) -> None:
        """Start a process, which resumes from a checkpoint if the run has one."""
        context = multiprocessing.get_context("forkserver")
        self.connection, other_end = context.Pipe()
        self.process = context.Process(
            target=_train_and_send, args=(other_end, dict(os.environ), self.arguments)
        )
        with _main_module_without_file():
            self.process.start()
        other_end.close()  # so that the pipe ends when the process does

    def receive(self) -> dict[str, Any] | None:
        """Return the facts of the run; None if its process was killed and has been replaced."""
        with suppress(EOFError, OSError):
            return self.connection.recv()
        self.process.join()
        self.num_lost += 1
        if self.num_lost <= MOST_LOSSES:
            self._start()
            return None
        reason = f"its process was lost {self.num_lost} times (code {self.process.exitcode})"
        return {"status": FAILED, "reason": reason}


class MappedData:
    """A :class:`SharedData` whose columns lie in files, which all processes map.

    Attributes:
        template: the data without their columns.
        files: name of a column -> its file.
    """

    def __init__(self, data: SharedData, folder: Path) -> None:
        """Write the columns into a folder."""
        self.template = copy.copy(data)
        self.template.columns = {}
        self.files: dict[str, Path] = {}
        for name, column in data.columns.items():
            self.files[name] = folder / f"{id(self)}-{len(self.files)}.npy"
            np.save(self.files[name], column)

    def make_dataset(self, config: Any) -> Any:
        """Return the dataset for the configuration of a run; it reads the mapped columns."""
        data = copy.copy(self.template)
        data.columns = {name: np.load(file, mmap_mode="r") for name, file in self.files.items()}
        return data.make_dataset(config)


def _train_and_send(connection: Connection, environment: dict[str, str], arguments: bytes) -> None:
    """Train a run, as a process of :class:`LocalRun`, and send its facts to the command.

    The environment is that of the command, since the server may have begun with another one. The
    arguments are those of ``train_run``, pickled by the command.

    The command sends nothing, so its end of the pipe becomes readable only when the command is
    gone, also by a kill; this process then ends at once, since another command may resume the run.
    """
    os.setpgid(0, 0)  # Ctrl-C of a terminal reaches the command alone, which ends this process

    def end_with_the_command() -> None:
        wait([connection])
        os._exit(1)

    threading.Thread(target=end_with_the_command, daemon=True).start()
    os.environ.update(environment)
    silent = os.open(os.devnull, os.O_WRONLY)  # the command prints what becomes of the run
    for output in (1, 2):
        os.dup2(silent, output)
    connection.send(train_run(*pickle.loads(arguments)))
    os._exit(0)  # at once: the end of the pipe must not look like the end of the command


@contextmanager
def _main_module_without_file() -> Iterator[None]:
    """Keep processes that start in a ``with`` block from importing the user's script.

    They do not need it: classes of a script are sent by ``pack``. And a script that calls
    ``compare`` outside of ``if __name__ == "__main__":`` would call it again.
    """
    main: dict[str, Any] = sys.modules["__main__"].__dict__
    names = [name for name in ("__file__", "__spec__") if name in main]
    hidden: dict[str, Any] = {name: main.pop(name) for name in names}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.pop("__spec__")
        main.update(hidden)
