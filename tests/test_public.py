"""Public logs: small files in each raw format, as their sources write them."""

from __future__ import annotations

import gzip
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import recbole_pos
from recbole_pos.cli.main import main
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.public import build_dataset as building
from recbole_pos.public.described import read_public_datasets
from recbole_pos.public.recipes import RECIPES
from recbole_pos.yaml_files import DATASETS, read_yaml

USERS, ITEMS = 7, 6


def pairs() -> list[tuple[int, int, int]]:
    """Every user with every item, five events or more of each; and a stranger with one."""
    every = [(u, i, 978300000 + 100 * u + i) for u in range(USERS) for i in range(ITEMS)]
    return [*every, (99, 0, 978300999)]


def zipped(path: Path, members: dict[str, str], encoding: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(f"{path.stem}/{name}", text.encode(encoding))
    return path


def ml_dat(folder: Path) -> list[Path]:
    ratings = "".join(f"{u}::{i}::{1 + (u + i) % 5}::{t}\n" for u, i, t in pairs())
    films = "".join(f'{i}::Caf\xe9 {i}: A "b" (199{i})::Comedy|Sci-Fi\n' for i in range(ITEMS))
    people = "".join(f"{u}::F::25::{u}::0{u}067\n" for u in [*range(USERS), 99])
    members = {"ratings.dat": ratings, "movies.dat": films, "users.dat": people}
    return [zipped(folder / "ml-1m.zip", members, "latin-1")]


def ml_csv(folder: Path) -> list[Path]:
    ratings = "".join(f"{u},{i},3.5,{t}\n" for u, i, t in pairs())
    films = "".join(f'{i},"One, {i} (199{i})",Comedy|Drama\n' for i in range(ITEMS - 1))
    films += f"{ITEMS - 1},Untitled,(no genres listed)\n"
    members = {"ratings.csv": f"userId,movieId,rating,timestamp\n{ratings}"}
    members["movies.csv"] = f"movieId,title,genres\n{films}"
    return [zipped(folder / "ml-25m.zip", members, "utf-8")]


def amazon(folder: Path) -> list[Path]:
    reviews = "".join(
        json.dumps({"reviewerID": f"A{u}", "asin": f"B00{i}", "unixReviewTime": t}) + "\n"
        for u, i, t in pairs()[:-1]
    )
    product: dict[str, Any] = {"title": 'It\'s "it"', "price": 9.5, "brand": "Fj\xf6rd & Co"}
    product["categories"] = [["Beauty", "Hair Care"], ["Beauty", "Tools"]]
    product["related"] = {"also_bought": ["B000", "B999"], "also_viewed": ["B001"]}
    # the source writes dicts as Python does
    meta = "".join(f"{ {'asin': f'B00{i}', **product} }\n" for i in range(ITEMS + 3))
    files = [folder / "reviews_Beauty_5.json.gz", folder / "meta_Beauty.json.gz"]
    for file, text in zip(files, (reviews, meta), strict=True):
        file.write_bytes(gzip.compress(text.encode()))
    return files


def yelp(folder: Path) -> list[Path]:
    reviews = [
        json.dumps({"user_id": f"u{u}", "business_id": f"b{i}", "date": f"{y}-03-02 10:0{u}:0{i}"})
        for y in (2018, 2019)
        for u, i, _ in pairs()[:-1]
    ]
    (folder / "reviews.json").write_text("\n".join(reviews))
    return [folder / "reviews.json"]


def diginetica(folder: Path) -> list[Path]:
    lines = [f"{u};NA;{i};{1000 * i};2016-05-0{1 + u % 9}" for u, i, _ in pairs()]
    names = "sessionId;userId;itemId;timeframe;eventdate"
    (folder / "views.csv").write_text("\n".join([names, *lines]))
    return [folder / "views.csv"]


def yoochoose(folder: Path) -> list[Path]:
    lines = [f"{u},2014-04-0{1 + u % 9}T10:51:0{i}.277Z,{i},0" for u, i, _ in pairs()]
    (folder / "clicks.dat").write_text("\n".join(lines))
    return [folder / "clicks.dat"]


def gowalla(folder: Path) -> list[Path]:
    lines = [
        f"{u}\t2010-10-1{1 + u % 9}T23:55:{i:02}Z\t30.2359091167\t-97.{i}\t{i}"
        for u, i, _ in reversed(pairs())
    ]
    (folder / "checkins.txt").write_text("\n".join(lines))
    return [folder / "checkins.txt"]


def foursquare(folder: Path) -> list[Path]:
    venue = "4bf5\tCaf\xe9\t40.7\t-74.0\t-240"
    lines = [
        f"{u}\t{i}\t{venue}\tTue Apr {3 + u:02} 02:00:{i:02} +0000 2012" for u, i, _ in pairs()[:-1]
    ]
    (folder / "nyc.txt").write_text("\n".join(lines), encoding="latin-1")
    return [folder / "nyc.txt"]


def yambda(folder: Path) -> list[Path]:
    events = [(u, 5 * t % 2**24, i) for u, i, t in pairs()]
    table = pd.DataFrame(events, columns=["uid", "timestamp", "item_id"], dtype="uint32")
    table.to_parquet(folder / "likes.parquet")
    return [folder / "likes.parquet"]


def zvuk(folder: Path) -> list[Path]:
    """Two users too many: one with a single play, one with as many as those of smaller ids."""
    plays = [*((USERS + 1, i, 978300000 + i) for i in range(ITEMS)), *pairs()]
    table = pd.DataFrame(plays, columns=["user_id", "track_id", "datetime"])
    table["datetime"] = pd.to_datetime(table["datetime"], unit="s").astype("datetime64[ms]")
    table.to_parquet(folder / "plays.parquet")
    return [folder / "plays.parquet"]


RAW = {
    "ml-1m": ml_dat,
    "ml-25m": ml_csv,
    "amazon-beauty": amazon,
    "yelp": yelp,
    "diginetica": diginetica,
    "yoochoose": yoochoose,
    "gowalla": gowalla,
    "foursquare-nyc": foursquare,
    "yambda-likes": yambda,
    "zvuk": zvuk,
}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Descriptions with the counts of the small logs."""
    folder = tmp_path_factory.mktemp("described")
    for name in RAW:
        (folder / name).mkdir(parents=True)
        text = (DATASETS / name / f"{name}.yaml").read_text().replace("[10,inf)", "[5,inf)")
        lines = [line for line in text.splitlines() if not line.startswith("  counts:")]
        lines.append(f"  counts: {{users: {USERS}, items: {ITEMS}, events: {USERS * ITEMS}}}\n")
        (folder / name / f"{name}.yaml").write_text("\n".join(lines))
    return folder


def take_small(described: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("recbole_pos.public.described.DATASETS", described)
    patch.setattr("recbole_pos.public.recipes.ZVUK_USERS", USERS)


@pytest.fixture
def small(described: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    take_small(described, monkeypatch)
    return described


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, described: Path) -> Path:
    """Every log, built of its raw files by the command line."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        take_small(described, patch)
        for name, write in RAW.items():
            raw = map(str, write(tmp_path_factory.mktemp(name)))
            assert main(["data", "build", name, *raw, "--data_path", str(folder)]) == 0
    return folder


def test_the_same_files_give_the_same_bytes(tmp_path: Path, built: Path, small: Path) -> None:
    raw = amazon(tmp_path)
    again = building.build("amazon-beauty", raw, tmp_path / "again", verbose=False)
    contents = [
        {file.name: file.read_bytes() for file in folder.glob("amazon-beauty.*")}
        for folder in (again, built / "amazon-beauty")
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 3
    with pytest.raises(UsageError, match="--overwrite"):
        building.build("amazon-beauty", raw, tmp_path / "again", verbose=False)


def test_a_row_without_a_date_has_no_time(tmp_path: Path) -> None:
    """Conversion leaves it out and counts it; an integer for no date would be the year 1677."""
    (file,) = diginetica(tmp_path)
    file.write_text(file.read_text() + "\n0;NA;5;1000;")
    times = RECIPES["diginetica"](file).interactions["timestamp"]
    assert times[:-1].min() > 1.4e9 and pd.isna(times.iloc[-1])


def test_other_files_than_the_published(tmp_path: Path, small: Path) -> None:
    """Their counts are others."""
    described = small / "ml-1m" / "ml-1m.yaml"
    text = described.read_text()
    described.write_text(text.replace(f"events: {USERS * ITEMS}", "events: 1"))
    with pytest.raises(UsageError, match="ml-1m: 42 events"):
        building.build("ml-1m", ml_dat(tmp_path), tmp_path / "few")
    described.write_text(text)


def test_what_stands_in_the_tables(built: Path) -> None:
    text = (built / "ml-1m" / "ml-1m.item").read_text()
    assert text.splitlines()[0] == "item_id:token\ttitle:token\trelease_year:token\tgenre:token_seq"
    assert 'Caf\xe9 3: A ""b""' in text and "\t1993\tComedy Sci-Fi" in text
    assert "\t02067" in (built / "ml-1m" / "ml-1m.user").read_text()
    item = (built / "amazon-beauty" / "amazon-beauty.item").read_text()
    assert len(item.splitlines()) == ITEMS + 1
    assert "Fj\xf6rd & Co\t9.5\t" in item and "B999" not in item and "Hair Care" in item
    places = (built / "gowalla" / "gowalla.item").read_text().splitlines()
    assert places[0] == "item_id:token\tlatitude:float\tlongitude:float"
    assert "3\t30.2359091167\t-97.3" in places


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("diginetica", 1462060800),
        ("yoochoose", 1396349460.277),
        ("gowalla", 1286841300),  # 2010-10-11
        ("foursquare-nyc", 1333404000),  # 2012-04-02, 22:00 in New York
        ("yambda-likes", 5 * 978300000 % 2**24),
        ("zvuk", 978300000),
        ("yelp", 1551520800),  # 2019-03-02, since older reviews are left out
    ],
)
def test_times_are_those_of_the_source(built: Path, small: Path, name: str, first: float) -> None:
    data = {"data_path": str(built)}
    dataset = read_dataset(PosConfig("Pop", name, None, data))
    assert dataset.log.times.min() == pytest.approx(first, abs=1e-6)
    if name == "zvuk":  # the users of the smallest ids
        assert {*dataset.field2id_token["user_id"][1:]} == {str(user) for user in range(USERS)}


