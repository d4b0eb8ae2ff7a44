"""Data-parallel training: several processes, each with a part of every batch, one model.

Each process has all the data and makes the same batches; of a batch it takes every n-th row, and
gradients are summed with each process's share as weight. So a step is the step that one process
would make, up to rounding and dropout. RecBole's DistributedSampler would instead repeat rows until
their number divides evenly, and train on those twice.

``torch.multiprocessing`` starts and watches the processes of a machine; when one is lost, those of
all machines are started again and resume from the last checkpoint. The first writes and prints.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException

from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.plugins import pack, unpack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import Interrupted, TrainingError, UsageError
from recbole_pos.experiment.device import ANY_GPU
from recbole_pos.experiment.environment import PORT, Rank, check_port
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.rendezvous import Rendezvous
from recbole_pos.experiment.result import Result, read_result
from recbole_pos.experiment.train import train
from recbole_pos.reporter import Reporter
from recbole_pos.values import is_whole

_ENDED = 3  # exit code of a process whose training did not finish
_GRACE = 30  # seconds that a process has to write its checkpoint when it is to end
_RENDEZVOUS: dict[tuple[str, int], Rendezvous] = {}  # kept to the end, as others may still read
_RUNS = itertools.count()  # numbers of runs: all processes run the same script and count alike


def check_processes(args: RunArguments) -> RunArguments:
    """Return the arguments of a run with ``world_size`` and ``port`` filled in."""
    nproc, offset = args.nproc, args.group_offset
    world_size = nproc if args.world_size in (-1, None) else args.world_size
    for name, value, minimum in (
        ("nproc", nproc, 1),
        ("world_size", world_size, nproc),
        ("max_restarts", args.max_restarts, 0),
    ):
        if not is_whole(value) or value < minimum:
            raise UsageError(
                f"--{name}: expected a whole number of at least {minimum}, found {value}"
            )
    if not 0 < args.join_timeout < math.inf:
        raise UsageError(f"--join_timeout: expected seconds above 0, found {args.join_timeout}")
    if not 0 <= offset <= world_size - nproc:
        raise UsageError(
            f"--group_offset: processes of this machine are {offset} to {offset + nproc - 1}, "
            f"but --world_size is {world_size}"
        )
    port = args.port
    if port is None:
        port = free_port() if world_size == nproc else PORT
    return replace(args, world_size=world_size, port=check_port(port, "--port"))


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def choose_gpu(config: PosConfig, rank: Rank) -> str:
    """Return the GPU of a process; empty where it is to use CPUs.

    The GPUs in ``gpu_id``, or by default those that a launcher leaves visible, are divided among
    the processes of a machine. A scheduler may show each process only its own.
    """
    gpu_id, visible = str(config.plain["gpu_id"]).strip(), rank.visible_gpus
    names = visible if gpu_id == ANY_GPU and visible is not None else gpu_id.split(",")
    gpus = [name.strip() for name in names if name.strip()]
    if not gpus or not config["use_gpu"] or not torch.cuda.is_available():
        return ""
    needed = 1 if visible and len(visible) == 1 else rank.local_size
    if len(gpus) < needed:
        raise UsageError(
            f"gpu_id: names {len(gpus)} GPUs for {needed} processes; for example "
            f"--gpu_id='{','.join(map(str, range(needed)))}', or --gpu_id= for CPUs"
        )
    return gpus[rank.local_rank % len(gpus)]


def run_in_parallel(
    args: RunArguments, config: PosConfig, run_dir: str | Path | None
) -> Result | None:
    """Start the processes of this machine, and start them again when one is lost.

    Returns:
        The result; None on a machine that does not run process 0.

    Raises:
        UsageError, TrainingError: the error of the first process to fail, or that processes were
            lost too often.
        KeyboardInterrupt: at Ctrl-C, when all processes have ended.
    """
    address = args.ip, int(args.port or PORT)
    ranks = [
        Rank(args.group_offset + i, args.world_size, i, args.nproc, *address, has_store=True)
        for i in range(args.nproc)
    ]
    ranks = [replace(rank, gpu=choose_gpu(config, rank)) for rank in ranks]
    job = args, config.plain, run_dir, pack(config["model"])
    runs_first = args.group_offset == 0  # process 0 is on this machine
    rendezvous = Rendezvous(*address, runs_first, args.join_timeout)
    try:
        for attempt in range(args.max_restarts + 1):
            lost = _run_processes([replace(rank, attempt=attempt) for rank in ranks], *job)
            if lost is None:
                break
            if error := rendezvous.read_error():
                raise error from None
            _require_restart(lost, attempt, args.max_restarts)
    except KeyboardInterrupt:
        path = (args.resume or rendezvous.folder) if runs_first else None
        if path and RunFolder(path).checkpoint.is_file():
            raise Interrupted(str(path)) from None
        raise  # nothing to continue, or not on this machine
    if not runs_first:  # the machine that keeps the store may have ended
        return None
    path = args.resume or rendezvous.folder
    return None if path is None else read_result(RunFolder(path))


def _require_restart(lost: ProcessExitedException, attempt: int, max_restarts: int) -> None:
    """Warn that all processes restart; a TrainingError where another attempt would not help."""
    if lost.exit_code == 1:  # Python's, where a process cannot import the script
        raise TrainingError(
            "a process of the run could not begin. In a script, what calls recbole_pos.run must "
            'stand under `if __name__ == "__main__":`'
        )
    if attempt == max_restarts:
        raise TrainingError(
            f"a process of the run was lost after {attempt} restarts ({lost}); memory may have run "
            "out"
        )
    logging.getLogger(__name__).warning(
        "a process was lost; all resume from the last checkpoint "
        f"(restart {attempt + 1} of {max_restarts})"
    )


def _run_processes(ranks: list[Rank], *job: Any) -> ProcessExitedException | None:
    """Run the processes of this machine to their end; return how the first of them failed."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it says what it ends
    context = torch.multiprocessing.start_processes(
        _run_process, (ranks, *job), len(ranks), join=False
    )
    try:
        while not context.join():
            pass
    except ProcessExitedException as error:
        return error
    finally:  # at Ctrl-C
        for process in context.processes:
            process.terminate()
        for process in context.processes:
            process.join(_GRACE)
            process.kill()
    return None


