"""Relations of a batch: who may read whom, what is related, and with which weight.

No leakage is a matter of one order. Every batch has a clock (``cross_sequence``), an event reads
other users' events only if they are strictly before it on that clock, and its own user's only if
they are older. Whatever is read, through any number of layers, lies before the reader, so nothing
comes back to a user from the user's own future: not values, not which relations are kept, not how
many. The degrees that normalise a relation count what its two ends themselves read, for the same
reason. (Where a window of training begins does depend on how many training events follow: windows
are counted from the newest, for every model.)

The paper aggregates over the whole batch. That gives an event its own target by way of another user
within two layers, so to mask the user's own future would not be enough. The order costs half of the
pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from recbole_pos.data.protocols import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import gather_index
from recbole_pos.layers.relations import BatchRelations, SparseProduct
from recbole_pos.relations.declare import POSITION, TIME, Relation
from recbole_pos.relations.search import Edges, EventOrder, top_differences, top_relations
from recbole_pos.relations.tables import (
    RelationTable,
    build_table,
    build_user_table,
    describe_empty,
    read_column,
)


@dataclass(frozen=True)
class PackedSequences:
    """Packed sequences of a batch by the places of their events in the log.

    Attributes:
        events: [m] int64.
        lengths: [b] int64 number of events of each row.
        chain: [b] int64, never falling; consecutive chunks of a user share one.
        source: [m] bool, whether other users may read the event.
        last: whether the row is there to be predicted from; [b] bool.
    """

    events: np.ndarray
    lengths: np.ndarray
    chain: np.ndarray
    source: np.ndarray
    last: np.ndarray

    def __add__(self, other: PackedSequences) -> PackedSequences:
        """Both, one after the other."""
        chain = other.chain + (self.chain[-1] + 1 if len(self.chain) else 0)
        both = [np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values())]  # noqa: B905
        return PackedSequences(
            both[0], both[1], np.concatenate((self.chain, chain)), both[3], both[4]
        )


@dataclass(frozen=True)
class TableRelation:
    """A relation between classes of entities.

    Attributes:
        table: the classes and their relations.
        across: whether it reaches other users (scope: batch).
        by_item: whether entities are items, or the events of the log.
    """

    table: RelationTable
    across: bool
    by_item: bool

    def known(self, events: np.ndarray, lookup: RelationLookup) -> np.ndarray:
        """[m] bool, whether events (by their places in the log) can be related by the attribute."""
        return self._take(self.table.known, events, lookup)

    def top(
        self, events: np.ndarray, lookup: RelationLookup, order: EventOrder, across: bool
    ) -> Edges:
        """Return the strongest relations of packed ``events`` ([m] places in the log)."""
        group = self._take(self.table.group, events, lookup)
        return top_relations(self.table, group, order, lookup.top_k, across and self.across)

    def _take(self, values: np.ndarray, events: np.ndarray, lookup: RelationLookup) -> np.ndarray:
        """Return [m] values of what events are about; 0 where the log does not have them."""
        if self.by_item:
            return values[lookup.items.numpy()[events]]
        return take_or_missing(values, events, 0)


@dataclass(frozen=True)
class NumberRelation:
    """A relation between numbers of events, within a sequence.

    Attributes:
        source: whose numbers: position, time, or inter (a field of events).
        scales: r_norm of equation 10.
        longest: events looked back at.
        values: [events of the log] float64, NaN where missing; of inter only.
    """

    source: str
    scales: tuple[float, ...]
    longest: int
    values: np.ndarray | None = None

    def numbers(self, events: np.ndarray, lookup: RelationLookup) -> np.ndarray:
        """Return [m] float64 numbers of events, NaN where missing; times in seconds."""
        if self.source == POSITION:
            return lookup.ranks[events].astype(np.float64)
        if self.source == TIME:
            return lookup.times[events] * lookup.seconds
        assert self.values is not None
        return take_or_missing(self.values, events, np.nan)

    def known(self, events: np.ndarray, lookup: RelationLookup) -> np.ndarray:
        """[m] bool, whether events (by their places in the log) can be related by the attribute."""
        return np.isfinite(self.numbers(events, lookup))

    def top(
        self, events: np.ndarray, lookup: RelationLookup, order: EventOrder, across: bool
    ) -> Edges:
        """Return the strongest relations of packed ``events`` ([m] places in the log)."""
        rising = self.source in (POSITION, TIME)  # in a user's history
        values = self.numbers(events, lookup)
        return top_differences(values, order.chain, lookup.top_k, self.scales, self.longest, rising)


def take_or_missing(values: np.ndarray, places: np.ndarray, missing: float) -> np.ndarray:
    """Return [m] values at places, ``missing`` for those after the last (``with_histories``)."""
    known = places < len(values)
    if known.all():
        return values[places]
    found = np.full(len(places), missing, dtype=values.dtype)
    found[known] = values[places[known]]
    return found


class RelationLookup:
    """Precomputed relations of a dataset, and the rules of who may read whom.

    Args:
        relations: as declared.
        dataset: the built training part; gives fields, log and split.
        top_k: relations kept of each event and attribute.
        cross_sequence: the order across users: random_order, time_respecting, or none.
        max_length: L, events of a window.
        seconds: how many seconds the time field counts by.
        unknown: what an event is to itself if its user has no attribute: 1 where aggregation by
            users takes the place of a state, 0 where it is added.
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
        unknown: float,
    ) -> None:
        log = dataset.log
        self.top_k, self.clock, self.max_length = top_k, cross_sequence, max_length
        self.unknown, self.seconds = unknown, seconds
        self.items, self.users, self.times = log.items, log.users.numpy(), log.times.numpy()
        self.ranks, self.offsets = log.ranks, log.offsets
        self.trained = dataset.part == TRAIN
        size = len(self.offsets) - 1
        # training events of a user come before the held-out ones
        self.train_end = self.offsets[:-1] + np.bincount(self.users[self.trained], minlength=size)
        self.notices: list[str] = []  # to report before training
        users = [relation for relation in relations if relation.source == "user"]
        others = [relation for relation in relations if relation.source != "user"]
        self.heads = [self._compile(relation, dataset) for relation in others]
        self.user_table = build_user_table(users, dataset, self.notices)

    def _compile(self, relation: Relation, dataset: Dataset) -> TableRelation | NumberRelation:
        """Return a relation of source item or behaviour, ready to be looked up."""
        source, scales, longest = relation.table, relation.scales, self.max_length
        if source in (POSITION, TIME):
            return NumberRelation(source, scales, longest)
        if source == "inter" and relation.kind == "numerical":
            values = read_column(relation.field, source, dataset)
            if not np.isfinite(values).any():
                self.notices.append(describe_empty(relation, dataset))
            return NumberRelation(source, scales, longest, values)
        table = build_table(relation, dataset, self.notices)
        return TableRelation(table, relation.scope == "batch", source == "item")

    def with_histories(
        self, items: np.ndarray, lengths: np.ndarray, times: np.ndarray | None
    ) -> RelationLookup:
        """Return a copy that knows more users: their events stand after all others.

        Other fields of these events, and attributes of these users, are missing.

        Args:
            items: [m] their histories, packed.
            lengths: [b] events of each.
            times: [m], or None if nothing reads them.
        """
        times = np.zeros(len(items)) if times is None else times
        ranks = np.arange(len(items)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        users = len(self.offsets) - 1 + np.repeat(np.arange(len(lengths)), lengths)
        other = copy.copy(self)
        other.items = torch.cat((self.items, torch.from_numpy(items)))
        other.users = np.append(self.users, users)
        other.times = np.append(self.times, times)
        other.ranks = np.append(self.ranks, ranks)
        other.trained = np.append(self.trained, np.zeros(len(items), dtype=bool))
        return other

    def windows(
        self, events: np.ndarray, lengths: np.ndarray, source: np.ndarray, linked: bool
    ) -> PackedSequences:
        """Return rows of a training batch.

        Args:
            events: [m] places in the log of the packed events.
            lengths: [b] events of each row.
            source: [m] bool; where rows overlap, each event should be a source in one of them.
            linked: whether chunks of a user that follow each other form one chain.
        """
        first = np.cumsum(lengths) - lengths
        follows = np.zeros(len(lengths), dtype=bool)
        if linked:
            begin, before = events[first[1:]], events[first[1:] - 1]
            follows[1:] = (begin == before + 1) & (self.users[begin] == self.users[before])
        chain = np.cumsum(~follows) - 1
        return PackedSequences(events, lengths, chain, source, np.zeros(len(lengths), dtype=bool))

    def histories(self, start: np.ndarray, end: np.ndarray, bank: bool) -> PackedSequences:
        """Return events start : end of each chain, cut into windows of L counted from the newest.

        Args:
            start, end: [chains] places in the log, start < end.
            bank: whether they are there to be read (True) or to predict from (False).
        """
        size = end - start
        count = -(-size // self.max_length)
        chain = np.repeat(np.arange(len(size)), count)
        lengths = np.full(len(chain), self.max_length)
        lengths[np.cumsum(count) - count] = size - (count - 1) * self.max_length
        events = gather_index(start, size)
        return PackedSequences(
            events,
            lengths,
            chain,
            np.full(len(events), bank),
            np.full(len(lengths), not bank),
        )

    def bank(self, users: np.ndarray) -> PackedSequences:
        """Return the newest window of training events of each user who has any.

        Training has all chunks of fewer users, so an early event of a long history finds fewer
        neighbours here. Whole histories, tried on models trained on ml-100k, were not better, for
        twice the events.
        """
        users = users[self.train_end[users] > self.offsets[users]]
        end = self.train_end[users]
        start = np.maximum(self.offsets[users], end - self.max_length)
        return self.histories(start, end, bank=True)

    def order(self, rows: PackedSequences, rng: np.random.Generator) -> EventOrder:
        """Return who may read whom. The only place where the rules stand."""
        row = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
        first = np.cumsum(rows.lengths) - rows.lengths
        events = rows.events
        if self.clock == "time_respecting":
            key = self.times[events]
        else:
            asked, key = rows.last[row], np.empty(len(events))
            key[~asked] = self._random_clock(events[~asked], rng)
            # the mean of clocks, not a sample: no predicted row moves another's
            key[asked] = self.ranks[events[asked]] + 1
        return EventOrder(
            user=self.users[events],
            chain=rows.chain[row],
            rank=np.unique(key, return_inverse=True)[1].reshape(-1),
            # held-out events never reach another user
            source=rows.source & self.trained[events],
            column=np.arange(len(events)) - first[row],
        )

    def _random_clock(self, events: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return [m] times of a Poisson process for each user, one arrival an event.

        Early events of a user come before most of the others', late ones after. The draw of an
        event does not depend on how many events of its user follow: a clock that spread the events
        of a user evenly would reveal to every one how many follow.
        """
        distinct, place = np.unique(events, return_inverse=True)
        user, rank = self.users[distinct], self.ranks[distinct]
        begins = np.append(True, user[1:] != user[:-1])
        steps = np.where(begins, rank + 1, np.diff(rank, prepend=0))
        arrival = np.cumsum(rng.gamma(steps))
        start = np.flatnonzero(begins)
        before = np.append(0.0, arrival)[start]
        arrival -= np.repeat(before, np.diff(np.append(start, len(distinct))))
        return arrival[place.reshape(-1)]

    def find(self, rows: PackedSequences, order: EventOrder) -> tuple[list[Edges], Edges | None]:
        """Return top-K relations of every event, attribute by attribute; and those of its user."""
        across = self.clock != "none"
        heads = [relation.top(rows.events, self, order, across) for relation in self.heads]
        if self.user_table is None:
            return heads, None
        group = take_or_missing(self.user_table.group, order.user, 0)
        users = top_relations(self.user_table, group, order, self.top_k, across, same_column=True)
        return heads, users

    def relations(
        self,
        rows: PackedSequences,
        rng: np.random.Generator,
        device: torch.device,
        dtype: torch.dtype,
    ) -> BatchRelations:
        """Return the normalised relations of a batch, on a device."""
        order = self.order(rows, rng)
        heads, users = self.find(rows, order)
        m = len(order)
        return BatchRelations(
            heads=_stack(heads, m, device, dtype) if heads else None,
            users=None if users is None else self._smoothing(users, order, device, dtype),
            edges=sum(len(edges.value) for edges in heads),
        )

    def _smoothing(
        self, edges: Edges, order: EventOrder, device: torch.device, dtype: torch.dtype
    ) -> SparseProduct:
        """Norm(R^U) with every event's relation to itself, position by position (section 3.1.3).

        An event whose user has no attribute keeps its state: it is related to itself at most.
        """
        assert self.user_table is not None
        m, event = len(order), np.arange(len(order))
        own = take_or_missing(self.user_table.own, order.user, 0)
        own[own == 0] = self.unknown
        kept = edges.reader, edges.source, edges.value
        edges = Edges.from_parts([(event, event, own), kept])
        scaled = _normalise(edges, m)
        return SparseProduct.build(edges.reader, edges.source, scaled, m, m, device, dtype)


def _normalise(edges: Edges, m: int) -> np.ndarray:
    """[E] D^-1/2 R D^-1/2 of an attribute; D sums what an event itself reads, at least 1 (eq. 6).

    Every shared token of a multi-hot attribute is a relation, so sums are what counts one-hot ones.
    A source may read nothing and still be read: it then has one.
    """
    degree = np.maximum(np.bincount(edges.reader, edges.value, minlength=m), 1)
    return edges.value / np.sqrt(degree[edges.reader] * degree[edges.source])


def _stack(
    heads: Sequence[Edges], m: int, device: torch.device, dtype: torch.dtype
) -> SparseProduct:
    """Return [M * m, m] the matrices of all attributes, each normalised, one below the other."""
    reader = np.concatenate([n * m + edges.reader for n, edges in enumerate(heads)])
    source = np.concatenate([edges.source for edges in heads])
    scaled = np.concatenate([_normalise(edges, m) for edges in heads])
    return SparseProduct.build(reader, source, scaled, len(heads) * m, m, device, dtype)
