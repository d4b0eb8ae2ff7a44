"""Frames of pandas, polars, pyarrow and DuckDB give the files that a file of theirs gives."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

import recbole_pos as rp

ZONE = dt.timezone(dt.timedelta(hours=2))


def orders(rows: int = 300) -> pd.DataFrame:
    """Orders with a column of every kind."""
    rng = np.random.default_rng(0)
    item = rng.integers(0, 30, rows)
    begin = pd.Timestamp("2024-03-02 08:00:00.5", tz="UTC")
    frame = pd.DataFrame(
        {
            "customer": pd.array([f"c{n}" for n in rng.integers(0, 40, rows)], dtype="string"),
            "product": pd.Categorical([f"p{n}" for n in item]),
            "bought_at": begin + pd.to_timedelta(rng.integers(0, 10**6, rows), unit="s"),
            "brand": pd.Categorical([f"b{n % 5}" for n in item]),
            "amount": [Decimal(int(n)) / 4 for n in rng.integers(1, 40, rows)],
            "quantity": pd.array(rng.integers(1, 5, rows), dtype="Int64"),
            "rating": rng.random(rows),
        }
    )
    frame["bought_at"] = frame["bought_at"].dt.tz_convert("Europe/Oslo")
    frame.loc[3, "quantity"] = pd.NA
    frame.loc[5, "customer"] = pd.NA
    frame.loc[7, "rating"] = np.nan
    return frame


def items_of(frame: pd.DataFrame) -> pd.DataFrame:
    """A line a product, with lists."""
    one = frame.drop_duplicates("product")[["product"]].reset_index(drop=True)
    return one.assign(
        product=one["product"].astype(str), tags=[["warm", "red"][: n % 3] for n in range(len(one))]
    )


def of_polars(frame: pd.DataFrame) -> Any:
    polars = pytest.importorskip("polars")
    return polars.from_pandas(frame)


def of_duckdb(frame: pd.DataFrame) -> Any:
    duckdb = pytest.importorskip("duckdb")
    table = pa.Table.from_pandas(frame)  # noqa: F841
    return duckdb.sql("select * from table")


KINDS = {
    "pandas": lambda frame: frame,
    "pyarrow": pa.Table.from_pandas,
    "polars": of_polars,
    "duckdb": of_duckdb,
}


def files(folder: Path) -> dict[str, bytes]:
    """The tables and the yaml of a dataset."""
    return {
        file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix != ".json"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_is_what_its_file_is(kind: str, tmp_path: Path) -> None:
    frame = orders()
    parquet.write_table(pa.Table.from_pandas(frame), tmp_path / "orders.parquet")
    parquet.write_table(pa.Table.from_pandas(items_of(frame)), tmp_path / "items.parquet")
    report = rp.convert(
        tmp_path / "orders.parquet",
        items=tmp_path / "items.parquet",
        name="shop",
        data_path=tmp_path / "file",
        verbose=False,
    )
    make = KINDS[kind]
    data = rp.Dataset.from_frame(
        make(frame), items=make(items_of(frame)), path=tmp_path / "made" / "shop"
    )
    assert files(data.path) == files(tmp_path / "file" / "shop")
    assert set(files(data.path)) == {"shop.inter", "shop.item", "shop.yaml"}
    fields = [(c.field, c.kind, c.table, c.different, c.missing) for c in data.report.columns]
    assert fields == [(c.field, c.kind, c.table, c.different, c.missing) for c in report.columns]
    assert data.counts == report.counts and data.counts["events"] == 299
    assert data.report.lines["events"].dropped == {
        "no user (customer)": {"lines": 1, "first": ["interactions:5"]}
    }
