"""Parts that files give (``benchmark_filename``); interactions that are there more than once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recbole_pos.data.events import EventLog
from recbole_pos.data.splits import PHASES, TEST, TRAIN, VALID, split_events
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_DEFAULT = {"LS": "valid_and_test"}


def check_given(files: Sequence[str], split: Any) -> None:
    """Whether names of parts are two or three, and leave the split to their files.

    Raises:
        UsageError: if not.
    """
    if len(files) not in (2, 3) or len(set(files)) < len(files) or not all(files):
        raise UsageError(
            "benchmark_filename: expected names of three different parts, [train, valid, test], or "
            f"of two, [train, test]; found {shown(list(files))}"
        )
    if len(files) == 3 and split != _DEFAULT:
        raise UsageError(
            f"eval_args.split: {shown(split)} is not read, since the files of benchmark_filename "
            "give all three parts; leave it out, or give two files, [train, test], and the split "
            "cuts validation from the first"
        )


def given_parts(
    log: EventLog, given: np.ndarray, eval_args: dict[str, Any], files: int
) -> np.ndarray:
    """The part of every interaction, where files give them.

    Args:
        log: sorted by user, part and time.
        given: [events] int8 of TRAIN, VALID and TEST, as files say.
        eval_args: RecBole's option of that name; where there are two files, ``split`` cuts
            validation from the first: whatever it holds out, under LS the last of each user.
        files: how many there are.

    Returns:
        [events] int8.
    """
    if files == 3:
        return given
    if eval_args["split"] == _DEFAULT:
        eval_args = {**eval_args, "split": {"LS": "valid_only"}}
    part, first = given.copy(), given == TRAIN
    inner, _ = split_events(log.keep(first), eval_args)
    part[first] = np.where(inner == TRAIN, TRAIN, VALID)
    return part


def find_copies(log: EventLog, by_time: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Interactions with the user, item and time of one that stands before them.

    Args:
        log: of all interactions.
        by_time: whether those of a user are sorted by time.

    Returns:
        [copies] int64 their places in the log, and [copies] that of the first of each.
    """
    users, times, items = log.users.numpy(), log.times.numpy(), log.items.numpy()
    place = np.arange(len(log)) if by_time else np.lexsort((times, users))
    if not by_time:
        users, times = users[place], times[place]
    same = (users[1:] == users[:-1]) & (times[1:] == times[:-1])
    near = np.append(same, False) | np.append(False, same)
    group = np.cumsum(~np.append(False, same))[near]
    place = place[near]
    order = np.lexsort((items[place], group))  # stable: the first of equals is the first in the log
    group, place = group[order], place[order]
    new = np.ones(len(place), dtype=bool)
    new[1:] = (group[1:] != group[:-1]) | (np.diff(items[place]) != 0)
    first = place[new][np.cumsum(new) - 1]
    return place[~new], first[~new]


def leaks(
    log: EventLog, part: np.ndarray, copy: np.ndarray, original: np.ndarray
) -> dict[str, dict[str, int]]:
    """Count what held-out interactions of given parts have in common with earlier parts.

    Args:
        log: sorted by user, part and time.
        part: [events] of each.
        copy, original: see :func:`find_copies`.

    Returns:
        for validation and test: ``in_earlier_part``, interactions that stand in an earlier part
        with the same user, item and time; ``before_earlier_part``, those at a time before an
        interaction of their user in an earlier part; and ``before_training_ends``, those at a time
        before the last training interaction of all users.
    """
    times = log.times.numpy()
    early = np.zeros(len(log), dtype=bool)
    for phase in (VALID, TEST):
        latest = np.full(len(log.offsets) - 1, -np.inf)  # of each user, in earlier parts
        before, now = part < phase, part == phase
        np.maximum.at(latest, log.users.numpy()[before], times[before])
        early[now] = times[now] < latest[log.users.numpy()[now]]
    last = times[part == TRAIN].max(initial=-np.inf)
    repeated = part[copy][part[original] < part[copy]]
    found = {
        "in_earlier_part": repeated,
        "before_earlier_part": part[early],
        "before_training_ends": part[(part != TRAIN) & (times < last)],
    }
    return {
        name: {PHASES[phase]: int((parts == phase).sum()) for phase in (VALID, TEST)}
        for name, parts in found.items()
    }
