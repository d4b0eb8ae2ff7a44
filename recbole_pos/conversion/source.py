"""Tables as read: columns of Arrow, and the file and row of each."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

Columns = dict[str, pa.ChunkedArray]
EMPTY_LINE = "empty line"  # fault of a row that holds nothing, so that nothing is lost with it
_MAX_CHUNK_ROWS = 1 << 20  # so that the text of a chunk has under 2 GiB


@dataclass
class Part:
    """One file (or frame) as read.

    Attributes:
        broken_lines: number of each broken line, from 0 among rows and broken lines, and its fault.
        first_number: number in reports of the first of these: its line, unless cells before it hold
            line breaks.
    """

    path: Path
    columns: Columns
    num_rows: int
    broken_lines: list[tuple[int, str]] = field(default_factory=list)
    first_number: int = 1

    def locate_rows(self, rows: np.ndarray) -> list[str]:
        """Return file and number of [n] rows, as ``orders.csv:17``."""
        broken = np.array([number for number, _ in self.broken_lines], np.int64)
        num_broken = np.searchsorted(broken - np.arange(len(broken)), rows, side="right")
        return [f"{self.path.name}:{number}" for number in rows + num_broken + self.first_number]

    def describe_broken(self) -> list[str]:
        """Return file, number and fault of each broken line, as ``orders.csv:18 (empty line)``."""
        first, name = self.first_number, self.path.name
        return [f"{name}:{number + first} ({fault})" for number, fault in self.broken_lines]


@dataclass
class Source:
    """What was read from a file, from all files of a folder, or from a frame.

    Attributes:
        path: the file or folder, or the name of the frame.
        parts: the files.
        columns: name of a column -> its cells in all files.
        form: description of the format for people.
        decimal_comma: whether numbers may have a decimal comma.
        cuts: held-out part -> its first row, see :meth:`add_part`.
        origin: [rows] row of the files that each row comes from; None if rows are those of files.
    """

    path: Path
    parts: list[Part]
    columns: Columns
    form: str
    decimal_comma: bool = False
    cuts: dict[str, int] = field(default_factory=dict)
    origin: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, of all files."""
        if self.origin is not None:
            return len(self.origin)
        return sum(part.num_rows for part in self.parts)

    def add_part(self, name: str, other: Source) -> Source:
        """Return a source with the rows of ``other``, a held-out part, below its own."""
        return replace(
            self,
            parts=[*self.parts, *other.parts],
            columns=stack_columns([(self.columns, self.num_rows), (other.columns, other.num_rows)]),
            cuts={**self.cuts, name: self.num_rows},
        )

    def locate_rows(self, rows: np.ndarray) -> list[str]:
        """Return file and number of [n] rows, which count from 0 through all files."""
        if self.origin is not None:
            rows = self.origin[rows]
        places: list[str] = []
        first_row = 0
        for part in self.parts:
            in_part = rows[(rows >= first_row) & (rows < first_row + part.num_rows)]
            places += part.locate_rows(in_part - first_row)
            first_row += part.num_rows
        return places


def take_columns(table: pa.Table, source: str | Path) -> Columns:
    """Return the columns of a table in few types; refuse two of one name.

    A column of records becomes columns ``outer.inner``.
    """
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    require_distinct(source, table.column_names)
    table = pa.Table.from_batches(table.to_batches(max_chunksize=_MAX_CHUNK_ROWS), table.schema)
    columns = {}
    for header, column in zip(table.schema, table.columns, strict=True):
        metadata = _find_period(header)
        if metadata is None:
            column = _format_uuids(_decode_dictionary(column))
            columns[header.name] = column.cast(_simplify_type(column.type))
            continue
        try:
            columns[header.name] = _read_periods(column, json.loads(metadata)["freq"])
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"{source}: column {shown(header.name)} holds periods that are no times "
                f"({str(error)[:100]}); write it as times, or leave it out of the table"
            ) from error
    return columns


