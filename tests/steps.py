"""Training one batch again and again, shared by the tests of models."""

from __future__ import annotations

from typing import Any

from recbole_pos.experiment.loss_watch import LossWatch


def learn(trainer: Any, loss_func: Any, batch: Any, steps: int) -> list[float]:
    """The loss before each step."""

    def refuse(number: int, batch: Any, value: float) -> None:
        raise AssertionError(f"step {number}: loss {value}")

    losses = []
    for number in range(steps):
        watch = LossWatch(refuse)
        trainer._step(loss_func, batch, watch, number)
        losses.append(watch.mean())
    return losses
