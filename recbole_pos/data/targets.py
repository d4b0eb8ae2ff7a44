"""Which held-out interactions are targets; counts of a split, and of leaks between its parts.

The protocol of Gusak et al., "Time to Split", 2025, over any split of ``splits.py`` or the parts of
``benchmark_filename``: every held-out interaction is a target, or one per user and phase.

A dataset does not show the order of a user's interactions at the same time. With the option
``eval_args.ties: file`` it is that of the file, as in RecBole; with ``random(SEED)`` it is random.
With ``drop`` the targets that depend on it are left out: on MovieLens-100K and Amazon Beauty those
of four users in ten.
"""

from __future__ import annotations

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
    read_split,
    split_log,
)
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, is_number, listed, shown, suggest

_DEFAULT_SPLIT = {"LS": "valid_and_test"}


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
        is_found = self.part == phase
        is_found &= self.is_target
        if only_newest:
            # The log is sorted by user and time: a user's newest target is the one after which the
            # next target is of another user (-1 after the last one of all).
            targets = np.flatnonzero(is_found)
            is_newest = np.diff(self.log.users.numpy()[targets], append=-1) != 0
            is_found[targets[~is_newest]] = False
        return is_found


class LaterTargets:
    """Looks up the next training targets of a user, as further ones to learn from.

    Args:
        split: the log with its targets.
        weights: [n] weight of the next target, of the one after it, and so on.
    """

    def __init__(self, split: Split, weights: Sequence[float]) -> None:
        self.items, self.users = split.log.items, split.log.users
        self.target_rows = torch.from_numpy(np.flatnonzero(split.find_targets(TRAIN)))
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def move(self, device: torch.device) -> None:
        """Copy the columns to a device, on which :meth:`find_next` works from now on."""
        self.items, self.users = self.items.to(device), self.users.to(device)
        self.target_rows, self.weights = self.target_rows.to(device), self.weights.to(device)

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
        # ``target_rows`` has the rows of all training targets, ascending. ``places`` in it: of the
        # first target at or after each given row, and of the n - 1 targets that follow.
        first_place = torch.searchsorted(self.target_rows, rows)
        places = first_place[:, None] + torch.arange(len(self.weights), device=rows.device)

        # Beyond the last target of all, or of the user, there are none.
        exists = places < len(self.target_rows)
        found = self.target_rows[places.clamp(max=len(self.target_rows) - 1)]
        exists &= self.users[found] == self.users[rows][:, None]
        return self.items[found], self.weights.where(exists, 0.0)


def read_tie_seed(ties: str) -> int | None:
    """Return the seed in ``random(SEED)``, a value of ``eval_args.ties``; None for file and drop.

    Raises:
        UsageError: for another value.
    """
    if ties in ("file", "drop"):
        return None
    match = re.fullmatch(r"random\((\d{1,9})\)", ties)
    if match is None:
        raise UsageError(
            "eval_args.ties: expected file, drop or random(SEED), such as random(7); found "
            f"{shown(ties)}"
        )
    return int(match[1])


