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
        broken: broken lines: number from 0 among rows and broken lines, and what is wrong.
        first: what the first of these is called in reports: its line, unless cells before it hold
            line breaks.
    """

    path: Path
    columns: Columns
    rows: int
    broken: list[tuple[int, str]] = field(default_factory=list)
    first: int = 1

    def places(self, rows: np.ndarray) -> list[str]:
        """Return file and number of [n] rows, as ``orders.csv:17``."""
        broken = np.array([number for number, _ in self.broken], np.int64)
        num_broken = np.searchsorted(broken - np.arange(len(broken)), rows, side="right")
        return [f"{self.path.name}:{number}" for number in rows + num_broken + self.first]

    def describe_broken(self) -> list[str]:
        """Return file, number and fault of the broken lines."""
        name = self.path.name
        return [f"{name}:{number + self.first} ({fault})" for number, fault in self.broken]


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
        """Number of rows of all files."""
        return sum(part.rows for part in self.parts)

    def add_part(self, name: str, other: Source) -> Source:
        """Return a source with the rows of ``other``, a held-out part, below its own."""
        return replace(
            self,
            parts=[*self.parts, *other.parts],
            columns=stack_columns([(self.columns, self.rows), (other.columns, other.rows)]),
            cuts={**self.cuts, name: self.rows},
        )

    def places(self, rows: np.ndarray) -> list[str]:
        """Return file and number of [n] rows, which count through all files."""
        places, first_row = [], 0
        for part in self.parts:
            in_part = rows[(rows >= first_row) & (rows < first_row + part.rows)]
            places += part.places(in_part - first_row)
            first_row += part.rows
        return places


def flatten_records(table: pa.Table) -> Columns:
    """Return the columns of a table, those of records within as ``outer.inner``."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return dict(zip(table.column_names, table.columns, strict=True))


def stack_columns(tables: list[tuple[Columns, int]]) -> Columns:
    """Stack the columns of tables (and their numbers of rows); null where a table has no such."""
    stacked = {}
    for name in dict.fromkeys(itertools.chain(*(columns for columns, _ in tables))):
        parts = [columns.get(name, pa.chunked_array([pa.nulls(rows)])) for columns, rows in tables]
        types = {part.type for part in parts} - {pa.null()}
        common_type = _find_common_type(types)
        try:
            chunks = [chunk for part in parts for chunk in part.cast(common_type).chunks]
        except pa.ArrowException as error:
            names = ", ".join(sorted(map(str, types)))
            raise UsageError(
                f"column {shown(name)} holds {names} in different places, which do not go "
                f"together; leave it out with --drop {shown(name)}"
            ) from error
        stacked[name] = pa.chunked_array(chunks, common_type)
    return stacked


def _find_common_type(types: set[Any]) -> Any:
    if len(types) < 2:
        return next(iter(types), pa.null())
    if all(map(pa.types.is_integer, types)):
        return pa.int64()
    are_numbers = all(pa.types.is_integer(t) or pa.types.is_floating(t) for t in types)
    return pa.float64() if are_numbers else pa.string()


def simplify_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type that a file has for one of a frame: text as ``string``, within lists too."""
    types = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        return simplify_type(dtype.storage_type)
    if types.is_dictionary(dtype):
        return pa.dictionary(pa.int32(), simplify_type(dtype.value_type))
    if is_list(dtype):
        return pa.large_list(simplify_type(dtype.value_type))
    is_text = types.is_large_string(dtype) or "string_view" in str(dtype)  # not in Arrow 14
    return pa.string() if is_text else dtype


def is_list(dtype: pa.DataType) -> bool:
    """Return whether an Arrow type is one of lists."""
    types = pa.types
    return types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)
