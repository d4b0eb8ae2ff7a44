"""Dates and epochs in any unambiguous form to seconds since 1970 in UTC."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

ROW_ORDER = "row_order"  # as the name of the time: none exists
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of an epoch, in a second
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_EPOCH = (10**8, 2 * 10**10)  # seconds that are taken for a date: 1973 to 2603
_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null, pa.types.is_dictionary)
_MOST = 0.99  # of the numbers of a column must be of one unit
_ISO_LIKE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d(?::\d\d(?::\d\d(?:\.\d{1,6}(?P<long>\d{1,3})?)?)?)?"
    r"(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?)?$"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
# A form has two halves, which meet at the first colon: a dataset has far fewer days and hours than
# moments, and only different texts are looked at.
Form = tuple[str, str]
_ZONE = r"(?: ?(?P<z>Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?))?"
_HOUR = r"(?:(?:T|,? +)(?P<H>\d{1,2}))?"
_REST = (
    r"(?:(?P<M>\d{2})(?::(?P<S>\d{2})(?:[.,](?P<f>\d{1,9}))?)?(?: ?(?P<p>[AaPp]\.?[Mm]\.?))?"
    + _ZONE
    + ")?"
)
_WEEKDAY = r"(?:[A-Za-z]{3,9},? )?"
_MONTH = r"(?P<B>[A-Za-z]{3})[a-z]*\.?"
_DAY, _YEAR = r"(?P<d>\d{1,2})", r"(?P<Y>\d{4})"
_TH = "(?:st|nd|rd|th)?"
_FORMS: dict[str, Form] = {
    "year first": (rf"{_YEAR}[-/.](?P<m>\d{{1,2}})[-/.]{_DAY}{_HOUR}", _REST),
    "day, month by name": (rf"{_WEEKDAY}{_DAY}{_TH}[ -]{_MONTH},?[ -]{_YEAR}{_HOUR}", _REST),
    "month by name": (rf"{_WEEKDAY}{_MONTH} {_DAY}{_TH},? {_YEAR}{_HOUR}", _REST),
    "as of Unix": (
        rf"[A-Za-z]{{3}} {_MONTH} +{_DAY} (?P<H>\d{{2}})",
        rf"(?P<M>\d{{2}}):(?P<S>\d{{2}}){_ZONE} {_YEAR}",
    ),
}
# Which of the first two is the day, only the column as a whole can tell.
_SLASHES = (rf"(?P<a>\d{{1,2}})[-/.](?P<b>\d{{1,2}})[-/.]{_YEAR}{_HOUR}", _REST)
_COMPACT_DAY = r"(?P<Y>(?:19|20)\d{2})(?P<m>\d{2})(?P<d>\d{2})"
_COMPACT = {8: _COMPACT_DAY, 14: _COMPACT_DAY + r"(?P<H>\d{2})(?P<M>\d{2})(?P<S>\d{2})"}
_DIRECTIVES = {
    **{"Y": _YEAR, "y": r"(?P<y>\d{2})", "m": r"(?P<m>\d{1,2})", "d": _DAY},
    **{"H": r"(?P<H>\d{1,2})", "I": r"(?P<H>\d{1,2})", "M": r"(?P<M>\d{1,2})"},
    **{"S": r"(?P<S>\d{1,2})", "f": r"(?P<f>\d{1,9})", "p": r"(?P<p>[AaPp]\.?[Mm]\.?)"},
    **{"B": _MONTH, "b": _MONTH, "A": "[A-Za-z]+", "a": "[A-Za-z]+", "%": "%"},
    **{"z": r"(?P<z>Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)", "Z": "(?P<z>Z|UTC|GMT)"},
}
_SHORT = {"%T": "%H:%M:%S", "%R": "%H:%M", "%F": "%Y-%m-%d", "%D": "%m/%d/%y"}


class AmbiguousDate(UsageError):
    """A column of dates of which nothing tells whether day or month stands first."""


@dataclass
class Times:
    """Times read from a column.

    Attributes:
        seconds: [rows] float64 since 1970-01-01 UTC; nan where none exists.
        forms: how many rows have which form, for people.
    """

    seconds: np.ndarray
    forms: Counter[str] = field(default_factory=Counter)

    def add(self, form: str, rows: Any, seconds: np.ndarray) -> None:
        """Set the seconds of rows that have none yet, and count their form.

        Args:
            form: name of the form, for people.
            rows: index of the rows.
            seconds: [rows] float64, NaN where the form does not match.
        """
        self.seconds[rows] = np.where(np.isnan(self.seconds[rows]), seconds, self.seconds[rows])
        if count := int((~np.isnan(seconds)).sum()):
            self.forms[form] += count


def read_times(column: pa.ChunkedArray, name: str, date_format: str | None = None) -> Times:
    """Read a column of times, numbers or text.

    Args:
        column: [rows] of any Arrow type.
        name: name of the column, for messages.
        date_format: s, ms, us or ns for numbers; or a form such as %d/%m/%Y %H:%M for text.

    Raises:
        UsageError: if it is unclear what days or numbers mean, saying how to settle it; if the
            column is of a type that says no time.
    """
    kind = column.type
    times = Times(np.full(len(column), np.nan))
    if date_format and date_format not in _UNITS and "%" not in date_format:
        raise UsageError(
            f"date_format: {shown(date_format)} is neither one of {', '.join(_UNITS)} (an epoch) "
            "nor a form such as %d/%m/%Y %H:%M"
        )
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        if date_format:
            raise UsageError(f"{name} holds {kind} already; leave date_format out")
        stamps = column if pa.types.is_timestamp(kind) else column.cast(pa.timestamp("s"))
        zone = getattr(stamps.type, "tz", None)
        ticks, missing = _numbers(stamps.cast(pa.int64()))
        seconds = np.where(missing, np.nan, _divide(ticks, _UNITS[stamps.type.unit]))
        times.add("times" if zone else "times without a zone, read as UTC", slice(None), seconds)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        _add_epochs(times, *_numbers(column), name, date_format)
    elif any(is_one(kind) for is_one in _TEXT):
        _add_text(times, column.cast(pa.string()), name, date_format)
    else:
        raise UsageError(f"{name} holds {kind}, which says no time")
    return times


def _numbers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return [rows] int64 or float64, and which are missing."""
    missing = column.is_null().to_numpy(zero_copy_only=False)
    values = column.fill_null(0).to_numpy()
    if values.dtype.kind == "f":
        missing = missing | ~np.isfinite(values)
        values = np.where(missing, 0, values)
    return values, missing


