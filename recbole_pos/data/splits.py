"""Which part of the dataset every interaction belongs to: training, validation or test.

``targets.py`` chooses the interactions of a part that are predicted, its *targets*; the history of
a target is everything of its user before it. Training interactions of a user precede the held-out
ones, so no history of a training target reaches into validation or test.

Leave-one-out follows RecBole: three interactions give a test target and none for validation. Under
the global temporal split a history may hold held-out interactions. Sessions are split whole, by
their last time, as in NARM, STAMP and SR-GNN: no training session ends after a held-out one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.data.events import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, is_whole, shown

TRAIN, VALID, TEST = 0, 1, 2
PHASES = ("train", "valid", "test")
_HELD_OUT = {"valid_and_test": (VALID, TEST), "valid_only": (VALID,), "test_only": (TEST,)}


def read_split(eval_args: dict[str, Any]) -> tuple[str, Any]:
    """Return the kind of split in ``eval_args`` (LS, RS, GT or ST) and its value.

    Raises:
        UsageError: for an order, grouping or split the plugin does not have.
    """
    for key, only in (("order", "TO"), ("group_by", "user")):
        if eval_args[key] != only:
            found = shown(eval_args[key])
            raise UsageError(f"eval_args.{key}: only {only} is supported; found {found}")
    split = eval_args["split"]
    kind = next(iter(split)) if isinstance(split, dict) and len(split) == 1 else None
    if kind not in ("LS", "RS", "GT", "ST"):
        raise UsageError(
            "eval_args.split: expected one of {LS: ...}, {RS: ...}, {GT: ...}, {ST: ...}; "
            f"found {shown(split)}"
        )
    return kind, split[kind]


def split_events(log: EventLog, eval_args: dict[str, Any]) -> tuple[np.ndarray, list[float]]:
    """Return [events] int8 TRAIN, VALID or TEST; and under GT and ST the boundaries, as times.

    Raises:
        UsageError: for a split the plugin does not have, or one that leaves a part empty.
    """
    kind, value = read_split(eval_args)
    if kind == "GT":
        return split_by_time(log.times.numpy(), value)
    if kind == "ST":
        return split_sessions(log, value)
    label = leave_one_out if kind == "LS" else split_by_ratio
    labels = np.empty(len(log), dtype=np.int8)
    for place, users_log in log.in_parts():
        labels[place] = label(*users_log.count_targets(), value)
    return labels, []


def leave_one_out(targets: np.ndarray, places: np.ndarray, mode: str) -> np.ndarray:
    """Hold out the last target of each user for test, the one before for validation.

    A user with too few targets for all parts keeps one for training first. An event after a
    held-out target that cannot be a target itself belongs to that target's part.

    Args:
        targets: [events] number of possible targets of the user of each event.
        places: [events] how many of these are up to the event, itself included.
        mode: valid_and_test, valid_only or test_only.
    """
    if not isinstance(mode, str) or mode not in _HELD_OUT:
        raise UsageError(f"eval_args.split.LS: {shown(mode)} is not one of {', '.join(_HELD_OUT)}")
    part = np.full(len(places), TRAIN, dtype=np.int8)
    age = targets - places
    for place, phase in enumerate(reversed(_HELD_OUT[mode])):
        part[(age == place) & (targets > place + 1)] = phase
    return part


def split_by_ratio(targets: np.ndarray, places: np.ndarray, ratios: list[float]) -> np.ndarray:
    """Cut each user's targets in time order by three ratios, as RecBole's method of this name does.

    ``targets`` and ``places`` are as in :func:`leave_one_out`.
    """
    are_three = isinstance(ratios, (list, tuple)) and len(ratios) == 3
    if not (are_three and all(map(is_number, ratios)) and min(ratios) >= 0 and sum(ratios) > 0):
        raise UsageError(f"eval_args.split.RS: expected three ratios, found {shown(ratios)}")
    share = np.asarray(ratios, dtype=float) / sum(ratios)
    valid, test = (share[1] * targets).astype(int), (share[2] * targets).astype(int)
    train = targets - valid - test
    for count, part in ((test, 2), (valid, 1)):  # a part rounded to nothing gets one if it can
        lift = (train > 1) & (share[part] * targets > 0) & (share[part] * targets < 1)
        count += lift
        train = train - lift
    labels = np.full(len(places), TRAIN, dtype=np.int8)
    labels[places > train] = VALID
    labels[places > train + valid] = TEST
    return labels


def split_by_time(times: np.ndarray, numbers: list[float]) -> tuple[np.ndarray, list[float]]:
    """Cut all users at the same times (Gusak et al., "Time to Split", 2025).

    ``numbers`` are one or two quantiles of the [events] times. Training is everything up to the
    first boundary, that included; test everything after the last; validation what lies between.
    """
    is_list = isinstance(numbers, (list, tuple)) and len(numbers) in (1, 2)
    edges = [0, *numbers, 1] if is_list and all(is_number(n) for n in numbers) else []
    if not edges or any(not low < high for low, high in zip(edges, edges[1:], strict=False)):
        raise UsageError(
            "eval_args.split.GT: expected one or two numbers above 0 and below 1, each larger than "
            f"the one before, such as [0.95, 0.97]; found {shown(numbers)}"
        )
    boundaries = np.quantile(times, numbers)
    part = np.searchsorted(boundaries, times, side="left").astype(np.int8)  # b[i-1] < t <= b[i]
    if len(numbers) == 1:
        part[part == 1] = TEST
    for phase in (VALID, TEST)[-len(numbers) :]:
        if not (part == phase).any():
            shared = (
                f"{show_time(b)} (shared by {(times == b).sum()} interactions)" for b in boundaries
            )
            raise UsageError(
                f"eval_args.split.GT: {shown(numbers)} leaves no interaction for {PHASES[phase]}; "
                "the "
                f"boundaries are at time {' and '.join(shared)}: choose other numbers"
            )
    return part, boundaries.tolist()


def show_time(time: float) -> str:
    """Return all digits of a time and no others: 893286638, 0.1."""
    return np.format_float_positional(time, trim="-")


def split_sessions(log: EventLog, value: Any) -> tuple[np.ndarray, list[float]]:
    """Cut whole sessions, which are the users of the log, in the order of their last times.

    ``value`` are ends of training and validation: one or two fractions of all sessions (rounded
    down) or numbers of sessions; with one there is no validation. The boundaries are the times of
    the last session of each.
    """
    order = _order_sessions(log)
    bounds = _read_bounds(value, len(order))
    label = np.searchsorted(bounds, np.arange(len(order)), side="right")
    if len(bounds) == 1:
        label *= 2  # test follows training
    labels = np.zeros(len(log.offsets) - 1, dtype=np.int8)
    labels[order] = label
    last_events = log.offsets[order[np.array(bounds) - 1] + 1] - 1
    return np.repeat(labels, log.lengths), log.times.numpy()[last_events].tolist()


def _order_sessions(log: EventLog) -> np.ndarray:
    """Return [sessions with events] ids in the order of their last times; ties as in the file."""
    sessions = np.flatnonzero(log.lengths)  # RecBole's ids are in the order of the file
    ends = log.times.numpy()[log.offsets[sessions + 1] - 1]
    return sessions[np.argsort(ends, kind="stable")]


def _read_bounds(value: Any, sessions: int) -> list[int]:
    """Return how many of all sessions end before validation and before test."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    are_counts = all(is_whole(n) and n > 0 for n in numbers)
    are_shares = all(isinstance(n, float) and 0 < n < 1 for n in numbers)
    are_rising = (are_counts or are_shares) and numbers == sorted(set(numbers))
    if len(numbers) not in (1, 2) or not are_rising:
        raise UsageError(
            "eval_args.split.ST: expected fractions of all sessions such as [0.9, 0.95] or numbers "
            "of sessions such as [9000, 9500], one or two, each larger than the one before; what "
            f"follows the last is test; found {shown(value)}"
        )
    # Fraction of the text: 0.29 * 100 is less than 29 in floats
    bounds = numbers if are_counts else [math.floor(Fraction(str(n)) * sessions) for n in numbers]
    if (np.diff([0, *bounds, sessions]) <= 0).any():
        raise UsageError(
            f"eval_args.split.ST: {shown(value)} of {sessions:,} sessions leaves a part empty"
        )
    return bounds


