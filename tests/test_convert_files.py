"""recbole-pos convert: what a file is, before anything of it is taken for something."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import recbole_pos
from recbole_pos.cli.main import main
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


def read_report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "shop" / "convert.json").read_text())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.csv", "ann,kite,2024-03-02\nbob,owl,2024-03-03\nann,owl,2024-03-04\n"),
        ("log.csv", f"1,1,{NOW}\n"),
        ("log.txt", "1 1 1\n1 2 2\n2 1 3\n"),
    ],
)
def test_a_file_without_a_header(tmp_path: Path, run: Run, capsys, name: str, text: str) -> None:
    assert run(text, name=name) == 2
    assert "--columns" in capsys.readouterr().err
    form = ["--date_format=s"] if " " in text else []
    assert run(text, "--columns=user,item,time", *form, name=name) == 0
    assert len(read_interactions(tmp_path)) == text.count("\n")
    assert read_report(tmp_path)["lines"]["events"]["read"] == text.count("\n")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"ann,kite,{NOW}\nbob,owl,{NOW}\n", ["--user=ann", "--item=kite", f"--time={NOW}"]),
        ("a,b,1/2/2024\nb,c,31/2/2024\n", ["--user=a", "--item=b", "--time=1/2/2024"]),
        ("1,10\n1,11\n2,10\n", ["--user=1", "--item=10", "--time=row_order"]),
        ("1 1 2 3\n2 6 7\n3 9 10 11 12\n", ["--columns=user,items", "--time=row_order"]),
        ("user,item\na,x\n", ["--time=row_order", "--rm_copies"]),
    ],
)
def test_a_row_is_not_taken_for_names(run: Run, capsys, text: str, options: list[str]) -> None:
    """Nor a row of items for columns, nor the order of rows for times."""
    assert run(text, *options) == 2
    error = capsys.readouterr().err
    assert any(way in error for way in ("--columns=user,item", "awk", "--time=row_order"))


def test_names_that_the_first_line_says_as_well(tmp_path: Path, run: Run) -> None:
    assert run("user,item\na,x\n", "--columns=user,item", "--time=row_order") == 0
    assert read_interactions(tmp_path) == [["a", "x", "0"]]
    assert run(f"0,1,2\na,x,{NOW}\n", "--user=0", "--item=1", "--time=2", "--overwrite") == 0
    assert len(read_interactions(tmp_path)) == 1


@pytest.mark.parametrize(
    ("header", "options"),
    [
        ("user,item", ["--time=row_order"]),
        ("user,book", ["--time=row_order"]),
        ("Kunde,Produkt", ["--user=Kunde", "--item=Produkt", "--time=row_order"]),
        (f"user,item,{NOW}", [f"--time={NOW}"]),
    ],
)
def test_one_cell_does_not_make_names_a_row(
    tmp_path: Path, run: Run, header: str, options: list[str]
) -> None:
    """A user may be called as her column, unless an item is, too, and the names are unusual."""
    who, what, *_ = header.split(",")
    rows = [f"{who},kite", "ann,owl", f"bob,{what if what == 'item' else 'owl'}"]
    time = f",{NOW}" if header.count(",") == 2 else ""
    assert run("\n".join([header, *(row + time for row in rows)]), *options) == 0
    assert [row[0] for row in read_interactions(tmp_path)] == [who, "ann", "bob"]


def test_order_of_rows_instead_of_times(tmp_path: Path, run: Run) -> None:
    text = "user,item,stars\nu,x,1\nv,x,2\nu,y,3\nu,x,4\n"
    assert run(text) == 2
    assert run(text, "--time=row_order", "--date_format=s") == 2
    assert run(text, "--time", "row_order") == 0
    assert [row[2] for row in read_interactions(tmp_path)] == ["0", "0", "1", "2"]
    options = read_yaml(tmp_path / "shop" / "shop.yaml")
    assert "timestamp_unit" not in options and options["TIME_FIELD"] == "timestamp"
    assert "time" not in [r["field"] for r in options["for"]["AttrFormer"]["relations"]]
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


def test_columns_are_known_by_names_and_by_what_they_hold(tmp_path: Path, run: Run) -> None:
    rows = "".join(f"u{n},i,2024-03-02,{n % 3},{n % 4},0{n % 5}\n" for n in range(9))
    assert run("user,item,moment,shop_id,amount,plz\n" + rows) == 0
    assert {row[2] for row in read_interactions(tmp_path)} == {"1709337600"}
    kinds = {one["column"]: one["kind"] for one in read_report(tmp_path)["columns"]}
    assert (kinds["shop_id"], kinds["amount"], kinds["plz"]) == ("token", "float", "token")


@pytest.mark.parametrize("ids", ["1.0 2.0", "0001 0002"])
def test_a_join(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], ids: str) -> None:
    rows = "".join(f"{one},brand {one}\n" for one in ids.split())
    (tmp_path / "items.csv").write_text(rows)
    text, items = f"user,item,time\nu,1,{NOW}\nv,2,{NOW}\n", str(tmp_path / "items.csv")
    assert run(text, "--items", items) == 2
    assert "--item_columns" in capsys.readouterr().err
    joins = "000" not in ids
    assert run(text, "--items", items, "--item_columns=item,brand") == (0 if joins else 2)
    if joins:
        assert "\tbrand" in (tmp_path / "shop" / "shop.item").read_text().split("\n")[1]
    else:
        error = capsys.readouterr().err
        assert "'0001'" in error and "'1'" in error and not (tmp_path / "shop").exists()


def test_exact_copies_are_counted(tmp_path: Path, run: Run, capsys) -> None:
    """Buying again is no copy."""
    rows = [f"u{u},i{n},{NOW + n}\n" for u in range(10) for n in range(4)]
    text = "user,item,time\n" + "".join(row * 2 for row in rows) + f"z,i0,{NOW}\nz,i0,{NOW + 9}\n"
    assert run(text) == 0
    assert read_report(tmp_path)["counts"]["copies"] == 40
    assert "40 of 82" in capsys.readouterr().out
    assert run(text, "--rm_copies", "--overwrite") == 0
    assert len(read_interactions(tmp_path)) == 42
    dropped = read_report(tmp_path)["lines"]["events"]["dropped"]
    assert [reason["lines"] for reason in dropped.values()] == [40]


def test_partitions_are_columns(tmp_path: Path, run: Run) -> None:
    """Unless the files have another column of the name."""
    folders = ["country=NO", "country=F%C3%B8r", "country=__HIVE_DEFAULT_PARTITION__", "user=7"]
    folders.append("_shard=1")
    for user, name in enumerate(folders):
        folder = tmp_path / "log" / "year=2024" / name
        folder.mkdir(parents=True)
        rows = [(user, n, NOW + n) for n in range(3)]
        pd.DataFrame(rows, columns=["user", "item", "time"]).to_parquet(folder / "part-0.parquet")
    assert run(None, name="log") == 0
    users = pd.read_csv(tmp_path / "shop" / "shop.user", sep="\t", dtype=str, keep_default_na=False)
    found = users.set_index("user_id:token")["country:token"].to_dict()
    assert found == {"0": "NO", "1": "Før", "2": "", "3": "", "4": ""}
    columns = {column["column"] for column in read_report(tmp_path)["columns"]}
    assert {"year", "country", "user", "user (folder)", "_shard"} <= columns
    assert run(None, "--overwrite", name="log/year=2024/country=NO") == 0
    assert {"year", "country"} <= {one["column"] for one in read_report(tmp_path)["columns"]}


GOOD = json.dumps({"user": 1, "item": "a", "time": NOW})
BAD = [
    '{"user": 2, "item": "a", "x": ' + "[" * 10**6 + "]" * 10**6 + "}",
    '{"x": ' * 100_000 + "1" + "}" * 100_000,
    '{"user": "\\ud800", "item": "a", "time": 1700000000}',  # half a pair of surrogates
]


@pytest.mark.parametrize("bad", BAD, ids=["lists", "objects", "half a pair"])
def test_json_that_no_parser_may_be_given(tmp_path: Path, run: Run, bad: str) -> None:
    text = f"{GOOD}\n{bad}\n{GOOD.replace(' 1,', ' 2,')}\n"
    assert run(text, "--max_lost=0.5", name="log.jsonl") == 0
    broken = read_report(tmp_path)["lines"]["events"]["dropped"]["broken line"]
    assert broken["lines"] == 1 and len(broken["first"][0]) < 300
    assert broken["first"][0].startswith("log.jsonl:2 ")


def test_blocks_of_json_count_on(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken rows are numbered through all blocks, and a number beyond 64 bits is no float."""
    monkeypatch.setattr("recbole_pos.conversion.reading._BLOCK", 100)
    rows = [json.dumps({"user": 2**64 + n, "item": "a", "time": NOW + n}) for n in range(9)]
    rows[2] = rows[6] = "{"
    assert run("\n".join(rows) + "\n", "--max_lost=0.5", name="log.jsonl") == 0
    dropped = read_report(tmp_path)["lines"]["events"]["dropped"]["broken line"]["first"]
    assert [one.split(" ")[0] for one in dropped] == ["log.jsonl:3", "log.jsonl:7"]
    assert read_interactions(tmp_path)[-1][0] == str(2**64 + 8)


