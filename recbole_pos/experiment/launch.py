"""Data-parallel training: several processes train one model, each with a part of every batch.

Each process has all the data and makes the same batches. Each of n processes takes every n-th row
of a batch, and gradients are summed, weighted by the share of its targets. So a step is the step
that one process would make, up to rounding and dropout. RecBole's DistributedSampler would instead
repeat rows until their number divides evenly, and train on those twice.

torch's elastic launcher, which is torchrun, starts and watches the processes. ``--nproc`` calls it
for this machine; for several machines the user calls torchrun. The first process writes and prints.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from recbole_pos import errors
from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.distributed import keep_working_directory_out
from recbole_pos.errors import Interrupted, TrainingError, UsageError, handle_signals
from recbole_pos.experiment.device import count_cores
from recbole_pos.experiment.folder import Result, RunFolder, find_unused_path
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter

_GRACE = 30  # seconds in which torch ends a process that has lost another one
_GROUP_NUMBERS = itertools.count()  # equal in all processes, which run the same script


def is_launched() -> bool:
    """Return whether torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def list_gpus(config: PosConfig, num_processes: int) -> list[str]:
    """Return the number of the GPU of each process of this machine, "" for one that uses CPUs.

    Args:
        config: configuration. Its ``gpu_id`` names the GPUs, such as "0,1", of which the first
            process gets the first.
        num_processes: number of processes of this machine.

    Raises:
        UsageError: if there are fewer GPUs than processes.
    """
    if config["device"].type == "cpu":
        return [""] * num_processes
    # ``plain`` has the options as they were given.
    gpus = [name.strip() for name in str(config.plain["gpu_id"]).split(",")]
    if len(gpus) < num_processes:
        problem = f"gpu_id: names {len(gpus)} GPUs for {num_processes} processes"
        raise UsageError(f"{problem}; name as many, as in --gpu_id='0,1', or --gpu_id= for CPUs")
    return gpus[:num_processes]


def run_in_parallel(
    args: RunArguments, config: PosConfig, run_dir: str | Path | None
) -> Result | None:
    """Train one model in ``args.nproc`` processes of this machine, as torchrun would.

    torch starts all processes again when one is killed, at most ``args.max_restarts`` times. An
    error of the program is not repeated: the process that meets it writes it into a file, and it
    is raised here.

    Args:
        args: arguments of the run.
        config: its options.
        run_dir: folder of a new run; None for one of a new name. A resumed run has its own.

    Returns:
        The result of the run.

    Raises:
        PosError: the error of a process, or a TrainingError after too many restarts.
        Interrupted: at Ctrl-C, when all processes have ended and an epoch was kept.
    """
    folder = RunFolder(
        args.resume or run_dir or find_unused_path(config["dataset"], config["model"])
    )
    new_run_dir = None if args.resume else folder.path
    gpus = list_gpus(config, args.nproc)
    classes = pack(config["model"])  # of models and schemes that users have registered

    # Start the processes and wait. Of their errors, ours come by a file, and others (a process that
    # was killed, or could not begin) as the failure that torch's launcher reports.
    with tempfile.TemporaryDirectory() as work:
        error_file = Path(work, "error")
        failure = None
        try:
            results = _launch(work, args, config.plain, new_run_dir, gpus, classes, error_file)
        except KeyboardInterrupt:
            if folder.checkpoint.is_file():
                raise Interrupted(str(folder.path), config["plugins"]) from None
            raise  # no epoch was kept, so there is nothing to resume
        except ChildFailedError as failed:
            _, failure = failed.get_first_failure()
        finally:
            # torch's store is part of a reference cycle. A process forked while it lives would hang
            # at its end.
            gc.collect()

        if error_file.is_file():
            name, _, text = error_file.read_text("utf-8").partition(": ")
            for kind in (UsageError, errors.CheckpointError, errors.StorageError, TrainingError):
                if kind.__name__ == name:
                    raise kind(text)
            raise TrainingError(f"{name}: {text}")

    if failure is not None:
        # A signal ends a process with a negative code. A positive one without an error in the file
        # is that of a process that failed before it reached our code.
        reason = failure.message
        if failure.exitcode > 0:
            guard = '`if __name__ == "__main__":`'
            reason = f"it could not begin; in a script recbole_pos.run must stand under {guard}"
        problem = f"a process of the run was lost after {args.max_restarts} restarts"
        raise TrainingError(f"{problem}: {reason}")
    return results[0]  # of the process of rank 0; the others have none


def _launch(log_folder: str, args: RunArguments, *more_args: Any) -> dict[int, Result | None]:
    """Start the processes of this machine, and return the result of each by its rank.

    Args:
        log_folder: folder for the files that torch's launcher writes.
        args: arguments of the run, which say how many processes and restarts there may be. They
            are also the first argument of :func:`_run_process`, which each process calls.
        more_args: the other arguments of that function, the same for each process.

    Returns:
        Rank (number of a process, from 0) -> what :func:`_run_process` returned in it.

    Raises:
        ChildFailedError: if a process was lost too often, when the others have ended.
        KeyboardInterrupt: after a signal, when all processes have ended.
    """
    # Our own message names the error; torch's loggers would add tables and tracebacks of the
    # processes that fail or that torch ends.
    for module in ("elastic.multiprocessing.api", "elastic.agent.server.api"):
        logging.getLogger(f"torch.distributed.{module}").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

    # The settings of `torchrun --standalone`.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=args.nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        max_restarts=args.max_restarts,
    )
    # A signal that stops the run, such as Ctrl-C, comes to this process. What it does depends on
    # the handlers of signals, which change three times:
    # 1. ``handle_signals`` sets ``default_int_handler``, which raises a KeyboardInterrupt.
    # 2. torch's launcher soon sets its own. They end the other processes and raise a
    #    SignalException. It does not put the former handlers back.
    # 3. ``handle_signals`` does so when its block ends.
    # ``keep_working_directory_out``: the new processes import nothing from the working directory.
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    try:
        with keep_working_directory_out(), handle_signals(signal.default_int_handler, *stops):
            return elastic_launch(config, _run_process)(args, *more_args)
    except SignalException as stop:
        # The other processes have ended, and this process has its former handlers again. So it gets
        # the same signal once more, and does what it would do without torch: SIGTERM, for example,
        # ends it here. If it ignores the signal, the KeyboardInterrupt says that the run stopped.
        signal.raise_signal(stop.sigval)
        raise KeyboardInterrupt from None