def read_fraction(value: Any) -> Fraction:
    """Read ``train_fraction``: a number or text such as 1/64, above 0 and at most 1, exactly."""
    try:
        fraction = Fraction(0 if isinstance(value, bool) else str(value))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        raise UsageError(
            "train_fraction: expected a number above 0 and at most 1, such as 1/64 or 0.25; "
            f"found {shown(value)}"
        )
    return fraction


def keep_recent_sessions(
    log: EventLog, part: np.ndarray, train_fraction: Any
) -> tuple[EventLog, np.ndarray, dict[str, int]]:
    """Leave out all training sessions but the newest ``train_fraction`` of them (None: all).

    Returns:
        the log and labels that remain; and numbers of sessions: by phase, ``left_out``, and
        ``overlapping`` (held-out sessions that begin before the last training interaction).
    """
    left_out = 0
    if train_fraction is not None:
        fraction, order = read_fraction(train_fraction), _order_sessions(log)
        trained = order[part[log.offsets[order]] == TRAIN]
        left_out = len(trained) - math.floor(fraction * len(trained))
        if left_out == len(trained):
            raise UsageError(
                f"train_fraction: {fraction} of {left_out:,} training sessions is less than one"
            )
        stays = np.repeat(~np.isin(np.arange(len(log.lengths)), trained[:left_out]), log.lengths)
        log, part = log.keep(stays), part[stays]
    times, first = log.times.numpy(), log.offsets[np.flatnonzero(log.lengths)]
    counts = np.bincount(part[first], minlength=len(PHASES)).tolist()
    newest = times[part == TRAIN].max(initial=-math.inf)
    overlapping = int(((part[first] != TRAIN) & (times[first] < newest)).sum())
    numbers = dict(zip(PHASES, counts, strict=True))
    return log, part, {**numbers, "left_out": left_out, "overlapping": overlapping}


def read_session_filter(value: Any) -> tuple[int, int]:
    """Return the least interactions of a session and of an item in ``session_filter``."""
    numbers = {} if value is None else value
    if isinstance(numbers, dict) and set(numbers) <= {"session", "item"}:
        least = numbers.get("session", 1), numbers.get("item", 1)
        if all(type(number) is int and number >= 1 for number in least):
            return least
    raise UsageError(
        "session_filter: expected least numbers of interactions such as {item: 5, session: 2}, "
        "found "
        f"{shown(value)}"
    )


def filter_sessions(
    events: pd.DataFrame, session: str, item: str, least: tuple[int, int]
) -> pd.DataFrame:
    """Drop sessions with under ``least[0]`` interactions, items under ``least[1]``, such sessions.

    This is one pass, as in PosRec's section 5.1.2: afterwards an item may be rare again.
    """
    for field, number in ((session, least[0]), (item, least[1]), (session, least[0])):
        events = events[events.groupby(field, observed=True)[field].transform("size") >= number]
    return events
