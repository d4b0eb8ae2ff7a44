"""Attention whose weights depend on positions only: PARec, FPARec and fixed patterns.

The weights do not depend on the batch. With unnormalised weights A (zero above the diagonal) and
``is_real``, 1 at interactions and 0 at padding, the normalised attention is

    o = (A (is_real * v)) / (A is_real)

which is one product of [t, t] with [t, b * e] per head; no [b, t, t] tensor exists. Sequences are
aligned at the end: the newest interaction has the last row of the position matrix, and a batch uses
the last t rows and columns. Shapes as in ``layers/sequence_batch.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recbole_pos.layers.attention import Dropout, future_mask
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch


class PositionalAttention(AttentionPosition):
    """Base of o_i = sum_j A_ij v_j / sum_j A_ij over the real interactions j <= i.

    Attributes:
        divides_by_sum: whether sums of values are divided by the sum of their weights A. Without
            it o_i = sum_j A_ij v_j, for weights that are a softmax already.
    """

    projections = ("value",)
    divides_by_sum = True

    def weights(self, t: int) -> Tensor:
        """Return A of the newest t positions, [h or 1, t, t], at least 0 and 0 for the future."""
        raise NotImplementedError

    def attend(
        self, query: None, key: None, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Return o_i = sum_j A_ij v_j / sum_j A_ij over j <= i, with weights A of positions only.

        :meth:`weights` returns A, which is the same for all histories; the newest interaction of
        each has the last row of A. If weights are a softmax already, sums are not divided by their
        sum (``divides_by_sum`` is False).

        Args:
            query, key: None, as they are not needed.
            value: [m, h, e] values v of all m interactions, history after history.
            batch: the histories.
            dropout: dropout on the weights; the divisor is without it.

        Returns:
            [m, h, e], history after history.
        """
        with torch.autocast(value.device.type, enabled=False):  # exp needs the range of float32
            weights = self.weights(batch.block_width("end"))  # A, [h or 1, t, t]
            # A block with a row for each position (``time_major``): the newest interaction of every
            # history is in the last row, and zeros stand before shorter histories ("end").
            block = batch.pad(value.to(weights.dtype), "end", time_major=True)  # [t, b, h, e]
            mixed = self._mix(dropout(weights), block)  # A times the block, head by head
            out = batch.unpad(mixed, "end", time_major=True)  # sum_j A_ij v_j, [m, h, e]
            if not self.divides_by_sum:
                return out
            total = self._sum_weights(weights, batch)
            # not 0: all weights of a short history may underflow beside those of a long one
            return out / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]

    @staticmethod
    def _sum_weights(weights: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the sum over j <= i of A_ij for each interaction i of its history.

        Args:
            weights: [h or 1, t, t] A.
            batch: the m interactions.

        Returns:
            [m, h or 1].
        """
        if batch.is_full:  # all histories have t interactions: a sum is that of a row of A
            row = batch.column("end")  # [m], the row of A that belongs to an interaction
            return weights.sum(-1)[:, row].t()
        # the product of A and a block with 1 at interactions and 0 at padding
        ones = weights.new_ones(batch.items.size(0))
        is_real = batch.pad(ones, "end", time_major=True)  # [t, b]
        total = (weights @ is_real).flatten(1)  # [h or 1, t b]
        slots = batch.slots("end", time_major=True)  # [m], where each interaction is among t b
        return total[:, slots].t()

    @staticmethod
    def _mix(weights: Tensor, block: Tensor) -> Tensor:
        """Return the product of weights and values along the sequence, head by head.

        Args:
            weights: [h or 1, t, t] weights of each head, or the same for all heads.
            block: [t, b, h, e] values.

        Returns:
            [t, b, h, e].
        """
        t, b, h, e = block.shape
        if weights.size(0) == 1:  # one product for all heads
            return (weights[0] @ block.view(t, b * h * e)).view(block.shape)
        per_head = weights @ block.permute(2, 0, 1, 3).reshape(h, t, b * e)
        return per_head.view(h, t, b, e).permute(1, 2, 0, 3)


class LearnedAttention(PositionalAttention):
    """Base of PARec and FPARec: A = exp(R / sqrt(e)) for a learned R.

    R has a number for each pair of positions, [n, n] for each head. The papers have one head, whose
    size e is d.

    Args:
        dimensions: sizes of the model.
        positional_mask: equation 6 writes Mask(softmax(R / sqrt(e))) v: softmax over all n
            positions, then future ones zeroed, so rows sum to less than one. ``after_softmax``
            does that. ``before_softmax`` (default, as in the authors' public code) removes future
            positions and padding first, so each row sums to one over the interactions that exist.
    """

    def __init__(self, dimensions: Dimensions, *, positional_mask: str) -> None:
        super().__init__()
        self.max_length = dimensions.max_length  # n
        self.scale = 1 / math.sqrt(dimensions.head_size)  # 1 / sqrt(e)
        self.divides_by_sum = positional_mask == "before_softmax"

    def logits(self, num_queries: int, num_keys: int) -> Tensor:
        """Return R / sqrt(e) from the newest queries (rows) to the newest keys.

        Returns:
            [h, num_queries, num_keys].
        """
        raise NotImplementedError

    def weights(self, t: int) -> Tensor:
        """Return the weights A with which the newest t positions read each other, [h, t, t].

        R is learned, with a number for each pair of the n positions, and e is the size of a head.
        ``logits(queries, keys)`` returns R / sqrt(e) from the newest positions to the newest ones.
        A is 0 for keys that are newer than the query. With ``positional_mask: before_softmax`` it
        is exp(R / sqrt(e)) up to a factor of each row, since :meth:`attend` divides by the sum of
        the weights (``divides_by_sum``), which makes a softmax of them. With ``after_softmax`` it
        is a softmax over all n positions, of which the newest t are read.

        Args:
            t: number of positions, as many as the longest history of the batch has interactions.
        """
        if not self.divides_by_sum:  # after_softmax
            whole_rows = self.logits(t, self.max_length).softmax(-1)  # [h, t, n]
            return whole_rows[..., -t:].tril()
        logits = self.logits(t, t)
        logits = logits.masked_fill(future_mask(t, logits.device), -torch.inf)
        # less the maximum of each row, which keeps exp in range and cancels in the division
        return (logits - logits.amax(-1, keepdim=True).detach()).exp()


class PositionMatrix(LearnedAttention):
    """PARec: R is a free [n, n] matrix, n^2 parameters a layer (Luo et al., FPARec, equation 6)."""

    options = ("positional_mask",)

    def __init__(self, dimensions: Dimensions, *, positional_mask: str) -> None:
        """Create R [h, n, n], a number for each pair of positions, by Xavier's rule."""
        super().__init__(dimensions, positional_mask=positional_mask)
        n = dimensions.max_length
        self.R = nn.Parameter(torch.empty(dimensions.n_heads, n, n))
        for matrix in self.R:
            nn.init.xavier_uniform_(matrix)

    def logits(self, num_queries: int, num_keys: int) -> Tensor:
        return self.R[:, -num_queries:, -num_keys:] * self.scale


class FactorizedPositionMatrix(LearnedAttention):
    """FPARec: R = R1 R2^T with [n, k] factors, 2kn parameters (Luo et al., FPARec, equation 7).

    Args:
        positional_rank: k.
        positional_mask: see :class:`LearnedAttention`.
    """

    options = ("positional_rank", "positional_mask")

    def __init__(
        self, dimensions: Dimensions, *, positional_rank: int, positional_mask: str
    ) -> None:
        """Create the factors R1 and R2, [h, n, k] each, by Xavier's rule for each head.

        Args:
            dimensions: sizes of the model.
            positional_rank: k, the rank of R = R1 R2^T.
            positional_mask: whether newer positions are masked ``before_softmax`` or
                ``after_softmax``.
        """
        super().__init__(dimensions, positional_mask=positional_mask)
        shape = (dimensions.n_heads, dimensions.max_length, positional_rank)
        self.R1 = nn.Parameter(torch.empty(shape))
        self.R2 = nn.Parameter(torch.empty(shape))
        for factor in (*self.R1, *self.R2):
            nn.init.xavier_uniform_(factor)

    def logits(self, num_queries: int, num_keys: int) -> Tensor:
        keys = self.R2[:, -num_keys:]
        return self.R1[:, -num_queries:] @ keys.transpose(1, 2) * self.scale


class FixedPattern(PositionalAttention):
    """Base of the handcrafted patterns of the FPARec paper's ablation (section 4.4, appendix B)."""

    A: Tensor

    def __init__(self, dimensions: Dimensions) -> None:
        """Compute the fixed weights A [1, n, n], zero above the diagonal, from :meth:`pattern`.

        Row i has the weights with which position i reads itself and older positions.

        Args:
            dimensions: sizes of the model; n is its ``max_length``.
        """
        super().__init__()
        n = dimensions.max_length
        position = torch.arange(1, n + 1)  # i and j of the appendix count from 1
        pattern = self.pattern(position[:, None], position[None, :]).to(torch.get_default_dtype())
        self.register_buffer("A", pattern.tril().unsqueeze(0), persistent=False)

    def pattern(self, i: Tensor, j: Tensor) -> Tensor:
        """Return a_ij for query position i and key position j, broadcastable to [n, n]."""
        raise NotImplementedError

    def weights(self, t: int) -> Tensor:
        return self.A[:, -t:, -t:]


class AverageAttention(FixedPattern):
    """a_ij = 1 (Luo et al., FPARec, equation 12)."""

    def pattern(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.ones_like(i * j)


class LinearAnnealing(FixedPattern):
    """a_ij = j (Luo et al., FPARec, equation 13)."""

    def pattern(self, i: Tensor, j: Tensor) -> Tensor:
        return j.expand(i.size(0), -1)


class ExponentialAnnealing(FixedPattern):
    """a_ij = e^(j - i) (Luo et al., FPARec, equation 14)."""

    def pattern(self, i: Tensor, j: Tensor) -> Tensor:
        return (j - i).clamp(max=0).to(torch.float64).exp()
