"""The harness of the workers. It runs in the environment of each library, so it imports little."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True)
class Job:
    """One run: its data, the settings that all sides share, and how long to measure.

    A worker refuses to time another number of ``targets`` in an epoch, or of ``items`` to rank.
    """

    events: str  # csv with user_id, item_id, timestamp
    length: int
    targets: int
    items: int
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
    bucket: int = 0  # rows of like length that RePlay encodes together; 0 for the whole batch
    seed: int = 2024
    warmup_seconds: float = 5.0
    timed_seconds: float = 10.0

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

    Steps of the first ``warmup_seconds`` do not count; those of the next ``timed_seconds`` do.

    Attributes:
        targets: number of targets of the steps that count.
        seconds: their time.
        done: whether enough was timed.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.warm = self.done = False
        self.targets, self.seconds = 0, 0.0
        self.began = time.perf_counter()

    def tick(self, targets: int) -> None:
        """Note that steps over so many real targets have ended."""
        now = time.perf_counter()
        if self.warm:
            self.targets += targets
            self.seconds = now - self.began
            self.done = self.seconds >= self.job.timed_seconds
        elif now - self.began >= self.job.warmup_seconds:
            self.warm, self.began = True, now

    def report(self) -> None:
        """Print the targets a second, as the last line of standard output."""
        print(self.targets / self.seconds, flush=True)


def check(job: Job, **counts: int) -> None:
    """Require that every side has the same number of targets, or of items."""
    for name, count in counts.items():
        if count != getattr(job, name):
            sys.exit(f"{count} {name}, expected {getattr(job, name)}")


def set_attention_dropout(model: Module, probability: float) -> None:
    """Set the dropout of attention, which libraries tie to their one option, for all calls."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = probability
