"""A term on the logits that falls, or rises, with the time between two interactions.

Shapes as in ``layers/context.py``.

References:
    Yufei Ye et al. "FuXi-beta: Towards a Lightweight and Fast Large-Scale Generative
    Recommendation Model." 2025 (arXiv 2508.10615): a power of the time instead of buckets.
    Dezhi Yi et al. "FuXi-gamma: Efficient Sequential Recommendation with Exponential-Power
    Temporal Encoder and Diagonal-Sparse Positional Mechanism." 2025 (arXiv 2512.12740).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.position.time_buckets import map_spans
from recbole_pos.values import SECONDS

SHORTEST = 1e-9  # seconds, in place of 0, which has no logarithm


class TimeDecay(AttentionPosition):
    """Learned functions of the time between interactions, one for each head.

    With d = max(t_i - t_j, 1 ns) for query i and key j, and a, s > 0, b > 0 learned for each head:

        exponential_power:  B_ij = a 2^(-(d / s)^b)       (FuXi-gamma: a g^(d^b), g = 2^(-1 / s^b))
        power:              B_ij = a (1 + d / s)^(-b)     (FuXi-beta: a (1 + d)^(-b))

    Fresh b are 1, so that half of a is left at d = s; fresh s are log-spaced over the heads. Fresh
    a are 0, so that a fresh model equals its backbone. Differences to FuXi: the term is added to
    the logits of content, not in a channel of its own; there is s; each head has its own numbers.

    Args:
        decay_kind: ``exponential_power`` or ``power``.
        decay_shortest, decay_longest: s of the first and the last head, in ``time_unit``.
        time_unit: unit of both.
    """

    options = ("decay_kind", "decay_shortest", "decay_longest", "time_unit")
    needs_time = True
    reads_request = True

    def __init__(
        self,
        dimensions: Dimensions,
        *,
        decay_kind: str,
        decay_shortest: float,
        decay_longest: float,
        time_unit: str,
    ) -> None:
        """Create a, s and b of each head, [h]; s is log-spaced between the two times given."""
        super().__init__()
        if decay_shortest > decay_longest:
            raise UsageError(
                f"decay_shortest must not be above decay_longest, found {decay_shortest} and "
                f"{decay_longest} {time_unit}"
            )
        self.kind, h = decay_kind, dimensions.n_heads
        low, high = (math.log(x * SECONDS[time_unit]) for x in (decay_shortest, decay_longest))
        start = torch.linspace(low, high, h) if h > 1 else torch.tensor([(low + high) / 2])
        self.strength = nn.Parameter(torch.zeros(h))
        self.log_reach = nn.Parameter(start.to(torch.get_default_dtype()))  # ln of s in seconds
        # b by softplus, which is 1 here
        self.raw_power = nn.Parameter(torch.full((h,), math.log(math.expm1(1.0))))

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor:
        def compute_log_seconds() -> Tensor:
            return map_spans(ctx, lambda spans: spans.clamp_(min=SHORTEST).log_(), q.dtype)

        log_seconds = ctx.cached(("time_decay", q.dtype), compute_log_seconds)
        return self.curve(log_seconds[:, None])

    def curve(self, log_seconds: Tensor) -> Tensor:
        """Return the terms B, [..., h, t, t], at natural logarithms of seconds [..., 1, t, t]."""
        parameters = (self.strength, self.log_reach, self.raw_power)
        strength, log_reach, raw = (x.to(log_seconds.dtype)[:, None, None] for x in parameters)
        power = F.softplus(raw)
        log_ratio = log_seconds - log_reach  # ln(d / s)
        if self.kind == "exponential_power":
            # 2^-(e^80) is 0, and above the gradient would be 0 times infinity
            return strength * torch.exp2(-(power * log_ratio).clamp(max=80.0).exp())
        return strength * (-power * F.softplus(log_ratio)).exp()
