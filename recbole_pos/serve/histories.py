"""Histories as people give them, checked and packed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

KEYS = ("id", "items", "times")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Histories:
    """Packed histories of b people.

    Attributes:
        ids: [b] who each is, as given; by default its number from 0.
        items: [m] int64 item ids, oldest first; unknown ones are left out.
        lengths: [b] int64; 0 where nothing known is left.
        times: [m] float64 in the unit of the time field, or None.
        unknown: [b] int64 how many items of each were not known.
        users: [b] int64 user ids, where the histories are those of users in the data.
    """

    ids: list[Any]
    items: np.ndarray
    lengths: np.ndarray
    times: np.ndarray | None
    unknown: np.ndarray
    users: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def joined(cls, parts: Sequence[Histories]) -> Histories:
        """One after the other; times only if all parts with an event have them."""
        timed = all(part.times is not None for part in parts if len(part.items))
        times = [part.times for part in parts if part.times is not None]
        items, lengths, unknown = (
            np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in parts)])
            for name in ("items", "lengths", "unknown")
        )
        ids = [name for part in parts for name in part.ids]
        return cls(ids, items, lengths, np.concatenate(times) if timed and times else None, unknown)

    def some(self, rows: np.ndarray) -> Histories:
        """Those of the given rows, in that order."""
        begin, lengths = (np.cumsum(self.lengths) - self.lengths)[rows], self.lengths[rows]
        index = gather_index(begin, lengths)
        return Histories(
            [self.ids[row] for row in rows],
            self.items[index],
            lengths,
            None if self.times is None else self.times[index],
            self.unknown[rows],
            None if self.users is None else self.users[rows],
        )

    def having(self, row: np.ndarray, item: np.ndarray) -> int:
        """How many of some pairs of a history, by its number, and an item are in it."""
        rows, size = np.unique(row), int(max(item.max(initial=0), self.items.max(initial=0))) + 1
        some = self.some(rows)
        pairs = np.sort(row * size + item)  # they are few, and np.isin would sort the events
        events = np.repeat(rows, some.lengths) * size + some.items
        place = np.minimum(np.searchsorted(pairs, events), len(pairs) - 1)
        return len(np.unique(place[pairs[place] == events]))

    def newest(self, most: int) -> Histories:
        """With at most the newest events of each."""
        age = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.items))
        keep = age <= most
        times = None if self.times is None else self.times[keep]
        lengths = np.minimum(self.lengths, most)
        return replace(self, items=self.items[keep], lengths=lengths, times=times)


def read_histories(
    given: Iterable[Any],
    ids: Mapping[str, int],
    needs_time: bool,
    what: str = "histories",
    unit: float | None = 1.0,
) -> Histories:
    """Check histories and look their items up.

    Args:
        given: of each person a list of items, oldest first, or a mapping with ``items`` and
            perhaps ``id`` and ``times``; a Series of lists, by id, or a DataFrame with such
            columns. Where times are given, events are sorted by them; equal times keep their
            order.
        ids: of the known items by name.
        needs_time: whether the model reads times.
        what: they are called in messages.
        unit: seconds in the unit of the time field, for dates; None if it has none.

    Raises:
        UsageError: naming the history that is none, and what was found.
    """
    if isinstance(given, pd.DataFrame) and "items" in given:
        given = given.to_dict("records")
    elif isinstance(given, pd.DataFrame):
        raise UsageError(
            f"{what}: expected columns items (lists), and perhaps id and times, found "
            f"{', '.join(map(str, given.columns))[:100]}; of interactions, take "
            "frame.groupby(USER)[ITEM].agg(list)"
        )
    elif isinstance(given, pd.Series):
        given = [{"id": name, "items": items} for name, items in given.items()]
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(f"{what}: expected a list of histories, found {shown(given)}")
    names: list[Any] = []
    events: list[list[int]] = []
    moments: list[list[float]] = []
    unknown: list[int] = []
    timed: set[bool] = set()
    for number, one in enumerate(given):
        name, items, times = _parts(one, f"{what}[{number}]", number, unit)
        if times is None and needs_time and items:
            raise UsageError(
                f"{what}[{number}]: the model reads times, so each history needs them: "
                '{"items": [...], "times": [...]}'
            )
        if times is not None:
            order = sorted(range(len(items)), key=times.__getitem__)
            items, times = [items[i] for i in order], [times[i] for i in order]
        known = [i for i, item in enumerate(items) if item in ids]
        names.append(name)
        events.append([ids[items[i]] for i in known])
        moments.append([] if times is None else [times[i] for i in known])
        unknown.append(len(items) - len(known))
        if known:
            timed.add(times is not None)
    lengths = np.array([len(of_one) for of_one in events], dtype=np.int64)
    return Histories(
        names,
        np.array([item for of_one in events for item in of_one], dtype=np.int64),
        lengths,
        np.array([time for of_one in moments for time in of_one]) if timed == {True} else None,
        np.array(unknown, dtype=np.int64),
    )


def _parts(
    one: Any, where: str, number: int, unit: float | None
) -> tuple[Any, list[str], list[float] | None]:
    """Id, items and times of a history."""
    name, items, times = number, one, None
    if isinstance(one, Mapping):
        if more := sorted(map(str, set(one) - set(KEYS))):
            raise UsageError(f"{where}: {', '.join(more)[:80]} is not one of {', '.join(KEYS)}")
        if "items" not in one:
            raise UsageError(f'{where}: expected {{"items": [...]}}, found {shown(dict(one))}')
        name, items, times = one.get("id", number), one["items"], one.get("times")
        if not _names(name) or (isinstance(name, str) and not _is_text(name)):
            raise UsageError(f"{where}.id: expected a name, found {shown(name)}")
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, (Sequence, np.ndarray)):
        raise UsageError(f"{where}: expected a list of items, found {shown(items)}")
    return name, [_name(item, where) for item in items], _moments(times, len(items), where, unit)


def _name(item: Any, where: str) -> str:
    if not _names(item):
        raise UsageError(f"{where}.items: expected names of items, found {shown(item)}")
    return str(item)


def _names(value: Any) -> bool:
    """Whether it is a name: a string, or a whole number of 64 bits."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return isinstance(value, str) or (whole and abs(value) < 2**63)


