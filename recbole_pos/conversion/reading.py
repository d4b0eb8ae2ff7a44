"""Files of events, items or users as Arrow columns, and which line of which file a row was."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import csv as arrow
from pyarrow import parquet

from recbole_pos.errors import UsageError

FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
_KNOWN = "csv, tsv, json lines (.jsonl) and parquet, each but parquet also as .gz"
_SEPARATORS = ",;\t|"
_BLOCK = 1 << 22  # bytes


@dataclass(frozen=True)
class Broken:
    """Text that is no row.

    Attributes:
        record: its number among the records of the file, from 1, a first line of names included.
        lines: how many lines it has; more than one if a quotation mark swallowed them.
        why: what is wrong with it.
    """

    record: int
    lines: int
    why: str


@dataclass
class Part:
    """One file.

    Attributes:
        path: of the file.
        columns: its cells as read.
        rows: how many.
        broken: what is no row, in the order of the file.
        first: number of the line in which the first record of data begins.
        multiline: whether a cell can hold line breaks.
    """

    path: Path
    columns: dict[str, pa.ChunkedArray]
    rows: int
    broken: list[Broken] = field(default_factory=list)
    first: int = 1
    multiline: bool = False

    def lines(self, rows: np.ndarray) -> np.ndarray:
        """[n] number of the line in which each of these rows begins."""
        record = np.array([b.record for b in self.broken], dtype=np.int64)
        before = np.searchsorted(record - 1 - np.arange(len(record)), rows, side="right")
        swallowed = np.cumsum([0, *(b.lines for b in self.broken)])
        return self.first + rows + swallowed[before] + self._breaks(rows)

    def _breaks(self, rows: np.ndarray) -> np.ndarray:
        """[n] line breaks in the cells of all rows before each."""
        counts = np.zeros(self.rows, dtype=np.int64)
        for column in self.columns.values() if self.multiline else ():
            for start, chunk in _chunks(column):
                text = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
                if not pc.any(pc.match_substring(text, "\n")).as_py():
                    continue
                each = pc.count_substring(text, "\n").fill_null(0)
                if text is not chunk:
                    each = each.take(chunk.indices).fill_null(0)
                counts[start : start + len(chunk)] += each.to_numpy(zero_copy_only=False)
        return np.concatenate(([0], np.cumsum(counts)))[rows]

    def line_of(self, broken: Broken) -> int:
        """Number of the line in which a broken record begins."""
        place = self.broken.index(broken)
        lines = sum(b.lines for b in self.broken[:place])
        rows = broken.record - 1 - place
        return self.first + rows + lines + int(self._breaks(np.array([rows]))[0])


@dataclass
class Source:
    """What was read from a file, or from all files of a folder.

    Attributes:
        path: as given.
        parts: the files.
        columns: the cells of all of them, by the names of the columns.
        form: what was read, for people.
        decimal_comma: whether numbers may be written with one.
    """

    path: Path
    parts: list[Part]
    columns: dict[str, pa.ChunkedArray]
    form: str
    decimal_comma: bool = False

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(part.rows for part in self.parts)

    @property
    def lines(self) -> int:
        """Lines of data: rows, and the lines that are none."""
        return self.rows + sum(b.lines for part in self.parts for b in part.broken)

    def places(self, rows: np.ndarray) -> list[str]:
        """``orders.csv:17`` for each of some rows, numbered through all files."""
        found: list[str] = []
        ends = np.cumsum([part.rows for part in self.parts])
        for part, end in zip(self.parts, ends, strict=True):
            inside = rows[(rows < end) & (rows >= end - part.rows)] - (end - part.rows)
            if len(inside):
                found += [f"{part.path.name}:{line}" for line in part.lines(inside)]
        return found

    def broken(self) -> Iterator[tuple[Part, Broken]]:
        """Everything that is no row."""
        return ((part, one) for part in self.parts for one in part.broken)


@dataclass(frozen=True)
class Dialect:
    """How text is written.

    Attributes:
        separator: between cells; None to see it in the first line.
        quotes: whether cells may stand in quotation marks.
        encoding: as Python names it.
        drop: columns that need not be read.
    """

    separator: str | None = None
    quotes: bool = True
    encoding: str = "utf-8"
    drop: tuple[str, ...] = ()


def read(path: str | Path, dialect: Dialect) -> Source:
    """Everything in a file, or in the files of a folder that have one format.

    Raises:
        UsageError: if there is no such file, or it is not of a format that can be read, saying which
            can; if its first line has no usable names; if most of its lines are broken.
    """
    path = Path(path)
    files = _files(path)
    kind = _format(files[0])
    form, comma = kind, False
    parts: list[Part] = []
    try:
        if kind == "csv":
            reader = _Csv(files[0], dialect)
            parts = [reader.read(file) for file in files]
            form = f"text separated by {reader.separator!r}"
            comma = reader.separator == ";"
        elif kind == "json":
            from recbole_pos.conversion.json_lines import read_json

            parts, form = [read_json(file, *_text(file)) for file in files], "json lines"
        else:
            parts = [_parquet(file) for file in files]
    except (OSError, EOFError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for part in parts:
        _require_rows(part)
    columns = union([(part.columns, part.rows) for part in parts])
    columns = {name: column for name, column in columns.items() if name not in dialect.drop}
    return Source(path, parts, columns, form, comma)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no file or folder {path}")
    inside = (file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
    found = sorted(file for file in inside if _kind(file))
    kinds = {_kind(file) for file in found}
    if not found:
        raise UsageError(f"{path} holds no data file; known are {_KNOWN}")
    if len(kinds) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise UsageError(f"{path} holds files of different formats ({names}); name one of them")
    return found


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _kind(file: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        kind = FORMATS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if kind == "parquet" else kind
    return FORMATS.get(suffixes[-1]) if suffixes else None


def _format(file: Path) -> str:
    if kind := _kind(file):
        return kind
    raise UsageError(f"{file.name}: its name does not end like a format that can be read: {_KNOWN}")


def _text(file: Path) -> tuple[IO[bytes], int]:
    """A file opened, unpacked on the way, and its size on the disk."""
    opened = gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb")  # noqa: SIM115
    return opened, file.stat().st_size  # type: ignore[return-value]


def _require_rows(part: Part) -> None:
    if not part.rows and not part.broken:
        raise UsageError(f"{part.path} has no line of data")
    if len(part.broken) > part.rows:
        first = part.broken[0]
        raise UsageError(
            f"{part.path}: {len(part.broken):,} of {part.rows + len(part.broken):,} lines are "
            f"broken, the first, line {part.line_of(first)}: {first.why}"
        )


def _parquet(file: Path) -> Part:
    try:
        table = parquet.read_table(file, partitioning=None)
    except pa.ArrowException as error:
        raise UsageError(f"{file} is no parquet file: {error}") from error
    return Part(file, flat(table), table.num_rows)


def flat(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Columns of a table, those of records within as ``outer.inner``."""
    while any(pa.types.is_struct(one.type) for one in table.schema):
        table = table.flatten()
    return dict(zip(table.column_names, table.columns, strict=True))


