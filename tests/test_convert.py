"""recbole-pos convert: every format gives the same files, every row is kept or counted."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from conftest import fork, run_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.data.atomic_files import TextTable
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import read_yaml

CONFIG = {"field_separator": "\t", "seq_separator": " ", "encoding": "utf-8", "memory_limit": "1GB"}
USERS = ["ann lee", "Zoë", "李雷", 'o"neil', "a\tb", "'q'", "x,y", "007"]
NOW = 1_700_000_000


def make_orders(events: int = 600, seed: int = 0) -> pd.DataFrame:
    """Orders with names of all kinds, missing cells, and a few contradictions."""
    rng = np.random.default_rng(seed)
    item, user = rng.integers(0, 30, events), rng.integers(0, len(USERS), events)
    frame = pd.DataFrame(
        {
            "customer": np.array(USERS, object)[user],
            "Produkt Größe": np.array([f"item {i}" for i in range(30)], object)[item],
            "bought at": NOW + np.sort(rng.integers(0, 10**6, events)),
            "stars": rng.integers(1, 6, events).astype(float),
            "brand": np.array([f"Brand {i % 7}" for i in range(30)], object)[item],
            "tags": np.array([f"t{i % 3}|t{i % 4 + 3}" for i in range(30)], object)[item],
            "country": np.array(["NO", "IS", "日本"], object)[user % 3],
        }
    )
    frame.loc[rng.random(events) < 0.2, "stars"] = np.nan
    frame.loc[rng.random(events) < 0.2, "brand"] = None
    frame.loc[[100, 200], "brand"] = "Other"
    return frame


ROLES = {"user": "customer", "item": "Produkt Größe", "time": "bought at"}
GIVEN = {**ROLES, "types": {"tags": "token_seq"}}


def convert(file: Any, folder: Path, **given: Any) -> Any:
    return recbole_pos.convert(
        file, **{"name": "shop", "verbose": False, **given}, data_path=folder
    )


def read_tables(folder: Path) -> dict[str, bytes]:
    return {file.suffix[1:]: file.read_bytes() for file in (folder / "shop").glob("shop.*")}


def as_hub(frame: pd.DataFrame, path: Path) -> None:
    (path / "data").mkdir(parents=True)
    (path / "dataset_infos.json").write_text("{}")
    for place, part in enumerate((frame[:250], frame[250:])):
        part.to_parquet(path / "data" / f"train-0000{place}-of-00002.parquet")


def as_json(frame: pd.DataFrame, path: Path) -> None:
    text = frame.to_json(orient="records", lines=True, force_ascii=False)
    path.write_bytes(gzip.compress(text.encode()))


FORMATS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "orders.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "rows.csv": lambda frame, path: frame.to_csv(path, sep=";", lineterminator="\r\n"),
    "orders.CSV.GZ": lambda frame, path: frame.to_csv(path, index=False),
    "excel.csv": lambda frame, path: frame.to_csv(path, index=False, encoding="utf-8-sig"),
    "utf-16.csv": lambda frame, path: frame.to_csv(path, index=False, encoding="utf-16"),
    "orders.jsonl.gz": as_json,
    "lists.parquet": lambda frame, path: frame.assign(tags=frame["tags"].str.split("|")).to_parquet(
        path
    ),
    "hub": as_hub,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    make_orders().to_csv(folder / "orders.csv", index=False)
    convert(folder / "orders.csv", folder, **GIVEN)
    return read_tables(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_files(
    tmp_path: Path, name: str, expected: dict[str, bytes]
) -> None:
    FORMATS[name](make_orders(), tmp_path / name)
    encoding = "utf-16" if "utf-16" in name else "utf-8"
    convert(tmp_path / name, tmp_path, encoding=encoding, **GIVEN)
    assert read_tables(tmp_path) == expected


def test_columns_go_where_they_belong(tmp_path: Path) -> None:
    make_orders().to_csv(tmp_path / "orders.csv", index=False)
    report = convert(tmp_path / "orders.csv", tmp_path, **GIVEN)
    tables = {s: TextTable(tmp_path / "shop" / f"shop.{s}", CONFIG) for s in ("item", "user")}
    assert tables["item"].kinds == {"item_id": "token", "brand": "token", "tags": "token_seq"}
    assert tables["user"].kinds == {"user_id": "token", "country": "token"}
    assert set(tables["user"].read(["user_id"])["user_id"]) == set(USERS)
    brands = tables["item"].read(["item_id", "brand"])
    assert {f"Brand {int(i.split()[1]) % 7}" for i in brands["item_id"]} >= set(brands["brand"])
    (brand,) = (column for column in report.columns if column.field == "brand")
    assert brand.notes[-1].startswith("2 rows differ from the first of the item")
    assert brand.notes[-1].endswith("first orders.csv:102, orders.csv:202")
    assert asdict(report) == json.loads((tmp_path / "shop" / "convert.json").read_text())
    options = read_yaml(tmp_path / "shop" / "shop.yaml")
    assert options["timestamp_unit"] == "seconds"
    assert options["load_col"]["inter"] == ["user_id", "item_id", "timestamp", "stars"]
    related = [entry["field"] for entry in options["for"]["AttrFormer"]["relations"]]
    assert related == ["brand", "tags", "country", "time", "position"]


def test_all_rows_decide_where_a_column_belongs(tmp_path: Path, monkeypatch) -> None:
    """A log that begins with one kind of event, longer than a block, keeps the others' values."""
    monkeypatch.setattr("recbole_pos.conversion.reading._BLOCK_BYTES", 1 << 10)
    kinds = ["view"] * 1000 + ["buy"] * 90
    rows = [f"u{n % 40},i{n % 30},{NOW + n},{kind},b{n % 3}" for n, kind in enumerate(kinds)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time,event_type,brand", *rows]))
    report = convert(tmp_path / "log.csv", tmp_path)
    assert [column.table for column in report.columns[3:]] == ["inter", "item"]
    lines = read_tables(tmp_path)["inter"].decode().splitlines()[1:]
    assert [line.split("\t")[3] for line in lines] == kinds


def test_items_and_users_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text(
        f"user,item,time,price\n1,a,{NOW},3\n1,b,{NOW + 1},4\n2,a,{NOW + 2},2\n"
    )
    (tmp_path / "items.csv").write_text(
        'item,name,genres,price\na,"Ow\nl",x y|z,9\nz,No,,1\na,Kite,,\n,Lost,,\n'
    )
    (tmp_path / "users.tsv").write_text("id\tage\n1\t33\n2\t\n")
    given = {"items": tmp_path / "items.csv", "users": tmp_path / "users.tsv", "max_lost": 0.5}
    given |= {"tables": {"price": "inter"}, "rename": {"name": "title"}}
    given |= {"types": {"genres": "token_seq"}}
    report = convert(tmp_path / "events.csv", tmp_path, **given)
    files = read_tables(tmp_path)
    assert files["item"].decode().splitlines() == [
        "item_id:token\ttitle:token\tgenres:token_seq\tprice:float",
        "a\tOw l\tx y|z\t9",
        "b\t\t\t",
    ]
    assert files["user"].decode().splitlines() == ["user_id:token\tage:float", "1\t33", "2\t"]
    assert files["inter"].decode().splitlines()[0].endswith("price_2:float")
    assert read_yaml(tmp_path / "shop" / "shop.yaml")["seq_separator"] == "|"
    assert set(report.lines["items"].dropped) == {"no item (item)", "item without an interaction"}
    (title,) = (column for column in report.columns if column.field == "title")
    assert title.notes[-1].endswith("first items.csv:5")


WITH_FAULTS = """customer,product,time
ann,owl,2024-03-02 10:00:00
ann,owl
,owl,2024-03-02 10:00:00

ann,NA,2024-03-02 10:00:00
ann,owl,
ann,owl,soon
"two
lines",owl,2024-03-02 10:00:00
ann,"the ""owl"" 1",2024-03-02 10:00:00,x
[PAD],owl,2024-03-02 10:00:00
ann,kite,2024-03-02T11:00:00+01:00
"""


def test_every_row_is_counted_under_its_number(tmp_path: Path, capsys) -> None:
    (tmp_path / "orders.csv").write_text(WITH_FAULTS)
    report = recbole_pos.convert(tmp_path / "orders.csv", data_path=tmp_path, max_lost=1)
    lines = report.lines["events"]
    broken, wide = lines.dropped.pop("broken line")["first"]
    assert broken == "orders.csv:3 (2 cells, the first line has 3)"
    assert wide == "orders.csv:11 (4 cells, the first line has 3)"
    assert {reason: d["first"] for reason, d in lines.dropped.items()} == {
        "empty line": ["orders.csv:5"],
        "no user (customer)": ["orders.csv:4"],
        "no item (product)": ["orders.csv:6"],
        "no time (time)": ["orders.csv:7"],
        "time cannot be read (time)": ["orders.csv:8"],
        "user with a line break, or called [PAD]": ["orders.csv:9", "orders.csv:12"],
    }
    assert (lines.read, lines.kept) == (11, 2)
    shown = capsys.readouterr().out
    assert "dropped: no user" in shown and "guessed: --user=customer, --item=product" in shown
    assert shown.splitlines()[-1] == report.command
    assert report.command == f"recbole-pos run -m PosSASRec -d orders --data_path={tmp_path}"


NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
TIME = st.sampled_from(["1700000000", "1700000001.5", "", "?"])


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(st.tuples(NAME, NAME, TIME, NAME), min_size=1, max_size=8))
def test_what_is_kept_comes_back(tmp_path: Path, rows: list[tuple[str, ...]]) -> None:
    frame = pd.DataFrame([("u", "i", "1700000000", "x"), *rows], columns=["u", "i", "t", "x"])
    lines = frame.to_json(orient="records", lines=True, force_ascii=False)
    (tmp_path / "log.jsonl").write_text(lines, encoding="utf-8")
    given = {"user": "u", "item": "i", "time": "t", "tables": {"x": "inter"}, "types": ["x=token"]}
    given["max_lost"] = 1
    found = convert(tmp_path / "log.jsonl", tmp_path, overwrite=True, **given).lines["events"]
    assert found.read == len(frame)
    assert found.kept + sum(d["lines"] for d in found.dropped.values()) == found.read
    lost = {int(place.split(":")[1]) - 1 for d in found.dropped.values() for place in d["first"]}
    kept = frame.drop(index=list(lost))
    file = TextTable(tmp_path / "shop" / "shop.inter", CONFIG)
    table = file.read(file.kinds)
    assert table["user_id"].tolist() == kept["u"].tolist()
    assert table["item_id"].tolist() == kept["i"].tolist()
    assert table["timestamp"].tolist() == kept["t"].astype(float).tolist()


