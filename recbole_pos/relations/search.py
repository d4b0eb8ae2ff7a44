"""Search the strongest relations of every interaction among the interactions it may read.

Words of this file, where m interactions of a batch are numbered from 0:

- To *read* an interaction is to add its state to one's own, weighted by the relation of the two.
  The interaction that reads is the *reader*, the other one the *source*.
- A *class* is all interactions with the same value of an attribute, such as one brand. A table says
  how strongly two classes are related. Class 0 is for interactions without a value.
- A *sequence* is interactions of one user, the oldest first.
- The *arrival* of an interaction is its place in an order of all interactions of the batch.

Who may read whom is said by :class:`EventOrder`. To find what a reader may read of a class,
interactions are sorted by class and arrival: then it is a *range* of neighbours, whose ends are
found by bisection. A reader searches the classes that it is most strongly related to, mostly few,
so the cost does not grow with the square of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recbole_pos.data.windows import count_from_zero, gather_index
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
    """Interactions sorted by several columns, such as first by class, then by arrival.

    Attributes:
        events: [n] int64 the interactions, sorted.
        keys: [n] int64 their keys, which never fall: the columns of an interaction made one number.
        sizes: how many values each of the columns may have.
    """

    def __init__(self, events: np.ndarray, *columns: np.ndarray) -> None:
        """Sort interactions by the first column, those with equal values by the second, and so on.

        For example, interactions 0, 1, 2 with the columns [2, 1, 2] and [5, 6, 4] are sorted 1, 2,
        0. For this the columns are made one *key*. The second column has values below 7, so the key
        is 7 * first + second, here 19, 13, 18.

        Args:
            events: [n] int64 the interactions to sort, ascending; some or all of a batch of m.
            *columns: [m] int64 each, a value of 0 or more for every interaction of the batch.
        """
        # how many values each column may have: (3, 7) in the example
        self.sizes = tuple(int(column.max(initial=0)) + 1 for column in columns)
        keys = np.ravel_multi_index([column[events] for column in columns], self.sizes)
        by_key = np.argsort(keys, kind="stable")
        self.events, self.keys = events[by_key], keys[by_key]

    def find_range(
        self, leading: Sequence[np.ndarray], start: np.ndarray | int, stop: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find interactions by their values in the sorted columns; this makes k searches at once.

        Let the columns be class and arrival. A search for class 3 and arrivals 0 to 6 has 3 in
        ``leading``, ``start`` 0 and ``stop`` 7. What it finds are neighbours, as interactions are
        sorted by class, and those of one class by arrival.

        Args:
            leading: for every column but the last an array [k] int64: the value of each search.
            start, stop: [k] int64 range of values of the last column, without ``stop`` itself;
                ``start`` may be one number for all searches.

        Returns:
            [k] int64 begin and [k] int64 end: search i finds ``self.events[begin[i] : end[i]]``.
        """
        # ``self.keys`` has one number for each interaction, its key: if there are 10 arrivals, it
        # is 10 * class + arrival. So the search above is for the keys from 30 to below 37.
        first_key = np.ravel_multi_index((*leading, start), self.sizes)
        end_key = np.ravel_multi_index((*leading, stop), self.sizes)
        return np.searchsorted(self.keys, first_key), np.searchsorted(self.keys, end_key)


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
    are related, and how strongly. An interaction is not related to itself here.

    Interactions search in rounds. In each round all that still lack relations, the readers, search
    the next few classes that their own is related to, the most strongly related first, and take the
    interactions of them that they may read, until they have k.

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
    # Class i is related to ``related[offsets[i] : offsets[i + 1]]``, the strongest first, and with
    # the same indices ``strength`` says how strongly: a pair of classes is one index of these.
    offsets, related, strength = _restrict_table(table, batch_classes)

    own_class = np.zeros(m, dtype=np.int64)  # index of each interaction's class among these
    own_class[classified] = class_index

    # With ``same_column`` a reader searches only the part of a class at its own place in a window.
    # Class and place make one number here, to count how many such parts the batch has.
    column = order.column if same_column else np.zeros(m, dtype=np.int64)
    class_and_column = own_class * (int(column.max(initial=0)) + 1) + column
    num_parts = np.unique(class_and_column[classified]).size
    readable = _ReadableInteractions(own_class, column, classified, order, across_users)

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

        # Which interactions of these classes the reader may read: of its own sequence, and all
        # that arrive before it, less those of its own user. And how many of them it takes.
        own, arrived, num_own_user = readable.find(related[pair], reader)
        num_others = arrived.size - num_own_user
        own_count, other_count = _allocate(own.size, num_others, reader, remaining)

        # those of its own sequence, then those of other users
        index, source = own.take_newest(own_count)
        parts.append((reader[index], source, value[index]))
        index, source = _take_other_users(arrived, other_count, num_own_user, order.user, reader)
        parts.append((reader[index], source, value[index]))

        # readers that lack relations and have classes left go on, with more classes at a time
        np.subtract.at(remaining, reader, own_count + other_count)
        next_pair[active] += num_classes
        active = active[(remaining[active] > 0) & (next_pair[active] < end_pair[active])]
        most_classes *= 4
    return Edges.from_parts(parts)


