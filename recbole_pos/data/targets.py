"""Which held-out events are predicted, and what becomes of items that training never saw.

The protocol of Gusak et al., "Time to Split: Exploring Data Splitting Strategies for Offline
Evaluation of Sequential Recommenders", 2025, over any split of ``splits.py``: every held-out event
is a target of its own (successive evaluation), or one per user and phase.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recbole_pos.data.events import PART, EventLog
from recbole_pos.data.given import find_copies, given_parts, leaks
from recbole_pos.data.sessions import (
    count_overlapping,
    count_sessions,
    read_fraction,
    recent_sessions,
)
from recbole_pos.data.splits import PHASES, TRAIN, show_time, split_events, split_kind
from recbole_pos.data.ties import DROP, FILE, tied
from recbole_pos.errors import UsageError


@dataclass(frozen=True)
class Split:
    """The events of a log, their parts and the targets among them: the same for all models.

    Attributes:
        log: the events; under ``cold_items: drop`` without the held-out events of cold items.
        part: [events] int8 of TRAIN, VALID and TEST.
        is_target: [events] bool; an event without history never is one.
        summary: what was split, held out and left out, in plain values; see :func:`make_split`.
    """

    log: EventLog
    part: np.ndarray
    is_target: np.ndarray
    summary: dict[str, Any]


def make_split(
    log: EventLog,
    eval_args: dict[str, Any],
    user_tokens: np.ndarray,
    item_num: int,
    train_fraction: Any = None,
    files: Sequence[str] | None = None,
) -> Split:
    """Cut the log, leave out old training sessions and cold items if asked to, choose the targets.

    Args:
        log: all events.
        eval_args: RecBole's option of that name, with ``target`` and ``cold_items``.
        user_tokens: [users] name of each user.
        item_num: size of the catalogue, padding included.
        train_fraction: of the training sessions of an ST split, the most recent; None for all.
        files: ``benchmark_filename``, where the log has the parts of its interactions (``PART``).

    Returns:
        The split. Its summary has for each phase: ``events`` as cut, and of these ``dropped`` (of
        cold items, under drop), ``without_history`` (first of their user), ``not_chosen`` (by
        ``target``), ``tied`` (under ``ties: drop``) and ``targets``, which add up; and
        ``cold_targets`` among the targets; and ``copies``: events with user, item and time of an
        earlier one, and ``copied_targets`` among them. Of given parts ``leaks`` has what
        ``given.leaks`` counts. Under ST ``sessions`` has those of each phase,
        ``left_out`` of training by ``train_fraction`` (their events are counted nowhere), and
        ``overlapping``: held-out ones that begin before the last training event.

    Raises:
        UsageError: for a split that cannot be read, or a ``train_fraction`` without sessions.
    """
    mode, cold_mode = eval_args["target"], eval_args["cold_items"]
    kind, value = split_kind(eval_args)
    if train_fraction is not None and kind != "ST":
        raise UsageError(
            "train_fraction: counts training sessions and needs eval_args.split: {ST: ...}; "
            f"the split is {kind}"
        )
    given = log.fields.pop(PART, None)
    if given is None or not files:
        part, boundaries = split_events(log, eval_args)
    else:
        part, boundaries = given_parts(log, given.numpy(), eval_args, len(files)), []
        kind, value = "benchmark_filename", list(files)
    sessions: dict[str, int] = {}
    if kind == "ST":
        log, part, sessions = _train_on_recent(log, part, train_fraction)
    cold = np.bincount(log.items.numpy()[part == TRAIN], minlength=item_num) == 0
    cut, is_copy = part, np.zeros(len(log), dtype=bool)
    copy, original = find_copies(log, by_time=given is None)
    is_copy[copy] = True
    leaking = {} if given is None else {"leaks": leaks(log, part, copy, original)}
    if cold_mode == "drop":
        keep = ~cold[log.items.numpy()]
        log, part, is_copy = log.keep(keep), part[keep], is_copy[keep]
    has_history = log.has_history
    is_target = has_history & (part == TRAIN)
    chosen = _choose(log, part, mode, user_tokens)
    is_target[chosen] = True
    drop = eval_args.get("ties", FILE) == DROP
    hanging = chosen[tied(log)[chosen]] if drop else chosen[:0]
    is_target[hanging] = False
    left_out = has_history & ~is_target
    summary = {
        "split": {kind: list(value) if isinstance(value, tuple) else value},
        "boundaries": boundaries,
        "sessions": sessions,
        "target": mode,
        "cold_items": cold_mode,
        "items_without_training": int(cold[1:].sum()),
        "events": _per_phase(cut),
        "dropped": _difference(_per_phase(cut), _per_phase(part)),
        "without_history": _per_phase(part[~has_history]),
        "not_chosen": _difference(_per_phase(part[left_out]), _per_phase(part[hanging])),
        "targets": _per_phase(part[is_target]),
        "cold_targets": _per_phase(part[is_target & cold[log.items.numpy()]]),
        "copies": _per_phase(cut[copy]),
        "copied_targets": _per_phase(part[is_target & is_copy]),
        **leaking,
    }
    if drop:
        summary["tied"] = _per_phase(part[hanging])
    return Split(log, part, is_target, summary)


def _train_on_recent(
    log: EventLog, part: np.ndarray, train_fraction: Any
) -> tuple[EventLog, np.ndarray, dict[str, int]]:
    """The log and parts without the training sessions that are too old, and a count of sessions."""
    before = count_sessions(log, part, len(PHASES))
    if train_fraction is not None:
        stays = recent_sessions(log, part, TRAIN, read_fraction(train_fraction))
        log, part = log.keep(stays), part[stays]
    counts = dict(zip(PHASES, count_sessions(log, part, len(PHASES)), strict=True))
    left_out = before[TRAIN] - counts["train"]
    overlapping = count_overlapping(log, part, TRAIN)
    return log, part, {**counts, "left_out": left_out, "overlapping": overlapping}


def _choose(log: EventLog, part: np.ndarray, mode: str, user_tokens: np.ndarray) -> np.ndarray:
    """[targets] the held-out events that count: all with a history, or one per user and phase."""
    held_out = np.flatnonzero((part != TRAIN) & log.has_history)
    if mode == "all":
        return held_out
    users = log.users.numpy()[held_out]
    # events of a user are in time order, so those of a phase follow each other
    group, start, count = np.unique(
        users * len(PHASES) + part[held_out], return_index=True, return_counts=True
    )
    if mode == "first":
        return held_out[start]
    if mode == "last":
        return held_out[start + count - 1]
    names = user_tokens[group // len(PHASES)].tolist()
    draws = [_draw(*pair) for pair in zip(names, (group % len(PHASES)).tolist(), strict=True)]
    return held_out[start + np.array(draws, dtype=np.int64) % count]


def _draw(user: str, phase: int) -> int:
    """A number that looks random and depends on nothing but its arguments: no seed, no user id."""
    digest = hashlib.blake2b(f"{PHASES[phase]} {user}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def describe(summary: dict[str, Any]) -> str:
    """A summary as one line for people; empty where nothing is worth a line."""
    notes = {
        "without_history": "without history",
        "dropped": "dropped as cold",
        "not_chosen": "not chosen",
        "cold_targets": "with a cold item",
    }
    times = " and ".join(show_time(time) for time in summary["boundaries"])
    sessions = summary["sessions"]
    whole = {phase: f" of {_sessions(n)}" for phase, n in sessions.items()}
    trained = whole.get("train", "")
    if sessions.get("left_out"):
        trained += f" ({sessions['left_out']:,} older ones left out)"
    parts, noted = [f"train {summary['events']['train']:,} events{trained}"], bool(times)
    for phase in PHASES[1:]:
        events = summary["events"][phase]
        remarks = [f"{summary[key][phase]:,} {text}" for key, text in notes.items()]
        remarks = [text for text in remarks if not text.startswith("0 ")]
        noted |= bool(remarks)
        if events:
            note = f" ({', '.join(remarks)})" if remarks else ""
            note = whole.get(phase, "") + note
            parts.append(
                f"{phase} {summary['targets'][phase]:,} targets of {events:,} events{note}"
            )
    where = f" at time {times}" if times else ""
    return f"split {next(iter(summary['split']))}{where}: {'; '.join(parts)}" if noted else ""


def warnings_about(summary: dict[str, Any]) -> list[str]:
    """What makes the metrics of a split easier than they look; a line each.

    Args:
        summary: of :func:`make_split`; of earlier versions, which counted less, too.
    """
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


def _sessions(count: int) -> str:
    return f"{count:,} session{'' if count == 1 else 's'}"


def _per_phase(part: np.ndarray) -> dict[str, int]:
    counts = np.bincount(part, minlength=len(PHASES))
    return dict(zip(PHASES, counts.tolist(), strict=True))


def _difference(one: dict[str, int], two: dict[str, int]) -> dict[str, int]:
    return {phase: one[phase] - two[phase] for phase in one}
