"""Histories as users give them (Python, json lines, frames, columns of Arrow or parquet), checked
and packed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn.functional import pad

from recbole_pos.data.tables import LARGEST
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features
from recbole_pos.values import listed, nearest, shown

KEYS = ("id", "items", "times", "at", "events", "user")
ROWS = 1 << 14  # histories of parquet that are read at once
UNIT = 1 << 16  # most histories of a part: to reach it, its row group is read from the start
# How values of a field are read: ids by name, and whether a value is a list of names; None for a
# field of numbers.
Field = tuple[Mapping[str, int], bool] | None
NO_FIELDS: dict[str, dict[str, Field]] = {"events": {}, "user": {}}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Histories:
    """Packed histories of b users.

    Attributes:
        ids: [b] names of the histories; by default numbers from 0.
        items: [m] int64 item ids, history by history, oldest first; unknown items are left out.
        lengths: [b] int64 number of items of each history; 0 where none of them is known.
        times: [m] float64 in the unit of the time field, or None.
        unknown: [b] int64 number of unknown items of each history.
        users: [b] int64 user ids, where the histories are those of users in the data.
        at: [b] float64 times of the requests, NaN where one is not given; None for none.
        features: features of the interactions and users.
    """

    ids: list[Any]
    items: np.ndarray
    lengths: np.ndarray
    times: np.ndarray | None
    unknown: np.ndarray
    users: np.ndarray | None = None
    at: np.ndarray | None = None
    features: Features = field(default_factory=Features)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def packed(
        cls,
        ids: list[Any],
        items: np.ndarray,
        lengths: np.ndarray,
        times: np.ndarray | None,
        timed: np.ndarray | None = None,
        at: np.ndarray | None = None,
        features: Features | None = None,
    ) -> Histories:
        """Return histories with events sorted by time and unknown items left out.

        Args:
            ids: [b] names of the histories.
            items: [m] item ids, 0 for unknown items.
            lengths: [b] number of items of each history.
            times: [m] times of the items; the order of equal times is kept.
            timed: [b] whether a history has times; all if None. ``times`` are kept if all
                histories with a known item have times.
            at: [b] times of the requests, NaN where a request has none.
            features: features of the [m] interactions and [b] users.
        """
        row, order = np.repeat(np.arange(len(ids)), lengths), np.arange(len(items))
        if times is not None:
            order = np.lexsort((times, row))
            items, times = items[order], times[order]
        is_known = items > 0
        places = torch.from_numpy(order[is_known])
        features = Features() if features is None else features.map(lambda x: x[places])
        kept = np.bincount(row[is_known], minlength=len(ids))
        if times is not None:
            has_all = kept.any() and (timed is None or timed[kept > 0].all())
            times = times[is_known] if has_all else None
        at = None if at is None or np.isnan(at).all() else at
        return cls(ids, items[is_known], kept, times, lengths - kept, None, at, features)

    @classmethod
    def joined(cls, parts: Sequence[Histories]) -> Histories:
        """Return the histories of all parts; with times if all parts with an event have times."""

        def column(name: str, kind: type = np.int64) -> np.ndarray:
            return np.concatenate([np.empty(0, kind), *(getattr(part, name) for part in parts)])

        with_events = [part for part in parts if len(part.items)]
        times = at = None
        if with_events and all(part.times is not None for part in with_events):
            times = np.concatenate([part.times for part in with_events])
        if any(part.at is not None for part in parts):
            at = np.concatenate([np.full(len(p), np.nan) if p.at is None else p.at for p in parts])
        ids = [name for part in parts for name in part.ids]
        features = _join([part.features for part in parts])
        unknown = column("unknown")
        return cls(ids, column("items"), column("lengths"), times, unknown, None, at, features)

    def asked_at(self, default: float) -> Histories:
        """Return the histories with ``default`` as the time of each request without a time.

        Args:
            default: time in the unit of the time field.

        Raises:
            UsageError: naming the first history that is requested before its newest event.
        """
        at = np.full(len(self), default) if self.at is None else self.at
        at = np.where(np.isnan(at), default, at)
        not_empty = np.flatnonzero(self.lengths)
        if self.times is not None and len(not_empty):
            newest = self.times[np.cumsum(self.lengths)[not_empty] - 1]
            if (early := at[not_empty] < newest).any():
                first = int(early.argmax())
                raise UsageError(
                    f"at: the history {shown(self.ids[not_empty[first]])} asks at "
                    f"{at[not_empty[first]]:.15g}, before its newest interaction at "
                    f"{newest[first]:.15g}; give a later time"
                )
        return replace(self, at=at)

    def some(self, rows: np.ndarray) -> Histories:
        """Return the histories of the given rows [r], in the order of ``rows``."""
        begin, lengths = (np.cumsum(self.lengths) - self.lengths)[rows], self.lengths[rows]
        index = gather_index(begin, lengths)
        return Histories(
            [self.ids[row] for row in rows],
            self.items[index],
            lengths,
            None if self.times is None else self.times[index],
            self.unknown[rows],
            None if self.users is None else self.users[rows],
            None if self.at is None else self.at[rows],
            self._features(index, rows),
        )

    def _features(self, events: np.ndarray, rows: np.ndarray) -> Features:
        both = map(torch.from_numpy, (events, rows))
        return self.features.map(*(lambda x, index=index: x[index] for index in both))

    def having(self, row: np.ndarray, item: np.ndarray) -> int:
        """Return for how many pairs [p] of a history (``row``, its number) and an item the history
        has the item."""
        rows, size = np.unique(row), int(max(item.max(initial=0), self.items.max(initial=0))) + 1
        asked = self.some(rows)
        pairs = np.sort(row * size + item)  # they are few, and np.isin would sort the events
        events = np.repeat(rows, asked.lengths) * size + asked.items
        place = np.minimum(np.searchsorted(pairs, events), len(pairs) - 1)
        return len(np.unique(place[pairs[place] == events]))

    def newest(self, most: int) -> Histories:
        """Return the histories cut to their ``most`` newest events."""
        age = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.items))
        keep = age <= most
        times = None if self.times is None else self.times[keep]
        lengths = np.minimum(self.lengths, most)
        features = self._features(np.flatnonzero(keep), np.arange(len(self)))
        return replace(
            self, items=self.items[keep], lengths=lengths, times=times, features=features
        )

    def without(self, steps_back: np.ndarray) -> Histories:
        """Return the histories without one interaction each; the others keep their times.

        Args:
            steps_back: [b] interaction to leave out, 1 for the newest; 0 leaves none out.
        """
        age = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.items))
        keep = age != np.repeat(steps_back, self.lengths)
        times = None if self.times is None else self.times[keep]
        lengths = self.lengths - (steps_back > 0)
        features = self._features(np.flatnonzero(keep), np.arange(len(self)))
        return replace(
            self, items=self.items[keep], lengths=lengths, times=times, features=features
        )


def _join(parts: Sequence[Features]) -> Features:
    """Concatenate the features of parts, columns of lists padded to the longest list."""

    def stacked(columns: list[Tensor]) -> Tensor:
        width = max(column.shape[-1] for column in columns)
        return torch.cat([pad(x, (0, width - x.size(1))) if x.dim() > 1 else x for x in columns])

    first = parts[0] if parts else Features()
    return Features(
        {name: stacked([part.events[name] for part in parts]) for name in first.events},
        {name: stacked([part.users[name] for part in parts]) for name in first.users},
    )


def read_histories(
    given: Iterable[Any],
    ids: Mapping[str, int],
    needs_time: bool,
    unit: float | None = 1.0,
    fields: Mapping[str, Mapping[str, Field]] = NO_FIELDS,
) -> Histories:
    """Check histories, look up the ids of their items, and pack them.

    Args:
        given: of each user a list of items, oldest first, or a mapping with ``items`` and perhaps
            ``id``, ``times``, ``at``, the time of the request, ``events``, by field a value for
            each item, and ``user``, a value by field; a Series of lists, by id; a DataFrame or a
            table of Arrow with such columns. Where times are given, events are sorted by them.
        ids: ids of the known items by name, from 1 in ascending order.
        needs_time: whether the model reads times.
        unit: seconds in the unit of the time field, for dates; None if it has none.
        fields: what the model reads under ``events`` and ``user``, by name.

    Raises:
        UsageError: naming the history that is wrong, what was found and what was expected.
    """
    if isinstance(given, pa.Table):
        if not any(fields.values()) and not fields.keys() & set(given.column_names):
            return _read_table(given, ids, needs_time, unit)
        _require_columns(given.column_names, "histories")
        given = given.to_pylist()
    if isinstance(given, pd.DataFrame) and "items" in given:
        given = given.to_dict("records")
    elif isinstance(given, pd.DataFrame):
        raise UsageError(
            f"histories: expected columns items (lists), and perhaps id and times, found "
            f"{', '.join(map(str, given.columns))[:100]}; of interactions, take "
            "frame.groupby(USER)[ITEM].agg(list)"
        )
    elif isinstance(given, pd.Series):
        given = [{"id": name, "items": items} for name, items in given.items()]
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(f"histories: expected a list of histories, found {shown(given)}")
    names, lengths, requests = [], [], []
    events: list[int] = []
    moments: list[float] = []
    timed: list[bool] = []
    values: dict[tuple[str, str], list[Any]] = {(of, n): [] for of in fields for n in fields[of]}
    for number, history in enumerate(given):
        name, items, times, at = _fields(history, f"histories[{number}]", number, unit)
        if times is None and needs_time and items:
            raise UsageError(
                f"histories[{number}]: the model reads times, so each history needs them: "
                '{"items": [...], "times": [...]}'
            )
        names.append(name)
        lengths.append(len(items))
        requests.append(at)
        events += [ids.get(item, 0) for item in items]
        timed.append(times is not None)
        moments += [0.0] * len(items) if times is None else times
        features = history if isinstance(history, Mapping) else {}
        _take_fields(features, fields, len(items), f"histories[{number}]", values)
    columns = {of: {n: _column(values[of, n], fields[of][n]) for n in fields[of]} for of in fields}
    return Histories.packed(
        names,
        np.array(events, np.int64),
        np.array(lengths, np.int64),
        np.array(moments) if any(timed) else None,
        np.array(timed),
        np.array(requests),
        Features(columns["events"], columns["user"]),
    )


def _take_fields(
    history: Mapping[str, Any],
    fields: Mapping[str, Mapping[str, Field]],
    items: int,
    where: str,
    values: dict[tuple[str, str], list[Any]],
) -> None:
    """Append the values of a history to ``values``, by table (``events``, ``user``) and field.

    Raises:
        UsageError: for a field that the model does not read, or values of the wrong kind or number.
    """
    for table, readable in fields.items():
        given = history.get(table) or {}
        if not isinstance(given, Mapping):
            raise UsageError(f"{where}.{table}: expected values by field, found {shown(given)}")
        for name in given:
            if name not in readable:
                raise UsageError(
                    f"{where}.{table}: {shown(name)} is not read by the model"
                    f"{nearest(str(name), readable) if readable else ''}; leave it out"
                )
        for name, kind in readable.items():
            entries, place = given.get(name), f"{where}.{table}.{name}"
            if table == "user":
                entries = [entries]
            elif entries is None:
                entries = [None] * items
            elif not _is_list(entries) or len(entries) != items:
                raise UsageError(
                    f"{place}: expected a list with a value for each of {items} items (null where "
                    f"there is none), found {shown(entries)}"
                )
            values[table, name] += [_value(value, kind, place) for value in entries]


def _value(value: Any, kind: Field, where: str) -> Any:
    """Return a number, an id, or a list of ids; NaN, 0 or an empty list where there is none."""
    if value is None:
        return math.nan if kind is None else [] if kind[1] else 0
    if kind is None:
        is_number = isinstance(value, (int, float, np.integer, np.floating))
        if is_number and not isinstance(value, bool) and not abs(value) > LARGEST:  # NaN is missing
            return float(value)
        raise UsageError(f"{where}: expected numbers, found {shown(value)}")
    ids, is_list = kind
    names = value if is_list and _is_list(value) else [value]
    if (_is_list(value) and not is_list) or not all(map(_is_name, names)):
        raise UsageError(
            f"{where}: expected {'lists of names' if is_list else 'names'}, found {shown(value)}"
        )
    found = [ids.get(str(name), 0) for name in names]
    return [id_ for id_ in found if id_] if is_list else found[0]


def _column(values: list[Any], kind: Field) -> Tensor:
    """Return the values of one field as a tensor: numbers or ids [n], or lists of ids [n, s] that
    are padded with 0."""
    if kind is None:
        return torch.tensor(values, dtype=torch.float32)
    if not kind[1]:
        return torch.tensor(values, dtype=torch.int64)
    width = max(map(len, values), default=0) or 1
    rows = [value + [0] * (width - len(value)) for value in values]
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)


def _fields(
    history: Any, where: str, number: int, unit: float | None
) -> tuple[Any, list[str], list[float] | None, float]:
    """Return id, items, times and request time (NaN if none) of a history, once they are checked.

    Raises:
        UsageError: naming the key that is wrong.
    """
    name, items, times, at = number, history, None, math.nan
    if isinstance(history, Mapping):
        if unknown := sorted(map(str, set(history) - set(KEYS))):
            raise UsageError(f"{where}: {', '.join(unknown)[:80]} is not one of {', '.join(KEYS)}")
        if "items" not in history:
            raise UsageError(f'{where}: expected {{"items": [...]}}, found {shown(dict(history))}')
        name, items, times = history.get("id", number), history["items"], history.get("times")
        if history.get("at") is not None:
            at = read_moment(history["at"], f"{where}.at", unit)
        # json may name half a letter, a lone surrogate, which cannot be written
        if not _is_name(name) or re.search("[\ud800-\udfff]", str(name)):
            raise UsageError(f"{where}.id: expected a name, found {shown(name)}")
    if not _is_list(items):
        raise UsageError(f"{where}: expected a list of items, found {shown(items)}")
    if times is not None and not _is_list(times):
        raise UsageError(f"{where}.times: expected a list of numbers, found {shown(times)}")
    if times is not None and len(times) != len(items):
        raise UsageError(
            f"{where}.times: expected one for each of {len(items)} items, found {len(times)}"
        )
    for item in items:
        if not _is_name(item):
            raise UsageError(f"{where}.items: expected names of items, found {shown(item)}")
    if times is not None:
        times = [read_moment(time, f"{where}.times", unit) for time in times]
    return name, list(map(str, items)), times, at


def _is_list(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def _is_name(value: Any) -> bool:
    """Return whether a value can be a name: a string, or a whole number of 64 bits."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return isinstance(value, str) or (whole and abs(value) < 2**63)


