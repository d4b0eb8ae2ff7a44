"""Files of a dataset, text or parquet, whose columns are named as name:type.

DuckDB splits them into cells, and Arrow and Python convert these. A text in which DuckDB finds
anything unusual (a cell too many, a line of blanks) is read again, line by line in Python, which
accepts more or reports the line and cell of the error.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute

from recbole_pos.errors import UsageError
from recbole_pos.tables.columns import Column
from recbole_pos.tables.engine import (
    ENGINE_ERRORS,
    SEPARATOR,
    ParquetFile,
    TextForm,
    find_form,
    iterate_lines,
    read_text,
)
from recbole_pos.tables.storage import Storage, read_limit
from recbole_pos.values import Options, listed, shown

PARQUET = ".parquet"
KINDS = ("token", "token_seq", "float", "float_seq")  # of columns
# What pandas takes for a missing value, in every column.
MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
# What no name of a user or item may match: line ends, NUL, and the name of RecBole's padding.
UNWRITABLE = "[\r\n\x00]|^\\[PAD\\]$"
_MISSING = frozenset(MISSING)
_BOOLEANS = {"true": 1, "false": 0}  # cells of columns that pandas wrote from bool
LARGEST = float(np.finfo(np.float32).max)  # largest number that a model can compute with
_BLOCK_LINES = 1 << 16  # how many lines Python reads at a time
# Columns of some rows: names as dictionaries, numbers as arrays of float64, lists of arrays.
Block = dict[str, Any]


def open_file(path: str | Path, config: Options) -> AtomicFile:
    """Open a file of a dataset, by the end of its name."""
    return (ParquetTable if str(path).endswith(PARQUET) else TextTable)(Path(path), config)


def read_rows(
    files: Sequence[AtomicFile], names: Iterable[str], storage: Storage | None = None
) -> tuple[pd.DataFrame, list[int]]:
    """Read files with the same columns into one table, one file below the other.

    The columns are made once, with room for all files. Each block of rows that a file yields is
    written to its place in them, so that nothing is copied to join the blocks.

    Args:
        files: the files.
        names: the columns to read.
        storage: where numbers and codes of names are kept: memory, or a file on disk for data that
            are too large; memory if None.

    Returns:
        table: a row per line. Columns hold categories of str (token, nan if missing), float64
            (float, nan if missing) or arrays (token_seq and float_seq, empty if missing).
        sizes: number of rows of each file.

    Raises:
        UsageError: for the first row that is wrong, or a file without rows.
    """
    kinds = {name: files[0].kinds[name] for name in names}  # all files have the same
    max_rows = sum(file.num_rows for file in files)
    columns = {name: Column(kind, max_rows, storage or Storage()) for name, kind in kinds.items()}

    # A file begins in row ``first_row`` of the table, and a block in row ``start`` of its file. If
    # reading a file fails midway, ``read_blocks`` begins again at row 0 of the file, by a slower
    # method: its blocks overwrite those before. So the end of the last block is the size of the
    # file, not the sum of all blocks. (All columns of a block have the same length.)
    first_row = 0
    sizes = []
    for file in files:
        num_rows = 0
        for start, block in file.read_blocks(kinds):
            for name, column in columns.items():
                column.write(first_row + start, block[name])
                num_rows = start + len(block[name])
        if num_rows == 0:
            raise UsageError(
                f"{file.path} has no line of data; fill it; a .user or .item file may also be "
                "removed"
            )
        first_row += num_rows
        sizes.append(num_rows)
    # ``first_row`` is now the number of all rows; ``finish`` cuts off the room that is left.
    table = {name: column.finish(first_row) for name, column in columns.items()}

    # Return the memory that Arrow keeps to use again: hundreds of megabytes after a large file.
    pa.default_memory_pool().release_unused()
    return pd.DataFrame(table, copy=False), sizes


class AtomicFile:
    """A file of one table, with ``kinds`` of columns by name; subclasses read its format.

    Raises:
        UsageError: for a column that is wrong.
    """

    def __init__(self, path: Path, config: Options) -> None:
        self.path, self.seq_separator = path, config["seq_separator"]
        self.memory_limit = read_limit(config["memory_limit"])
        self.kinds: dict[str, str] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows, or of lines where some may be blank."""
        raise NotImplementedError

    def read(self, names: Iterable[str]) -> pd.DataFrame:
        """Return columns of every row, as :func:`read_rows` does."""
        return read_rows([self], names)[0]

    def read_blocks(self, kinds: Mapping[str, str]) -> Iterator[tuple[int, Block]]:
        """Yield number of the first row, from 0, and columns of each block of rows.

        After an error of a fast reader the rows are yielded again from the first.
        """
        raise NotImplementedError

    def _add_column(self, name: str, kind: str) -> None:
        """Add a column to ``kinds`` (name -> type), or refuse a name that is there already."""
        if name in self.kinds:
            raise UsageError(
                f"{self.path}: two columns are called {shown(name)}; rename one or remove it"
            )
        self.kinds[name] = kind

    def _make_error(self, place: str, problem: str) -> UsageError:
        return UsageError(f"{self.path}, {place}: {problem}")

    def _parse_cell(self, place: str, name: str, cell: Any) -> Any:
        """Convert a cell to the type of its column.

        Args:
            place: where it is, for the message, such as "line 7".
            name: name of its column.
            cell: its text; or, of a field of lists in parquet, a list.

        Returns:
            A name (None if missing), a number (NaN if missing), or an array.

        Raises:
            UsageError: if it should be a number or numbers, and is not.
        """
        # ``_MISSING`` has the texts that stand for no value, such as NaN and the empty text.
        kind = self.kinds[name]
        if kind == "token":
            return None if cell in _MISSING else cell
        try:
            return _parse_number(cell) if kind == "float" else self._parse_list(cell, kind)
        except ValueError:
            raise self._make_error(
                place,
                f"{name} ({kind}) is {str(cell)[:80]!r}, in which something is not a number; "
                "correct the cell or leave it empty",
            ) from None

    def _parse_list(self, cell: Any, kind: str) -> np.ndarray:
        """Parse a cell of a list field.

        Args:
            cell: a text with separators between its values, or a list from a parquet file.
            kind: token_seq or float_seq.

        Returns:
            An array of str or of float64, empty if the cell is missing.

        Raises:
            ValueError: if a value of float_seq is not a number, is NaN, or is not finite in
                float32.
        """
        # ``_MISSING`` has the texts that stand for no value, such as NaN and the empty text.
        values = [] if cell is None else cell
        if isinstance(values, str):
            values = [] if values in _MISSING else values.split(self.seq_separator)
        texts = [str(value) for value in values if value is not None and value != ""]
        if kind == "token_seq":
            return np.array(texts)

        # LARGEST is the largest number of float32. The comparison is false for NaN, too.
        numbers = np.array(list(map(float, texts)))
        if not (np.abs(numbers) <= LARGEST).all():
            raise ValueError
        return numbers


