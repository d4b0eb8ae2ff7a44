"""Encodings by the position from the start of a session, from its end, and its length.

Reference:
    Ruihong Qiu, Zi Huang, Tong Chen, Hongzhi Yin. "Exploiting Positional Information for
    Session-based Recommendation." ACM Transactions on Information Systems 2021.

Definitions 3.1 to 3.3 are in ``studies/posrec/encodings.py``.

All but SPE and LPE read how many later interactions there are: of the window, where that is cut off
(``MAX_ITEM_LIST_LENGTH``). That reveals nothing of their items, as padding on the left does not in
the papers' code, so a model stays causal in what it knows of items. But where every interaction of
a window is a query, as in PosSASRec, those in training have any number of later interactions while
the one that predicts has none; PosRec trains on each prefix of a session as its own example.

Entries of the fixed ones are of size 1, so item vectors should be too: ``embedding_scale: True``.
"""

from __future__ import annotations

from torch import Tensor

from recbole_pos.position.additive import FixedEncoding, LearnedEncoding, make_sinusoids


class SPE(FixedEncoding):
    """Sines and cosines of the position from the start (Qiu et al., PosRec, equation 1)."""


class LPE(LearnedEncoding):
    """Learned, by the position from the start (Qiu et al., PosRec, section 5.3)."""


class RSPE(FixedEncoding):
    """Sines and cosines of the position from the end (Qiu et al., PosRec, equation 4)."""

    counts = ("backward",)


class LRPE(LearnedEncoding):
    """Learned, by the position from the end (Qiu et al., PosRec, section 5.3)."""

    counts = ("backward",)


class ASPE(FixedEncoding):
    """SPE plus RSPE with sine and cosine exchanged (Qiu et al., PosRec, equations 16 and 17).

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
    """The sum of LPE and LRPE, a table each (Qiu et al., PosRec, section 5.3)."""

    counts = ("forward", "backward")
    added = True


class SPE2D(FixedEncoding):
    """Half SPE of the position, half SPE of the length (Qiu et al., PosRec, equation 24).

    Frequencies fall twice as fast as those of SPE, so that each half has all of their range. The
    paper counts it as aware of neither end, like ASPE; but its first half is the same exactly for
    interactions at the same position, which is definition 3.1: it is forward-aware.
    """

    counts = ("forward", "length")

    def make_slice(self, count: str, row: Tensor, width: int, d: int) -> Tensor:
        return make_sinusoids(row + 1 if count == "length" else row, width, d / 2)


class LPE2D(LearnedEncoding):
    """Half learned by the position, half by the length (Qiu et al., PosRec, section 5.3).

    The paper leaves open what it learns. These are the halves of equation 24 with as many
    parameters as LPE; a vector for every pair of position and length would be n / 2 times as many.
    """

    counts = ("forward", "length")


class DPE(FixedEncoding):
    """Half SPE, half RSPE, by the position from both ends (Qiu et al., PosRec, equation 5).

    Each half has the first half of SPE's columns, those with the fast frequencies.
    """

    counts = ("forward", "backward")


class LDPE(LearnedEncoding):
    """Half learned from the start, half from the end (Qiu et al., PosRec, equation 6).

    Equation 6 puts rows of one [n, d] table into places of d / 2. They are read as its left half by
    pos and its right half by l - pos - 1: that is as many parameters as LPE has, as section 5.3
    says. One half for both ends would be half as many.
    """

    counts = ("forward", "backward")
