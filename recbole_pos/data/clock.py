"""Checks that a time field holds clock times, for models that read it."""

from __future__ import annotations

import math

import numpy as np

from recbole_pos.data.interactions import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.values import SECONDS, shown

YEAR = 365.25 * 86400  # seconds


def counts_time(times: np.ndarray, unit: str) -> bool | None:
    """Return whether times, in ``unit`` since 1970, are dates from 1971 to 2100; None without any.

    Other numbers only order the interactions, as a running number does.
    """
    if not len(times):
        return None
    first, last = (float(x) * SECONDS[unit] / YEAR for x in (times.min(), times.max()))
    return 1 < first and last < 2100 - 1970


def check_clock(
    log: EventLog,
    unit: str,
    shortest_period: float | None = None,
    instead: str = "take a scheme without time such as rope or learned",
    across: bool = False,
) -> list[str]:
    """Check the times of all interactions before a time-aware model is built.

    Args:
        log: the interactions.
        unit: unit of the time field, ``timestamp_unit``.
        shortest_period: seconds in which the fastest plane of a rotary scheme turns once.
        instead: alternative to advise where times are unusable.
        across: whether the model compares times of different users only.

    Returns:
        Warnings to show before training.

    Raises:
        UsageError: if no user has two different times; with ``across``, if all are the same.
    """
    name, times, users = shown(log.time_field), log.times.numpy(), log.users.numpy()
    distinct = np.unique(times)
    steps = np.diff(times)[users[1:] == users[:-1]]  # between interactions of one user
    steps = steps[steps != 0]
    advice = f"set TIME_FIELD to a column of clock times, or {instead}"
    if len(steps) == 0:
        if across and len(distinct) > 1:
            return []
        raise UsageError(
            f"{name} is the same for all interactions of a user: there is no time to learn from; "
            f"{advice}"
        )
    is_numbering = len(distinct) == len(times) == distinct[-1] - distinct[0] + 1
    if is_numbering or (steps == steps[0]).all():
        return [
            f"{name} looks like a running number, not like clock time: a time-aware model learns "
            f"no more from it than from order; {advice}"
        ]
    warnings = []
    first, last = (1970 + time * SECONDS[unit] / YEAR for time in (distinct[0], distinct[-1]))
    if first < 1971 or last > 2100:
        warnings.append(
            f"{name} reads as {unit} from the year {_show_year(first)} to {_show_year(last)}. If "
            f"it counts something else, set timestamp_unit to one of {', '.join(SECONDS)}; if it "
            f"only numbers interactions: {advice}; if it counts from another day than 1970-01-01, "
            "its years do not matter"
        )
    resolution = float(np.diff(distinct).min()) * SECONDS[unit]
    # Nyquist: a period needs at least two distinguishable times
    if shortest_period is not None and shortest_period < 2 * resolution:
        warnings.append(
            f"{name}, read as {unit}, has a resolution of {resolution:g} s, so periods under "
            f"{2 * resolution:g} s mean nothing, but the fastest plane turns in "
            f"{shortest_period:g} s: raise time_min_period (or lower time_scale, if time_base is "
            "set)"
        )
    return warnings


def require_order(log: EventLog, readers: str, instead: str) -> None:
    """Refuse times that fall along a user's history, as they may from one given part to the next.

    Args:
        log: the interactions.
        readers: what assumes that times never fall, as an option with its value.
        instead: alternative to advise.
    """
    users = log.users.numpy()
    falls = (np.diff(log.times.numpy()) < 0) & (users[1:] == users[:-1])
    if falls.any():
        num_users = len(np.unique(users[1:][falls]))
        raise UsageError(
            f"{shown(log.time_field)}: the times of {num_users:,} users fall from one part of "
            f"benchmark_filename to the next, and {readers} needs times that never fall; give "
            f"parts that follow each other in time, or {instead}"
        )


def _show_year(year: float) -> str:
    return str(math.floor(year)) if abs(year) < 1e6 else f"{year:.0e}"
