"""What was read: columns of Arrow, and which line of which file each row was."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_COLUMNS = 10_000


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
        origin: [rows] which row of the files each is, where these had lists; None if it is itself.
        rejected: rows that are no interactions, by reason.
    """

    path: Path
    parts: list[Part]
    columns: dict[str, pa.ChunkedArray]
    form: str
    decimal_comma: bool = False
    origin: np.ndarray | None = None
    rejected: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of all files; of lists what is in them."""
        return sum(part.rows for part in self.parts) if self.origin is None else len(self.origin)

    @property
    def lines(self) -> int:
        """Lines of data: rows, and the lines that are none."""
        return self.rows + sum(b.lines for part in self.parts for b in part.broken)

    def places(self, rows: np.ndarray) -> list[str]:
        """``orders.csv:17`` for each of some rows, numbered through all files."""
        rows = rows if self.origin is None else self.origin[rows]
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


def opened(file: Path) -> IO[bytes]:
    """A file, unpacked on the way."""
    return gzip.open(file) if packed(file) else open(file, "rb")  # type: ignore[return-value]


def packed(file: Path) -> bool:
    """Whether a file is gzip's, by its name, in letters of either case."""
    return file.suffix.lower() == ".gz"


def require_few_columns(path: Path, columns: int) -> None:
    """Refuse a table so wide that it can be no table of interactions."""
    if columns > _COLUMNS:
        raise UsageError(
            f"{path}: {columns:,} columns, expected at most {_COLUMNS:,}; take those that matter"
        )


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
                f"column {shown(name)} holds {held} in different places, which do not go together; "
                f"leave it out with --drop {shown(name)}"
            ) from error
        chunks = itertools.chain(
            *(c.chunks if isinstance(c, pa.ChunkedArray) else [c] for c in cast)
        )
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
