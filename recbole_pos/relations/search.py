"""Search the strongest relations of every interaction among the interactions it may read.

Interactions of a batch have an order (:class:`EventOrder`); an interaction reads only interactions
before it. Sources are sorted once by class and order, so the interactions of a class that a reader
may read are a run that ends at the reader's place, found by bisection. The cost is readers times
classes searched, mostly few, not the square of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recbole_pos.data.windows import gather_index
from recbole_pos.relations.tables import WEAKEST, RelationTable, similarity

# most classes of a reader searched in the first round; each later round searches four times as many
FIRST_CLASSES = 8
PAIRS = 1 << 22  # pairs of interactions that are compared at once


@dataclass(frozen=True)
class EventOrder:
    """Who may read whom among the m packed interactions of a batch.

    An interaction reads

    - interactions before it in its own *chain* (a sequence, or linked chunks of one), and
    - interactions of other users' chains that are sources and whose ``rank`` is strictly lower.

    Ranks rise along a chain, so successive reads fall in rank, or stay with one user and go back in
    time: nothing that an interaction reads, however indirectly, is of the same user and later.

    Attributes:
        user: [m] int64 user of the interaction.
        chain: [m] int64, never falling; in a chain the oldest interaction is first.
        rank: [m] int64 >= 0, the order across users.
        source: [m] bool, whether other users may read the interaction.
        column: [m] int64 place of the interaction in its window.
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
        empty = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        reader, source, value = (np.concatenate(x) for x in zip(empty, *parts, strict=True))
        by_reader = np.argsort(reader, kind="stable")
        return cls(reader[by_reader], source[by_reader], value[by_reader])


class _Runs:
    """Interactions [n] sorted by codes of class and order, to find a class's run up to a code."""

    def __init__(self, events: np.ndarray, codes: np.ndarray) -> None:
        by_code = np.argsort(codes, kind="stable")
        self.events, self.codes = events[by_code], codes[by_code]

    def between(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the end of each run of codes in [low, high), and how many interactions it has."""
        end = np.searchsorted(self.codes, high, "left")
        return end, end - np.searchsorted(self.codes, low, "left")


class _ReadableRuns:
    """The runs of each cell, which is class and column as one number, that a reader may read."""

    def __init__(
        self, cell: np.ndarray, classified: np.ndarray, order: EventOrder, across: bool
    ) -> None:
        self.order = order
        self.chains, self.users, self.ranks = (
            int(x.max(initial=0)) + 1 for x in (order.chain, order.user, order.rank)
        )
        chain = cell[classified] * self.chains + order.chain[classified]
        self.own = _Runs(classified, chain * len(order) + classified)
        source = classified[order.source[classified]] if across else classified[:0]
        rank = order.rank[source]
        self.others = _Runs(source, cell[source] * self.ranks + rank)
        user = cell[source] * self.users + order.user[source]
        self.by_user = _Runs(source, user * self.ranks + rank)

    def find(self, cell: np.ndarray, reader: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return end and size of own runs, those of others' runs, and how many to skip of these."""
        rank = self.order.rank[reader]
        start = (cell * self.chains + self.order.chain[reader]) * len(self.order)
        own = self.own.between(start, start + reader)
        start = cell * self.ranks
        others = self.others.between(start, start + rank)
        start = (cell * self.users + self.order.user[reader]) * self.ranks
        _, skipped = self.by_user.between(start, start + rank)  # of the reader's user
        return *own, *others, skipped


def top_relations(
    table: RelationTable,
    group: np.ndarray,
    order: EventOrder,
    k: int,
    across: bool,
    same_column: bool = False,
) -> Edges:
    """Return the k strongest relations of every interaction to interactions that it may read.

    Among equal relations, the larger cosine of the classes goes first, then the lower class, then
    interactions of the own chain, then the nearest before the reader (in its chain, or in rank; at
    equal ranks the later in the batch). An interaction is not related to itself here.

    Args:
        table: the relation.
        group: [m] class of each interaction, 0 for none.
        order: who may read whom.
        k: most relations of an interaction.
        across: whether interactions of other users are read at all.
        same_column: relate only interactions at the same place of their windows (section 3.1.3).
    """
    m, classified = len(order), np.flatnonzero(group > 0)
    batch_classes, class_index = np.unique(group[classified], return_inverse=True)
    offsets, related, strength = _restrict_table(table, batch_classes)

    column = order.column if same_column else np.zeros(m, dtype=np.int64)
    columns = int(column.max(initial=0)) + 1
    cell = column.copy()
    cell[classified] += class_index * columns
    cells = np.unique(cell[classified]).size
    runs = _ReadableRuns(cell, classified, order, across)

    # so many classes have about 2 k interactions, of which half stand before the reader
    most_classes = min(FIRST_CLASSES, 1 + 2 * k * cells // max(len(classified), 1))
    remaining, next_pair, end_pair = (np.zeros(m, dtype=np.int64) for _ in range(3))
    remaining[classified] = k
    next_pair[classified], end_pair[classified] = offsets[class_index], offsets[class_index + 1]
    active, parts = classified, list[tuple[np.ndarray, ...]]()
    while len(active):
        num_classes = np.minimum(end_pair[active] - next_pair[active], most_classes)
        pair = gather_index(next_pair[active], num_classes)
        reader, value = np.repeat(active, num_classes), strength[pair]
        source_cell = related[pair] * columns + column[reader]
        own_end, own_size, others_end, others_size, skipped = runs.find(source_cell, reader)
        own_taken, others_taken = _allocate(
            own_size, others_size - skipped, remaining[reader], num_classes
        )
        parts.append(_take_newest(runs.own, own_end, own_taken, own_taken, reader, value))
        inspected = np.minimum(others_taken + skipped, others_size) * (others_taken > 0)
        ends = others_end, others_taken, inspected
        parts.append(_take_newest(runs.others, *ends, reader, value, order.user))
        np.subtract.at(remaining, reader, own_taken + others_taken)
        next_pair[active] += num_classes
        active = active[(remaining[active] > 0) & (next_pair[active] < end_pair[active])]
        most_classes *= 4
    return Edges.from_parts(parts)


def _allocate(
    own: np.ndarray, others: np.ndarray, remaining: np.ndarray, num_classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] how many own interactions, and how many of others, to take of each class."""
    # [n] available reader by reader, class by class, and remaining of the reader: classes are
    # filled in order, in each the own chain first; num_classes [readers] are those of a reader
    available = np.stack((own, others), 1).reshape(-1)
    before = np.cumsum(available) - available
    first = 2 * (np.cumsum(num_classes) - num_classes)
    has_class = num_classes > 0
    before -= np.repeat(before[first[has_class]], 2 * num_classes[has_class])
    taken = np.clip(np.repeat(remaining, 2) - before, 0, available)
    return taken[::2], taken[1::2]


def _restrict_table(
    table: RelationTable, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return offsets [classes + 1], related classes and values [pairs] among sorted classes."""
    class_index = np.full(len(table.indptr) - 1, -1)
    class_index[classes] = np.arange(len(classes))
    size = np.diff(table.indptr)[classes]
    pair = gather_index(table.indptr[classes], size)
    related = class_index[table.classes[pair]]
    is_present = related >= 0
    row = np.repeat(np.arange(len(classes)), size)[is_present]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(classes)))))
    return offsets, related[is_present], table.values[pair[is_present]]