WIDE = ",".join(f"c{n}" for n in range(1_001))
ROW = f"user,item,time\n1,a,{NOW}\n"


@pytest.mark.parametrize(
    ("name", "text", "option"),
    [
        ("log.csv", f"{WIDE}\n{WIDE}\n", []),
        ("log.csv", ROW, ["--name=" + "x" * 300]),
        ("log.csv", ROW, ["--user=" + "x" * 100_000]),
        ("log.csv", f"user,item,time\n1,a,{'x' * 100_000}\n", ["--time=time"]),
        ("log.csv", "\ud800,b,c\n1,2,3\n", []),
        ("log.csv.gz", "no gzip", []),
    ],
)
def test_every_error_is_one_short_line(
    run: Run, capsys: pytest.CaptureFixture[str], name: str, text: str, option: list[str]
) -> None:
    assert run(text, *option, name=name) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 1_000


def test_a_folder_has_files_of_the_same_columns(tmp_path: Path, run: Run) -> None:
    (tmp_path / "log").mkdir()
    for name, header in (("a", "user,item,time"), ("b", "user,time,item")):
        (tmp_path / "log" / f"{name}.csv").write_text(f"{header}\nu,1,{NOW}\n")
    assert run(None, name="log") == 2


T = 1_700_000_000
LISTS = {
    "hstu.csv": "user_id,sequence_item_ids,sequence_timestamps,tag\n"
    f'1,"10,11,12","{T + 2},{T + 1},{T}",a\n2,11,{T},b\n',
    "lists.csv": "user;items;times;tag\n"
    f"1;['10', '11', '12'];[{T + 2}, {T + 1}, {T}];a\n2;[\"11\"];[{T}];b\n",
    "pipes.tsv": "user\titem_list\ttimes\ttag\n"
    f"1\t10|11|12\t{T + 2}|{T + 1}|{T}\ta\n2\t11\t{T}\tb\n",
    "numpy.csv": "user,items,times,tag\n"
    f"1,[10 11 12],[{T + 2} {T + 1} {T}],a\n2,[11],[{T}],b\n3,[],[],b\n",
    "lists.jsonl": '{"user": "1", "items": ["10", "11", "12"], "tag": "a", '
    f'"times": [{T + 2}, {T + 1}, {T}]}}\n'
    f'{{"user": "2", "items": ["11"], "times": [{T}], "tag": "b"}}\n',
}


