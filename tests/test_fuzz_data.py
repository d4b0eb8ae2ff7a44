"""Damaged atomic files: an error that says so, or every event as a plain loop reads it."""

from __future__ import annotations

import csv
import math
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damages import FILES, damage

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.location import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset


def parse(data: bytes) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """(name, type) of the columns and the cells of all lines; ValueError if the file is wrong."""
    text = data.decode("utf-8-sig")
    rows = []
    for line in re.split("\r\n|\r|\n", text):
        if line.strip() or "\t" in line:
            if "\0" in line:
                raise ValueError("no text")
            try:
                rows += csv.reader([line], delimiter="\t", strict=True)
            except csv.Error as error:
                raise ValueError(str(error)) from error
    while rows and not "".join(rows[0]).strip():
        rows.pop(0)
    if len(rows) < 2 or {len(row) for row in rows} != {len(rows[0])}:
        raise ValueError("another number of cells")
    columns = [tuple(cell.split(":")) for cell in rows[0]]
    if any(len(column) != 2 or column[1] not in KINDS for column in columns):
        raise ValueError("no header")
    if len({name for name, _ in columns}) < len(columns):
        raise ValueError("a column twice")
    return columns, rows[1:]


def number(cell: str) -> float:
    """nan where none exists."""
    if cell in MISSING:
        return math.nan
    value = {"true": 1.0, "false": 0.0}.get(cell.lower())
    value = float(cell) if value is None else value
    return value if math.isfinite(value) else math.nan


def values(data: bytes) -> list[dict[str, Any]]:
    """A dict for every line: None or nan where something is missing."""
    columns, rows = parse(data)
    read = {
        "token": lambda cell: None if cell in MISSING else cell,
        "float": number,
        "token_seq": lambda cell: [] if cell in MISSING else [p for p in cell.split(" ") if p],
        "float_seq": lambda cell: (
            [] if cell in MISSING else [float(p) for p in cell.split(" ") if p]
        ),
    }
    return [
        {name: read[kind](cell) for (name, kind), cell in zip(columns, row, strict=True)}
        for row in rows
    ]


def first_of(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """The first line of every user or item."""
    return {row[key]: row for row in reversed(rows) if row[key] is not None}


def expected(texts: dict[str, bytes]) -> tuple[dict[str, list[dict]], dict[str, dict[str, dict]]]:
    """Events of every user in time order, and the lines of users and items by their names."""
    tables = {suffix: values(data) for suffix, data in texts.items()}
    things = {
        f"{suffix}_id": first_of(tables[suffix], f"{suffix}_id") for suffix in ("user", "item")
    }
    events: dict[str, list[dict]] = defaultdict(list)
    for row in sorted(tables["inter"], key=lambda row: row["timestamp"]):
        assert math.isfinite(row["timestamp"]), "an event without a time"
        if all(row[key] is not None and row[key] in things[key] for key in things):
            events[row["user_id"]].append(row)
    return events, things


def same_value(dataset: Any, field: str, found: Any, value: Any, missing: bool) -> bool:
    """Whether a cell of a table is what the file says."""
    kind = dataset.field2type[field].value
    if kind == "float":
        if missing or abs(value) > np.finfo(np.float32).max and field != "timestamp":
            return missing
        return float(found) == (value if field == "timestamp" else np.float32(value))
    if kind == "float_seq":
        padded = value + [0.0] * (len(found) - len(value))
        return found.tolist() == np.float32(padded).tolist()
    names = dataset.field2id_token[field]
    ids = np.atleast_1d(found.numpy())
    return names[ids[ids > 0]].tolist() == (value if kind == "token_seq" else [value] * bool(value))


def compare(dataset: Any, texts: dict[str, bytes]) -> None:
    """A dataset, after ``build``, against its files."""
    events, things = expected(texts)
    log = dataset.log
    users = dataset.field2id_token["user_id"]
    assert len(log) == sum(map(len, events.values())) > 0
    for user in range(1, dataset.user_num):
        span = range(log.offsets[user], log.offsets[user + 1])
        rows = events[users[user]]
        assert len(span) == len(rows), users[user]
        for event, row in zip(span, rows, strict=True):
            for field, column in log.fields.items():
                missing = field in dataset.missing and bool(dataset.missing[field][event])
                assert same_value(dataset, field, column[event], row[field], missing), (field, row)
    for feat, key in ((dataset.user_feat, "user_id"), (dataset.item_feat, "item_id")):
        for number_, name in enumerate(dataset.field2id_token[key][1:], 1):
            row = things[key].get(name)
            for field in feat.columns if row else ():
                missing = field in dataset.missing and bool(dataset.missing[field][number_])
                found = feat[field][number_]
                assert same_value(dataset, field, found, row[field], missing), (field, row)


def load(folder: Path, texts: dict[str, bytes], config: PosConfig) -> Any:
    """The files, read and built."""
    for suffix, data in texts.items():
        (folder / "shop" / f"shop.{suffix}").write_bytes(data)
    dataset = read_dataset(config)
    dataset.build()
    return dataset


# What Python says about itself, and no person should have to read.
PYTHON = re.compile(
    r"unpack|ufunc|NoneType|no attribute|max\(\) arg|dtype|KeyError|Traceback|object"
)


@pytest.fixture
def configs(tmp_path: Path) -> list[PosConfig]:
    """All columns of a dataset ``shop``, or those that the files have when they are whole."""
    (tmp_path / "shop").mkdir()
    load = [None, {s: [c.split(":")[0] for c in r[0].split("\t")] for s, r in FILES.items()}]
    return [
        PosConfig("SASRec", "shop", None, {"data_path": str(tmp_path), "load_col": columns})
        for columns in load
    ]


def test_whole_files_are_read(tmp_path: Path, configs: list[PosConfig]) -> None:
    texts = {suffix: "\n".join(rows).encode() for suffix, rows in FILES.items()}
    for config in configs:
        dataset = load(tmp_path, texts, config)
        assert len(dataset.log) == 40 and len(dataset.item_feat) == 12
        compare(dataset, texts)


def test_a_number_that_no_model_can_hold_is_missing(tmp_path: Path, configs) -> None:
    texts = {suffix: "\n".join(rows).encode() for suffix, rows in FILES.items()}
    texts["item"] = texts["item"].replace(b"\t3.5\t", b"\t1e39\t").replace(b"\t4.5\t", b"\tinf\t")
    dataset = load(tmp_path, texts, configs[0])
    names = dataset.field2id_token["item_id"][dataset.missing["price"]]
    assert set(names[1:]) == {"i3", "i4"} and torch.isfinite(dataset.item_feat["price"]).all()
    compare(dataset, texts)


def test_damaged_files(tmp_path: Path, configs, pytestconfig, record_property) -> None:
    cases = 3000 if pytestconfig.getoption("fuzz") else 100
    count: Counter[str] = Counter()
    for seed in range(cases):
        rng = random.Random(seed)
        what, texts = damage(rng)
        try:
            dataset = load(tmp_path, texts, rng.choice(configs))
        except UsageError as error:
            assert not PYTHON.search(str(error)), (seed, what, str(error))
            count["UsageError"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"case {seed}: {what}") from error
        try:
            compare(dataset, texts)
        except (ValueError, KeyError, AssertionError) as error:
            raise AssertionError(f"case {seed}, {what}: read, and not as it is written") from error
        count["read as written"] += 1
    assert min(count.values()) > cases / 10
    outcomes = ", ".join(f"{number} {what}" for what, number in count.items())
    record_property("fuzz", f"{cases} damaged datasets: {outcomes}")
