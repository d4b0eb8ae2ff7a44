"""Read a file, or a folder of files, in the format that its name tells; or a frame, by Arrow."""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow
from pyarrow import parquet

from recbole_pos.conversion.json_lines import read_json
from recbole_pos.conversion.layout import has_header, is_user_with_items, name_columns
from recbole_pos.conversion.source import (
    Columns,
    ParseError,
    Part,
    Source,
    flatten,
    is_packed,
    open_unpacked,
    plain_type,
    require_few_columns,
    union,
)
from recbole_pos.conversion.times import ROW_ORDER
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
_BESIDE = (".json", ".txt")  # suffixes of files beside data, such as dataset_infos.json, README.txt
_KNOWN = "csv, tsv, json lines (.jsonl) and parquet, each but parquet also as .gz"
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_SEPARATORS = ",;\t|"
_BLOCK = 1 << 22  # bytes
_SAMPLE = 100  # rows
_ROWS = 1 << 20  # most rows of a chunk of a frame, so that its text has under 2 GiB


@dataclass(frozen=True)
class Dialect:
    """How text is written.

    Attributes:
        separator: separator of cells; None to find it in the first line.
        quotes: whether cells may be in quotation marks.
        encoding: Python's name of the encoding.
        names: names of the columns of a file without a line of names.
        header: whether the first line names the columns, whatever it looks like.
        option: option that ``names`` come from, for messages.
    """

    separator: str | None = None
    quotes: bool = True
    encoding: str = "utf-8"
    names: tuple[str, ...] = ()
    header: bool = False
    option: str = "columns"


