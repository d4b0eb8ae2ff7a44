"""recbole-pos convert: every format gives the same files."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import recbole_pos
from recbole_pos.data.tables import TextTable
from recbole_pos.errors import UsageError
from recbole_pos.yaml_files import read_yaml

CONFIG = {"field_separator": "\t", "seq_separator": " ", "encoding": "utf-8"}
USERS = ["ann lee", "Zoë", "李雷", 'o"neil', "a\tb", "'q'", "x,y", "007"]


def shop(events: int = 600, seed: int = 0) -> pd.DataFrame:
    """Orders with names of all kinds, missing cells, and a few contradictions."""
    rng = np.random.default_rng(seed)
    item, user = rng.integers(0, 30, events), rng.integers(0, len(USERS), events)
    frame = pd.DataFrame(
        {
            "customer": np.array(USERS, object)[user],
            "Produkt Größe": np.array([f"item {i}" for i in range(30)], object)[item],
            "bought at": 1.7e9 + np.sort(rng.integers(0, 10**6, events)),
            "stars": rng.integers(1, 6, events).astype(float),
            "brand": np.array([f"Brand {i % 7}" for i in range(30)], object)[item],
            "tags": np.array([f"t{i % 3}|t{i % 4 + 3}" for i in range(30)], object)[item],
            "country": np.array(["NO", "IS", "日本"], object)[user % 3],
        }
    )
    frame["bought at"] = frame["bought at"].astype("int64")
    frame.loc[rng.random(events) < 0.2, "stars"] = np.nan
    frame.loc[rng.random(events) < 0.2, "brand"] = None
    frame.loc[[100, 200], "brand"] = "Other"
    return frame


GIVEN: dict[str, Any] = {
    "name": "shop",
    "user": "customer",
    "item": "Produkt Größe",
    "time": "bought at",
    "verbose": False,
}


def written(folder: Path) -> dict[str, bytes]:
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
    shop().to_csv(folder / "orders.csv", index=False)
    recbole_pos.convert(folder / "orders.csv", data_path=folder, **GIVEN)
    return written(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_files(
    tmp_path: Path, name: str, expected: dict[str, bytes]
) -> None:
    FORMATS[name](shop(), tmp_path / name)
    given = {**GIVEN, "encoding": "utf-16" if "utf-16" in name else "utf-8"}
    recbole_pos.convert(tmp_path / name, data_path=tmp_path, **given)
    assert written(tmp_path) == expected


def test_columns_go_where_they_belong(tmp_path: Path) -> None:
    shop().to_csv(tmp_path / "orders.csv", index=False)
    report = recbole_pos.convert(tmp_path / "orders.csv", data_path=tmp_path, **GIVEN)
    tables = {s: TextTable(tmp_path / "shop" / f"shop.{s}", CONFIG) for s in ("item", "user")}
    assert tables["item"].columns == {"item_id": "token", "brand": "token", "tags": "token_seq"}
    assert tables["user"].columns == {"user_id": "token", "country": "token"}
    assert set(tables["user"].read(["user_id"])["user_id"]) == set(USERS)
    brands = tables["item"].read(["item_id", "brand"])
    assert {f"Brand {int(i.split()[1]) % 7}" for i in brands["item_id"]} >= set(brands["brand"])
    (brand,) = (column for column in report.columns if column.field == "brand")
    assert "of 600 interactions have none" in brand.notes[0]
    found = report.contradictions["brand"]
    assert (found["lines"], found["first"]) == (2, ["orders.csv:102", "orders.csv:202"])
    assert report.as_json() == json.loads((tmp_path / "shop" / "convert.json").read_text())
    options = read_yaml(tmp_path / "shop" / "shop.yaml")
    assert options["timestamp_unit"] == "seconds"
    assert options["load_col"]["inter"] == ["user_id", "item_id", "timestamp", "stars"]
    related = [entry["field"] for entry in options["for"]["AttrFormer"]["relations"]]
    assert related == ["brand", "tags", "country", "time", "position"]


def test_items_and_users_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text(
        "user,item,time,price\n1,a,1700000000,3\n1,b,1700000001,4\n2,a,1700000002,2\n"
    )
    (tmp_path / "items.csv").write_text(
        'item,name,genres,price\na,"Ow\nl","[""x y"", ""z""]",9\nz,No,[],1\na,Kite,,\n,Lost,,\n'
    )
    (tmp_path / "users.tsv").write_text("id\tage\n1\t33\n2\t\n")
    report = recbole_pos.convert(
        tmp_path / "events.csv",
        items=tmp_path / "items.csv",
        users=tmp_path / "users.tsv",
        name="shop",
        data_path=tmp_path,
        tables={"price": "inter"},
        rename={"name": "title"},
        verbose=False,
    )
    files = written(tmp_path)
    assert files["item"].decode().splitlines() == [
        "item_id:token\ttitle:token\tgenres:token_seq\tprice:float",
        "a\tOw l\tx y|z\t9",
        "b\t\t\t",
    ]
    assert files["user"].decode().splitlines() == ["user_id:token\tage:float", "1\t33", "2\t"]
    assert files["inter"].decode().splitlines()[0].endswith("price_2:float")
    assert read_yaml(tmp_path / "shop" / "shop.yaml")["seq_separator"] == "|"
    assert report.lines["items"].kept == 2
    assert set(report.lines["items"].dropped) == {"no item (item)", "item without an event"}
    assert report.contradictions["title"]["first"] == ["items.csv:4"]
    assert "1 of 2 items with events have no line in items.csv" in report.notes[0]


def test_core_repeats_until_nothing_changes(tmp_path: Path) -> None:
    pairs = [("u", "a"), ("u", "b"), ("v", "a"), ("v", "b"), ("w", "a"), ("w", "c")]
    lines = [f"{u},{i},{1700000000 + n}" for n, (u, i) in enumerate(pairs)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *lines]) + "\n")
    report = recbole_pos.convert(tmp_path / "log.csv", data_path=tmp_path, core=2, verbose=False)
    assert report.counts["events"] == 4
    assert report.lines["events"].dropped == {
        "item with under 2 events": {"lines": 1, "first": ["log.csv:7"]},
        "user with under 2 events": {"lines": 1, "first": ["log.csv:6"]},
    }
    with pytest.raises(UsageError, match="lower min_user, min_item or core"):
        recbole_pos.convert(tmp_path / "log.csv", name="x", data_path=tmp_path, core=9)


GOOD = "user,item,time,stars\n1,a,1700000000,3\n"
WRONG: list[tuple[str | bytes, dict[str, Any], str]] = [
    (GOOD, {"user": "usr"}, "user"),
    (GOOD.replace("item", "thing"), {}, "--item"),
    (GOOD.replace("stars", "product"), {}, "--item"),
    (GOOD, {"types": {"starz": "float"}}, "type: .*starz"),
    (GOOD.replace(",3", ",x"), {"types": ["stars=float"]}, "'x'"),
    (GOOD, {"name": "a/b"}, "name: "),
    (GOOD, {"item": "user", "user": "user"}, "user"),
    (GOOD, {"time": "stars"}, "stars"),
    ("user,item,time\n", {}, "log.csv"),
    ("user,item\n1,a,1700000000\n", {}, "log.csv:2"),
    (GOOD.replace("a,", "é,").encode("cp1252"), {}, "--encoding"),
    ("[\n{}]", {"file": "x.jsonl"}, "jq -c '.\\[\\]' x.jsonl > x-lines.jsonl"),
    (GOOD, {"file": "x.xlsx"}, "tsv"),
    (GOOD, {"file": "x.parquet"}, "parquet"),
    (GOOD.replace("1700000000", "02/03/2024"), {}, "--date_format"),
]


@pytest.mark.parametrize(("text", "options", "named"), WRONG)
def test_what_cannot_be_converted(
    tmp_path: Path, text: str | bytes, options: dict[str, Any], named: str
) -> None:
    options = dict(options)
    file = tmp_path / options.pop("file", "log.csv")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=named):
        recbole_pos.convert(file, data_path=tmp_path / "out", verbose=False, **options)
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_is_there_stays(tmp_path: Path) -> None:
    shop().to_csv(tmp_path / "orders.csv", index=False)
    recbole_pos.convert(tmp_path / "orders.csv", data_path=tmp_path, **GIVEN)
    before = written(tmp_path)
    fewer = shop()[["customer", "Produkt Größe", "bought at"]]
    fewer.to_csv(tmp_path / "fewer.csv", index=False)
    with pytest.raises(UsageError, match="--overwrite"):
        recbole_pos.convert(tmp_path / "fewer.csv", data_path=tmp_path, **GIVEN)
    recbole_pos.convert(tmp_path / "fewer.csv", data_path=tmp_path, dry_run=True, **GIVEN)
    assert written(tmp_path) == before
    recbole_pos.convert(tmp_path / "fewer.csv", data_path=tmp_path, overwrite=True, **GIVEN)
    assert set(written(tmp_path)) == {"inter", "yaml"}


@pytest.mark.slow
def test_from_the_command_line_to_an_epoch(tmp_path: Path) -> None:
    shop(3000).to_csv(tmp_path / "orders.csv", index=False)
    command = [sys.executable, "-m", "recbole_pos.cli.main", "convert", "orders.csv"]
    given = ["--user", "customer", "--item", "Produkt Größe", "--time", "bought at"]
    done = subprocess.run(
        [*command, "--name", "shop", *given], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "recbole-pos run -m PosSASRec -d shop", done.stderr
    code = "import sys, recbole_pos as r; r.convert; print({'torch', 'recbole'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"
    for model in ("TORoPE", "AttrFormer"):
        result = recbole_pos.run(
            model,
            str(tmp_path / "dataset" / "shop") + "/",
            config_dict={"epochs": 1, "hidden_size": 16},
            run_dir=tmp_path / model,
            verbose=False,
        )
        assert (result.dataset, result.epochs) == ("shop", 1)
