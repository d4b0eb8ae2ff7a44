"""Fields that options name, columns that load_col names, items that two lines tell of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.loading import NAMING_FIELDS
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

TOYSHOP = Path(__file__).parent.parent / "dataset" / "toyshop"


class Reader(recbole_pos.PosRecommender):
    """A custom model, which may read any field."""

    def encode(self, items: Any, ctx: Any) -> Any:
        return self.item_embedding(items)


def read(folder: Path, **options: Any) -> Any:
    given = {"data_path": str(folder), **options}
    return read_dataset(PosConfig(Reader, "toyshop", None, given))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A copy of toyshop that may be spoilt."""
    shutil.copytree(TOYSHOP, tmp_path / "toyshop")
    return tmp_path


GIVEN = {
    "numerical_features": ["prise"],
    "normalize_field": ["prise"],
    "discretization": {"prise": {"method": "LD"}},
    "seq_len": {"prise": 3},
    "alias_of_user_id": ["prise"],
    "alias_of_item_id": ["prise"],
    "val_interval": {"prise": "[3,inf)"},
    "threshold": {"prise": 3},
    "unused_col": {"item": ["prise"]},
    "preload_weight": {"item_id": "prise"},
}


@pytest.mark.parametrize("option", NAMING_FIELDS)
def test_a_field_that_is_not_loaded(shop: Path, option: str) -> None:
    with pytest.raises(UsageError, match=rf"{option}: field 'prise' is not loaded \(did you mean"):
        read(shop, **{option: GIVEN[option]})


@pytest.mark.parametrize("option", [name for name, kinds in NAMING_FIELDS.items() if kinds])
def test_a_field_of_another_type(shop: Path, option: str) -> None:
    given, kinds = GIVEN[option], NAMING_FIELDS[option]
    field, its = ("price", "float") if "token" in kinds else ("brand", "token")
    wrong = [field] if isinstance(given, list) else {field: given["prise"]}
    with pytest.raises(UsageError, match=f"{option}: field '{field}' is of type {its}; {kinds[0]}"):
        read(shop, **{option: wrong})


def test_columns_and_files_that_load_col_names(shop: Path) -> None:
    inter = ["user_id", "item_id", "timestamp"]
    with pytest.raises(UsageError, match=r"load_col: .*toyshop.inter has no column 'stars'"):
        read(shop, load_col={"inter": [*inter, "stars"]})
    (shop / "toyshop" / "toyshop.item").unlink()
    with pytest.raises(UsageError, match=r"load_col: item: found no file .*toyshop.item"):
        read(shop, load_col={"inter": inter, "item": ["item_id", "brand"]})
    assert read(shop, load_col={"inter": inter}).item_num == 121


@pytest.mark.parametrize("table", ["item", "user"])
def test_two_lines_about_one(shop: Path, table: str) -> None:
    file = shop / "toyshop" / f"toyshop.{table}"
    header, first, second, *rest = file.read_text().splitlines()
    same = [header, first, second, first, *rest]
    file.write_text("\n".join(same) + "\n")
    read(shop)  # repeated values are no contradiction
    name, tab, _ = first.partition("\t")
    other = name + tab + second.partition("\t")[2]
    file.write_text("\n".join([header, first, second, other, *rest]) + "\n")
    with pytest.raises(UsageError, match=f"toyshop.{table}: 2 lines are about {table}_id '{name}'"):
        read(shop)


def test_a_table_of_other_names(shop: Path) -> None:
    """Ids in another case: nothing would be known of any item."""
    file = shop / "toyshop" / "toyshop.item"
    header, *lines = file.read_text().splitlines()
    file.write_text("\n".join([header, *(f"ID-{line}" for line in lines)]) + "\n")
    load = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "brand"]}
    with pytest.raises(UsageError, match="toyshop.item: no item_id of it has an inter.*'ID-"):
        read(shop, load_col=load, filter_inter_by_user_or_item=False)