def read(path: str | Path, dialect: Dialect) -> Source:
    """Read a file, or all files of a folder that have one format.

    Raises:
        UsageError: if there is no such file, or it is not of a format that can be read; if its
            first line has no usable names; if most of its lines are broken.
    """
    path = Path(path)
    files = _find_files(path)
    form = _format(files[0])
    if form is None:
        raise UsageError(
            f"{path.name}: its name does not end like a format that can be read: {_KNOWN}"
        )
    if dialect.names and form != "csv":
        raise UsageError(f"{dialect.option}: {files[0]} names its columns; leave the option out")
    has_comma = False
    try:
        if form == "csv":
            text = TextReader(files[0], dialect)
            parts = [text.read(file) for file in files]
            form = f"text separated by {shown(text.separator)}"
            has_comma = text.separator == ";"
        elif form == "json":
            parts, form = [read_json(file) for file in files], "json lines"
        else:
            parts = [_read_parquet(file) for file in files]
    except (OSError, EOFError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for part in parts:
        if not part.rows and not part.broken:
            raise UsageError(f"{part.path} has no line of data")
        if len(part.broken) > part.rows:
            raise UsageError(
                f"{part.path}: {len(part.broken):,} of {part.rows + len(part.broken):,} lines are "
                f"broken, the first, line {part.lines[1][0]}: {part.broken[0].why}"
            )
    notes = dict.fromkeys(note for part in parts for note in _add_partitions(part, path))
    columns = union([(part.columns, part.rows) for part in parts])
    require_few_columns(path, len(columns))
    return Source(path, parts, columns, form, has_comma, notes=list(notes))


def is_frame(value: Any) -> bool:
    """Return whether a value is a DataFrame of pandas, or anything that Arrow reads."""
    pandas = sys.modules.get("pandas")
    return hasattr(value, "__arrow_c_stream__") or (
        pandas is not None and isinstance(value, pandas.DataFrame)
    )


def read_frame(frame: Any, name: str) -> Source:
    """Read a frame, with the columns of Arrow.

    Args:
        frame: of pandas, polars, pyarrow, or anything that Arrow reads.
        name: name of the frame in messages.

    Raises:
        UsageError: if two columns have one name, or there is no row.
    """
    if isinstance(frame, pa.Table):
        table = frame
    elif hasattr(frame, "iloc"):  # pandas, whose index is columns if it has names
        has_names = any(name is not None for name in frame.index.names)
        table = pa.Table.from_pandas(frame, preserve_index=has_names)
    else:
        table = pa.table(frame)
    names = Counter(table.column_names)
    if twice := [column for column, times in names.items() if times > 1]:
        raise UsageError(f"{name}: two columns are called {shown(twice[0])}; rename one")
    require_few_columns(Path(name), table.num_columns)
    if not table.num_rows:
        raise UsageError(f"{name} has no row")
    table = pa.Table.from_batches(table.to_batches(max_chunksize=_ROWS), table.schema)
    columns = {
        column: cells.cast(plain_type(cells.type)) for column, cells in flatten(table).items()
    }
    return Source(
        Path(name), [Part(Path(name), columns, table.num_rows, first=0)], columns, "frame"
    )


def _find_files(path: Path) -> list[Path]:
    """Return the file at a path, or all data files of a folder, which must have one format.

    Raises:
        UsageError: if there is none, or formats differ.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"found no file or folder {shown(str(path))}")
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and _format(file)
        and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
    )
    files = [file for file in files if file.suffix not in _BESIDE] or files
    if not files:
        raise UsageError(f"{path} holds no data file; known are {_KNOWN}")
    if len({_format(file) for file in files}) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise UsageError(f"{path} holds files of different formats ({names}); name one of them")
    return files


def _format(file: Path) -> str | None:
    if not is_packed(file):
        return _FORMATS.get(file.suffix.lower())
    form = _FORMATS.get(file.with_suffix("").suffix.lower())
    return None if form == "parquet" else form


def _add_partitions(part: Part, folder: Path) -> Iterator[str]:
    """Add columns to a part from names of its folders, such as country=NO, while it is iterated.

    Yields:
        notes on values that are left out, since the files have a column of that name.
    """
    for name in part.path.relative_to(folder).parts[:-1]:
        column, equals, value = map(unquote, name.partition("="))
        if not (column and equals):
            continue
        known = None if value == _NO_PARTITION else value
        if column in part.columns:
            if part.columns[column].cast(pa.string()).unique().to_pylist() != [known]:
                yield (
                    f"{column}: the files have a column of this name, which is read; the values in "
                    "the names of folders, which differ, are left out"
                )
            continue
        cells: pa.Array = pa.nulls(part.rows)
        if known is not None:
            codes = np.zeros(part.rows, np.int32)
            cells = pa.DictionaryArray.from_arrays(codes, pa.array([known]))
        part.columns[column] = pa.chunked_array([cells])


def _read_parquet(file: Path) -> Part:
    try:
        table = parquet.read_table(file, partitioning=None)
    except pa.ArrowException as error:
        raise UsageError(f"{file} is no parquet file: {error}") from error
    return Part(file, flatten(table), table.num_rows)


class TextReader:
    """Reads files of separated cells that all begin with the same line of names.

    Args:
        file: the first file, by which separator, names and types are found.
        dialect: how the files are written.

    Raises:
        UsageError: if the file is not text, or its separator or names cannot be found.
    """

    def __init__(self, file: Path, dialect: Dialect) -> None:
        self.dialect = dialect
        first, line = self._first_line(file)
        self.separator = dialect.separator or self._find_separator(file, first)
        cells = self._cells(first, self.separator)
        require_few_columns(file, len(cells))
        self.names = list(map(str, range(len(cells))))
        self.types = dict.fromkeys(self.names, pa.string())
        head = self._head(file, line)
        if not (dialect.names or dialect.header):
            self._require_header(file, first, cells, head)
        self.names = self._column_names(file, first)
        few = pa.dictionary(pa.int32(), pa.string())
        self.types = {
            name: few if column and 2 * len(column.unique()) < len(column) else pa.string()
            for name, column in itertools.zip_longest(self.names, head.values())
        }

    def read(self, file: Path) -> Part:
        """Read one of the files.

        Raises:
            UsageError: if it is not text, or its first line is not like that of the first file.
        """
        first, line = self._first_line(file)
        above = line - 1 if self.dialect.names else line  # lines above the first row
        if self._column_names(file, first) != self.names:
            raise UsageError(
                f"{file}: its first line, {first[:80]!r}, is not that of the other files; files "
                "with different columns are converted one by one (--items, --users)"
            )
        packing = "gzip" if is_packed(file) else None
        for threads in (True, False):  # with several, Arrow does not number broken lines
            with pa.input_stream(str(file), compression=packing, buffer_size=_BLOCK) as stream:
                columns, broken = self._table(file, stream, above, threads)
            if not broken:
                break
        rows = len(next(iter(columns.values())))
        return Part(file, columns, rows, broken, above + 1, self.dialect.quotes)

    def _first_line(self, file: Path) -> tuple[str, int]:
        """Return the first line with text, and its number."""
        with open_unpacked(file) as stream:
            for number, line in enumerate(self._decoded(file, stream), 1):
                line = line.removeprefix("\ufeff").strip("\r\n")
                if "\0" in line:
                    raise self._not_text(file, "it has NUL bytes")
                if line.strip():
                    return line, number
        raise UsageError(f"{file} is empty")

    def _decoded(self, file: Path, stream: IO[bytes]) -> Iterator[str]:
        try:
            yield from io.TextIOWrapper(stream, self.dialect.encoding)
        except (UnicodeError, LookupError) as error:
            raise self._not_text(file, str(error)) from error

    def _not_text(self, file: Path, why: str) -> UsageError:
        return UsageError(
            f"{file} is no {self.dialect.encoding} text ({why}). Give --encoding (cp1252 is what "
            "spreadsheets write in the West), or write the file as UTF-8"
        )

    def _find_separator(self, file: Path, line: str) -> str:
        """Find the separator of cells by the first line of a file.

        In this order: a tab if the name ends in .tsv; the mark of ``_SEPARATORS`` that cuts the
        line into most cells; a space, if all of the first lines have as many spaces.

        Raises:
            UsageError: if no mark cuts the line.
        """
        if ".tsv" in [suffix.lower() for suffix in file.suffixes]:
            return "\t"
        counts = {mark: len(self._cells(line, mark)) for mark in _SEPARATORS}
        best = max(counts, key=lambda mark: counts[mark])
        if counts[best] > 1:
            return best
        if re.fullmatch(r"\S+(?: \S+)+", line):
            with open_unpacked(file) as stream:
                rows = itertools.islice(self._decoded(file, stream), _SAMPLE)
                if {row.count(" ") for row in rows if row.strip()} == {line.count(" ")}:
                    return " "
        raise UsageError(
            f"{file}: the first line, {line[:80]!r}, has one column; cells may be separated by "
            "comma, semicolon, tab or |, another is given with --separator"
        )

    def _cells(self, line: str, separator: str) -> list[str]:
        """Return the cells of a line."""
        if not self.dialect.quotes:
            return line.split(separator)
        try:
            return next(csv.reader([line], delimiter=separator))
        except csv.Error:  # a cell exceeds the limit of Python's csv
            return line.split(separator)

    def _column_names(self, file: Path, line: str) -> list[str]:
        """Return the names of columns, from the options or the first line.

        Raises:
            UsageError: if the options name another number of columns, or a name repeats.
        """
        names = self._cells(line, self.separator)
        if self.dialect.names:
            if len(self.dialect.names) != len(names):
                raise UsageError(
                    f"{self.dialect.option}: {len(self.dialect.names)} names, but {file} has "
                    f"{len(names)} columns; its first line is {line[:80]!r}"
                )
            names = list(self.dialect.names)
        twice = sorted(name for name, times in Counter(names).items() if name and times > 1)
        if twice:
            raise UsageError(f"{file}: two columns are called {shown(twice[0])}; rename one")
        return [name or f"(column {place})" for place, name in enumerate(names, 1)]

    def _head(self, file: Path, line: int) -> Columns:
        """Return the first rows below line ``line``, by the numbers of their columns."""
        with open_unpacked(file) as stream:
            head = pa.py_buffer(stream.read(_BLOCK >> 2))
        try:
            return self._table(file, pa.BufferReader(head), line, False)[0]
        except UsageError:  # reading the whole file raises it again, with the line
            return {}

    def _require_header(self, file: Path, first: str, cells: list[str], head: Columns) -> None:
        """Refuse a file whose first line is like its rows, with advice on how to name its columns.

        Args:
            file: the file.
            first: its first line.
            cells: cells of the line.
            head: first rows below it.
        """
        below = {int(place): column for place, column in head.items()}
        rows = {n: column.slice(0, _SAMPLE).drop_null().to_pylist() for n, column in below.items()}
        if has_header(cells, rows):
            return
        names, has_time = name_columns(below, len(cells))
        order = "" if has_time else f" --time {ROW_ORDER}"
        if self.dialect.option != "columns":
            key = self.dialect.option.removesuffix("_columns")
            names, order = [key, *(f"column_{n}" for n in range(2, len(cells) + 1))], ""
        if not has_time and is_user_with_items(cells):
            raise UsageError(
                f"{file}: its first line, {first[:80]!r}, seems to be a user with items; expected "
                'an interaction a line, or lists in one column, such as user,"[i1,i2]"; if these '
                "are columns, write their names as the first line"
            )
        advice = ",".join(names) if len(names) <= 100 else ",".join([*names[:3], "..."])
        raise UsageError(
            f"{file}: its first line, {first[:80]!r}, is like the others and names no columns. "
            f"--{self.dialect.option} {advice}{order} names them and keeps that line (in the "
            "order of the file); --header if it is names"
        )

    def _table(
        self, file: Path, stream: Any, header: int, threads: bool
    ) -> tuple[Columns, list[ParseError]]:
        """Read the rows of a stream by Arrow.

        Args:
            file: the file, for messages.
            stream: its bytes, unpacked.
            header: number of lines above the first row.
            threads: whether to read in several threads, where broken lines get no numbers.

        Returns:
            columns of the rows, and the lines that are no rows.
        """
        broken: list[ParseError] = []

        def record_broken(row: Any) -> str:
            lines = 1 + row.text.count("\n")
            why = f"{row.actual_columns} cells, the first line has {row.expected_columns}"
            if lines > 1:
                why += "; a quotation mark opens that is not closed in its line (--no_quotes?)"
            # the line of names, and lines above it, are no records
            broken.append(ParseError((row.number or 0) - header, lines, why))
            return "skip"

        try:
            table = arrow.read_csv(
                stream,
                arrow.ReadOptions(
                    use_threads=threads,
                    block_size=_BLOCK,
                    column_names=self.names,
                    skip_rows=header,
                    encoding=self.dialect.encoding,
                ),
                arrow.ParseOptions(
                    delimiter=self.separator,
                    quote_char='"' if self.dialect.quotes else False,
                    newlines_in_values=self.dialect.quotes,
                    ignore_empty_lines=False,  # every line is a row, so rows give line numbers
                    invalid_row_handler=record_broken,
                ),
                arrow.ConvertOptions(
                    column_types=self.types, null_values=[""], strings_can_be_null=True
                ),
            )
        except (pa.ArrowException, UnicodeError) as error:
            if isinstance(error, UnicodeError) or "UTF8" in str(error):
                raise self._not_text(file, str(error)) from error
            raise UsageError(
                f"{file} cannot be read: {error}. If a quotation mark opens that no one closes, "
                "and none of them mean anything, give --no_quotes"
            ) from error
        return flatten(table), broken
