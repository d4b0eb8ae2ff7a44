"""Which held-out interactions are targets; counts of a split, and of leaks between its parts.

The protocol of Gusak et al., "Time to Split", 2025, over any split of ``splits.py`` or the parts of
``benchmark_filename``: every held-out interaction is a target, or one per user and phase.

No dataset tells the order of a user's interactions at the same time (``eval_args.ties``): ``file``
takes that of the file, as RecBole does; ``random(SEED)`` a random one; ``drop`` leaves out targets
that depend on it, which on MovieLens-100K and Amazon Beauty are four users in ten.
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

from recbole_pos.data.events import KIND, PART, EventLog
from recbole_pos.data.splits import (
    PHASES,
    TEST,
    TRAIN,
    VALID,
    keep_recent_sessions,
    read_split,
    show_time,
    split_events,
)
from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, listed, shown, suggest

_DEFAULT = {"LS": "valid_and_test"}
_RANDOM = re.compile(r"random\((\d{1,9})\)")


@dataclass(frozen=True)
class Split:
    """The interactions of a dataset, their parts and the targets among them, for all models.

    Attributes:
        log: the interactions; under ``cold_items: drop`` without held-out interactions of cold
            items.
        part: [events] int8 of TRAIN, VALID and TEST.
        is_target: [events] bool; False for interactions without history.
        summary: settings and counts of the split, in plain values; see :func:`make_split`.
    """

    log: EventLog
    part: np.ndarray
    is_target: np.ndarray
    summary: dict[str, Any]


class LaterTargets:
    """Looks up the next training targets of a user after an event, as further ones to learn from.

    ``weights`` are those of the next interaction, of the one after it, and so on.
    """

    def __init__(self, split: Split, weights: Sequence[float]) -> None:
        trained = torch.from_numpy(split.is_target & (split.part == TRAIN))
        self.columns: tuple[Tensor, ...] = split.log.items, split.log.users, trained
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def move(self, device: torch.device) -> None:
        """Copy the columns to a device, on which :meth:`after` works from now on."""
        self.columns = tuple(column.to(device) for column in self.columns)
        self.weights = self.weights.to(device)

    def after(self, events: Tensor) -> tuple[Tensor, Tensor]:
        """Return [k, n] items and weights (0 for none) of the next targets from [k] events on."""
        items, users, trained = self.columns
        later = events[:, None] + torch.arange(len(self.weights), device=events.device)
        is_valid = later < len(users)
        later = later.where(is_valid, events[:, None])
        is_valid &= (users[later] == users[events][:, None]) & trained[later]
        return items[later], self.weights.where(is_valid, 0.0)


def read_ties(value: Any) -> str | int:
    """Read ``eval_args.ties``: return ``file``, ``drop``, or the seed of ``random(SEED)``."""
    text = str(value).strip()
    if random := _RANDOM.fullmatch(text):
        return int(random[1])
    if text not in ("file", "drop"):
        raise UsageError(
            f"eval_args.ties: {shown(value)} is not one of file, drop and random(SEED), such as "
            "random(7)"
        )
    return text


def shuffle_ties(fields: dict[str, Tensor], ties: str | int) -> dict[str, Tensor]:
    """Shuffle the rows of an interaction table by the seed ``ties``; file and drop change nothing.

    Sorting by time is stable, so only ties keep the random order.
    """
    if isinstance(ties, str):
        return fields
    count = len(next(iter(fields.values())))
    order = torch.from_numpy(np.random.default_rng(ties).permutation(count))
    return {name: column[order] for name, column in fields.items()}


def find_kind(dataset: Any, fields: dict[str, Tensor]) -> np.ndarray | None:
    """Return [events] bool: which interactions ``target_events`` selects; None without the option.

    ``fields`` are the columns of the interactions.
    """
    wanted = dataset.config["target_events"]
    if not wanted:
        return None
    kind = np.ones(len(next(iter(fields.values()))), dtype=bool)
    ids = {dataset.uid_field, dataset.iid_field, dataset.time_field}
    allowed = {field for field in fields.keys() - ids if fields[field].dim() == 1}
    for field, selected in wanted.items():
        if field not in allowed:
            raise UsageError(
                f"target_events: {shown(field)} is no token or float field of interactions that "
                f"load_col names; it names {listed(allowed) or 'none'}"
            )
        column, names = fields[field].numpy(), dataset.field2id_token.get(field)
        has_value = ~dataset.missing.get(field, np.zeros(len(kind), dtype=bool))
        codes = {str(v if names is None else names[v]): v for v in pd.unique(column[has_value])}
        codes.pop("[PAD]", None)
        values = selected if isinstance(selected, (list, tuple)) else [selected]
        if names is None:  # compare numbers in float32, as the data store them
            values = [np.float32(value) if is_number(value) else value for value in values]
        for value in map(str, values):
            if value not in codes:
                raise UsageError(
                    f"target_events: no interaction has {field}: {shown(value)}"
                    f"{suggest(value, codes)}; they have {listed(codes)}"
                )
        kind &= has_value & np.isin(column, [codes[str(value)] for value in values])
    return kind


def check_given(files: Sequence[str], split: Any) -> None:
    """Require two or three names in ``benchmark_filename``, and a split that goes with them."""
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


def count_items(log: EventLog, mask: np.ndarray, item_num: int) -> np.ndarray:
    """Return [items] int64 number of interactions in ``mask`` ([events] bool) of each item."""
    counts = np.zeros(item_num, dtype=np.int64)
    for place, users_log in log.in_parts():
        counts += np.bincount(users_log.items.numpy()[mask[place]], minlength=item_num)
    return counts


def make_split(
    log: EventLog,
    eval_args: dict[str, Any],
    user_tokens: np.ndarray,
    item_num: int,
    train_fraction: Any = None,
    files: Sequence[str] | None = None,
) -> Split:
    """Split the log, leave out old training sessions and cold items if configured, choose targets.

    Args:
        log: all interactions.
        eval_args: RecBole's option of that name, with ``target`` and ``cold_items``.
        user_tokens: [users] name of each user.
        item_num: size of the catalogue, padding included.
        train_fraction: share of an ST split's training sessions, the newest; None for all.
        files: ``benchmark_filename``, where the log has the parts of its interactions (``PART``).

    Returns:
        The split. Its summary has for each phase: ``events`` as cut, and of these ``dropped`` (of
        cold items, under drop), ``without_history`` (first of their user), ``other_events`` (not of
        ``target_events``, where the log has a column ``KIND``), ``not_chosen`` (by ``target``),
        ``tied`` (under ``ties: drop``) and ``targets``, which add up; ``cold_targets`` among the
        targets; ``copies`` of an earlier interaction, and ``copied_targets`` among them; of given
        parts ``leaks``; under ST ``sessions``, see :func:`keep_recent_sessions`.
    """
    kind, value = read_split(eval_args)
    if train_fraction is not None and kind != "ST":
        raise UsageError(
            "train_fraction: counts training sessions and needs eval_args.split: {ST: ...}; "
            f"the split is {kind}"
        )
    given = log.fields.pop(PART, None)
    if given is None or not files:
        part, boundaries = split_events(log, eval_args)
    else:
        part, boundaries = _take_given_parts(log, given.numpy(), eval_args, len(files)), []
        kind, value = "benchmark_filename", list(files)
    sessions: dict[str, int] = {}
    if kind == "ST":
        log, part, sessions = keep_recent_sessions(log, part, train_fraction)
    cold = count_items(log, part == TRAIN, item_num) == 0
    cut, is_copy = part, np.zeros(len(log), dtype=bool)
    copy, original = _find_copies(log, by_time=given is None)
    is_copy[copy] = True
    leaks = {} if given is None else {"leaks": _count_leaks(log, part, copy, original)}
    is_dropped = np.zeros(len(log), dtype=bool)
    if eval_args["cold_items"] == "drop":
        is_dropped = cold[log.items.numpy()]
        log, part, is_copy = log.keep(~is_dropped), part[~is_dropped], is_copy[~is_dropped]
    has_history, possible = log.has_history, log.possible_targets
    is_target, is_tied = possible & (part == TRAIN), np.zeros(len(log), dtype=bool)
    is_target[_choose(log, part, eval_args["target"], user_tokens)] = True
    drops_ties = eval_args.get("ties") == "drop"
    if drops_ties:
        is_tied = is_target & (part != TRAIN) & _find_ties(log)
        is_target &= ~is_tied
    counts = {  # the part of every interaction that is counted
        "events": cut,
        "without_history": part[~has_history],
        **({"other_events": part[has_history & ~possible]} if KIND in log.fields else {}),
        "targets": part[is_target],
        "cold_targets": part[is_target & cold[log.items.numpy()]],
        "copies": cut[copy],
        "copied_targets": part[is_target & is_copy],
        **({"tied": part[is_tied]} if drops_ties else {}),
        "dropped": cut[is_dropped],
        "not_chosen": part[possible & ~is_target & ~is_tied],
    }
    summary = {
        "split": {kind: list(value) if isinstance(value, tuple) else value},
        "boundaries": boundaries,
        "sessions": sessions,
        "target": eval_args["target"],
        "cold_items": eval_args["cold_items"],
        "items_without_training": int(cold[1:].sum()),
        **{name: _per_phase(parts) for name, parts in counts.items()},
        **leaks,
    }
    log.fields.pop(KIND, None)
    return Split(log, part, is_target, summary)


def _take_given_parts(
    log: EventLog, given: np.ndarray, eval_args: dict[str, Any], files: int
) -> np.ndarray:
    """Return [events] int8 the part of every interaction of given files.

    Of two files the split cuts validation from the first: all that it holds out.
    """
    if files == 3:
        return given
    if eval_args["split"] == _DEFAULT:
        eval_args = {**eval_args, "split": {"LS": "valid_only"}}
    part, first = given.copy(), given == TRAIN
    inner, _ = split_events(log.keep(first), eval_args)
    part[first] = np.where(inner == TRAIN, TRAIN, VALID)
    return part


def _find_copies(log: EventLog, by_time: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return [copies] int64 places in the log of exact copies, and of what they are copies of.

    Args:
        log: the interactions.
        by_time: whether the interactions of a user are sorted by time.
    """
    found = []
    for part, some in log.in_parts():
        users, times, items = some.users.numpy(), some.times.numpy(), some.items.numpy()
        place = np.arange(len(some)) if by_time else np.lexsort((times, users))
        same = (np.diff(users[place]) == 0) & (np.diff(times[place]) == 0)
        near = np.append(same, False) | np.append(False, same)
        group, place = np.cumsum(~np.append(False, same))[near], place[near]
        order = np.lexsort((items[place], group))  # stable: the first of equals stays the first
        group, place = group[order], place[order]
        new = np.append(True, (np.diff(group) != 0) | (np.diff(items[place]) != 0))[: len(place)]
        first = place[new][np.cumsum(new) - 1]
        found.append(part.start + np.stack((place, first))[:, ~new])
    copy, original = np.concatenate(found, axis=1)
    return copy, original


