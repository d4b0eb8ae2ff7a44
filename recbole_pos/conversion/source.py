"""Files as read: columns of Arrow, and the file and line of each row."""

from __future__ import annotations

import gzip
import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

Columns = dict[str, pa.ChunkedArray]
_MOST_COLUMNS = 10_000


class ParseError(NamedTuple):
    """Text that is no row: its record number from 1, how many lines it has, what is wrong."""

    record: int
    lines: int
    why: str


@dataclass
class Part:
    """One file as read.

    Attributes:
        path: path of the file.
        columns: cells by column.
        rows: number of rows.
        broken: text that is no row, in the order of the file.
        first: number of the line in which the first record of data begins.
        multiline: whether a cell can hold line breaks.
    """

    path: Path
    columns: Columns
    rows: int
    broken: list[ParseError] = field(default_factory=list)
    first: int = 1
    multiline: bool = False

    @cached_property
    def lines(self) -> tuple[np.ndarray, np.ndarray]:
        """[rows] and [broken] int64 numbers of the lines in which rows and broken text begin."""
        is_row = np.ones(self.rows + len(self.broken), dtype=bool)
        is_row[[one.record - 1 for one in self.broken]] = False
        heights = np.ones(len(is_row), dtype=np.int64)
        heights[is_row] += self._count_line_breaks()
        heights[~is_row] = [one.lines for one in self.broken]
        starts = self.first + np.cumsum(heights) - heights
        return starts[is_row], starts[~is_row]

    def _count_line_breaks(self) -> np.ndarray:
        """Return [rows] int64 number of line breaks within the cells of each row."""
        counts = np.zeros(self.rows, dtype=np.int64)
        for column in self.columns.values() if self.multiline else ():
            start = 0
            for chunk in column.chunks:
                text = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
                if pc.any(pc.match_substring(text, "\n")).as_py():
                    each = pc.count_substring(text, "\n")
                    each = each if text is chunk else each.take(chunk.indices)
                    counts[start : start + len(chunk)] += each.fill_null(0).to_numpy(
                        zero_copy_only=False
                    )
                start += len(chunk)
        return counts


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
        cuts: where the rows of another given part begin, see :meth:`add_part`.
        rejected: rows that are no interactions, by reason.
        notes: what is left out of it, for people.
    """

    path: Path
    parts: list[Part]
    columns: Columns
    form: str
    decimal_comma: bool = False
    origin: np.ndarray | None = None
    cuts: tuple[int, ...] = ()
    rejected: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of all files; of lists what is in them."""
        return sum(part.rows for part in self.parts) if self.origin is None else len(self.origin)

    def add_part(self, other: Source) -> Source:
        """Return a source with the rows of ``other``, a held-out part, below the own ones."""
        both = union([(self.columns, self.rows), (other.columns, other.rows)])
        return replace(
            self,
            parts=[*self.parts, *other.parts],
            columns=both,
            cuts=(*self.cuts, self.rows),
            notes=[*self.notes, *other.notes],
        )

    def part_of(self, rows: np.ndarray) -> np.ndarray:
        """Return [rows] int64 number of the given part of each row, from 0."""
        return np.searchsorted(self.cuts, self._origin(rows), side="right")

    def _origin(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.origin is None else self.origin[rows]

    def places(self, rows: np.ndarray) -> list[str]:
        """Return file and line of rows, as ``orders.csv:17``; rows count through all files."""
        rows = self._origin(rows)
        places, begin = [], 0
        for part in self.parts:
            inside = rows[(rows >= begin) & (rows < begin + part.rows)] - begin
            if len(inside):
                places += [f"{part.path.name}:{line}" for line in part.lines[0][inside]]
            begin += part.rows
        return places


def open_unpacked(file: Path) -> IO[bytes]:
    """Open a file for reading, unpacked on the way if its name ends in .gz."""
    return gzip.open(file) if is_packed(file) else open(file, "rb")  # type: ignore[return-value]


def is_packed(file: Path) -> bool:
    """Return whether a file is gzip's, by its name, in letters of either case."""
    return file.suffix.lower() == ".gz"


def require_few_columns(path: Path, columns: int) -> None:
    """Refuse a table so wide that it can be no table of interactions."""
    if columns > _MOST_COLUMNS:
        raise UsageError(
            f"{path}: {columns:,} columns, expected at most {_MOST_COLUMNS:,}; take those that "
            "matter"
        )


def flatten(table: pa.Table) -> Columns:
    """Return the columns of a table, those of records within as ``outer.inner``."""
    while any(pa.types.is_struct(one.type) for one in table.schema):
        table = table.flatten()
    return dict(zip(table.column_names, table.columns, strict=True))


def union(tables: list[tuple[Columns, int]]) -> Columns:
    """Stack the columns of tables (and their numbers of rows); null where a table has no such."""
    joined = {}
    for name in dict.fromkeys(itertools.chain(*(columns for columns, _ in tables))):
        parts = [columns.get(name, pa.chunked_array([pa.nulls(rows)])) for columns, rows in tables]
        types = {part.type for part in parts} - {pa.null()}
        kind = _common_type(types)
        try:
            chunks = [chunk for part in parts for chunk in part.cast(kind).chunks]
        except pa.ArrowException as error:
            held = ", ".join(sorted(map(str, types)))
            raise UsageError(
                f"column {shown(name)} holds {held} in different places, which do not go together; "
                f"leave it out with --drop {shown(name)}"
            ) from error
        joined[name] = pa.chunked_array(chunks, kind)
    return joined


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that files have for one: text as ``string``, in lists and codes too."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), plain_type(kind.value_type))
    if is_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    is_text = types.is_large_string(kind) or "string_view" in str(kind)  # Arrow 14 has no such type
    return pa.string() if is_text else kind


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of lists."""
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _common_type(types: set[Any]) -> Any:
    if len(types) < 2:
        return next(iter(types), pa.null())
    if all(pa.types.is_integer(one) for one in types):
        return pa.int64()
    numbers = all(pa.types.is_integer(one) or pa.types.is_floating(one) for one in types)
    return pa.float64() if numbers else pa.string()