def _divide(ticks: np.ndarray, unit: int) -> np.ndarray:
    """Return [n] float64 seconds of ticks, of which a second has ``unit``.

    Whole seconds are split off first: float64 cannot hold nanoseconds since 1970.
    """
    if ticks.dtype.kind == "f":
        return ticks / unit
    whole = ticks // unit
    return whole + (ticks - whole * unit) / unit


def _add_text(times: Times, column: pa.ChunkedArray, name: str, date_format: str | None) -> None:
    """Add times of text: what Arrow reads as ISO dates, then numbers, then other dates."""
    if not date_format:
        left, start = [], 0
        for chunk in column.chunks:
            left.append(_add_iso(times, chunk, start))
            start += len(chunk)
        column = pa.chunked_array(left, pa.string())
    none = pa.scalar(None, pa.string())
    if not date_format or date_format in _UNITS:  # else digits are a date, with zeros before them
        try:
            values, missing = _numbers(column.cast(pa.int64()))
            column = pa.chunked_array([pa.nulls(len(column), pa.string())])
        except pa.ArrowException:  # some are no whole numbers
            pattern = r"^[+-]?\d{1,19}(?:\.\d*)?(?:[eE][+-]?\d+)?$"
            is_number = pc.match_substring_regex(column, pattern)
            numbers, column = (
                pc.if_else(is_number, column, none),
                pc.if_else(is_number, none, column),
            )
            values, missing = _numbers(numbers.cast(pa.float64()))
        _add_epochs(times, values, missing, name, date_format)
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    if len(rows) and date_format not in _UNITS:
        _add_dates(times, rows, column.take(pa.array(rows)), name, date_format)


def _add_iso(times: Times, chunk: Any, start: int) -> Any:
    """Add what Arrow reads, if it reads all of a chunk; return the rest, null where read."""
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
    form = "ISO dates" if likely["zone"] else "ISO dates without a zone, read as UTC"
    seconds = np.where(missing, np.nan, _divide(ticks, _UNITS[unit]))
    times.add(form, slice(start, start + len(chunk)), seconds)
    return pa.nulls(len(chunk), pa.string())


