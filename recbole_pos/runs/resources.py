"""CPUs and GPUs of a training run, and how many runs fit on some machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recbole_pos.errors import UsageError
from recbole_pos.values import shown


@dataclass(frozen=True)
class Resources:
    """The resources of a training run.

    Attributes:
        cpus: number of CPUs, which is also the number of threads.
        gpus: number of GPUs; with a fraction, several runs share one.
    """

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        """Return ``1 CPU and 0.5 GPU a training``."""
        return f"{self.cpus:g} CPU and {self.gpus:g} GPU a training"


def count_runs(machines: Sequence[Mapping[str, float]], resources: Resources) -> int:
    """Return how many runs some machines can train at the same time.

    On each machine, the scarcest resource limits the number of runs: 8 CPUs and 2 GPUs hold two
    runs of 1 CPU and 1 GPU.

    Args:
        machines: for each machine, ``CPU`` and ``GPU`` -> number of each.
        resources: CPUs and GPUs of a run.

    Raises:
        UsageError: if no machine has the resources of a run.
    """
    required = {"CPU": resources.cpus, "GPU": resources.gpus}
    rounding = 1e-9  # 0.3 GPUs hold three runs of 0.1, although 0.3 / 0.1 < 3
    num_runs = sum(
        min(int(m.get(key, 0) / amount + rounding) for key, amount in required.items() if amount)
        for m in machines
    )
    if not num_runs:
        found = "; ".join(f"{m.get('CPU', 0):g} CPUs, {m.get('GPU', 0):g} GPUs" for m in machines)
        raise UsageError(
            f"--cpus_per_trial, --gpus_per_trial: no machine has {resources.cpus:g} CPUs and "
            f"{resources.gpus:g} GPUs for a run; found {shown(found)}"
        )
    return num_runs
