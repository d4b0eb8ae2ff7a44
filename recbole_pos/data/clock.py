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
    """Look at the times of all events before a model that reads them is built.

    Args:
        log: the events.
        unit: of the time field, ``timestamp_unit``.
        shortest_period: seconds in which the fastest plane of a rotary scheme turns once.

    Raises:
        UsageError: if no user has two events at different times.

    Warns (by logging) of times that only number the events, of years that nobody lived in, and of
    periods too short for the resolution of the data.
    """
    field, times = log.time_field, log.times.numpy()
    users = log.users.numpy()
    step = np.diff(times)[users[1:] == users[:-1]]
    step = step[step != 0]
    if len(step) == 0:
        raise UsageError(
            f"{field!r} is the same for all events of a user: there is no time to learn from. "
            f"{_HELP}"
        )
    warn = logging.getLogger(__name__).warning
    distinct = np.unique(times)
    if (step == step[0]).all() or _numbers_all_events(times, distinct):
        warn(
            f"{field!r} looks like a running number, not like clock time: a time-aware model "
            f"learns no more from it than from order. {_HELP}"
        )
        return
    first, last = (1970 + t * SECONDS[unit] / _YEAR for t in (distinct[0], distinct[-1]))
    if first < 1971 or last > 2100:
        warn(
            f"{field!r} reads as {unit} from the year {first:,.0f} to {last:,.0f}. If it counts "
            f"something else, set timestamp_unit to one of {', '.join(SECONDS)}; if it only "
            f"numbers events: {_HELP[0].lower()}{_HELP[1:]}; if it counts from another day than "
            "1970-01-01, all is well"
        )
        return
    resolution = float(np.diff(distinct).min()) * SECONDS[unit]
    if shortest_period is not None and shortest_period < 2 * resolution:
        warn(
            f"{field!r} has a resolution of {resolution:g} s, so periods under {2 * resolution:g} "
            f"s mean nothing, but the fastest plane turns in {shortest_period:g} s: raise "
            "time_min_period (or lower time_scale, if time_base is set)"
        )


def _numbers_all_events(times: np.ndarray, distinct: np.ndarray) -> bool:
    """Whether times are 1, 2, 3, ... over the whole log."""
    return len(distinct) == len(times) and distinct[-1] - distinct[0] == len(times) - 1
