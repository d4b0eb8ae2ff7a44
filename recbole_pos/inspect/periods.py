"""The periods after which time angles repeat, and where they started (TO-RoPE)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from recbole_pos.inspect.attention_weights import attention_layers
from recbole_pos.values import SECONDS

HOURS = {"hour": 1.0, "day": 24.0, "week": 168.0, "month": 30.44 * 24, "year": 365.25 * 24}
MARKED = ("day", "week", "month", "year")
NEAR = 0.15  # share by which a period may differ from a calendar period that it is marked as


@dataclass(frozen=True)
class Periods:
    """The periods of one scheme in one layer, of heads that have the same.

    Attributes:
        layer: number of the layer, from 1.
        scheme: name of the scheme.
        heads: numbers of the heads, from 1.
        all_heads: whether these are all heads of the layer.
        hours: finite periods, shortest first.
        started: the same periods before training.
        still: number of planes that do not rotate with time.
    """

    layer: int
    scheme: str
    heads: tuple[int, ...]
    all_heads: bool
    hours: tuple[float, ...]
    started: tuple[float, ...]
    still: int

    @property
    def learned(self) -> bool:
        """Whether training has changed any period."""
        return self.hours != self.started

    @property
    def label(self) -> str:
        """``layer 1`` or ``layer 1, heads 1-2``."""
        if self.all_heads:
            return f"layer {self.layer}"
        plural = "s" if len(self.heads) > 1 else ""
        return f"layer {self.layer}, head{plural} {format_spans(self.heads)}"


def format_spans(numbers: tuple[int, ...]) -> str:
    """Return rising numbers as text, such as ``1-3, 5``."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


@torch.no_grad()
def learned_periods(model: nn.Module) -> list[Periods]:
    """Return the periods of every scheme that rotates query and key by time, layer by layer.

    Heads with the same periods are one group. Empty for models without such a scheme.
    """
    periods = []
    for number, layer in enumerate(attention_layers(model), 1):
        for name, scheme in layer.position.parts().items():
            seconds = scheme.time_periods()
            if seconds is None:
                continue
            hours = seconds.double().cpu().numpy() / SECONDS["hours"]  # [h, e / 2]
            fresh = scheme.fresh_periods
            started = hours if fresh is None else fresh.double().cpu().numpy() / SECONDS["hours"]
            groups: dict[tuple[tuple[float, float], ...], list[int]] = {}
            for head, pairs in enumerate(np.stack((hours, started), -1).tolist(), 1):
                groups.setdefault(tuple(sorted(map(tuple, pairs))), []).append(head)
            for pairs, heads in groups.items():
                finite = [pair for pair in pairs if np.isfinite(pair[0])]
                now, then = (tuple(pair[side] for pair in finite) for side in (0, 1))
                still = len(pairs) - len(finite)
                has_all = len(groups) == 1
                periods.append(Periods(number, name, tuple(heads), has_all, now, then, still))
    return periods


def find_calendar_period(hours: float) -> str:
    """Return which of day, week, month and year is within ``NEAR`` of a period, or ''."""
    return next((name for name in MARKED if abs(hours / HOURS[name] - 1) <= NEAR), "")
