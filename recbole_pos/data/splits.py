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
    """Return the kind of split that the option ``eval_args`` names, and the value of that kind.

    For example, ``{"split": {"LS": "valid_and_test"}, ...}`` gives ("LS", "valid_and_test").

    Args:
        eval_args: RecBole's option of that name.

    Returns:
        kind: LS (leave-one-out), RS (ratios per user), GT (global time) or ST (whole sessions).
        value: what stands under that kind, not yet checked.

    Raises:
        UsageError: for a split the plugin does not have.
    """
    split = eval_args["split"]
    if isinstance(split, dict) and len(split) == 1:
        ((kind, value),) = split.items()
        if kind in ("LS", "RS", "GT", "ST"):
            return kind, value
    raise UsageError(
        "eval_args.split: expected one of {LS: ...}, {RS: ...}, {GT: ...}, {ST: ...}; "
        f"found {shown(split)}"
    )


def split_log(
    log: EventLog, is_possible: np.ndarray, eval_args: dict[str, Any], time_unit: str
) -> tuple[np.ndarray, list[float]]:
    """Assign every interaction to training, validation or test, by the split in ``eval_args``.

    Args:
        log: the interactions, sorted by user and time.
        is_possible: [interactions] bool, which interactions may be targets, that is, be predicted.
            Leave-one-out (LS) and ratios (RS) count only these.
        eval_args: RecBole's option of that name.
        time_unit: unit of the times in the log, such as seconds.

    Returns:
        part: [interactions] int8 of TRAIN, VALID and TEST.
        boundaries: times that separate the parts, at most two; empty under LS and RS, where each
            user is split alone.

    Raises:
        UsageError: for a split the plugin does not have, or one that leaves a part empty.
    """
    kind, value = read_split(eval_args)
    if kind == "GT":
        return split_by_time(log.times.numpy(), value, time_unit)
    if kind == "ST":
        return split_sessions(log, value)

    # Both other kinds split each user alone, so that a chunk of users at a time saves memory. For
    # each interaction, count the possible targets of its user: in all, and up to the interaction.
    split_users = leave_last_out if kind == "LS" else split_by_ratio
    part = np.empty(len(log), dtype=np.int8)
    for rows, chunk in log.iterate_chunks():
        num_targets, num_until = chunk.count_targets(is_possible[rows])
        part[rows] = split_users(num_targets, num_until, value)
    return part, []


def leave_last_out(num_targets: np.ndarray, num_until: np.ndarray, value: Any) -> np.ndarray:
    """Hold out the last targets of each user for test, the ones before them for validation.

    A user with too few targets for all parts keeps the first, if there is one, for training; test
    comes next, validation last. An interaction that cannot be a target belongs to the part of the
    target before it. For example, with one target held out for each part, a user whose interactions
    are [no target, target, target, target] has the parts [TRAIN, TRAIN, VALID, TEST].

    Args:
        num_targets: [interactions] number of possible targets of the interaction's user; above,
            [3, 3, 3, 3].
        num_until: [interactions] how many of these targets come up to the interaction, itself
            included; above, [0, 1, 2, 3].
        value: valid_and_test, valid_only or test_only, which hold out one target of a user for
            each part; or numbers of targets such as {valid: 1, test: 3}.

    Returns:
        [interactions] int8 of TRAIN, VALID and TEST.
    """
    # How many targets the user of each interaction gives to test, and then to validation.
    num_valid, num_test = _read_held_out(value)
    num_spare = np.maximum(num_targets - 1, 0)  # one stays for training
    num_test = np.minimum(num_test, num_spare)
    num_valid = np.minimum(num_valid, num_spare - num_test)

    # How many targets of the user come after each interaction: above, [3, 2, 1, 0]. Below 2 it is
    # held out, for validation at first; below 1, the number for test, it is of test.
    num_later = num_targets - num_until
    part = np.full(len(num_until), TRAIN, dtype=np.int8)
    part[num_later < num_test + num_valid] = VALID
    part[num_later < num_test] = TEST
    return part


