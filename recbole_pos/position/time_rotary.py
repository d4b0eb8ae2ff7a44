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
    """Base of schemes that rotate query and key by angles that depend on the times of a batch.

    A plane, a pair of columns of a head, is rotated by one angle. A subclass defines
    :meth:`angles`.

    Attributes:
        time_unit: unit in which :meth:`time` counts.
        cache_key: what the angles of a batch depend on, such as frequencies; layers with equal
            keys share the angles. None if parameters change them.
    """

    needs_time = True
    reads_request = True
    time_unit: str
    cache_key: tuple | None = None

    def angles(self, batch: SequenceBatch) -> Tensor:
        """Return the angle of every plane, [m, h or 1, e / 2] float64 radians."""
        raise NotImplementedError

    def rotate(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of attention, so that their products depend on times.

        A key is rotated by the time of its interaction. A query is rotated by the time at which the
        next item is requested after it (``batch.request``), which is the time of its own
        interaction where requests have no times.

        Args:
            q, k: [m, h, e] queries and keys of all m interactions.
            batch: the histories, with times.

        Returns:
            The rotated queries and keys, [m, h, e] each.
        """
        # The cosines and sines of the angles of keys, and of queries. Without times of requests
        # ``batch.request`` is the batch itself.
        of_keys = self._cached_cos_sin(batch)
        of_queries = of_keys if batch.request is batch else self._cached_cos_sin(batch.request)
        return rotate_pairs(q, *of_queries).to(q.dtype), rotate_pairs(k, *of_keys).to(k.dtype)

    def cos_sin(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines of the angles, [m, h or 1, e / 2] each."""
        angle = self.angles(batch).to(torch.get_default_dtype())
        return angle.cos(), angle.sin()

    def _cached_cos_sin(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of a batch's angles, computed once for all layers if possible.

        Layers with equal options have the same angles, unless these depend on parameters.
        ``cache_key`` has the options, or is None if angles depend on parameters.

        Returns:
            [m, h or 1, e / 2] cosines, and the same of sines.
        """
        if self.cache_key is None:
            return self.cos_sin(batch)
        key = (type(self), self.cache_key, torch.get_default_dtype())
        # ``cached`` calls the function only if the batch has no value of this key yet
        return batch.cached(key, lambda: self.cos_sin(batch))

    def time(self, batch: SequenceBatch) -> Tensor:
        """Return [m] float64 the time since the sequence's oldest interaction, in ``time_unit``."""
        # times may count from any point: products depend on the difference of two times only
        return batch.elapsed / SECONDS[self.time_unit]


class BankRotaryPosition(AngularPosition):
    """Base of schemes that turn by time only, with the frequencies of one bank.

    The angle of plane c is the time times the frequency of plane c.
    """

    def __init__(self, dimensions: Dimensions, bank: FrequencyBank, time_unit: str) -> None:
        """Keep the frequencies by which queries and keys are rotated with time.

        Each pair of columns of a query or key is rotated by an angle: the time of the interaction
        times the frequency of the pair.

        Args:
            dimensions: sizes of the model.
            bank: module that returns the frequency of each pair of columns of a head, in radians
                per ``time_unit``. It has parameters if frequencies are learned.
            time_unit: unit of time.
        """
        super().__init__()
        self.bank, self.time_unit, self.n_heads = bank, time_unit, dimensions.n_heads
        # Layers with the same fixed frequencies share the angles of a batch. If frequencies are
        # learned, each layer computes angles of its own.
        self.cache_key = None if list(bank.parameters()) else (time_unit, *bank().tolist())

    def angles(self, batch: SequenceBatch) -> Tensor:
        return make_angles(self.time(batch), self.bank())[:, None]

    @torch.no_grad()
    def time_periods(self) -> Tensor:
        """Return the seconds of a whole turn of each plane, [h, e / 2]."""
        periods = 2 * math.pi / self.bank() * SECONDS[self.time_unit]
        return periods.expand(self.n_heads, -1)


class TimeRotaryPosition(BankRotaryPosition):
    """Rotary positions that turn with time instead of order (Wei et al., TO-RoPE, section 3.2).

    Plane c, a pair of columns, turns interaction j by the angle f_c t_j, with frequencies f_c.

    Args:
        learn_frequencies: ``fixed``, ``ladder`` (learned, order kept) or ``free``.
        time_options: unit and bank, see ``properties/position/time_rope.yaml``.
    """

    options = ("learn_frequencies", *TIME_OPTIONS)

    def __init__(
        self, dimensions: Dimensions, *, learn_frequencies: str, **time_options: Any
    ) -> None:
        """Build the frequencies by which pairs of columns (planes) of a head rotate with time.

        Args:
            dimensions: sizes of the model.
            learn_frequencies: ``fixed`` for none, ``free`` to learn each by itself, ``ladder`` to
                learn the first one and how far each next one is below it.
            **time_options: ``time_unit``, and the fresh frequencies. Their periods are log-spaced
                from ``time_min_period`` to ``time_max_period``; or, if ``time_base`` is a number,
                frequencies fall by it, as in RoFormer, from ``time_scale`` on.
        """
        planes = count_planes(dimensions, "time_rope")  # pairs of columns of a head
        # a module that returns the frequencies; ``scaled`` would add a learned factor to each
        bank = build_time_bank(planes, time_options, learn=learn_frequencies, scaled=False)
        super().__init__(dimensions, bank, time_options["time_unit"])


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

        # the part of each plane, and how often it turns in the period of its part: with 2 parts and
        # 4 planes 0, 1, 0, 1 and 1, 1, 2, 2
        plane, num_parts = torch.arange(planes), len(calendar_parts)
        part, turns = plane % num_parts, plane // num_parts + 1
        days = torch.tensor([PERIODS[name] for name in calendar_parts], dtype=torch.float64)
        period = days[part] / turns
        bank = FrequencyBank(2 * math.pi / period, "fixed", scaled=False)
        super().__init__(dimensions, bank, time_unit="days")


class MultiLevelRotaryPosition(AngularPosition):
    """Rotary positions of year, month and day at once, added up (RoTE, Zhang et al. 2026).

    With t in days since 1970 and R(angle) the rotation of plane c by an angle,

        q_i  becomes  sum over year, month, day of  weight R(t_i base^(-c / planes) / days) q_i

    and so do keys. Each level has a weight, a base and its days: 365.25, 30.4375 and 1 as in the
    authors' code. Parts of a year or a month count, and nothing is learned. Products of two levels
    depend on when both interactions happened, not only on the time between them. Fresh logits are
    larger than elsewhere by up to the square of the sum of the weights.

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
        """Compute how fast each pair of columns of a head is rotated, by year, by month and by day.

        For pair c of ``pairs`` pairs the frequency is

            base^(-c / pairs) / days       radians per day

        where a year has 365.25 days, a month 30.4375 and a day 1 (``LEVELS``). :meth:`cos_sin` adds
        up the three rotations with the weights.

        Args:
            dimensions: sizes of the model.
            rote_bases: the base of the year, of the month and of the day.
            rote_weights: the weight of the year, of the month and of the day.

        Raises:
            UsageError: if a head has an odd number of columns.
        """
        super().__init__()
        self.level_weights = rote_weights
        pairs = count_planes(dimensions, "rote")  # "rote" is for the message of the error
        # base_form(pairs, base, 1 / days) returns base^(-c / pairs) / days for every c, [pairs]
        levels = zip(rote_bases, LEVELS, strict=True)
        frequencies = torch.stack([base_form(pairs, base, 1 / days) for base, days in levels])
        # a module without parameters, which returns the frequencies, [3, pairs]
        self.bank = FrequencyBank(frequencies, learn="fixed", scaled=False)
        # layers with equal options compute the same angles, and share those of a batch by this key
        self.cache_key = (*rote_bases, *rote_weights)

    def cos_sin(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return weighted sums of cosines and of sines of the angles of year, month and day.

        Rotated by one angle, a pair (x, y) of columns becomes (cos x - sin y, sin x + cos y). This
        is linear in cos and sin. So the caller, which puts in

            cos = sum of weight cos(angle)        over year, month and day
            sin = sum of weight sin(angle)

        gets the weighted sum of the three rotated pairs at once.

        Args:
            batch: the m interactions, with times in seconds.

        Returns:
            cos and sin, [m, 1, e / 2] each: for each pair of columns, and the same in all heads.
        """
        assert batch.times is not None  # because of ``needs_time``
        # days times the frequencies of year, month and day, which are ``bank()``, [3, e / 2]
        angles = make_angles(batch.times / SECONDS["days"], self.bank())  # [m, 3, e / 2]

        cos = sin = torch.zeros_like(angles[:, 0])  # [m, e / 2]
        for weight, angle in zip(self.level_weights, angles.unbind(1), strict=True):
            cos = cos + weight * angle.cos()
            sin = sin + weight * angle.sin()
        dtype = torch.get_default_dtype()
        return cos[:, None].to(dtype), sin[:, None].to(dtype)


class TimeOrderRotaryPosition(AngularPosition):
    """Rotary positions of time and order at once, in five forms (Wei et al., TO-RoPE, section 4).

    A plane, a pair of columns of a head, is rotated by one angle, the formula of this file's
    beginning. The option ``fusion`` says which planes turn by order and which by time:

    - ``early``: every plane by both, weighted by a gate g (equation 5);
    - ``split_dim``: some planes of every head by time, the others by order (section 4.3);
    - ``split_head``: all planes of some heads by time, those of the other heads by order (4.4);
    - ``split_layer``: the same with layers (4.1.2);
    - ``effective``: every plane by both. The products of gate, scale and frequency are learned as
      one number (end of 4.1.1).

    In the split forms the last planes, heads or layers are those of time. Each source has a whole
    bank of frequencies over the planes it turns, so that a share of the planes still covers all
    scales.

    Attributes:
        by_order, by_time: [1 or h, e / 2] bool, whether a plane of a head turns by order, by time.
        order, clock: modules that return the frequencies of order and of time.
        gate_logit: what gives a learned gate; None if the gate is ``gate_value``.
    """

    options = (
        *("fusion", "time_ratio", "gate", "gate_scope", "gate_value", "learn_frequencies"),
        *("learn_scales", "rope_base", "rope_scale", *TIME_OPTIONS),
    )
    by_order: Tensor
    by_time: Tensor

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

        Args:
            dimensions: sizes of the model, with h heads.
            fusion: which planes turn by order and which by time: early, effective (all by both),
                split_dim, split_head or split_layer.
            time_ratio: share of planes, heads or layers that turn by time in the split forms,
                rounded, but at least one of either kind; 0 is order only (``rope``), 1 time only
                (``time_rope``).
            gate: of ``early``: ``fixed``, learned through a ``sigmoid``, or learned and ``hard`` (0
                or 1, with the gradient of the sigmoid).
            gate_scope: one gate for all (``global``), per ``plane`` or per ``head``.
            gate_value: where the gate starts, in (0, 1); 0 and 1 too if it is fixed. A hard gate is
                1 above 0.5, so all of its gates start on the same side. Under ``effective`` it is
                the factor of the first frequencies, as in early fusion.
            learn_frequencies: ``fixed``, ``ladder`` (learned, always falling) or ``free``.
            learn_scales: whether planes have learned positive factors a and b.
            rope_base, rope_scale: the bank of order, rope_scale * rope_base^(-c / planes) radians
                per interaction for plane c.
            **time_options: unit and bank of time, see ``rotary.build_time_bank``.

        Raises:
            UsageError: if options contradict each other, or there is too little to split.
        """
        super().__init__()
        learns_gate = fusion == "early" and gate != "fixed"
        if fusion == "effective" and (learn_frequencies == "fixed" or learn_scales):
            raise UsageError(
                "fusion: effective learns the frequencies and no factors of them; set "
                "learn_frequencies: ladder or free, and learn_scales: False"
            )
        if gate_value in (0, 1) and (learns_gate or fusion == "effective"):
            raise UsageError(
                "gate_value: expected a number above 0 and below 1, from which a gate or, with "
                f"fusion: effective, frequencies can be learned; found {gate_value}"
            )
        self.fusion, self.gate, self.gate_value = fusion, gate, gate_value
        self.time_unit, self.n_heads = time_options["time_unit"], dimensions.n_heads
        self.planes = count_planes(dimensions, "to_rope")

        by_order, by_time = assign_planes(fusion, time_ratio, dimensions)
        self.register_buffer("by_order", by_order, persistent=False)
        self.register_buffer("by_time", by_time, persistent=False)

        # A bank has a frequency for each plane that turns by its source in any head. Those of
        # ``effective`` start as the products that ``early`` has: with the factors 1 - g and g.
        factors = (1 - gate_value, gate_value) if fusion == "effective" else (1.0, 1.0)
        order_factor, time_factor = factors
        order_planes, time_planes = int(by_order.any(0).sum()), int(by_time.any(0).sum())
        learned: dict[str, Any] = {"learn": learn_frequencies, "scaled": learn_scales}
        start = base_form(order_planes, rope_base, rope_scale * order_factor)
        self.order = FrequencyBank(start, **learned)
        self.clock = build_time_bank(time_planes, time_options, factor=time_factor, **learned)

        # a learned gate, by its logit: one for all, for each plane or for each head
        self.gate_logit = None
        if learns_gate:
            shapes = {"global": (1, 1), "plane": (1, self.planes), "head": (self.n_heads, 1)}
            self.gate_logit = nn.Parameter(torch.full(shapes[gate_scope], gate_value).logit())

        # layers with equal options share the angles of a batch, unless these are learned
        options = (fusion, time_ratio, gate_value, rope_base, rope_scale, *time_options.values())
        self.cache_key = None if list(self.parameters()) else (*options, order_planes, time_planes)

    def time_share(self) -> Tensor | float:
        """Return the gate g, which weighs time against position (TO-RoPE, 2025, equation 5).

        Queries and keys are rotated by angles that mix the position of an interaction and its time:
        (1 - g) times the angle of the position plus g times that of the time.

        Returns:
            A number if it is fixed. A learned one is float64, [h or 1, e / 2 or 1]: for each head
            or for all, and for each pair of columns that is rotated or for all. It is between 0 and
            1 (``sigmoid``), or 0 or 1 (``hard``).
        """
        if self.gate_logit is None:
            return self.gate_value
        soft = self.gate_logit.double().sigmoid()
        if self.gate == "sigmoid":
            return soft
        # ``hard`` is a straight-through estimator: the value is soft, rounded to 0 or 1, and the
        # gradient is that of soft, since the rest has none.
        return (soft > 0.5) + soft - soft.detach()

    def frequencies(self) -> tuple[Tensor, Tensor]:
        """Return the frequencies by which queries and keys turn with order and with time.

        Queries and keys are rotated plane by plane; a plane is a pair of columns of a head. Each
        plane has a frequency of order, w, by which it turns from one interaction to the next, and
        one of time, f, by which it turns in a unit of time (TO-RoPE, equation 4). Either may be 0.
        The option ``fusion`` says which are. For 2 heads of 4 planes the results have a row for
        each head, or one row for both:

            split_dim      order [[w0, w1, 0, 0]]        time [[0, 0, f0, f1]]
            split_head     order [[w0, w1, w2, w3],      time [[0, 0, 0, 0],
                                  [0, 0, 0, 0]]                [f0, f1, f2, f3]]
            split_layer    order [[w0, w1, w2, w3]] in the first layers, or time [[f0, f1, f2, f3]]
                           in the last ones, and 0 for the other
            early          order [[w0, w1, w2, w3]] times 1 - g, time [[f0, f1, f2, f3]] times g,
                           with a gate g between 0 and 1
            effective      as ``early``, without a gate

        Returns:
            Radians per interaction, and radians per ``time_unit``, [h or 1, e / 2] float64 each.
        """
        order, time = self.order(), self.clock()  # the frequencies w and f that are not 0
        if self.fusion == "early":
            gate = self.time_share()  # g: a number, or [h or 1, e / 2 or 1]
            order, time = (1 - gate) * order, gate * time

        # Fill up with zeros to one frequency for each plane. In ``split_dim``, as above, w0 and w1
        # get zeros behind them, and f0 and f1 before them. In ``split_layer`` one of the two is
        # empty, and gets zeros only. The other forms have a frequency for every plane already.
        order = F.pad(order, (0, self.planes - order.size(-1)))
        time = F.pad(time, (self.planes - time.size(-1), 0))

        # ``by_order`` and ``by_time`` are masks of the planes that turn by order and by time. Only
        # ``split_head`` needs them: there they are [h, e / 2], so that the one row of frequencies
        # becomes a row for each head, with 0 in the heads of the other source.
        return order.masked_fill(~self.by_order, 0), time.masked_fill(~self.by_time, 0)

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
        """Return the periods of the rotation by time: how long each takes to turn once around.

        Rotary position schemes rotate each pair of columns of a head by an angle. Here the angle
        grows with the order of interactions, with their time, or with both. Before training the
        shortest period is compared with the resolution of the dataset's times.

        Returns:
            [h, e / 2] seconds for each pair of columns of each head, infinite where the angle does
            not depend on time; None if that is so everywhere.
        """
        # [h or 1, e / 2] radians per ``time_unit``, 0 where the angle does not depend on time; a
        # single row is that of all heads
        _, time_frequency = self.frequencies()
        if not time_frequency.any():
            return None
        periods = 2 * math.pi / time_frequency * SECONDS[self.time_unit]
        return periods.expand(self.n_heads, -1)


def assign_planes(fusion: str, ratio: float, dimensions: Dimensions) -> tuple[Tensor, Tensor]:
    """Return which planes of a layer's heads turn by order, and which by time.

    A rotary scheme rotates planes, pairs of columns of queries and keys, by angles. An angle grows
    with the number of the interaction in its history (order), with its time, or with both.

    With ``early`` and ``effective`` all planes turn by both. The other forms split planes, heads or
    layers into two: the first turn by order, the last by time. For 2 heads of 4 planes, 2 layers
    and a ratio of 0.5, the planes that turn by time are

        split_dim     [[0, 0, 1, 1]], the same in both heads
        split_head    [[0, 0, 0, 0], [1, 1, 1, 1]]
        split_layer   [[0, 0, 0, 0]] in the first layer, [[1, 1, 1, 1]] in the second

    Args:
        fusion: the form.
        ratio: share of planes, heads or layers that turn by time, rounded.
        dimensions: sizes of the model, and the number of this layer.

    Returns:
        By order and by time, [1 or h, e / 2] bool each.

    Raises:
        UsageError: if there is only one plane, head or layer to be split.
    """
    planes, h = dimensions.head_size // 2, dimensions.n_heads
    if fusion in ("early", "effective"):
        both = torch.ones(1, planes, dtype=torch.bool)
        return both, both

    # ``_mark_last(ratio, total, ...)`` returns [total] bool, True for the last ones; its other
    # arguments are for the message of an error.
    if fusion == "split_dim":
        last_planes = _mark_last(ratio, planes, "planes of a head", "hidden_size")
        by_time = last_planes[None]  # one row for all heads
    elif fusion == "split_head":
        last_heads = _mark_last(ratio, h, "heads", "n_heads")
        by_time = last_heads[:, None].expand(h, planes)  # a row for each head
    else:  # split_layer
        last_layers = _mark_last(ratio, dimensions.n_layers, "layers", "n_layers")
        by_time = last_layers[dimensions.layer].expand(1, planes)  # one row for all heads
    return ~by_time, by_time


def _mark_last(ratio: float, total: int, units: str, option: str) -> Tensor:
    """Return which of several planes, heads or layers are the last ones, a given share of them.

    Their number is rounded: for a ratio of 0.4 and a total of 4 the result is
    [False, False, True, True]. Unless the ratio is 0 or 1, at least one is marked and one is not.

    Args:
        ratio: the share to be marked, from 0 to 1. A rotary scheme turns them by time.
        total: number of planes, heads or layers.
        units, option: their name, and the option that sets their number, for the message.

    Returns:
        [total] bool, True for those marked.

    Raises:
        UsageError: if there is only one, and the ratio is neither 0 nor 1.
    """
    if total == 1 and ratio not in (0, 1):
        raise UsageError(
            f"time_ratio {ratio} splits {units}, of which there is one; raise {option}, choose "
            "another fusion, or set time_ratio to 0 or 1"
        )
    num_marked = round(ratio * total)
    if ratio not in (0, 1):
        num_marked = min(max(num_marked, 1), total - 1)
    return torch.arange(total) >= total - num_marked
