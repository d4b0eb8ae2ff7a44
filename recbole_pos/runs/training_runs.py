"""Training runs of ``tune`` and ``compare``, each in a process that resumes from a checkpoint.

:func:`train_run` trains a run in its own folder, which all machines must reach. Its data were read
once, by the command, and are shared by all runs as :class:`SharedData`.

:class:`LocalRuns` trains runs in plain processes of this machine, which begin in a tenth of a
second. Ray starts seven processes of its own and imports torch in each worker. Here one server
process imports the package once, and every run is a fork of it. ``cluster.RayRuns`` has the same
methods, for a Ray cluster.
"""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import joblib
import torch

from recbole_pos.config.plugins import unpack
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.interactions import wrap_read_only
from recbole_pos.distributed import keep_working_directory_out
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment.device import configure_for_gpus, count_cores
from recbole_pos.experiment.diagnosis import locate_in_custom_code
from recbole_pos.experiment.folder import RunFolder, copy_run
from recbole_pos.experiment.train import train
from recbole_pos.files import TemporaryFolder
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE, FAILED
from recbole_pos.values import shown

MOST_LOSSES = 3  # how often a run is resumed whose process or machine was lost
QUIET = {"show_progress": False}  # options of all runs: nobody sees the output of Ray's processes


@dataclass(frozen=True)
class Resources:
    """The resources of a training run.

    Attributes:
        cpus: number of CPUs, which is also the number of threads.
        gpus: number of GPUs; with a fraction, several runs share one.
    """

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        """Return ``1 CPU and 0.5 GPU a training``."""
        return f"{self.cpus:g} CPU and {self.gpus:g} GPU a training"


def choose_resources(
    machines: Sequence[Mapping[str, float]], cpus: float, gpus: float | None, uses_gpu: bool
) -> Resources:
    """Return how many CPUs and GPUs each training run gets.

    If ``gpus`` is None, a run gets one GPU if the configuration uses GPUs and a machine has one,
    and otherwise none.

    Args:
        machines: for each machine, ``CPU`` and ``GPU`` -> number of each.
        cpus: ``--cpus_per_trial``.
        gpus: ``--gpus_per_trial``; None if it is not given.
        uses_gpu: whether the configuration leaves GPUs on (``use_gpu``).
    """
    if gpus is None:
        has_gpu = any(machine.get("GPU", 0) >= 1 for machine in machines)
        gpus = 1 if uses_gpu and has_gpu else 0
    return Resources(cpus, gpus)


def count_runs(machines: Sequence[Mapping[str, float]], resources: Resources) -> int:
    """Return how many runs some machines can train at the same time.

    On each machine, the scarcest resource limits the number of runs: 8 CPUs and 2 GPUs hold two
    runs of 1 CPU and 1 GPU.

    Args:
        machines: for each machine, ``CPU`` and ``GPU`` -> number of each.
        resources: CPUs and GPUs of a run.

    Raises:
        UsageError: if no machine has the resources of a run.
    """
    rounding = 1e-9  # 0.3 GPUs hold three runs of 0.1, although 0.3 / 0.1 < 3
    num_runs = 0
    for machine in machines:
        limits = [machine.get("CPU", 0) / resources.cpus]
        if resources.gpus:
            limits.append(machine.get("GPU", 0) / resources.gpus)
        num_runs += int(min(limits) + rounding)
    if not num_runs:
        found = "; ".join(f"{m.get('CPU', 0):g} CPUs, {m.get('GPU', 0):g} GPUs" for m in machines)
        raise UsageError(
            f"--cpus_per_trial, --gpus_per_trial: no machine has {resources.cpus:g} CPUs and "
            f"{resources.gpus:g} GPUs for a run; found {shown(found)}"
        )
    return num_runs


class SharedData:
    """A prepared dataset whose columns are numpy arrays, which Ray keeps once per machine.

    Arrays are mapped into every process on the machine that reads them; tensors would be copied.
    Test interactions are cut out unless they are needed: a trial of a search cannot read what it
    does not have.

    Attributes:
        dataset: the dataset. Its interactions have numpy arrays in place of tensors.
    """

    def __init__(self, dataset: Dataset, includes_test: bool = False) -> None:
        """Make a copy of a dataset with arrays in place of tensors.

        Processes can share the memory of numpy arrays, while each would get a copy of a tensor.

        Args:
            dataset: the dataset with its split, which stays as it is.
            includes_test: whether test interactions are kept.
        """
        reduced = copy.copy(dataset) if includes_test else dataset.without_test()
        # The hash of the whole dataset. The copy cannot compute it itself: it needs tensors, and
        # all interactions.
        reduced.identity = dataset.identity
        reduced.config = {}  # large to copy; make_dataset puts in the configuration of a run
        arrays = {name: column.numpy() for name, column in reduced.split.log.fields.items()}
        self.dataset = _replace_columns(reduced, arrays)

    def make_dataset(self, config: Any) -> Dataset:
        """Return the dataset for the configuration of a run, with tensors of the shared arrays.

        The arrays are not copied, and so must not be written to.

        Args:
            config: configuration of the run. Options of the model may differ from those of the
                dataset, options of the data may not.
        """
        # ``fields`` has the columns of the log of all interactions, by name. ``wrap_read_only``
        # makes a tensor that uses the memory of an array, and ``for_config`` a dataset with the
        # options of the run.
        arrays: dict[str, Any] = self.dataset.split.log.fields
        tensors = {name: wrap_read_only(array) for name, array in arrays.items()}
        return _replace_columns(self.dataset, tensors).for_config(config)


