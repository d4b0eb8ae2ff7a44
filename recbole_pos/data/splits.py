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
from datetime import date
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pandas as pd

from recbole_pos.data.interactions import EventLog
from recbole_pos.errors import UsageError
from recbole_pos.values import SECONDS, is_number, is_whole, shown

TRAIN, VALID, TEST = 0, 1, 2
PHASES = ("train", "valid", "test")
# RecBole's names for the targets that leave-one-out holds out.
_HELD_OUT = {
    "valid_and_test": {"valid": 1, "test": 1},
    "valid_only": {"valid": 1},
    "test_only": {"test": 1},
}


def read_split(eval_args: dict[str, Any]) -> tuple[str, Any]:
    """Return the kind of split in ``eval_args`` (LS, RS, GT or ST) and its value.

    Raises:
        UsageError: for an order, grouping or split the plugin does not have.
    """
    for key, supported in (("order", "TO"), ("group_by", "user")):
        if eval_args[key] != supported:
            value = shown(eval_args[key])
            raise UsageError(f"eval_args.{key}: only {supported} is supported; found {value}")
    split = eval_args["split"]
    kind = next(iter(split)) if isinstance(split, dict) and len(split) == 1 else None
    if kind not in ("LS", "RS", "GT", "ST"):
        raise UsageError(
            "eval_args.split: expected one of {LS: ...}, {RS: ...}, {GT: ...}, {ST: ...}; "
            f"found {shown(split)}"
        )
    return kind, split[kind]


def split_log(
    log: EventLog, is_possible: np.ndarray, eval_args: dict[str, Any], time_unit: str
) -> tuple[np.ndarray, list[float]]:
    """Return [interactions] int8 parts, and the times of the boundaries (none under LS and RS).

    Args:
        log: the interactions.
        is_possible: [interactions] bool, which may be targets; LS and RS count these.
        eval_args: RecBole's option of that name.
        time_unit: unit of the times in the log, such as seconds.

    Raises:
        UsageError: for a split the plugin does not have, or one that leaves a part empty.
    """
    kind, value = read_split(eval_args)
    if kind == "GT":
        return split_by_time(log.times.numpy(), value, time_unit)
    if kind == "ST":
        return split_sessions(log, value)
    split_users = leave_last_out if kind == "LS" else split_by_ratio
    part = np.empty(len(log), dtype=np.int8)
    for rows, chunk in log.iterate_chunks():
        part[rows] = split_users(*chunk.count_targets(is_possible[rows]), value)
    return part, []


def leave_last_out(num_targets: np.ndarray, num_until: np.ndarray, value: Any) -> np.ndarray:
    """Hold out the last targets of each user for test, the ones before them for validation.

    A user with too few targets for all parts keeps one for training first, then those of the test.
    An interaction after a held-out target that cannot be a target itself belongs to that target's
    part. The result is [interactions] int8.

    Args:
        num_targets: [interactions] number of possible targets of the interaction's user.
        num_until: [interactions] how many of these are up to the interaction, itself included.
        value: valid_and_test, valid_only or test_only, which hold out one target of a user for
            each part; or numbers of targets such as {valid: 1, test: 3}.
    """
    num_valid, num_test = _read_held_out(value)
    num_test = np.minimum(num_test, np.maximum(num_targets - 1, 0))
    num_valid = np.minimum(num_valid, np.maximum(num_targets - 1 - num_test, 0))
    num_later = num_targets - num_until
    part = np.full(len(num_until), TRAIN, dtype=np.int8)
    part[num_later < num_test + num_valid] = VALID
    part[num_later < num_test] = TEST
    return part


def _read_held_out(value: Any) -> tuple[int, int]:
    """Return how many targets of a user LS holds out for validation and for test."""
    numbers = _HELD_OUT.get(value, {}) if isinstance(value, str) else value
    is_valid = isinstance(numbers, dict) and numbers and numbers.keys() <= set(PHASES[1:])
    if not is_valid or not all(is_whole(n) and n > 0 for n in numbers.values()):
        raise UsageError(
            f"eval_args.split.LS: expected {', '.join(_HELD_OUT)}, or numbers of targets such as "
            f"{{valid: 1, test: 3}}; found {shown(value)}"
        )
    return numbers.get("valid", 0), numbers.get("test", 0)


