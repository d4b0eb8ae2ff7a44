"""Encodings by position: rows of tables that are added to item vectors before the first layer.

Those from ``SPE`` on are of the PosRec paper: by the position from the start of a session, from its
end, and its length. Definitions 3.1 to 3.3 are in ``studies/posrec/encodings.py``.

Of these all but SPE and LPE read how many later interactions there are: of the window, where that
is cut off (``MAX_ITEM_LIST_LENGTH``). That reveals nothing of their items, as padding on the left
does not in the papers' code, so a model stays causal in what it knows of items. But where every
interaction of a window is a query, as in PosSASRec, those in training have any number of later
interactions while the one that predicts has none; PosRec trains on each prefix of a session as its
own example.

In their equations P is what is added to the item vector of an interaction, pos is the number of
older interactions, age that of newer ones, and l the length of the window. T[r] and T'[r] are rows
of two learned tables. S(p) has sin and cos of p / 10000^(2i/d) in columns 2i and 2i + 1. A || B is
A and B side by side.

Entries of the fixed ones are of size 1, so item vectors should be too: ``embedding_scale: True``.
Shapes as in ``layers/sequence_batch.py``.

Reference:
    Ruihong Qiu, Zi Huang, Tong Chen, Hongzhi Yin. "Exploiting Positional Information for
    Session-based Recommendation." ACM Transactions on Information Systems 2021.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from recbole_pos.layers.hooks import Dimensions, InputPosition
from recbole_pos.layers.sequence_batch import SequenceBatch


class PositionEncoding(InputPosition):
    """Base of x + P: item vectors x [m, d] plus encodings P [m, d] of positions only.

    A subclass defines :meth:`rows`. n is the maximum length, d the hidden size, l the number of
    interactions of a session, and pos the number of older ones than a given one.
    """

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.max_length = dimensions.max_length

    def rows(self, forward: Tensor, backward: Tensor, length: Tensor | None = None) -> Tensor:
        """Return the encodings P of interactions, which depend on the following counts only.

            session     A  B  C
            forward     0  1  2        number of older interactions
            backward    2  1  0        number of newer interactions
            length      3  3  3        number of all interactions

        Args:
            forward, backward: [...] int64 counts.
            length: [...] int64. Most models give None, for forward + backward + 1. PosRec, which
                encodes an item once even if it occurs twice in a session, gives the length.

        Returns:
            [..., d] a vector of the hidden size d for each interaction.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return x + P [m, d]; ``batch`` counts the older (``index``) and newer interactions."""
        return x + self.rows(batch.index, batch.age)


def make_table(dimensions: Dimensions, num_rows: int, width: int) -> nn.Parameter:
    """Return a learned table [num_rows, width], normal with the deviation of the model's tables."""
    table = nn.Parameter(torch.empty(num_rows, width))
    nn.init.normal_(table, std=dimensions.initializer_range)
    return table


def make_sinusoids(position: Tensor, width: int, size: float, exchanged: bool = False) -> Tensor:
    """Return a table of sines and cosines that encodes positions (Vaswani et al., 2017, 3.5).

    Column 2i is sin(p / 10000^(2i / size)), and column 2i + 1 is the cosine of the same angle.

    Args:
        position: [n] float64 positions p.
        width: number of columns; an odd number ends with a column 2i.
        size: by which frequencies fall from column to column; as a rule the hidden size.
        exchanged: whether cosines are in the even columns and sines in the odd ones.

    Returns:
        [n, width] float64.
    """
    column = torch.arange(width, dtype=torch.float64)
    is_even = column % 2 == 0
    first_of_pair = column - column % 2  # 2i for both columns of a pair
    angle = position[:, None] * 10000.0 ** (-first_of_pair / size)
    return torch.where(is_even != exchanged, angle.sin(), angle.cos())


