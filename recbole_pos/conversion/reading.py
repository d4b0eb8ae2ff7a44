"""Files and frames to tables of Arrow, with the file and line of every row."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.text_files import BrokenLines, read_json, read_text
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

FILE, LINE = "(file)", "(line)"  # columns of a source that say where a row is from
_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
_BESIDE = (".json", ".txt")  # suffixes of files beside data, such as dataset_infos.json, README.txt
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_UNREADABLE = (
    *(OSError, EOFError, UnicodeError, LookupError),
    *(pa.ArrowException, duckdb.Error, zlib.error),
)


@dataclass
class Source:
    """What was read from a file, from all files of a folder, or from a frame.

    Attributes:
        path: the file or folder, or the name of the frame.
        table: the rows of all files; its columns FILE and LINE say where each row is from.
        form: format of the files.
        broken_lines: place and fault of each line that is no row: ("log.csv:7", "empty line").
        cuts: held-out part -> its first row, see :meth:`add_part`.
    """

    path: Path
    table: pa.Table
    form: str
    broken_lines: list[tuple[str, str]] = field(default_factory=list)
    cuts: Mapping[str, int] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the files."""
        return [name for name in self.table.column_names if name not in (FILE, LINE)]

    def add_part(self, name: str, other: Source) -> Source:
        """Return a source with the rows of ``other``, a held-out part, below its own."""
        table = _stack([self.table, other.table])
        cuts = {**self.cuts, name: self.table.num_rows}
        broken_lines = [*self.broken_lines, *other.broken_lines]
        return replace(self, table=table, broken_lines=broken_lines, cuts=cuts)

    def locate_rows(self, rows: np.ndarray) -> list[str]:
        """Return file and line of [n] rows, as ``orders.csv:17``; lines count from 1.

        A line that is given for a row is smaller than that in its file if cells before it hold line
        breaks.
        """
        places = self.table.select([FILE, LINE]).take(pa.array(rows)).to_pylist()
        return [f"{place[FILE]}:{place[LINE]}" for place in places]


def _add_places(table: pa.Table, name: str, first: int, broken: Sequence[int] = ()) -> pa.Table:
    """Return a table with FILE and LINE; lines count from ``first``, and ``broken`` are no rows."""
    file = pa.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int16), [name])
    lines = np.delete(np.arange(table.num_rows + len(broken), dtype=np.int32), list(broken))
    return table.append_column(FILE, file).append_column(LINE, pa.array(lines + np.int32(first)))


def read_files(path: Path, args: ConvertArguments, columns: Any) -> Source:
    """Read a file, or all files of a folder that have one format.

    Args:
        path: the file or folder.
        args: separator, quotation marks and encoding of text.
        columns: names of the columns of text without a header; empty if there is a header.

    Raises:
        UsageError: if no format that can be read is found, or most lines are broken.
    """
    files, file_format = _find_files(path)
    if columns and file_format != "csv":
        raise UsageError(f"columns: {path} names its columns; leave the option out")
    names = columns.split(",") if isinstance(columns, str) else list(columns)
    tables, broken_lines = [], []
    for file in files:
        try:
            table, broken, first = _read_file(file, file_format, args, names)
            table = _add_partitions(simplify_types(table), file)
        except _UNREADABLE as error:
            raise UsageError(
                f"{file} cannot be read as {file_format}: {str(error)[:200]}; see --encoding "
                "(cp1252 is what spreadsheets write in the West), --separator and --no_quotes"
            ) from error
        broken_lines += [(f"{file.name}:{number + first}", fault) for number, fault in broken]
        if not table.num_rows or len(broken) > table.num_rows:
            place, fault = broken_lines[-len(broken)] if broken else ("", "")
            example = f", the first: {place} ({fault})" if broken else ""
            raise UsageError(
                f"{file} has {table.num_rows:,} rows of data and {len(broken):,} broken lines"
                f"{example}; if it has no header, give --columns"
            )
        tables.append(_add_places(table, file.name, first, [number for number, _ in broken]))
    return Source(path, _stack(tables), file_format, broken_lines)


def _read_file(
    file: Path, file_format: str, args: ConvertArguments, names: list[str]
) -> tuple[pa.Table, BrokenLines, int]:
    """Return the rows of a file, its broken lines, and the number of its first line of data."""
    if file_format == "csv":
        return read_text(file, args, names)
    if file_format == "json":
        return *read_json(file, args.encoding), 1
    return parquet.read_table(file, partitioning=None), [], 1


def _find_files(path: Path) -> tuple[list[Path], str]:
    """Return the file at a path, or all data files of a folder, and their one format."""
    if not path.exists():
        raise UsageError(f"found no file or folder {shown(str(path))}")
    files = []
    for file in sorted(path.rglob("*")) or [path]:  # a file has none below it
        is_hidden = any(part[0] == "." for part in file.relative_to(path).parts)
        if file.is_file() and _find_format(file) and not is_hidden:
            files.append(file)
    files = [file for file in files if file.suffix not in _BESIDE] or files
    formats = {_find_format(file) for file in files}
    if len(formats) != 1:
        raise UsageError(
            f"{path} holds {' and '.join(map(str, formats)) or 'no data'}, expected one of csv, "
            "tsv, json lines (.jsonl) and parquet, text also as .gz; read other files by a library "
            "such as polars, and give its frame to Dataset.from_frame"
        )
    return files, str(formats.pop())


