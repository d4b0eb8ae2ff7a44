"""The harness of the workers. It runs in the environment of each library, so it imports little."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

Batch = TypeVar("Batch")
if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    Ids = Mapping[int, int]
    Score = Callable[[Tensor], Tensor]


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
    loss: str = "softmax"  # over all items; or "sampled_softmax", "bce"
    negatives: int = 0  # of those two
    threads: int = 2
    seed: int = 2024
    warmup_seconds: float = 30.0
    min_seconds: float = 10.0
    max_seconds: float = 1e9
    held_out: str = ""  # csv with user_id, item_id: train until these are predicted no better
    patience: int = 5  # epochs without improvement before that

    @classmethod
    def read(cls) -> Job:
        """Return the job named on the command line; silence the process and pin its threads."""
        job = cls(**json.loads(Path(sys.argv[1]).read_text()))
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        import torch

        torch.set_num_threads(job.threads)
        torch.manual_seed(job.seed)
        return job

    def write(self, file: Path) -> None:
        """Write the job for :meth:`read`."""
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


class Curve(Clock):
    """Trains to quality: the NDCG@10 after each epoch, and the seconds of training until then.

    Every user's held-out item is ranked among all; this time is not counted.

    Args:
        job: a job with ``held_out``.
        ids: id of the data -> the side's own number, of each item.
        model: the model, which is in eval mode while it scores.
        score: returns the scores [b, items] of the next item after histories [b, L] of such
            numbers, padded on the left with ``padding``.
        padding: the side's number of padding, whose score does not count.
    """

    def __init__(self, job: Job, ids: Ids, model: Module, score: Score, padding: int) -> None:
        import pandas as pd

        super().__init__(job)
        self.model, self.score, self.padding = model, score, padding
        events = pd.read_csv(job.events)
        histories = events["item_id"].map(ids).groupby(events["user_id"]).agg(list)
        held_out = pd.read_csv(job.held_out, index_col="user_id")["item_id"].loc[histories.index]
        self.inputs = [
            [padding] * (job.length - len(items)) + items for items in histories.str[-job.length :]
        ]
        self.targets_held_out = held_out.map(ids).fillna(-1).astype(int).tolist()  # -1: not trained
        self.points: list[tuple[float, float]] = []
        self.began = time.perf_counter()

    def tick(self, targets: int) -> None:
        """Note that steps have ended; after an epoch evaluate, while the clock stands."""
        self.targets += targets
        if self.targets < (len(self.points) + 1) * self.job.targets:
            return
        self.seconds += time.perf_counter() - self.began
        self.points.append((self.seconds, self.ndcg()))
        values = [value for _, value in self.points]
        epochs_without_gain = len(values) - 1 - values.index(max(values))
        is_late = self.seconds >= self.job.max_seconds
        self.done = epochs_without_gain >= self.job.patience or is_late
        self.began = time.perf_counter()

    def ndcg(self) -> float:
        """Return NDCG@10; an item that was never trained is never found."""
        import torch

        total = 0.0
        self.model.eval()
        for start in range(0, len(self.inputs), 256):
            rows = slice(start, start + 256)
            with torch.no_grad():
                scores = self.score(torch.tensor(self.inputs[rows])).float()
            if not scores.isfinite().all():  # nothing would rank above such a target
                sys.exit(f"epoch {len(self.points) + 1}: scores that are not finite")
            targets = torch.tensor(self.targets_held_out[rows])
            if self.padding < scores.size(1):
                scores[:, self.padding] = -torch.inf
            own = scores.gather(1, targets.clamp(min=0)[:, None])
            rank = (scores > own).sum(1) + (scores == own).sum(1) // 2  # the middle of ties
            gain = 1 / (rank + 2).double().log2()
            total += float(gain[(targets >= 0) & (rank < 10)].sum())
        self.model.train()
        return total / len(self.inputs)


def make_clock(job: Job, ids: Ids, model: Module, score: Score, padding: int) -> Clock:
    """Return a clock of speed, or of quality where something is held out."""
    return Curve(job, ids, model, score, padding) if job.held_out else Clock(job)


def train(
    clock: Clock,
    optimizer: Optimizer,
    make_batches: Callable[[], Iterable[Batch]],
    compute: Callable[[Batch], tuple[Tensor, int]],
) -> None:
    """Train in a plain loop until the clock is done.

    Args:
        clock: see :func:`make_clock`.
        optimizer: optimiser of the model.
        make_batches: returns the batches of an epoch.
        compute: returns the loss of a batch, and how many real targets it has.
    """
    while not clock.done:
        for batch in make_batches():
            loss, targets = compute(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.tick(targets)
            if clock.done:
                break
    if not loss.isfinite():
        sys.exit("the loss is not finite")


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
        "points": clock.points if isinstance(clock, Curve) else [],
    }
    print(json.dumps(result), flush=True)
