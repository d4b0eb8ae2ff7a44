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
_TIME_LIMIT = 2.0**63  # times from here on do not fit into int64, and are refused


def _is_list(value: Any) -> bool:
    # Text, bytes and mappings are values; arrays of several dimensions are no lists. What has no
    # ``ndim``, such as a list of Python, counts as one dimension.
    if isinstance(value, (str, bytes, Mapping)) or getattr(value, "ndim", 1) != 1:
        return False  # nor are numpy's numbers a list, which have the ndim 0
    return hasattr(value, "__getitem__")  # a list, an array, a Series of pandas or polars


def _to_plain(value: Any) -> Any:
    """Return a value, or each value of a list, as a str or int, which the name of an item may be.

    A UUID becomes text, a number of numpy one of Python, and a whole float such as 3.0 the int 3,
    since pandas turns ids into floats where one is missing. Other values are returned as they are.
    """
    if isinstance(value, list):
        return [_to_plain(x) for x in value]
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _validate_plain(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return a value as pydantic validates it, also where it is an array or number of numpy.

    Args:
        value: what the user gives. Arrays and Series become lists.
        validate: pydantic's own validation of the field. What it refuses is converted into types of
            Python and tried again: the conversion is slow, and seldom needed.
    """
    # _is_list is true for lists, arrays and Series, but not for text; _to_plain converts.
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
        return pd.Timestamp(value)  # a subclass of datetime
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day)
    return value


def _to_time(value: Any) -> Any:
    """Return dates and times of numpy as datetimes, also those in a list, and NaN as None.

    None means that the value is missing. All other values are returned as they are.
    """
    # A datetime is a date, too; _to_datetime converts what is none yet.
    if _is_list(value) and any(isinstance(x, (np.datetime64, date)) for x in value):
        return list(map(_to_datetime, value))
    is_nan = isinstance(value, (float, np.floating)) and value != value
    return None if is_nan else _to_datetime(value)


# Types of the fields below: what pydantic does with a value before it checks it.
_Date, _Time = BeforeValidator(_to_datetime), BeforeValidator(_to_time)
_Names = Annotated[list[Name] | None, FailFast(), Plain]
_Number = Annotated[Annotated[StrictFloat, Bounds(ge=-LARGEST, le=LARGEST)] | None, _Time]


class History(BaseModel, extra="forbid", strict=True):
    """The history of one person as users write it: items, oldest first, and what belongs to them.

    A plain list of items is also read as a history.
    """

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
        # pydantic calls this with what the user gives, before it reads the fields. What is neither
        # a mapping nor a list is left for pydantic to read or refuse.
        if isinstance(value, Mapping):
            return dict(value)
        return {"items": value} if _is_list(value) else value


KEYS = tuple(History.model_fields)  # names of the fields of a history, and of columns of a table
_RARE_KEYS = set(KEYS) - {"id", "items", "times"}  # columns that are read history by history
_HISTORIES = TypeAdapter(Annotated[list[History], FailFast()])
_NUMBERS = TypeAdapter(Annotated[list[_Number], Plain])
_NAMES = TypeAdapter(Annotated[list[Name | None], Plain])
_NAME_LISTS = TypeAdapter(Annotated[list[list[Name] | Name | None], Plain])


def describe_invalid(error: ValidationError, location: str) -> str:
    """Return why pydantic, which checks what users give, refuses a value: one line for the user.

    For example ``histories[3].items[0]: Input should be a valid string; found 1.5``.

    Args:
        error: the error of pydantic.
        location: what was validated, such as ``histories``; the place in it is appended.
    """
    # Of several errors take a misspelt key ("extra_forbidden": an unknown one), which explains the
    # errors that follow from it.
    reasons = error.errors(include_url=False)
    misspelt = [reason for reason in reasons if reason["type"] == "extra_forbidden"]
    reason = (misspelt or reasons)[0]

    # Keys of the place are indices, names of fields (KEYS has those of a history), and names of
    # types that pydantic has tried, which are left out.
    for key in reason["loc"]:
        if isinstance(key, int):
            location += f"[{key}]"
        elif key in KEYS or misspelt:
            location += f".{shown(str(key))[1:-1]}"  # shortened, without its quotation marks

    hint = suggest(str(reason["loc"][-1]), KEYS) if misspelt else ""
    return f"{location}: {reason['msg']}{hint}; found {shown(reason['input'])}"


def read_histories(
    histories: Any,
    item_ids: Mapping[str, int],
    needs_time: bool,
    unit: float | None = 1.0,
    fields: Fields = NO_FIELDS,
) -> Histories:
    """Turn histories, in any form that users may give, into arrays with the ids of their items.

    Args:
        histories: a :class:`History` of each user, a mapping with its fields, or a list of items;
            a Series of lists, by id; a DataFrame, or a table or RecordBatch of Arrow, with columns
            like the fields. Interactions with times are sorted by them.
        item_ids: ids of the known items by name, from 1 in ascending order.
        needs_time: whether the model reads times.
        unit: how many seconds one unit of the time field has (0.001 for milliseconds), by which
            dates are converted; None if the field has no unit.
        fields: features that the model reads: ``events`` or ``user`` -> name of the feature -> ids
            of its tokens, or None for numbers.

    Returns:
        The histories in their order. One without times, where the model needs them, has no
        interactions and a text in ``errors``, so that the others still get an answer.

    Raises:
        UsageError: naming the history that is malformed, what was found and what was expected.
    """
    # A table with only the usual columns (_RARE_KEYS are the others), for a model without features,
    # is read column by column, which is much faster; None if a value needs the other way.
    table = _to_table(histories)
    if table is not None:
        if not any(fields.values()) and not _RARE_KEYS & set(table.column_names):
            packed = _read_columns(table, item_ids, needs_time, unit)
            if packed is not None:
                return packed
        histories = table.to_pylist()

    # Everything else is validated history by history: pydantic makes a History of each.
    try:
        rows = _HISTORIES.validate_python(histories)
    except ValidationError as error:
        raise UsageError(describe_invalid(error, "histories")) from None

    # A history that lacks the times that the model needs becomes an empty one with an error;
    # `refuse` keeps it in its place at the end, so that the others get their answers.
    errors = {}
    for number, row in enumerate(rows if needs_time else ()):
        if row.items and row.times is None:
            errors[number] = (
                f"histories[{number}]: the model reads times, so each history needs them: "
                '{"items": [...], "times": [...]}'
            )
            rows[number] = History.model_validate({"id": row.id, "items": []})

    # Items of all histories one after the other; 0 is an unknown item, which pack leaves out.
    lengths = np.array([len(row.items) for row in rows], np.int64)
    items = [item_ids.get(str(name), 0) for row in rows for name in row.items]

    # Times of the requests, NaN where a history gives none.
    at = None
    if any(row.at is not None for row in rows):
        moments = ((row.at, f"histories[{number}].at") for number, row in enumerate(rows))
        at = np.array([np.nan if x is None else read_moment(x, key, unit) for x, key in moments])

    # Packed: arrays over the interactions of all histories, sorted by time within each.
    packed = Histories.pack(
        [number if row.id is None else row.id for number, row in enumerate(rows)],
        np.array(items, np.int64),
        lengths,
        _read_times(rows, unit),
        at,
        _read_features(rows, fields, lengths),
    )

    # The id 0 in front marks a list of allowed items that is given, though it may have no known
    # item: nothing is recommended then. An empty list allows everything.
    allowed = _look_up_lists([row.allowed for row in rows], item_ids, [0])
    excluded = _look_up_lists([row.excluded for row in rows], item_ids, [])
    return replace(packed, allowed=allowed, excluded=excluded).refuse(errors)


def _to_table(histories: Any) -> pa.Table | None:
    """Return a frame or a Series of histories as a table of Arrow; None for any other form.

    The index of a Series becomes the column ``id``, and so does the named index of a DataFrame that
    has no such column.

    Raises:
        UsageError: if the columns are not those of histories, or Arrow cannot hold the values.
    """
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

    # Frames of polars, DuckDB and pyarrow have both attributes; a stream without names has one.
    is_frame = hasattr(histories, "__arrow_c_stream__") and hasattr(histories, "columns")
    if isinstance(histories, pa.RecordBatch) or is_frame:
        table = pa.table(histories)
        require_columns(table.column_names, "histories")
        return table
    return None


def _read_times(histories: list[History], unit: float | None) -> np.ndarray | None:
    """Return the times of the interactions of all histories, one history after the other.

    Args:
        histories: the validated histories.
        unit: how many seconds one unit of the time field of the data has, such as 0.001, to convert
            dates; None if the field only orders interactions.

    Returns:
        [m] float64 in that unit, NaN for interactions of histories without times; None if no
        history has times.

    Raises:
        UsageError: if a history has more or fewer times than items, or a value is no time.
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

        # Plain numbers need no conversion by read_moment, which takes three times as long. Times
        # from _TIME_LIMIT on, NaN and infinity are left to it: it refuses them.
        numbers = [x for x in history.times if isinstance(x, float) and abs(x) < _TIME_LIMIT]
        if len(numbers) == num_items:
            times += numbers
        else:
            times += [read_moment(x, f"histories[{number}].times", unit) for x in history.times]
    return np.array(times)


def _look_up_lists(
    lists: list[list[str | int] | None], item_ids: Mapping[str, int], first_ids: list[int]
) -> TokenLists | None:
    """Return the ids of the known items in a list of item names for each history.

    Args:
        lists: [b] a list of names for each history, or None where a history has no list.
        item_ids: id of each known item by name; other names are left out.
        first_ids: ids to put before the ids of each list, but not where a history has no list.
            With [0], which is the id of no item, the lists [["new", "i1"], ["new"], None] become
            [[0, 2], [0], []], so that a list of unknown names differs from no list.

    Returns:
        [b] lists of ids; None if no history has a list.
    """
    if all(names is None for names in lists):
        return None
    ids = []
    for names in lists:
        known = [item_ids[name] for name in map(str, names or ()) if name in item_ids]
        ids.append(known if names is None else first_ids + known)
    return TokenLists.from_lists(ids)


def _read_features(histories: list[History], fields: Fields, lengths: np.ndarray) -> Features:
    """Return the features of interactions and users that histories have beside their items.

    Args:
        histories: the b validated histories, with features under ``events`` and ``user``.
        fields: the features that the model reads: ``events`` or ``user`` -> name of the feature ->
            ids of its tokens, or None for numbers.
        lengths: [b] number of items of each history.

    Raises:
        UsageError: if a history has a feature that the model does not read, or a wrong value.
    """
    # For each table (``events``, ``user``), refuse names that the model does not read; ``nearest``
    # suggests a name that is spelt alike.
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

        # A feature of interactions has a value for each item, one of users a single value.
        counts = lengths if table == "events" else None
        columns[table] = {
            name: _read_column([row.get(name) for row in rows], tokens, f"{table}.{name}", counts)
            for name, tokens in readable.items()
        }
    return Features(columns["events"], columns["user"])


def _read_column(
    values: list[Any], tokens: TokenIds | None, name: str, lengths: np.ndarray | None
) -> Tensor | TokenLists:
    """Return the values of one feature of all histories as numbers or ids of tokens.

    Args:
        values: [b] what each history has for the feature; None if nothing.
        tokens: the ids of the feature's tokens; None for a feature of numbers.
        name: the feature as in messages, such as ``events.rating``.
        lengths: [b] number of items of each history, for a feature that has a value for each
            interaction; None for a feature of users, which has a single value for each history.

    Returns:
        n values, where n is b or the number of all interactions: numbers [n] float32, NaN if
        missing; or ids [n] int64, 0 if missing or unknown; or n lists of the known ids.

    Raises:
        UsageError: if a value has the wrong type, or interactions have too many or few values.
    """
    # Validate the values of each history, and put them one after the other.
    # An adapter is pydantic's check of a type: lists of numbers (_NUMBERS), of names (_NAMES), or
    # of lists of names (_NAME_LISTS); each value may also be None.
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

    # Convert the values by the kind of the feature: number, token, or list of tokens. The id 0 is
    # padding, so ``ids.get`` leaves it out of lists as it does unknown names.
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
        unit: how many seconds one unit has; None if the field only orders interactions, so that
            only numbers are allowed.

    Raises:
        UsageError: for anything else.
    """
    original = time
    if not isinstance(time, float):
        time = _to_plain(_to_datetime(time))  # types of numpy become Python's, dates datetimes
    if isinstance(time, (float, int)) and not isinstance(time, bool):
        if abs(time) < _TIME_LIMIT:  # what int64 can hold; false for NaN, which fails below
            return float(time)

    # Everything but a number becomes a datetime, in UTC if it names no zone. A value that is no
    # time raises one of the exceptions below.
    try:
        if isinstance(time, str):  # Python 3.10 does not read the Z that stands for UTC
            time = datetime.fromisoformat(f"{time[:-1]}+00:00" if time[-1:] in "Zz" else time)
        time = time if time.tzinfo else time.replace(tzinfo=timezone.utc)
        since_epoch = (time - _EPOCH) / timedelta(microseconds=1)
        is_missing = since_epoch != since_epoch  # pandas' NaT gives NaN, which differs from itself
        if is_missing or unit is None:
            raise ValueError
    except (ValueError, TypeError, OverflowError, AttributeError):
        raise UsageError(
            f"{location}: expected finite numbers, or, if the time field of the data counts time, "
            f"times such as '2026-01-31T09:30:00Z', found {shown(original)}"
        ) from None
    return since_epoch / (unit * 1e6)


def require_columns(names: list[str], location: Any) -> None:
    """Raise a UsageError unless a table of histories has the columns that it needs.

    It must have the column ``items``, no column of a history twice, and none that looks like a
    misspelt one, such as ``item``. Any other column is allowed and not read.

    Args:
        names: names of the columns.
        location: what has the columns, for the message: a file, or ``histories``.
    """
    counts = {key: names.count(key) for key in KEYS}  # the columns that are read
    hints = (suggest(name, KEYS) for name in names if name not in KEYS)
    hint = next(filter(None, hints), "")  # the first suggestion; empty if no name is like a key
    if hint or not counts["items"] or max(counts.values()) > 1:
        raise UsageError(
            f"{location}: expected the column items (lists of names) and perhaps id and times "
            f"(lists of numbers), each once; found {listed(names)}{hint}; of interactions, take "
            "frame.groupby(USER)[ITEM].agg(list)"
        )


def _read_columns(
    table: pa.Table, item_ids: Mapping[str, int], needs_time: bool, unit: float | None
) -> Histories | None:
    """Return the histories of a table, read column by column without a Python object per item.

    Args:
        table: the columns ``items`` and perhaps ``id`` and ``times``, a history in each row.
        item_ids: id of each known item by name.
        needs_time: whether the model reads times.
        unit: how many seconds one unit of the time field has; None if it only orders interactions.

    Returns:
        The histories; None if a column has nulls or another type than usual, or a number of times
        or a time is wrong: then the slower reading, row by row, must say what is wrong.
    """
    # Lists must have no nulls (_is_full_list), and times be there if the model needs them. KEYS are
    # the names of columns that are read.
    columns = {name: table[name].combine_chunks() for name in KEYS if name in table.column_names}
    lists = [columns[name] for name in ("items", "times") if name in columns]
    if not all(map(_is_full_list, lists)) or (needs_time and "times" not in columns):
        return None

    # Names must be text or whole numbers (_holds_names); without ids, histories get numbers from 0.
    # ``flatten`` puts the names of all lists one after the other.
    ids = columns.get("id", pa.array(range(len(table)), pa.int64()))
    names = columns["items"].flatten()
    if ids.null_count or not (_holds_names(ids) and _holds_names(names)):
        return None

    # As many times as items in each history, all of them finite. ``_to_moments`` returns None for a
    # column of another type than numbers or timestamps.
    lengths, *lengths_of_times = (
        pc.list_value_length(x).to_numpy().astype(np.int64) for x in lists
    )
    times = None
    if "times" in columns:
        times = _to_moments(columns["times"].flatten(), unit)
        if times is None or (lengths_of_times[0] != lengths).any():
            return None
        if not (np.abs(times) < _TIME_LIMIT).all():  # false for NaN, too
            return None

    # Ids of the items, 0 for unknown names, which ``pack`` leaves out.
    items = _look_up(names.cast(pa.large_string()), item_ids)
    return Histories.pack(ids.to_pylist(), items, lengths, times, None, Features())


def _look_up(names: pa.Array, ids: Mapping[str, int]) -> np.ndarray:
    """Return the id of each name [m], 0 for an unknown one; equal names are looked up once."""
    # Arrow's dictionary has each name once, and for each of the m names its index there.
    encoded = names.dictionary_encode()
    distinct = np.array([ids.get(name, 0) for name in encoded.dictionary.to_pylist()], np.int64)
    return distinct[encoded.indices.to_numpy()]


def _is_full_list(column: pa.Array) -> bool:
    """Return whether a column has lists, none of which is or contains a null."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return is_list and not (column.null_count or column.flatten().null_count)


def _holds_names(values: pa.Array) -> bool:
    """Return whether values are text or whole numbers."""
    # A dictionary array (a category of pandas) has its values in ``dictionary``.
    values = values.dictionary if pa.types.is_dictionary(values.type) else values
    is_name = pa.types.is_integer, pa.types.is_string, pa.types.is_large_string
    return any(check(values.type) for check in is_name)


def _to_moments(values: pa.Array, unit: float | None) -> np.ndarray | None:
    """Return m times of a column as float64 in the unit of the time field of the data.

    Args:
        values: [m] timestamps, or numbers that are in that unit already.
        unit: how many seconds one unit has; None if the field only orders interactions.

    Returns:
        [m] float64; None if the column is of another type, or has timestamps without a unit.
    """
    if pa.types.is_timestamp(values.type) and unit is not None:
        # Microseconds since 1970. ``safe=False``: finer digits are cut off without an error.
        since_epoch = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return since_epoch.to_numpy() / (unit * 1e6)
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        return values.cast(pa.float64(), safe=False).to_numpy()
    return None