def _replace_columns(dataset: Dataset, columns: dict[str, Any]) -> Dataset:
    """Return a copy of a dataset whose interactions have other columns, such as arrays or tensors.

    Copied are only the objects that lead to the columns: the dataset, its split, and the log of all
    interactions in it. All else is shared with the given dataset, which stays as it is.

    Args:
        dataset: the dataset.
        columns: name of a field, such as ``item_id`` -> its new column.
    """
    copied = copy.copy(dataset)
    log = replace(dataset.split.log, fields=columns)
    copied.split = replace(dataset.split, log=log)
    return copied


def train_run(
    plain: dict[str, Any],
    path: str,
    data: Any,
    resources: Resources,
    packed: bytes = b"",
    tested_run: str | None = None,
    report: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Train a run in this process and, where there are test interactions, test it.

    A failure is not raised but returned, since Ray would train the run again after an exception.

    Args:
        plain: options of the configuration.
        path: folder of the run. If it has a checkpoint, the run resumes from it.
        data: the :class:`SharedData` of the run.
        resources: CPUs and GPUs of this process.
        packed: code of custom models and schemes as bytes, from ``plugins.pack``, which are
            registered in this process; empty if there are none.
        tested_run: folder of a trained run whose weights are only tested: the best trial of a
            search, which had no test interactions, or a run of another configuration. None to
            train.
        report: called with the experiment after every validated epoch, once its checkpoint is
            written; and once if no epoch is left to train.

    Returns:
        ``status``, ``done`` or ``failed``. For a finished run also the content of its
        ``result.json``. For a failed one the ``reason``, and ``lost``: whether the disk or Ray
        failed, and not the run itself.
    """
    torch.set_num_threads(max(1, int(resources.cpus)))
    logging.getLogger().setLevel(logging.WARNING)  # without RecBole's reports of every step
    try:
        # The folder of the run; a run that is only tested begins as a copy of the trained one,
        # whose training has ended. ``unpack`` registers the custom models.
        unpack(packed)
        run = RunFolder(path)
        if not run.path.parent.is_dir():
            raise UsageError(
                f"{socket.gethostname()} does not see {run.path.parent}: give a --run_dir that all "
                "machines reach"
            )
        if tested_run is not None and not run.checkpoint.is_file():
            copy_run(RunFolder(tested_run), run)

        # Train from the beginning, or from the checkpoint of a process that was lost.
        resumed = run if run.checkpoint.is_file() else None
        config = configure_for_gpus(plain, _list_gpus(resources))
        dataset = data.make_dataset(config)
        result = train(config, resumed, run.path, Reporter(enabled=False), dataset, report)
        assert result is not None  # only further processes of a distributed run return None
        return {"status": DONE, **asdict(result)}
    except Exception as error:
        is_of_ray = type(error).__module__.startswith("ray.")  # which may not be imported here
        is_lost = isinstance(error, OSError) or is_of_ray
        return {"status": FAILED, "lost": is_lost, "reason": explain_failure(error)}
    finally:
        # Free memory, since this process trains the next run.
        gc.collect()
        if resources.gpus:
            torch.cuda.empty_cache()


def _list_gpus(resources: Resources) -> str:
    """Return the GPUs that Ray gave this process, such as ``0,1``, as the option ``gpu_id``.

    Args:
        resources: CPUs and GPUs of the run; without GPUs the option is empty.
    """
    if not resources.gpus:
        return ""
    import ray  # only Ray assigns GPUs; local runs, which use CPUs, do without the import

    # RecBole trains on the GPUs of this option. The gpu_id that the user has set for the study or
    # the search is not taken: it is the same for all runs, which would then share one GPU.
    return ",".join(str(gpu) for gpu in ray.get_gpu_ids())


def explain_failure(error: BaseException) -> str:
    """Return, in one line, why a training run has failed.

    The message of an error of this package stands for itself. Of another error the type is named,
    too, and the file and line if it came from the user's custom code (such as a model).

    Args:
        error: the exception that ended the run.
    """
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, PosError):
        return text
    # Such as "my_model.py, line 12"; None if the error is from elsewhere.
    location = locate_in_custom_code(error)
    return f"{type(error).__name__}: {text}" + (f" ({location})" if location else "")


# --- processes of this machine ---


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

    def list_machines(self) -> list[dict[str, float]]:
        """Return the resources of this machine, as ``RayRuns`` returns those of a cluster."""
        return [{"CPU": count_cores()}]  # a run that needs a GPU is left to Ray

    def share(self, data: SharedData) -> MappedData:
        """Return the data for :meth:`start`, written once for all runs."""
        file = self.folder.path / f"{uuid.uuid4().hex}.joblib"
        joblib.dump(data, file)
        return MappedData(file)

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


@dataclass(frozen=True)
class MappedData:
    """A :class:`SharedData` in a file, whose arrays all processes map into memory.

    Processes that map the same file share its memory, so that the arrays are there only once.

    Attributes:
        file: the file, which joblib has written.
    """

    file: Path

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
