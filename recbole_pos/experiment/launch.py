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
import pickle
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
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.distributed import keep_working_directory_out
from recbole_pos.errors import Interrupted, PosError, TrainingError, UsageError, handle_signals
from recbole_pos.experiment.device import configure_for_gpus, count_cores
from recbole_pos.experiment.folder import Result, RunFolder, find_unused_path
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter

MAX_RESTARTS = 3  # from the last epoch, when a process is killed
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

    torch starts all processes again when one is killed, at most ``MAX_RESTARTS`` times.

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
    new_path = run_dir or find_unused_path(config["dataset"], config["model"])
    folder = RunFolder(args.resume or new_path)
    new_run_dir = None if args.resume else folder.path
    gpus = list_gpus(config, args.nproc)
    packed_classes = pack(config["model"])  # of models and schemes that users have registered

    with tempfile.TemporaryDirectory() as work:
        # Start the processes and wait for their end. One that raises an error writes it into
        # ``error_file``.
        error_file = Path(work, "error")
        arguments = args, config.plain, new_run_dir, gpus, packed_classes, error_file
        try:
            results, failure = _launch(work, args.nproc, arguments)
        except KeyboardInterrupt:
            if not folder.checkpoint.is_file():
                raise  # no epoch was kept, so there is nothing to resume
            text = f"interrupted; continue with `{folder.resume_command}`"
            raise Interrupted(text) from None
        # Free torch's store: a later process that is forked with it would hang at its end.
        gc.collect()

        # The error itself says more than ``failure``, which may also be None after an error.
        if error_file.is_file():
            raise pickle.loads(error_file.read_bytes())
    if failure is not None:  # a process was killed, or failed before it reached our code
        raise _explain_failure(failure)
    return results[0]  # of the process of rank 0; the others have none


def _explain_failure(failure: ProcessFailure) -> TrainingError:
    """Return the error to raise when a process has ended without reporting an error itself.

    Args:
        failure: what torch's launcher reports of the process.
    """
    if failure.exitcode < 0:  # a signal has ended the process, such as a kill
        reason = failure.message
    else:  # it failed before it reached our code
        guard = '`if __name__ == "__main__":`'
        reason = f"it could not begin; in a script recbole_pos.run must stand under {guard}"
    return TrainingError(f"a process of the run was lost after {MAX_RESTARTS} restarts: {reason}")


