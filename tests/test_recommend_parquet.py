"""Histories as columns get what they get as json lines; what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_recommend import trained

from recbole_pos.cli.main import main
from recbole_pos.errors import UsageError
from recbole_pos.serve import parquet
from recbole_pos.serve.histories import Histories, read_histories
from recbole_pos.serve.parquet import count_of, read_table, tables_of, units_of

NAMES = np.array([f"i{n}" for n in range(40)], dtype=object)
IDS = {name: n for n, name in enumerate(NAMES, start=1)}


def drawn(seed: int, count: int = 50) -> list[dict[str, Any]]:
    """Histories with unknown items, ties in time, and nothing."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        n = int(rng.integers(0, 20)) if number else 0
        items = [f"i{i}" for i in rng.integers(0, 50, n)]
        made.append({"id": f"p{number}", "items": items, "times": rng.integers(0, 6, n).tolist()})
    return made


def same(one: Histories, other: Histories) -> None:
    assert one.ids == other.ids
    for name in ("items", "lengths", "times", "unknown"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("times", [True, False])
def test_the_same_histories(times: bool) -> None:
    rows = [{k: v for k, v in row.items() if times or k != "times"} for row in drawn(0)]
    same(
        read_table(pa.Table.from_pylist(rows), NAMES, times),
        read_histories(rows, IDS, needs_time=times),
    )


def test_other_types_of_columns() -> None:
    rows = drawn(1)
    table = pa.Table.from_pylist(rows)
    large = pa.large_list(pa.large_string())
    coded = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    parts = table.slice(3, 20), table.slice(23)  # arrays that do not begin at 0
    want = read_histories(rows[3:], IDS, True)
    for kind in (large, coded):
        columns = [part.set_column(1, "items", part["items"].cast(kind)) for part in parts]
        same(Histories.joined([read_table(part, NAMES, True) for part in columns]), want)
    numbers = {"id": [7], "items": [[3, 1, 99]]}
    known = np.array(["1", "3"], dtype=object)
    same(
        read_table(pa.table(numbers), known, False),
        read_histories([{"id": 7, "items": [3, 1, 99]}], {"1": 1, "3": 2}, False),
    )


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"id": ["a", None], "items": [[], []]}, "the id of 1 is missing"),
        ({"id": [1.5], "items": [["i1"]]}, "id: expected names, found 1.5"),
        ({"id": ["a", "b"], "items": [["i1"], None]}, "items of 'b': a value is missing"),
        ({"id": ["a", "b"], "items": [["i1"], ["i1", None]]}, "items of 'b': a value is missing"),
        ({"id": ["a"], "items": ["i1"]}, "items: expected lists, found string"),
        ({"id": ["a"], "items": [[1.5]]}, "items: expected lists of names, found list<"),
        ({"id": ["a", "b"], "items": [["i1"], ["i2"]], "times": [[1], [1, 2]]}, "times of 'b'"),
        ({"id": ["a", "b"], "items": [[], ["i2"]], "times": [[], [np.nan]]}, "times of 'b'"),
        ({"id": ["a"], "items": [["i2"]], "times": [["x"]]}, "expected lists of numbers"),
        ({"id": ["a"], "items": [["i1"]]}, "the model reads times"),
    ],
)
def test_what_is_no_history(columns: dict[str, list], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_table(pa.table(columns), NAMES, needs_time=True)


@pytest.mark.parametrize(("size", "at_once"), [(100, 100), (7, 3), (12, 100), (13, 5)])
def test_files(tmp_path: Path, monkeypatch, size: int, at_once: int) -> None:
    """Of several row groups, in parts that end anywhere; a folder in the order of names."""
    monkeypatch.setattr(parquet, "ROWS", at_once)
    for number in range(2):
        table = pa.Table.from_pylist(drawn(number))
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=23)
    assert count_of(tmp_path) == 100
    units = units_of(tmp_path, size)
    assert max(unit["end"] - unit["begin"] for unit in units) <= size
    tables = [table for unit in units for table in tables_of(**unit)]
    want = read_histories(drawn(0) + drawn(1), IDS, True)
    same(Histories.joined([read_table(table, NAMES, True) for table in tables]), want)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    for name in ("text.parquet", "none.parquet"):
        with pytest.raises(UsageError, match=f"{name} cannot be read"):
            units_of(tmp_path / name, 9)
    pq.write_table(pa.table({"user": ["a"], "items": [["i1"]]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="no column id; expected id, items .* found user, items"):
        units_of(tmp_path / "b.parquet", 9)


def test_command(tiny: Path, tmp_path: Path, capsys) -> None:
    run_dir, rows = trained("PosSASRec", tiny, tmp_path / "run"), drawn(2)
    (tmp_path / "h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "h.parquet")
    found = []
    for name in ("h.jsonl", "h.parquet"):
        out = tmp_path / f"{name}.csv"
        command = ["recommend", str(run_dir), "--histories", str(tmp_path / name), "--out"]
        assert main([*command, str(out)]) == 0
        found.append((pd.read_csv(out), capsys.readouterr().out.replace(name, "")))
    pd.testing.assert_frame_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] and "of 50 get the most popular items" in found[0][1]
    (tmp_path / "none.jsonl").touch()
    assert main([*command[:3], str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "n.csv")]) == 0
