"""Encodings added to the item vectors before the first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext
from recbole_pos.position.base import Dimensions, InputPosition


class LearnedPosition(InputPosition):
    """Learned absolute positions, x + P (Kang and McAuley, SASRec, 2018).

    Args:
        dimensions: sizes of the model.
        position_from: where rows are counted from. ``oldest`` numbers the events of a window 0, 1,
            2, ... as RecBole does; ``newest`` puts the last event in the last row, n - 1, as the
            papers of SASRec's line do by padding on the left.
    """

    options = ("position_from",)

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__()
        if position_from not in ("oldest", "newest"):
            raise UsageError(f"position_from must be oldest or newest, found {position_from!r}")
        self.position_from = position_from
        self.weight = nn.Parameter(torch.empty(dimensions.max_length, dimensions.hidden_size))
        nn.init.normal_(self.weight, std=dimensions.initializer_range)

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        if self.position_from == "oldest":
            rows = ctx.index
        else:
            rows = ctx.max_length - 1 - ctx.age
        return x + nn.functional.embedding(rows, self.weight)
