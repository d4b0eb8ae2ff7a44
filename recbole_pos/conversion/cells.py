"""Columns as the different cells they have, and the type of field that these make."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.times import convert_ticks, read_times
from recbole_pos.data.location import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, shown

INNER = "\x1f"  # between the names of a sequence, until they are written
_MISSING_WORDS = pa.array([word for word in MISSING if word])
_ID = re.compile(r"(^|_)(id|ids|code|zip|zipcode|postcode|sku|isbn|asin|ean|upc|gtin|phone)$")
_LIST = r"(?s)^\s*\[.*\]\s*$"
_ISO = r"^\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?$"
_PIPE = r"[^\s|]\|[^\s|]"
_MIN_PIPED = 0.05  # of the different cells must have a | for all of them to be lists
# Decimal and thousands separators of numbers as people write them: 1,234.50 or 1 234,50.
_SEPARATORS = ((".", ","), (".", " "), (".", "'"), (",", "."), (",", " "), (",", "'"))
_ENCODED = (  # what Arrow has codes for
    *(pa.types.is_string, pa.types.is_integer, pa.types.is_floating),
    *(pa.types.is_decimal, pa.types.is_dictionary),
)
_SPACES = "[\u00a0\u2009\u202f]"  # that do not break a line
_EXPONENT = re.compile(r"\d\.?[eE][+-]?\d")
_GROUPED = r"^[+-]?[1-9]\d{0,2}\.\d{3}$"
_UNIT = r"(?P<unit>\p{Sc}|%$|\b[A-Z]{3}$)"  # of an amount, such as $, % and EUR
_FIRST = 200  # cells that are read first, since they mostly decide
_MAX_WRONG = 0.1  # of the different cells may be no number for a note on them


@dataclass(frozen=True)
class Cells:
    """A column of text, as codes of its different values.

    Attributes:
        codes: [rows] index of each cell in ``values``; 0 where it is missing.
        values: [different cells + 1] text, the first empty; ``INNER`` separates the names of a
            sequence.
        kind: token, token_seq, float or float_seq; empty before it is guessed.
        notes: what to report about the column.
    """

    codes: np.ndarray
    values: pa.Array
    kind: str = ""
    notes: tuple[str, ...] = ()

    @property
    def different(self) -> int:
        """Number of different values."""
        return len(self.values) - 1

    def __getitem__(self, rows: np.ndarray) -> Cells:
        """Return the cells of some rows."""
        return replace(self, codes=self.codes[rows])

    def as_kind(self, kind: str, *notes: str) -> Cells:
        """Return the same cells with a kind and further notes; empty notes are left out."""
        return replace(self, kind=kind, notes=(*self.notes, *filter(None, notes)))

    def recode(self, values: pa.Array, kind: str, *notes: str) -> Cells:
        """Return cells with other texts [different cells]; where a text is empty, it is missing."""
        encoded = pa.concat_arrays([pa.array([""]), values]).dictionary_encode()
        is_empty = pc.equal(encoded.dictionary, "").to_numpy(zero_copy_only=False)
        new_codes = np.where(is_empty, 0, np.cumsum(~is_empty)).astype(np.int32)
        texts = encoded.dictionary.filter(pa.array(~is_empty))
        cells = replace(
            self,
            codes=new_codes[encoded.indices.to_numpy()][self.codes],
            values=pa.concat_arrays([pa.array([""]), texts]),
        )
        return cells.as_kind(kind, *notes)


def encode(column: pa.ChunkedArray, name: str) -> Cells:
    """Encode a column of text, numbers, times, or lists of them; refuse another Arrow type.

    Cells with words such as NaN become missing.
    """
    kind = note = ""
    dtype, types = column.type, pa.types
    if isinstance(dtype, pa.BaseExtensionType):  # whose storage may mean anything
        raise UsageError(f"column {shown(name)} holds {dtype}, which is no field")
    try:
        if types.is_timestamp(dtype) or types.is_date(dtype):
            kind, note = "float", "seconds since 1970, UTC"
            seconds = read_times(column, name).seconds
            column = pa.chunked_array([pa.array(seconds, from_pandas=True)])
        elif types.is_duration(dtype):
            kind, note = "float", "durations in seconds"
            column = pa.chunked_array([pa.array(convert_ticks(column), from_pandas=True)])
        elif types.is_large_list(dtype):
            kind = "float_seq" if types.is_floating(dtype.value_type) else "token_seq"
            column = pa.chunked_array([_join_lists(chunk) for chunk in column.chunks], pa.string())
        elif types.is_floating(dtype):
            column = column.cast(pa.float64())
        elif not any(is_type(dtype) for is_type in _ENCODED):
            column = column.cast(pa.string())
        codes, text = _encode_texts(column)
    except pa.ArrowException as error:
        raise UsageError(f"column {shown(name)} holds {dtype}, which is no field") from error
    cells = Cells(codes, pa.concat_arrays([pa.array([""]), text]), kind, (note,) if note else ())
    is_missing = pc.is_in(cells.values, _MISSING_WORDS)
    if not (pc.any(is_missing).as_py() or pc.any(pc.equal(text, "")).as_py()):
        return cells
    num_missing = int(is_missing.to_numpy(zero_copy_only=False)[codes].sum())
    words = ", ".join(map(repr, cells.values.filter(is_missing).to_pylist()[:4]))
    note = f"{num_missing:,} cells {words} read as missing" if num_missing else ""
    return cells.recode(pc.if_else(is_missing, "", cells.values)[1:], kind, note)


def _encode_texts(column: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Return [rows] code of each cell, 0 if it is null, and the text of codes from 1."""
    # a given dictionary may hold null, or one text twice; 0.0 and -0.0 are both 0
    may_repeat = pa.types.is_dictionary(column.type) or pa.types.is_floating(column.type)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    encoded = column.unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # of no rows
        encoded = pa.array([], pa.string()).dictionary_encode()
    values = encoded.dictionary
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False) + np.int32(1)
    if pa.types.is_floating(values.type):
        text = format_numbers(values)
    elif pa.types.is_decimal(values.type):  # may be ids, which no float holds
        text = _format_decimals(values)
    else:
        text = values.cast(pa.string())
    if not may_repeat:
        return codes, text
    unique = text.drop_null().unique()
    new_codes = pc.index_in(text, unique, skip_nulls=True).fill_null(-1).to_numpy() + np.int32(1)
    return np.append(np.int32(0), new_codes)[codes], unique


