"""Dates and epochs in any unambiguous form to seconds since 1970 in UTC."""

from __future__ import annotations

from contextlib import suppress
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
_WITH_ZONE = r":.*(?:Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)$"  # 12:00Z, 12:00 UTC or 12:00-04:00
# A date whose first number is the day or the month; only the column as a whole can tell which.
_DAY_OR_MONTH = r"^(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})"


def read_times(
    column: pa.ChunkedArray, name: str, date_format: str | None = None, timezone: str | None = None
) -> tuple[np.ndarray, str]:
    """Read a column of times, numbers or text as seconds since 1970 in UTC.

    The type of the column decides how. Timestamps are converted. Numbers are epochs (counts of
    seconds, ms, us or ns since 1970), unless ``date_format`` is a form such as ``%Y%m%d``: then
    they are digits of dates. Text is read as epochs if it has more numbers than texts that
    begin as dates do, else as dates. Epochs are always in UTC.

    Args:
        column: [rows] of times, numbers or text.
        name: name of the column, for messages.
        date_format: unit of numbers (s, ms, us or ns), or form of text such as %d/%m/%Y %H:%M, with
            directives of Python's strptime; None to tell it by the values.
        timezone: zone of dates that name none, such as America/New_York; None for UTC.

    Returns:
        [rows] float64 seconds, NaN where nothing is read; and the form of the times in words, such
        as ``ISO dates``.

    Raises:
        UsageError: if days or numbers can mean several times, or the column has no type of times.
    """
    dtype, types = column.type, pa.types
    if types.is_timestamp(dtype):
        return convert_ticks(column, timezone), "times"
    has_numbers = types.is_integer(dtype) or types.is_floating(dtype)
    if not (has_numbers or types.is_string(dtype) or types.is_dictionary(dtype)):
        raise UsageError(f"{name} holds {dtype}, which says no time")

    if date_format and date_format not in _UNITS:
        return _read_dates(column.cast(pa.string()), name, date_format, timezone)
    if has_numbers:
        return _read_epochs(column, name, date_format)

    # The fast way for text: if every cell is an ISO date, Arrow reads the column at once, or else
    # raises an error. It does so if all cells have a zone, and if none has.
    texts = column.cast(pa.string())
    if not date_format:
        for zone in (None, "UTC"):
            with suppress(pa.ArrowException):
                return convert_ticks(texts.cast(pa.timestamp("ns", zone)), timezone), "ISO dates"

    is_number = pc.match_substring_regex(texts, _NUMBER)
    begins_as_date = pc.match_substring_regex(texts, f"{_ISO}|{_DAY_OR_MONTH}")
    num_numbers, num_dates = (pc.sum(cells).as_py() or 0 for cells in (is_number, begins_as_date))
    if not date_format and num_dates >= num_numbers:
        return _read_dates(texts, name, date_format, timezone)

    # All cells that are no numbers become null, and so have no time.
    numbers = pc.if_else(is_number, texts, pa.scalar(None, pa.string()))
    return _read_epoch_texts(numbers, name, date_format)


def _ticks_to_seconds(ticks: np.ndarray, per_second: int) -> np.ndarray:
    """Return [n] float64 seconds of [n] ticks, such as 2500 ticks at 1000 per second: 2.5."""
    whole = ticks // per_second  # split off: float64 cannot hold nanoseconds since 1970
    return whole + (ticks - whole * per_second) / per_second


def convert_ticks(column: Any, timezone: str | None = None) -> np.ndarray:
    """Return [rows] float64 seconds since 1970 in UTC of Arrow's timestamps, NaN where null.

    Args:
        column: [rows] timestamps, all of which have a zone, or none.
        timezone: the zone of timestamps without one; None for UTC.
    """
    ticks = column.cast(pa.int64()).fill_null(0).to_numpy()
    is_missing = column.is_null().to_numpy(zero_copy_only=False)
    seconds = np.where(is_missing, np.nan, _ticks_to_seconds(ticks, _UNITS[column.type.unit]))
    if timezone and not column.type.tz:
        return _convert_clock(seconds, timezone)
    return seconds


def _convert_clock(seconds: np.ndarray, timezone: str) -> np.ndarray:
    """Convert times that the clocks of a zone show to UTC.

    Of the hour that clocks show twice in autumn, the first is taken. The hour that they skip in
    spring becomes its end: 02:30 becomes 03:00.

    Args:
        seconds: [n] what the clock shows, as seconds since 1970-01-01 00:00 on that clock, or NaN.
        timezone: name of the zone, such as ``Europe/Oslo``.

    Returns:
        [n] seconds since 1970 in UTC, or NaN.

    Raises:
        UsageError: if there is no such zone.
    """
    # Only the offset of whole seconds is subtracted, so that fractions of a second are kept. pandas
    # asks for each time whether it is the first (True) or second where clocks show it twice.
    clock = pd.Series(np.floor(seconds).astype("datetime64[s]"))
    is_first = np.ones(len(clock), dtype=bool)
    try:
        local = clock.dt.tz_localize(timezone, ambiguous=is_first, nonexistent="shift_forward")
    except KeyError as error:  # how pandas says that there is no such zone
        raise UsageError(
            f"timezone: found {shown(timezone)}, expected a zone such as Europe/Oslo"
        ) from error
    utc = local.dt.tz_convert(None)
    return seconds - (clock - utc).dt.total_seconds().to_numpy()


