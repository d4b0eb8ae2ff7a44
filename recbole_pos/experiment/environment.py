"""Whether this process is one of several that torchrun, mpirun or srun have started.

Then they are one run: each has its number from the environment, and nobody starts more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

import torch
import torch.distributed as dist

from recbole_pos.config.arguments import RunArguments
from recbole_pos.errors import UsageError
from recbole_pos.experiment.meeting import Meeting, Member, open_store
from recbole_pos.experiment.starters import STARTERS, Starter, number_in, started_by
from recbole_pos.values import shown

PORT = 5678  # where several machines meet, as in RecBole
_STORES: dict[str, dist.Store] = {}  # kept until the process ends: others may still read
_RUNS = itertools.count()  # all processes run the same script, so they count alike


def member_here(environ: Mapping[str, str], told: RunArguments) -> Member | None:
    """Which process of a run this one is; None if nobody but us has started any.

    Args:
        environ: ``os.environ``.
        told: arguments of the run: ``ip`` and ``port`` win over the environment. ``world_size``
            with an mpirun or srun that starts a launcher on each machine wins over their processes.

    Raises:
        UsageError: if the environment makes no sense, or ``nproc`` asks for still more processes.
    """
    for starter, rank, size in started_by(environ):
        if not 0 <= rank < size:
            raise UsageError(
                f"{starter.rank}={rank} and {starter.size}={size} in the environment: expected "
                f"a process from 0 to {size - 1}"
            )
        if told.world_size not in (-1, None) and starter is not STARTERS[0]:
            return None
        if told.nproc != 1 or told.world_size not in (-1, None):
            raise UsageError(
                f"--nproc, --world_size: {starter.name} has started {size} processes already "
                f"({starter.size}={size}); leave them out. To let it start a launcher on each "
                "machine, which mpirun and srun can, give --world_size and --group_offset too"
            )
        return _member(environ, told, starter, rank, size)
    return None


def _member(
    environ: Mapping[str, str], told: RunArguments, starter: Starter, rank: int, size: int
) -> Member:
    local_rank = number_in(environ, starter.local_rank, 0)
    local_size = number_in(environ, starter.local_size, 1)
    ip = told.ip if told.ip != RunArguments.ip else environ.get("MASTER_ADDR", "")
    ip = ip or _first_host(environ) or ("localhost" if local_size == size else "")
    if not ip:
        raise UsageError(
            f"{starter.name} has started {size} processes on several machines, and nothing says "
            "where process 0 is: give --ip, or set MASTER_ADDR"
        )
    job = environ.get("SLURM_JOB_ID", "")
    # two jobs on one machine should not meet each other
    usual = 10_000 + int(job) % 20_000 if job.isdigit() else PORT
    port = str(told.port or environ.get("MASTER_PORT") or usual)
    if not (port.isdigit() and 1 <= int(port) <= 65535):
        raise UsageError(
            f"--port, MASTER_PORT: expected a number from 1 to 65535, found {shown(port)}"
        )
    return Member(
        rank,
        size,
        local_rank,
        local_size,
        ip,
        int(port),
        attempt=number_in(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        kept=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        gpus=_gpus(environ),
    )


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What a scheduler has left visible; counted without beginning to use any."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    return tuple(map(str, range(torch.cuda.device_count())))


def meeting_here(member: Member, timeout: float) -> Meeting:
    """Where the processes of this environment meet, once a run: a script may have several.

    Raises:
        UsageError: if nobody answers there, or the port cannot be had.
    """
    address = f"{member.ip}:{member.port}"
    if address not in _STORES:
        keep = member.rank == 0 and not member.kept
        _STORES[address] = open_store(member.ip, member.port, keep, timeout)
    return Meeting(_STORES[address], address, timeout, f"run{next(_RUNS)}")


def _first_host(environ: Mapping[str, str]) -> str:
    """Of ``node[03-07,11],other``: node03, which has process 0; nothing without SLURM."""
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", hosts)
    return "".join(part or "" for part in found.groups()) if found else ""
