"""Data-parallel training: several processes train one model, each with a part of every batch.

Each process has all the data and makes the same batches. Each of n processes takes every n-th row
of a batch, and gradients are summed, weighted by the share of its targets. So a step is the step
that one process would make, up to rounding and dropout. RecBole's DistributedSampler would instead
repeat rows until their number divides evenly, and train on those twice.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException

from recbole_pos.config.arguments import RunArguments
from recbole_pos.config.options import count_cores
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
# By address, to the end of this process: other processes may still read the store.
_RENDEZVOUS: dict[tuple[str, int], Rendezvous] = {}
_RUN_NUMBERS = itertools.count()  # equal in all processes, which run the same script


def check_processes(args: RunArguments) -> RunArguments:
    """Check the arguments about processes; return them with ``world_size`` and ``port`` set."""
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
        port = find_free_port() if world_size == nproc else PORT
    return replace(args, world_size=world_size, port=check_port(port, "--port"))


def find_free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def choose_gpu(config: PosConfig, rank: Rank) -> str:
    """Return the number of the GPU of a process; "" if it is to use CPUs.

    The GPUs in ``gpu_id``, or by default those that a launcher leaves visible, are divided among
    the processes of a machine. A scheduler may show each process only one GPU.
    """
    gpu_id = str(config.plain["gpu_id"]).strip()
    visible = rank.visible_gpus
    names = visible if gpu_id == ANY_GPU and visible is not None else gpu_id.split(",")
    gpus = [name.strip() for name in names if name.strip()]
    if not gpus or not config["use_gpu"] or not torch.cuda.is_available():
        return ""
    num_needed = 1 if visible and len(visible) == 1 else rank.local_size
    if len(gpus) < num_needed:
        raise UsageError(
            f"gpu_id: names {len(gpus)} GPUs for {num_needed} processes; for example "
            f"--gpu_id='{','.join(map(str, range(num_needed)))}', or --gpu_id= for CPUs"
        )
    return gpus[rank.local_rank % len(gpus)]


def run_in_parallel(
    args: RunArguments, config: PosConfig, run_dir: str | Path | None
) -> Result | None:
    """Start the processes of this machine, and start them again when one is lost.

    The result is None on a machine that does not run process 0. The error of the first process to
    fail is raised, and at Ctrl-C a KeyboardInterrupt when all processes have ended.
    """
    address = (args.ip, int(args.port or PORT))
    ranks = [
        Rank(args.group_offset + i, args.world_size, i, args.nproc, *address, has_store=True)
        for i in range(args.nproc)
    ]
    ranks = [replace(rank, gpu=choose_gpu(config, rank)) for rank in ranks]
    job = (args, config.plain, run_dir, pack(config["model"]))
    has_process_0 = args.group_offset == 0
    rendezvous = Rendezvous(*address, has_process_0, args.join_timeout)
    try:
        for attempt in range(args.max_restarts + 1):
            lost = _run_processes([replace(rank, attempt=attempt) for rank in ranks], *job)
            if lost is None:
                break
            if error := rendezvous.read_error():
                raise error from None
            _announce_restart(lost, attempt, args.max_restarts)
    except KeyboardInterrupt:
        path = (args.resume or rendezvous.folder) if has_process_0 else None
        if path and RunFolder(path).checkpoint.is_file():
            raise Interrupted(str(path), config["plugins"]) from None
        raise  # there is nothing to continue, or it is on another machine
    if not has_process_0:  # the store may be gone with its machine
        return None
    path = args.resume or rendezvous.folder
    return None if path is None else read_result(RunFolder(path))


def _announce_restart(lost: ProcessExitedException, attempt: int, max_restarts: int) -> None:
    """Warn that all processes restart, or raise a TrainingError if that would not help."""
    if lost.exit_code == 1:  # of Python, if a process cannot import the script
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
    """Run the processes of this machine; return how the first one failed, None if none did."""
    # torch would warn of every process that it ends
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with _safe_path():
        context = torch.multiprocessing.start_processes(
            _run_process, (ranks, *job), len(ranks), join=False
        )
    try:
        while not context.join():
            pass
    except ProcessExitedException as error:
        return error
    finally:  # at Ctrl-C, processes are still running
        for process in context.processes:
            process.terminate()
        for process in context.processes:
            process.join(_GRACE)
            process.kill()
    return None


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


def _run_process(local_rank: int, ranks: list[Rank], *job: Any) -> None:
    """Run one process of this machine; ``job`` has the other arguments of :func:`run_as_rank`."""

    def interrupt(*_: Any) -> None:
        """Interrupt once: a terminal sends Ctrl-C to this process and its parent, which ends it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        run_as_rank(ranks[local_rank], *job)
    except BaseException:
        os._exit(_ENDED)  # at once, as leaving the group may block; the error is reported already


def run_as_rank(
    rank: Rank,
    args: RunArguments,
    plain: dict[str, Any],
    run_dir: str | Path | None,
    packed: bytes = b"",
) -> Result | None:
    """Train as one process of several; after a restart, from the last checkpoint.

    ``plain`` are the options of the whole run, and ``packed`` the classes to register, see
    :func:`pack`. The result is None in all processes but process 0.
    """
    if rank.gpu:  # torch is to see no other GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = rank.gpu
    elif "OMP_NUM_THREADS" not in os.environ:  # the processes share the cores
        torch.set_num_threads(max(1, count_cores() // rank.local_size))
    rendezvous = _find_rendezvous(rank, args.join_timeout)
    with rendezvous.joined(rank):
        unpack(packed)
        config = PosConfig(config_dict={**plain, "gpu_id": rank.gpu}, strict=False)
        config.plain["gpu_id"] = plain["gpu_id"]  # the folder keeps the option of the whole run
        resumed = args.resume
        if resumed is None:
            if rank.rank == 0:
                if (chosen := rendezvous.folder) is None:  # this is the first attempt
                    created = RunFolder.create(run_dir, config["dataset"], config["model"])
                    chosen = rendezvous.folder = str(created.path)
                run_dir = chosen
                resumed = run_dir if RunFolder(run_dir).checkpoint.is_file() else None
            received = [resumed]  # torch sends lists
            torch.distributed.broadcast_object_list(received)
            resumed = received[0]
        folder = None if resumed is None else RunFolder(resumed)
        reporter = Reporter(False)
        if rank.rank == 0:
            reporter = Reporter(args.verbose, as_json=args.as_json, log=args.log)
        try:
            return train(config, folder, run_dir, reporter)
        except UsageError:
            if rank.rank == 0 and folder is None and run_dir is not None:
                with suppress(OSError):  # raised if the folder is not empty
                    Path(run_dir).rmdir()
            raise


def _find_rendezvous(rank: Rank, timeout: float) -> Rendezvous:
    """Return the rendezvous at the address of a process, begun for the next run of this script."""
    address = (rank.ip, rank.port)
    if address not in _RENDEZVOUS:
        keeps_store = rank.rank == 0 and not rank.has_store
        _RENDEZVOUS[address] = Rendezvous(*address, keeps_store, timeout)
    rendezvous = _RENDEZVOUS[address]
    rendezvous.timeout = timeout
    rendezvous.begin(next(_RUN_NUMBERS))
    return rendezvous