def _is_text(name: str) -> bool:
    """Whether it can be written: json may name half a letter (a lone surrogate)."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _moments(times: Any, length: int, where: str, unit: float | None) -> list[float] | None:
    if times is None:
        return None
    if isinstance(times, (str, bytes)) or not isinstance(times, (Sequence, np.ndarray)):
        raise UsageError(f"{where}.times: expected a list of numbers, found {shown(times)}")
    if len(times) != length:
        raise UsageError(
            f"{where}.times: expected one for each of {length} items, found {len(times)}"
        )
    numbers = (int, float, np.integer, np.floating)
    times = [
        _moment(time, f"{where}.times", unit) if isinstance(time, (str, datetime)) else time
        for time in times
    ]
    for time in times:
        fits = isinstance(time, numbers) and not isinstance(time, bool)
        if not (fits and abs(time) < 2**63):  # NaN is not either
            raise UsageError(f"{where}.times: expected finite numbers, found {shown(time)}")
    return [float(time) for time in times]


def _moment(time: str | datetime, where: str, unit: float | None) -> float:
    """A date, or a time as ISO 8601 writes it, in the unit of the time field."""
    try:
        read = time if isinstance(time, datetime) else datetime.fromisoformat(_zoned(time))
        read = read if read.tzinfo else read.replace(tzinfo=timezone.utc)
        moment = (read - _EPOCH) / timedelta(microseconds=1)
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
    return moment / (unit * 1e6)


def _zoned(time: str) -> str:
    """Python 3.10 does not read the Z that stands for UTC."""
    return f"{time[:-1]}+00:00" if time[-1:] in ("Z", "z") else time


def lines_of(file: str | Path) -> Iterator[Any]:
    """The histories of a file of json lines.

    Raises:
        UsageError: if it is not there, or a line is no json.
    """
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise UsageError(f"{file}, line {number} is no json: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
