"""Sessions whole: filtered, cut by session in time, and only the most recent of them trained on.

A session is what the user field names. Its time is that of its last event, as in the preprocessing
of the papers on sessions (NARM, STAMP, SR-GNN): then no training session ends after a held-out one
has ended. It may still end after a held-out one has begun; such sessions are counted.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.data.events import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.values import is_whole, shown

_FORMS = (
    "fractions of all sessions such as [0.9, 0.95] or numbers of sessions such as [9000, 9500], "
    "one or two, each larger than the one before; what follows the last is test"
)


def session_order(log: EventLog) -> np.ndarray:
    """[sessions with events] their ids by the time of the last event, ties as in the file.

    RecBole numbers users in the order of their first lines, so ids are the order of the file.
    """
    sessions = np.flatnonzero(log.lengths)
    ends = log.times.numpy()[log.offsets[sessions + 1] - 1]
    return sessions[np.argsort(ends, kind="stable")]


def session_time(log: EventLog, value: Any) -> tuple[np.ndarray, list[float]]:
    """Whole sessions cut in the order of their times.

    Args:
        log: the events.
        value: where the parts end: one or two fractions of all sessions (rounded down) or numbers
            of sessions; with one there is no validation.

    Returns:
        [events] int8 labels, the same for all events of a session; the times of the last session
        of training and, if there is one, of validation.

    Raises:
        UsageError: for another value, or one that leaves a part empty.
    """
    order = session_order(log)
    bounds = _bounds(value, len(order))
    label = np.searchsorted(bounds, np.arange(len(order)), side="right")
    if len(bounds) == 1:
        label *= 2  # test follows training
    labels = np.zeros(len(log.offsets) - 1, dtype=np.int8)
    labels[order] = label
    last_events = log.offsets[order[np.array(bounds) - 1] + 1] - 1
    return np.repeat(labels, log.lengths), log.times.numpy()[last_events].tolist()


def _bounds(value: Any, sessions: int) -> list[int]:
    """The number of sessions up to the end of training, and up to that of validation."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    whole = [is_whole(n) and n > 0 for n in numbers]
    shares = [isinstance(n, float) and 0 < n < 1 for n in numbers]
    rising = (all(whole) or all(shares)) and numbers == sorted(set(numbers))
    if len(numbers) not in (1, 2) or not rising:
        raise UsageError(f"eval_args.split.ST: expected {_FORMS}; found {shown(value)}")
    bounds = numbers if whole[0] else [_share(Fraction(str(n)), sessions) for n in numbers]
    parts = np.diff([0, *bounds, sessions])
    names = ["training", "test"] if len(bounds) == 1 else ["training", "validation", "test"]
    for name, count in zip(names, parts, strict=True):
        if count <= 0:
            raise UsageError(
                f"eval_args.split.ST: {shown(value)} of {sessions:,} sessions leaves none for "
                f"{name}"
            )
    return bounds


def read_fraction(value: Any) -> Fraction:
    """``train_fraction``: a number or a text such as 1/64, above 0 and at most 1, exactly.

    Raises:
        UsageError: for anything else.
    """
    try:
        if isinstance(value, bool):
            raise ValueError
        fraction = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        raise UsageError(
            "train_fraction: expected a number above 0 and at most 1, such as 1/64 or 0.25; "
            f"found {shown(value)}"
        )
    return fraction


def recent_sessions(log: EventLog, part: np.ndarray, train: int, fraction: Fraction) -> np.ndarray:
    """[events] whether an event stays when only the newest training sessions do.

    Args:
        log: the events.
        part: [events] label of each, whole sessions.
        train: the label of training.
        fraction: of the training sessions, rounded down.

    Raises:
        UsageError: if none is left.
    """
    order = session_order(log)
    trained = order[part[log.offsets[order]] == train]
    count = _share(fraction, len(trained))
    if not count:
        raise UsageError(
            f"train_fraction: {fraction} of {len(trained):,} training sessions is less than one"
        )
    stays = np.ones(len(log.offsets) - 1, dtype=bool)
    stays[trained[: len(trained) - count]] = False
    return np.repeat(stays, log.lengths)


def count_sessions(log: EventLog, part: np.ndarray, phases: int) -> list[int]:
    """Sessions of each part, given whole sessions."""
    sessions = np.flatnonzero(log.lengths)
    return np.bincount(part[log.offsets[sessions]], minlength=phases).tolist()


def count_overlapping(log: EventLog, part: np.ndarray, train: int) -> int:
    """Held-out sessions that begin before the last training event."""
    times, sessions = log.times.numpy(), np.flatnonzero(log.lengths)
    first = log.offsets[sessions]
    last_trained = times[part == train].max(initial=-math.inf)
    return int(((part[first] != train) & (times[first] < last_trained)).sum())


def _share(fraction: Fraction, count: int) -> int:
    return math.floor(fraction * count)


def read_session_filter(value: Any) -> tuple[int, int]:
    """Least events of a session and of an item; 1 where ``session_filter`` says nothing.

    Raises:
        UsageError: for anything but such numbers.
    """
    given = {} if value is None else value
    if isinstance(given, dict) and set(given) <= {"session", "item"}:
        least = given.get("session", 1), given.get("item", 1)
        if all(type(number) is int and number >= 1 for number in least):
            return least
    raise UsageError(
        "session_filter: expected least numbers of events such as {item: 5, session: 2}, found "
        f"{shown(value)}"
    )


def filter_sessions(
    events: pd.DataFrame, session: str, item: str, least: tuple[int, int]
) -> pd.DataFrame:
    """One pass over short sessions, rare items, and sessions that this has made short.

    As PosRec's section 5.1.2 and the code of SR-GNN: afterwards an item may be rare again.

    Args:
        events: a row per event.
        session, item: their columns.
        least: events of a session and of an item.
    """
    for field, number in ((session, least[0]), (item, least[1]), (session, least[0])):
        events = events[events.groupby(field, observed=True)[field].transform("size") >= number]
    return events
