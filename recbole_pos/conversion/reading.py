"""Files and frames as tables of Arrow, in which every row knows its file and its line.

Parquet is read by DuckDB in ``tables/``, as atomic files are. Csv is read by Arrow: DuckDB does not
number the lines that it skips, so that a file with an empty or broken line, or with a cell of
several lines, would have to be read again by Python, in ten times the time.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote
from uuid import UUID

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as csv_reader

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.errors import UsageError
from recbole_pos.tables.engine import ENGINE_ERRORS, ParquetFile
from recbole_pos.tables.storage import read_limit
from recbole_pos.tables.text import is_utf8
from recbole_pos.values import shown

FILE, LINE = "(file)", "(line)"  # columns of a source that say where a row is from
EMPTY_LINE = "empty line"  # fault of a line that holds nothing, so that nothing is lost with it
# Suffix of a file -> the format that it is read as.
_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
_BESIDE = (".json", ".txt")  # suffixes of files beside data, such as dataset_infos.json, README.txt
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # Hive's name of a folder without a value
_SEPARATORS = ",;\t|"  # between cells, of which the most frequent one is taken
_BLOCK_BYTES = 1 << 22  # that are read at a time
# What readers raise for a file that they cannot read.
_UNREADABLE = (*ENGINE_ERRORS, EOFError, UnicodeError, LookupError, csv.Error, zlib.error)


@dataclass
class Source:
    """What was read from a file, from all files of a folder, or from a frame.

    Attributes:
        path: the file or folder, or the name of the frame.
        table: the rows of all files; its columns FILE and LINE say where each row is from.
        broken_lines: place and fault of each line that is no row: ("log.csv:7", "empty line").
        cuts: ``valid`` or ``test``, if the user gives these interactions as files of their own ->
            number of the first of their rows in ``table``.
    """

    path: Path
    table: pa.Table
    broken_lines: list[tuple[str, str]] = field(default_factory=list)
    cuts: Mapping[str, int] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the files."""
        return [name for name in self.table.column_names if name not in (FILE, LINE)]

    def add_part(self, name: str, other: Source) -> Source:
        """Return a source with the rows of ``other`` below its own, held out as ``name``."""
        table = _stack([self.table, other.table])
        cuts = {**self.cuts, name: self.table.num_rows}
        broken_lines = [*self.broken_lines, *other.broken_lines]
        return replace(self, table=table, broken_lines=broken_lines, cuts=cuts)

    def locate_rows(self, rows: np.ndarray) -> list[str]:
        """Return file and line of [n] rows, as ``orders.csv:17``; lines count from 1."""
        places = self.table.select([FILE, LINE]).take(pa.array(rows)).to_pylist()
        return [f"{place[FILE]}:{place[LINE]}" for place in places]


class _FileRows(NamedTuple):
    """The rows of one file, the line number [rows] of each, and the lines that are no rows.

    Of a broken line there are number and fault: (7, "empty line").
    """

    table: pa.Table
    lines: np.ndarray
    broken_lines: list[tuple[int, str]]


def read_files(path: Path, args: ConvertArguments, columns: Any) -> Source:
    """Read a file, or all files of a folder that have one format.

    Args:
        path: the file or folder.
        args: its separator, quotation marks and encoding say how text is read.
        columns: names of the columns of text without a header, as a list or separated by commas;
            empty if there is a header.

    Returns:
        The rows of all files, each with its file and line, and the lines that are no rows.

    Raises:
        UsageError: if no format that can be read is found, or most lines are broken.
    """
    files, file_format = _find_files(path)
    given_names = columns.split(",") if isinstance(columns, str) else list(columns)

    tables, broken_lines = [], []
    for file in files:
        try:
            if file_format == "csv":
                rows = _read_csv(file, args, given_names)
            elif file_format == "json":
                rows = _read_json(file, args.encoding)
            else:
                rows = _read_parquet(file)
            table = _add_partitions(_simplify_types(rows.table), file)
        except _UNREADABLE as error:
            raise UsageError(
                f"{file} cannot be read as {file_format}: {str(error)[:200]}; see --encoding "
                "(cp1252 is what spreadsheets write in the West), --separator and --no_quotes"
            ) from error

        # More broken lines than rows mean that the file is not what it was taken for.
        broken = [(f"{file.name}:{number}", fault) for number, fault in rows.broken_lines]
        if not table.num_rows or len(broken) > table.num_rows:
            example = f", the first: {broken[0][0]} ({broken[0][1]})" if broken else ""
            raise UsageError(
                f"{file} has {table.num_rows:,} rows of data and {len(broken):,} broken lines"
                f"{example}; if it has no header, give --columns"
            )
        tables.append(_add_places(table, file.name, rows.lines))
        broken_lines += broken
    return Source(path, _stack(tables), broken_lines)


