"""recbole-pos convert: what a file is, and what the cells of a column are."""

import csv
import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recbole_pos.cli.main import main
from recbole_pos.conversion.times import read_times
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.yaml_files import read_yaml

NOW = 1_700_000_000
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``recbole-pos convert`` of a file of this text, or of one there is, to ``tmp_path/shop``."""

    def run(text: str | None, *options: str, name: str = "log.csv") -> int:
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        command = ["convert", str(tmp_path / name), "--name=shop", f"--data_path={tmp_path}"]
        return main([*command, *options])

    return run


def read_interactions(folder: Path) -> list[list[str]]:
    lines = (folder / "shop" / "shop.inter").read_text().splitlines()
    return [line.split("\t") for line in lines[1:]]


def make_rows(number: int) -> list[str]:
    return [f"u{n % 5},i{n % 4},{NOW + n}" for n in range(number)]


def read_report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "shop" / "convert.json").read_text())


def test_a_file_without_a_header(tmp_path: Path, run: Run, capsys) -> None:
    """Names that the first line has as well are its header."""
    text = "ann,kite,2024-03-02\nbob,owl,2024-03-03\n"
    assert run(text) == 2 and "--columns" in capsys.readouterr().err
    assert run(text, "--columns=user,item,time") == 0
    assert [row[0] for row in read_interactions(tmp_path)] == ["ann", "bob"]
    options = ["--columns=user,item", "--time=row_order", "--overwrite"]
    assert run("user,item\na,x\n", *options) == 0
    assert read_interactions(tmp_path) == [["a", "x", "0"]]


def test_order_of_rows_instead_of_times(tmp_path: Path, run: Run) -> None:
    text = "user,item,stars\nu,x,1\nv,x,2\nu,y,3\nu,x,4\n"
    assert run(text) == 2
    assert run(text, "--time", "row_order") == 0
    assert [row[2] for row in read_interactions(tmp_path)] == ["0", "0", "1", "2"]
    options = read_yaml(tmp_path / "shop" / "shop.yaml")
    assert "timestamp_unit" not in options and options["TIME_FIELD"] == "timestamp"
    assert read_report(tmp_path)["counts"]["first"] is None


def test_ids_that_became_floats_are_the_same_ids(tmp_path: Path, run: Run) -> None:
    text = f"user,item,time\n1034.0,A7,{NOW}\n1034,3.0,{NOW + 1}\n1035.0,3,{NOW + 2}\n"
    assert run(text) == 0
    expected = [["1034", "A7"], ["1034", "3"], ["1035", "3"]]
    assert [row[:2] for row in read_interactions(tmp_path)] == expected
    assert read_report(tmp_path)["columns"][0]["notes"]
    versions = ["1.10", "1.1", "1.0", "2.0"]
    rows = "".join(f"1,{version},{NOW}\n" for version in versions)
    assert run(f"user,item,time\n{rows}", "--overwrite") == 0
    assert [row[1] for row in read_interactions(tmp_path)] == versions


def test_kinds_are_known_by_names_and_by_what_columns_hold(tmp_path: Path, run: Run) -> None:
    rows = "".join(f"u{n},i,2024-03-02,{n % 3},{n % 4},0{n % 5}\n" for n in range(9))
    assert run("user,item,date,shop_id,amount,plz\n" + rows) == 0
    assert {row[2] for row in read_interactions(tmp_path)} == {"1709337600"}
    kinds = {one["column"]: one["kind"] for one in read_report(tmp_path)["columns"]}
    assert (kinds["shop_id"], kinds["amount"], kinds["plz"]) == ("token", "float", "token")


@pytest.mark.parametrize(
    ("items", "words"),
    [("thing,brand\n1.0,b\n", "no column is called 'item'"), ("item,brand\n01,b\n", "'01'")],
)
def test_items_in_no_interaction(tmp_path: Path, run: Run, capsys, items: str, words: str) -> None:
    (tmp_path / "items.csv").write_text(items)
    assert run(f"user,item,time\nu,1,{NOW}\n", f"--items={tmp_path / 'items.csv'}") == 2
    assert words in capsys.readouterr().err and not (tmp_path / "shop").exists()


def test_items_are_joined_by_their_id(tmp_path: Path, run: Run) -> None:
    """1.0 is 1, as programs write it where a column has missing cells."""
    (tmp_path / "items.csv").write_text("item,brand\n1.0,b\n2.0,b\n")
    assert run(f"user,item,time\nu,1,{NOW}\n", f"--items={tmp_path / 'items.csv'}") == 0
    assert (tmp_path / "shop" / "shop.item").read_text().split("\n")[1] == "1\tb"


def test_rows_of_the_same_time_are_ordered_by_a_column(tmp_path: Path, run: Run) -> None:
    """Numbers by size, other cells as text; an empty cell comes first."""
    for keys, expected in ((["10", "9", ""], "cba"), (["x10", "x9", ""], "cab")):
        rows = [f"u,{item},{NOW},{key}" for item, key in zip("abc", keys, strict=True)]
        text = "\n".join(["user,item,time,step", *rows, f"u,z,{NOW - 1},99"])
        assert run(text, "--then=step", "--overwrite") == 0
        assert [row[1] for row in read_interactions(tmp_path)] == ["z", *expected]
    assert run(text, "--then=stp", "--overwrite") == 2


def test_a_zone_that_does_not_exist_is_named(run: Run, capsys) -> None:
    assert run("user,item,time\nu,a,2024-01-01 10:00\n", "--timezone=Europe/Olso") == 2
    assert "timezone: found 'Europe/Olso'" in capsys.readouterr().err


def test_partitions_are_columns(tmp_path: Path, run: Run) -> None:
    folders = ["country=NO", "country=F%C3%B8r", "country=__HIVE_DEFAULT_PARTITION__"]
    for user, name in enumerate(folders):
        folder = tmp_path / "log" / "year=2024" / name
        folder.mkdir(parents=True)
        rows = [(user, n, NOW + n) for n in range(3)]
        pd.DataFrame(rows, columns=["user", "item", "time"]).to_parquet(folder / "part-0.parquet")
    (tmp_path / "log" / "dataset_infos.json").write_text("{}")  # beside the data, as in a hub
    assert run(None, name="log") == 0
    users = pd.read_csv(tmp_path / "shop" / "shop.user", sep="\t", dtype=str, keep_default_na=False)
    found = users.set_index("user_id:token")["country:token"].to_dict()
    assert found == {"0": "NO", "1": "Før", "2": ""}
    assert run(None, "--overwrite", name="log/year=2024/country=NO") == 0
    columns = {column["column"] for column in read_report(tmp_path)["columns"]}
    assert columns == {"year", "country", "user", "item", "time"}


def test_blocks_of_json_count_on(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken rows are numbered through all blocks, and a number beyond 64 bits is no float."""
    monkeypatch.setattr("recbole_pos.tables.engine.BLOCK_BYTES", 100)
    rows = [json.dumps({"user": 2**64 + n, "item": "a", "time": NOW + n}) for n in range(9)]
    rows[2] = rows[6] = "{"
    assert run("\n".join(rows) + "\n", "--max_lost=0.5", name="log.jsonl") == 0
    dropped = read_report(tmp_path)["lines"]["events"]["dropped"]["broken line"]["first"]
    assert [one.split(" ")[0] for one in dropped] == ["log.jsonl:3", "log.jsonl:7"]
    assert read_interactions(tmp_path)[-1][0] == str(2**64 + 8)