def find_selected(
    selections: dict[str, Any] | None,
    log: EventLog,
    missing: dict[str, np.ndarray],
    names: dict[str, np.ndarray],
    requires_all: bool = False,
) -> np.ndarray | None:
    """Find the interactions that the option ``target_events`` selects as targets.

    For example, {event: [buy, cart], rating: 5} selects those whose event is buy or cart and whose
    rating is 5.

    Args:
        selections: the option: field -> value or list of values.
        log: the interactions.
        missing: field -> [interactions] bool, which cells have no number.
        names: field of tokens -> [ids] names by id.
        requires_all: whether a value that no interaction has is an error. It is one in a whole
            file, but not in a part of it.

    Returns:
        [interactions] bool; None without the option.

    Raises:
        UsageError: if a field is not loaded or has lists, or no interaction has a value.
    """
    if not selections:
        return None

    # Fields with one value for each interaction, but for its user, item and time.
    is_selected = np.ones(len(log), dtype=bool)
    keys = {log.user_field, log.item_field, log.time_field}
    allowed = {name for name, column in log.fields.items() if column.dim() == 1} - keys
    for field, selection in selections.items():
        if field not in allowed:
            raise UsageError(
                f"target_events: {shown(field)} is no token or float field of interactions that "
                f"load_col names; it names {listed(sorted(allowed)) or 'none'}"
            )
        # The cells that have a value, and of these those with a selected value.
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
        present: [n] different values in the data: ids of tokens, or float32 numbers.
        tokens: [ids] name of each id; None for a field of numbers.
        requires_all: whether a value that no interaction has is an error.

    Returns:
        Those of the values ``present`` that are selected.
    """
    # Values are compared by their texts. A value in the data has the text of its token, or of its
    # number, such as 0.1. Padding is in no interaction.
    texts_in_data = map(str, present if tokens is None else tokens[present])
    value_by_text = dict(zip(texts_in_data, present, strict=True))
    value_by_text.pop("[PAD]", None)

    # ``_spell_value`` returns the texts that stand for a wanted value: 5 gives ["5.0"] in a field
    # of numbers. In a field of tokens True gives two, ["True", "true"], of which data have one.
    values = []
    for wanted in selection if isinstance(selection, (list, tuple)) else [selection]:
        texts = _spell_value(wanted, is_in_numbers=tokens is None)
        found = [value_by_text[text] for text in texts if text in value_by_text]
        values += found
        if requires_all and not found:
            raise UsageError(
                f"target_events: no interaction has {field}: {shown(texts[0])}"
                f"{suggest(texts[0], value_by_text)}; they have {listed(value_by_text)}"
            )
    return values


def _spell_value(wanted: Any, is_in_numbers: bool) -> list[str]:
    """Return the texts by which a value that a user has written is looked up in a field.

    In a field of numbers (``is_in_numbers``) the number 5 is looked up as 5.0, as a float32 number
    is written, and in a field of tokens as 5. A boolean may be a token: True is looked up as True,
    as pandas writes it, and as true, as `recbole-pos convert` does.
    """
    if is_in_numbers and is_number(wanted):
        return [str(np.float32(wanted))]
    if isinstance(wanted, bool):
        return [str(wanted), str(wanted).lower()]
    return [str(wanted)]


def check_given_parts(files: Sequence[str], split: Any) -> None:
    """Refuse a wrong ``benchmark_filename``, which names parts that were split beforehand.

    Args:
        files: the option: [train, valid, test] or [train, test].
        split: ``eval_args.split``, which three files leave nothing to do, so that it must be left
            at its default (``_DEFAULT_SPLIT``).
    """
    if len(files) not in (2, 3) or len(set(files)) < len(files) or not all(files):
        raise UsageError(
            "benchmark_filename: expected names of three different parts, [train, valid, test], or "
            f"of two, [train, test]; found {shown(list(files))}"
        )
    if len(files) == 3 and split != _DEFAULT_SPLIT:
        raise UsageError(
            f"eval_args.split: {shown(split)} is not read, since the files of benchmark_filename "
            "give all three parts; leave it out, or give two files, [train, test]"
        )


def count_items(log: EventLog, mask: np.ndarray, item_num: int) -> np.ndarray:
    """Return [items] int64: how many interactions in ``mask`` ([interactions] bool) each has."""
    counts = np.zeros(item_num, dtype=np.int64)
    for rows, chunk in log.iterate_chunks():
        counts += np.bincount(chunk.items.numpy()[mask[rows]], minlength=item_num)
    return counts


def make_split(
    log: EventLog,
    config: Options,
    item_num: int,
    given_part: np.ndarray | None = None,
    is_selected: np.ndarray | None = None,
) -> tuple[Split, np.ndarray]:
    """Split the log and choose targets; leave out old sessions and cold (untrained) items if asked.

    Args:
        log: all interactions.
        config: configuration. Read are ``eval_args``, with the split, ``target``, ``cold_items``
            and ``ties``; ``train_fraction``, the share of training sessions, the newest, that is
            kept (split ST only; None for all); ``benchmark_filename``, the names of given parts;
            ``target_events``, for the summary; and ``timestamp_unit``.
        item_num: size of the catalogue, padding included.
        given_part: [interactions] int8 TRAIN, VALID or TEST by file; None if one file has all.
        is_selected: [interactions] bool, which ``target_events`` selects; None for all.

    Returns:
        split: parts and targets of the interactions that are left. Its ``summary`` has the settings
            of the split and counts of interactions by phase, which are explained below.
        is_left: [interactions] bool, which of all interactions are left.
    """
    # Assign every interaction to a part. Only those with a history may be targets.
    eval_args, train_fraction = config["eval_args"], config["train_fraction"]
    kind, value = read_split(eval_args)
    if train_fraction is not None and kind != "ST":
        raise UsageError(
            "train_fraction: counts training sessions and needs eval_args.split: {ST: ...}; "
            f"the split is {kind}"
        )
    is_possible = log.has_history if is_selected is None else log.has_history & is_selected
    part, boundaries = _assign_parts(log, is_possible, config, given_part)
    if given_part is not None:
        kind, value = "benchmark_filename", list(config["benchmark_filename"])

    # Leave out the older training sessions, if ``train_fraction`` says so.
    is_left = np.ones(len(log), dtype=bool)
    sessions: dict[str, int] = {}
    if kind == "ST":
        is_left, sessions = find_recent_sessions(log, part, train_fraction)
        log, part = log.keep(is_left), part[is_left]
    part_as_cut = part

    # Find what makes metrics too good: exact copies, and leaks between given parts.
    copies, originals = _find_copies(log, is_by_time=given_part is None)
    is_copy = np.zeros(len(log), dtype=bool)
    is_copy[copies] = True
    leaks = {}
    if given_part is not None:
        leaks = {"leaks": _count_leaks(log, part, copies, originals)}

    # Under ``cold_items: drop``, leave out interactions of items that no training interaction has.
    is_cold = count_items(log, part == TRAIN, item_num) == 0  # [items]
    is_dropped = np.zeros(len(log), dtype=bool)
    if eval_args["cold_items"] == "drop":
        is_dropped = is_cold[log.items.numpy()]
        log, part, is_copy = log.keep(~is_dropped), part[~is_dropped], is_copy[~is_dropped]
        is_left[is_left] = ~is_dropped

    # Choose the targets among the rest. In training every possible one is a target.
    has_history = log.has_history
    is_possible = has_history if is_selected is None else has_history & is_selected[is_left]
    is_held_out = part != TRAIN
    is_target = is_possible & ~is_held_out
    held_out_rows = np.flatnonzero(is_possible & is_held_out)
    is_target[_choose_held_out(log, part, held_out_rows, eval_args["target"])] = True
    is_at_a_tie = is_held_out & find_ties(log)
    drops_ties = eval_args["ties"] == "drop"
    is_tied = is_target & is_at_a_tie & drops_ties
    is_target &= ~is_tied

    # Count by phase: name of a count -> [n] parts of the interactions that it counts. Of ``events``
    # each is a target, or dropped, without history, not chosen, tied or one of ``other_events``.
    parts_by_count = {
        "events": part_as_cut,
        "without_history": part[~has_history],  # the first one of a user
        "targets": part[is_target],
        "cold_targets": part[is_target & is_cold[log.items.numpy()]],  # of items never trained on
        "copies": part_as_cut[copies],  # exact copies of an earlier interaction
        "copied_targets": part[is_target & is_copy],
        "tied_targets": part[is_target & is_at_a_tie],  # the order of the file has chosen them
        "repeated_targets": part[find_repeated_targets(log, is_target & is_held_out)],
        "dropped": part_as_cut[is_dropped],  # of cold items, under ``cold_items: drop``
        "not_chosen": part[is_possible & ~is_target & ~is_tied],  # by ``eval_args.target``
    }
    if is_selected is not None:  # those that ``target_events`` does not select
        parts_by_count["other_events"] = part[has_history & ~is_possible]
    if drops_ties:  # possible targets that depend on the order at a tie
        parts_by_count["tied"] = part[is_tied]
    counts = {
        name: {phase: int((parts == number).sum()) for number, phase in enumerate(PHASES)}
        for name, parts in parts_by_count.items()
    }
    summary = {
        "split": {kind: list(value) if isinstance(value, tuple) else value},
        "boundaries": boundaries,
        "sessions": sessions,
        "target": eval_args["target"],
        "cold_items": eval_args["cold_items"],
        "items_without_training": int(is_cold[1:].sum()),
        **counts,
        **leaks,
    }
    if config["target_events"]:
        summary["target_events"] = config["target_events"]
    return Split(log, part, is_target, summary), is_left


def _assign_parts(
    log: EventLog, is_possible: np.ndarray, config: Options, given_part: np.ndarray | None
) -> tuple[np.ndarray, list[float]]:
    """Assign every interaction to training, validation or test, by the split or by its file.

    Args:
        log: all interactions.
        is_possible: [interactions] bool: whether each may be a target. Splits count only these.
        config: configuration. ``eval_args`` says how to split, and ``benchmark_filename`` names the
            parts that have files: three, or only training and test.
        given_part: [interactions] int8 TRAIN, VALID or TEST by file; None if one file has all.

    Returns:
        part: [interactions] int8 of TRAIN, VALID and TEST.
        boundaries: times that separate the parts, at most two; empty if parts are given.
    """
    eval_args, time_unit = config["eval_args"], config["timestamp_unit"]
    if given_part is None:
        return split_log(log, is_possible, eval_args, time_unit)
    if len(config["benchmark_filename"]) == 3:
        return given_part, []

    # Two files, training and test: cut validation from the first. For example, a user has [a, b, c]
    # in the first file and [d] in the second. By default the newest target of the first file is cut
    # off, so the parts of [a, b, c, d] are [TRAIN, TRAIN, VALID, TEST]. (The default split itself
    # would hold out two targets, one of them for a test, which the second file is already.)
    if eval_args["split"] == _DEFAULT_SPLIT:
        eval_args = {**eval_args, "split": {"LS": "valid_only"}}
    is_in_first = given_part == TRAIN
    first_log, first_possible = log.keep(is_in_first), is_possible[is_in_first]
    first_part, _ = split_log(first_log, first_possible, eval_args, time_unit)

    # Another split, such as by ratios, may cut the first file into three parts. Two of them, VALID
    # and TEST, are then for validation.
    part = given_part.copy()
    part[is_in_first] = np.where(first_part == TRAIN, TRAIN, VALID)
    return part, []


def _find_copies(log: EventLog, is_by_time: bool) -> tuple[np.ndarray, np.ndarray]:
    """Find exact copies: interactions with the user, item and time of an earlier row.

    For example, the rows 0 to 3 of one user have the items [a, b, a, a] and the times [1, 1, 1, 2].
    Row 2 is a copy, and its original is row 0.

    Args:
        log: the interactions.
        is_by_time: whether those of each user are sorted by time. Where a file gives each part,
            they are sorted by part first.

    Returns:
        copies: [copies] int64 rows of the copies.
        originals: [copies] int64 for each of them, the first row that is the same.
    """
    copies, originals = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for chunk_rows, chunk in log.iterate_chunks():  # whole users, to need little memory
        users, times, items = chunk.users.numpy(), chunk.times.numpy(), chunk.items.numpy()

        # Take the rows in the order of user and time. Those with the same user and time follow each
        # other, and are a group. Number the groups: [0, 0, 0, 1] in the example.
        rows = np.arange(len(chunk)) if is_by_time else np.lexsort((times, users))
        has_new_user, has_new_time = np.diff(users[rows]) != 0, np.diff(times[rows]) != 0
        is_first_of_group = np.append(True, has_new_user | has_new_time)
        group = np.cumsum(is_first_of_group) - 1

        # A row that is a group by itself is no copy. Without such rows, few are left to compare: in
        # the example, where the groups have [3, 1] rows, the rows [0, 1, 2].
        group_sizes = np.bincount(group)
        is_in_several = group_sizes[group] > 1
        rows, group = rows[is_in_several], group[is_in_several]

        # For each row find the first row with the same group and item, [0, 1, 0] in the example.
        # Where that is another row, the row is a copy of it.
        pair = group * (items.max() + 1) + items[rows]  # one number for each group and item
        first_row = pd.Series(rows).groupby(pair).transform("first").to_numpy()
        is_copy = rows != first_row

        # Rows of the chunk become rows of the log.
        copies.append(chunk_rows.start + rows[is_copy])
        originals.append(chunk_rows.start + first_row[is_copy])
    return np.concatenate(copies), np.concatenate(originals)


def _count_leaks(
    log: EventLog, part: np.ndarray, copies: np.ndarray, originals: np.ndarray
) -> dict[str, dict[str, int]]:
    """Count the leaks of a split: held-out interactions that are in, or older than, earlier parts.

    They make metrics too good. Only parts that are given as files can have such leaks.

    Args:
        log: the interactions.
        part: [interactions] int8 TRAIN, VALID or TEST.
        copies, originals: [copies] rows of exact copies, and of what they are copies of.

    Returns:
        Kind of leak -> valid or test -> number of interactions. ``in_earlier_part`` counts copies
        of an interaction in an earlier part; ``before_earlier_part`` those older than their user's
        newest interaction in earlier parts; ``before_training_ends`` those older than the newest
        training interaction.
    """
    # Find the interactions of validation, and of test, that are older than the newest one of their
    # user in earlier parts. For example, with the times 3 and 8 in training, 5 is too early.
    times, users = log.times.numpy(), log.users.numpy()
    is_too_early = np.zeros(len(log), dtype=bool)
    for phase in (VALID, TEST):
        is_in_earlier, is_in_phase = part < phase, part == phase
        # [users] time of the newest one, which ``maximum.at`` raises for each interaction
        newest_time = np.full(len(log.lengths), -np.inf)
        np.maximum.at(newest_time, users[is_in_earlier], times[is_in_earlier])
        is_too_early[is_in_phase] = times[is_in_phase] < newest_time[users[is_in_phase]]

    # Take the part of each interaction that is a leak, and count by part. Parts are numbered in
    # their order, so a lower number is an earlier part.
    copy_part, original_part = part[copies], part[originals]
    is_older_than_training = times < times[part == TRAIN].max(initial=-np.inf)
    parts_by_leak = {
        "in_earlier_part": copy_part[original_part < copy_part],
        "before_earlier_part": part[is_too_early],
        "before_training_ends": part[(part != TRAIN) & is_older_than_training],
    }
    return {
        leak: {"valid": int((parts == VALID).sum()), "test": int((parts == TEST).sum())}
        for leak, parts in parts_by_leak.items()
    }


def find_repeated_targets(log: EventLog, is_target: np.ndarray) -> np.ndarray:
    """Return the rows of targets whose item the user has had before: [repeated targets] int64.

    Args:
        log: the interactions, sorted by user and time.
        is_target: [interactions] bool, the targets to look at.
    """
    found = [np.empty(0, dtype=np.int64)]
    for chunk_rows, chunk in log.iterate_chunks():  # all interactions of a user are in one chunk
        items, users = chunk.items.numpy(), chunk.users.numpy()
        pairs = users * (items.max() + 1) + items  # one number for each user and item
        # pandas' ``duplicated`` is true for all rows of a pair but the first
        is_repeated = pd.Series(pairs).duplicated().to_numpy() & is_target[chunk_rows]
        found.append(chunk_rows.start + np.flatnonzero(is_repeated))
    return np.concatenate(found)


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
        # ``group`` is the number of the pair of user and time, which begins where ``is_new``.
        users, times, items = chunk.users.numpy(), chunk.times.numpy(), chunk.items.numpy()
        is_new = np.append(True, (np.diff(users) != 0) | (np.diff(times) != 0))
        group = np.cumsum(is_new) - 1

        # A group has several items if one of them differs from its first.
        first_item = items[is_new][group]  # by row
        has_several = np.zeros(group[-1] + 1, dtype=bool)
        has_several[group[items != first_item]] = True
        is_tied[rows] = has_several[group]
    return is_tied


def _choose_held_out(log: EventLog, part: np.ndarray, rows: np.ndarray, mode: str) -> np.ndarray:
    """Return those of the possible held-out targets that ``eval_args.target`` chooses.

    Args:
        log: the interactions.
        part: [interactions] int8 part of each.
        rows: [n] int64 rows of the possible targets in the log, ascending.
        mode: all; or one for each user and phase: first or last.

    Returns:
        [m] int64 rows of the chosen targets.
    """
    if mode == "all":
        return rows
    # The possible targets of one user in one phase (TRAIN 0, VALID 1 or TEST 2) are a group, with
    # the number 3 * user + phase. They follow each other in ``rows``, in the order of time, so that
    # the first of a group is where the number changes, and the last is before it changes.
    group_by_row = log.users.numpy()[rows] * len(PHASES) + part[rows]
    if mode == "first":
        return rows[np.diff(group_by_row, prepend=-1) != 0]
    return rows[np.diff(group_by_row, append=-1) != 0]
