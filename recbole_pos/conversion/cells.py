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

from recbole_pos.conversion.source import is_list
from recbole_pos.conversion.times import read_times
from recbole_pos.data.location import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, shown

INNER = "\x1f"  # between the names of a sequence, until they are written
_WORDS = pa.array([word for word in MISSING if word])
_ID = re.compile(r"(^|_)(id|ids|code|zip|zipcode|postcode|sku|isbn|asin|ean|upc|gtin|phone)$")
_LIST = r"(?s)^\s*\[.*\]\s*$"
_ISO = r"^\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?$"
_PIPE = r"[^\s|]\|[^\s|]"
_PIPED = 0.05  # of the different cells must have a | for all of them to be lists
# Decimal and thousands separators of numbers as people write them: 1,234.50 or 1 234,50.
_MARKS = tuple((decimal, mark) for decimal, other in (".,", ",.") for mark in (other, " ", "'"))
_SPACES = "[\u00a0\u2009\u202f]"  # that do not break a line
_GROUPED = r"^[+-]?[1-9]\d{0,2}\.\d{3}$"
_FIRST = 200  # cells that are looked at before all are
_NEAR = 0.1  # of the different cells are no numbers: then the note on the column says so


@dataclass(frozen=True)
class Cells:
    """A column of text, as codes of its different values.

    Attributes:
        codes: [rows] place of each cell's value in ``values``; 0 where it is missing.
        values: [different cells + 1] text, the first empty; names of a sequence with ``INNER``
            between them.
        kind: token, token_seq, float or float_seq; empty before it is guessed.
        notes: what to report about it.
    """

    codes: np.ndarray
    values: pa.Array
    kind: str = ""
    notes: tuple[str, ...] = ()

    @property
    def different(self) -> int:
        """How many different values there are."""
        return len(self.values) - 1

    def __getitem__(self, rows: np.ndarray) -> Cells:
        """Return the cells of some rows."""
        return replace(self, codes=self.codes[rows])

    def as_kind(self, kind: str, *notes: str) -> Cells:
        """Return the same, of a type, with further notes."""
        return replace(self, kind=kind, notes=(*self.notes, *filter(None, notes)))

    def recode(self, values: pa.Array, kind: str, *notes: str) -> Cells:
        """Return cells with other text of each value but the first; an empty one is missing."""
        encoded = pa.concat_arrays([pa.array([""]), values]).dictionary_encode()
        empty = pc.equal(encoded.dictionary, "").to_numpy(zero_copy_only=False)
        new_codes = np.where(empty, 0, np.cumsum(~empty)).astype(np.int32)
        names = encoded.dictionary.filter(pa.array(~empty))
        cells = replace(
            self,
            codes=new_codes[encoded.indices.to_numpy()][self.codes],
            values=pa.concat_arrays([pa.array([""]), names]),
        )
        return cells.as_kind(kind, *notes)


def encode(column: pa.ChunkedArray, name: str) -> Cells:
    """Encode a column of any Arrow type that has text, numbers, times, or lists of them.

    Raises:
        UsageError: for another type.
    """
    held, kind, note, types = column.type, "", "", pa.types
    try:
        if types.is_timestamp(held) or types.is_date(held):
            seconds = pa.array(read_times(column, name).seconds, from_pandas=True)
            column, kind, note = pa.chunked_array([seconds]), "float", "seconds since 1970, UTC"
        elif is_list(held):
            kind = "float_seq" if types.is_floating(held.value_type) else "token_seq"
            column = pa.chunked_array([_join(chunk) for chunk in column.chunks], pa.string())
        elif types.is_decimal(held) and held.scale == 0:  # ids, which no float holds
            column = column.cast(pa.string())
        elif types.is_floating(held) or types.is_decimal(held):
            column = column.cast(pa.float64())
        elif not any(
            same(held) for same in (types.is_string, types.is_integer, types.is_dictionary)
        ):
            column = column.cast(pa.string())
        if not types.is_dictionary(column.type):
            column = column.dictionary_encode()
        one = column.unify_dictionaries().combine_chunks()
        if isinstance(one, pa.ChunkedArray):  # of no rows
            one = pa.array([], pa.string()).dictionary_encode()
        names = one.dictionary
        # 1.0 is called 1, and 1e15 by its digits
        text = format_numbers(names) if types.is_floating(names.type) else names.cast(pa.string())
    except pa.ArrowException as error:
        raise UsageError(f"column {shown(name)} holds {held}, which is no field") from error
    codes = one.indices.fill_null(-1).to_numpy(zero_copy_only=False) + np.int32(1)
    cells = Cells(codes, pa.concat_arrays([pa.array([""]), text]), kind, (note,) if note else ())
    words = pc.is_in(cells.values, _WORDS)
    if not (pc.any(words).as_py() or pc.any(pc.equal(text, "")).as_py()):
        return cells
    count = int(words.to_numpy(zero_copy_only=False)[codes].sum())
    found = ", ".join(map(repr, cells.values.filter(words).to_pylist()[:4]))
    note = f"{count:,} cells {found} read as missing" if count else ""
    return cells.recode(pc.if_else(words, "", cells.values)[1:], kind, note)


