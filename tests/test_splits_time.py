"""The global temporal split, its targets and cold items, against lists and loops."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_pos.config.options import rule
from recbole_pos.data.events import EventLog
from recbole_pos.data.splits import PHASES, TEST, TRAIN, VALID, global_time, ratio, split_kind
from recbole_pos.data.targets import Split, describe, make_split
from recbole_pos.data.windows import PrefixRows
from recbole_pos.errors import UsageError

LONGEST = 4
ITEMS = 9


class Event(NamedTuple):
    user: int
    item: int
    time: float


def eval_args(numbers: list[float], target: str = "all", cold_items: str = "keep") -> dict:
    fixed = {"order": "TO", "group_by": "user", "split": {"GT": numbers}}
    return {**fixed, "target": target, "cold_items": cold_items}


def split_of(events: list[Event], options: dict) -> Split:
    columns = {
        "u": torch.tensor([e.user for e in events]),
        "i": torch.tensor([e.item for e in events]),
        "t": torch.tensor([e.time for e in events], dtype=torch.float64),
        "row": torch.arange(len(events)),
    }
    users = max(e.user for e in events) + 1
    log = EventLog.build(columns, users, "u", "i", "t")
    return make_split(log, options, np.array([f"name{u}" for u in range(users)]), ITEMS)


def rows_of(split: Split) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """(rows of the history, row of the target) of each phase, through the lazy rows."""
    found = {}
    for label, phase in enumerate(PHASES):
        targets = np.flatnonzero((split.part == label) & split.is_target)
        batch = PrefixRows(split.log, targets, LONGEST, "_list", "n")[np.arange(len(targets))]
        lengths = batch["n"].tolist()
        histories = [tuple(h[:n]) for h, n in zip(batch["row_list"].tolist(), lengths, strict=True)]
        found[phase] = sorted(zip(histories, batch["row"].tolist(), strict=True))
    return found


def quantile(times: list[float], q: float) -> float:
    """numpy's linear quantile, in its own order of operations."""
    times = sorted(times)
    place = (len(times) - 1) * q
    low = math.floor(place)
    a, b = times[low], times[min(low + 1, len(times) - 1)]
    share = place - low
    return b - (b - a) * (1 - share) if share >= 0.5 else a + (b - a) * share


def brute_force(events: list[Event], numbers: list[float], target: str, cold_items: str):
    """{phase: rows}, counts, number of cold items; or None where a part is empty."""
    edges = [quantile([e.time for e in events], q) for q in numbers]
    phases = []
    for event in events:
        later = sum(event.time > edge for edge in edges)
        phases.append("train" if later == 0 else "test" if later == len(edges) else "valid")
    if "test" not in phases or (len(edges) == 2 and "valid" not in phases):
        return None
    trained = {e.item for e, phase in zip(events, phases, strict=True) if phase == "train"}
    counts = defaultdict(Counter)
    rows = {phase: [] for phase in PHASES}
    for user in {e.user for e in events}:
        mine = [row for row in range(len(events)) if events[row].user == user]
        mine.sort(key=lambda row: (events[row].time, row))
        left, possible = [], defaultdict(list)
        for row in mine:
            phase = phases[row]
            counts["events"][phase] += 1
            if cold_items == "drop" and events[row].item not in trained:
                counts["dropped"][phase] += 1
                continue
            if left:
                possible[phase].append((tuple(left[-LONGEST:]), row))
            else:
                counts["without_history"][phase] += 1
            left.append(row)
        for phase, found in possible.items():
            if phase != "train" and target == "first":
                found = found[:1]
            elif phase != "train" and target == "last":
                found = found[-1:]
            rows[phase] += found
            counts["targets"][phase] += len(found)
            counts["cold_targets"][phase] += sum(events[r].item not in trained for _, r in found)
    cold = len(set(range(1, ITEMS)) - trained)
    return {phase: sorted(found) for phase, found in rows.items()}, counts, cold


logs = st.lists(
    st.builds(Event, st.integers(1, 5), st.integers(1, ITEMS - 1), st.integers(0, 7).map(float)),
    min_size=1,
    max_size=40,
)
shares = st.one_of(st.floats(0.01, 0.99), st.sampled_from([0.25, 0.5, 0.8, 0.9, 0.95]))
cuts = st.lists(shares, min_size=1, max_size=2, unique=True).map(sorted)
modes = st.sampled_from([mode for mode in rule("eval_args.target").choices if mode != "random"])


