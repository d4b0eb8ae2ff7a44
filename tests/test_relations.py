"""Explicit relations: equations 1 and 10 in loops, top-K by brute force, declarations."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shop import (
    LOAD,
    RELATIONS,
    Cells,
    all_windows,
    categorical,
    find,
    open_shop,
    shaken,
    similarity,
    tables,
    write,
)

from recbole_pos.errors import UsageError
from recbole_pos.relations import search
from recbole_pos.relations.compiled import NumberRelation, TableRelation
from recbole_pos.relations.declare import read_relations
from recbole_pos.relations.search import EventOrder, top_differences, top_relations
from recbole_pos.relations.tables import WEAKEST, RelationTable


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shop"), tables())


def strong(value: float) -> float:
    """What is weaker than the limit counts as nothing."""
    return value if value >= WEAKEST else 0.0


def test_relations_of_things_equal_their_formula(shop: Path) -> None:
    """Equation 10 for every pair of items, users or events, missing cells included."""
    made = open_shop(shop)
    dataset, lookup = made.dataset, made.model.lookup
    declared = read_relations(RELATIONS, dataset)
    cells = Cells(dataset, tables())
    seen = set()
    heads = [relation for relation in declared if relation.source != "user"]
    for relation, compiled in zip(heads, lookup.heads, strict=True):
        if not isinstance(compiled, TableRelation):
            continue
        dense = compiled.table.matrix().toarray()
        group = compiled.table.group
        for a in range(1, len(group)):
            for b in range(1, len(group)):
                x, y = (cells.of(relation.table, n, relation.field) for n in (a, b))
                want = strong(similarity(x, y, relation.scales))
                if relation.within:
                    x, y = (cells.of(relation.table, n, relation.within) for n in (a, b))
                    want *= similarity(x, y, ()) > 0
                assert dense[group[a], group[b]] == pytest.approx(want, rel=1e-12), relation
        seen.add(relation.field)
    assert seen == {"brand", "tags", "price", "weight", "channel"}
    of_users = [relation for relation in declared if relation.source == "user"]
    dense, group = lookup.user_table.matrix().toarray(), lookup.user_table.group
    for a in range(1, len(group)):
        for b in range(1, len(group)):
            pairs = [
                similarity(cells.of("user", a, r.field), cells.of("user", b, r.field), r.scales)
                for r in of_users
            ]
            assert dense[group[a], group[b]] == pytest.approx(sum(pairs) / 2, rel=1e-12)


def test_numbers_of_events(shop: Path) -> None:
    """Stars where given, times in seconds, positions: as the files say."""
    made = open_shop(shop)
    cells, log = Cells(made.dataset, tables()), made.dataset.log
    found = {
        relation.field: compiled
        for relation, compiled in zip(
            [r for r in read_relations(RELATIONS, made.dataset) if r.source != "user"],
            made.model.lookup.heads,
            strict=True,
        )
        if isinstance(compiled, NumberRelation)
    }
    stars = [cells.of("inter", event, "stars") for event in range(len(log))]
    want = [np.nan if star is None else star for star in stars]
    assert None in stars
    np.testing.assert_array_equal(found["stars"].values, want)
    np.testing.assert_array_equal(found["timestamp"].values, log.times.numpy())
    np.testing.assert_array_equal(found["position"].values, log.ranks)
    assert found["timestamp"].scales == (3600.0, 86400.0)  # appendix A.2
    assert found["timestamp"].rising and not found["stars"].rising


def brute_force(table: RelationTable, group, order: EventOrder, k, across, same_column):
    """For every event, all that it may read, sorted by the rule, the first k."""
    dense = table.matrix().toarray()
    kept = []
    for i in range(len(order)):
        found = []
        for j in range(len(order)):
            r = dense[group[i], group[j]]
            own = order.chain[i] == order.chain[j] and j < i
            other = (
                across
                and order.user[i] != order.user[j]
                and order.source[j]
                and order.rank[j] < order.rank[i]
            )
            if (
                r > 0
                and (own or other)
                and not (same_column and order.column[i] != order.column[j])
            ):
                near = (-j,) if own else (-order.rank[j], -j)
                found.append((-r, dense[group[j], group[j]], group[j], not own, near, j, r))
        kept += [(i, j, r) for *_, j, r in sorted(found)[:k]]
    return sorted(kept)


def random_order(rng: np.random.Generator, rows: int) -> EventOrder:
    """Chains of one to three rows, ranks with ties that rise along a chain, users with several."""
    lengths = rng.integers(1, 7, rows)
    chain = np.cumsum(rng.random(rows) < 0.7)
    user = rng.integers(1, 1 + max(rows // 2, 1), chain.max() + 1)[chain]
    rank = np.concatenate([np.sort(rng.integers(0, 12, n)) for n in lengths])
    per_event = {"user": np.repeat(user, lengths), "chain": np.repeat(chain, lengths)}
    column = np.concatenate([np.arange(n) for n in lengths])
    return EventOrder(**per_event, rank=rank, source=rng.random(len(rank)) < 0.8, column=column)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12), st.booleans(), st.booleans())
def test_top_relations_by_brute_force(seed, rows, k, across, same_column) -> None:
    """Ties of every sort; classes that few or all share; a single sequence."""
    rng = np.random.default_rng(seed)
    column = rng.integers(0, 4, (30, rng.integers(1, 4)))  # 0 is missing
    table = RelationTable.from_matrix(*categorical(column, "x"))
    order = random_order(rng, rows)
    group = table.group[rng.integers(0, 30, len(order))]
    edges = top_relations(table, group, order, k, across, same_column)
    found = sorted(zip(edges.reader, edges.source, edges.value, strict=True))
    assert found == brute_force(table, group, order, k, across, same_column)
    assert (np.diff(edges.reader) >= 0).all()
    assert np.bincount(edges.reader, minlength=1).max(initial=0) <= k


def test_readers_that_need_many_classes() -> None:
    """The search goes on in rounds until a reader has k or has seen everything."""
    rng = np.random.default_rng(0)
    column = np.stack((np.ones(200, int), 2 + np.arange(200)), 1)  # all share a token, none all
    table = RelationTable.from_matrix(*categorical(column, "x"))
    order = EventOrder(
        user=np.arange(200),
        chain=np.arange(200),
        rank=rng.permutation(200),
        source=np.ones(200, bool),
        column=np.zeros(200, int),
    )
    edges = top_relations(table, table.group, order, 7, across=True)
    assert np.bincount(edges.reader, minlength=200).tolist() == np.minimum(order.rank, 7).tolist()
    found = sorted(zip(edges.reader, edges.source, edges.value, strict=True))
    assert found == brute_force(table, table.group, order, 7, True, False)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.sampled_from([1, 2, 3, 6, 10**9]),
    st.booleans(),
    st.sampled_from([1, 7, 20, 1 << 22]),
)
def test_top_differences_by_brute_force(
    seed: int, k: int, longest: int, rising: bool, pairs: int
) -> None:
    """Whole, and in parts of few events."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 5)
    chain = np.repeat(np.arange(5), lengths)
    values = rng.integers(0, 6, len(chain)).astype(float)
    if rising:
        values = np.concatenate([np.sort(values[chain == c]) for c in range(5)])
    else:
        values[rng.random(len(chain)) < 0.2] = np.nan
    with patch.object(search, "PAIRS", pairs):
        edges = top_differences(values, chain, k, (1.0, 4.0), WEAKEST, longest, rising)
    want = []
    for i in range(len(chain)):
        cells = [None if np.isnan(v) else v for v in values]
        found = [
            (-similarity(cells[i], cells[j], (1.0, 4.0)), -j)
            for j in range(max(i - longest, 0), i)
            if chain[i] == chain[j]
        ]
        want += [(i, -j, -r) for r, j in sorted(found)[:k] if r < 0]
    found = list(zip(edges.reader.tolist(), edges.source.tolist(), edges.value, strict=True))
    assert [pair[:2] for pair in sorted(found)] == [pair[:2] for pair in sorted(want)]
    np.testing.assert_allclose(sorted(r for *_, r in found), sorted(r for *_, r in want))


