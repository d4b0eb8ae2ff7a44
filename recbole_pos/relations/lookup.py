"""Relations of a batch: who may read whom, what is related, and with which weight.

One order prevents leakage. Every batch has a clock (``cross_sequence``). An interaction reads
interactions of other users only if they are strictly before it on that clock, and of its own user
only if they are older. Everything read, through any number of layers, lies before the reader, so
nothing of a user's own future reaches the user: neither values, nor which relations are kept, nor
how many. For the same reason the degrees that normalise a relation count what its two ends
themselves read. (Where a window of training begins does depend on how many training interactions
follow: windows are counted from the newest, for every model.)

The paper aggregates over the whole batch. Within two layers an interaction then reads its own
target by way of another user, so masking the user's own future would not be enough. The order costs
half of the pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbole_pos.data.attributes import read_column
from recbole_pos.data.dataset import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import gather_index
from recbole_pos.relations.search import Edges, EventOrder, top_differences, top_relations
from recbole_pos.relations.tables import (
    POSITION,
    TIME,
    Relation,
    RelationTable,
    build_table,
    build_user_table,
    describe_empty,
)


@dataclass(frozen=True)
class SparseProduct:
    """A constant sparse matrix [rows, cols] that multiplies dense ones, [cols, d] to [rows, d].

    Entries are kept by rows and, for the gradient, by columns. ``embedding_bag`` sums the rows in a
    twentieth of the time of torch's own sparse product on a CPU.

    Attributes:
        index, weight: [E] column and value of each entry, row by row.
        offset: [rows] index of the first entry of each row.
        back_index, back_weight: [E] row and value of each entry, column by column.
        back_offset: [cols] index of the first entry of each column.
    """

    index: Tensor
    offset: Tensor
    weight: Tensor
    back_index: Tensor
    back_offset: Tensor
    back_weight: Tensor

    @classmethod
    def build(
        cls,
        row: np.ndarray,
        col: np.ndarray,
        weight: np.ndarray,
        num_rows: int,
        num_cols: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> SparseProduct:
        """Build the matrix [num_rows, num_cols] from its entries [E], sorted by row."""

        def compute_offsets(index: np.ndarray, size: int) -> Tensor:
            """Return [size] the index of the first entry of each row (or column)."""
            counts = np.bincount(index, minlength=size)
            return torch.from_numpy(np.cumsum(counts) - counts).to(device)

        by_col = np.argsort(col, kind="stable")
        return cls(
            torch.from_numpy(col).to(device),
            compute_offsets(row, num_rows),
            torch.from_numpy(weight).to(device, dtype),
            torch.from_numpy(row[by_col]).to(device),
            compute_offsets(col, num_cols),
            torch.from_numpy(weight[by_col]).to(device, dtype),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [rows, d] with x [cols, d]."""
        return _Product.apply(x, self)


class _Product(torch.autograd.Function):
    """The product with a :class:`SparseProduct`, with a gradient to the dense factor only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: SparseProduct) -> Tensor:
        ctx.matrix = matrix
        return _sum_rows(matrix.index, matrix.offset, matrix.weight, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        matrix = ctx.matrix
        return _sum_rows(matrix.back_index, matrix.back_offset, matrix.back_weight, grad), None


def _sum_rows(index: Tensor, offset: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return the product with x of a matrix whose entries are kept as in SparseProduct."""
    weight = weight.to(x.dtype)
    return F.embedding_bag(index, x.contiguous(), offset, mode="sum", per_sample_weights=weight)


@dataclass(frozen=True)
class BatchRelations:
    """The relations of one batch, its ``extras``.

    Attributes:
        heads: multiplies [m, d] by [M m, m], the stacked normalised relations of items and
            behaviour; None without such relations.
        users: multiplies [m, d] by Norm(R^U) [m, m] from position to position, which relates
            interactions of one column of the block; None without the relation.
        edges: E, the number of entries in ``heads``.
    """

    heads: Callable[[Tensor], Tensor] | None
    users: Callable[[Tensor], Tensor] | None
    edges: int = 0


