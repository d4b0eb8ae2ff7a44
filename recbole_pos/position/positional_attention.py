"""Attention whose weights depend on positions only: PARec, FPARec, fixed patterns, and an MLP.

The weights do not depend on the batch. With unnormalised weights A (zero above the diagonal) and
``is_real``, 1 at interactions and 0 at padding, the normalised attention (not the MLP) is

    o = (A (is_real * v)) / (A is_real)

which is one product of [t, t] with [t, b * e] per head; no [b, t, t] tensor exists. Sequences are
aligned at the end: the newest interaction has the last row of the position matrix, and a batch uses
the last t rows and columns. Shapes as in ``layers/sequence_batch.py``.

Reference of the MLP (``TokenMixing``), which FPARec is compared with (its section 4.2):
    Ilya Tolstikhin et al. "MLP-Mixer: An all-MLP Architecture for Vision." NeurIPS 2021.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
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
        """Return weighted means of values, o_i = sum_j A_ij v_j / sum_j A_ij over j <= i.

        The weights A depend on positions only, so one matrix serves all histories. It has a row and
        a column for each of the t positions of the longest history, and the newest interaction of
        every history has the last ones: a history of 2 interactions uses the last 2 rows and
        columns. Where the weights are a softmax already, ``divides_by_sum`` is False, and
        o_i = sum_j A_ij v_j.

        Args:
            query, key: None. The layer computes neither, since weights do not depend on them.
            value: [m, h, e] values v of all m interactions, history after history.
            batch: the histories.
            dropout: dropout on the weights; the divisor is without it.

        Returns:
            [m, h, e], history after history.
        """
        with torch.autocast(value.device.type, enabled=False):  # exp needs the range of float32
            # A, [h, t, t], or [1, t, t] for all heads; ``block_width`` is t
            weights = self.weights(batch.block_width("end"))
            # The values of all histories side by side, position by position. Zeros stand before
            # shorter histories, so that all end in the last row.
            block = batch.pad(value.to(weights.dtype), "end", time_major=True)  # [t, b, h, e]
            mixed = self._mix(dropout(weights), block)  # A times the block, head by head
            out = batch.unpad(mixed, "end", time_major=True)  # sum_j A_ij v_j, [m, h, e]
            if self.divides_by_sum:
                out = out / self._sum_weights(weights, batch)[..., None]  # sum_j A_ij, [m, h or 1]
            return out

    @staticmethod
    def _sum_weights(weights: Tensor, batch: SequenceBatch) -> Tensor:
        """Return for each interaction the sum of the weights of those that it reads.

        It reads itself and the older ones of its history, each with a weight that depends on the
        positions of the two. A has a row and a column for each of the t positions of the longest
        history, with 0 for newer positions. Every history ends at the last position. With t = 3 a
        history of 2 interactions has the positions 1 and 2, so the sums of its interactions are
        A_11 and A_21 + A_22, without the column of position 0, where it has none.

        Args:
            weights: [h or 1, t, t] weights A of each head, or the same for all heads.
            batch: the m interactions of b histories.

        Returns:
            [m, h or 1], above 0, so that one can divide by it.
        """
        if batch.is_full:  # all histories have t interactions, so the sums are those of whole rows
            position = batch.column("end")  # [m]
            total = weights.sum(-1)[:, position].t()
        else:
            # a matrix [t, b] with 1 where a history has an interaction at a position, else 0
            ones = weights.new_ones(batch.items.size(0))  # [m]
            is_real = batch.pad(ones, "end", time_major=True)
            # for each history the sum of every row of A over the positions that the history has
            sums = weights @ is_real  # [h or 1, t, b]
            # of these the sums of the m interactions: of each history the rows of its positions
            total = batch.unpad(sums.permute(1, 2, 0), "end", time_major=True)
        # Learned weights of a row are scaled so that the largest is 1. If it is that of a position
        # that a short history lacks, all others may be so small that they are 0 in floating point.
        return total.clamp_min(torch.finfo(total.dtype).tiny)

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
        """Keep the sizes; subclasses create R, the learned numbers of pairs of positions.

        Args:
            dimensions: sizes of the model, with n positions and heads of size e.
            positional_mask: ``before_softmax``: newer positions and padding are left out of the
                softmax, so that weights are divided by the sum of those that are left.
                ``after_softmax``: they are set to 0 after it.
        """
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
        """Return the weights A with which the newest t positions read each other.

        A history can have n positions. A logit is learned for each position that reads, the query,
        and each that it reads, the key. The weights of a query are the softmax of its logits, and
        0 for keys that are newer than it. The option ``positional_mask`` says when they become 0:

        - After the softmax (``divides_by_sum`` is false). It is over all n keys, so the weights
          that stay add up to 1 or less.
        - Before it (``divides_by_sum`` is true), so that these add up to 1. Here the weights
          returned are the numerators of the softmax only: the caller divides by their sum.

        Args:
            t: number of positions, as many as the longest history of the batch has interactions.

        Returns:
            [h, t, t]: row i has the weights of query i, the newest position last.
        """
        # ``logits(t, num_keys)`` returns [h, t, num_keys] the logits of the newest t queries (rows)
        # for the newest ``num_keys`` keys (columns).
        if not self.divides_by_sum:
            all_keys = self.logits(t, self.max_length).softmax(-1)  # [h, t, n]
            return all_keys[..., -t:].tril()  # 0 above the diagonal, for newer keys

        logits = self.logits(t, t)
        logits = logits.masked_fill(future_mask(t, logits.device), -torch.inf)
        # The maximum of each row is subtracted, so that exp does not overflow. The division by the
        # sum gives the same with it.
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
        return self.R1[:, -num_queries:] @ self.R2[:, -num_keys:].transpose(1, 2) * self.scale


class FixedPattern(PositionalAttention):
    """Base of the handcrafted patterns of the FPARec paper's ablation (section 4.4, appendix B)."""

    A: Tensor

    def __init__(self, dimensions: Dimensions) -> None:
        """Compute the fixed weights with which positions read each other (FPARec, appendix B).

        :meth:`pattern` is a formula of a subclass for the weight a_ij with which position i reads
        position j, such as a_ij = j. As in the paper (Luo et al.) positions count from 1. Newer
        positions, j > i, get the weight 0.

        Args:
            dimensions: sizes of the model, with ``max_length`` positions.
        """
        super().__init__()
        position = torch.arange(1, dimensions.max_length + 1)
        pattern = self.pattern(i=position[:, None], j=position[None, :])  # [n, n]
        weights = pattern.to(torch.get_default_dtype()).tril()
        self.register_buffer("A", weights[None], persistent=False)  # [1, n, n], for all heads

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