def test_decimals_are_ids_and_times(tmp_path: Path) -> None:
    """Ids with all digits, without the zeros of their scale."""
    names = ["12345678901234567890", "12345678901234567891", "10"]
    ids = pa.array(map(Decimal, names), pa.decimal128(30, 9))
    times = pa.array([Decimal(NOW + n) for n in range(3)], pa.decimal128(38, 0))
    convert(pa.table({"user": ids.dictionary_encode(), "item": ids, "time": times}), tmp_path)
    found = pd.read_csv(tmp_path / "shop" / "shop.inter", sep="\t", dtype=str)
    assert found["user_id:token"].tolist() == found["item_id:token"].tolist() == names
    assert found["timestamp:float"].tolist() == [str(NOW + n) for n in range(3)]


GOOD = f"user,item,time,stars\n1,a,{NOW},3\n"
WRONG: list[tuple[str | bytes, dict[str, Any], str]] = [
    (GOOD, {"user": "usr"}, "^user: found no column 'usr' .did you mean user"),
    (GOOD.replace("item", "thing"), {}, "name it with --item=COLUMN"),
    (GOOD, {"types": {"starz": "float"}}, "^type: .*starz"),
    (GOOD.replace(",3", ",x"), {"types": ["stars=float"]}, "'x'"),
    (GOOD, {"name": "a/b"}, "^name: "),
    (GOOD, {"timezone": "Mars"}, "^timezone: "),
    (f"user,item\n1,a,{NOW}\n", {}, "log.csv:2"),
    ("user,item,time\n", {}, "log.csv"),
    (GOOD + '2,"b,1700000001,4\n', {}, "log.csv, line 3: .*--no_quotes"),
    ('{"user": 1, "item": ["a"], "time": 1}', {"file": "x.jsonl"}, "item: found lists.*explode"),
    ("no gzip", {"file": "x.csv.gz"}, "x.csv.gz"),
    (GOOD.replace("a,", "é,").encode("cp1252"), {}, "see --encoding"),
    ("[\n{}]", {"file": "x.jsonl"}, "x.jsonl:1 .no json object"),
    (GOOD.replace("stars", "item"), {}, "two columns are called 'item'"),
    (GOOD, {"file": "x.xlsx"}, "Dataset.from_frame"),
    (GOOD.replace(str(NOW), "02/03/2024"), {}, "such as --date_format="),
    (GOOD.replace(str(NOW), "2024-03-02"), {"date_format": "%Y/%m/%d"}, "2024-03-02"),
]


