"""Which held-out interactions are targets; counts of a split, and of leaks between its parts.

The protocol of Gusak et al., "Time to Split", 2025, over any split of ``splits.py`` or the parts of
``benchmark_filename``: every held-out interaction is a target, or one per user and phase.

A dataset does not show the order of a user's interactions at the same time (``eval_args.ties``):
``file`` takes that of the file, as RecBole does; ``random(SEED)`` a random one; ``drop`` leaves out
targets that depend on it, which on MovieLens-100K and Amazon Beauty are four users in ten.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recbole_pos.data.interactions import EventLog
from recbole_pos.data.splits import (
    PHASES,
    TEST,
    TRAIN,
    VALID,
    find_recent_sessions,
    format_time,
    read_split,
    split_log,
)
from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, listed, shown, suggest

_DEFAULT_SPLIT = {"LS": "valid_and_test"}
_RANDOM = re.compile(r"random\((\d{1,9})\)")


@dataclass(frozen=True)
class Split:
    """The interactions of a dataset, their parts and the targets among them, for all models.

    Attributes:
        log: the interactions; under ``cold_items: drop`` without held-out interactions of cold
            items.
        part: [interactions] int8 of TRAIN, VALID and TEST.
        is_target: [interactions] bool; False for interactions without history.
        summary: settings and counts of the split, in plain values; see :func:`make_split`.
    """

    log: EventLog
    part: np.ndarray
    is_target: np.ndarray
    summary: dict[str, Any]

    def find_targets(self, phase: int, only_newest: bool = False) -> np.ndarray:
        """Return which interactions are targets of a phase.

        Args:
            phase: TRAIN, VALID or TEST.
            only_newest: whether of the targets of a user only the newest one counts.

        Returns:
            [interactions] bool.
        """
        mask = self.part == phase
        mask &= self.is_target
        if only_newest:
            targets = np.flatnonzero(mask)
            # the log is sorted by user, so a user's newest target is before the next user's first
            is_newest = np.diff(self.log.users.numpy()[targets], append=-1) != 0
            mask[targets[~is_newest]] = False
        return mask


class LaterTargets:
    """Looks up the next training targets of a user, as further ones to learn from.

    Args:
        split: the log with its targets.
        weights: weight of the next interaction, of the one after it, and so on.
    """

    def __init__(self, split: Split, weights: Sequence[float]) -> None:
        self.items, self.users = split.log.items, split.log.users
        self.targets = torch.from_numpy(np.flatnonzero(split.find_targets(TRAIN)))
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def find_next(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next n training targets of the same user, at or after given interactions.

        Interactions that are no training targets are skipped. For example, with training targets
        at the rows 2, 5, 7 and 9 of the log and n = 2, row 4 gets the items of rows 5 and 7.

        Args:
            rows: [k] int64 rows of the log.

        Returns:
            items: [k, n] ids of the targets.
            weights: [k, n] how much each target counts: ``weights`` of this object, and 0 where the
                user has fewer than n targets left.
        """
        # the first call moves the columns to the device; later ones find them there
        device = rows.device
        self.items, self.users = self.items.to(device), self.users.to(device)
        self.targets, self.weights = self.targets.to(device), self.weights.to(device)

        # places in ``targets``: of the first one at or after each row, and of the n - 1 that follow
        first = torch.searchsorted(self.targets, rows)
        places = first[:, None] + torch.arange(len(self.weights), device=device)

        # beyond the end of ``targets``, or beyond the targets of the user, there are none
        exists = places < len(self.targets)
        target_rows = self.targets[places.clamp(max=len(self.targets) - 1)]
        exists &= self.users[target_rows] == self.users[rows][:, None]
        return self.items[target_rows], self.weights.where(exists, 0.0)


def read_ties(value: Any) -> str | int:
    """Return ``file``, ``drop`` or the seed of ``random(SEED)``, as ``eval_args.ties`` has it."""
    text = str(value).strip()
    if match := _RANDOM.fullmatch(text):
        return int(match[1])
    if text not in ("file", "drop"):
        raise UsageError(
            f"eval_args.ties: {shown(value)} is not one of file, drop and random(SEED), such as "
            "random(7)"
        )
    return text


