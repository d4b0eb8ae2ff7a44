"""What is typed instead of a dataset's name is answered with what to type."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

SHOP = Path(__file__).parent.parent / "dataset" / "toyshop"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with datasets in ``dataset``, the default data_path, and in ``more``."""
    for folder in ("dataset/toyshop", "more/toyshop", "flat"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("dataset/toyshop", "more/toyshop", "flat"):
        shutil.copy(SHOP / "toyshop.inter", tmp_path / folder)
    (tmp_path / "dataset" / "agetext").mkdir()
    shutil.copy(SHOP / "toyshop.inter", tmp_path / "dataset" / "agetext" / "agetext.inter")
    (tmp_path / "orders.csv").write_text("a,b\n")
    (tmp_path / "raw" / "my shop" / "data").mkdir(parents=True)
    (tmp_path / "raw" / "my shop" / "data" / "train-0.parquet").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("dataset/toyshop/toyshop.inter", "`-d toyshop --data_path=dataset`"),
        ("dataset/toyshop/toyshop.item", "`-d toyshop --data_path=dataset`"),
        ("more/toyshop/toyshop.inter", "`-d toyshop --data_path=more`"),
        ("more", "datasets toyshop; type `-d NAME --data_path=more`"),
        ("dataset", "`-d NAME --data_path=dataset`"),
        ("flat", "move toyshop.* to flat/toyshop/ and type `-d toyshop --data_path=flat`"),
        ("flat/toyshop.inter", "move toyshop.* to flat/toyshop/"),
        ("orders.csv", "type `recbole-pos convert orders.csv --name orders` and then `-d orders`"),
        ("more/ORDERS.CSV", "type `recbole-pos convert more/ORDERS.CSV"),
        ("raw/my shop/", "convert 'raw/my shop' --name 'my shop'"),
        ("toyshpo", "did you mean toyshop?"),
        ("dataset/toyshpo", "did you mean toyshop?"),
        ("..", "there is no"),
        ("/", "there is no"),
    ],
)
def test_something_else_than_a_name(home: Path, given: str, answer: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read_dataset(PosConfig("SASRec", given, None, None))
    assert answer in str(refusal.value) and "dataset/dataset" not in str(refusal.value)


@pytest.mark.parametrize("given", ["toyshop", "toyshop/", "dataset/toyshop/", "./more/toyshop"])
def test_the_path_of_its_folder_is_as_good_as_a_name(home: Path, given: str) -> None:
    config = PosConfig("SASRec", given, None, None)
    assert config["dataset"] == config.plain["dataset"] == "toyshop"  # run folders are named so
    assert len(read_dataset(config).inter_feat) == 4000
    there = home / ("more" if "more" in given else "dataset")
    assert config.plain["data_path"] == str(there)


def test_the_folder_of_a_dataset_from_within(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "more" / "toyshop")
    assert len(read_dataset(PosConfig("SASRec", ".", None, None)).inter_feat) == 4000


@pytest.mark.parametrize("suffix", ["inter", "user", "item"])
def test_a_folder_in_place_of_a_file(home: Path, suffix: str) -> None:
    file = home / "dataset" / "toyshop" / f"toyshop.{suffix}"
    file.unlink(missing_ok=True)
    file.mkdir()
    with pytest.raises(UsageError, match=rf"toyshop.{suffix} is a folder"):
        read_dataset(PosConfig("SASRec", "toyshop", None, None))
