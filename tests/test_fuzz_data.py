"""Damaged atomic files: an error that says so, or every event as a plain loop reads it."""

import codecs
import csv
import math
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data import atomic_files
from recbole_pos.data.atomic_files import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import read_dataset
from recbole_pos.tables.engine import find_form

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
CELLS += ['"', '""', '"a"', '"a""b"', 'a"b', '"a"b', '"a\tb"', '"a\nb"', "\\", "\u2028", "\x85"]


def cut_out(rng: random.Random, data: bytes) -> bytes:
    """A few bytes, or all that follow."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice([1, 5, 50, 10**6]) :]


def change_lines(rng: random.Random, data: bytes) -> bytes:
    """Lines twice, gone, in another order, or with a cell too many."""
    header, *lines = data.split(b"\n")
    some = rng.choices(lines or [b""], k=3)
    lines = rng.choice([lines + some, lines[3:], [], rng.sample(lines, len(lines))])
    return b"\n".join([header, *lines, *rng.choice([[], [some[0] + b"\t"], some])])


def set_cell(rng: random.Random, data: bytes) -> bytes:
    """A cell of one line, of some, of all, or of the header."""
    rows = [line.split(b"\t") for line in data.split(b"\n")]
    cell, place = rng.choice(CELLS).encode(), rng.randrange(5)
    for row in rng.choice([rng.sample(rows, 1), rng.sample(rows, len(rows) // 2 or 1), rows[1:]]):
        row[place % len(row)] = cell
    return b"\n".join(map(b"\t".join, rows))


def change_line_ends(rng: random.Random, data: bytes) -> bytes:
    return codecs.BOM_UTF8 + data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n"]))


DAMAGES = [cut_out, change_lines, change_line_ends, *[set_cell] * 4]


def damage_files(rng: random.Random) -> dict[str, bytes]:
    texts = {suffix: ("\n".join(rows) + "\n").encode() for suffix, rows in FILES.items()}
    for _ in range(rng.choice([1, 1, 1, 2])):
        suffix = rng.choice(["inter", "inter", "item", "user"])
        texts[suffix] = rng.choice(DAMAGES)(rng, texts[suffix])
    return texts


def parse(data: bytes) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """(name, type) of the columns and the cells of all lines; ValueError if the file is wrong."""
    text = data.decode("utf-8-sig")
    rows = []
    for line in (line.removesuffix("\r") for line in text.split("\n")):
        if line.strip() or "\t" in line:
            try:  # a carriage return within a line is a part of its cell
                quoted = csv.reader([line], delimiter="\t", strict=True)
                rows += quoted if '"' in line else [line.split("\t")]
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


def value(cell: str, kind: str) -> Any:
    """None, nan or an empty list where something is missing."""
    if kind.endswith("_seq"):
        parts = [] if cell in MISSING else [part for part in cell.split(" ") if part]
        return parts if kind == "token_seq" else list(map(float, parts))
    if kind == "token":
        return None if cell in MISSING else cell
    number = {"true": 1.0, "false": 0.0}.get(cell.lower())
    if cell in MISSING or (number is None and not math.isfinite(number := float(cell))):
        return math.nan
    return number


def expected(texts: dict[str, bytes]) -> tuple[dict[str, list[dict]], dict[str, dict[str, dict]]]:
    """Events of every user in time order, and the first lines of users and items by their names."""
    tables = {}
    for suffix, data in texts.items():
        columns, rows = parse(data)
        tables[suffix] = [
            {name: value(cell, kind) for (name, kind), cell in zip(columns, row, strict=True)}
            for row in rows
        ]
    things = {
        key: {row[key]: row for row in reversed(tables[key[:4]]) if row[key] is not None}
        for key in ("user_id", "item_id")
    }
    events: dict[str, list[dict]] = defaultdict(list)
    for row in sorted(tables["inter"], key=lambda row: row["timestamp"]):
        assert math.isfinite(row["timestamp"]), "an event without a time"
        if all(row[key] is not None and row[key] in things[key] for key in things):
            events[row["user_id"]].append(row)
    return events, things


def check_cell(dataset: Any, field: str, found: Any, place: int, wanted: Any) -> None:
    """Require that a cell of a column, at a place of it, is what the file says."""
    kind = dataset.kinds[field]
    is_missing = field in dataset.missing and bool(dataset.missing[field][place])
    if kind == "float":
        if is_missing or abs(wanted) > np.finfo(np.float32).max and field != "timestamp":
            assert is_missing, field
        else:
            assert float(found) == (wanted if field == "timestamp" else np.float32(wanted)), field
    elif kind == "float_seq":
        padded = wanted + [0.0] * (len(found) - len(wanted))
        assert found.tolist() == np.float32(padded).tolist(), field
    else:
        names, ids = dataset.field2id_token[field], np.atleast_1d(found.numpy())
        wanted = wanted if kind == "token_seq" else [wanted] * bool(wanted)
        assert names[ids[ids > 0]].tolist() == wanted, field


def compare(dataset: Any, texts: dict[str, bytes]) -> None:
    """Require of a dataset, that it is what its files say."""
    events, things = expected(texts)
    log, users = dataset.log, dataset.field2id_token["user_id"]
    assert len(log) == sum(map(len, events.values())) > 0
    for user in range(1, dataset.user_num):
        span = range(log.offsets[user], log.offsets[user + 1])
        for place, row in zip(span, events[users[user]], strict=True):
            for field, column in log.fields.items():
                check_cell(dataset, field, column[place], place, row[field])
    for feat, key in ((dataset.user_feat, "user_id"), (dataset.item_feat, "item_id")):
        for place, name in enumerate(dataset.field2id_token[key][1:], 1):
            row = things[key].get(name)
            for field in feat if row else ():
                check_cell(dataset, field, feat[field][place], place, row[field])


def load(folder: Path, texts: dict[str, bytes], config: PosConfig) -> Any:
    for suffix, data in texts.items():
        (folder / "shop" / f"shop.{suffix}").write_bytes(data)
    return read_dataset(config)


@pytest.fixture
def configs(tmp_path: Path) -> list[PosConfig]:
    """All columns of a dataset ``shop``, or those that the files have when they are whole."""
    (tmp_path / "shop").mkdir()
    columns = {s: [c.split(":")[0] for c in rows[0].split("\t")] for s, rows in FILES.items()}
    return [
        PosConfig("SASRec", "shop", None, {"data_path": str(tmp_path), "load_col": chosen})
        for chosen in (None, columns)
    ]


def test_whole_files_are_read(tmp_path: Path, configs: list[PosConfig]) -> None:
    texts = {suffix: "\n".join(rows).encode() for suffix, rows in FILES.items()}
    for config in configs:
        dataset = load(tmp_path, texts, config)
        assert len(dataset.log) == 40 and len(dataset.item_feat["item_id"]) == 12
        compare(dataset, texts)


def test_damaged_files(tmp_path: Path, configs, monkeypatch, pytestconfig, record_property) -> None:
    """Whether DuckDB splits their lines into cells or, where it cannot, Python."""
    cases = 3000 if pytestconfig.getoption("fuzz") else 100
    count: Counter[str] = Counter()
    monkeypatch.setattr(atomic_files, "_BLOCK_LINES", 7)
    for seed in range(cases):
        print(seed)  # shown on failure
        rng = random.Random(seed)
        texts, reader = damage_files(rng), rng.choice([find_form, lambda *_: None])
        monkeypatch.setattr(atomic_files, "find_form", reader)
        try:
            dataset = load(tmp_path, texts, rng.choice(configs))
        except UsageError as error:
            assert "shop" in str(error) and "\n" not in str(error)
            count["UsageError"] += 1
            continue
        compare(dataset, texts)
        count["read as written"] += 1
    assert min(count.values()) > cases / 10
    outcomes = ", ".join(f"{number} {what}" for what, number in count.items())
    record_property("fuzz", f"{cases} damaged datasets: {outcomes}")
