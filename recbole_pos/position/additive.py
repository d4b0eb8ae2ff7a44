"""Encodings added to the item vectors before the first layer: the base, and one row per position.

Those that read a position from both ends of the session are in ``position/dual.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import Dimensions, InputPosition


class PositionEncoding(InputPosition):
    """Base: x + P, where P depends on positions only. A subclass defines :meth:`rows`."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.max_length = dimensions.max_length

    def rows(self, forward: Tensor, backward: Tensor, length: Tensor | None = None) -> Tensor:
        """Return P [..., d] by the distance of events from both ends of their session.

        Args:
            forward: [...] int64 number of older events, pos; 0 to n - 1.
            backward: [...] int64 number of newer events, l - pos - 1; 0 to n - 1.
            length: [...] int64 l, where it is not forward + backward + 1: an item that occurs
                several times has ``forward`` of its first and ``backward`` of its last place.
        """
        raise NotImplementedError

    def encode(self, position: Tensor, length: Tensor) -> Tensor:
        """Return P [..., d] of event ``position`` (0: the oldest) of a session of ``length``."""
        return self.rows(position, length - 1 - position, length)

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        return x + self.rows(ctx.index, ctx.age)


def learned_table(dimensions: Dimensions, width: int) -> nn.Parameter:
    """Return a learned [n, width] table, fresh with the standard deviation of the model."""
    table = nn.Parameter(torch.empty(dimensions.max_length, width))
    nn.init.normal_(table, std=dimensions.initializer_range)
    return table


def sinusoids(count: Tensor, width: int, size: float, exchanged: bool = False) -> Tensor:
    """Return [n, width] float64: sin(count / 10000^(2i/size)) in column 2i, the cosine in 2i + 1.

    Args:
        count: [n] float64.
        width: number of columns; an odd number ends with a column 2i.
        size: d, which frequencies depend on.
        exchanged: whether cosines are in the even columns and sines in the odd ones.
    """
    column = torch.arange(width, dtype=torch.float64)
    angle = count[:, None] * 10000.0 ** (-(column - column % 2) / size)
    return torch.where((column % 2 == 0) != exchanged, angle.sin(), angle.cos())


class AbsolutePosition(PositionEncoding):
    """Base: x + P, where P are rows of a table ``weight`` [n, d].

    Args:
        position_from: where rows are counted from. ``oldest`` numbers the events of a window 0, 1,
            2, ... as RecBole does; ``newest`` puts the last event in the last row, n - 1, as the
            papers of SASRec's line do by padding on the left.
    """

    options = ("position_from",)
    weight: Tensor

    def __init__(self, dimensions: Dimensions, position_from: str) -> None:
        super().__init__(dimensions)
        self.position_from = position_from

    def rows(self, forward: Tensor, backward: Tensor, length: Tensor | None = None) -> Tensor:
        oldest = self.position_from == "oldest"
        row = forward if oldest else self.max_length - 1 - backward
        return nn.functional.embedding(row, self.weight)


class LearnedPosition(AbsolutePosition):
    """Learned absolute positions, x + P (Kang and McAuley, SASRec, 2018).

    From the oldest event it is ``lpe``, from the newest ``lrpe`` with its table upside down.
    """

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__(dimensions, position_from)
        self.weight = learned_table(dimensions, dimensions.hidden_size)


class SinusoidalPosition(AbsolutePosition):
    """Fixed sines and cosines, x + P (Vaswani et al., Attention Is All You Need, 2017).

    P[p, 2i] = sin(p / 10000^(2i/d)) and P[p, 2i + 1] = cos of the same. Its entries are of size 1,
    so item vectors should be too: set ``embedding_scale: True``. From the oldest event it is
    ``spe``; from the newest it encodes what ``rspe`` does, but p falls with the age.
    """

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__(dimensions, position_from)
        n, d = dimensions.max_length, dimensions.hidden_size
        table = sinusoids(torch.arange(n, dtype=torch.float64), d, d)
        self.register_buffer("weight", table.to(torch.get_default_dtype()), persistent=False)
