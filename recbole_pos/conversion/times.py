"""Dates and epochs in any unambiguous form to seconds since 1970 in UTC."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

ROW_ORDER = "row_order"  # name of the column of times where none exists
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of an epoch, in a second
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# Numbers of seconds that are taken for an epoch: 1978 to 2033. Hours and minutes written as digits,
# such as 2024030217, are beyond them in every unit.
_EPOCH = (25 * 10**7, 199 * 10**7)
_MIN_SHARE = 0.99  # of the numbers of a column must be epochs of one unit
_NUMBER = r"^[+-]?\d{1,19}(?:\.\d*)?(?:[eE][+-]?\d+)?$"
_ISO = r"^\d{4}[-/.]"
# A clock and then a zone: 12:00Z, 12:00 UTC, 12:00-04:00
_WITH_ZONE = r":.*(?:Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)\s*$"
# A date whose first number is the day or the month; only the column as a whole can tell which.
_DAY_OR_MONTH = r"^(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})"


@dataclass
class Times:
    """Times of a column.

    Attributes:
        seconds: [rows] float64 seconds since 1970 in UTC, NaN where nothing is read.
        forms: form of times, such as ``ISO dates`` -> number of rows that have it.
    """

    seconds: np.ndarray
    forms: Counter[str]


def read_times(
    column: pa.ChunkedArray, name: str, date_format: str | None = None, timezone: str | None = None
) -> Times:
    """Read a column of times, numbers or text as seconds since 1970 in UTC.

    Args:
        column: [rows] of times, numbers or text.
        name: name of the column, for messages.
        date_format: unit of numbers (s, ms, us or ns), or form of text such as %d/%m/%Y %H:%M, with
            directives of Python's strptime; None to tell it by the values.
        timezone: zone of times that name none, such as America/New_York; None for UTC.

    Raises:
        UsageError: if days or numbers can mean several times, or the column has no type of times.
    """
    # Some rows may hold dates and others epochs. The column is read once for each form, and each
    # reading is NaN in the rows of other forms.
    times = Times(np.full(len(column), np.nan), Counter())
    for form, seconds in _read_as_utc(column, name, date_format).items():
        is_read = ~np.isnan(seconds)
        times.seconds[is_read] = seconds[is_read]
        if is_read.any():
            times.forms[form] = int(is_read.sum())

    # Times that name no zone were read as if in UTC: move them by the offset of their zone.
    if timezone:
        lacks_zone = _find_without_zone(column, date_format) & ~np.isnan(times.seconds)
        times.seconds[lacks_zone] = _convert_clock(times.seconds[lacks_zone], timezone)
        times.forms[f"without a zone, read as {timezone}"] = int(lacks_zone.sum())
    return times


def _read_as_utc(
    column: pa.ChunkedArray, name: str, date_format: str | None
) -> dict[str, np.ndarray]:
    """Read a column of times as :func:`read_times` does, as if times without a zone were in UTC.

    The type of the column decides how. Timestamps are converted and text is parsed. Numbers are
    epochs (counts of seconds, ms, us or ns since 1970); or they are digits of dates (20240302), if
    ``date_format`` is a form such as ``%Y%m%d``.

    Args:
        column: [rows] of times, numbers or text.
        name: name of the column, for messages.
        date_format: unit of epochs or form of dates; None to tell it by the values.

    Returns:
        Name of a form, such as ``ISO dates`` -> [rows] float64 seconds, NaN in rows of other forms.

    Raises:
        UsageError: if the type of the column cannot say a time.
    """
    # _UNITS has the units of epochs (s, ms, us, ns); any other ``date_format`` is a form of dates.
    dtype, types = column.type, pa.types
    if types.is_timestamp(dtype):
        return {"times": convert_ticks(column)}
    is_number = types.is_integer(dtype) or types.is_floating(dtype)
    if is_number and (not date_format or date_format in _UNITS):
        return _read_epochs(column, name, date_format)
    if is_number or types.is_string(dtype) or types.is_dictionary(dtype):
        return _read_texts(column.cast(pa.string()), name, date_format)
    raise UsageError(f"{name} holds {dtype}, which says no time")


def _find_without_zone(column: pa.ChunkedArray, date_format: str | None) -> np.ndarray:
    """Return [rows] bool, true where a cell is a date that names no zone.

    Only such dates are moved to the zone that the user gives. Cells that are epochs (seconds since
    1970 and such) are false: they are always in UTC.

    Args:
        column: [rows] of times, numbers or text.
        date_format: unit of epochs (s, ms, us, ns) or form of dates, such as %Y%m%d; None if each
            cell tells its own form.
    """
    dtype = column.type
    if pa.types.is_timestamp(dtype):
        return np.full(len(column), dtype.tz is None)
    text = column.cast(pa.string()).fill_null("")
    # A clock and then a zone, such as 12:00Z or 12:00-04:00.
    has_zone = pc.match_substring_regex(text, _WITH_ZONE)
    if not date_format or date_format in _UNITS:  # then numbers are epochs, and not digits of dates
        has_zone = pc.or_(has_zone, pc.match_substring_regex(text, _NUMBER))
    return ~has_zone.to_numpy()


def _convert_clock(seconds: np.ndarray, timezone: str) -> np.ndarray:
    """Convert times that the clocks of a zone show to UTC.

    Of the hour that clocks show twice in autumn, the first is taken. The hour that they skip in
    spring becomes its end: 02:30 becomes 03:00.

    Args:
        seconds: [n] what the clock shows, as seconds since 1970-01-01 00:00 on that clock.
        timezone: name of the zone, such as ``Europe/Oslo``.

    Returns:
        [n] seconds since 1970 in UTC. Fractions of a second are kept, since only the whole seconds
        of the offset are subtracted.
    """
    # Take the whole seconds for local times of the zone, and find the same moments in UTC. pandas
    # asks for each time whether it is the first (True) or second where clocks show it twice.
    clock = pd.Series(np.floor(seconds).astype("datetime64[s]"))
    is_first = np.ones(len(clock), dtype=bool)
    try:
        local = clock.dt.tz_localize(timezone, ambiguous=is_first, nonexistent="shift_forward")
    except KeyError as error:  # how pandas says that there is no such zone
        raise UsageError(
            f"timezone: found {shown(timezone)}, expected a zone such as Europe/Oslo"
        ) from error
    utc = local.dt.tz_convert("UTC").dt.tz_localize(None)
    return seconds - (clock - utc).dt.total_seconds().to_numpy()


def _ticks_to_seconds(ticks: np.ndarray, per_second: int) -> np.ndarray:
    """Return [n] float64 seconds of [n] ticks, such as 2500 ticks at 1000 per second: 2.5."""
    whole = ticks // per_second  # split off: float64 cannot hold nanoseconds since 1970
    return whole + (ticks - whole * per_second) / per_second


def convert_ticks(column: Any) -> np.ndarray:
    """Return [rows] float64 seconds of Arrow's timestamps, NaN where null."""
    ticks = column.cast(pa.int64()).fill_null(0).to_numpy()
    is_missing = column.is_null().to_numpy(zero_copy_only=False)
    return np.where(is_missing, np.nan, _ticks_to_seconds(ticks, _UNITS[column.type.unit]))


