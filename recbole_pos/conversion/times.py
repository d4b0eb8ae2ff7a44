"""Dates and epochs in any unambiguous form to seconds since 1970 in UTC."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

ROW_ORDER = "row_order"  # name of the column of times where none exists
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of an epoch, in a second
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_EPOCH = (10**8, 2 * 10**10)  # seconds that are taken for a date: 1973 to 2603
_MIN_SHARE = 0.99  # of the numbers of a column must be epochs of one unit
_COMPACT = {8: "%Y%m%d", 14: "%Y%m%d%H%M%S"}  # number of digits -> form of a date
# Further forms whose numbers are also epochs, and the years of those that are taken for dates.
_COMPACT_OR_EPOCH = {10: "%Y%m%d%H", 12: "%Y%m%d%H%M"}
_COMPACT_YEARS = (1990, 2100)
_NUMBER = r"^[+-]?\d{1,19}(?:\.\d*)?(?:[eE][+-]?\d+)?$"
_ISO = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d(?::\d\d(?::\d\d(?:\.\d{1,6}(?P<long>\d{1,3})?)?)?)?"
    r"(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?)?$"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
# Forms of dates in lower case, and what their groups are rewritten to: an ISO date.
_SEP, _TH, _DAY, _YEAR = "[-/.]", "(?:st|nd|rd|th)?", r"(\d{1,2})", r"(\d{4})"
_WEEKDAY, _MONTH = "(?:[a-z]{3,9},? )?", r"([a-z]{3})[a-z]*\.?"
_ZONE = r"(?: ?(?:z|utc|gmt|([+-]\d{2}(?::?\d{2})?)))?"
_CLOCK = rf"(?:t|,? +)(\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d{{1,9}})?)?)(?: ?[ap]\.?m\.?)?{_ZONE}"
_FORMS = {
    "year first": (rf"{_YEAR}{_SEP}{_DAY}{_SEP}{_DAY}{_CLOCK}", r"\1-\2-\3t\4\5"),
    "day, month by name": (
        rf"{_WEEKDAY}{_DAY}{_TH}[ -]{_MONTH},?[ -]{_YEAR}{_CLOCK}",
        r"\3-\2-\1t\4\5",
    ),
    "month by name": (rf"{_WEEKDAY}{_MONTH} {_DAY}{_TH},? {_YEAR}{_CLOCK}", r"\3-\1-\2t\4\5"),
    "as of Unix": (
        rf"[a-z]{{3}} {_MONTH} +{_DAY} (\d{{2}}:\d{{2}}:\d{{2}}){_ZONE} {_YEAR}",
        r"\5-\1-\2t\3\4",
    ),
}
_HALF_DAY = r"(?P<hour>\d{1,2}):[^ap]*(?P<half>[ap])\.?m"  # a clock of twelve hours
# Which of the first two numbers is the day, only the column as a whole can tell.
_SLASHES = rf"{_DAY}{_SEP}{_DAY}{_SEP}{_YEAR}{_CLOCK}"
_DAY_FIRST, _MONTH_FIRST = (_SLASHES, r"\3-\2-\1t\4\5"), (_SLASHES, r"\3-\1-\2t\4\5")


class AmbiguousDate(UsageError):
    """A column of dates whose order of day and month is unclear, or that may be epochs."""


@dataclass
class Times:
    """Times of a column: [rows] seconds since 1970 in UTC (NaN: unread), and form -> row count."""

    seconds: np.ndarray
    forms: Counter[str] = field(default_factory=Counter)

    def add(self, form: str, rows: Any, seconds: np.ndarray) -> None:
        """Set seconds (NaN: not of the form) where ``rows`` are unread, and count the form."""
        self.seconds[rows] = np.where(np.isnan(self.seconds[rows]), seconds, self.seconds[rows])
        if num_rows := int((~np.isnan(seconds)).sum()):
            self.forms[form] += num_rows


def read_times(column: pa.ChunkedArray, name: str, date_format: str | None = None) -> Times:
    """Read a column of times, numbers or text.

    Args:
        column: [rows] of any Arrow type.
        name: name of the column, for messages.
        date_format: unit of numbers (s, ms, us or ns), or form of text such as %d/%m/%Y %H:%M, with
            directives of Python's strptime.

    Raises:
        UsageError: if days or numbers can mean several times, or the column has no type of times.
    """
    types = pa.types
    if types.is_decimal(column.type):
        try:
            column = column.cast(pa.int64() if column.type.scale == 0 else pa.float64())
        except pa.ArrowException as error:  # of more than 64 bits
            raise UsageError(f"{name} holds {column.type}, which says no time") from error
    dtype = column.type
    times = Times(np.full(len(column), np.nan))
    if date_format and date_format not in _UNITS:
        _require_date(date_format)
    if types.is_timestamp(dtype) or types.is_date(dtype):
        if date_format:
            raise UsageError(f"{name} holds {dtype} already; leave date_format out")
        stamps = column if types.is_timestamp(dtype) else column.cast(pa.timestamp("s"))
        form = "times" if stamps.type.tz else "times without a zone, read as UTC"
        times.add(form, slice(None), convert_ticks(stamps))
    elif types.is_integer(dtype) or types.is_floating(dtype):
        _add_epochs(times, *_read_numbers(column), name, date_format)
    elif types.is_string(dtype) or types.is_null(dtype) or types.is_dictionary(dtype):
        _add_text(times, column.cast(pa.string()), name, date_format)
    else:
        raise UsageError(f"{name} holds {dtype}, which says no time")
    return times


def _require_date(date_format: str) -> None:
    """Refuse a form without day, month or year."""
    directives = set(re.findall("%(.)", date_format.replace("%F", "%Y-%m-%d")))
    if not ("d" in directives and directives & set("mbB") and directives & set("yY")):
        raise UsageError(
            f"date_format: {shown(date_format)} is neither one of {', '.join(_UNITS)} (an epoch) "
            "nor a form with day, month and year, such as %d/%m/%Y %H:%M"
        )


def _read_numbers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return [rows] int64 or float64 numbers, and [rows] bool, true where one is missing."""
    is_missing = column.is_null().to_numpy(zero_copy_only=False)
    values = column.fill_null(0).to_numpy()
    if values.dtype.kind == "f":
        is_missing = is_missing | ~np.isfinite(values)
        values = np.where(is_missing, 0, values)
    return values, is_missing


