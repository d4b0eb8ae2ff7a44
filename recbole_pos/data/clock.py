"""Whether a time field tells the time, for models that read it."""

from __future__ import annotations

import logging

import numpy as np

from recbole_pos.data.events import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.units import SECONDS

_YEAR = 365.25 * 86400
_HELP = (
    "Set TIME_FIELD to a column of clock times, or take a scheme without time such as rope or "
    "learned"
)


def check_clock(log: EventLog, unit: str, shortest_period: float | None = None) -> None:
    """Look at the times of all events before a model that reads them is trained.

    Args:
        log: the events.
        unit: of the time field, ``timestamp_unit``.
        shortest_period: seconds in which the fastest plane of a rotary scheme turns once.

    Raises:
        UsageError: if all times are the same.

    Warns (by logging) of times that only number the events, of a unit that makes them implausible,
    and of periods too short for the resolution of the data.
    """
    field, times = log.time_field, log.times.numpy()
    distinct = np.unique(times)
    if len(distinct) < 2:
        raise UsageError(
            f"{field!r} is {times[0]:g} for every event: there is no time to learn from. {_HELP}"
        )
    warn = logging.getLogger(__name__).warning
    if _numbers_events(times, log.users.numpy(), distinct):
        warn(
            f"{field!r} looks like a running number, not like clock time: a time-aware model "
            f"learns no more from it than from order. {_HELP}"
        )
        return
    seconds = SECONDS[unit]
    years = (distinct[-1] - distinct[0]) * seconds / _YEAR
    if years > 200:
        warn(
            f"{field!r} spans {years:,.0f} years if it counts {unit}; if it counts something else, "
            f"set timestamp_unit to one of {', '.join(SECONDS)}"
        )
    step = float(np.diff(distinct).min()) * seconds
    if shortest_period is not None and shortest_period < 2 * step:
        warn(
            f"{field!r} has a resolution of {step:g} s, so periods under {2 * step:g} s mean "
            f"nothing, but the fastest plane turns in {shortest_period:g} s: raise time_min_period"
        )


def _numbers_events(times: np.ndarray, users: np.ndarray, distinct: np.ndarray) -> bool:
    """Whether times are 1, 2, 3, ... within every user, or over the whole log."""
    if (times != np.floor(times)).any():
        return False
    if len(distinct) == len(times) and distinct[-1] - distinct[0] == len(times) - 1:
        return True
    step = np.diff(times)[users[1:] == users[:-1]]
    return len(step) > 0 and bool((step == 1).all())
