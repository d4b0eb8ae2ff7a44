"""RecBole's causal models, trained at every position of a window in one pass.

RecBole makes a row of every target, runs the model over the whole history and reads the state after
its newest event (``gather_indexes``). Where states are made from the events up to them alone, the
states on the way are those of the shorter histories, so one pass over a window trains them all.
For histories of up to L events that is the loss of RecBole's rows, term by term, but for padding,
which RecBole counts as a candidate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.losses import full_cross_entropy


def every_state(model: Any, batch: SequenceBatch) -> Tensor:
    """[k, d] what the model predicts from after each trained position, in the order of targets.

    Args:
        model: one of ``CAUSAL_BUILTINS``.
        batch: k targets among the events of its windows.
    """
    ctx = SequenceContext.from_lengths(
        batch.lengths, batch.width, items=batch.items, width=batch.width
    )
    items = ctx.pad(batch.items, "start")  # padded on the right, as RecBole's histories

    def gather_all(output: Tensor, _newest: Tensor) -> Tensor:
        states = ctx.unpad(output, "start")
        return states if batch.positions is None else states[batch.positions]

    model.gather_indexes = gather_all  # of this object, in front of its class's
    try:
        return model(items, batch.lengths)
    finally:
        del model.gather_indexes


def every_position_loss(model: Any, batch: SequenceBatch) -> Tensor:
    """Mean cross-entropy of the targets, padding not being a candidate."""
    return full_cross_entropy(every_state(model, batch), model.item_embedding.weight, batch.targets)
