"""Tables of a dataset, text or parquet, whose columns are named as name:type.

Arrow reads text in blocks of whole lines. Where it finds anything unusual (a cell too many, a
number it cannot parse) the block is read again line by line in Python, which accepts more (``+5``,
``True``, ``1e400``) or reports the line and cell of the error.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute, parquet
from pyarrow import csv as arrow

from recbole_pos.data.location import KINDS, MISSING, PARQUET
from recbole_pos.data.scratch import ColumnWriter, Scratch
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, listed, shown

_MISSING = frozenset(MISSING)
_BOOLEANS = {"true": 1.0, "false": 0.0}  # cells of columns that pandas wrote from bool
LARGEST = float(np.finfo(np.float32).max)  # of a number in a model
_BLOCK_CHARACTERS = 1 << 22
_BLOCK_ROWS = 1 << 18  # of parquet
_MAX_ARROW_BYTES = (1 << 31) - 1  # of a block
_MAX_TOKEN_BYTES = 1 << 33  # of the array in which RecBole keeps the tokens of a column
_EXPECTED = {
    "token": "text or whole numbers",
    "float": "numbers (a time as a number, such as seconds since 1970)",
    "token_seq": "lists of text or numbers, or text",
    "float_seq": "lists of numbers, or text",
}


def open_table(path: str | Path, config: Options) -> Table:
    """Open a table of a dataset, by the end of its name."""
    return (ParquetTable if str(path).endswith(PARQUET) else TextTable)(Path(path), config)


class Table:
    """A file of one table, with ``kinds`` of columns by name; subclasses read its format.

    Raises:
        UsageError: for the first row or column that is wrong, or if there is no row.
    """

    def __init__(self, path: Path, config: Options) -> None:
        self.path, self.seq_separator = path, config["seq_separator"]
        self.kinds: dict[str, str] = {}
        if self.seq_separator == "":
            raise UsageError("seq_separator is empty: nothing stands between names or numbers")

    def read(self, names: Iterable[str], scratch: Scratch | None = None) -> pd.DataFrame:
        """Read columns of every row; only once, since it consumes the open file.

        Args:
            names: the columns.
            scratch: disk space for numbers and codes of names; they are in memory if None.

        Returns:
            A row per line. Columns hold categories of str (token, nan if missing), float64
            (float, nan if missing) or arrays (token_seq and float_seq, empty if missing).
        """
        kinds = {name: self.kinds[name] for name in names}
        blocks: dict[str, Any] = {
            name: ColumnWriter(scratch) if scratch and not kind.endswith("seq") else []
            for name, kind in kinds.items()
        }
        num_rows = 0
        for block in self._read_blocks(kinds):
            num_rows += max(map(len, block.values()))
            for name, column in block.items():
                blocks[name].append(column)
        if not num_rows:
            raise UsageError(
                f"{self.path} has no line of data; fill it; a .user or .item file may also be "
                "removed"
            )
        columns = {name: self._join(name, blocks.pop(name)) for name in kinds}
        pa.default_memory_pool().release_unused()  # hundreds of megabytes after a large file
        return pd.DataFrame(columns, copy=False)

    def _read_blocks(self, kinds: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield blocks of rows, as columns: number arrays, name dictionaries, lists of arrays."""
        raise NotImplementedError

    def _join(self, name: str, blocks: Any) -> Any:
        """Return a whole column, joined from its blocks in memory or read from its writer."""
        kind = self.kinds[name]
        if kind.endswith("seq"):
            return pd.Series([cell for block in blocks for cell in block], dtype=object)
        if kind == "float":
            return blocks.close() if isinstance(blocks, ColumnWriter) else np.concatenate(blocks)
        if isinstance(blocks, ColumnWriter):
            codes, tokens = blocks.close(), list(blocks.names)
        else:
            column = pa.chunked_array(blocks).unify_dictionaries().combine_chunks()
            codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            tokens = column.dictionary.to_pylist()
        longest = max(tokens, key=len, default="")
        if 4 * len(longest) * len(tokens) > _MAX_TOKEN_BYTES:
            raise UsageError(
                f"{self.path}: {name} has {len(tokens):,} different tokens of up to "
                f"{len(longest):,} characters ({longest[:40]!r}...), more than can be kept: names "
                "are kept at the length of the longest. Shorten it, or leave the column out"
            )
        names = pd.Index(tokens, dtype=object)
        return pd.Categorical.from_codes(codes, names, validate=False)

    def _parse_list(self, cell: Any, kind: str) -> np.ndarray:
        """Return a cell of a sequence (text or list) as an array, or raise ValueError."""
        if isinstance(cell, str):
            cell = () if cell in _MISSING else cell.split(self.seq_separator)
        texts = [str(value) for value in cell or () if value is not None and value != ""]
        if kind == "token_seq":
            return np.array(texts)
        numbers = np.array(list(map(float, texts)))
        if not (np.abs(numbers) <= LARGEST).all():  # no mean can be filled in within a sequence
            raise ValueError("nan or inf")
        return numbers


