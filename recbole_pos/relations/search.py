"""The strongest relations of every event among the events it may read, without a pair too many.

Events of a batch have an order (:class:`EventOrder`); an event reads only what stands before it.
Sources are sorted once by class and order, so what a reader may read of a class is a run that ends
where the reader stands, found by bisection. Cost grows with readers times the classes looked at,
mostly few, and never with the square of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recbole_pos.data.windows import gather_index
from recbole_pos.relations.tables import RelationTable, similarity

# classes of a reader looked at in the first round, at most; four times as many in each later one
FIRST_CLASSES = 8
PAIRS = 1 << 22  # events times events looked back at that are compared at once


@dataclass(frozen=True)
class EventOrder:
    """Who may read whom among the m packed events of a batch.

    An event reads

    - events of its own *chain* (a sequence, or linked chunks of one) that stand before it, and
    - events of other users' chains that are sources and whose ``rank`` is strictly lower.

    Ranks rise along a chain, so every chain of reads falls in rank, or stays with one user and goes
    back in time: nothing that an event reads, however indirectly, is of the same user and later.

    Attributes:
        user: [m] int64.
        chain: [m] int64, never falling; events of a chain lie one after the other, oldest first.
        rank: [m] int64 >= 0, the order across users.
        source: [m] bool, whether other users may read the event.
        column: [m] int64 place of the event in its window.
    """

    user: np.ndarray
    chain: np.ndarray
    rank: np.ndarray
    source: np.ndarray
    column: np.ndarray

    def __len__(self) -> int:
        return len(self.user)


@dataclass(frozen=True)
class Edges:
    """[E] relations kept: ``reader`` (never falling) reads ``source`` with weight ``value``."""

    reader: np.ndarray
    source: np.ndarray
    value: np.ndarray


class _Runs:
    """Events sorted by a code of class and order: runs of a class up to a place in the order."""

    def __init__(self, events: np.ndarray, codes: np.ndarray) -> None:
        by_code = np.argsort(codes, kind="stable")
        self.events, self.codes = events[by_code], codes[by_code]

    def between(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """End of each run of codes in [low, high), and how many events it has."""
        end = np.searchsorted(self.codes, high, "left")
        return end, end - np.searchsorted(self.codes, low, "left")


class _Sources:
    """What readers may read of a class: runs of its events that end where a reader stands.

    Args:
        local: [m] class of each event, those of the batch numbered from 0.
        known: events that have a class.
        order: who may read whom.
        column: [m] only events of the same column are related; zeros for all.
        across: whether events of other users are read at all.
    """

    def __init__(
        self,
        local: np.ndarray,
        known: np.ndarray,
        order: EventOrder,
        column: np.ndarray,
        across: bool,
    ) -> None:
        self.order, self.column, self.width = order, column, int(column.max(initial=0)) + 1
        sizes = (int(x.max(initial=0)) + 1 for x in (order.chain, order.user, order.rank))
        self.chains, self.users, self.ranks = sizes
        cell = self._cell(local[known], known)
        self.cells = np.unique(cell).size
        self.own = _Runs(known, (cell * self.chains + order.chain[known]) * len(order) + known)
        source = known[order.source[known]] if across else known[:0]
        cell, user, rank = self._cell(local[source], source), order.user, order.rank
        self.sources = _Runs(source, cell * self.ranks + rank[source])
        self.by_user = _Runs(source, (cell * self.users + user[source]) * self.ranks + rank[source])

    def _cell(self, kind: np.ndarray, event: np.ndarray) -> np.ndarray:
        """Class and column as one number."""
        return kind * self.width + self.column[event]

    def readable(self, kind: np.ndarray, reader: np.ndarray) -> _Readable:
        """What each of ``reader`` may read of its class of ``kind``."""
        order, here = self.order, self._cell(kind, reader)
        begin = (here * self.chains + order.chain[reader]) * len(order)
        own_end, own_count = self.own.between(begin, begin + reader)
        begin = here * self.ranks
        all_end, all_count = self.sources.between(begin, begin + order.rank[reader])
        begin = (here * self.users + order.user[reader]) * self.ranks
        _, own_among_all = self.by_user.between(begin, begin + order.rank[reader])
        return _Readable(own_end, own_count, all_end, all_count, own_among_all)

    def newest(
        self, runs: _Readable, wanted: np.ndarray, reader: np.ndarray, value: np.ndarray
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """The newest events of runs, [n, 2] ``wanted`` of the own chain and of other users."""
        yield _newest(self.own, runs.own_end, wanted[:, 0], reader, value)
        skipped = _OwnEvents(self.order.user, runs.all_count, runs.own_among_all)
        yield _newest(self.sources, runs.all_end, wanted[:, 1], reader, value, skipped)


class _Readable(NamedTuple):
    """Where runs end and how many events they have: the own chain's, and those of all users, of
    which ``own_among_all`` are the reader's own and not read."""

    own_end: np.ndarray
    own_count: np.ndarray
    all_end: np.ndarray
    all_count: np.ndarray
    own_among_all: np.ndarray


