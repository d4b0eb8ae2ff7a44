"""Encodings added to the item vectors before the first layer: rows of tables, by position.

Those of the PosRec paper are in ``position/dual.py``. Shapes as in ``layers/context.py``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import Dimensions, InputPosition


class PositionEncoding(InputPosition):
    """Base: x + P, where P depends on positions only. A subclass defines :meth:`rows`."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.max_length = dimensions.max_length

    def rows(self, forward: Tensor, backward: Tensor, length: Tensor | None = None) -> Tensor:
        """Return P [..., d] by the distance of interactions from both ends of their session.

        Args:
            forward: [...] int64 number of older interactions, pos; 0 to n - 1.
            backward: [...] int64 number of newer interactions, l - pos - 1; 0 to n - 1.
            length: [...] int64 l, where it is not forward + backward + 1: an item that occurs
                several times has ``forward`` of its first and ``backward`` of its last place.
        """
        raise NotImplementedError

    def encode(self, position: Tensor, length: Tensor) -> Tensor:
        """Return P [..., d] at ``position`` (0: the oldest) of sessions of ``length``, [...]."""
        return self.rows(position, length - 1 - position, length)

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        return x + self.rows(ctx.index, ctx.age)


def learned_table(dimensions: Dimensions, width: int) -> nn.Parameter:
    """Return a learned [n, width] table with the standard deviation of the model's fresh tables."""
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


class CountedEncoding(PositionEncoding):
    """Base: rows of a table ``weight`` [n, w] that has a slice of columns for each count.

    The slices are the d columns of P side by side, or have d columns each and are added. Side by
    side they are halves; the first has the middle column where d is odd.

    Attributes:
        counts: the count that indexes each slice: ``forward`` is pos, ``backward`` l - pos - 1,
            ``newest`` the same from the last row up, and ``length`` l, whose first row is l = 1.
        added: whether slices are added.
        widths: columns of each slice.
    """

    counts: tuple[str, ...] = ("forward",)
    added: ClassVar[bool] = False
    weight: Tensor

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__(dimensions)
        d, slices = dimensions.hidden_size, len(self.counts)
        if d < slices and not self.added:
            raise UsageError(f"{type(self).__name__} halves hidden_size, which cannot be {d}")
        halves = [len(half) for half in torch.arange(d).tensor_split(slices)]
        self.widths = [d] * slices if self.added else halves

    def rows(self, forward: Tensor, backward: Tensor, length: Tensor | None = None) -> Tensor:
        length = forward + backward + 1 if length is None else length
        newest = self.max_length - 1 - backward
        rows = torch.broadcast_tensors(forward, backward, newest, length - 1)
        row_by_count = dict(zip(("forward", "backward", "newest", "length"), rows, strict=True))
        tables = zip(self.counts, self.weight.split(self.widths, dim=-1), strict=True)
        columns = [nn.functional.embedding(row_by_count[count], table) for count, table in tables]
        if self.added or len(columns) == 1:
            return sum(columns[1:], columns[0])
        return torch.cat(columns, dim=-1)


class FixedEncoding(CountedEncoding):
    """Base: sines and cosines, without parameters."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__(dimensions)
        row = torch.arange(dimensions.max_length, dtype=torch.float64)
        slices = zip(self.counts, self.widths, strict=True)
        d = dimensions.hidden_size
        tables = [self.sines(count, row, width, d) for count, width in slices]
        table = torch.cat(tables, dim=-1).to(torch.get_default_dtype())
        self.register_buffer("weight", table, persistent=False)

    def sines(self, count: str, row: Tensor, width: int, d: int) -> Tensor:
        """Return the slice [n, width] for ``count``, whose float64 rows are numbered by row [n]."""
        return sinusoids(row, width, d)


class LearnedEncoding(CountedEncoding):
    """Base: learned tables."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__(dimensions)
        self.weight = learned_table(dimensions, sum(self.widths))


class LearnedPosition(LearnedEncoding):
    """Learned absolute positions, x + P (Kang and McAuley, SASRec, 2018).

    From the oldest interaction it is ``lpe``, from the newest ``lrpe`` with its table upside down.

    Args:
        position_from: where rows are counted from. ``oldest`` numbers the interactions of a window
            0, 1, 2, ... as RecBole does; ``newest`` puts the last interaction in the last row, n -
            1, as the papers of SASRec's line do by padding on the left.
    """

    options = ("position_from",)

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__(dimensions)
        self.counts = ("forward",) if position_from == "oldest" else ("newest",)


class SinusoidalPosition(FixedEncoding):
    """Fixed sines and cosines, x + P (Vaswani et al., Attention Is All You Need, 2017).

    P[p, 2i] = sin(p / 10000^(2i/d)) and P[p, 2i + 1] = cos of the same. Its entries are of size 1,
    so item vectors should be too: set ``embedding_scale: True``. From the oldest interaction it is
    ``spe``; from the newest it encodes what ``rspe`` does, but p falls with the age.

    Args:
        position_from: see :class:`LearnedPosition`.
    """

    options = ("position_from",)

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__(dimensions)
        self.counts = ("forward",) if position_from == "oldest" else ("newest",)
