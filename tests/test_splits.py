"""Splits, their targets, cold items and ties, against lists and loops."""

import math
from collections import Counter, defaultdict
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recbole.data.dataset import SequentialDataset

from recbole_pos.config.options import find_option
from recbole_pos.data.interactions import sort_interactions
from recbole_pos.data.recbole_view import PrefixRows
from recbole_pos.data.splits import (
    PHASES,
    TEST,
    TRAIN,
    VALID,
    read_fraction,
    split_by_ratio,
    split_by_time,
    split_sessions,
)
from recbole_pos.data.targets import Split, make_split
from recbole_pos.errors import UsageError

LONGEST = 4
ITEMS = 9


class Event(NamedTuple):
    user: int
    item: int
    time: float
    is_selected: bool = True  # by the option ``target_events``


def eval_args(split: Any, target: str = "all", cold_items: str = "keep") -> dict[str, Any]:
    fixed = {"order": "TO", "group_by": "user", "split": split, "ties": "file"}
    return {**fixed, "target": target, "cold_items": cold_items}


def split_of(events: list[Event], options: dict, fraction: Any = None) -> Split:
    """The split of events whose users are numbered in the order of the file, as RecBole does."""
    number = {user: n for n, user in enumerate(dict.fromkeys(e.user for e in events), start=1)}
    columns = {
        "u": torch.tensor([number[e.user] for e in events]),
        "i": torch.tensor([e.item for e in events]),
        "t": torch.tensor([e.time for e in events], dtype=torch.float64),
        "row": torch.arange(len(events)),
    }
    log, _ = sort_interactions(columns, len(number) + 1, "u", "i", "t")
    config = dict.fromkeys(("benchmark_filename", "target_events"))
    config |= {"eval_args": options, "train_fraction": fraction, "timestamp_unit": "seconds"}
    is_selected = None
    if not all(event.is_selected for event in events):
        is_selected = np.array([events[row].is_selected for row in log.fields["row"].tolist()])
    return make_split(log, config, ITEMS, is_selected=is_selected)[0]


def rows_of(split: Split) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """(rows of the history, row of the target) of each phase, through the lazy rows."""
    found = {}
    for label, phase in enumerate(PHASES):
        rows = PrefixRows(split, label, False, LONGEST, "_list", "n")
        batch = rows[np.arange(len(rows))]
        assert not batch["i_list"][torch.arange(LONGEST) >= batch["n"][:, None]].any()  # padding
        lengths = batch["n"].tolist()
        histories = [tuple(h[:n]) for h, n in zip(batch["row_list"].tolist(), lengths, strict=True)]
        found[phase] = sorted(zip(histories, batch["row"].tolist(), strict=True))
    return found


