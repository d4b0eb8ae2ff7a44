"""Search the strongest relations of every event among the events it may read.

Events of a batch have an order (:class:`EventOrder`); an event reads only events before it.
Sources are sorted once by class and order, so the events of a class that a reader may read are a
run that ends at the reader's place, found by bisection. The cost is readers times classes searched,
mostly few, not the square of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recbole_pos.data.windows import gather_index
from recbole_pos.relations.tables import WEAKEST, RelationTable, similarity

# most classes of a reader searched in the first round; each later round searches four times as many
FIRST_CLASSES = 8
PAIRS = 1 << 22  # pairs of events that are compared at once


@dataclass(frozen=True)
class EventOrder:
    """Who may read whom among the m packed events of a batch.

    An event reads

    - events before it in its own *chain* (a sequence, or linked chunks of one), and
    - events of other users' chains that are sources and whose ``rank`` is strictly lower.

    Ranks rise along a chain, so successive reads fall in rank, or stay with one user and go back in
    time: nothing that an event reads, however indirectly, is of the same user and later.

    Attributes:
        user: [m] int64 user of the event.
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

    @classmethod
    def from_parts(cls, parts: list[tuple[np.ndarray, ...]]) -> Edges:
        """Join parts of readers, sources and values, and sort them by reader."""
        nothing = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        joined = [np.concatenate(part) for part in zip(nothing, *parts, strict=True)]
        by_reader = np.argsort(joined[0], kind="stable")
        return cls(*(part[by_reader] for part in joined))


