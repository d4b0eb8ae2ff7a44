"""Data-parallel training: several processes, each with a part of every batch, one model.

RecBole's ``--nproc`` and ``--world_size``, on CPUs (gloo) as well as on GPUs (NCCL). Each process
has all the data and makes the same batches; of a batch it takes every n-th row, and gradients are
summed with each process's share as weight. So a step is the step that one process would make, up to
rounding and dropout. RecBole's DistributedSampler would instead repeat rows until their number
divides evenly, and train on those twice.

The processes of a machine are started and watched here; when one is lost, all of all machines are
started again and resume from the last checkpoint. The first of all writes and prints.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.options import cores
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import Interrupted, TrainingError, UsageError
from recbole_pos.experiment.device import ANY_GPU
from recbole_pos.experiment.environment import PORT, Rank, check_port
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.rendezvous import Rendezvous, from_first
from recbole_pos.experiment.result import Result, read_result
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter

MOST = 8  # processes of one run that a machine with few cores may have
_GRACE = 30  # seconds that a process has to write its checkpoint when it is to end
_RENDEZVOUS: dict[tuple[str, int], Rendezvous] = {}  # kept to the end, as others may still read
_RUNS = itertools.count()  # numbers of runs: all processes run the same script and count alike


@dataclass(frozen=True)
class Plan:
    """Which processes train: ``nproc`` on this machine, of ``world_size``, from ``offset`` on."""

    nproc: int
    world_size: int
    ip: str
    port: int
    offset: int

    @classmethod
    def from_arguments(cls, args: RunArguments) -> Plan:
        """Make the plan of a run's arguments, which are RecBole's.

        Raises:
            UsageError: if the arguments contradict each other.
        """
        nproc, offset, port = args.nproc, args.group_offset, args.port
        world_size = nproc if args.world_size in (-1, None) else args.world_size
        for name, value, low in (("nproc", nproc, 1), ("world_size", world_size, nproc)):
            if not isinstance(value, int) or value < low:
                raise UsageError(
                    f"--{name}: expected a whole number of at least {low}, found {value}"
                )
        most = max(MOST, 2 * cores())
        if nproc > most:
            raise UsageError(
                f"--nproc: {nproc:,} processes on {cores()} cores, each with all the data; at most "
                f"{most}"
            )
        if not 0 <= offset <= world_size - nproc:
            raise UsageError(
                f"--group_offset: processes of this machine are {offset} to {offset + nproc - 1}, "
                f"but --world_size is {world_size}"
            )
        if port is None:
            port = free_port() if world_size == nproc else PORT
        return cls(nproc, world_size, args.ip, check_port(port, "--port"), offset)


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def gpus_for(gpu_id: Any, nproc: int) -> list[str]:
    """Return a GPU for every process of this machine; empty where they are to use CPUs.

    Raises:
        UsageError: if ``gpu_id`` names fewer GPUs than processes.
    """
    ids = [part.strip() for part in str(gpu_id).split(",") if part.strip()]
    if not ids or not torch.cuda.is_available():
        return []
    if len(ids) < nproc:
        raise UsageError(
            f"gpu_id: names {len(ids)} GPUs for {nproc} processes; for example "
            f"--gpu_id='{','.join(map(str, range(nproc)))}', or --gpu_id= for CPUs"
        )
    return ids[:nproc]


def gpu_here(gpu_id: Any, rank: Rank) -> str:
    """Return the GPU of a process that another program has started; empty for none.

    The GPUs in ``gpu_id``, by default all visible ones, are divided among the processes. A
    scheduler may show each process only its own.
    """
    ids = str(gpu_id).strip() if str(gpu_id).strip() != ANY_GPU else ",".join(rank.gpus)
    gpus = gpus_for(ids, 1 if len(rank.gpus) == 1 else rank.local_size)
    return gpus[rank.local_rank % len(gpus)] if gpus else ""


def _use_device(gpu: str, nproc: int) -> None:
    """Let this process see only its GPU or, without one, compute with its share of the cores."""
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // nproc))


def run_in_parallel(
    args: RunArguments, plan: Plan, config: PosConfig, run_dir: str | Path | None
) -> Result | None:
    """Start the processes of this machine, and start them again when one is lost.

    Args:
        args: arguments of the run.
        plan: plan made of the arguments.
        config: configuration of the run.
        run_dir: folder of a new run.

    Returns:
        The result; None on a machine that does not run process 0.

    Raises:
        UsageError, TrainingError: the error of the first process to fail, or that processes were
            lost too often.
        KeyboardInterrupt: at Ctrl-C, when all processes have ended.
    """
    gpus = gpus_for(config.plain["gpu_id"], plan.nproc) if config["use_gpu"] else []
    if args.resume is None and plan.offset == 0:
        run_dir = RunFolder.create(run_dir, config["dataset"], config["model"]).path
    folder = run_dir if args.resume is None else args.resume
    path = Path(folder) if folder is not None and (plan.offset == 0 or args.resume) else None
    reporter = {"enabled": args.verbose, "as_json": args.as_json, "log": args.log}
    arguments = config.plain, path, args.resume is not None, reporter
    try:
        rendezvous = Rendezvous(plan.ip, plan.port, plan.offset == 0, args.join_timeout)
        own = range(plan.offset, plan.offset + plan.nproc)
        rendezvous.meet("launchers", own, plan.world_size)
        for attempt in range(args.max_restarts + 1):
            codes = _run_processes(
                plan, pack(config["model"]), attempt, gpus, args.join_timeout, arguments
            )
            if error := rendezvous.error():
                raise error
            if not codes:
                break
            if not rendezvous.has_met(attempt):
                raise TrainingError(
                    "a process of the group ended before all had met. In a script, what calls "
                    'recbole_pos.run must stand under `if __name__ == "__main__":`; else memory '
                    "may have run out"
                )
            if attempt == args.max_restarts:
                lost = ", ".join(f"{rank} with code {code}" for rank, code in codes.items())
                raise TrainingError(
                    f"a process of the group ended after {attempt} restarts: {lost}; memory may "
                    "have run out"
                )
            logging.getLogger(__name__).warning(
                "a process was lost; all resume from the last checkpoint (restart %d of %d)",
                attempt + 1,
                args.max_restarts,
            )
    except KeyboardInterrupt:
        if path and RunFolder(path).checkpoint.is_file():
            raise Interrupted(str(path)) from None
        raise  # nothing to continue, or not on this machine
    except UsageError:
        if args.resume is None:
            _remove_if_empty(path)
        raise
    return None if plan.offset or path is None else read_result(RunFolder(path))


def _run_processes(plan: Plan, *args: Any) -> dict[int, int]:
    """Run all processes of this machine to their end; when one fails, end the others.

    Args:
        plan: plan of the run.
        args: further arguments of :func:`_run_rank`.

    Returns:
        The exit codes of the processes that failed, by rank.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_run_rank, args=(i, plan, *args)) for i in range(plan.nproc)]
    codes: dict[int, int] = {}
    try:
        for process in processes:
            process.start()
        while not codes and (alive := [p for p in processes if p.is_alive()]):
            multiprocessing.connection.wait([process.sentinel for process in alive])
            codes = {plan.offset + i: p.exitcode for i, p in enumerate(processes) if p.exitcode}
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in started:
            process.join(max(deadline - time.monotonic(), 0.1))
            process.kill()
            process.join()
    return codes


