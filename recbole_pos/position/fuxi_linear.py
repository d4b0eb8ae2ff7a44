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
from recbole_pos.position.mixing import sum_past
from recbole_pos.position.rotary import (
    FrequencyBank,
    base_form,
    require_periods,
    wavelength_form,
)
from recbole_pos.values import SECONDS

TIME_CHUNK = 16  # interactions of a chunk in the channel of time: each column has its own weights


class FuXiLinear(AttentionPosition):
    """Retention, a learned kernel of positions and periodic retention of time (FuXi-Linear, 2026).

    A head's value is cut in three, v = (v^c, v^p, v^t), q, k and v^c go through SiLU, and

        out_i = ( sum_j g_h^(i - j) (q_i . k_j) / sqrt(e) v^c_j,
                  alpha sum_j (p_i . p_j) / (s / 2) v^p_j + beta v^p_i,
                  sum_j 2^(-a) cos(a) v^t_j in half of its columns, sin(a) in the others )
        over j <= i, with a = 2 pi (t_i - t_j) / period

    g_h falls from head to head and is learned, as are the rows p of size s, sines and cosines when
    fresh, alpha and beta. Every pair of columns of v^t has a period, log-spaced over all heads.
    Sums are computed in chunks, so that the cost is linear in the length; dropout of weights falls
    on the values. Differences to the authors' code: channels share the width of one value and are
    not normalised one by one, the gate and the feed-forward network are the backbone's
    (``block: ligr`` comes near), and t_i is the request's time only with ``request_time: target``,
    which the code always takes.

    Args:
        dimensions: sizes of the model; heads of at least three numbers.
        channel_share: share of a head for order, and for time: below 1/2.
        fuxi_position_size: s, even.
        time_min_period, time_max_period: the shortest and the longest period.
        time_unit: unit of both.
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
        """Create the decay of each head [h], the rows p [n, s], alpha and beta, and the periods.

        Args:
            dimensions: sizes of the model; heads of at least three numbers.
            channel_share: share of a head's columns for order, and for time: below 1/2.
            fuxi_position_size: s, even.
            time_min_period, time_max_period: the shortest and the longest period.
            time_unit: unit of both.

        Raises:
            UsageError: if s is odd, a period is wrong, or no column is left for content.
        """
        super().__init__()
        if fuxi_position_size % 2:
            raise UsageError(f"fuxi_position_size: must be even, found {fuxi_position_size}")

        # the columns of a head for content, order and time: 16 and a share of 0.25 give 8, 4, 4
        e, h = dimensions.head_size, dimensions.n_heads
        size = max(1, round(channel_share * e))
        if 2 * size >= e:
            raise UsageError(
                f"channel_share: {channel_share} of a head of {e} numbers for order and as much "
                "for time leave none for content; give a smaller one, or raise hidden_size"
            )
        self.sizes = [e - 2 * size, size, size]

        # a fixed period for each pair of columns for time of each head
        self.num_pairs = math.ceil(size / 2)
        require_periods(time_min_period, time_max_period, time_unit)
        shortest, longest = (x * SECONDS[time_unit] for x in (time_min_period, time_max_period))
        # radians per second, whose periods are log-spaced; fixed and without learned factors
        frequencies = wavelength_form(h * self.num_pairs, shortest, longest)
        self.bank = FrequencyBank(frequencies, "fixed", scaled=False)

        # What is learned: a number for each head, by whose softplus its rate of decay is above that
        # of the head before; a vector p of each position, the rows of a table that starts as sines
        # and cosines; alpha and beta.
        self.raw_decay = nn.Parameter(torch.zeros(h))
        frequency = base_form(fuxi_position_size // 2, 1e4, 1.0)  # 10000^(-2c / s) of column c
        angle = torch.arange(dimensions.max_length)[:, None] * frequency
        rows = torch.cat((angle.sin(), angle.cos()), 1)
        self.positions = nn.Parameter(rows.to(torch.get_default_dtype()))
        self.share = nn.Parameter(torch.tensor([0.02, 1.0]))  # alpha, beta

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: SequenceBatch, dropout: Dropout
    ) -> Tensor:
        """Sum the values of older interactions by content, by order and by time, side by side.

        The e columns of a value are cut into three parts, v = (v^c, v^p, v^t):

            content   sum_j g^(i - j) (silu(q_i) . silu(k_j)) / sqrt(e) silu(v^c_j)
            order     alpha sum_j (p_i . p_j) / (s / 2) v^p_j + beta v^p_i
            time      see :meth:`_sum_periodically`

        over j <= i, with a decay g of each head and learned rows p of size s (FuXi-Linear, Ye et
        al., 2026). Sums are computed in chunks, at a cost linear in the length.

        Args:
            query, key, value: [m, h, e] q, k and v of all m interactions, history after history.
            batch: the histories, with times.
            dropout: dropout, which falls on the values, as weights never exist.

        Returns:
            [m, h, e], history after history.
        """
        # Pad histories to one length. Sums over older interactions are right with padding at either
        # end, so the batch chooses the cheaper one (any_alignment).
        e, dtype, align = query.size(-1), value.dtype, batch.any_alignment
        scaled = torch.cat((F.silu(query) / math.sqrt(e), F.silu(key), dropout(value)), -1)
        block = batch.pad(scaled, align).transpose(1, 2)  # [b, h, t, 3e]
        # ``sizes`` are the columns of the three parts of v
        q, k, content, order, time = block.split([e, e, *self.sizes], -1)

        # Logarithms of the decay g^i [b, h, t], which falls with the position; then p, alpha, beta.
        # The rate of each head is that of the head before plus a positive number.
        rate = F.softplus(self.raw_decay.double()).cumsum(0)[:, None]  # -ln g, [h, 1]
        log_decay = -rate * batch.pad(batch.index.double(), align)[:, None]
        p = batch.pad(self.positions[batch.index].to(dtype), align)[:, None]
        alpha, beta = self.share.to(dtype)

        # sum_past(q, k, v) returns the sums over j <= i of (q_i . k_j) v_j
        channels = (
            sum_past(q, k, F.silu(content), (log_decay, log_decay)),
            alpha * sum_past(p, p * (2 / p.size(-1)), order) + beta * order,
            self._sum_periodically(time, batch),
        )
        out = torch.cat([x.to(dtype) for x in channels], -1)
        return batch.unpad(out.transpose(1, 2), align)

    def _sum_periodically(self, values: Tensor, batch: SequenceBatch) -> Tensor:
        """Sum the values of older interactions by weights that are periodic in the time between.

            out_i = sum_j 2^(-a) cos(a) v_j in half of the columns, sin(a) in the others

        over j <= i with a = 2 pi (t_i - t_j) / period (FuXi-Linear, Ye et al., 2026). The cosine
        and the sine of a difference are products of a vector of i and a vector of j, which are
        query and key of :func:`~recbole_pos.position.mixing.sum_past`.

        Args:
            values: [b, h, t, columns] values v, padded.
            batch: the histories, with times.

        Returns:
            [b, h, t, columns].
        """
        b, h, t, columns = values.shape
        dtype, num_pairs = values.dtype, self.num_pairs

        # Angles of queries and of keys, [b, h num_pairs, t] each, from the seconds since the oldest
        # interaction (``elapsed``) times the frequencies, which ``bank`` returns. A query is asked
        # at the time of its request, the moment at which the next item is asked for.
        align, frequency = batch.any_alignment, self.bank()[:, None]  # [h num_pairs, 1]
        query_angle = batch.pad(batch.request.elapsed.detach(), align)[:, None] * frequency
        key_angle = batch.pad(batch.elapsed.detach(), align)[:, None] * frequency

        # The two factors of cos(a - c) = cos a cos c + sin a sin c, for the first half of the
        # columns, and of sin(a - c) = sin a cos c - cos a sin c, for the second.
        cos, sin = query_angle.cos(), query_angle.sin()
        q = torch.stack((torch.cat((cos, sin), 1), torch.cat((sin, -cos), 1)), -1).to(dtype)
        k = torch.stack((key_angle.cos(), key_angle.sin()), -1).to(dtype).repeat(1, 2, 1, 1)
        # logarithms of the decay 2^(-a)
        query_decay = (-math.log(2) * query_angle).repeat(1, 2, 1)
        key_decay = (-math.log(2) * key_angle).repeat(1, 2, 1)

        # Every column has its own weights, so it is summed on its own, as a head of one column, and
        # put back in its place. An odd number of columns is filled up, to have two halves. Heads of
        # few columns are faster in short chunks (``TIME_CHUNK``).
        v = F.pad(values, (0, 2 * num_pairs - columns)).unflatten(-1, (2, num_pairs))
        v = v.permute(0, 3, 1, 4, 2).reshape(b, -1, t, 1)  # [b, 2 h num_pairs, t, 1]
        out = sum_past(q, k, v, (query_decay, key_decay), TIME_CHUNK).view(b, 2, h, num_pairs, t)
        return out.permute(0, 2, 4, 1, 3).flatten(3)[..., :columns]
