"""Which events are predicted for training, validation and test.

A split labels every event. A labelled event is a *target*; its history is everything of the same
user before it. Train events of a user always precede the held-out ones, so no history of a training
target reaches into validation or test.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recbole_pos.errors import UsageError

TRAIN, VALID, TEST = 0, 1, 2
PHASES = ("train", "valid", "test")


def split_events(lengths: np.ndarray, ranks: np.ndarray, eval_args: dict[str, Any]) -> np.ndarray:
    """Label every event as RecBole does for sequential models.

    Args:
        lengths: [events] number of events of the event's user.
        ranks: [events] place of the event among them, from 0.
        eval_args: RecBole's option of that name.

    Returns:
        [events] int8 of TRAIN, VALID and TEST. A user's first event has no history; it is TRAIN.

    Raises:
        UsageError: for an order, grouping or split the plugin does not have.
    """
    order, group_by = eval_args["order"], eval_args["group_by"]
    if order != "TO":
        raise UsageError(f"eval_args.order: sequences are split in time order, TO; found {order!r}")
    if group_by != "user":
        raise UsageError(f"eval_args.group_by: only user is supported; found {group_by!r}")
    split = eval_args["split"]
    if not isinstance(split, dict) or len(split) != 1:
        raise UsageError(
            f"eval_args.split: expected one of {{LS: ...}}, {{RS: ...}}; found {split!r}"
        )
    ((mode, value),) = split.items()
    if mode == "LS":
        return leave_one_out(lengths, ranks, value)
    if mode == "RS":
        return ratio(lengths, ranks, value)
    raise UsageError(f"eval_args.split: unknown split {mode!r}; known are LS and RS")


def leave_one_out(lengths: np.ndarray, ranks: np.ndarray, mode: str) -> np.ndarray:
    """The last target of each user is held out for test, the one before for validation.

    Users too short for both keep one target for training first: with 3 events the last is test and
    none is validation, with 2 or fewer nothing is held out.
    """
    held_out = {"valid_and_test": (VALID, TEST), "valid_only": (VALID,), "test_only": (TEST,)}
    if mode not in held_out:
        raise UsageError(f"eval_args.split.LS: {mode!r} is not one of {', '.join(held_out)}")
    phases = held_out[mode]
    part = np.full(len(ranks), TRAIN, dtype=np.int8)
    targets = lengths - 1  # the first event is never a target
    age = lengths - 1 - ranks
    for place, phase in enumerate(reversed(phases)):
        part[(age == place) & (targets > place + 1)] = phase
    return part


def ratio(lengths: np.ndarray, ranks: np.ndarray, ratios: list[float]) -> np.ndarray:
    """Each user's targets in time order, cut by ratios as RecBole's ``split_by_ratio`` does."""
    if not (isinstance(ratios, list) and len(ratios) == 3 and min(ratios) >= 0 and sum(ratios) > 0):
        raise UsageError(f"eval_args.split.RS: expected three ratios, found {ratios!r}")
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