def _find_files(path: Path) -> tuple[list[Path], str]:
    """Return the file at a path, or all data files of a folder, and their format.

    Hidden files, and files in hidden folders, are skipped. Files such as README.txt or
    dataset_infos.json are read only if the folder has no other data.

    Args:
        path: the file or folder.

    Returns:
        The files, sorted by path, and ``csv``, ``json`` or ``parquet``.

    Raises:
        UsageError: if there is no file that can be read, or files have different formats.
    """
    if not path.exists():
        raise UsageError(f"found no file or folder {shown(str(path))}")
    files = []
    for file in sorted(path.rglob("*")) or [path]:  # rglob finds nothing below a file
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


def _read_parquet(file: Path) -> _FileRows:
    parquet = ParquetFile(file, read_limit("auto"))
    batches = [_simplify_types(pa.table(batch)) for batch in parquet.read(parquet.columns)]
    table = _stack(batches)
    return _FileRows(table, np.arange(1, table.num_rows + 1), [])


def _open(file: Path, encoding: str) -> BinaryIO:
    """Open a text file as a stream of bytes in UTF-8, uncompressed.

    Text in another encoding is converted into a temporary file first, since the readers of csv and
    json know UTF-8 only.

    Args:
        file: the file, compressed by gzip if its name ends in .gz.
        encoding: name of its encoding.
    """
    stream: Any = gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb")
    if is_utf8(encoding):
        return stream
    transcoded: Any = tempfile.TemporaryFile()
    with io.TextIOWrapper(stream, encoding, newline="") as text:
        while characters := text.read(_BLOCK_BYTES):
            transcoded.write(characters.encode())
    transcoded.seek(0)
    return transcoded


