"""Warnings about times that do not tell the time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import SMALL, make_log, write_atomic

import recbole_pos
from recbole_pos.data.clock import check_clock
from recbole_pos.data.interactions import EventLog
from recbole_pos.errors import UsageError

DAY = 86400.0


def check(times: list[float], unit: str = "seconds", period: float = 600.0) -> list[str]:
    """What is said about the times of a user with three interactions, and of one with two."""
    fields = {
        "user": torch.tensor([1, 1, 1, 2, 2]),
        "item": torch.ones(5, dtype=torch.int64),
        "when": torch.tensor(times, dtype=torch.float64),
    }
    return check_clock(EventLog.build(fields, 3, "user", "item", "when"), unit, period)


def days(*numbers: int, since: int = 0) -> list[float]:
    return [DAY * (since + number) for number in numbers]


DATES = days(0, 2, 9, 1, 1, since=15000)
RESOLUTION = "resolution of 86400 s.* raise time_min_period"
CLOCKS = [
    ([3, 4, 5, 1, 2], ["running number"]),
    ([0.5, 10.5, 20.5, 3, 13], ["running number"]),
    ([1995, 1997, 2005, 2001, 2003], ["from the year 1970 to 1970. .*timestamp_unit"]),
    (
        [1.5e12, 1.6e12, 1.6e12, 1.5e12, 1.7e12],
        ["from the year 49502 to 55839. .*timestamp_unit", "resolution of 1e.11 s"],
    ),
    ([1, 3, 10, 2, 1e300], ["from the year 1970 to 3e.292. "]),
    (days(1, 3, 10, 2, 400), ["from the year 1970 to 1971. ", RESOLUTION]),
    (DATES, [RESOLUTION]),
]


@pytest.mark.parametrize("times,warnings", CLOCKS, ids=lambda x: str(x)[:25])
def test_what_is_no_clock(times: list[float], warnings: list[str]) -> None:
    for found, pattern in zip(check(times), warnings, strict=True):
        assert re.match("'when'.*" + pattern, found), found


def test_a_period_needs_two_steps_of_the_clock() -> None:
    for unit, ticks in (("seconds", 1), ("milliseconds", 1000)):
        times = [ticks * time for time in DATES]
        assert check(times, unit, 2 * DAY) == []
        assert len(check(times, unit, 1.99 * DAY)) == 1


def test_a_clock_that_stands_still() -> None:
    for times in ([7] * 5, [7, 7, 7, 9, 9]):
        with pytest.raises(UsageError, match="'when' is the same for all interactions of a user"):
            check(times)


def test_training_warns_and_opening_a_run_does_not(tmp_path: Path, caplog) -> None:
    frame = make_log()
    frame["timestamp"] = (frame["timestamp"] - 1.5e9) * DAY
    given = {**SMALL, "data_path": str(write_atomic(frame, tmp_path, "dates")), "epochs": 1}
    recbole_pos.run("TORoPE", "dates", None, given, run_dir=tmp_path / "run", verbose=False)
    texts = [r.getMessage() for r in caplog.records if "'timestamp'" in r.getMessage()]
    assert len(texts) == 2 and "time_min_period" in texts[1]
    caplog.clear()
    recbole_pos.recommend(tmp_path / "run", k=2)
    assert not [r for r in caplog.records if "'timestamp'" in r.getMessage()]
