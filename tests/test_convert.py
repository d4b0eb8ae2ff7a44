"""recbole-pos convert: every format gives the same files, every row is kept or counted."""

import json
import os
import shutil
import signal
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
from conftest import fork
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recbole_pos
from recbole_pos.data.atomic_files import TextTable
from recbole_pos.data.loading import locate_dataset
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import read_yaml

CONFIG = {"seq_separator": " ", "memory_limit": "1GB"}
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
    given = {"name": "shop", "verbose": False, **given}
    return recbole_pos.convert(file, data_path=folder, **given)


def read_tables(folder: Path) -> dict[str, bytes]:
    return {file.suffix[1:]: file.read_bytes() for file in (folder / "shop").glob("shop.*")}


FORMATS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "orders.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "rows.csv": lambda frame, path: frame.to_csv(path, sep=";", lineterminator="\r\n"),
    "orders.CSV.GZ": lambda frame, path: frame.to_csv(path, index=False),
    "excel.csv": lambda frame, path: frame.to_csv(path, index=False, encoding="utf-8-sig"),
    "utf-16.csv": lambda frame, path: frame.to_csv(path, index=False, encoding="utf-16"),
    "orders.jsonl.gz": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "lists.parquet": lambda f, path: f.assign(tags=f.tags.str.split("|")).to_parquet(path),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    make_orders().to_csv(folder / "orders.csv", index=False)
    convert(folder / "orders.csv", folder, **GIVEN)
    return read_tables(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_give_the_same_files(tmp_path: Path, name: str, expected: dict[str, bytes]) -> None:
    FORMATS[name](make_orders(), tmp_path / name)
    encoding = "utf-16" if "utf-16" in name else "utf-8"
    convert(tmp_path / name, tmp_path, encoding=encoding, **GIVEN)
    assert read_tables(tmp_path) == expected


def test_columns_go_where_they_belong(tmp_path: Path) -> None:
    make_orders().to_csv(tmp_path / "orders.csv", index=False)
    report = convert(tmp_path / "orders.csv", tmp_path, **GIVEN)
    items, users = (TextTable(tmp_path / "shop" / f"shop.{s}", CONFIG) for s in ("item", "user"))
    assert items.kinds == {"item_id": "token", "brand": "token", "tags": "token_seq"}
    assert users.kinds == {"user_id": "token", "country": "token"}
    assert set(users.read(["user_id"])["user_id"]) == set(USERS)
    brands = items.read(["item_id", "brand"])
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


def test_items_and_users_of_their_own(tmp_path: Path) -> None:
    events = f"user,item,time,price\n1,a,{NOW},3\n1,b,{NOW + 1},4\n2,a,{NOW + 2},2\n"
    (tmp_path / "events.csv").write_text(events)
    items = 'item,name,genres,price\na,"Ow\nl",x y|z,9\nz,No,,1\na,Kite,,\n,Lost,,\n'
    (tmp_path / "items.csv").write_text(items)
    (tmp_path / "users.tsv").write_text("id\tage\n1\t33\n2\t\n")
    tables = {"items": tmp_path / "items.csv", "users": tmp_path / "users.tsv", "max_lost": 0.5}
    given = {"types": {"genres": "token_seq"}, "rename": {"name": "title"}}
    given["tables"] = {"price": "inter"}
    report = convert(tmp_path / "events.csv", tmp_path, **tables, **given)
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
    options = {"max_lost": 1, "overwrite": True, **given}
    found = convert(tmp_path / "log.jsonl", tmp_path, **options).lines["events"]
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
    (GOOD.replace(",3", ",x"), {"types": ["stars=float"]}, "'x'"),
    (GOOD, {"name": "a/b"}, "^name: "),
    (f"user,item\n1,a,{NOW}\n", {}, "log.csv:2"),
    (GOOD + '2,"b,1700000001,4\n', {}, "log.csv, line 3: .*--no_quotes"),
    ('{"user": 1, "item": ["a"], "time": 1}', {"file": "x.jsonl"}, "item: found lists.*explode"),
    (GOOD.replace("a,", "é,").encode("cp1252"), {}, "see --encoding"),
    ("[\n{}]", {"file": "x.jsonl"}, "x.jsonl:1 .no json object"),
    (GOOD.replace("stars", "item"), {}, "two columns are called 'item'"),
    (GOOD, {"file": "x.xlsx"}, "Dataset.from_frame"),
    (GOOD.replace(str(NOW), "2024-03-02"), {"date_format": "%Y/%m/%d"}, "2024-03-02"),
]


@pytest.mark.parametrize(("text", "options", "named"), WRONG)
def test_what_is_refused(
    tmp_path: Path, text: str | bytes, options: dict[str, Any], named: str
) -> None:
    options = {"file": "log.csv", **options}
    file = tmp_path / options.pop("file")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=named):
        convert(file, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_existing_dataset_stays(tmp_path: Path) -> None:
    """Until ``overwrite`` replaces all of it, the tables of items and users, too."""
    make_orders().to_csv(tmp_path / "orders.csv", index=False)
    convert(tmp_path / "orders.csv", tmp_path, **ROLES)
    (tmp_path / "shop" / "shop.inter").rename(tmp_path / "shop" / "shop.inter.parquet")
    before = read_tables(tmp_path)
    make_orders()[list(ROLES.values())].to_csv(tmp_path / "fewer.csv", index=False)
    with pytest.raises(UsageError, match="with --overwrite$"):
        convert(tmp_path / "fewer.csv", tmp_path, **ROLES)
    assert read_tables(tmp_path) == before
    convert(tmp_path / "fewer.csv", tmp_path, overwrite=True, **ROLES)
    assert set(read_tables(tmp_path)) == {"inter", "yaml"}


def write_orders(path: Path, brand: str) -> Path:
    rows = [f"u{n % 3},i{n % 4},{NOW + n},{brand}{n % 4}" for n in range(24)]
    path.write_text("\n".join(["user,item,time,brand", *rows]) + "\n")
    return path


def read_folder(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_killed_while_it_replaces_a_dataset(tmp_path: Path) -> None:
    """The next reader finds the old one or the new one, whole."""
    folder, before = tmp_path / "data", tmp_path / "before"
    convert(write_orders(tmp_path / "a.csv", "old"), before)
    (before / "shop" / "notes.txt").write_text("mine")
    file = write_orders(tmp_path / "b.csv", "new")

    def convert_and_die() -> int:
        """Convert, and die at the step of this number that touches the folder of the data."""
        left = len(found)

        def count(event: str, details: tuple) -> None:
            nonlocal left
            if event in ("os.rename", "shutil.rmtree") and str(folder) in str(details[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        convert(file, folder, overwrite=True)
        return 0

    found: list[dict[str, bytes]] = []
    killed = True
    while killed:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        killed = fork(convert_and_die).returncode == -signal.SIGKILL
        locate_dataset("shop", folder)  # with which every reader begins
        found.append(read_folder(folder / "shop"))
        found[-1].pop("lock", None)  # of the process that was killed
    *others, new = found
    assert len(others) >= 5 and new["notes.txt"] == b"mine" and b"new" in new["shop.item"]
    assert all(one in (read_folder(before / "shop"), new) for one in others)
