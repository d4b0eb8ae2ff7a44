"""Callbacks: what a user runs during a training, at the hooks of :class:`Callback`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Callback:
    """Follow a training run; a subclass overrides the hooks that it needs.

    Examples:
        >>> class Patience(recbole_pos.Callback):
        ...     def on_epoch(self, epoch):
        ...         return epoch["loss"] < 6.5  # stop
        >>> trained = recbole_pos.fit("FPARec", "ml-100k", epochs=2, callbacks=[Patience()])
    """

    def on_start(self, experiment: Any) -> None:
        """Act before the first epoch: configuration, dataset, model and trainer are there."""

    def on_step(self, step: int, loss: Tensor) -> None:
        """Act after a step, counted from 1 in all epochs; reading ``loss`` waits for the device."""

    def on_validation(self, epoch: int, metrics: dict[str, float]) -> bool | None:
        """Act after a validation; return True to end the training after this epoch."""

    def on_epoch(self, epoch: dict[str, Any]) -> bool | None:
        """Act after an epoch, with its line of metrics.jsonl; return True to end the training."""

    def on_end(self, experiment: Any, result: Any) -> None:
        """Act after the test, with the best weights; ``result`` is None if the run was stopped."""


def call(callbacks: Sequence[Callback], hook: str, *args: Any) -> bool:
    """Call the method ``hook`` of every callback; return whether one of them ends the training."""
    answers = [getattr(callback, hook)(*args) for callback in callbacks]
    return any(answers)
