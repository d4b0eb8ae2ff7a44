"""Dates and epochs in any unambiguous form to seconds since 1970 in UTC."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recbole_pos.conversion.forms import (
    FORMS,
    SLASHES,
    Halves,
    compact_form,
    form_width,
    read_form,
    seconds_of,
)
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of an epoch, in a second
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_EPOCH = (10**8, 2 * 10**10)  # seconds that are taken for a date: 1973 to 2603
_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null, pa.types.is_dictionary)
_MOST = 0.99  # of the numbers of a column must be of one unit
_ISO_LIKE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d(?::\d\d(?::\d\d(?:\.\d{1,6}(?P<long>\d{1,3})?)?)?)?"
    r"(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?)?$"
)


@dataclass
class Times:
    """What a column says of time.

    Attributes:
        seconds: [rows] float64 since 1970-01-01 UTC; nan where there is none.
        forms: how many rows have which form, for people.
    """

    seconds: np.ndarray
    forms: Counter[str] = field(default_factory=Counter)


def read_times(column: pa.ChunkedArray, name: str, date_format: str | None = None) -> Times:
    """Seconds of a column of times, numbers or text.

    Args:
        column: [rows] of any Arrow type.
        name: of the column, for messages.
        date_format: s, ms, us or ns for numbers; or a form such as %d/%m/%Y %H:%M for text.

    Raises:
        UsageError: if it cannot be told what days or numbers mean, saying how to settle it; if the
            column is of a type that says no time.
    """
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        if date_format:
            raise UsageError(f"{name} holds {kind} already; leave date_format out")
        stamps = column if pa.types.is_timestamp(kind) else column.cast(pa.timestamp("s"))
        zone = getattr(stamps.type, "tz", None)
        ticks, missing = _numbers(stamps.cast(pa.int64()))
        seconds = _divided(ticks, UNITS[stamps.type.unit])
        seconds[missing] = np.nan
        told = "times" if zone else "times without a zone, read as UTC"
        return Times(seconds, Counter({told: int((~missing).sum())}))
    reader = _Reader(name, date_format)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return reader.result(*_numbers(column), pa.nulls(len(column), pa.string()))
    if any(is_one(kind) for is_one in _TEXT):
        return reader.text(column.cast(pa.string()))
    raise UsageError(f"{name} holds {kind}, which says no time")


def _numbers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """[rows] int64 or float64, and which are missing."""
    missing = column.is_null().to_numpy(zero_copy_only=False)
    values = column.fill_null(0).to_numpy()
    if values.dtype.kind == "f":
        missing = missing | ~np.isfinite(values)
        values = np.where(missing, 0, values)
    return values, missing


def _divided(ticks: np.ndarray, unit: int) -> np.ndarray:
    """[n] float64 seconds; whole ones apart from the rest, as no float holds nanoseconds."""
    if ticks.dtype.kind == "f":
        return ticks / unit
    whole = ticks // unit
    return whole + (ticks - whole * unit) / unit


class _Reader:
    """Reads text and numbers; what only the whole column can tell is decided at the end."""

    def __init__(self, name: str, date_format: str | None) -> None:
        self.name, self.format = name, date_format
        if date_format and date_format not in UNITS and "%" not in date_format:
            raise UsageError(
                f"date_format: {shown(date_format)} is neither one of {', '.join(UNITS)} (an "
                f"epoch) nor "
                "a form such as %d/%m/%Y %H:%M"
            )

    def text(self, column: pa.ChunkedArray) -> Times:
        """Seconds of [rows] text."""
        seconds = np.full(len(column), np.nan)
        forms: Counter[str] = Counter()
        if not self.format:
            left, start = [], 0
            for chunk in column.chunks:
                left.append(self._iso(chunk, seconds[start : start + len(chunk)], forms))
                start += len(chunk)
            column = pa.chunked_array(left, pa.string())
        if column.null_count < len(column):
            found = self._other(column)
            seconds = np.where(np.isnan(seconds), found.seconds, seconds)
            forms.update(found.forms)
        return Times(seconds, forms)

    def _iso(self, chunk: Any, out: np.ndarray, forms: Counter[str]) -> Any:
        """Fill in what Arrow reads if it reads all of it; returns the rest, null where read."""
        known = chunk.drop_null()
        likely = _ISO_LIKE.match(known[0].as_py()) if len(known) else None
        if likely is None:  # what cannot be cast takes Arrow long to refuse
            return chunk
        unit = "ns" if likely["long"] else "us"
        try:
            stamps = chunk.cast(pa.timestamp(unit, "UTC" if likely["zone"] else None))
        except pa.ArrowException:
            return chunk
        ticks, missing = _numbers(stamps.cast(pa.int64()))
        out[:] = np.where(missing, np.nan, _divided(ticks, UNITS[unit]))
        told = "ISO dates" if likely["zone"] else "ISO dates without a zone, read as UTC"
        forms[told] += int((~missing).sum())
        return pa.nulls(len(chunk), pa.string())

    def _other(self, column: pa.ChunkedArray) -> Times:
        """Numbers and forms of dates."""
        if self.format and self.format not in UNITS:  # digits are a date, with zeros before them
            none = np.zeros(len(column), dtype=np.int64)
            return self.result(none, np.ones(len(column), dtype=bool), column)
        try:  # all of them
            values, missing = _numbers(column.cast(pa.int64()))
            return self.result(values, missing, pa.nulls(len(column), pa.string()))
        except pa.ArrowException:
            pass
        is_number = pc.match_substring_regex(column, r"^[+-]?\d{1,19}(?:\.\d*)?(?:[eE][+-]?\d+)?$")
        numbers = pc.if_else(is_number, column, pa.scalar(None, pa.string()))
        rest = pc.if_else(is_number, pa.scalar(None, pa.string()), column)
        try:
            values, missing = _numbers(numbers.cast(pa.int64()))
        except pa.ArrowException:
            values, missing = _numbers(numbers.cast(pa.float64()))
        return self.result(values, missing, rest)

    def result(self, values: np.ndarray, missing: np.ndarray, text: Any) -> Times:
        """Seconds of [rows] numbers (where not missing) and of text (where not null)."""
        forms: Counter[str] = Counter()
        seconds = np.full(len(values), np.nan)
        if not missing.all():
            seconds[~missing] = self._epoch(values[~missing], forms)
        rows = np.flatnonzero(text.is_valid().to_numpy(zero_copy_only=False))
        if len(rows):
            seconds[rows] = self._dates(text.take(pa.array(rows)), forms)
        return Times(seconds, forms)

    def _epoch(self, values: np.ndarray, forms: Counter[str]) -> np.ndarray:
        """[n] seconds of numbers.

        Raises:
            UsageError: if they are too small or too different for one unit.
        """
        if self.format in UNITS:
            forms[f"epoch {_NAMES[self.format]}"] += len(values)
            return _divided(values, UNITS[self.format])
        if values.dtype.kind in "iu":
            texts = pa.array(values).cast(pa.string())
            form = read_form(self.format) if self.format else compact_form(values)
            if self.format:  # numbers have lost the zeros before them
                texts = pc.utf8_lpad(texts, form_width(self.format), "0")
            if form:
                seconds = seconds_of(Halves(texts).parts(form))
                if self.format or not np.isnan(seconds).any():
                    forms[self.format or "compact dates, read as UTC"] += len(values)
                    return seconds
        size = np.abs(values)
        for unit, ticks in UNITS.items():
            fits = (_EPOCH[0] * ticks <= size) & (size < _EPOCH[1] * ticks)
            if fits.sum() >= _MOST * len(values):  # the others, such as 0, tell no time
                forms[f"epoch {_NAMES[unit]}"] += int(fits.sum())
                return np.where(fits, _divided(values, ticks), np.nan)
        raise UsageError(
            f"{self.name}: numbers from {values.min():,} to {values.max():,} are no epoch of one "
            "unit after 1973. --date_format=s (or ms, us, ns) says that they are, whatever they "
            "look like"
        )

    def _dates(self, text: Any, forms: Counter[str]) -> np.ndarray:
        """[texts] seconds; nan for what is no date."""
        seconds = np.full(len(text), np.nan)
        halves = Halves(text)
        known = {self.format: read_form(self.format)} if self.format else FORMS
        for told, form in known.items() if self.format not in UNITS else ():
            if (parts := halves.parts(form))["fits"].any():
                found = seconds_of(parts)
                seconds = np.where(np.isnan(seconds), found, seconds)
                _count(forms, f"dates ({told})", found)
        if not self.format and (parts := halves.parts(SLASHES))["fits"].any():
            seconds = np.where(np.isnan(seconds), self._slashes(text, parts, forms), seconds)
        return seconds

    def _slashes(self, text: Any, parts: dict[str, np.ndarray], forms: Counter[str]) -> np.ndarray:
        """[texts] seconds of dates whose day and month are told by the largest of each."""
        a, b = parts["a"], parts["b"]
        day_first, month_first = (a > 12) & (b <= 12), (b > 12) & (a <= 12)
        unsure = parts["fits"] & (a != b) & (a <= 12) & (b <= 12)
        if day_first.any() == month_first.any() and unsure.any():
            first = text[int(np.flatnonzero(unsure)[0])].as_py()
            both = "others of the column contradict each other"
            none = "nothing in the column tells which"
            mark = next(one for one in first if not one.isdigit())
            raise UsageError(
                f"{self.name}: {shown(first)} may begin with the day or with the month, and "
                f"{both if day_first.any() else none}. Say --date_format='%d{mark}%m{mark}%Y' "
                f"(day first) or '%m{mark}%d{mark}%Y', with ' %H:%M:%S' where a clock follows"
            )
        by_day = day_first if month_first.any() else np.full(len(a), day_first.any())
        days = {"d": np.where(by_day, a, b), "m": np.where(by_day, b, a)}
        found = seconds_of({**parts, **days})
        _count(forms, "dates (day first)", found[by_day])
        _count(forms, "dates (month first)", found[~by_day])
        return found


def _count(forms: Counter[str], told: str, found: np.ndarray) -> None:
    if known := int((~np.isnan(found)).sum()):
        forms[told] += known