def _read_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a stream, many of them at a time."""
    while block := stream.read(_BLOCK_BYTES) + stream.readline():
        yield block


class _CsvForm(NamedTuple):
    """What separates the cells of a csv, and whether quotation marks may enclose them."""

    separator: str
    has_quotes: bool

    def split(self, lines: Iterable[str]) -> Any:
        """Return Python's csv reader, which yields the list of cells of each row.

        It raises csv.Error for a quotation mark that is not closed or stands within a cell.
        """
        return csv.reader(
            lines,
            delimiter=self.separator,
            quoting=csv.QUOTE_MINIMAL if self.has_quotes else csv.QUOTE_NONE,
            strict=True,
        )


def _read_csv(file: Path, args: ConvertArguments, given_names: list[str]) -> _FileRows:
    """Read a file of separated cells, all of them as text.

    Args:
        file: the file.
        args: separator (guessed from the first line if it is not given), encoding, and whether
            quotation marks may enclose cells.
        given_names: names of the columns, if the file has no header. If its first line has just
            these names, it is a header nevertheless.

    Raises:
        UsageError: if the first line has too few columns, two columns have one name, or a quotation
            mark is not closed.
    """
    with _open(file, args.encoding) as stream:
        # Find the first line that is not empty; ``start`` is the byte where it begins.
        first_line, num_skipped = "", 0
        while not first_line and (line := stream.readline()):
            start, num_skipped = stream.tell() - len(line), num_skipped + 1
            first_line = line.decode("utf-8-sig").strip("\r\n")

        # Split it into names of columns.
        is_tsv = ".tsv" in [suffix.lower() for suffix in file.suffixes]
        likely = "\t" if is_tsv else max(_SEPARATORS, key=first_line.count)
        form = _CsvForm(args.separator or likely, not args.no_quotes)
        names: list[str] = next(form.split([first_line]), [])
        if len(names) < 2 or (given_names and len(given_names) != len(names)):
            raise UsageError(
                f"{file}: the first line, {first_line[:80]!r}, has {len(names)} columns, expected "
                f"{len(given_names) or 'more'}; see --separator and --columns"
            )

        # If it has other cells than the given names, it is the first row of data and is read again.
        if given_names and names != given_names:
            names, num_skipped = given_names, num_skipped - 1
            stream.seek(start)
        names = [name or f"(column {number})" for number, name in enumerate(names, 1)]
        _require_different(names)

        # Read the rows, after a first pass that counts their lines if some rows have several.
        start = stream.tell()
        num_further = {}
        if form.has_quotes and _spans_lines(stream):
            stream.seek(start)
            num_further = _count_further_lines(stream, file, num_skipped + 1, len(names), form)
        stream.seek(start)
        table, broken_rows = _read_by_arrow(stream, names, form)

    # Number the line where each row begins: a row of three lines moves the rows after it by two.
    # Broken rows are counted like others here, and then get out of the numbers of good rows.
    num_rows = table.num_rows + len(broken_rows)
    shift = np.zeros(num_rows + 1, np.int64)
    for row, count in num_further.items():
        shift[row + 1] = count
    lines = num_skipped + 1 + np.arange(num_rows) + np.cumsum(shift)[:num_rows]
    broken_lines = [(int(lines[row]), fault) for row, fault in broken_rows]
    return _FileRows(table, np.delete(lines, [row for row, _ in broken_rows]), broken_lines)


def _spans_lines(stream: BinaryIO) -> bool:
    """Return whether a line has a quotation mark that is not closed in the same line.

    It has if the number of its marks is odd. Then a cell may go on in the next line.
    """
    blocks = (block for block in _read_blocks(stream) if b'"' in block)
    return any(line.count(b'"') % 2 for block in blocks for line in block.split(b"\n"))


def _count_further_lines(
    stream: BinaryIO, file: Path, first_line: int, num_columns: int, form: _CsvForm
) -> dict[int, int]:
    """Return how many lines each row of a csv has after its first one.

    Args:
        stream: the rows, without the header.
        file: the file, for messages.
        first_line: number of the first line of the stream in the file, from 1.
        num_columns: number of cells of every row.
        form: what separates cells.

    Returns:
        Number of the row, from 0 -> number of its further lines, only for rows that have any.

    Raises:
        UsageError: for a quotation mark that is not closed: nobody knows where its row ends.
    """
    num_further = {}
    rows = form.split(line.decode() for line in stream)
    num_lines = 0  # of the rows before this one
    try:
        for number, cells in enumerate(rows):
            if further := rows.line_num - num_lines - 1:
                num_further[number] = further
                if len(cells) != num_columns:
                    raise csv.Error(f"a row of {further + 1} lines has {len(cells)} cells")
            num_lines = rows.line_num
    except csv.Error as error:
        raise UsageError(
            f"{file}, line {first_line + num_lines}: {error}; a quotation mark opens that is not "
            "closed, or stands within a cell: correct the line, or read marks as text by "
            "--no_quotes"
        ) from error
    return num_further


def _read_by_arrow(
    stream: BinaryIO, names: list[str], form: _CsvForm
) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Read the rows of a csv by Arrow, and skip lines with another number of cells.

    Args:
        stream: the lines after the header.
        names: names of the columns.
        form: what separates cells.

    Returns:
        The good rows, all cells as text, empty ones as null; and number and fault of each broken
        row. Good and broken rows are numbered together from 0.
    """
    broken_rows: list[tuple[int, str]] = []

    # Arrow calls this for every row with too few or many cells, and numbers rows from 1.
    def skip_row(row: csv_reader.InvalidRow) -> str:
        fault = f"{row.actual_columns} cells, the first line has {row.expected_columns}"
        broken_rows.append((row.number - 1, fault if row.text.strip() else EMPTY_LINE))
        return "skip"

    read_options = csv_reader.ReadOptions(
        use_threads=False,  # else Arrow does not number rows, and keeps much of the file
        block_size=_BLOCK_BYTES,
        column_names=names,
    )
    parse_options = csv_reader.ParseOptions(
        delimiter=form.separator,
        quote_char='"' if form.has_quotes else False,
        newlines_in_values=form.has_quotes,
        ignore_empty_lines=False,  # every line is a row
        invalid_row_handler=skip_row,
    )
    convert_options = csv_reader.ConvertOptions(
        column_types=dict.fromkeys(names, pa.dictionary(pa.int32(), pa.string())),
        null_values=[""],
        strings_can_be_null=True,
    )
    return csv_reader.read_csv(stream, read_options, parse_options, convert_options), broken_rows