def test_counts_are_checked_unless_filters_differ(tmp_path: Path, built: Path, small: Path) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "d"))
    options = {"data_path": str(folder), "epochs": 1, "topk": [2], "valid_metric": "NDCG@2"}

    def run(**more: Any) -> None:
        given, folder = {**options, **more}, tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        recbole_pos.run("Pop", "ml-1m", None, given, run_dir=folder, verbose=False)

    run()
    inter = folder / "ml-1m" / "ml-1m.inter"
    inter.write_text("\n".join(inter.read_text().splitlines()[:-4]) + "\n")
    with pytest.raises(UsageError, match=r"dataset ml-1m: 6 users.*but the public dataset has 7"):
        run()
    run(item_inter_num_interval="[1,inf)")


@pytest.mark.parametrize("name", ["ml-1m", "amazon-beauty", "zvuk"])
def test_damaged_files_are_refused(name: str, tmp_path: Path, small: Path) -> None:
    for file in (raw := RAW[name](tmp_path)):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(UsageError):
            building.build(name, raw, tmp_path / "d", verbose=False)
        file.write_bytes(content)
    assert not list((tmp_path / "d").glob("*/*.inter"))


def test_the_list_has_every_log(capsys) -> None:
    assert main(["data"]) == 0
    printed = capsys.readouterr().out
    for name, log in read_public_datasets().items():
        assert name in printed and log.recipe in RECIPES
        assert main(["data", name]) == 0
        assert log.licence in (page := capsys.readouterr().out) and str(log.yaml) in page
        assert set(read_yaml(log.yaml)["load_col"]["inter"]) >= {"item_id", "timestamp"}
        config = PosConfig("Pop", name, None, {"data_path": str(DATASETS)})
        assert config.expected_counts == log.counts
