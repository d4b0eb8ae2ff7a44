"""Explicit relations: equations 1 and 10 in loops, top-K by brute force, tables, declarations."""

import itertools
import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shop import RELATIONS, Cells, all_windows, find, open_shop, places, similarity, tables, write

from recbole_pos.errors import UsageError
from recbole_pos.relations import search
from recbole_pos.relations import tables as tables_module
from recbole_pos.relations.search import EventOrder, top_differences, top_relations
from recbole_pos.relations.tables import WEAKEST, RelationTable, read_relations


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory):
    """AttrFormer on the shop; nothing here changes it."""
    return open_shop(write(tmp_path_factory.mktemp("shop"), tables()))


def relate_all_classes(table: RelationTable) -> np.ndarray:
    """[classes, classes] the relations of a table."""
    n = len(table.indptr) - 1
    return sp.csr_matrix((table.values, table.related, table.indptr), shape=(n, n)).toarray()


def dense(table: RelationTable) -> np.ndarray:
    """[entities, entities] the relations of a table."""
    matrix = relate_all_classes(table)
    assert np.array_equal(matrix.diagonal(), table.self_relation)
    return matrix[np.ix_(table.class_of, table.class_of)]


def test_relations_of_entities_equal_their_formula(opened) -> None:
    """Equation 10 for every pair of items, users or events, missing cells included."""
    dataset, lookup = opened.dataset, opened.model.lookup
    declared = read_relations(RELATIONS, dataset)
    cells, seen = Cells(dataset, tables()), set()

    def column(table: str, field: str, size: int) -> list:
        return [cells.of(table, n, field) if n else None for n in range(size)]

    heads = [relation for relation in declared if not relation.is_of_users]
    for relation, compiled in zip(heads, lookup.by_attribute, strict=True):
        if not hasattr(compiled, "table"):
            continue
        found = dense(compiled.table)
        values = column(relation.origin, relation.field, len(found))
        within = relation.within and column(relation.origin, relation.within, len(found))
        for a, b in itertools.product(range(1, len(found)), repeat=2):
            want = similarity(values[a], values[b], relation.scales)
            want *= want >= WEAKEST  # what is weaker counts as nothing
            if within:
                want *= similarity(within[a], within[b], ()) > 0
            assert found[a, b] == pytest.approx(want, rel=1e-12), relation
        seen.add(relation.field)
    assert seen == {"brand", "tags", "price", "weight", "channel"}
    found = dense(lookup.user_table)
    users = [relation for relation in declared if relation.is_of_users]
    columns = [column("user", relation.field, len(found)) for relation in users]
    for a, b in itertools.product(range(1, len(found)), repeat=2):
        pairs = zip(users, columns, strict=True)
        want = sum(similarity(c[a], c[b], relation.scales) for relation, c in pairs) / 2
        assert found[a, b] == pytest.approx(want, rel=1e-12)


def test_numbers_of_events(tmp_path: Path, opened) -> None:
    """Stars where given, times in seconds whatever the unit, positions: as in the files."""
    cells, log = Cells(opened.dataset, tables()), opened.dataset.log
    declared = read_relations(RELATIONS, opened.dataset)
    names = [relation.field for relation in declared if not relation.is_of_users]
    found = dict(zip(names, opened.model.lookup.by_attribute, strict=True))
    stars = [cells.of("inter", event, "stars") or np.nan for event in range(len(log))]
    assert np.isnan(stars).any()
    np.testing.assert_array_equal(found["stars"].values, stars)
    lookup, every = opened.model.lookup, np.arange(len(log))
    np.testing.assert_array_equal(found["timestamp"].read_numbers(every, lookup), log.times.numpy())
    np.testing.assert_array_equal(found["position"].read_numbers(every, lookup), log.ranks)
    assert found["timestamp"].scales == (3600.0, 86400.0)  # appendix A.2
    days = open_shop(write(tmp_path, tables()), timestamp_unit="days").model.lookup
    (by_days,) = (x for x in days.by_attribute if getattr(x, "origin", "") == "time")
    np.testing.assert_allclose(by_days.read_numbers(every, days), 86_400 * log.times.numpy())


def test_users_read_others_at_the_same_place_of_their_windows(tmp_path: Path) -> None:
    """Section 3.1.3, in a loop: by each later interaction of another user of the country.

    Places count from the oldest interaction of a window.
    """
    made = open_shop(write(tmp_path, tables()), relations=["country"], top_k=1000)
    rows, cells = all_windows(made), Cells(made.dataset, tables())
    order, _, users = find(made.model, rows)
    place, country = places(rows), [cells.of("user", u, "country") for u in order.user]
    want = {
        (i, j)
        for i, j in itertools.permutations(range(len(place)), 2)
        if order.user[i] != order.user[j] and place[i] == place[j]
        if country[i] == country[j] is not None and order.arrival[j] < order.arrival[i]
    }
    pairs = zip(users.reader.tolist(), users.source.tolist(), strict=True)
    assert {(i, j) for i, j in pairs if order.user[i] != order.user[j]} == want
    left = np.concatenate([np.arange(length)[::-1] for length in rows.lengths])
    assert any(left[i] != left[j] for i, j in want)  # from the newest they would be others


