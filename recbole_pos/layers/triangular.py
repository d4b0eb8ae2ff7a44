"""Products of lower-triangular matrices [t, t] with x [t, c] that skip blocks of zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows of a block: smaller blocks skip more zeros, larger ones make faster products.
BLOCK = {"cpu": 64, "cuda": 512}
# Above this length a Toeplitz product is cheaper by FFT (results/speed_positions.md, on CPU).
FFT_LENGTH = 768


class _TriangularProduct(torch.autograd.Function):
    """matrix @ x in blocks of rows; only blocks that touch the band are read or written."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, x: Tensor, band: int) -> Tensor:
        ctx.save_for_backward(matrix, x)
        ctx.band = band
        out = torch.empty_like(x)
        for rows, columns in _blocks(matrix, band):
            torch.mm(matrix[rows, columns], x[columns], out=out[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients to the matrix [t, t], within its band, and to x [t, c]."""
        matrix, x = ctx.saved_tensors
        grad = grad.contiguous()
        grad_matrix = torch.zeros_like(matrix) if ctx.needs_input_grad[0] else None
        grad_x = torch.empty_like(x)
        for rows, columns in _blocks(matrix, ctx.band):
            if grad_matrix is not None:
                torch.mm(grad[rows], x[columns].t(), out=grad_matrix[rows, columns])
            # rows of the matrix that are not zero in the columns ``rows``
            nonzero = slice(rows.start, min(rows.stop + ctx.band - 1, len(matrix)))
            torch.mm(matrix[nonzero, rows].t(), grad[nonzero], out=grad_x[rows])
        return grad_matrix, grad_x, None


def block_rows(device: torch.device) -> int:
    """Return how many rows a block has on a device."""
    return BLOCK.get(device.type, BLOCK["cuda"])


def _blocks(matrix: Tensor, band: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each block, and the columns that are not all zero in them."""
    t, size = len(matrix), block_rows(matrix.device)
    for start in range(0, t, size):
        end = min(start + size, t)
        yield slice(start, end), slice(max(start - band + 1, 0), end)


def triangular_product(matrix: Tensor, x: Tensor, band: int) -> Tensor:
    """Return matrix @ x for a lower-triangular matrix, zero from the ``band``-th subdiagonal on.

    Row i of the result [t, c], and of its derivative, depends on rows up to i only. The gradient to
    the zeros of ``matrix`` is not defined: it may be 0 or not.
    """
    if torch.compiler.is_compiling():  # one graph for any number of blocks
        return matrix @ x
    return _TriangularProduct.apply(matrix, x, band)


def toeplitz_matrix(weight: Tensor, t: int) -> Tensor:
    """Return [t, t] with ``weight[i - j]`` at [i, j]; zero above the diagonal and past the band."""
    # The same weights in every row, read as rows that are one longer, shift by a column per row.
    # No index is used, so that the gradient is a plain sum.
    padded = F.pad(weight, (t - 1, t))[: 2 * t - 1]
    shifted = F.pad(padded.expand(t, -1).reshape(-1), (0, t)).view(t, 2 * t)
    return shifted[:, :t].flip(1)


def toeplitz_product(weight: Tensor, x: Tensor) -> Tensor:
    """Return the causal convolution out[i] = sum over lags s of weight[s] x[i - s].

    Long sequences are halved. Each half is convolved by itself, and an FFT of the older half is
    added to the newer one: one FFT of both would carry rounding back in time.

    Args:
        weight: [band] weights of the lags from 0 on.
        x: [t, c], the oldest interaction first; the result has the same shape and order.
    """
    t, c = x.shape
    if t <= FFT_LENGTH or len(weight) <= FFT_LENGTH // 2:
        return triangular_product(toeplitz_matrix(weight, t), x, min(len(weight), t))
    half = (t + 1) // 2
    older = x[:half]
    newer = F.pad(x[half:], (0, 0, 0, 2 * half - t))
    # both halves as columns of one product
    within = toeplitz_product(weight, torch.cat((older, newer), 1))
    # circular, of length 2 * half: only rows below half wrap around, and these are not read
    spectrum = torch.fft.rfft(weight[:t], 2 * half)
    from_older = torch.fft.irfft(torch.fft.rfft(older.t(), 2 * half) * spectrum, 2 * half)
    return torch.cat((within[:, :c], within[: t - half, c:] + from_older[:, half:t].t()))
