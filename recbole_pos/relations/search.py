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

    - interactions before it in its own *chain* (a sequence, or several windows of one that follow
      each other), and
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
    """Relations that are kept: the state of ``source`` is added to that of ``reader``.

    Attributes:
        reader, source: [E] int64 two interactions of a batch; readers never fall.
        value: [E] float64 strength of the relation, the weight of the source's state.
    """

    reader: np.ndarray
    source: np.ndarray
    value: np.ndarray

    @classmethod
    def from_parts(cls, parts: list[tuple[np.ndarray, ...]]) -> Edges:
        """Join lists of relations into one, sorted by reader.

        A relation connects two interactions of a batch: the reader, which adds the state of the
        source to its own, with a value as the weight.

        Args:
            parts: for each list its readers, sources and values, [relations] each. Relations of
                the same reader keep their order.

        Returns:
            The relations of all lists.
        """
        # begin with an empty list, so that there is something to join without any part
        empty = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        reader, source, value = (np.concatenate(x) for x in zip(empty, *parts, strict=True))
        by_reader = np.argsort(reader, kind="stable")
        return cls(reader[by_reader], source[by_reader], value[by_reader])


class _Runs:
    """Interactions [n] sorted by a number, their code.

    Those whose code is in a range are a run: they stand next to each other.

    Attributes:
        events: [n] int64 interactions, by rising code.
        codes: [n] int64 their codes.
    """

    def __init__(self, events: np.ndarray, codes: np.ndarray) -> None:
        by_code = np.argsort(codes, kind="stable")
        self.events, self.codes = events[by_code], codes[by_code]

    def locate(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the run of interactions with a code from ``low`` up to, not including, ``high``.

        In the codes 2, 5, 5, 9 the range from 5 to 9 ends at index 3 and has 2 interactions.

        Args:
            low, high: [runs] int64.

        Returns:
            The index after the last interaction, and the number of interactions, [runs] each.
        """
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
        """Sort the interactions of a batch so that those which a reader may read are neighbours.

        They are sorted three times: by own chain, by rank, and by user and rank. A class is a value
        of the field that relates interactions (a brand), a chain the interactions of one sequence,
        oldest first, and a rank the order in time of interactions of different users. The key of
        each sorting is one number made of several, as hours and minutes make minutes: with 10
        ranks, cell 3 and rank 7 are 37, so that a cell is a range of numbers.

        Args:
            cell: [m] int64 cell of each interaction: its class and, where only interactions at the
                same place of their windows are related, this place (column), as one number.
            classified: int64 indices of the interactions that have a class, ascending.
            order: chain, user and rank of the m interactions, and whether others may read them.
            across_users: whether interactions of other users are read at all.
        """
        self.order = order
        self.num_chains = int(order.chain.max(initial=0)) + 1
        self.num_users = int(order.user.max(initial=0)) + 1
        self.num_ranks = int(order.rank.max(initial=0)) + 1

        # (cell, chain, interaction) as one number, by which ``_Runs`` sorts
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
        """Find the interactions of a cell that a reader may read, for n pairs of reader and cell.

        To read an interaction is to add its state to one's own. ``__init__`` has sorted all
        interactions, so the readable ones are a run, a stretch of neighbours. ``locate`` returns
        the end and the size of a run by bisection.

        Args:
            cell: [n] cell to look in: a class (such as a brand) and a place in a window as one
                number.
            reader: [n] interaction that reads.

        Returns:
            own_end, own_size: [n] where the earlier interactions of the reader's own chain (its
                sequence) end in ``self.own``, and how many they are.
            shared_end, shared_size: [n] the same in ``self.shared``, for the interactions of all
                users whose rank, the order across users, is lower than the reader's.
            num_own_user: [n] how many of those in ``self.shared`` are of the reader's own user.
                They must be skipped: of its own user a reader reads its own chain only.
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

    To read an interaction is to add its state to one's own, weighted by the relation. A class is
    all interactions with the same value of a field, such as a brand; the table says which classes
    are related. A chain is one sequence, oldest first; a rank orders interactions of different
    users.

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

    Returns:
        Pairs of reader and source with their relation, sorted by reader.
    """
    # the classes that occur in the batch, and which of them are related to each other
    m = len(order)
    classified = np.flatnonzero(group > 0)
    batch_classes, class_index = np.unique(group[classified], return_inverse=True)
    # of class i: ``related[offsets[i] : offsets[i + 1]]``, the strongest first, and their relations
    offsets, related, strength = _restrict_table(table, batch_classes)

    # a cell is a class, or with ``same_column`` a class and a column as one number
    column = order.column if same_column else np.zeros(m, dtype=np.int64)
    num_columns = int(column.max(initial=0)) + 1
    cell = column.copy()
    cell[classified] += class_index * num_columns
    num_cells = np.unique(cell[classified]).size
    runs = _ReadableRuns(cell, classified, order, across_users)

    # In the first round a reader searches so many classes that they have about 2 k interactions, of
    # which half stand before it: that is mostly enough. ``FIRST_CLASSES`` limits their number.
    most_classes = min(FIRST_CLASSES, 1 + 2 * k * num_cells // max(len(classified), 1))

    # how many relations an interaction still lacks, and the pairs of classes it has yet to search
    remaining, next_pair, end_pair = (np.zeros(m, dtype=np.int64) for _ in range(3))
    remaining[classified] = k
    next_pair[classified] = offsets[class_index]
    end_pair[classified] = offsets[class_index + 1]
    active = classified
    parts = list[tuple[np.ndarray, ...]]()
    while len(active):
        # the next classes that each active reader is related to, the strongest first
        num_classes = np.minimum(end_pair[active] - next_pair[active], most_classes)
        pair = gather_index(next_pair[active], num_classes)
        reader = np.repeat(active, num_classes)
        value = strength[pair]
        source_cell = related[pair] * num_columns + column[reader]

        # which interactions of these classes the reader may read, and how many of them it takes
        own_end, own_size, shared_end, shared_size, skipped = runs.find(source_cell, reader)
        own_taken, shared_taken = _allocate(
            own_size, shared_size - skipped, remaining[reader], num_classes
        )

        # those of its own chain, then those of other users
        parts.append(_take_newest(runs.own, own_end, own_taken, own_taken, reader, value))
        # the newest of a shared run may be of the reader's own user, so as many more are looked at
        inspected = np.minimum(shared_taken + skipped, shared_size) * (shared_taken > 0)
        newest_shared = _take_newest(
            runs.shared, shared_end, shared_taken, inspected, reader, value, order.user
        )
        parts.append(newest_shared)

        # readers that lack relations and have classes left go on, with more classes at a time
        np.subtract.at(remaining, reader, own_taken + shared_taken)
        next_pair[active] += num_classes
        active = active[(remaining[active] > 0) & (next_pair[active] < end_pair[active])]
        most_classes *= 4
    return Edges.from_parts(parts)


def _allocate(
    own_size: np.ndarray, shared_size: np.ndarray, remaining: np.ndarray, num_classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Decide how many interactions a reader takes from each class that it searches.

    A class (all interactions of a brand, for example) offers two lists to a reader: its own run, of
    the reader's own sequence, and its shared run, of other users. A reader takes from its classes
    one by one, in each from the own run first, until it has as many as it lacks. For example, one
    reader that lacks 4, with two classes of own sizes 1 and 2 and shared sizes 2 and 5, takes 1 and
    1 of its own and 2 and 0 of the shared.

    Args:
        own_size, shared_size: [n] sizes of the runs, reader by reader and class by class.
        remaining: [n] how many the reader of each run lacks.
        num_classes: [readers] number of classes of each reader.

    Returns:
        [n] how many to take of each own run, and [n] of each shared run.
    """
    # own and shared runs in turn, [2n], and how many interactions stand before each
    sizes = np.stack((own_size, shared_size), 1).reshape(-1)
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

    A class is a value of a field, such as a brand. The table lists for each class the related ones,
    one class after the other; a batch has few of all classes, so the rest need not be searched.

    Args:
        table: which classes of all are related, and how strongly.
        classes: [classes] int64 ascending classes to keep.

    Returns:
        Offsets [classes + 1] of each class among the pairs, the related classes [pairs] as indices
        of the ascending ``classes``, and the relations [pairs].
    """
    # the index of each class of the table among those to keep, or -1
    class_index = np.full(len(table.indptr) - 1, -1)
    class_index[classes] = np.arange(len(classes))

    # all pairs of the kept classes, then those whose second class is kept, too
    sizes = np.diff(table.indptr)[classes]
    pair = gather_index(table.indptr[classes], sizes)
    related = class_index[table.classes[pair]]
    is_present = related >= 0

    # kept pairs of each class, added up: 2, 0 and 1 pairs give the offsets 0, 2, 2, 3
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
    """Return the relations of readers to the newest interactions of their runs.

    A run is a stretch of sorted interactions that a reader may read, the newest at its end. With
    sorted interactions 7, 2, 9, 4, an end of 3 and 2 to take, they are 9 and 2.

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
    # all interactions to look at, each with the number of its run
    run = np.repeat(np.arange(len(inspected)), inspected)
    place_from_end = gather_index(np.zeros_like(inspected), inspected)  # 0 is the newest of a run
    event = runs.events[end[run] - 1 - place_from_end]

    if user is not None:
        # leave out those of the reader's own user, then take the first ones of what is left
        is_other = user[event] != user[reader[run]]
        event, run = event[is_other], run[is_other]
        sizes = np.bincount(run, minlength=len(inspected))
        place_in_run = gather_index(np.zeros_like(sizes), sizes)  # among what is left, from 0
        is_taken = place_in_run < taken[run]
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
    """Relate every interaction to the k older ones of its sequence with the nearest numbers.

    A relation is exp(-|z_i - z_j| / r_norm), averaged over the values of r_norm (AttrFormer, Liu et
    al., KDD 2025, equation 10); weaker ones than ``WEAKEST`` are left out. Times 10, 90 and 100
    relate the third interaction to the second first.

    Args:
        values: [m] float64 number z of each interaction, such as its time; NaN where missing.
        chain: [m] int64 sequence of each interaction, never falling; within one oldest first.
        k: most relations of an interaction.
        scales: values of r_norm.
        max_back: how many interactions back are compared.
        is_rising: whether values never fall along a chain, as times and positions; the k nearest
            interactions are then the strongest, and only they are compared.

    Returns:
        Pairs of reader and source with their relation, sorted by reader.
    """
    # how far back a reader looks: 1, 2, ... interactions before it
    longest = np.bincount(chain).max(initial=1)
    back = np.arange(1, min(max_back, longest - 1, k if is_rising else max_back) + 1)

    # so many readers at a time that they make ``PAIRS_AT_ONCE`` pairs
    num_readers = max(1, PAIRS_AT_ONCE // max(len(back), 1))
    parts = list[tuple[np.ndarray, ...]]()
    for start in range(0, len(values), num_readers):
        # relations [readers, back] of each reader to each interaction before it, 0 for none
        reader = np.arange(start, min(start + num_readers, len(values)))[:, None]
        source = np.maximum(reader - back, 0)
        is_in_chain = (back <= reader) & (chain[source] == chain[reader])
        # ``similarity`` is the mean of exp(-difference / scale); comparing NaN gives no warning
        with np.errstate(invalid="ignore"):
            relation = similarity(values[reader] - values[source], scales)
        relation[~(is_in_chain & (relation >= WEAKEST))] = 0  # of missing numbers, too

        strongest = np.argsort(-relation, axis=1, kind="stable")[:, :k]  # equal: the nearest first
        relation = np.take_along_axis(relation, strongest, 1)
        source = np.take_along_axis(source, strongest, 1)
        row, column = np.nonzero(relation)
        parts.append((start + row, source[row, column], relation[row, column]))
    return Edges.from_parts(parts)
