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
    """Base of learned lower-triangular [n, n] matrices, which are the identity when fresh."""

    weight: nn.Parameter

    def matrix(self, t: int) -> Tensor:
        """Return the last t rows and columns of the matrix, [t, t]."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Return the product [t, c] of the last t rows and columns with x [t, c]."""
        return self.matrix(len(x)) @ x

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Multiply each sequence by the matrix: position i gets a sum of positions up to i.

        (Nabiev and Frolov, 2026, equations 10 and 11.) A sequence of t interactions uses the last t
        rows and columns, so it is padded at its beginning.

        Args:
            x: [m, h, e] values of all m interactions, history after history.
            batch: the histories.

        Returns:
            [m, h, e] in the same order.
        """
        # In the type of the weights, also under automatic mixed precision. ``product`` multiplies
        # the last t rows and columns of the matrix by a block [t, columns].
        with torch.autocast(x.device.type, enabled=False):
            # "end": all histories end in the last row; time_major: positions are the first axis
            block = batch.pad(x.to(self.weight.dtype), "end", time_major=True)  # [t, b, h, e]
            mixed = self.product(block.flatten(1)).view(block.shape)  # of columns b * h * e
            return batch.unpad(mixed, "end", time_major=True).to(x.dtype)


class FullFactor(Factor):
    """One weight for every pair of positions: n (n + 1) / 2 parameters, row by row."""

    flat_index: Tensor  # of each weight in the [n, n] matrix

    def __init__(self, n: int) -> None:
        """Create the weights on and below the diagonal of an [n, n] matrix, as the identity.

        They are kept row by row: of a matrix [[a, 0], [b, c]] as a, b, c. ``flat_index`` says where
        each is in the matrix read as one row, here 0, 2, 3.

        Args:
            n: number of rows and columns.
        """
        super().__init__()
        self.n = n
        row, column = torch.tril_indices(n, n)
        self.register_buffer("flat_index", row * n + column, persistent=False)
        self.weight = nn.Parameter((row == column).to(torch.get_default_dtype()))

    def matrix(self, t: int) -> Tensor:
        """Return the last t rows and columns of the matrix, [t, t], zero above the diagonal.

        Args:
            t: number of rows and columns, up to n.
        """
        # ``weight`` has the learned numbers row by row, and ``flat_index`` the place of each in the
        # whole [n, n] matrix read as one row. Rows have 1, 2, 3, ... weights, so r (r + 1) / 2
        # weights stand before row r.
        first_row = self.n - t
        start = first_row * (first_row + 1) // 2

        # put the weights of the last t rows into a matrix [t, n], which is read as one row
        flat_index = self.flat_index[start:] - first_row * self.n
        rows = self.weight.new_zeros(t * self.n).index_copy(0, flat_index, self.weight[start:])
        return rows.view(t, self.n)[:, first_row:]


class ToeplitzFactor(Factor):
    """One weight for each of the lags 0 to ``band`` - 1 (equation 10 with u_ik = w_(k-i))."""

    def __init__(self, n: int, band: int | None) -> None:
        """Create the weights of the lags 0 to ``band`` - 1, as the identity: 1 at lag 0.

        Args:
            n: size of the matrix.
            band: number of lags that have a weight, of which there are n at most; None for n.
        """
        super().__init__()
        lag = torch.arange(n if band is None else min(band, n))
        self.weight = nn.Parameter((lag == 0).to(torch.get_default_dtype()))

    def matrix(self, t: int) -> Tensor:
        return toeplitz_matrix(self.weight, t)

    def product(self, x: Tensor) -> Tensor:
        return toeplitz_product(self.weight, x)


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
        """Build the factors U and L of the kernel, [n, n] each and the identity when fresh.

        A factor mixes each position with older ones. ``_build_factor`` returns None for the
        identity, which leaves keys or values as they are.

        Args:
            dimensions: sizes of the model; n is ``max_length``.
            kernel_u, kernel_l: form of U, acting on keys, and of L, acting on values: toeplitz,
                full, or identity for none.
            kernel_u_shared, kernel_l_shared: whether all layers have the same.
            kernel_band: lags that a Toeplitz factor has; None for all.
        """
        super().__init__()
        n = dimensions.max_length
        self.U = _build_factor(kernel_u, n, kernel_band)
        self.L = _build_factor(kernel_l, n, kernel_band)
        self.shared = {"U": kernel_u_shared, "L": kernel_l_shared}

    def share_with(self, first: PositionalKernel) -> None:
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


# Above this length a Toeplitz product is cheaper by FFT (results/speed_positions.md, on CPU).
FFT_LENGTH = 768


def toeplitz_matrix(weight: Tensor, t: int) -> Tensor:
    """Return the matrix that has ``weight[i - j]`` at row i and column j, and zero elsewhere.

    For weights a, b and t = 3 it is [[a, 0, 0], [b, a, 0], [0, b, a]].

    Args:
        weight: [lags] weight of each distance i - j from 0 on.
        t: number of rows and columns.

    Returns:
        [t, t].
    """
    # No index is used, so that the gradient is a plain sum. The weights of a row are 0 0 a b 0, the
    # same in each of t rows. Read with one number more in a row, each row shifts by one column:
    #     0 0 a b 0 0        a 0 0   (its first t columns, reversed)
    #     0 a b 0 0 0   ->   b a 0
    #     a b 0 . . .        0 b a
    padded = F.pad(weight, (t - 1, t))[: 2 * t - 1]
    shifted = F.pad(padded.expand(t, -1).reshape(-1), (0, t)).view(t, 2 * t)
    return shifted[:, :t].flip(1)


def toeplitz_product(weight: Tensor, x: Tensor) -> Tensor:
    """Return the causal convolution out[i] = sum over lags s of weight[s] x[i - s].

    Long sequences are halved. Each half is convolved by itself, and an FFT of the older half is
    added to the newer one: one FFT of both would carry rounding back in time.

    Args:
        weight: [band] weights of the lags from 0 on.
        x: [t, c], the oldest interaction first.

    Returns:
        [t, c] in the same order.
    """
    t, c = x.shape
    # up to the length FFT_LENGTH, or with few lags, a plain product is faster than an FFT
    if t <= FFT_LENGTH or len(weight) <= FFT_LENGTH // 2:
        return toeplitz_matrix(weight, t) @ x

    # Each half by itself: both as columns of one product, the newer one filled up if t is odd. The
    # first c columns are the older half, the others the newer one.
    half = (t + 1) // 2
    older = x[:half]
    newer = F.pad(x[half:], (0, 0, 0, 2 * half - t))
    within = toeplitz_product(weight, torch.cat((older, newer), 1))

    # What the older half adds to the newer one, as a product of spectra. That is a circular
    # convolution of length 2 * half: only rows below half wrap around, and these are not read.
    spectrum = torch.fft.rfft(weight[:t], 2 * half)
    from_older = torch.fft.irfft(torch.fft.rfft(older.t(), 2 * half) * spectrum, 2 * half)
    return torch.cat((within[:, :c], within[: t - half, c:] + from_older[:, half:t].t()))