def _find_format(file: Path) -> str | None:
    """Return csv, json or parquet by the name of a file; None for another name."""
    name = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return _FORMATS.get(name.suffix.lower())


def _add_partitions(table: pa.Table, file: Path) -> pa.Table:
    """Return a table with a column for each folder of its file that is called as country=NO is.

    A column of the same name in the file wins.
    """
    for name in file.parts[:-1]:
        column, equals, value = map(unquote, name.partition("="))
        if column and equals and column not in table.column_names:
            cell = pa.scalar(None if value == _NO_PARTITION else value, pa.string())
            table = table.append_column(column, pa.repeat(cell, table.num_rows))
    return table


def read_frame(frame: Any, name: str) -> Source:
    """Read a frame of pandas, polars, pyarrow, or whatever Arrow reads; refuse an empty one."""
    try:
        if hasattr(frame, "iloc"):  # pandas, of whose index only the names are columns
            has_names = any(name is not None for name in frame.index.names)
            table = pa.Table.from_pandas(frame, preserve_index=has_names)
        elif hasattr(frame, "to_arrow"):  # polars, whose streams pyarrow 14 cannot read
            table = pa.table(frame.to_arrow())
        elif hasattr(frame, "__arrow_c_stream__"):
            table = pa.table(frame)
        else:
            raise TypeError("Arrow cannot read it")
        table = _add_places(simplify_types(table), name, first=0)
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as error:
        reason = " ".join(map(str, error.args))[:200].rstrip(".")
        raise UsageError(
            f"{name}: expected a file, or a frame of pandas, polars (collected), pyarrow or "
            f"DuckDB, found {type(frame).__name__}: {reason}"
        ) from error
    if not table.num_rows:
        raise UsageError(f"{name} has no row")
    return Source(Path(name), table, "frame")


def simplify_types(table: pa.Table) -> pa.Table:
    """Return a table in few types of Arrow; refuse two columns of one name.

    Text, categories of text and whole numbers stay what they are. Booleans and decimals become
    text, other numbers float64, dates times, and all lists large_list. Other types stay: they are
    refused when a column is used (``cells.encode``).
    """
    names = table.column_names
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(
            f"two columns are called {shown(repeated[0])}; rename one, or name all with --columns "
            "if there is no header"
        )
    columns = {}
    for name, column in zip(names, table.columns, strict=True):
        if isinstance(column.type, pa.BaseExtensionType):
            column = _read_extension(column)
        with suppress(pa.ArrowException):
            column = column.cast(_find_simple_type(column.type))
        if pa.types.is_decimal(column.type):  # databases have ids as 1034.00
            text = column.cast(pa.string())
            column = pc.replace_substring_regex(text, r"\.0*$|(\.\d*[1-9])0+$", r"\1")
        columns[name] = column
    return pa.table(columns)


def _read_extension(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return uuids as text, which DuckDB has for ids, and other extension types as stored."""
    storage = [chunk.storage for chunk in column.chunks]
    if column.type.extension_name != "arrow.uuid":
        return pa.chunked_array(storage, column.type.storage_type)
    texts = []
    for chunk in storage:
        encoded = chunk.dictionary_encode()  # so that each uuid is formatted once
        names = [str(UUID(bytes=value)) for value in encoded.dictionary.to_pylist()]
        texts.append(pa.DictionaryArray.from_arrays(encoded.indices, pa.array(names, pa.string())))
    return pa.chunked_array(texts, pa.dictionary(pa.int32(), pa.string()))


def _find_simple_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type to which a column is cast; its own if there is none."""
    types = pa.types
    if types.is_dictionary(dtype):
        value_type = _find_simple_type(dtype.value_type)
        is_text = types.is_string(value_type)
        return pa.dictionary(pa.int32(), value_type) if is_text else value_type
    if types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype):
        return pa.large_list(_find_simple_type(dtype.value_type))
    if types.is_boolean(dtype) or types.is_null(dtype) or "string" in str(dtype):
        return pa.string()
    if types.is_floating(dtype):
        return pa.float64()
    return pa.timestamp("s") if types.is_date(dtype) else dtype


def _stack(tables: list[pa.Table]) -> pa.Table:
    """Return the rows of all tables; a column that a table lacks is empty there.

    A column that is text in one table, and categories or numbers in another, becomes text.
    """
    texts = {f.name for table in tables for f in table.schema if pa.types.is_string(f.type)}
    stacked = []
    try:
        for table in tables:
            for number, field in enumerate(table.schema):
                if field.name in texts and not pa.types.is_string(field.type):
                    text = table[number].cast(pa.string())
                    table = table.set_column(number, field.name, text)
            stacked.append(table)
        return pa.concat_tables(stacked, promote_options="permissive")
    except pa.ArrowException as error:
        raise UsageError(f"the types of columns differ between files: {error}") from error
