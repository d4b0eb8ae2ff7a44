"""A small dataset and what can happen to its files."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable
from typing import Any

from recbole_pos.data.location import KINDS

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