@settings(max_examples=400)
@given(
    events=logs,
    numbers=cuts,
    target=modes,
    cold_items=st.sampled_from(rule("eval_args.cold_items").choices),
)
def test_global_split_against_brute_force(events, numbers, target, cold_items) -> None:
    want = brute_force(events, numbers, target, cold_items)
    options = eval_args(numbers, target, cold_items)
    if want is None:
        with pytest.raises(UsageError, match="no event for (validation|test)"):
            split_of(events, options)
        return
    split = split_of(events, options)
    rows, counts, cold = want
    assert split.summary["items_without_training"] == cold
    assert rows_of(split) == rows
    for key in ("events", "dropped", "without_history", "targets", "cold_targets"):
        assert split.summary[key] == {phase: counts[key][phase] for phase in PHASES}, key
    parts = ("dropped", "without_history", "not_chosen", "targets")
    for phase in PHASES:
        added = sum(split.summary[key][phase] for key in parts)
        assert split.summary["events"][phase] == added
    assert split.summary["boundaries"] == [quantile([e.time for e in events], q) for q in numbers]


@given(events=logs, numbers=cuts, cold_items=st.sampled_from(rule("eval_args.cold_items").choices))
def test_random_targets_are_one_of_all_for_each_user_and_phase(events, numbers, cold_items) -> None:
    try:
        every = rows_of(split_of(events, eval_args(numbers, "all", cold_items)))
    except UsageError:
        return
    some = rows_of(split_of(events, eval_args(numbers, "random", cold_items)))
    assert some["train"] == every["train"]
    for phase in ("valid", "test"):
        assert set(some[phase]) <= set(every[phase])
        users = [events[row].user for _, row in some[phase]]
        assert sorted(users) == sorted({events[row].user for _, row in every[phase]})


def one_each(users: int, order: list[int] | None = None) -> list[Event]:
    """Every user has 2 training events, and 4 in validation and in test, at the same times."""
    return [
        Event(user, 1 + place % (ITEMS - 1), float(place))
        for user in order or range(1, users + 1)
        for place in range(10)
    ]


def chosen(split: Split) -> dict[str, dict[int, float]]:
    found = {}
    for phase in (VALID, TEST):
        at = np.flatnonzero((split.part == phase) & split.is_target)
        users, times = split.log.users[at].tolist(), split.log.times[at].tolist()
        found[PHASES[phase]] = dict(zip(users, times, strict=True))
    return found


def test_random_targets_do_not_depend_on_a_seed_or_on_the_order_of_users() -> None:
    options = eval_args([0.15, 0.55], "random")
    np.random.seed(1)
    first = chosen(split_of(one_each(400), options))
    np.random.seed(2)
    assert chosen(split_of(one_each(400), options)) == first
    assert chosen(split_of(one_each(400, list(range(400, 0, -1))), options)) == first
    # names and not ids decide: the same names under other ids
    events = one_each(400)
    split = split_of(events, options)
    names = np.array(["", *(f"name{u}" for u in range(400, 0, -1))])
    turned = chosen(make_split(split.log, options, names, ITEMS))
    for phase in first:
        assert turned[phase] == {401 - user: time for user, time in first[phase].items()}


def test_random_targets_are_spread_evenly_and_apart_in_both_phases() -> None:
    found = chosen(split_of(one_each(1600), eval_args([0.15, 0.55], "random")))
    places = Counter((found["valid"][u] - 2, found["test"][u] - 6) for u in found["valid"])
    assert len(places) == 16 and all(60 <= n <= 140 for n in places.values())


def test_ties_fall_into_one_part() -> None:
    """The boundary is inside a run of equal times: all of it is training."""
    times = np.array([1.0, 2, 2, 2, 2, 2, 2, 3, 4, 5])
    part, boundaries = global_time(times, [0.2, 0.8])
    assert boundaries == [2.0, np.quantile(times, 0.8)]
    assert part.tolist() == [TRAIN] * 7 + [VALID] + [TEST] * 2