def _launch(
    log_folder: str, num_processes: int, arguments: tuple[Any, ...]
) -> tuple[dict[int, Result | None], ProcessFailure | None]:
    """Start the processes of this machine, wait for their end, and return their results.

    Args:
        log_folder: folder for the files that torch's launcher writes.
        num_processes: number of processes.
        arguments: those of :func:`_run_process`, which each process calls.

    Returns:
        Rank (number of a process, from 0) -> what :func:`_run_process` returned in it; ``{}`` after
            a failure.
        What torch's launcher reports of the process that failed first, if processes have failed
            more than ``MAX_RESTARTS`` times; else None.

    Raises:
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
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        max_restarts=MAX_RESTARTS,
    )
    # ``keep_working_directory_out``: the new processes import nothing from the working directory.
    try:
        with keep_working_directory_out(), _signals_as_without_torch():
            return elastic_launch(config, _run_process)(*arguments), None
    except ChildFailedError as error:
        _, failure = error.get_first_failure()  # after the rank of the process
        return {}, failure


@contextmanager
def _signals_as_without_torch() -> Iterator[None]:
    """Run torch's launcher in a ``with`` block; a signal has its usual effect after the block.

    torch's launcher has its own handlers of signals: they end the processes that it has started,
    and raise a SignalException. Here that exception is replaced by the usual effect of the signal:
    Ctrl-C raises a KeyboardInterrupt, and SIGTERM ends this process.
    """
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    try:
        # The launcher leaves its handlers set; ``handle_signals`` puts the former ones back after
        # the block. Until the launcher has set its own, ``default_int_handler`` handles each signal
        # by a KeyboardInterrupt.
        with handle_signals(signal.default_int_handler, *stops):
            yield
    except SignalException as stop:
        # The launcher's processes have ended, and the former handlers are back. Send the signal to
        # this process again, for its usual effect, with which this function ends.
        signal.raise_signal(stop.sigval)
        # Here the process ignores the signal, as SIGHUP under nohup. But the run has been stopped.
        raise KeyboardInterrupt from None


def _run_process(
    args: RunArguments,
    plain: dict[str, Any],
    run_dir: str | Path | None,
    gpus: list[str],
    packed_classes: bytes,
    error_file: Path,
) -> Result | None:
    """Train as one of the processes that ``--nproc`` has started; write an error into a file.

    torch starts all processes again when one of them fails. That helps if it was killed, but an
    error of the program would come again. So the first process with an error writes it into
    ``error_file``, and a process that finds this file at its start ends without training.

    Args:
        args: arguments of the run.
        plain: options of the whole run.
        run_dir: folder of a new run; None if a run is resumed.
        gpus: GPUs of the processes of this machine, see :func:`list_gpus`.
        packed_classes: models and schemes that users have registered (``config.plugins.pack``).
        error_file: file for the error, which does not exist before.

    Returns:
        The result in process 0; None in the others, and where an error has been written.
    """
    if error_file.is_file():
        return None
    _interrupt_at_first_signal()
    unpack(packed_classes)  # registers the classes, which a new process does not know
    try:
        return run_as_rank(args, plain, run_dir, gpus)
    except KeyboardInterrupt:
        # The last checkpoint is written by now. End at once: Python's own exit takes a second.
        os._exit(Interrupted.exit_code)
    except Exception as error:
        # An error of a class of the user's cannot be read in the process that has started this one.
        if not isinstance(error, PosError):
            error = TrainingError(f"{type(error).__name__}: {error}")
        # The mode "x" raises a FileExistsError if another process has written its error already.
        with suppress(FileExistsError), error_file.open("xb") as file:
            pickle.dump(error, file)
        raise


def _interrupt_at_first_signal() -> None:
    """Let the first SIGINT or SIGTERM raise a KeyboardInterrupt, and ignore those that follow.

    At Ctrl-C two come: one from the terminal, and one from the process that has started this one.
    """
    stops = signal.SIGINT, signal.SIGTERM

    def interrupt(*_: Any) -> None:
        for number in stops:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in stops:
        signal.signal(number, interrupt)


def run_as_rank(
    args: RunArguments, plain: dict[str, Any], run_dir: str | Path | None, gpus: list[str]
) -> Result | None:
    """Train as one of the processes that torch has started.

    Args:
        args: arguments of the run.
        plain: options of the whole run.
        run_dir: folder of a new run; None for one that is named by the time, or if ``args.resume``
            names the folder of a run to resume.
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

    # The run to resume, if any: the one that the user names. After a loss, torch starts all
    # processes again; then also this run itself, if an epoch of it was kept in its new folder.
    num_restarts = _count_restarts()
    resumed_folder = None if args.resume is None else RunFolder(args.resume)
    if num_restarts and run_dir and RunFolder(run_dir).checkpoint.is_file():
        resumed_folder = RunFolder(run_dir)

    with _process_group("nccl" if gpu else "gloo") as rank:
        is_first = rank == 0  # only the first process prints
        if is_first and num_restarts:
            text = f"a process was lost; all resume from the last epoch (restart {num_restarts})"
            logging.getLogger(__name__).warning(text)
        reporter = Reporter(args.verbose and is_first)
        return train(configure_for_gpus(plain, gpu), resumed_folder, run_dir, reporter)


def _count_restarts() -> int:
    """Return how often torchrun has started the processes of this run again, after a loss."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextmanager
def _process_group(backend: str) -> Iterator[int]:
    """Join this process with the others of its run for a ``with`` block, which gets its rank.

    In the group, processes sum up gradients and wait for each other. A rank is the number of a
    process, from 0.

    Args:
        backend: how torch's processes talk: nccl between GPUs, gloo between CPUs.
    """
    rank = int(os.environ["RANK"])
    try:
        # ``rendezvous`` returns a store, in which each process leaves its address for the others,
        # and the number of processes. Earlier groups of this run have left addresses in the store,
        # too. So the names of each group's entries get a prefix: the number of restarts and the
        # number of the group since then, such as "1/0".
        store, _, num_processes = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"{_count_restarts()}/{next(_GROUP_NUMBERS)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_processes)
        yield rank
    except Exception as error:
        if _has_lost_process(error):
            # Another process was killed. As soon as torch's launcher notices, it ends this process
            # and reports the one that failed first. So do not fail before the launcher notices.
            time.sleep(_GRACE)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _has_lost_process(error: Exception) -> bool:
    """Return whether an error means that another process of the group has ended.

    Processes of a run are a group, which sum up their gradients. Where one is gone, torch raises a
    DistError in the others or, if they talk by the backend gloo, a RuntimeError whose text names
    the file of gloo that failed.
    """
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
