"""Atomic tables as parquet give what the same tables give as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet
from shop import shop_options, tables, write

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.location import name_and_folder
from recbole_pos.data.tables import ParquetTable
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset

CONFIG: dict[str, Any] = {"seq_separator": " ", "column_types": None}


def typed(table: pd.DataFrame, lists: bool) -> pa.Table:
    """A table of texts as one whose columns have the types of their kinds."""
    columns = {}
    for called in table:
        kind = called.partition(":")[2]
        cells = [None if cell == "" else cell for cell in table[called]]
        if kind == "token_seq" and lists:
            columns[called] = pa.array([[] if c is None else c.split() for c in cells])
        elif kind == "token" and lists:
            columns[called] = pa.array(cells, pa.string()).dictionary_encode()
        else:
            columns[called] = pa.array(cells, pa.float64() if kind == "float" else pa.string())
    return pa.table(columns)


def facts(folder: Path, **options: Any) -> Any:
    dataset = read_dataset(PosConfig("AttrFormer", "shop", None, shop_options(folder, **options)))
    dataset.build()
    names = {field: list(names) for field, names in dataset.field2id_token.items()}
    return dataset.identity, names, dataset.field2type, dataset.field2seqlen


@pytest.mark.parametrize("lists", [True, False])
def test_parquet_is_as_text(tmp_path: Path, lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recbole_pos.data.tables._ROWS", 7)  # several blocks
    want = facts(write(tmp_path / "text", tables()))
    folder, types = tmp_path / "parquet", {}
    (folder / "shop").mkdir(parents=True)
    for suffix, table in tables().items():
        made = typed(table, lists)
        if not lists:  # plain names, and types in yaml
            types |= dict(called.split(":") for called in made.column_names)
            made = made.rename_columns([called.split(":")[0] for called in made.column_names])
        parquet.write_table(made, folder / "shop" / f"shop.{suffix}.parquet", row_group_size=50)
    assert facts(folder, column_types=types or None) == want
    assert name_and_folder(str(folder / "shop"), "dataset/") == ("shop", str(folder))


def test_both_kinds_of_a_table(tmp_path: Path) -> None:
    folder = write(tmp_path, tables())
    parquet.write_table(typed(tables()["item"], True), folder / "shop" / "shop.item.parquet")
    with pytest.raises(UsageError, match=r"shop.item and shop.item.parquet are both there; remove"):
        facts(folder)


def column(tmp_path: Path, cells: Any, called: str) -> pd.Series:
    file = tmp_path / "x.inter.parquet"
    parquet.write_table(pa.table({called: cells}), file)
    table = ParquetTable(file, CONFIG)
    return table.read(table.columns).iloc[:, 0]


def test_names_and_numbers(tmp_path: Path) -> None:
    big = 2**60 + 1  # no float
    assert list(column(tmp_path, pa.array([big, 7, big]), "id:token")) == [str(big), "7", str(big)]
    tokens = column(tmp_path, pa.array(["a", "NA", None, "", "a"]), "id:token")
    assert tokens.isna().tolist() == [False, True, True, True, False]
    numbers = column(tmp_path, pa.array([True, None, False]), "n:float")
    np.testing.assert_array_equal(numbers, [1.0, np.nan, 0.0])
    lists = column(tmp_path, pa.array([[1.5, None], None, []]), "n:float_seq")
    assert [cell.tolist() for cell in lists] == [[1.5], [], []]
    assert column(tmp_path, pa.nulls(3), "id:token").isna().all()


@pytest.mark.parametrize(
    ("cells", "called", "words"),
    [
        (pa.array([1.5]), "id:token", r"id \(token\) holds double; expected text or whole numbers"),
        (pa.array(["1"]), "time:float", r"time \(float\) holds string; expected numbers"),
        (pa.array([0], pa.timestamp("s")), "time:float", r"timestamp\[.*a time as a number"),
        (pa.array([["a"], ["b"]]), "v:float_seq", r"row 1: v \(float_seq\) is .*not a number"),
        (pa.array([[1.0], [np.inf]]), "v:float_seq", "row 2: v "),
        (pa.array(["a\0"]), "id:token", "a name of id has a NUL byte"),
        (pa.array([], pa.string()), "id:token", "no line of data"),
        (pa.array(["a"]), "id", r"column 'id' has no type.*column_types: \{id: ...\}"),
        (pa.array(["a"]), "id:text", "column 'id:text' has no type"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_named(tmp_path: Path, cells: Any, called: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as found:
        column(tmp_path, cells, called)
    assert "x.inter.parquet" in str(found.value)


def test_damage(tmp_path: Path) -> None:
    file = tmp_path / "x.inter.parquet"
    parquet.write_table(pa.table({"id:token": ["a" * 50] * 9}), file, compression="none")
    whole = file.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], b"PAR1" + bytes(len(whole) - 8) + b"PAR1"):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match="cannot be read as parquet"):
            table = ParquetTable(file, CONFIG)
            table.read(table.columns)