def _count_leaks(
    log: EventLog, part: np.ndarray, copy: np.ndarray, original: np.ndarray
) -> dict[str, dict[str, int]]:
    """Count held-out interactions of given parts that leak into, or from, earlier parts.

    ``in_earlier_part`` stand there with the same user, item and time; ``before_earlier_part`` are
    older than one of their user there; ``before_training_ends`` than one of any user in training.
    """
    times, users = log.times.numpy(), log.users.numpy()
    early = np.zeros(len(log), dtype=bool)
    for phase in (VALID, TEST):
        latest = np.full(len(log.offsets) - 1, -np.inf)  # of each user, in earlier parts
        before, now = part < phase, part == phase
        np.maximum.at(latest, users[before], times[before])
        early[now] = times[now] < latest[users[now]]
    last = times[part == TRAIN].max(initial=-np.inf)
    leaking = {  # parts of the leaking interactions
        "in_earlier_part": part[copy][part[original] < part[copy]],
        "before_earlier_part": part[early],
        "before_training_ends": part[(part != TRAIN) & (times < last)],
    }
    return {
        name: {PHASES[phase]: int((parts == phase).sum()) for phase in (VALID, TEST)}
        for name, parts in leaking.items()
    }


def _find_ties(log: EventLog) -> np.ndarray:
    """Return [events] bool: whether the user has another item at the same time."""
    users, times, items = log.users.numpy(), log.times.numpy(), log.items.numpy()
    new = np.append(True, (np.diff(users) != 0) | (np.diff(times) != 0))
    group = np.cumsum(new) - 1
    has_several = np.zeros(int(new.sum()), dtype=bool)
    has_several[group[items != items[new][group]]] = True
    return has_several[group]


