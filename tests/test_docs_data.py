"""What docs/data.md says and no other test holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_log

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset


def read(folder: Path, **options: Any) -> Any:
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
    assert set(read(tmp_path).kinds) == {"user_id", "item_id", "timestamp"}
    columns = ["user_id", "item_id", "timestamp", "brand", "stars"]
    inter = read(tmp_path, load_col={"inter": columns}).log.fields
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
    assert len(read(tmp_path).log) == num_kept < len(frame)
    assert len(read(tmp_path, filter_inter_by_user_or_item=False).log) == len(frame)


def test_a_column_may_occur_in_one_file_only(tmp_path: Path) -> None:
    frame = make_log().assign(brand="b")
    recbole_pos.Dataset.from_frame(frame, path=tmp_path / "shop", tables={"brand": "inter"})
    (tmp_path / "shop" / "shop.item").write_text("item_id:token\tbrand:token\ni1\tb\n")
    columns = {"inter": ["user_id", "item_id", "timestamp", "brand"], "item": ["item_id", "brand"]}
    with pytest.raises(UsageError, match="brand: is loaded from shop.inter and from shop.item"):
        read(tmp_path, load_col=columns)
