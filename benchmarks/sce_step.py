"""One side of "A million items" of ``sce.py``: training steps of PosSASRec, part by part.

``python benchmarks/sce_step.py kept`` or ``dense``; both make the same steps, to the same bits.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_data import Size, trainer_of

from recbole_pos.experiment.folder import peak_rss_mb
from recbole_pos.experiment.loss_watch import LossWatch
from recbole_pos.experiment.memory import keep_freed_memory

SIZE = Size(7_000, 1_000_000, 1_000_000, length=50, d=64, layers=2, batch=128)
STEPS = 5
PARTS = {"zero": "_zero_grad", "forward": "_loss"}  # methods of the trainer


class Parts:
    """CPU-seconds of calls, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same, and its time is added up."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            found = call(*args, **kwargs)
            self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - begun
            return found

        return wrapped


def measure(side: str) -> dict[str, float]:
    """A step on average, after two that warm up."""
    keep_freed_memory()
    trainer, loader = trainer_of(SIZE, loss_type="SCE")
    if side == "dense":
        trainer._table = lambda: None
    watch, loss = LossWatch(partial(trainer._refuse, 0)), trainer.adapter.loss(packed=True)
    batches = list(itertools.islice(loader, STEPS + 2))
    trainer.model.train()
    with trainer.steps_in_rows():
        for number, batch in enumerate(batches[:2]):
            trainer._step(loss, batch, watch, number)
        parts = Parts()
        for name, method in PARTS.items():
            setattr(trainer, method, parts.timed(name, getattr(trainer, method)))
        trainer.optimizer.step = parts.timed("adam", trainer.optimizer.step)
        before, step = resource.getrusage(resource.RUSAGE_SELF), parts.timed("all", trainer._step)
        for number, batch in enumerate(batches[2:]):
            step(loss, batch, watch, number)
        after = resource.getrusage(resource.RUSAGE_SELF)
    found = {name: spent / STEPS for name, spent in parts.spent.items()}
    found["backward"] = 2 * found["all"] - sum(found.values())
    return found | {
        "system": (after.ru_stime - before.ru_stime) / STEPS,
        "faults": (after.ru_minflt - before.ru_minflt) / STEPS,
        "targets": sum(map(len, batches[2:])) / STEPS,
        "peak_mb": peak_rss_mb(),
        "weights": sum(p.double().sum().item() for p in trainer.model.parameters()),
    }


if __name__ == "__main__":
    side, sys.argv = sys.argv[1], sys.argv[:1]
    print(json.dumps(measure(side)))
