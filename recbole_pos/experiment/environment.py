"""Which process of a run this one is, where torchrun, mpirun or srun have started several.

Such processes are one run: each has its rank from the environment, and none starts others. Nothing
heavy is imported here, as the command line asks before it imports torch. Also, signals.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from recbole_pos.config.arguments import RunArguments
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

PORT = 5678  # at which several machines meet by default, as in RecBole


@dataclass(frozen=True)
class Rank:
    """One of the processes of a run.

    Attributes:
        rank, size: number of the process, from 0, and number of processes.
        local_rank, local_size: the same among the processes of this machine.
        ip, port: address where the processes meet, which :func:`find_launcher` leaves out.
        attempt: number of times that all processes were restarted.
        has_store: whether a launcher, rather than process 0, keeps the store at the address.
        visible_gpus: GPUs that the launcher has left visible; None if this package started it.
        gpu: the GPU it trains on; empty for CPUs.
        launcher: the program that started it; empty if this package did.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    ip: str = ""
    port: int = 0
    attempt: int = 0
    has_store: bool = False
    visible_gpus: tuple[str, ...] | None = None
    gpu: str = ""
    launcher: str = ""


# By launcher, the variables that have rank, size, local rank and local size. The first with more
# than one process counts: mpirun stands before srun, by which it may start its helpers. A batch
# script of SLURM has SLURM_NTASKS too and is one process, so the size is that of a step.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def find_launcher(environ: Mapping[str, str]) -> Rank | None:
    """Return what a launcher has set for this process; None if it is not one of several."""
    for launcher, (rank_key, size_key, local_rank_key, local_size_key) in _LAUNCHERS.items():
        if rank_key not in environ or size_key not in environ:
            continue
        rank = _read_number(environ, rank_key)
        size = _read_number(environ, size_key)
        if rank >= size:
            raise UsageError(
                f"{rank_key}={rank} and {size_key}={size} in the environment: expected a process "
                f"from 0 to {size - 1}"
            )
        if size > 1:
            local_rank = _read_number(environ, local_rank_key, 0)
            local_size = _read_number(environ, local_size_key, 1)
            return Rank(rank, size, local_rank, local_size, launcher=launcher)
    return None


def find_rank(environ: Mapping[str, str], args: RunArguments) -> Rank | None:
    """Return which process of a run this one is; None unless a launcher started several.

    ``ip`` and ``port`` of the arguments win over the environment. A UsageError says what the
    arguments contradict, or what is missing.
    """
    launched = find_launcher(environ)
    if launched is None:
        return None
    if args.nproc != 1 or args.world_size not in (-1, None):
        raise UsageError(
            f"--nproc, --world_size: {launched.launcher} has started {launched.size} processes; "
            "leave them out"
        )
    job = environ.get("SLURM_JOB_ID", "")
    # the port depends on the job, so that two jobs on one machine do not meet
    default_port = 10_000 + int(job) % 20_000 if job.isdecimal() else PORT
    port = args.port or environ.get("MASTER_PORT") or default_port
    return replace(
        launched,
        ip=_find_ip(environ, args, launched),
        port=check_port(port, "--port, MASTER_PORT"),
        attempt=_read_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        visible_gpus=_list_visible_gpus(environ),
    )


def _find_ip(environ: Mapping[str, str], args: RunArguments, launched: Rank) -> str:
    """Return the address of process 0; a UsageError if nothing gives it."""
    ip = args.ip if args.ip != RunArguments.ip else environ.get("MASTER_ADDR", "")
    ip = ip or _read_first_host(environ)
    if not ip and launched.local_size == launched.size:
        ip = "localhost"
    if not ip:
        raise UsageError(
            f"{launched.launcher} has started {launched.size} processes on several machines, and "
            "nothing says where process 0 is: give --ip, or set MASTER_ADDR"
        )
    return ip


def check_port(port: object, name: str) -> int:
    """Return a port as a number; a UsageError about ``name`` if it is not a port."""
    if not (str(port).isdecimal() and 1 <= int(str(port)) <= 65535):
        raise UsageError(f"{name}: expected a number from 1 to 65535, found {shown(port)}")
    return int(str(port))


def _list_visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a scheduler has left visible; counting them does not initialise CUDA."""
    import torch

    all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
    names = environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
    return tuple(name.strip() for name in names if name.strip())


def _read_first_host(environ: Mapping[str, str]) -> str:
    """Return the first host of SLURM's list, ``node03`` of ``node[03-07,11],other``; "" if none."""
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else ""


def _read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the number that a variable begins with: srun writes ``2(x3),1``, tasks by machine."""
    if default is not None and name not in environ:
        return default
    digits = re.match(r"\d+", environ[name])
    if not digits:
        raise UsageError(
            f"{name} in the environment: expected a number, found {shown(environ[name])}"
        )
    return int(digits.group())


@contextmanager
def handle_signals(handler: Callable[[int, Any], object], *numbers: int) -> Iterator[None]:
    """Let ``handler`` handle signals in a ``with`` block; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_handlers = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, former_handler in zip(numbers, former_handlers, strict=True):
            signal.signal(number, former_handler)
