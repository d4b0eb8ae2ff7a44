"""From declared relations and loaded fields to what finds relations in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import scipy.sparse as sp

from recbole_pos.data.events import EventLog
from recbole_pos.data.protocols import Dataset
from recbole_pos.relations import tables
from recbole_pos.relations.declare import POSITION, TIME, Relation
from recbole_pos.relations.search import Edges, EventOrder, top_differences, top_relations
from recbole_pos.relations.tables import WEAKEST, RelationTable


@dataclass(frozen=True)
class TableRelation:
    """A relation between classes of things.

    Attributes:
        table: the classes and their relations.
        thing: [events of the log] which thing an event is about: its item, or the event itself.
        across: whether it reaches other users (scope: batch).
        of_items: whether things are items.
    """

    table: RelationTable
    thing: np.ndarray
    across: bool
    of_items: bool

    def known(self, events: np.ndarray) -> np.ndarray:
        """[m] bool, whether events (by their places in the log) can be related by the attribute."""
        return self.table.known[self.thing[events]]

    def top(self, events: np.ndarray, order: EventOrder, k: int, across: bool) -> Edges:
        """The strongest relations of the packed ``events`` ([m], their places in the log)."""
        group = self.table.group[self.thing[events]]
        return top_relations(self.table, group, order, k, across and self.across)

    def with_events(
        self, items: np.ndarray, ranks: np.ndarray, seconds: np.ndarray
    ) -> TableRelation:
        """With more events after those of the log; see ``RelationLookup.with_histories``."""
        if self.of_items:
            return replace(self, thing=np.append(self.thing, items))
        table = replace(self.table, group=np.append(self.table.group, 0))
        nothing = np.full(len(items), len(table.group) - 1)
        return replace(self, table=table, thing=np.append(self.thing, nothing))


@dataclass(frozen=True)
class NumberRelation:
    """A relation between numbers of events, within a sequence.

    Attributes:
        values: [events of the log] float64, NaN where missing.
        scales: r_norm of equation 10.
        longest: events looked back at.
        rising: whether values never fall in a user's history.
        source: what they are of: position, time or inter (a field of events).
    """

    values: np.ndarray
    scales: tuple[float, ...]
    longest: int
    rising: bool
    source: str

    def known(self, events: np.ndarray) -> np.ndarray:
        """[m] bool, whether events (by their places in the log) can be related by the attribute."""
        return np.isfinite(self.values[events])

    def top(self, events: np.ndarray, order: EventOrder, k: int, across: bool) -> Edges:
        """The strongest relations of the packed ``events`` ([m], their places in the log)."""
        values = self.values[events]
        return top_differences(
            values, order.chain, k, self.scales, WEAKEST, self.longest, self.rising
        )

    def with_events(
        self, items: np.ndarray, ranks: np.ndarray, seconds: np.ndarray
    ) -> NumberRelation:
        """With more events after those of the log; see ``RelationLookup.with_histories``."""
        missing = np.full(len(items), np.nan)
        values = {POSITION: ranks, TIME: seconds}.get(self.source, missing)
        return replace(self, values=np.append(self.values, values))


def compile_relation(
    relation: Relation, dataset: Dataset, seconds: float, longest: int, notices: list[str]
) -> TableRelation | NumberRelation:
    """A relation of items or events, ready to be looked up.

    Args:
        relation: of source item or behaviour.
        dataset: has the fields and the log.
        seconds: how many seconds the time field counts by.
        longest: how far back numbers of events are compared, the length of a window.
        notices: takes what to tell before training.
    """
    log: EventLog = dataset.log
    if relation.table == POSITION:
        return NumberRelation(
            log.ranks.astype(np.float64), relation.scales, longest, True, POSITION
        )
    if relation.table == TIME:
        return NumberRelation(log.times.numpy() * seconds, relation.scales, longest, True, TIME)
    if relation.table == "inter" and relation.kind == "numerical":
        values = _column(relation.field, "inter", dataset)
        _notice_nothing(relation, np.isfinite(values).any(), dataset, notices)
        return NumberRelation(values, relation.scales, longest, False, "inter")
    of_items = relation.table == "item"
    thing = log.items.numpy() if of_items else np.arange(len(log))
    table = RelationTable.from_matrix(*_classes(relation, dataset, notices))
    return TableRelation(table, thing, relation.scope == "batch", of_items)


def compile_users(
    relations: Sequence[Relation], dataset: Dataset, notices: list[str]
) -> RelationTable | None:
    """The mean of all relations of users, R^U of section 3.1.3; a missing attribute counts as 0."""
    if not relations:
        return None
    groups, matrices = zip(
        *(_classes(relation, dataset, notices) for relation in relations), strict=True
    )
    group, members = tables.joint(groups)
    name = " and ".join(relation.field for relation in relations)
    advice = "users differ in all of them together: use fields with fewer distinct values (steps)"
    spread = [tables.spread(m, s, name, advice) for m, s in zip(members, matrices, strict=True)]
    return RelationTable.from_matrix(group, (sum(spread[1:], spread[0]) / len(spread)).tocsr())


def _classes(
    relation: Relation, dataset: Dataset, notices: list[str]
) -> tuple[np.ndarray, sp.csr_matrix]:
    """Classes of items, users or events, and their relations (equation 10)."""
    group, matrix = _related(relation, dataset)
    _notice_nothing(relation, matrix.nnz > 0, dataset, notices)
    return group, matrix


def _related(relation: Relation, dataset: Dataset) -> tuple[np.ndarray, sp.csr_matrix]:
    column = _column(relation.field, relation.table, dataset)
    if relation.kind == "categorical":
        group, hot = tables.multi_hot(column)
        if relation.within is None:
            return group, tables.categorical(hot, relation.field)
        relate: Callable[[np.ndarray, np.ndarray], np.ndarray] = partial(tables.dot_products, hot)
    else:
        group, values = tables.number_classes(column)
        if relation.within is None:
            return group, tables.numerical(values, relation.scales, relation.field)

        def relate(i: np.ndarray, j: np.ndarray) -> np.ndarray:
            return tables.similarity(values[i] - values[j], relation.scales)

    shared, hot = tables.multi_hot(_column(relation.within, relation.table, dataset))
    condition = tables.categorical(hot, relation.within)
    return tables.restrict_within(group, relate, shared, condition, relation.field)


def _notice_nothing(relation: Relation, known: bool, dataset: Dataset, notices: list[str]) -> None:
    if not known:
        both = f" and {relation.within}" if relation.within else ""
        notices.append(
            f"relations: {relation.field} relates nothing, as if it were not given: no line of "
            f"{dataset.dataset_name}.{relation.table} whose id occurs has {relation.field}{both}"
        )


def _column(field: str, table: str, dataset: Dataset) -> np.ndarray:
    """A field of things by their id, or of events by their place in the log; NaN where missing."""
    feat = dataset.log.fields if table == "inter" else getattr(dataset, f"{table}_feat")
    column = feat[field].numpy()
    if column.dtype.kind != "f":
        return column
    column = column.astype(np.float64)
    missing = dataset.missing.get(field)
    if missing is not None:
        column[missing] = np.nan
    return column
