"""Columns as the different cells they have, and the type of field that these make."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
_ID = re.compile(r"(^|_)(id|ids|code|zip|zipcode|postcode|sku|isbn|asin|ean|upc|gtin|phone)$")
_ISO = r"^\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?$"
_NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf)$"
_LEADING_ZERO = r"^[+-]?0\d"
_MANY_DIGITS = r"^[+-]?\d{16,}$"
_SEQUENCE_SEPARATORS = (r"\|", r"\s+", ",")  # of the values in a cell of text, the surest first
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
        """Return cells with other texts [different cells]; where a text is empty, it is missing.

        Cells whose texts become the same get one code: codes [0, 1, 2, 3] of the values
        ["", "1.0", "1", "NA"] become [0, 1, 1, 0] for the new texts ["1", "1", ""].
        """
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


def encode(column: pa.ChunkedArray, name: str, missing: Iterable[str] = ()) -> Cells:
    """Encode a column of text, numbers, times, or lists of them; refuse another Arrow type.

    Words such as NaN, and those in ``missing``, become missing cells.
    """
    kind = note = ""
    dtype, types = column.type, pa.types
    is_text = types.is_dictionary(dtype) and types.is_string(dtype.value_type)
    if types.is_timestamp(dtype):
        kind, note = "float", "seconds since 1970, UTC"
        column = pa.chunked_array([pa.array(convert_ticks(column), from_pandas=True)])
    elif types.is_large_list(dtype):
        kind = "float_seq" if types.is_floating(dtype.value_type) else "token_seq"
        column = pa.chunked_array([_join_lists(chunk) for chunk in column.chunks], pa.string())
    elif not (is_text or types.is_integer(dtype) or types.is_floating(dtype)):
        raise UsageError(f"column {shown(name)} holds {dtype}, which is no field")

    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    values = encoded.dictionary
    is_float = types.is_floating(values.type)
    text = format_numbers(values) if is_float else values.cast(pa.string()).fill_null("")
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False) + np.int32(1)

    is_missing = pc.is_in(text, pa.array([word for word in (*MISSING, *missing) if word]))
    by_code = np.append(False, is_missing.to_numpy(zero_copy_only=False))
    words = ", ".join(map(repr, text.filter(is_missing).to_pylist()[:4]))
    missing_note = f"{by_code[codes].sum():,} cells {words} read as missing" if words else ""
    # 0.0 and -0.0 are both 0, and the dictionary of a frame may hold a text twice, or null
    cells = Cells(codes, pa.concat_arrays([pa.array([""]), text]))
    return cells.recode(pc.if_else(is_missing, "", text), kind, note, missing_note)


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


def guess_kind(cells: Cells, column: str, decimal: str) -> Cells:
    """Return the cells of a column with the kind that they most likely have.

    Numbers in a column whose name ends in _id or the like, numbers with leading zeros, and whole
    numbers that float64 would round are tokens. ``decimal`` is the decimal separator of numbers.

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
    if _ID.search(re.sub(r"\W+", "_", column.lower())) or _any_match(values, _LEADING_ZERO):
        return read_ids(cells).as_kind("token")

    numbers = read_numbers(values, decimal)
    is_wrong = np.isnan(numbers)
    if not is_wrong.any():
        is_long = pc.match_substring_regex(values, _MANY_DIGITS)
        if (np.abs(numbers[is_long]) >= 2**53).any():
            return cells.as_kind("token", "text, as a float would be another number")
        return cells.recode(format_numbers(numbers), "float")

    if pc.all(pc.match_substring_regex(values, _ISO)).as_py():
        seconds = read_times(pa.chunked_array([values]), column).seconds
        if not np.isnan(seconds).any():
            return cells.recode(format_numbers(seconds), "float", "dates: seconds since 1970, UTC")
    is_near = is_wrong.sum() <= _MAX_WRONG * len(values)
    return cells.as_kind(
        "token", f"text, as {_describe_wrong(values, is_wrong)}" if is_near else ""
    )


def convert_cells(cells: Cells, kind: str, column: str, decimal: str) -> Cells:
    """Return cells of the kind that the user gives, or raise a UsageError if they cannot be of it.

    Sequences in cells of text are separated by pipes, blanks or commas. ``decimal`` is the decimal
    separator of numbers.
    """
    check_choice(f"type: {column}", kind, KINDS)
    values = cells.values[1:]
    if kind == "token":
        return cells.as_kind(kind)
    if kind == "float":
        numbers = read_numbers(values, decimal)
        if np.isnan(numbers).any():
            wrong = _describe_wrong(values, np.isnan(numbers))
            raise UsageError(f"type: {column}=float: {wrong}; correct them or take token")
        return cells.recode(format_numbers(numbers), kind)
    if not cells.kind.endswith("_seq"):
        separators = (mark for mark in _SEQUENCE_SEPARATORS if _any_match(values, mark))
        separator = next(separators, ",")
        parts = pc.replace_substring_regex(values, rf"\s*{separator}\s*", INNER)
        cells = cells.recode(parts, kind)
    if kind == "float_seq":
        _require_finite(cells, f"type: {column}=float_seq")
    return cells.as_kind(kind)


def _require_finite(cells: Cells, name: str) -> None:
    """Refuse sequences with values that are missing or not finite numbers."""
    texts = cells.values.filter(pc.not_equal(cells.values, ""))
    values = pc.split_pattern(texts, INNER).flatten()
    wrong = values.filter(pa.array(~np.isfinite(read_numbers(values, decimal="."))))
    if len(wrong):
        raise UsageError(
            f"{name}: found {shown(wrong[0].as_py())} in a list, expected finite numbers; correct "
            "it, or leave its cell empty"
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


def _any_match(values: pa.Array, regex: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, regex)).as_py())


def read_numbers(texts: pa.Array, decimal: str) -> np.ndarray:
    """Return [n] float64 numbers in texts with this decimal separator; NaN where a text is none."""
    null = pa.scalar(None, pa.string())
    if decimal != ".":  # then a point separates thousands, and no number has these
        has_point = pc.match_substring(texts, ".")
        texts = pc.if_else(has_point, null, pc.replace_substring(texts, decimal, "."))
    texts = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, null)
    return texts.cast(pa.float64()).to_numpy(zero_copy_only=False)


def _describe_wrong(values: pa.Array, is_wrong: np.ndarray) -> str:
    """Return how many of [n] different values are no numbers, with an example."""
    example = values[int(np.flatnonzero(is_wrong)[0])].as_py()[:60]
    return (
        f"{is_wrong.sum():,} of {len(values):,} different cells are no number, such as {example!r}"
    )
