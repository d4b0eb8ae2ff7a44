"""Columns as the different cells they have, the type of field that these make, and its table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.conversion.times import convert_ticks, read_times
from recbole_pos.data.atomic_files import KINDS, MISSING, is_list_type
from recbole_pos.errors import UsageError
from recbole_pos.values import check_choice, shown

# Types of Arrow that are converted to text.
_TEXT_TYPES = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_boolean, pa.types.is_null, pa.types.is_decimal),
)
INNER = "\x1f"  # control character between the names of a sequence, until they are written
# Names of columns whose numbers are names (tokens), such as user_id, and not amounts.
_ID = re.compile(r"(^|_)(id|ids|code|zip|zipcode|postcode|sku|isbn|asin|ean|upc|gtin|phone)$")
_ISO = r"^\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?$"
_NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf)$"
_LEADING_ZERO = r"^[+-]?0\d"
_MANY_DIGITS = r"^[+-]?\d{16,}$"
_SEQUENCE_SEPARATORS = (r"\|", r"\s+", ",")  # of the values in a cell of text, the surest first
# Of the contradictions expected by chance, a column of items or users has at most this share.
_MAX_CONTRADICTIONS = 0.1
# A field of names is of no use if so many rows have one, and more than this share of them another.
_UNIQUE_ROWS, _UNIQUE_SHARE = 100, 0.9


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
    def texts(self) -> pa.Array:
        """[different cells] the different texts, of code 1 and so on: ``values`` without the first.

        The first of ``values`` is empty and stands for missing cells.
        """
        return self.values[1:]

    @property
    def different(self) -> int:
        """Number of different texts."""
        return len(self.texts)

    @property
    def example(self) -> str:
        """One of the different texts, as messages quote it."""
        return shown(self.values[-1].as_py())

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: np.ndarray) -> Cells:
        """Return the cells of some rows."""
        return replace(self, codes=self.codes[rows])

    def as_kind(self, kind: str, *notes: str) -> Cells:
        """Return the same cells with a kind and further notes; empty notes are left out."""
        return replace(self, kind=kind, notes=(*self.notes, *filter(None, notes)))

    def recode(self, new_texts: pa.Array, kind: str, *notes: str) -> Cells:
        """Return the cells with other texts; cells whose text becomes the same get one code.

        A cell has a code, the index of its text in ``values``. The first of these is empty, so code
        0 is a missing cell. For example, ``new_texts`` is ["1", "1", ""]::

            values ["", "1.0", "1", "NA"]  ->  ["", "1"]
            codes [0, 1, 2, 3, 3]          ->  [0, 1, 1, 0, 0]

        Args:
            new_texts: [different cells] what replaces each of ``values`` but the first. An empty
                text makes its cells missing.
            kind: the new kind: token, token_seq, float or float_seq; empty if not guessed yet.
            notes: texts for the report on the column, added to those before; not if empty.
        """
        # Arrow numbers different texts as they appear, from 0 on. So "" is put in front. In the
        # example "", "1", "1", "" get the numbers 0, 1, 1, 0: the new code for each old one.
        encoded = pa.concat_arrays([pa.array([""]), new_texts]).dictionary_encode()
        new_codes = encoded.indices.to_numpy()
        cells = replace(self, codes=new_codes[self.codes], values=encoded.dictionary)
        return cells.as_kind(kind, *notes)


def simplify_types(table: pa.Table) -> pa.Table:
    """Return a table whose columns have one of few types: see :func:`_simplify_column`."""
    return pa.table([_simplify_column(column) for column in table.columns], table.column_names)


def _simplify_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of any type of Arrow in one of the few types that conversion understands.

    ======================================  ================================================
    text, booleans, decimals, uuids, nulls  text in a dictionary of int32, since names repeat
    floats                                  float64
    dates                                   timestamps in seconds
    lists of floats                         large lists of float64
    other lists                             large lists of text
    others, such as integers and times      the same
    ======================================  ================================================

    A column that Arrow cannot convert, such as a list of lists, stays as it is. It is refused if it
    is used (:func:`encode`).
    """
    # Extension types and dictionaries wrap another type: unwrap the column. Dictionaries of text
    # stay, since they are one of the types to convert to.
    types = pa.types
    if isinstance(column.type, pa.BaseExtensionType):
        column = _read_extension(column)
    if types.is_dictionary(column.type) and not types.is_string(column.type.value_type):
        with suppress(pa.ArrowException):  # such as intervals of pandas, which stay
            column = column.cast(column.type.value_type)

    unwrapped_type = column.type
    with suppress(pa.ArrowException):  # the column stays if Arrow cannot convert it
        column = column.cast(_choose_type(unwrapped_type))
    # Decimals are text now. Databases write the id 1034 as 1034.00: cut off the zeros.
    if types.is_decimal(unwrapped_type) and unwrapped_type.scale > 0:
        column = pc.utf8_rtrim(pc.utf8_rtrim(column, "0"), ".")
    return column.dictionary_encode() if types.is_string(column.type) else column