class TokenMixing(AttentionPosition):
    """Causal token-mixing MLP (Tolstikhin et al. 2021): W2 gelu(W1 X), no attention, no value.

    W1 and W2 are [n, n] lower triangular ("we mask the future positional in token mixing layers"),
    shared by all channels. They have no bias, so padding stays zero and does not reach a real
    interaction.
    """

    projections = ()

    def __init__(self, dimensions: Dimensions) -> None:
        """Create W1 and W2, which mix the positions of a sequence, by Xavier's rule.

        They are [n, n] each, with n the maximum length; :meth:`attend` masks newer positions.

        Args:
            dimensions: sizes of the model; n is its ``max_length``.
        """
        super().__init__()
        n = dimensions.max_length
        self.W1 = nn.Parameter(torch.empty(n, n))
        self.W2 = nn.Parameter(torch.empty(n, n))
        nn.init.xavier_uniform_(self.W1)
        nn.init.xavier_uniform_(self.W2)

    def attend(
        self, query: None, key: None, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Mix the positions of each history by an MLP: W2 gelu(W1 X) (MLP-Mixer, NeurIPS 2021).

        X has a row for each of the t positions of the longest history, and a column for each number
        of each history. W1 and W2 are learned [n, n] matrices over positions, with n the maximum
        length. The newest interaction always has the last row, so t positions use the last t rows
        and columns of W1 and W2. Their weights of newer positions are masked, so that a position
        reads itself and older ones only; gelu works on each number by itself.

        Args:
            query, key: None. The layer computes neither, since the MLP does not read them.
            value: [m, h, e] inputs of all m interactions, history after history.
            batch: the histories.
            dropout: dropout on the hidden layer, gelu(W1 X).

        Returns:
            [m, h, e], history after history.
        """
        # All histories side by side, position by position, with zeros before the shorter ones, so
        # that all end in the last row.
        block = batch.pad(value, "end", time_major=True)  # [t, b, h, e]
        X = block.flatten(1)  # [t, b h e]
        t = X.size(0)

        # row i: the position that reads; column j: the one that is read; ``tril`` keeps j <= i
        W1, W2 = self.W1[-t:, -t:].tril(), self.W2[-t:, -t:].tril()
        mixed = W2 @ dropout(F.gelu(W1 @ X))  # [t, b h e]
        return batch.unpad(mixed.view(block.shape), "end", time_major=True)