def _choose(log: EventLog, part: np.ndarray, mode: str, user_tokens: np.ndarray) -> np.ndarray:
    """Return places in the log of the held-out targets by ``eval_args.target``, ``mode``.

    A random one per user and phase depends on the name of the user, not on a seed or ids.
    """
    held_out = np.flatnonzero((part != TRAIN) & log.possible_targets)
    if mode == "all":
        return held_out
    users = log.users.numpy()[held_out]
    # interactions of a user are in time order, so those of a phase follow each other
    group, start, count = np.unique(
        users * len(PHASES) + part[held_out], return_index=True, return_counts=True
    )
    if mode == "first":
        return held_out[start]
    if mode == "last":
        return held_out[start + count - 1]
    names = user_tokens[group // len(PHASES)].tolist()
    texts = (f"{PHASES[n % len(PHASES)]} {name}" for n, name in zip(group, names, strict=True))
    digests = (hashlib.blake2b(text.encode(), digest_size=7).digest() for text in texts)
    numbers = np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.int64)
    return held_out[start + numbers % count]


def describe(summary: dict[str, Any]) -> str:
    """Return the summary of a split as one line of text; empty where nothing is unusual."""
    notes = {
        "without_history": "without history",
        "other_events": "not of target_events",
        "dropped": "dropped as cold",
        "not_chosen": "not chosen",
        "cold_targets": "with a cold item",
    }
    events, sessions = summary["events"], summary["sessions"]
    in_sessions = {phase: f" of {count:,} sessions" for phase, count in sessions.items()}
    older = f" ({sessions['left_out']:,} older ones left out)" if sessions.get("left_out") else ""
    parts = [f"train {events['train']:,} interactions{in_sessions.get('train', '')}{older}"]
    is_unusual = bool(summary["boundaries"])
    for phase in PHASES[1:]:
        counts = {text: summary.get(key, {}).get(phase) for key, text in notes.items()}
        remarks = [f"{count:,} {text}" for text, count in counts.items() if count]
        is_unusual |= bool(remarks)
        if events[phase]:
            note = f" ({', '.join(remarks)})" if remarks else ""
            parts.append(
                f"{phase} {summary['targets'][phase]:,} targets of {events[phase]:,} interactions"
                f"{in_sessions.get(phase, '')}{note}"
            )
    times = " and ".join(map(show_time, summary["boundaries"]))
    where = f" at time {times}" if times else ""
    return f"split {next(iter(summary['split']))}{where}: {'; '.join(parts)}" if is_unusual else ""


