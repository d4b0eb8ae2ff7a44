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
NEAR = 0.15


@dataclass(frozen=True)
class Periods:
    """The periods of one scheme in one layer, of heads that have the same.

    Attributes:
        layer: from 1.
        scheme: its name.
        heads: which, from 1.
        all_heads: whether these are all of the layer.
        hours: finite periods, shortest first.
        started: what they were before training.
        still: how many planes time does not turn.
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
        """Whether training has moved any."""
        return self.hours != self.started

    @property
    def label(self) -> str:
        """``layer 1`` or ``layer 1, heads 1-2``."""
        if self.all_heads:
            return f"layer {self.layer}"
        return f"layer {self.layer}, head{'s' * (len(self.heads) > 1)} {spans(self.heads)}"


def spans(numbers: tuple[int, ...]) -> str:
    """Rising numbers as ``1-3, 5``."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


@torch.no_grad()
def learned_periods(model: nn.Module) -> list[Periods]:
    """Return the periods of every scheme that turns query and key by time, layer by layer.

    Heads with the same periods stand together. Empty for models without such a scheme.
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
                alone = len(groups) == 1
                periods.append(Periods(number, name, tuple(heads), alone, now, then, still))
    return periods


def near(hours: float) -> str:
    """Return which of day, week, month and year a period is within 15% of, or nothing."""
    return next((name for name in MARKED if abs(hours / HOURS[name] - 1) <= NEAR), "")
