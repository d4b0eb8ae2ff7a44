"""Relations of a batch: who may read whom, what is related, and with which weight.

To *read* an interaction is to add its state to one's own, weighted by the relation of the two. A
*sequence* is interactions of one user, oldest first: a window, or several that follow each other.
The *log* is all interactions of the dataset, sorted by user and time, one row each.

One order prevents leakage. Every interaction of a batch has an arrival time, a real or a random one
(option ``cross_sequence``). An interaction reads interactions of other users only if they arrive
strictly before it, and of its own user only older ones of its sequence. Everything read, through
any number of layers, lies before the reader, so nothing of a user's own future reaches the user:
neither values, nor which relations are kept, nor how many. So the degrees that normalise a relation
count what its two ends themselves read.

The paper aggregates over the whole batch. Within two layers an interaction then reads its own
target by way of another user, so masking the user's own future would not be enough.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.dataset import Dataset, read_column
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import count_from_zero, gather_index
from recbole_pos.relations.search import (
    Edges,
    EventOrder,
    PackedSequences,
    top_differences,
    top_relations,
)
from recbole_pos.relations.sparse import stack_relations
from recbole_pos.relations.tables import (
    POSITION,
    TIME,
    Relation,
    RelationTable,
    build_user_table,
    relate_classes,
    take_or_fill,
)


@dataclass(frozen=True)
class BatchRelations:
    """The relations of one batch, its ``extras``.

    Attributes:
        heads: multiplies [m, d] by [M m, m], the stacked normalised relations of items and
            behaviour; None without such relations.
        users: multiplies [m, d] by Norm(R^U) [m, m]; None without relations of users.
    """

    heads: Callable[[Tensor], Tensor] | None
    users: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class TableRelation:
    """A relation between classes of entities.

    Attributes:
        table: the classes and their relations.
        is_of_items: whether entities are items, whose relations reach other users. If not, entities
            are the interactions of the log, and only those of one sequence are related.
    """

    table: RelationTable
    is_of_items: bool

    def find_top(self, events: np.ndarray, lookup: RelationLookup, order: EventOrder) -> Edges:
        """Find the strongest relations of each interaction of a batch by one field.

        The field is one of items, such as the brand, or one of interactions, such as the shop.
        Interactions with the same value are a class, and ``self.table`` says how strongly two
        classes are related. A field of interactions relates those of one user only: it tells about
        the behaviour of the user, not about items.

        Args:
            events: [m] int64 row of each interaction of the batch in the log, the table of all
                interactions of the dataset.
            lookup: has the item of each row (``items``), how many relations of an interaction are
                kept (``top_k``), and whether an option allows relations between users at all
                (``across_users``).
            order: which interactions of the batch each one may be related to.

        Returns:
            Pairs of related interactions and the strength of their relation, at most
            ``lookup.top_k`` for each interaction.
        """
        # the class [m] of each interaction: that of its item, or its own; 0 if it has no value
        entities = lookup.items[events] if self.is_of_items else events
        classes = self.table.classify(entities)

        across_users = self.is_of_items and lookup.across_users
        return top_relations(self.table, classes, order, lookup.top_k, across_users)


@dataclass(frozen=True)
class NumberRelation:
    """A relation between numbers of interactions, within a sequence.

    Attributes:
        origin: where numbers come from: position, time, or inter (a field of interactions).
        scales: r_norm of equation 10.
        max_back: how many interactions back are compared.
        values: [interactions of the log] float64, NaN where missing; for inter only.
    """

    origin: str
    scales: tuple[float, ...]
    max_back: int
    values: np.ndarray | None = None

    def read_numbers(self, events: np.ndarray, lookup: RelationLookup) -> np.ndarray:
        """Return the numbers by which interactions are compared: positions, times or field values.

        ``self.origin`` says which of these.

        Args:
            events: [m] int64 row of each interaction in the log, the table of all interactions of
                the dataset. Histories that are not in the dataset have the rows after its last one.
            lookup: has the position and the time of each row, also of those histories.

        Returns:
            [m] float64: how many interactions of the user are older (position), seconds (time), or
            the value of the field, NaN where it is missing.
        """
        if self.origin == POSITION:
            return lookup.ranks[events].astype(np.float64)
        if self.origin == TIME:
            return lookup.times[events]
        # the field has values for the rows of the dataset only: later rows get NaN
        assert self.values is not None
        return take_or_fill(self.values, events, np.nan)

    def find_top(self, events: np.ndarray, lookup: RelationLookup, order: EventOrder) -> Edges:
        """Find the strongest relations of each interaction of a batch to older ones of its user.

        Each interaction has a value: its position, its time or that of a field. Two interactions
        are related by exp(-abs(difference) / scale), averaged over ``self.scales``.

        Args:
            events: [m] int64 row of each interaction of the batch in the log, the table of all
                interactions of the dataset.
            lookup: the columns of the log, and how many relations of each interaction are kept
                (``lookup.top_k``).
            order: the sequence of each interaction (``order.sequence``). A sequence is interactions
                of one user, next to each other in the batch, the oldest first.

        Returns:
            Pairs of an interaction and an older one, at most ``self.max_back`` places before it in
            its sequence, and the strength of their relation; at most ``lookup.top_k`` for each.
        """
        return top_differences(
            self.read_numbers(events, lookup),
            order.sequence,
            lookup.top_k,
            self.scales,
            self.max_back,
            # positions and times never fall, so the search can end at the ``top_k`` just before
            is_rising=self.origin in (POSITION, TIME),
        )


@dataclass(frozen=True)
class ExtendedColumn:
    """Values of the log [n], then of histories [m]; the log is large, and so is not copied."""

    log: np.ndarray
    histories: np.ndarray

    def __getitem__(self, events: np.ndarray) -> np.ndarray:
        """Return the values [m] at indices [m]: below n of the log, from n on of the histories."""
        values = take_or_fill(self.log, events, 0)
        is_outside_log = events >= len(self.log)
        values[is_outside_log] = self.histories[events[is_outside_log] - len(self.log)]
        return values


Column = np.ndarray | ExtendedColumn  # read by places of interactions


class RelationLookup:
    """Finds the relations among the interactions of a batch, and decides who may read whom.

    Attributes:
        top_k, max_length, cross_sequence, default_self_relation: see ``__init__``.
        across_users: whether any relation reaches interactions of other users.
        users, items, times, ranks, is_trained: columns of the log, [interactions] each: user, item,
            seconds, how many interactions of the user are older, and whether the interaction is of
            the training part.
        offsets: [users + 1] int64 row of each user's first interaction; the last entry is the
            number of interactions.
        train_end: [users] int64 row after each user's last training interaction.
        num_events: number of interactions in the log.
        by_attribute: what finds the relations by each field of items or interactions.
        user_table: how strongly users are related, all their fields averaged; None without fields
            of users.
    """

    def __init__(
        self,
        relations: Sequence[Relation],
        dataset: Dataset,
        *,
        top_k: int,
        cross_sequence: str,
        max_length: int,
        seconds: float,
        default_self_relation: float,
    ) -> None:
        """Read a dataset and its fields, by which the interactions of each batch will be related.

        Two interactions are related if they agree in a field, such as the brand of their items, or
        have similar values of it, such as times. A model adds to the state of an interaction the
        states of related ones.

        Args:
            relations: the fields, each of interactions, of their items or of their users.
            dataset: training part of a dataset.
            top_k: how many relations to keep of each interaction and field.
            cross_sequence: to which interactions of other users one may be related: to earlier ones
                (``time_respecting``), to those before it in a random order (``random_order``), or
                to none (``none``).
            max_length: the most interactions of a history that a model reads at once.
            seconds: seconds in one unit of the time field.
            default_self_relation: weight of an interaction's own state in the sum of related states
                if no field of its user has a value; a field with a value gives a weight of its own,
                such as 1 for the same age.
        """
        self.top_k, self.max_length = top_k, max_length
        self.cross_sequence, self.across_users = cross_sequence, cross_sequence != "none"
        self.default_self_relation = default_self_relation
        self._read_log(dataset, seconds)  # columns: user, item, time, ... of each interaction

        # For each field of interactions or items there is an object whose ``find_top`` finds the
        # relations of a batch. For all fields of users together there is one table, which says how
        # strongly users are related; None without such fields.
        of_users = [relation for relation in relations if relation.is_of_users]
        others = [relation for relation in relations if not relation.is_of_users]
        self.by_attribute = [self._build_relation(relation, dataset) for relation in others]
        self.user_table = build_user_table(of_users, dataset)

    def _read_log(self, dataset: Dataset, seconds: float) -> None:
        """Read the columns of a dataset's log, which has a row for each interaction.

        The log is sorted by user and time: user u has the rows offsets[u] to offsets[u + 1] - 1.
        Its times have a unit of so many ``seconds``.
        """
        log, is_trained = dataset.log, dataset.part == TRAIN
        users, times = log.users.numpy(), log.times.numpy()
        self.users: Column = users
        self.items: Column = log.items.numpy()
        self.is_trained: Column = is_trained  # whether an interaction is of the training part
        self.times: Column = times if seconds == 1 else times * seconds  # without a copy if it can
        self.ranks: Column = log.ranks  # how many interactions of the user are older
        self.offsets, self.num_events = log.offsets, len(log)

        # [users] row after each user's last training interaction; a user's training interactions
        # stand before the held-out ones
        num_trained = np.bincount(users[is_trained], minlength=len(self.offsets) - 1)
        self.train_end = self.offsets[:-1] + num_trained

    def _build_relation(
        self, relation: Relation, dataset: Dataset
    ) -> TableRelation | NumberRelation:
        """Build what finds the relations by one field of items or interactions.

        Positions, times and number fields of interactions are compared by their difference, in
        every batch (``NumberRelation``). Any other field divides items or interactions into classes
        of the same value, such as a brand, whose relations are a table made here, once
        (``TableRelation``).

        Args:
            relation: an entry of the option ``relations``, not one of users.
            dataset: where the values of its field are read.

        Returns:
            An object whose ``find_top`` finds the related interactions of a batch.
        """
        origin = relation.origin
        if origin in (POSITION, TIME):
            return NumberRelation(origin, relation.scales, self.max_length)
        if origin == "inter" and relation.kind == "numerical":
            values = read_column(relation.field, origin, dataset)
            return NumberRelation(origin, relation.scales, self.max_length, values)

        class_of, matrix = relate_classes(relation, dataset)
        return TableRelation(RelationTable.from_matrix(class_of, matrix), origin == "item")

    def with_histories(
        self, items: np.ndarray, lengths: np.ndarray, times: np.ndarray | None
    ) -> RelationLookup:
        """Return a copy of this lookup whose log also has histories from outside the dataset.

        The rows of the histories follow the last row of the log, and each history is a new user. A
        log of 100 interactions of 8 users, for example, with histories of 2 and 3 interactions gets

            row                          100  101  102  103  104
            user                           8    8    9    9    9
            rank (older interactions)      0    1    0    1    2

        The new rows have an item, a time, and no value of any other field. They are not of the
        training part, so that other users never read them.

        Args:
            items: [m] int64 items of the histories, one history after the other, oldest first.
            lengths: [b] int64 number of interactions of each history.
            times: [m] float64 seconds of the interactions, or None if no relation reads them.

        Returns:
            The copy, whose columns of the log have the new rows.
        """
        num_users = len(self.offsets) - 1
        new_columns = {
            "users": num_users + np.repeat(np.arange(len(lengths)), lengths),
            "items": items,
            "times": np.zeros(len(items)) if times is None else times,
            "ranks": count_from_zero(lengths),  # 0, 1, 0, 1, 2 for the lengths 2 and 3
            "is_trained": np.zeros(len(items), dtype=bool),
        }

        # an ``ExtendedColumn`` is indexed as if the new column followed that of the log
        extended = copy.copy(self)
        for name, new_column in new_columns.items():
            setattr(extended, name, ExtendedColumn(getattr(self, name), new_column))
        return extended

    def is_followed_in_training(self, events: np.ndarray) -> np.ndarray:
        """Return [n] bool, whether the user's next interaction in the log is of training."""
        # the row after each one; for the last row of all that row itself
        following = np.minimum(events + 1, self.num_events - 1)
        is_same_user = (following > events) & (self.users[following] == self.users[events])
        return is_same_user & self.is_trained[following]

    def pack_windows(
        self, events: np.ndarray, lengths: np.ndarray, is_source: np.ndarray, linked: bool
    ) -> PackedSequences:
        """Put the training windows of a batch together, and decide which ones form a sequence.

        In a sequence later interactions read all earlier ones. Without ``linked`` each window is a
        sequence of its own. With ``linked`` a window continues the sequence of the window before if
        both are of the same user and it begins at the row where the other one ended.

        Args:
            events: [m] int64 rows of the interactions in the log, window after window.
            lengths: [b] int64 number of interactions of each window.
            is_source: [m] bool, whether interactions of other users may read this one.
            linked: whether windows of a user that follow each other form one sequence.

        Returns:
            The windows. ``is_predicted`` is False for all, as it is about evaluation only.
        """
        first = np.cumsum(lengths) - lengths
        follows = np.zeros(len(lengths), dtype=bool)
        if linked:
            # the first interaction of each window but the first one, and the last of the one before
            oldest, previous = events[first[1:]], events[first[1:] - 1]
            is_same_user = self.users[oldest] == self.users[previous]
            follows[1:] = (oldest == previous + 1) & is_same_user

        # a window that follows has the number of the one before: False, True, False give 0, 0, 1
        sequence = np.cumsum(~follows) - 1
        is_predicted = np.zeros_like(follows)
        return PackedSequences(events, lengths, sequence, is_source, is_predicted)

    def pack_histories(self, start: np.ndarray, end: np.ndarray, is_bank: bool) -> PackedSequences:
        """Cut histories into windows, which are pieces of at most ``max_length`` interactions.

        With a ``max_length`` of 50, histories of 120 and 30 interactions become the windows

            lengths     20  50  50  30
            sequence     0   0   0   1

        The windows of a history are one sequence, in which later interactions read earlier ones.

        Args:
            start, end: [histories] a history is the rows ``start`` to ``end - 1`` of the dataset's
                interactions, at least one.
            is_bank: True for the bank, histories that only serve other users, who read them. False
                for histories after which items are predicted; other users do not read these.

        Returns:
            The windows of all histories, one after the other.
        """
        sizes = end - start
        num_windows = -(-sizes // self.max_length)  # division rounded up: 3, 1 in the example
        sequence = np.repeat(np.arange(len(sizes)), num_windows)

        # The oldest window of each history, here the windows 0 and 3, has what full ones leave.
        lengths = np.full(len(sequence), self.max_length)
        oldest_window = np.cumsum(num_windows) - num_windows
        lengths[oldest_window] = sizes - (num_windows - 1) * self.max_length

        events = gather_index(start, sizes)  # the rows of all histories
        is_source = np.full(len(events), is_bank)  # whether other users may read an interaction
        is_predicted = np.full(len(lengths), not is_bank)  # whether items are predicted after it
        return PackedSequences(events, lengths, sequence, is_source, is_predicted)

    def pack_bank(self, users: np.ndarray) -> PackedSequences:
        """Return the newest training interactions of some users, up to ``max_length`` of each.

        They are called the bank. When items are predicted for a user, the model adds states of
        interactions in the bank to those of related interactions of the user.

        Args:
            users: [n] int64 ids; a user without training interactions is left out.

        Returns:
            The interactions of each user in one piece (a window).
        """
        # training interactions of user u are the rows offsets[u] to train_end[u] - 1 of the log
        users = users[self.train_end[users] > self.offsets[users]]
        end = self.train_end[users]
        start = np.maximum(self.offsets[users], end - self.max_length)
        return self.pack_histories(start, end, is_bank=True)

    def make_order(self, rows: PackedSequences, rng: np.random.Generator) -> EventOrder:
        """Return what decides which interactions of a batch each one may read, so nothing leaks.

        To read an interaction is to add its state to one's own. An interaction may read

        - those before it in its own sequence, a part of its user's history; and
        - those of other users that arrive before it, if they are ``is_source``.

        A user's interactions arrive from the oldest to the newest, so none reads its user's future.

        Args:
            rows: the batch of windows, pieces of histories. ``rows.events`` [m] are the rows of the
                interactions in the dataset's log. By window there are ``lengths`` (how many
                interactions), ``sequence`` and ``is_predicted`` (whether items are predicted).
            rng: generator of random arrival times.

        Returns:
            The user, sequence, arrival and so on of each of the m interactions.
        """
        # the window of each interaction: 0, 0, 1, 1, 1 for windows of 2 and 3 interactions
        window = np.repeat(np.arange(len(rows.lengths)), rows.lengths)

        # times become places in the order of arrival, equal for equal ones: 3.5, 1.0, 3.5 give
        # 1, 0, 1
        time = self._choose_arrival_times(rows.events, rows.is_predicted[window], rng)
        _, arrival = np.unique(time, return_inverse=True)

        return EventOrder(
            user=self.users[rows.events],
            sequence=rows.sequence[window],
            arrival=arrival.reshape(-1),
            # whether other users may read it; never if it is held out of training
            is_source=rows.is_source & self.is_trained[rows.events],
            column=count_from_zero(rows.lengths),  # the place in its window: 0, 1, 0, 1, 2
        )

    def _choose_arrival_times(
        self, events: np.ndarray, is_predicted: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the times [m] float64 by which interactions may read those of other users.

        An interaction may read those of other users that have a smaller time. With the option
        ``cross_sequence: time_respecting`` these are the real times. Else they are invented: each
        user's interactions keep their order, and those of different users are mixed at random. The
        k-th interaction of a user then has a random time with mean k, a sum of k gaps with mean 1.
        In evaluation it has the time k itself, so that predictions do not depend on chance.

        Args:
            events: [m] int64 row of each interaction in the dataset's log.
            is_predicted: [m] bool, True in evaluation: items are predicted after the interaction.
            rng: generator of the random times.
        """
        if self.cross_sequence == "time_respecting":
            return self.times[events]
        time = self.ranks[events] + 1.0  # k, as ``ranks`` is 0 for the first one of a user
        is_random = ~is_predicted
        time[is_random] = self._sample_arrival_times(events[is_random], rng)
        return time

    def _sample_arrival_times(self, events: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Sample arrival times [m] of interactions: a Poisson process of rate 1 for each user.

        The gaps between a user's interactions are exponential with mean 1, so the k-th one arrives
        at about k. A time does not depend on how many interactions of the user follow: spread
        evenly over a common span, the times would leak that number.

        Args:
            events: [m] int64 rows of interactions in the dataset's log, which is sorted by user and
                time; equal rows get equal times.
            rng: generator.
        """
        # each interaction once, user by user, oldest first; its rank is how many interactions of
        # the user are older, also such as are not in the batch
        distinct, index = np.unique(events, return_inverse=True)
        user, rank = self.users[distinct], self.ranks[distinct]
        is_first = np.append(True, user[1:] != user[:-1])  # of its user

        # The wait since the user's interaction before, in the batch, is a sum of several gaps: from
        # rank 1 to rank 4 there are 3. A user's first wait begins at time 0, as if at rank -1. The
        # sum of n exponential gaps has a gamma distribution with shape n.
        previous_rank = np.where(is_first, -1, np.roll(rank, 1))
        waiting_time = rng.gamma(rank - previous_rank)

        # waits of 2.0 and 3.5 of one user, 1.5 of the next give the arrival times 2.0, 5.5 and 1.5
        by_user = np.split(waiting_time, np.flatnonzero(is_first)[1:])
        arrival_time = np.concatenate([of_user.cumsum() for of_user in by_user])
        return arrival_time[index.reshape(-1)]  # one for each of ``events`` again

    def find(self, rows: PackedSequences, order: EventOrder) -> tuple[list[Edges], Edges | None]:
        """Find the ``top_k`` strongest relations of each interaction in a batch, by each attribute.

        Args:
            rows: the batch; ``rows.events`` [m] are the rows of its m interactions in the log, the
                table of all interactions of the dataset.
            order: to which of the others each interaction may be related, and the user of each.

        Returns:
            The relations by each attribute of items (such as brands) or of interactions (such as
            times), as a list; and the relations by all attributes of users together, None if there
            are no attributes of users.
        """
        # ``find_top`` looks up the items or times of the interactions in this object
        edges = [relation.find_top(rows.events, self, order) for relation in self.by_attribute]
        if self.user_table is None:
            return edges, None

        # Users with equal attributes are a class, and the table relates classes. The n-th
        # interaction of a window (a piece of a history) is related only to the n-th ones of others,
        # as in the paper: their ``column`` is the same.
        classes = self.user_table.classify(order.user)
        user_edges = top_relations(
            self.user_table, classes, order, self.top_k, self.across_users, same_column=True
        )
        return edges, user_edges

    def build_relations(
        self,
        rows: PackedSequences,
        rng: np.random.Generator,
        device: torch.device,
        dtype: torch.dtype,
    ) -> BatchRelations:
        """Compute the relations among the m interactions of a batch as sparse matrices.

        Entry i, j of a matrix is the weight with which the state of interaction j is added to that
        of interaction i.

        Args:
            rows: the interactions of the batch, history after history.
            rng: generator of random numbers, by which interactions without real times are ordered.
            device, dtype: of the matrices.

        Returns:
            ``heads``: the M matrices [m, m] of the M attributes of items and of interactions,
            stacked to one [M m, m]. ``users``: one matrix [m, m] for all attributes of users
            together. Each is None if there are no such attributes.
        """
        order = self.make_order(rows, rng)  # which interactions each one may be related to
        # of these the related ones: lists of edges, an edge being two interactions and a weight
        edges_by_attribute, user_edges = self.find(rows, order)

        m, heads, users = len(order), None, None
        if edges_by_attribute:
            heads = stack_relations(edges_by_attribute, m, device, dtype)
        if user_edges is not None:
            # the sum may take the place of a state, so that state is made part of it
            user_edges = self._add_self_relations(user_edges, order)
            users = stack_relations([user_edges], m, device, dtype)
        return BatchRelations(heads, users)

    def _add_self_relations(self, edges: Edges, order: EventOrder) -> Edges:
        """Add to relations by attributes of users those of every interaction to itself.

        For example, interaction 1 is related to 0 with 0.5, and the users of both are related to
        themselves with 1. Then the result has the pairs (0, 0), (1, 1) and (1, 0) with the values
        1, 1 and 0.5 (AttrFormer, section 3.1.3).

        Args:
            edges: the relations between different interactions: pairs of a reader and a source,
                whose state is added to that of the reader, and the values, which are the weights.
            order: the m interactions of the batch; ``order.user`` [m] are their users.

        Returns:
            The relations with m more, sorted by reader.
        """
        assert self.user_table is not None
        # how strongly the user of each interaction is related to itself, 0 without attributes
        classes = self.user_table.classify(order.user)
        value = self.user_table.self_relation[classes]
        value[value == 0] = self.default_self_relation

        itself = np.arange(len(order))  # both the reader and the source
        self_relations = itself, itself, value
        return Edges.from_parts([self_relations, (edges.reader, edges.source, edges.value)])