class _Runs:
    """Events [n] sorted by a code of class and order, to find a class's run up to a place."""

    def __init__(self, events: np.ndarray, codes: np.ndarray) -> None:
        by_code = np.argsort(codes, kind="stable")
        self.events, self.codes = events[by_code], codes[by_code]

    def between(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the end of each run of codes in [low, high), and how many events it has."""
        end = np.searchsorted(self.codes, high, "left")
        return end, end - np.searchsorted(self.codes, low, "left")


def top_relations(
    table: RelationTable,
    group: np.ndarray,
    order: EventOrder,
    k: int,
    across: bool,
    same_column: bool = False,
) -> Edges:
    """Return the k strongest relations of every event to events that it may read.

    Among equal relations, the larger cosine of the classes goes first, then the lower class, then
    events of the own chain, then the nearest before the reader (in its chain, or in rank; at equal
    ranks the later in the batch). An event is not related to itself here.

    Args:
        table: the relation.
        group: [m] class of each event, 0 for none.
        order: who may read whom.
        k: most relations of an event.
        across: whether events of other users are read at all.
        same_column: relate only events at the same place of their windows (section 3.1.3).
    """
    m, known = len(order), np.flatnonzero(group > 0)
    present, local = np.unique(group[known], return_inverse=True)
    kind = np.zeros(m, dtype=np.int64)  # class of each event, those of the batch numbered from 0
    kind[known] = local
    offsets, related, strength = _related(table, present)

    # Runs are sorted by class and column as one number, then by who may read them.
    column = order.column if same_column else np.zeros(m, dtype=np.int64)
    width, chains, users, ranks = (
        int(x.max(initial=0)) + 1 for x in (column, order.chain, order.user, order.rank)
    )
    cell = kind * width + column
    cells = np.unique(cell[known]).size
    own = _Runs(known, (cell[known] * chains + order.chain[known]) * m + known)
    source = known[order.source[known]] if across else known[:0]
    rank, user = order.rank, order.user
    others = _Runs(source, cell[source] * ranks + rank[source])
    by_user = _Runs(source, (cell[source] * users + user[source]) * ranks + rank[source])

    # so many classes have about 2 k events, of which half stand before the reader
    classes = min(FIRST_CLASSES, 1 + 2 * k * cells // max(len(known), 1))
    need, cursor, last = (np.zeros(m, dtype=np.int64) for _ in range(3))
    need[known], cursor[known], last[known] = k, offsets[local], offsets[local + 1]
    active, parts = known, list[tuple[np.ndarray, ...]]()
    while len(active):
        looked = np.minimum(last[active] - cursor[active], classes)
        pair = gather_index(cursor[active], looked)
        reader = np.repeat(active, looked)
        here = related[pair] * width + column[reader]
        begin = (here * chains + order.chain[reader]) * m
        own_end, own_count = own.between(begin, begin + reader)
        begin = here * ranks
        end, count = others.between(begin, begin + rank[reader])
        begin = (here * users + user[reader]) * ranks
        # the run of other users includes events of the reader's user, which are not read from it
        _, own_among = by_user.between(begin, begin + rank[reader])
        wanted = _divide(own_count, count - own_among, need[reader], looked)
        value = strength[pair]
        parts.append(_newest(own, own_end, wanted[:, 0], wanted[:, 0], reader, value))
        fetch = np.where(wanted[:, 1] > 0, np.minimum(wanted[:, 1] + own_among, count), 0)
        parts.append(_newest(others, end, wanted[:, 1], fetch, reader, value, user))
        np.subtract.at(need, reader, wanted.sum(1))
        cursor[active] += looked
        active = active[(need[active] > 0) & (cursor[active] < last[active])]
        classes *= 4
    return Edges.from_parts(parts)


def _divide(
    own: np.ndarray, others: np.ndarray, need: np.ndarray, looked: np.ndarray
) -> np.ndarray:
    """Return [n, 2] how many events to take of each class: of the own chain, and of other users.

    Classes are filled in order, and in each class the own chain first, until the need is met.
    ``own`` and ``others`` [n] are available, reader by reader, class by class, ``need`` [n] is what
    the reader of a class still needs, and ``looked`` [readers] how many classes a reader has.
    """
    available = np.stack((own, others), 1).reshape(-1)
    before = np.cumsum(available) - available
    first = 2 * (np.cumsum(looked) - looked)
    before -= np.repeat(before[first[looked > 0]], 2 * looked[looked > 0])
    return np.clip(np.repeat(need, 2) - before, 0, available).reshape(-1, 2)


def _related(
    table: RelationTable, present: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Restrict a table to the sorted classes [classes] of a batch, which are renumbered.

    Returns:
        [classes + 1] offsets of each class's relations, [pairs] related classes, [pairs] values.
    """
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
    fetch: np.ndarray,
    reader: np.ndarray,
    value: np.ndarray,
    user: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ``wanted`` newest events of runs that end at ``end``, as edges.

    Args:
        runs: events that runs are of.
        end, wanted, reader, value: [runs] each.
        fetch: [runs] number of events to look at, ``wanted`` and the reader's user's own.
        user: [m] user of each event, to skip events of the reader's user; None to skip none.
    """
    run = np.repeat(np.arange(len(fetch)), fetch)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(fetch) - fetch, fetch)
    event = runs.events[end[run] - 1 - nth]
    if user is not None:
        other = user[event] != user[reader[run]]
        event, run = event[other], run[other]
        size = np.bincount(run, minlength=len(fetch))
        nth = np.arange(len(run)) - np.repeat(np.cumsum(size) - size, size)
        keep = nth < wanted[run]
        event, run = event[keep], run[keep]
    return reader[run], event, value[run]


def top_differences(
    values: np.ndarray,
    chain: np.ndarray,
    k: int,
    scales: tuple[float, ...],
    longest: int,
    rising: bool,
) -> Edges:
    """Return the k strongest relations of numbers of events, within a chain (scope: sequence).

    Args:
        values: [m] float64, NaN where missing.
        chain: [m] as in :class:`EventOrder`.
        k, longest: most relations of an event, and how many events back are compared.
        scales: r_norm of equation 10.
        rising: whether values never fall along a chain, as times and positions; the k nearest
            events are then the strongest, and only they are compared.
    """
    m, before = len(values), np.bincount(chain).max(initial=1) - 1
    back = np.arange(1, min(longest, before, k if rising else longest) + 1)
    rows, parts = max(1, PAIRS // max(len(back), 1)), list[tuple[np.ndarray, ...]]()
    for start in range(0, m, rows):
        reader = np.arange(start, min(start + rows, m))[:, None]
        source = np.maximum(reader - back, 0)
        inside = (back <= reader) & (chain[source] == chain[reader])
        with np.errstate(invalid="ignore"):
            relation = similarity(values[reader] - values[source], scales)
        relation[~inside | ~(relation >= WEAKEST)] = 0
        nearest = np.argsort(-relation, axis=1, kind="stable")[:, :k]  # equal: the nearest first
        relation, source = (np.take_along_axis(x, nearest, 1) for x in (relation, source))
        row, place = np.nonzero(relation)
        parts.append((row + start, source[row, place], relation[row, place]))
    return Edges.from_parts(parts)