def read_moment(time: Any, where: str, unit: float | None) -> float:
    """Return a time in the unit of the time field, counted from 1970-01-01 UTC.

    Args:
        time: a number in that unit, a datetime, or text in ISO 8601; UTC if it names no zone.
        where: what to call the place of the time in error messages.
        unit: seconds in the unit; None if the field only orders interactions.

    Raises:
        UsageError: if it is not a finite number or a time, or a date where the field only orders.
    """
    if not isinstance(time, (str, datetime)):
        is_number = isinstance(time, (int, float, np.integer, np.floating))
        if is_number and not isinstance(time, bool) and abs(time) < 2**63:  # false for NaN
            return float(time)
        raise UsageError(f"{where}: expected finite numbers, found {shown(time)}")
    try:
        if isinstance(time, str):  # Python 3.10 does not read the Z that stands for UTC
            time_text = f"{time[:-1]}+00:00" if time[-1:] in ("Z", "z") else time
            parsed = datetime.fromisoformat(time_text)
        else:
            parsed = time
        parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)
        since_epoch = (parsed - _EPOCH) / timedelta(microseconds=1)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(
            f"{where}: expected finite numbers, or times such as '2026-01-31T09:30:00Z', found "
            f"{shown(time)}"
        ) from None
    if unit is None:
        raise UsageError(
            f"{where}: expected numbers, as the time field of the data has, which counts no time; "
            f"found {shown(time)}"
        )
    return since_epoch / (unit * 1e6)


