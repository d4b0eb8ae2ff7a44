"""Histories from Python, json lines, frames or parquet, validated and packed into arrays.

:func:`read_histories` takes histories in any of these forms and the ids of names. It returns
:class:`~recbole_pos.serve.scorer.Histories`, which everything behind it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from typing import Annotated, Any

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
    model_validator,
)
from pydantic import Field as Bounds
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recbole_pos.errors import UsageError
from recbole_pos.layers.sequence_batch import Features
from recbole_pos.serve.scorer import NO_FIELDS, Fields, Histories, TokenIds
from recbole_pos.values import listed, nearest, shown, suggest

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIME_LIMIT = 2.0**63  # times from here on do not fit into int64, and are refused


def _convert_numpy(value: Any) -> Any:
    """Return a time of numpy, or each one in a list, as a Timestamp; other values as they are.

    Times of numpy convert to floats, so pydantic would take them for numbers.
    """
    if isinstance(value, list | np.ndarray):
        return [_convert_numpy(x) for x in value]
    return pd.Timestamp(value) if isinstance(value, np.datetime64) else value


def _to_datetime(value: Any) -> datetime:
    """Return a datetime, a date (midnight) or text in ISO 8601 as a datetime.

    Raises:
        ValueError: for anything else, such as a number, other text, or a missing time (NaT).
    """
    if isinstance(value, str):  # Python 3.10 does not read the Z that stands for UTC
        with suppress(ValueError):
            return datetime.fromisoformat(value.upper().replace("Z", "+00:00"))
    if isinstance(value, date) and value is not pd.NaT:  # a datetime is a date, too
        return pd.Timestamp(value).to_pydatetime(warn=False)
    raise ValueError("expected a finite number, or a time such as '2026-01-31T09:30:00Z'")


def _to_name(value: Any) -> Any:
    """Return a whole number as text, as names are written; other values as they are."""
    if isinstance(value, (float, np.integer)) and float(value).is_integer():
        return str(int(value))
    return value


# Types that pydantic reads. A name of an item or user may also be a whole number, such as 3 or the
# 3.0 that pandas makes of it in a column with empty cells, which becomes text. A moment is a number
# in the unit of the time field, or a time as `_to_datetime` takes it.
_FIRST_THAT_FITS = Bounds(union_mode="left_to_right")
Name = Annotated[
    StrictStr | StrictInt | Annotated[str, BeforeValidator(_to_name)], _FIRST_THAT_FITS
]
_Number = Annotated[StrictFloat, Bounds(gt=-_TIME_LIMIT, lt=_TIME_LIMIT)]
_Time = Annotated[datetime, BeforeValidator(_to_datetime)]
_Moment = Annotated[_Number | _Time, _FIRST_THAT_FITS]
Moment = Annotated[_Moment, BeforeValidator(_convert_numpy)]


class History(BaseModel, extra="forbid"):
    """The history of one person as users write it: items, oldest first, and what belongs to them.

    A plain list of items is also read as a history.
    """

    id: Name | None = Bounds(None, description="returned; the index by default")
    items: Annotated[list[Name], FailFast()] = Bounds(description="names, oldest first")
    times: Annotated[list[_Moment] | None, FailFast(), BeforeValidator(_convert_numpy)] = Bounds(
        None, description="sorted by, if any: numbers or ISO 8601"
    )
    at: Moment | None = Bounds(None, description="time of the request")
    events: dict[str, Any] | None = Bounds(None, description="by field, a value for each item")
    user: dict[str, Any] | None = Bounds(None, description="by field, a value")
    allowed: list[Name] | None = Bounds(None, description="items to choose from, of this history")
    excluded: list[Name] | None = Bounds(None, description="items to leave out, of this history")

    @model_validator(mode="before")
    @classmethod
    def _to_fields(cls, value: Any) -> Any:
        # pydantic calls this with what the user gives: a mapping of fields, a list of items, or a
        # History that was validated before.
        if isinstance(value, Mapping):
            return dict(value)
        return value if isinstance(value, cls) else {"items": value}


KEYS = tuple(History.model_fields)  # names of the fields of a history, and of columns of a table
_RARE_KEYS = set(KEYS) - {"id", "items", "times"}  # columns that are read history by history
_HISTORIES = TypeAdapter(Annotated[list[History], FailFast()])
_MOMENT = TypeAdapter(Moment)
# Values of a feature, one for each interaction or user: numbers, names, or lists of names.
_NUMBERS = TypeAdapter(list[StrictFloat | None])
_NAMES = TypeAdapter(list[Name | None])
_NAME_LISTS = TypeAdapter(list[list[Name] | Name | None])
# Types of Arrow that columns have which are read without a Python object for each value.
_LIST_TYPES = pa.types.is_list, pa.types.is_large_list
_NAME_TYPES = pa.types.is_integer, pa.types.is_string, pa.types.is_large_string
_NUMBER_TYPES = pa.types.is_integer, pa.types.is_floating


def describe_invalid(error: ValidationError, location: str) -> str:
    """Return why pydantic, which checks what users give, refuses a value: one line for the user.

    For example ``histories[3].items[0]: Input should be a valid string; found 1.5``.

    Args:
        error: the error of pydantic.
        location: what was validated, such as ``histories``; the place in it is appended.
    """
    # Pydantic lists a reason for each value that does not fit, and for each type that it has tried.
    # Report the first misspelt name, called "extra_forbidden", since it explains other reasons:
    # with "item" in place of "items", "items" is missing, too. Else report the first reason with a
    # message of this package ("value_error"), or else the first of all.
    reasons = error.errors(include_url=False)
    misspelt = next((each for each in reasons if each["type"] == "extra_forbidden"), None)
    own = next((each for each in reasons if each["type"] == "value_error"), None)
    reason = misspelt or own or reasons[0]

    # The place of the value is a path such as (3, "items", 0, "str"), which becomes [3].items[0].
    # Names of types that pydantic has tried, here "str", are left out; KEYS are names of fields.
    for key in reason["loc"]:
        if isinstance(key, int):
            location += f"[{key}]"
        elif key in KEYS:
            location += f".{key}"
    if misspelt:
        name = str(reason["loc"][-1])
        return f"{location}: {shown(name)} is not the name of a field{suggest(name, KEYS)}"
    message = reason["msg"].removeprefix("Value error, ")
    return f"{location}: {message}; found {shown(reason['input'])}"


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
        item_ids: id of each known item by name, from 1.
        needs_time: whether the model reads times.
        unit: how many seconds one unit of the time field has (0.001 for milliseconds), by which
            dates are converted; None if the field only orders interactions.
        fields: features that the model reads: ``events`` or ``user`` -> name of the feature -> ids
            of its tokens, or None for numbers.

    Returns:
        The histories in their order.

    Raises:
        UsageError: naming the history that is malformed, or has no times where the model needs
            them; what was found and what was expected.
    """
    # Most tables can be read column by column, which is much faster; else the result is None.
    table = _to_table(histories)
    if table is not None:
        packed = _read_columns(table, item_ids, needs_time, fields)
        if packed is not None:
            return packed
        histories = table.to_pylist()

    # Everything else is validated history by history: pydantic makes a History of each.
    try:
        rows = _HISTORIES.validate_python(histories)
    except ValidationError as error:
        raise UsageError(describe_invalid(error, "histories")) from None

    for number, row in enumerate(rows):
        if needs_time and row.items and row.times is None:
            raise UsageError(
                f"histories[{number}]: the model reads times, so each history needs them: "
                '{"items": [...], "times": [...]}'
            )

    # Items of all histories, one history after the other; 0 is an unknown item, which pack leaves
    # out. Times of the requests are NaN where a history gives none.
    lengths = np.array([len(row.items) for row in rows], np.int64)
    items = [item_ids.get(str(name), 0) for row in rows for name in row.items]
    at = None
    if any(row.at is not None for row in rows):
        moments = [np.nan if row.at is None else row.at for row in rows]
        at = np.array([_to_unit(x, f"histories[{n}].at", unit) for n, x in enumerate(moments)])
    packed = Histories.pack(
        ids=[number if row.id is None else row.id for number, row in enumerate(rows)],
        items=np.array(items, np.int64),
        lengths=lengths,
        times=_read_times(rows, unit),
        at=at,
        features=_read_features(rows, fields, lengths),
    )

    packed = _add_item_lists(packed, rows, item_ids)

    # Times are kept only if all histories have them (one without has NaN); a model that needs times
    # gets no others.
    if packed.times is not None and np.isnan(packed.times).any():
        packed = replace(packed, times=None)
    return packed