def split_by_ratio(
    num_targets: np.ndarray, num_until: np.ndarray, ratios: list[float]
) -> np.ndarray:
    """Return [interactions] int8 parts: each user's targets are cut by ratios, as in RecBole.

    ``num_targets`` and ``num_until`` are as in :func:`leave_last_out`.
    """
    are_three = isinstance(ratios, (list, tuple)) and len(ratios) == 3
    if not (are_three and all(map(is_number, ratios)) and min(ratios) >= 0 and sum(ratios) > 0):
        raise UsageError(f"eval_args.split.RS: expected three ratios, found {shown(ratios)}")
    _, valid_share, test_share = np.asarray(ratios, dtype=float) / sum(ratios)
    num_valid = (valid_share * num_targets).astype(int)
    num_test = (test_share * num_targets).astype(int)
    num_train = num_targets - num_valid - num_test
    # a part of less than one target gets one from training, if that has two
    for counts, share in ((num_test, test_share), (num_valid, valid_share)):
        exact = share * num_targets
        is_raised = (num_train > 1) & (exact > 0) & (exact < 1)
        counts += is_raised
        num_train -= is_raised
    part = np.full(len(num_until), TRAIN, dtype=np.int8)
    part[num_until > num_train] = VALID
    part[num_until > num_train + num_valid] = TEST
    return part


def split_by_time(times: np.ndarray, value: Any, time_unit: str) -> tuple[np.ndarray, list[float]]:
    """Return [interactions] int8 parts, cut at the same times for all users, and these times.

    Args:
        times: [interactions] float64.
        value: one or two boundaries; test is what follows the last. Numbers below 1 are quantiles
            of ``times``: training is all up to the first, itself included (Gusak et al., "Time to
            Split", 2025). Larger numbers are times and texts are dates: training is all before the
            first.
        time_unit: unit of the times, such as seconds.
    """
    bounds = list(value) if isinstance(value, (list, tuple)) else []
    side: Literal["left", "right"]
    if bounds and all(is_number(bound) and 0 < bound < 1 for bound in bounds):
        boundaries, side = np.quantile(times, bounds), "left"  # b[i-1] < t <= b[i]
        is_valid = (np.diff(bounds) > 0).all()  # two quantiles may be the same time
    else:
        boundaries, side = _read_times(bounds, time_unit), "right"  # b[i-1] <= t < b[i]
        is_valid = (np.diff(boundaries) > 0).all()
    if len(boundaries) not in (1, 2) or not is_valid:
        raise UsageError(
            "eval_args.split.GT: expected one or two boundaries, each above the one before: "
            "quantiles such as [0.95, 0.97], dates such as ['2024-01-25', '2024-02-05'], or times "
            f"as in the time field; found {shown(value)}"
        )
    part = np.searchsorted(boundaries, times, side=side).astype(np.int8)
    if len(boundaries) == 1:
        part[part == 1] = TEST
    for phase in (TRAIN, VALID, TEST) if len(boundaries) == 2 else (TRAIN, TEST):
        if not (part == phase).any():
            raise UsageError(
                f"eval_args.split.GT: {shown(value)} leaves no interaction for {PHASES[phase]}; "
                f"the boundaries are at time {' and '.join(map(format_time, boundaries))}, the "
                f"times of the data from {format_time(times.min())} to {format_time(times.max())}"
            )
    return part, boundaries.tolist()


def _read_times(bounds: list[Any], time_unit: str) -> np.ndarray:
    """Return [bounds] float64 times of given boundaries; none if one is no time.

    A date is midnight; a date or time without a zone is UTC.
    """
    times = []
    for bound in bounds:
        if is_number(bound) and bound >= 1:
            times.append(float(bound))
            continue
        try:
            moment = pd.Timestamp(bound if isinstance(bound, (str, date)) else "")
            moment = moment.tz_localize("UTC") if moment.tzinfo is None else moment
            times.append(moment.timestamp() / SECONDS[time_unit])
        except (ValueError, OverflowError):  # NaT has no timestamp
            return np.empty(0)
    return np.array(times)


def format_time(time: float) -> str:
    """Return all digits of a time and no others: 893286638, 0.1."""
    return np.format_float_positional(time, trim="-")


def split_sessions(log: EventLog, value: Any) -> tuple[np.ndarray, list[float]]:
    """Return [interactions] int8 parts of whole sessions, and the last time of each but test.

    Sessions are the users of the log, in the order of their last times. ``value`` are ends of
    training and validation: one or two fractions of all sessions (rounded down) or numbers of
    sessions; with one there is no validation.
    """
    sessions = _order_sessions(log)
    bounds = _read_bounds(value, len(sessions))
    part = np.searchsorted(bounds, np.arange(len(sessions)), side="right")  # in that order
    if len(bounds) == 1:
        part[part == 1] = TEST
    part_by_user = np.zeros(len(log.lengths), dtype=np.int8)
    part_by_user[sessions] = part
    last_sessions = sessions[np.array(bounds) - 1]
    last_times = log.times.numpy()[log.offsets[last_sessions + 1] - 1]
    return np.repeat(part_by_user, log.lengths), last_times.tolist()


