"""Two replacements of dot-product attention that FPARec is compared with (its section 4.2).

Shapes as in ``layers/sequence_batch.py``.

References:
    Angelos Katharopoulos et al. "Transformers are RNNs: Fast Autoregressive Transformers with
    Linear Attention." ICML 2020.
    Ilya Tolstikhin et al. "MLP-Mixer: An all-MLP Architecture for Vision." NeurIPS 2021.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch

CHUNK = 64  # interactions of a chunk in ``sum_past``


class LinearAttention(AttentionPosition):
    """Linearised attention (Katharopoulos et al. 2020): sim(q, k) = phi(q) . phi(k), phi = elu + 1.

    out_i = phi(q_i) . sum_{j<=i} phi(k_j) v_j^T / phi(q_i) . sum_{j<=i} phi(k_j), in chunks, so the
    cost is linear in the length. Weights never exist, so their dropout falls on the values.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Attend with weights phi(q_i) . phi(k_j), phi = elu + 1, instead of a softmax.

            out_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j)       over j <= i

        (Katharopoulos et al., ICML 2020.)

        Args:
            query, key, value: [m, h, e] q, k and v of all m interactions, history after history.
            batch: the histories.
            dropout: dropout, which falls on the values, as weights never exist.

        Returns:
            [m, h, e], history after history.
        """
        # A further column of ones in v makes the denominator a column of the numerator: the sum of
        # the weights times 1. ``sum_past`` returns sum_j (q_i . k_j) v_j over j <= i. It is right
        # with padding at either end of a history; ``any_alignment`` is the cheaper end.
        align = batch.any_alignment
        ones = value.new_ones(*value.shape[:-1], 1)
        features = torch.cat((F.elu(query) + 1, F.elu(key) + 1, dropout(value), ones), -1)
        block = batch.pad(features, align).transpose(1, 2)  # [b, h, t, 3e + 1]
        q, k, v = block.split([query.size(-1), key.size(-1), value.size(-1) + 1], -1)
        out = batch.unpad(sum_past(q, k, v).transpose(1, 2), align)
        total, weight = out[..., :-1], out[..., -1:]
        # elu + 1 is 0 in float32 below about -17: a query of zeros then returns zero, not NaN
        return total / weight.clamp_min(torch.finfo(out.dtype).tiny)


def sum_past(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: tuple[Tensor, Tensor] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return for each interaction the sum over itself and older ones: attention without softmax.

        out_i = sum_j (q_i . k_j) v_j                      over j <= i
        out_i = sum_j exp(a_i - c_j) (q_i . k_j) v_j       with ``log_decays`` (a, c)

    The factor exp(a_i - c_j) lets older interactions count less. It is exp(-rate (t_i - t_j)) if
    a_i is -rate t_i for the time t_i at which query i is asked, and c_j is -rate t_j for the time
    of interaction j. A query may be asked later than its interaction took place; else a equals c.

    A product of all pairs i, j would cost t^2. So the t interactions are cut into chunks: with
    t = 100 and chunks of 64 there are two, and 28 zeros fill up the second. Interactions j in the
    chunk of i are summed by a product of all pairs. Those in older chunks are summed at once, since

        sum_j (q_i . k_j) v_j = q_i . S        with the matrix S = sum_j k_j v_j^T, [f, w],

    which is the same for all i of a chunk.

    Args:
        q, k: [b, h, t, f] queries and keys.
        v: [b, h, t, w] values.
        log_decays: a of queries and c of keys, [b or 1, h, t] float64 each, or None. Both never
            rise along the sequence, and a_i <= c_i, so that no factor is above 1.
        chunk: interactions of a chunk; ``CHUNK`` if None. Few columns are faster in short chunks.

    Returns:
        [b, h, t, w].
    """
    # cut into chunks, [b, h, num_chunks, size, f or w]; the last one is filled up with zeros
    t = v.size(2)
    size = min(chunk or CHUNK, t)
    num_chunks = (t + size - 1) // size
    num_zeros = num_chunks * size - t
    shape = num_chunks, size, -1  # not unflatten: its check of sizes fails in exported programs
    q, k, v = (F.pad(x, (0, 0, 0, num_zeros)).view(*x.shape[:2], *shape) for x in (q, k, v))
    weights = q @ k.transpose(-1, -2)  # of pairs within a chunk, [b, h, num_chunks, size, size]

    if log_decays is None:
        # S of each chunk by itself, then summed over all chunks before it: for the chunks S_1, S_2,
        # S_3 that is 0, S_1, S_1 + S_2. (Subtracting S_3 from S_1 + S_2 + S_3 would leave rounding
        # of newer values in the result.)
        own_state = k.transpose(-1, -2) @ v  # [b, h, num_chunks, f, w]
        older_states = F.pad(own_state.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
        from_older_chunks = q @ older_states
    else:
        # The same with the factors exp(a_i - c_j); ``_decay(x)`` is exp(x), at most 1.
        a, c = (F.pad(x, (0, num_zeros)).view(*x.shape[:2], num_chunks, size) for x in log_decays)
        weights = weights * _decay(a[..., None] - c[..., None, :], v.dtype)
        from_older_chunks = _sum_older_chunks(q, k, v, a, c)

    out = weights.tril() @ v + from_older_chunks  # ``tril`` leaves out newer keys
    return out.view(*out.shape[:2], num_chunks * size, -1)[:, :, :t]


def _sum_older_chunks(q: Tensor, k: Tensor, v: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """Return for each interaction i a sum over all interactions j in earlier chunks than its own.

        out_i = sum_j exp(a_i - c_j) (q_i . k_j) v_j

    A history is cut into chunks of successive interactions. Every chunk is first summed up in one
    matrix, its state, so that i reads a state and not every j:

        state = sum_j exp(end - c_j) k_j v_j^T         over j in the chunk; end is its last c
        older = the states of all earlier chunks, each decayed up to the end of the last of them
        out_i = exp(a_i - previous_end) q_i . older    previous_end is the end of that last chunk

    Args:
        q, k: [b, h, num_chunks, size, f] queries and keys.
        v: [b, h, num_chunks, size, w] values.
        a, c: [b or 1, h, num_chunks, size] float64 logarithms for queries and keys. Both never rise
            along the history, so that no factor is above 1.

    Returns:
        [b, h, num_chunks, size, w].
    """
    # ``_decay(x)`` is exp(x), at most 1
    end = c[..., -1:]  # [b or 1, h, num_chunks, 1]
    state = (k * _decay(end - c, v.dtype)[..., None]).transpose(-1, -2) @ v  # [..., f, w]

    # the end of the chunk before each chunk; 0 for the first, which reads no older chunk
    previous_end = F.pad(end[:, :, :-1], (0, 0, 1, 0))  # [b or 1, h, num_chunks, 1]
    factors = _decay_between_chunks(end, previous_end, v.dtype)  # to a chunk (row) from another
    older = (factors @ state.flatten(3)).view_as(state)  # all f w numbers of a state side by side
    return (q * _decay(a - previous_end, v.dtype)[..., None]) @ older


def _decay_between_chunks(end: Tensor, previous_end: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors with which each chunk (row) reads the states of the chunks before it.

    A history is cut into chunks of successive interactions, and a state sums up a chunk (column).
    A state counts less the more time has passed from the end of its chunk to the end of the chunk
    before the one that reads it. With end_y for the logarithm at the end of chunk y, the rows are

        chunk 1    0                   0                   0    0
        chunk 2    1                   0                   0    0
        chunk 3    exp(end_2 - end_1)  1                   0    0
        chunk 4    exp(end_3 - end_1)  exp(end_3 - end_2)  1    0

    Args:
        end: [b or 1, h, num_chunks, 1] float64 logarithm at the end of each chunk.
        previous_end: the same at the end of the chunk before each.
        dtype: type of the result.

    Returns:
        [b or 1, h, num_chunks, num_chunks].
    """
    return _decay(previous_end - end.transpose(-1, -2), dtype).tril(-1)  # ``_decay(x)`` is exp(x)


def _decay(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(exponent), at most 1.

    Exponents of pairs that count are never above 0. Those of padding and of newer keys, which are
    masked afterwards, may be; without the limit their exponentials could be infinite.
    """
    return exponent.clamp(max=0).exp().to(dtype)


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