def _choose_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type that :func:`_simplify_column` converts a type to, before text is encoded."""
    types = pa.types
    if types.is_dictionary(dtype):  # of text
        return pa.dictionary(pa.int32(), pa.string())
    if any(has_type(dtype) for has_type in _TEXT_TYPES):  # text, booleans, decimals, nulls
        return pa.string()
    if types.is_floating(dtype):
        return pa.float64()
    if types.is_date(dtype):
        return pa.timestamp("s")
    if is_list_type(dtype):
        is_float = types.is_floating(dtype.value_type)
        return pa.large_list(pa.float64() if is_float else pa.string())
    return dtype


def _read_extension(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of an extension type as the type that Arrow stores it in, UUIDs as text.

    Extension types are names that programs give to types of Arrow; UUIDs are stored as 16 bytes.
    """
    storage = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if column.type.extension_name != "arrow.uuid":
        return storage

    # Each different UUID is formatted only once.
    encoded = storage.combine_chunks().dictionary_encode()
    names = [str(UUID(bytes=value)) for value in encoded.dictionary.to_pylist()]
    return pa.chunked_array([pa.DictionaryArray.from_arrays(encoded.indices, names)])


def encode(column: pa.ChunkedArray, name: str, missing: Iterable[str] = ()) -> Cells:
    """Return a column as codes of its different values: "a", "b", "a" become [1, 2, 1].

    A code is the index of a value among all different ones. A missing cell has code 0. Later steps
    work on each different value once, and not on every row.

    Args:
        column: a column as :func:`simplify_types` makes it: text in a dictionary, numbers, times,
            or lists of text or floats.
        name: name of the column, for the message.
        missing: words that stand for a missing value, beside the usual ones such as NaN.

    Returns:
        The cells, with their ``kind`` (type of field) where the type of the column tells it: float
        for times, as seconds since 1970; token_seq or float_seq for lists. The kind of text and
        numbers is empty, to be guessed.

    Raises:
        UsageError: if the column has another type of Arrow.
    """
    # In each case ``_number_values`` gives the different texts or numbers their codes.
    dtype, types = column.type, pa.types
    is_text = types.is_dictionary(dtype) and types.is_string(dtype.value_type)
    if is_text or types.is_integer(dtype) or types.is_floating(dtype):
        cells = _number_values(column)
    elif types.is_timestamp(dtype):
        seconds = pa.chunked_array([pa.array(convert_ticks(column), from_pandas=True)])
        note = "seconds since 1970, UTC"  # for the report on the column
        cells = _number_values(seconds).as_kind("float", note)
    elif types.is_large_list(dtype):
        # Each list becomes a text, with a control character between its values.
        texts = pa.chunked_array([_join_lists(chunk) for chunk in column.chunks], pa.string())
        is_float = types.is_floating(dtype.value_type)
        cells = _number_values(texts).as_kind("float_seq" if is_float else "token_seq")
    else:
        raise UsageError(f"column {shown(name)} holds {dtype}, which is no field")
    return _remove_missing_words(cells, [*MISSING, *missing])


def _remove_missing_words(cells: Cells, words: Sequence[str]) -> Cells:
    """Empty the cells of a column that hold a word for a missing value, such as NaN.

    The result has a note for the report, such as "'NaN', 'null' read as missing".

    Args:
        cells: the column; ``texts`` are its different texts.
        words: the words for a missing value.
    """
    # Find which of the different texts are such words, and name up to four of these in the note.
    is_missing = pc.is_in(cells.texts, pa.array([word for word in words if word]))
    examples = ", ".join(map(repr, cells.texts.filter(is_missing).to_pylist()[:4]))
    note = f"{examples} read as missing" if examples else ""

    # Replace each of the different texts: a word by an empty text, which stands for a missing cell,
    # and any other text by itself.
    new_texts = pc.if_else(is_missing, "", cells.texts)
    return cells.recode(new_texts, cells.kind, note)