def _join(chunk: Any) -> pa.Array:
    """Return lists as text with ``INNER`` between what they hold; an empty list is missing."""
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    inside = chunk.values.cast(pa.string()).fill_null("")
    kind = pa.LargeListArray if pa.types.is_large_list(chunk.type) else pa.ListArray
    # from_arrays takes no null where the array is a slice; binary_join gives none for these
    text = pc.binary_join(kind.from_arrays(chunk.offsets, inside), INNER).cast(pa.string())
    return pc.if_else(chunk.is_valid(), text, pa.scalar(None, pa.string()))


def format_numbers(numbers: Any) -> pa.Array:
    """Return [n] float64 as the shortest text that reads as the same; whole ones without a point,
    nan empty."""
    numbers = np.asarray(numbers, dtype=np.float64)
    whole = (numbers == np.rint(numbers)) & (np.abs(numbers) < 2**53)
    text = pa.array(numbers).cast(pa.string())
    if whole.any():
        plain = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.string())
        text = pc.if_else(pa.array(whole), plain, text)
    return pc.if_else(pa.array(np.isnan(numbers)), "", text)


def guess(cells: Cells, column: str, decimal_comma: bool = False) -> Cells:
    """Guess the kind of a column, and convert its cells to it.

    Numbers in a column that ends in _id or the like are tokens; ``decimal_comma``: 12,99 is one.
    """
    values = cells.values[1:]
    if cells.kind:
        return cells
    if not len(values):
        return cells.as_kind("token")
    if (lists := parse_lists(values)) is not None:
        return _as_sequences(cells, lists)
    if pc.sum(pc.match_substring_regex(values, _PIPE)).as_py() > _PIPED * len(values):
        return convert_cells(cells, "token_seq", column).as_kind("token_seq", "lists, split at |")
    if _ID.search(re.sub(r"\W+", "_", column.lower())) or _has_any(values, r"^[+-]?0\d"):
        return read_whole_ids(cells).as_kind("token")
    numbers, note = read_numbers(values, column, decimal_comma=decimal_comma)
    if numbers is not None:
        return cells.recode(format_numbers(numbers), "float", note)
    if _has_all(values, _ISO):
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
    """Convert cells to the kind that the user gives, numbers as :func:`read_numbers` reads them.

    Raises:
        UsageError: for an unknown type, or if cells cannot be of it.
    """
    check_choice(f"type: {column}", kind, KINDS)
    values = cells.values[1:]
    if kind == "token":
        return cells.as_kind(kind)
    if kind == "float":
        numbers, note = read_numbers(values, column, decimal, thousands, decimal_comma)
        if numbers is not None:
            return cells.recode(format_numbers(numbers), kind, note)
        if not note:
            wrong = describe_wrong(find_wrong(values, decimal, thousands), values)
            note = f"{wrong}; correct them or take token"
        raise UsageError(f"type: {column}=float: {note}")
    if not cells.kind.endswith("_seq"):
        if len(values) and (lists := parse_lists(values)) is not None:
            cells = _as_sequences(cells, lists)
        else:
            mark = r"\|" if _has_any(values, r"\|") else r"\s+" if _has_any(values, r"\s") else ","
            cells = cells.recode(pc.replace_substring_regex(values, rf"\s*{mark}\s*", INNER), kind)
    if kind == "float_seq":
        parts = pc.split_pattern(cells.values, INNER).flatten()
        try:
            numbers = parts.filter(pc.not_equal(parts, "")).cast(pa.float64()).to_numpy()
        except pa.ArrowException as error:
            raise UsageError(f"type: {column}=float_seq: {str(error)[:200]}") from error
        if not np.isfinite(numbers).all():
            raise UsageError(f"type: {column}=float_seq: a number is not finite")
    return cells.as_kind(kind)


