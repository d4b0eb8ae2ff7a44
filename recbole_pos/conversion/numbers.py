"""Numbers as people write them: ``1,234.50``, ``1.234,50``, ``1 234,50``."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

_MARKS = tuple((decimal, mark) for decimal, other in (".,", ",.") for mark in (other, " ", "'"))
_SPACES = "[\u00a0\u2009\u202f]"  # that do not break a line
_GROUPED = r"^[+-]?[1-9]\d{0,2}\.\d{3}$"
_SAMPLE = 200  # cells that are looked at before all are


def read_numbers(
    values: pa.Array,
    column: str,
    decimal: str | None = None,
    thousands: str | None = None,
    decimal_comma: bool = False,
) -> tuple[np.ndarray | None, str]:
    """Read the different texts of a column as numbers, if they can be read in one way only.

    Args:
        values: [n] texts.
        column: name of the column, for notes.
        decimal, thousands: separators that the user gives; None to try all.
        decimal_comma: whether a comma that may be either separator is that of decimals.

    Returns:
        [n] float64, or None if a value is not a number or can be read in two ways; and a note on
        how they are read, or why they are not.
    """
    if not (decimal or thousands):
        with suppress(pa.ArrowException):
            numbers = values.cast(pa.float64()).to_numpy()
            note = f"the point is read as decimal; --thousands {column}=. if it is not decimal"
            return numbers, note if pc.all(_matches(values, _GROUPED)).as_py() else ""
    text = _plain(values)
    readings: dict[tuple[str, str], np.ndarray] = {}
    for marks in _marks(decimal, thousands):
        if all(pc.all(_matches(some, _pattern(*marks))).as_py() for some in (text[:_SAMPLE], text)):
            digits = pc.replace_substring(text, marks[1], "")
            numbers = pc.replace_substring(digits, marks[0], ".").cast(pa.float64()).to_numpy()
            if not any(np.array_equal(numbers, other) for other in readings.values()):
                readings[marks] = numbers
    if not readings:
        return None, ""
    certain = list(readings)
    if len(certain) > 1:
        certain = [marks for marks in certain if decimal_comma and marks[0] == ","][:1]
    elif certain[0][1] == " " and not (decimal or thousands):  # 101 205 may be two names
        if not pc.any(pc.match_substring(text, certain[0][0])).as_py():
            return None, f"{values[0]} may be a number or a list: --thousands {column}=' '"
    if certain:
        note = "decimal separator {!r}, thousands {!r}".format(*certain[0])
        return readings[certain[0]], note
    first, second = list(readings.values())[:2]
    place = int(np.flatnonzero(first != second)[0])
    options = [f"--decimal {column}={m[0]!r} ({n[place]:.15g})" for m, n in readings.items()]
    return None, (
        f"{values[place].as_py()[:60]!r} may have a thousands or a decimal separator: give "
        f"{' or '.join(options)}"
    )


def describe_wrong(values: pa.Array, decimal: str | None, thousands: str | None) -> str:
    """Return which values are no numbers, in the reading with most numbers."""
    text = _plain(values)
    masks = [_matches(text, _pattern(*marks)) for marks in _marks(decimal, thousands)]
    wrong = values.filter(pc.invert(max(masks, key=lambda mask: pc.sum(mask).as_py() or 0)))
    return (
        f"{len(wrong):,} of {len(values):,} different cells are no number, such as "
        f"{wrong[0].as_py()[:60]!r}; correct them or take token"
    )


def _matches(text: pa.Array, pattern: str) -> pa.Array:
    return pc.match_substring_regex(text, pattern)


def _plain(values: pa.Array) -> pa.Array:
    text = pc.replace_substring_regex(pc.utf8_trim_whitespace(values), _SPACES, " ")
    return pc.replace_substring(pc.replace_substring(text, "\u2212", "-"), "’", "'")


def _marks(decimal: str | None, thousands: str | None) -> list[tuple[str, str]]:
    """Return the pairs of decimal and thousands separators that are possible."""
    given = decimal or ("," if thousands == "." else "."), thousands or " "
    return [
        (one, two)
        for one, two in dict.fromkeys([*_MARKS, given])
        if one != two and decimal in (None, one) and thousands in (None, two)
    ]


def _pattern(decimal: str, thousands: str) -> str:
    point, mark = (rf"\x{{{ord(one):x}}}" for one in (decimal, thousands))
    whole = rf"(?:\d+|[1-9]\d{{0,2}}(?:{mark}\d{{3}})+)"
    return rf"^[+-]?(?:{whole}(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?$"