@pytest.mark.parametrize(("text", "options", "named"), WRONG)
def test_what_cannot_be_converted(
    tmp_path: Path, text: str | bytes, options: dict[str, Any], named: str
) -> None:
    options = {"file": "log.csv", **options}
    file = tmp_path / options.pop("file")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=named):
        convert(file, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".inter", ".inter.parquet"])
def test_an_existing_dataset_stays(tmp_path: Path, suffix: str) -> None:
    """Until ``overwrite`` replaces all of it, the tables of items and users, too."""
    make_orders().to_csv(tmp_path / "orders.csv", index=False)
    convert(tmp_path / "orders.csv", tmp_path, **ROLES)
    (tmp_path / "shop" / "shop.inter").rename(tmp_path / "shop" / f"shop{suffix}")
    before = read_tables(tmp_path)
    make_orders()[list(ROLES.values())].to_csv(tmp_path / "fewer.csv", index=False)
    with pytest.raises(UsageError, match="with --overwrite$"):
        convert(tmp_path / "fewer.csv", tmp_path, **ROLES)
    convert(tmp_path / "fewer.csv", tmp_path, dry_run=True, **ROLES)
    assert read_tables(tmp_path) == before
    convert(tmp_path / "fewer.csv", tmp_path, overwrite=True, **ROLES)
    assert set(read_tables(tmp_path)) == {"inter", "yaml"}


