"""Which process of a run this one is, where torchrun, mpirun or srun have started several.

Such processes are one run: each has its rank from the environment, and none starts others. Nothing
heavy is imported here, as the command line asks before it imports torch. Also, how a process that
serves ends.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from recbole_pos.config.arguments import RunArguments
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

PORT = 5678  # where several machines meet, as in RecBole


@dataclass(frozen=True)
class Rank:
    """One of the processes of a run.

    Attributes:
        rank, size: number of the process, of how many.
        local_rank, local_size: the same among the processes of this machine.
        ip, port: address where the processes meet.
        attempt: how often all processes were started before.
        has_store: whether a launcher, rather than process 0, keeps the store at the address.
        gpus: GPUs that processes of this machine may use.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    ip: str
    port: int
    attempt: int = 0
    has_store: bool = False
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Starter:
    """A program that starts processes, and the environment variables that have their ranks."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The first with more than one process counts. mpirun stands before srun, by which it may start its
# helpers on a SLURM cluster.
_OMPI = "OMPI_COMM_WORLD_"
STARTERS = (
    Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Starter("mpirun", *(f"{_OMPI}{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # not SLURM_NTASKS: a batch script has it too, and is one process
    Starter(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
)


def find_launchers(environ: Mapping[str, str]) -> Iterator[tuple[Starter, int, int]]:
    """Find the launchers that have started several processes.

    Args:
        environ: ``os.environ``.

    Yields:
        The launcher, the rank of this process, and the number of processes.

    Raises:
        UsageError: if a launcher's variable is not a number.
    """
    for starter in STARTERS:
        if starter.rank in environ and starter.size in environ:
            rank, size = (_number(environ, name) for name in (starter.rank, starter.size))
            if size > 1:
                yield starter, rank, size


def rank_here(environ: Mapping[str, str], args: RunArguments) -> Rank | None:
    """Return which process of a run this one is; None unless another program started several.

    Args:
        environ: ``os.environ``.
        args: arguments of the run: ``ip`` and ``port`` win over the environment. ``world_size``
            says that mpirun or srun has started only a launcher on each machine (None).

    Raises:
        UsageError: if the environment contradicts itself, or ``nproc`` asks for more processes.
    """
    for starter, rank, size in find_launchers(environ):
        if not 0 <= rank < size:
            raise UsageError(
                f"{starter.rank}={rank} and {starter.size}={size} in the environment: expected "
                f"a process from 0 to {size - 1}"
            )
        if args.world_size not in (-1, None) and starter is not STARTERS[0]:
            return None
        if args.nproc != 1 or args.world_size not in (-1, None):
            raise UsageError(
                f"--nproc, --world_size: {starter.name} has started {size} processes already "
                f"({starter.size}={size}); leave them out. To let it start a launcher on each "
                "machine, which mpirun and srun can, give --world_size and --group_offset too"
            )
        local_size = _number(environ, starter.local_size, 1)
        ip = args.ip if args.ip != RunArguments.ip else environ.get("MASTER_ADDR", "")
        ip = ip or _first_host(environ) or ("localhost" if local_size == size else "")
        if not ip:
            raise UsageError(
                f"{starter.name} has started {size} processes on several machines, and nothing "
                "says where process 0 is: give --ip, or set MASTER_ADDR"
            )
        job = environ.get("SLURM_JOB_ID", "")
        # two jobs on one machine should not meet each other
        usual = 10_000 + int(job) % 20_000 if job.isdigit() else PORT
        port = args.port or environ.get("MASTER_PORT") or usual
        return Rank(
            rank,
            size,
            _number(environ, starter.local_rank, 0),
            local_size,
            ip,
            check_port(port, "--port, MASTER_PORT"),
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            gpus=_gpus(environ),
        )
    return None


def check_port(port: object, name: str) -> int:
    """Return a port as a number.

    Raises:
        UsageError: if it is not one.
    """
    if not (str(port).isdigit() and 1 <= int(str(port)) <= 65535):
        raise UsageError(f"{name}: expected a number from 1 to 65535, found {shown(port)}")
    return int(str(port))


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a scheduler has left visible; counting them does not initialise CUDA."""
    import torch

    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    return tuple(map(str, range(torch.cuda.device_count())))


def _first_host(environ: Mapping[str, str]) -> str:
    """Return the first host of SLURM's list, which has process 0; empty without SLURM.

    Of ``node[03-07,11],other`` it is node03.
    """
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else ""


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the number that a variable begins with: srun writes ``2(x3),1``, tasks by machine.

    Raises:
        UsageError: if it begins with no number.
    """
    if default is not None and name not in environ:
        return default
    digits = re.match(r"\d+", environ[name])
    if digits is None:
        raise UsageError(
            f"{name} in the environment: expected a number, found {shown(environ[name])}"
        )
    return int(digits.group())


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once, with exit code 0, in a ``with`` block.

    While requests are answered, uvicorn has its own handlers, and raises the signal again when it
    is done. An exception instead could come in the middle of an import, which may swallow it.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows no other
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