def _format_decimals(decimals: pa.Array) -> pa.Array:
    """Return the exact text of [n] decimals: 1.50 as 1.5, 2.00 as 2, 0E-8 as 0."""
    text = pc.replace_substring_regex(decimals.cast(pa.string()), r"^0E.*", "0")
    text = pc.replace_substring_regex(text, r"(\.\d*?)0+($|E)", r"\1\2")
    return pc.replace_substring_regex(text, r"\.($|E)", r"\1")


def _join_lists(chunk: Any) -> pa.Array:
    """Return lists as text with ``INNER`` between values; an empty list becomes an empty text."""
    values = chunk.values.cast(pa.string()).fill_null("")
    # from_arrays takes no null where the array is a slice; binary_join gives none for these
    text = pc.binary_join(pa.LargeListArray.from_arrays(chunk.offsets, values), INNER).cast(
        pa.string()
    )
    return pc.if_else(chunk.is_valid(), text, pa.scalar(None, pa.string()))


def format_numbers(numbers: Any) -> pa.Array:
    """Return the shortest exact text of [n] float64: 1.0 as 1, 1e15 by its digits, nan empty."""
    numbers = np.asarray(numbers, dtype=np.float64)
    is_whole = (numbers == np.rint(numbers)) & (np.abs(numbers) < 2**53)
    text = pa.array(numbers).cast(pa.string())
    if is_whole.any():
        whole_text = pa.array(np.where(is_whole, numbers, 0).astype(np.int64)).cast(pa.string())
        text = pc.if_else(pa.array(is_whole), whole_text, text)
    return pc.if_else(pa.array(np.isnan(numbers)), "", text)