def _add_item_lists(
    packed: Histories, rows: list[History], item_ids: Mapping[str, int]
) -> Histories:
    """Return the histories with the items that each one may get, or may not get, as ids.

    A history without names to choose from, or with an empty list of them, may get any item; one
    with unknown names only gets nothing.
    """
    if any(row.allowed for row in rows):
        allowed = [_find_ids(row.allowed, item_ids) if row.allowed else None for row in rows]
        packed = replace(packed, allowed=allowed)
    if any(row.excluded for row in rows):
        excluded = [_find_ids(row.excluded or [], item_ids) for row in rows]
        packed = replace(packed, excluded=excluded)
    return packed


def _find_ids(names: list[Any], item_ids: Mapping[str, int]) -> Tensor:
    """Return the ids [n] of those names that are of known items."""
    ids = [item_ids[str(name)] for name in names if str(name) in item_ids]
    return torch.tensor(ids, dtype=torch.int64)


def _to_table(histories: Any) -> pa.Table | None:
    """Return histories as a table of Arrow: a frame, a Series, or plain lists of names.

    None for any other form. The index of a Series becomes the column ``id``, and so does the named
    index of a DataFrame that has no such column.

    Raises:
        UsageError: if the columns are not those of histories, or Arrow cannot hold the values.
    """
    # Lists of names. Arrow refuses them if a name is no text: then they are read in another way.
    if isinstance(histories, list):
        if all(isinstance(items, list) for items in histories):
            with suppress(pa.ArrowException, UnicodeError):
                return pa.table({"items": pa.array(histories, pa.list_(pa.string()))})
        return None

    # Frames. Those of polars, DuckDB and pyarrow are streams of Arrow with names of columns.
    if isinstance(histories, (pd.Series, pd.DataFrame)):
        table = _convert_pandas(histories)
    elif isinstance(histories, pa.RecordBatch):
        table = pa.table(histories)
    elif hasattr(histories, "__arrow_c_stream__") and hasattr(histories, "columns"):
        table = pa.table(histories)
    else:
        return None
    require_columns(table.column_names, "histories")
    return table


