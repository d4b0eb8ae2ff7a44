"""recbole-pos convert: numbers and times as people write them, and what may be two of them."""

from __future__ import annotations

import csv
import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recbole_pos.cli.main import main
from recbole_pos.conversion.times import read_times
from recbole_pos.errors import UsageError


def convert(folder: Path, cells: list[str], *options: str) -> Any:
    """What became of a column ``amount``: kind, cells, notes; an exit code if nothing did."""
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "time", "amount"])
        for n, cell in enumerate(cells * 3):
            writer.writerow([f"u{n}", "i", 1_700_000_000 + n, cell])
    command = ["convert", str(folder / "log.csv"), "--name=shop", f"--data_path={folder}"]
    if code := main([*command, "--overwrite", "--table=amount=inter", *options]):
        return code
    columns = json.loads((folder / "shop" / "convert.json").read_text())["columns"]
    column = next(one for one in columns if one["column"] == "amount")
    table = pd.read_csv(folder / "shop" / "shop.inter", sep="\t", dtype=str, na_filter=False)
    found = table[f"amount:{column['kind']}"][: len(cells)].tolist()
    return column["kind"], found, "; ".join(column["notes"])


@pytest.mark.parametrize(
    ("cells", "options", "kind", "found"),
    [
        (["1.50", "-2e3", ".5", "inf"], [], "float", ["1.5", "-2000", "0.5", "inf"]),
        (["12,99", "5"], ["--decimal=,"], "float", ["12.99", "5"]),
        (["1.234,50", "5"], ["--decimal=,"], "token", ["1.234,50", "5"]),
        (["-", "5", "NA"], ["--missing", "-"], "float", ["", "5", ""]),
        (["01", "5"], [], "token", ["01", "5"]),
        (["2024-03-02", "2024-03-03 10:00"], [], "float", ["1709337600", "1709460000"]),
        (["a|b c", "d"], ["--type=amount=token_seq"], "token_seq", ["a|b c", "d"]),
        (["0.5,1e3", "2,3"], ["--type=amount=float_seq"], "float_seq", ["0.5 1e3", "2 3"]),
    ],
)
def test_what_cells_are(
    tmp_path: Path, cells: list[str], options: list[str], kind: str, found: list[str]
) -> None:
    """Numbers with the separator that the user gives; lists only by type."""
    assert convert(tmp_path, cells, *options)[:2] == (kind, found)


MOMENT = 1709399131  # 2024-03-02 17:05:31 UTC
DAY = 1709337600


def seconds(values: list[Any], form: str | None = None, timezone: str | None = None) -> list[float]:
    column = pa.chunked_array([pa.array(values)])
    return read_times(column, "bought_at", form, timezone)[0].tolist()


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        ("2024-03-02 17:05:31", None, MOMENT),
        ("2024-03-02T17:05:31.123456789", None, MOMENT + 0.123456789),
        ("2024-03-02T18:05:31.5+0100", None, MOMENT + 0.5),
        ("2024-03-02", None, DAY),
        ("2024/3/2 17:05:31", None, MOMENT),
        ("31/12/2024", None, 1735603200),
        ("03/03/2024", None, DAY + 86400),  # the same both ways
        ("1709399131250", None, MOMENT + 0.25),
        (MOMENT * 10**9 + 15_838, None, MOMENT + 1.5838e-5),  # more digits than a float has
        (datetime(2024, 3, 2, 18, 5, 31, tzinfo=timezone(timedelta(hours=1))), None, MOMENT),
        ("02/03/2024", "%d/%m/%Y", DAY),
        ("Mar 02, 2024 05:05:31 PM", "%b %d, %Y %I:%M:%S %p", MOMENT),
        (20240302.0, "%Y%m%d", DAY),  # as pandas has whole numbers beside empty cells
        (17, "s", 17),
    ],
)
def test_a_time_in_a_known_or_a_given_form(value: Any, form: str | None, expected: float) -> None:
    assert seconds([value, None], form)[0] == expected


def test_one_cell_of_a_column_decides_day_and_month() -> None:
    assert seconds(["01/02/2024", "13/02/2024"]) == [1706745600, 1707782400]
    assert seconds(["01/02/2024", "02/13/2024"]) == [1704153600, 1707782400]


@pytest.mark.parametrize(
    ("values", "form", "words"),
    [
        (["03/04/2024", "05/06/2024 17:05"], None, r"date_format='%d/%m/%Y %H:%M' .*'%m/%d"),
        ([20240302], None, "date_format=s "),
        (["13/01/2024", "01/13/2024", "02/03/2024"], None, "may begin with the day"),
        ([1, 2, 3], None, "date_format=s"),
        ([MOMENT, MOMENT * 1000], None, "of one unit"),
    ],
)
def test_times_that_may_mean_two_or_none(values: list[Any], form: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        seconds(values, form)


@pytest.mark.parametrize("as_written", [str, datetime.fromisoformat])
def test_times_without_a_zone_are_those_of_the_zone_that_is_given(as_written: Any) -> None:
    """A zone in the cell wins, and epochs are in UTC, but not digits of dates."""
    zone = "America/New_York"
    utc = {
        "2024-07-02 12:00": "2024-07-02 16:00",
        "2024-01-02 12:00:00.500": "2024-01-02 17:00:00.500",
        "2024-11-03 01:30": "2024-11-03 05:30",  # the first of an hour that occurs twice
        "2024-03-10 02:30": "2024-03-10 07:00",  # the end of an hour that is skipped
    }
    moments = [datetime.fromisoformat(f"{text}+00:00") for text in utc.values()]
    expected = [moment.timestamp() for moment in moments]
    assert seconds([None, *map(as_written, utc)], timezone=zone)[1:] == expected
    assert seconds([as_written(f"{text}+00:00") for text in utc.values()], None, zone) == expected
    assert seconds([*utc, "2024-07-02 12:00Z", "soon"], None, zone)[:5] == [*expected, 1719921600]
    assert seconds([MOMENT], None, zone) == [MOMENT]
    assert seconds([20240302], "%Y%m%d", zone) == [DAY + 5 * 3600]


def test_no_such_day_or_clock_is_no_time() -> None:
    values = ["2024-02-30", "2024-02-29", "2023-02-29", "2024-01-01 25:00", "soon"]
    assert np.isnan(seconds(values)).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize(("right", "wrong"), [("2024-03-02 17:05:31", "yesterday"), (MOMENT, 0)])
def test_one_wrong_cell_hides_no_other(right: Any, wrong: Any) -> None:
    """Among dates that Arrow reads at once; and a number among numbers."""
    found = np.array(seconds([right] * 500 + [wrong]))
    assert (found[:-1] == MOMENT).all() and np.isnan(found[-1])


def test_whole_numbers_that_no_float_holds_stay_apart(tmp_path: Path) -> None:
    cells = ["1234567890123456789", "1234567890123456790"]
    assert convert(tmp_path, cells)[:2] == ("token", cells)
    kind, found, _ = convert(tmp_path, [str(2**53 - 1), f"{10**12}.0"])
    assert (kind, found) == ("float", ["9007199254740991", "1000000000000"])