def _find_period(header: pa.Field) -> bytes | None:
    """Return the metadata of a column of pandas' periods; None for other columns."""
    if isinstance(header.type, pa.BaseExtensionType):
        name, content = header.type.extension_name, b""
        if isinstance(header.type, pa.ExtensionType):  # of Python; Arrow's own have no such method
            content = header.type.__arrow_ext_serialize__()
    else:  # of a file, until pandas tells Arrow of its types
        metadata = header.metadata or {}
        name = metadata.get(b"ARROW:extension:name", b"").decode(errors="replace")
        content = metadata.get(b"ARROW:extension:metadata", b"")
    return content if name == "pandas.period" else None


def _decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return categories of a type that Arrow cannot cast, such as intervals, as plain values."""
    dtype = column.type
    if not pa.types.is_dictionary(dtype):
        return column
    is_extension = isinstance(dtype.value_type, pa.BaseExtensionType)
    if not (is_extension or pa.types.is_nested(dtype.value_type)):
        return column
    return pa.chunked_array([c.dictionary_decode() for c in column.chunks], dtype.value_type)


def _format_uuids(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of uuids, or of lists of them, as text; other columns as they are."""
    is_list = _is_list(column.type)
    value_type = column.type.value_type if is_list else column.type
    if getattr(value_type, "extension_name", "") != "arrow.uuid":
        return column
    if not is_list:
        return pa.chunked_array(map(_format_uuid_array, column.chunks), pa.string())
    list_type = pa.large_list(pa.string())
    lists = []
    for chunk in column.cast(pa.large_list(value_type)).chunks:
        texts = pa.LargeListArray.from_arrays(chunk.offsets, _format_uuid_array(chunk.values))
        lists.append(pc.if_else(chunk.is_valid(), texts, pa.scalar(None, list_type)))
    return pa.chunked_array(lists, list_type)


def _format_uuid_array(uuids: Any) -> pa.Array:
    """Return the usual text of [n] uuids; each different one is formatted once."""
    encoded = uuids.storage.dictionary_encode()
    texts = [str(UUID(bytes=value)) for value in encoded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(encoded.indices)


def _read_periods(column: pa.ChunkedArray, frequency: str) -> pa.ChunkedArray:
    """Return the times at which periods of pandas start."""
    ordinals = column.cast(pa.int64())
    numbers = ordinals.fill_null(0).to_numpy()
    starts = pd.PeriodIndex.from_ordinals(numbers, freq=frequency).to_timestamp()
    is_missing = ordinals.is_null().to_numpy()
    return pa.chunked_array([pa.array(starts, mask=is_missing)])


def require_distinct(source: str | Path, names: Iterable[str]) -> None:
    """Refuse two columns of one name."""
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UsageError(
            f"{source}: two columns are called {shown(repeated[0])}; rename one, or name them with "
            "--columns if there is no header"
        )


def stack_columns(tables: list[tuple[Columns, int]]) -> Columns:
    """Stack tables (columns and number of rows); a column that a table lacks is null there."""
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
                f"together; leave it out with --drop={shown(name)}"
            ) from error
        stacked[name] = pa.chunked_array(chunks, common_type)
    return stacked


def _find_common_type(types: set[Any]) -> Any:
    """Return the Arrow type to which columns of several types are cast."""
    if len(types) < 2:
        return next(iter(types), pa.null())
    if all(map(pa.types.is_integer, types)):
        return pa.int64()
    are_numbers = all(pa.types.is_integer(t) or pa.types.is_floating(t) for t in types)
    return pa.float64() if are_numbers else pa.string()


def _simplify_type(dtype: pa.DataType) -> pa.DataType:
    """Return one type for all of a kind: string of texts, large_list of lists, int32 of codes.

    Of extension types only those whose storage is their value are simplified.
    """
    types = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        is_plain = dtype.extension_name in ("arrow.json", "arrow.bool8")
        return _simplify_type(dtype.storage_type) if is_plain else dtype
    if types.is_dictionary(dtype):
        return pa.dictionary(pa.int32(), _simplify_type(dtype.value_type))
    if _is_list(dtype):
        return pa.large_list(_simplify_type(dtype.value_type))
    is_text = types.is_large_string(dtype) or "string_view" in str(dtype)  # not in Arrow 14
    return pa.string() if is_text else dtype


def _is_list(dtype: pa.DataType) -> bool:
    """Return whether an Arrow type is one of lists."""
    types = pa.types
    return types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)
