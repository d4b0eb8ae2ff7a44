"""The positional kernel C = UL inside attention (Nabiev and Frolov, section 3).

Equation 9 reads softmax( M + q k^T U / sqrt(d) ) L v, with U upper and L lower triangular. Since
(q k^T) U = q (U^T k)^T, it is scaled-dot-product attention on q, U^T k and L v, and both factors
are lower-triangular matrices that mix a history with its past (U^T for keys, L for values). Shapes
as in ``layers/sequence_batch.py``.

Rows and columns count from the newest interaction, as with the authors' padding on the left: a
sequence of t interactions uses the last t rows and columns. For a Toeplitz factor that makes no
difference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch


class Factor(nn.Module):
    """Base of learned lower-triangular [n, n] matrices F, which are the identity when fresh.

    F is U^T for keys and L for values. Row i of it has the weights with which position i sums
    itself and older positions.
    """

    weight: nn.Parameter

    def matrix(self, t: int) -> Tensor:
        """Return the last t rows and columns of F, [t, t]."""
        raise NotImplementedError

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Multiply each history by F: interaction i gets the sum over j <= i of F_ij x_j.

        F is a learned lower-triangular matrix with a row and a column for each position. The newest
        interaction always has the last row and column. So histories of at most t interactions need
        only the last t rows and columns of F, which ``matrix(t)`` returns (Nabiev and Frolov, 2026,
        equations 10 and 11).

        Args:
            x: [m, h, e] keys or values of all m interactions, history after history.
            batch: the histories.

        Returns:
            [m, h, e] in the same order.
        """
        # automatic mixed precision would compute the product in half precision
        with torch.autocast(x.device.type, enabled=False):
            # All histories side by side, position by position: row i of the block has interaction i
            # of every history. Zeros stand before shorter histories, so that all end in row t - 1.
            block = batch.pad(x.to(self.weight.dtype), "end", time_major=True)  # [t, b, h, e]
            columns = block.flatten(1)  # [t, b h e]: one product for all histories and heads
            mixed = (self.matrix(columns.size(0)) @ columns).view(block.shape)
            return batch.unpad(mixed, "end", time_major=True).to(x.dtype)


class FullFactor(Factor):
    """A matrix with one weight for every pair of positions: n (n + 1) / 2 parameters.

    Attributes:
        weight: the learned numbers on and below the diagonal, row by row: a, b, c of the matrix
            [[a, 0], [b, c]].
    """

    def __init__(self, n: int) -> None:
        """Create a learned lower-triangular matrix [n, n], which at first is the identity."""
        super().__init__()
        self.n = n
        row, column = torch.tril_indices(n, n)
        self.weight = nn.Parameter((row == column).to(torch.get_default_dtype()))

    def matrix(self, t: int) -> Tensor:
        # the row and the column of each weight: 0, 1, 1 and 0, 0, 1 for n = 2
        row, column = torch.tril_indices(self.n, self.n, device=self.weight.device)
        zeros = self.weight.new_zeros(self.n, self.n)
        return zeros.index_put((row, column), self.weight)[-t:, -t:]


class ToeplitzFactor(Factor):
    """A matrix with one weight for each lag i - j (equation 10 with u_ik = w_(k-i))."""

    def __init__(self, n: int, band: int | None) -> None:
        """Create a learned [n, n] matrix with one weight for each lag, at first the identity.

        The lag is how much older a position (column) is than the one that reads it (row). So the
        fresh weights are 1 for lag 0, and 0 for all others.

        Args:
            n: size of the matrix.
            band: number of lags that have a weight, from 0 on, at most n; None for n. Older
                positions are not read.
        """
        super().__init__()
        lag = torch.arange(n if band is None else min(band, n))
        self.weight = nn.Parameter((lag == 0).to(torch.get_default_dtype()))

    def matrix(self, t: int) -> Tensor:
        return toeplitz_matrix(self.weight, t)


