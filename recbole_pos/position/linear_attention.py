"""Attention without softmax, whose cost is linear in the length: sums over the past, in chunks.

Shapes as in ``layers/sequence_batch.py``.

References:
    Angelos Katharopoulos et al. "Transformers are RNNs: Fast Autoregressive Transformers with
    Linear Attention." ICML 2020.
    Yufei Ye et al. "FuXi-Linear: Unleashing the Power of Linear Attention in Long-term Time-aware
    Sequential Recommendation." 2026 (arXiv 2602.23671). Implemented from the abstract and the
    public code.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position import rotary
from recbole_pos.values import SECONDS

CHUNK = 64  # interactions of a chunk in ``sum_past``
TIME_CHUNK = 16  # interactions of a chunk in the channel of time: each column has its own weights


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


class FuXiLinear(AttentionPosition):
    """Retention, a learned kernel of positions and periodic retention of time (FuXi-Linear, 2026).

    A head's value is cut in three, v = (v^c, v^p, v^t), q, k and v^c go through SiLU, and

        out_i = ( sum_j g_h^(i - j) (q_i . k_j) / sqrt(e) v^c_j,
                  alpha sum_j (p_i . p_j) / (s / 2) v^p_j + beta v^p_i,
                  sum_j 2^(-x) cos(x) v^t_j in half of its columns, sin(x) in the others )
        over j <= i, with x = 2 pi (t_i - t_j) / period

    Learned are g_h, alpha, beta and a row p_i of size s for each position, sines and cosines when
    fresh. g_h = exp(-(r_1 + ... + r_h)) with r = softplus of ``raw_decay``, so that it falls from
    head to head. Every pair of columns of v^t has a fixed period, log-spaced over all heads. Sums
    are computed in chunks, so that the cost is linear in the length; dropout of weights falls on
    the values. Differences to the authors' code: channels share the width of one value and are not
    normalised one by one, the gate and the feed-forward network are the backbone's (``block: ligr``
    comes near), and t_i is the request's time only with ``request_time: target``, which the code
    always takes.

    Attributes:
        sizes: numbers of columns of v^c, v^p and v^t.
        num_pairs: number of pairs of columns of v^t in a head, each with a period.
        bank: returns 2 pi / period of each pair of each head.
        raw_decay: [h] gives g_h.
        positions: [n, s] rows p.
        share: alpha and beta.
    """

    options = (
        *("channel_share", "fuxi_position_size"),
        *("time_min_period", "time_max_period", "time_unit"),
    )
    needs_time = True
    reads_request = True
    assumes_order = True  # sums in chunks need weights that never rise along the history

    def __init__(
        self,
        dimensions: Dimensions,
        *,
        channel_share: float,
        fuxi_position_size: int,
        time_min_period: float,
        time_max_period: float,
        time_unit: str,
    ) -> None:
        """Create the parameters of attention by content, by order and by time.

        The columns of a head's values v are shared out among the three. Each sums its columns over
        interaction i and older ones j (FuXi-Linear, Ye et al., 2026; without constant factors):

            content    sum_j g^(i - j) (q_i . k_j) v_j        with queries q and keys k
            order      alpha sum_j (p_i . p_j) v_j + beta v_i
            time       sum_j 2^(-x) cos(x) v_j in half of the columns, sin(x) in the others,
                       with x = 2 pi (t_i - t_j) / period

        Learned are a factor g of each head, a vector p_i of each position, alpha and beta. Periods
        are fixed, one for every two columns.

        Args:
            dimensions: sizes of the model, with h heads of at least three columns.
            channel_share: share of the columns for order, and the same again for time; below 1/2.
            fuxi_position_size: size of the vectors of positions; an odd one is lowered by one.
            time_min_period, time_max_period: the shortest and the longest period.
            time_unit: unit of both.

        Raises:
            UsageError: if a period is wrong, or no column is left for content.
        """
        super().__init__()
        h = dimensions.n_heads
        # the numbers of columns for content, for order and for time
        self.sizes = _share_out_columns(dimensions.head_size, channel_share)

        # Content: a number for each head, of which :meth:`_sum_by_content` computes g.
        self.raw_decay = nn.Parameter(torch.zeros(h))

        # Order: the vectors p of the n positions, [n, size], at first sines and cosines; and
        # (alpha, beta), at first 0.02 and 1.
        self.positions = nn.Parameter(_make_sinusoids(dimensions.max_length, fuxi_position_size))
        self.share = nn.Parameter(torch.tensor([0.02, 1.0]))

        # Time: every two columns of every head have a period. ``wavelength_form`` returns so many
        # values of 2 pi / period, in radians per second, with periods log-spaced from the shortest
        # to the longest. ``bank`` is a module without parameters that keeps them.
        rotary.require_periods(time_min_period, time_max_period, time_unit)
        shortest = time_min_period * SECONDS[time_unit]
        longest = time_max_period * SECONDS[time_unit]
        self.num_pairs = math.ceil(self.sizes[2] / 2)  # of the columns for time of a head
        frequencies = rotary.wavelength_form(h * self.num_pairs, shortest, longest)
        self.bank = rotary.FrequencyBank(frequencies, "fixed", scaled=False)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Sum the values of older interactions by content, by order and by time.

        The e columns of a value v are cut into three groups, v = (v^c, v^o, v^t). Each group is
        summed over interaction i and older ones j with weights of its own, and the three sums are
        put side by side (FuXi-Linear, Ye et al., 2026):

            content    sum_j g^(i - j) (silu(q_i) . silu(k_j)) / sqrt(e) silu(v^c_j)
            order      sum_j (weights of the positions i and j) v^o_j
            time       sum_j (weights of the time between i and j) v^t_j

        Args:
            query, key, value: [m, h, e] q, k and v of all m interactions, history after history.
            batch: the histories, with times.
            dropout: dropout, which falls on the values, as no tensor of weights is formed.

        Returns:
            [m, h, e], history after history.
        """
        # One block of queries, keys and values, padded with zeros to histories of one length t. As
        # zeros add nothing to a sum, padding may stand before or after a history: ``any_alignment``
        # is the choice that costs less.
        e, align = query.size(-1), batch.any_alignment
        scaled = torch.cat((F.silu(query) / math.sqrt(e), F.silu(key), dropout(value)), -1)
        block = batch.pad(scaled, align).transpose(1, 2)  # [b, h, t, 3e]
        # ``sizes`` are the numbers of columns of v^c, v^o and v^t, in sum e
        q, k, content, order, time = block.split([e, e, *self.sizes], -1)

        by_content = self._sum_by_content(q, k, F.silu(content), batch)
        sums = by_content, self._sum_by_order(order, batch), self._sum_by_time(time, batch)
        out = torch.cat([x.to(value.dtype) for x in sums], -1)  # [b, h, t, e]
        return batch.unpad(out.transpose(1, 2), align)

    def _sum_by_content(self, q: Tensor, k: Tensor, v: Tensor, batch: SequenceBatch) -> Tensor:
        """Return sum_j g^(i - j) (q_i . k_j) v_j over j <= i, with a decay g of each head.

        With r = softplus(raw_decay), a positive number for each head, learned, -ln g is r_1 in the
        first head, r_1 + r_2 in the second, and so on. So g is between 0 and 1 and falls from head
        to head: the first head looks back the farthest.

        Args:
            q, k: [b, h, t, e] queries and keys.
            v: [b, h, t, columns] values.
            batch: the histories; those of fewer than t interactions are padded with zeros.

        Returns:
            [b, h, t, columns].
        """
        rate = F.softplus(self.raw_decay.double()).cumsum(0)[:, None]  # -ln g, [h, 1]
        # the number i of each interaction in its history, padded on the same side as q, k and v
        position = batch.pad(batch.index.double(), batch.any_alignment)  # [b, t]

        # ``sum_past`` returns sum_j exp(a_i - c_j) (q_i . k_j) v_j. The factor is g^(i - j) if a
        # and c are both i ln g.
        log_decay = -rate * position[:, None]  # i ln g, [b, h, t]
        return sum_past(q, k, v, log_decays=(log_decay, log_decay))

    def _sum_by_order(self, v: Tensor, batch: SequenceBatch) -> Tensor:
        """Return alpha sum_j (p_i . p_j) / (s / 2) v_j + beta v_i over j <= i.

        p_i is row i of the learned table ``positions``, [n, s], for the interaction at position i
        of its history. A fresh row has s / 2 sines and the cosines of the same angles, so that
        p_i . p_i is s / 2. ``share`` has the learned numbers alpha and beta.

        Args:
            v: [b, h, t, columns] values.
            batch: the histories; those of fewer than t interactions are padded with zeros.

        Returns:
            [b, h, t, columns].
        """
        rows = self.positions[batch.index].to(v.dtype)  # p of the m interactions, [m, s]
        p = batch.pad(rows, batch.any_alignment)[:, None]  # [b, 1, t, s], the same for all heads
        alpha, beta = self.share.to(v.dtype)
        # ``sum_past(q, k, v)`` is sum_j (q_i . k_j) v_j over j <= i
        return alpha * sum_past(p, p * (2 / p.size(-1)), v) + beta * v

    def _sum_by_time(self, values: Tensor, batch: SequenceBatch) -> Tensor:
        """Sum the values of older interactions by weights that are periodic in the time between.

        Interaction i gets the sum over itself and all older interactions j (FuXi-Linear, Ye et al.,
        2026). With t_j the time of interaction j, and t_i the time of interaction i or, if it is
        known, of the request for the item after it, the sums are

            sum_j 2^(-x) cos(x) v_j        in the first half of the columns of v
            sum_j 2^(-x) sin(x) v_j        in the second half
            x = 2 pi (t_i - t_j) / period

        Every column of a half has a period of its own, in each head; the two halves have the same.

        Args:
            values: [b, h, t, columns] values v.
            batch: the histories, with times; those of fewer than t interactions are padded.

        Returns:
            [b, h, t, columns].
        """
        b, h, t, columns = values.shape
        p, align = self.num_pairs, batch.any_alignment  # ``align``: the side of padding in v

        # Every column has weights of its own, so it is computed as a head of one column: h heads
        # with halves of p columns become h p heads. x is the difference of an angle of i and one of
        # j, [b, h p, t] each. ``elapsed`` counts seconds.
        frequency = self.bank()[:, None]  # 2 pi / period, [h p, 1]
        angle_i = batch.pad(batch.request.elapsed, align)[:, None] * frequency
        angle_j = batch.pad(batch.elapsed, align)[:, None] * frequency

        # The cosine and the sine of the difference are products of queries and keys of two columns:
        #     cos(x) = (cos angle_i,  sin angle_i) . (cos angle_j, sin angle_j)
        #     sin(x) = (sin angle_i, -cos angle_i) . (cos angle_j, sin angle_j)
        cos, sin = angle_i.cos(), angle_i.sin()
        query_cos, query_sin = torch.stack((cos, sin), -1), torch.stack((sin, -cos), -1)
        key = torch.stack((angle_j.cos(), angle_j.sin()), -1).to(values.dtype)
        # and 2^(-x) is exp(-ln(2) angle_i - (-ln(2) angle_j))
        log_decays = -math.log(2) * angle_i, -math.log(2) * angle_j

        # an odd number of columns is filled up by a column of zeros, so that halves are equal
        halves = F.pad(values, (0, 2 * p - columns)).chunk(2, -1)
        sums = []
        for query, half in zip((query_cos, query_sin), halves, strict=True):
            v = half.transpose(2, 3).reshape(b, h * p, t, 1)  # from [b, h, t, p]
            # With log_decays (a, c) this is sum_j exp(a_i - c_j) (query_i . key_j) v_j over j <= i.
            # Heads of one column are faster in short chunks.
            out = sum_past(query.to(v.dtype), key, v, log_decays, chunk=TIME_CHUNK)
            sums.append(out.view(b, h, p, t).transpose(2, 3))
        return torch.cat(sums, -1)[..., :columns]  # without the column that was filled up


