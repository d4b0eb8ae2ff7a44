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
        # The denominator is the same sum with a value of 1: a further column of ones gives it, so
        # that the last column of ``out`` is the denominator, and the others are the numerator.
        # sum_past(q, k, v) returns the sums over j <= i of (q_i . k_j) v_j. They are right with
        # padding at either end of a history, so the batch chooses the cheaper one (any_alignment).
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
    """Compute attention without a softmax: the sums over j <= i of (q_i . k_j) v_j.

    With decays, each weight q_i . k_j is multiplied by exp(a_i - c_j).

    The sequence is cut into chunks. Pairs within a chunk are a masked product [size, size]. All
    pairs of i with an earlier chunk are one product of q_i with the chunk's state, which is the sum
    of its k_j v_j^T, [f, w]. So the cost grows with t and not with its square.

    Args:
        q, k: [b, h, t, f] queries and keys.
        v: [b, h, t, w] values.
        log_decays: a of queries and c of keys, [b or 1, h, t] float64 each; None for no decay. Both
            never rise along the sequence, and a_i <= c_i, so that no decay is above 1.
        chunk: interactions of a chunk; ``CHUNK`` if None. Few columns are faster in short chunks.

    Returns:
        [b, h, t, w].
    """
    # Cut into chunks, [b, h, num_chunks, size, ...]. _decay(x, dtype) below is exp(x), at most 1:
    # for padding and masked pairs x may be above 0.
    t = v.size(2)
    size = min(chunk or CHUNK, t)
    num_chunks = (t + size - 1) // size
    filled = num_chunks * size - t  # columns that fill up the last chunk
    shape = num_chunks, size, -1  # not unflatten: its check of sizes fails in exported programs
    q, k, v = (F.pad(x, (0, 0, 0, filled)).view(*x.shape[:2], *shape) for x in (q, k, v))
    weights = q @ k.transpose(-1, -2)  # of pairs within a chunk, [b, h, num_chunks, size, size]

    # The state of each chunk, and for each chunk the sum of the states before it. The sum is
    # shifted by one chunk: subtracting a chunk's own state from a sum that includes it would leave
    # rounding of later values.
    if log_decays is None:
        past_q = q
        state = k.transpose(-1, -2) @ v  # [b, h, num_chunks, f, w]
        past_state = F.pad(state.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    else:
        # The decay exp(a_i - c_j) is split at ends of chunks, so that no factor is above 1: from j
        # to the end of its chunk, on to the end of the chunk before that of i, and from there to i.
        a, c = (F.pad(x, (0, filled)).view(*x.shape[:2], num_chunks, size) for x in log_decays)
        end = c[..., -1:]  # [b, h, num_chunks, 1], of each chunk
        start = end.roll(1, 2)  # the end of the chunk before
        weights = weights * _decay(a[..., None] - c[..., None, :], v.dtype)
        state = (k * _decay(end - c, v.dtype)[..., None]).transpose(-1, -2) @ v
        # the second factor, [b, h, num_chunks, num_chunks] to each chunk (row) from earlier ones
        carried = _decay(start - end.transpose(-1, -2), v.dtype).tril(-1)
        past_state = (carried @ state.flatten(3)).view_as(state)
        past_q = q * _decay(a - start, v.dtype)[..., None]

    # pairs within a chunk, where newer keys are masked, and pairs with earlier chunks
    out = weights.tril() @ v + past_q @ past_state
    return out.view(*out.shape[:2], num_chunks * size, -1)[:, :, :t]


def _decay(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(exponent), at most 1: padding and the future, which is masked, may rise."""
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
        """Mix the positions of each sequence by an MLP: W2 gelu(W1 X) (MLP-Mixer, NeurIPS 2021).

        Args:
            query, key: None, as they are not needed.
            value: [m, h, e] inputs X of all m interactions, history after history.
            batch: the histories.
            dropout: dropout on the hidden layer.

        Returns:
            [m, h, e], history after history. A position gets a sum of itself and older ones: the
            matrices are lower triangular.
        """
        # Sequences are padded before their first interaction ("end": all end in the last row): one
        # of t interactions uses the last t rows and columns of W1 and W2. Positions are the first
        # axis of the block (time_major), and ``tril`` lets no position read a newer one.
        block = batch.pad(value, "end", time_major=True)  # [t, b, h, e]
        t = batch.block_width("end")
        hidden = F.gelu(self.W1[-t:, -t:].tril() @ block.flatten(1))
        mixed = (self.W2[-t:, -t:].tril() @ dropout(hidden)).view(block.shape)
        return batch.unpad(mixed, "end", time_major=True)
