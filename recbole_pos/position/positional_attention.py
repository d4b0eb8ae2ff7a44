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
        a column for each of the t positions of the longest history. A shorter history has the last
        positions: one of 2 interactions uses the last 2 rows and columns.

        Without ``divides_by_sum`` the sum of values is not divided, o_i = sum_j A_ij v_j. That is
        for weights that are a softmax already.

        Args:
            query, key: None. The layer computes neither, since weights do not depend on them.
            value: [m, h, e] values v of all m interactions, history after history.
            batch: the histories.
            dropout: dropout on the weights of the values, but not on their sum, the divisor.

        Returns:
            [m, h, e], history after history.
        """
        with torch.autocast(value.device.type, enabled=False):  # exp needs the range of float32
            t = batch.block_width("end")  # length of the longest history
            weights = self.weights(t)  # A, [h, t, t], or [1, t, t] for all heads

            # The values as a block with a row for each position and a column for each history.
            # Zeros stand before shorter histories, so that all end in the last row.
            block = batch.pad(value.to(weights.dtype), "end", time_major=True)  # [t, b, h, e]
            mixed = self._mix(dropout(weights), block)  # A times the block, head by head
            sums = batch.unpad(mixed, "end", time_major=True)  # sum_j A_ij v_j, [m, h, e]

            if not self.divides_by_sum:
                return sums
            divisor = self._sum_weights(weights, batch)  # sum_j A_ij, [m, h], or [m, 1] for all
            return sums / divisor[..., None]

    @staticmethod
    def _sum_weights(weights: Tensor, batch: SequenceBatch) -> Tensor:
        """Return for each interaction i the sum of its weights, sum_j A_ij over j <= i.

        A has a row i and a column j for each of the positions 0 to t - 1, and 0 for newer ones,
        j > i. A shorter history has the last positions only: with t = 3 a history of 2 interactions
        has the positions 1 and 2, and its sums are A_11 and A_21 + A_22, without column 0.

        Args:
            weights: [h or 1, t, t] weights A of each head, or the same for all heads.
            batch: the m interactions of b histories.

        Returns:
            [m, h or 1], above 0, so that one can divide by it.
        """
        if batch.is_full:  # every history has all t positions: sums of whole rows
            row_sums = weights.sum(-1)  # [h or 1, t]
            total = row_sums[:, batch.column("end")].t()  # of the position of each interaction
        else:
            # a block of ones, [t, b], with 0 where a history does not have the position
            ones = weights.new_ones(batch.items.size(0))  # [m]
            is_real = batch.pad(ones, "end", time_major=True)
            # the sum of every row of A over the positions that a history has, [h or 1, t, b]
            row_sums = weights @ is_real
            # ``unpad`` takes the sums of the m interactions out of a block [t, b, h or 1]
            total = batch.unpad(row_sums.permute(1, 2, 0), "end", time_major=True)
        # A sum of very small weights may be 0 in floating point: a limit avoids 0 / 0.
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
        """Return the weights A with which the newest t of all n positions read each other.

        A logit is learned for each query, the position that reads, and each key, the position that
        is read. Weights of newer keys are 0. The others are

        - with ``divides_by_sum`` the exponentials of the logits, up to a factor for each query. The
          caller divides them by their sum, which makes them a softmax over the keys that exist;
        - without it the softmax of the logits over all n keys, newer ones included. So the weights
          that are left add up to 1 or less, and are not divided.

        Args:
            t: number of positions, as many as the longest history of the batch has interactions.

        Returns:
            [h, t, t] from query i (row) to key j (column), the newest position last.
        """
        # ``logits(t, num_keys)`` returns the logits of the newest t queries for the newest
        # ``num_keys`` keys, [h, t, num_keys].
        if self.divides_by_sum:
            logits = self.logits(t, t)
            logits = logits.masked_fill(future_mask(t, logits.device), -torch.inf)
            # The largest logit of each row is subtracted, so that exp does not overflow.
            return (logits - logits.amax(-1, keepdim=True).detach()).exp()

        over_all_keys = self.logits(t, self.max_length).softmax(-1)  # [h, t, n]
        return over_all_keys[..., -t:].tril()  # ``tril`` makes the weights of newer keys 0


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
    """a_ij = j (Luo et al., FPARec, equation 13).

    The newest interaction has j = n: with n = 50 a window of three weighs 48, 49 and 50.
    """

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

        X has a row for each of the t positions of the longest history, and h e columns for each
        history. W1 and W2 are learned [n, n] matrices, with n the maximum length. The newest
        interaction always has the last row of X, so W1 and W2 are cut to their last t rows and
        columns. A position reads itself and older ones only.

        Args:
            query, key: None. The layer computes neither, since the MLP does not read them.
            value: [m, h, e] inputs of all m interactions, history after history.
            batch: the histories.
            dropout: dropout on the hidden layer, gelu(W1 X).

        Returns:
            [m, h, e], history after history.
        """
        # All histories side by side, with zeros before the shorter ones, so that all end in the
        # last row.
        block = batch.pad(value, "end", time_major=True)  # [t, b, h, e]
        X = block.flatten(1)  # [t, b h e]
        t = X.size(0)

        # from the position that reads, i (row), to the one that is read, j; ``tril`` keeps j <= i
        W1, W2 = self.W1[-t:, -t:].tril(), self.W2[-t:, -t:].tril()
        mixed = W2 @ dropout(F.gelu(W1 @ X))  # [t, b h e]
        # as the block was, [t, b, h, e]; then the interactions without the zeros, [m, h, e]
        return batch.unpad(mixed.view(block.shape), "end", time_major=True)