def _ticks_to_seconds(ticks: np.ndarray, per_second: int) -> np.ndarray:
    """Return [n] float64 seconds of ticks."""
    whole = ticks // per_second  # split off: float64 cannot hold nanoseconds since 1970
    return whole + (ticks - whole * per_second) / per_second


def convert_ticks(column: Any) -> np.ndarray:
    """Return [rows] float64 seconds of Arrow's timestamps or durations, NaN where null."""
    ticks, is_missing = _read_numbers(column.cast(pa.int64()))
    return np.where(is_missing, np.nan, _ticks_to_seconds(ticks, _UNITS[column.type.unit]))


def _add_text(times: Times, column: pa.ChunkedArray, name: str, date_format: str | None) -> None:
    """Add times of text: first ISO dates, then numbers, then other dates.

    After each step ``column`` holds the text that is still unread, and null elsewhere.
    """
    if not date_format:
        unread, first_row = [], 0
        for chunk in column.chunks:
            unread.append(_add_iso(times, chunk, first_row))
            first_row += len(chunk)
        column = pa.chunked_array(unread, pa.string())
    # with a form of dates, digits such as 01032024 are a date and not an epoch
    if not date_format or date_format in _UNITS:
        try:
            values, is_missing = _read_numbers(column.cast(pa.int64()))
            column = pa.chunked_array([pa.nulls(len(column), pa.string())])
        except pa.ArrowException:  # some are no whole numbers
            is_number = pc.match_substring_regex(column, _NUMBER)
            null = pa.scalar(None, pa.string())
            numbers = pc.if_else(is_number, column, null).cast(pa.float64())
            column = pc.if_else(is_number, null, column)
            values, is_missing = _read_numbers(numbers)
        _add_epochs(times, values, is_missing, name, date_format)
    if date_format in _UNITS or column.null_count == len(column):
        return  # with a unit, only numbers are times
    if date_format:
        column = _normalize_dates(column, date_format)
        seconds = [_parse_dates(chunk, date_format) for chunk in column.chunks]
        times.add(f"dates ({date_format})", slice(None), np.concatenate(seconds))
    else:
        _add_dates(times, column, name)