def _read_json(file: Path, encoding: str) -> _FileRows:
    """Read a file of json objects, one in each line, as a table with a column for each key.

    Lines that are no json object are listed as broken.
    """
    tables, lines, broken_lines = [], [np.empty(0, np.int64)], []
    num_lines = 0
    with _open(file, encoding) as stream, duckdb.connect() as connection:
        for block in _read_blocks(stream):
            # Ask DuckDB which lines are objects.
            texts = pa.array(block.removesuffix(b"\n").split(b"\n")).cast(pa.string())
            table = connection.from_arrow(pa.table({"line": texts}))
            checked = table.project("coalesce(try(json_type(line)), '') = 'OBJECT' AS is_object")
            is_object = checked.to_arrow_table()["is_object"].to_numpy()

            # Keep these with their line numbers, and note the fault of the others.
            numbers = np.arange(num_lines + 1, num_lines + 1 + len(texts))
            for index in np.flatnonzero(~is_object):
                fault = "no json object" if texts[int(index)].as_py().strip() else EMPTY_LINE
                broken_lines.append((int(numbers[index]), fault))
            if is_object.any():
                objects = _read_objects(connection, texts.filter(pa.array(is_object)))
                tables.append(_simplify_types(objects))
                lines.append(numbers[is_object])
            num_lines += len(texts)
    return _FileRows(_stack(tables), np.concatenate(lines), broken_lines)


def _read_objects(connection: duckdb.DuckDBPyConnection, lines: pa.Array) -> pa.Table:
    """Return json objects as a table with a column for each key.

    Values are read as text, so that ids keep all their digits. Lists are read as lists of text, or
    of floats if they hold floats only: ``{"user": 12, "tags": ["a", "b"]}`` makes the columns
    ``user`` ("12") and ``tags`` (["a", "b"]).

    Args:
        connection: a connection to DuckDB, which reads them.
        lines: [rows] text, a json object each.
    """
    # DuckDB finds the type of each key over all objects; we choose what it is read as.
    texts = connection.from_arrow(pa.table({"line": lines}))
    ((structure,),) = texts.aggregate("json_group_structure(line::JSON)").fetchall()
    types: dict[str, Any] = {}
    for key, value_type in json.loads(structure).items():
        if isinstance(value_type, dict):
            types[key] = {"record": "VARCHAR"}  # any record, which no field can hold
        elif isinstance(value_type, list):
            types[key] = ["DOUBLE" if value_type == ["DOUBLE"] else "VARCHAR"]
        else:
            types[key] = "VARCHAR"

    # Empty objects have no key, but DuckDB needs one. A quote is doubled inside of quotes in SQL.
    record = json.dumps(types or {"none": "VARCHAR"}).replace("'", "''")
    return texts.project(f"unnest(from_json(line, '{record}'))").to_arrow_table()


def _add_places(table: pa.Table, name: str, lines: np.ndarray) -> pa.Table:
    """Return the rows of the file ``name`` with two more columns, FILE and LINE [rows]."""
    file = pa.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int16), [name])
    table = table.append_column(FILE, file)
    return table.append_column(LINE, pa.array(lines.astype(np.int32)))


def _add_partitions(table: pa.Table, file: Path) -> pa.Table:
    """Return a table with further columns whose values stand in the names of folders.

    The file ``log/country=NO/part.csv`` gets the column ``country`` with the value NO in every row,
    as Hive and Spark write it. A column of the same name in the file wins.
    """
    for name in file.parts[:-1]:
        column, equals, value = map(unquote, name.partition("="))
        if column and equals and column not in table.column_names:
            cell = pa.scalar(None if value == _NO_PARTITION else value, pa.string())
            cells = pa.repeat(cell, table.num_rows).dictionary_encode()
            table = table.append_column(column, cells)
    return table