@pytest.mark.parametrize("name", LISTS)
def test_a_row_for_each_user_with_lists(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LISTS[name])
    given = {"name": "shop", "data_path": tmp_path, "overwrite": True, "verbose": False}
    given["max_lost"] = 0.5
    recbole_pos.convert(tmp_path / name, **given)
    assert [[int(x) for x in row[:3]] for row in read_interactions(tmp_path)] == [
        [1, 10, T + 2],
        [1, 11, T + 1],
        [1, 12, T],
        [2, 11, T],
    ]
    if name == "lists.jsonl":  # rows are those of the file, of which none is lost in silence
        (tmp_path / name).write_text("{\n" + LISTS[name].replace(f"{T + 1}", "null"))
        text = repr(recbole_pos.convert(tmp_path / name, **given))
        assert "lists.jsonl:1 (" in text and "lists.jsonl:2" in text.split("lists.jsonl:1 (")[1]
    (tmp_path / name).write_text(re.sub(rf"{T + 2}(, |[,| ])", "", LISTS[name]))
    with pytest.raises(UsageError, match="expected lists of one length"):
        recbole_pos.convert(tmp_path / name, **given)


def test_a_dataset_that_is_replaced_by_less(
    tmp_path: Path, run: Run, recwarn: pytest.WarningsRecorder
) -> None:
    """A new day alone is not the history that a model goes on from; quiet or not, that is said."""
    days = [f"u{n % 3},i{n % 4},{NOW + n}\n" for n in range(24)]
    header = "user,item,time\n"
    assert run(header + "".join(days)) == 0
    assert run(header + "".join(days), "--overwrite") == 0
    assert not [warning for warning in recwarn if issubclass(warning.category, RunWarning)]
    for options in (["--dry_run"], ["--quiet"]):
        with pytest.warns(RunWarning, match="12 interactions replace 24 in .*shop.* `update` "):
            assert run(header + "".join(days[12:]), "--overwrite", *options) == 0
    pd.DataFrame({"user_id:token": ["u1"] * 13}).to_parquet(
        tmp_path / "shop" / "shop.inter.parquet"
    )
    (tmp_path / "shop" / "shop.inter").unlink()
    with pytest.warns(RunWarning, match="12 interactions replace 13 in"):
        assert run(header + "".join(days[12:]), "--overwrite") == 0


