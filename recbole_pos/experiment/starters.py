"""Programs that start the processes of one run, and how they tell each of them who it is.

One row for each; the first that says more than one process holds. Nothing heavy is imported here:
the command line asks before torch is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recbole_pos.errors import UsageError
from recbole_pos.values import shown


@dataclass(frozen=True)
class Starter:
    """A program that starts processes, and the variables by which it tells them who they are."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# mpirun on a SLURM cluster may start its helpers by srun: what it says itself stands before.
STARTERS = (
    Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Starter(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # not SLURM_NTASKS: a batch script has it too, and is one process
    Starter(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
)


def started_by(environ: Mapping[str, str]) -> Iterator[tuple[Starter, int, int]]:
    """The programs that say they have started several processes: rank of this one, and how many.

    Args:
        environ: ``os.environ``.

    Raises:
        UsageError: if one of them says something that is no number.
    """
    for starter in STARTERS:
        if starter.rank in environ and starter.size in environ:
            rank, size = (number_in(environ, name) for name in (starter.rank, starter.size))
            if size > 1:
                yield starter, rank, size


def number_in(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number that a value begins with: srun writes ``2(x3),1``, tasks by machine."""
    if default is not None and name not in environ:
        return default
    found = re.match(r"\d+", environ[name])
    if found is None:
        raise UsageError(
            f"{name} in the environment: expected a number, found {shown(environ[name])}"
        )
    return int(found.group())
