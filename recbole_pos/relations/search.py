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
PAIRS_AT_ONCE = 1 << 22  # pairs of interactions that are compared at once


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
        is_source: [m] bool, whether other users may read the interaction.
        column: [m] int64 place of the interaction in its window.
    """

    user: np.ndarray
    chain: np.ndarray
    rank: np.ndarray
    is_source: np.ndarray
    column: np.ndarray

    def __len__(self) -> int:
        return len(self.user)


@dataclass(frozen=True)
class Edges:
    """Relations [E] that are kept: ``reader`` (never falling) reads ``source`` at ``value``."""

    reader: np.ndarray
    source: np.ndarray
    value: np.ndarray

    @classmethod
    def from_parts(cls, parts: list[tuple[np.ndarray, ...]]) -> Edges:
        """Return the edges of parts, each of readers, sources and values, sorted by reader."""
        empty = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)  # if there is no part
        reader, source, value = (np.concatenate(x) for x in zip(empty, *parts, strict=True))
        by_reader = np.argsort(reader, kind="stable")
        return cls(reader[by_reader], source[by_reader], value[by_reader])


class _Runs:
    """Interactions [n] sorted by their codes, in which those of a range of codes are a run."""

    def __init__(self, events: np.ndarray, codes: np.ndarray) -> None:
        by_code = np.argsort(codes, kind="stable")
        self.events, self.codes = events[by_code], codes[by_code]

    def locate(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the end and the size of each run of codes in [low, high)."""
        end = np.searchsorted(self.codes, high, "left")
        return end, end - np.searchsorted(self.codes, low, "left")