def _read_epoch_texts(numbers: Any, name: str, unit: str | None) -> tuple[np.ndarray, str]:
    """Read numbers that are given as text as epochs, as :func:`_read_epochs` reads numbers."""
    try:
        numbers = numbers.cast(pa.int64())
    except pa.ArrowException:  # some have decimals
        numbers = numbers.cast(pa.float64())
    return _read_epochs(numbers, name, unit)


def _read_epochs(column: Any, name: str, unit: str | None) -> tuple[np.ndarray, str]:
    """Read numbers as epochs: counts of seconds, ms, us or ns since 1970, all in one unit.

    Args:
        column: [rows] numbers, null where the cell is empty.
        name: name of the column, for messages.
        unit: s, ms, us or ns; None to guess it by the size of the numbers.

    Returns:
        [rows] seconds: NaN for missing numbers, and, if the unit is guessed, for those outside 1978
        to 2033, such as 0; and the form in words, such as ``epoch seconds``.
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
    return np.where(is_epoch, seconds, np.nan), f"epoch {_NAMES[unit]}"


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


def _read_dates(
    column: pa.ChunkedArray, name: str, date_format: str | None, timezone: str | None
) -> tuple[np.ndarray, str]:
    """Read a column of text as dates, by parsing each different text once.

    Args:
        column: [rows] strings, null where a cell is empty.
        name: name of the column, for messages.
        date_format: form for strptime; None for ISO dates and dates such as 31/12/2024.
        timezone: zone of dates that name none; None for UTC.

    Returns:
        [rows] float64 seconds since 1970, NaN where a cell is no date; and the form in words.
    """
    # the different texts, and the number of the text in each row
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    texts = pc.utf8_trim_whitespace(encoded.dictionary)
    if date_format:
        if "." not in date_format:  # digits that were read as floats, such as 20240302.0
            texts = pc.replace_substring_regex(texts, r"\.0*$", "")
        seconds, form = _parse_dates(texts, date_format), f"dates ({date_format})"
    else:
        # Without a form, dates begin with the year (ISO), or with day and month. Databases write a
        # zone as in 2024-03-02 17:05:31 UTC.
        texts = pc.replace_substring_regex(texts, " ?(UTC|GMT)$", "Z")
        iso = _parse_dates(pc.if_else(pc.match_substring_regex(texts, _ISO), texts, ""), "ISO8601")
        others, form = _parse_days_and_months(texts, name)
        seconds = np.where(np.isnan(iso), others, iso)

    if timezone:  # dates without a zone were read as if in UTC
        has_zone = pc.match_substring_regex(texts, _WITH_ZONE).to_numpy(zero_copy_only=False)
        seconds = np.where(has_zone, seconds, _convert_clock(seconds, timezone))

    # an empty cell gets the number after the last text, where a NaN is appended to the times
    numbers = encoded.indices.fill_null(len(texts)).to_numpy()
    return np.append(seconds, np.nan)[numbers], form


def _parse_dates(texts: pa.Array, date_format: str) -> np.ndarray:
    """Parse [n] texts in one form to [n] float64 seconds since 1970; NaN for other texts.

    Args:
        texts: [n] strings.
        date_format: the form, with directives of strptime; or ``ISO8601``, as pandas calls ISO
            dates. pandas raises a ValueError for a directive that it does not know.
    """
    objects = texts.to_pandas().astype(object)
    stamps = pd.to_datetime(objects, format=date_format, errors="coerce", utc=True)
    ticks = stamps.dt.as_unit("ns").astype("int64").to_numpy()
    return np.where(stamps.isna(), np.nan, _ticks_to_seconds(ticks, _UNITS["ns"]))


def _parse_days_and_months(texts: pa.Array, name: str) -> tuple[np.ndarray, str]:
    """Parse dates such as 31/12/2024, of which the column as a whole tells what comes first.

    Each text is read both ways, as day/month and as month/day. If some text is a date only with
    the day first (31/12), all are read so; 12/31 tells the opposite. If texts of both kinds occur,
    or of neither, a text that may be two days (03/04) is refused.

    Args:
        texts: [n] strings, of which those of other forms are left out.
        name: name of the column, for the message.

    Returns:
        [n] float64 seconds since 1970, NaN for a text of another form; and the form of all dates of
        the column in words, ``ISO dates`` if none is such a date.

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
    if has_day_first:
        return np.where(can_be_day, by_day, by_month), "dates (day first)"
    return by_month, "dates (month first)" if can_be_month.any() else "ISO dates"
