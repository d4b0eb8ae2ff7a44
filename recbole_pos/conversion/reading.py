"""Reads a file, or a folder of files, in the format that its name tells; or a frame, by Arrow."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import csv as csv_reader
from pyarrow import json as json_reader
from pyarrow import parquet
from pydantic_core import from_json

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.source import (
    EMPTY_LINE,
    Columns,
    Part,
    Source,
    require_distinct,
    stack_columns,
    take_columns,
)
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
_BESIDE = (".json", ".txt")  # suffixes of files beside data, such as dataset_infos.json, README.txt
_FORMAT_NAMES = "csv, tsv, json lines (.jsonl) and parquet, each but parquet also as .gz"
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_SEPARATORS = ",;\t|"
_BLOCK = 1 << 22  # bytes
_MAX_DEPTH = 200  # of brackets; parsers recurse, and deeper text could overflow the stack
_HEAD = 1 << 20  # bytes by which types are chosen


def read_files(path: Path, args: ConvertArguments, names_option: str) -> Source:
    """Read a file, or all files of a folder that have one format.

    Args:
        path: the file or folder.
        args: separator, quotation marks and encoding of text.
        names_option: argument that may name the columns of text without a header.

    Raises:
        UsageError: if no format that can be read is found, or most lines are broken.
    """
    files = _find_files(path)
    file_format = _find_format(files[0])
    if getattr(args, names_option) and file_format != "csv":
        raise UsageError(f"{names_option}: {files[0]} names its columns; leave the option out")
    decimal_comma = False
    if file_format == "csv":
        reader = TextReader(files[0], args, names_option)
        parts = [reader.read(file) for file in files]
        form = f"text separated by {shown(reader.separator)}"
        decimal_comma = reader.separator == ";"
    elif file_format == "json":
        parts = [read_json(file) for file in files]
        form = "json lines"
    else:
        parts = [_read_parquet(file) for file in files]
        form = "parquet"
    for part in parts:
        num_broken = len(part.broken_lines)
        num_lines = part.num_rows + num_broken
        if not num_lines:
            hint = "; if it has no header, give --columns" if file_format == "csv" else ""
            raise UsageError(f"{part.path} has no line of data{hint}")
        if num_broken > part.num_rows:
            raise UsageError(
                f"{part.path}: {num_broken:,} of {num_lines:,} lines are broken, the first: "
                f"{part.describe_broken()[0]}"
            )
        _add_partitions(part)
    columns = stack_columns([(part.columns, part.num_rows) for part in parts])
    return Source(path, parts, columns, form, decimal_comma)


def _read_parquet(file: Path) -> Part:
    """Read a parquet file, without columns of its folders."""
    table = parquet.read_table(file, partitioning=None)
    return Part(file, take_columns(table, file), table.num_rows)


def read_frame(frame: Any, name: str) -> Source:
    """Read a frame of pandas, polars, pyarrow, or whatever Arrow reads; refuse an empty one."""
    try:
        table = _convert_frame(frame, name)
    except (TypeError, ValueError, pa.ArrowException) as error:
        reason = " ".join(map(str, error.args))[:200].rstrip(".")
        raise UsageError(
            f"{name}: Arrow cannot read the frame: {reason}; give the column a plain type, or "
            "leave it out of the frame"
        ) from error
    if not isinstance(table, pa.Table):
        raise UsageError(
            f"{name}: expected a file or a frame (pandas, polars, pyarrow, DuckDB), found "
            f"{type(frame).__name__}; a lazy frame is collected first, a series gets to_frame()"
        )
    if not table.num_rows:
        raise UsageError(f"{name} has no row")
    columns = take_columns(table, name)
    part = Part(Path(name), columns, table.num_rows, first_number=0)
    return Source(Path(name), [part], columns, "frame")


def _convert_frame(frame: Any, name: str) -> Any:
    """Return a frame as a table of Arrow; what is no frame becomes None, or no table."""
    if hasattr(frame, "iloc") and hasattr(frame, "columns"):  # pandas, with names as columns
        if frame.columns.duplicated().any():
            name_twice = frame.columns[frame.columns.duplicated()][0]
            raise UsageError(f"{name}: two columns are called {shown(name_twice)}; rename one")
        has_names = any(name is not None for name in frame.index.names)
        return pa.Table.from_pandas(frame, preserve_index=has_names)
    if hasattr(frame, "to_arrow"):  # polars, whose streams pyarrow 14 cannot read
        return frame.to_arrow()
    is_stream = hasattr(frame, "__arrow_c_stream__") and not isinstance(frame, pa.ChunkedArray)
    return pa.table(frame) if is_stream and not isinstance(frame, pa.Table) else frame


def _find_files(path: Path) -> list[Path]:
    """Return the file at a path, or all data files of a folder; refuse files of two formats."""
    if not path.exists():
        raise UsageError(f"found no file or folder {shown(str(path))}")
    files = []
    for file in sorted(path.rglob("*")) or [path]:  # a file has none below it
        parts = file.relative_to(path).parts
        is_hidden = any(part[0] in "._" and "=" not in part for part in parts)
        if file.is_file() and _find_format(file) and not is_hidden:
            files.append(file)
    files = [file for file in files if file.suffix not in _BESIDE] or files
    if not files:
        raise UsageError(
            f"{path} holds no data: its name ends like no known format, {_FORMAT_NAMES}"
        )
    if len(set(map(_find_format, files))) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise UsageError(f"{path} holds files of different formats ({names}); name one of them")
    return files


def _find_format(file: Path) -> str | None:
    """Return csv, json or parquet by the name of a file; None for another name."""
    if not _is_gzip(file):
        return _FORMATS.get(file.suffix.lower())
    file_format = _FORMATS.get(file.with_suffix("").suffix.lower())
    return None if file_format == "parquet" else file_format


def _is_gzip(file: Path) -> bool:
    return file.suffix.lower() == ".gz"


def _open(file: Path) -> IO[bytes]:
    """Open a file for reading, unpacked on the way if its name ends in .gz."""
    return gzip.open(file) if _is_gzip(file) else open(file, "rb")  # type: ignore[return-value]


def _add_partitions(part: Part) -> None:
    """Add a column for each folder of the path that is called such as country=NO.

    It is called ``country (folder)`` if the file has a column country with other values.
    """
    for name in part.path.parts[:-1]:
        column, equals, value = map(unquote, name.partition("="))
        if not (column and equals):
            continue
        cell = pa.scalar(None if value == _NO_PARTITION else value, pa.string())
        if column in part.columns:
            if part.columns[column].cast(pa.string()).unique().to_pylist() == [cell.as_py()]:
                continue  # the file says the same
            column = f"{column} (folder)"
        cells = pa.repeat(cell, part.num_rows).dictionary_encode()
        part.columns[column] = pa.chunked_array([cells])


class TextReader:
    """Reads files of separated cells that all begin with the same line of names.

    Args:
        file: the first of the files, which decides on separator, names and types.
        args: separator, quotation marks and encoding, where the user gives them.
        names_option: argument that may name the columns.
    """

    def __init__(self, file: Path, args: ConvertArguments, names_option: str) -> None:
        self.encoding = args.encoding
        self.has_quotes = not args.no_quotes
        self.names_option = names_option
        names = getattr(args, names_option)
        self.given_names = names.split(",") if isinstance(names, str) else list(names)
        first_line, line_number = self._read_first_line(file)
        self.separator = args.separator or self._find_separator(file, first_line)
        num_columns = len(self._split(first_line, self.separator))
        self.names = list(map(str, range(num_columns)))
        self.types = dict.fromkeys(self.names, pa.string())
        with _open(file) as stream:
            head = pa.BufferReader(pa.py_buffer(stream.read(_HEAD) + stream.readline()))
        columns: Columns = {}
        bad_rows: list[tuple[int, str]] = []
        with suppress(UsageError):  # reading the whole file raises it again
            columns, bad_rows = self._read_table(file, head, line_number, use_threads=False)
        is_ragged = self.separator == " " and bad_rows
        if num_columns > 1 and is_ragged and not args.separator:
            raise UsageError(
                f"{file}: separated by spaces, line {bad_rows[0][0] + line_number + 1} has "
                f"{bad_rows[0][1]}; if each is a user and the items in order, write pairs: "
                f"`awk '{{for (n = 2; n <= NF; n++) print $1, $n}}' {file.name} > pairs.txt` for "
                f"--{names_option}=user,item --time=row_order"
            )
        if num_columns < 2 and not args.separator:
            raise UsageError(
                f"{file}: the first line, {first_line[:80]!r}, has one column; cells may be "
                "separated by comma, semicolon, tab or |, another is given with --separator"
            )
        self.names = self._name_columns(file, first_line)
        self.types = dict.fromkeys(self.names, pa.string())
        for name, column in zip(self.names, columns.values(), strict=False):
            if 2 * len(column.unique()) < len(column):
                self.types[name] = pa.dictionary(pa.int32(), pa.string())

    def read(self, file: Path) -> Part:
        """Read one of the files; refuse it if its first line differs from the first file's."""
        first_line, line_number = self._read_first_line(file)
        if self._name_columns(file, first_line) != self.names:
            raise UsageError(
                f"{file}: its first line, {first_line[:80]!r}, is not that of the other files; "
                "files with different columns are converted one by one (--items, --users)"
            )
        is_header = self._split(first_line, self.separator) == self.names
        num_header = line_number if is_header or not self.given_names else line_number - 1
        compression = "gzip" if _is_gzip(file) else None
        for use_threads in (True, False):  # with threads, Arrow does not number bad rows
            with pa.input_stream(str(file), compression=compression, buffer_size=_BLOCK) as stream:
                columns, bad_rows = self._read_table(file, stream, num_header, use_threads)
            if not bad_rows:
                break
        return Part(file, columns, len(next(iter(columns.values()))), bad_rows, num_header + 1)

    def _read_first_line(self, file: Path) -> tuple[str, int]:
        """Return the first line with text, and its number from 1."""
        try:
            with _open(file) as stream:
                for number, line in enumerate(io.TextIOWrapper(stream, self.encoding), 1):
                    line = line.removeprefix("\ufeff").strip("\r\n")
                    if line.strip():
                        return line, number
        except (UnicodeError, LookupError) as error:
            raise self._make_error(file, error) from error
        raise UsageError(f"{file} is empty")

    def _make_error(self, file: Path, reason: object) -> UsageError:
        """Return the error about a file that cannot be read."""
        return UsageError(
            f"{file} cannot be read as {self.encoding} text: {reason}. Give --encoding if it "
            "has another one (cp1252 is what spreadsheets write in the West), or --no_quotes if "
            "quotation marks mean nothing"
        )

    def _find_separator(self, file: Path, line: str) -> str:
        """Return a tab for .tsv, else the mark that cuts a line into most cells, else a space."""
        if ".tsv" in [suffix.lower() for suffix in file.suffixes]:
            return "\t"
        counts = {mark: len(self._split(line, mark)) for mark in _SEPARATORS}
        best = max(counts, key=lambda mark: counts[mark])
        return best if counts[best] > 1 else " "

    def _split(self, line: str, separator: str) -> list[str]:
        """Return the cells of a line."""
        if not self.has_quotes:
            return line.split(separator)
        return next(csv.reader([line], delimiter=separator))

    def _name_columns(self, file: Path, first_line: str) -> list[str]:
        """Return the names of columns, from the option or the first line; refuse repeated ones."""
        names = self._split(first_line, self.separator)
        if self.given_names:
            if len(self.given_names) != len(names):
                raise UsageError(
                    f"{self.names_option}: {len(self.given_names)} names, but {file} has "
                    f"{len(names)} columns; its first line is {first_line[:80]!r}"
                )
            names = self.given_names
        require_distinct(file, names)
        return [name or f"(column {number})" for number, name in enumerate(names, 1)]

    def _read_table(
        self, file: Path, stream: pa.NativeFile, num_header: int, use_threads: bool
    ) -> tuple[Columns, list[tuple[int, str]]]:
        """Return the columns, and number (from 0, exact without threads) and fault of bad rows."""
        bad_rows: list[tuple[int, str]] = []

        def skip_row(row: csv_reader.InvalidRow) -> str:
            fault = f"{row.actual_columns} cells, the first line has {row.expected_columns}"
            if "\n" in row.text:
                fault += "; a quotation mark opens that is not closed in its line (--no_quotes?)"
            # Arrow counts from 1, and counts the header
            bad_rows.append(((row.number or 0) - num_header - 1, fault))
            return "skip"

        read_options = csv_reader.ReadOptions(
            use_threads=use_threads,
            block_size=_BLOCK,
            column_names=self.names,
            skip_rows=num_header,
            encoding=self.encoding,
        )
        parse_options = csv_reader.ParseOptions(
            delimiter=self.separator,
            quote_char='"' if self.has_quotes else False,
            newlines_in_values=self.has_quotes,
            ignore_empty_lines=False,  # every line is a row, so rows give line numbers
            invalid_row_handler=skip_row,
        )
        convert_options = csv_reader.ConvertOptions(
            column_types=self.types, null_values=[""], strings_can_be_null=True
        )
        try:
            table = csv_reader.read_csv(stream, read_options, parse_options, convert_options)
        except (pa.ArrowException, UnicodeError) as error:
            raise self._make_error(file, error) from error
        return take_columns(table, file), bad_rows


