"""Content, order and time in separate channels, each with its own weights and values.

Shapes as in ``layers/sequence_batch.py``.

Reference:
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
from recbole_pos.position.mixing import sum_past
from recbole_pos.values import SECONDS

TIME_CHUNK = 16  # interactions of a chunk in the channel of time: each column has its own weights


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