def _read_epochs(column: Any, name: str, unit: str | None) -> dict[str, np.ndarray]:
    """Read numbers as epochs: counts of seconds, ms, us or ns since 1970, all in one unit.

    Args:
        column: [rows] numbers, null where the cell is empty.
        name: name of the column, for messages.
        unit: s, ms, us or ns; None to guess it by the size of the numbers.

    Returns:
        Name of the form, such as ``epoch seconds`` -> [rows] seconds: NaN for missing numbers,
        and, if the unit is guessed, for those outside 1978 to 2033, such as 0.
    """
    # Which cells are epochs: all numbers, or, if the unit is guessed, those that ``_guess_unit``
    # finds to be in the years of that unit.
    values = column.fill_null(0).to_numpy()
    is_epoch = np.isfinite(values) & ~column.is_null().to_numpy(zero_copy_only=False)
    if unit is None and is_epoch.any():
        unit, has_unit = _guess_unit(values[is_epoch], name)
        is_epoch[is_epoch] = has_unit
    # _UNITS has how many of each unit are a second, and _NAMES the words for it.
    unit = unit or "s"  # of a column without numbers
    seconds = _ticks_to_seconds(np.where(is_epoch, values, 0), _UNITS[unit])
    return {f"epoch {_NAMES[unit]}": np.where(is_epoch, seconds, np.nan)}


