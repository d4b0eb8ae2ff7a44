"""Names and dates that a conversion, a file of names or a search must not make others of."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recbole_pos
from recbole_pos.errors import UsageError
from recbole_pos.serve.recommend import read_names

LARGE = [9007199254740993 + n for n in range(4)]  # which floats do not tell apart


def made_of(path: Path, folder: Path, **given: Any) -> pd.DataFrame:
    args = {"user": "u", "item": "i", "time": "t", "verbose": False, **given}
    recbole_pos.convert(path, name="shop", data_path=folder, **args)
    return pd.read_csv(folder / "shop" / "shop.inter", sep="\t", dtype=str)


@pytest.mark.parametrize(
    ("form", "given", "day"),
    [
        (
            "%d%m%Y",
            ["02032024", "15032024", "03122024"],
            ["2024-03-02", "2024-03-15", "2024-12-03"],
        ),
        ("%m%d%Y", ["01112024", "12312024"], ["2024-01-11", "2024-12-31"]),
        ("%d%m%y", ["020324", "311224"], ["2024-03-02", "2024-12-31"]),
        ("%y%m%d", ["050302", "241231"], ["2005-03-02", "2024-12-31"]),
        ("%Y%m%d", ["20240302", "20241231"], ["2024-03-02", "2024-12-31"]),
    ],
)
@pytest.mark.parametrize("numbers", [False, True])
def test_dates_of_digits_alone(
    tmp_path: Path, form: str, given: list[str], day: list[str], numbers: bool
) -> None:
    """As text, and as whole numbers, which have lost the zeros before them."""
    table = pd.DataFrame({"u": range(len(given)), "i": ["a"] * len(given), "t": given})
    if numbers:
        table["t"] = table["t"].astype("int64")
        table.to_parquet(tmp_path / "log.parquet")
    else:
        table.to_csv(tmp_path / "log.csv", index=False)
    file = tmp_path / ("log.parquet" if numbers else "log.csv")
    found = made_of(file, tmp_path, date_format=form)
    seconds = found.iloc[:, 2].astype(float).sort_values()
    assert [str(pd.Timestamp(s, unit="s").date()) for s in seconds] == sorted(day)


def test_ids_that_no_float_holds(tmp_path: Path) -> None:
    """Decimals, as databases write them; json above int64; json with a float among them."""
    times = list(range(1_700_000_000, 1_700_000_004))
    ids = pa.array([Decimal(one) for one in LARGE], pa.decimal128(38, 0))
    pq.write_table(pa.table({"u": ids, "i": ids, "t": times}), tmp_path / "log.parquet")
    assert set(made_of(tmp_path / "log.parquet", tmp_path / "a").iloc[:, 1]) == {*map(str, LARGE)}
    for folder, names in (
        ("b", [12345678901234567890 + n for n in range(4)]),
        ("c", [*LARGE[:3], 1.5]),
    ):
        lines = [
            {"u": n, "i": one, "t": t} for n, (one, t) in enumerate(zip(names, times, strict=True))
        ]
        file = tmp_path / f"{folder}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = made_of(file, tmp_path / folder)
        assert set(found.iloc[:, 1]) == {*map(str, names)}, folder


def test_a_type_that_is_no_field(tmp_path: Path) -> None:
    """It is left out, and the report says why."""
    column = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    table = pa.table({"u": ["x"], "i": ["a"], "t": [1_700_000_000], "m": column})
    pq.write_table(table, tmp_path / "log.parquet")
    assert list(made_of(tmp_path / "log.parquet", tmp_path)) == [
        "user_id:token",
        "item_id:token",
        "timestamp:float",
    ]
    assert "holds map<string, int64" in (tmp_path / "shop" / "convert.json").read_text()


def test_a_dataset_in_parquet_is_one(tmp_path: Path) -> None:
    """Which is not written beside, and which --overwrite replaces."""
    (tmp_path / "shop").mkdir()
    there = tmp_path / "shop" / "shop.inter.parquet"
    there.touch()
    (tmp_path / "log.csv").write_text("u,i,t\na,b,1700000000\n")
    with pytest.raises(UsageError, match="holds a dataset already"):
        made_of(tmp_path / "log.csv", tmp_path)
    made_of(tmp_path / "log.csv", tmp_path, overwrite=True)
    assert not there.exists() and (tmp_path / "shop" / "shop.inter").is_file()


def test_files_of_names(tmp_path: Path) -> None:
    """As editors of any system write them; a name is what stands in a line."""
    file = tmp_path / "names.txt"
    file.write_bytes("\ufeffi3\r\n i4\r\n\r\na\u2028b\r\n".encode())
    assert read_names(file) == ["i3", " i4", "a\u2028b"]
