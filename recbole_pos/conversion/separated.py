"""Text of separated cells: csv, tsv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyarrow import csv as arrow

from recbole_pos.conversion.source import Broken, Part, opened, packed
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

NAMELESS = "(column {})"
_SEPARATORS = ",;\t|"
_BLOCK = 1 << 22  # bytes


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


class Separated:
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
        with opened(file) as stream:
            lines = enumerate(self._decoded(file, stream), 1)
            for number, line in lines:
                line = line.removeprefix("\ufeff").strip("\r\n")
                if "\0" in line:
                    raise self._no_text(file, "it has NUL bytes")
                if line.strip():
                    return line, number
        raise UsageError(f"{file} is empty")

    def _decoded(self, file: Path, stream: IO[bytes]) -> Iterator[str]:
        try:
            yield from io.TextIOWrapper(stream, self.dialect.encoding)
        except (UnicodeError, LookupError) as error:
            raise self._no_text(file, str(error)) from error

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
            raise UsageError(f"{file}: two columns are called {shown(twice[0])}; rename one")
        return [name or NAMELESS.format(place) for place, name in enumerate(names, 1)]

    def _types(self, file: Path) -> dict[str, Any]:
        """Text; as a dictionary where the first block has few different cells."""
        with opened(file) as stream:
            head = pa.py_buffer(stream.read(_BLOCK >> 2))
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
        packing = "gzip" if packed(file) else None
        for threads in (True, False):  # with several, nobody knows the number of a broken line
            with pa.input_stream(str(file), compression=packing, buffer_size=_BLOCK) as stream:
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
