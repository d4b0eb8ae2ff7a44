"""Which part of the log every event belongs to: training, validation or test.

``targets.py`` chooses the events of a part that are predicted, its *targets*. The history of a
target is everything of the same user before it. Train events of a user always precede the held-out
ones, so no history of a training target reaches into validation or test.

One split for all: sequential models of RecBole and of the plugin and general models read the same
labels, which belong to events and not to rows. Leave-one-out follows RecBole's rule: three events
give a test target and none for validation, two or fewer nothing. The global temporal split labels
by time alone: a history may hold held-out events, training never does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recbole_pos.data.events import EventLog
from recbole_pos.data.sessions import session_time
from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, shown

TRAIN, VALID, TEST = 0, 1, 2
PHASES = ("train", "valid", "test")
KINDS = ("LS", "RS", "GT", "ST")


def split_kind(eval_args: dict[str, Any]) -> tuple[str, Any]:
    """LS, RS, GT or ST, and the value given with it.

    Raises:
        UsageError: for an order, grouping or split the plugin does not have.
    """
    order, group_by = eval_args["order"], eval_args["group_by"]
    if order != "TO":
        raise UsageError(
            f"eval_args.order: sequences are split in time order, TO; found {shown(order)}"
        )
    if group_by != "user":
        raise UsageError(f"eval_args.group_by: only user is supported; found {shown(group_by)}")
    split = eval_args["split"]
    if not isinstance(split, dict) or len(split) != 1:
        raise UsageError(
            "eval_args.split: expected one of {LS: ...}, {RS: ...}, {GT: ...}, {ST: ...}; "
            f"found {shown(split)}"
        )
    ((kind, value),) = split.items()
    if kind not in KINDS:
        raise UsageError(
            f"eval_args.split: unknown split {shown(kind)}; known are {', '.join(KINDS)}"
        )
    return kind, value


def split_events(log: EventLog, eval_args: dict[str, Any]) -> tuple[np.ndarray, list[float]]:
    """Label every event.

    Args:
        log: the events.
        eval_args: RecBole's option of that name.

    Returns:
        [events] int8 of TRAIN, VALID and TEST; and under GT and ST the boundaries, as times.

    Raises:
        UsageError: for a split the plugin does not have, or one that leaves a part empty.
    """
    kind, value = split_kind(eval_args)
    if kind == "GT":
        return global_time(log.times.numpy(), value)
    if kind == "ST":
        return session_time(log, value)
    lengths = np.repeat(log.lengths, log.lengths)
    return (leave_one_out if kind == "LS" else ratio)(lengths, log.ranks, value), []


def leave_one_out(lengths: np.ndarray, ranks: np.ndarray, mode: str) -> np.ndarray:
    """The last target of each user is held out for test, the one before for validation.

    Users too short for both keep one target for training first: with 3 events the last is test and
    none is validation, with 2 or fewer nothing is held out.
    """
    held_out = {"valid_and_test": (VALID, TEST), "valid_only": (VALID,), "test_only": (TEST,)}
    if not isinstance(mode, str) or mode not in held_out:
        raise UsageError(f"eval_args.split.LS: {shown(mode)} is not one of {', '.join(held_out)}")
    phases = held_out[mode]
    part = np.full(len(ranks), TRAIN, dtype=np.int8)
    targets = lengths - 1  # the first event is never a target
    age = lengths - 1 - ranks
    for place, phase in enumerate(reversed(phases)):
        part[(age == place) & (targets > place + 1)] = phase
    return part


def ratio(lengths: np.ndarray, ranks: np.ndarray, ratios: list[float]) -> np.ndarray:
    """Each user's targets in time order, cut by ratios as RecBole's ``split_by_ratio`` does."""
    three = isinstance(ratios, (list, tuple)) and len(ratios) == 3 and all(map(is_number, ratios))
    if not (three and min(ratios) >= 0 and sum(ratios) > 0):
        raise UsageError(f"eval_args.split.RS: expected three ratios, found {shown(ratios)}")
    share = np.asarray(ratios, dtype=float) / sum(ratios)
    targets = np.maximum(lengths - 1, 0)
    valid, test = (share[1] * targets).astype(int), (share[2] * targets).astype(int)
    train = targets - valid - test
    for count, part in ((test, 2), (valid, 1)):  # a part rounded to nothing gets one if it can
        lift = (train > 1) & (share[part] * targets > 0) & (share[part] * targets < 1)
        count += lift
        train = train - lift
    labels = np.full(len(ranks), TRAIN, dtype=np.int8)
    labels[ranks > train] = VALID
    labels[ranks > train + valid] = TEST
    return labels


def global_time(times: np.ndarray, numbers: list[float]) -> tuple[np.ndarray, list[float]]:
    """All users cut at the same times (Gusak et al., "Time to Split", 2025).

    Args:
        times: [events] float64 times.
        numbers: one or two quantiles of them. Train is everything up to the first boundary, the
            boundary included; test everything after the last; validation what lies between.

    Returns:
        [events] int8 labels, equal times always under the same one; the boundaries.
    """
    known = isinstance(numbers, (list, tuple)) and len(numbers) in (1, 2)
    edges = [0, *numbers, 1] if known and all(is_number(n) for n in numbers) else []
    if not edges or any(not low < high for low, high in zip(edges, edges[1:], strict=False)):
        raise UsageError(
            "eval_args.split.GT: expected one or two numbers above 0 and below 1, each larger than "
            f"the one before, such as [0.95, 0.97]; found {shown(numbers)}"
        )
    boundaries = np.quantile(times, numbers)
    part = np.searchsorted(boundaries, times, side="left").astype(np.int8)  # b[i-1] < t <= b[i]
    shared = [int((times == b).sum()) for b in boundaries]
    at = [f"{show_time(b)} (shared by {n} events)" for b, n in zip(boundaries, shared, strict=True)]
    if not (part == len(numbers)).any():
        raise UsageError(
            f"eval_args.split.GT: {shown(numbers)} leaves no event for test: none is later than "
            f"the "
            f"last boundary, time {at[-1]}; give a smaller last number"
        )
    if not (part == 1).any():
        raise UsageError(
            f"eval_args.split.GT: {shown(numbers)} leaves no event for validation: none lies "
            f"between "
            f"the boundaries, times {' and '.join(at)}; move the numbers further apart, or give "
            "one number to do without validation"
        )
    if len(numbers) == 1:
        part[part == 1] = TEST
    return part, boundaries.tolist()


def show_time(time: float) -> str:
    """All digits of a time and no others: 893286638, 0.1."""
    return np.format_float_positional(time, trim="-")
