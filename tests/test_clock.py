"""Whether times tell the time: warnings about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import SMALL, make_log, write_atomic

import recbole_pos
from recbole_pos.data.clock import check_clock
from recbole_pos.data.events import EventLog
from recbole_pos.errors import UsageError

DAY = 86400.0
USERS = [1, 1, 1, 2, 2]


def log_of(times: list[float], users: list[int]) -> EventLog:
    n = len(times)
    fields = {
        "user": torch.tensor(users),
        "item": torch.ones(n, dtype=torch.int64),
        "when": torch.tensor(times, dtype=torch.float64),
    }
    return EventLog.build(fields, max(users) + 1, "user", "item", "when")


def days(numbers: list[int], since: int = 0) -> list[float]:
    return [DAY * (since + number) for number in numbers]


SHIFTED = days([1, 3, 10, 2, 400])  # dates counted from another day than 1970-01-01
CLOCKS = [
    ([1, 2, 3, 1, 2], ["running number"]),
    ([3, 4, 5, 1, 2], ["running number"]),
    ([0.5, 10.5, 20.5, 3, 13], ["running number"]),
    ([1, 3, 5, 2, 4], ["running number"]),
    ([18000, 18003, 18009, 18001, 18002], ["from the year 1970 to 1970. .*timestamp_unit"]),
    ([1995, 1997, 2005, 2001, 2003], ["from the year 1970 to 1970. .*timestamp_unit"]),
    (
        [1.5e12, 1.6e12, 1.6e12, 1.5e12, 1.7e12],
        ["from the year 49502 to 55839. .*timestamp_unit", "resolution of 1e.11 s"],
    ),
    ([1, 3, 10, 2, 1e300], ["from the year 1970 to 3e.292. "]),
    (SHIFTED, ["from the year 1970 to 1971. ", "resolution of 86400 s.* raise time_min_period"]),
    (days([0, 2, 9, 1, 1], 15000), ["resolution of 86400 s.* raise time_min_period"]),
]


@pytest.mark.parametrize("times,notices", CLOCKS, ids=lambda x: str(x)[:25])
def test_clocks_that_do_not_tell_the_time(times: list[float], notices: list[str]) -> None:
    found = check_clock(log_of(times, USERS), "seconds", 600.0)
    for notice, pattern in zip(found, notices, strict=True):
        assert re.match("'when'.*" + pattern, notice), notice


def test_clocks_that_do() -> None:
    times = days([0, 2, 9, 1, 1], 15000)
    assert check_clock(log_of(times, USERS), "seconds", 2 * DAY) == []
    times = [1000 * t for t in times]
    assert check_clock(log_of(times, USERS), "milliseconds", 2 * DAY) == []


def test_a_clock_that_stands_still() -> None:
    for times in ([7] * 5, [7, 7, 7, 9, 9]):
        with pytest.raises(UsageError, match="'when' is the same for all events of a user.*TIME_F"):
            check_clock(log_of(times, USERS), "seconds")


def test_a_clock_is_spoken_of_when_training_starts(tmp_path: Path, caplog) -> None:
    """And not when the run is opened."""
    frame = make_log()
    frame["timestamp"] = (frame["timestamp"] - 1.5e9) * DAY
    given = {**SMALL, "data_path": str(write_atomic(frame, tmp_path, "dates")), "epochs": 1}
    recbole_pos.run("TORoPE", "dates", None, given, run_dir=tmp_path / "run", verbose=False)
    texts = [r.getMessage() for r in caplog.records if "'timestamp'" in r.getMessage()]
    assert len(texts) == 2 and "time_min_period" in texts[1]
    caplog.clear()
    recbole_pos.recommend(tmp_path / "run", k=2)
    assert not [r for r in caplog.records if "'timestamp'" in r.getMessage()]