class CountedEncoding(PositionEncoding):
    """Base of encodings that are rows of a table, found by counting interactions.

    What is counted is one or two of:

        forward     pos, the number of older interactions
        backward    l - pos - 1, the number of newer interactions
        newest      the same, but counted from the last row of the table upwards: n - 1 for the
                    newest interaction
        length      l - 1, so that a session of one interaction has row 0

    Attributes:
        counts: what is counted. Each count has a slice of the table's columns for itself.
        added: whether P is the sum of the slices, with d columns each. Else slices stand side by
            side and have d columns together; of two halves of 5 columns the first has 3.
        widths: number of columns of each slice.
        weight: [n, sum of widths] the table.
    """

    counts: tuple[str, ...] = ("forward",)
    added: ClassVar[bool] = False
    weight: Tensor

    def __init__(self, dimensions: Dimensions) -> None:
        """Compute the sizes of the vectors that the encoding of an interaction is made of.

        The encoding has d numbers. It is made of one vector for each of ``counts``, such as forward
        (how many interactions are older) and backward (how many are newer). If the vectors are
        added up (``added``), each has d numbers. Otherwise they are put side by side, so that for
        d = 5 the first has 3 numbers and the second 2.

        Args:
            dimensions: sizes of the model; d is its ``hidden_size``.
        """
        super().__init__(dimensions)
        d, num_slices = dimensions.hidden_size, len(self.counts)
        parts = torch.arange(d).tensor_split(num_slices)  # d columns in parts of about equal size
        self.widths = [d] * num_slices if self.added else [len(part) for part in parts]

    def rows(self, forward: Tensor, backward: Tensor, length: Tensor | None = None) -> Tensor:
        """Return the encodings of interactions, which are rows of one or two tables.

        The class attribute ``counts`` names what is counted, such as ("forward", "length"). Each
        count has a table of its own. For tables of n = 5 rows, the three interactions of a session
        get these rows:

            forward     0  1  2        number of older interactions
            backward    2  1  0        number of newer interactions
            newest      2  3  4        n - 1 less the number of newer interactions
            length      2  2  2        number of all interactions, less 1

        For ("forward", "length") the second interaction gets row 1 of the first table and row 2 of
        the second. These two vectors are added up if ``added``, and else put side by side.

        Args:
            forward: [...] int64 number of older interactions of the session.
            backward: [...] int64 number of newer interactions.
            length: [...] int64 number of interactions of the session; None for
                forward + backward + 1.

        Returns:
            [..., d] one vector for each number in ``forward``.
        """
        if length is None:
            length = forward + backward + 1
        row_numbers = {
            "forward": forward,
            "backward": backward,
            "newest": self.max_length - 1 - backward,  # max_length is n
            "length": length - 1,
        }
        # ``weight`` has the tables side by side, and ``widths`` their numbers of columns
        tables = self.weight.split(self.widths, dim=-1)  # [n, width] each
        vectors = []
        for count, table in zip(self.counts, tables, strict=True):
            vectors.append(nn.functional.embedding(row_numbers[count], table))  # [..., width]
        return torch.stack(vectors).sum(0) if self.added else torch.cat(vectors, dim=-1)


class FixedEncoding(CountedEncoding):
    """Base of encodings by sines and cosines, without parameters."""

    def __init__(self, dimensions: Dimensions) -> None:
        """Compute ``weight``, the fixed tables of sines and cosines that encodings are read from.

        ``counts`` names one or two things that are counted, such as ("forward", "backward"): how
        many interactions are older, and how many are newer. Each count has a table of its own, with
        one row for each of the numbers 0, 1, 2, ... ``weight`` has the tables side by side.

        Args:
            dimensions: sizes of the model; tables have n = ``max_length`` rows.
        """
        super().__init__(dimensions)  # sets ``widths``, the number of columns of each table
        row = torch.arange(dimensions.max_length, dtype=torch.float64)  # 0 to n - 1
        # :meth:`make_slice` returns the table of a count
        tables = []
        for count, width in zip(self.counts, self.widths, strict=True):
            tables.append(self.make_slice(count, row, width, dimensions.hidden_size))  # [n, width]
        weight = torch.cat(tables, dim=-1).to(torch.get_default_dtype())
        # fixed and easy to compute: a checkpoint need not have it
        self.register_buffer("weight", weight, persistent=False)

    def make_slice(self, count: str, row: Tensor, width: int, d: int) -> Tensor:
        """Return a table of sines and cosines whose row k encodes the number k of interactions.

        In the table for the count ``forward``, the number of older interactions, row 3 is the
        encoding of an interaction that has three older ones.

        Args:
            count: what is counted: ``forward`` (older interactions), ``backward`` (newer ones) or
                ``length`` (all). Their tables are the same here, but not in all subclasses.
            row: [n] float64 numbers of the rows: 0, 1, 2, ...
            width: number of columns of the table.
            d: hidden size of the model, by which frequencies fall from column to column.

        Returns:
            [n, width] float64.
        """
        return make_sinusoids(row, width, d)


