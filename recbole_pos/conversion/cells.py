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

INNER = "\x1f"  # control character between the names of a sequence, until they are written
# Names of columns whose numbers are names (tokens), such as user_id, and not amounts.
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
        """Return the cells with other texts; cells whose text becomes the same get one code.

        The codes [0, 1, 2, 3] of the values ["", "1.0", "1", "NA"] become [0, 1, 1, 0] for the new
        texts ["1", "1", ""].

        Args:
            values: [different cells] new text of each value but the first, which stands for missing
                cells. An empty text makes its cells missing.
            kind: type of field of the new cells.
            notes: what to report about the column; empty notes are left out.
        """
        # Encode the new texts, an empty one first, and number those that are not empty from 1.
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
    """Return a column as codes of its different values: "a", "b", "a" become [1, 2, 1].

    Words such as NaN, and those in ``missing``, become missing cells, of which a note is made.

    Args:
        column: text in a dictionary, numbers, times, or lists of text or floats.
        name: name of the column, for the message.
        missing: further words that stand for a missing value.

    Returns:
        The cells, whose kind (type of field) is set for times and lists only: times become seconds
        since 1970, and the values of lists are joined by ``INNER``.

    Raises:
        UsageError: if the column has another type of Arrow.
    """
    # Turn times and lists into numbers and text.
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

    # Number the different values from 1, so that 0 is left for missing cells, and get their texts.
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    values = encoded.dictionary
    is_float = types.is_floating(values.type)
    text = format_numbers(values) if is_float else values.cast(pa.string()).fill_null("")
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False) + np.int32(1)

    # Count the cells whose text is a word for a missing value.
    is_missing = pc.is_in(text, pa.array([word for word in (*MISSING, *missing) if word]))
    by_code = np.append(False, is_missing.to_numpy(zero_copy_only=False))
    words = ", ".join(map(repr, text.filter(is_missing).to_pylist()[:4]))
    missing_note = f"{by_code[codes].sum():,} cells {words} read as missing" if words else ""

    # recode joins equal texts: 0.0 and -0.0 are both 0, and a frame's dictionary may repeat a text.
    cells = Cells(codes, pa.concat_arrays([pa.array([""]), text]))
    return cells.recode(pc.if_else(is_missing, "", text), kind, note, missing_note)


def _join_lists(chunk: Any) -> pa.Array:
    """Return each list of a column as one text with ``INNER`` (a control character) between values.

    An empty list becomes an empty text, a null stays null.

    Args:
        chunk: [rows] a large list of Arrow, of text or numbers.
    """
    values = chunk.values.cast(pa.string()).fill_null("")
    # LargeListArray.from_arrays refuses the nulls of a sliced array, so it is given none: a null
    # becomes an empty text here, and null again in the last line.
    text = pc.binary_join(pa.LargeListArray.from_arrays(chunk.offsets, values), INNER).cast(
        pa.string()
    )
    return pc.if_else(chunk.is_valid(), text, pa.scalar(None, pa.string()))


def format_numbers(numbers: Any) -> pa.Array:
    """Return the shortest text of each number that reads as the same float64.

    Whole numbers have no decimals: [1.0, 0.5, 1e15, nan] becomes "1", "0.5", "1000000000000000" and
    an empty text.

    Args:
        numbers: [n] numbers.
    """
    numbers = np.asarray(numbers, dtype=np.float64)
    # From 2^53 on, not every whole number is a float64, so its digits would promise too much.
    is_whole = (numbers == np.rint(numbers)) & (np.abs(numbers) < 2**53)
    text = pa.array(numbers).cast(pa.string())
    if is_whole.any():
        whole_text = pa.array(np.where(is_whole, numbers, 0).astype(np.int64)).cast(pa.string())
        text = pc.if_else(pa.array(is_whole), whole_text, text)
    return pc.if_else(pa.array(np.isnan(numbers)), "", text)


