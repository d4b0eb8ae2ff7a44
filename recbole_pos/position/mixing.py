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
    """Return the sums over older interactions, out_i = sum_{j<=i} exp(a_i - c_j) (q_i . k_j) v_j.

    This is attention without a softmax. Without decays a and c are 0. The sequence is cut into
    chunks, so that the cost grows with t and not with its square. Interaction i reads those of its
    own chunk by a masked product [size, size]. It reads an older chunk at once by q_i . S, where S
    = sum_j k_j v_j^T over the interactions j of the chunk is the chunk's state, [f, w].

    Decays are split at the ends of chunks, so that no factor is above 1. With E the value of c at
    the end of the chunk of j, and P that at the end of the chunk before i,

        exp(a_i - c_j) = exp(E - c_j) exp(P - E) exp(a_i - P)

    Args:
        q, k: [b, h, t, f] queries and keys.
        v: [b, h, t, w] values.
        log_decays: a of queries and c of keys, [b or 1, h, t] float64 each, or None. Both never
            rise along the sequence, and a_i <= c_i.
        chunk: interactions of a chunk; ``CHUNK`` if None. Few columns are faster in short chunks.

    Returns:
        [b, h, t, w].
    """
    # cut into chunks, [b, h, num_chunks, size, ...]; the last one is filled up with zeros
    t = v.size(2)
    size = min(chunk or CHUNK, t)
    num_chunks = (t + size - 1) // size
    filled = num_chunks * size - t
    shape = num_chunks, size, -1  # not unflatten: its check of sizes fails in exported programs
    q, k, v = (F.pad(x, (0, 0, 0, filled)).view(*x.shape[:2], *shape) for x in (q, k, v))
    weights = q @ k.transpose(-1, -2)  # of pairs within a chunk, [b, h, num_chunks, size, size]

    # ``past_state`` is the sum of the states of all chunks before each one. Taking a chunk's own
    # state off a sum that includes it would leave rounding of later values, so the sum is shifted.
    if log_decays is None:
        past_q = q
        state = k.transpose(-1, -2) @ v  # S of each chunk, [b, h, num_chunks, f, w]
        past_state = F.pad(state.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    else:
        a, c = (F.pad(x, (0, filled)).view(*x.shape[:2], num_chunks, size) for x in log_decays)
        end = c[..., -1:]  # E of each chunk, [b, h, num_chunks, 1]
        previous_end = end.roll(1, 2)  # P of each chunk; the first one's is not used
        weights = weights * _decay(a[..., None] - c[..., None, :], v.dtype)

        # S with the decay from each j to the end of its chunk
        state = (k * _decay(end - c, v.dtype)[..., None]).transpose(-1, -2) @ v
        # on to the end of the chunk before i: [b, h, num_chunks of i, num_chunks of j], older only
        carried = _decay(previous_end - end.transpose(-1, -2), v.dtype).tril(-1)
        past_state = (carried @ state.flatten(3)).view_as(state)
        # from there to i
        past_q = q * _decay(a - previous_end, v.dtype)[..., None]

    # pairs within a chunk, where newer keys are masked, and pairs with older chunks
    out = weights.tril() @ v + past_q @ past_state
    return out.view(*out.shape[:2], num_chunks * size, -1)[:, :, :t]


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