def test_conversion_does_not_wait_for_torch(tmp_path: Path) -> None:
    """What it writes is trained by test_readme.py."""
    write_orders(tmp_path / "orders.csv", "b")
    code = (
        "import sys\n"
        "from recbole_pos.cli.main import main\n"
        "assert main(['convert', 'orders.csv']) == 0\n"
        "assert not {'torch', 'recbole'} & {*sys.modules}, 'slow to import'"
    )
    printed = run_python("-c", code, cwd=tmp_path)
    assert printed.splitlines()[-1] == "recbole-pos run -m PosSASRec -d orders"


TABLES = {"shop/shop.inter", "shop/shop.item", "shop/shop.yaml", "shop/convert.json"}


def write_orders(path: Path, brand: str) -> Path:
    rows = [f"u{n % 3},i{n % 4},{NOW + n},{brand}{n % 4}" for n in range(24)]
    path.write_text("\n".join(["user,item,time,brand", *rows]) + "\n")
    return path


def test_killed_while_it_replaces_a_dataset(tmp_path: Path) -> None:
    """The next reader finds the old one or the new one; another run then replaces it whole."""
    folder = tmp_path / "data"
    convert(write_orders(tmp_path / "a.csv", "old"), folder)
    (folder / "shop" / "notes.txt").write_text("mine")
    old = {name: (folder / name).read_text() for name in TABLES}
    worker = Path(__file__).with_name("killed_convert.py")
    file = write_orders(tmp_path / "b.csv", "new")
    command = [sys.executable, str(worker), str(file), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) > 5 and not kills[-1]["killed"]
    new = {name: kills[-1]["again"][name] for name in TABLES}
    assert new["shop/shop.item"] != old["shop/shop.item"]
    for kill in kills:
        found = {name: text for name, text in kill["after"].items() if name in TABLES}
        assert found in (old, new) and "shop/notes.txt" in kill["after"]
        assert kill["again"] == {**new, "shop/notes.txt": "mine"}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    convert(write_orders(tmp_path / "a.csv", "old"), folder)
    before = {file.name: file.read_bytes() for file in (folder / "shop").iterdir()}
    file = write_orders(tmp_path / "a.csv", "new" * 1000)
    command = ["convert", str(file), "--name=shop", f"--data_path={folder}", "--overwrite"]

    def convert_on_a_small_disk() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
        return main(command)

    done = fork(convert_on_a_small_disk)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: cannot write") and done.stderr.count("\n") == 1
    assert [file.name for file in folder.iterdir()] == ["shop"]
    assert {file.name: file.read_bytes() for file in (folder / "shop").iterdir()} == before
    assert main(command) == 0