def _normalize_dates(column: pa.ChunkedArray, date_format: str) -> pa.ChunkedArray:
    """Return texts as ``date_format`` can read them: without blanks around, pm for p.m.

    Digits lose the .0 of floats, and get the zeros before them back.
    """
    column = pc.utf8_trim_whitespace(column)
    if "%p" in date_format:
        column = pc.replace_substring_regex(column, r"(?i)([ap])\.m\.?", r"\1m")
    if "." in date_format:
        return column
    is_float = pc.match_substring_regex(column, r"^\d+\.0+$")
    digits = pc.replace_substring_regex(column, r"\.0+$", "")
    return pc.if_else(is_float, pc.utf8_lpad(digits, _count_digits(date_format), "0"), column)


def _count_digits(date_format: str) -> int:
    """Return the number of characters of dates in a form."""
    return len(datetime(2000, 12, 31).strftime(date_format))


def _add_iso(times: Times, chunk: Any, first_row: int) -> Any:
    """Add a chunk's times if Arrow reads all as ISO dates; return the chunk, or nulls if read."""
    known = chunk.drop_null()
    match = _ISO.match(known[0].as_py()) if len(known) else None
    if match is None:  # Arrow would take long to refuse it
        return chunk
    try:
        zone = "UTC" if match["zone"] else None
        stamps = chunk.cast(pa.timestamp("ns" if match["long"] else "us", zone))
    except pa.ArrowException:
        return chunk
    form = "ISO dates" if zone else "ISO dates without a zone, read as UTC"
    times.add(form, slice(first_row, first_row + len(chunk)), convert_ticks(stamps))
    return pa.nulls(len(chunk), pa.string())


def _add_epochs(
    times: Times, values: np.ndarray, is_missing: np.ndarray, name: str, date_format: str | None
) -> None:
    """Add times of [rows] numbers by unit or form of digits; guess it if ``date_format`` is None.

    Raises a UsageError if no unit fits.
    """
    rows = np.flatnonzero(~is_missing)
    if not len(rows):
        return
    values = values[rows]
    is_whole = np.abs(values) < 2**63
    if values.dtype.kind == "f":  # of pandas, which has floats where a cell is empty
        is_whole &= values == np.rint(values)
        values = values.astype(np.int64) if is_whole.all() else values
    if date_format in _UNITS:
        form = f"epoch {_NAMES[date_format]}"
        seconds = _ticks_to_seconds(values, _UNITS[date_format])
    elif date_format:
        form, seconds = date_format, np.full(len(values), np.nan)
        seconds[is_whole] = _parse_digits(values[is_whole].astype(np.int64), date_format)
    else:
        _refuse_ambiguous_digits(values, name)
        guess = _read_compact_dates(values) or _guess_epoch(values)
        if guess is None:
            raise UsageError(
                f"{name}: numbers from {values.min():,} to {values.max():,} are no epoch of one "
                "unit after 1973. --date_format=s (or ms, us, ns) says that they are, whatever "
                "they look like"
            )
        form, seconds = guess
    times.add(form, rows, seconds)


