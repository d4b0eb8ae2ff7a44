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

    if date_format and date_format not in _UNITS:  # the form of dates
        return _read_dates(column.cast(pa.string()), name, date_format, timezone)
    unit = date_format  # otherwise it is the unit of epochs, or None
    if has_numbers:
        return _read_epochs(column, name, unit)
    return _read_texts(column.cast(pa.string()), name, unit, timezone)


def _read_texts(
    texts: pa.ChunkedArray, name: str, unit: str | None, timezone: str | None
) -> tuple[np.ndarray, str]:
    """Read text of unknown form as dates, or as epochs if more cells are numbers than dates.

    Args:
        texts: [rows] strings, null where a cell is empty.
        name: name of the column, for messages.
        unit: s, ms, us or ns if all are epochs; None to tell epochs and their unit by the values.
        timezone: zone of dates that name none; None for UTC.

    Returns:
        [rows] float64 seconds since 1970, NaN where nothing is read; and the form in words.
    """
    if not unit:
        # The fast way: Arrow reads all cells at once, if each is an ISO date and either none has a
        # zone or all have. It raises an error otherwise.
        for zone in (None, "UTC"):
            with suppress(pa.ArrowException):
                return convert_ticks(texts.cast(pa.timestamp("ns", zone)), timezone), "ISO dates"

    is_number = pc.match_substring_regex(texts, _NUMBER)
    if not unit:
        begins_as_date = pc.match_substring_regex(texts, f"{_ISO}|{_DAY_OR_MONTH}")
        num_numbers = pc.sum(is_number).as_py() or 0  # None if all cells are empty
        num_dates = pc.sum(begins_as_date).as_py() or 0
        if num_dates >= num_numbers:
            return _read_dates(texts, name, None, timezone)

    # They are epochs. Cells that are no numbers become null, and so have no time.
    numbers = pc.if_else(is_number, texts, pa.scalar(None, pa.string()))
    return _read_epoch_texts(numbers, name, unit)


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
    # Find the cells that are epochs: all finite numbers or, if the unit is guessed, those of them
    # in the years 1978 to 2033.
    values = column.fill_null(0).to_numpy()
    is_epoch = np.isfinite(values) & ~column.is_null().to_numpy(zero_copy_only=False)
    if unit is None and is_epoch.any():
        unit = _guess_unit(values[is_epoch], name)
        is_epoch &= _are_in_usual_years(values, unit)
    unit = unit or "s"  # of a column without numbers

    # Convert them. Other cells, which may be infinite, count as 0 meanwhile, and become NaN.
    epochs = np.where(is_epoch, values, 0)
    seconds = _ticks_to_seconds(epochs, _UNITS[unit])  # _UNITS: how many of the unit are a second
    return np.where(is_epoch, seconds, np.nan), f"epoch {_NAMES[unit]}"


def _are_in_usual_years(values: np.ndarray, unit: str) -> np.ndarray:
    """Return [n] bool, whether [n] epochs of a unit (s, ms, us or ns) lie in 1978 to 2033."""
    first, end = _EPOCH  # seconds since 1970
    per_second = _UNITS[unit]
    return (first * per_second <= values) & (values < end * per_second)


def _guess_unit(values: np.ndarray, name: str) -> str:
    """Guess in which unit numbers count the time since 1970.

    It is the unit (s, ms, us or ns) in which at least 99% of them lie between 1978 and 2033. The
    few others, such as a 0 that stands for a missing time, are taken for no times.

    Args:
        values: [n] numbers, of which none is missing.
        name: name of their column, for the message.

    Returns:
        The unit.

    Raises:
        UsageError: if no unit fits.
    """
    for unit in _UNITS:
        num_fitting = _are_in_usual_years(values, unit).sum()
        if num_fitting >= _MIN_SHARE * len(values):  # _MIN_SHARE is 0.99
            return unit
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
    # ``encoded`` has the different texts (``dictionary``), and for each row the index of its text
    # among them (``indices``), null for an empty cell.
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    texts = pc.utf8_trim_whitespace(encoded.dictionary)
    if date_format:
        if "." not in date_format:  # digits that were read as floats, such as 20240302.0
            texts = pc.replace_substring_regex(texts, r"\.0*$", "")
        seconds, form = _parse_dates(texts, date_format), f"dates ({date_format})"
    else:
        seconds, form = _parse_usual_dates(texts, name)

    if timezone:  # dates without a zone were read as if in UTC
        has_zone = pc.match_substring_regex(texts, _WITH_ZONE).to_numpy(zero_copy_only=False)
        seconds = np.where(has_zone, seconds, _convert_clock(seconds, timezone))

    # Take the time of each row's text; NaN, appended after the last one, is that of empty cells.
    indices = encoded.indices.fill_null(len(texts)).to_numpy()
    return np.append(seconds, np.nan)[indices], form