def _add_epochs(
    times: Times, values: np.ndarray, missing: np.ndarray, name: str, date_format: str | None
) -> None:
    """Add seconds of [rows] numbers that are not missing.

    Raises:
        UsageError: if they are too small or too different for one unit.
    """
    rows = np.flatnonzero(~missing)
    if not len(rows):
        return
    values = values[rows]
    if date_format in _UNITS:
        form = f"epoch {_NAMES[date_format]}"
        return times.add(form, rows, _divide(values, _UNITS[date_format]))
    if values.dtype.kind in "iu":
        texts = pa.array(values).cast(pa.string())
        if date_format:  # numbers have lost the zeros before them
            halves = read_form(date_format)
            texts = pc.utf8_lpad(texts, _count_digits(date_format), "0")
            return times.add(date_format, rows, _seconds(DateTimeParts(texts).match(halves)))
        digits = {len(str(abs(int(value)))) for value in (values.min(), values.max())}
        if len(digits) == 1 and (pattern := _COMPACT.get(digits.pop())):
            seconds = _seconds(DateTimeParts(texts).match((pattern, "")))
            if not np.isnan(seconds).any():
                return times.add("compact dates, read as UTC", rows, seconds)
    size = np.abs(values)
    for unit, ticks in _UNITS.items():
        fits = (_EPOCH[0] * ticks <= size) & (size < _EPOCH[1] * ticks)
        if fits.sum() >= _MOST * len(values):  # the others, such as 0, tell no time
            seconds = np.where(fits, _divide(values, ticks), np.nan)
            return times.add(f"epoch {_NAMES[unit]}", rows, seconds)
    raise UsageError(
        f"{name}: numbers from {values.min():,} to {values.max():,} are no epoch of one unit after "
        "1973. --date_format=s (or ms, us, ns) says that they are, whatever they look like"
    )


def _add_dates(
    times: Times, rows: np.ndarray, text: Any, name: str, date_format: str | None
) -> None:
    """Add times of texts that are dates.

    Args:
        times: times to add to.
        rows: [n] row of each text.
        text: [n] texts.
        name: name of the column, for messages.
        date_format: form that the user gives; None to try all.

    Raises:
        AmbiguousDate: if nothing tells whether day or month is first.
    """
    halves = DateTimeParts(text)
    for label, form in (
        {date_format: read_form(date_format)}.items() if date_format else (_FORMS.items())
    ):
        if (parts := halves.match(form))["fits"].any():
            times.add(f"dates ({label})", rows, _seconds(parts))
    if date_format or not (parts := halves.match(_SLASHES))["fits"].any():
        return
    # day and month are distinguished by the largest of each
    a, b = parts["a"], parts["b"]
    day_first, month_first = (a > 12) & (b <= 12), (b > 12) & (a <= 12)
    unsure = parts["fits"] & (a != b) & (a <= 12) & (b <= 12)
    if day_first.any() == month_first.any() and unsure.any():
        first = text[int(np.flatnonzero(unsure)[0])].as_py()
        both = "others of the column contradict each other"
        none = "nothing in the column tells which"
        mark = next(one for one in first if not one.isdigit())
        raise AmbiguousDate(
            f"{name}: {shown(first)} may begin with the day or with the month, and "
            f"{both if day_first.any() else none}. Give --date_format='%d{mark}%m{mark}%Y' "
            f"(day first) or '%m{mark}%d{mark}%Y', with ' %H:%M:%S' where a clock follows"
        )
    by_day = day_first if month_first.any() else np.full(len(a), day_first.any())
    seconds = _seconds({**parts, "d": np.where(by_day, a, b), "m": np.where(by_day, b, a)})
    times.add("dates (day first)", rows[by_day], seconds[by_day])
    times.add("dates (month first)", rows[~by_day], seconds[~by_day])


def read_form(date_format: str) -> Form:
    """Return the halves of a form such as %d/%m/%Y %H:%M.

    Raises:
        UsageError: if it is not one.
    """
    for short, long in _SHORT.items():
        date_format = date_format.replace(short, long)
    left, _, right = (_pattern(part) for part in date_format.partition(":"))
    names = re.findall(r"\?P<(\w)>", left + right)
    day = {"d"} <= set(names) and {"m", "B"} & set(names) and {"Y", "y"} & set(names)
    if not day or len(set(names)) < len(names):
        raise UsageError(
            f"date_format: {shown(date_format)} must have day, month and year, and each once, as "
            "in %d/%m/%Y %H:%M"
        )
    return left, right


def _count_digits(date_format: str) -> int:
    """Return how many digits a date in a form of digits only has, such as 8 for %d%m%Y; else 0."""
    is_digits = re.fullmatch(r"(?:%[dmYyHMS])+", date_format)
    return sum(4 if part == "Y" else 2 for part in date_format[1::2]) if is_digits else 0


def _pattern(date_format: str) -> str:
    text = ""
    for place, part in enumerate(re.split(r"%(.)", date_format)):
        if place % 2 == 0:
            text += re.escape(part).replace(r"\ ", " ")
        elif part in _DIRECTIVES:
            text += _DIRECTIVES[part]
        else:
            raise UsageError(
                f"date_format: %{part} is not known; known are %{', %'.join(_DIRECTIVES)}"
            )
    return text


