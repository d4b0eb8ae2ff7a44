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
        # phi of queries and keys. A further column of 1 in v makes the denominator the last column
        # of the numerator: the sum of the weights times 1.
        e = value.size(-1)
        ones = value.new_ones(*value.shape[:-1], 1)
        packed = torch.cat((F.elu(query) + 1, F.elu(key) + 1, dropout(value), ones), -1)
        block = _pad(packed, batch).transpose(1, 2)  # [b, h, t, e + e + (e + 1)]
        q, k, v = block.split([e, e, e + 1], -1)

        # ``sum_past`` returns sum_j (q_i . k_j) v_j over j <= i, [b, h, t, e + 1].
        # ``any_alignment`` is the side of the zeros that ``_pad`` has put in.
        out = batch.unpad(sum_past(q, k, v).transpose(1, 2), batch.any_alignment)  # [m, h, e + 1]
        numerator, denominator = out[..., :-1], out[..., -1:]
        # elu + 1 is 0 in float32 below about -17: a query of zeros then returns zero, not NaN
        return numerator / denominator.clamp_min(torch.finfo(out.dtype).tiny)


def _pad(x: Tensor, batch: SequenceBatch) -> Tensor:
    """Return values of interactions [m, ...] as a block [b, t, ...] with a row for each history.

    Zeros fill up shorter histories. They may stand before or after a history, since they add
    nothing to a sum; ``any_alignment`` is the side that costs less.
    """
    return batch.pad(x, batch.any_alignment)