def _guess_unit(values: np.ndarray, name: str) -> tuple[str, np.ndarray]:
    """Guess in which unit numbers count the time since 1970.

    It is the unit (s, ms, us or ns) in which at least 99% of them lie between 1978 and 2033. The
    few others, such as a 0 that stands for a missing time, are taken for no times.

    Args:
        values: [n] numbers, of which none is missing.
        name: name of their column, for the message.

    Returns:
        The unit, and [n] bool: which of the ``values`` lie in those years.

    Raises:
        UsageError: if no unit fits.
    """
    # _UNITS has how many of each unit are a second; _MIN_SHARE is 99%.
    first, end = _EPOCH  # seconds since 1970: of 1978 and 2033
    for unit, per_second in _UNITS.items():
        has_unit = (first * per_second <= values) & (values < end * per_second)
        if has_unit.sum() >= _MIN_SHARE * len(values):
            return unit, has_unit
    raise UsageError(
        f"{name}: numbers from {values.min():,} to {values.max():,} are no epoch of one unit "
        "between 1978 and 2033; give --date_format=s (or ms, us, ns) if they are epochs, or a form "
        "such as --date_format=%Y%m%d if they are dates"
    )


def _read_texts(
    column: pa.ChunkedArray, name: str, date_format: str | None
) -> dict[str, np.ndarray]:
    """Read a column of text as times: numbers as epochs, all other texts as dates.

    An epoch is a count of seconds, ms, us or ns since 1970, such as 1709398800. A column may have
    both epochs and dates, and dates of several forms. So the times of each form are returned as an
    array of their own, which is NaN in all other rows.

    Args:
        column: [rows] strings.
        name: name of the column, for messages.
        date_format: s, ms, us or ns if all cells are epochs of this unit; a form such as
            ``%d/%m/%Y`` if all are dates of this form; None to tell it by the cells.

    Returns:
        Name of a form, such as ``ISO dates`` -> [rows] float64 seconds, NaN in rows of other forms.
    """
    if date_format and date_format not in _UNITS:  # a form: then numbers, too, are digits of dates
        return _read_date_texts(column, name, date_format)

    # The fast way: if every cell is an ISO date, Arrow reads the column at once, else it raises.
    if not date_format:
        for zone in (None, "UTC"):  # Arrow reads a column of which all cells, or none, have a zone
            with suppress(pa.ArrowException):
                return {"ISO dates": convert_ticks(column.cast(pa.timestamp("ns", zone)))}

    # Divide the column into numbers and other texts: two columns, each null in the other's rows.
    null = pa.scalar(None, pa.string())
    is_number = pc.match_substring_regex(column, _NUMBER)
    numbers, texts = pc.if_else(is_number, column, null), pc.if_else(is_number, null, column)
    forms = _read_epoch_texts(numbers, name, unit=date_format)
    return forms if date_format else forms | _read_date_texts(texts, name, date_format)


def _read_epoch_texts(numbers: Any, name: str, unit: str | None) -> dict[str, np.ndarray]:
    """Read numbers that are given as text as epochs, as :func:`_read_epochs` reads numbers."""
    try:
        numbers = numbers.cast(pa.int64())
    except pa.ArrowException:  # some have decimals
        numbers = numbers.cast(pa.float64())
    return _read_epochs(numbers, name, unit)


def _read_date_texts(
    column: pa.ChunkedArray, name: str, date_format: str | None
) -> dict[str, np.ndarray]:
    """Read a column of text as dates, by parsing each different text once.

    Args:
        column: [rows] strings, null where a cell is empty.
        name: name of the column, for messages.
        date_format: form for strptime; None for ISO dates and dates such as 31/12/2024.

    Returns:
        Name of a form -> [rows] float64 seconds since 1970, NaN in other rows. Nothing for a column
        that is empty.
    """
    if column.null_count == len(column):
        return {}
    # the different texts, and the number of the text in each row
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    forms = _read_dates(encoded.dictionary, name, date_format)
    # an empty cell gets the number after the last text, where a NaN is appended to the times
    numbers = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()
    return {form: np.append(seconds, np.nan)[numbers] for form, seconds in forms.items()}