class TextTable(AtomicFile):
    """Text of UTF-8 whose first line names the columns; tabs separate the cells of a line."""

    def __init__(self, path: Path, config: Options) -> None:
        """Open a text file, and read the names and types of its columns from its first line.

        Raises:
            UsageError: if the first line is wrong.
        """
        super().__init__(path, config)
        # The number of the line that names the columns, from 1: data begin in the line after it.
        self.header_line = self._read_header()

    def _read_header(self) -> int:
        """Read the names and types of the columns from the first line that is not blank.

        Returns:
            The number of this line, counted from 1.

        Raises:
            UsageError: if there is none, or a cell of it is not name:type.
        """
        # ``iterate_lines`` yields each line with its number.
        filled = ((number, line) for number, line in iterate_lines(self.path) if line.strip())
        number, header = next(filled, (0, ""))
        if not header:
            raise UsageError(
                f"{self.path} is empty: its first line must name the columns as name:type, such as "
                "user_id:token"
            )

        # A cell is such as user_id:token. ``_add_column`` puts name and type into ``self.kinds``,
        # and refuses a name that is there already. KINDS are the four types of columns.
        for i, cell in enumerate(self._split_line(number, header), 1):
            name, _, kind = cell.partition(":")
            if not name or kind not in KINDS:
                raise self._make_error(
                    f"line {number}",
                    f"cell {i} of the first line is {shown(cell[:80])}, but must name a column "
                    f"as name:type, type being one of {', '.join(KINDS)}, as in 'user_id:token'. "
                    "Cells are separated by tabs; `recbole-pos convert` reads other separators",
                )
            self._add_column(name, kind)
        return number

    @cached_property
    def _form(self) -> TextForm | None:
        """The form of the text; None if only Python can read it."""
        return find_form(self.path, self.header_line)

    @property
    def num_rows(self) -> int:
        """Number of rows, or of lines where some may be blank."""
        if self._form is not None:
            return self._form.num_lines
        return sum(1 for _ in iterate_lines(self.path))

    def read_blocks(self, kinds: Mapping[str, str]) -> Iterator[tuple[int, Block]]:
        """Yield blocks of rows: the number of the first row, from 0, and the columns.

        DuckDB reads most files. If it finds anything unusual, even after some blocks, Python reads
        the file line by line. Then all blocks are yielded again, from row 0 on, and the caller
        replaces the rows that it has got before.

        Args:
            kinds: column to read -> token (a name), float, token_seq or float_seq (lists of these).

        Yields:
            Number of the first row of a block, and by column its names, its numbers, or a list of
            arrays.
        """
        # ``_form`` has counts of the lines that DuckDB must find; it is None if only Python can
        # read the text. Nor can DuckDB read a file of one column, in which a blank line looks like
        # an empty cell.
        if self._form is not None and len(self.kinds) > 1:
            # An error of DuckDB (ENGINE_ERRORS) or of a cell (ValueError) leaves this block before
            # its ``return``, and is not raised.
            with suppress(*ENGINE_ERRORS, ValueError):
                yield from self._read_fast(kinds, self._form)
                return
        # DuckDB cannot read the file, or has just failed.
        yield from self._read_slowly(kinds)

    def _read_fast(self, kinds: Mapping[str, str], form: TextForm) -> Iterator[tuple[int, Block]]:
        """Yield blocks of rows whose lines DuckDB splits into cells.

        This is the fast way, for a text in which DuckDB finds nothing unusual.

        Args:
            kinds: column to read -> token (a name), float, token_seq or float_seq (lists of these).
            form: counts of the lines of the file, with which its rows are compared.

        Yields:
            The number of the first row, from 0, and the columns of the block.

        Raises:
            ValueError, or an error of DuckDB: if only Python can read the file, which then begins
                again at its first row.
        """
        # ``self.kinds`` has all columns of the file, in its order; ``kinds`` only those to read.
        # For each block of rows, ``read_text`` yields the cells of all columns, as text.
        first_row = 0
        all_columns = self.kinds
        for columns in read_text(self.path, len(all_columns), form, self.memory_limit):
            text_by_name = dict(zip(all_columns, columns, strict=True))
            block: Block = {}
            for name, kind in kinds.items():
                texts = text_by_name[name]
                if kind == "token":  # Arrow numbers the names; those such as NaN become null
                    block[name] = _drop_missing(texts.dictionary_encode())
                elif kind == "float":
                    block[name] = _parse_numbers(texts)
                else:
                    block[name] = [self._parse_list(cell, kind) for cell in texts.to_pylist()]
            yield first_row, block
            first_row += len(columns[0])

    def _read_slowly(self, kinds: Mapping[str, str]) -> Iterator[tuple[int, Block]]:
        """Yield blocks of rows that Python reads line by line, where the fast reader has failed.

        It accepts more than DuckDB, such as blank lines, and can name the line of an error.

        Args:
            kinds: column to read -> token (a name), float, token_seq or float_seq (lists of these).

        Yields:
            The number of the first row, from 0, and the columns of the block.

        Raises:
            UsageError: for the first wrong line, with its number.
        """
        first_row = num_rows = 0  # rows before this block, and in it
        columns: Block = {name: [] for name in kinds}
        for number, line in iterate_lines(self.path):
            # A line of tabs only is not blank: it is a row of empty cells.
            is_blank = SEPARATOR not in line and not line.strip()
            if number <= self.header_line or is_blank:
                continue

            # A row: one cell for each column, of which those that are read are parsed.
            cells = self._split_line(number, line)
            if len(cells) != len(self.kinds):
                raise self._make_error(
                    f"line {number}",
                    f"cells of this line: {len(cells)}, expected {len(self.kinds)}, one for each "
                    f"column of the first line ({listed(self.kinds)}), separated by tabs; a cell "
                    'that holds a tab needs quotation marks ("...")',
                )
            row, place = dict(zip(self.kinds, cells, strict=True)), f"line {number}"
            for name, column in columns.items():
                column.append(self._parse_cell(place, name, row[name]))
            num_rows += 1

            if num_rows == _BLOCK_LINES:
                yield first_row, _make_block(columns, kinds)
                first_row += num_rows
                num_rows, columns = 0, {name: [] for name in kinds}
        yield first_row, _make_block(columns, kinds)

    def _split_line(self, number: int, line: str) -> list[str]:
        """Split a line into cells at its tabs, but not within quotation marks.

        Args:
            number: number of the line, for the message.
            line: its text. A cell in quotation marks may hold a tab.

        Returns:
            The text of each cell, without quotation marks.

        Raises:
            UsageError: if a quotation mark is not closed.
        """
        if '"' not in line:
            return line.split(SEPARATOR)
        csv.field_size_limit(sys.maxsize)  # the module refuses long cells unless it is told so
        try:
            return next(csv.reader([line], delimiter=SEPARATOR, strict=True))
        except csv.Error as error:
            raise self._make_error(
                f"line {number}",
                "a cell starts with a quotation mark that its end does not close: double it "
                '(""") or remove it; a cell cannot hold a line break',
            ) from error


