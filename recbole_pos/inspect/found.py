"""What was found in a trained model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RelationUse:
    """What one attribute does in the batches looked at; see ``MEANING``.

    Attributes:
        field: of the relation; for users all their fields, which act as one.
        source: item, behaviour or user.
        known, read, others: as in ``MEANING``; others is NaN where nothing is read.
        adds: one number a layer; of users, NaN in layers that do not aggregate.
        heads: [layers, M'] W^R of equation 8; none for users.
        gate: one number a layer, of users alone; NaN where there is no gate.
    """

    field: str
    source: str
    known: float
    read: float
    others: float
    adds: list[float]
    heads: list[list[float]]
    gate: list[float]