def find_selected(
    selections: dict[str, Any] | None,
    log: EventLog,
    missing: dict[str, np.ndarray],
    names: dict[str, np.ndarray],
    requires_all: bool = False,
) -> np.ndarray | None:
    """Return [interactions] bool: whether ``target_events`` selects each; None without the option.

    Args:
        selections: the option: field -> value or values.
        log: the interactions.
        missing: field -> [interactions] bool, which cells have no number.
        names: field of tokens -> [ids] names by id.
        requires_all: whether a value that no interaction has is an error, as of a whole file.
    """
    # For each field: the cells that have a value, and of these those with a selected value.
    if not selections:
        return None
    is_selected = np.ones(len(log), dtype=bool)
    log_fields = {log.user_field, log.item_field, log.time_field}
    allowed = {field for field in log.fields.keys() - log_fields if log.fields[field].dim() == 1}
    for field, selection in selections.items():
        if field not in allowed:
            raise UsageError(
                f"target_events: {shown(field)} is no token or float field of interactions that "
                f"load_col names; it names {listed(sorted(allowed)) or 'none'}"
            )
        column = log.fields[field].numpy()
        has_value = ~missing.get(field, np.zeros(len(log), dtype=bool))
        present = pd.unique(column[has_value])
        selected = _find_values(field, selection, present, names.get(field), requires_all)
        is_selected &= has_value & np.isin(column, selected)
    return is_selected


def _find_values(
    field: str, selection: Any, present: np.ndarray, tokens: np.ndarray | None, requires_all: bool
) -> list[Any]:
    """Return the values of a field that a selection of ``target_events`` names.

    Args:
        field: name of the field, for messages.
        selection: a value or a list of values, as the user has written them: ``[buy, cart]``.
        present: [n] different values in the data: ids of tokens, or numbers.
        tokens: [ids] name of each id; None for a field of numbers.
        requires_all: whether a value that no interaction has is an error.

    Returns:
        Those of the values ``present`` that are selected.
    """
    # The user writes names or numbers: compare texts. Of tokens the value is the id.
    value_by_text = {str(value if tokens is None else tokens[value]): value for value in present}
    value_by_text.pop("[PAD]", None)  # the name of padding, which no interaction has
    selected = selection if isinstance(selection, (list, tuple)) else [selection]
    values = []
    for value in selected:
        if tokens is None and is_number(value):  # compare in float32, as the data store them
            value = np.float32(value)
        text = str(value)
        if isinstance(value, bool) and text not in value_by_text:  # as convert and yaml write it
            text = text.lower()
        if text in value_by_text:
            values.append(value_by_text[text])
        elif requires_all:
            raise UsageError(
                f"target_events: no interaction has {field}: {shown(text)}"
                f"{suggest(text, value_by_text)}; they have {listed(value_by_text)}"
            )
    return values


def check_given_parts(files: Sequence[str], split: Any) -> None:
    """Require two or three names in ``benchmark_filename``, and the default split for three."""
    if len(files) not in (2, 3) or len(set(files)) < len(files) or not all(files):
        raise UsageError(
            "benchmark_filename: expected names of three different parts, [train, valid, test], or "
            f"of two, [train, test]; found {shown(list(files))}"
        )
    if len(files) == 3 and split != _DEFAULT_SPLIT:
        raise UsageError(
            f"eval_args.split: {shown(split)} is not read, since the files of benchmark_filename "
            "give all three parts; leave it out, or give two files, [train, test], and the split "
            "cuts validation from the first"
        )


def count_items(log: EventLog, mask: np.ndarray, item_num: int) -> np.ndarray:
    """Return [items] int64: how many interactions in ``mask`` ([interactions] bool) each has."""
    counts = np.zeros(item_num, dtype=np.int64)
    for rows, chunk in log.iterate_chunks():
        counts += np.bincount(chunk.items.numpy()[mask[rows]], minlength=item_num)
    return counts