def _take_newest(
    runs: _Runs,
    end: np.ndarray,
    taken: np.ndarray,
    inspected: np.ndarray,
    reader: np.ndarray,
    value: np.ndarray,
    user: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return edges to the ``taken`` newest interactions of runs that end at ``end``."""
    # all [runs], but user [m]; with it, interactions of the reader's user are skipped, which are
    # among the ``inspected`` newest ones of a run
    run = np.repeat(np.arange(len(inspected)), inspected)
    event = runs.events[end[run] - 1 - gather_index(np.zeros_like(inspected), inspected)]
    if user is not None:
        is_other = user[event] != user[reader[run]]
        event, run = event[is_other], run[is_other]
        size = np.bincount(run, minlength=len(inspected))
        is_taken = gather_index(np.zeros_like(size), size) < taken[run]
        event, run = event[is_taken], run[is_taken]
    return reader[run], event, value[run]


def top_differences(
    values: np.ndarray,
    chain: np.ndarray,
    k: int,
    scales: tuple[float, ...],
    longest: int,
    rising: bool,
) -> Edges:
    """Return the k strongest relations of numbers within a chain (``scope: sequence``).

    Args:
        values: [m] float64, NaN where missing.
        chain: [m] as in :class:`EventOrder`.
        k, longest: most relations of an interaction, and how many interactions back are compared.
        scales: r_norm of equation 10.
        rising: whether values never fall along a chain, as times and positions; the k nearest
            interactions are then the strongest, and only they are compared.
    """
    m, most_older = len(values), np.bincount(chain).max(initial=1) - 1
    back = np.arange(1, min(longest, most_older, k if rising else longest) + 1)
    rows, parts = max(1, PAIRS // max(len(back), 1)), list[tuple[np.ndarray, ...]]()
    for start in range(0, m, rows):
        reader = np.arange(start, min(start + rows, m))[:, None]
        source = np.maximum(reader - back, 0)
        is_in_chain = (back <= reader) & (chain[source] == chain[reader])
        with np.errstate(invalid="ignore"):
            relation = similarity(values[reader] - values[source], scales)
        relation[~is_in_chain | ~(relation >= WEAKEST)] = 0
        strongest = np.argsort(-relation, axis=1, kind="stable")[:, :k]  # equal: the nearest first
        relation, source = (np.take_along_axis(x, strongest, 1) for x in (relation, source))
        row, column = np.nonzero(relation)
        parts.append((row + start, source[row, column], relation[row, column]))
    return Edges.from_parts(parts)
