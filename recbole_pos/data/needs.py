"""What a model declares about the batches it learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recbole.data.interaction import Interaction

from recbole_pos.data.batch import SequenceBatch


@dataclass(frozen=True)
class Needs:
    """What a model declares about the batches it learns from.

    Attributes:
        windows: whether it can learn from packed windows, a target at every position.
        causal: whether every event has a state of its own, made from the events up to it; else a
            window has one target, after its newest event.
        times: whether windows carry times.
        requests: whether they carry the time of the newest event's target, too.
        events: whether windows carry the places of events in the log.
        linked: whether all windows of a user come in one batch, one after the other, oldest first.
        prepare: what sizes or places only values tell, made of a batch of windows on the host; None
            for models that need none. A device would be waited for, so batches for one are made on
            the host, and prepared one ahead; on a CPU the model does it itself, in its step.
        pack: rows of RecBole's as the batch that the model makes of them, for the same reason: how
            many of their places hold an event.
    """

    windows: bool = False
    causal: bool = True
    times: bool = False
    requests: bool = False
    events: bool = False
    linked: bool = False
    prepare: Callable[[SequenceBatch], SequenceBatch] | None = None
    pack: Callable[[Interaction], SequenceBatch | Interaction] | None = None
