"""Content, order and time in channels of their own, each with weights and values of its own.

Reference:
    Yufei Ye et al. "FuXi-alpha: Scaling Recommendation Model with Feature Interaction Enhanced
    Transformer." 2025 (arXiv 2502.03036): its adaptive multi-channel self-attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext, future_mask
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.triangular import toeplitz_matrix
from recbole_pos.position.time_buckets import look_up_intervals


class SeparateChannels(AttentionPosition):
    """Three weighted sums side by side, after FuXi-alpha's adaptive multi-channel self-attention.

    A head's value is cut in three, v = (v^c, v^p, v^t), and with j <= i

        out_i = ( sum_j softmax_j(q_i . k_j / sqrt(e)) v^c_j,
                  sum_j softmax_j(w_pos[i - j]) v^p_j,
                  sum_j softmax_j(w_time[bucket(t_i - t_j)]) v^t_j )

    so that order and time need not speak through the logits of content. Tables are one each per
    layer, zero when fresh: the mean of the past. Differences to FuXi-alpha: weights are normalised
    (its channels have none, or SiLU), the channels share the width of one value instead of having
    a whole one each, and the block around them is the backbone's.

    Args:
        dimensions: sizes of the model; heads of at least three numbers.
        channel_share: part of a head for order, and for time: below one half, rounded, at least one
            number each.
        hstu_time_buckets: entries of w_time; the last one takes everything that is longer.

    Raises:
        UsageError: if nothing is left for content.
    """

    options = ("channel_share", "hstu_time_buckets")
    needs_time = True
    reads_request = True

    def __init__(
        self, dimensions: Dimensions, *, channel_share: float, hstu_time_buckets: int
    ) -> None:
        super().__init__()
        self.sizes = channel_sizes(channel_share, dimensions.head_size)
        self.distance = nn.Parameter(torch.zeros(dimensions.max_length))
        self.time = nn.Parameter(torch.zeros(hstu_time_buckets))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ctx: SequenceContext, dropout: Dropout
    ) -> Tensor:
        """Return the three sums of the class docstring side by side, packed [m, h, e]."""
        e, t = query.size(-1), ctx.width
        block = ctx.pad(torch.cat((query, key, value), -1), "start")  # [b, t, h, 3e]
        q, k, content, order, time = block.split([e, e, *self.sizes], -1)
        q, k, content = (part.transpose(1, 2) for part in (q, k, content))
        padded = F.pad(content, (0, e - content.size(-1)))  # fused attention has one head size
        mixed = F.scaled_dot_product_attention(
            q, k, padded, dropout_p=dropout.p if dropout.training else 0.0, is_causal=True
        )
        parts = [mixed[..., : content.size(-1)].transpose(1, 2)]
        future = future_mask(t, q.device)
        logits = (toeplitz_matrix(self.distance, t)[None], look_up_intervals(self.time, ctx))
        for logit, x in zip(logits, (order, time), strict=True):
            weights = (
                logit.masked_fill(future, -torch.inf).softmax(-1).to(x.dtype)
            )  # [1 or b, t, t]
            parts.append((dropout(weights) @ x.flatten(2)).view_as(x))
        return ctx.unpad(torch.cat([part.to(value.dtype) for part in parts], -1), "start")


def channel_sizes(share: float, e: int) -> tuple[int, int, int]:
    """Return how many of the e numbers of a head are for content, for order and for time.

    Raises:
        UsageError: if nothing is left for content.
    """
    part = max(1, round(share * e))
    if 2 * part >= e:
        raise UsageError(
            f"channel_share: {share} of a head of {e} numbers for order and as much for time leave "
            "none for content; give a smaller one, or raise hidden_size"
        )
    return e - 2 * part, part, part