def describe_warnings(summary: dict[str, Any]) -> list[str]:
    """Return warnings about copies and leaks, which make metrics too good; 0.2.0 counted less."""
    lines = []
    copies, targets = (summary.get(key) or {} for key in ("copies", "copied_targets"))
    if sum(copies.values()):
        shares = [
            f"{targets[phase]:,} of {summary['targets'][phase]:,} {phase} targets"
            for phase in PHASES[1:]
            if targets[phase]
        ]
        lines.append(
            f"{sum(copies.values()):,} interactions are exact copies of an earlier one (user, "
            f"item, time), among them {' and '.join(shares) or 'no held-out target'}; "
            "`rm_copies: True` leaves copies out"
        )
    leaking = summary.get("leaks") or {}
    for key, text in (
        ("in_earlier_part", "are in an earlier file as well (user, item, time)"),
        ("before_earlier_part", "are earlier than an interaction of their user in an earlier file"),
    ):
        counts = [f"{n:,} {phase}" for phase, n in leaking.get(key, {}).items() if n]
        if counts:
            lines.append(f"benchmark_filename: {' and '.join(counts)} interactions {text}")
    return lines


def _per_phase(part: np.ndarray) -> dict[str, int]:
    return {name: int(np.count_nonzero(part == i)) for i, name in enumerate(PHASES)}