class _ReadableRuns:
    """Finds the interactions of a cell that a reader may read, which are runs of sorted arrays.

    A cell is a class and a column as one number. Interactions are sorted by cell and chain, for
    those of the reader's own chain, and by cell and rank, for those of other users.

    Args:
        cell: [m] cell of each interaction.
        classified: interactions that have a class, ascending.
        order: who may read whom.
        across_users: whether interactions of other users are read at all.
    """

    def __init__(
        self, cell: np.ndarray, classified: np.ndarray, order: EventOrder, across_users: bool
    ) -> None:
        self.order = order
        self.num_chains = int(order.chain.max(initial=0)) + 1
        self.num_users = int(order.user.max(initial=0)) + 1
        self.num_ranks = int(order.rank.max(initial=0)) + 1
        # (cell, chain, interaction) as one number
        chain_code = cell[classified] * self.num_chains + order.chain[classified]
        self.own = _Runs(classified, chain_code * len(order) + classified)
        # (cell, rank) as one number, of the interactions that other users may read
        shared = classified[order.is_source[classified]] if across_users else classified[:0]
        rank = order.rank[shared]
        self.shared = _Runs(shared, cell[shared] * self.num_ranks + rank)
        # (cell, user, rank) as one number
        user_code = cell[shared] * self.num_users + order.user[shared]
        self.shared_by_user = _Runs(shared, user_code * self.num_ranks + rank)

    def find(self, cell: np.ndarray, reader: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the runs of the interactions in ``cell`` [n] that each ``reader`` [n] may read.

        Returns:
            Ends and sizes of the runs of the own chain, ends and sizes of the runs of all users,
            and how many interactions of the latter are of the reader's own user; [n] each.
        """
        # a run begins at the code of its first possible interaction, and ends before the reader's
        chain_code = (cell * self.num_chains + self.order.chain[reader]) * len(self.order)
        own_end, own_size = self.own.locate(chain_code, chain_code + reader)

        rank, rank_code = self.order.rank[reader], cell * self.num_ranks
        shared_end, shared_size = self.shared.locate(rank_code, rank_code + rank)

        user_code = (cell * self.num_users + self.order.user[reader]) * self.num_ranks
        _, num_own_user = self.shared_by_user.locate(user_code, user_code + rank)
        return own_end, own_size, shared_end, shared_size, num_own_user


def top_relations(
    table: RelationTable,
    group: np.ndarray,
    order: EventOrder,
    k: int,
    across_users: bool,
    same_column: bool = False,
) -> Edges:
    """Return the k strongest relations of every interaction to interactions that it may read.

    Among equal relations, the larger cosine of the classes goes first, then the lower class, then
    interactions of the own chain, then the nearest before the reader (in its chain, or in rank; at
    equal ranks the later in the batch). An interaction is not related to itself here.

    Args:
        table: classes of entities and their relations.
        group: [m] class of each interaction, 0 for none.
        order: who may read whom.
        k: most relations of an interaction.
        across_users: whether interactions of other users are read at all.
        same_column: whether to relate only interactions at the same place of their windows
            (section 3.1.3).
    """
    m = len(order)
    classified = np.flatnonzero(group > 0)
    batch_classes, class_index = np.unique(group[classified], return_inverse=True)
    offsets, related, strength = _restrict_table(table, batch_classes)

    column = order.column if same_column else np.zeros(m, dtype=np.int64)
    num_columns = int(column.max(initial=0)) + 1
    cell = column.copy()
    cell[classified] += class_index * num_columns
    num_cells = np.unique(cell[classified]).size
    runs = _ReadableRuns(cell, classified, order, across_users)

    # so many classes have about 2 k interactions, of which half stand before the reader
    most_classes = min(FIRST_CLASSES, 1 + 2 * k * num_cells // max(len(classified), 1))
    # relations that an interaction still lacks, and the pairs of classes it has yet to search
    remaining, next_pair, end_pair = (np.zeros(m, dtype=np.int64) for _ in range(3))
    remaining[classified] = k
    next_pair[classified] = offsets[class_index]
    end_pair[classified] = offsets[class_index + 1]
    active = classified
    parts = list[tuple[np.ndarray, ...]]()
    while len(active):
        num_classes = np.minimum(end_pair[active] - next_pair[active], most_classes)
        pair = gather_index(next_pair[active], num_classes)
        reader = np.repeat(active, num_classes)
        value = strength[pair]
        source_cell = related[pair] * num_columns + column[reader]
        own_end, own_size, shared_end, shared_size, skipped = runs.find(source_cell, reader)
        own_taken, shared_taken = _allocate(
            own_size, shared_size - skipped, remaining[reader], num_classes
        )
        parts.append(_take_newest(runs.own, own_end, own_taken, own_taken, reader, value))
        # the newest of a shared run may be those to skip
        inspected = np.minimum(shared_taken + skipped, shared_size) * (shared_taken > 0)
        shared_run = runs.shared, shared_end, shared_taken, inspected
        parts.append(_take_newest(*shared_run, reader, value, order.user))
        np.subtract.at(remaining, reader, own_taken + shared_taken)
        next_pair[active] += num_classes
        active = active[(remaining[active] > 0) & (next_pair[active] < end_pair[active])]
        most_classes *= 4
    return Edges.from_parts(parts)


def _allocate(
    own_size: np.ndarray, shared_size: np.ndarray, remaining: np.ndarray, num_classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] how many interactions to take of each own run, and of each shared run.

    Runs are listed reader by reader and class by class. A reader takes from them in this order, and
    in each class from its own chain first, until it has all that it lacks. For example, one reader
    that lacks 4, with two classes of own sizes 1 and 2 and shared sizes 2 and 5, takes 1 and 1 of
    its own and 2 and 0 of the shared.

    Args:
        own_size, shared_size: [n] sizes of the runs.
        remaining: [n] how many the reader of each run lacks.
        num_classes: [readers] number of classes of each reader.
    """
    sizes = np.stack((own_size, shared_size), 1).reshape(-1)  # own and shared runs in turn, [2n]
    num_before = np.cumsum(sizes) - sizes

    # subtract what stands before the reader's first run, so that each reader counts from 0
    first_run = 2 * (np.cumsum(num_classes) - num_classes)
    has_class = num_classes > 0
    num_before -= np.repeat(num_before[first_run[has_class]], 2 * num_classes[has_class])

    num_taken = np.clip(np.repeat(remaining, 2) - num_before, 0, sizes)
    return num_taken[::2], num_taken[1::2]


def _restrict_table(
    table: RelationTable, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the part of a table that relates the given classes to each other.

    Returns:
        Offsets [classes + 1] of each class among the pairs, the related classes [pairs] as indices
        of the ascending ``classes``, and the relations [pairs].
    """
    class_index = np.full(len(table.indptr) - 1, -1)
    class_index[classes] = np.arange(len(classes))
    sizes = np.diff(table.indptr)[classes]
    pair = gather_index(table.indptr[classes], sizes)
    related = class_index[table.classes[pair]]
    is_present = related >= 0
    row = np.repeat(np.arange(len(classes)), sizes)[is_present]
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
    """Return the edges from readers to the newest interactions of their runs.

    Args:
        runs: the sorted interactions, of which a run is a stretch.
        end: [n] where each run ends.
        taken: [n] how many interactions to take of each run.
        inspected: [n] how many to look at: more than are taken where some are to be skipped.
        reader: [n] the reader of each run.
        value: [n] the relation of the reader to each run.
        user: [m] user of each interaction, to skip those of the reader's own user; None skips none.

    Returns:
        Readers, sources and values of the edges, [edges] each.
    """
    run = np.repeat(np.arange(len(inspected)), inspected)
    place_from_end = gather_index(np.zeros_like(inspected), inspected)  # 0 is the newest of a run
    event = runs.events[end[run] - 1 - place_from_end]

    if user is not None:
        is_other = user[event] != user[reader[run]]
        event, run = event[is_other], run[is_other]
        sizes = np.bincount(run, minlength=len(inspected))
        is_taken = gather_index(np.zeros_like(sizes), sizes) < taken[run]
        event, run = event[is_taken], run[is_taken]
    return reader[run], event, value[run]


def top_differences(
    values: np.ndarray,
    chain: np.ndarray,
    k: int,
    scales: tuple[float, ...],
    max_back: int,
    is_rising: bool,
) -> Edges:
    """Return the k strongest relations of numbers within a chain (``scope: sequence``).

    Args:
        values: [m] float64, NaN where missing.
        chain: [m] as in :class:`EventOrder`.
        k: most relations of an interaction.
        scales: r_norm of equation 10.
        max_back: how many interactions back are compared.
        is_rising: whether values never fall along a chain, as times and positions; the k nearest
            interactions are then the strongest, and only they are compared.
    """
    longest = np.bincount(chain).max(initial=1)
    back = np.arange(1, min(max_back, longest - 1, k if is_rising else max_back) + 1)
    num_readers = max(1, PAIRS_AT_ONCE // max(len(back), 1))
    parts = list[tuple[np.ndarray, ...]]()
    for start in range(0, len(values), num_readers):
        reader = np.arange(start, min(start + num_readers, len(values)))[:, None]
        source = np.maximum(reader - back, 0)
        is_in_chain = (back <= reader) & (chain[source] == chain[reader])
        with np.errstate(invalid="ignore"):
            relation = similarity(values[reader] - values[source], scales)
        relation[~(is_in_chain & (relation >= WEAKEST))] = 0  # of missing numbers, too

        strongest = np.argsort(-relation, axis=1, kind="stable")[:, :k]  # equal: the nearest first
        relation = np.take_along_axis(relation, strongest, 1)
        source = np.take_along_axis(source, strongest, 1)
        row, column = np.nonzero(relation)
        parts.append((start + row, source[row, column], relation[row, column]))
    return Edges.from_parts(parts)