def _read_held_out(value: Any) -> tuple[int, int]:
    """Return how many targets of each user leave-one-out holds out for validation and for test.

    Args:
        value: one of RecBole's words valid_and_test, valid_only and test_only; or a dict with a
            number above 0 for valid, test or both, such as {valid: 1, test: 3}.

    Returns:
        Number of targets for validation, and for test; 0 for one that is not named.

    Raises:
        UsageError: if the value is neither.
    """
    # ``_HELD_OUT`` has the dict that each word means. An unknown word stays a text, which is
    # refused as all else that is not a dict.
    numbers: Any = _HELD_OUT.get(value, value) if isinstance(value, str) else value
    is_valid = isinstance(numbers, dict) and numbers and numbers.keys() <= {"valid", "test"}
    if not is_valid or not all(is_whole(n) and n > 0 for n in numbers.values()):
        raise UsageError(
            f"eval_args.split.LS: expected {', '.join(_HELD_OUT)}, or numbers of targets such as "
            f"{{valid: 1, test: 3}}; found {shown(value)}"
        )
    return numbers.get("valid", 0), numbers.get("test", 0)


def split_by_ratio(
    num_targets: np.ndarray, num_until: np.ndarray, ratios: list[float]
) -> np.ndarray:
    """Cut the targets of each user, oldest first, into training, validation and test by ratios.

    This gives the same parts as RecBole. For example, ratios [8, 1, 1] give a user with 20 targets
    16 for training, then 2 for validation and 2 for test.

    Args:
        num_targets: [interactions] number of possible targets of the interaction's user.
        num_until: [interactions] how many of these targets come up to the interaction, itself
            included.
        ratios: three numbers, for training, validation and test; only their proportions matter.

    Returns:
        [interactions] int8 of TRAIN, VALID and TEST.
    """
    are_three = isinstance(ratios, (list, tuple)) and len(ratios) == 3
    if not (are_three and all(map(is_number, ratios)) and min(ratios) >= 0 and sum(ratios) > 0):
        raise UsageError(f"eval_args.split.RS: expected three ratios, found {shown(ratios)}")

    # Numbers of targets are rounded down for validation and test; training has the rest.
    _, valid_share, test_share = np.asarray(ratios, dtype=float) / sum(ratios)
    num_valid = (valid_share * num_targets).astype(int)
    num_test = (test_share * num_targets).astype(int)
    num_train = num_targets - num_valid - num_test

    # Where a share is less than one target, and so was rounded to none, the part gets one target
    # from training, if that keeps at least one; test comes first. For example, of 5 targets the
    # ratios [8, 1, 1] give 0.5 to test: it gets 1, and training has 4. Then validation gets 1, and
    # training has 3. With 2 targets only test gets one. The arrays are changed in place.
    for num_of_part, share in ((num_test, test_share), (num_valid, valid_share)):
        unrounded = share * num_targets
        gets_one = (unrounded > 0) & (unrounded < 1) & (num_train > 1)
        num_of_part += gets_one
        num_train -= gets_one

    part = np.full(len(num_until), TRAIN, dtype=np.int8)
    part[num_until > num_train] = VALID
    part[num_until > num_train + num_valid] = TEST
    return part


def split_by_time(times: np.ndarray, value: Any, time_unit: str) -> tuple[np.ndarray, list[float]]:
    """Cut all interactions into parts at the same one or two points in time (the split GT).

    Args:
        times: [interactions] float64.
        value: one or two boundaries; test is what follows the last. Numbers below 1 are quantiles
            of ``times``: training is all up to the first, itself included (Gusak et al., "Time to
            Split", 2025). Larger numbers are times and texts are dates: training is all before the
            first.
        time_unit: unit of the times, such as seconds.

    Returns:
        part: [interactions] int8 of TRAIN, VALID and TEST; no VALID with one boundary.
        boundaries: the one or two boundaries as times.

    Raises:
        UsageError: if ``value`` holds no such boundaries, or a part would be empty.
    """
    # The boundaries as times. Those in ``value`` must ascend. (The times of two quantiles may still
    # be equal, which leaves no interaction between them and is refused below.)
    bounds = list(value) if isinstance(value, (list, tuple)) else []
    are_quantiles = bool(bounds) and all(is_number(bound) and 0 < bound < 1 for bound in bounds)
    if are_quantiles:
        boundaries = np.quantile(times, bounds)
        are_ascending = (np.diff(bounds) > 0).all()
    else:
        boundaries = _read_times(bounds, time_unit)
        are_ascending = (np.diff(boundaries) > 0).all()
    if len(boundaries) not in (1, 2) or not are_ascending:
        raise UsageError(
            "eval_args.split.GT: expected one or two boundaries, each above the one before: "
            "quantiles such as [0.95, 0.97], dates such as ['2024-01-25', '2024-02-05'], or times "
            f"as in the time field; found {shown(value)}"
        )

    # For each time count the boundaries that lie before it: 0, 1 or 2, the place in ``parts``. With
    # side "left" a boundary that equals the time is not counted: the time is still in the part
    # before it. With "right" it is counted, and the time is in the part after it.
    parts = [TRAIN, VALID, TEST] if len(boundaries) == 2 else [TRAIN, TEST]
    side: Literal["left", "right"] = "left" if are_quantiles else "right"
    places = np.searchsorted(boundaries, times, side=side)
    part = np.array(parts, np.int8)[places]

    for phase in parts:
        if not (part == phase).any():
            raise UsageError(
                f"eval_args.split.GT: {shown(value)} leaves no interaction for {PHASES[phase]}; "
                f"the boundaries are at time {' and '.join(map(format_time, boundaries))}, the "
                f"times of the data from {format_time(times.min())} to {format_time(times.max())}"
            )
    return part, boundaries.tolist()


