"""Finding, loading and filtering the tables of a dataset: what is wrong is answered with advice."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_log
from hypothesis import given, settings
from hypothesis import strategies as st
from recbole.data.dataset import Dataset

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.filters import (
    filter_by_counts,
    leave_out_copies,
    leave_out_nameless,
    leave_out_undescribed,
)
from recbole_pos.data.loading import NAMING_FIELDS, Tables
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

TOYSHOP = Path(__file__).parent.parent / "dataset" / "toyshop"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with datasets in ``dataset``, the default data_path, and in ``more``."""
    for folder in ("dataset/toyshop", "more/toyshop", "raw/my shop/data"):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(TOYSHOP / "toyshop.inter", tmp_path / folder)
    folder = tmp_path / "raw" / "my shop" / "data"
    (folder / "toyshop.inter").rename(folder / "train-0.parquet")
    (tmp_path / "orders.csv").write_text("a,b\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("more", "(found there: toyshop)"),
        ("orders.csv", "`recbole-pos convert FILE --name NAME` makes a dataset"),
        ("dataset/toyshpo", "did you mean toyshop?"),
        ("/", "there is no"),
    ],
)
def test_what_is_no_name_of_a_dataset(home: Path, typed: str, answer: str) -> None:
    (home / "dataset" / "double").mkdir()  # another dataset, which cannot be read
    for name in ("double.inter", "double.inter.parquet"):
        (home / "dataset" / "double" / name).touch()
    with pytest.raises(UsageError) as refusal:
        read_dataset(PosConfig("SASRec", typed, None, None))
    assert answer in str(refusal.value) and "dataset/dataset" not in str(refusal.value)


@pytest.mark.parametrize("typed", ["toyshop", "dataset/toyshop/", "./more/toyshop", "."])
def test_a_name_or_the_path_of_a_folder(home: Path, monkeypatch, typed: str) -> None:
    folder = home / ("dataset" if typed.strip("/").startswith(("toy", "data")) else "more")
    if typed == ".":
        monkeypatch.chdir(folder / "toyshop")
    config = PosConfig("SASRec", typed, None, None)
    assert config["dataset"] == config.plain["dataset"] == "toyshop"  # run folders are named so
    assert config.plain["data_path"] == str(folder)
    assert len(read_dataset(config).log) == 4000


class ReadsAll(recbole_pos.PosRecommender):
    """A custom model, which may read any field."""

    def encode(self, batch: Any) -> Any:
        return self.item_embedding(batch.items)


def read(folder: Path, **options: Any) -> Any:
    given = {"data_path": str(folder), **options}
    return read_dataset(PosConfig(ReadsAll, "toyshop", None, given))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A copy of toyshop that may be spoilt."""
    shutil.copytree(TOYSHOP, tmp_path / "toyshop")
    return tmp_path


@pytest.mark.parametrize("option", NAMING_FIELDS)
def test_fields_that_options_name(shop: Path, option: str) -> None:
    """They must be loaded, and of a type that the option can use."""

    def name(field: str) -> Any:
        return {field: "[3,inf)"} if option == "val_interval" else [field]

    with pytest.raises(UsageError, match=rf"{option}: field 'prise' is not loaded \(did you mean"):
        read(shop, **{option: name("prise")})
    with pytest.raises(UsageError, match=f"{option}: field 'brand' is of type token; "):
        read(shop, **{option: name("brand")})


INTER = ["user_id", "item_id", "timestamp"]


def test_columns_and_files_that_load_col_names(shop: Path) -> None:
    with pytest.raises(UsageError, match=r"load_col: .*toyshop.inter has no column 'stars'"):
        read(shop, load_col={"inter": [*INTER, "stars"]})
    (shop / "toyshop" / "toyshop.item").unlink()
    with pytest.raises(UsageError, match=r"load_col: item: found no file .*toyshop.item"):
        read(shop, load_col={"inter": INTER, "item": ["item_id", "brand"]})
    assert read(shop, load_col={"inter": INTER}).item_num == 121


def test_lines_that_contradict_each_other(shop: Path) -> None:
    """Repeated lines do not."""
    file = shop / "toyshop" / "toyshop.item"
    header, first, second, *rest = file.read_text().splitlines()
    file.write_text("\n".join([header, first, second, first, *rest]) + "\n")
    read(shop)
    name, _, other = first.partition("\t")[0], *second.partition("\t")[1:]
    file.write_text("\n".join([header, first, f"{name}\t{other}", *rest]) + "\n")
    with pytest.raises(UsageError, match=f"toyshop.item: 2 lines are about item_id '{name}'"):
        read(shop)


class RecBoleTables(Dataset):
    """RecBole's filters over tables at hand."""

    uid_field, iid_field, time_field = "user", "item", "time"
    logger = logging.getLogger()

    def __init__(self, config: dict[str, Any], *tables: pd.DataFrame | None) -> None:
        self.config = config
        self.inter_feat, self.user_feat, self.item_feat = tables


OPTIONS = {"USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item", "TIME_FIELD": "time"}
OPTIONS |= {"data_path": "dataset", "dataset": "tiny", "benchmark_filename": None}


def make_tables(*tables: pd.DataFrame | None) -> Tables:
    """Tables as they are read, with codes of names."""
    coded = (
        None if table is None else table.astype(dict.fromkeys({*table} - {"time"}, "category"))
        for table in tables
    )
    return Tables(*coded)


def lines(tables: Tables) -> list[list[int] | None]:
    feats = (tables.inter, tables.user, tables.item)
    return [None if feat is None else list(feat.index) for feat in feats]


def make_inter(pairs: list[tuple[int, int, int]]) -> pd.DataFrame:
    rows = [(f"u{user}", f"i{item}", float(time)) for user, item, time in pairs]
    return pd.DataFrame(rows, columns=["user", "item", "time"])


