"""Rotary angles from time, and from time and order together (TO-RoPE).

Reference:
    Xiaokai Wei, Jiajun Wu, Daiyao Yi, Reza Shirkavand, Michelle Gong. "Rotate Both Ways:
    Time-and-Order RoPE for Generative Recommendation." 2025 (arXiv 2510.20455).

Equation 4, from its description in section 4.1: plane c of a head turns interaction i at time t_i
by

    angle_c(i) = (1 - g_c) a_c w_c i  +  g_c b_c f_c t_i

with frequencies w of order and f of time (a bank each, which has the positive scales a or b), and a
gate g in [0, 1].

A key turns by the time of its interaction. So does a query, or, with ``request_time: target``, by
the time of the request that it answers: t_{i+1} for the state after interaction i. Shapes as in
``layers/sequence_batch.py``; the planes of a head are e / 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.rotary import (
    FrequencyBank,
    base_form,
    build_time_bank,
    count_planes,
    make_angles,
    rotate_pairs,
)
from recbole_pos.values import SECONDS

# Days. Month and year are means of the Gregorian calendar: with calendar months equal gaps would
# turn by different angles.
PERIODS = {
    **{"hour": 1 / 24, "day": 1.0, "week": 7.0},
    **{"month": 365.2425 / 12, "year": 365.2425, "decade": 3652.425},
}

LEVELS = (365.25, 30.4375, 1.0)  # days of year, month and day in the code of RoTE

# Options of all schemes with a bank of frequencies of time (``rotary.build_time_bank``).
TIME_OPTIONS = ("time_unit", "time_min_period", "time_max_period", "time_base", "time_scale")


class AngularPosition(AttentionPosition):
    """Base of schemes that turn query and key by angles that differ from batch to batch.

    Attributes:
        time_unit: unit in which :meth:`time` counts.
        cache_key: options that fix the angles of a batch; None where parameters change them.
    """

    needs_time = True
    reads_request = True
    time_unit: str
    cache_key: tuple | None = None

    def angles(self, batch: SequenceBatch) -> Tensor:
        """Return the angle of every plane, [m, h or 1, e / 2] float64."""
        raise NotImplementedError

    def rotate(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of attention, so that their products depend on times.

        A key turns by the time of its interaction. A query turns by the time at which the next item
        is requested after it (``batch.request``), which is the time of its own interaction where
        requests have no times.

        Args:
            q, k: [m, h, e] queries and keys of all m interactions.
            batch: the histories, with times.

        Returns:
            The rotated queries and keys, [m, h, e] each.
        """
        # cosines and sines of the angles
        # (batch.request is batch itself if requests have no times)
        key_turns = self._cached_turns(batch)
        query_turns = key_turns if batch.request is batch else self._cached_turns(batch.request)
        return rotate_pairs(q, *query_turns).to(q.dtype), rotate_pairs(k, *key_turns).to(k.dtype)

    def turns(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines of the angles, [m, h or 1, e / 2] each."""
        angle = self.angles(batch).to(torch.get_default_dtype())
        return angle.cos(), angle.sin()

    def _cached_turns(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of :meth:`turns`, [m, h or 1, e / 2] each.

        If they depend on no parameter they are computed once per batch and shared by all layers.

        Args:
            batch: the m interactions, with times.
        """
        # cache_key holds the options that the angles depend on, or None
        if self.cache_key is None:  # they depend on parameters
            return self.turns(batch)
        key = (type(self), self.cache_key, torch.get_default_dtype())
        return batch.cached(key, lambda: self.turns(batch))

    def time(self, batch: SequenceBatch) -> Tensor:
        """Return [m] float64 the time since the sequence's oldest interaction, in ``time_unit``."""
        # times may count from any point: products depend on the difference of two times only
        return batch.elapsed / SECONDS[self.time_unit]


class BankRotaryPosition(AngularPosition):
    """Base of schemes that turn by time only, with the frequencies of one bank.

    Args:
        bank: frequencies in radians per ``time_unit``.
        cache_key: options that determine the frequencies of a bank without parameters.
    """

    def __init__(
        self, dimensions: Dimensions, bank: FrequencyBank, time_unit: str, cache_key: tuple
    ) -> None:
        """Keep the bank; its angles are shared by all layers unless it has parameters."""
        super().__init__()
        self.bank, self.time_unit, self.n_heads = bank, time_unit, dimensions.n_heads
        self.cache_key = None if list(bank.parameters()) else cache_key

    def angles(self, batch: SequenceBatch) -> Tensor:
        return make_angles(self.time(batch), self.bank())[:, None]

    @torch.no_grad()
    def time_periods(self) -> Tensor:
        """Return the seconds of a whole turn of each plane, [h, e / 2]."""
        periods = 2 * math.pi / self.bank() * SECONDS[self.time_unit]
        return periods.expand(self.n_heads, -1)


class TimeRotaryPosition(BankRotaryPosition):
    """Rotary positions that turn with time instead of order (Wei et al., TO-RoPE, section 3.2).

    Args:
        learn_frequencies: ``fixed``, ``ladder`` (learned, order kept) or ``free``.
        time_options: unit and bank, see ``properties/position/time_rope.yaml``.
    """

    options = ("learn_frequencies", *TIME_OPTIONS)

    def __init__(
        self, dimensions: Dimensions, *, learn_frequencies: str, **time_options: Any
    ) -> None:
        planes = count_planes(dimensions, "time_rope")
        bank = build_time_bank(planes, time_options, learn=learn_frequencies, scaled=False)
        super().__init__(dimensions, bank, time_options["time_unit"], tuple(time_options.values()))


class CalendarRotaryPosition(BankRotaryPosition):
    """Rotary positions that turn once an hour, a day, a week, a month, a year.

    Recent work on rotary positions turns by calendar parts (year, month, day, hour). Here they are
    periods, so that products depend on the difference of two times only.

    Planes are assigned to the parts in turn. The n-th plane of a part turns n times in a period, so
    that together they encode any shape of a day or a week. Nothing is learned.

    Args:
        calendar_parts: of hour, day, week, month, year, decade; one plane each at least. Parts
            shorter than twice the resolution of the times carry no information.
    """

    options = ("calendar_parts",)

    def __init__(self, dimensions: Dimensions, *, calendar_parts: list[str]) -> None:
        """Compute the period of each plane of a head, in days.

        A plane is a pair of columns that is rotated by one angle, and turns once in its period.
        With 4 planes and the parts day and week the planes are day, week, day, week, and turn once
        a day, once a week, twice a day and twice a week.

        Args:
            dimensions: sizes of the model.
            calendar_parts: names in ``PERIODS``.

        Raises:
            UsageError: if there are more parts than planes.
        """
        planes = count_planes(dimensions, "calendar_rope")
        if planes < len(calendar_parts):
            raise UsageError(
                f"calendar_parts: {len(calendar_parts)} parts ({', '.join(calendar_parts)}) and "
                f"{planes} planes in a head; leave some out, or raise hidden_size"
            )

        # How often each plane turns in the period of its part. PERIODS has the days of each part of
        # the calendar, such as 7 of a week; count_planes returns half of the columns of a head.
        turns = torch.arange(planes) // len(calendar_parts) + 1
        days = torch.tensor([PERIODS[name] for name in calendar_parts], dtype=torch.float64)
        period = days[torch.arange(planes) % len(calendar_parts)] / turns
        bank = FrequencyBank(2 * math.pi / period, "fixed", scaled=False)  # nothing is learned
        # layers with the same parts, the cache_key, compute the angles of a batch once
        super().__init__(dimensions, bank, time_unit="days", cache_key=tuple(calendar_parts))


class MultiLevelRotaryPosition(AngularPosition):
    """Rotary positions of year, month and day at once, added up (RoTE, Zhang et al. 2026).

    With t in days since 1970 and R(angle) the rotation of plane c by an angle,

        q_i becomes the sum over year, month and day of
        weight * R(base^(-c / planes) * t_i / days) q_i, and so do keys; days: 365.25, 30.4375, 1

    as in the authors' code, where parts of a year or a month count and nothing is learned. Products
    of two levels depend on when both interactions happened, not only on the time between them.
    Fresh logits are larger than elsewhere by up to the square of the sum of the weights.

    Reference:
        Haolin Zhang, Longtao Xiao, Guohao Cai, Ruixuan Li, Xiu Li. "RoTE: Coarse-to-Fine
        Multi-Level Rotary Time Embedding for Sequential Recommendation." SIGIR 2026 (arXiv
        2604.13389). Implemented from the abstract and the public code.

    Args:
        rote_bases: bases of year, month and day.
        rote_weights: weights of year, month and day.
    """

    options = ("rote_bases", "rote_weights")

    def __init__(
        self, dimensions: Dimensions, *, rote_bases: list[float], rote_weights: list[float]
    ) -> None:
        """Compute the fixed frequencies of year, month and day, [planes] radians per day each.

        A plane is a pair of columns of a head that is rotated by one angle. Plane c turns by
        base^(-c / planes) in a year, in a month and in a day.

        Args:
            dimensions: sizes of the model.
            rote_bases: three bases, of year, month and day.
            rote_weights: three weights of the rotations.
        """
        super().__init__()
        planes = count_planes(dimensions, "rote")
        self.level_weights = rote_weights
        # A FrequencyBank returns the frequencies. "fixed" and not scaled: nothing is learned.
        self.banks = nn.ModuleList()
        for base, days in zip(rote_bases, LEVELS, strict=True):  # days of a year, month and day
            frequencies = base_form(planes, base, 1 / days)  # base^(-c / planes) / days
            self.banks.append(FrequencyBank(frequencies, "fixed", scaled=False))
        # layers with these options compute the angles of a batch once
        self.cache_key = (*rote_bases, *rote_weights)

    def turns(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines that rotate pairs by year, month and day at once.

        They are weighted sums over the three levels, so a rotated pair is the weighted sum of its
        three rotations (RoTE, Zhang et al., SIGIR 2026).

        Args:
            batch: the m interactions, with times in seconds.

        Returns:
            Cosines and sines for the e / 2 pairs of a head, [m, 1, e / 2] each.
        """
        assert batch.times is not None  # because of ``needs_time``
        days = batch.times / SECONDS["days"]
        cos, sin = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for weight, bank in zip(self.level_weights, self.banks, strict=True):
            angle = make_angles(days, bank())[:, None]  # days times the frequencies of the level
            cos, sin = cos + weight * angle.cos(), sin + weight * angle.sin()
        dtype = torch.get_default_dtype()
        return cos.to(dtype), sin.to(dtype)


class TimeOrderRotaryPosition(AngularPosition):
    """Rotary positions of time and order at once, in five forms (Wei et al., TO-RoPE, section 4).

    ``early``: both angles in every plane, weighted by the gate g (equation 5). ``split_dim``: some
    planes of every head turn by time, the others by order (4.3); ``split_head``: some heads do;
    ``split_layer``: some layers do (4.1.2). ``effective``: the frequencies of both are learned
    directly, gates and scales folded in (end of 4.1.1).

    Each source has a whole bank over the planes it turns, so that a share of the planes still
    covers all its scales. The last planes, heads or layers are those of time.

    Args:
        fusion: the form.
        time_ratio: share of planes, heads or layers that turn by time in the split forms, rounded,
            but at least one of either kind; 0 is order only (``rope``), 1 time only
            (``time_rope``).
        gate: of ``early``: ``fixed``, learned through a ``sigmoid``, or learned and ``hard`` (0 or
            1, with the gradient of the sigmoid).
        gate_scope: one gate for all (``global``), per ``plane`` or per ``head``.
        gate_value: where the gate starts, in (0, 1); 0 and 1 too if it is fixed. A hard gate is 1
            above 0.5, so all of its gates start on the same side. Under ``effective`` it is the
            factor of the first frequencies, as in early fusion.
        learn_frequencies: ``fixed``, ``ladder`` (learned, order kept) or ``free``.
        learn_scales: whether planes have learned positive factors a and b, outside the ladder.
        rope_base: the bank of order: w_c = rope_scale * rope_base^(-c / planes) per interaction.
        rope_scale: see ``rope_base``.
        time_options: unit and bank of time, see ``properties/position/to_rope.yaml``.
    """

    options = (
        *("fusion", "time_ratio", "gate", "gate_scope", "gate_value", "learn_frequencies"),
        *("learn_scales", "rope_base", "rope_scale", *TIME_OPTIONS),
    )

    def __init__(
        self,
        dimensions: Dimensions,
        *,
        fusion: str,
        time_ratio: float,
        gate: str,
        gate_scope: str,
        gate_value: float,
        learn_frequencies: str,
        learn_scales: bool,
        rope_base: float,
        rope_scale: float,
        **time_options: Any,
    ) -> None:
        """Build the frequencies of order and of time, and the gate if it is learned.

        A plane is a pair of columns of a head that is rotated by one angle.

        Args:
            dimensions: sizes of the model.
            fusion: how order and time share planes: early, split_dim, split_head, split_layer or
                effective.
            time_ratio: share of planes, heads or layers that turn by time in the split forms.
            gate: ``fixed``, or how the gate between order and time is learned.
            gate_scope: one gate for all (``global``), per ``plane`` or per ``head``.
            gate_value: the gate, or where it starts.
            learn_frequencies: ``fixed``, ``ladder`` or ``free``.
            learn_scales: whether each plane has a learned factor.
            rope_base, rope_scale: the frequencies of order are scale * base^(-c / planes).
            **time_options: unit of time, and what gives the frequencies of time.

        Raises:
            UsageError: if options contradict each other, or there is too little to split.
        """
        super().__init__()
        _require_consistent(fusion, gate, gate_value, learn_frequencies, learn_scales)

        self.fusion, self.gate, self.gate_value = fusion, gate, gate_value
        self.time_unit, self.n_heads = time_options["time_unit"], dimensions.n_heads
        self.planes = count_planes(dimensions, "to_rope")
        self.n_time_heads = 0  # the last heads turn by time under ``split_head``
        if fusion == "split_head":
            self.n_time_heads = _count_by_time(time_ratio, self.n_heads, "heads", "n_heads")
        order_planes, time_planes = self._assign_planes(time_ratio, dimensions)

        # The form ``effective`` learns the products of gate and frequency. They start with the
        # factors (1 - gate) and gate, as those of the form ``early`` do.
        is_folded = fusion == "effective"
        order_factor, time_factor = (1 - gate_value, gate_value) if is_folded else (1.0, 1.0)
        learned: dict[str, Any] = {"learn": learn_frequencies, "scaled": learn_scales}
        # modules that return the frequencies of order and of time
        start = base_form(order_planes, rope_base, rope_scale * order_factor)
        self.order = FrequencyBank(start, **learned)
        self.clock = build_time_bank(time_planes, time_options, factor=time_factor, **learned)

        # a learned gate, by its logit: one for all, for each plane or for each head
        self.gate_logit = None
        if gate != "fixed":
            shapes = {"global": (1, 1), "plane": (1, self.planes), "head": (self.n_heads, 1)}
            self.gate_logit = nn.Parameter(torch.full(shapes[gate_scope], gate_value).logit())

        # layers with equal options share the angles of a batch, unless these are learned
        options = (fusion, time_ratio, gate_value, rope_base, rope_scale, *time_options.values())
        self.cache_key = None if list(self.parameters()) else (*options, order_planes, time_planes)

    def _assign_planes(self, ratio: float, dimensions: Dimensions) -> tuple[int, int]:
        """Return how many planes of a head have a frequency of order, and how many one of time.

        A plane is a pair of columns of a head that is rotated by one angle. What the option
        ``fusion`` says is divided by the ratio: the planes of every head (``split_dim``), the heads
        (``split_head``) or the layers (``split_layer``). Under ``early`` and ``effective`` all
        planes have both frequencies.

        Args:
            ratio: share of planes, heads or layers that turn by time.
            dimensions: number of layers, and which one this is.

        Returns:
            The number of planes of order, and of time: all of a head, some or none.
        """
        planes = self.planes
        if self.fusion == "split_dim":
            time_planes = _count_by_time(ratio, planes, "planes of a head", "hidden_size")
            return planes - time_planes, time_planes
        if self.fusion == "split_head":
            order_planes = planes if self.n_time_heads < self.n_heads else 0
            time_planes = planes if self.n_time_heads > 0 else 0
            return order_planes, time_planes
        if self.fusion == "split_layer":
            n_layers = dimensions.n_layers
            n_time_layers = _count_by_time(ratio, n_layers, "layers", "n_layers")
            is_time_layer = dimensions.layer >= n_layers - n_time_layers
            return (0, planes) if is_time_layer else (planes, 0)
        return planes, planes

    def time_share(self) -> Tensor | float:
        """Return the gate g, the share of time in an angle (TO-RoPE, Wei et al., 2025, equation 5).

        An angle is (1 - g) times that of the order plus g times that of the time.

        Returns:
            A number if it is fixed. A learned one is [h or 1, e / 2 or 1] float64: between 0 and 1
            (``sigmoid``), or rounded to 0 or 1 with the gradient of the sigmoid (``hard``).
        """
        if self.gate_logit is None:
            return self.gate_value
        soft = self.gate_logit.double().sigmoid()
        if self.gate == "sigmoid":
            return soft
        return (soft > 0.5) + soft - soft.detach()  # hard: 0 or 1, with the gradient of soft

    def frequencies(self) -> tuple[Tensor, Tensor]:
        """Return how fast each plane turns with order, and how fast with time.

        A plane is a pair of columns of a head that is rotated by one angle. A frequency is 0 where
        a plane turns by the other source only: the first planes (``split_dim``), heads
        (``split_head``) or layers turn by order, the last ones by time. Under ``fusion: early`` the
        gate g weights both: (1 - g) w and g f.

        Returns:
            Radians per interaction, and radians per ``time_unit``, [h or 1, e / 2] float64 each.
        """
        # frequencies of order and of time for the planes that have one, [1, planes] each
        order, time = self.order()[None], self.clock()[None]
        if self.fusion == "early":
            share = self.time_share()
            order, time = (1 - share) * order, share * time

        # Zeros for the planes that the bank of order, or of time, has no frequency for: order has
        # those of the first planes, time those of the last. If each has all, nothing is filled up.
        order = F.pad(order, (0, self.planes - order.size(-1)))
        time = F.pad(time, (self.planes - time.size(-1), 0))
        if self.fusion == "split_head":
            head = torch.arange(self.n_heads, device=order.device)[:, None]
            is_time_head = head >= self.n_heads - self.n_time_heads
            order = order.masked_fill(is_time_head, 0.0)
            time = time.masked_fill(~is_time_head, 0.0)
        return order, time

    def angles(self, batch: SequenceBatch) -> Tensor:
        """Return the angle by which order and time turn every plane (TO-RoPE, equation 4).

        A plane is a pair of columns of a head. Interaction i at time t_i turns it by i times the
        frequency of order plus t_i times that of time, of which one may be 0.

        Args:
            batch: the m interactions, with times.

        Returns:
            [m, h or 1, e / 2] float64 radians.
        """
        # ``batch.index`` is the number i, and ``time`` returns the times in the option's time_unit
        order_frequency, time_frequency = self.frequencies()
        by_order = make_angles(batch.index.double(), order_frequency)
        return by_order + make_angles(self.time(batch), time_frequency)

    @torch.no_grad()
    def time_periods(self) -> Tensor | None:
        """Return after how many seconds each plane has turned once by time.

        A plane is a pair of columns of a head. Before training the shortest of these periods is
        compared with the resolution of the dataset's times.

        Returns:
            [h, e / 2], infinite for planes that turn by order; None if all of them do.
        """
        _, time_frequency = self.frequencies()
        if not time_frequency.any():  # 0 for planes that do not turn by time
            return None
        periods = 2 * math.pi / time_frequency * SECONDS[self.time_unit]
        return periods.expand(self.n_heads, -1)


def _count_by_time(ratio: float, total: int, units: str, option: str) -> int:
    """Return how many of the planes, heads or layers turn by time: a share of them, rounded.

    There is at least one of either kind, unless the ratio is 0 or 1.

    Args:
        ratio: the share.
        total: number of planes, heads or layers.
        units, option: their name, and the option that sets their number, for the message.

    Returns:
        From 0 to ``total``.

    Raises:
        UsageError: if there is only one to be split.
    """
    if ratio in (0, 1):
        return total * int(ratio)
    if total == 1:
        raise UsageError(
            f"time_ratio {ratio} splits {units}, of which there is one; raise {option}, choose "
            "another fusion, or set time_ratio to 0 or 1"
        )
    return min(max(round(ratio * total), 1), total - 1)  # some of either kind


def _require_consistent(
    fusion: str, gate: str, value: float, learn_frequencies: str, learn_scales: bool
) -> None:
    """Refuse options of rotations by time and order that contradict each other.

    Args:
        fusion: how order and time are combined; ``early`` weights them by a gate, ``effective``
            learns the weighted frequencies directly.
        gate: ``fixed``, or how it is learned.
        value: the gate, or where it starts if it is learned.
        learn_frequencies: ``fixed``, or how they are learned.
        learn_scales: whether each plane has a learned factor.

    Raises:
        UsageError: if a gate is learned but not used; if ``effective`` has fixed frequencies, or
            factors beside them; or if the gate is not from 0 to 1, or starts at an end, where its
            logit is infinite.
    """
    learns_gate = gate != "fixed"
    is_fixed = learn_frequencies == "fixed"
    has_unused_gate = learns_gate and fusion != "early"
    contradicts_effective = fusion == "effective" and (is_fixed or learn_scales)
    if has_unused_gate or contradicts_effective:
        raise UsageError(
            f"fusion: {fusion} does not go with gate: {gate}, learn_frequencies: "
            f"{learn_frequencies} and learn_scales: {learn_scales}. A gate is learned with early "
            "only; effective learns the frequencies themselves, as ladder or free without scales"
        )
    is_start = learns_gate or fusion == "effective"  # the value is where learning starts
    if not 0 <= value <= 1 or (value in (0, 1) and is_start):
        raise UsageError(
            f"gate_value: must be above 0 and below 1 where it is only the start (a learned gate, "
            f"or fusion: effective), found {value}"
        )
