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
        """Create what three kinds of attention need: by content, by order and by time.

        Each kind sums some of the e columns of a head's values over older interactions. The weight
        of interaction j for interaction i is

            content    g^(i - j) (q_i . k_j) / sqrt(e)
            order      alpha (p_i . p_j) / (s / 2), and beta is added for j = i
            time       a fixed function of t_i - t_j, with a period for each pair of columns

        (FuXi-Linear, Ye et al., 2026). Learned are the decay g of each head, a vector p_i of size s
        for each position i, and the numbers alpha and beta, which all heads share.

        Args:
            dimensions: sizes of the model, with h heads of at least three columns.
            channel_share: share of the columns for order, and the same again for time; below 1/2.
            fuxi_position_size: s, the size of the vectors p; an odd number is lowered by one.
            time_min_period, time_max_period: the shortest and the longest period.
            time_unit: unit of both.

        Raises:
            UsageError: if a period is wrong, or no column is left for content.
        """
        super().__init__()
        # numbers of columns for content, order and time: 16 and a share of 0.25 give 8, 4, 4
        e, h = dimensions.head_size, dimensions.n_heads
        size = max(1, round(channel_share * e))
        if 2 * size >= e:
            raise UsageError(
                f"channel_share: {channel_share} of a head of {e} numbers for order and as much "
                "for time leave none for content; give a smaller one, or raise hidden_size"
            )
        self.sizes = [e - 2 * size, size, size]

        # Time: a fixed period for each pair of columns in each head, from the shortest to the
        # longest. ``bank()`` returns 2 pi / period in radians per second, [h num_pairs].
        self.num_pairs = math.ceil(size / 2)
        rotary.require_periods(time_min_period, time_max_period, time_unit)
        shortest, longest = (x * SECONDS[time_unit] for x in (time_min_period, time_max_period))
        frequencies = rotary.wavelength_form(h * self.num_pairs, shortest, longest)  # log-spaced
        self.bank = rotary.FrequencyBank(frequencies, "fixed", scaled=False)

        # Content: -ln g of the first head is softplus(raw_decay[0]), and each next head adds its
        # own softplus, so that g is between 0 and 1 and falls from head to head.
        self.raw_decay = nn.Parameter(torch.zeros(h))

        # Order: the vectors p in the rows of ``positions``, [n, s]; alpha and beta in ``share``.
        # A fresh p_i has the sines and cosines of i 10000^(-2c / s) for c = 0, 1, ..., s / 2 - 1.
        frequency = rotary.base_form(fuxi_position_size // 2, 1e4, 1.0)  # 10000^(-2c / s), [s / 2]
        angle = torch.arange(dimensions.max_length)[:, None] * frequency
        rows = torch.cat((angle.sin(), angle.cos()), 1)
        self.positions = nn.Parameter(rows.to(torch.get_default_dtype()))
        self.share = nn.Parameter(torch.tensor([0.02, 1.0]))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Sum the values of older interactions by content, by order and by time.

        The e columns of a value are cut into three groups. Each group is summed over interaction i
        and older ones with weights of its own, and the three sums are put side by side
        (FuXi-Linear, Ye et al., 2026).

        Args:
            query, key, value: [m, h, e] q, k and v of all m interactions, history after history.
            batch: the histories, with times.
            dropout: dropout, which falls on the values, as no tensor of weights is formed.

        Returns:
            [m, h, e], history after history.
        """
        # Histories are padded with zeros to one length t. Zeros add nothing to a sum, so they may
        # stand at either end: ``any_alignment`` is the end that is cheaper.
        e, align = query.size(-1), batch.any_alignment
        scaled = torch.cat((F.silu(query) / math.sqrt(e), F.silu(key), dropout(value)), -1)
        block = batch.pad(scaled, align).transpose(1, 2)  # [b, h, t, 3e]
        # ``sizes`` are the numbers of columns of a value for content, order and time
        q, k, content, order, time = block.split([e, e, *self.sizes], -1)

        by_content = self._sum_by_content(q, k, F.silu(content), batch)
        sums = by_content, self._sum_by_order(order, batch), self._sum_by_time(time, batch)
        out = torch.cat([x.to(value.dtype) for x in sums], -1)  # [b, h, t, e]
        return batch.unpad(out.transpose(1, 2), align)

    def _sum_by_content(self, q: Tensor, k: Tensor, v: Tensor, batch: SequenceBatch) -> Tensor:
        """Return sum_j g^(i - j) (q_i . k_j) v_j over j <= i, with a decay g of each head.

        ``raw_decay`` [h] is the learned parameter behind g. Its softplus, added up over the heads
        so far, is -ln g.

        Args:
            q, k: [b, h, t, e] queries and keys.
            v: [b, h, t, columns] values.
            batch: the histories; those of fewer than t interactions are padded with zeros.

        Returns:
            [b, h, t, columns].
        """
        # ``sum_past`` takes the decay as exp(a_i - a_j). That is g^(i - j) for a_i = i ln g.
        rate = F.softplus(self.raw_decay.double()).cumsum(0)[:, None]  # -ln g, [h, 1]
        position = batch.pad(batch.index.double(), batch.any_alignment)  # i, [b, t]
        a = -rate * position[:, None]  # [b, h, t]
        return sum_past(q, k, v, (a, a))

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

            first half of the columns      sum_j 2^(-x) cos(x) v_j
            second half                    sum_j 2^(-x) sin(x) v_j

        over j <= i with x = 2 pi (t_i - t_j) / period (FuXi-Linear, Ye et al., 2026). t_i is the
        time of the request after interaction i if it is known, else that of interaction i. In each
        half every column has a period of its own.

        :func:`~recbole_pos.position.mixing.sum_past` takes q_i, k_j, a_i and c_j and returns
        sum_j exp(a_i - c_j) (q_i . k_j) v_j. With the angles x_i = 2 pi t_i / period and
        x_j = 2 pi t_j / period the weights have this form, since x = x_i - x_j:

            cos(x)  = (cos x_i, sin x_i) . (cos x_j, sin x_j)
            sin(x)  = (sin x_i, -cos x_i) . (cos x_j, sin x_j)
            2^(-x)  = exp(a_i - c_j)     with a_i = -ln 2 x_i and c_j = -ln 2 x_j

        Args:
            values: [b, h, t, columns] values v.
            batch: the histories, with times; those of fewer than t interactions are padded.

        Returns:
            [b, h, t, columns].
        """
        # angles [b, h num_pairs, t]: every column of a half counts as a head with its own period
        b, h, t, columns = values.shape
        align, num_pairs = batch.any_alignment, self.num_pairs  # columns of a half
        frequency = self.bank()[:, None]  # 2 pi / period, [h num_pairs, 1]
        x_i = batch.pad(batch.request.elapsed.detach(), align)[:, None] * frequency
        x_j = batch.pad(batch.elapsed.detach(), align)[:, None] * frequency

        # queries of the two halves, and the keys of both, [b, h num_pairs, t, 2] each
        cos, sin = x_i.cos(), x_i.sin()
        queries = torch.stack((cos, sin), -1), torch.stack((sin, -cos), -1)
        k = torch.stack((x_j.cos(), x_j.sin()), -1).to(values.dtype)
        decays = -math.log(2) * x_i, -math.log(2) * x_j  # a and c

        # an odd number of columns is filled up by a column of zeros, so that halves are equal
        halves = F.pad(values, (0, 2 * num_pairs - columns)).chunk(2, -1)
        sums = []
        for q, half in zip(queries, halves, strict=True):
            v = half.transpose(2, 3).reshape(b, h * num_pairs, t, 1)
            # heads of one column are faster in short chunks
            out = sum_past(q.to(v.dtype), k, v, decays, TIME_CHUNK)
            sums.append(out.view(b, h, num_pairs, t).transpose(2, 3))
        return torch.cat(sums, -1)[..., :columns]  # without the column that was filled up
