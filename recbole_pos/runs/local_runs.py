"""Training runs in plain processes of this machine, which begin in a tenth of a second.

Ray starts seven processes of its own and imports torch in each worker. Here one server process
imports the package once, and every run is a fork of it. ``cluster.RayRuns`` has the same methods.
"""

from __future__ import annotations

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
import joblib
import torch

from recbole_pos.distributed import keep_working_directory_out
from recbole_pos.experiment.device import count_cores
from recbole_pos.files import TemporaryFolder
from recbole_pos.runs import FAILED
from recbole_pos.runs.worker import MOST_LOSSES, Resources, SharedData, count_runs, train_run


def can_run_here(address: str | None, gpus: float | None, uses_gpu: bool) -> bool:
    """Return whether training runs can be plain processes of this machine, without Ray.

    They can if no cluster and no GPU is asked for (Ray is what distributes GPUs), and if this
    process is not connected to Ray already. Windows cannot fork processes, so it always needs Ray.

    Args:
        address: ``--address``, of a Ray cluster; None for this machine.
        gpus: ``--gpus_per_trial``; None if it is not given.
        uses_gpu: whether the configuration leaves GPUs on (``use_gpu``), which then are used if
            there are any.
    """
    ray = sys.modules.get("ray")
    is_in_ray = ray is not None and ray.is_initialized()
    has_gpu = bool(gpus) or (gpus is None and uses_gpu and torch.cuda.is_available())
    return address is None and not is_in_ray and not has_gpu and os.name == "posix"


def start_server() -> None:
    """Start Python's fork server: a process that imports this package once, and is then copied.

    Each training run is a copy (fork) of it, which has nothing to import any more. The server must
    not import from the working directory, which may be a stranger's folder. Before Python 3.11 that
    cannot be switched off, so there each run imports the package by itself.
    """
    if sys.version_info < (3, 11):
        return
    from multiprocessing import forkserver  # Windows has none, and trains on Ray

    forkserver.set_forkserver_preload([__name__])  # what the server imports
    with keep_working_directory_out():
        forkserver.ensure_running()


class LocalRuns:
    """Runs on CPUs of this machine, each in a process of its own; ``cluster.RayRuns`` is alike.

    A run whose process is killed starts again, and so resumes from its last checkpoint, up to
    :data:`MOST_LOSSES` times.

    Attributes:
        folder: temporary folder for the data of the runs.
    """

    def __init__(self) -> None:
        """Start the server, unless it runs, and make a folder for the data of runs."""
        start_server()
        self.folder = TemporaryFolder()

    def choose_resources(self, cpus: float, gpus: float | None, uses_gpu: bool) -> Resources:
        """Return the resources of a run: the CPUs that it is given, and no GPU.

        Runs that need a GPU are left to ``RayRuns``, which has a method of this name, too.

        Args:
            cpus: number of CPUs of a run.
            gpus, uses_gpu: read by the method of ``RayRuns`` only.
        """
        return Resources(cpus)

    def count_concurrent_runs(self, resources: Resources) -> int:
        """Return how many runs this machine trains at a time; a UsageError if it is none."""
        # count_runs takes a list of machines, here one without GPUs.
        return count_runs([{"CPU": count_cores()}], resources)

    def share(self, data: SharedData) -> MappedData:
        """Return the data for :meth:`start`, written once for all runs."""
        return MappedData(data, self.folder.path)

    def start(self, **arguments: Any) -> LocalRun:
        """Start ``train_run(**arguments)`` in a process of its own."""
        return LocalRun(arguments)

    def wait(self, runs: Iterable[LocalRun]) -> Iterator[tuple[LocalRun, dict[str, Any]]]:
        """Wait up to a second for a run to end, and yield it with the facts that it returned.

        Callers call this in a loop, and do other things between. A run whose process was killed is
        not yielded, since it starts again (``receive`` sees to that, and returns None).

        Args:
            runs: running ones, as :meth:`start` returned them.

        Yields:
            The run, and the dict that ``train_run`` returned, such as ``{"status": "done"}``.
        """
        # The ``wait`` of multiprocessing returns the connections that have content, or have ended.
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
    """A run in a process of this machine.

    Attributes:
        process: the process.
        connection: the pipe on which it sends the facts of the run.
        arguments: arguments of ``train_run`` as bytes.
        num_lost: how many processes of this run were killed.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start the run in a process of its own; ``arguments`` are those of ``train_run``."""
        # They are kept as bytes, to start the run again. Classes are pickled by value: a process
        # cannot import those of a script or a notebook.
        self.arguments, self.num_lost = cloudpickle.dumps(arguments), 0
        self.connection: Connection
        self._start()

    def _start(self) -> None:
        """Start a process that trains the run, from its last checkpoint if it has one.

        Python's fork server, which has imported this package already, makes the process as a copy
        of itself. ``self.connection`` is the end of a pipe, through which the process will send
        what ``train_run`` returns.
        """
        context = multiprocessing.get_context("forkserver")
        self.connection, other_end = context.Pipe()
        # The environment is passed on, since the fork server has that of an earlier moment.
        sent = other_end, dict(os.environ), self.arguments
        self.process = context.Process(target=_train_and_send, args=sent)
        # Python would import the user's script in the new process, which would train again. It does
        # not if the main module seems to have no file, as in this block.
        with _main_module_without_file():
            self.process.start()
        other_end.close()  # so that the pipe ends when the process does

    def receive(self) -> dict[str, Any] | None:
        """Return the facts that ``train_run`` returned in the process of the run.

        It is called once the pipe from the process has content or has ended. If it has ended
        without content, the process was killed: a new one is started in its place, and None is
        returned; after too many losses, ``{"status": "failed", "reason": ...}``.
        """
        with suppress(EOFError, OSError):  # the pipe has ended without a result
            return self.connection.recv()

        # The process was killed; up to MOST_LOSSES times another one goes on with the run.
        self.process.join()
        self.num_lost += 1
        if self.num_lost <= MOST_LOSSES:
            self._start()
            return None
        reason = f"its process was lost {self.num_lost} times (code {self.process.exitcode})"
        return {"status": FAILED, "reason": reason}