def read_whole_ids(cells: Cells) -> Cells:
    """Write ids such as 1034.0 as whole numbers, unless others have decimals, as versions do."""
    values = cells.values[1:]
    floats = pc.match_substring_regex(values, r"^-?\d+\.0$")
    others = pc.and_not(pc.match_substring_regex(values, r"^-?\d+\.\d"), floats)
    if not pc.any(floats).as_py() or pc.any(others).as_py():
        return cells
    text = pc.if_else(floats, pc.utf8_slice_codeunits(values, 0, -2), values)
    is_float = np.append(False, floats.to_numpy(zero_copy_only=False))
    rows = int(is_float[cells.codes].sum())
    example = values.filter(floats)[0].as_py()
    note = f"{rows:,} cells such as {example} read as {example[:-2]}"
    return cells.recode(text, cells.kind, note)


def _has_all(values: pa.Array, regex: str) -> bool:
    return pc.all(pc.match_substring_regex(values, regex)).as_py()


def _has_any(values: pa.Array, regex: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, regex)).as_py())


def parse_lists(values: pa.Array) -> list[list[Any]] | None:
    """Return the lists that are written in json (or as Python writes them); None if one is not."""
    if not _has_all(values, _LIST):
        return None
    lists = []
    for text in values.to_pylist():
        try:
            one = json.loads(text)
        except (ValueError, RecursionError):
            try:
                one = ast.literal_eval(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
        if not isinstance(one, list) or any(isinstance(part, (list, dict)) for part in one):
            return None
        lists.append(one)
    return lists


def _as_sequences(cells: Cells, lists: list[list[Any]]) -> Cells:
    is_float = any(isinstance(part, float) for one in lists for part in one)
    text = [INNER.join("" if part is None else str(part) for part in one) for one in lists]
    kind = "float_seq" if is_float else "token_seq"
    return cells.recode(pa.array(text, pa.string()), kind, "json lists")


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
            return numbers, note if _has_all(values, _GROUPED) else ""
    text = _plain_text(values)
    readings: dict[tuple[str, str], np.ndarray] = {}
    for marks in _possible_separators(decimal, thousands):
        if all(_has_all(some, _number_pattern(*marks)) for some in (text[:_FIRST], text)):
            digits = pc.replace_substring(text, marks[1], "")
            numbers = pc.replace_substring(digits, marks[0], ".").cast(pa.float64()).to_numpy()
            if not any(np.array_equal(numbers, other) for other in readings.values()):
                readings[marks] = numbers
    if not readings:
        return None, "" if decimal or thousands else _note_near_numbers(values)
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


def find_wrong(values: pa.Array, decimal: str | None, thousands: str | None) -> pa.Array:
    """Return the values that are no numbers, in the reading with most numbers."""
    text = _plain_text(values)
    masks = [
        pc.match_substring_regex(text, _number_pattern(*marks))
        for marks in _possible_separators(decimal, thousands)
    ]
    return values.filter(pc.invert(max(masks, key=lambda mask: pc.sum(mask).as_py() or 0)))


def describe_wrong(wrong: pa.Array, values: pa.Array) -> str:
    """Return how many of the values are wrong, with one of them."""
    return (
        f"{len(wrong):,} of {len(values):,} different cells are no number, such as "
        f"{wrong[0].as_py()[:60]!r}"
    )


def _note_near_numbers(values: pa.Array) -> str:
    """Return a note on why a column of nearly only numbers is text; empty for other columns."""
    few = values[:_FIRST]
    if not len(values) or len(find_wrong(few, None, None)) > len(few) / 2:
        return ""
    wrong = find_wrong(values, None, None)
    is_near = 0 < len(wrong) <= _NEAR * len(values)
    return f"text, as {describe_wrong(wrong, values)}" if is_near else ""


def _plain_text(values: pa.Array) -> pa.Array:
    text = pc.replace_substring_regex(pc.utf8_trim_whitespace(values), _SPACES, " ")
    return pc.replace_substring(pc.replace_substring(text, "\u2212", "-"), "’", "'")


def _possible_separators(decimal: str | None, thousands: str | None) -> list[tuple[str, str]]:
    """Return the pairs of decimal and thousands separators that are possible."""
    given = decimal or ("," if thousands == "." else "."), thousands or " "
    return [
        (one, two)
        for one, two in dict.fromkeys([*_MARKS, given])
        if one != two and decimal in (None, one) and thousands in (None, two)
    ]


def _number_pattern(decimal: str, thousands: str) -> str:
    point, mark = (rf"\x{{{ord(one):x}}}" for one in (decimal, thousands))
    whole = rf"(?:\d+|[1-9]\d{{0,2}}(?:{mark}\d{{3}})+)"
    return rf"^[+-]?(?:{whole}(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?$"
