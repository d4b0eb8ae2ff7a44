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
from recbole_pos.conversion.times import read_times
from recbole_pos.data.kinds import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

INNER = "\x1f"  # between the names of a sequence, until they are written
_WORDS = pa.array([word for word in MISSING if word])
_ID = re.compile(r"(^|_)(id|ids|code|zip|zipcode|postcode|sku|isbn|asin|ean|upc|gtin|phone)$")
_LIST = r"(?s)^\s*\[.*\]\s*$"
_ISO = r"^\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?$"
_GROUPED = r"^[+-]?[1-9]\d{0,2}\.\d{3}$"
_POINTS = "the point is read as decimal; --thousands COLUMN=. if it is none"
_PIPE = r"[^\s|]\|[^\s|]"
_PIPED = 0.05  # of the different cells must have a | for all of them to be lists


@dataclass(frozen=True)
class Cells:
    """A column.

    Attributes:
        codes: [rows] which of the values stands there; 0 where none does.
        values: [different cells + 1] text, the first empty; names of a sequence with ``INNER``
            between them.
        kind: token, token_seq, float or float_seq; empty before it is guessed.
        notes: what is to be told of it.
        raw: what the source calls the type, where it is no text.
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
        """The cells of some rows."""
        return replace(self, codes=self.codes[rows])

    def noted(self, note: str) -> Cells:
        """The same, with a note more."""
        return replace(self, notes=(*self.notes, note))

    def examples(self) -> list[str]:
        """Three values."""
        return [value.replace(INNER, " | ") for value in self.values[1:4].to_pylist()]


def encode(column: pa.ChunkedArray, name: str) -> Cells:
    """A column of any Arrow type that has text, numbers, times, or lists of them.

    Raises:
        UsageError: for another type.
    """
    kind, raw = column.type, ""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        seconds = read_times(column, name).seconds
        column, raw = pa.chunked_array([pa.array(seconds, from_pandas=True)]), "time"
    elif _is_list(kind):
        raw = "floats" if pa.types.is_floating(kind.value_type) else "list"
        column = pa.chunked_array([_joined(chunk, name) for chunk in column.chunks], pa.string())
    elif pa.types.is_decimal(kind) and kind.scale == 0:  # ids, which no float holds
        column, raw = column.cast(pa.string()), "integer"
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        column, raw = column.cast(pa.float64()), "float"
    elif pa.types.is_integer(kind):
        raw = "integer"
    elif pa.types.is_boolean(kind) or _is_binary(kind) or pa.types.is_null(kind):
        try:
            column = column.cast(pa.string())
        except pa.ArrowException as error:
            raise UsageError(f"column {shown(name)} holds bytes that are no text") from error
    try:
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
    except pa.ArrowException as error:
        raise UsageError(f"column {shown(name)} holds {kind}, which is no field") from error
    one = column.unify_dictionaries().combine_chunks()
    if isinstance(one, pa.ChunkedArray):  # of no rows
        one = pa.array([], pa.string()).dictionary_encode()
    codes = one.indices.fill_null(-1).to_numpy(zero_copy_only=False) + np.int32(1)
    try:
        if pa.types.is_floating(one.dictionary.type):  # 1.0 is called 1, and 1e15 by its digits
            text = number_text(one.dictionary)
        else:
            text = one.dictionary.cast(pa.string())
    except pa.ArrowException as error:
        raise UsageError(f"column {shown(name)} holds {kind}, which is no field") from error
    return _without_missing(codes, text, raw)


def _is_list(kind: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_one(kind) for is_one in lists)


def _is_binary(kind: Any) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_large_string)
    return any(is_one(kind) for is_one in (*kinds, pa.types.is_string_view))


def _joined(chunk: Any, name: str) -> pa.Array:
    """Lists as text with ``INNER`` between what they hold; a list without anything is missing."""
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    try:
        inside = chunk.values.cast(pa.string()).fill_null("")
    except pa.ArrowException as error:
        raise UsageError(f"column {shown(name)} holds {chunk.type}, which is no field") from error
    kind = pa.LargeListArray if pa.types.is_large_list(chunk.type) else pa.ListArray
    # from_arrays takes no null where the array is a slice; binary_join gives none for these
    lists = kind.from_arrays(chunk.offsets, inside)
    text = pc.binary_join(lists, INNER).cast(pa.string())
    return pc.if_else(chunk.is_valid(), text, pa.scalar(None, pa.string()))


def _without_missing(codes: np.ndarray, text: pa.Array, raw: str) -> Cells:
    """Cells of codes from 1, those of words for missing values (and of nothing) being 0."""
    words = pc.is_in(text, _WORDS).to_numpy(zero_copy_only=False)
    none = words | (pc.binary_length(text).to_numpy(zero_copy_only=False) == 0)
    notes: tuple[str, ...] = ()
    if words.any():
        counts = np.bincount(codes, minlength=len(text) + 1)[1:][words]
        names = ", ".join(map(repr, text.filter(pa.array(words)).to_pylist()[:4]))
        if raw != "float":
            notes = (f"{counts.sum():,} cells {names} read as missing",)
    if none.any():
        new = np.concatenate(([0], np.where(none, 0, np.cumsum(~none)))).astype(np.int32)
        codes, text = new[codes], text.filter(pa.array(~none))
    return Cells(codes, pa.concat_arrays([pa.array([""]), text]), notes=notes, raw=raw)


def recoded(cells: Cells, values: pa.Array, kind: str, *notes: str) -> Cells:
    """Cells whose values are written otherwise, as [different + 1] ``values``; those that are now
    the same become one."""
    one = values.dictionary_encode()
    place = one.indices.to_numpy()
    again = np.zeros(len(one.dictionary), dtype=np.int32)
    names, empty = one.dictionary, pc.equal(one.dictionary, "").to_numpy(zero_copy_only=False)
    again[~empty] = np.arange(1, (~empty).sum() + 1)
    values = pa.concat_arrays([pa.array([""]), names.filter(pa.array(~empty))])
    codes = again[place][cells.codes]
    return replace(cells, codes=codes, values=values, kind=kind, notes=(*cells.notes, *notes))


def number_text(numbers: Any) -> pa.Array:
    """[n] float64 as the shortest text that reads as the same; whole ones without a point.

    nan becomes empty.
    """
    numbers = np.asarray(numbers, dtype=np.float64)
    whole = (numbers == np.rint(numbers)) & (np.abs(numbers) < 2**53)
    text = pa.array(numbers).cast(pa.string())
    if whole.any():
        plain = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.string())
        text = pc.if_else(pa.array(whole), plain, text)
    return pc.if_else(pa.array(np.isnan(numbers)), "", text)


def guess(cells: Cells, field_name: str, decimal_comma: bool = False) -> Cells:
    """The cells with the type they most likely are of.

    Args:
        cells: as encoded.
        field_name: of which ends such as _id tell that numbers are names.
        decimal_comma: whether 12,99 is a number.
    """
    values = cells.values[1:]
    if cells.raw == "time":
        return typed(cells, "float", "", False).noted("seconds since 1970, UTC")
    if cells.raw in ("list", "floats"):
        return typed(cells, "float_seq" if cells.raw == "floats" else "token_seq", "", False)
    if not len(values):
        return replace(cells, kind="token")
    if _every(values, _LIST) and (lists := _parsed(values)) is not None:
        return _sequences(cells, lists)
    piped = pc.sum(pc.match_substring_regex(values, _PIPE)).as_py()
    if piped > _PIPED * len(values):
        return typed(cells, "token_seq", "", False).noted("lists, split at |")
    if _ID.search(field_name.lower()) or _any(values, r"^[+-]?0\d"):
        return replace(whole_ids(cells), kind="token")
    numbers, note = _floats(values, decimal_comma)
    if numbers is not None:
        text = pa.concat_arrays([pa.array([""]), number_text(numbers)])
        return recoded(cells, text, "float", *filter(None, [note]))
    if _every(values, _ISO):
        seconds = read_times(pa.chunked_array([values]), field_name).seconds
        if not np.isnan(seconds).any():
            text = pa.concat_arrays([pa.array([""]), number_text(seconds)])
            return recoded(cells, text, "float", "dates: seconds since 1970, UTC")
    note = note or describe_near_numbers(values, cells.codes)
    return replace(cells, kind="token", notes=(*cells.notes, *filter(None, [note])))


def typed(
    cells: Cells,
    kind: str,
    column: str,
    decimal_comma: bool = False,
    decimal: str | None = None,
    thousands: str | None = None,
) -> Cells:
    """The cells as the type that somebody says.

    Args:
        cells: as encoded.
        kind: the type.
        column: its name.
        decimal_comma: whether a comma that may be either separator is that of decimals.
        decimal, thousands: separators of numbers, where they are given.

    Raises:
        UsageError: for an unknown type, or if cells cannot be of it.
    """
    if kind not in KINDS:
        raise UsageError(f"type: {column}={kind}: a type is one of {', '.join(KINDS)}")
    values = cells.values[1:]
    if kind == "token":
        return replace(cells, kind=kind)
    if kind == "float":
        numbers, note = _floats(values, decimal_comma, decimal, thousands)
        if numbers is None:
            if note:
                raise UsageError(f"type: {column}=float: {note}".replace("COLUMN", column))
            wrong = find_wrong(values, decimal, thousands)
            raise UsageError(
                f"type: {column}=float: {len(wrong):,} of {len(values):,} different cells are no "
                f"number{_marks_text(decimal, thousands)}, such as {wrong[0].as_py()[:60]!r}; "
                "correct them or take token"
            )
        text = pa.concat_arrays([pa.array([""]), number_text(numbers)])
        return recoded(cells, text, kind, *filter(None, [note]))
    if cells.raw not in ("list", "floats"):
        if len(values) and _every(values, _LIST) and (lists := _parsed(values)) is not None:
            cells = _sequences(cells, lists)
        else:
            mark = r"\|" if _any(values, r"\|") else r"\s+" if _any(values, r"\s") else ","
            split = pc.replace_substring_regex(cells.values, rf"\s*{mark}\s*", INNER)
            cells = recoded(cells, split, kind)
    if kind == "float_seq":
        parts = pc.split_pattern(cells.values, INNER).flatten()
        if wrong := [part for part in parts.to_pylist() if part and not _is_float(part)]:
            raise UsageError(f"type: {column}=float_seq: {wrong[0][:60]!r} is no number")
    return replace(cells, kind=kind)


def _every(values: pa.Array, regex: str) -> bool:
    return pc.all(pc.match_substring_regex(values, regex)).as_py()


def _any(values: pa.Array, regex: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, regex)).as_py())


def whole_ids(cells: Cells) -> Cells:
    """Ids as whole numbers where some are written as floats are: 1034.0 is 1034.

    Not if others have decimals, as names of versions do.
    """
    floats = pc.match_substring_regex(cells.values, r"^-?\d+\.0$")
    others = pc.and_not(pc.match_substring_regex(cells.values, r"^-?\d+\.\d"), floats)
    if not pc.any(floats).as_py() or pc.any(others).as_py():
        return cells
    text = pc.if_else(floats, pc.utf8_slice_codeunits(cells.values, 0, -2), cells.values)
    rows = int(floats.to_numpy(zero_copy_only=False)[cells.codes].sum())
    example = cells.values.filter(floats)[0].as_py()
    return recoded(
        cells, text, cells.kind, f"{rows:,} cells such as {example} read as {example[:-2]}"
    )


def _floats(
    values: pa.Array,
    decimal_comma: bool,
    decimal: str | None = None,
    thousands: str | None = None,
) -> tuple[np.ndarray | None, str]:
    """[n] float64, None if one is no number or in doubt; and what to say of it."""
    if not (decimal or thousands):
        with suppress(pa.ArrowException):
            numbers = values.cast(pa.float64()).to_numpy()
            return numbers, _POINTS if _every(values, _GROUPED) else ""
    readings = find_readings(values, decimal, thousands)
    certain = [one for one in readings if one.certain]
    if len(readings) > 1 and decimal_comma:
        certain = [one for one in certain if one.decimal == ","][:1]
    elif len(readings) > 1:
        return None, describe_doubt(values, readings)
    if certain:
        return certain[0].numbers, certain[0].note
    return None, describe_doubt(values, readings) if readings else ""


def _marks_text(decimal: str | None, thousands: str | None) -> str:
    named = {"decimal separator": decimal, "thousands": thousands}
    given = [f"{name} {mark!r}" for name, mark in named.items() if mark]
    return f" ({', '.join(given)})" if given else ""


def _is_float(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _parsed(values: pa.Array) -> list[list[Any]] | None:
    """The lists that are written in json (or as Python writes them); None if one is none."""
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


def _sequences(cells: Cells, lists: list[list[Any]]) -> Cells:
    parts = [part for one in lists for part in one]
    kind = "float_seq" if any(isinstance(part, float) for part in parts) else "token_seq"
    text = [INNER.join("" if part is None else str(part) for part in one) for one in lists]
    return recoded(cells, pa.array(["", *text], pa.string()), kind, "json lists")