def _number_values(column: pa.ChunkedArray) -> Cells:
    """Return a column as codes of its different values, in the order in which they first occur.

    For example, [a, b, null, a] has the codes [1, 2, 0, 1] of the values ["", "a", "b"].

    Args:
        column: [rows] text or numbers, null where a cell is missing.
    """
    # Arrow numbers the different values from 0 on, here [0, 1, null, 0] of ["a", "b"]. In ``Cells``
    # 0 is a missing cell: so each code is one more, and an empty text stands in front.
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    distinct = encoded.dictionary
    is_float = pa.types.is_floating(distinct.type)
    texts = format_numbers(distinct) if is_float else distinct.cast(pa.string()).fill_null("")
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False) + np.int32(1)
    return Cells(codes, values=pa.concat_arrays([pa.array([""]), texts]))


def _join_lists(chunk: Any) -> pa.Array:
    """Return each list of a column as one text with ``INNER`` (a control character) between values.

    So lists can be numbered as texts are (:func:`encode`). An empty list becomes an empty text, a
    null stays null.

    Args:
        chunk: [rows] a large list of Arrow, of text or numbers.
    """
    values = chunk.values.cast(pa.string()).fill_null("")
    # LargeListArray.from_arrays refuses the nulls of a sliced array, so it is given none: a null
    # becomes an empty text here, and null again in the last line.
    lists = pa.LargeListArray.from_arrays(chunk.offsets, values)
    text = pc.binary_join(lists, INNER).cast(pa.string())
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

    Numbers and dates become ``float``, everything else ``token``, which is the name of something.
    Numbers are tokens if the name of the column ends in _id or the like, if one has leading zeros,
    or if one is a whole number that float64 would round.

    Args:
        cells: the cells. They keep their kind if they have one. ``as_kind`` sets the kind, and may
            add a note for the report. ``recode`` also replaces each of the different texts.
        column: name of the column.
        decimal: decimal separator of numbers, a point or a comma.

    Raises:
        UsageError: if a list of numbers has one that is missing or not finite.
    """
    # Lists and times have a kind, which their type tells.
    if cells.kind == "float_seq":
        _require_finite(cells, f"column {shown(column)}")
    if cells.kind:
        return cells
    values = cells.texts  # the different texts
    if not len(values):
        return cells.as_kind("token")

    # Names: all values of a column that is called like shop_id (the pattern _ID), and numbers with
    # leading zeros, such as the postal code 01234. ``read_ids`` makes 17 of an id 17.0.
    is_called_id = _ID.search(re.sub(r"\W+", "_", column.lower())) is not None
    if is_called_id or _any_match(values, _LEADING_ZERO):
        return read_ids(cells).as_kind("token")

    # All values are numbers: a float, unless that would change one. Those of 16 digits or more
    # (_MANY_DIGITS) may be beyond 2^53, up to which float64 has every whole number.
    numbers = read_numbers(values, decimal)
    if not np.isnan(numbers).any():
        is_long = pc.match_substring_regex(values, _MANY_DIGITS)
        if (np.abs(numbers[is_long]) >= 2**53).any():
            return cells.as_kind("token", "text, as a float would be another number")
        return cells.recode(format_numbers(numbers), "float")

    # All are dates: a float, the seconds since 1970.
    if pc.all(pc.match_substring_regex(values, _ISO)).as_py():
        seconds, _ = read_times(pa.chunked_array([values]), column)
        if not np.isnan(seconds).any():
            return cells.recode(format_numbers(seconds), "float", "dates: seconds since 1970, UTC")

    return cells.as_kind("token")  # text


def convert_cells(cells: Cells, kind: str, column: str, decimal: str) -> Cells:
    """Return the cells of a column with the kind (type of field) that the user gives it.

    Cells are codes of their different ``texts``. ``as_kind`` sets the kind and keeps the texts;
    ``recode`` sets the kind and replaces each of the different texts.

    Args:
        cells: the cells of the column.
        kind: ``token`` (a name), ``float``, or a sequence of these: ``token_seq``, ``float_seq``.
        column: name of the column, for messages.
        decimal: decimal separator of numbers, a point or a comma.

    Raises:
        UsageError: if there is no such kind, or a value is not a number where it must be.
    """
    check_choice(f"type: {column}", kind, KINDS)
    if kind == "token":
        return cells.as_kind(kind)
    if kind == "float":
        numbers = read_numbers(cells.texts, decimal)
        wrong = cells.texts.filter(pa.array(np.isnan(numbers)))
        if len(wrong):
            raise UsageError(
                f"type: {column}=float: {len(wrong):,} of {cells.different:,} different cells are "
                f"no number, such as {shown(wrong[0].as_py())}; correct them or take token"
            )
        return cells.recode(format_numbers(numbers), kind)

    # A sequence is one text with INNER, a control character, between its values. Lists are such
    # texts already, and have the kind token_seq or float_seq, in place of which the user may set
    # the other one.
    if not cells.kind.endswith("_seq"):
        cells = cells.recode(_mark_values(cells.texts), kind)
    if kind == "float_seq":
        _require_finite(cells, f"type: {column}=float_seq")
    return cells.as_kind(kind)


def _mark_values(texts: pa.Array) -> pa.Array:
    """Return sequences, such as "red, blue", with ``INNER`` between the values.

    ``INNER`` is a control character. It replaces the separator that the user has written, with
    blanks around it. All texts have the same separator: pipes if any text has one, else blanks if
    any has one, else commas.
    """
    found = [mark for mark in _SEQUENCE_SEPARATORS if _any_match(texts, mark)]
    separator = found[0] if found else ","
    return pc.replace_substring_regex(texts, rf"\s*{separator}\s*", INNER)


def _require_finite(cells: Cells, name: str) -> None:
    """Raise a UsageError if a sequence of numbers has one that is missing or not finite.

    Args:
        cells: the sequences. ``texts`` are the different ones, such as "1.5|2", where the pipe
            stands for ``INNER``, a control character between the numbers.
        name: the column or option, with which the message begins.
    """
    values = pc.split_pattern(cells.texts, INNER).flatten()  # the numbers of all texts, as text
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

    Args:
        cells: the cells, as codes of their different ``texts``.
    """
    # If no text ends in .0, or another has decimals, there is nothing to change.
    is_float = pc.match_substring_regex(cells.texts, r"^-?\d+\.0$")
    has_decimals = pc.and_not(pc.match_substring_regex(cells.texts, r"^-?\d+\.\d"), is_float)
    if not pc.any(is_float).as_py() or pc.any(has_decimals).as_py():
        return cells

    # Cut off the two characters ".0".
    texts = pc.if_else(is_float, pc.utf8_slice_codeunits(cells.texts, 0, -2), cells.texts)
    example = cells.texts.filter(is_float)[0].as_py()
    return cells.recode(texts, cells.kind, f"ids such as {example} read as {example[:-2]}")


