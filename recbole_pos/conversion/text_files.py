"""Text files: separated cells (csv, tsv) and json lines, with the number of every broken line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import numpy as np
import pyarrow as pa
from pyarrow import csv as csv_reader

from recbole_pos.config.arguments import ConvertArguments
from recbole_pos.errors import UsageError

EMPTY_LINE = "empty line"  # fault of a row that holds nothing, so that nothing is lost with it
# Number of each broken line, from 0 among rows and broken lines, and its fault.
BrokenLines = list[tuple[int, str]]
_SEPARATORS = ",;\t|"
_BLOCK = 1 << 22  # bytes that are read at a time
# Stands in place of a line with a quotation mark that is not closed. One cell is too few for a row,
# so that the reader reports the line with its number.
_UNCLOSED = b"(unclosed)\n"


def _open(file: Path, encoding: str) -> BinaryIO:
    """Open a text file, unpacked if its name ends in .gz, as bytes of UTF-8."""
    stream: Any = gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb")
    if encoding.lower() in ("utf-8", "utf8"):
        return stream
    transcoded: Any = tempfile.TemporaryFile()
    with io.TextIOWrapper(stream, encoding, newline="") as text:
        while characters := text.read(_BLOCK):
            transcoded.write(characters.encode())
    transcoded.seek(0)
    return transcoded


def _read_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a stream, many of them at a time."""
    while block := stream.read(_BLOCK) + stream.readline():
        yield block


def read_text(
    file: Path, args: ConvertArguments, given_names: list[str]
) -> tuple[pa.Table, BrokenLines, int]:
    """Read a file of separated cells.

    Args:
        file: the file; its first line that is not empty is the header.
        args: separator, quotation marks and encoding.
        given_names: names of the columns of a file without a header; empty if it has one.

    Returns:
        The rows, all cells as text; broken lines; and the number of the first line after the
        header.
    """
    with _open(file, args.encoding) as stream:
        num_header = 0
        first_line = ""
        while not first_line and (line := stream.readline()):
            start, num_header = stream.tell() - len(line), num_header + 1
            first_line = line.decode("utf-8-sig").strip("\r\n")
        is_tsv = ".tsv" in [suffix.lower() for suffix in file.suffixes]
        likely = "\t" if is_tsv else max(_SEPARATORS, key=first_line.count)
        layout = _Layout(args.separator or likely, not args.no_quotes)
        names = layout.split(first_line)
        if given_names and names != given_names:
            num_header -= 1
            stream.seek(start)
        if len(names) < 2 or (given_names and len(given_names) != len(names)):
            raise UsageError(
                f"{file}: the first line, {first_line[:80]!r}, has {len(names)} columns, expected "
                f"{len(given_names) or 'more'}; see --separator and --columns"
            )
        names = given_names or names
        layout.names = [name or f"(column {number})" for number, name in enumerate(names, 1)]
        return *layout.read(stream), num_header + 1


