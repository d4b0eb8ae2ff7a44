"""What may go wrong in training, told before it starts, and why it stopped making sense."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.distributed import this_share


def tell_notices(model: nn.Module) -> None:
    """Log what a model has found in its data and options (``notices``), once for a group."""
    if this_share().rank == 0:
        for notice in getattr(model, "notices", ()):
            logging.getLogger(__name__).warning(notice)


def explain_loss(batch: Any, model: nn.Module, learning_rate: float) -> str:
    """The likely cause of a loss that is not a number.

    Args:
        batch: the one it was seen at, packed or RecBole's.
        model: after the step before.
        learning_rate: of that step.
    """
    columns = vars(batch) if isinstance(batch, SequenceBatch) else batch.interaction
    bad_fields = [
        name
        for name, column in columns.items()
        if isinstance(column, Tensor) and not column.double().isfinite().all()
    ]
    if bad_fields:
        return f"the data: {', '.join(bad_fields)} holds values that are not finite"
    bad_weights = [n for n, p in model.named_parameters() if not p.isfinite().all()]
    if bad_weights:
        return (
            f"an earlier step made {len(bad_weights)} weights not finite (first: "
            f"{bad_weights[0]}); learning_rate {learning_rate} may be too high, "
            "or set clip_grad_norm: {max_norm: 1.0}"
        )
    return (
        "weights and data are finite, so the forward pass overflowed; lower learning_rate "
        f"(now {learning_rate}) or switch enable_amp off"
    )