def make_split(
    log: EventLog,
    eval_args: dict[str, Any],
    user_tokens: np.ndarray,
    item_num: int,
    train_fraction: Any = None,
    files: Sequence[str] | None = None,
    time_unit: str = "seconds",
    given_part: np.ndarray | None = None,
    is_selected: np.ndarray | None = None,
) -> tuple[Split, np.ndarray]:
    """Split the log and choose targets; leave out old sessions and cold (untrained) items if asked.

    Args:
        log: all interactions.
        eval_args: RecBole's option of that name, with ``target`` and ``cold_items``.
        user_tokens: [users] name of each user.
        item_num: size of the catalogue, padding included.
        train_fraction: share of training sessions, the newest (split ST only); None for all.
        files: ``benchmark_filename``, where there is a ``given_part``.
        time_unit: unit of the times in the log, for dates in ``eval_args.split``.
        given_part: [interactions] int8 TRAIN, VALID or TEST by file; None if one file has all.
        is_selected: [interactions] bool, which ``target_events`` selects; None for all.

    Returns:
        The split, and which of the interactions are left in it, [interactions] bool.

        The summary of the split has for each phase: ``events`` as cut, and of these ``dropped`` (of
        cold items, under drop), ``without_history`` (first of their user), ``other_events`` (not
        ``is_selected``), ``not_chosen`` (by ``target``), ``tied`` (under ``ties: drop``) and
        ``targets``, which add up; ``cold_targets`` among the targets; ``copies`` of an earlier
        interaction, and ``copied_targets`` among them; ``tied_targets``, held-out ones whose user
        has another item at the same time, so that the order of the file decides;
        ``repeated_targets``, see :func:`find_repeated_targets`; of given parts ``leaks``; under ST
        ``sessions``, see :func:`find_recent_sessions`.
    """
    kind, value = read_split(eval_args)
    if train_fraction is not None and kind != "ST":
        raise UsageError(
            "train_fraction: counts training sessions and needs eval_args.split: {ST: ...}; "
            f"the split is {kind}"
        )

    # the part of every interaction
    is_possible = log.has_history & (True if is_selected is None else is_selected)
    boundaries: list[float] = []
    if given_part is not None and files:
        kind, value = "benchmark_filename", list(files)
        part = given_part
        if len(files) == 2:
            part = _cut_validation(log, given_part, is_possible, eval_args, time_unit)
    else:
        part, boundaries = split_log(log, is_possible, eval_args, time_unit)

    # what is left out of it
    is_left = np.ones(len(log), dtype=bool)
    sessions: dict[str, int] = {}
    if kind == "ST":
        is_left, sessions = find_recent_sessions(log, part, train_fraction)
    if not is_left.all():
        log, part = log.keep(is_left), part[is_left]
    part_as_cut = part
    is_cold = count_items(log, part == TRAIN, item_num) == 0  # by item
    copies, originals = _find_copies(log, is_by_time=given_part is None)
    leaks = {}
    if given_part is not None:
        leaks = {"leaks": _count_leaks(log, part, copies, originals)}
    is_copy = np.zeros(len(log), dtype=bool)
    is_copy[copies] = True
    is_dropped = np.zeros(len(log), dtype=bool)
    if eval_args["cold_items"] == "drop":
        is_dropped = is_cold[log.items.numpy()]
        log, part, is_copy = log.keep(~is_dropped), part[~is_dropped], is_copy[~is_dropped]
        is_left[is_left] = ~is_dropped

    # the targets among the rest
    has_history = log.has_history
    is_possible = has_history & (True if is_selected is None else is_selected[is_left])
    is_at_a_tie = find_ties(log)
    is_held_out = part != TRAIN
    possible_rows = np.flatnonzero(is_possible & is_held_out)
    is_target = is_possible & ~is_held_out
    is_target[_choose_held_out(log, part, possible_rows, eval_args["target"], user_tokens)] = True
    is_tied = np.zeros(len(log), dtype=bool)
    if eval_args.get("ties") == "drop":
        is_tied = is_target & is_held_out & is_at_a_tie
        is_target &= ~is_tied

    parts_by_count = {  # name of a count -> parts of the interactions that it counts
        "events": part_as_cut,
        "without_history": part[~has_history],
        "targets": part[is_target],
        "cold_targets": part[is_target & is_cold[log.items.numpy()]],
        "copies": part_as_cut[copies],
        "copied_targets": part[is_target & is_copy],
        "tied_targets": part[is_target & is_held_out & is_at_a_tie],
        "repeated_targets": part[find_repeated_targets(log, is_target & is_held_out)],
        "dropped": part_as_cut[is_dropped],
        "not_chosen": part[is_possible & ~is_target & ~is_tied],
    }
    if is_selected is not None:
        parts_by_count["other_events"] = part[has_history & ~is_possible]
    if eval_args.get("ties") == "drop":
        parts_by_count["tied"] = part[is_tied]
    summary = {
        "split": {kind: list(value) if isinstance(value, tuple) else value},
        "boundaries": boundaries,
        "sessions": sessions,
        "target": eval_args["target"],
        "cold_items": eval_args["cold_items"],
        "items_without_training": int(is_cold[1:].sum()),
        **{name: count_phases(parts) for name, parts in parts_by_count.items()},
        **leaks,
    }
    return Split(log, part, is_target, summary), is_left