logs = st.lists(st.tuples(*[st.integers(0, 6)] * 2, st.integers(0, 3)), min_size=1, max_size=50)
ids = st.none() | st.lists(st.integers(0, 8), unique=True, max_size=8)
intervals = st.sampled_from(["[0,inf)", "[2,inf)", "(1,4]", "[1,1];[3,5)", None])


@settings(max_examples=100, deadline=None)
@given(logs, ids, ids, intervals, intervals, st.booleans())
def test_filters_by_counts_are_recboles(
    log: list, users: Any, items: Any, of_users: Any, of_items: Any, is_known: bool
) -> None:
    config = {**OPTIONS, "filter_inter_by_user_or_item": is_known, "session_filter": None}
    config |= {"user_inter_num_interval": of_users, "item_inter_num_interval": of_items}
    tables = [make_inter(log)]
    for name, numbers in (("user", users), ("item", items)):
        names = None if numbers is None else {name: [f"{name[0]}{n}" for n in numbers]}
        tables.append(names and pd.DataFrame(names, dtype=object))
    ours = make_tables(*tables)
    ours = filter_by_counts(leave_out_undescribed(ours, config) if is_known else ours, config)
    peer = RecBoleTables(config, *(None if table is None else table.copy() for table in tables))
    peer._filter_inter_by_user_or_item()
    peer._filter_by_inter_num()
    assert lines(ours) == lines(Tables(peer.inter_feat, peer.user_feat, peer.item_feat))


@settings(deadline=None, max_examples=50)
@given(logs, st.sampled_from(["first", "last"]))
def test_the_oldest_or_newest_of_each_pair(log: list, keep: str) -> None:
    """Of interactions at one time, by their lines."""
    config = {**OPTIONS, "rm_dup_inter": keep, "rm_copies": False}
    ours = leave_out_copies(make_tables(make_inter(log)), config)
    best: dict[tuple[int, int], tuple[int, int]] = {}
    choose = min if keep == "first" else max
    for line, (user, item, time) in enumerate(log):
        best[user, item] = choose(best.get((user, item), (time, line)), (time, line))
    assert lines(ours)[0] == sorted(line for _, line in best.values())


def test_lines_without_a_user_or_an_item(caplog: pytest.LogCaptureFixture) -> None:
    """Exactly these go. RecBole, counting what is left after the first kind, drops others."""
    log = make_inter([(n % 3, n % 4, n) for n in range(12)])
    log.loc[[2, 5], "user"] = np.nan
    log.loc[[4, 9], "item"] = np.nan
    ours = leave_out_nameless(make_tables(log), OPTIONS)
    assert lines(ours)[0] == [0, 1, 3, 6, 7, 8, 10, 11]
    ends = ("tiny.inter: 2 rows have no user and", ": 3, 6"), ("2 rows have no item and", ": 5, 10")
    for record, (begin, numbers) in zip(caplog.records, ends, strict=True):
        assert begin in record.getMessage() and record.getMessage().endswith(numbers)


# --- what docs/data.md says and no other test holds ---


def prepare(folder: Path, **options: Any) -> Any:
    """The prepared dataset ``shop`` in a folder."""
    return read_dataset(PosConfig("Pop", "shop", None, {"data_path": str(folder), **options}))


def test_what_is_loaded_and_what_is_missing(tmp_path: Path) -> None:
    """Without ``load_col`` user, item and time; a missing token is id 0, a number the mean."""
    frame = make_log()
    numbers = np.arange(len(frame))
    frame["brand"] = np.where(numbers % 7 == 0, None, "b")
    frame["stars"] = np.where(numbers % 5 == 0, np.inf, numbers % 3)
    tables = {"brand": "inter", "stars": "inter"}
    recbole_pos.Dataset.from_frame(frame, path=tmp_path / "shop", tables=tables)
    (tmp_path / "shop" / "shop.yaml").unlink()
    assert set(prepare(tmp_path).kinds) == {"user_id", "item_id", "timestamp"}
    columns = ["user_id", "item_id", "timestamp", "brand", "stars"]
    inter = prepare(tmp_path, load_col={"inter": columns}).log.fields
    assert ((inter["brand"] == 0).sum() - (frame["brand"].isna()).sum()) == 0
    finite = frame["stars"][np.isfinite(frame["stars"])]
    assert inter["stars"].sum().item() == pytest.approx(finite.mean() * len(frame), rel=1e-5)


def test_interactions_whose_item_has_no_row(tmp_path: Path) -> None:
    """They are dropped unless ``filter_inter_by_user_or_item`` is false."""
    frame = make_log()
    frame["brand"] = "b" + frame["item_id"].str[-1]
    recbole_pos.Dataset.from_frame(frame, path=tmp_path / "shop")
    file = tmp_path / "shop" / "shop.item"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("i7\t")))
    num_kept = int((frame["item_id"] != "i7").sum())
    assert len(prepare(tmp_path).log) == num_kept < len(frame)
    assert len(prepare(tmp_path, filter_inter_by_user_or_item=False).log) == len(frame)


def test_a_column_may_occur_in_one_file_only(tmp_path: Path) -> None:
    frame = make_log().assign(brand="b")
    recbole_pos.Dataset.from_frame(frame, path=tmp_path / "shop", tables={"brand": "inter"})
    (tmp_path / "shop" / "shop.item").write_text("item_id:token\tbrand:token\ni1\tb\n")
    columns = {"inter": ["user_id", "item_id", "timestamp", "brand"], "item": ["item_id", "brand"]}
    with pytest.raises(UsageError, match="brand: is loaded from shop.inter and from shop.item"):
        prepare(tmp_path, load_col=columns)
