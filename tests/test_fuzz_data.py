"""Damaged atomic files: an error that says so, or every event as a plain loop reads it."""

from __future__ import annotations

import codecs
import csv
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recbole_pos.config import PosConfig
from recbole_pos.data.atomic import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.quick_start import read_dataset

FILES = {
    "inter": ["user_id:token\titem_id:token\ttimestamp:float\trating:float\tdevice:token"]
    + [
        f"u{n % 6}\ti{n * 7 % 11}\t{1.7e9 + n * 1000 + 0.25}\t{n % 5 + 1}\t{('web', 'app')[n % 2]}"
        for n in range(40)
    ],
    "item": ["item_id:token\ttitle:token_seq\tprice:float\tbrand:token\tsizes:float_seq"]
    + [f"i{n}\tred n{n} é\t{n}.5\tb{n % 3}\t{n} 0.5 -1e3" for n in range(11)],
    "user": ["user_id:token\tage:float\tcountry:token"] + [f"u{n}\t{20 + n}\tNO" for n in range(6)],
}
CELLS = ["", " ", "NA", "null", "nan", "inf", "-inf", "1e308", "1e309", "1e-320", "9" * 400, "0x10"]
CELLS += ["1_000", "1,5", "+7", " 5", "5 ", "True", "٣", "-0", "--1", "[PAD]", "x" * 20_000, "😀"]
CELLS += [
    '"',
    '""',
    '"a"',
    '"a""b"',
    'a"b',
    '"a"b',
    '"a\tb"',
    '"a\nb"',
    "\\",
    "\x1a",
    "\u2028",
    "\x85",
]
Damage = Callable[[random.Random, bytes], bytes]


def of_bytes(change: Callable[[random.Random, bytearray, int], None]) -> Damage:
    """A damage at one byte of a file."""

    def damage(rng: random.Random, data: bytes) -> bytes:
        changed = bytearray(data)
        change(rng, changed, rng.randrange(len(data) + 1))
        return bytes(changed)

    return damage


def of_lines(change: Callable[[random.Random, list[list[str]]], Any]) -> Damage:
    """A damage of a file as a list of lines, lists of cells; the first is the header."""

    def damage(rng: random.Random, data: bytes) -> bytes:
        rows = [line.split("\t") for line in data.decode("latin-1").split("\n")]
        change(rng, rows)
        return "\n".join("\t".join(row) for row in rows).encode("latin-1", "replace")

    return damage


