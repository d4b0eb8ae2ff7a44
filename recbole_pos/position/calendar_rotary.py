"""Rotary angles of the calendar: events of the same hour, weekday or season look alike.

After the calendar parts that recent work on rotary positions turns by (year, month, day, hour);
here as periods, so that products depend on the difference of two times alone, as of every rotary.
"""

from __future__ import annotations

import math

import torch

from recbole_pos.errors import UsageError
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.position.frequencies import FrequencyBank
from recbole_pos.position.rotary import planes_of
from recbole_pos.position.time_rotary import BankRotaryPosition

# Days. Month and year are the mean ones of the Gregorian calendar: those of one's own length would
# make the same two gaps differ by where they stand.
PERIODS = {
    "hour": 1 / 24,
    "day": 1.0,
    "week": 7.0,
    "month": 365.2425 / 12,
    "year": 365.2425,
    "decade": 3652.425,
}


class CalendarRotaryPosition(BankRotaryPosition):
    """Rotary positions that turn once an hour, a day, a week, a month, a year.

    Planes are dealt out to the parts in turn; the n-th plane of a part turns n times a period, so
    that together they tell any shape of a day or a week. Nothing is learned.

    Args:
        dimensions: sizes of the model; heads must have even size.
        calendar_parts: of hour, day, week, month, year, decade; one plane each at least. Parts
            shorter than twice the resolution of the times say nothing.
    """

    options = ("calendar_parts",)

    def __init__(self, dimensions: Dimensions, *, calendar_parts: list[str]) -> None:
        planes = planes_of(dimensions, "calendar_rope")
        if planes < len(calendar_parts):
            raise UsageError(
                f"calendar_parts: {len(calendar_parts)} parts ({', '.join(calendar_parts)}) and "
                f"{planes} planes in a head; leave some out, or raise hidden_size"
            )
        turns = torch.arange(planes) // len(calendar_parts) + 1
        days = torch.tensor([PERIODS[part] for part in calendar_parts], dtype=torch.float64)
        period = days[torch.arange(planes) % len(calendar_parts)] / turns
        bank = FrequencyBank(2 * math.pi / period, "fixed", scaled=False)
        super().__init__(dimensions, bank, "days", tuple(calendar_parts))