class ParquetTable(AtomicFile):
    """Parquet: columns called name:type, or with types from ``column_types``."""

    def __init__(self, path: Path, config: Options) -> None:
        """Open the file and find the name and type of each column.

        Args:
            path: the file.
            config: configuration. The option ``column_types`` has the types of columns whose names
                do not say it, such as {user_id: token}.

        Raises:
            UsageError: if it is no parquet file, or a column has no type.
        """
        super().__init__(path, config)
        try:
            self.file = ParquetFile(path, self.memory_limit)
        except ENGINE_ERRORS as error:
            raise self._explain_damage(error) from error
        self.column_names: dict[str, str] = {}  # name of a field -> its column in the file
        types = config["column_types"] or {}
        # The name and type of a column are in its name (user_id:token), or else in the option.
        # KINDS are the four types; ``_add_column`` puts name and type into ``self.kinds``.
        for column in self.file.columns:
            name, _, kind = column.rpartition(":")
            if not name or kind not in KINDS:
                name, kind = column, str(types.get(column))
            if not name or kind not in KINDS:
                raise UsageError(
                    f"{self.path}: column {shown(column)} has no type: call it as in "
                    f"'user_id:token', or name it in column_types: {{{column}: ...}}, one of "
                    f"{', '.join(KINDS)}"
                )
            self._add_column(name, kind)
            self.column_names[name] = column

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.file.num_rows

    def _explain_damage(self, error: Exception) -> UsageError:
        problem = str(error).partition("\n")[0]
        return UsageError(f"{self.path} cannot be read as parquet: {problem}")

    def read_blocks(self, kinds: Mapping[str, str]) -> Iterator[tuple[int, Block]]:
        """Yield blocks of rows: the number of the first row, from 0, and the columns.

        Args:
            kinds: field to read -> token (a name), float, token_seq or float_seq (lists of these).
        """
        # ``column_names`` has the name of each field's column in the file, such as user_id:token.
        first_row = 0
        try:
            for block in self.file.read([self.column_names[name] for name in kinds]):
                columns = zip(kinds, block.columns, strict=True)
                converted = {name: self._convert(first_row, name, cells) for name, cells in columns}
                yield first_row, converted
                first_row += len(block)
        except ENGINE_ERRORS as error:
            raise self._explain_damage(error) from error

    def _convert(self, first_row: int, name: str, column: pa.Array) -> Any:
        """Convert the cells of one column in a block of rows to the type of its field.

        Args:
            first_row: number of the block's first row, from 0, for messages.
            name: name of the field.
            column: the cells, of any type of Arrow.

        Returns:
            Names numbered by Arrow (token), float64 numbers (float), or a list of arrays.

        Raises:
            UsageError: if cells of this type cannot be such values.
        """
        kind = self.kinds[name]
        if pa.types.is_null(column.type):  # all cells are missing
            column = column.cast(pa.float64() if kind == "float" else pa.string())
        dtype = column.type

        # token: text or whole numbers
        if kind == "token" and (pa.types.is_integer(dtype) or _is_text(dtype)):
            encoded = column.dictionary_encode()
            names = encoded.dictionary.cast(pa.string())
            return _drop_missing(pa.DictionaryArray.from_arrays(encoded.indices, names))

        # float: numbers, or true and false as 1 and 0
        if kind == "float" and (_is_number(dtype) or pa.types.is_boolean(dtype)):
            return column.cast(pa.float64()).to_numpy(zero_copy_only=False)

        # token_seq and float_seq: lists, or text with separators
        is_list = is_list_type(dtype)
        value_type = dtype.value_type if is_list else dtype
        if kind.endswith("seq") and (_is_text(value_type) or (is_list and _is_number(value_type))):
            rows = enumerate(column.to_pylist(), first_row + 1)  # messages count from 1
            return [self._parse_cell(f"row {row}", name, cell) for row, cell in rows]
        raise UsageError(
            f"{self.path}: {name} ({kind}) holds {column.type}; expected text or whole numbers "
            "(token), numbers (float, a time too), or lists of these (token_seq, float_seq)"
        )