class DateTimeParts:
    """Texts cut at their first colon, so that forms are matched on few different halves.

    Args:
        text: [texts] of Arrow.
    """

    def __init__(self, text: Any) -> None:
        if isinstance(text, pa.ChunkedArray):
            text = text.combine_chunks()
        cut = pc.split_pattern(text, ":", max_splits=1)
        ends = cut.offsets.to_numpy()
        second = pa.array(ends[:-1] + 1, mask=np.diff(ends) < 2)
        halves = (cut.values.take(at) for at in (pa.array(ends[:-1]), second))
        self.halves = [half.fill_null("").dictionary_encode() for half in halves]

    def match(self, form: Form) -> dict[str, np.ndarray]:
        """Return the named groups of a form as [texts] numbers: -1 where they are absent.

        ``fits`` says where both halves match; if they do nowhere, there is nothing else.
        """
        parts: dict[str, np.ndarray] = {}
        for half, regex in zip(self.halves, form, strict=True):
            codes = half.indices.to_numpy()
            groups = _match_groups(half.dictionary, regex)
            fits = groups.pop("fits")[codes]
            parts["fits"] = parts["fits"] & fits if parts else fits
            if not fits.any():
                return {"fits": fits}
            parts |= {name: values[codes] for name, values in groups.items()}
        return parts


def _match_groups(text: Any, regex: str) -> dict[str, np.ndarray]:
    """Match one half of a form: named groups as [n] int64, and ``fits`` as [n] bool."""
    names = re.findall(r"\?P<(\w)>", regex)
    if not names:
        fits = pc.match_substring_regex(text, f"^(?:{regex})$")
        return {"fits": fits.to_numpy(zero_copy_only=False)}
    found = pc.extract_regex(text, f"^(?:{regex})$")
    parts = {"fits": found.is_valid().to_numpy(zero_copy_only=False)}
    for place, name in enumerate(names):
        group = pc.struct_field(found, [place]).fill_null("")
        is_empty = pc.equal(group, "")
        if name == "B":
            lower = pc.utf8_lower(pc.utf8_slice_codeunits(group, 0, 3))
            number = pc.index_in(lower, pa.array(_MONTHS)).fill_null(-2).to_numpy() + 1
            parts["m"] = number.astype(np.int64)
        elif name == "z":  # seconds that a clock is ahead of UTC
            digits = pc.utf8_rpad(pc.replace_substring_regex(group, "[^0-9]", ""), 4, "0")
            hours = digits.cast(pa.int64()).to_numpy()
            behind = pc.starts_with(group, "-").to_numpy(zero_copy_only=False)
            parts[name] = np.where(behind, -1, 1) * (hours // 100 * 3600 + hours % 100 * 60)
        elif name == "p":
            after = pc.starts_with(pc.utf8_lower(group), "p").cast(pa.int64())
            parts[name] = pc.if_else(is_empty, -1, after).to_numpy()
        elif name == "f":
            group = pc.utf8_rpad(pc.if_else(is_empty, "0", group), 9, "0")
            parts[name] = group.cast(pa.int64()).to_numpy()
        else:
            parts[name] = pc.if_else(is_empty, "-1", group).cast(pa.int64()).to_numpy()
    if "y" in parts:  # two digits, as in POSIX: 69 to 99 are 1969 to 1999
        y = parts.pop("y")
        parts["Y"] = np.where(y < 0, -1, np.where(y < 69, 2000 + y, 1900 + y))
    return parts


def _seconds(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Return [n] float64 seconds since 1970 of parts of dates; nan where a date is impossible."""
    if not parts["fits"].any():
        return np.full(len(parts["fits"]), np.nan)
    year, month, day = parts["Y"], parts["m"], parts["d"]
    right = parts["fits"] & (year >= 1) & (month >= 1) & (month <= 12) & (day >= 1)
    months = (np.where(right, (year - 1970) * 12 + month - 1, 0)).astype("datetime64[M]")
    length = ((months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")).astype(int)
    right &= day <= length
    hour, minute, second = (np.maximum(parts.get(key, np.int64(0)), 0) for key in "HMS")
    half = parts.get("p", np.int64(-1))
    right &= (minute < 60) & (second < 60) & (hour < 24)
    right &= (half < 0) | ((hour >= 1) & (hour <= 12))
    hour = np.where(half < 0, hour, hour % 12 + 12 * half)
    days = months.astype("datetime64[D]").astype(np.int64) + day - 1
    clock = hour * 3600 + minute * 60 + second - parts.get("z", np.int64(0))
    total = days * 86400 + clock + parts.get("f", np.int64(0)) / 1e9
    return np.where(right, total, np.nan)
