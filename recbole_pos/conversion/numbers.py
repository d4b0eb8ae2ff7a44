"""Numbers as people write them: ``1,234.50``, ``1.234,50``, ``1 234,50``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

_MARKS = tuple((decimal, mark) for decimal, other in (".,", ",.") for mark in (other, " ", "'"))
_SPACES = "[\u00a0\u2009\u202f]"  # that do not break a line
_UNIT = r"(?:[$€£¥₹%]|[A-Z]{3}|kr\.?)?"
_UNITS = rf"^{_UNIT}\s?[+-]?\d[\d., ']*\s?{_UNIT}$"
_PLAIN = r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$"
_LIKELY = 0.5  # of the first cells must have digits as numbers have them, or nothing is looked at
_NEARLY = 0.9  # of the cells are numbers: then the others are reported
_SAMPLE = 200


@dataclass(frozen=True)
class Reading:
    """One way to read a column as numbers.

    Attributes:
        decimal, thousands: separators.
        numbers: [values] float64 numbers.
        certain: whether the values cannot be anything else, such as names with a space.
    """

    decimal: str
    thousands: str
    numbers: np.ndarray
    certain: bool = True

    @property
    def note(self) -> str:
        """The separators, for people."""
        return f"decimal separator {self.decimal!r}, thousands {self.thousands!r}"


def find_readings(
    values: pa.Array, decimal: str | None = None, thousands: str | None = None
) -> list[Reading]:
    """Return all readings of the values as numbers that differ in a number.

    Args:
        values: [n] different texts of a column.
        decimal, thousands: separators that the user gives; None to try all.
    """
    if not _is_likely(values):
        return []
    text = _plain(values)
    readings: list[Reading] = []
    for point, mark in _marks(decimal, thousands):
        if not pc.all(pc.match_substring_regex(text, _pattern(point, mark))).as_py():
            continue
        digits = pc.replace_substring(pc.replace_substring(text, mark, ""), point, ".")
        numbers = digits.cast(pa.float64()).to_numpy()
        if any(np.array_equal(numbers, other.numbers) for other in readings):
            continue
        is_certain = True
        if mark == " " and not (decimal or thousands):  # 101 205 may be two names
            is_certain = pc.any(pc.match_substring(text, point)).as_py()
        readings.append(Reading(point, mark, numbers, is_certain))
    return readings


def describe_doubt(values: pa.Array, readings: list[Reading]) -> str:
    """Return a message on the first ambiguous value, with the options that settle it."""
    if len(readings) == 1:
        return (
            f"{values[0].as_py()[:60]!r} may be a number or a list: --thousands COLUMN=' ' reads "
            "numbers"
        )
    first, second = readings[:2]
    place = int(np.flatnonzero(first.numbers != second.numbers)[0])
    options = [
        f"--decimal COLUMN={one.decimal!r} (it is {one.numbers[place]:.15g})" for one in readings
    ]
    return (
        f"{values[place].as_py()[:60]!r} may have a thousands or a decimal separator: give "
        f"{' or '.join(options)}"
    )


def find_wrong(
    values: pa.Array, decimal: str | None = None, thousands: str | None = None
) -> pa.Array:
    """Return the values that are no numbers, in the reading with most numbers."""
    text = _plain(values)
    patterns = [_PLAIN, *(_pattern(*marks) for marks in _marks(decimal, thousands))]
    masks = [pc.match_substring_regex(text, pattern) for pattern in patterns]
    best = max(masks, key=lambda mask: pc.sum(mask).as_py() or 0)
    return values.filter(pc.invert(best))


def describe_near_numbers(values: pa.Array, codes: np.ndarray) -> str:
    """Return a note on why a column of nearly only numbers is text; empty for other columns.

    Args:
        values: [n] different texts of the column.
        codes: [rows] place of each cell's value, from 1; 0 where it is missing.
    """
    if not len(values) or not _is_likely(values):
        return ""
    wrong = find_wrong(values)
    is_number = ~pc.is_in(values, wrong).to_numpy(zero_copy_only=False)
    rows = np.bincount(codes, minlength=len(values) + 1)[1:]
    share = max(rows[is_number].sum() / max(rows.sum(), 1), is_number.mean())
    if is_number.any() and share >= _NEARLY:
        return (
            f"text, as {len(wrong):,} of {len(values):,} different cells are no numbers, such as "
            f"{wrong[0].as_py()[:60]!r}"
        )
    if pc.all(pc.match_substring_regex(_plain(values), _UNITS)).as_py():
        return f"text, as numbers with units such as {values[0].as_py()!r} are not read"
    return ""


def _is_likely(values: pa.Array) -> bool:
    mask = pc.match_substring_regex(_plain(values[:_SAMPLE]), _UNITS)
    return (pc.sum(mask).as_py() or 0) >= _LIKELY * len(mask)


def _plain(values: pa.Array) -> pa.Array:
    text = pc.replace_substring_regex(pc.utf8_trim_whitespace(values), _SPACES, " ")
    return pc.replace_substring_regex(pc.replace_substring(text, "\u2212", "-"), "’", "'")


def _marks(decimal: str | None, thousands: str | None) -> list[tuple[str, str]]:
    given = decimal or ("," if thousands == "." else "."), thousands or " "
    return [
        (one, two)
        for one, two in dict.fromkeys([*_MARKS, given])
        if one != two and decimal in (None, one) and thousands in (None, two)
    ]


def _pattern(decimal: str, thousands: str) -> str:
    point, mark = (rf"\x{{{ord(one):x}}}" for one in (decimal, thousands))
    return rf"^[+-]?(?:\d+|[1-9]\d{{0,2}}(?:{mark}\d{{3}})+)(?:{point}\d+)?$"
