"""recbole-pos convert: numbers and times as people write them, and what may be two of them."""

from __future__ import annotations

import csv
import json
import re
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_pos.cli.main import main
from recbole_pos.conversion.times import read_times
from recbole_pos.errors import UsageError


def convert(folder: Path, cells: list[str], *options: str, separator: str = ",") -> Any:
    """What became of a column ``amount``: kind, cells, notes; an exit code if nothing did."""
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["user", "item", "time", "amount"])
        for n, cell in enumerate(cells * 3):
            writer.writerow([f"u{n}", "i", 1_700_000_000 + n, cell])
    command = ["convert", str(folder / "log.csv"), "--name=shop", f"--data_path={folder}"]
    if code := main([*command, "--overwrite", "--table=amount=inter", *options]):
        return code
    columns = json.loads((folder / "shop" / "convert.json").read_text())["columns"]
    column = next(one for one in columns if one["column"] == "amount")
    table = pd.read_csv(folder / "shop" / "shop.inter", sep="\t", dtype=str)
    found = table[f"amount:{column['kind']}"][: len(cells)].tolist()
    return column["kind"], found, "; ".join(column["notes"])


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["1,234.50", "12", "-7.25"], ["1234.5", "12", "-7.25"]),
        (["1.234,50", "12", "-7,25"], ["1234.5", "12", "-7.25"]),
        (["1 234,50", "1\u00a0000,00", "2\u202f000,00"], ["1234.5", "1000", "2000"]),
        (["1'234.50", "12"], ["1234.5", "12"]),
        (["1,234,567", "1,234"], ["1234567", "1234"]),
        (["12,99", "5", "0,123"], ["12.99", "5", "0.123"]),
        (["$1,234.50", "-$12", "$ 3"], ["1234.5", "-12", "3"]),
        (["1.234,50 €", "5\u00a0€"], ["1234.5", "5"]),
        (["12.5 EUR", "7 EUR"], ["12.5", "7"]),
        (["12%", "5.5%"], ["12", "5.5"]),
    ],
)
def test_separators_that_are_certain(tmp_path: Path, cells: list[str], numbers: list[str]) -> None:
    for options in ([], ["--type", "amount=float"]):
        kind, found, notes = convert(tmp_path, cells, *options)
        assert (kind, found) == ("float", numbers) and notes


@pytest.mark.parametrize(
    ("cells", "options", "first"),
    [
        (["1,234", "2,345"], ["--thousands", "amount=,"], "1234"),
        (["1,234", "2,345"], ["--decimal", "amount=,"], "1.234"),
        (["1.234", "2.345"], ["--thousands", "amount=."], "1234"),
        (["101 205", "330 120"], ["--thousands", "amount= "], "101205"),
        (["1_234·5", "7"], ["--thousands", "amount=_", "--decimal", "amount=·"], "1234.5"),
    ],
)
def test_what_may_be_two_numbers_is_noted_and_can_be_given(
    tmp_path: Path, cells: list[str], options: list[str], first: str
) -> None:
    kind, found, notes = convert(tmp_path, cells)
    assert kind == ("float" if cells[0] == "1.234" else "token")  # as all programs read it
    assert "--" in notes or "_" in cells[0]
    if kind == "token":
        assert found == cells and convert(tmp_path, cells, "--type", "amount=float") == 2
    if " " in cells[0]:  # or two names, unless something has a decimal
        assert convert(tmp_path, [*cells, "1 000.5"])[0] == "float"
    kind, found, _ = convert(tmp_path, cells, *options)
    assert (kind, found[0]) == ("float", first)


def test_a_comma_between_semicolons_is_that_of_decimals(tmp_path: Path) -> None:
    kind, found, _ = convert(tmp_path, ["1,234", "2,345"], separator=";")
    assert (kind, found) == ("float", ["1.234", "2.345"])


MOMENT = 1709399131  # 2024-03-02 17:05:31 UTC
DAY = 1709337600


def seconds(values: list[Any], form: str | None = None) -> list[float]:
    return read_times(pa.chunked_array([pa.array(values)]), "bought_at", form).seconds.tolist()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2024-03-02 17:05:31", MOMENT),
        ("2024-03-02T17:05:31Z", MOMENT),
        ("2024-03-02T17:05:31.123456789", MOMENT + 0.123456789),
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
        ("1.709399131e9", MOMENT),
        ("1709399131250", MOMENT + 0.25),
        ("20240302", DAY),
        ("20240302170531", MOMENT),
        (2030313233, 2030313233),  # seconds in 2034, as it has 31 months
        (202403021760, 202403021.76),  # milliseconds, as it has 60 minutes
        (MOMENT * 10**6 + 1, MOMENT + 1e-6),
        (MOMENT * 10**9 + 15_838, MOMENT + 1.5838e-5),  # more digits than a float has
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
        ("02032024", "%d%m%Y", DAY),
        (2032024, "%d%m%Y", DAY),  # a whole number has lost the zeros before it
        ("030224", "%m%d%y", DAY),
        (30224, "%m%d%y", DAY),
        (2024030217, "%Y%m%d%H", MOMENT - 331),
        ("202403021705", "%Y%m%d%H%M", MOMENT - 31),
        (2024030217, "s", 2024030217),
        (17, "s", 17),
        ("17", "ms", 0.017),
    ],
)
def test_a_given_form(value: Any, form: str, expected: float) -> None:
    assert seconds([value], form) == [expected]