def guess_kind(cells: Cells, column: str, decimal_comma: bool = False) -> Cells:
    """Return the cells of a column with the kind that they most likely have.

    Numbers in a column whose name ends in _id or the like are tokens. With ``decimal_comma`` 12,99
    is a number.

    Raises:
        UsageError: if a list of numbers has one that is missing or not finite.
    """
    values = cells.values[1:]
    if cells.kind == "float_seq":
        _require_finite(cells, f"column {shown(column)}")
    if cells.kind:
        return cells
    if not len(values):
        return cells.as_kind("token")
    if (lists := parse_lists(values)) is not None:
        return guess_kind(_as_sequences(cells, lists), column)
    if pc.sum(pc.match_substring_regex(values, _PIPE)).as_py() > _MIN_PIPED * len(values):
        return convert_cells(cells, "token_seq", column).as_kind("token_seq", "lists, split at |")
    if _ID.search(re.sub(r"\W+", "_", column.lower())) or _any_match(values, r"^[+-]?0\d"):
        return read_ids(cells).as_kind("token")
    numbers, note = read_numbers(values, column, decimal_comma=decimal_comma)
    if numbers is not None:
        if rounded := _find_rounded(values, numbers):
            return cells.as_kind("token", f"text, as a float would be another number: {rounded}")
        return cells.recode(format_numbers(numbers), "float", note)
    if _all_match(values, _ISO):
        seconds = read_times(pa.chunked_array([values]), column).seconds
        if not np.isnan(seconds).any():
            return cells.recode(format_numbers(seconds), "float", "dates: seconds since 1970, UTC")
    return cells.as_kind("token", note)


def convert_cells(
    cells: Cells,
    kind: str,
    column: str,
    decimal_comma: bool = False,
    decimal: str | None = None,
    thousands: str | None = None,
) -> Cells:
    """Return cells of the kind that the user gives, or raise a UsageError if they cannot be of it.

    Separators are those of :func:`read_numbers`.
    """
    check_choice(f"type: {column}", kind, KINDS)
    values = cells.values[1:]
    if kind == "token":
        return cells.as_kind(kind)
    if kind == "float":
        numbers, note = read_numbers(values, column, decimal, thousands, decimal_comma)
        if numbers is not None:
            rounded = _find_rounded(values, numbers)
            lost = f"digits are lost in a float: {rounded}; token keeps them" if rounded else ""
            return cells.recode(format_numbers(numbers), kind, note, lost)
        if not note:
            wrong = _describe_non_numbers(_find_non_numbers(values, decimal, thousands), values)
            note = f"{wrong}; correct them or take token"
        raise UsageError(f"type: {column}=float: {note}")
    if not cells.kind.endswith("_seq"):
        lists = parse_lists(values) if len(values) else None
        if lists is not None:
            cells = _as_sequences(cells, lists)
        else:
            separators = (sep for sep in (r"\|", r"\s+") if _any_match(values, sep))
            pattern = rf"\s*{next(separators, ',')}\s*"
            cells = cells.recode(pc.replace_substring_regex(values, pattern, INNER), kind)
    if kind == "float_seq":
        _require_finite(cells, f"type: {column}=float_seq")
    return cells.as_kind(kind)


def _require_finite(cells: Cells, name: str) -> None:
    """Refuse sequences with values that are missing or not finite numbers."""
    texts = pc.split_pattern(cells.values.filter(pc.not_equal(cells.values, "")), INNER)
    values = texts.flatten()
    try:
        numbers = pc.if_else(pc.equal(values, ""), "nan", values).cast(pa.float64()).to_numpy()
    except pa.ArrowException as error:
        raise UsageError(f"{name}: {str(error)[:200]}") from error
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        row = pc.list_parent_indices(texts)[int(wrong[0])].as_py()
        example = ", ".join(text or "null" for text in texts[row].as_py())
        raise UsageError(
            f"{name}: found the list [{example[:60]}], expected finite numbers; correct it, or "
            "leave its cell empty"
        )