def _run_process(
    args: RunArguments,
    plain: dict[str, Any],
    run_dir: str | Path | None,
    gpus: list[str],
    packed: bytes,
    error_file: Path,
) -> Result | None:
    """Train as one of the processes that ``--nproc`` has started.

    torch starts all processes again whenever one of them fails. That helps after a kill, but an
    error of the program would come again. So the first process with an error writes it into
    ``error_file``, and processes that find this file end without training.

    Args:
        args: arguments of the run.
        plain: options of the whole run.
        run_dir: folder of a new run; None if a run is resumed.
        gpus: GPUs of the processes of this machine, see :func:`list_gpus`.
        packed: models and schemes that users have registered, as bytes (``config.plugins.pack``).
        error_file: file for the error, which does not exist before.

    Returns:
        The result in process 0; None in the others, and where an error has been written.
    """
    if error_file.is_file():
        return None

    def interrupt(*_: Any) -> None:
        """Interrupt the training at the first signal, and ignore those that follow.

        Two come at Ctrl-C: one from the terminal, one from the parent, which ends this process.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    unpack(packed)  # registers models and schemes of users, which a new process does not know
    try:
        return run_as_rank(args, plain, run_dir, gpus)
    except KeyboardInterrupt:
        # The checkpoint is written. A kill ends the process a second sooner than Python would.
        signal.raise_signal(signal.SIGKILL)
        raise
    except Exception as error:
        # Only the first process succeeds in creating the file.
        with suppress(FileExistsError), error_file.open("x", encoding="utf-8") as file:
            file.write(f"{type(error).__name__}: {error}")
        raise


def run_as_rank(
    args: RunArguments, plain: dict[str, Any], run_dir: str | Path | None, gpus: list[str]
) -> Result | None:
    """Train as one of the processes that torch has started.

    Args:
        args: arguments of the run.
        plain: options of the whole run.
        run_dir: folder of a new run. A process that torchrun has started again resumes from it.
        gpus: GPUs of the processes of this machine, see :func:`list_gpus`.

    Returns:
        The result in process 0; None in the others.
    """
    # The GPU of this process, or its share of the cores. torch has numbered the processes of this
    # machine by LOCAL_RANK, from 0.
    gpu = gpus[int(os.environ["LOCAL_RANK"])]
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # torch sees no other GPU
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_cores() // len(gpus)))  # the processes share the cores

    # The folder to resume from: the one that the user names; after a restart, that of this run, if
    # an epoch was kept. None for a run that begins.
    num_restarts = _count_restarts()
    resumed_folder = None
    if args.resume is not None:
        resumed_folder = RunFolder(args.resume)
    elif run_dir and num_restarts and RunFolder(run_dir).checkpoint.is_file():
        resumed_folder = RunFolder(run_dir)

    with _process_group("nccl" if gpu else "gloo") as rank:
        if rank == 0 and num_restarts:
            logging.getLogger(__name__).warning(
                f"a process was lost; all resume from the last epoch (restart {num_restarts})"
            )
        # ``gpu`` is the only one that this process sees. ``strict`` would refuse options without
        # effect; they were checked when the run began.
        config = PosConfig(config_dict={**plain, "gpu_id": gpu}, strict=False)
        config.plain["gpu_id"] = plain["gpu_id"]  # the folder keeps the option of the whole run
        is_first = rank == 0  # only the first process prints
        reporter = Reporter(args.verbose and is_first, as_json=args.as_json and is_first)
        return train(config, resumed_folder, run_dir, reporter)


def _count_restarts() -> int:
    """Return how often torchrun has started the processes of this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextmanager
def _process_group(backend: str) -> Iterator[int]:
    """Join the group of all processes for a ``with`` block, which gets the rank of this one.

    In the group, processes sum up gradients and wait for each other. A rank is the number of a
    process, from 0.

    Args:
        backend: how torch's processes talk: nccl between GPUs, gloo between CPUs.
    """
    rank = int(os.environ["RANK"])
    try:
        # The store, by which processes find each other, outlives the group. A group that is made
        # later, or after a restart, must not read the addresses of this one, so each has a prefix:
        # the number of the restart and a running number.
        store, _, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"{_count_restarts()}/{next(_GROUP_NUMBERS)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        yield rank
    except Exception as error:
        # An error of the talk between processes means that another one was lost; gloo raises it as
        # a plain RuntimeError, which is known by its text. torch then ends this process, too, and
        # reports the one that failed first. So this one waits (_GRACE seconds), and does not fail
        # first itself.
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            time.sleep(_GRACE)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