def _any_match(values: pa.Array, regex: str) -> bool:
    """Return whether a pattern occurs in any of some texts."""
    return bool(pc.any(pc.match_substring_regex(values, regex)).as_py())


def read_numbers(texts: pa.Array, decimal: str) -> np.ndarray:
    """Return the numbers that texts hold, such as 0.5 for ".5" and NaN for "five".

    Args:
        texts: [n] text.
        decimal: decimal separator, a point or a comma. With a comma, a text with a point is no
            number, since the point could only separate thousands.

    Returns:
        [n] float64, NaN where a text is no number.
    """
    # Let only texts that look like numbers (the pattern _NUMBER) through, since Arrow raises for
    # others.
    null = pa.scalar(None, pa.string())
    if decimal != ".":
        has_point = pc.match_substring(texts, ".")
        texts = pc.if_else(has_point, null, pc.replace_substring(texts, decimal, "."))
    texts = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, null)
    return texts.cast(pa.float64()).to_numpy(zero_copy_only=False)


def explain_useless(cells: Cells) -> str:
    """Return why a field is of no use to a model; an empty text if it may be of use.

    Of no use is a field without any value, and one of names that are nearly all distinct, such as
    titles: at least 100 cells have a name (``_UNIQUE_ROWS``), and the number of distinct names is
    more than 90% of the number of these cells (``_UNIQUE_SHARE``).

    Args:
        cells: the values of the field: a code for each distinct one, 0 where it is missing.
    """
    num_filled = np.count_nonzero(cells.codes)
    if not num_filled:
        return "it is empty"
    num_distinct = cells.different
    are_distinct = num_filled >= _UNIQUE_ROWS and num_distinct > _UNIQUE_SHARE * num_filled
    return "nearly all values are distinct" if are_distinct and cells.kind == "token" else ""


# --- columns that say something of items or users ---