def _order_sessions(log: EventLog) -> np.ndarray:
    """Return the ids of sessions with interactions, by their last times, then as in the file."""
    sessions = np.flatnonzero(log.lengths)  # ids are in the order of the file
    last_times = log.times.numpy()[log.offsets[sessions + 1] - 1]
    return sessions[np.argsort(last_times, kind="stable")]


def _read_bounds(value: Any, num_sessions: int) -> list[int]:
    """Return the number of sessions before validation and before test, or only the latter."""
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
    bounds = numbers
    if are_shares:  # exactly, by the text of each: in floats 0.29 * 100 is less than 29
        bounds = [math.floor(Fraction(str(share)) * num_sessions) for share in numbers]
    if (np.diff([0, *bounds, num_sessions]) <= 0).any():
        raise UsageError(
            f"eval_args.split.ST: {shown(value)} of {num_sessions:,} sessions leaves a part empty"
        )
    return bounds


def read_fraction(value: Any) -> Fraction:
    """Return ``train_fraction``, a number or text such as 1/64 above 0 and at most 1, exactly."""
    try:
        text = "0" if isinstance(value, bool) else str(value)
        # by float, since a Fraction of 1e-999999999 has as many digits
        fraction = Fraction(text if "/" in text else str(float(text)))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        raise UsageError(
            "train_fraction: expected a number above 0 and at most 1, such as 1/64 or 0.25; "
            f"found {shown(value)}"
        )
    return fraction


def find_recent_sessions(
    log: EventLog, part: np.ndarray, train_fraction: Any
) -> tuple[np.ndarray, dict[str, int]]:
    """Find which interactions are left without all but the newest training sessions.

    Args:
        log: the interactions.
        part: [interactions] int8 part of each.
        train_fraction: share of the training sessions that is kept; None for all of them.

    Returns:
        [interactions] bool, which are left; and the numbers of sessions that are left: by phase,
        ``left_out``, and ``overlapping`` (held out, begun before the last training interaction).
    """
    sessions = _order_sessions(log)
    session_parts = part[log.offsets[sessions]]
    num_left_out = 0
    is_kept = np.ones(len(log.lengths), dtype=bool)
    if train_fraction is not None:
        fraction, train_sessions = read_fraction(train_fraction), sessions[session_parts == TRAIN]
        num_kept = math.floor(fraction * len(train_sessions))
        if num_kept == 0:
            raise UsageError(
                f"train_fraction: {fraction} of {len(train_sessions):,} training sessions is less "
                "than one"
            )
        num_left_out = len(train_sessions) - num_kept
        is_kept[train_sessions[:num_left_out]] = False

    is_left = np.repeat(is_kept, log.lengths)
    times = log.times.numpy()
    train_end = times[is_left & (part == TRAIN)].max(initial=-math.inf)
    first_times = times[log.offsets[sessions]]
    num_overlapping = int(((session_parts != TRAIN) & (first_times < train_end)).sum())
    counts = np.bincount(session_parts[is_kept[sessions]], minlength=len(PHASES)).tolist()
    numbers = dict(zip(PHASES, counts, strict=True))
    return is_left, {**numbers, "left_out": num_left_out, "overlapping": num_overlapping}


def read_session_filter(value: Any) -> tuple[int, int]:
    """Return the least interactions of a session and of an item by ``session_filter``."""
    option = {} if value is None else value
    if isinstance(option, dict) and set(option) <= {"session", "item"}:
        minimums = option.get("session", 1), option.get("item", 1)
        if all(type(number) is int and number >= 1 for number in minimums):
            return minimums
    raise UsageError(
        "session_filter: expected least numbers of interactions such as {item: 5, session: 2}, "
        f"found {shown(value)}"
    )


def filter_sessions(
    interactions: pd.DataFrame, session: str, item: str, min_session: int, min_item: int
) -> pd.DataFrame:
    """Drop sessions with too few interactions, items with too few, such sessions again.

    This is one pass, as in PosRec's section 5.1.2: afterwards an item may be rare again.
    ``session`` and ``item`` are the names of the columns.
    """
    for field, minimum in ((session, min_session), (item, min_item), (session, min_session)):
        sizes = interactions.groupby(field, observed=True)[field].transform("size")
        interactions = interactions[sizes >= minimum]
    return interactions
