"""Columns as the different cells they have, and the type of field that these make."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.numbers import (
    describe_doubt,
    describe_near_numbers,
    find_readings,
    find_wrong,
)
from recbole_pos.conversion.source import is_list
from recbole_pos.conversion.times import read_times
from recbole_pos.data.location import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

INNER = "\x1f"  # between the names of a sequence, until they are written
_WORDS = pa.array([word for word in MISSING if word])
_ID = re.compile(r"(^|_)(id|ids|code|zip|zipcode|postcode|sku|isbn|asin|ean|upc|gtin|phone)$")
_LIST = r"(?s)^\s*\[.*\]\s*$"
_ISO = r"^\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?$"
_GROUPED = r"^[+-]?[1-9]\d{0,2}\.\d{3}$"
_POINTS = "the point is read as decimal; --thousands COLUMN=. if it is not decimal"
_PIPE = r"[^\s|]\|[^\s|]"
_PIPED = 0.05  # of the different cells must have a | for all of them to be lists


@dataclass(frozen=True)
class Cells:
    """A column of text, as codes of its different values.

    Attributes:
        codes: [rows] place of each cell's value in ``values``; 0 where it is missing.
        values: [different cells + 1] text, the first empty; names of a sequence with ``INNER``
            between them.
        kind: token, token_seq, float or float_seq; empty before it is guessed.
        notes: what to report about it.
        raw: what the source calls the type, where it is not text.
    """

    codes: np.ndarray
    values: pa.Array
    kind: str = ""
    notes: tuple[str, ...] = ()
    raw: str = field(default="", compare=False)

    @property
    def different(self) -> int:
        """How many different values there are."""
        return len(self.values) - 1

    def take(self, rows: np.ndarray) -> Cells:
        """Return the cells of some rows."""
        return replace(self, codes=self.codes[rows])

    def as_kind(self, kind: str, *notes: str) -> Cells:
        """Return the same, of a type, with further notes."""
        return replace(self, kind=kind, notes=(*self.notes, *filter(None, notes)))

    def recode(self, values: pa.Array, kind: str, *notes: str) -> Cells:
        """Return cells with other values, of which equal ones become one.

        Args:
            values: new text of each value but the first; an empty one is missing.
            kind: new kind.
            notes: notes to add.
        """
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
    kind, raw, types = column.type, "", pa.types
    try:
        if types.is_timestamp(kind) or types.is_date(kind):
            seconds = read_times(column, name).seconds
            column, raw = pa.chunked_array([pa.array(seconds, from_pandas=True)]), "time"
        elif is_list(kind):
            raw = "floats" if types.is_floating(kind.value_type) else "list"
            column = pa.chunked_array([_join(chunk) for chunk in column.chunks], pa.string())
        elif types.is_decimal(kind) and kind.scale == 0:  # ids, which no float holds
            column, raw = column.cast(pa.string()), "integer"
        elif types.is_floating(kind) or types.is_decimal(kind):
            column, raw = column.cast(pa.float64()), "float"
        elif types.is_integer(kind):
            raw = "integer"
        elif not (types.is_string(kind) or types.is_dictionary(kind)):
            column = column.cast(pa.string())
        if not types.is_dictionary(column.type):
            column = column.dictionary_encode()
        one = column.unify_dictionaries().combine_chunks()
        if isinstance(one, pa.ChunkedArray):  # of no rows
            one = pa.array([], pa.string()).dictionary_encode()
        names = one.dictionary
        # 1.0 is called 1, and 1e15 by its digits
        text = number_text(names) if types.is_floating(names.type) else names.cast(pa.string())
    except pa.ArrowException as error:
        raise UsageError(f"column {shown(name)} holds {kind}, which is no field") from error
    codes = one.indices.fill_null(-1).to_numpy(zero_copy_only=False) + np.int32(1)
    return _without_missing(codes, text, raw)


def _join(chunk: Any) -> pa.Array:
    """Return lists as text with ``INNER`` between what they hold; an empty list is missing."""
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    inside = chunk.values.cast(pa.string()).fill_null("")
    kind = pa.LargeListArray if pa.types.is_large_list(chunk.type) else pa.ListArray
    # from_arrays takes no null where the array is a slice; binary_join gives none for these
    text = pc.binary_join(kind.from_arrays(chunk.offsets, inside), INNER).cast(pa.string())
    return pc.if_else(chunk.is_valid(), text, pa.scalar(None, pa.string()))


def _without_missing(codes: np.ndarray, text: pa.Array, raw: str) -> Cells:
    """Return cells in which empty text and words for missing values have code 0.

    Args:
        codes: [rows] int32 place of each cell in ``text``, from 1; 0 for null.
        text: the different values.
        raw: what the source calls the type.
    """
    words = pc.is_in(text, _WORDS).to_numpy(zero_copy_only=False)
    none = words | (pc.binary_length(text).to_numpy(zero_copy_only=False) == 0)
    notes: tuple[str, ...] = ()
    if words.any() and raw != "float":
        counts = np.bincount(codes, minlength=len(text) + 1)[1:][words]
        names = ", ".join(map(repr, text.filter(pa.array(words)).to_pylist()[:4]))
        notes = (f"{counts.sum():,} cells {names} read as missing",)
    if none.any():
        new = np.concatenate(([0], np.where(none, 0, np.cumsum(~none)))).astype(np.int32)
        codes, text = new[codes], text.filter(pa.array(~none))
    return Cells(codes, pa.concat_arrays([pa.array([""]), text]), notes=notes, raw=raw)


def number_text(numbers: Any) -> pa.Array:
    """Return [n] float64 as the shortest text that reads as the same; whole ones without a point,
    nan empty."""
    numbers = np.asarray(numbers, dtype=np.float64)
    whole = (numbers == np.rint(numbers)) & (np.abs(numbers) < 2**53)
    text = pa.array(numbers).cast(pa.string())
    if whole.any():
        plain = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.string())
        text = pc.if_else(pa.array(whole), plain, text)
    return pc.if_else(pa.array(np.isnan(numbers)), "", text)


def guess(cells: Cells, field_name: str, decimal_comma: bool = False) -> Cells:
    """Guess the kind of a column, and convert its cells to it.

    Args:
        cells: the column.
        field_name: name of its field; numbers in one that ends in _id or the like are tokens.
        decimal_comma: whether 12,99 is a number.
    """
    values = cells.values[1:]
    if cells.raw == "time":
        return convert_cells(cells, "float", "").as_kind("float", "seconds since 1970, UTC")
    if cells.raw in ("list", "floats"):
        return convert_cells(cells, "float_seq" if cells.raw == "floats" else "token_seq", "")
    if not len(values):
        return cells.as_kind("token")
    if (lists := _parse_lists(values)) is not None:
        return _as_sequences(cells, lists)
    if pc.sum(pc.match_substring_regex(values, _PIPE)).as_py() > _PIPED * len(values):
        return convert_cells(cells, "token_seq", "").as_kind("token_seq", "lists, split at |")
    if _ID.search(field_name.lower()) or _has_any(values, r"^[+-]?0\d"):
        return whole_ids(cells).as_kind("token")
    numbers, note = _read_floats(values, decimal_comma)
    if numbers is not None:
        return cells.recode(number_text(numbers), "float", note)
    if _has_all(values, _ISO):
        seconds = read_times(pa.chunked_array([values]), field_name).seconds
        if not np.isnan(seconds).any():
            return cells.recode(number_text(seconds), "float", "dates: seconds since 1970, UTC")
    return cells.as_kind("token", note or describe_near_numbers(values, cells.codes))


def convert_cells(
    cells: Cells,
    kind: str,
    column: str,
    decimal_comma: bool = False,
    decimal: str | None = None,
    thousands: str | None = None,
) -> Cells:
    """Convert cells to the kind that the user gives.

    Args:
        cells: the column.
        kind: token, token_seq, float or float_seq.
        column: name of the column, for messages.
        decimal_comma: whether a comma that may be either separator is that of decimals.
        decimal, thousands: separators that the user gives.

    Raises:
        UsageError: for an unknown type, or if cells cannot be of it.
    """
    if kind not in KINDS:
        raise UsageError(f"type: {column}={kind}: a type is one of {', '.join(KINDS)}")
    values = cells.values[1:]
    if kind == "token":
        return cells.as_kind(kind)
    if kind == "float":
        numbers, note = _read_floats(values, decimal_comma, decimal, thousands)
        if numbers is not None:
            return cells.recode(number_text(numbers), kind, note)
        if note:
            raise UsageError(f"type: {column}=float: {note}".replace("COLUMN", column))
        wrong = find_wrong(values, decimal, thousands)
        marks = {"decimal separator": decimal, "thousands": thousands}
        given = ", ".join(f"{name} {mark!r}" for name, mark in marks.items() if mark)
        raise UsageError(
            f"type: {column}=float: {len(wrong):,} of {len(values):,} different cells are no "
            f"number{f' ({given})' if given else ''}, such as {wrong[0].as_py()[:60]!r}; correct "
            "them or take token"
        )
    if cells.raw not in ("list", "floats"):
        if len(values) and (lists := _parse_lists(values)) is not None:
            cells = _as_sequences(cells, lists)
        else:
            mark = r"\|" if _has_any(values, r"\|") else r"\s+" if _has_any(values, r"\s") else ","
            cells = cells.recode(pc.replace_substring_regex(values, rf"\s*{mark}\s*", INNER), kind)
    if kind == "float_seq":
        for part in pc.split_pattern(cells.values, INNER).flatten().unique().to_pylist():
            if part and not _is_float(part):
                raise UsageError(f"type: {column}=float_seq: {part[:60]!r} is not a number")
    return replace(cells, kind=kind)


def whole_ids(cells: Cells) -> Cells:
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


def _is_float(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _read_floats(
    values: pa.Array,
    decimal_comma: bool,
    decimal: str | None = None,
    thousands: str | None = None,
) -> tuple[np.ndarray | None, str]:
    """Read values as numbers.

    Returns:
        [n] float64, or None if a value is not a number or can be read in two ways; and a note.
    """
    if not (decimal or thousands):
        with suppress(pa.ArrowException):
            numbers = values.cast(pa.float64()).to_numpy()
            return numbers, _POINTS if _has_all(values, _GROUPED) else ""
    readings = find_readings(values, decimal, thousands)
    certain = [reading for reading in readings if reading.certain]
    if len(readings) > 1:
        certain = [reading for reading in certain if decimal_comma and reading.decimal == ","][:1]
    if certain:
        return certain[0].numbers, certain[0].note
    return None, describe_doubt(values, readings) if readings else ""


def _parse_lists(values: pa.Array) -> list[list[Any]] | None:
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