def _parse_number(cell: str) -> float:
    """Return a cell of text as a number; NaN if it is missing. Raise ValueError for other text.

    ``_MISSING`` has the texts that stand for no value. The words true and false, which pandas
    writes for a column of bool, are 1 and 0 (``_BOOLEANS``).
    """
    if cell in _MISSING:
        return float("nan")
    return float(_BOOLEANS.get(cell.lower(), cell))


def _parse_numbers(texts: pa.Array) -> np.ndarray:
    """Convert cells of text to numbers: NaN where a cell is empty or says that it is missing.

    Returns:
        [rows] float64.

    Raises:
        ValueError: if a cell is something else.
    """
    # Arrow is fast, and an empty cell (null) becomes NaN. If a text became NaN as well, the result
    # is not used: Arrow reads some wrong cells as NaN, such as nan(1). It raises ArrowInvalid for
    # texts that are no number to it, such as None.
    with suppress(pa.ArrowInvalid):
        numbers: np.ndarray = texts.cast(pa.float64()).to_numpy(zero_copy_only=False)
        num_nan, num_empty = np.isnan(numbers).sum(), texts.null_count
        if num_nan == num_empty:
            return numbers

    # Then Python converts each different text once. The code of a text is its place in ``values``;
    # an empty cell gets the code -1, for NaN in the last place.
    encoded = texts.dictionary_encode()
    values = np.array([*map(_parse_number, encoded.dictionary.to_pylist()), np.nan])
    codes = encoded.indices.fill_null(-1).to_numpy()
    return values[codes]


