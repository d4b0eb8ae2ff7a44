"""Histories from Python, json lines, frames or parquet, validated and packed into arrays.

:func:`read_histories` takes histories in any of these forms and the ids of names; it returns
:class:`~recbole_pos.serve.scorer.Histories`, which everything behind it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from typing import Annotated, Any
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
from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.serve.scorer import NO_FIELDS, Fields, Histories, TokenIds, TokenLists
from recbole_pos.values import listed, nearest, shown, suggest

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIME_LIMIT = 2.0**63


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
        return pd.Timestamp(value)
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
_Names = Annotated[list[Name] | None, FailFast(), Plain]
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
    allowed: _Names = Bounds(None, description="items to choose from, for this history only")
    excluded: _Names = Bounds(None, description="items to leave out, for this history only")

    @model_validator(mode="before")
    @classmethod
    def _to_fields(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        return {"items": value} if _is_list(value) else value


KEYS = tuple(History.model_fields)
_RARE_KEYS = set(KEYS) - {"id", "items", "times"}  # columns that are read history by history
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
    table = _to_table(histories)
    if table is not None:
        if not any(fields.values()) and not _RARE_KEYS & set(table.column_names):
            packed = _read_columns(table, item_ids, needs_time, unit)
            if packed is not None:
                return packed
        histories = table.to_pylist()
    try:
        rows = _HISTORIES.validate_python(histories)
    except ValidationError as error:
        raise UsageError(describe_invalid(error, "histories")) from None

    errors = {}
    for number, row in enumerate(rows if needs_time else ()):
        if row.items and row.times is None:
            errors[number] = (
                f"histories[{number}]: the model reads times, so each history needs them: "
                '{"items": [...], "times": [...]}'
            )
            rows[number] = History.model_validate({"id": row.id, "items": []})

    lengths = np.array([len(row.items) for row in rows], np.int64)
    items = [item_ids.get(str(name), 0) for row in rows for name in row.items]
    at = None
    if any(row.at is not None for row in rows):
        moments = ((row.at, f"histories[{number}].at") for number, row in enumerate(rows))
        at = np.array([np.nan if x is None else read_moment(x, key, unit) for x, key in moments])
    packed = Histories.pack(
        [number if row.id is None else row.id for number, row in enumerate(rows)],
        np.array(items, np.int64),
        lengths,
        _read_times(rows, unit),
        at,
        _read_features(rows, fields, lengths),
    )
    allowed = _look_up_lists([row.allowed for row in rows], item_ids, [0])
    excluded = _look_up_lists([row.excluded for row in rows], item_ids, [])
    return replace(packed, allowed=allowed, excluded=excluded).refuse(errors)


def _to_table(histories: Any) -> pa.Table | None:
    """Return a frame or a Series of histories as a table of Arrow; None for other histories."""
    if isinstance(histories, pd.Series):
        histories = histories.rename("items").rename_axis("id").reset_index()
    if isinstance(histories, pd.DataFrame):
        if "id" not in histories and histories.index.name is not None:  # as groupby leaves it
            histories = histories.rename_axis("id").reset_index()
        require_columns([*histories], "histories")
        try:
            return pa.Table.from_pandas(histories, preserve_index=False)
        except pa.ArrowException as error:
            raise UsageError(f"histories: {' '.join(map(str, error.args))}") from error
    is_frame = hasattr(histories, "__arrow_c_stream__") and hasattr(histories, "columns")
    if isinstance(histories, pa.RecordBatch) or is_frame:
        table = pa.table(histories)
        require_columns(table.column_names, "histories")
        return table
    return None


def _read_times(histories: list[History], unit: float | None) -> np.ndarray | None:
    """Return the time of each interaction [m] in the unit of the time field.

    It is NaN in histories without times, and None if no history has any.
    """
    if all(history.times is None for history in histories):
        return None
    times: list[float] = []
    for number, history in enumerate(histories):
        num_items = len(history.items)
        if history.times is None:
            times += [np.nan] * num_items
            continue
        if len(history.times) != num_items:
            raise UsageError(
                f"histories[{number}].times: expected one for each of {num_items} items, found "
                f"{len(history.times)}"
            )
        numbers = [x for x in history.times if isinstance(x, float) and abs(x) < _TIME_LIMIT]
        if len(numbers) == num_items:  # as read_moment has them, in a third of the time
            times += numbers
        else:
            times += [read_moment(x, f"histories[{number}].times", unit) for x in history.times]
    return np.array(times)


def _look_up_lists(
    lists: list[list[str | int] | None], item_ids: Mapping[str, int], first_ids: list[int]
) -> TokenLists | None:
    """Return the ids of known items in the lists of names of histories; None if none has a list.

    ``first_ids`` stand before the ids of each list that a history has. With [0], which is the id of
    no item, ["new", "i1"] becomes [0, 2], ["new"] becomes [0], and None becomes [].
    """
    if all(names is None for names in lists):
        return None
    ids = []
    for names in lists:
        known = [item_ids[name] for name in map(str, names or ()) if name in item_ids]
        ids.append(known if names is None else first_ids + known)
    return TokenLists.from_lists(ids)


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
    """Return a field of users or (given ``lengths``) interactions.

    These are numbers [n], NaN if missing; ids [n], 0 if missing or unknown; or lists of known ids.
    """
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

    if tokens is None:
        numbers = [np.nan if value is None else value for value in flat]
        return torch.tensor(numbers, dtype=torch.float32)
    ids = tokens.ids
    if not tokens.is_list:
        value_ids = [0 if value is None else ids.get(str(value), 0) for value in flat]
        return torch.tensor(value_ids, dtype=torch.int64)
    lists = []
    for value in flat:
        names = value if isinstance(value, list) else [] if value is None else [value]
        lists.append([ids[token] for token in map(str, names) if ids.get(token)])
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
        if since_epoch != since_epoch or unit is None:  # NaT
            raise ValueError
    except (ValueError, TypeError, OverflowError, AttributeError):
        raise UsageError(
            f"{location}: expected finite numbers, or, if the time field of the data counts time, "
            f"times such as '2026-01-31T09:30:00Z', found {shown(given)}"
        ) from None
    return since_epoch / (unit * 1e6)


def require_columns(names: list[str], location: Any) -> None:
    """Raise a UsageError unless a table has the columns of histories, each once, none misspelt."""
    counts = {key: names.count(key) for key in KEYS}
    hints = (suggest(name, KEYS) for name in names if name not in KEYS)
    hint = next(filter(None, hints), "")  # other columns are not of a history
    if hint or not counts["items"] or max(counts.values()) > 1:
        raise UsageError(
            f"{location}: expected the column items (lists of names) and perhaps id and times "
            f"(lists of numbers), each once; found {listed(names)}{hint}; of interactions, take "
            "frame.groupby(USER)[ITEM].agg(list)"
        )


def _read_columns(
    table: pa.Table, item_ids: Mapping[str, int], needs_time: bool, unit: float | None
) -> Histories | None:
    """Return histories read without a Python object per item, or None if a column is unusual."""
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