@dataclass(frozen=True)
class PackedSequences:
    """Packed rows of a batch, by the places of their interactions in the log.

    Attributes:
        events: [m] int64 place of each interaction in the log.
        lengths: [b] int64 number of interactions of each row.
        chain: [b] int64 chain of each row, never falling; consecutive chunks of a user share one.
        is_source: [m] bool, whether other users may read the interaction.
        is_predicted: [b] bool, whether predictions are made from the row.
    """

    events: np.ndarray
    lengths: np.ndarray
    chain: np.ndarray
    is_source: np.ndarray
    is_predicted: np.ndarray

    def __add__(self, other: PackedSequences) -> PackedSequences:
        """Return the rows of both, whose chains differ."""
        next_chain = self.chain[-1] + 1 if len(self.chain) else 0
        other = replace(other, chain=other.chain + next_chain)
        names = [field.name for field in fields(self)]
        joined = {name: np.append(getattr(self, name), getattr(other, name)) for name in names}
        return PackedSequences(**joined)

    @property
    def row(self) -> np.ndarray:
        """[m] int64 row of each interaction."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


@dataclass(frozen=True)
class TableRelation:
    """A relation between classes of entities.

    Attributes:
        table: the classes and their relations.
        across_users: whether it reaches other users (scope: batch).
        is_of_items: whether entities are items; if not, they are the interactions of the log.
    """

    table: RelationTable
    across_users: bool
    is_of_items: bool

    def find_top(self, events: np.ndarray, lookup: RelationLookup, order: EventOrder) -> Edges:
        """Return the strongest relations of packed interactions at places [m] of the log."""
        group = self.table.group
        if self.is_of_items:
            group = group[lookup.items[events]]
        else:
            group = take_or_fill(group, events, 0)
        across_users = self.across_users and lookup.across_users
        return top_relations(self.table, group, order, lookup.top_k, across_users)


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
        """Return [m] float64 numbers of interactions, NaN where missing; times in seconds."""
        if self.origin == POSITION:
            return lookup.ranks[events].astype(np.float64)
        if self.origin == TIME:
            return lookup.times[events]
        assert self.values is not None
        return take_or_fill(self.values, events, np.nan)

    def find_top(self, events: np.ndarray, lookup: RelationLookup, order: EventOrder) -> Edges:
        """Return the strongest relations of packed interactions at places [m] of the log."""
        values = self.read_numbers(events, lookup)
        is_rising = self.origin in (POSITION, TIME)  # along a user's history
        return top_differences(
            values, order.chain, lookup.top_k, self.scales, self.max_back, is_rising
        )


def take_or_fill(values: np.ndarray, index: np.ndarray, fill_value: float) -> np.ndarray:
    """Return values at [m] indices, ``fill_value`` beyond the last value.

    Users and interactions that ``RelationLookup.with_histories`` adds are beyond it.
    """
    result = np.full(len(index), fill_value, dtype=values.dtype)
    is_known = index < len(values)
    result[is_known] = values[index[is_known]]
    return result


@dataclass(frozen=True)
class ExtendedColumn:
    """Values of the interactions of the log [n], and after them those of histories [m].

    Only what is read is copied: the log is large, and a request has few interactions.
    """

    log: np.ndarray
    histories: np.ndarray

    def __getitem__(self, events: np.ndarray) -> np.ndarray:
        values = take_or_fill(self.log, events, 0)
        is_given = events >= len(self.log)
        values[is_given] = self.histories[events[is_given] - len(self.log)]
        return values


Column = np.ndarray | ExtendedColumn  # read by places of interactions


class RelationLookup:
    """Precomputed relations of a dataset, and the rules of who may read whom.

    Args:
        relations: the declared relations.
        dataset: the built training part; gives fields, log and split.
        top_k: relations kept of each interaction and attribute.
        cross_sequence: the order across users: random_order, time_respecting, or none.
        max_length: L, interactions of a window.
        seconds: seconds in one unit of the time field.
        default_self_relation: the relation to itself of an interaction whose user has no
            attribute: 1 where aggregation by users replaces a state, 0 where it is added.
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
        """Take the interactions from the dataset, and build the relations of heads and users."""
        log = dataset.log
        self.top_k, self.max_length = top_k, max_length
        self.clock = cross_sequence
        self.across_users = cross_sequence != "none"  # whether any relation reaches other users
        self.default_self_relation = default_self_relation
        users, is_trained = log.users.numpy(), dataset.part == TRAIN
        self.users: Column = users
        self.is_trained: Column = is_trained
        self.items: Column = log.items.numpy()
        times = log.times.numpy()
        self.times: Column = times if seconds == 1 else times * seconds
        self.ranks: Column = log.ranks
        self.offsets, self.num_events = log.offsets, len(log)

        # training interactions of a user come before the held-out ones
        num_trained = np.bincount(users[is_trained], minlength=len(self.offsets) - 1)
        self.train_end = self.offsets[:-1] + num_trained
        self.notices: list[str] = []  # to report before training

        of_users = [relation for relation in relations if relation.is_of_users]
        of_heads = [relation for relation in relations if not relation.is_of_users]
        self.heads = [self._build_relation(relation, dataset) for relation in of_heads]
        self.user_table = build_user_table(of_users, dataset, self.notices)

    def _build_relation(
        self, relation: Relation, dataset: Dataset
    ) -> TableRelation | NumberRelation:
        """Return a relation of source item or behaviour, with its table or numbers."""
        origin, scales = relation.table, relation.scales
        if origin in (POSITION, TIME):
            return NumberRelation(origin, scales, self.max_length)
        if origin == "inter" and relation.kind == "numerical":
            values = read_column(relation.field, origin, dataset)
            if not np.isfinite(values).any():
                self.notices.append(describe_empty(relation, dataset))
            return NumberRelation(origin, scales, self.max_length, values)
        table = build_table(relation, dataset, self.notices)
        across_users = relation.scope == "batch"
        return TableRelation(table, across_users, is_of_items=origin == "item")

    def with_histories(
        self, items: np.ndarray, lengths: np.ndarray, times: np.ndarray | None
    ) -> RelationLookup:
        """Return a copy with further users, whose interactions follow those of the log.

        Other fields of these interactions, and attributes of these users, are missing.

        Args:
            items: [m] int64 items of their histories, packed.
            lengths: [b] int64 number of interactions of each history.
            times: [m] float64 seconds of the interactions, or None if no relation reads them.
        """
        times = np.zeros(len(items)) if times is None else times
        ranks = gather_index(np.zeros(len(lengths), dtype=np.int64), lengths)
        users = len(self.offsets) - 1 + np.repeat(np.arange(len(lengths)), lengths)
        extended = copy.copy(self)
        for name, column in {
            "items": items,
            "users": users,
            "times": times,
            "ranks": ranks,
            "is_trained": np.zeros(len(items), dtype=bool),
        }.items():
            setattr(extended, name, ExtendedColumn(getattr(self, name), column))
        return extended

    def is_followed_in_training(self, events: np.ndarray) -> np.ndarray:
        """Return [n] bool, whether the user's next interaction in the log is of training."""
        following = np.minimum(events + 1, self.num_events - 1)
        is_same_user = (following > events) & (self.users[following] == self.users[events])
        return is_same_user & self.is_trained[following]

    def pack_windows(
        self, events: np.ndarray, lengths: np.ndarray, is_source: np.ndarray, linked: bool
    ) -> PackedSequences:
        """Return windows of packed interactions as rows, none of them to predict from.

        Args:
            events, lengths, is_source: see :class:`PackedSequences`; where rows overlap, each
                interaction should be a source in one of them.
            linked: whether chunks of a user that follow each other form one chain.
        """
        first = np.cumsum(lengths) - lengths
        follows = np.zeros(len(lengths), dtype=bool)
        if linked:
            oldest, previous = events[first[1:]], events[first[1:] - 1]
            is_same_user = self.users[oldest] == self.users[previous]
            follows[1:] = (oldest == previous + 1) & is_same_user
        chain = np.cumsum(~follows) - 1
        return PackedSequences(events, lengths, chain, is_source, np.zeros_like(follows))

    def pack_histories(self, start: np.ndarray, end: np.ndarray, is_bank: bool) -> PackedSequences:
        """Return histories as rows: windows of L interactions, counted from the newest.

        Args:
            start, end: [chains] a history is the interactions start : end of the log, start < end.
            is_bank: whether the rows are for others to read; if not, they are to predict from.
        """
        sizes = end - start
        num_windows = -(-sizes // self.max_length)  # division rounded up
        chain = np.repeat(np.arange(len(sizes)), num_windows)
        lengths = np.full(len(chain), self.max_length)
        oldest_window = np.cumsum(num_windows) - num_windows
        lengths[oldest_window] = sizes - (num_windows - 1) * self.max_length
        events = gather_index(start, sizes)
        is_source = np.full(len(events), is_bank)
        return PackedSequences(
            events, lengths, chain, is_source, np.full(len(lengths), not is_bank)
        )

    def pack_bank(self, users: np.ndarray) -> PackedSequences:
        """Return the newest training window of each of the users [n] who has one, to be read.

        A training batch has all chunks of fewer users, so an early interaction of a long history
        finds fewer neighbours here. Whole histories took twice the interactions and gave no better
        metrics on ml-100k.
        """
        users = users[self.train_end[users] > self.offsets[users]]
        end = self.train_end[users]
        start = np.maximum(self.offsets[users], end - self.max_length)
        return self.pack_histories(start, end, is_bank=True)

    def make_order(self, rows: PackedSequences, rng: np.random.Generator) -> EventOrder:
        """Return who may read whom, by the rules of this module; ``rng`` is of the random clock."""
        events, row = rows.events, rows.row
        if self.clock == "time_respecting":
            arrival = self.times[events]
        else:
            is_predicted = rows.is_predicted[row]
            arrival = np.empty(len(events))
            arrival[~is_predicted] = self._sample_clock(events[~is_predicted], rng)
            # the mean of the random clock, so that a prediction does not depend on other rows
            arrival[is_predicted] = self.ranks[events[is_predicted]] + 1

        _, rank = np.unique(arrival, return_inverse=True)
        return EventOrder(
            user=self.users[events],
            chain=rows.chain[row],
            rank=rank.reshape(-1),
            # held-out interactions never reach another user
            is_source=rows.is_source & self.is_trained[events],
            column=gather_index(np.zeros(len(rows.lengths), dtype=np.int64), rows.lengths),
        )

    def _sample_clock(self, events: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return [m] float64 arrival times of interactions, a Poisson process for each user."""
        # Early interactions of a user come before most of others, late ones after. A time does not
        # depend on how many interactions of the user follow: spread evenly over the clock, the
        # times would leak that number.
        distinct, index = np.unique(events, return_inverse=True)
        user, rank = self.users[distinct], self.ranks[distinct]
        is_first = np.append(True, user[1:] != user[:-1])
        steps = np.where(is_first, rank + 1, np.diff(rank, prepend=0))
        arrival = np.cumsum(rng.gamma(steps))
        start = np.flatnonzero(is_first)
        earlier_sum = np.append(0.0, arrival)[start]  # over earlier users
        arrival -= np.repeat(earlier_sum, np.diff(np.append(start, len(distinct))))
        return arrival[index.reshape(-1)]

    def find(self, rows: PackedSequences, order: EventOrder) -> tuple[list[Edges], Edges | None]:
        """Find the top-K relations of every interaction.

        Returns:
            The relations of each attribute of items or behaviour, and those of users: None if no
            relation of users is declared.
        """
        heads = [relation.find_top(rows.events, self, order) for relation in self.heads]
        if self.user_table is None:
            return heads, None
        group = take_or_fill(self.user_table.group, order.user, 0)
        users = top_relations(
            self.user_table, group, order, self.top_k, self.across_users, same_column=True
        )
        return heads, users

    def build_relations(
        self,
        rows: PackedSequences,
        rng: np.random.Generator,
        device: torch.device,
        dtype: torch.dtype,
    ) -> BatchRelations:
        """Return the normalised relations of a batch of m interactions.

        Args:
            rows: rows of the batch.
            rng: generator of the random clock that orders interactions across users.
            device, dtype: of the sparse matrices.
        """
        order = self.make_order(rows, rng)
        heads, users = self.find(rows, order)
        m = len(order)
        head_product = _stack(heads, m, device, dtype) if heads else None
        user_product = None
        if users is not None:
            user_product = _stack([self._add_self_relations(users, order)], m, device, dtype)
        return BatchRelations(head_product, user_product, sum(len(edges.value) for edges in heads))

    def _add_self_relations(self, edges: Edges, order: EventOrder) -> Edges:
        """Return relations of users with those of every interaction to itself (section 3.1.3)."""
        assert self.user_table is not None
        value = take_or_fill(self.user_table.self_relation, order.user, 0)
        value[value == 0] = self.default_self_relation
        event = np.arange(len(order))
        return Edges.from_parts([(event, event, value), (edges.reader, edges.source, edges.value)])


def _normalise(edges: Edges, m: int) -> np.ndarray:
    """Return the weights [E] of the relations of one attribute, D^-1/2 R D^-1/2 (equation 6)."""
    # D sums the relations that an interaction reads, where the paper counts them: their strength
    # differs. It is at least 1, since a source may read nothing.
    degree = np.maximum(np.bincount(edges.reader, edges.value, minlength=m), 1)
    return edges.value / np.sqrt(degree[edges.reader] * degree[edges.source])


def _stack(
    heads: Sequence[Edges], m: int, device: torch.device, dtype: torch.dtype
) -> SparseProduct:
    """Return the sparse matrix [M * m, m] of M attributes, one normalised matrix under the other.

    ``heads`` are the relations of each attribute among m interactions.
    """
    reader = np.concatenate([head * m + edges.reader for head, edges in enumerate(heads)])
    source = np.concatenate([edges.source for edges in heads])
    weight = np.concatenate([_normalise(edges, m) for edges in heads])
    return SparseProduct.build(reader, source, weight, len(heads) * m, m, device, dtype)