class _Layout:
    """How the lines of a file are cut into cells, and what their columns are called."""

    def __init__(self, separator: str, has_quotes: bool) -> None:
        self.separator, self.has_quotes = separator, has_quotes
        self.names: list[str] = []

    def split(self, line: str) -> list[str]:
        """Return the cells of a line."""
        if not self.has_quotes:
            return line.split(self.separator)
        return next(csv.reader([line], delimiter=self.separator), [])

    def read(self, stream: BinaryIO) -> tuple[pa.Table, BrokenLines]:
        """Return the rows from here to the end of a stream, and broken lines."""
        start = stream.tell()
        if self.has_quotes and _spans_lines(stream):
            stream.seek(start)
            marked: Any = tempfile.TemporaryFile()
            marked.writelines(self._mark_unclosed(stream))
            stream, start = marked, 0
        stream.seek(start)
        if not (head := stream.read(_BLOCK) + stream.readline()):
            return pa.table({name: pa.array([], pa.string()) for name in self.names}), []
        sample, _ = self._read_by_arrow(io.BytesIO(head), {})
        types = {
            name: pa.dictionary(pa.int32(), pa.string())  # takes less memory if cells repeat
            for name, column in zip(self.names, sample.columns, strict=True)
            if 2 * len(column.unique()) < len(column)
        }
        stream.seek(start)
        return self._read_by_arrow(stream, types)

    def _mark_unclosed(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield lines, with ``_UNCLOSED`` for each whose quotation mark is not closed.

        A quotation mark may be closed in a later line, as in a review of several paragraphs. Then
        the lines together are one row, and those between the first and the last are none. Else the
        mark was forgotten, and only the line with it is broken.
        """
        opened: list[bytes] = []  # a line that may begin such a row, and those after it
        for line in lines:
            is_odd = line.count(b'"') % 2 == 1
            if opened and is_odd:
                between = opened[1:]
                has_rows = between and all(map(self._is_row, between))
                if self._is_row(b"".join([*opened, line])) and not has_rows:
                    yield from [*opened, line]
                    opened = []
                    continue
                yield from [_UNCLOSED, *between]
                opened = []
            if opened or (is_odd and not self._is_row(line)):
                opened.append(line)
            else:
                yield line
        if opened:
            yield from [_UNCLOSED, *opened[1:]]

    def _is_row(self, text: bytes) -> bool:
        """Return whether text is one row of as many cells as there are columns."""
        reader = csv.reader(io.StringIO(text.decode()), delimiter=self.separator, strict=True)
        try:
            return [len(row) for row in reader] == [len(self.names)]
        except csv.Error:
            return False

    def _read_by_arrow(
        self, stream: BinaryIO, types: dict[str, pa.DataType]
    ) -> tuple[pa.Table, BrokenLines]:
        """Return the rows of a stream, and broken lines; columns not in ``types`` are text."""
        broken_lines: BrokenLines = []

        def skip_row(row: csv_reader.InvalidRow) -> str:
            fault = f"{row.actual_columns} cells, the first line has {row.expected_columns}"
            if row.text.encode() == _UNCLOSED.strip():
                fault = "a quotation mark opens that is not closed; see --no_quotes"
            elif not row.text.strip():
                fault = EMPTY_LINE
            broken_lines.append((row.number - 1, fault))  # Arrow counts from 1
            return "skip"

        read_options = csv_reader.ReadOptions(
            use_threads=False,  # else Arrow does not number rows, and keeps much of the file
            block_size=_BLOCK,
            column_names=self.names,
        )
        parse_options = csv_reader.ParseOptions(
            delimiter=self.separator,
            quote_char='"' if self.has_quotes else False,
            newlines_in_values=self.has_quotes,
            ignore_empty_lines=False,  # every line is a row, so rows give line numbers
            invalid_row_handler=skip_row,
        )
        convert_options = csv_reader.ConvertOptions(
            column_types=dict.fromkeys(self.names, pa.string()) | types,
            null_values=[""],
            strings_can_be_null=True,
        )
        table = csv_reader.read_csv(stream, read_options, parse_options, convert_options)
        return table, broken_lines


def _spans_lines(stream: BinaryIO) -> bool:
    """Return whether a line has a quotation mark that is not closed in the same line."""
    blocks = (block for block in _read_blocks(stream) if b'"' in block)
    return any(line.count(b'"') % 2 for block in blocks for line in block.split(b"\n"))


def read_json(file: Path, encoding: str) -> tuple[pa.Table, BrokenLines]:
    """Read a file of json objects, one a line; return the rows and broken lines."""
    tables = []
    broken_lines: BrokenLines = []
    num_lines = 0
    with _open(file, encoding) as stream, duckdb.connect() as connection:
        for block in _read_blocks(stream):
            lines = pa.array(block.removesuffix(b"\n").split(b"\n")).cast(pa.string())
            texts = connection.from_arrow(pa.table({"line": lines}))
            checked = texts.project("coalesce(try(json_type(line)), '') = 'OBJECT' AS is_object")
            is_object = checked.to_arrow_table()["is_object"].to_numpy()
            for number in np.flatnonzero(~is_object):
                fault = "no json object" if lines[number].as_py().strip() else EMPTY_LINE
                broken_lines.append((num_lines + int(number), fault))
            if is_object.any():
                tables.append(_read_objects(connection, lines.filter(pa.array(is_object))))
            num_lines += len(lines)
    return pa.concat_tables(tables or [pa.table({})], promote_options="permissive"), broken_lines


def _read_objects(connection: duckdb.DuckDBPyConnection, lines: pa.Array) -> pa.Table:
    """Return a table of json objects, one in each of [rows] lines, with a column for each key.

    Values are read as text, so that ids keep all their digits, and lists as lists of text:
    ``{"user": 12, "tags": ["a", "b"]}`` makes the columns ``user`` and ``tags``.
    """
    texts = connection.from_arrow(pa.table({"line": lines}))
    ((structure,),) = texts.aggregate("json_group_structure(line::JSON)").fetchall()
    found = connection.execute("SELECT key, value FROM json_each(?)", [structure]).fetchall()
    types: dict[str, Any] = {}
    for key, value_type in found:
        if value_type.startswith(("{", "[{", "[[")):
            types[key] = {"record": "VARCHAR"}  # any record, which no field can hold
        elif value_type.startswith("["):
            types[key] = ["DOUBLE" if value_type == '["DOUBLE"]' else "VARCHAR"]
        else:
            types[key] = "VARCHAR"
    record = json.dumps(types or {"none": "VARCHAR"}).replace("'", "''")
    return texts.project(f"unnest(from_json(line, '{record}'))").to_arrow_table()
