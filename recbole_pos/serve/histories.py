"""Histories from Python, json lines, pandas, Arrow or parquet, validated and packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, timezone
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic import Field as Bounds
from torch import Tensor

from recbole_pos.data.atomic_files import LARGEST
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features
from recbole_pos.serve.token_lists import TokenLists
from recbole_pos.values import listed, nearest, shown, suggest

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIME_LIMIT = 2.0**63


class TokenIds(NamedTuple):
    """Ids of a token field by name, and whether each of its values is a list of names."""

    ids: Mapping[str, int]
    is_list: bool


# by table (events or user) and field; None for a field of numbers
Fields = Mapping[str, Mapping[str, TokenIds | None]]
NO_FIELDS: Fields = {"events": {}, "user": {}}


def _is_list(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping)) or getattr(value, "ndim", 1) != 1:
        return False  # nor are numpy's numbers a list, which have the ndim 0
    return hasattr(value, "__getitem__")  # a list, an array, a Series of pandas or polars


def _to_plain(value: Any) -> Any:
    """Return a value or a list as Python's own: whole floats as int, a uuid as text."""
    if isinstance(value, list):
        return [_to_plain(x) for x in value]
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _validate_plain(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return the validated value or list; arrays and numbers of numpy are allowed."""
    value = list(value) if _is_list(value) else value
    try:
        return validate(value)
    except ValidationError:
        return validate(_to_plain(value))


Plain = WrapValidator(_validate_plain)
Name = StrictStr | StrictInt
Moment = StrictFloat | StrictStr | datetime  # read_moment says what is not finite


def _to_datetime(value: Any) -> Any:
    """Return a date (midnight) or a time of numpy as a datetime, and other values as they are."""
    if isinstance(value, np.datetime64):
        seconds = value.astype("datetime64[s]").item()  # a number beyond the year 9999
        return str(value) if isinstance(seconds, int) else pd.Timestamp(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day)
    return value


def _to_time(value: Any) -> Any:
    """Return None for NaN, which is missing, and dates, or those in a list, as datetimes."""
    if _is_list(value) and any(isinstance(x, (np.datetime64, date)) for x in value):
        return list(map(_to_datetime, value))
    is_nan = isinstance(value, (float, np.floating)) and value != value
    return None if is_nan else _to_datetime(value)


_Date, _Time = BeforeValidator(_to_datetime), BeforeValidator(_to_time)
_Number = Annotated[Annotated[StrictFloat, Bounds(ge=-LARGEST, le=LARGEST)] | None, _Time]


class History(BaseModel, extra="forbid", strict=True):
    """One history; a list of items, oldest first, is also read as one."""

    id: Annotated[Name | None, Plain] = Bounds(None, description="returned; the index by default")
    items: Annotated[list[Name], FailFast(), Plain] = Bounds(description="names, oldest first")
    times: Annotated[list[Moment] | None, FailFast(), Plain, _Time] = Bounds(
        None, description="sorted by, if any: numbers or ISO 8601"
    )
    at: Annotated[Moment | None, Plain, _Date] = Bounds(None, description="time of the request")
    events: dict[str, Any] | None = Bounds(None, description="by field, a value for each item")
    user: dict[str, Any] | None = Bounds(None, description="by field, a value")

    @model_validator(mode="before")
    @classmethod
    def _to_fields(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        return {"items": value} if _is_list(value) else value


KEYS = tuple(History.model_fields)
_HISTORIES = TypeAdapter(Annotated[list[History], FailFast()])
_NUMBERS = TypeAdapter(Annotated[list[_Number], Plain])
_NAMES = TypeAdapter(Annotated[list[Name | None], Plain])
_NAME_LISTS = TypeAdapter(Annotated[list[list[Name] | Name | None], Plain])


def describe_invalid(error: ValidationError, location: str) -> str:
    """Return pydantic's first reason as one line: its place, from ``location`` on, and the value.

    Of a place pydantic also names the member of a union that it tried, which is left out.
    """
    reasons = error.errors(include_url=False)
    first = next((x for x in reasons if x["type"] == "extra_forbidden"), reasons[0])
    for key in first["loc"]:
        if isinstance(key, int):
            location += f"[{key}]"
        elif key in KEYS or first["type"] == "extra_forbidden":
            location += f".{shown(str(key))[1:-1]}"
    hint = suggest(str(key), KEYS) if first["type"] == "extra_forbidden" else ""
    return f"{location}: {first['msg']}{hint}; found {shown(first['input'])}"


@dataclass(frozen=True)
class Histories:
    """Packed histories of b users, with m interactions of known items in all.

    Attributes:
        ids: [b] names of the histories; by default numbers from 0.
        items: [m] int64 item ids, history by history, oldest first.
        lengths: [b] int64 number of known items of each history; may be 0.
        times: [m] float64 in the unit of the time field, or None.
        unknown: [b] int64 number of unknown items of each history.
        users: [b] int64 user ids, where the histories are those of users in the dataset.
        at: [b] float64 times of the requests, NaN where one is missing; None if all are.
        features: features of the interactions and users.
        errors: index of a history -> why it gets no answer; it has no interactions here.
    """

    ids: list[Any]
    items: np.ndarray
    lengths: np.ndarray
    times: np.ndarray | None
    unknown: np.ndarray
    users: np.ndarray | None = None
    at: np.ndarray | None = None
    features: Features = field(default_factory=Features)
    errors: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def pack(
        cls,
        ids: list[Any],
        items: np.ndarray,
        lengths: np.ndarray,
        times: np.ndarray | None,
        at: np.ndarray | None,
        features: Features,
    ) -> Histories:
        """Return histories sorted by time, ties in their order, without unknown items (id 0).

        Items, times and features are [m], histories one after the other; ids, lengths and ``at``,
        the times of requests, are [b]. NaN is a missing time; ``times`` are kept only if no known
        item lacks one.
        """
        row = np.repeat(np.arange(len(ids)), lengths)
        order = np.arange(len(items)) if times is None else np.lexsort((times, row))
        order = order[items[order] > 0]
        num_known = np.bincount(row[order], minlength=len(ids))
        times = None if times is None or np.isnan(times[order]).any() else times[order]
        at = None if at is None or np.isnan(at).all() else at
        index = torch.from_numpy(order)
        features = features.map(lambda x: x[index])
        return cls(ids, items[order], num_known, times, lengths - num_known, None, at, features)

    @property
    def newest(self) -> np.ndarray:
        """Time of the newest interaction of each history [b]; -inf where there is none."""
        newest = np.full(len(self), -np.inf)
        if self.times is not None:
            not_empty = np.flatnonzero(self.lengths)
            newest[not_empty] = self.times[np.cumsum(self.lengths)[not_empty] - 1]
        return newest

    def refuse(self, errors: Mapping[int, str]) -> Histories:
        """Return the histories with further ``errors``, by index; those have no interactions then.

        Raises:
            UsageError: if no other history is left, with the first error.
        """
        if not errors:
            return self
        errors = {**self.errors, **errors}
        if len(errors) == len(self):
            raise UsageError(next(iter(errors.values())))
        lengths = self.lengths.copy()
        lengths[list(errors)] = 0
        index = np.flatnonzero(np.repeat(lengths, self.lengths))
        return replace(self._take_interactions(index, lengths), errors=errors)

    def with_request_time(self, default: float | np.ndarray) -> Histories:
        """Return the histories with ``default`` (one, or [b]) as the time of requests without one.

        A history that is requested before its newest interaction is an error of its own.
        """
        at = np.full(len(self), np.nan) if self.at is None else self.at
        at, newest = np.where(np.isnan(at), default, at), self.newest
        errors = {
            row: f"at: the history {shown(self.ids[row])} asks at {at[row]:.15g}, before its "
            f"newest interaction at {newest[row]:.15g}; give a later time"
            for row in np.flatnonzero(at < newest).tolist()
        }
        return replace(self.refuse(errors), at=at)

    def require_before(self, latest: float, unit: str) -> None:
        """Raise a UsageError for a time after ``latest``: it is in another unit than ``unit``."""
        for name, times in (("times", self.times), ("at", self.at)):
            if times is not None and len(times) and (newest := np.nanmax(times)) > latest:
                raise UsageError(
                    f"{name}: {newest:.15g} is in no year that can be meant: the time field counts "
                    f"{unit} since 1970"
                )

    def select(self, rows: np.ndarray) -> Histories:
        """Return the histories of the given rows [r], in the order of ``rows``."""
        start = (np.cumsum(self.lengths) - self.lengths)[rows]
        lengths = self.lengths[rows]
        selected = self._take_interactions(gather_index(start, lengths), lengths)
        row_index = torch.from_numpy(rows)
        return replace(
            selected,
            ids=[self.ids[row] for row in rows],
            unknown=self.unknown[rows],
            users=None if self.users is None else self.users[rows],
            at=None if self.at is None else self.at[rows],
            errors={new: self.errors[old] for new, old in enumerate(rows) if old in self.errors},
            features=selected.features.map(lambda x: x, lambda x: x[row_index]),
        )

    def list_pairs(self) -> tuple[Tensor, Tensor]:
        """Return the index of the history [m] and the item id [m] of each interaction."""
        row = torch.repeat_interleave(torch.from_numpy(self.lengths))
        return row, torch.from_numpy(self.items)

    def keep_newest(self, limit: int) -> Histories:
        """Return the histories cut to their ``limit`` newest interactions."""
        index = np.flatnonzero(self._count_steps_back() <= limit)
        return self._take_interactions(index, np.minimum(self.lengths, limit))

    def leave_out(self, steps_back: np.ndarray) -> Histories:
        """Return each history without its ``steps_back``-th newest interaction ([b], 0 for none).

        The other interactions keep their times.
        """
        index = np.flatnonzero(self._count_steps_back() != np.repeat(steps_back, self.lengths))
        return self._take_interactions(index, self.lengths - (steps_back > 0))

    def _count_steps_back(self) -> np.ndarray:
        """Return the position [m] of each interaction from the end of its history, from 1."""
        return np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.items))

    def _take_interactions(self, index: np.ndarray, lengths: np.ndarray) -> Histories:
        """Return the histories with only the interactions at ``index``, ``lengths`` [b] of each."""
        times = None if self.times is None else self.times[index]
        tensor_index = torch.from_numpy(index)
        features = self.features.map(lambda x: x[tensor_index])
        return replace(
            self, items=self.items[index], lengths=lengths, times=times, features=features
        )


def read_histories(
    histories: Any,
    item_ids: Mapping[str, int],
    needs_time: bool,
    unit: float | None = 1.0,
    fields: Fields = NO_FIELDS,
) -> Histories:
    """Validate histories, look up the ids of their items, and pack them.

    Args:
        histories: a :class:`History` of each user, a mapping with its fields, or a list of items;
            a Series of lists, by id; a DataFrame, or a table or RecordBatch of Arrow, with columns
            like the fields. Interactions with times are sorted by them. A history without times,
            where the model needs them, is an error of its own.
        item_ids: ids of the known items by name, from 1 in ascending order.
        needs_time: whether the model reads times.
        unit: seconds in the unit of the time field, for dates; None if it has none.
        fields: what the model reads under ``events`` and ``user``.

    Raises:
        UsageError: naming the history that is wrong, what was found and what was expected.
    """
    if isinstance(histories, (pa.Table, pa.RecordBatch)):
        histories = pa.table(histories)
        require_columns(histories.column_names, "histories")
        if not any(fields.values()) and not fields.keys() & set(histories.column_names):
            packed = _read_table(histories, item_ids, needs_time, unit)
            if packed is not None:
                return packed
    rows = _parse_histories(histories)
    errors = {}
    for number, row in enumerate(rows):
        if needs_time and row.items and row.times is None:
            errors[number] = (
                f"histories[{number}]: the model reads times, so each history needs them: "
                '{"items": [...], "times": [...]}'
            )
            rows[number] = History.model_validate({"id": row.id, "items": []})
    times: list[float] = []
    for number, row in enumerate(rows):
        times += _read_times(row, f"histories[{number}]", unit)
    at = [
        np.nan if row.at is None else read_moment(row.at, f"histories[{number}].at", unit)
        for number, row in enumerate(rows)
    ]
    lengths = np.array([len(row.items) for row in rows], np.int64)
    items = [item_ids.get(str(name), 0) for row in rows for name in row.items]
    packed = Histories.pack(
        [number if row.id is None else row.id for number, row in enumerate(rows)],
        np.array(items, np.int64),
        lengths,
        np.array(times),
        np.array(at),
        _read_features(rows, fields, lengths),
    )
    return packed.refuse(errors)


def _parse_histories(histories: Any) -> list[History]:
    """Return histories of any form that :func:`read_histories` takes, validated one by one."""
    if isinstance(histories, pd.DataFrame):
        if "id" not in histories and histories.index.name is not None:  # as groupby leaves it
            histories = histories.rename_axis("id").reset_index()
        require_columns([*histories], "histories")
        if "at" in histories:  # pandas has NaN where a history has no time of its own
            at = histories["at"].astype(object)
            histories = histories.assign(at=at.where(at.notna(), None))
        histories = histories.to_dict("records")
    elif hasattr(histories, "__arrow_c_stream__") and hasattr(histories, "columns"):
        table = pa.table(histories)
        require_columns(table.column_names, "histories")
        histories = table.to_pylist()
    elif isinstance(histories, pd.Series):
        histories = [{"id": name, "items": items} for name, items in histories.items()]
    elif isinstance(histories, np.ndarray):
        histories = list(histories)
    try:
        return _HISTORIES.validate_python(histories)
    except ValidationError as error:
        raise UsageError(describe_invalid(error, "histories")) from None


def _read_times(history: History, location: str, unit: float | None) -> list[float]:
    """Return the time of each interaction in the unit of the time field, or NaN for each."""
    num_items = len(history.items)
    if history.times is None:
        return [np.nan] * num_items
    if len(history.times) != num_items:
        raise UsageError(
            f"{location}.times: expected one for each of {num_items} items, found "
            f"{len(history.times)}"
        )
    return [read_moment(time, f"{location}.times", unit) for time in history.times]


def _read_features(histories: list[History], fields: Fields, lengths: np.ndarray) -> Features:
    """Return the features of histories of ``lengths`` [b]; refuse a field that is not read."""
    columns: dict[str, dict[str, Any]] = {}
    for table, readable in fields.items():
        rows = [getattr(history, table) or {} for history in histories]
        for number, row in enumerate(rows):
            unread = [name for name in row if name not in readable]
            if unread:
                raise UsageError(
                    f"histories[{number}].{table}: {shown(unread[0])} is not read by the model"
                    f"{nearest(unread[0], readable) if readable else ''}; leave it out"
                )
        counts = lengths if table == "events" else None
        columns[table] = {
            name: _read_column([row.get(name) for row in rows], tokens, f"{table}.{name}", counts)
            for name, tokens in readable.items()
        }
    return Features(columns["events"], columns["user"])


def _read_column(
    values: list[Any], tokens: TokenIds | None, name: str, lengths: np.ndarray | None
) -> Tensor | TokenLists:
    """Return a field of users or (given ``lengths``) interactions, see :func:`_to_column`."""
    adapter: TypeAdapter[Any] = _NUMBERS
    if tokens is not None:
        adapter = _NAME_LISTS if tokens.is_list else _NAMES
    flat: list[Any] = []
    for number, value in enumerate(values):
        location = f"histories[{number}].{name}"
        if lengths is None:
            value = [value]
        elif value is None:
            value = [None] * lengths[number]
        elif not _is_list(value) or len(value) != lengths[number]:
            raise UsageError(
                f"{location}: expected a list with a value for each of {lengths[number]} items "
                f"(null where there is none), found {shown(value)}"
            )
        try:
            flat += adapter.validate_python(value)
        except ValidationError as error:
            raise UsageError(describe_invalid(error, location)) from None
    return _to_column(flat, tokens)


def _to_column(values: list[Any], tokens: TokenIds | None) -> Tensor | TokenLists:
    """Return validated values of a field: numbers [n], NaN if missing; ids [n], then 0; or lists.

    Lists lack unknown tokens.
    """
    if tokens is None:
        numbers = [np.nan if value is None else value for value in values]
        return torch.tensor(numbers, dtype=torch.float32)
    ids = tokens.ids
    if not tokens.is_list:
        value_ids = [0 if value is None else ids.get(str(value), 0) for value in values]
        return torch.tensor(value_ids, dtype=torch.int64)
    lists = []
    for value in values:
        names = value if isinstance(value, list) else [] if value is None else [value]
        lists.append([ids[name] for name in map(str, names) if ids.get(name)])
    return TokenLists.from_lists(lists)


def read_moment(time: Any, location: str, unit: float | None) -> float:
    """Return a time in the unit of the time field, counted from 1970-01-01 UTC.

    Args:
        time: a number in that unit, a datetime, a date (midnight), or text in ISO 8601; UTC if it
            names no zone.
        location: the time's field, for error messages.
        unit: seconds in the unit; None if the field only orders interactions.
    """
    given, time = time, time if isinstance(time, float) else _to_plain(_to_datetime(time))
    if isinstance(time, (float, int)) and not isinstance(time, bool):
        if abs(time) < _TIME_LIMIT:  # false for NaN
            return float(time)
    try:
        if isinstance(time, str):  # Python 3.10 does not read the Z that stands for UTC
            time = datetime.fromisoformat(f"{time[:-1]}+00:00" if time[-1:] in "Zz" else time)
        time = time if time.tzinfo else time.replace(tzinfo=timezone.utc)
        since_epoch = (time - _EPOCH) / timedelta(microseconds=1)
        if since_epoch != since_epoch:  # NaT
            raise ValueError
    except (ValueError, TypeError, OverflowError, AttributeError):
        raise UsageError(
            f"{location}: expected finite numbers, or times such as '2026-01-31T09:30:00Z', found "
            f"{shown(given)}"
        ) from None
    if unit is None:
        raise UsageError(
            f"{location}: expected numbers, as the time field of the data has, which counts no "
            f"time; found {shown(str(time))}"
        )
    return since_epoch / (unit * 1e6)


def require_columns(names: list[str], location: Any) -> None:
    """Raise a UsageError unless a table has the columns of histories, each once, none misspelt."""
    counts = {key: names.count(key) for key in KEYS}
    if not (counts["items"] and max(counts.values()) == 1):
        raise UsageError(
            f"{location}: expected the column items (lists of names) and perhaps id and times "
            f"(lists of numbers), each once; found {listed(names)}; of interactions, take "
            "frame.groupby(USER)[ITEM].agg(list)"
        )
    for name in names:
        if name not in KEYS and (hint := suggest(name, KEYS)):  # others are not of a history
            raise UsageError(f"{location}: unknown column {shown(name)}{hint}")


def _read_table(
    table: pa.Table, item_ids: Mapping[str, int], needs_time: bool, unit: float | None
) -> Histories | None:
    """Return histories read without a Python object per item, or None if a column is unusual."""
    if "at" in table.column_names:
        return None
    columns = {name: table[name].combine_chunks() for name in KEYS if name in table.column_names}
    lists = [columns[name] for name in ("items", "times") if name in columns]
    if not all(map(_is_full_list, lists)) or (needs_time and "times" not in columns):
        return None
    ids = columns.get("id", pa.array(range(len(table)), pa.int64()))
    names = columns["items"].flatten()
    if ids.null_count or not (_holds_names(ids) and _holds_names(names)):
        return None
    lengths, *lengths_of_times = (
        pc.list_value_length(x).to_numpy().astype(np.int64) for x in lists
    )
    times = None
    if "times" in columns:
        times = _to_moments(columns["times"].flatten(), unit)
        if times is None or (lengths_of_times[0] != lengths).any():
            return None
        if not (np.abs(times) < _TIME_LIMIT).all():  # nor NaN
            return None
    items = _look_up(names.cast(pa.large_string()), item_ids)
    return Histories.pack(ids.to_pylist(), items, lengths, times, None, Features())


def _look_up(names: pa.Array, ids: Mapping[str, int]) -> np.ndarray:
    """Return the id of each name [m], 0 for an unknown one; equal names are looked up once."""
    encoded = names.dictionary_encode()
    distinct = np.array([ids.get(name, 0) for name in encoded.dictionary.to_pylist()], np.int64)
    return distinct[encoded.indices.to_numpy()]


def _is_full_list(column: pa.Array) -> bool:
    """Return whether a column has lists, none of which is or contains a null."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return is_list and not (column.null_count or column.flatten().null_count)


def _holds_names(values: pa.Array) -> bool:
    """Return whether values are text or whole numbers."""
    values = values.dictionary if pa.types.is_dictionary(values.type) else values
    is_name = pa.types.is_integer, pa.types.is_string, pa.types.is_large_string
    return any(check(values.type) for check in is_name)


def _to_moments(values: pa.Array, unit: float | None) -> np.ndarray | None:
    """Return times [m] in the unit of the time field; None for another type."""
    if pa.types.is_timestamp(values.type) and unit is not None:
        since_epoch = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return since_epoch.to_numpy() / (unit * 1e6)
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        return values.cast(pa.float64(), safe=False).to_numpy()
    return None