class LearnedEncoding(CountedEncoding):
    """Base of encodings from learned tables."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__(dimensions)
        self.weight = make_table(dimensions, self.max_length, sum(self.widths))


class LearnedPosition(LearnedEncoding):
    """Learned absolute positions, x + P (Kang and McAuley, SASRec, 2018).

    P = T[n - 1 - age], or T[pos] if positions are counted from the oldest interaction.

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

    P = S(n - 1 - age), or S(pos) if positions are counted from the oldest interaction. Its entries
    are of size 1, so item vectors should be too: set ``embedding_scale: True``. From the oldest
    interaction it is ``spe``; from the newest it has the information of ``rspe``, counted down.

    Args:
        position_from: see :class:`LearnedPosition`.
    """

    options = ("position_from",)

    def __init__(self, dimensions: Dimensions, *, position_from: str) -> None:
        super().__init__(dimensions)
        self.counts = ("forward",) if position_from == "oldest" else ("newest",)


class SPE(FixedEncoding):
    """Sines and cosines of the position from the start (Qiu et al., PosRec, equation 1).

    P = S(pos).
    """


class LPE(LearnedEncoding):
    """Learned, by the position from the start (Qiu et al., PosRec, section 5.3).

    P = T[pos].
    """


class RSPE(FixedEncoding):
    """Sines and cosines of the position from the end (Qiu et al., PosRec, equation 4).

    P = S(age).
    """

    counts = ("backward",)


class LRPE(LearnedEncoding):
    """Learned, by the position from the end (Qiu et al., PosRec, section 5.3).

    P = T[age].
    """

    counts = ("backward",)


class ASPE(FixedEncoding):
    """SPE plus RSPE with sine and cosine exchanged (Qiu et al., PosRec, equations 16 and 17).

    P = S(pos) + S'(age), where S' is S with sin and cos exchanged.

    With w = 10000^(-2i/d), columns 2i and 2i + 1 are r sin(u) and r cos(u) with
    r = 2 cos(pi/4 - (l - 1) w / 2) and u = pos w + pi/4 - (l - 1) w / 2: an SPE whose size and
    start depend on the length. So k interactions later it is turned by k w in every session.
    Appendix A denies that, by a sign lost in equation 18: sin(L - X) = sin L cos X - cos L sin X.
    What does fail is equation 15, which takes the turn from the encoding of k itself.
    """

    counts = ("forward", "backward")
    added = True

    def make_slice(self, count: str, row: Tensor, width: int, d: int) -> Tensor:
        return make_sinusoids(row, width, d, exchanged=count == "backward")


class ALPE(LearnedEncoding):
    """The sum of LPE and LRPE, a table each (Qiu et al., PosRec, section 5.3).

    P = T[pos] + T'[age].
    """

    counts = ("forward", "backward")
    added = True


class SPE2D(FixedEncoding):
    """Half SPE of the position, half SPE of the length (Qiu et al., PosRec, equation 24).

    P = S(pos) || S(l), each S made for d / 2 columns.

    Frequencies fall twice as fast as those of SPE, so that each half has all of their range. The
    paper counts it as aware of neither end, like ASPE; but its first half is the same exactly for
    interactions at the same position, which is definition 3.1: it is forward-aware.
    """

    counts = ("forward", "length")

    def make_slice(self, count: str, row: Tensor, width: int, d: int) -> Tensor:
        return make_sinusoids(row + 1 if count == "length" else row, width, d / 2)


class LPE2D(LearnedEncoding):
    """Half learned by the position, half by the length (Qiu et al., PosRec, section 5.3).

    P = T[pos] || T'[l - 1], of d / 2 columns each.

    The paper leaves open what it learns. These are the halves of equation 24 with as many
    parameters as LPE; a vector for every pair of position and length would be n / 2 times as many.
    """

    counts = ("forward", "length")


class DPE(FixedEncoding):
    """Half SPE, half RSPE, by the position from both ends (Qiu et al., PosRec, equation 5).

    P = S(pos) || S(age), the first d / 2 columns of each.

    The first columns are those with the fast frequencies.
    """

    counts = ("forward", "backward")


class LDPE(LearnedEncoding):
    """Half learned from the start, half from the end (Qiu et al., PosRec, equation 6).

    P = T[pos] || T'[age], of d / 2 columns each.

    Equation 6 puts rows of one [n, d] table into places of d / 2. They are read as its left half by
    pos and its right half by l - pos - 1: that is as many parameters as LPE has, as section 5.3
    says. One half for both ends would be half as many.
    """

    counts = ("forward", "backward")
