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
        """Divide the columns of a head, and create the periods and the learned numbers.

        The first columns of a head attend by content, with a decay g^(i - j) of older interactions;
        the next by order, with weights alpha p_i . p_j of learned rows p and beta for interaction i
        itself; the last by time, with weights that are periodic in t_i - t_j. :meth:`attend` has
        the formulas. Learned are p, alpha, beta, and ``raw_decay``, which gives g: the softplus of
        it, added up over the heads so far, is -ln g, so that g falls from head to head.

        Args:
            dimensions: sizes of the model; heads of at least three numbers.
            channel_share: share of a head's columns for order, and for time: below 1/2.
            fuxi_position_size: s, the length of the rows p; an odd number is lowered by one.
            time_min_period, time_max_period: the shortest and the longest period.
            time_unit: unit of both.

        Raises:
            UsageError: if a period is wrong, or no column is left for content.
        """
        super().__init__()
        # the columns of a head for content, order and time: 16 and a share of 0.25 give 8, 4, 4
        e, h = dimensions.head_size, dimensions.n_heads
        size = max(1, round(channel_share * e))
        if 2 * size >= e:
            raise UsageError(
                f"channel_share: {channel_share} of a head of {e} numbers for order and as much "
                "for time leave none for content; give a smaller one, or raise hidden_size"
            )
        self.sizes = [e - 2 * size, size, size]

        # A fixed period for each pair of columns for time of each head. The bank returns the
        # frequencies 2 pi / period in radians per second, [h num_pairs].
        self.num_pairs = math.ceil(size / 2)
        rotary.require_periods(time_min_period, time_max_period, time_unit)
        shortest, longest = (x * SECONDS[time_unit] for x in (time_min_period, time_max_period))
        frequencies = rotary.wavelength_form(h * self.num_pairs, shortest, longest)  # log-spaced
        self.bank = rotary.FrequencyBank(frequencies, "fixed", scaled=False)

        # the learned numbers; a fresh row p_i has the sines and cosines of i 10000^(-2c / s)
        self.raw_decay = nn.Parameter(torch.zeros(h))
        frequency = rotary.base_form(fuxi_position_size // 2, 1e4, 1.0)  # 10000^(-2c / s), [s / 2]
        angle = torch.arange(dimensions.max_length)[:, None] * frequency
        rows = torch.cat((angle.sin(), angle.cos()), 1)
        self.positions = nn.Parameter(rows.to(torch.get_default_dtype()))
        self.share = nn.Parameter(torch.tensor([0.02, 1.0]))  # alpha, beta

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Sum the values of older interactions by content, by order and by time, side by side.

        The e columns of a value are cut into three parts, v = (v^c, v^p, v^t), of :attr:`sizes`:

            content   sum_j g^(i - j) (silu(q_i) . silu(k_j)) / sqrt(e) silu(v^c_j)
            order     alpha sum_j (p_i . p_j) / (s / 2) v^p_j + beta v^p_i
            time      see :meth:`_sum_periodically`

        over j <= i, with a decay g of each head and learned rows p of size s (FuXi-Linear, Ye et
        al., 2026). ``sum_past(q, k, v, (a, c))`` returns sum_j exp(a_i - c_j) (q_i . k_j) v_j.

        Args:
            query, key, value: [m, h, e] q, k and v of all m interactions, history after history.
            batch: the histories, with times.
            dropout: dropout, which falls on the values, as weights never exist.

        Returns:
            [m, h, e], history after history.
        """
        # Pad histories to one length. Sums over older interactions are right with padding at either
        # end; ``any_alignment`` is the cheaper one.
        e, dtype, align = query.size(-1), value.dtype, batch.any_alignment
        scaled = torch.cat((F.silu(query) / math.sqrt(e), F.silu(key), dropout(value)), -1)
        block = batch.pad(scaled, align).transpose(1, 2)  # [b, h, t, 3e]
        q, k, content, order, time = block.split([e, e, *self.sizes], -1)

        # content: g^(i - j) is exp(a_i - a_j) with a_i = i ln g, which falls with the position i
        rate = F.softplus(self.raw_decay.double()).cumsum(0)[:, None]  # -ln g, [h, 1]
        log_decay = -rate * batch.pad(batch.index.double(), align)[:, None]  # a, [b, h, t]
        by_content = sum_past(q, k, F.silu(content), (log_decay, log_decay))

        # order: ``batch.index`` is the position i
        p = batch.pad(self.positions[batch.index].to(dtype), align)[:, None]  # [b, 1, t, s]
        alpha, beta = self.share.to(dtype)
        by_order = alpha * sum_past(p, p * (2 / p.size(-1)), order) + beta * order

        by_time = self._sum_periodically(time, batch)
        out = torch.cat([x.to(dtype) for x in (by_content, by_order, by_time)], -1)
        return batch.unpad(out.transpose(1, 2), align)

    def _sum_periodically(self, values: Tensor, batch: SequenceBatch) -> Tensor:
        """Sum the values of older interactions by weights that are periodic in the time between.

            out_i = sum_j 2^(-x) cos(x) v_j in half of the columns, sin(x) in the others

        over j <= i with x = 2 pi (t_i - t_j) / period (FuXi-Linear, Ye et al., 2026), where t_i is
        the time of the request after interaction i if it is known. With the angles
        a_i = 2 pi t_i / period and c_j = 2 pi t_j / period each weight is a product of a vector of
        i and a vector of j, as :func:`~recbole_pos.position.mixing.sum_past` needs it:

            cos(a - c) = (cos a, sin a) . (cos c, sin c)
            sin(a - c) = (sin a, -cos a) . (cos c, sin c)
            2^(c - a)  = exp(-ln 2 a - (-ln 2 c))

        Args:
            values: [b, h, t, columns] values v, padded.
            batch: the histories, with times.

        Returns:
            [b, h, t, columns].
        """
        b, h, t, columns = values.shape
        dtype, num_pairs = values.dtype, self.num_pairs

        # angles a and c [b, h num_pairs, t], with times in seconds since the oldest interaction
        align, frequency = batch.any_alignment, self.bank()[:, None]  # [h num_pairs, 1]
        a = batch.pad(batch.request.elapsed.detach(), align)[:, None] * frequency
        c = batch.pad(batch.elapsed.detach(), align)[:, None] * frequency

        # The vectors of i and of j, [b, 2 h num_pairs, t, 2]: for the first half of the columns
        # those of the cosine, for the second those of the sine. Then the logarithms of 2^(c - a).
        cos, sin = a.cos(), a.sin()
        q = torch.stack((torch.cat((cos, sin), 1), torch.cat((sin, -cos), 1)), -1).to(dtype)
        k = torch.stack((c.cos(), c.sin()), -1).to(dtype).repeat(1, 2, 1, 1)
        log_decays = (-math.log(2) * a).repeat(1, 2, 1), (-math.log(2) * c).repeat(1, 2, 1)

        # Every column has weights of its own, so it becomes a head of one column. An odd number of
        # columns is filled up by one. Heads of few columns are faster in short chunks.
        v = F.pad(values, (0, 2 * num_pairs - columns)).unflatten(-1, (2, num_pairs))
        v = v.permute(0, 3, 1, 4, 2).reshape(b, -1, t, 1)  # [b, 2 h num_pairs, t, 1]
        out = sum_past(q, k, v, log_decays, TIME_CHUNK)

        # back to columns: [b, 2, h, num_pairs, t] to [b, h, t, 2 num_pairs]
        out = out.view(b, 2, h, num_pairs, t).permute(0, 2, 4, 1, 3)
        return out.flatten(3)[..., :columns]