class EntityIndex:
    """All items, or all users, numbered in the order in which they first occur.

    Items and users are called entities where both are meant.

    Attributes:
        codes: [interactions] number of the entity of each, from 0.
        cells: [entities] names of the entities.
    """

    def __init__(self, cells: Cells) -> None:
        """Number the entities whose names are in ``cells`` [interactions]."""
        # The different codes in the order in which they first occur are the entities.
        encoded = pa.array(cells.codes).dictionary_encode()
        self.codes = encoded.indices.to_numpy()
        self.cells = replace(cells, codes=encoded.dictionary.to_numpy(), kind="token")

    def __len__(self) -> int:
        return len(self.cells)

    def find(self, names: Cells) -> np.ndarray:
        """Return the number of the entity that each cell of a column names, -1 for none.

        For example, the entities are a (0) and b (1), and the column is [b, c, empty, b]. Its
        ``values`` are ["", "b", "c"] and its ``codes`` [1, 2, 0, 1]. The result is [1, -1, -1, 1].

        Args:
            names: [rows] the column.

        Returns:
            [rows] whole numbers.
        """
        # Look up each different name once: in the example "", b and c have the numbers [-1, 1, -1].
        entity_names = self.cells.values.take(pa.array(self.cells.codes))
        numbers = pc.index_in(names.values, entity_names).fill_null(-1).to_numpy()
        # Then take the number of each row's name; a row without a name has code 0.
        return np.where(names.codes > 0, numbers[names.codes], -1)


def find_first_values(
    cells: Cells, entities: np.ndarray, num_entities: int
) -> tuple[Cells, np.ndarray]:
    """Find the first value of a column for each item (user), and the rows with another value.

    For items [0, 0, 1] with the values red, blue, red, the first values are red and red, and the
    second row contradicts.

    Args:
        cells: [rows] cells of a column, as codes of its different texts. Empty ones (code 0) are
            neither first nor contradict.
        entities: [rows] number of the item (user) of each row, from 0.
        num_entities: number of items (users).

    Returns:
        Cells [num_entities], empty where an item has no value, and [rows] bool.
    """
    # Write the code of each filled cell into the place of its item, from the last row to the first:
    # the code that is written last stays, which is that of the item's first filled cell.
    filled = np.flatnonzero(cells.codes)[::-1]
    first = np.zeros(num_entities, dtype=cells.codes.dtype)
    first[entities[filled]] = cells.codes[filled]
    is_contradicting = (cells.codes > 0) & (cells.codes != first[entities])
    return replace(cells, codes=first), is_contradicting


def choose_table(cells: Cells, entities: Mapping[str, EntityIndex]) -> str:
    """Decide whether a column of the interactions says something of the item, or of the user.

    A brand, for instance, is the same in all interactions of an item, but for a few errors. A cell
    contradicts if it differs from the first filled cell of its item. The column belongs to the
    items if few cells contradict:

        share = contradicting cells / filled cells that are not the first of their item
        chance = probability that two random filled cells of the column differ
        share <= 0.1 * chance (_MAX_CONTRADICTIONS)

    For example, a column has 100 filled cells of 10 items, and two brands that are equally
    frequent. If 2 cells contradict, the share is 2 / 90 = 0.02, the chance 0.5, and the brand
    belongs to the items. The same is tested for users.

    Args:
        cells: [interactions] cells of the column, as codes of its different texts; code 0 is an
            empty cell.
        entities: ``item`` and ``user`` -> which item (user) each interaction has (``codes``).

    Returns:
        ``item`` or ``user``, whichever has the lower share; ``inter`` (interactions) if the column
        belongs to neither.
    """
    # A flag has one value and empty cells. Empty is a value of it, too, and so gets a code above 0:
    # the codes 0 and 1 become 1 and 2.
    is_flag = len(np.unique(cells.codes)) == 2 and cells.codes.min() == 0
    if is_flag:
        cells = replace(cells, codes=cells.codes + 1)

    # Two random cells both have a certain value with the probability (share of its cells)^2. They
    # are equal with the sum of this over all values, and differ otherwise.
    counts = np.bincount(cells.codes)[1:]  # cells with each code but 0, which is empty
    chance = 1 - float(((counts / counts.sum()) ** 2).sum()) if len(counts) else 0.0

    best, lowest_share = "inter", np.inf
    for table, index in entities.items():
        # ``first`` is the first filled cell of each item (user), ``index.codes`` the item of each
        # interaction, and ``is_contradicting`` whether its cell differs from the item's first.
        first, is_contradicting = find_first_values(cells, index.codes, len(index))
        num_testable = np.count_nonzero(cells.codes) - np.count_nonzero(first.codes)
        if not num_testable:  # no item has two filled cells, so nothing could contradict
            continue
        share = np.count_nonzero(is_contradicting) / num_testable
        if share <= _MAX_CONTRADICTIONS * chance and share < lowest_share:
            best, lowest_share = table, share
    return best