def _share_out_columns(head_size: int, channel_share: float) -> list[int]:
    """Return how many columns of a head are for content, for order and for time.

    16 columns and a share of 0.25 give [8, 4, 4].

    Args:
        head_size: number of columns.
        channel_share: share of the columns for order, and the same again for time.

    Raises:
        UsageError: if no column is left for content.
    """
    size = max(1, round(channel_share * head_size))
    if 2 * size >= head_size:
        raise UsageError(
            f"channel_share: {channel_share} of a head of {head_size} numbers for order and as "
            "much for time leave none for content; give a smaller one, or raise hidden_size"
        )
    return [head_size - 2 * size, size, size]


def _make_sinusoids(num_positions: int, size: int) -> Tensor:
    """Return fresh vectors of positions: sines and cosines, as in a Transformer.

    With half = size / 2, vector i has the sines of i 10000^(-c / half) for c = 0, ..., half - 1 in
    its first half, and the cosines in the second.

    Args:
        num_positions: number of vectors.
        size: size of a vector; an odd one is lowered by one.

    Returns:
        [num_positions, size].
    """
    # base_form(count, base, scale) returns scale * base^(-c / count) for each c
    frequency = rotary.base_form(size // 2, 1e4, 1.0)
    angle = torch.arange(num_positions)[:, None] * frequency  # float64
    return torch.cat((angle.sin(), angle.cos()), 1).to(torch.get_default_dtype())