def _convert_pandas(frame: pd.Series | pd.DataFrame) -> pa.Table:
    """Return histories of pandas as a table of Arrow; see :func:`_to_table`.

    Raises:
        UsageError: if Arrow cannot hold the values.
    """
    # A Series of lists becomes a frame with the column ``items`` and the index ``id``; and an index
    # that has a name becomes the column ``id``, if there is no such column.
    if isinstance(frame, pd.Series):
        frame = frame.rename("items").rename_axis("id").to_frame()
    if "id" not in frame and frame.index.name is not None:  # as groupby leaves it
        frame = frame.rename_axis("id").reset_index()
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except pa.ArrowException as error:
        raise UsageError(f"histories: {' '.join(map(str, error.args))}") from error


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
        UsageError: if a history has more or fewer times than items, or dates without a unit.
    """
    if all(history.times is None for history in histories):
        return None

    # ``_to_unit`` makes a number of a date, and leaves a number as it is.
    times: list[float] = []
    for number, history in enumerate(histories):
        location, num_items = f"histories[{number}].times", len(history.items)
        if history.times is None:
            times += [np.nan] * num_items
        elif len(history.times) != num_items:
            raise UsageError(
                f"{location}: expected one for each of {num_items} items, found "
                f"{len(history.times)}"
            )
        else:
            times += [_to_unit(time, location, unit) for time in history.times]
    return np.array(times)


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
    columns: dict[str, dict[str, Tensor]] = {}
    for table, readable in fields.items():
        # Of each history: name of the feature -> what the user gives for it.
        rows = [getattr(history, table) or {} for history in histories]
        _refuse_unread_features(rows, table, readable)

        columns[table] = {}
        for name, tokens in readable.items():
            values: list[Any] = []  # of all histories, one history after the other
            for number, row in enumerate(rows):
                # Interactions have a list with a value for each item, or None if all values are
                # missing. A user has one value.
                given: Any = row.get(name)
                num_values = int(lengths[number])
                if table == "user":
                    given, num_values = [given], 1
                elif given is None:
                    given = [None] * num_values
                location = f"histories[{number}].{table}.{name}"
                values += _validate_feature(given, num_values, tokens, location)
            columns[table][name] = _encode_feature(values, tokens)  # a tensor of numbers or ids
    return Features(columns["events"], columns["user"])


def _refuse_unread_features(
    rows: list[dict[str, Any]], table: str, readable: Mapping[str, Any]
) -> None:
    """Raise a UsageError for a feature that the model does not read.

    Args:
        rows: of each history, its features by name.
        table: which features these are, ``events`` or ``user``, for the message.
        readable: the features that the model reads, by name.
    """
    for number, row in enumerate(rows):
        for name in row.keys() - readable.keys():
            suggestion = nearest(name, readable) if readable else ""
            raise UsageError(
                f"histories[{number}].{table}: {shown(name)} is not read by the model"
                f"{suggestion}; leave it out"
            )


def _validate_feature(
    values: Any, length: int, tokens: TokenIds | None, location: str
) -> list[Any]:
    """Return the values of a feature in one history as a list of numbers, names or lists of names.

    Args:
        values: what the user gives; None stands for a missing value.
        length: how many values there must be.
        tokens: the ids of the feature's tokens; None for a feature of numbers.
        location: the feature in messages, such as ``histories[0].events.rating``.

    Raises:
        UsageError: if a value has the wrong type, or there are too many or few.
    """
    # An adapter is pydantic's check of a type: here a list of numbers, names or lists of names.
    adapter: TypeAdapter[Any] = _NUMBERS
    if tokens is not None:
        adapter = _NAME_LISTS if tokens.is_list else _NAMES
    try:
        valid = adapter.validate_python(values)
    except ValidationError as error:
        raise UsageError(describe_invalid(error, location)) from None
    if len(valid) != length:
        raise UsageError(
            f"{location}: expected a list with a value for each of {length} items (null where "
            f"there is none), found {shown(values)}"
        )
    return valid


def _encode_feature(values: list[Any], tokens: TokenIds | None) -> Tensor:
    """Return the values of a feature as a tensor of numbers, of ids, or of padded lists of ids.

    Args:
        values: [n] validated values of interactions or users, None if missing.
        tokens: the ids of the feature's tokens; None for a feature of numbers.

    Returns:
        Numbers [n] float32, NaN if missing; ids [n] int64, 0 if missing or unknown; or lists of
        known ids [n, s] int64, with 0 behind those that are shorter than the longest.
    """
    if tokens is None:
        numbers = [np.nan if value is None else value for value in values]
        return torch.tensor(numbers, dtype=torch.float32)
    if not tokens.is_list:
        ids = [0 if value is None else tokens.ids.get(str(value), 0) for value in values]
        return torch.tensor(ids, dtype=torch.int64)

    # A value is a list of names, one name, or None. ``pad_sequence`` puts lists of ids below each
    # other. The list [0] in front, which is cut off again, makes the table at least one id wide.
    lists = [torch.tensor([0])]
    for value in values:
        names = value if isinstance(value, list) else [value]
        ids = [tokens.ids.get(str(name), 0) for name in names if name is not None]
        known_ids = [token_id for token_id in ids if token_id > 0]
        lists.append(torch.tensor(known_ids, dtype=torch.int64))
    return pad_sequence(lists, batch_first=True)[1:]


def read_moment(moment: Any, unit: float | None) -> float:
    """Return the time of a request (``at``) in the unit of the time field, from 1970-01-01 UTC on.

    Args:
        moment: a number in that unit, a datetime, a date (midnight), or text in ISO 8601; UTC if it
            names no zone.
        unit: how many seconds one unit has; None if the field only orders interactions, so that
            only numbers are allowed.

    Raises:
        UsageError: for anything else.
    """
    try:
        return _to_unit(_MOMENT.validate_python(moment), "at", unit)
    except ValidationError as error:
        raise UsageError(describe_invalid(error, "at")) from None


def _to_unit(moment: float | datetime, location: str, unit: float | None) -> float:
    """Return a time in the unit of the time field, from 1970-01-01 UTC on.

    Args:
        moment: a number, which is in this unit already; or a datetime, in UTC if it has no zone.
        location: what has the time, such as ``at``; the message begins with it.
        unit: how many seconds one unit has; None if the field only orders interactions.

    Raises:
        UsageError: for a datetime without a unit.
    """
    if not isinstance(moment, datetime):
        return moment
    if unit is None:
        raise UsageError(
            f"{location}: the time field of the data counts no time, so a number is expected; "
            f"found {shown(moment)}"
        )
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return (moment - _EPOCH) / timedelta(microseconds=1) / (unit * 1e6)


def require_columns(names: list[str], location: Any) -> None:
    """Raise a UsageError unless a table of histories has the columns that it needs.

    It must have the column ``items``, no column of a history twice, and none that looks like a
    misspelt one, such as ``item``. Any other column is allowed and not read.

    Args:
        names: names of the columns.
        location: what has the columns, for the message: a file, or ``histories``.
    """
    # KEYS are the columns that are read. For a name that is like one of them, ``suggest`` returns a
    # text such as " (did you mean items?)", else "".
    has_duplicate = any(names.count(key) > 1 for key in KEYS)
    suggestions = [suggest(name, KEYS) for name in names if name not in KEYS]
    suggestion = next(filter(None, suggestions), "")  # the first one
    if "items" not in names or has_duplicate or suggestion:
        raise UsageError(
            f"{location}: expected the column items (lists of names) and perhaps id and times "
            f"(lists of numbers), each once; found {listed(names)}{suggestion}; a table with an "
            "interaction in each row becomes one of histories by "
            "frame.groupby(USER)[ITEM].agg(list)"
        )


def _read_columns(
    table: pa.Table, item_ids: Mapping[str, int], needs_time: bool, fields: Fields
) -> Histories | None:
    """Return the histories of a table, read column by column without a Python object per item.

    It reads the usual columns and types only, and nothing that is missing or wrong.

    Args:
        table: a history in each row.
        item_ids: id of each known item by name.
        needs_time: whether the model reads times.
        fields: features that the model reads.

    Returns:
        The histories, or None in one of these cases: the model reads features; the table has a
        column that is rarely given, such as the time of the request (``_RARE_KEYS``); a column has
        nulls or an unusual type; times are missing or wrong. Then the slower reading, row by row,
        must convert the values or say what is wrong.
    """
    columns = table.column_names
    if any(fields.values()) or _RARE_KEYS & set(columns):
        return None

    # Without a column of ids, histories get numbers from 0. ``_has_type`` says whether a column has
    # one of some types and no null.
    items = table["items"].combine_chunks()
    ids = table["id"].combine_chunks() if "id" in columns else pa.array(range(len(table)))
    has_usual_items = _has_type(items, _LIST_TYPES) and _has_type(items.flatten(), _NAME_TYPES)
    if not has_usual_items or not _has_type(ids, _NAME_TYPES):
        return None

    lengths = pc.list_value_length(items).to_numpy().astype(np.int64)
    times = None
    if "times" in columns:
        times = _flatten_times(table["times"].combine_chunks(), lengths)
    # ``_flatten_times`` returns None for times that are wrong; without the column they are missing
    if times is None and ("times" in columns or needs_time):
        return None

    # Look up the id of each distinct name once. For the names b, a, b, Arrow's ``dictionary`` is
    # [b, a], and ``indices`` are [0, 1, 0]. Unknown names get the id 0, which ``pack`` leaves out.
    encoded = items.flatten().cast(pa.large_string()).dictionary_encode()
    distinct_ids = [item_ids.get(name, 0) for name in encoded.dictionary.to_pylist()]
    item_column = np.array(distinct_ids, np.int64)[encoded.indices.to_numpy()]
    names, no_features = ids.to_pylist(), Features()
    return Histories.pack(names, item_column, lengths, times, at=None, features=no_features)


def _flatten_times(times: pa.Array, lengths: np.ndarray) -> np.ndarray | None:
    """Return the times of all histories, one history after the other.

    Args:
        times: [b] a list of times for each history.
        lengths: [b] number of items of each history.

    Returns:
        [m] float64; None unless each history has a time for each item, all finite numbers.
    """
    # ``_has_type``: the histories have lists and the lists numbers, and none of these is null. A
    # whole number that float64 cannot hold is rounded (``safe=False``).
    if not (_has_type(times, _LIST_TYPES) and _has_type(times.flatten(), _NUMBER_TYPES)):
        return None
    flat = times.flatten().cast(pa.float64(), safe=False).to_numpy()
    has_same_lengths = (pc.list_value_length(times).to_numpy() == lengths).all()
    has_limits = (np.abs(flat) < _TIME_LIMIT).all()  # false if one is NaN
    return flat if has_same_lengths and has_limits else None


def _has_type(values: pa.Array, checks: Iterable[Callable[[pa.DataType], bool]]) -> bool:
    """Return whether a column has no null, and a type for which one of the checks is true."""
    return values.null_count == 0 and any(check(values.type) for check in checks)
