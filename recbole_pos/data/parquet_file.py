"""Atomic tables as parquet: columns called name:type, or with types from ``column_types``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute, parquet

from recbole_pos.data.atomic import LARGEST, AtomicFile
from recbole_pos.data.blocks import join_blocks
from recbole_pos.data.kinds import KINDS, MISSING
from recbole_pos.data.location import PARQUET
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, shown

_ROWS = 1 << 18  # of a block


class ParquetTable:
    """One file; ``columns`` maps the names of its columns to their kinds.

    Args:
        path: of the file.
        config: RecBole's, for column_types and seq_separator.

    Raises:
        UsageError: if the file cannot be read, or a column has no type.
    """

    head = "its schema or column_types"  # what names its columns

    def __init__(self, path: str | Path, config: Options) -> None:
        self.path, self.inner = Path(path), config["seq_separator"]
        try:
            self.file = parquet.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"{self.path} cannot be read as parquet: {error}") from error
        self.places: dict[str, str] = {}  # name -> what the column is called
        self.columns: dict[str, str] = {}
        types = config["column_types"] or {}
        for called in self.file.schema_arrow.names:
            name, colon, kind = called.rpartition(":")
            if not colon or kind not in KINDS:
                name, kind = called, str(types.get(called))
            if not name or kind not in KINDS:
                raise UsageError(
                    f"{self.path}: column {shown(called)} has no type: call it as in "
                    f"'user_id:token', "
                    f"or say it in column_types: {{{called}: ...}}, one of {', '.join(KINDS)}"
                )
            if name in self.columns:
                raise UsageError(
                    f"{self.path}: two columns are called {shown(name)}; rename one or remove it"
                )
            self.places[name], self.columns[name] = called, kind

    def read(self, names: Iterable[str]) -> pd.DataFrame:
        """The named columns of every row, as those of a text, see ``AtomicFile.read``.

        Raises:
            UsageError: for a column of another type than its kind, a row with a number that is
                none, damage, or if there is no row.
        """
        kinds = {name: self.columns[name] for name in names}
        parts: dict[str, list[Any]] = {name: [] for name in kinds}
        rows = 0
        try:
            for block in self.file.iter_batches(
                _ROWS, columns=[self.places[name] for name in kinds], use_threads=False
            ):
                for name, kind in kinds.items():
                    column = block.column(self.places[name])
                    parts[name].append(self._converted(rows, name, kind, column))
                rows += len(block)
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"{self.path} cannot be read as parquet: {error}") from error
        if not rows:
            raise UsageError(
                f"{self.path} has no row; fill it; a .user or .item file may also be removed"
            )
        columns = {name: join_blocks(self.path, name, parts.pop(name)) for name in kinds}
        pa.default_memory_pool().release_unused()
        return pd.DataFrame(columns, copy=False)

    def _converted(self, first: int, name: str, kind: str, column: pa.Array) -> Any:
        """One block of a column, as ``join_blocks`` takes it; ``first`` counts rows before it."""
        of = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if pa.types.is_null(of):  # nothing in it has a value
            column, of = column.cast(pa.string()), pa.string()
        if kind == "token" and (pa.types.is_integer(of) or _is_text(of)):
            return self._tokens(name, column)
        if kind == "float" and (_is_number(of) or pa.types.is_boolean(of)):
            numbers = column.dictionary_decode() if of is not column.type else column
            return np.array(numbers.cast(pa.float64()).to_numpy(zero_copy_only=False))
        if kind.endswith("seq"):
            listed = _is_list(of) and (_is_text(of.value_type) or _is_number(of.value_type))
            if listed or _is_text(of):
                return self._lists(first, name, kind, column)
        raise UsageError(
            f"{self.path}: {name} ({kind}) holds {column.type}; expected "
            f"{_EXPECTED[kind]}. Write another type into the file, or give the column another kind"
        )

    def _tokens(self, name: str, column: pa.Array) -> pa.DictionaryArray:
        coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        names = coded.dictionary.cast(pa.string())
        if compute.any(compute.match_substring(names, "\0")).as_py():
            raise UsageError(f"{self.path}: a name of {name} has a NUL byte; remove it")
        missing = compute.is_in(names, pa.array([*MISSING, None], pa.string()))
        codes = coded.indices.cast(pa.int32())
        if compute.any(missing).as_py():
            codes = compute.if_else(missing.take(codes), None, codes)
        return pa.DictionaryArray.from_arrays(codes, names)

    def _lists(self, first: int, name: str, kind: str, column: pa.Array) -> list[np.ndarray]:
        lists = []
        for row, cell in enumerate(column.to_pylist(), first):
            if isinstance(cell, str):
                cell = [] if cell in MISSING else cell.split(self.inner)
            parts = [str(part) for part in cell or () if part is not None and part != ""]
            if kind == "token_seq":
                lists.append(np.array(parts))
                continue
            try:
                numbers = np.array([float(part) for part in parts])
            except ValueError:
                numbers = np.array([np.nan])
            if not (np.abs(numbers) <= LARGEST).all():  # a mean has no meaning here
                raise UsageError(
                    f"{self.path}, row {row + 1}: {name} ({kind}) is {str(cell)[:80]!r}, in which "
                    "something is no number; correct the cell or leave it empty"
                )
            lists.append(numbers)
        return lists


def open_table(path: str | Path, config: Options) -> AtomicFile | ParquetTable:
    """A table of a dataset, by the end of its name."""
    return (ParquetTable if str(path).endswith(PARQUET) else AtomicFile)(path, config)


_EXPECTED = {
    "token": "text or whole numbers",
    "float": "numbers (a time as a number, such as seconds since 1970)",
    "token_seq": "lists of text or numbers, or text",
    "float_seq": "lists of numbers, or text",
}


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_number(kind: pa.DataType) -> bool:
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(is_one(kind) for is_one in numbers)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