def brute_force(table: RelationTable, group, order: EventOrder, k, across, same_column):
    """For every event, all that it may read, sorted by the rule, the first k."""
    relation, kept = relate_all_classes(table), []
    for i in range(len(order)):
        found = []
        for j in range(len(order)):
            r = relation[group[i], group[j]]
            own = order.sequence[i] == order.sequence[j] and j < i
            other = across and order.user[i] != order.user[j] and order.is_source[j]
            other = other and order.arrival[j] < order.arrival[i]
            same = not same_column or order.column[i] == order.column[j]
            if r > 0 and (own or other) and same:
                near = (-j,) if own else (-order.arrival[j], -j)
                found.append((-r, relation[group[j], group[j]], group[j], not own, near, j, r))
        kept += [(i, j, r) for *_, j, r in sorted(found)[:k]]
    return sorted(kept)


def random_order(rng: np.random.Generator, rows: int) -> EventOrder:
    """Sequences of some windows, arrivals with ties that rise along each, users with several."""
    lengths = rng.integers(1, 7, rows)
    sequence = np.cumsum(rng.random(rows) < 0.7)
    user = rng.integers(1, 1 + max(rows // 2, 1), sequence.max() + 1)[sequence]
    rank = np.concatenate([np.sort(rng.integers(0, 12, n)) for n in lengths])
    per_event = {"user": np.repeat(user, lengths), "sequence": np.repeat(sequence, lengths)}
    column = np.concatenate([np.arange(n) for n in lengths])
    is_source = rng.random(len(rank)) < 0.8
    return EventOrder(**per_event, arrival=rank, is_source=is_source, column=column)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12), st.booleans(), st.booleans())
def test_top_relations_by_brute_force(seed, rows, k, across, same_column) -> None:
    """Ties of every sort; classes that few or all share; a single sequence; several rounds."""
    rng = np.random.default_rng(seed)
    column = rng.integers(0, 4, (30, rng.integers(1, 4)))  # 0 is missing
    if seed % 3 == 1:  # a class for each entity, all of them related
        column = np.stack((np.ones(30, int), 2 + np.arange(30)), 1)
    if seed % 3 == 2 and seed % 5 == 0:
        column[:] = 0
    group, hot = tables_module.number_token_sets(column)
    table = RelationTable.from_matrix(group, tables_module.relate_categorical(hot, "x"))
    order = random_order(rng, rows)
    group = table.class_of[rng.integers(0, 30, len(order))]
    edges = top_relations(table, group, order, k, across, same_column)
    found = sorted(zip(edges.reader, edges.source, edges.value, strict=True))
    assert found == brute_force(table, group, order, k, across, same_column)
    assert (np.diff(edges.reader) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.sampled_from([1, 2, 3, 6, 10**9]),
    st.booleans(),
    st.sampled_from([1, 7, 20, 1 << 22]),
)
@example(0, 3, 6, False, 7)
def test_top_differences(seed: int, k: int, longest: int, rising: bool, pairs: int) -> None:
    """Whole, and in parts of few events."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 5)
    chain = np.repeat(np.arange(5), lengths)
    values = rng.integers(0, 6, len(chain)).astype(float)
    if rising:
        values = np.concatenate([np.sort(values[chain == c]) for c in range(5)])
    else:
        values[rng.random(len(chain)) < 0.2] = np.nan
    with patch.object(search, "PAIRS_AT_ONCE", pairs):
        edges = top_differences(values, chain, k, (1.0, 4.0), longest, rising)
    cells, want = [None if np.isnan(v) else v for v in values], {}
    for i in range(len(chain)):
        found = [
            (-similarity(cells[i], cells[j], (1.0, 4.0)), -j)
            for j in range(max(i - longest, 0), i)
            if chain[i] == chain[j]
        ]
        want |= {(i, -j): -r for r, j in sorted(found)[:k] if r < 0}
    pairs = zip(edges.reader.tolist(), edges.source.tolist(), strict=True)
    assert dict(zip(pairs, edges.value.tolist(), strict=True)) == pytest.approx(want)
    assert len(edges.value) == len(want)


def test_the_weakest_relation_of_numbers() -> None:
    """What is below the limit is not one, wherever numbers are compared, and is never formed."""
    _, values = tables_module.number_values(np.arange(4000.0))
    assert tables_module.relate_numerical(values, [1.0], "x").nnz < 4000 * 29
    far = -math.log(WEAKEST)
    for value, edges in ((far - 0.01, 1), (far + 0.01, 0)):
        found = top_differences(np.array([0, value]), np.zeros(2, int), 3, (1.0,), 5, True)
        assert len(found.value) == edges


def test_tables_too_large_are_refused(tmp_path: Path, monkeypatch) -> None:
    folder = write(tmp_path, tables())
    monkeypatch.setattr(tables_module, "MAX_PAIRS", 20)
    with pytest.raises(UsageError, match="^relations: tags relates up to"):
        open_shop(folder, relations=["tags"])


@pytest.mark.parametrize(
    ("relations", "message"),
    [
        ([{"feild": "brand"}], "keys field, .*feild"),
        ([{"field": "price", "scales": [0]}], "price: scales: .*above 0"),
        ([{"field": "price", "within": "weight"}], "price: within: .*'weight' is a float"),
        ([{"field": "tags", "within": "brand"}], "tags: within: .*of a categorical field"),
        (["user_id"], "user_id: .*not of the ids"),
    ],
    ids=str,
)
def test_bad_declarations(opened, relations, message: str) -> None:
    with pytest.raises(UsageError, match=f"^relations: .*{message}"):
        read_relations(relations, opened.dataset)