def _read_times(bounds: list[Any], time_unit: str) -> np.ndarray:
    """Convert the points in time at which a split cuts to numbers in the unit of the time field.

    Args:
        bounds: each a number of at least 1, which is a time already; or a date, or a text such as
            2024-01-25, which is midnight. Where no time zone is given, it is UTC.
        time_unit: unit of the times since 1970, such as seconds.

    Returns:
        [bounds] float64; an empty array if one of them is neither, which the caller refuses.
    """
    # SECONDS[time_unit] is the number of seconds in a unit of the time field.
    times = []
    for bound in bounds:
        if is_number(bound) and bound >= 1:
            times.append(float(bound))
            continue
        if not isinstance(bound, (str, date)):
            return np.empty(0)
        try:
            moment = pd.Timestamp(bound)
            moment = moment.tz_localize("UTC") if moment.tzinfo is None else moment
            times.append(moment.timestamp() / SECONDS[time_unit])
        except (ValueError, OverflowError):  # as of the empty text, which pandas reads as NaT
            return np.empty(0)
    return np.array(times)


def format_time(time: float) -> str:
    """Return all digits of a time and no others: 893286638, 0.1."""
    return np.format_float_positional(time, trim="-")


def split_sessions(log: EventLog, value: Any) -> tuple[np.ndarray, list[float]]:
    """Assign whole sessions, ordered by their last times, to training, validation and test.

    A session is what the log calls a user. For example, of 10 sessions the value [8, 9] gives the
    8 that end first to training, the next to validation and the last to test.

    Args:
        log: the interactions, sorted by session and time.
        value: where training and validation end, as one or two fractions of all sessions (rounded
            down) or numbers of sessions; with one there is no validation.

    Returns:
        part: [interactions] int8 of TRAIN, VALID and TEST.
        last_times: the time of the last interaction of training and, if it exists, of validation.
    """
    # The ids of the sessions in the order of their last times, and how many of them come before
    # validation and test: [8, 9], or [8] if there is no validation.
    sessions = _order_sessions(log)
    bounds = _read_bounds(value, len(sessions))

    # The part of each session in this order: 8 times TRAIN, once VALID, once TEST.
    parts = [TRAIN, VALID, TEST] if len(bounds) == 2 else [TRAIN, TEST]
    ordered_parts = np.repeat(parts, np.diff([0, *bounds, len(sessions)]))

    # Put the parts in the order of ids, and repeat each for the interactions of its session, of
    # which ``log.lengths`` is the number.
    part_by_id = np.zeros(len(log.lengths), dtype=np.int8)
    part_by_id[sessions] = ordered_parts
    part_by_row = np.repeat(part_by_id, log.lengths)

    # The last session of training, and of validation: those just before a bound. The rows of
    # session s in the log end before offsets[s + 1], so its last one is the row before that.
    last_sessions = sessions[np.array(bounds) - 1]
    last_rows = log.offsets[last_sessions + 1] - 1
    return part_by_row, log.times.numpy()[last_rows].tolist()


def _order_sessions(log: EventLog) -> np.ndarray:
    """Return the ids of all sessions that have interactions, in the order of their last times.

    Sessions that end at the same time stay in the order of the file, which is that of their ids.

    Args:
        log: the interactions, sorted by session (what the log calls a user) and time.
    """
    # The rows of session s in the log end before offsets[s + 1], so its last one is that before it.
    sessions = np.flatnonzero(log.lengths)
    last_times = log.times.numpy()[log.offsets[sessions + 1] - 1]
    return sessions[np.argsort(last_times, kind="stable")]


