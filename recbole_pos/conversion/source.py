"""Tables as read: columns of Arrow, and the file and row of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

Columns = dict[str, pa.ChunkedArray]


@dataclass
class Part:
    """One file (or frame) as read.

    Attributes:
        broken: what is no row: its number from 0 among rows and broken ones, and what is wrong.
        first: number of the first of these, for people: that of its line, unless cells before it
            hold line breaks.
    """

    path: Path
    columns: Columns
    rows: int
    broken: list[tuple[int, str]] = field(default_factory=list)
    first: int = 1

    def places(self, rows: np.ndarray) -> list[str]:
        """Return file and number of [n] rows, as ``orders.csv:17``."""
        broken = np.array([number for number, _ in self.broken], np.int64)
        before = np.searchsorted(broken - np.arange(len(broken)), rows, side="right")
        return [f"{self.path.name}:{row}" for row in rows + before + self.first]

    def describe_broken(self) -> list[str]:
        """Return file, number and fault of what is no row."""
        return [f"{self.path.name}:{number + self.first} ({why})" for number, why in self.broken]


@dataclass
class Source:
    """What was read from a file, from all files of a folder, or from a frame.

    Attributes:
        path: as given.
        parts: the files.
        columns: the cells of all of them, by the names of the columns.
        form: what was read, for people.
        decimal_comma: whether numbers may be written with one.
        cuts: first row of each held-out part, by its name, see :meth:`add_part`.
    """

    path: Path
    parts: list[Part]
    columns: Columns
    form: str
    decimal_comma: bool = False
    cuts: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(part.rows for part in self.parts)

    def add_part(self, name: str, other: Source) -> Source:
        """Return a source with the rows of ``other``, a held-out part, below the own ones."""
        return replace(
            self,
            parts=[*self.parts, *other.parts],
            columns=stack_columns([(self.columns, self.rows), (other.columns, other.rows)]),
            cuts={**self.cuts, name: self.rows},
        )

    def places(self, rows: np.ndarray) -> list[str]:
        """Return file and number of [n] rows, which count through all files."""
        places, begin = [], 0
        for part in self.parts:
            inside = rows[(rows >= begin) & (rows < begin + part.rows)]
            places += part.places(inside - begin)
            begin += part.rows
        return places


def flatten_records(table: pa.Table) -> Columns:
    """Return the columns of a table, those of records within as ``outer.inner``."""
    while any(pa.types.is_struct(one.type) for one in table.schema):
        table = table.flatten()
    return dict(zip(table.column_names, table.columns, strict=True))


def stack_columns(tables: list[tuple[Columns, int]]) -> Columns:
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


def _common_type(types: set[Any]) -> Any:
    if len(types) < 2:
        return next(iter(types), pa.null())
    if all(pa.types.is_integer(one) for one in types):
        return pa.int64()
    numbers = all(pa.types.is_integer(one) or pa.types.is_floating(one) for one in types)
    return pa.float64() if numbers else pa.string()


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
