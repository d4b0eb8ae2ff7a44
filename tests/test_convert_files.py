"""recbole-pos convert: what a file is, before anything of it is taken for something."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from recbole_pos.cli.main import main
from recbole_pos.errors import RunWarning
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
def test_items_that_are_in_no_interaction_are_refused(
    tmp_path: Path, run: Run, capsys, items: str, words: str
) -> None:
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
def test_a_quotation_mark_that_is_not_closed_is_an_error_with_its_line(
    tmp_path: Path, run: Run, capsys, later: str
) -> None:
    """Whatever marks the rows after it have; without it, a cell may have several lines."""
    rows = [f"{row},x" for row in make_rows(18)]
    rows[9] = rows[9].removesuffix("x") + later
    assert run("\n".join(["user,item,time,word", *rows])) == 0
    assert len(read_interactions(tmp_path)) == 18
    rows[5] = f'u1,i1,{NOW},"x'
    assert run("\n".join(["user,item,time,word", *rows]), "--overwrite") == 2
    assert "log.csv, line 7: " in capsys.readouterr().err