def union(tables: list[tuple[dict[str, pa.ChunkedArray], int]]) -> dict[str, pa.ChunkedArray]:
    """Columns of tables (and their numbers of rows) end to end; null where a table has no such."""
    names = dict.fromkeys(itertools.chain(*(columns for columns, _ in tables)))
    joined = {}
    for name in names:
        parts = [columns.get(name, pa.nulls(rows)) for columns, rows in tables]
        types = {part.type for part in parts} - {pa.null()}
        kind = _common(types)
        try:
            cast = [part if part.type == kind else part.cast(kind) for part in parts]
        except pa.ArrowException as error:
            held = ", ".join(sorted(map(str, types)))
            raise UsageError(
                f"column {name!r} holds {held} in different places, which do not go together; "
                f"leave it out with --drop {name!r}"
            ) from error
        chunks = itertools.chain(*(c.chunks if isinstance(c, pa.ChunkedArray) else [c] for c in cast))
        joined[name] = pa.chunked_array(list(chunks), kind)
    return joined


def _common(types: set[Any]) -> Any:
    if len(types) < 2:
        return next(iter(types), pa.null())
    if all(pa.types.is_integer(one) for one in types):
        return pa.int64()
    numbers = all(pa.types.is_integer(one) or pa.types.is_floating(one) for one in types)
    return pa.float64() if numbers else pa.string()


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, Any]]:
    """Chunks, and the row where each begins."""
    start = 0
    for chunk in column.chunks:
        yield start, chunk
        start += len(chunk)


