"""Histories as users give them (Python, json lines, frames, columns of Arrow or parquet), checked
and packed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
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
from torch.nn.utils.rnn import pad_sequence

from recbole_pos.data.tables import LARGEST
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features
from recbole_pos.values import listed, nearest, shown

KEYS = ("id", "items", "times", "at", "events", "user")
PART = 1 << 14  # histories of a file that are read at once
# How values of a field are read: ids by name, and whether a value is a list of names; None for a
# field of numbers.
Field = tuple[Mapping[str, int], bool] | None
NO_FIELDS: dict[str, dict[str, Field]] = {"events": {}, "user": {}}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _is_list(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def _validate_plain(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a value or a sequence, if need be with numbers of numpy as Python's own."""
    value = list(value) if _is_list(value) else value
    try:
        return validate(value)
    except ValidationError:
        to_plain = lambda x: x.item() if isinstance(x, np.number) else x  # noqa: E731
        return validate([*map(to_plain, value)] if isinstance(value, list) else to_plain(value))


Plain = WrapValidator(_validate_plain)
Name = StrictStr | Annotated[StrictInt, Bounds(gt=-(2**63), lt=2**63)]
Moment = Annotated[StrictFloat, Bounds(gt=-(2.0**63), lt=2.0**63)] | StrictStr | datetime
_Number = Annotated[
    Annotated[StrictFloat, Bounds(ge=-LARGEST, le=LARGEST)] | None,
    BeforeValidator(lambda value: None if value != value else value),  # NaN is missing
]


class History(BaseModel, extra="forbid", strict=True):
    """One history; a list of items, oldest first, is one, too."""

    id: Annotated[Name | None, Plain] = Bounds(None, description="returned; the index by default")
    items: Annotated[list[Name], FailFast(), Plain] = Bounds(description="names, oldest first")
    times: Annotated[list[Moment] | None, FailFast(), Plain] = Bounds(
        None, description="sorted by, if any: numbers or ISO 8601"
    )
    at: Annotated[Moment | None, Plain] = Bounds(None, description="time of the request")
    events: dict[str, Any] | None = Bounds(None, description="by field, a value for each item")
    user: dict[str, Any] | None = Bounds(None, description="by field, a value")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            return dict(given)
        return {"items": given} if _is_list(given) else given


_HISTORIES = TypeAdapter(Annotated[list[History], FailFast()])
_NUMBERS = TypeAdapter(Annotated[list[_Number], Plain])
_NAMES = TypeAdapter(Annotated[list[Name | None], Plain])
_NAME_LISTS = TypeAdapter(Annotated[list[list[Name] | Name | None], Plain])