def flip(rng: random.Random, data: bytearray, at: int) -> None:
    for _ in range(rng.choice([1, 1, 3, 20])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def insert(rng: random.Random, data: bytearray, at: int) -> None:
    data[at:at] = rng.choice(
        [b"\0", b'"', b"\t", b"\n", b"\r", b" ", b"\xff", codecs.BOM_UTF8, b":"]
    )


def cut_out(rng: random.Random, data: bytearray, at: int) -> None:
    del data[at : at + rng.choice([1, 5, 50, 10**6])]


def repeat(rng: random.Random, data: bytearray, at: int) -> None:
    data[at:at] = data[at : at + rng.choice([5, 50, 500])]


def some(rng: random.Random, rows: list[list[str]]) -> list[list[str]]:
    """One line, some, or all."""
    return rng.choice([[rng.choice(rows)], rng.sample(rows, len(rows) // 2 or 1), rows])


def set_cell(rng: random.Random, rows: list[list[str]]) -> None:
    cell, place = rng.choice(CELLS), rng.randrange(5)
    for row in some(rng, rows[1:] or rows):
        row[place % len(row)] = cell.encode().decode("latin-1")


def add_cell(rng: random.Random, rows: list[list[str]]) -> None:
    cell, place = rng.choice(["", "", "x", "7"]), rng.choice([0, 1, 99])
    for row in some(rng, rows):
        row.insert(place, cell)


def remove_cell(rng: random.Random, rows: list[list[str]]) -> None:
    place = rng.randrange(5)
    for row in some(rng, rows):
        del row[place % len(row)]


def double_column(rng: random.Random, rows: list[list[str]]) -> None:
    place = rng.randrange(len(rows[0]))
    for row in rng.choice([rows, rows[:1]]):
        row.append(row[place % len(row)])


def other_header(rng: random.Random, rows: list[list[str]]) -> None:
    place, other = rng.randrange(len(rows[0])), rng.randrange(len(rows[0]))
    name, _, kind = rows[0][place].partition(":")
    rows[0][place] = rng.choice(
        [f"{name}:{rng.choice(KINDS)}", name, f"{name}:text", f"{name}:{kind}:{kind}", f":{kind}"]
        + [
            "",
            f"new:{kind}",
            f"{name} :{kind}",
            f"{name}:{kind} ",
            rows[0][other],
            f'"{name}:{kind}"',
        ]
    )


def swap_columns(rng: random.Random, rows: list[list[str]]) -> None:
    for row in rng.choice([rows, rows[:1], rows[1:]]):
        if len(row) > 1:
            row[0], row[1] = row[1], row[0]


def other_separator(rng: random.Random, rows: list[list[str]]) -> None:
    separator = rng.choice([",", " ", ";", "\t\t"])
    for row in some(rng, rows):
        row[:] = [separator.join(row)]


def blank_lines(rng: random.Random, rows: list[list[str]]) -> None:
    for _ in range(3):
        rows.insert(
            rng.randrange(len(rows) + 1), rng.choice([[""], [" "], ["\r"], ["", ""], ['""']])
        )


def lines_again(rng: random.Random, rows: list[list[str]]) -> None:
    rows += rng.choice([rows[1:], rows, [rng.choice(rows)]])


def leave_lines(rng: random.Random, rows: list[list[str]]) -> None:
    del rows[1 + rng.randrange(len(rows)) : rng.choice([len(rows), len(rows) // 2])]


def order_of_lines(rng: random.Random, rows: list[list[str]]) -> None:
    rows[1:] = rng.sample(rows[1:], len(rows[1:]))


DAMAGES: dict[str, Damage] = {
    "flip": of_bytes(flip),
    "insert": of_bytes(insert),
    "cut out": of_bytes(cut_out),
    "repeat": of_bytes(repeat),
    "cell": of_lines(set_cell),
    "more cells": of_lines(add_cell),
    "fewer cells": of_lines(remove_cell),
    "doubled column": of_lines(double_column),
    "header": of_lines(other_header),
    "swapped columns": of_lines(swap_columns),
    "separator": of_lines(other_separator),
    "blank lines": of_lines(blank_lines),
    "lines twice": of_lines(lines_again),
    "lines gone": of_lines(leave_lines),
    "order of lines": of_lines(order_of_lines),
    "no header": of_lines(lambda rng, rows: rows.pop(0)),
    "header alone": of_lines(lambda rng, rows: rows.__delitem__(slice(1, None))),
    "bom": lambda rng, data: codecs.BOM_UTF8 + data,
    "line ends": lambda rng, data: data.replace(
        b"\n", rng.choice([b"\r\n", b"\r", b"\n\r", b"\n\n"])
    ),
    "encoding": lambda rng, data: data.decode("utf-8", "replace").encode(
        rng.choice(["utf-16", "utf-16-le", "cp1252", "utf-32", "utf-7"]), "replace"
    ),
    "emptied": lambda rng, data: rng.choice([b"", b"\n", b" \n\t\n", codecs.BOM_UTF8]),
    "rubbish": lambda rng, data: rng.randbytes(rng.choice([1, 50, 5000])),
}


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
    """nan where there is none."""
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


# What Python says of itself, and no person should have to read.
PYTHON = re.compile(
    r"unpack|ufunc|NoneType|no attribute|max\(\) arg|dtype|KeyError|Traceback|object"
)


def damage(rng: random.Random) -> tuple[str, dict[str, bytes]]:
    """Files with one to three damages, and what was done to them."""
    texts = {suffix: ("\n".join(rows) + "\n").encode() for suffix, rows in FILES.items()}
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        suffix, name = (
            rng.choice(["inter", "inter", "item", "user"]),
            rng.choice([*DAMAGES, *["cell"] * 9]),
        )
        if texts[suffix]:
            texts[suffix] = DAMAGES[name](rng, texts[suffix])
        done.append(f"{name} of {suffix}")
    return ", ".join(done), texts


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