class TextTable(Table):
    """Text whose first line names the columns, with a cell of each in every line."""

    def __init__(self, path: str | Path, config: Options) -> None:
        super().__init__(Path(path), config)
        self.separator = config["field_separator"]
        self.encoding = config["encoding"] or "utf-8"  # RecBole's own Config has no default
        if len(self.separator) != 1 or self.separator in '"\r\n\0':
            raise UsageError(
                f"field_separator: {shown(self.separator)} must be one character, and neither a "
                'quotation mark nor the end of a line; a tab is "\\t" in a yaml file'
            )
        try:
            "".encode(self.encoding)  # raises for codecs that do not encode text
        except (LookupError, ValueError) as error:
            raise UsageError(
                f"encoding: {shown(self.encoding)} is not one that Python knows"
            ) from error
        self._blocks_of_lines = self._decode()
        self._read_names()

    def _make_line_error(self, line_number: int, problem: str) -> UsageError:
        return UsageError(f"{self.path}, line {line_number}: {problem}")

    def _make_encoding_error(self, line_number: int, reason: str) -> UsageError:
        return self._make_line_error(
            line_number,
            f"{reason}; the file is no {self.encoding} text. Write it as UTF-8, or set encoding to "
            "the one it has (cp1252 and utf-16 are what spreadsheets write)",
        )

    def _decode(self) -> Iterator[tuple[int, str]]:
        """Yield number and text of the first line that is not blank, then of blocks of lines."""
        number = 1
        try:
            with open(self.path, encoding=self.encoding) as file:
                block = file.readline().removeprefix("\ufeff")  # as Excel writes it
                while block and not block.strip():
                    number, block = number + 1, file.readline()
                while block:
                    if "\0" in block:
                        line = number + block.count("\n", 0, block.index("\0"))
                        raise self._make_encoding_error(line, "a NUL byte")
                    yield number, block
                    number += block.count("\n")
                    block = file.read(_BLOCK_CHARACTERS) + file.readline()
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except UnicodeError as error:
            reason = str(getattr(error, "reason", error))
            raise self._make_encoding_error(self._find_undecodable(), reason) from error

    def _find_undecodable(self) -> int:
        """Return the number of the first line that cannot be decoded."""
        number = 1
        try:
            with open(self.path, encoding=self.encoding) as file:
                while file.readline():
                    number += 1
        except UnicodeDecodeError as error:
            number += error.object[: error.start].count(b"\n")
        return number

    def _read_names(self) -> None:
        """Read names and types of the columns from the first line with text."""
        number, line = next(self._blocks_of_lines, (0, ""))
        if not line:
            raise UsageError(
                f"{self.path} is empty: its first line must name the columns as name:type, such as "
                "user_id:token"
            )
        for i, cell in enumerate(self._split_line(number, line.removesuffix("\n")), 1):
            name, _, kind = cell.partition(":")
            if not name or kind not in KINDS:
                raise self._make_line_error(
                    number,
                    f"cell {i} of the first line is {shown(cell[:80])}, but must name a column "
                    f"as name:type, type being one of {', '.join(KINDS)}, as in 'user_id:token'. "
                    f"Cells are separated by {shown(self.separator)} (field_separator); a file "
                    "without such a line needs one",
                )
            if name in self.kinds:
                raise self._make_line_error(
                    number, f"two columns are called {shown(name)}; rename one or remove it"
                )
            self.kinds[name] = kind

    def _read_blocks(self, kinds: dict[str, str]) -> Iterator[dict[str, Any]]:
        for first_line, text in self._blocks_of_lines:
            try:
                yield self._read_fast(text, kinds)
            except (ValueError, pa.ArrowException):
                yield self._read_slowly(first_line, text, kinds)

    def _read_fast(self, text: str, kinds: dict[str, str]) -> dict[str, Any]:
        """Return the columns of a block, read by Arrow; raise if it needs ``_read_slowly``."""
        if len(self.kinds) == 1:
            raise ValueError("a blank line and an empty cell are the same")
        if '"' in text:
            self._check_quotes(text)
        data = text.encode()
        if len(data) > _MAX_ARROW_BYTES:
            raise ValueError("too long for Arrow")
        arrow_types = {"token": pa.dictionary(pa.int32(), pa.string()), "float": pa.float64()}
        text_type = pa.string()  # of lists, which are parsed below
        table = arrow.read_csv(
            pa.py_buffer(data),
            arrow.ReadOptions(
                use_threads=False, block_size=len(data) + 1, column_names=list(self.kinds)
            ),
            arrow.ParseOptions(delimiter=self.separator),
            arrow.ConvertOptions(
                column_types={n: arrow_types.get(kind, text_type) for n, kind in kinds.items()},
                include_columns=list(kinds),
                null_values=MISSING,
                strings_can_be_null=True,
            ),
        )
        columns: dict[str, Any] = {}
        for name, kind in kinds.items():
            column = table[name].combine_chunks()
            if kind == "float":
                columns[name] = column.to_numpy(zero_copy_only=False)
                if np.isnan(columns[name]).sum() > column.null_count:
                    raise ValueError("nan in a spelling that MISSING does not have")
            elif kind == "token":
                columns[name] = column
            else:
                columns[name] = [self._parse_list(cell, kind) for cell in column.to_pylist()]
        return columns

    def _read_slowly(self, first_line: int, text: str, kinds: dict[str, str]) -> dict[str, Any]:
        """Return the columns of a block, read line by line; ``first_line`` is its first number."""
        columns: dict[str, Any] = {name: [] for name in kinds}
        indices = {name: i for i, name in enumerate(self.kinds) if name in kinds}
        for number, line in enumerate(text.split("\n"), first_line):
            if self.separator not in line and not line.strip():
                continue
            cells = self._split_line(number, line)
            if len(cells) != len(self.kinds):
                raise self._make_line_error(
                    number,
                    f"cells of this line: {len(cells)}, expected {len(self.kinds)}, one for each "
                    f"column of the first line ({listed(self.kinds)}), separated by "
                    f"{shown(self.separator)}; a cell that holds the separator needs quotation "
                    'marks ("...")',
                )
            for name, i in indices.items():
                try:
                    columns[name].append(self._parse_cell(cells[i], kinds[name]))
                except UnicodeEncodeError as error:  # lone surrogates, which utf-7 can hold
                    raise self._make_encoding_error(number, error.reason) from error
                except ValueError:
                    raise self._make_line_error(
                        number,
                        f"{name} ({kinds[name]}) is {cells[i][:80]!r}, which is not a number; "
                        "correct the cell or leave it empty",
                    ) from None
        for name, kind in kinds.items():
            if kind == "token":
                columns[name] = pa.array(columns[name], pa.string()).dictionary_encode()
            elif kind == "float":
                columns[name] = np.array(columns[name], dtype=np.float64)
        return columns

    def _split_line(self, number: int, line: str) -> list[str]:
        """Return the cells of line ``number``, or refuse a quotation mark that is not closed."""
        if '"' not in line:
            return line.split(self.separator)
        old_limit = csv.field_size_limit(len(line) + 1)  # of the process, restored below
        try:
            return next(csv.reader([line], delimiter=self.separator, strict=True))
        except csv.Error as error:
            raise self._make_line_error(
                number,
                "a cell starts with a quotation mark that its end does not close: double it "
                '(""") or remove it; a cell cannot hold a line break',
            ) from error
        finally:
            csv.field_size_limit(old_limit)

    def _check_quotes(self, text: str) -> None:
        """Refuse a quotation mark that is not closed at the end of its cell; Arrow accepts it."""
        separator = re.escape(self.separator)
        # an opening quotation mark that none before a separator closes; csv decides on it
        doubtful = rf'(?:^|{separator})"(?![^"\n]*(?:""[^"\n]*)*"(?:{separator}|$))'
        for quote in re.finditer(doubtful, text, re.MULTILINE):
            line_start = text.rfind("\n", 0, quote.end()) + 1
            line = text[line_start:].partition("\n")[0]
            self._split_line(0, line)  # an error names no line yet: the block is read again

    def _parse_cell(self, cell: str, kind: str) -> Any:
        """Return a cell as a value of its type, or raise ValueError."""
        cell.encode()  # raises for lone surrogates
        if kind.endswith("_seq"):
            return self._parse_list(cell, kind)
        if kind == "token":
            return None if cell in _MISSING else cell
        if cell in _MISSING:
            return float("nan")
        number = _BOOLEANS.get(cell.lower())
        return float(cell) if number is None else number


