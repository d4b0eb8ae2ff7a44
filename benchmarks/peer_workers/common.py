"""What the workers share. Runs in the virtual environment of each library, so it imports little."""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One run: what to train on, the settings that all sides share, and how long to measure.

    ``targets`` is what an epoch must cover; a worker refuses to time anything else.
    """

    events: str  # csv with user_id, item_id, timestamp
    length: int
    targets: int
    batch_size: int = 128
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 2
    inner_size: int = 256
    dropout: float = 0.2
    attention_dropout: float = 0.2
    learning_rate: float = 1e-3
    threads: int = 2
    accelerator: str = "cpu"  # or gpu
    seed: int = 2024
    warmup_seconds: float = 30.0
    min_seconds: float = 10.0
    max_seconds: float = 1e9

    @classmethod
    def read(cls) -> Job:
        """The job named on the command line; also quiets the process and pins its threads."""
        job = cls(**json.loads(Path(sys.argv[1]).read_text()))
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        import torch

        torch.set_num_threads(job.threads)
        torch.manual_seed(job.seed)
        return job

    def write(self, file: Path) -> None:
        """As :meth:`read` expects it."""
        file.write_text(json.dumps(asdict(self)))


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
        """Steps over so many real targets have just ended."""
        self.targets += targets
        self.seconds = time.perf_counter() - self.began
        whole = self.targets >= self.job.targets
        if self.warm:
            enough = whole and self.seconds >= self.job.min_seconds
            self.done = enough or self.seconds >= self.job.max_seconds
        elif whole or self.seconds >= self.job.warmup_seconds:
            self.warm, self.targets = True, 0
            self.began = time.perf_counter()


def check_targets(found: int, job: Job) -> None:
    """A comparison holds only if every side learns the same targets."""
    if found != job.targets:
        sys.exit(f"an epoch has {found} targets, expected {job.targets}")


def set_attention_dropout(model: object, probability: float) -> None:
    """Libraries tie it to their one dropout option; torch's attention reads it at every call."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = probability


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of the packages, with those that decide the speed of all sides."""
    return {name: version(name) for name in [*packages, "torch", "numpy"]}


def report(clock: Clock, items: int, model: object, packages: dict[str, str]) -> None:
    """The result as the last line of standard output."""
    result = {
        "targets": clock.targets,
        "seconds": clock.seconds,
        "targets_per_second": clock.targets / clock.seconds,
        "epochs": clock.targets / clock.job.targets,
        "items": items,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "versions": packages,
        "python": platform.python_version(),
    }
    print(json.dumps(result), flush=True)