def _follow_parent() -> None:
    """Wait in a thread for the end of the parent process, and end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a process of a group
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _run_rank(
    local_rank: int,
    plan: Plan,
    packed: bytes,
    attempt: int,
    gpus: list[str],
    timeout: float,
    arguments: Sequence[Any],
) -> None:
    """Be process ``local_rank`` of this machine, from its start to its end.

    Ctrl-C goes to the parent, which sends SIGTERM; the process also ends with its parent.

    Args:
        local_rank: number of the process on this machine.
        plan: plan of the run.
        packed: custom models and schemes, see ``plugins.pack``.
        attempt: how often the processes were started before.
        gpus: GPUs by ``local_rank``; empty for CPUs.
        timeout: seconds to wait for missing processes.
        arguments: further arguments of :func:`_train_in_group`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_follow_parent, daemon=True).start()
    number = plan.offset + local_rank
    rank = Rank(number, plan.world_size, local_rank, plan.nproc, plan.ip, plan.port, attempt)
    gpu = gpus[local_rank] if gpus else ""
    _use_device(gpu, plan.nproc)
    try:
        rendezvous = Rendezvous(plan.ip, plan.port, False, timeout)
        with rendezvous.joined(rank, bool(gpus)):
            unpack(packed)
            _train_in_group(rendezvous, rank, gpu, *arguments)
    except BaseException:
        os._exit(1)  # at once, as leaving the group could block; the error was reported