def _drop_missing(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Replace names that stand for a missing one, such as NaN or an empty text, by null.

    Args:
        column: names numbered by Arrow: a code for each cell (``indices``), and the name of each
            code (``dictionary``). It is returned as it is if it has no such name.

    Returns:
        The column with null in place of such names.
    """
    # MISSING has the texts that stand for no value. Only the codes of such names become null; the
    # names stay, without a cell that has them.
    is_missing = compute.is_in(column.dictionary, pa.array([*MISSING, None], pa.string()))
    if not compute.any(is_missing).as_py():
        return column
    codes = compute.if_else(is_missing.take(column.indices), None, column.indices)
    return pa.DictionaryArray.from_arrays(codes, column.dictionary)


def _make_block(columns: Block, kinds: Mapping[str, str]) -> Block:
    """Convert the parsed cells of some rows, a list for each column, to the form of a block.

    Names become a column of Arrow, which numbers them, and numbers become an array. The cells of a
    list field are arrays already: their list stays as it is.

    Args:
        columns: name of each column -> list of names (None if missing), numbers or arrays.
        kinds: name -> token (a name), float, token_seq or float_seq (lists of these).

    Returns:
        Name -> names numbered by Arrow, float64 numbers, or a list of arrays.
    """
    block: Block = {}
    for name, kind in kinds.items():
        cells = columns[name]
        if kind == "token":
            block[name] = pa.array(cells, pa.string()).dictionary_encode()
        elif kind == "float":
            block[name] = np.array(cells, np.float64)
        else:  # a list field
            block[name] = cells
    return block


def is_list_type(dtype: pa.DataType) -> bool:
    """Return whether cells of a type of Arrow are lists, of any length or of one."""
    types = pa.types
    return types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)


def _is_text(dtype: pa.DataType) -> bool:
    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype)


def _is_number(dtype: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(dtype) or types.is_floating(dtype) or types.is_decimal(dtype)
