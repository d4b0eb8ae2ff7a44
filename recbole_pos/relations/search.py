"""Search the strongest relations of every interaction among the interactions it may read.

Words of this file, where m interactions of a batch are numbered from 0:

- To *read* an interaction is to add its state to one's own, weighted by the relation of the two.
  The interaction that reads is the *reader*, the other one the *source*.
- A *class* is all interactions with the same value of an attribute, such as one brand. A table says
  how strongly two classes are related. Class 0 is for interactions without a value.
- A *sequence* is interactions of one user, the oldest first.
- The *arrival* of an interaction is its place in an order of all interactions of the batch.

Who may read whom is said by :class:`EventOrder`. To find the interactions of a class that a reader
may read, interactions are sorted by class and, within a class, by arrival: then they are a *run*, a
stretch of neighbours, whose ends are found by bisection. A reader searches the classes that it is
most strongly related to, mostly few, so the cost does not grow with the square of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recbole_pos.data.windows import gather_index
from recbole_pos.relations.tables import WEAKEST, RelationTable, similarity

# most classes of a reader searched in the first round; each later round searches four times as many
FIRST_CLASSES = 8
PAIRS_AT_ONCE = 1 << 22  # pairs of interactions that are compared at once


@dataclass(frozen=True)
class PackedSequences:
    """Windows of histories, one after the other, by the rows of their interactions in the log.

    Attributes:
        events: [m] int64 row of each interaction in the dataset's log.
        lengths: [b] int64 number of interactions of each window.
        sequence: [b] int64 number of the sequence that each window belongs to, never falling.
            Consecutive windows of a user may be one sequence, in which later interactions read all
            earlier ones.
        is_source: [m] bool, whether other users may read the interaction.
        is_predicted: [b] bool, whether predictions are made from the window.
    """

    events: np.ndarray
    lengths: np.ndarray
    sequence: np.ndarray
    is_source: np.ndarray
    is_predicted: np.ndarray

    def __add__(self, other: PackedSequences) -> PackedSequences:
        """Return the windows of this batch followed by those of ``other``.

        The sequences of ``other`` are numbered on from the last one here: 0, 0, 1 and 0, 1 become
        0, 0, 1, 2, 3, so that no window of one batch continues a sequence of the other.
        """
        num_sequences = self.sequence.max(initial=-1) + 1
        return PackedSequences(
            np.append(self.events, other.events),
            np.append(self.lengths, other.lengths),
            np.append(self.sequence, other.sequence + num_sequences),
            np.append(self.is_source, other.is_source),
            np.append(self.is_predicted, other.is_predicted),
        )


@dataclass(frozen=True)
class EventOrder:
    """Who may read whom among the m interactions of a batch.

    An interaction reads

    - the interactions before it in its own sequence, and
    - interactions of other users that arrive strictly before it, if they are sources.

    Arrivals rise along a sequence. So whatever an interaction reads, also by way of others, arrives
    before it, or is of its own user and older: nothing comes back from its user's future.

    Attributes:
        user: [m] int64 user of the interaction.
        sequence: [m] int64 number of the interaction's sequence, never falling from one interaction
            to the next; in a sequence the oldest interaction is first.
        arrival: [m] int64 number of earlier arrival times in the batch, the same for interactions
            that arrive at the same time.
        is_source: [m] bool, whether other users may read the interaction.
        column: [m] int64 place of the interaction in its window, 0 for the oldest.
    """

    user: np.ndarray
    sequence: np.ndarray
    arrival: np.ndarray
    is_source: np.ndarray
    column: np.ndarray

    def __len__(self) -> int:
        """Return m, the number of interactions."""
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


class _SortedInteractions:
    """Interactions sorted by several numbers of each, such as first by class, then by arrival.

    The numbers of an interaction are made into one, its key, as hours and minutes make minutes: if
    there are 10 arrivals, class 3 and arrival 7 have the key 37.

    Attributes:
        events: [n] int64 the interactions, sorted.
        keys: [n] int64 their keys, which never fall.
        sizes: how many values each of the numbers may have.
    """

    def __init__(self, events: np.ndarray, *numbers: np.ndarray) -> None:
        """Sort interactions.

        Args:
            events: [n] int64 the interactions to sort, ascending.
            *numbers: [m] int64 numbers of all interactions of the batch, the one to sort by first
                at the front.
        """
        self.sizes = [int(x.max(initial=0)) + 1 for x in numbers]
        keys = self._make_keys([x[events] for x in numbers])
        by_key = np.argsort(keys, kind="stable")
        self.events, self.keys = events[by_key], keys[by_key]

    def _make_keys(self, numbers: Sequence[np.ndarray | int]) -> np.ndarray:
        """Return the keys [k] of k interactions, whose numbers are given as [k] each."""
        first, *others = numbers
        keys = np.asarray(first)
        for number, size in zip(others, self.sizes[1:], strict=True):
            keys = keys * size + number
        return keys

    def count_below(self, *numbers: np.ndarray | int) -> np.ndarray:
        """Return how many of the interactions have a lower key than given numbers, by bisection.

        Args:
            *numbers: [k] int64 each, as many as the interactions are sorted by, or one number for
                all.

        Returns:
            [k] int64, which is also where interactions with these numbers begin in ``events``.
        """
        return np.searchsorted(self.keys, self._make_keys(numbers), "left")


def top_relations(
    table: RelationTable,
    classes: np.ndarray,
    order: EventOrder,
    k: int,
    across_users: bool,
    same_column: bool = False,
) -> Edges:
    """Return the k strongest relations of every interaction to interactions that it may read.

    To read an interaction is to add its state to one's own, weighted by the relation. A class is
    all interactions with the same value of a field, such as a brand; the table says which classes
    are related. An interaction is not related to itself here.

    Among equal relations, the larger cosine of the classes goes first, then the lower class, then
    interactions of the own sequence, then the nearest before the reader (in its sequence, or by
    arrival; of those that arrive together the later in the batch).

    Args:
        table: classes and their relations.
        classes: [m] int64 class of each interaction, 0 for none.
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
    classified = np.flatnonzero(classes > 0)
    batch_classes, class_index = np.unique(classes[classified], return_inverse=True)
    # of class i: ``related[offsets[i] : offsets[i + 1]]``, the strongest first, and their relations
    offsets, related, strength = _restrict_table(table, batch_classes)

    own_class = np.zeros(m, dtype=np.int64)  # index of each interaction's class among these
    own_class[classified] = class_index

    # with ``same_column`` only the part of a class in the reader's column is searched
    column = order.column if same_column else np.zeros(m, dtype=np.int64)
    class_and_column = own_class * (int(column.max(initial=0)) + 1) + column  # as one number
    num_parts = np.unique(class_and_column[classified]).size
    readable = _ReadableRuns(own_class, column, classified, order, across_users)

    # In the first round a reader searches so many classes that they have about 2 k interactions, of
    # which half stand before it: that is mostly enough. ``FIRST_CLASSES`` limits their number.
    most_classes = min(FIRST_CLASSES, 1 + 2 * k * num_parts // max(len(classified), 1))

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

        # which interactions of these classes the reader may read, and how many of them it takes
        own, shared = readable.find(related[pair], reader)
        own_count, shared_count = _allocate(
            own.num_readable, shared.num_readable, reader, remaining
        )

        # those of its own sequence, then those of other users
        run, source = own.take_newest(own_count)
        parts.append((reader[run], source, value[run]))
        run, source = _take_other_users(shared, shared_count, order.user, reader)
        parts.append((reader[run], source, value[run]))

        # readers that lack relations and have classes left go on, with more classes at a time
        np.subtract.at(remaining, reader, own_count + shared_count)
        next_pair[active] += num_classes
        active = active[(remaining[active] > 0) & (next_pair[active] < end_pair[active])]
        most_classes *= 4
    return Edges.from_parts(parts)


@dataclass(frozen=True)
class _Runs:
    """A run for each of n pairs of a reader and a class: interactions of the class before it.

    Attributes:
        events: interactions of a batch, sorted, among which a run is a stretch of neighbours, the
            newest at its end.
        end: [n] int64 the index in ``events`` after the last interaction of a run.
        size: [n] int64 how many interactions a run has.
        num_readable: [n] int64 how many of them the reader may read.
    """

    events: np.ndarray
    end: np.ndarray
    size: np.ndarray
    num_readable: np.ndarray

    def take_newest(self, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """List the newest interactions of each run, the newest first.

        Of the sorted interactions 7, 2, 9, 4 a run that ends at 3 gives 9 and 2 if its count is 2.

        Args:
            count: [n] int64 how many to list of each run.

        Returns:
            The number of the run, and the interaction, [sum of ``count``] int64 both.
        """
        run = np.repeat(np.arange(len(count)), count)
        place_from_end = gather_index(np.zeros_like(count), count)  # 0 is the newest of a run
        return run, self.events[self.end[run] - 1 - place_from_end]


class _ReadableRuns:
    """Finds the interactions of a class that a reader may read, as runs of sorted interactions.

    Args:
        own_class: [m] int64 class of each interaction.
        column: [m] int64 column of each interaction; a reader reads its own column only.
        classified: int64 the interactions that have a class, ascending.
        order: who may read whom.
        across_users: whether interactions of other users are read at all.
    """

    def __init__(
        self,
        own_class: np.ndarray,
        column: np.ndarray,
        classified: np.ndarray,
        order: EventOrder,
        across_users: bool,
    ) -> None:
        self.order, self.column = order, column
        # the first interaction of the sequence that each interaction belongs to
        self.first = np.searchsorted(order.sequence, order.sequence, "left")
        # Interactions of a sequence have numbers in a row, so sorted by number the earlier ones of
        # a reader's sequence are neighbours.
        number = np.arange(len(order))
        self.by_number = _SortedInteractions(classified, own_class, column, number)

        # interactions that other users may read: by arrival, those before a reader are neighbours
        shared = classified[order.is_source[classified]] if across_users else classified[:0]
        self.by_arrival = _SortedInteractions(shared, own_class, column, order.arrival)
        self.by_user = _SortedInteractions(shared, own_class, column, order.user, order.arrival)

    def find(self, source_class: np.ndarray, reader: np.ndarray) -> tuple[_Runs, _Runs]:
        """Find the interactions of a class before a reader, for n pairs of a class and a reader.

        Args:
            source_class: [n] int64 class to search.
            reader: [n] int64 interaction that reads.

        Returns:
            Two runs for each pair: the earlier interactions of the reader's own sequence, and all
            interactions for others to read that arrive before the reader. In the second run those
            of the reader's own user are not readable: of its user it reads its own sequence only.
        """
        part = source_class, self.column[reader]
        end = self.by_number.count_below(*part, reader)
        size = end - self.by_number.count_below(*part, self.first[reader])
        own = _Runs(self.by_number.events, end, size, num_readable=size)

        user, arrival = self.order.user[reader], self.order.arrival[reader]
        end = self.by_arrival.count_below(*part, arrival)
        size = end - self.by_arrival.count_below(*part, 0)
        user_end = self.by_user.count_below(*part, user, arrival)
        num_own_user = user_end - self.by_user.count_below(*part, user, 0)
        return own, _Runs(self.by_arrival.events, end, size, num_readable=size - num_own_user)


def _allocate(
    num_own: np.ndarray, num_shared: np.ndarray, reader: np.ndarray, remaining: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Decide how many interactions a reader takes from each class that it searches.

    A class (all interactions of a brand, for example) offers two runs of interactions to a reader:
    its own run, of the reader's own sequence, and its shared run, of other users. A reader goes
    through its classes one by one, in each through the own run first, until it has as many as it
    lacks. For example, one reader that lacks 4 and searches two classes, with own runs of 1 and 2
    and shared runs of 2 and 5, takes 1 and 1 from the own runs, and 2 and 0 from the shared ones.

    Args:
        num_own, num_shared: [n] int64 how many interactions the runs have for n pairs of a reader
            and a class.
        reader: [n] int64 the reader of each pair, never falling.
        remaining: [m] int64 how many each of the m interactions lacks as a reader.

    Returns:
        [n] int64 how many to take from each own run, and [n] from each shared run.
    """
    # the 2n runs in the order in which they are gone through, own and shared in turn
    sizes = np.stack((num_own, num_shared), 1).reshape(-1)
    run_reader = np.repeat(reader, 2)

    # How many interactions the runs before have: of all readers, less those before the reader's
    # first run. Sums never fall, so the sum at the reader's first run is the largest up to here.
    num_before = np.cumsum(sizes) - sizes
    is_first = np.diff(run_reader, prepend=-1) > 0
    num_before -= np.maximum.accumulate(np.where(is_first, num_before, 0))

    num_taken = np.clip(remaining[run_reader] - num_before, 0, sizes)
    return num_taken[::2], num_taken[1::2]


def _take_other_users(
    shared: _Runs, count: np.ndarray, user: np.ndarray, reader: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """List the newest interactions of each shared run that are not of the reader's own user.

    Args:
        shared: [n] runs of interactions that arrive before their reader.
        count: [n] int64 how many to list of each run.
        user: [m] int64 user of each interaction of the batch.
        reader: [n] int64 the reader of each run.

    Returns:
        The number of the run, and the interaction, [sum of ``count``] int64 both.
    """
    # as many more are looked at as there are of the reader's own user, then these are left out
    num_own_user = shared.size - shared.num_readable
    num_inspected = np.where(count > 0, np.minimum(count + num_own_user, shared.size), 0)
    run, event = shared.take_newest(num_inspected)
    is_other = user[event] != user[reader[run]]
    run, event = run[is_other], event[is_other]

    # of what is left the first ones of each run: runs 4, 4, 4, 6 have the places 0, 1, 2, 0
    place_in_run = np.arange(len(run)) - np.searchsorted(run, run, "left")
    is_taken = place_in_run < count[run]
    return run[is_taken], event[is_taken]


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
    related = class_index[table.related[pair]]
    is_present = related >= 0

    # kept pairs of each class, added up: 2, 0 and 1 pairs give the offsets 0, 2, 2, 3
    row = np.repeat(np.arange(len(classes)), sizes)[is_present]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(classes)))))
    return offsets, related[is_present], table.values[pair[is_present]]


def top_differences(
    values: np.ndarray,
    sequence: np.ndarray,
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
        sequence: [m] int64 number of each interaction's sequence, never falling; within one the
            oldest interaction is first.
        k: most relations of an interaction.
        scales: values of r_norm.
        max_back: how many interactions back are compared.
        is_rising: whether values never fall along a sequence, as times and positions; the k nearest
            interactions are then the strongest, and only they are compared.

    Returns:
        Pairs of reader and source with their relation, sorted by reader.
    """
    # how far back a reader looks: 1, 2, ... interactions before it
    longest = np.bincount(sequence).max(initial=1)
    back = np.arange(1, min(max_back, longest - 1, k if is_rising else max_back) + 1)

    # so many readers at a time that they make ``PAIRS_AT_ONCE`` pairs
    num_readers = max(1, PAIRS_AT_ONCE // max(len(back), 1))
    parts = list[tuple[np.ndarray, ...]]()
    for start in range(0, len(values), num_readers):
        # relations [readers, back] of each reader to each interaction before it, 0 for none
        reader = np.arange(start, min(start + num_readers, len(values)))[:, None]
        source = np.maximum(reader - back, 0)
        is_in_sequence = (back <= reader) & (sequence[source] == sequence[reader])
        # ``similarity`` is the mean of exp(-difference / scale); comparing NaN gives no warning
        with np.errstate(invalid="ignore"):
            relation = similarity(values[reader] - values[source], scales)
        relation[~(is_in_sequence & (relation >= WEAKEST))] = 0  # of missing numbers, too

        strongest = np.argsort(-relation, axis=1, kind="stable")[:, :k]  # equal: the nearest first
        relation = np.take_along_axis(relation, strongest, 1)
        source = np.take_along_axis(source, strongest, 1)
        row, column = np.nonzero(relation)
        parts.append((start + row, source[row, column], relation[row, column]))
    return Edges.from_parts(parts)