def run_as_rank(
    rank: Rank, args: RunArguments, config: PosConfig, run_dir: str | Path | None
) -> Result | None:
    """Train as one of the processes that another program has started.

    Args:
        rank: this process.
        args: arguments of the run.
        config: configuration of the run.
        run_dir: folder of a new run.

    Returns:
        The result in process 0; None in the others.
    """
    gpu = gpu_here(config.plain["gpu_id"], rank) if config["use_gpu"] else ""
    _use_device(gpu, rank.local_size)
    folder = run_dir if args.resume is None else args.resume
    path = None if folder is None else Path(folder)
    address = rank.ip, rank.port
    if address not in _RENDEZVOUS:
        keeps_store = rank.rank == 0 and not rank.has_store
        _RENDEZVOUS[address] = Rendezvous(*address, keeps_store, args.join_timeout)
    rendezvous = _RENDEZVOUS[address]
    rendezvous.timeout = args.join_timeout
    rendezvous.begin(f"run{next(_RUNS)}")
    reporter = {"enabled": args.verbose, "as_json": args.as_json, "log": args.log}
    with rendezvous.joined(rank, bool(gpu)):
        resumed = args.resume is not None
        return _train_in_group(rendezvous, rank, gpu, config.plain, path, resumed, reporter)


def _train_in_group(
    rendezvous: Rendezvous,
    rank: Rank,
    gpu: str,
    plain: dict[str, Any],
    path: Path | None,
    resumed: bool,
    reporter: dict[str, Any],
) -> Result | None:
    """Train as one process of a joined group; after a restart, from the last checkpoint.

    Args:
        rendezvous: where the processes meet.
        rank: this process.
        gpu: its GPU; empty for CPUs.
        plain: configuration of the run.
        path: folder of the run; None for a new one with the default name.
        resumed: whether the user resumes the run.
        reporter: arguments of the reporter in process 0.
    """
    config = PosConfig(None, None, None, {**plain, "gpu_id": gpu}, strict=False)
    config.plain["gpu_id"] = plain["gpu_id"]  # the folder keeps the option of the whole run

    def choose_folder() -> tuple[Path, bool]:
        """Return the folder, new in the first attempt, and whether it has a checkpoint."""
        folder = rendezvous.folder
        if folder is None:
            folder = str(RunFolder.create(path, config["dataset"], config["model"]).path)
            rendezvous.folder = folder
        return Path(folder), RunFolder(folder).checkpoint.is_file()

    if not resumed:
        path, resumed = from_first(rank, choose_folder)
    folder = RunFolder(path) if resumed and path else None
    try:
        return train(
            config, folder, path, Reporter(**reporter) if rank.rank == 0 else Reporter(False)
        )
    except UsageError:
        if rank.rank == 0 and not resumed:
            _remove_if_empty(path)
        raise


def _remove_if_empty(path: Path | None) -> None:
    """Remove the folder of a run that was refused, unless it holds files."""
    with suppress(OSError):  # not empty
        if path:
            path.rmdir()