@pytest.mark.parametrize(
    ("values", "form", "words"),
    [
        (["03/04/2024", "05/06/2024 17:05"], None, r"date_format='%d/%m/%Y'.*'%m/%d/%Y'"),
        (["03.04.2024"], None, r"%d\.%m\.%Y"),
        ([202403021705, 202403031706, None], None, "date_format=%Y%m%d%H%M or .*date_format=ms"),
        (["2024030217"] * 200 + ["0"], None, "date_format=%Y%m%d%H or .*date_format=s$"),
        (["13/01/2024", "01/13/2024", "02/03/2024"], None, "contradict each other"),
        ([1, 2, 3], None, "date_format=s"),
        ([MOMENT, MOMENT * 1000], None, "of one unit"),
        ([True], None, "bought_at holds bool"),
        (["x"], "%d/%m", "day, month and year"),
        (["x"], "%d/%m/%Y %Q", "'Q'"),
        ([date(2024, 3, 2)], "s", "date_format"),
    ],
)
def test_times_that_may_mean_two_or_none(values: list[Any], form: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        seconds(values, form)


@pytest.mark.parametrize(
    "clock",
    ["", " 03:04", "T03:04:05", ", 3:04 PM", " 03:04:05.25 p.m.", " 03:04PM UTC", " 3:04:05 +0200"],
)
def test_the_form_that_an_error_gives_reads_the_date(clock: str) -> None:
    """Day first and month first."""
    for text in (f"01/02/2024{clock}", f" 1.2.2024{clock} "):
        with pytest.raises(UsageError, match="with the month") as caught:
            seconds([text])
        forms = re.findall("'(%[^']*)'", str(caught.value))
        by_day, by_month = (seconds([text], form)[0] for form in forms)
        assert by_day - by_month == 30 * 86400
        assert by_day == seconds([f"2024-02-01{clock}".replace("-", "/")])[0]


@pytest.mark.parametrize("dates", [[20240302.0, np.nan], ["20240302.0"], ["20240302.00", None]])
def test_whole_dates_that_became_floats(dates: list[Any]) -> None:
    assert seconds(dates)[0] == seconds(dates, "%Y%m%d")[0] == DAY
    assert seconds([2032024.0, np.nan], "%d%m%Y")[0] == seconds(["2032024.0"], "%d%m%Y")[0] == DAY
    assert np.isnan(seconds([20240302.0, 20240302.5], "%Y%m%d")).tolist() == [False, True]


def test_no_such_day_or_clock_is_no_time() -> None:
    values = ["2024-02-30", "2024-02-29", "2023-02-29", "2024-13-01", "2024-01-01 25:00", "soon"]
    assert np.isnan(seconds(values)).tolist() == [True, False, True, True, True, True]


def test_one_wrong_line_hides_no_other() -> None:
    """Among many that Arrow reads at once; and a number among numbers."""
    for right, wrong in (("2024-03-02 17:05:31", "yesterday"), (MOMENT, 0)):
        values = [right] * 5000
        values[1234] = wrong
        found = np.array(seconds(values))
        assert np.flatnonzero(np.isnan(found)).tolist() == [1234]
        assert (np.delete(found, 1234) == MOMENT).all()


def test_one_cell_of_a_column_decides_day_and_month() -> None:
    assert seconds(["01/02/2024", "13/02/2024"]) == [1706745600, 1707782400]
    assert seconds(["01/02/2024", "02/13/2024"]) == [1704153600, 1707782400]


@settings(deadline=None, max_examples=30)
@given(st.datetimes(datetime(1974, 1, 1), datetime(2099, 12, 31)))
def test_forms_agree_on_every_second(moment: datetime) -> None:
    moment = moment.replace(microsecond=0)
    expected = moment.replace(tzinfo=timezone.utc).timestamp()
    forms = ["%Y-%m-%d %H:%M:%S", "%d %B %Y %H:%M:%S", "%b %d, %Y %I:%M:%S %p", "%Y%m%d%H%M%S"]
    for form in forms:
        text = moment.strftime(form)
        assert seconds([text]) == seconds([text], form) == [expected], form
    assert seconds([moment.strftime("%d/%m/%Y %T")], "%d/%m/%Y %T") == [expected]


def test_nearly_numbers_are_noted(tmp_path: Path) -> None:
    for cells, is_noted in (([*map(str, range(30)), "n/x"], True), (["1,5", "2", "x"], False)):
        kind, _, notes = convert(tmp_path, cells)
        assert (kind, bool(notes)) == ("token", is_noted)


@pytest.mark.parametrize("mark", ["", ","])
def test_whole_numbers_that_no_float_holds_stay_apart(tmp_path: Path, mark: str) -> None:
    cells = [f"{number:{mark}}" for number in (1234567890123456789, 1234567890123456790)]
    kind, found, notes = convert(tmp_path, cells)
    assert (kind, found) == ("token", cells) and f"{cells[0]} is 1.234567890123456" in notes
    kind, found, notes = convert(tmp_path, cells, "--type", "amount=float")
    assert kind == "float" and len(set(found)) == 1 and "digits are lost" in notes
    kind, found, _ = convert(tmp_path, [str(2**53), "1e300", f"{10**22}.0"])
    assert (kind, found) == ("float", ["9.007199254740992e+15", "1e+300", "1e+22"])
