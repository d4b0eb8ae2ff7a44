"""Files and frames as tables of Arrow, in which every row knows its file and its line.

Parquet is read by DuckDB in ``tables/``, as atomic files are. Csv is read by Arrow: DuckDB does not
number the lines that it skips, so that a file with an empty or broken line, or with a cell of
several lines, would have to be read again by Python, in ten times the time.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import duckdb
import numpy as np
import pyarrow as pa
from pyarrow import csv as csv_reader

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.cells import simplify_types
from recbole_pos.errors import UsageError
from recbole_pos.tables.engine import BLOCK_BYTES, ENGINE_ERRORS, ParquetFile, read_blocks
from recbole_pos.tables.storage import read_limit
from recbole_pos.values import shown

FILE, LINE = "(file)", "(line)"  # columns of a source that say where a row is from
EMPTY_LINE = "empty line"  # fault of a line that holds nothing, so that nothing is lost with it
# Suffix of a file -> the format that it is read as.
_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
# Suffixes of files that may stand beside data, such as dataset_infos.json and README.txt.
_SUFFIXES_BESIDE_DATA = (".json", ".txt")
_HIVE_MISSING = "__HIVE_DEFAULT_PARTITION__"  # Hive's name of a folder without a value
_SEPARATORS = ",;\t|"  # between cells, of which the most frequent one is taken
# What readers raise for a file that they cannot read.
_UNREADABLE = (*ENGINE_ERRORS, EOFError, UnicodeError, LookupError, csv.Error, zlib.error)


@dataclass
class Source:
    """What was read from a file, from all files of a folder, or from a frame.

    Attributes:
        path: the file or folder, or the name of the frame.
        table: the rows of all files; its columns FILE and LINE say where each row is from.
        broken_lines: place and fault of each line that is no row: ("log.csv:7", "empty line").
    """

    path: Path
    table: pa.Table
    broken_lines: list[tuple[str, str]] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the files."""
        return [name for name in self.table.column_names if name not in (FILE, LINE)]

    def locate_rows(self, rows: np.ndarray) -> list[str]:
        """Return file and line of [n] rows, as ``orders.csv:17``; lines count from 1.

        The table has them in its columns FILE and LINE.
        """
        places = self.table.select([FILE, LINE]).take(pa.array(rows)).to_pylist()
        return [f"{place[FILE]}:{place[LINE]}" for place in places]


def _make_source(
    path: Path, table: pa.Table, lines: np.ndarray, broken_lines: Iterable[tuple[int, str]] = ()
) -> Source:
    """Return the rows of one file or frame as a source, in which each has its file and its line.

    Args:
        path: the file, or the name of the frame.
        table: the rows.
        lines: [rows] number of the line of each row.
        broken_lines: number and fault of each line that is no row: (7, "empty line").
    """
    # FILE and LINE are the names of the two columns that are added. The name of the file is the
    # same in all rows, and so stored once.
    file = pa.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int16), [path.name])
    table = table.append_column(FILE, file)
    table = table.append_column(LINE, pa.array(lines.astype(np.int32)))
    return Source(path, table, [(f"{path.name}:{number}", fault) for number, fault in broken_lines])