def make_rows(number: int) -> list[str]:
    return [f"u{n % 5},i{n % 4},{NOW + n}" for n in range(number)]


@pytest.mark.parametrize("reporting", [[], ["--quiet"]])
def test_lost_rows_are_named_in_one_warning(tmp_path: Path, run: Run, reporting: list[str]) -> None:
    """Those of all tables, but not what an option leaves out, or items without an interaction."""
    items = ["item,brand", *(f"i{n},b" for n in range(4)), *["stock,b"] * 20, "i3,b,x", ",b"]
    (tmp_path / "items.csv").write_text("\n".join(items))
    rows = [*make_rows(50), "u1", "", f",i1,{NOW}", f"u1,i1,{NOW + 99}", f"once,i1,{NOW}"]
    text = "\n".join(["user,item,time", *rows])
    options = ["--items", str(tmp_path / "items.csv"), "--min_user=2", *reporting]
    warning = (
        "left out of shop: 2 of 55 rows of log.csv (broken line: 1, first log.csv:52 (1 cells, the "
        "first line has 3); no user (user): 1, first log.csv:54); 2 of 26 rows of items.csv "
        "(broken line: 1, first items.csv:26 (3 cells, the first line has 2); no item (item): 1, "
        "first items.csv:27)"
    )
    with pytest.warns(RunWarning) as warned:
        assert run(text, *options) == 0
    assert [str(one.message) for one in warned if one.category is RunWarning] == [warning]
    events = read_report(tmp_path)["lines"]["events"]
    assert (events["read"], events["kept"]) == (55, 51)


def test_too_many_lost_rows_are_an_error(tmp_path: Path, run: Run, capsys) -> None:
    """More than a tenth, unless ``max_lost`` says otherwise."""
    text = "\n".join(["user,item,time", *make_rows(18), "u1", f",i1,{NOW}"])
    assert run(text) == 0
    text += f"\n,i1,{NOW}\n"
    assert run(text, "--overwrite") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: 3 of 21 rows of log.csv (broken line: 1, first log.csv:20 (")
    assert "--max_lost" in error
    assert len(read_interactions(tmp_path)) == 18
    assert run(text, "--overwrite", "--max_lost=0.2") == 0
    assert run(text, "--overwrite", "--max_lost=2") == 2


def test_a_user_with_an_empty_list_is_counted(tmp_path: Path, run: Run) -> None:
    text = f"user,items,times,tag\n1,[10 11],[{NOW} {NOW + 1}],a\n2,[],[],b\n3,[11],[{NOW}],b\n"
    assert run(text, "--max_lost=1") == 0
    assert [row[:2] for row in read_interactions(tmp_path)] == [
        ["1", "10"],
        ["1", "11"],
        ["3", "11"],
    ]
    events = read_report(tmp_path)["lines"]["events"]
    assert (events["read"], events["kept"]) == (4, 3)
    assert events["dropped"] == {"no item (item)": {"lines": 1, "first": ["log.csv:3"]}}


@pytest.mark.xfail(
    strict=True,
    reason="nothing is dropped in silence: a quotation mark that is not closed swallows lines, "
    "which count as one or as none; mended with the new reader",
)
@pytest.mark.parametrize(
    "cells", ['"u1,i1,{time},x', 'u1,"i1,{time},x', 'u1,i1,{time},"x'], ids=["user", "item", "last"]
)
def test_lines_within_an_unclosed_quotation_mark_are_counted(
    tmp_path: Path, run: Run, cells: str
) -> None:
    """Each line is kept, or counted under a reason."""
    rows = [f"{row},x" for row in make_rows(18)]
    rows[5] = cells.format(time=NOW + 5)
    text = "\n".join(["user,item,time,word", *rows]) + "\n"
    assert run(text, "--max_lost=1") == 0
    events = read_report(tmp_path)["lines"]["events"]
    assert events["read"] == 18
    assert events["kept"] == len(read_interactions(tmp_path))