def read_lines(file: str | Path) -> Iterator[Any]:
    """Yield the histories of a file of json lines.

    Raises:
        UsageError: if it cannot be read, or a line is not json.
    """
    with _reading(file), open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{file}, line {number} is no json: {error}") from None


@contextmanager
def _reading(file: str | Path) -> Iterator[None]:
    """Turn errors of reading a file into a UsageError; for use in a ``with`` block."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def is_parquet(file: str | Path) -> bool:
    """Return whether histories are read as parquet: from a folder, or a file named ``.parquet``."""
    return Path(file).suffix == ".parquet" or os.path.isdir(file)


def list_units(file: str | Path, size: int) -> list[dict[str, Any]]:
    """Split a file or folder into parts of at most ``size`` histories.

    Returns:
        The arguments of :func:`read_tables` for each part.

    Raises:
        UsageError: if the file cannot be read, or lacks the columns of histories.
    """
    units = []
    with _reading(file):
        data = ds.dataset(str(file), format="parquet")
        _require_columns(data.schema.names, file)
        for fragment in data.get_fragments():
            for group in fragment.row_groups:
                for begin in range(0, group.num_rows, size):
                    part = {"file": fragment.path, "group": group.id}
                    units.append({**part, "begin": begin, "end": min(begin + size, group.num_rows)})
    return units


def read_tables(file: str | Path, group: int, begin: int, end: int) -> Iterator[pa.Table]:
    """Yield histories ``begin`` to ``end`` of a row group of a file, at most ``ROWS`` at a time.

    Raises:
        UsageError: if the file cannot be read.
    """
    rows_read = 0
    with _reading(file), pq.ParquetFile(file) as opened:
        names = [name for name in KEYS if name in opened.schema_arrow.names]
        for batch in opened.iter_batches(ROWS, [group], names):
            part = batch.slice(max(begin - rows_read, 0), max(end - max(rows_read, begin), 0))
            rows_read += len(batch)
            if len(part):
                part.validate(full=True)  # a damaged file may hold text that is not one
                yield pa.Table.from_batches([part])
            if rows_read >= end:
                return


def _require_columns(names: list[str], where: Any) -> None:
    """Raise a UsageError unless a table has the columns of histories, each once."""
    if missing := {"id", "items"} - set(names):
        raise UsageError(
            f"{where}: no column {' and '.join(sorted(missing))}; expected id, items (lists of "
            f"names) and perhaps times (lists of numbers), found {listed(names)}"
        )
    if twice := [name for name in KEYS if names.count(name) > 1]:
        raise UsageError(f"{where}: there are several columns {twice[0]}")


def _read_table(
    table: pa.Table, item_ids: Mapping[str, int], needs_time: bool, unit: float | None
) -> Histories:
    """Read histories from columns ``id``, ``items`` (lists), and perhaps ``times`` and ``at``, as
    :func:`read_histories` does, without a Python object for each item."""
    _require_columns(table.column_names, "histories")
    ids = table["id"].to_pylist()
    if table["id"].null_count:
        raise UsageError(f"histories: the id of {table['id'].null_count} is missing")
    if not all(map(_is_name, ids[:1])):  # a column has one type
        raise UsageError(f"histories: id: expected names, found {shown(ids[0])}")
    lengths, items = _flatten(table["items"], "items", ids)
    kind = items.type.value_type if pa.types.is_dictionary(items.type) else items.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise UsageError(f"histories: items: expected lists of names, found {table['items'].type}")
    # cast first: a dictionary-encoded column would be looked up by its codes
    place = pc.index_in(items.cast(pa.string()), value_set=pa.array(item_ids, pa.string()))
    events = place.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1
    times = at = None
    if "times" in table.column_names:
        sizes, values = _flatten(table["times"], "times", ids)
        if (sizes != lengths).any():
            first = int((sizes != lengths).argmax())
            raise UsageError(
                f"histories: times of {shown(ids[first])}: expected one for each of "
                f"{lengths[first]} items, found {sizes[first]}"
            )
        times = _moments(values, "times", unit, np.repeat(np.arange(len(ids)), sizes), ids)
    elif needs_time and len(events):
        raise UsageError("histories: the model reads times: a column times of lists is needed")
    if "at" in table.column_names:
        at = _moments(table["at"].combine_chunks(), "at", unit, np.arange(len(ids)), ids)
    return Histories.packed(ids, events, lengths, times, None, at)


def _flatten(column: pa.ChunkedArray, name: str, ids: list[Any]) -> tuple[np.ndarray, pa.Array]:
    """Return the lengths [b] of a column of lists and the values [m] in them.

    Raises:
        UsageError: for a column of another type, a missing list or a missing value.
    """
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise UsageError(f"histories: {name}: expected lists, found {column.type}")
    lengths, values = pc.list_value_length(column), pc.list_flatten(column).combine_chunks()
    if lengths.null_count or values.null_count:
        first = next(n for n, one in enumerate(column.to_pylist()) if one is None or None in one)
        raise UsageError(f"histories: {name} of {shown(ids[first])}: a value is missing")
    return lengths.to_numpy().astype(np.int64), values


def _moments(
    values: pa.Array, name: str, unit: float | None, row: np.ndarray, ids: list[Any]
) -> np.ndarray:
    """Return times [m] in the unit of the time field, from numbers or timestamps.

    Args:
        values: [m] times; those of requests (``at``) may be missing, which gives NaN.
        row, ids: [m] number of the history of each value, and names of histories, for messages.

    Raises:
        UsageError: for a column of another type, or a number that is not finite.
    """
    kind = values.type
    if pa.types.is_timestamp(kind) and unit is not None:
        moments = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return moments.to_numpy(zero_copy_only=False) / (unit * 1e6)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise UsageError(f"histories: {name}: expected numbers, found {kind}")
    moments = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    is_wrong = ~(np.abs(moments) < 2**63)
    if name == "at":  # NaN stands for a request without a time
        is_wrong &= ~np.isnan(moments)
    if is_wrong.any():
        first = int(is_wrong.argmax())
        raise UsageError(
            f"histories: {name} of {shown(ids[row[first]])}: expected finite numbers, found "
            f"{moments[first]}"
        )
    return moments