def test_files_of_a_folder_are_joined_by_names_of_columns(tmp_path: Path, run: Run) -> None:
    """A column that a file lacks is empty there; each row has the file and line it is from."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv").write_text(f"user,item,time,stars\nu,1,{NOW},5\n,2,{NOW},4\n")
    (tmp_path / "log" / "b.csv").write_text(f"user,time,item\nu,{NOW},2\nv,{NOW},1\n,{NOW},1\n")
    assert run(None, "--table=stars=inter", "--max_lost=0.5", name="log") == 0
    cells = [[row[0], row[1], row[3]] for row in read_interactions(tmp_path)]
    assert cells == [["u", "1", "5"], ["u", "2", ""], ["v", "1", ""]]
    dropped = read_report(tmp_path)["lines"]["events"]["dropped"]
    assert dropped == {"no user (user)": {"lines": 2, "first": ["a.csv:3", "b.csv:4"]}}


def test_a_dataset_that_is_replaced_by_less_is_warned_of(run: Run) -> None:
    """A new day alone is not the history that a model goes on from."""
    days = ["user,item,time", *make_rows(24)]
    assert run("\n".join(days)) == 0
    with pytest.warns(RunWarning, match="12 interactions replace 24 in .*shop.* `update` "):
        assert run("\n".join(days[:13]), "--overwrite", "--quiet") == 0


def test_lost_rows_are_named_in_one_warning(tmp_path: Path, run: Run) -> None:
    """Those of all tables, but not items without an interaction; quiet or not."""
    items = ["item,brand", *(f"i{n},b" for n in range(4)), *["stock,b"] * 20, ",b"]
    (tmp_path / "items.csv").write_text("\n".join(items))
    rows = [*make_rows(50), "u1", "", f",i1,{NOW}", f"u1,i1,{NOW + 99}"]
    warning = (
        "left out of shop: 2 of 54 rows of log.csv (broken line: 1, first log.csv:52 (1 cells, the "
        "first line has 3); no user (user): 1, first log.csv:54); 1 of 25 rows of items.csv "
        "(no item (item): 1, first items.csv:26)"
    )
    with pytest.warns(RunWarning) as warned:
        items_option = f"--items={tmp_path / 'items.csv'}"
        assert run("\n".join(["user,item,time", *rows]), items_option, "--quiet") == 0
    assert [str(one.message) for one in warned if one.category is RunWarning] == [warning]


def test_too_many_lost_rows_are_an_error(tmp_path: Path, run: Run, capsys) -> None:
    """More than a tenth, unless ``max_lost`` says otherwise."""
    text = "\n".join(["user,item,time", *make_rows(18), "u1", f",i1,{NOW}", f",i1,{NOW}"])
    assert run(text) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: 3 of 21 rows of log.csv (broken line: 1, first log.csv:20 (")
    assert run(text, "--max_lost=0.2") == 0
    assert len(read_interactions(tmp_path)) == 18


@pytest.mark.parametrize("later", ["x", '"two\nlines,,,,"'])
def test_a_quotation_mark_must_be_closed(tmp_path: Path, run: Run, capsys, later: str) -> None:
    """Whatever marks the rows after it have; without it, a cell may have several lines."""
    rows = [f"{row},x" for row in make_rows(18)]
    rows[9] = rows[9].removesuffix("x") + later
    assert run("\n".join(["user,item,time,word", *rows])) == 0
    assert len(read_interactions(tmp_path)) == 18
    rows[5] = f'u1,i1,{NOW},"x'
    assert run("\n".join(["user,item,time,word", *rows]), "--overwrite") == 2
    assert "log.csv, line 7: " in capsys.readouterr().err


# --- numbers and times as people write them ---


def convert_amounts(folder: Path, cells: list[str], *options: str) -> Any:
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
    assert convert_amounts(tmp_path, cells, *options)[:2] == (kind, found)


MOMENT = 1709399131  # 2024-03-02 17:05:31 UTC
MIDNIGHT = 1709337600


def seconds(values: list[Any], form: str | None = None, timezone: str | None = None) -> list[float]:
    column = pa.chunked_array([pa.array(values)])
    return read_times(column, "bought_at", form, timezone)[0].tolist()


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        ("2024-03-02 17:05:31", None, MOMENT),
        ("2024-03-02T17:05:31.123456789", None, MOMENT + 0.123456789),
        ("2024-03-02T18:05:31.5+0100", None, MOMENT + 0.5),
        ("2024-03-02", None, MIDNIGHT),
        ("2024/3/2 17:05:31", None, MOMENT),
        ("31/12/2024", None, 1735603200),
        ("03/03/2024", None, MIDNIGHT + 86400),  # the same both ways
        ("1709399131250", None, MOMENT + 0.25),
        (MOMENT * 10**9 + 15_838, None, MOMENT + 1.5838e-5),  # more digits than a float has
        (datetime(2024, 3, 2, 18, 5, 31, tzinfo=timezone(timedelta(hours=1))), None, MOMENT),
        ("02/03/2024", "%d/%m/%Y", MIDNIGHT),
        ("Mar 02, 2024 05:05:31 PM", "%b %d, %Y %I:%M:%S %p", MOMENT),
        (20240302.0, "%Y%m%d", MIDNIGHT),  # as pandas has whole numbers beside empty cells
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
    assert seconds([20240302], "%Y%m%d", zone) == [MIDNIGHT + 5 * 3600]


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
    assert convert_amounts(tmp_path, cells)[:2] == ("token", cells)
    kind, found, _ = convert_amounts(tmp_path, [str(2**53 - 1), f"{10**12}.0"])
    assert (kind, found) == ("float", ["9007199254740991", "1000000000000"])
