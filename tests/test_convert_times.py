"""Times in every form are the same seconds, and what may be two days is refused."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_pos.conversion.times import read_times
from recbole_pos.errors import UsageError

MOMENT = 1709399131  # 2024-03-02 17:05:31 UTC
DAY = 1709337600


def seconds(values: list[Any], form: str | None = None, kind: Any = None) -> list[float]:
    return read_times(
        pa.chunked_array([pa.array(values, kind)]), "bought_at", form
    ).seconds.tolist()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2024-03-02 17:05:31", MOMENT),
        ("2024-03-02T17:05:31Z", MOMENT),
        ("2024-03-02T17:05:31.123456789", MOMENT + 0.123456789),
        ("2024-03-02T18:05:31+01:00", MOMENT),
        ("2024-03-02T18:05:31.5+0100", MOMENT + 0.5),
        ("2024-03-02 11:35:31 -0530", MOMENT),
        ("2024-03-02 17:05:31 UTC", MOMENT),
        ("2024-03-02", DAY),
        ("2024/3/2 5:05:31 PM", MOMENT),
        ("31/12/2024", 1735603200),
        ("12/31/2024 12:00 AM", 1735603200),
        ("31.12.2024 00:00:01", 1735603201),
        ("03/03/2024", DAY + 86400),  # the same both ways
        ("2 March 2024 17:05:31", MOMENT),
        ("Mar 2, 2024", DAY),
        ("Sat, 02 Mar 2024 17:05:31 GMT", MOMENT),
        ("Sat Mar 02 17:05:31 +0000 2024", MOMENT),
        ("1709399131", MOMENT),
        ("1.709399131e9", MOMENT),
        ("1709399131250", MOMENT + 0.25),
        ("20240302", DAY),
        ("20240302170531", MOMENT),
        (MOMENT, MOMENT),
        (MOMENT * 10**6 + 1, MOMENT + 1e-6),
        (MOMENT * 10**9 + 500_000_000, MOMENT + 0.5),
        (datetime(2024, 3, 2, 17, 5, 31, 500_000), MOMENT + 0.5),
        (datetime(2024, 3, 2, 18, 5, 31, tzinfo=timezone(timedelta(hours=1))), MOMENT),
    ],
)
def test_every_form(value: Any, expected: float) -> None:
    assert seconds([value, None])[0] == expected


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        ("02/03/2024", "%d/%m/%Y", DAY),
        ("03/02/2024 05:05:31 pm", "%m/%d/%Y %I:%M:%S %p", MOMENT),
        ("02.03.24 17:05", "%d.%m.%y %H:%M", MOMENT - 31),
        ("24-03-02T17:05:31.25", "%y-%m-%dT%T.%f", MOMENT + 0.25),
        ("20240302", "%Y%m%d", DAY),
        (17, "s", 17),
        ("17", "ms", 0.017),
    ],
)
def test_a_form_that_is_said(value: Any, form: str, expected: float) -> None:
    assert seconds([value], form) == [expected]


@pytest.mark.parametrize(
    ("values", "form", "words"),
    [
        (["03/04/2024", "05/06/2024 17:05"], None, r"date_format='%d/%m/%Y'.*'%m/%d/%Y'"),
        (["03.04.2024"], None, r"%d\.%m\.%Y"),
        (["13/01/2024", "01/13/2024", "02/03/2024"], None, "contradict each other"),
        ([1, 2, 3], None, "from 1 to 3 are no epoch"),
        ([MOMENT, MOMENT * 1000], None, "of one unit"),
        ([True], None, "says no time"),
        (["x"], "day_first", "neither one of s, ms"),
        (["x"], "%d/%m", "day, month and year"),
        (["x"], "%d/%m/%Y %Q", "'Q'"),
        ([date(2024, 3, 2)], "s", "leave date_format out"),
    ],
)
def test_what_cannot_be_told(values: list[Any], form: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        seconds(values, form)


def test_no_such_day_or_clock_is_no_time() -> None:
    values = ["2024-02-30", "2024-02-29", "2023-02-29", "2024-13-01", "2024-01-01 25:00", "soon"]
    assert np.isnan(seconds(values)).tolist() == [True, False, True, True, True, True]


def test_one_line_that_is_wrong_hides_no_other() -> None:
    """Among many that Arrow reads at once; and a number among numbers."""
    texts = ["2024-03-02 17:05:31"] * 5000
    texts[1234] = "yesterday"
    found = np.array(seconds(texts))
    assert np.flatnonzero(np.isnan(found)).tolist() == [1234]
    assert (np.delete(found, 1234) == MOMENT).all()
    found = np.array(seconds([MOMENT] * 500 + [0]))
    assert np.flatnonzero(np.isnan(found)).tolist() == [500]


def test_one_column_tells_day_from_month() -> None:
    assert seconds(["01/02/2024", "13/02/2024"]) == [1706745600, 1707782400]
    assert seconds(["01/02/2024", "02/13/2024"]) == [1704153600, 1707782400]


@settings(deadline=None)
@given(
    st.datetimes(datetime(1974, 1, 1), datetime(2099, 12, 31)).map(
        lambda t: t.replace(microsecond=0)
    )
)
def test_forms_agree_on_every_second(moment: datetime) -> None:
    expected = (moment - datetime(1970, 1, 1)).total_seconds()
    forms = ["%Y-%m-%d %H:%M:%S", "%d %B %Y %H:%M:%S", "%b %d, %Y %I:%M:%S %p", "%Y%m%d%H%M%S"]
    for form in forms:
        text = moment.strftime(form)
        assert seconds([text]) == seconds([text], form) == [expected], form
    assert seconds([moment.strftime("%d/%m/%Y %T")], "%d/%m/%Y %T") == [expected]