def by_user(events: list[Event]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = defaultdict(list)
    for row in sorted(range(len(events)), key=lambda row: (events[row].time, row)):
        rows[events[row].user].append(row)
    return rows


NAMES = {"valid_only": {"valid": 1}, "test_only": {"test": 1}}
NAMES["valid_and_test"] = {"valid": 1, "test": 1}


def leave_last_out(events: list[Event], value: Any) -> list[str]:
    phases = ["train"] * len(events)
    numbers = NAMES.get(value) if isinstance(value, str) else value
    for rows in by_user(events).values():
        names = ["valid"] * numbers.get("valid", 0) + ["test"] * numbers.get("test", 0)
        possible = [row for row in rows[1:] if events[row].is_selected]
        names = names[max(len(names) - max(len(possible) - 1, 0), 0) :]  # one stays for training
        held_out = dict(zip(possible[len(possible) - len(names) :], names, strict=True))
        phase = "train"
        for row in rows:  # others belong to the part of the target before them
            phase = phases[row] = held_out.get(row, phase)
    return phases


def global_split(events: list[Event], numbers: list[float]) -> list[str] | None:
    """None where a part is empty."""
    if numbers[0] < 1:
        edges = np.quantile([e.time for e in events], numbers)
        later = [sum(event.time > edge for edge in edges) for event in events]
    else:  # times
        edges = numbers
        later = [sum(event.time >= edge for edge in edges) for event in events]
    names = ["train", *["valid"] * (len(edges) - 1), "test"]
    phases = [names[n] for n in later]
    return None if set(names) - set(phases) else phases


def session_split(events: list[Event], value: Any, fraction: Any) -> list[str] | None:
    """Empty for what a fraction leaves out; None where a part is empty."""
    ends: dict[int, float] = {}
    for event in events:
        ends[event.user] = max(ends.get(event.user, event.time), event.time)
    order = sorted(ends, key=ends.get)  # stable, and a dict keeps the order of the file
    numbers = value if isinstance(value, list) else [value]
    bounds = [int(Decimal(str(n)) * len(order)) if isinstance(n, float) else n for n in numbers]
    names = ["train", "test"] if len(bounds) == 1 else PHASES
    cuts, phases = [0, *bounds, len(order)], {}
    for name, low, high in zip(names, cuts, cuts[1:], strict=False):
        if low >= high:
            return None
        phases |= dict.fromkeys(order[low:high], name)
    if fraction is not None:
        kept = max(int(Fraction(fraction) * bounds[0]), 1)
        phases |= dict.fromkeys(order[: bounds[0] - kept], "")
    return [phases[event.user] for event in events]


def brute_force(events: list[Event], phases: list[str], options: dict[str, Any]):
    trained = {e.item for e, phase in zip(events, phases, strict=True) if phase == "train"}
    counts: dict[str, Counter] = defaultdict(Counter)
    rows: dict[str, list] = {phase: [] for phase in PHASES}
    for mine in by_user(events).values():
        left: list[int] = []
        possible, at_once = defaultdict(list), defaultdict(set)
        for row in mine:
            if not (phase := phases[row]):
                continue
            counts["events"][phase] += 1
            if options["cold_items"] == "drop" and events[row].item not in trained:
                counts["dropped"][phase] += 1
                continue
            if not left:
                counts["without_history"][phase] += 1
            elif events[row].is_selected:
                possible[phase].append((tuple(left[-LONGEST:]), row))
            else:
                counts["other_events"][phase] += 1
            left.append(row)
            at_once[events[row].time].add(events[row].item)
        for phase, found in possible.items():
            if phase != "train":
                found = {"all": found, "first": found[:1], "last": found[-1:]}[options["target"]]
                tied = [row for _, row in found if len(at_once[events[row].time]) > 1]
                if options["ties"] == "drop":
                    counts["tied"][phase] += len(tied)
                    found = [one for one in found if one[1] not in tied]
                else:
                    counts["tied_targets"][phase] += len(tied)
            rows[phase] += found
            counts["targets"][phase] += len(found)
            counts["cold_targets"][phase] += sum(events[r].item not in trained for _, r in found)
    return {phase: sorted(found) for phase, found in rows.items()}, counts


logs = st.lists(
    st.builds(
        Event,
        st.integers(1, 8),
        st.integers(1, ITEMS - 1),
        st.integers(0, 7).map(float),
        st.sampled_from([True, True, False]),
    ),
    min_size=1,
    max_size=40,
)
shares = st.one_of(st.floats(0.01, 0.99), st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 0.8, 0.9]))
one_or_two = {"min_size": 1, "max_size": 2, "unique": True}
several = [st.lists(x, **one_or_two).map(sorted) for x in (shares, st.integers(1, 7))]
splits = st.one_of(
    st.sampled_from([*NAMES, {"valid": 1, "test": 3}, {"valid": 2}]).map(lambda v: {"LS": v}),
    st.one_of(*several).map(lambda v: {"GT": v}),
    st.one_of(st.integers(1, 7), shares, *several).map(lambda v: {"ST": v}),
)
targets = st.sampled_from(find_option("eval_args.target").choices)
ties = st.sampled_from(["file", "drop"])
colds = st.sampled_from(find_option("eval_args.cold_items").choices)
fractions = st.sampled_from([None, None, "1/2", "1/3", "2/3", "1"])


def phases_of(events: list[Event], split: dict[str, Any], fraction: Any) -> list[str] | None:
    ((kind, value),) = split.items()
    if kind == "ST":
        return session_split(events, value, fraction)
    return (leave_last_out if kind == "LS" else global_split)(events, value)


@settings(max_examples=400, deadline=None)
@given(logs, splits, fractions, targets, colds, ties, st.booleans())
def test_splits_against_brute_force(events, split, fraction, target, cold, ties, selects) -> None:
    events = [event._replace(is_selected=event.is_selected or not selects) for event in events]
    fraction = fraction if "ST" in split else None
    phases, options = phases_of(events, split, fraction), eval_args(split, target, cold)
    options["ties"] = ties
    if phases is None:
        with pytest.raises(UsageError, match=r"split\.(GT|ST)"):
            split_of(events, options, fraction)
        return
    made = split_of(events, options, fraction)
    rows, counts = brute_force(events, phases, options)
    summary = made.summary
    assert rows_of(made) == rows
    trained = {e.item for e, phase in zip(events, phases, strict=True) if phase == "train"}
    assert summary["items_without_training"] == len(set(range(1, ITEMS)) - trained)
    parts = ["dropped", "without_history", "targets", *["tied"] * (ties == "drop")]
    parts += ["other_events"] * (not all(event.is_selected for event in events))
    for key in ("events", "cold_targets", "tied_targets", *parts):
        assert summary[key] == {phase: counts[key][phase] for phase in PHASES}, key
    for phase in PHASES:
        counted = sum(summary[key][phase] for key in (*parts, "not_chosen"))
        assert summary["events"][phase] == counted
    if "GT" in split:
        edges = split["GT"]
        if edges[0] < 1:
            edges = np.quantile([e.time for e in events], edges).tolist()
        assert summary["boundaries"] == edges
    if "ST" in split:
        check_sessions(events, phases, summary)


