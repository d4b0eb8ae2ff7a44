"""Encodings added to the item vectors before the first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext
from recbole_pos.position.base import Dimensions, InputPosition


class AbsolutePosition(InputPosition):
    """Base: x + P, row by row of a table ``weight`` [n, d].

    Args:
        position_from: where rows are counted from. ``oldest`` numbers the events of a window 0, 1,
            2, ... as RecBole does; ``newest`` puts the last event in the last row, n - 1, as the
            papers of SASRec's line do by padding on the left.
    """

    options = ("position_from",)
    weight: Tensor

    def __init__(self, position_from: str) -> None:
        super().__init__()
        if position_from not in ("oldest", "newest"):
            raise UsageError(f"position_from must be oldest or newest, found {position_from!r}")
        self.position_from = position_from

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        rows = ctx.index if self.position_from == "oldest" else ctx.max_length - 1 - ctx.age
        return x + nn.functional.embedding(rows, self.weight)


class LearnedPosition(AbsolutePosition):
    """Learned absolute positions, x + P (Kang and McAuley, SASRec, 2018)."""

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__(position_from)
        self.weight = nn.Parameter(torch.empty(dimensions.max_length, dimensions.hidden_size))
        nn.init.normal_(self.weight, std=dimensions.initializer_range)


class SinusoidalPosition(AbsolutePosition):
    """Fixed sines and cosines, x + P (Vaswani et al., Attention Is All You Need, 2017).

    P[p, 2i] = sin(p / 10000^(2i/d)) and P[p, 2i + 1] = cos of the same. Its entries are of size 1,
    so item vectors should be too: set ``embedding_scale: True``.
    """

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__(position_from)
        n, d = dimensions.max_length, dimensions.hidden_size
        column = torch.arange(d, dtype=torch.float64)
        frequency = 10000.0 ** (-(column - column % 2) / d)
        angle = torch.arange(n, dtype=torch.float64)[:, None] * frequency
        table = torch.where(column % 2 == 0, angle.sin(), angle.cos())
        self.register_buffer("weight", table.to(torch.get_default_dtype()), persistent=False)