def _read_compact_dates(values: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Return form and [n] float64 seconds of numbers such as 20240302; None for other numbers."""
    if values.dtype.kind not in "iu":
        return None
    digits = {len(str(abs(int(value)))) for value in (values.min(), values.max())}
    date_format = _COMPACT.get(digits.pop()) if len(digits) == 1 else None
    if date_format is None:
        return None
    seconds = _parse_digits(values, date_format)
    return None if np.isnan(seconds).any() else ("compact dates, read as UTC", seconds)


def _refuse_ambiguous_digits(values: np.ndarray, name: str) -> None:
    """Raise an AmbiguousDate about numbers such as 2024030217, which are dates and epochs."""
    for num_digits, date_format in _COMPACT_OR_EPOCH.items():
        first, last = (year * 10 ** (num_digits - 4) for year in _COMPACT_YEARS)
        in_range = values[(first <= values) & (values < last)]
        if values.dtype.kind not in "iu" or len(in_range) < _MIN_SHARE * len(values):
            continue
        is_date = ~np.isnan(_parse_digits(in_range, date_format))
        if is_date.sum() >= _MIN_SHARE * len(values):
            unit = "s" if num_digits == 10 else "ms"
            raise AmbiguousDate(
                f"{name}: {in_range[0]} may be a date or {_NAMES[unit]} since 1970, expected one "
                f"meaning; give --date_format={date_format} or --date_format={unit}"
            )


def _guess_epoch(values: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Return form and [n] float64 seconds of numbers of one unit; None if no unit fits 99%."""
    magnitudes = np.abs(values)
    for unit, per_second in _UNITS.items():
        is_epoch = (_EPOCH[0] * per_second <= magnitudes) & (magnitudes < _EPOCH[1] * per_second)
        if is_epoch.sum() >= _MIN_SHARE * len(values):  # the others, such as 0, are no times
            seconds = np.where(is_epoch, _ticks_to_seconds(values, per_second), np.nan)
            return f"epoch {_NAMES[unit]}", seconds
    return None


def _parse_digits(values: np.ndarray, date_format: str) -> np.ndarray:
    """Return [n] float64 seconds of dates as whole numbers, which may lack leading zeros."""
    width = _count_digits(date_format)
    distinct, codes = np.unique(values, return_inverse=True)
    texts = pc.utf8_lpad(pa.array(distinct).cast(pa.string()), width, "0")
    return _parse_dates(texts, date_format)[codes]


def _parse_dates(texts: pa.Array, date_format: str) -> np.ndarray:
    """Return [n] float64 seconds of texts in a form that pandas knows; NaN for other texts."""
    import pandas as pd

    date_format = date_format.replace("%T", "%H:%M:%S").replace("%F", "%Y-%m-%d")
    try:
        stamps = pd.to_datetime(
            texts.to_pandas().astype(object), format=date_format, errors="coerce", utc=True
        )
    except ValueError as error:
        raise UsageError(f"date_format: {error}") from error
    ticks = stamps.dt.as_unit("ns").astype("int64").to_numpy()
    return np.where(stamps.isna(), np.nan, _ticks_to_seconds(ticks, _UNITS["ns"]))


def _add_dates(times: Times, column: pa.ChunkedArray, name: str) -> None:
    """Add times of text in one of the forms of dates, or raise an AmbiguousDate."""
    by_day, by_month = np.full((2, len(column)), np.nan)  # seconds if day (month) stands first
    first_row = 0
    for chunk in column.chunks:
        rows = slice(first_row, first_row + len(chunk))
        first_row += len(chunk)
        encoded = chunk.dictionary_encode()
        codes = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()
        text = pc.utf8_lower(pc.utf8_trim_whitespace(encoded.dictionary))
        midnight = pc.binary_join_element_wise(text, "00:00", " ")
        text = pc.if_else(pc.match_substring(text, ":"), text, midnight)
        for label, form in _FORMS.items():
            times.add(f"dates ({label})", rows, _parse_form(text, form)[codes])
        by_day[rows] = _parse_form(text, _DAY_FIRST)[codes]
        by_month[rows] = _parse_form(text, _MONTH_FIRST)[codes]
    can_be_day, can_be_month = ~np.isnan(by_day), ~np.isnan(by_month)
    has_day_first = (can_be_day & ~can_be_month).any()
    has_month_first = (can_be_month & ~can_be_day).any()
    is_ambiguous = np.abs(by_day - by_month) > 0
    if has_day_first == has_month_first and is_ambiguous.any():
        example = column[int(np.flatnonzero(is_ambiguous)[0])].as_py()
        reason = "nothing in the column tells which"
        if has_day_first:
            reason = "others of the column contradict each other"
        day_first, month_first = (_make_date_format(example, order) for order in ("dm", "md"))
        raise AmbiguousDate(
            f"{name}: {shown(example)} may begin with the day or with the month, and {reason}. "
            f"Give --date_format={day_first!r} (day first) or {month_first!r}"
        )
    is_day_first = can_be_day & has_day_first
    times.add("dates (day first)", slice(None), np.where(is_day_first, by_day, np.nan))
    times.add("dates (month first)", slice(None), np.where(is_day_first, np.nan, by_month))


def _make_date_format(example: str, order: str) -> str:
    """Return the form of a date with slashes, in which ``order`` (dm or md) stands first."""
    form = re.sub(r"^\d+(\D)\d+(\D)\d+", rf"%{order[0]}\1%{order[1]}\2%Y", example.strip())
    form = re.sub(r"[+-]\d\d(:?\d\d)?$", "%z", form)
    form, has_half = re.subn(r"(?i)[ap]\.?m\.?", "%p", form)
    form = re.sub(r"(:\d\d[.,])\d+", r"\1%f", form)
    form = re.sub(r"\d+:\d\d", "%I:%M" if has_half else "%H:%M", form, count=1)
    return re.sub(r":\d\d", ":%S", form)


def _parse_form(text: pa.Array, form: tuple[str, str]) -> np.ndarray:
    """Return [n + 1] float64 seconds of [n] dates with a clock; NaN for others, and at the end."""
    seconds = np.full(len(text) + 1, np.nan)  # n is the code of missing cells
    pattern, iso = f"^(?:{form[0]})$", form[1]  # and the ISO date that its groups make
    has_form = pc.match_substring_regex(text, pattern)
    if not pc.any(has_form).as_py():
        return seconds
    text = text.filter(has_form)
    dates = pc.replace_substring(pc.replace_substring_regex(text, pattern, iso), ",", ".")
    for number, month in enumerate(_MONTHS, 1):
        dates = pc.replace_substring(dates, f"-{month}-", f"-{number}-")
    has_zone = pc.match_substring_regex(dates, "t.*[+-]")
    dates = pc.if_else(has_zone, dates, pc.binary_join_element_wise(dates, "z", ""))
    parsed = _parse_dates(pc.utf8_upper(dates), "ISO8601")
    _add_half_days(parsed, text)
    seconds[np.flatnonzero(has_form)] = parsed
    return seconds


def _add_half_days(seconds: np.ndarray, text: pa.Array) -> None:
    """Correct [n] seconds in place where the clock of a text is one of twelve hours (pm)."""
    clock = pc.extract_regex(text, _HALF_DAY)
    rows = np.flatnonzero(clock.is_valid().to_numpy(zero_copy_only=False))
    hour, half = clock.take(pa.array(rows)).flatten()
    hour = hour.cast(pa.int64()).to_numpy()
    hours_to_add = np.where(hour % 12 == 0, -12, 0) + np.where(pc.equal(half, "p"), 12, 0)
    seconds[rows] += np.where((hour >= 1) & (hour <= 12), hours_to_add * 3600, np.nan)