def _read_bounds(value: Any, num_sessions: int) -> list[int]:
    """Return how many sessions come before validation and before test.

    For example, [0.9, 0.95] of 200 sessions gives [180, 190], and [0.9] gives [180].

    Args:
        value: one or two fractions of all sessions, or numbers of sessions; with one there is no
            validation, so that it is the number before test.
        num_sessions: number of all sessions.

    Raises:
        UsageError: if the value is something else, or leaves a part empty.
    """
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    are_counts = all(is_whole(n) for n in numbers)
    are_shares = all(isinstance(n, float) and 0 < n < 1 for n in numbers)
    is_valid = len(numbers) in (1, 2) and (are_counts or are_shares)
    bounds = numbers
    if are_shares:  # as exact fractions of their texts: in floats 0.29 * 100 is less than 29
        bounds = [math.floor(Fraction(str(share)) * num_sessions) for share in numbers]

    # Each part, which lies between two bounds, must have a session.
    if not is_valid or (np.diff([0, *bounds, num_sessions]) <= 0).any():
        raise UsageError(
            "eval_args.split.ST: expected fractions of all sessions such as [0.9, 0.95] or numbers "
            "of sessions such as [9000, 9500], one or two, which leave no part empty; found "
            f"{shown(value)} of {num_sessions:,} sessions"
        )
    return bounds


def read_fraction(value: Any) -> Fraction:
    """Return the option ``train_fraction`` as an exact fraction, above 0 and at most 1.

    Args:
        value: a number such as 0.25, or a text such as 1/64.

    Raises:
        UsageError: if it is something else.
    """
    try:
        fraction = Fraction(str(value))  # the exact value of 0.3, which a float only comes near to
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
    """Find the interactions that remain when only the newest training sessions are kept.

    A session is what the log calls a user. Validation and test sessions all remain.

    Args:
        log: the interactions, sorted by session and time.
        part: [interactions] int8 of TRAIN, VALID and TEST, the same for a whole session.
        train_fraction: share of the training sessions that is kept, at least one; None for all.

    Returns:
        is_left: [interactions] bool, which interactions remain.
        counts: numbers of sessions: those that remain as ``train``, ``valid`` and ``test``; those
            that do not as ``left_out``.
    """
    # The ids of all sessions, in the order of their last times, and the part of each. It is that of
    # the session's first interaction, which is in row ``offsets[id]`` of the log.
    sessions = _order_sessions(log)
    parts = part[log.offsets[sessions]]

    # Leave out all training sessions but the newest.
    left_out = sessions[:0]  # none
    if train_fraction is not None:
        train_sessions = sessions[parts == TRAIN]
        num_kept = max(math.floor(read_fraction(train_fraction) * len(train_sessions)), 1)
        left_out = train_sessions[:-num_kept]

    # Repeat this for the interactions of each session, of which ``log.lengths`` is the number.
    is_kept_by_id = np.ones(len(log.lengths), dtype=bool)
    is_kept_by_id[left_out] = False
    is_left = np.repeat(is_kept_by_id, log.lengths)

    kept_parts = parts[is_kept_by_id[sessions]]
    counts = {phase: int((kept_parts == number).sum()) for number, phase in enumerate(PHASES)}
    return is_left, {**counts, "left_out": len(left_out)}


def filter_sessions(
    interactions: pd.DataFrame, session: str, item: str, min_session: int, min_item: int
) -> pd.DataFrame:
    """Drop sessions with too few interactions, then items with too few, then sessions again.

    The last step is for sessions that lost items in the second. It is one pass, as in section
    5.1.2 of the paper PosRec, so afterwards an item may have too few interactions again.

    Args:
        interactions: a row per interaction.
        session: name of the column of sessions.
        item: name of the column of items.
        min_session: least number of interactions of a session.
        min_item: least number of interactions of an item.

    Returns:
        The rows that are left, in the same order.
    """
    # ``sizes`` has for each row how many rows have its session, or its item.
    for field, minimum in ((session, min_session), (item, min_item), (session, min_session)):
        sizes = interactions.groupby(field, observed=True)[field].transform("size")
        interactions = interactions[sizes >= minimum]
    return interactions
