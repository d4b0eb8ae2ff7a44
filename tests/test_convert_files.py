"""recbole-pos convert: what a file is, before anything of it is taken for something."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from recbole_pos.cli.main import main
from recbole_pos.yaml_files import read_yaml

NOW = 1_700_000_000
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``recbole-pos convert`` of a file of this text, into ``tmp_path/shop``."""

    def run(text: str, *options: str, name: str = "log.csv") -> int:
        (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        return main(
            ["convert", str(tmp_path / name), "--name=shop", f"--data_path={tmp_path}", *options]
        )

    return run


def interactions(folder: Path) -> list[list[str]]:
    lines = (folder / "shop" / "shop.inter").read_text().splitlines()
    return [line.split("\t") for line in lines[1:]]


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "shop" / "convert.json").read_text())


HEADLESS = {
    "text and dates": "ann,kite,2024-03-02\nbob,owl,2024-03-03\nann,owl,2024-03-04\n",
    "numbers": f"1,1,{NOW}\n2,1,{NOW + 1}\n1,2,{NOW + 2}\n",
    "SASRec": "1 1 1\n1 2 2\n2 1 3\n",
    "one row": f"u1,i1,{NOW}\n",
}


@pytest.mark.parametrize("text", HEADLESS.values(), ids=HEADLESS)
def test_a_file_without_a_header(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    name = "log.txt" if " " in text else "log.csv"
    assert run(text, name=name) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--columns" in error
    form = ["--date_format=s"] if " " in text else []
    assert run(text, "--columns=user,item,time", *form, name=name) == 0
    assert len(interactions(tmp_path)) == text.count("\n")
    assert report(tmp_path)["lines"]["events"]["read"] == text.count("\n")


LISTS = [
    ("u", [7, 8, 9], [NOW, NOW + 1, NOW + 2]),
    ("v", [8], [NOW]),
    ("w", [7, 8], [NOW]),
    ("x", [], []),
]


def as_text(form: str) -> str:
    """The rows of LISTS as csv, of which ``form`` is that of a list of items."""
    return "user;items;times\n" + "".join(
        f"{user};{form.format(repr(list(map(str, items))))};{times}\n"
        for user, items, times in LISTS
    )


WRITTEN = {
    "HSTU.csv": "user_id,sequence_item_ids,sequence_ratings,sequence_timestamps,sex\n"
    f'u,"7,8,9","1,2,3","{NOW},{NOW + 1},{NOW + 2}",F\nv,"8","1","{NOW}",M\n'
    f'w,"7,8","1,2","{NOW}",F\nx,"","","",F\n',
    "quoted.csv": as_text("{}"),
    "json.csv": as_text("{}").replace("'", ""),
    "lines.jsonl": "".join(
        json.dumps(dict(zip(("user", "items", "times"), row, strict=True))) + "\n" for row in LISTS
    ),
    "lists.parquet": "",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_row_for_each_user_with_lists(tmp_path: Path, run: Run, name: str) -> None:
    if name.endswith(".parquet"):
        pd.DataFrame(LISTS, columns=["user", "items", "times"]).to_parquet(tmp_path / name)
        command = ["convert", str(tmp_path / name), "--name=shop", f"--data_path={tmp_path}"]
        assert main(command) == 0
    else:
        assert run(WRITTEN[name], name=name) == 0
    expected = [["u", str(7 + n), str(NOW + n)] for n in range(3)] + [["v", "8", str(NOW)]]
    assert [row[:3] for row in interactions(tmp_path)] == expected
    ((reason, lines),) = report(tmp_path)["lines"]["events"]["dropped"].items()
    line = 3 if name.startswith("l") else 4
    assert reason.startswith("lists")
    assert lines == {"lines": 2, "first": [f"{name}:{line}", f"{name}:{line + 1}"]}


def test_lists_of_names_with_commas_and_lists_that_stay(tmp_path: Path, run: Run) -> None:
    days = ["2024-03-02", "2024-03-03"]
    rows = [
        {"user": "u", "items": ["a, b", "c"], "times": days, "likes": ["x", "y", "z"]},
        {"user": "v", "items": ["c"], "times": days[:1], "likes": ["y", "z"]},
    ]
    assert run("".join(json.dumps(row) + "\n" for row in rows), name="log.jsonl") == 0
    assert [row[1] for row in interactions(tmp_path)] == ["a, b", "c", "c"]
    assert (tmp_path / "shop" / "shop.user").read_text().splitlines()[1:] == ["u\tx y z", "v\ty z"]


def test_order_of_rows_instead_of_times(tmp_path: Path, run: Run) -> None:
    text = "user,item,stars\nu,x,1\nv,x,2\nu,y,3\nu,x,4\n"
    assert run(text) == 2
    assert run(text, "--time", "row_order") == 0
    assert [row[2] for row in interactions(tmp_path)] == ["0", "0", "1", "2"]
    options = read_yaml(tmp_path / "shop" / "shop.yaml")
    assert "timestamp_unit" not in options and options["TIME_FIELD"] == "timestamp"
    assert "time" not in [r["field"] for r in options["for"]["AttrFormer"]["relations"]]
    assert report(tmp_path)["counts"]["first"] is None
    assert run('user,items\nu,"[1, 2]"\nv,[2]\n', "--time=row_order", "--overwrite") == 0
    assert [row[2] for row in interactions(tmp_path)] == ["0", "1", "0"]


def test_ids_that_became_floats_are_the_same_ids(tmp_path: Path, run: Run) -> None:
    text = f"user,item,time\n1034.0,A7,{NOW}\n1034,3.0,{NOW + 1}\n1035.0,3,{NOW + 2}\n"
    assert run(text) == 0
    assert [row[:2] for row in interactions(tmp_path)] == [
        ["1034", "A7"],
        ["1034", "3"],
        ["1035", "3"],
    ]
    assert report(tmp_path)["columns"][0]["notes"]
    versions = ["1.10", "1.1", "1.0", "2.0"]
    rows = "".join(f"1,{version},{NOW}\n" for version in versions)
    assert run(f"user,item,time\n{rows}", "--overwrite") == 0
    assert [row[1] for row in interactions(tmp_path)] == versions


def test_a_time_is_found_by_what_it_holds(tmp_path: Path, run: Run) -> None:
    assert run("user,item,note,moment\nu,i,red,2024-03-02\nu,j,blue,2024-03-03\n") == 0
    assert {row[2] for row in interactions(tmp_path)} == {"1709337600", "1709424000"}


def test_numbers_of_fields_that_are_names(tmp_path: Path, run: Run) -> None:
    text = "user,item,time,shop_id,amount,plz\n"
    assert (
        run(text + "".join(f"u{n},i,{NOW + n},{n % 3},{n % 4},0{n % 5}\n" for n in range(9))) == 0
    )
    kinds = {one["column"]: one["kind"] for one in report(tmp_path)["columns"]}
    assert (kinds["shop_id"], kinds["amount"], kinds["plz"]) == ("token", "float", "token")


@pytest.mark.parametrize("ids", ["1 2", "1.0 2.0", "0001 0002"])
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


@pytest.mark.parametrize("option", ["--type=brand=token", "--table=brand=item", "--rename=brand=x"])
def test_a_column_that_is_named_has_a_value(tmp_path: Path, run: Run, option: str) -> None:
    text = f"user,item,time,brand\nu,1,{NOW},\nv,2,{NOW},NA\n"
    assert run(text, option) == 2
    assert run(text) == 0


def test_exact_copies_are_counted_and_told(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"u{u},i{n},{NOW + n}\n" for u in range(10) for n in range(4)]
    copied = "user,item,time\n" + "".join(row * 2 for row in rows)
    assert run(copied + f"z,i0,{NOW}\nz,i1,{NOW}\nz,i0,{NOW + 9}\n") == 0
    assert report(tmp_path)["counts"]["copies"] == 40
    assert "40 of 83" in capsys.readouterr().out
    rows = [f"u{u},i{n},{NOW + n}\n" for u in range(10) for n in range(4)]
    copied = "user,item,time\n" + "".join(row * 2 for row in rows)
    assert run(copied + f"z,i0,{NOW}\nz,i0,{NOW + 9}\n", "--rm_copies", "--overwrite") == 0
    assert len(interactions(tmp_path)) == 42  # buying again is no copy
    assert [d["lines"] for d in report(tmp_path)["lines"]["events"]["dropped"].values()] == [40]


def test_partitions_are_columns(tmp_path: Path) -> None:
    for place, country in enumerate(("NO", "F%C3%B8r", "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / "log" / "year=2024" / f"country={country}"
        folder.mkdir(parents=True)
        rows = [(place, n, NOW + n) for n in range(3)]
        pd.DataFrame(rows, columns=["user", "item", "time"]).to_parquet(folder / "part-0.parquet")
    assert main(["convert", str(tmp_path / "log"), "--name=shop", f"--data_path={tmp_path}"]) == 0
    users = (tmp_path / "shop" / "shop.user").read_text()
    assert "0\tNO\n" in users and "1\tFør\n" in users and "2\t\n" in users
    assert {"year", "country"} <= {column["column"] for column in report(tmp_path)["columns"]}
    assert not report(tmp_path)["notes"]
    folder = tmp_path / "log" / "year=2024" / "user=7"  # the files have a user
    folder.mkdir()
    rows = pd.DataFrame({"user": [8], "item": [1], "time": [NOW]})
    rows.to_parquet(folder / "part-0.parquet")
    main(["convert", str(tmp_path / "log"), "--name=two", f"--data_path={tmp_path}"])
    assert "8\t" in (tmp_path / "two" / "two.inter").read_text()
    assert "user_folder" in (tmp_path / "two" / "two.inter").read_text()


GOOD = json.dumps({"user": 1, "item": "a", "time": NOW})


BAD = {
    "1,000 deep": '{"user": 2, "item": "a", "x": ' + "[" * 1_000 + "]" * 1_000 + "}",
    "1,000,000 deep": '{"user": 2, "item": "a", "x": ' + "[" * 10**6 + "]" * 10**6 + "}",
    "objects": '{"x": ' * 100_000 + "1" + "}" * 100_000,
    "half a pair": '{"user": "\\ud800", "item": "a", "time": 1700000000}',
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_json_that_no_parser_may_be_given(tmp_path: Path, run: Run, bad: str) -> None:
    text = f"{GOOD}\n{bad}\n{GOOD.replace(' 1,', ' 2,')}\n"
    assert run(text, name="log.jsonl") == 0
    broken = report(tmp_path)["lines"]["events"]["dropped"]["broken line"]
    assert broken["lines"] == 1 and len(broken["first"][0]) < 300
    assert broken["first"][0].startswith("log.jsonl:2 ")


def test_blocks_of_json_count_on(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken rows are numbered through all blocks, and a number beyond 64 bits is no float."""
    monkeypatch.setattr("recbole_pos.conversion.json_lines._BLOCK", 100)
    rows = [json.dumps({"user": 2**64 + n, "item": "a", "time": NOW + n}) for n in range(9)]
    rows[2] = rows[6] = "{"
    assert run("\n".join(rows) + "\n", name="log.jsonl") == 0
    dropped = report(tmp_path)["lines"]["events"]["dropped"]["broken line"]["first"]
    assert [one.split(" ")[0] for one in dropped] == ["log.jsonl:3", "log.jsonl:7"]
    assert interactions(tmp_path)[-1][0] == str(2**64 + 8)


WIDE = ",".join(f"c{n}" for n in range(10_001))
ROW = f"user,item,time\n1,a,{NOW}\n"


@pytest.mark.parametrize(
    ("name", "text", "option"),
    [
        ("log.csv", f"{WIDE}\n{WIDE}\n", ""),
        ("log.csv", ROW, "--items=--"),
        ("log.csv", ROW, "--items=" + "x" * 5_000),
        ("log.csv", ROW, "--name=" + "x" * 300),
        ("log.csv", ROW, "--user=" + "x" * 100_000),
        ("log.csv", ROW, "--type=" + "x" * 100_000),
        ("log.csv", f"user,item,time\n1,a,{'x' * 100_000}\n", "--time=time"),
        ("log.csv", "\ud800,b,c\n1,2,3\n", ""),
        ("log.csv.gz", "no gzip", ""),
    ],
)
def test_every_error_is_one_short_line(
    run: Run, capsys: pytest.CaptureFixture[str], name: str, text: str, option: str
) -> None:
    assert run(text, *filter(None, [option]), name=name) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 1_000


def test_a_folder_has_files_of_the_same_columns(tmp_path: Path, run: Run) -> None:
    (tmp_path / "log").mkdir()
    for name, header in (("log/a.csv", "user,item,time"), ("log/b.csv", "user,time,item")):
        run(f"{header}\nu,1,{NOW}\n", name=name)
    assert main(["convert", str(tmp_path / "log"), f"--data_path={tmp_path}"]) == 2


def test_options_that_would_change_nothing(tmp_path: Path, run: Run) -> None:
    assert run(f"{GOOD}\n", "--columns=user,item,time", name="log.jsonl") == 2
    text = f"u,i,{NOW}\nv,i,{NOW}\n"
    assert run(text, "--columns=user,item,time", "--item_columns=item,brand") == 2
    assert run(text, "--columns=user,item,time", "--time=row_order", "--date_format=s") == 2