class _Csv:
    """Files of separated cells with one first line.

    Args:
        file: the first of them.
        dialect: how they are written.
    """

    def __init__(self, file: Path, dialect: Dialect) -> None:
        self.dialect = dialect
        first, _ = self._first_line(file)
        self.separator = dialect.separator or self._seen(file, first)
        self.names = self._named(file, first)
        self.parsing = {
            "delimiter": self.separator,
            "quote_char": '"' if dialect.quotes else False,
            "newlines_in_values": dialect.quotes,
            "ignore_empty_lines": False,  # every line is a row, so that rows tell lines
        }
        self.types = dict.fromkeys(self.names, pa.string())
        self.types = self._types(file)

    def _first_line(self, file: Path) -> tuple[str, int]:
        """The first line with text, and its number."""
        opened, _ = _text(file)
        with opened:
            for number, raw in enumerate(opened, 1):
                try:
                    # utf-16 has NUL bytes in every line, and its line ends cut in two
                    line = raw.decode(self.dialect.encoding).removeprefix("\ufeff").strip("\r\n")
                except (UnicodeDecodeError, LookupError) as error:
                    raise self._no_text(file, str(error)) from error
                if "\0" in line:
                    raise self._no_text(file, "it has NUL bytes")
                if line.strip():
                    return line, number
        raise UsageError(f"{file} is empty")

    def _no_text(self, file: Path, why: str) -> UsageError:
        return UsageError(
            f"{file} is no {self.dialect.encoding} text ({why}). Give --encoding (cp1252 is what "
            "spreadsheets write in the West), or write the file as UTF-8"
        )

    def _seen(self, file: Path, line: str) -> str:
        if ".tsv" in [suffix.lower() for suffix in file.suffixes]:
            return "\t"
        counts = {mark: len(self._cells(line, mark)) for mark in _SEPARATORS}
        best = max(counts, key=lambda mark: counts[mark])
        if counts[best] == 1:
            raise UsageError(
                f"{file}: the first line, {line[:80]!r}, has one column; cells may be separated by "
                "comma, semicolon, tab or |, another is given with --separator"
            )
        return best

    def _cells(self, line: str, separator: str) -> list[str]:
        if not self.dialect.quotes:
            return line.split(separator)
        return next(csv.reader([line], delimiter=separator))

    def _named(self, file: Path, line: str) -> list[str]:
        names = self._cells(line, self.separator)
        twice = sorted({name for name in names if name and names.count(name) > 1})
        if twice:
            raise UsageError(f"{file}: two columns are called {twice[0]!r}; rename one")
        return [name or f"(column {place} without a name)" for place, name in enumerate(names, 1)]

    def _types(self, file: Path) -> dict[str, Any]:
        """Text; as a dictionary where the first block has few different cells."""
        opened, _ = _text(file)
        with opened:
            head = pa.py_buffer(opened.read(_BLOCK >> 2))
        try:
            columns, _ = self._table(file, pa.BufferReader(head), 1, False)
        except UsageError:  # whatever is wrong will be met again, with a line
            return self.types
        few = pa.dictionary(pa.int32(), pa.string())
        return {
            name: few if 2 * len(column.unique()) < len(column) else pa.string()
            for name, column in columns.items()
        }

    def read(self, file: Path) -> Part:
        """One of the files.

        Raises:
            UsageError: if it is not text, or its first line is not like that of the first file.
        """
        first, line = self._first_line(file)
        if self._named(file, first) != self.names:
            raise UsageError(
                f"{file}: its first line, {first[:80]!r}, is not that of the other files; files "
                "with different columns are converted one by one (--items, --users)"
            )
        for threads in (True, False):  # with several, nobody knows the number of a broken line
            with pa.input_stream(str(file), compression="detect", buffer_size=_BLOCK) as stream:
                columns, broken = self._table(file, stream, line, threads)
            if not broken:
                break
        rows = len(next(iter(columns.values())))
        return Part(file, columns, rows, broken, line + 1, self.dialect.quotes)

    def _table(
        self, file: Path, stream: Any, header: int, threads: bool
    ) -> tuple[dict[str, pa.ChunkedArray], list[Broken]]:
        broken: list[Broken] = []

        def keep(row: Any) -> str:
            lines = 1 + row.text.count("\n")
            why = f"{row.actual_columns} cells, the first line has {row.expected_columns}"
            if lines > 1:
                why += "; a quotation mark opens that is not closed in its line (--no_quotes?)"
            # the line of names, and what is above it, are no records
            broken.append(Broken((row.number or 0) - header, lines, why))
            return "skip"

        wanted = [name for name in self.names if name not in self.dialect.drop]
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
                arrow.ParseOptions(**self.parsing, invalid_row_handler=keep),
                arrow.ConvertOptions(
                    column_types=self.types,
                    include_columns=wanted,
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
        except pa.ArrowException as error:
            if "UTF8" in str(error):
                raise self._no_text(file, str(error)) from error
            raise UsageError(
                f"{file} cannot be read: {error}. If a quotation mark opens that nobody closes, "
                "and none of them mean anything, give --no_quotes"
            ) from error
        except UnicodeError as error:
            raise self._no_text(file, str(error)) from error
        return dict(zip(table.column_names, table.columns, strict=True)), broken