def _parse_usual_dates(texts: pa.Array, name: str) -> tuple[np.ndarray, str]:
    """Parse dates that begin with the year (ISO dates), or with day and month.

    Args:
        texts: [n] strings.
        name: name of their column, for messages.

    Returns:
        [n] float64 seconds since 1970, NaN for a text of another form; and the form of the dates in
        words: ``ISO dates`` unless some begin with day and month.
    """
    # Databases write a zone as in 2024-03-02 17:05:31 UTC, for which ISO has the letter Z.
    texts = pc.replace_substring_regex(texts, " ?(UTC|GMT)$", "Z")
    begins_with_year = pc.match_substring_regex(texts, _ISO)
    iso = _parse_dates(pc.if_else(begins_with_year, texts, ""), "ISO8601")  # NaN for others

    others, form = _parse_days_and_months(texts, name)
    return np.where(np.isnan(iso), others, iso), form


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

    Each text is read both ways, as day/month and as month/day. One such as 31/12 or 12/31, which is
    a date in one way only, is read in this way. It also tells how to read one such as 03/04, which
    may be two days:

    ==================  ==================  ================
    a text as 31/12     a text as 12/31     03/04 is
    ==================  ==================  ================
    occurs              does not occur      the 3rd of April
    does not occur      occurs              the 4th of March
    occurs              occurs              refused
    does not occur      does not occur      refused
    ==================  ==================  ================

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

    # See whether texts such as 31/12 and 12/31 occur, and which texts may be two days.
    can_be_day, can_be_month = ~np.isnan(by_day), ~np.isnan(by_month)
    has_day_first = (can_be_day & ~can_be_month).any()
    has_month_first = (can_be_month & ~can_be_day).any()
    is_ambiguous = np.abs(by_day - by_month) > 0  # False for NaN, and for 05/05
    if has_day_first == has_month_first and is_ambiguous.any():
        example = texts[int(np.flatnonzero(is_ambiguous)[0])].as_py()
        raise UsageError(
            f"{name}: {shown(example)} may begin with the day or with the month; give its form, "
            "such as --date_format='%d/%m/%Y %H:%M' (day first) or '%m/%d/%Y %H:%M'"
        )
    if has_day_first:  # 12/31, if it occurs, too, is read in its only way
        return np.where(can_be_day, by_day, by_month), "dates (day first)"
    if can_be_month.any():
        return by_month, "dates (month first)"
    return by_month, "ISO dates"  # no text is such a date, all are NaN


def order_by_time(seconds: np.ndarray, column: pa.ChunkedArray) -> np.ndarray:
    """Return the order of interactions by time, and of those of the same time by a column.

    Args:
        seconds: [n] times.
        column: [n] cells. If each is a number or empty, they are compared as numbers, else as
            text. Empty cells come first.

    Returns:
        [n] indices of the interactions in that order.
    """
    # What is no number becomes NaN; ``are_numbers``: nothing but empty cells has become NaN.
    cells = column.to_pandas()
    numbers = pd.to_numeric(cells, errors="coerce")
    are_numbers = numbers.notna().equals(cells.notna())
    frame = pd.DataFrame({"time": seconds, "cell": numbers if are_numbers else cells})
    ordered = frame.sort_values(["time", "cell"], kind="stable", na_position="first")
    return ordered.index.to_numpy()