def test_times_that_float32_cannot_tell_apart() -> None:
    start = 1.7e9
    times = start + np.arange(100) / 4  # float32 steps there are 128 s
    part, boundaries = global_time(times, [0.5, 0.75])
    assert boundaries == np.quantile(times, [0.5, 0.75]).tolist()
    want = [TRAIN if t <= boundaries[0] else VALID if t <= boundaries[1] else TEST for t in times]
    assert part.tolist() == want and Counter(want) == {TRAIN: 50, VALID: 25, TEST: 25}


def test_a_boundary_that_is_an_event_keeps_it() -> None:
    times = np.arange(21, dtype=np.float64) * 1e8 + 0.1
    part, boundaries = global_time(times, [0.5])
    assert boundaries == [times[10]] and (part == TRAIN).sum() == 11
    assert set(part.tolist()) == {TRAIN, TEST}


def test_empty_parts_name_time_and_events() -> None:
    with pytest.raises(UsageError, match=r"for test: .* time 7.5 \(shared by 4 events\).*smaller"):
        global_time(np.array([1.0, 2, 7.5, 7.5, 7.5, 7.5]), [0.1, 0.6])
    with pytest.raises(
        UsageError, match=r"for validation: .* 2 \(shared by 8 events\) and 2 \(.* further apart"
    ):
        global_time(np.array([1.0] + [2] * 8 + [3]), [0.3, 0.6])


@pytest.mark.parametrize(
    "numbers",
    [[], [0.9, 0.8], [0.9, 0.9], [0.0], [1.0], [-0.1, 0.5], [0.5, 1.5], [0.1, 0.2, 0.3]]
    + [0.9, "0.9", ["0.9"], [True], [math.nan], None, {"a": 1}],
    ids=str,
)
def test_wrong_numbers(numbers) -> None:
    with pytest.raises(UsageError, match=r"split.GT: expected one or two numbers .* found"):
        global_time(np.arange(10.0), numbers)


def test_other_splits_choose_and_drop_too() -> None:
    """Items 7 and 8 are only held out, each by one user."""
    events = [Event(1, item, float(t)) for t, item in enumerate([1, 2, 3, 4, 5, 6, 7, 1])]
    events += [Event(2, item, float(t)) for t, item in enumerate([5, 6, 2, 3, 4, 8])]

    def test_rows(**options) -> list[int]:
        rows = rows_of(split_of(events, {**eval_args([]), **options}))
        return sorted(row for _, row in rows["test"])

    ratios, leave_one = {"RS": [2, 0, 2]}, {"LS": "valid_and_test"}
    assert test_rows(split=ratios) == [5, 6, 7, 12, 13]
    assert test_rows(split=ratios, cold_items="drop") == [5, 7, 12]
    assert test_rows(split=ratios, target="first") == [5, 12]
    assert test_rows(split=ratios, target="last", cold_items="drop") == [7, 12]
    for target in rule("eval_args.target").choices:
        assert test_rows(split=leave_one, target=target) == [7, 13]
    assert test_rows(split=leave_one, cold_items="drop") == [7]


def test_the_line_for_people() -> None:
    events = one_each(3) + [Event(4, 1, 8.5), Event(5, 5, 8.25), Event(5, 5, 9.0)]
    line = describe(split_of(events, eval_args([0.15, 0.55], "last", "drop")).summary)
    assert line == (
        "split GT at time 1 and 5.600000000000001: train 6 events; valid 0 targets of 12 events "
        "(12 dropped as cold); test 3 targets of 15 events (1 without history, 8 dropped as cold, "
        "3 not chosen)"
    )
    quiet = {**eval_args([]), "split": {"LS": "test_only"}}
    assert describe(split_of([Event(1, 1, float(t)) for t in range(5)], quiet).summary) == ""


@pytest.mark.parametrize("ratios", [[0, 0, 0], [2, -1, 1], [1, 2], [1, 1, math.nan]], ids=str)
def test_ratios_that_divide_nothing(ratios: list) -> None:
    with pytest.raises(UsageError, match="three ratios"):
        ratio(np.full(5, 5), np.arange(5), ratios)


@pytest.mark.parametrize("split", [{}, {"LS": "valid_and_test", "RS": [8, 1, 1]}, "LS"], ids=str)
def test_one_split_is_asked_for(split: object) -> None:
    with pytest.raises(UsageError, match="expected one of"):
        split_kind({"order": "TO", "group_by": "user", "split": split})