def describe_invalid(error: ValidationError, where: str = "") -> str:
    """Return the first thing that was refused: its place within ``where``, why, what was found."""
    first = error.errors(include_url=False, include_context=False)[0]
    for part in first["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part not in ("str", "float", "datetime", "constrained-int", "constrained-float"):
            where += f".{shown(part)[1:-1]}"  # the others name members of a union
    return f"{where.removeprefix('.') or 'the body'}: {first['msg']}, found {shown(first['input'])}"


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

        NaN stands for a time that is not given; ``times`` are kept only if no known item lacks one.
        """
        row, order = np.repeat(np.arange(len(ids)), lengths), np.arange(len(items))
        if times is not None:
            order = np.lexsort((times, row))
        order = order[items[order] > 0]
        known = np.bincount(row[order], minlength=len(ids))
        times = None if times is None or np.isnan(times[order]).any() else times[order]
        at = None if at is None or np.isnan(at).all() else at
        place = torch.from_numpy(order)
        features = features.map(lambda x: x[place])
        return cls(ids, items[order], known, times, lengths - known, None, at, features)

    def with_request_time(self, default: float) -> Histories:
        """Return the histories with ``default`` as the time of each request without a time.

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

    def select(self, rows: np.ndarray) -> Histories:
        """Return the histories of the given rows [r], in the order of ``rows``."""
        begin, lengths = (np.cumsum(self.lengths) - self.lengths)[rows], self.lengths[rows]
        found = self._with_events(gather_index(begin, lengths), lengths)
        place = torch.from_numpy(rows)
        return replace(
            found,
            ids=[self.ids[row] for row in rows],
            unknown=self.unknown[rows],
            users=None if self.users is None else self.users[rows],
            at=None if self.at is None else self.at[rows],
            features=found.features.map(lambda x: x, lambda x: x[place]),
        )

    def list_pairs(self) -> tuple[Tensor, Tensor]:
        """Return the number of the history [m] and the item [m] of each event."""
        row = torch.repeat_interleave(torch.from_numpy(self.lengths))
        return row, torch.from_numpy(self.items)

    def keep_newest(self, most: int) -> Histories:
        """Return the histories cut to their ``most`` newest events."""
        events = np.flatnonzero(self._steps_back() <= most)
        return self._with_events(events, np.minimum(self.lengths, most))

    def leave_out(self, steps_back: np.ndarray) -> Histories:
        """Return the histories without one interaction each, ``steps_back`` [b] of them: 1 is the
        newest, 0 leaves none out. The others keep their times."""
        events = np.flatnonzero(self._steps_back() != np.repeat(steps_back, self.lengths))
        return self._with_events(events, self.lengths - (steps_back > 0))

    def _steps_back(self) -> np.ndarray:
        """Return the place of each event in its history, 1 for the newest."""
        return np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.items))

    def _with_events(self, events: np.ndarray, lengths: np.ndarray) -> Histories:
        """Return the histories with only some of the events, ``lengths`` of each."""
        times, place = None if self.times is None else self.times[events], torch.from_numpy(events)
        features = self.features.map(lambda x: x[place])
        return replace(
            self, items=self.items[events], lengths=lengths, times=times, features=features
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
        given: a :class:`History` of each user, a mapping with its fields, or a list of items; a
            Series of lists, by id; a DataFrame or a table of Arrow with columns like the fields.
            Where times are given, events are sorted by them.
        ids: ids of the known items by name, from 1 in ascending order.
        needs_time: whether the model reads times.
        unit: seconds in the unit of the time field, for dates; None if it has none.
        fields: what the model reads under ``events`` and ``user``, by name.

    Raises:
        UsageError: naming the history that is wrong, what was found and what was expected.
    """
    if isinstance(given, pa.Table):
        _require_columns(given.column_names, "histories")
        if not any(fields.values()) and not fields.keys() & set(given.column_names):
            found = _read_table(given, ids, needs_time, unit)
            if found is not None:
                return found
        given = given.to_pylist()
    if isinstance(given, pd.DataFrame):
        if "items" not in given:
            raise UsageError(
                f"histories: expected columns items (lists), and perhaps id and times, found "
                f"{', '.join(map(str, given.columns))[:100]}; of interactions, take "
                "frame.groupby(USER)[ITEM].agg(list)"
            )
        given = given.to_dict("records")
    elif isinstance(given, pd.Series):
        given = [{"id": name, "items": items} for name, items in given.items()]
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(f"histories: expected a list of histories, found {shown(given)}")
    try:
        histories = _HISTORIES.validate_python(list(given))
    except ValidationError as error:
        raise UsageError(describe_invalid(error, "histories")) from None
    times: list[float] = []
    for number, history in enumerate(histories):
        times += _read_times(history, f"histories[{number}]", needs_time, unit)
    at = [
        np.nan if one.at is None else read_moment(one.at, f"histories[{number}].at", unit)
        for number, one in enumerate(histories)
    ]
    lengths = np.array([len(one.items) for one in histories], np.int64)
    names = [str(name) for one in histories for name in one.items]
    return Histories.pack(
        [number if one.id is None else one.id for number, one in enumerate(histories)],
        _look_up(pa.array(names, pa.large_string()), ids),
        lengths,
        np.array(times),
        np.array(at),
        _read_features(histories, fields, lengths),
    )


def _read_times(
    history: History, where: str, needs_time: bool, unit: float | None
) -> Iterable[float]:
    """Return the time of each interaction in the unit of the time field, NaN where there are none;
    raise a UsageError for times of another number, or none where the model reads them."""
    count = len(history.items)
    if history.times is None:
        if needs_time and count:
            raise UsageError(
                f"{where}: the model reads times, so each history needs them: "
                '{"items": [...], "times": [...]}'
            )
        return [np.nan] * count
    if len(history.times) != count:
        raise UsageError(
            f"{where}.times: expected one for each of {count} items, found {len(history.times)}"
        )
    return [read_moment(time, f"{where}.times", unit) for time in history.times]


def _read_features(
    histories: list[History], fields: Mapping[str, Mapping[str, Field]], lengths: np.ndarray
) -> Features:
    """Return the features that histories have under ``events`` and ``user``; raise a UsageError for
    a field that the model does not read, or values of the wrong kind or number."""
    columns: dict[str, dict[str, Tensor]] = {}
    for table, readable in fields.items():
        given = [getattr(history, table) or {} for history in histories]
        for number, values in enumerate(given):
            if unread := [name for name in values if name not in readable]:
                raise UsageError(
                    f"histories[{number}].{table}: {shown(unread[0])} is not read by the model"
                    f"{nearest(unread[0], readable) if readable else ''}; leave it out"
                )
        sizes = lengths if table == "events" else None
        columns[table] = {
            name: _read_column([one.get(name) for one in given], kind, f"{table}.{name}", sizes)
            for name, kind in readable.items()
        }
    return Features(columns["events"], columns["user"])


def _read_column(values: list[Any], kind: Field, name: str, lengths: np.ndarray | None) -> Tensor:
    """Return the values of a field, of each user [b] or, with ``lengths``, of each interaction, as
    numbers or ids [n], or as lists of ids [n, s] padded with 0."""
    read = _NUMBERS if kind is None else _NAME_LISTS if kind[1] else _NAMES
    flat: list[Any] = []
    for number, value in enumerate(values):
        where = f"histories[{number}].{name}"
        if lengths is None:
            value = [value]
        elif value is None:
            value = [None] * lengths[number]
        elif not _is_list(value) or len(value) != lengths[number]:
            raise UsageError(
                f"{where}: expected a list with a value for each of {lengths[number]} items (null "
                f"where there is none), found {shown(value)}"
            )
        try:
            flat += read.validate_python(value)
        except ValidationError as error:
            raise UsageError(describe_invalid(error, where)) from None
    if kind is None:
        numbers = [np.nan if number is None else number for number in flat]
        return torch.tensor(numbers, dtype=torch.float32)
    ids, is_list = kind
    if not is_list:
        return torch.tensor([ids.get(str(one), 0) for one in flat], dtype=torch.int64)
    rows = [one if isinstance(one, list) else [one] for one in flat]
    found = [[ids[name] for name in map(str, row) if ids.get(name)] for row in rows]
    padded = pad_sequence([torch.tensor(row or [0]) for row in (*found, [])], batch_first=True)
    return padded[:-1]


def read_moment(time: Any, where: str, unit: float | None) -> float:
    """Return a time in the unit of the time field, counted from 1970-01-01 UTC.

    Args:
        time: a number in that unit, a datetime, or text in ISO 8601; UTC if it names no zone.
        where: what to call the place of the time in error messages.
        unit: seconds in the unit; None if the field only orders interactions.
    """
    if isinstance(time, (float, int, np.number)) and not isinstance(time, bool):
        if abs(time) < 2**63:  # false for NaN
            return float(time)
    try:
        if isinstance(time, str):  # Python 3.10 does not read the Z that stands for UTC
            time = datetime.fromisoformat(f"{time[:-1]}+00:00" if time[-1:] in "Zz" else time)
        time = time if time.tzinfo else time.replace(tzinfo=timezone.utc)
        since_epoch = (time - _EPOCH) / timedelta(microseconds=1)
    except (ValueError, TypeError, OverflowError, AttributeError):
        raise UsageError(
            f"{where}: expected finite numbers, or times such as '2026-01-31T09:30:00Z', found "
            f"{shown(time)}"
        ) from None
    if unit is None:
        raise UsageError(
            f"{where}: expected numbers, as the time field of the data has, which counts no time; "
            f"found {shown(str(time))}"
        )
    return since_epoch / (unit * 1e6)


def read_parts(file: str | Path) -> Iterator[list[History] | pa.Table]:
    """Yield the histories of a file of json lines, or of parquet (a folder, or named ``.parquet``),
    at most ``PART`` at a time. Those without an id get their number."""
    if Path(file).suffix != ".parquet" and not os.path.isdir(file):
        histories = _read_lines(file)
        while part := list(islice(histories, PART)):
            yield part
        return
    with _reading(file):
        data = ds.dataset(str(file), format="parquet")
        _require_columns(data.schema.names, file)
        names = [name for name in KEYS if name in data.schema.names]
        for batch in data.to_batches(names, batch_size=PART, batch_readahead=1):
            batch.validate(full=True)  # a damaged file may hold text that is not one
            if len(batch):
                yield pa.Table.from_batches([batch])


def _read_lines(file: str | Path) -> Iterator[History]:
    """Yield the histories of a file of json lines."""
    with _reading(file), open(file, encoding="utf-8-sig") as lines:
        count = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    history = History.model_validate_json(line)
                except ValidationError as error:
                    raise UsageError(describe_invalid(error, f"{file}, line {number}")) from None
                history.id = count if history.id is None else history.id
                count += 1
                yield history


@contextmanager
def _reading(file: str | Path) -> Iterator[None]:
    """Turn errors of reading a file into a UsageError."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _require_columns(names: list[str], where: Any) -> None:
    """Raise a UsageError unless a table has the columns of histories, each once."""
    counts = {key: names.count(key) for key in KEYS}
    if not (counts["id"] and counts["items"] and max(counts.values()) == 1):
        raise UsageError(
            f"{where}: expected the columns id, items (lists of names) and perhaps times (lists of "
            f"numbers), each once; found {listed(names)}"
        )


def _read_table(
    table: pa.Table, item_ids: Mapping[str, int], needs_time: bool, unit: float | None
) -> Histories | None:
    """Read columns ``id``, ``items``, and perhaps ``times`` and ``at``, without a Python object for
    each item; None for a table that is not regular, whose rows have to be looked at one by one."""
    columns = {name: table[name].combine_chunks() for name in KEYS if name in table.column_names}
    lists = [columns[name] for name in ("items", "times") if name in columns]
    is_regular = all(
        (pa.types.is_list(x.type) or pa.types.is_large_list(x.type))
        and not x.null_count + x.flatten().null_count
        for x in lists
    )
    has_times = "times" in columns
    if not is_regular or columns["id"].null_count or (needs_time and not has_times):
        return None
    names, items = columns["id"], columns["items"].flatten()
    lengths, *others = (pc.list_value_length(x).to_numpy().astype(np.int64) for x in lists)
    times = _to_moments(columns["times"].flatten(), unit) if has_times else None
    at = _to_moments(columns["at"], unit) if "at" in columns else None
    if (
        not (_holds_names(names.type) and _holds_names(items.type))
        or any((other != lengths).any() for other in others)
        or (has_times and (times is None or not (np.abs(times) < 2**63).all()))
        or ("at" in columns and (at is None or (np.abs(at) >= 2**63).any()))
    ):
        return None
    found = _look_up(items.cast(pa.large_string()), item_ids)
    return Histories.pack(names.to_pylist(), found, lengths, times, at, Features())


def _look_up(names: pa.Array, ids: Mapping[str, int]) -> np.ndarray:
    """Return the id of each name [m], 0 for an unknown one; equal names are looked up once."""
    coded = names.dictionary_encode()
    found = np.array([ids.get(name, 0) for name in coded.dictionary.to_pylist()], np.int64)
    return found[coded.indices.to_numpy()]


def _holds_names(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(
        of(kind) for of in (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer)
    )


def _to_moments(values: pa.Array, unit: float | None) -> np.ndarray | None:
    """Return numbers or timestamps [m] in the unit of the time field, NaN for none; None for values
    of another type."""
    if pa.types.is_timestamp(values.type) and unit is not None:
        since_epoch = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return since_epoch.to_numpy(zero_copy_only=False) / (unit * 1e6)
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        return values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return None