def _cut_validation(
    log: EventLog,
    given_part: np.ndarray,
    is_possible: np.ndarray,
    eval_args: dict[str, Any],
    time_unit: str,
) -> np.ndarray:
    """Cut validation from training, where only training and test are given as files.

    Args:
        log: all interactions.
        given_part: [interactions] int8: TRAIN for those of the first file, TEST for the others.
        is_possible: [interactions] bool: whether each may be a target.
        eval_args: RecBole's option, whose ``split`` says how to cut.
        time_unit: unit of the times in the log.

    Returns:
        [interactions] int8 of TRAIN, VALID and TEST.
    """
    # the default split would cut a test, too
    if eval_args["split"] == _DEFAULT_SPLIT:
        eval_args = {**eval_args, "split": {"LS": "valid_only"}}
    is_first = given_part == TRAIN
    first, is_possible_first = log.keep(is_first), is_possible[is_first]
    part_of_first, _ = split_log(first, is_possible_first, eval_args, time_unit)
    part = given_part.copy()
    part[is_first] = np.where(part_of_first == TRAIN, TRAIN, VALID)
    return part


def _find_copies(log: EventLog, is_by_time: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return [copies] int64 rows of exact copies (user, item, time), and of their originals.

    A copy has the user, item and time of an earlier row, its original. For example, rows of one
    user with the items [a, b, a, a] at the times [1, 1, 1, 2] have the copy 2 with the original 0.
    ``is_by_time`` says whether the interactions of each user are sorted by time; with given parts
    they are sorted by part first.
    """
    pairs = [np.empty((2, 0), dtype=np.int64)]
    for chunk_rows, chunk in log.iterate_chunks():
        users, times, items = chunk.users.numpy(), chunk.times.numpy(), chunk.items.numpy()

        # only rows at the same time as another row of their user may be copies
        rows = np.arange(len(chunk)) if is_by_time else np.lexsort((times, users))
        ties_previous = (np.diff(users[rows]) == 0) & (np.diff(times[rows]) == 0)
        is_tied = np.append(ties_previous, False) | np.append(False, ties_previous)
        group = np.cumsum(~np.append(False, ties_previous))[is_tied]  # one per user and time
        rows = rows[is_tied]

        # sorted by item within a user and time, copies follow their original
        order = np.lexsort((items[rows], group))  # stable: the first of equals stays the first
        group, rows = group[order], rows[order]
        is_new = np.ones(len(rows), dtype=bool)
        is_new[1:] = (np.diff(group) != 0) | (np.diff(items[rows]) != 0)
        originals = rows[is_new][np.cumsum(is_new) - 1]
        pairs.append(chunk_rows.start + np.stack((rows, originals))[:, ~is_new])
    copies, originals = np.concatenate(pairs, axis=1)
    return copies, originals


def _count_leaks(
    log: EventLog, part: np.ndarray, copies: np.ndarray, originals: np.ndarray
) -> dict[str, dict[str, int]]:
    """Return kind of leak -> phase -> number of held-out interactions of given parts.

    ``in_earlier_part`` counts copies of an interaction in an earlier part; ``before_earlier_part``
    those older than their user's newest interaction in earlier parts; ``before_training_ends``
    those older than the newest training interaction. ``copies`` and ``originals`` are [copies]
    rows in the log.
    """
    times, users = log.times.numpy(), log.users.numpy()
    is_early = np.zeros(len(log), dtype=bool)
    for phase in (VALID, TEST):
        num_users = len(log.lengths)
        latest_earlier = np.full(num_users, -np.inf)  # by user, newest time in earlier parts
        is_before, is_here = part < phase, part == phase
        np.maximum.at(latest_earlier, users[is_before], times[is_before])
        is_early[is_here] = times[is_here] < latest_earlier[users[is_here]]
    train_end = times[part == TRAIN].max(initial=-np.inf)
    copy_part, original_part = part[copies], part[originals]
    leaks = {  # kind of leak -> parts of the interactions that it counts
        "in_earlier_part": copy_part[original_part < copy_part],
        "before_earlier_part": part[is_early],
        "before_training_ends": part[(part != TRAIN) & (times < train_end)],
    }
    return {
        name: {PHASES[phase]: int((parts == phase).sum()) for phase in (VALID, TEST)}
        for name, parts in leaks.items()
    }


def find_repeated_targets(log: EventLog, is_target: np.ndarray) -> np.ndarray:
    """Return the rows of targets whose item the user has had before: [repeated targets] int64.

    Args:
        is_target: [interactions] bool, the targets to look at.
    """
    repeated = [np.empty(0, dtype=np.int64)]
    for chunk_rows, chunk in log.iterate_chunks():  # all interactions of a user are in one chunk
        items, users = chunk.items.numpy(), chunk.users.numpy()
        pairs = users * (items.max(initial=0) + 1) + items  # one number for each user and item
        is_repeated = pd.Series(pairs).duplicated().to_numpy() & is_target[chunk_rows]
        repeated.append(chunk_rows.start + np.flatnonzero(is_repeated))
    return np.concatenate(repeated)


def find_ties(log: EventLog) -> np.ndarray:
    """Find interactions at whose time their user has another item, too.

    For example, one user's items [a, b, c, c] at the times [1, 1, 2, 2] give [True, True, False,
    False]: nothing depends on the order of two interactions with c.

    Args:
        log: the interactions, sorted by user and time.

    Returns:
        [interactions] bool.
    """
    is_tied = np.zeros(len(log), dtype=bool)
    for rows, chunk in log.iterate_chunks():
        users, times, items = chunk.users.numpy(), chunk.times.numpy(), chunk.items.numpy()
        is_new = np.append(True, (np.diff(users) != 0) | (np.diff(times) != 0))
        group = np.cumsum(is_new) - 1  # [rows] number of the pair of user and time
        first_item = items[is_new]  # [groups]
        has_several = np.zeros(len(first_item), dtype=bool)
        has_several[group[items != first_item[group]]] = True
        is_tied[rows] = has_several[group]
    return is_tied


def _choose_held_out(
    log: EventLog, part: np.ndarray, rows: np.ndarray, mode: str, user_tokens: np.ndarray
) -> np.ndarray:
    """Return those of the possible held-out targets that ``eval_args.target`` chooses.

    Args:
        log: the interactions.
        part: [interactions] int8 part of each.
        rows: [n] int64 rows of the possible targets in the log, ascending.
        mode: all; or one for each user and phase: first, last or random. A random choice depends
            on the name of the user only, so that every model and seed has the same one.
        user_tokens: [users] name of each user.

    Returns:
        [m] int64 rows of the chosen targets.
    """
    if mode == "all":
        return rows
    users = log.users.numpy()[rows]
    # One group for each user and phase. The interactions of a user are in time order, so those of a
    # phase follow each other: a group is ``counts`` rows from ``first`` on.
    groups, first, counts = np.unique(
        users * len(PHASES) + part[rows], return_index=True, return_counts=True
    )
    if mode == "first":
        return rows[first]
    if mode == "last":
        return rows[first + counts - 1]

    # the digest of "test ann" chooses one of ann's rows in the test
    group_users, phases = np.divmod(groups, len(PHASES))
    names = user_tokens[group_users].tolist()
    texts = (f"{PHASES[phase]} {name}" for phase, name in zip(phases, names, strict=True))
    digests = (hashlib.blake2b(text.encode(), digest_size=7).digest() for text in texts)
    hashes = np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.int64)
    return rows[first + hashes % counts]


def describe_split(summary: dict[str, Any]) -> str:
    """Return the ``summary`` of :func:`make_split` as a line of text; "" if nothing is unusual."""
    labels = {
        "without_history": "without history",
        "other_events": "not of target_events",
        "dropped": "dropped as cold",
        "not_chosen": "not chosen",
        "cold_targets": "with a cold item",
        "tied_targets": "with another item of their user at the same time",
    }
    counts, sessions = summary["events"], summary["sessions"]
    in_sessions = {phase: f" of {count:,} sessions" for phase, count in sessions.items()}
    older = f" ({sessions['left_out']:,} older ones left out)" if sessions.get("left_out") else ""
    parts = [f"train {counts['train']:,} interactions{in_sessions.get('train', '')}{older}"]
    is_unusual = bool(summary["boundaries"])
    for phase in PHASES[1:]:
        remarks = [
            f"{summary[key][phase]:,} {label}"
            for key, label in labels.items()
            if summary.get(key, {}).get(phase)
        ]
        is_unusual |= bool(remarks)
        if counts[phase]:
            note = f" ({', '.join(remarks)})" if remarks else ""
            parts.append(
                f"{phase} {summary['targets'][phase]:,} targets of {counts[phase]:,} interactions"
                f"{in_sessions.get(phase, '')}{note}"
            )
    if not is_unusual:
        return ""
    kind = next(iter(summary["split"]))
    times = " and ".join(map(format_time, summary["boundaries"]))
    boundaries = f" at time {times}" if times else ""
    return f"split {kind}{boundaries}: {'; '.join(parts)}"


def make_warnings(summary: dict[str, Any]) -> list[str]:
    """Return warnings about copies, leaks (both make metrics too good) and items never trained on.

    A leak is held out, but a copy of, or older than, what is trained on. ``summary``: of a split.
    """
    warnings = []
    targets, copied = summary["targets"], summary["copied_targets"]
    if num_copies := sum(summary["copies"].values()):
        phrases = [
            f"{copied[phase]:,} of {targets[phase]:,} {phase} targets"
            for phase in PHASES[1:]
            if copied[phase]
        ]
        warnings.append(
            f"{num_copies:,} interactions are exact copies of an earlier one (user, "
            f"item, time), among them {' and '.join(phrases) or 'no held-out target'}; "
            "`rm_copies: True` leaves copies out"
        )
    if "leaks" not in summary:
        return warnings

    warnings += [
        f"benchmark_filename: no item of the {phase} targets is in training; unless that is meant, "
        "names are written differently in the files"
        for phase in PHASES[1:]
        if summary["cold_targets"][phase] == targets[phase] > 0
    ]
    for key, text in (
        ("in_earlier_part", "are in an earlier file as well (user, item, time)"),
        ("before_earlier_part", "are earlier than an interaction of their user in an earlier file"),
    ):
        counts = summary["leaks"][key]
        phrases = [f"{count:,} {phase}" for phase, count in counts.items() if count]
        if phrases:
            warnings.append(f"benchmark_filename: {' and '.join(phrases)} interactions {text}")
    return warnings


def count_phases(part: np.ndarray) -> dict[str, int]:
    """Count interactions by phase.

    Args:
        part: [n] int8 part of each interaction: TRAIN, VALID or TEST.

    Returns:
        Name of the phase -> number of interactions in it.
    """
    return {phase: int(np.count_nonzero(part == i)) for i, phase in enumerate(PHASES)}
