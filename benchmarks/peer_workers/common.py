"""The harness of the workers. It runs in the environment of each library, so it imports little."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True)
class Job:
    """One run: its data, the settings that all sides share, and how long to measure.

    ``targets`` is the number of targets of an epoch; a worker refuses to time any other.
    """

    events: str  # csv with user_id, item_id, timestamp
    length: int
    targets: int
    batch_size: int = 128
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 2
    inner_size: int = 256
    activation: str = "gelu"  # or "relu"; peers have no choice
    dropout: float = 0.2
    attention_dropout: float = 0.2
    learning_rate: float = 1e-3
    negatives: int = 0  # items that each target is compared with; 0 for all items
    seed: int = 2024
    warmup_seconds: float = 5.0
    min_seconds: float = 5.0
    max_seconds: float = 12.0

    @classmethod
    def read(cls) -> Job:
        """Return the job that the command line has as json, and silence the process."""
        job = cls(**json.loads(sys.argv[1]))
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        import torch

        torch.manual_seed(job.seed)
        return job


class Clock:
    """Times training in steady state, from step to step.

    The first epoch is warm-up, cut off after ``warmup_seconds``. Then at least one epoch's worth of
    targets and ``min_seconds`` are timed, cut off after ``max_seconds``.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.warm = self.done = False
        self.targets, self.seconds = 0, 0.0
        self.began = time.perf_counter()

    def tick(self, targets: int) -> None:
        """Note that steps over so many real targets have ended."""
        job = self.job
        self.targets += targets
        self.seconds = time.perf_counter() - self.began
        has_epoch = self.targets >= job.targets
        if self.warm:
            is_enough = has_epoch and self.seconds >= job.min_seconds
            self.done = is_enough or self.seconds >= job.max_seconds
        elif has_epoch or self.seconds >= job.warmup_seconds:
            self.warm, self.targets = True, 0
            self.began = time.perf_counter()


def check_targets(targets: int, job: Job) -> None:
    """Require that every side learns the same targets."""
    if targets != job.targets:
        sys.exit(f"an epoch has {targets} targets, expected {job.targets}")


def set_attention_dropout(model: Module, probability: float) -> None:
    """Set the dropout of attention, which libraries tie to their one option, for all calls."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = probability


def report(clock: Clock, items: int, *packages: str) -> None:
    """Print the result, with the versions of packages, as the last line of standard output."""
    result = {
        "targets_per_second": clock.targets / clock.seconds,
        "items": items,
        "versions": {name: version(name) for name in (*packages, "torch", "numpy")},
    }
    print(json.dumps(result), flush=True)
