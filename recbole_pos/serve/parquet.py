"""Histories as columns: tables of arrow, files of parquet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from recbole_pos.errors import UsageError
from recbole_pos.serve.histories import KEYS, Histories
from recbole_pos.values import listed, shown

ROWS = 1 << 14  # histories that are read at once
UNIT = 1 << 16  # of a part: it is found by reading those of its row group before it


def is_parquet(file: str | Path) -> bool:
    """Whether histories in it are columns: a folder, or a name that says so."""
    return Path(file).suffix == ".parquet" or os.path.isdir(file)


def units_of(file: str | Path, size: int) -> list[dict[str, Any]]:
    """What :func:`tables_of` reads, in parts of at most so many histories: its arguments.

    Raises:
        UsageError: if it cannot be read, or is no histories.
    """
    units = []
    with _reading(file):
        data = ds.dataset(str(file), format="parquet")
        _require(data.schema.names, file)
        for fragment in data.get_fragments():
            for group in fragment.row_groups:
                for begin in range(0, group.num_rows, size):
                    end, part = min(begin + size, group.num_rows), (fragment.path, group.id)
                    units.append({"file": part[0], "group": part[1], "begin": begin, "end": end})
    return units


def count_of(file: str | Path) -> int:
    """How many histories there are in a file or folder."""
    with _reading(file):
        return ds.dataset(str(file), format="parquet").count_rows()


def tables_of(file: str | Path, group: int, begin: int, end: int) -> Iterator[pa.Table]:
    """Histories ``begin`` to ``end`` of a row group of a file, some at a time.

    Raises:
        UsageError: if it cannot be read.
    """
    seen = 0
    with _reading(file), pq.ParquetFile(file) as opened:
        names = [name for name in KEYS if name in opened.schema_arrow.names]
        for batch in opened.iter_batches(ROWS, [group], names):
            part = batch.slice(max(begin - seen, 0), max(end - max(seen, begin), 0))
            seen += len(batch)
            if len(part):
                part.validate(full=True)  # a damaged file may hold text that is none
                yield pa.Table.from_batches([part])
            if seen >= end:
                return


def _require(names: list[str], where: Any) -> None:
    if missing := {"id", "items"} - set(names):
        raise UsageError(
            f"{where}: no column {' and '.join(sorted(missing))}; expected id, items (lists of "
            f"names) and perhaps times (lists of numbers), found {listed(names)}"
        )
    if twice := [name for name in KEYS if names.count(name) > 1]:
        raise UsageError(f"{where}: there are several columns {twice[0]}")


@contextmanager
def _reading(file: str | Path) -> Iterator[None]:
    """Within, what cannot be read is told of the file."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def read_table(
    table: pa.Table, names: np.ndarray, needs_time: bool, unit: float | None = 1.0
) -> Histories:
    """``read_histories`` of columns ``id``, ``items`` (lists of names) and perhaps ``times``.

    Args:
        table: a row a history.
        names: of the known items, by id from 1.
        needs_time: whether the model reads times.
        unit: seconds in the unit of the time field, for timestamps; None if it has none.

    Raises:
        UsageError: naming the history that is none, and what was found.
    """
    _require(table.column_names, "histories")
    ids = table["id"].to_pylist()
    if table["id"].null_count:
        raise UsageError(f"histories: the id of {table['id'].null_count} is missing")
    if not all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in ids[:1]):
        raise UsageError(f"histories: id: expected names, found {shown(ids[0])}")
    lengths, items = _lists(table["items"], "items", ids)
    if not _of_names(items.type):
        raise UsageError(f"histories: items: expected lists of names, found {table['items'].type}")
    # an encoded column would be looked up by its codes
    ids_of = pc.index_in(items.cast(pa.string()), value_set=pa.array(names, pa.string()))
    found = ids_of.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1
    row = np.repeat(np.arange(len(ids)), lengths)
    times = None
    if "times" in table.column_names:
        times = _times(table["times"], lengths, ids, unit)
        order = np.lexsort((times, row))  # equal times keep their order
        found, times = found[order], times[order]
    elif needs_time and len(found):
        raise UsageError("histories: the model reads times: a column times of lists is needed")
    at = None
    if "at" in table.column_names:
        at = _moments(table["at"].combine_chunks(), "at", unit)
        if (wrong := np.isinf(at)).any():
            raise UsageError(
                f"histories: at of {shown(ids[int(wrong.argmax())])}: expected a finite number"
            )
    known = found > 0
    of_row = np.bincount(row[known], minlength=len(ids))
    times = None if times is None or not known.any() else times[known]
    return Histories(ids, found[known], of_row, times, lengths - of_row, None, at)


def _of_names(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return texts or pa.types.is_integer(kind) or pa.types.is_null(kind)


def _lists(column: pa.ChunkedArray, name: str, ids: list[Any]) -> tuple[np.ndarray, pa.Array]:
    """Lengths of lists and what is in them, neither of which may be missing."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise UsageError(f"histories: {name}: expected lists, found {column.type}")
    lengths = pc.list_value_length(column)
    parts = pc.list_flatten(column)
    values = parts.combine_chunks()
    if lengths.null_count or values.null_count:
        missing = pc.is_null(column).to_numpy(zero_copy_only=False)
        if not missing.any():
            missing = np.array([None in one for one in column.to_pylist()])
        where = ids[int(missing.argmax())]
        raise UsageError(f"histories: {name} of {shown(where)}: a value is missing")
    return lengths.to_numpy().astype(np.int64), values


def _times(
    column: pa.ChunkedArray, lengths: np.ndarray, ids: list[Any], unit: float | None
) -> np.ndarray:
    sizes, values = _lists(column, "times", ids)
    if (sizes != lengths).any():
        at = int((sizes != lengths).argmax())
        raise UsageError(
            f"histories: times of {shown(ids[at])}: expected one for each of {lengths[at]} items, "
            f"found {sizes[at]}"
        )
    times = _moments(values, "times", unit)
    wrong = ~(np.abs(times) < 2**63)
    if wrong.any():
        at = int(np.searchsorted(np.cumsum(sizes), int(wrong.argmax()), side="right"))
        raise UsageError(
            f"histories: times of {shown(ids[at])}: expected finite numbers, found "
            f"{times[wrong][0]}"
        )
    return times


def _moments(values: pa.Array, name: str, unit: float | None) -> np.ndarray:
    """Numbers, or timestamps in the unit of the time field; NaN where one is missing."""
    kind = values.type
    if pa.types.is_timestamp(kind) and unit is not None:
        moments = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return moments.to_numpy(zero_copy_only=False) / (unit * 1e6)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise UsageError(f"histories: {name}: expected lists of numbers, found {kind}")
    return values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