def read_ids(cells: Cells) -> Cells:
    """Return ids such as 1034.0 as 1034, unless others have decimals, as versions do."""
    values = cells.values[1:]
    is_float = pc.match_substring_regex(values, r"^-?\d+\.0$")
    has_decimals = pc.and_not(pc.match_substring_regex(values, r"^-?\d+\.\d"), is_float)
    if not pc.any(is_float).as_py() or pc.any(has_decimals).as_py():
        return cells
    text = pc.if_else(is_float, pc.utf8_slice_codeunits(values, 0, -2), values)
    example = values.filter(is_float)[0].as_py()
    is_float_by_code = np.append(False, is_float.to_numpy(zero_copy_only=False))
    num_cells = int(is_float_by_code[cells.codes].sum())
    note = f"{num_cells:,} cells such as {example} read as {example[:-2]}"
    return cells.recode(text, cells.kind, note)


def _all_match(values: pa.Array, regex: str) -> bool:
    return pc.all(pc.match_substring_regex(values, regex)).as_py()


def _any_match(values: pa.Array, regex: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, regex)).as_py())


def parse_lists(texts: pa.Array) -> list[list[Any]] | None:
    """Return the lists written in json or as Python literals; None if a text is not a list."""
    if not _all_match(texts, _LIST):
        return None
    lists = []
    for text in texts.to_pylist():
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            try:
                values = ast.literal_eval(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
        if not isinstance(values, list) or any(isinstance(v, (list, dict)) for v in values):
            return None
        lists.append(values)
    return lists


def _as_sequences(cells: Cells, lists: list[list[Any]]) -> Cells:
    """Return cells whose different values are lists as sequences."""
    is_float = any(isinstance(value, float) for values in lists for value in values)
    texts = [INNER.join("" if v is None else str(v) for v in values) for values in lists]
    kind = "float_seq" if is_float else "token_seq"
    return cells.recode(pa.array(texts, pa.string()), kind, "json lists")


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
        decimal_comma: whether a comma that may be either separator is the decimal one.

    Returns:
        [n] float64 numbers, None if a value is not a number or can be read in two ways; and a note
        on how they are read, or why they are not.
    """
    if not (decimal or thousands):
        with suppress(pa.ArrowException):
            numbers = values.cast(pa.float64()).to_numpy()
            note = f"the point is read as decimal; --thousands={column}='.' if it is not decimal"
            return numbers, note if _all_match(values, _GROUPED) else ""
    text = _normalize(values)
    readings: dict[tuple[str, str], np.ndarray] = {}  # by decimal and thousands separator
    for point, mark in _possible_separators(decimal, thousands):
        pattern = _number_pattern(point, mark)
        if _all_match(text[:_FIRST], pattern) and _all_match(text, pattern):
            digits = pc.replace_substring(text, mark, "")
            numbers = pc.replace_substring(digits, point, ".").cast(pa.float64()).to_numpy()
            if not any(np.array_equal(numbers, other) for other in readings.values()):
                readings[point, mark] = numbers
    if not readings:
        return None, "" if decimal or thousands else _describe_near_numbers(values)
    if len(readings) > 1:
        with_comma = [pair for pair in readings if decimal_comma and pair[0] == ","]
        if not with_comma:
            return None, _describe_ambiguity(readings, values, column)
        chosen = with_comma[0]
    else:
        (chosen,) = readings
        has_spaces_only = chosen[1] == " " and not _any_match(text, re.escape(chosen[0]))
        if has_spaces_only and not (decimal or thousands):  # 101 205 may be two names
            return None, f"{values[0]} may be a number or a list: --thousands={column}=' '"
    unit = _find_unit(pc.utf8_trim_whitespace(values))
    note = f"decimal separator {chosen[0]!r}, thousands {chosen[1]!r}"
    return readings[chosen], f"{note}, without {unit!r}" if unit else note


def _find_rounded(values: pa.Array, numbers: np.ndarray) -> str:
    """Return a whole number among [n] texts that float64 rounds, and what to; empty if none is."""
    for index in np.flatnonzero(np.abs(numbers) >= 2**53):
        text, number = values[index].as_py(), numbers[index]
        digits = "" if _EXPONENT.search(text) else re.sub(r"\D", "", text).lstrip("0")
        exact = str(abs(int(number))) if np.isfinite(number) else "inf"
        if digits and not digits.startswith(exact):
            return f"{text[:60]} is {number:.17g}"
    return ""


def _describe_ambiguity(
    readings: dict[tuple[str, str], np.ndarray], values: pa.Array, column: str
) -> str:
    """Return a note on a value that can be read in several ways, and the options to choose one."""
    first, second, *_ = readings.values()
    index = int(np.flatnonzero(first != second)[0])
    options = [
        f"--decimal={column}={decimal!r} ({numbers[index]:.15g})"
        for (decimal, _), numbers in readings.items()
    ]
    return (
        f"{values[index].as_py()[:60]!r} may have a thousands or a decimal separator: give "
        f"{' or '.join(options)}"
    )


def _find_non_numbers(values: pa.Array, decimal: str | None, thousands: str | None) -> pa.Array:
    """Return the values that are no numbers, by the separators that most numbers have."""
    text = _normalize(values)
    masks = [
        pc.match_substring_regex(text, _number_pattern(*separators))
        for separators in _possible_separators(decimal, thousands)
    ]
    is_number = max(masks, key=lambda mask: pc.sum(mask).as_py() or 0)
    return values.filter(pc.invert(is_number))


def _describe_non_numbers(wrong: pa.Array, values: pa.Array) -> str:
    """Return how many of the values are wrong, with an example."""
    return (
        f"{len(wrong):,} of {len(values):,} different cells are no number, such as "
        f"{wrong[0].as_py()[:60]!r}"
    )


def _describe_near_numbers(values: pa.Array) -> str:
    """Return a note on why a column of nearly only numbers is text; empty for other columns."""
    first = values[:_FIRST]
    if not len(values) or len(_find_non_numbers(first, None, None)) > len(first) / 2:
        return ""
    wrong = _find_non_numbers(values, None, None)
    is_near = 0 < len(wrong) <= _MAX_WRONG * len(values)
    return f"text, as {_describe_non_numbers(wrong, values)}" if is_near else ""


def _normalize(values: pa.Array) -> pa.Array:
    """Return texts with plain spaces, minus signs and apostrophes, trimmed, without their unit.

    Texts without the unit of the others get it, since they may be in another one.
    """
    text = pc.replace_substring_regex(pc.utf8_trim_whitespace(values), _SPACES, " ")
    text = pc.replace_substring(pc.replace_substring(text, "\u2212", "-"), "’", "'")
    if not (unit := _find_unit(text)):
        return text
    pattern = rf"^([+-]?)\Q{unit}\E\s*|\s*\Q{unit}\E$"
    bare = pc.replace_substring_regex(text, pattern, r"\1")
    return pc.if_else(
        pc.match_substring_regex(text, pattern), bare, pc.binary_join_element_wise(text, unit, "")
    )


def _find_unit(text: pa.Array) -> str:
    """Return the currency or percent sign that most of the first texts have; empty if none."""
    first = text[:_FIRST]
    units = pc.extract_regex(first, _UNIT).drop_null()
    return units[0]["unit"].as_py() if 2 * len(units) > len(first) else ""


def _possible_separators(decimal: str | None, thousands: str | None) -> list[tuple[str, str]]:
    """Return the pairs of decimal and thousands separators that agree with the given ones."""
    given = (decimal or ("," if thousands == "." else "."), thousands or " ")
    return [
        (point, mark)
        for point, mark in dict.fromkeys([*_SEPARATORS, given])
        if point != mark and decimal in (None, point) and thousands in (None, mark)
    ]


def _number_pattern(decimal: str, thousands: str) -> str:
    """Return the regular expression of numbers with these separators."""
    point, mark = (rf"\x{{{ord(separator):x}}}" for separator in (decimal, thousands))
    whole = rf"(?:\d+|[1-9]\d{{0,2}}(?:{mark}\d{{3}})+)"
    return rf"^[+-]?(?:{whole}(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?$"