class PositionalKernel(AttentionPosition):
    """Learned kernel C = UL over positions, on logits and values (Nabiev and Frolov, equation 9).

    Fresh factors are the identity, so a new model equals its backbone. Section 3.4 gives each layer
    its U and shares one L; section 6.3 and Table 4 call a variant with both per layer the default.
    Both are here: the defaults are those of section 3.4, with BK + K(K + 1)/2 parameters for B
    layers of length K.

    Args:
        dimensions: sizes of the model; all heads of a layer have the same factors.
        kernel_u: U, acting on the logits: toeplitz, full, or identity for none.
        kernel_l: L, acting on the values: the same choices.
        kernel_u_shared: one U for all layers.
        kernel_l_shared: one L for all layers.
        kernel_band: lags that a Toeplitz factor has; None for all.
    """

    options = ("kernel_u", "kernel_l", "kernel_u_shared", "kernel_l_shared", "kernel_band")

    def __init__(
        self,
        dimensions: Dimensions,
        *,
        kernel_u: str,
        kernel_l: str,
        kernel_u_shared: bool,
        kernel_l_shared: bool,
        kernel_band: int | None,
    ) -> None:
        """Build the factors U and L of one layer, [n, n] each and the identity when fresh.

        A factor mixes each position with older ones: U the keys of attention, L its values.

        Args:
            dimensions: sizes of the model; n is ``max_length``.
            kernel_u, kernel_l: form of U and of L. A ``toeplitz`` matrix has a weight for each
                distance of two positions, a ``full`` one for each pair of positions; with
                ``identity`` keys or values are not mixed.
            kernel_u_shared, kernel_l_shared: whether all layers have the same U, or the same L;
                :meth:`share_with` then replaces this one by that of the first layer.
            kernel_band: number of distances, from 0 on, for which a Toeplitz matrix has a weight;
                None for all.
        """
        super().__init__()
        n = dimensions.max_length
        self.U = _build_factor(kernel_u, n, kernel_band)  # None for the identity
        self.L = _build_factor(kernel_l, n, kernel_band)
        self.shared = {"U": kernel_u_shared, "L": kernel_l_shared}

    def share_with(self, first: PositionalKernel) -> None:
        """Replace the factors that all layers share by those of the first layer.

        Args:
            first: the same scheme in the first layer.
        """
        for name, is_shared in self.shared.items():  # the factors U and L
            if is_shared:
                setattr(self, name, getattr(first, name))

    def mix_keys(self, k: Tensor, batch: SequenceBatch) -> Tensor:
        return k if self.U is None else self.U(k, batch)

    def mix_values(self, v: Tensor, batch: SequenceBatch) -> Tensor:
        return v if self.L is None else self.L(v, batch)


def _build_factor(kind: str, n: int, band: int | None) -> Factor | None:
    """Build a factor of a kind: toeplitz or full; return None for the identity."""
    if kind == "toeplitz":
        return ToeplitzFactor(n, band)
    return FullFactor(n) if kind == "full" else None


def toeplitz_matrix(weight: Tensor, t: int) -> Tensor:
    """Return the matrix that has ``weight[i - j]`` at row i and column j, and zero elsewhere.

    For weights a, b and t = 3 it is [[a, 0, 0], [b, a, 0], [0, b, a]].

    Args:
        weight: [lags] weight of each lag i - j from 0 on.
        t: number of rows and columns.

    Returns:
        [t, t].
    """
    # An index would be shorter, but its gradient is slow. The weights of the lags 1 - t to t - 1,
    # for t = 3 the five numbers
    by_lag = F.pad(weight, (t - 1, t))[: 2 * t - 1]  # 0 0 a b 0

    # are written t times in one line,
    line = by_lag.expand(t, -1).reshape(-1)  # 0 0 a b 0 0 0 a b 0 0 0 a b 0

    # which is filled up with zeros (here dots), and cut into t rows. A row is longer than the five
    # weights by one, so each row begins one weight later than the row above it:
    #     0 0 a   b 0 0
    #     0 a b   0 0 0
    #     a b 0   . . .
    rows = F.pad(line, (0, t)).view(t, 2 * t)

    # The first t columns, in reverse order, are the matrix.
    return rows[:, :t].flip(1)