class MappedData:
    """A :class:`SharedData` in a file, whose arrays all processes map into memory.

    Processes that map the same file share its memory, so that the arrays are there only once.

    Attributes:
        file: the file, which joblib writes and reads.
    """

    def __init__(self, data: SharedData, folder: Path) -> None:
        """Write the data into a folder, which may have files of other datasets as well.

        Args:
            data: a dataset with numpy arrays, which joblib can map from a file.
            folder: the folder, which processes that read the file can see.
        """
        self.file = folder / f"{id(self)}.joblib"  # another name for each object
        joblib.dump(data, self.file)

    def make_dataset(self, config: Any) -> Any:
        """Return the dataset for the configuration of a run; its columns cannot be written to."""
        # With the mode "r" the arrays stay in the file, and parts of it are read as they are used.
        data = joblib.load(self.file, mmap_mode="r")
        return data.make_dataset(config)


def _train_and_send(connection: Connection, environment: dict[str, str], arguments: bytes) -> None:
    """Train a run and send its facts to the command that started this process.

    If the command is gone, also by a kill, this process ends at once, since another command may
    resume the run. The command sends nothing, so its end of the pipe becomes readable only then.

    Args:
        connection: this process's end of the pipe to the command.
        environment: environment variables of the command. Those of the server, from which this
            process was forked, may be others.
        arguments: arguments of ``train_run``, pickled by the command.
    """
    # Ctrl-C of a terminal then reaches only the command, which ends this process.
    os.setpgid(0, 0)

    def end_with_the_command() -> None:
        wait([connection])  # until the pipe is readable: its other end is gone
        os._exit(1)

    threading.Thread(target=end_with_the_command, daemon=True).start()
    os.environ.update(environment)

    # Silence stdout and stderr: the command prints what becomes of the run.
    silent = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(silent, output)
    connection.send(train_run(**pickle.loads(arguments)))
    # Exit at once. An ordinary exit would close this end of the pipe first, which the thread could
    # take for the end of the command, and exit with the code 1.
    os._exit(0)


@contextmanager
def _main_module_without_file() -> Iterator[None]:
    """Keep processes that start in a ``with`` block from importing the user's script.

    Python lets a new process import the script that started it, if that has a file. These processes
    do not need it, since classes of a script are sent as bytes. And a script that calls ``compare``
    outside of ``if __name__ == "__main__":`` would call it again.
    """
    # Python decides by these two names whether there is a script to import; hide them meanwhile.
    main: dict[str, Any] = sys.modules["__main__"].__dict__
    names = [name for name in ("__file__", "__spec__") if name in main]
    hidden: dict[str, Any] = {name: main.pop(name) for name in names}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.pop("__spec__")
        main.update(hidden)
