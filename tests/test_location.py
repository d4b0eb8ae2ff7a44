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
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("dataset/toyshop", "`-d toyshop --data_path=dataset`"),
        ("dataset/toyshop/", "`-d toyshop --data_path=dataset`"),
        ("./dataset/toyshop", "`-d toyshop --data_path=dataset`"),
        ("toyshop/", "`-d toyshop --data_path=dataset`"),
        ("dataset/toyshop/toyshop.inter", "`-d toyshop --data_path=dataset`"),
        ("dataset/toyshop/toyshop.item", "`-d toyshop --data_path=dataset`"),
        ("more/toyshop", "`-d toyshop --data_path=more`"),
        ("more", "`-d toyshop --data_path=more`"),
        ("dataset", "`-d NAME --data_path=dataset`"),
        ("toyshop.inter", "`-d toyshop --data_path=dataset`"),
        ("flat", "Move toyshop.* to flat/toyshop/ and type `-d toyshop --data_path=flat`"),
        ("flat/toyshop.inter", "Move toyshop.* to flat/toyshop/"),
        ("orders.csv", "docs/data.md"),
        ("more/ORDERS.CSV", "docs/data.md"),
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


def test_what_is_told_to_type_works(home: Path) -> None:
    with pytest.raises(UsageError, match="type `-d toyshop --data_path=more`"):
        read_dataset(PosConfig("SASRec", "more/toyshop", None, None))
    config = PosConfig("SASRec", "toyshop", None, {"data_path": "more"})
    assert len(read_dataset(config).inter_feat) == 4000


def test_a_path_is_no_name_even_where_it_leads_to_a_file(home: Path) -> None:
    """The run folder is named after the dataset."""
    shutil.copy(SHOP / "toyshop.inter", home)
    with pytest.raises(UsageError, match=f"holds toyshop.inter.*Move|no {home}/toyshop/toyshop"):
        read_dataset(PosConfig("SASRec", str(home / "toyshop"), None, None))


@pytest.mark.parametrize("suffix", ["inter", "user", "item"])
def test_a_folder_in_place_of_a_file(home: Path, suffix: str) -> None:
    file = home / "dataset" / "toyshop" / f"toyshop.{suffix}"
    file.unlink(missing_ok=True)
    file.mkdir()
    with pytest.raises(UsageError, match=rf"toyshop.{suffix} is a folder"):
        read_dataset(PosConfig("SASRec", "toyshop", None, None))