@dataclass(frozen=True)
class _Ranges:
    """A range of sorted interactions for each of n pairs of a reader and a class.

    Attributes:
        events: interactions of a batch, sorted, the newest of each class last.
        begin, end: [n] int64 range i is ``events[begin[i] : end[i]]``.
    """

    events: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """[n] int64 how many interactions each range has."""
        return self.end - self.begin

    def take_newest(self, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """List the newest interactions of each range, the newest first.

        Range i is ``events[begin[i] : end[i]]``, with the newest interaction at its end. If
        ``events`` is 7, 2, 9, 4, the range from 0 to 3 has the interactions 7, 2, 9; with a count
        of 2 it gives 9 and 2.

        Args:
            count: [n] int64 how many interactions to list of each of the n ranges.

        Returns:
            [sum of ``count``] int64 the index of the range; and [sum of ``count``] int64 the
            interaction.
        """
        # for counts 2 and 3: the indices 0, 0, 1, 1, 1 of ranges, and the places 0, 1, 0, 1, 2 from
        # the end of a range
        index = np.repeat(np.arange(len(count)), count)
        place_from_end = count_from_zero(count)
        return index, self.events[self.end[index] - 1 - place_from_end]


class _ReadableInteractions:
    """Finds interactions of a class that a reader may read, as ranges of sorted interactions."""

    def __init__(
        self,
        own_class: np.ndarray,
        column: np.ndarray,
        classified: np.ndarray,
        order: EventOrder,
        across_users: bool,
    ) -> None:
        """Sort the m interactions of a batch in three ways, each for one kind of search.

        A search is for interactions of one class, such as a brand, that another interaction, the
        reader, may read: it adds their states to its own. These are older ones of its own sequence,
        a part of its user's history, and ones of other users that come before it in the order of
        the whole batch (``order.arrival``).

        Args:
            own_class: [m] int64 class of each interaction.
            column: [m] int64: an interaction may read only those with the same number here. It is
                the place in a window, or 0 for all if the place does not matter.
            classified: indices of the interactions that have a class, ascending.
            order: for each interaction its user, sequence and arrival, and whether other users may
                read it (``is_source``). Those of a sequence are next to each other, oldest first.
            across_users: whether interactions of other users are read at all.
        """
        # ``_SortedInteractions(interactions, a, b, c)`` sorts interactions by a, equal ones by b,
        # and equal ones by c. So those of one a, one b and all c below a limit are neighbours,
        # which a search finds by bisection.

        # for older interactions of a sequence: by class, column and index in the batch
        index = np.arange(len(order))
        self.by_index = _SortedInteractions(classified, own_class, column, index)

        # For interactions that come before the reader: of all users, and of the reader's own user,
        # which are to be left out of the former.
        sources = classified[order.is_source[classified]] if across_users else classified[:0]
        self.by_arrival = _SortedInteractions(sources, own_class, column, order.arrival)
        self.by_user = _SortedInteractions(sources, own_class, column, order.user, order.arrival)

        # for the reader; ``first`` [m] is the index of the first interaction of its sequence
        self.order, self.column = order, column
        self.first = np.searchsorted(order.sequence, order.sequence, "left")

    def find(
        self, source_class: np.ndarray, reader: np.ndarray
    ) -> tuple[_Ranges, _Ranges, np.ndarray]:
        """Find what each of n readers may read of one class, such as a brand.

        A reader is an interaction that reads others: it adds their states to its own. It may read
        those before it in its own sequence, and those of other users that arrive before it: their
        arrival, the place in an order of the whole batch, is smaller. For example, of a class are

            interaction    0    1    2    3
            user           ann  ann  bob  bob
            arrival        0    2    1    3

        Reader 3 may read 2, of its own sequence, and 0 and 1, of another user.

        Args:
            source_class: [n] int64 the class that each reader searches.
            reader: [n] int64 index of each reader in the batch.

        Returns:
            own: those before each reader in its own sequence, as a range of sorted interactions: 2
            in the example.
            arrived: those of all users that arrive before it: 0, 2 and 1.
            num_own_user: [n] int64 how many of ``arrived`` are of the reader's own user, and so to
            be skipped by the caller: 1.
        """
        # Only interactions with the reader's ``column`` are read: its place in its window, or 0 for
        # all. ``find_range`` finds those of a class, a column and a range of a third value, such as
        # arrivals; the range is given by its first value and the one after its last.
        class_and_column = source_class, self.column[reader]
        user, arrival = self.order.user[reader], self.order.arrival[reader]

        # indices in the batch from the first one of the reader's sequence to before the reader
        begin, end = self.by_index.find_range(class_and_column, self.first[reader], reader)
        own = _Ranges(self.by_index.events, begin, end)

        # arrivals from 0 to before that of the reader
        begin, end = self.by_arrival.find_range(class_and_column, 0, arrival)
        arrived = _Ranges(self.by_arrival.events, begin, end)

        # the same arrivals, but of the reader's own user
        begin, end = self.by_user.find_range((*class_and_column, user), 0, arrival)
        num_own_user = end - begin
        return own, arrived, num_own_user


def _allocate(
    num_own: np.ndarray, num_others: np.ndarray, reader: np.ndarray, remaining: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Decide how many interactions each reader takes of each class that it searches.

    A reader needs a number of interactions. It searches classes, such as brands, one after the
    other. Of each it takes interactions of its own user first, then those of other users, until it
    has enough. For example, reader 0 needs 4 and searches two classes, reader 1 needs 2 in one:

        reader         0  0  1
        num_own        1  2  3
        num_others     2  5  0
        own_count      1  1  2
        other_count    2  0  0

    From its first class reader 0 takes 3, so that it takes 1 more from the second.

    Args:
        num_own, num_others: [n] int64 for n pairs of a reader and a class: how many interactions
            the class has of the reader's own user, and of other users.
        reader: [n] int64 the reader of each pair, never falling.
        remaining: [m] int64 how many interactions each of the m readers needs: here [4, 2].

    Returns:
        own_count: [n] int64 how many interactions of its own user a reader takes of the class.
        other_count: [n] int64 how many of other users.
    """
    # how many interactions all pairs before have: 0, 3, 10 in the example
    num_offered = num_own + num_others
    offered_before = np.cumsum(num_offered) - num_offered

    # Of these only the pairs of the same reader count: 0, 3, 0. So the number at the reader's first
    # pair, which is pair 0, 0, 2, is subtracted.
    first_pair = np.searchsorted(reader, reader, "left")
    offered_to_reader = offered_before - offered_before[first_pair]

    # what the reader needs before the class: 4, 1, 2; nothing is taken if that is below 0
    num_needed = remaining[reader] - offered_to_reader
    own_count = np.clip(num_needed, 0, num_own)
    other_count = np.clip(num_needed - num_own, 0, num_others)
    return own_count, other_count


def _take_other_users(
    ranges: _Ranges, count: np.ndarray, num_own: np.ndarray, user: np.ndarray, reader: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """List the newest interactions of each range that are not of the reader's own user.

    A range is interactions, the newest last, that one interaction, its reader, may read. For
    example, range 0 has the interactions 0 to 4, of eve, ann, bob, ann, bob, and a reader of bob.
    If 2 are to be listed, these are 3 and 1, both of ann.

    Args:
        ranges: n ranges of interactions; ``ranges.size`` says how many each has.
        count: [n] int64 how many to list of each range, which has at least so many of other users.
        num_own: [n] int64 how many of each range are of the reader's own user, to be skipped.
        user: [m] int64 user of each interaction of the batch.
        reader: [n] int64 the reader of each range.

    Returns:
        [sum of ``count``] int64 the index of the range; and [sum of ``count``] int64 the
        interaction.
    """
    # List the newest ``count + num_own`` of each range, which have enough of other users. In the
    # example these are 2 + 2: ``event`` is 4, 3, 2, 1, and ``index``, the range, is 0, 0, 0, 0.
    num_listed = np.where(count > 0, np.minimum(count + num_own, ranges.size), 0)
    index, event = ranges.take_newest(num_listed)

    # leave out those of the reader's own user: 3, 1 remain
    is_other = user[event] != user[reader[index]]
    index, event = index[is_other], event[is_other]

    # Of each range take the first ``count``. The places in a range begin with 0 where the range
    # does: if the index is 4, 4, 4, 6, ranges begin at 0, 0, 0, 3, and the places are 0, 1, 2, 0.
    range_begin = np.searchsorted(index, index, "left")
    place_in_range = np.arange(len(index)) - range_begin
    is_taken = place_in_range < count[index]
    return index[is_taken], event[is_taken]


def _restrict_table(
    table: RelationTable, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the part of a table that relates the k classes of a batch, renumbered 0 to k - 1.

    The table is a sparse matrix in three arrays: class c is related to the classes
    ``related[indptr[c] : indptr[c + 1]]``, with the strengths ``values`` at the same indices. For
    example, 1 is related to 1, 2, 3; 2 to 2, 1; and 3 to 3, 1. The batch has 1 and 3 only, which
    become 0 and 1:

        indptr     [0, 0, 3, 5, 7]           ->    offsets    [0, 2, 4]
        related    [1, 2, 3, 2, 1, 3, 1]     ->    related    [0, 1, 1, 0]

    Args:
        table: which classes are related, and how strongly.
        classes: [k] int64 the classes of the batch, ascending.

    Returns:
        offsets [k + 1] int64, related [pairs] int64 and values [pairs] float64 of the batch.
    """
    # the new number of each class of the table, -1 if it is not in the batch: here -1, 0, -1, 1
    new_number = np.full(len(table.indptr) - 1, -1)
    new_number[classes] = np.arange(len(classes))

    # The entries of the batch's classes are 0, 1, 2 and 5, 6 (``gather_index`` lists so many from
    # each first one on). They relate the new classes 0, 0, 0, 1, 1 to 0, -1, 1, 1, 0.
    num_entries = np.diff(table.indptr)[classes]
    entry = gather_index(table.indptr[classes], num_entries)
    row = np.repeat(np.arange(len(classes)), num_entries)
    column = new_number[table.related[entry]]

    # keep the entries whose second class is in the batch, too: here 2 of each class
    is_kept = column >= 0
    num_kept = np.bincount(row[is_kept], minlength=len(classes))
    offsets = np.append(0, np.cumsum(num_kept))
    return offsets, column[is_kept], table.values[entry[is_kept]]


def top_differences(
    values: np.ndarray,
    sequence: np.ndarray,
    k: int,
    scales: tuple[float, ...],
    max_back: int,
    is_rising: bool,
) -> Edges:
    """Relate every interaction to the k older ones of its sequence with the most similar numbers.

    The relation of interactions i and j is exp(-|z_i - z_j| / r_norm), averaged over the values of
    r_norm (AttrFormer, Liu et al., KDD 2025, equation 10). Weaker ones than ``WEAKEST`` are left
    out. For example, the third of the times 10, 90, 100 is related to the second most strongly.

    Args:
        values: [m] float64 number z of each interaction, such as its time; NaN where missing.
        sequence: [m] int64 number of each interaction's sequence, never falling; within one the
            oldest interaction is first.
        k: most relations of an interaction.
        scales: values of r_norm.
        max_back: how many interactions back are compared.
        is_rising: whether numbers never fall along a sequence, as times do not.

    Returns:
        Pairs of reader (the later interaction) and source (the older one) with their relation,
        sorted by reader.
    """
    # Each interaction is compared with the ``num_back`` before it. If numbers never fall, the k
    # just before it have the most similar ones, so no others need be compared.
    longest = np.bincount(sequence).max(initial=1)
    num_back = min(max_back, longest - 1)
    if is_rising:
        num_back = min(num_back, k)
    steps_back = np.arange(1, num_back + 1)

    # With the sequences 0, 0, 1, 1, 1, the first interaction of each one's sequence is 0, 0, 2, 2,
    # 2. So each has 0, 1, 0, 1, 2 older ones in its sequence.
    first = np.searchsorted(sequence, sequence, "left")
    num_older = np.arange(len(values)) - first

    # a block of interactions at once, with up to ``PAIRS_AT_ONCE`` pairs: this bounds the memory
    block_size = max(1, PAIRS_AT_ONCE // max(num_back, 1))
    parts = list[tuple[np.ndarray, ...]]()
    for start in range(0, len(values), block_size):
        # A row for each reader of the block, with the sources 1, 2, ... steps before it: readers
        # 3, 4 and ``num_back`` 2 give the rows 2, 1 and 3, 2. Some are of another sequence.
        reader = np.arange(start, min(start + block_size, len(values)))
        source = reader[:, None] - steps_back
        is_same_sequence = steps_back <= num_older[reader, None]

        # ``similarity`` is the mean of exp(-difference / scale), NaN if a number is missing; the
        # comparison with that is False, and gives no warning
        with np.errstate(invalid="ignore"):
            relation = similarity(values[reader, None] - values[source], scales)
            is_strong = relation >= WEAKEST
        relation[~(is_same_sequence & is_strong)] = 0

        # the k largest entries of each row, as indices of rows and columns
        row, column = _find_largest(relation, k)
        parts.append((reader[row], source[row, column], relation[row, column]))
    return Edges.from_parts(parts)


def _find_largest(matrix: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k largest entries of each row that are above 0; of equal ones the first in the row.

    If k is 2, for example, the row [0.1, 0.7, 0, 0.7] gives the columns 1 and 3.

    Returns:
        [n] int64 row and [n] int64 column of each entry, row by row, the largest first.
    """
    largest = np.argsort(-matrix, axis=1, kind="stable")[:, :k]  # columns of each row
    is_positive = np.take_along_axis(matrix, largest, axis=1) > 0
    return np.nonzero(is_positive)[0], largest[is_positive]