class ParquetTable(Table):
    """Parquet: columns called name:type, or with types from ``column_types``."""

    def __init__(self, path: str | Path, config: Options) -> None:
        super().__init__(Path(path), config)
        try:
            self.file = parquet.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            raise self._make_read_error(error) from error
        self.column_names: dict[str, str] = {}  # name of a field -> its column in the file
        types = config["column_types"] or {}
        for column in self.file.schema_arrow.names:
            name, _, kind = column.rpartition(":")
            if not name or kind not in KINDS:
                name, kind = column, str(types.get(column))
            if not name or kind not in KINDS:
                raise UsageError(
                    f"{self.path}: column {shown(column)} has no type: call it as in "
                    f"'user_id:token', or name it in column_types: {{{column}: ...}}, one of "
                    f"{', '.join(KINDS)}"
                )
            if name in self.kinds:
                raise UsageError(
                    f"{self.path}: two columns are called {shown(name)}; rename one or remove it"
                )
            self.column_names[name] = column
            self.kinds[name] = kind

    def _make_read_error(self, error: Exception) -> UsageError:
        return UsageError(f"{self.path} cannot be read as parquet: {error}")

    def _read_blocks(self, kinds: dict[str, str]) -> Iterator[dict[str, Any]]:
        columns = [self.column_names[name] for name in kinds]
        first_row = 0
        try:
            for block in self.file.iter_batches(_BLOCK_ROWS, columns=columns, use_threads=False):
                yield {
                    name: self._convert(first_row, name, block.column(self.column_names[name]))
                    for name in kinds
                }
                first_row += len(block)
        except (OSError, pa.ArrowException) as error:
            raise self._make_read_error(error) from error

    def _convert(self, first_row: int, name: str, column: pa.Array) -> Any:
        """Return a block of a column, from ``first_row`` on, converted to its kind."""
        kind = self.kinds[name]
        has_codes = pa.types.is_dictionary(column.type)
        dtype = column.type.value_type if has_codes else column.type
        if pa.types.is_null(dtype):  # all cells are missing
            dtype = pa.float64() if kind == "float" else pa.string()
            column = column.cast(dtype)
        if kind == "token" and (pa.types.is_integer(dtype) or _is_text(dtype)):
            return self._convert_tokens(name, column if has_codes else column.dictionary_encode())
        if kind == "float" and (_is_number(dtype) or pa.types.is_boolean(dtype)):
            numbers = column.dictionary_decode() if has_codes else column
            return np.array(numbers.cast(pa.float64()).to_numpy(zero_copy_only=False))
        is_list = is_list_type(dtype)
        value_type = dtype.value_type if is_list else dtype
        if kind.endswith("seq") and (_is_text(value_type) or (is_list and _is_number(value_type))):
            return self._convert_lists(first_row, name, column)
        raise UsageError(
            f"{self.path}: {name} ({kind}) holds {column.type}; expected {_EXPECTED[kind]}. Write "
            "another type into the file, or give the column another kind"
        )

    def _convert_tokens(self, name: str, column: pa.DictionaryArray) -> pa.DictionaryArray:
        """Return a block of tokens as a dictionary of names, null where one is missing."""
        names = column.dictionary.cast(pa.string())
        if compute.any(compute.match_substring(names, "\0")).as_py():
            raise UsageError(f"{self.path}: a name of {name} has a NUL byte; remove it")
        is_missing = compute.is_in(names, pa.array([*MISSING, None], pa.string()))
        codes = column.indices.cast(pa.int32())
        if compute.any(is_missing).as_py():
            codes = compute.if_else(is_missing.take(codes), None, codes)
        return pa.DictionaryArray.from_arrays(codes, names)

    def _convert_lists(self, first_row: int, name: str, column: pa.Array) -> list[np.ndarray]:
        """Return a block of sequences as arrays, or refuse a row with something else."""
        lists = []
        kind = self.kinds[name]
        for row, cell in enumerate(column.to_pylist(), first_row + 1):
            try:
                lists.append(self._parse_list(cell, kind))
            except ValueError:
                raise UsageError(
                    f"{self.path}, row {row}: {name} ({kind}) is {str(cell)[:80]!r}, in which "
                    "something is not a number; correct the cell or leave it empty"
                ) from None
        return lists


def is_list_type(dtype: pa.DataType) -> bool:
    """Return whether cells of a type are lists, of any length or of one."""
    types = pa.types
    return types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)


def _is_text(dtype: pa.DataType) -> bool:
    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype)


def _is_number(dtype: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(dtype) or types.is_floating(dtype) or types.is_decimal(dtype)