@pytest.mark.parametrize(
    ("relations", "message"),
    [
        ("brand", "relations: expected a list"),
        ([{"kind": "categorical"}], "expected entries such as"),
        ([{"field": "brand", "scpe": "batch"}], "brand: unknown key 'scpe'; nearest known: scope"),
        (["brand", {"field": "brand"}], "field 'brand' is given twice"),
        (["time", "timestamp"], "field 'timestamp' is given twice"),
        (
            [{"field": "brand", "kind": "numerical"}],
            "brand: the field is categorical by its type token .*brand:float",
        ),
        ([{"field": "price", "kind": "categorical"}], "numerical by its type float .*shop.item"),
        ([{"field": "brand", "kind": "number"}], "kind: 'number' is not one of categorical, num"),
        ([{"field": "brand", "source": "user"}], "item table is of source item or behaviour"),
        ([{"field": "age", "source": "item"}], "user table is of source user"),
        ([{"field": "time", "scope": "batch"}], "relate events of one sequence alone"),
        ([{"field": "age", "scope": "sequence"}], "users are related across sequences"),
        ([{"field": "brand", "scope": "all"}], "scope: 'all' is not one of sequence, batch"),
        ([{"field": "brand", "scales": [1]}], "and this one is categorical by its type token"),
        ([{"field": "price", "scales": [0]}], "scales: expected numbers above 0"),
        ([{"field": "price", "scales": [True]}], "scales: expected numbers above 0"),
        ([{"field": "price", "scales": []}], "scales: expected numbers above 0"),
        ([{"field": "price", "scales": [float("inf")]}], "scales must be finite"),
        ([{"field": "price", "within": "weight"}], "within: 'weight' must be a token or token_seq"),
        ([{"field": "price", "within": "country"}], "'country' must be .* field of the item table"),
        ([{"field": "stars", "within": "channel"}], "only a field of the item or user table"),
        ([{"field": "price", "within": "brnd"}], "within: field 'brnd' is not loaded"),
        ([{"feild": "brand"}], "unknown key 'feild'; nearest known: field"),
        (["user_id"], "the id of users or items is no attribute"),
        (["brnd"], "field 'brnd' is not loaded .*no atomic file .*did you mean brand"),
    ],
)
def test_bad_declarations(shop: Path, relations, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_shop(shop, relations=relations)


@pytest.mark.parametrize(
    ("relation", "empty"),
    [
        ({"field": "tags", "within": "brand"}, "brand"),
        ("weight", "weight"),
        ("country", "country"),
        ("channel", "channel"),
    ],
    ids=str,
)
def test_an_attribute_that_nothing_has_is_refused(tmp_path: Path, relation, empty: str) -> None:
    """A file whose ids do not match the others' looks like that, too."""
    made = tables()
    for table in made.values():
        table[[column for column in table if column.split(":")[0] == empty]] = ""
    with pytest.raises(UsageError) as caught:
        open_shop(write(tmp_path, made), relations=[relation])
    assert str(caught.value).startswith("relations: ") and f"'{empty}'" in str(caught.value)


def test_histories_that_recbole_adds_are_no_fields(shop: Path) -> None:
    for name in ("item_id_list", "item_length"):
        with pytest.raises(UsageError, match=f"'{name}' is not loaded") as told:
            open_shop(shop, relations=[name])
        assert f", {name}" not in str(told.value).split(")")[0]


def test_a_field_that_is_not_loaded_says_how_to_load_it(shop: Path) -> None:
    load = {**LOAD, "item": ["item_id", "price"]}
    with pytest.raises(UsageError) as error:
        open_shop(shop, load_col=load)
    assert ("shop.item has it: add it to load_col, as in item: [item_id, price, brand]") in str(
        error.value
    )
    load = {"inter": LOAD["inter"]}
    with pytest.raises(UsageError, match=r"shop.user has it: .* as in user: \[user_id, country\]"):
        open_shop(shop, load_col=load, relations=["country"], filter_inter_by_user_or_item=True)


def test_time_by_the_name_of_its_field(shop: Path) -> None:
    one, two = (
        open_shop(shop, relations=[name], timestamp_unit="days").model.lookup.heads[0]
        for name in ("time", "timestamp")
    )
    assert two.scales == one.scales == (3600.0, 86400.0) and two.rising
    np.testing.assert_array_equal(one.values, two.values)


def test_scope_sequence_of_an_item_field(shop: Path) -> None:
    """Events of other users are not read by it, though they are by the field beside it."""
    made = open_shop(shop, relations=[{"field": "brand", "scope": "sequence"}, "tags"])
    order, (brand, tags), _ = find(shaken(made), all_windows(made))
    assert len(brand.value) and (order.chain[brand.reader] == order.chain[brand.source]).all()
    assert (order.user[tags.reader] != order.user[tags.source]).any()


def test_a_field_of_vectors_is_no_attribute(tmp_path: Path) -> None:
    made = tables()
    made["item"]["vector:float_seq"] = "0.1 0.2"
    load = {**LOAD, "item": [*LOAD["item"], "vector"]}
    with pytest.raises(UsageError, match="vector: has type float_seq"):
        open_shop(write(tmp_path, made), load_col=load, relations=["vector"])


def test_a_field_that_an_option_leaves_out_says_which(shop: Path) -> None:
    with pytest.raises(UsageError, match="unused_col leaves it out: take it from unused_col: item"):
        open_shop(shop, unused_col={"item": ["brand"]})
    load = {"inter": LOAD["inter"], "user": LOAD["user"]}
    with pytest.raises(UsageError, match="unload_col leaves it out"):
        open_shop(shop, load_col={**load, "item": "*"}, unload_col={"item": ["brand"]})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = tables()
    del made["user"]
    with pytest.raises(UsageError, match=r"load_col: user: there is no file .*shop\.user"):
        open_shop(write(tmp_path, made))


@pytest.mark.parametrize("layers", ["none", "even"])
def test_users_whom_no_layer_reads_are_told(shop: Path, layers: str) -> None:
    (notice,) = open_shop(shop, user_layers=layers, n_layers=1).model.notices
    assert f"country, age of users is read by no layer: user_layers is {layers}" in notice
    assert open_shop(shop, user_layers="odd", n_layers=1).model.notices == []