def guess_kind(cells: Cells, column: str, decimal: str) -> Cells:
    """Return the cells of a column with the kind (type of field) that they most likely have.

    ``as_kind`` keeps the cells and only sets kind and notes; ``recode`` gives them other texts.
    Numbers and dates become ``float``, everything else ``token``, which is the name of something.
    Numbers are tokens if the name of the column ends in _id or the like, if one has leading zeros,
    or if one is a whole number that float64 would round.

    Args:
        cells: the cells, which keep their kind if they have one.
        column: name of the column.
        decimal: decimal separator of numbers, a point or a comma.

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

    # All values are numbers: a float, unless that would change one.
    numbers = read_numbers(values, decimal)
    is_wrong = np.isnan(numbers)
    if not is_wrong.any():
        is_long = pc.match_substring_regex(values, _MANY_DIGITS)
        if (np.abs(numbers[is_long]) >= 2**53).any():
            return cells.as_kind("token", "text, as a float would be another number")
        return cells.recode(format_numbers(numbers), "float")

    # All are dates: a float, the seconds since 1970.
    if pc.all(pc.match_substring_regex(values, _ISO)).as_py():
        seconds = read_times(pa.chunked_array([values]), column).seconds
        if not np.isnan(seconds).any():
            return cells.recode(format_numbers(seconds), "float", "dates: seconds since 1970, UTC")

    # Otherwise text. If nearly all are numbers, the user may want to correct the few that are not.
    is_near = is_wrong.sum() <= _MAX_WRONG * len(values)
    return cells.as_kind(
        "token", f"text, as {_describe_wrong(values, is_wrong)}" if is_near else ""
    )


def convert_cells(cells: Cells, kind: str, column: str, decimal: str) -> Cells:
    """Return the cells of a column with the kind (type of field) that the user gives it.

    ``as_kind`` keeps the cells and only sets the kind; ``recode`` gives them other texts as well.

    Args:
        cells: the cells of the column.
        kind: ``token`` (a name), ``float``, or a sequence of these: ``token_seq``, ``float_seq``.
            The values of a sequence are separated by pipes, blanks or commas in a cell of text.
        column: name of the column, for messages.
        decimal: decimal separator of numbers, a point or a comma.

    Raises:
        UsageError: if there is no such kind, or a value is not a number where it must be.
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

    # A sequence. In cells of text, the surest separator that any of them has splits all.
    if not cells.kind.endswith("_seq"):
        separators = (mark for mark in _SEQUENCE_SEPARATORS if _any_match(values, mark))
        separator = next(separators, ",")
        parts = pc.replace_substring_regex(values, rf"\s*{separator}\s*", INNER)
        cells = cells.recode(parts, kind)
    if kind == "float_seq":
        _require_finite(cells, f"type: {column}=float_seq")
    return cells.as_kind(kind)


def _require_finite(cells: Cells, name: str) -> None:
    """Raise a UsageError if a sequence of numbers has one that is missing or not finite.

    Args:
        cells: the sequences.
        name: the column or option, with which the message begins.
    """
    texts = cells.values.filter(pc.not_equal(cells.values, ""))
    values = pc.split_pattern(texts, INNER).flatten()
    wrong = values.filter(pa.array(~np.isfinite(read_numbers(values, decimal="."))))
    if len(wrong):
        raise UsageError(
            f"{name}: found {shown(wrong[0].as_py())} in a list, expected finite numbers; correct "
            "it, or leave its cell empty"
        )


def read_ids(cells: Cells) -> Cells:
    """Return the cells of a column of ids, with ids such as 1034.0 read as 1034.

    Programs write whole numbers in this way where a column has missing values. If other cells have
    decimals, such as 1.5, they are not ids but versions or the like, and nothing is changed.
    """
    values = cells.values[1:]
    # If no value ends in .0, or another has decimals, there is nothing to change.
    is_float = pc.match_substring_regex(values, r"^-?\d+\.0$")
    has_decimals = pc.and_not(pc.match_substring_regex(values, r"^-?\d+\.\d"), is_float)
    if not pc.any(is_float).as_py() or pc.any(has_decimals).as_py():
        return cells

    # Cut off the two characters ".0", and note how many cells that concerns.
    text = pc.if_else(is_float, pc.utf8_slice_codeunits(values, 0, -2), values)
    example = values.filter(is_float)[0].as_py()
    is_float_by_code = np.append(False, is_float.to_numpy(zero_copy_only=False))
    num_cells = int(is_float_by_code[cells.codes].sum())
    note = f"{num_cells:,} cells such as {example} read as {example[:-2]}"
    return cells.recode(text, cells.kind, note)


def _any_match(values: pa.Array, regex: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, regex)).as_py())


def read_numbers(texts: pa.Array, decimal: str) -> np.ndarray:
    """Return the numbers that texts hold.

    Args:
        texts: [n] text.
        decimal: decimal separator, a point or a comma. With a comma, a text with a point is no
            number, since the point could only separate thousands.

    Returns:
        [n] float64, NaN where a text is no number.
    """
    null = pa.scalar(None, pa.string())
    if decimal != ".":
        has_point = pc.match_substring(texts, ".")
        texts = pc.if_else(has_point, null, pc.replace_substring(texts, decimal, "."))
    texts = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, null)
    return texts.cast(pa.float64()).to_numpy(zero_copy_only=False)


def _describe_wrong(values: pa.Array, is_wrong: np.ndarray) -> str:
    """Return a sentence about the values of a column that are no numbers, with an example.

    Args:
        values: [n] different values.
        is_wrong: [n] bool, true for at least one that is no number.
    """
    example = values[int(np.flatnonzero(is_wrong)[0])].as_py()[:60]
    return (
        f"{is_wrong.sum():,} of {len(values):,} different cells are no number, such as {example!r}"
    )
