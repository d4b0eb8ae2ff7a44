"""Rotary angles of order, and of an interaction's time through a small sinusoidal network.

Reference:
    Hailing Cheng, Daqi Sun, Xinyu Lu. "Learning to Rotate: Temporal and Semantic Rotary Encoding
    for Sequential Modeling." 2026 (arXiv 2604.24717), SIREN-RoPE.

Implemented from the abstract: continuous times and cyclical patterns turn query and key through a
sinusoidal network of two branches. Sizes, scales and fresh weights are this module's. Shapes as in
``layers/context.py``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.frequencies import FrequencyBank, base_form, make_angles
from recbole_pos.position.rotary import count_planes
from recbole_pos.position.time_rotary import PERIODS, AngularPosition
from recbole_pos.values import SECONDS

SPAN = 10.0  # log1p of 60 years in days, which scales the signal of elapsed time to about 1


class SirenRotaryPosition(AngularPosition):
    """Rotary positions whose angles are learned functions of time (SIREN-RoPE, Cheng et al. 2026).

    Plane k of a head turns interaction number n at time t by

        angle_k = n base^(-k / planes) + (W sin(omega (A u(t) + a)) + V gelu(B u(t) + b))_k
        u(t) = (log(1 + max(t - t_first, 0)) / 10,
                and sin, cos of 2 pi t / period for every calendar part)

    The frequencies of time are the rows of A, which are learned and mix all signals. W and V are 0
    when fresh, so that a fresh model equals one with ``rope``. Unlike in other rotary schemes,
    products depend on when two interactions happened, not only on the time between them.

    Args:
        rope_base: the base of order.
        calendar_parts: of hour, day, week, month, year, decade; in UTC.
        siren_width: hidden units of each branch.
        siren_omega: omega, how fast fresh waves are.
        time_unit: unit of t - t_first.
    """

    options = ("rope_base", "calendar_parts", "siren_width", "siren_omega", "time_unit")

    def __init__(
        self,
        dimensions: Dimensions,
        *,
        rope_base: float,
        calendar_parts: list[str],
        siren_width: int,
        siren_omega: float,
        time_unit: str,
    ) -> None:
        """Create A and B [width, signals + 1], biases included, and W and V [planes, width]."""
        super().__init__()
        planes = count_planes(dimensions, "siren_rope")
        num_signals = 1 + 2 * len(calendar_parts)
        self.omega, self.time_unit, self.calendar_parts = siren_omega, time_unit, calendar_parts
        self.order = FrequencyBank(base_form(planes, rope_base, 1.0), "fixed", scaled=False)
        # the last column of A and of B is the bias
        self.sine = nn.Parameter(torch.empty(siren_width, num_signals + 1))
        self.smooth = nn.Parameter(torch.empty(siren_width, num_signals + 1))
        for inner in (self.sine, self.smooth):
            nn.init.uniform_(inner, -1 / num_signals, 1 / num_signals)
        self.sine_out = nn.Parameter(torch.zeros(planes, siren_width))
        self.smooth_out = nn.Parameter(torch.zeros(planes, siren_width))

    def signals(self, ctx: SequenceContext) -> Tensor:
        """Return u(t) of every interaction and a 1 for the bias, [m, num_signals + 1] float64."""
        assert ctx.times is not None  # ``elapsed`` raises first
        # A given split may have test interactions before those of training: times are clamped.
        columns = [torch.log1p(self.time(ctx).clamp(min=0)) / SPAN]
        for name in self.calendar_parts:
            period = PERIODS[name] * SECONDS["days"]
            angle = 2 * math.pi * ctx.times.remainder(period) / period
            columns += [angle.sin(), angle.cos()]
        return torch.stack([*columns, torch.ones_like(columns[0])], 1)

    def angles(self, ctx: SequenceContext) -> Tensor:
        """Return the angles of order and learned time, [m, 1, e / 2], the same for all heads."""
        key = (type(self), self.time_unit, *self.calendar_parts)
        u = ctx.cached(key, lambda: self.signals(ctx)).to(self.sine.dtype)
        with torch.autocast(u.device.type, enabled=False):  # angles need their digits
            waves = (self.omega * (u @ self.sine.T)).sin() @ self.sine_out.T
            smooth = F.gelu(u @ self.smooth.T) @ self.smooth_out.T
        return (make_angles(ctx.index.double(), self.order()) + waves + smooth)[:, None]