def _run_process(local_rank: int, ranks: list[Rank], *job: Any) -> None:
    """Be a process of this machine to its end; ``job`` is the rest of `run_as_rank`'s arguments."""

    def interrupt(*_: Any) -> None:
        """End the training, once: a terminal sends Ctrl-C here and to the parent, which ends us."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        run_as_rank(ranks[local_rank], *job)
    except BaseException:
        os._exit(_ENDED)  # at once, as leaving the group could block; the error was reported


def run_as_rank(
    rank: Rank,
    args: RunArguments,
    plain: dict[str, Any],
    run_dir: str | Path | None,
    packed: bytes = b"",
) -> Result | None:
    """Train as one process of several; after a restart, from the last checkpoint.

    Args:
        rank: this process, with its GPU.
        args: arguments of the run.
        plain: options of the whole run.
        run_dir: folder of a new run.
        packed: custom classes that are not known here yet.

    Returns:
        The result in process 0; None in the others.
    """
    if rank.gpu:  # torch is to see no other
        os.environ["CUDA_VISIBLE_DEVICES"] = rank.gpu
    elif "OMP_NUM_THREADS" not in os.environ:  # a share of the cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank.local_size))
    rendezvous = _find_rendezvous(rank, args.join_timeout)
    with rendezvous.joined(rank, on_gpu=bool(rank.gpu)):
        if packed:
            unpack(packed)
        config = PosConfig(None, None, None, {**plain, "gpu_id": rank.gpu}, strict=False)
        config.plain["gpu_id"] = plain["gpu_id"]  # the folder keeps the option of the whole run
        resumed = [None if args.resume is None else str(args.resume)]  # torch sends lists
        if args.resume is None:
            if rank.rank == 0:
                chosen = rendezvous.folder
                if chosen is None:
                    created = RunFolder.create(run_dir, config["dataset"], config["model"])
                    chosen = rendezvous.folder = str(created.path)
                resumed = [chosen if RunFolder(chosen).checkpoint.is_file() else None]
                run_dir = chosen
            torch.distributed.broadcast_object_list(resumed)
        folder = None if resumed[0] is None else RunFolder(resumed[0])
        reporter = Reporter(False)
        if rank.rank == 0:
            reporter = Reporter(args.verbose, as_json=args.as_json, log=args.log)
        try:
            return train(config, folder, run_dir, reporter)
        except UsageError:
            if rank.rank == 0 and folder is None and run_dir is not None:
                with suppress(OSError):  # it holds files
                    Path(run_dir).rmdir()
            raise


def _find_rendezvous(rank: Rank, timeout: float) -> Rendezvous:
    """Return the rendezvous at the address of a process, for the next run of this script."""
    address = rank.ip, rank.port
    if address not in _RENDEZVOUS:
        keeps_store = rank.rank == 0 and not rank.has_store
        _RENDEZVOUS[address] = Rendezvous(*address, keeps_store, timeout)
    rendezvous = _RENDEZVOUS[address]
    rendezvous.timeout = timeout
    rendezvous.begin(next(_RUNS))
    return rendezvous