def read_json(file: Path) -> Part:
    """Read a file of json lines in blocks: by Arrow, or by Python if a line is broken."""
    tables: list[tuple[Columns, int]] = []  # columns and number of rows
    broken_lines: list[tuple[int, str]] = []
    text_columns: dict[str, pa.DataType] = {}
    num_rows = 0
    with _open(file) as lines:
        while block := lines.read(_BLOCK) + lines.readline():
            if not tables:
                block = block.removeprefix(b"\xef\xbb\xbf")
                if block.lstrip().startswith(b"["):
                    raise UsageError(
                        f"{file} holds json lists, expected an object a line; write it again, as "
                        f"in `jq -c '.[]' {file.name} > {file.stem}-lines.jsonl` for one list"
                    )
            table = _read_json_by_arrow(block, text_columns)
            if table is None:
                num_lines_before = num_rows + len(broken_lines)
                table, faults = _read_json_by_python(block)
                broken_lines += [(num_lines_before + number, fault) for number, fault in faults]
            tables.append((take_columns(table, file), table.num_rows))
            num_rows += table.num_rows
    return Part(file, stack_columns(tables), num_rows, broken_lines)


def _read_json_by_arrow(block: bytes, text_columns: dict[str, pa.DataType]) -> pa.Table | None:
    """Return a table of whole lines; None if a line is not an object that Arrow reads exactly.

    Columns that Arrow takes for times are read as text, and added to ``text_columns``.
    """
    characters = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    brackets = np.flatnonzero(np.isin(characters, tuple(b"[{")))
    line_by_bracket = np.searchsorted(ends, brackets)
    if (line_by_bracket[_MAX_DEPTH:] == line_by_bracket[:-_MAX_DEPTH]).any():  # may be deep
        return None
    options = json_reader.ReadOptions(block_size=len(block) + 1)
    while True:
        schema = json_reader.ParseOptions(explicit_schema=pa.schema(text_columns))
        try:
            table = json_reader.read_json(io.BytesIO(block), options, schema)
        except pa.ArrowException:
            return None
        times = {f.name: pa.string() for f in table.schema if pa.types.is_timestamp(f.type)}
        if not times:
            break
        text_columns |= times
    floats = [column for column in table.columns if pa.types.is_floating(column.type)]
    # a whole number of more than 64 bits, such as an id, is a float
    is_exact = all((pc.max(pc.abs(column)).as_py() or 0) < 2**53 for column in floats)
    num_lines = len(ends) + (not block.endswith(b"\n"))
    return table if is_exact and table.num_rows == num_lines else None


def _read_json_by_python(block: bytes) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Return a table of whole lines, and number (from 0) and fault of lines without an object."""
    rows: list[dict[str, Any]] = []
    faults: list[tuple[int, str]] = []
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n")):
        try:
            row = from_json(line)  # refuses deep nesting and lone surrogates, too
            if not isinstance(row, dict):
                raise ValueError("not an object")
            rows.append(row)
        except ValueError as error:
            faults.append((number, f"no json: {error}" if line.strip() else EMPTY_LINE))
    names = dict.fromkeys(itertools.chain(*rows))
    return pa.table({name: _make_array([row.get(name) for row in rows]) for name in names}), faults


def _make_array(values: list[Any]) -> pa.Array:
    """Return values as an array, as text if they are of several types."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # numbers and text under one name
        texts = (v if v is None or isinstance(v, str) else json.dumps(v) for v in values)
        return pa.array(texts, pa.string())