def read_frame(frame: Any, name: str) -> Source:
    """Read a frame of pandas, polars, DuckDB, pyarrow, or what else has a stream of Arrow.

    Args:
        frame: the frame. The index of pandas is read only if it has a name.
        name: what the frame holds, such as ``interactions``, for messages and places of rows.

    Returns:
        Its rows, numbered from 0 as lines.

    Raises:
        UsageError: if it is no frame, has no row, or two columns of one name.
    """
    try:
        if hasattr(frame, "iloc"):  # pandas
            has_names = any(name is not None for name in frame.index.names)
            table = pa.Table.from_pandas(frame, preserve_index=has_names)
        elif hasattr(frame, "to_arrow"):  # polars, whose streams have a type of text of their own
            table = pa.table(frame.to_arrow())
        elif hasattr(frame, "__arrow_c_stream__"):
            table = pa.table(frame)
        else:  # of a dict of dicts Arrow would take the keys
            raise TypeError("Arrow cannot read it")
        if not table.num_rows:
            raise ValueError("it has no row")
        _require_different(table.column_names)
        table = _add_places(_simplify_types(table), name, np.arange(table.num_rows))
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as error:
        reason = " ".join(map(str, error.args))[:200].rstrip(".")
        raise UsageError(
            f"{name}: expected a file, or a frame of pandas, polars (collected), pyarrow or "
            f"DuckDB, found {type(frame).__name__}: {reason}"
        ) from error
    return Source(Path(name), table)


def _require_different(names: list[str]) -> None:
    """Raise a UsageError if two columns have one name."""
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(
            f"two columns are called {shown(repeated[0])}; rename one, or name all with --columns "
            "if there is no header"
        )


def _simplify_types(table: pa.Table) -> pa.Table:
    """Return a table whose columns have one of few types: see :func:`_simplify_column`."""
    return pa.table([_simplify_column(column) for column in table.columns], table.column_names)


def _simplify_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of any type of Arrow in one of the few types that conversion understands.

    ======================================  ================================================
    text, booleans, decimals, uuids, nulls  text in a dictionary of int32, since names repeat
    floats                                  float64
    dates                                   timestamps in seconds
    lists                                   large lists of text, or of float64 if of floats
    ======================================  ================================================

    Whole numbers and times stay as they are. So do types that cannot be converted: they are refused
    if the column is used (``cells.encode``).
    """
    types = pa.types
    if isinstance(column.type, pa.BaseExtensionType):
        column = _read_extension(column)
    with suppress(pa.ArrowException):
        if types.is_dictionary(column.type):
            if types.is_string(column.type.value_type):
                return column.cast(pa.dictionary(pa.int32(), pa.string()))
            column = column.cast(column.type.value_type)
        dtype = column.type
        if types.is_decimal(dtype):  # databases have ids as 1034.00
            text = column.cast(pa.string())
            column = pc.replace_substring_regex(text, r"\.0*$|(\.\d*[1-9])0+$", r"\1")
            return column.dictionary_encode()
        if "string" in str(dtype) and not types.is_nested(dtype):
            return column.cast(pa.string()).dictionary_encode()
        if types.is_boolean(dtype) or types.is_null(dtype):
            return column.cast(pa.string()).dictionary_encode()
        if types.is_floating(dtype):
            return column.cast(pa.float64())
        if types.is_date(dtype):
            return column.cast(pa.timestamp("s"))
        if types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype):
            is_float = types.is_floating(dtype.value_type)
            return column.cast(pa.large_list(pa.float64() if is_float else pa.string()))
    return column


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


def _stack(tables: list[pa.Table]) -> pa.Table:
    """Put tables, such as those of the files of a folder, below each other into one.

    It has the columns of all tables, empty where a table lacks one. A column whose type differs
    between the tables becomes text.

    Raises:
        UsageError: if a type cannot become text.
    """
    if not tables:
        return pa.table({})

    # Find the columns that have several types.
    types_by_name: dict[str, set[str]] = {}
    for table in tables:
        for column in table.schema:
            types_by_name.setdefault(column.name, set()).add(str(column.type))
    mixed = {name for name, types in types_by_name.items() if len(types) > 1}

    # Turn these into text, and put the tables together.
    stacked = []
    try:
        for table in tables:
            for name in mixed.intersection(table.column_names):
                text = table[name].cast(pa.string()).dictionary_encode()
                table = table.set_column(table.column_names.index(name), name, text)
            stacked.append(table)
        return pa.concat_tables(stacked, promote_options="default")
    except pa.ArrowException as error:
        raise UsageError(f"the types of columns differ between files: {error}") from error
