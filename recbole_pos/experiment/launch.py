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

from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import (
    CheckpointError,
    Interrupted,
    StorageError,
    TrainingError,
    UsageError,
    handle_signals,
)
from recbole_pos.experiment.device import count_cores
from recbole_pos.experiment.folder import Result, RunFolder, find_unused_path
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter

_GRACE = 30  # seconds in which torch ends a process that has lost another one
_GROUP_NUMBERS = itertools.count()  # equal in all processes, which run the same script
_ERRORS = {
    error.__name__: error for error in (UsageError, CheckpointError, StorageError, TrainingError)
}


def is_launched() -> bool:
    """Return whether torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def list_gpus(config: PosConfig, num_processes: int) -> list[str]:
    """Return the number of the GPU of each process of this machine, "" for one that uses CPUs."""
    if config["device"].type == "cpu":
        return [""] * num_processes
    gpus = [name.strip() for name in str(config.plain["gpu_id"]).split(",")]
    if len(gpus) < num_processes:
        raise UsageError(
            f"gpu_id: names {len(gpus)} GPUs for {num_processes} processes; for example "
            f"--gpu_id='{','.join(map(str, range(num_processes)))}', or --gpu_id= for CPUs"
        )
    return gpus[:num_processes]


def run_in_parallel(
    args: RunArguments, config: PosConfig, run_dir: str | Path | None
) -> Result | None:
    """Train in ``nproc`` processes of this machine; torch starts them again when one is killed.

    Raises:
        PosError: the error of a process, or a TrainingError after too many restarts.
        Interrupted: at Ctrl-C, when all processes have ended and an epoch was kept.
    """
    folder = RunFolder(
        args.resume or run_dir or find_unused_path(config["dataset"], config["model"])
    )
    run_dir = None if args.resume else folder.path
    gpus = list_gpus(config, args.nproc)
    with tempfile.TemporaryDirectory() as work:
        error_file = Path(work, "error")
        job = args, config.plain, run_dir, gpus, pack(config["model"]), error_file
        failure = None
        try:
            results = _launch(args, work, *job)
        except KeyboardInterrupt:
            if folder.checkpoint.is_file():
                raise Interrupted(str(folder.path), config["plugins"]) from None
            raise  # there is nothing to continue
        except ChildFailedError as failed:
            _, failure = failed.get_first_failure()
        finally:
            gc.collect()  # torch's store; a process forked from this one would hang at its end
        if error_file.is_file():
            name, _, text = error_file.read_text("utf-8").partition(": ")
            raise _ERRORS[name](text) if name in _ERRORS else TrainingError(f"{name}: {text}")
    if failure is not None:
        reason = failure.message
        if failure.exitcode > 0:
            reason = (
                "it could not begin. In a script, what calls recbole_pos.run must stand under "
                '`if __name__ == "__main__":`'
            )
        raise TrainingError(
            f"a process of the run was lost after {args.max_restarts} restarts: {reason}"
        )
    return results[0]


def _launch(args: RunArguments, log_folder: str, *job: Any) -> dict[int, Result | None]:
    """Start the processes of this machine; return the result of each by its rank.

    Raises:
        ChildFailedError: if a process was lost too often, when the others have ended.
        KeyboardInterrupt: after a signal, when all processes have ended.
    """
    for module in ("elastic.multiprocessing.api", "elastic.agent.server.api"):
        # torch would write a table of the processes that fail or that it ends
        logging.getLogger(f"torch.distributed.{module}").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    config = LaunchConfig(  # as `torchrun --standalone`
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
    try:
        # torch replaces the handlers of these signals, and does not put them back
        with _safe_path(), handle_signals(signal.default_int_handler, *stops):
            return elastic_launch(config, _run_process)(*job)
    except SignalException as stop:
        signal.raise_signal(stop.sigval)
        raise KeyboardInterrupt from None  # this process ignores the signal


@contextmanager
def _safe_path() -> Iterator[None]:
    """Let Python processes that a ``with`` block starts not search the working directory first."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # of Python 3.11
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _run_process(
    args: RunArguments,
    plain: dict[str, Any],
    run_dir: str | Path | None,
    gpus: list[str],
    packed: bytes,
    error_file: Path,
) -> Result | None:
    """Train as a process that ``--nproc`` starts.

    Args:
        args, plain, run_dir, gpus: as of :func:`run_as_rank`.
        packed: classes to register.
        error_file: the first process with an error writes it there. torch starts all processes
            again, as after a kill, and they end at once: the error would only come again.
    """
    if error_file.is_file():
        return None

    def interrupt(*_: Any) -> None:
        """Interrupt once: a terminal sends Ctrl-C to this process and its parent, which ends it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    unpack(packed)
    try:
        return run_as_rank(args, plain, run_dir, gpus)
    except KeyboardInterrupt:
        signal.raise_signal(signal.SIGKILL)  # Python's own end takes a second
        raise
    except Exception as error:
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
    gpu = gpus[int(os.environ["LOCAL_RANK"])]
    if gpu:  # torch is to see no other GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    elif "OMP_NUM_THREADS" not in os.environ:  # the processes share the cores
        torch.set_num_threads(max(1, count_cores() // len(gpus)))
    folder = None if args.resume is None else RunFolder(args.resume)
    if folder is None and run_dir and _count_restarts():
        folder = RunFolder(run_dir) if RunFolder(run_dir).checkpoint.is_file() else None
    with _process_group("nccl" if gpu else "gloo") as rank:
        if rank == 0 and _count_restarts():
            logging.getLogger(__name__).warning(
                f"a process was lost; all resume from the last epoch (restart {_count_restarts()})"
            )
        config = PosConfig(config_dict={**plain, "gpu_id": gpu}, strict=False)
        config.plain["gpu_id"] = plain["gpu_id"]  # the folder keeps the option of the whole run
        reporter = Reporter(False)
        if rank == 0:
            reporter = Reporter(args.verbose, as_json=args.as_json)
        return train(config, folder, run_dir, reporter)


def _count_restarts() -> int:
    """Return how often torchrun has started the processes of this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextmanager
def _process_group(backend: str) -> Iterator[int]:
    """Join the group of all processes for a ``with`` block, which gets the rank of this one.

    Raises:
        TrainingError: if another process was lost and torch does not end this one.
    """
    rank = int(os.environ["RANK"])
    try:
        store, _, size = next(dist.rendezvous("env://"))
        # torchrun keeps the store, in which a later group would read the addresses of this one
        store = dist.PrefixStore(f"{_count_restarts()}/{next(_GROUP_NUMBERS)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        yield rank
    except Exception as error:
        if not (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
            raise
        time.sleep(_GRACE)  # torch ends this process, as it reports the one that failed first
        reason = str(error).splitlines()[0]
        raise TrainingError(f"process {rank} lost another process: {reason}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
