"""One cell of ``scale.py``: a model on a log of one size, phase by phase, within limits."""

from __future__ import annotations

import functools
import itertools
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recbole_pos  # noqa: F401  (RecBole needs its fixes to start at all on this numpy)
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.loaders import TargetLoader
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.loss_watch import LossWatch
from recbole_pos.experiment.memory import keep_freed_memory
from recbole_pos.experiment.state import capture

MEMORY = 12 << 30  # bytes of address space
CPU = 150  # seconds of a cell, all phases together
USERS = 512  # who are evaluated
PRODUCTS = 2e8  # logits of a step at most: a second, and not minutes, where there are many items
FIRST = "first start"  # a side that reads the text, and leaves what others start from


@dataclass(frozen=True)
class Cell:
    """A model and the sizes that it is measured at.

    Attributes:
        side: the model, and a loss that is not its own after a comma; or FIRST.
        axis: the size that is varied.
        events, items, length: sizes; ``each`` is the mean number of events of a user.
    """

    side: str
    axis: str
    events: int
    items: int
    length: int
    each: int

    @property
    def size(self) -> int:
        """On its axis."""
        return int(getattr(self, self.axis))

    @property
    def log(self) -> str:
        """The name of its log's folder."""
        return f"{self.events}-{self.items}-{self.each}"

    @property
    def batch(self) -> int:
        """Windows of a step."""
        return int(min(max(PRODUCTS / (self.items * self.length), 1), 128))


class Some(TargetLoader):
    """The first batches."""

    most = 1

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.most)


def options(cell: Cell, folder: Path) -> tuple[str, dict[str, Any]]:
    """Model and options: defaults but for the sizes."""
    model, _, loss = cell.side.partition(", ")
    model = "PosSASRec" if model == FIRST else model
    found: dict[str, Any] = {
        "data_path": str(folder / cell.log),
        "load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id"]},
        "MAX_ITEM_LIST_LENGTH": cell.length,
        "show_progress": False,
    }
    if model != "PosRec":  # whose batch is of prefixes, one target each
        found["train_batch_size"] = 128 if loss else cell.batch
    return model, found | ({"loss_type": loss} if loss else {})


def train(made: Experiment, seconds: float) -> tuple[float, int]:
    """CPU-seconds of an epoch, by the targets of the steps that were made, and their number."""
    trainer, loader = made.trainer, made.trainer.training_loader(made.loaders["train"])
    watch = LossWatch(functools.partial(trainer._refuse, 0))
    loss, targets, begun = trainer.adapter.loss(loader.packed), 0, 0.0
    trainer.loader = loader  # as ``fit`` sets it; a checkpoint has its state
    trainer.model.train()
    loader.set_epoch(0)
    number = -1
    with trainer.precision.steps(), trainer.steps_in_rows():
        for number, batch in enumerate(loader.batches_on(trainer.device, "never")):
            if number == 1:  # the first makes the optimiser's state
                targets, begun = 0, time.process_time()
            trainer._step(loss, batch, watch, number)
            targets += len(batch)
            if number and time.process_time() - begun > seconds:
                break
        watch.mean()
    return (time.process_time() - begun) / targets * loader.targets, number


def evaluate(made: Experiment) -> float:
    """CPU-seconds of a thousand users."""
    loader: Any = made.loaders["valid"]
    loader.__class__ = Some
    loader.most = -(-USERS // made.config["eval_batch_size"])
    begun = time.process_time()
    made.trainer.evaluate(loader, load_best_model=False)
    users = min(loader.most * made.config["eval_batch_size"], len(loader.rows))
    return (time.process_time() - begun) / users * 1000


def measure(cell: Cell, folder: Path, seconds: float, tell: Callable[..., None]) -> None:
    """Print every phase as soon as it is over: its figures, and the peak of memory so far in MB."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU, spent + CPU + 5))
    keep_freed_memory()
    model, given = options(cell, folder)
    with tempfile.TemporaryDirectory() as kept:
        config = PosConfig(model, "generated", None, given)
        tell(before_mb=peak_rss_mb())
        begun = time.process_time()
        made = prepare(config)
        tell(start=time.process_time() - begun, start_mb=peak_rss_mb())
        if cell.side == FIRST:
            return
        epoch, steps = train(made, seconds)
        tell(epoch=epoch, steps=steps, epoch_mb=peak_rss_mb())
        begun = time.process_time()
        checkpoint.save(Path(kept, "checkpoint.pt"), capture(made.trainer))
        size = Path(kept, "checkpoint.pt").stat().st_size / 1e6
        tell(checkpoint=time.process_time() - begun, checkpoint_size=size)
        tell(evaluation=evaluate(made), peak_mb=peak_rss_mb())