def sum_past(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: tuple[Tensor, Tensor] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return for each interaction i the sum over itself and older ones: attention without softmax.

        out_i = sum_j (q_i . k_j) v_j                      over j <= i
        out_i = sum_j exp(a_i - c_j) (q_i . k_j) v_j       with ``log_decays`` (a, c)

    The factor exp(a_i - c_j) lets older interactions count less. For example, a_i = c_i = -rate t_i
    with the time t_i of interaction i gives exp(-rate (t_i - t_j)).

    A product of all pairs i, j would cost t^2. So a history is cut into chunks of successive
    interactions, such as 64 and 36 of t = 100. Only within a chunk all pairs are multiplied. Each
    older chunk is summed up first, and then read as a whole.

    Args:
        q, k: [b, h, t, f] queries and keys.
        v: [b, h, t, w] values.
        log_decays: a of queries and c of keys, [b or 1, h, t] float64 each, or None. Both never
            rise along the history, and a_i <= c_i, so that no factor is above 1.
        chunk: interactions of a chunk; ``CHUNK`` if None. Few columns are faster in short chunks.

    Returns:
        [b, h, t, w].
    """
    t = v.size(2)
    size = min(chunk or CHUNK, t)
    q, k, v = (_cut_into_chunks(x, size) for x in (q, k, v))  # [b, h, num_chunks, size, f or w]
    weights = q @ k.transpose(-1, -2)  # of pairs within a chunk, [b, h, num_chunks, size, size]

    if log_decays is None:
        from_older_chunks = _sum_older_chunks(q, k, v)
    else:
        # a and c as columns, [b or 1, h, num_chunks, size, 1]
        a, c = (_cut_into_chunks(x[..., None], size) for x in log_decays)
        weights = weights * _decay(a - c.transpose(-1, -2), v.dtype)  # times exp(a_i - c_j)
        from_older_chunks = _sum_decayed_chunks(q, k, v, a, c)

    out = weights.tril() @ v + from_older_chunks  # ``tril`` leaves out newer keys
    return out.flatten(2, 3)[:, :, :t]  # chunk after chunk, without what was filled up


def _cut_into_chunks(x: Tensor, size: int) -> Tensor:
    """Cut histories into chunks of ``size`` interactions; zeros fill up the last one.

    Args:
        x: [b, h, t, columns] values of the interactions.
        size: number of interactions of a chunk.

    Returns:
        [b, h, num_chunks, size, columns].
    """
    b, h, t, columns = x.shape
    num_chunks = (t + size - 1) // size
    num_zeros = num_chunks * size - t
    # not unflatten: its check of sizes fails in exported programs
    return F.pad(x, (0, 0, 0, num_zeros)).view(b, h, num_chunks, size, columns)


def _sum_older_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return sum_j (q_i . k_j) v_j over all interactions j in earlier chunks than that of i.

    It is q_i times the matrix S = sum_j k_j v_j^T, which is the same for all i of a chunk.

    Args:
        q, k: [b, h, num_chunks, size, f] queries and keys of chunks of successive interactions.
        v: [b, h, num_chunks, size, w] values.

    Returns:
        [b, h, num_chunks, size, w].
    """
    state = k.transpose(-1, -2) @ v  # S of each chunk by itself, [b, h, num_chunks, f, w]
    # The chunks S_1, S_2, S_3 read the sums 0, S_1, S_1 + S_2. (Subtracting S_3 from
    # S_1 + S_2 + S_3 would leave rounding of newer values in the result.)
    sums = state.cumsum(2)
    older = F.pad(sums[:, :, :-1], (0, 0, 0, 0, 1, 0))  # a zero in front, along the chunks
    return q @ older


def _sum_decayed_chunks(q: Tensor, k: Tensor, v: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """Return sum_j exp(a_i - c_j) (q_i . k_j) v_j over all j in earlier chunks than that of i.

    The sum over the j of a chunk is computed once for all i, since (q_i . k_j) v_j is q_i times the
    matrix k_j v_j^T. With end_y for the last c of chunk y, the factor exp(a_i - c_j) for i in chunk
    x and j in an earlier chunk y is the product of

        exp(end_y - c_j)            from j to the end of its chunk
        exp(end_(x-1) - end_y)      from there to the end of the chunk before x
        exp(a_i - end_(x-1))        from there to i

    Args:
        q, k: [b, h, num_chunks, size, f] queries and keys of chunks of successive interactions.
        v: [b, h, num_chunks, size, w] values.
        a, c: [b or 1, h, num_chunks, size, 1] float64. Both never rise along the history, so that
            no factor is above 1.

    Returns:
        [b, h, num_chunks, size, w].
    """
    # First every chunk is summed up: sum_j exp(end - c_j) k_j v_j^T, [b, h, num_chunks, f, w].
    # ``_decay(x)`` is exp(x), at most 1.
    end = c[..., -1:, :]  # [b or 1, h, num_chunks, 1, 1]
    state = (k * _decay(end - c, v.dtype)).transpose(-1, -2) @ v

    # Then, for each chunk x, the states of all chunks y < x are added up by the second factor.
    previous_end = F.pad(end[:, :, :-1], (0, 0, 0, 0, 1, 0))  # end_(x-1); 0 for the first chunk
    factors = _decay_between_chunks(end.squeeze(-1), previous_end.squeeze(-1), v.dtype)
    older = (factors @ state.flatten(3)).view_as(state)  # each state as a row of f w numbers

    # Last, every i multiplies its query by the third factor, and by this sum.
    return (q * _decay(a - previous_end, v.dtype)) @ older


def _decay_between_chunks(end: Tensor, previous_end: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors by which each chunk x (row) multiplies the sum of each chunk y (column).

    end_y is the exponent c of the last interaction of chunk y, as in :func:`_sum_decayed_chunks`.
    The sum of an earlier chunk, y < x, decays by exp(end_(x-1) - end_y) until the end of the chunk
    before x: this is its factor, 1 for the chunk just before x. Other chunks have the factor 0.
    With four chunks the rows are

        x = 1    0                   0                   0    0
        x = 2    1                   0                   0    0
        x = 3    exp(end_2 - end_1)  1                   0    0
        x = 4    exp(end_3 - end_1)  exp(end_3 - end_2)  1    0

    Args:
        end: [b or 1, h, num_chunks, 1] float64, end_y of each chunk y.
        previous_end: the same of the chunk before each, end_(x-1).
        dtype: type of the result.

    Returns:
        [b or 1, h, num_chunks, num_chunks].
    """
    exponent = previous_end - end.transpose(-1, -2)  # of every row x and column y
    return _decay(exponent, dtype).tril(-1)  # ``tril(-1)`` keeps the columns y < x


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
        # the numbers of columns of a head for content, for order and for time
        self.sizes = _share_out_columns(dimensions.head_size, channel_share)
        _, _, time_columns = self.sizes

        # Content: a number r for each head, from which :meth:`_sum_by_content` computes g. In the
        # first head g is exp(-softplus(r)).
        self.raw_decay = nn.Parameter(torch.zeros(h))

        # Order: p of the n positions, [n, size], at first sines and cosines; alpha and beta.
        self.positions = nn.Parameter(_make_sinusoids(dimensions.max_length, fuxi_position_size))
        self.share = nn.Parameter(torch.tensor([0.02, 1.0]))

        # Time: 2 pi / period in radians per second, for each pair of columns of the first head,
        # then of the second, and so on. Periods are log-spaced from the shortest to the longest.
        rotary.require_periods(time_min_period, time_max_period, time_unit)
        shortest = time_min_period * SECONDS[time_unit]
        longest = time_max_period * SECONDS[time_unit]
        self.num_pairs = math.ceil(time_columns / 2)  # in a head
        frequencies = rotary.wavelength_form(h * self.num_pairs, shortest, longest)
        # a module that returns them, and keeps them in float64
        self.bank = rotary.FrequencyBank(frequencies, "fixed", scaled=False)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Sum the values of older interactions by content, by order and by time.

        The e columns of the values are cut into three groups. Each group is summed over interaction
        i and all older ones j, with weights of its own; the three sums are put side by side
        (FuXi-Linear, Ye et al., 2026):

            content    weights of the query of i, the key of j, and how many interactions j is older
            order      weights of the positions of i and j
            time       weights of the time between i and j

        Queries, keys and the values of content first go through SiLU.

        Args:
            query, key, value: [m, h, e] of all m interactions, history after history.
            batch: the histories, with times.
            dropout: dropout, which falls on the values, as no tensor of weights is formed.

        Returns:
            [m, h, e], history after history.
        """
        # Queries, keys and values side by side, so that they are padded at once, to histories of
        # one length t. ``sizes`` are the columns of content, order and time, in sum e.
        e = query.size(-1)
        packed = torch.cat((F.silu(query) / math.sqrt(e), F.silu(key), dropout(value)), -1)
        block = _pad(packed, batch).transpose(1, 2)  # [b, h, t, 3e]
        q, k, content, order, time = block.split([e, e, *self.sizes], -1)

        by_content = self._sum_by_content(q, k, F.silu(content), batch)
        sums = by_content, self._sum_by_order(order, batch), self._sum_by_time(time, batch)
        out = torch.cat([x.to(value.dtype) for x in sums], -1)  # [b, h, t, e]
        return batch.unpad(out.transpose(1, 2), batch.any_alignment)  # without the zeros of _pad

    def _sum_by_content(self, q: Tensor, k: Tensor, v: Tensor, batch: SequenceBatch) -> Tensor:
        """Return sum_j g^(i - j) (q_i . k_j) v_j over j <= i, with a factor g of each head.

        g = exp(-rate) is between 0 and 1, and lets older interactions count less. With the positive
        learned numbers s = softplus(raw_decay), one for each head, the rates of three heads are
        s_1, s_1 + s_2 and s_1 + s_2 + s_3. So the first head looks back the farthest.

        Args:
            q, k: [b, h, t, e] queries and keys.
            v: [b, h, t, columns] values.
            batch: the histories; those of fewer than t interactions are padded with zeros.

        Returns:
            [b, h, t, columns].
        """
        rate = F.softplus(self.raw_decay.double()).cumsum(0)[:, None]  # [h, 1]
        position = _pad(batch.index.double(), batch)[:, None]  # i of each interaction, [b, 1, t]

        # ``sum_past`` returns sum_j exp(a_i - a_j) (q_i . k_j) v_j. With a_i = -rate i the factor
        # is exp(-rate (i - j)), which is g^(i - j).
        a = -rate * position  # [b, h, t]
        return sum_past(q, k, v, log_decays=(a, a))

    def _sum_by_order(self, v: Tensor, batch: SequenceBatch) -> Tensor:
        """Return alpha sum_j (p_i . p_j) / (s / 2) v_j + beta v_i over j <= i.

        p_i is row i of the learned table ``positions``, [n, s], for the interaction at position i
        of its history. Before training it has s / 2 sines and the cosines of the same angles, so
        that (p_i . p_i) / (s / 2) is 1. alpha and beta are learned numbers.

        Args:
            v: [b, h, t, columns] values.
            batch: the histories; those of fewer than t interactions are padded with zeros.

        Returns:
            [b, h, t, columns].
        """
        rows = self.positions[batch.index].to(v.dtype)  # p of all m interactions, [m, s]
        p = _pad(rows, batch)[:, None]  # [b, 1, t, s], the same for all heads
        scaled_p = p * (2 / p.size(-1))  # p / (s / 2)
        alpha, beta = self.share.to(v.dtype)
        # ``sum_past(q, k, v)`` is sum_j (q_i . k_j) v_j over j <= i
        return alpha * sum_past(p, scaled_p, v) + beta * v

    def _sum_by_time(self, values: Tensor, batch: SequenceBatch) -> Tensor:
        """Sum the values of older interactions by weights that are periodic in the time between.

        Interaction i gets the sum over itself and all older interactions j (FuXi-Linear, Ye et al.,
        2026). With t_j the time of interaction j, and t_i the time of interaction i or, if it is
        known, of the request for the item after it, the sums are

            sum_j 2^(-x) cos(x) v_j        in the first half of the columns of v
            sum_j 2^(-x) sin(x) v_j        in the second half
            x = 2 pi (t_i - t_j) / period

        The columns of a half have different periods, also from head to head. Both halves have the
        same periods.

        Args:
            values: [b, h, t, columns] values v.
            batch: the histories, with times; those of fewer than t interactions are padded.

        Returns:
            [b, h, t, columns].
        """
        # x is angle_i - angle_j. ``bank()`` has 2 pi / period of the p columns of a half of each
        # of the h heads, and ``elapsed`` counts seconds.
        frequency = self.bank()[:, None]  # [h p, 1]
        angle_i = _pad(batch.request.elapsed, batch)[:, None] * frequency  # [b, h p, t]
        angle_j = _pad(batch.elapsed, batch)[:, None] * frequency

        # 2^(-x) is exp(a_i - c_j) with these a and c
        log_decays = -math.log(2) * angle_i, -math.log(2) * angle_j

        # cos(x) and sin(x) are products of a query of i and a key of j:
        #     cos(x) = (cos angle_i,  sin angle_i) . (cos angle_j, sin angle_j)
        #     sin(x) = (sin angle_i, -cos angle_i) . (cos angle_j, sin angle_j)
        cos, sin = angle_i.cos(), angle_i.sin()
        cos_query, sin_query = torch.stack((cos, sin), -1), torch.stack((sin, -cos), -1)
        key = torch.stack((angle_j.cos(), angle_j.sin()), -1).to(values.dtype)  # [b, h p, t, 2]

        # an odd number of columns is filled up by a column of zeros, so that halves are equal
        columns = values.size(-1)
        cos_half, sin_half = F.pad(values, (0, 2 * self.num_pairs - columns)).chunk(2, -1)
        cos_sum = _sum_columns(cos_query, key, cos_half, log_decays)
        sin_sum = _sum_columns(sin_query, key, sin_half, log_decays)
        return torch.cat((cos_sum, sin_sum), -1)[..., :columns]


def _sum_columns(
    query: Tensor, key: Tensor, values: Tensor, log_decays: tuple[Tensor, Tensor]
) -> Tensor:
    """Return sums over the past in which every column of the values has weights of its own.

        out_i = sum_j exp(a_i - c_j) (query_i . key_j) v_j        over j <= i

    :func:`sum_past` computes this with weights for each head. So every column is made a head of one
    column: 2 heads of 3 columns become 6 heads.

    Args:
        query, key: [b, h columns, t, f] queries and keys of every column, head after head.
        values: [b, h, t, columns] values v.
        log_decays: a and c, [b or 1, h columns, t] float64 each.

    Returns:
        [b, h, t, columns].
    """
    b, h, t, columns = values.shape
    heads = values.transpose(2, 3).reshape(b, h * columns, t, 1)
    # heads of one column are faster in short chunks
    sums = sum_past(query.to(values.dtype), key, heads, log_decays, chunk=TIME_CHUNK)
    return sums.view(b, h, columns, t).transpose(2, 3)


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