class _OwnEvents(NamedTuple):
    """What tells a reader's own events in runs of all users: [m] the user of every event, and the
    last two of :class:`_Readable`."""

    user: np.ndarray
    all_count: np.ndarray
    own_among_all: np.ndarray


def top_relations(
    table: RelationTable,
    group: np.ndarray,
    order: EventOrder,
    k: int,
    across: bool,
    same_column: bool = False,
) -> Edges:
    """The k strongest relations of every event to events that it may read.

    Among equal relations, the larger cosine of the classes goes first, then the lower class, then
    events of the own chain, then what is nearest before the reader (in its chain, or in rank; in
    equal ranks what stands later in the batch). An event is not related to itself here.

    Args:
        table: the relation.
        group: [m] class of each event, 0 for none.
        order: who may read whom.
        k: most relations of an event.
        across: whether events of other users are read at all.
        same_column: relate only events at the same place of their windows (section 3.1.3).
    """
    present = np.unique(group[group > 0])
    offsets, related, strength = _related(table, present)
    local = np.searchsorted(present, group)
    known = np.flatnonzero(group > 0)
    column = order.column if same_column else np.zeros(len(order), dtype=np.int64)
    sources = _Sources(local, known, order, column, across)
    # where a class has many events, the first ones give k; half of them stand after the reader
    classes = min(FIRST_CLASSES, 1 + 2 * k * sources.cells // max(len(known), 1))
    need = np.where(group > 0, k, 0)
    cursor = np.where(group > 0, offsets[np.minimum(local, max(len(present) - 1, 0))], 0)
    last = np.where(group > 0, offsets[np.minimum(local + 1, len(present))], 0)
    active = known
    parts: list[tuple[np.ndarray, ...]] = []
    while len(active):
        looked = np.minimum(last[active] - cursor[active], classes)
        pair = gather_index(cursor[active], looked)
        reader = np.repeat(active, looked)
        runs = sources.readable(related[pair], reader)
        wanted = _shares(runs, need[reader], looked)
        parts += sources.newest(runs, wanted, reader, strength[pair])
        np.subtract.at(need, reader, wanted.sum(1))
        cursor[active] += looked
        active = active[(need[active] > 0) & (cursor[active] < last[active])]
        classes *= 4
    nothing = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    reader, source, value = (np.concatenate(part) for part in zip(nothing, *parts, strict=True))
    by_reader = np.argsort(reader, kind="stable")
    return Edges(reader[by_reader], source[by_reader], value[by_reader])


def _shares(runs: _Readable, need: np.ndarray, looked: np.ndarray) -> np.ndarray:
    """[n, 2] how many events to take of each class, its own chain before other users.

    Args:
        runs: what there is, reader by reader, class by class.
        need: [n] what the reader of each class still needs.
        looked: [readers] how many classes of each reader there are.
    """
    available = np.stack((runs.own_count, runs.all_count - runs.own_among_all), 1).reshape(-1)
    before = np.cumsum(available) - available
    first = 2 * (np.cumsum(looked) - looked)
    before -= np.repeat(before[first[looked > 0]], 2 * looked[looked > 0])
    return np.clip(np.repeat(need, 2) - before, 0, available).reshape(-1, 2)


def _related(
    table: RelationTable, present: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows and columns of the classes of a batch: offsets, related (renumbered), values."""
    local = np.full(len(table.indptr) - 1, -1)
    local[present] = np.arange(len(present))
    size = np.diff(table.indptr)[present]
    entry = gather_index(table.indptr[present], size)
    related = local[table.classes[entry]]
    keep = related >= 0
    row = np.repeat(np.arange(len(present)), size)[keep]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(present)))))
    return offsets, related[keep], table.values[entry[keep]]


def _newest(
    runs: _Runs,
    end: np.ndarray,
    wanted: np.ndarray,
    reader: np.ndarray,
    value: np.ndarray,
    skipped: _OwnEvents | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The last ``wanted`` events of every run, newest first, those ``skipped`` not counted.

    Of the last wanted + own_among_all events of a run at most own_among_all are the reader's own.
    """
    some = np.flatnonzero(wanted)
    end, wanted, reader, value = end[some], wanted[some], reader[some], value[some]
    fetch = wanted
    if skipped is not None:
        fetch = np.minimum(wanted + skipped.own_among_all[some], skipped.all_count[some])
    nth = np.arange(int(fetch.sum())) - np.repeat(np.cumsum(fetch) - fetch, fetch)
    event = runs.events[np.repeat(end, fetch) - 1 - nth]
    run = np.repeat(np.arange(len(some)), fetch)
    if skipped is not None:
        other = skipped.user[event] != skipped.user[reader[run]]
        event, run = event[other], run[other]
        size = np.bincount(run, minlength=len(some))
        nth = np.arange(len(run)) - np.repeat(np.cumsum(size) - size, size)
        keep = nth < wanted[run]
        event, run = event[keep], run[keep]
    return reader[run], event, value[run]


def top_differences(
    values: np.ndarray,
    chain: np.ndarray,
    k: int,
    scales: tuple[float, ...],
    weakest: float,
    longest: int,
    rising: bool,
) -> Edges:
    """The k strongest relations of numbers of events, within a chain (scope: sequence).

    Args:
        values: [m] float64, NaN where missing.
        chain: [m] as in :class:`EventOrder`.
        k: most relations of an event.
        scales: r_norm of equation 10.
        weakest: relations below it are none.
        longest: how many events back are looked at.
        rising: whether values never fall along a chain, as times and positions; the nearest
            events are then the strongest, and nothing else is looked at.
    """
    m, before = len(values), np.bincount(chain).max(initial=1) - 1
    back = np.arange(1, min(longest, before, k if rising else longest) + 1)
    rows = max(1, PAIRS // max(len(back), 1))
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for start in range(0, m, rows):
        reader = np.arange(start, min(start + rows, m))[:, None]
        source = np.maximum(reader - back, 0)
        inside = (back <= reader) & (chain[source] == chain[reader])
        with np.errstate(invalid="ignore"):
            relation = similarity(values[reader] - values[source], scales)
        relation[~inside | ~(relation >= weakest)] = 0
        order = np.argsort(-relation, axis=1, kind="stable")[:, :k]  # equal: the nearest first
        relation, source = (np.take_along_axis(x, order, 1) for x in (relation, source))
        row, place = np.nonzero(relation)
        parts.append((row + start, source[row, place], relation[row, place]))
    return Edges(*(np.concatenate(part) for part in zip(*parts, strict=True)))