def _read_dates(texts: pa.Array, name: str, date_format: str | None) -> dict[str, np.ndarray]:
    """Parse the different texts of a column as dates, in every form that a date may have.

    Args:
        texts: [n] strings, all different.
        name: name of the column, for messages.
        date_format: form for strptime; None for ISO dates and dates such as 31/12/2024.

    Returns:
        Name of a form -> [n] float64 seconds since 1970, NaN for a text of another form.
    """
    texts = pc.utf8_trim_whitespace(texts)
    if date_format:
        if "." not in date_format:  # digits that were read as floats, such as 20240302.0
            texts = pc.replace_substring_regex(texts, r"\.0*$", "")
        return {f"dates ({date_format})": _parse_dates(texts, date_format)}

    # Without a form, dates begin with the year (ISO), or with day and month. Databases write a zone
    # as in 2024-03-02 17:05:31 UTC.
    texts = pc.replace_substring_regex(texts, " ?(UTC|GMT)$", "Z")
    iso = pc.if_else(pc.match_substring_regex(texts, _ISO), texts, "")
    return {"ISO dates": _parse_dates(iso, "ISO8601"), **_parse_days_and_months(texts, name)}


def _parse_dates(texts: pa.Array, date_format: str) -> np.ndarray:
    """Parse [n] texts in one form to [n] float64 seconds since 1970; NaN for other texts.

    Args:
        texts: [n] strings.
        date_format: the form, with directives of strptime; or ``ISO8601``, as pandas calls ISO
            dates. pandas raises a ValueError for a directive that it does not know.
    """
    # two short forms that users know from strftime, but that reading by strptime lacks
    form = date_format.replace("%T", "%H:%M:%S").replace("%F", "%Y-%m-%d")
    objects = texts.to_pandas().astype(object)
    stamps = pd.to_datetime(objects, format=form, errors="coerce", utc=True)
    ticks = stamps.dt.as_unit("ns").astype("int64").to_numpy()
    return np.where(stamps.isna(), np.nan, _ticks_to_seconds(ticks, _UNITS["ns"]))


def _parse_days_and_months(texts: pa.Array, name: str) -> dict[str, np.ndarray]:
    """Parse dates such as 31/12/2024, of which the column as a whole tells what comes first.

    Each text is read both ways, as day/month and as month/day. If some text is a date only with
    the day first (31/12), all are read so; 12/31 tells the opposite. If texts of both kinds occur,
    or of neither, a text that may be two days (03/04) is refused.

    Args:
        texts: [n] strings, of which those of other forms are left out.
        name: name of the column, for the message.

    Returns:
        Name of a form -> [n] float64 seconds since 1970, NaN for a text of another form.

    Raises:
        UsageError: if a text may be two days, as 03/04/2024, and no other tells the order.
    """
    dates = pc.if_else(pc.match_substring_regex(texts, _DAY_OR_MONTH), texts, "")
    # Rewrite each text as an ISO date in both ways: 31/12/2024 as 2024-12-31 and as 2024-31-12.
    # What is no date, as month 31, becomes NaN.
    day_first = pc.replace_substring_regex(dates, _DAY_OR_MONTH, r"\3-\2-\1")
    month_first = pc.replace_substring_regex(dates, _DAY_OR_MONTH, r"\3-\1-\2")
    by_day, by_month = _parse_dates(day_first, "ISO8601"), _parse_dates(month_first, "ISO8601")

    # See whether some text can be read in one way only.
    can_be_day, can_be_month = ~np.isnan(by_day), ~np.isnan(by_month)
    has_day_first = (can_be_day & ~can_be_month).any()
    has_month_first = (can_be_month & ~can_be_day).any()
    is_ambiguous = np.abs(by_day - by_month) > 0
    if has_day_first == has_month_first and is_ambiguous.any():
        example = texts[int(np.flatnonzero(is_ambiguous)[0])].as_py()
        raise UsageError(
            f"{name}: {shown(example)} may begin with the day or with the month; give its form, "
            "such as --date_format='%d/%m/%Y %H:%M' (day first) or '%m/%d/%Y %H:%M'"
        )
    # By the month otherwise: then it is the only way, or both ways give the same day (05/05).
    is_day_first = can_be_day & has_day_first
    return {
        "dates (day first)": np.where(is_day_first, by_day, np.nan),
        "dates (month first)": np.where(is_day_first, np.nan, by_month),
    }