def read_files(path: Path, args: ConvertArguments, columns: Any) -> Source:
    """Read a file, or all files of a folder that have one format, into one table.

    Args:
        path: the file or folder.
        args: arguments of the command ``convert``; its separator, quotation marks and encoding say
            how text is read.
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
        # Libraries raise errors of many types (_UNREADABLE), which do not name the file: our
        # message does.
        try:
            if file_format == "csv":
                source = _read_csv(file, args, given_names)
            elif file_format == "json":
                source = _read_json(file, args.encoding)
            else:
                source = _read_parquet(file)
        except _UNREADABLE as error:
            raise UsageError(
                f"{file} cannot be read as {file_format}: {str(error)[:200]}; see --encoding "
                "(cp1252 is what spreadsheets write in the West), --separator and --no_quotes"
            ) from error

        # More broken lines than rows mean that the file is not what it was taken for.
        num_rows, num_broken = source.table.num_rows, len(source.broken_lines)
        if not num_rows or num_broken > num_rows:
            places = [f", the first: {place} ({fault})" for place, fault in source.broken_lines[:1]]
            raise UsageError(
                f"{file} has {num_rows:,} rows of data and {num_broken:,} broken lines"
                f"{''.join(places)}; if it has no header, give --columns"
            )
        # Names of folders such as country=NO become columns, too.
        tables.append(_add_partitions(source.table, file))
        broken_lines += source.broken_lines
    return Source(path, _stack(tables), broken_lines)


def _find_files(path: Path) -> tuple[list[Path], str]:
    """Return the file at a path, or all data files of a folder, and their format.

    The suffix of a file tells its format; other files are skipped, and so are hidden files and
    files in hidden folders. Files such as README.txt or dataset_infos.json, whose suffix may also
    be that of data, are read only if the folder has nothing else.

    Args:
        path: the file or folder.

    Returns:
        The files, sorted by path, and ``csv``, ``json`` or ``parquet``.

    Raises:
        UsageError: if there is no file that can be read, or files have different formats.
    """
    if not path.exists():
        raise UsageError(f"found no file or folder {shown(str(path))}")
    # The format of each file that may hold data, by its suffix: _FORMATS has csv for .tsv.
    formats: dict[Path, str] = {}
    for file in sorted(path.rglob("*")) or [path]:  # rglob finds nothing below a file
        is_hidden = any(part[0] == "." for part in file.relative_to(path).parts)
        uncompressed = Path(file.name.lower().removesuffix(".gz"))
        if file.is_file() and not is_hidden and uncompressed.suffix in _FORMATS:
            formats[file] = _FORMATS[uncompressed.suffix]

    # Leave out those with the suffixes .json and .txt (_SUFFIXES_BESIDE_DATA), unless all have one.
    files = [file for file in formats if file.suffix not in _SUFFIXES_BESIDE_DATA] or list(formats)
    found = {formats[file] for file in files}
    if len(found) != 1:
        raise UsageError(
            f"{path} holds {' and '.join(sorted(found)) or 'no data'}, expected one of csv, "
            "tsv, json lines (.jsonl) and parquet, text also as .gz; read other files by a library "
            "such as polars, and give its frame to Dataset.from_frame"
        )
    return files, found.pop()


def _read_parquet(file: Path) -> Source:
    """Read a parquet file; the rows count as its lines, and none is broken."""
    parquet = ParquetFile(file, read_limit("auto"))  # as much memory as DuckDB may have
    # Simplify each block as it comes: text in a dictionary takes a fraction of the memory.
    table = _stack([simplify_types(pa.table(block)) for block in parquet.read(parquet.columns)])
    return _make_source(file, table, np.arange(1, table.num_rows + 1))


def _open(file: Path, encoding: str) -> BinaryIO:
    """Open a text file as a stream of bytes in UTF-8, uncompressed.

    Text in another encoding is converted into a temporary file first, since the readers of csv and
    json know UTF-8 only.

    Args:
        file: the file, compressed by gzip if its name ends in .gz.
        encoding: name of its encoding.
    """
    stream: Any = gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb")
    if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii"):
        return stream
    transcoded: Any = tempfile.TemporaryFile()
    # With an empty ``newline`` all line ends stay as they are.
    with io.TextIOWrapper(stream, encoding, newline="") as text:
        while characters := text.read(BLOCK_BYTES):
            transcoded.write(characters.encode())
    transcoded.seek(0)
    return transcoded


def _read_csv(file: Path, args: ConvertArguments, given_names: list[str]) -> Source:
    """Read a file of separated cells, all of them as text, and number the line of each row.

    Args:
        file: the file.
        args: arguments of the command ``convert``: separator (guessed if None), encoding, and
            whether quotation marks mean nothing (``no_quotes``).
        given_names: names of the columns, if the user says that the file has no header; else empty.

    Raises:
        UsageError: if the first line has too few columns, two columns have one name, or a quotation
            mark is not closed.
    """
    has_quotes = not args.no_quotes
    with _open(file, args.encoding) as stream:
        # The stream is now where the rows begin: at 0, if the file has no header.
        names, separator = _read_header(stream, file, args, given_names)
        start = stream.tell()
        num_skipped = 1 if start else 0  # lines before the rows: the header, or none

        # A cell in quotation marks may have several lines. Arrow does not tell how many, so that
        # they are counted before.
        num_further: dict[int, int] = {}
        if has_quotes:
            num_further = _count_further_lines(stream, file, num_skipped + 1, len(names), separator)
            stream.seek(start)
        table, broken_rows = _read_by_arrow(stream, names, separator, has_quotes)

    # Find the line of each row, good and broken ones together, and then separate the two.
    num_rows = table.num_rows + len(broken_rows)
    lines = _number_lines(num_rows, num_further, num_skipped + 1)
    broken_lines = [(int(lines[row]), fault) for row, fault in broken_rows]
    good_lines = np.delete(lines, [row for row, _ in broken_rows])
    return _make_source(file, table, good_lines, broken_lines)


def _number_lines(num_rows: int, num_further: Mapping[int, int], first_line: int) -> np.ndarray:
    """Return [rows] the number of the line in which each row of a csv begins.

    For example, rows of 1, 3 and 1 lines, the first of which begins at line 2, begin at the lines
    [2, 3, 6].

    Args:
        num_rows: number of rows.
        num_further: row, from 0 -> lines that it has after its first one, if any: ``{1: 2}``.
        first_line: line in which the first row begins.
    """
    num_lines = np.ones(num_rows, np.int64)
    for row, count in num_further.items():
        num_lines[row] += count  # [1, 3, 1] in the example
    ends = first_line + np.cumsum(num_lines)  # the line after each row: [3, 6, 7]
    return ends - num_lines


def _read_header(
    stream: BinaryIO, file: Path, args: ConvertArguments, given_names: list[str]
) -> tuple[list[str], str]:
    """Find the names of the columns of a csv, and leave the stream where the rows begin.

    The first line has the names, unless the user gives other ones: then it is the first row.

    Args:
        stream: the file from its beginning, in UTF-8.
        file: path of the file, for messages.
        args: arguments of the command ``convert``: the separator, None to take the character that
            the first line has most of; and whether quotation marks mean nothing.
        given_names: names of the columns, if the user says that the file has no header; else empty.

    Returns:
        Names of the columns, and the separator.

    Raises:
        UsageError: if the first line has too few columns, or two columns have one name.
    """
    # utf-8-sig leaves out the mark that some programs put before text. _SEPARATORS has the usual
    # separators: comma, semicolon, tab, pipe.
    first_line = stream.readline().decode("utf-8-sig").strip("\r\n")
    is_tsv = ".tsv" in [suffix.lower() for suffix in file.suffixes]
    likely = "\t" if is_tsv else max(_SEPARATORS, key=first_line.count)
    separator = args.separator or likely
    rows = csv.reader(
        [first_line],
        delimiter=separator,
        quoting=csv.QUOTE_NONE if args.no_quotes else csv.QUOTE_MINIMAL,
        strict=True,
    )
    names = next(rows, [])
    if len(names) < 2 or (given_names and len(given_names) != len(names)):
        raise UsageError(
            f"{file}: the first line, {first_line[:80]!r}, has {len(names)} columns, expected "
            f"{len(given_names) or 'more'}; see --separator and --columns"
        )

    # If the user gives names, and the first line does not have the same ones, it is no header: go
    # back, so that it is read again as the first row.
    if given_names and names != given_names:
        names = given_names
        stream.seek(0)
    names = [name or f"(column {number})" for number, name in enumerate(names, 1)]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UsageError(
            f"{file}: two columns are called {shown(repeated[0])}; rename one, or name all with "
            "--columns if there is no header"
        )
    return names, separator


def _count_further_lines(
    stream: BinaryIO, file: Path, first_line: int, num_columns: int, separator: str
) -> dict[int, int]:
    """Count the lines that each row of a csv has after its first one.

    A row has several lines if a cell in quotation marks does.

    Args:
        stream: the rows, without the header.
        file: the file, for messages.
        first_line: number of the first line of the stream in the file, from 1.
        num_columns: number of cells of every row.
        separator: character between cells.

    Returns:
        Number of the row, from 0 -> number of its further lines, only for rows that have any.

    Raises:
        UsageError: for a quotation mark that is not closed: nobody knows where its row ends.
    """
    # Python's reader, which counts lines, is slow, and not needed for most files.
    start = stream.tell()
    if not _has_odd_quotes(stream):
        return {}
    stream.seek(start)

    num_further = {}
    reader = csv.reader((line.decode() for line in stream), delimiter=separator, strict=True)
    num_before = 0  # lines of the rows before this one
    try:
        for row, cells in enumerate(reader):
            num_lines = reader.line_num - num_before  # ``line_num``: lines that were read so far
            if num_lines > 1:
                num_further[row] = num_lines - 1
                # A mark that is not closed joins rows up to the next mark, however far that is.
                if len(cells) != num_columns:
                    raise csv.Error(f"a row of {num_lines} lines has {len(cells)} cells")
            num_before = reader.line_num
    except csv.Error as error:  # raised above, or by the reader for a mark within a cell
        raise UsageError(
            f"{file}, line {first_line + num_before}: {error}; a quotation mark opens that is not "
            "closed, or stands within a cell: correct the line, or read marks as text by "
            "--no_quotes"
        ) from error
    return num_further


def _has_odd_quotes(stream: BinaryIO) -> bool:
    """Return whether some line has an odd number of quotation marks.

    Only then can a cell in quotation marks begin in a line and go on in the next one.
    """
    for block in read_blocks(stream):
        if b'"' in block and any(line.count(b'"') % 2 for line in block.split(b"\n")):
            return True
    return False


def _read_by_arrow(
    stream: BinaryIO, names: list[str], separator: str, has_quotes: bool
) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Read the rows of a csv by Arrow, and skip lines with another number of cells.

    Args:
        stream: the lines after the header.
        names: names of the columns.
        separator: character between cells.
        has_quotes: whether quotation marks may enclose cells; otherwise they are text.

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
        block_size=BLOCK_BYTES,
        column_names=names,
    )
    parse_options = csv_reader.ParseOptions(
        delimiter=separator,
        quote_char='"' if has_quotes else False,
        newlines_in_values=has_quotes,
        ignore_empty_lines=False,  # every line is a row
        invalid_row_handler=skip_row,
    )
    convert_options = csv_reader.ConvertOptions(
        column_types=dict.fromkeys(names, pa.dictionary(pa.int32(), pa.string())),
        null_values=[""],
        strings_can_be_null=True,
    )
    return csv_reader.read_csv(stream, read_options, parse_options, convert_options), broken_rows


def _read_json(file: Path, encoding: str) -> Source:
    """Read a file of json objects, one in each line, as a table with a column for each key.

    Lines that are no json object are listed as broken.

    Args:
        file: the file, compressed by gzip if its name ends in .gz.
        encoding: name of its encoding, such as ``utf-8``.
    """
    tables, lines, broken_lines = [], [np.empty(0, np.int64)], []
    num_lines = 0  # before this block
    with _open(file, encoding) as stream, duckdb.connect() as connection:
        for block in read_blocks(stream):
            # Ask DuckDB which lines are objects, as {"user": 1} is and [1] is not.
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
                tables.append(simplify_types(objects))
                lines.append(numbers[is_object])
            num_lines += len(texts)
    return _make_source(file, _stack(tables), np.concatenate(lines), broken_lines)


def _read_objects(connection: duckdb.DuckDBPyConnection, lines: pa.Array) -> pa.Table:
    """Return json objects as a table with a column for each key.

    Values are read as text, so that ids keep all their digits. Lists are read as lists of text, or
    of floats if they hold floats only: ``{"user": 12, "tags": ["a", "b"]}`` makes the columns
    ``user`` ("12") and ``tags`` (["a", "b"]).

    Args:
        connection: a connection to DuckDB, which reads them.
        lines: [rows] text, a json object each.
    """
    # DuckDB finds the type of each key over all objects, as a json text in one row of one column:
    # {"user": "UBIGINT", "tags": ["VARCHAR"]}. We choose what each is read as.
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


def _add_partitions(table: pa.Table, file: Path) -> pa.Table:
    """Return a table with further columns whose values stand in the names of folders.

    Hive and Spark write tables in this way: the file ``log/country=NO/part.csv`` gets the column
    ``country`` with the value NO in every row. A column of the same name in the file wins.

    Args:
        table: rows of the file.
        file: its path.
    """
    # In the name of a folder some characters are written in code, such as %20 for a blank, which
    # ``unquote`` reads. A missing value has a name of its own, _HIVE_MISSING.
    for folder in file.parts[:-1]:
        column, equals, value = map(unquote, folder.partition("="))
        if column and equals and column not in table.column_names:
            cell = pa.scalar(None if value == _HIVE_MISSING else value, pa.string())
            cells = pa.repeat(cell, table.num_rows).dictionary_encode()
            table = table.append_column(column, cells)
    return table


def read_frame(frame: Any, name: str) -> Source:
    """Read a frame of pandas, polars, DuckDB, pyarrow, or of any library with streams of Arrow.

    Args:
        frame: the frame. The index of pandas is read only if it has a name.
        name: what the frame holds, such as ``interactions``, for messages and places of rows.

    Returns:
        Its rows, numbered from 0 as lines.

    Raises:
        UsageError: if it is no frame, or has no row.
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
        return _make_source(Path(name), simplify_types(table), np.arange(table.num_rows))
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as error:
        reason = " ".join(map(str, error.args))[:200].rstrip(".")
        raise UsageError(
            f"{name}: expected a file, or a frame of pandas, polars (collected), pyarrow or "
            f"DuckDB, found {type(frame).__name__}: {reason}"
        ) from error


def _stack(tables: list[pa.Table]) -> pa.Table:
    """Put tables, such as those of the files of a folder, below each other into one.

    It has the columns of all tables, empty where a table lacks one. A column whose type differs
    between the tables becomes text.

    Raises:
        pa.ArrowException: if a type, such as a list, cannot become text.
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
    for table in tables:
        for name in mixed.intersection(table.column_names):
            text = table[name].cast(pa.string()).dictionary_encode()
            table = table.set_column(table.column_names.index(name), name, text)
        stacked.append(table)
    return pa.concat_tables(stacked, promote_options="default")
