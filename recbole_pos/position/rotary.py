"""Rotary positions: banks of frequencies, and the rotation of query and key by order.

A query and a key are rotated, so that their product depends on how far apart they are. A bank says
how fast the planes of a head turn with order or with time (``time_rotary.py``). Shapes: m
interactions, one frequency for each plane of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch


def base_form(planes: int, base: float, scale: float) -> Tensor:
    """Return RoFormer's frequencies of rotations: scale * base^(-c / planes) for c = 0, 1, ...

    A plane is a pair of columns of a head, and plane c is rotated by its frequency, in radians, for
    each position or unit of time (TO-RoPE, Wei et al., 2025, equation 3).

    Args:
        planes: number of frequencies.
        base: factor by which frequencies fall from c = 0 to c = planes.
        scale: the first frequency.

    Returns:
        [planes] float64.
    """
    return scale * base ** (-torch.arange(planes, dtype=torch.float64) / planes)


def wavelength_form(planes: int, shortest: float, longest: float) -> Tensor:
    """Return frequencies whose periods are log-spaced (TO-RoPE, Wei et al., 2025, section 3.2).

    The period is the time of a whole turn, 2 pi / frequency. Three periods from 1 to 100 are 1, 10
    and 100.

    Args:
        planes: number of frequencies; a single one has the geometric mean of both periods.
        shortest, longest: first and last period.

    Returns:
        [planes] float64 radians per unit of the periods, falling.
    """
    low, high = math.log(shortest), math.log(longest)
    if planes == 1:
        low = high = (low + high) / 2
    return 2 * math.pi / torch.linspace(low, high, planes, dtype=torch.float64).exp()


def require_periods(shortest: float, longest: float, unit: str) -> None:
    """Raise a UsageError unless the shortest period is above 0 and below the longest."""
    if not 0 < shortest < longest:
        raise UsageError(
            f"time_min_period must be above 0 and below time_max_period, found {shortest} and "
            f"{longest} {unit}"
        )


def make_angles(position: Tensor, frequency: Tensor) -> Tensor:
    """Return the angles of rotary schemes: each position, or time, times each frequency.

    Rotary schemes rotate planes, pairs of columns of a head, by these angles. Whole turns are taken
    off, so that angles are small and keep their digits in a shorter type.

    Args:
        position: [m] float64 positions or times.
        frequency: [..., planes] float64 radians for each position, or unit of time.

    Returns:
        [m, ..., planes] float64, from -pi to pi.
    """
    position = position.view(-1, *[1] * frequency.dim())  # [m, 1, ..., 1]
    angle = position * frequency
    num_turns = (angle.detach() / (2 * math.pi)).round()
    return angle - 2 * math.pi * num_turns


class FrequencyBank(nn.Module):
    """Frequencies of one source, order or time: how fast each plane turns.

    A plane is a pair of columns of query and key that is rotated by one angle. The frequency w_c of
    plane c is one of

        fixed     start_c
        free      exp(log_c)                                                 log learned
        ladder    exp(log_first - softplus(s_1) - ... - softplus(s_c))       log_first and s learned

    so that a ladder always falls. With ``scaled`` it is times softplus(raw_scale_c), a learned
    factor that is 1 when fresh: the paper's a_c and b_c.

    The parameters are ``log``, or ``log_first`` and ``raw_step`` (s), and ``raw_scale``.
    """

    start: Tensor

    def __init__(self, start: Tensor, learn: str, scaled: bool) -> None:
        """Keep the frequencies of a rotary position scheme, or create parameters to learn them.

        A rotary scheme rotates pairs of columns of queries and keys, and each pair has a frequency:
        its angle per interaction, or per unit of time. :meth:`forward` computes the frequencies
        from the parameters; before training it returns ``start``.

        Args:
            start: [pairs] float64 frequencies before training, falling from pair to pair. It may be
                empty; then nothing is learned.
            learn: ``fixed``: nothing is learned. ``free``: the logarithm of each frequency is.
                ``ladder``: the logarithm of the first is learned, and the step down from each
                logarithm to the next, so that frequencies always fall.
            scaled: whether each frequency is multiplied by a further learned factor above 0.
        """
        super().__init__()
        if not len(start):
            learn, scaled = "fixed", False
        self.learn = learn
        log, dtype = start.log(), torch.get_default_dtype()

        # Steps and factors must be above 0, and a parameter may be any number. So :meth:`forward`
        # takes the softplus of the parameter, log(1 + exp(raw)), and the parameter that gives x is
        # raw = log(exp(x) - 1). expm1(x) is exp(x) - 1.
        if learn == "fixed":
            self.register_buffer("start", start, persistent=False)
        elif learn == "free":
            self.log = nn.Parameter(log.to(dtype))
        else:
            steps = log[:-1] - log[1:]  # from each logarithm down to the next
            self.log_first = nn.Parameter(log[:1].to(dtype))
            self.raw_step = nn.Parameter(steps.expm1().log().to(dtype))

        raw_ones = torch.full(start.shape, math.log(math.expm1(1.0)), dtype=dtype)  # factors of 1
        self.raw_scale = nn.Parameter(raw_ones) if scaled else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrequencyBank:
        """Move and cast the module, as torch asks, but keep fixed frequencies in float64.

        torch calls this method for ``module.half()``, ``module.to("cuda")`` and the like. A cast
        would take digits from the frequencies that long times need.

        Args:
            fn: function that torch applies to all tensors, such as a cast to half precision.
            recurse: whether it is applied to modules within this one, too.

        Returns:
            The module.
        """
        # Learned frequencies are computed from parameters, which may be cast. Fixed ones are in the
        # buffer ``start``: torch casts and moves it, and here it gets its digits back.
        exact = self.start if self.learn == "fixed" else None
        super()._apply(fn, recurse)
        if exact is not None:
            self.start = exact.to(self.start.device)
        return self

    def forward(self) -> Tensor:
        """Return the frequencies: by how many radians each plane turns for an interaction, or time.

        A plane is a pair of columns of query and key. How ``self.learn`` computes frequencies:

            fixed     ``start`` [planes] has them; nothing is learned
            free      ``log`` [planes] has their logarithms, which are learned one by one
            ladder    ``log_first`` [1] is the logarithm of the first one; each next logarithm is
                      smaller by softplus(raw_step), with ``raw_step`` [planes - 1]; both learned

        As a softplus is above 0, the frequencies of a ladder always fall from plane to plane.
        Finally, if ``raw_scale`` [planes] is not None, each frequency is multiplied by
        softplus(raw_scale), a learned factor.

        Returns:
            [planes] float64 radians per interaction, or per unit of time.
        """
        if self.learn == "fixed":
            frequency = self.start
        elif self.learn == "free":
            frequency = self.log.double().exp()
        else:
            # how far each logarithm is below the first: steps of 1 and 2 give 0, 1, 3
            sums = F.softplus(self.raw_step.double()).cumsum(0)  # here 1, 3
            frequency = (self.log_first.double() - F.pad(sums, (1, 0))).exp()
        if self.raw_scale is not None:
            frequency = frequency * F.softplus(self.raw_scale.double())
        return frequency


def build_time_bank(
    planes: int, options: Mapping[str, Any], *, learn: str, scaled: bool, factor: float = 1.0
) -> FrequencyBank:
    """Build a module that returns the frequencies of a rotary scheme, by which it turns with time.

    A rotary scheme rotates pairs of columns of queries and keys (planes). Plane c turns by its
    frequency, in radians, in each ``time_unit``. Before training the frequencies are

    - if ``time_base`` is given, time_scale * time_base^(-c / planes), as in RoFormer;
    - else those of log-spaced periods. A period is the time of a whole turn: 3 planes have the
      periods 1, 10 and 100 days if the shortest is 1 day and the longest 100.

    Args:
        planes: number of frequencies.
        options: ``time_unit``, ``time_base`` (a number or None), ``time_scale``,
            ``time_min_period`` and ``time_max_period``.
        learn: how frequencies are learned. ``fixed``: not at all. ``free``: each by itself.
            ``ladder``: so that each stays below the one before.
        scaled: whether each frequency is also multiplied by a learned factor, at first 1.
        factor: number by which all frequencies are multiplied before training.

    Returns:
        The module, whose result is [planes] float64.

    Raises:
        UsageError: if the shortest period is not above 0 and below the longest.
    """
    if options["time_base"] is not None:
        start = base_form(planes, options["time_base"], options["time_scale"])
    else:
        shortest, longest = options["time_min_period"], options["time_max_period"]
        require_periods(shortest, longest, options["time_unit"])
        start = wavelength_form(planes, shortest, longest)  # 2 pi / period of each plane
    return FrequencyBank(factor * start, learn, scaled)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_(i + e/2)) of vectors by angles (Su et al., RoFormer, 2021).

    RoFormer pairs neighbours (x_2i, x_(2i+1)) instead: the same up to a fixed order of the columns
    of the projections.

    Args:
        x: [..., e] vectors.
        cos, sin: [..., e / 2] cosines and sines of the angles.

    Returns:
        [..., e].
    """
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def count_planes(dimensions: Dimensions, scheme: str) -> int:
    """Return the number of planes of a head, which is half the number of its columns.

    A plane is a pair of columns of queries and keys. Rotary position schemes turn each plane by an
    angle of its own.

    Args:
        dimensions: sizes of the model, with heads of ``head_size`` columns.
        scheme: name of the position scheme, for the message.

    Raises:
        UsageError: if a head has an odd number of columns.
    """
    if dimensions.head_size % 2:
        raise UsageError(
            f"{scheme} rotates pairs and needs heads of even size; hidden_size "
            f"{dimensions.hidden_size} over {dimensions.n_heads} heads gives {dimensions.head_size}"
        )
    return dimensions.head_size // 2


class RotaryPosition(AttentionPosition):
    """Rotary positions, (R_i q_i) . (R_j k_j) (Su et al., RoFormer, 2021).

    Plane c of a head turns by position * base^(-2c/e).

    Args:
        rope_base: the base.
    """

    options = ("rope_base",)
    cos: Tensor
    sin: Tensor

    def __init__(self, dimensions: Dimensions, *, rope_base: float) -> None:
        """Compute the table of angles by which positions are rotated, as cosines and sines.

        Plane c, a pair of columns of a head, turns by position * base^(-2c/e). There is a table
        ``cos`` and a table ``sin``, [n, e / 2] each, for n positions and heads of size e.

        Args:
            dimensions: sizes of the model.
            rope_base: the base.
        """
        super().__init__()
        # base_form gives scale * base^(-c / planes), here with scale 1 and e / 2 planes
        frequency = base_form(count_planes(dimensions, "rope"), rope_base, 1.0)
        angle = torch.arange(dimensions.max_length, dtype=torch.float64)[:, None] * frequency
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def rotate(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[batch.index, None], self.sin[batch.index, None]  # [m, 1, e / 2]
        return rotate_pairs(q, cos, sin).to(q.dtype), rotate_pairs(k, cos, sin).to(k.dtype)
