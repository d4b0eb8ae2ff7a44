"""Public datasets: raw files as their sources write them, and what is built of them."""

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.public import build_dataset as building
from recbole_pos.public.datasets import RECIPES, Tables, read_public_datasets
from recbole_pos.yaml_files import DATASETS, read_yaml

USERS, ITEMS = 7, 6


def zipped(path: Path, members: dict[str, str], encoding: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(f"{path.stem}/{name}", text.encode(encoding))
    return path


# --- recipes ---


def rows(frame: pd.DataFrame) -> list[list[Any]]:
    return frame.astype(object).where(frame.notna(), None).values.tolist()


def test_movielens_with_a_header(tmp_path: Path) -> None:
    members = {
        "ratings.csv": "userId,movieId,rating,timestamp\n1,10,3.5,978300760\n",
        "movies.csv": 'movieId,title,genres\n10,"One, A (1995)",Comedy|Drama\n'
        "11,Untitled,(no genres listed)\n",
    }
    tables = RECIPES["movielens"](zipped(tmp_path / "ml-25m.zip", members, "utf-8"))
    assert rows(tables.interactions) == [["1", "10", "978300760", "3.5"]]
    one, untitled = rows(tables.items)
    assert one == ["10", "One, A", "1995", ["Comedy", "Drama"]]
    assert untitled == ["11", "Untitled", None, [""]]


def test_amazon(tmp_path: Path) -> None:
    """The source writes dicts as Python does; what has no review is left out."""
    product = {"asin": "B1", "price": 9.5, "brand": 'Fj\xf6rd\'s "&" Co'}
    product |= {"categories": [["Beauty", "Hair"], ["Beauty", "Tools"]]}
    product |= {"related": {"also_bought": ["B1", "B9"]}}
    texts = {
        "reviews.json.gz": '{"reviewerID": "A1", "asin": "B1", "unixReviewTime": 978300760}\n',
        "meta.json.gz": f"{product}\n{ {**product, 'asin': 'B9'} }\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    tables = RECIPES["amazon"](*(tmp_path / name for name in texts))
    assert rows(tables.interactions) == [["A1", "B1", 978300760]]
    (item,) = tables.items.to_dict("records")
    assert item["brand"] == product["brand"] and item["categories"] == ["Beauty", "Hair", "Tools"]
    assert item["also_bought"] == ["B1"] and item["also_viewed"] == []


REVIEW = {"user_id": "u1", "business_id": "b1", "date": "2018-03-02 10:00:01"}
FOURSQUARE = "1\t3\t4bf5\tCaf\xe9\t40.7\t-74.0\t-240\tTue Apr 03 02:00:09 +0000 2012"


@pytest.mark.parametrize(
    ("recipe", "text", "interactions"),
    [
        ("yelp", json.dumps(REVIEW), [["u1", "b1", 1519984801.0]]),
        (
            "diginetica",  # a row without a date has no time: 1677 would be one
            "sessionId;userId;itemId;timeframe;eventdate\n1;NA;5;1500;2016-05-01\n1;NA;6;9;",
            [["1", "5", 1462060801.5], ["1", "6", None]],
        ),
        ("yoochoose", "1,2014-04-01T10:51:00.277Z,5,0", [["1", "5", 1396349460.277]]),
        ("gowalla", "1\t2010-10-12T00:15:00Z\t30.2\t-97.3\t5", [["1", "5", 1286842500.0]]),
        ("foursquare", FOURSQUARE, [["1", "3", 1333404009]]),  # 22:00 in New York
    ],
)
def test_interactions(tmp_path: Path, recipe: str, text: str, interactions: list[Any]) -> None:
    encoding = "latin-1" if recipe == "foursquare" else "utf-8"
    (tmp_path / "raw").write_text(text, encoding=encoding)
    tables: Tables = RECIPES[recipe](tmp_path / "raw")
    assert rows(tables.interactions) == interactions
    if recipe == "gowalla":
        assert rows(tables.items) == [["5", "30.2", "-97.3"]]
    if recipe == "foursquare":
        assert rows(tables.items) == [["3", "Caf\xe9"]]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Zvuk the users with most plays; of equally many those of smaller ids."""
    file = tmp_path / "raw.parquet"
    pd.DataFrame({"uid": [1], "timestamp": [5], "item_id": [3]}).to_parquet(file)
    assert rows(RECIPES["yambda"](file).interactions) == [[1, 3, 5]]
    plays = [(9, 1, 7), (9, 2, 8), (3, 1, 9), (4, 1, 9), (3, 2, 9), (4, 2, 9)]
    table = pd.DataFrame(plays, columns=["user_id", "track_id", "datetime"])
    table["datetime"] = pd.to_datetime(table["datetime"], unit="s").astype("datetime64[ms]")
    table.to_parquet(file)
    monkeypatch.setattr("recbole_pos.public.datasets.ZVUK_USERS", 2)
    found = RECIPES["zvuk"](file).interactions
    assert rows(found) == [[3, 1, 9.0], [4, 1, 9.0], [3, 2, 9.0], [4, 2, 9.0]]


# --- what is built of them ---


def ml_1m(folder: Path) -> Path:
    """Every user with every item, five interactions or more of each; and a stranger with one."""
    pairs = [(u, i, 978300000 + 100 * u + i) for u in range(USERS) for i in range(ITEMS)]
    pairs.append((99, 0, 978300999))
    members = {
        "ratings.dat": "".join(f"{u}::{i}::{1 + (u + i) % 5}::{t}\n" for u, i, t in pairs),
        "movies.dat": "".join(f'{i}::Caf\xe9 {i}: A "b" (199{i})::Comedy\n' for i in range(ITEMS)),
        "users.dat": "".join(f"{u}::F::25::{u}::0{u}067\n" for u in [*range(USERS), 99]),
    }
    return zipped(folder / "ml-1m.zip", members, "latin-1")


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The yaml of ml-1m, with the counts of a small dataset."""
    file = tmp_path / "described" / "ml-1m" / "ml-1m.yaml"
    file.parent.mkdir(parents=True)
    text = (DATASETS / "ml-1m" / "ml-1m.yaml").read_text().replace("[10,inf)", "[5,inf)")
    lines = [line for line in text.splitlines() if not line.startswith("  counts:")]
    lines.append(f"  counts: {{users: {USERS}, items: {ITEMS}, events: {USERS * ITEMS}}}\n")
    file.write_text("\n".join(lines))
    monkeypatch.setattr("recbole_pos.public.datasets.DATASETS", tmp_path / "described")
    return file


def test_the_same_files_give_the_same_bytes(tmp_path: Path, described: Path) -> None:
    raw, folder = ml_1m(tmp_path), tmp_path / "again"
    assert main(["data", "build", "ml-1m", str(raw), "--data_path", str(tmp_path / "a")]) == 0
    building.build("ml-1m", [raw], folder, verbose=False)
    contents = [
        {file.name: file.read_bytes() for file in parent.glob("ml-1m/ml-1m.*")}
        for parent in (tmp_path / "a", folder)
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 4
    text = contents[0]["ml-1m.item"].decode()
    assert text.splitlines()[0] == "item_id:token\ttitle:token\trelease_year:token\tgenre:token_seq"
    assert 'Caf\xe9 3: A ""b""' in text and "\t1993\tComedy" in text
    assert "\t02067" in contents[0]["ml-1m.user"].decode()
    with pytest.raises(UsageError, match="--overwrite"):
        building.build("ml-1m", [raw], folder, verbose=False)


def test_other_files_than_the_published(tmp_path: Path, described: Path) -> None:
    """Their counts are others, or they are damaged."""
    raw = ml_1m(tmp_path)
    described.write_text(described.read_text().replace(f"events: {USERS * ITEMS}", "events: 1"))
    with pytest.raises(UsageError, match="ml-1m: 42 events"):
        building.build("ml-1m", [raw], tmp_path / "few", verbose=False)
    raw.write_bytes(raw.read_bytes()[:200])
    with pytest.raises(UsageError, match=r"ml-1m\.zip cannot be read"):
        building.build("ml-1m", [raw], tmp_path / "damaged", verbose=False)
    assert not list((tmp_path / "damaged").glob("*/*.inter"))


def test_counts_are_checked_unless_filters_differ(tmp_path: Path, described: Path) -> None:
    folder = building.build("ml-1m", [ml_1m(tmp_path)], tmp_path / "d", verbose=False)
    options = {"data_path": str(tmp_path / "d"), "epochs": 1, "topk": [2]}

    def run(name: str, **more: Any) -> None:
        given = {**options, "valid_metric": "NDCG@2", **more}
        recbole_pos.run("Pop", "ml-1m", None, given, run_dir=tmp_path / name, verbose=False)

    run("whole")
    inter = folder / "ml-1m.inter"
    inter.write_text("\n".join(inter.read_text().splitlines()[:-4]) + "\n")
    with pytest.raises(UsageError, match=r"dataset ml-1m: 6 users.*but the public dataset has 7"):
        run("cut")
    run("other", item_inter_num_interval="[1,inf)")


def test_the_list_has_every_dataset(capsys: pytest.CaptureFixture) -> None:
    assert main(["data"]) == 0
    printed = capsys.readouterr().out
    for name, dataset in read_public_datasets().items():
        assert name in printed and dataset.recipe in RECIPES
        assert main(["data", name]) == 0
        page = capsys.readouterr().out
        assert dataset.licence in " ".join(page.split()) and str(dataset.yaml) in page
        assert set(read_yaml(dataset.yaml)["load_col"]["inter"]) >= {"item_id", "timestamp"}
        config = PosConfig("Pop", name, None, {"data_path": str(DATASETS)})
        assert config.expected_counts == dataset.counts
