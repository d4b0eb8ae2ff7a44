"""Read a file, or a folder of files, in the format that its name tells; or a frame, by Arrow."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import csv as csv_reader
from pyarrow import json as json_reader
from pyarrow import parquet

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.conversion.source import (
    Columns,
    Part,
    Source,
    flatten_records,
    simplify_type,
    stack_columns,
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
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_HEAD = 1 << 20  # bytes by which types are chosen
_MAX_CHUNK_ROWS = 1 << 20  # of a frame, so that the text of a chunk has under 2 GiB


def read(path: Path, args: ConvertArguments, names_option: str) -> Source:
    """Read a file, or all files of a folder that have one format.

    Args:
        path: the file or folder.
        args: separator, quotation marks and encoding of text.
        names_option: which argument may name the columns of text without a header.

    Raises:
        UsageError: if it is not of a format that can be read, or most of its rows are broken.
    """
    files = _find_files(path)
    form = _find_format(files[0]) or ""
    if getattr(args, names_option) and form != "csv":
        raise UsageError(f"{names_option}: {files[0]} names its columns; leave the option out")
    decimal_comma = False
    if form == "csv":
        reader = TextReader(files[0], args, names_option)
        parts = [reader.read(file) for file in files]
        form = f"text separated by {shown(reader.separator)}"
        decimal_comma = reader.separator == ";"
    elif form == "json":
        parts, form = [read_json(file) for file in files], "json lines"
    else:
        parts = []
        for file in files:
            table = parquet.read_table(file, partitioning=None)
            parts.append(Part(file, flatten_records(table), table.num_rows))
    for part in parts:
        if not part.rows and not part.broken:
            header = "; if it has no header, give --columns" if form.startswith("text") else ""
            raise UsageError(f"{part.path} has no line of data{header}")
        if len(part.broken) > part.rows:
            raise UsageError(
                f"{part.path}: {len(part.broken):,} of {part.rows + len(part.broken):,} lines are "
                f"broken, the first: {part.describe_broken()[0]}"
            )
        _add_partitions(part, path)
    columns = stack_columns([(part.columns, part.rows) for part in parts])
    return Source(path, parts, columns, form, decimal_comma)


def read_frame(frame: Any, name: str) -> Source:
    """Read a frame of pandas, polars, pyarrow, or anything that Arrow reads."""
    if hasattr(frame, "iloc"):  # pandas, whose index is columns if it has names
        has_names = any(name is not None for name in frame.index.names)
        table = pa.Table.from_pandas(frame, preserve_index=has_names)
    elif isinstance(frame, pa.Table) or hasattr(frame, "__arrow_c_stream__"):
        table = frame if isinstance(frame, pa.Table) else pa.table(frame)
    else:
        raise UsageError(
            f"{name}: expected a file or a frame (pandas, polars, pyarrow, DuckDB), found "
            f"{type(frame).__name__}; a lazy frame is collected first"
        )
    _require_distinct(name, table.column_names)
    if not table.num_rows:
        raise UsageError(f"{name} has no row")
    table = pa.Table.from_batches(table.to_batches(max_chunksize=_MAX_CHUNK_ROWS), table.schema)
    columns = {
        column: cells.cast(simplify_type(cells.type))
        for column, cells in flatten_records(table).items()
    }
    part = Part(Path(name), columns, table.num_rows, first=0)
    return Source(Path(name), [part], columns, "frame")


def _require_distinct(source: str | Path, names: Iterable[str]) -> None:
    """Refuse two columns of one name."""
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UsageError(
            f"{source}: two columns are called {shown(repeated[0])}; rename one, or name them with "
            "--columns if there is no header"
        )


def _find_files(path: Path) -> list[Path]:
    """Return the file at a path, or all data files of a folder, which must have one format."""
    if not path.exists():
        raise UsageError(f"found no file or folder {shown(str(path))}")
    if path.is_file():
        files = [path] if _find_format(path) else []
    else:
        files = []
        for file in sorted(path.rglob("*")):
            is_hidden = any(part[0] in "._" for part in file.relative_to(path).parts)
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
    """Return csv, json or parquet by the name of a file; None for another."""
    if not _is_gzip(file):
        return _FORMATS.get(file.suffix.lower())
    form = _FORMATS.get(file.with_suffix("").suffix.lower())
    return None if form == "parquet" else form


def _is_gzip(file: Path) -> bool:
    return file.suffix.lower() == ".gz"


def _open(file: Path) -> IO[bytes]:
    """Open a file for reading, unpacked on the way if its name ends in .gz."""
    return gzip.open(file) if _is_gzip(file) else open(file, "rb")  # type: ignore[return-value]


def _add_partitions(part: Part, folder: Path) -> None:
    """Add columns by names of folders, such as country=NO; of another column: country (folder)."""
    for name in part.path.relative_to(folder).parts[:-1]:
        column, equals, value = map(unquote, name.partition("="))
        if not (column and equals):
            continue
        cell = pa.scalar(None if value == _NO_PARTITION else value, pa.string())
        if column in part.columns:
            if part.columns[column].cast(pa.string()).unique().to_pylist() == [cell.as_py()]:
                continue
            column = f"{column} (folder)"
        cells = pa.repeat(cell, part.rows).dictionary_encode()
        part.columns[column] = pa.chunked_array([cells])


class TextReader:
    """Reads files of separated cells that all begin with the same line of names.

    Args:
        file: the first of the files, which decides on separator, names and types.
        args: separator, quotation marks and encoding, where the user gives them.
        names_option: which argument may name the columns.
    """

    def __init__(self, file: Path, args: ConvertArguments, names_option: str) -> None:
        self.encoding, self.has_quotes = args.encoding, not args.no_quotes
        self.names_option, names = names_option, getattr(args, names_option)
        self.given_names = names.split(",") if isinstance(names, str) else list(names)
        first_line, number = self._read_first_line(file)
        self.separator = args.separator or self._find_separator(file, first_line)
        cells = self._split(first_line, self.separator)
        self.names = list(map(str, range(len(cells))))
        self.types = dict.fromkeys(self.names, pa.string())
        with _open(file) as stream:
            head = pa.py_buffer(stream.read(_HEAD) + stream.readline())
        try:
            columns, broken = self._read_table(file, pa.BufferReader(head), number, False)
        except UsageError:  # reading the whole file raises it again
            columns, broken = {}, []
        if not args.separator and (len(cells) < 2 or self.separator == " " and broken):
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
        """Read one of the files, whose first line must be like that of the first file."""
        first_line, number = self._read_first_line(file)
        if self._name_columns(file, first_line) != self.names:
            raise UsageError(
                f"{file}: its first line, {first_line[:80]!r}, is not that of the other files; "
                "files with different columns are converted one by one (--items, --users)"
            )
        num_header = number - 1 if self.given_names else number  # lines above the first row
        compression = "gzip" if _is_gzip(file) else None
        for use_threads in (True, False):  # with several, Arrow does not number broken lines
            with pa.input_stream(str(file), compression=compression, buffer_size=_BLOCK) as stream:
                columns, broken = self._read_table(file, stream, num_header, use_threads)
            if not broken:
                break
        return Part(file, columns, len(next(iter(columns.values()))), broken, num_header + 1)

    def _read_first_line(self, file: Path) -> tuple[str, int]:
        """Return the first line with text, and its number."""
        try:
            with _open(file) as stream:
                for number, line in enumerate(io.TextIOWrapper(stream, self.encoding), 1):
                    line = line.removeprefix("\ufeff").strip("\r\n")
                    if line.strip():
                        return line, number
        except (UnicodeError, LookupError) as error:
            raise self._unreadable(file, error) from error
        raise UsageError(f"{file} is empty")

    def _unreadable(self, file: Path, reason: object) -> UsageError:
        return UsageError(
            f"{file} cannot be read as {self.encoding} text: {reason}. Give --encoding if it "
            "has another one (cp1252 is what spreadsheets write in the West), or --no_quotes if "
            "quotation marks mean nothing"
        )

    def _find_separator(self, file: Path, line: str) -> str:
        """Return a tab if a name ends in .tsv, else the mark that cuts a line into most cells."""
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
        """Return the names of columns, from the options or the first line."""
        names = self._split(first_line, self.separator)
        if self.given_names:
            if len(self.given_names) != len(names):
                raise UsageError(
                    f"{self.names_option}: {len(self.given_names)} names, but {file} has "
                    f"{len(names)} columns; its first line is {first_line[:80]!r}"
                )
            names = self.given_names
        _require_distinct(file, names)
        return [name or f"(column {number})" for number, name in enumerate(names, 1)]

    def _read_table(
        self, file: Path, stream: Any, num_header: int, use_threads: bool
    ) -> tuple[Columns, list[tuple[int, str]]]:
        """Return the columns below the header; number (without threads) and fault of bad rows."""
        broken: list[tuple[int, str]] = []

        def skip_broken(row: Any) -> str:
            fault = f"{row.actual_columns} cells, the first line has {row.expected_columns}"
            if "\n" in row.text:
                fault += "; a quotation mark opens that is not closed in its line (--no_quotes?)"
            # the line of names, and lines above it, are no records
            broken.append(((row.number or 0) - num_header - 1, fault))
            return "skip"

        try:
            table = csv_reader.read_csv(
                stream,
                csv_reader.ReadOptions(
                    use_threads=use_threads,
                    block_size=_BLOCK,
                    column_names=self.names,
                    skip_rows=num_header,
                    encoding=self.encoding,
                ),
                csv_reader.ParseOptions(
                    delimiter=self.separator,
                    quote_char='"' if self.has_quotes else False,
                    newlines_in_values=self.has_quotes,
                    ignore_empty_lines=False,  # every line is a row, so rows give line numbers
                    invalid_row_handler=skip_broken,
                ),
                csv_reader.ConvertOptions(
                    column_types=self.types, null_values=[""], strings_can_be_null=True
                ),
            )
        except (pa.ArrowException, UnicodeError) as error:
            raise self._unreadable(file, error) from error
        return flatten_records(table), broken


def read_json(file: Path) -> Part:
    """Read a file of json lines in blocks: by Arrow, or by Python if a line is broken."""
    tables: list[tuple[Columns, int]] = []
    broken: list[tuple[int, str]] = []
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
                first_line = num_rows + len(broken)
                table, faults = _read_json_by_python(block)
                broken += [(first_line + number, fault) for number, fault in faults]
            tables.append((flatten_records(table), table.num_rows))
            num_rows += table.num_rows
    return Part(file, stack_columns(tables), num_rows, broken)


def _read_json_by_arrow(block: bytes, text_columns: dict[str, pa.DataType]) -> pa.Table | None:
    """Parse whole lines by Arrow; None if one is not an object that Arrow reads exactly.

    ``text_columns`` is extended by columns to read as text, since Arrow takes them for times.
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
    """Parse whole lines by Python; also return number from 0 and fault of those not an object."""
    rows: list[dict[str, Any]] = []
    broken: list[tuple[int, str]] = []
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n")):
        try:
            rows.append(_parse_object(line))
        except ValueError as error:
            broken.append((number, f"no json: {error}" if line.strip() else "empty line"))
    names = dict.fromkeys(itertools.chain(*rows))
    return pa.table({name: _make_array([row.get(name) for row in rows]) for name in names}), broken


def _parse_object(line: bytes) -> dict[str, Any]:
    """Return the object of a line; ValueError if it is none, or too deep for a parser."""
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH:
        characters = np.frombuffer(_STRING.sub(b"", line), np.uint8)
        opens, closes = (np.isin(characters, tuple(marks)) for marks in (b"[{", b"]}"))
        depth = np.cumsum(opens.astype(np.int32) - closes)
        if depth.max(initial=0) > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} brackets within each other")
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not an object")
    if b"\\u" in line:  # raises for a lone surrogate, which is no character
        json.dumps(row, ensure_ascii=False).encode()
    return row


def _make_array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # numbers and text under one name
        texts = (v if v is None or isinstance(v, str) else json.dumps(v) for v in values)
        return pa.array(texts, pa.string())