def check_sessions(events: list[Event], phases: list[str], summary: dict[str, Any]) -> None:
    """No training interaction is later than the end of a held-out session."""
    phase = {event.user: name for event, name in zip(events, phases, strict=True)}
    times: dict[int, list[float]] = defaultdict(list)
    for event in events:
        times[event.user].append(event.time)
    newest = max(max(times[user]) for user, name in phase.items() if name == "train")
    ends = [max(times[user]) for user, name in phase.items() if name in PHASES[1:]]
    assert summary["boundaries"][0] == newest <= min(ends)
    found = Counter(phase.values())
    sizes = {name: found[name] for name in PHASES}
    assert summary["sessions"] == {**sizes, "left_out": found[""]}


@pytest.mark.parametrize(
    "bounds", [["2024-01-25", "2024-02-05 12:00"], [date(2024, 1, 25), "2024-02-05T14:00+02:00"]]
)
def test_dates_cut_before_their_first_moment(bounds: list[Any]) -> None:
    """A date is midnight in UTC; what happens at that moment is no training any more."""
    days = np.array([0, 0.999, 1, 12.4999, 12.5, 13]) + 19_746  # from 2024-01-24 on
    part, boundaries = split_by_time(days * 86_400, bounds, "seconds")
    assert part.tolist() == [TRAIN, TRAIN, VALID, VALID, TEST, TEST]
    assert boundaries == [1_706_140_800, 1_707_134_400]
    if isinstance(bounds[0], str):
        assert split_by_time(days, bounds, "days")[0].tolist() == part.tolist()


@pytest.mark.parametrize("ratios", [[0.8, 0.1, 0.1], [0.5, 0.25, 0.25], [1, 0, 1]])
def test_ratio_split_equals_recboles(ratios: list[float]) -> None:
    share = [r / sum(ratios) for r in ratios]
    for n in range(2, 60):
        cuts = SequentialDataset._calcu_split_ids(None, n - 1, share)
        want = [TRAIN] + [int(np.searchsorted(cuts, row, "right")) for row in range(n - 1)]
        assert split_by_ratio(np.full(n, n - 1), np.arange(n), ratios).tolist() == want


def test_fractions_are_exact() -> None:
    assert read_fraction("1/64") == read_fraction(0.015625) and read_fraction(0.3) * 10 == 3
    session = torch.arange(1, 101)
    columns = {"u": session, "i": session, "t": session.double()}
    log, _ = sort_interactions(columns, 101, "u", "i", "t")
    part = split_sessions(log, [0.29, 0.57])[0]  # 0.29 * 100 is 28.999999999999996 in floats
    assert part.tolist() == [0] * 29 + [1] * 28 + [2] * 43


FIVE = [Event(user, 1, float(10 * user + n)) for user in range(1, 6) for n in range(3)]


WRONG_SPLITS = {
    "GT": [[], [0.9, 0.8], [0.0], [0.1, 0.2, 0.3], [True], ["2024-13-01"], [0.5, 9], [0.1, 0.11]],
    "ST": [[], [2, 2], [1, 2, 3], 0, "2", [0.5, 3], 0.1, [2, 7]],
    "RS": [[0, 0, 0], [2, -1, 1], [1, 2], [1, 1, math.nan]],
    "LS": ["x", {"test": 0}, {"train": 1}, {}, 2],
}


@pytest.mark.parametrize("kind", WRONG_SPLITS)
def test_wrong_splits_are_refused(kind: str) -> None:
    for value in WRONG_SPLITS[kind]:
        with pytest.raises(UsageError, match=f"eval_args.split.{kind}"):
            split_of(FIVE, eval_args({kind: value}))


@pytest.mark.parametrize(
    ("split", "fraction", "words"),
    [
        ({"GT": [1000]}, None, "no interaction for test.*from 10 to 52"),
        ({"LS": "test_only", "RS": [8, 1, 1]}, None, "eval_args.split"),
        ("LS", None, "eval_args.split"),
        ({"ST": 3}, 0, "train_fraction"),
        ({"ST": 3}, "1/0", "train_fraction"),
        ({"LS": "test_only"}, "1/2", "train_fraction"),
    ],
)
def test_wrong_options_of_splits_are_refused(split: Any, fraction: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split_of(FIVE, eval_args(split), fraction)


def test_a_random_order_moves_equal_times_only() -> None:
    user = torch.arange(200) % 9
    times = torch.arange(200, dtype=torch.float64) // 30

    def sort(seed: int | None) -> torch.Tensor:
        columns = {"u": user, "i": torch.arange(200), "t": times}
        log, _ = sort_interactions(columns, 9, "u", "i", "t", tie_seed=seed)
        assert (np.diff(times[log.items])[np.diff(log.users) == 0] >= 0).all()
        assert torch.equal(log.users, user[log.items]) and len(log.items.unique()) == 200
        return log.items

    file, one, again, other = map(sort, (None, 1, 1, 2))
    assert torch.equal(one, again)
    assert not any(torch.equal(*pair) for pair in ((one, other), (one, file), (other, file)))
