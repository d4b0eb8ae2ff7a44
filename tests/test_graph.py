"""Session graphs: worked by hand, and against dictionaries and breadth-first search."""

from __future__ import annotations

import pytest
import reference_graph as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_pos.config.options import rule
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.graph import Anchors, SessionGraph, distances, neighbourhoods

N = 12
session = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=N),  # many repeats
    st.lists(st.integers(1, 900), min_size=1, max_size=N),  # few
    st.lists(st.integers(1, 30), min_size=N, max_size=N),  # full length
    st.integers(1, N).map(lambda length: [7] * length),  # one item alone
)
sessions = st.lists(session, min_size=1, max_size=5)


def build(given_sessions: list[list[int]], max_length: int = N) -> SessionGraph:
    lengths = torch.tensor([len(s) for s in given_sessions])
    items = torch.tensor([item for s in given_sessions for item in s])
    return SessionGraph.build(items, SequenceContext.from_lengths(lengths, max_length))


def nodes_of(graph: SessionGraph, row: int) -> dict[int, int]:
    """Item -> node of one session."""
    found = (graph.nodes.row == row).nonzero().squeeze(1).tolist()
    return {int(graph.items[node]): node for node in found}


def edges_of(graph: SessionGraph, row: int) -> dict[tuple[int, int], float]:
    found = zip(*(column.tolist() for column in graph.edges), strict=True)
    items, rows = graph.items.tolist(), graph.nodes.row.tolist()
    return {(items[a], items[b]): w for a, b, w in found if rows[a] == row}


def anchors_of(graph: SessionGraph, anchors: Anchors, row: int, side: str) -> dict:
    """Anchor item -> {item: distance} of N_in or N_out."""
    inside = nodes_of(graph, row)
    place = {item: int(graph.nodes.index[node]) for item, node in inside.items()}
    found = {}
    for number, node in enumerate(anchors.node.tolist()):
        if graph.nodes.row[node] == row and getattr(anchors, side)[number]:
            distance = anchors.distance[number]
            found[int(graph.items[node])] = {i: int(distance[place[i]]) for i in inside}
    return found


def test_a_session_with_a_way_back_by_hand() -> None:
    """v1 v2 v3 v2 v4 v2 v3 v5: a hub, a transition that comes twice, and a tail."""
    graph = build([[1, 2, 3, 2, 4, 2, 3, 5]])
    assert graph.items.tolist() == [1, 2, 3, 4, 5]
    assert graph.count.tolist() == [1, 3, 2, 1, 1]
    assert graph.first.tolist() == [0, 1, 2, 4, 7]
    assert graph.age.tolist() == [7, 2, 1, 3, 0]
    assert graph.alias.tolist() == [0, 1, 2, 1, 3, 1, 2, 4]
    assert graph.first_node.tolist() == [0] and graph.last_node.tolist() == [4]
    assert edges_of(graph, 0) == {
        (1, 2): 1,
        (2, 3): 2,
        (3, 2): 1,
        (2, 4): 1,
        (4, 2): 1,
        (3, 5): 1,
    }
    anchors = Anchors.build(graph)
    of_v2 = {1: 1, 2: 0, 3: 1, 4: 1, 5: 2}
    of_v3 = {1: 2, 2: 1, 3: 0, 4: 2, 5: 1}
    assert anchors_of(graph, anchors, 0, "into") == {
        1: {1: 0, 2: 1, 3: 2, 4: 2, 5: 3},
        2: of_v2,
        3: of_v3,
    }
    assert anchors_of(graph, anchors, 0, "out") == {
        2: of_v2,
        3: of_v3,
        5: {1: 3, 2: 2, 3: 1, 4: 3, 5: 0},
    }


def test_messages_by_hand() -> None:
    """v1 v2 v1 v2 v3 v3: an edge of weight 2 from an anchor, a self-transition of the last item."""
    graph = build([[1, 2, 1, 2, 3, 3]])
    assert edges_of(graph, 0) == {(1, 2): 2, (2, 1): 1, (2, 3): 1, (3, 3): 1}
    anchors = Anchors.build(graph)

    def weights(overlap: str, self_weight: float = 0.0, mean: bool = False) -> list:
        return neighbourhoods(graph, anchors, overlap, self_weight, mean)[0].tolist()

    # rows receive, columns send; every item is repeated, so all are anchors on both sides
    edges = neighbourhoods(graph, None, "distance", 0.0, False)[0].tolist()
    assert edges == [[[0, 1, 0], [2, 0, 0], [0, 1, 1]], [[0, 2, 0], [1, 0, 1], [0, 0, 1]]]
    assert weights("distance") == [
        [[0, 1, 2], [1, 0, 1], [2, 1, 1]],
        [[0, 1, 2], [1, 0, 1], [2, 1, 1]],
    ]
    assert weights("edge") == [
        [[0, 1, 2], [2, 0, 1], [2, 1, 1]],
        [[0, 2, 2], [1, 0, 1], [2, 1, 1]],
    ]
    assert weights("sum") == [
        [[0, 2, 2], [3, 0, 1], [2, 2, 1]],
        [[0, 3, 2], [2, 0, 2], [2, 1, 1]],
    ]
    assert [row[i] for i, row in enumerate(weights("distance", 0.5)[0])] == [0.5, 0.5, 1.5]
    assert weights("distance", mean=True)[0][1:] == [[0.5, 0, 0.5], [0.5, 0.25, 0.25]]


def test_a_session_without_repeats_is_a_line() -> None:
    graph = build([[4, 9, 2, 6]])
    start = graph.alias  # the node of each event
    want = [[abs(i - j) for j in range(4)] for i in range(4)]
    assert distances(graph, start)[:, start].tolist() == want
    anchors = Anchors.build(graph)
    assert set(anchors_of(graph, anchors, 0, "into")) == {4}
    assert set(anchors_of(graph, anchors, 0, "out")) == {6}


@pytest.mark.parametrize("length", [1, 5])
def test_one_item_alone(length: int) -> None:
    """Of length 1 it has neither edge nor neighbour; repeated, only the self-transition."""
    graph = build([[3] * length])
    weights = neighbourhoods(graph, Anchors.build(graph), "distance", 0.0, True)
    assert weights.flatten().tolist() == [float(length > 1)] * 2
    assert edges_of(graph, 0) == ({(3, 3): length - 1} if length > 1 else {})


@settings(max_examples=300, deadline=None)
@given(sessions)
def test_graphs_equal_dictionaries(many: list[list[int]]) -> None:
    graph, want_alias = build(many), []
    for row, events in enumerate(many):
        nodes = nodes_of(graph, row)
        assert set(nodes) == set(events) and len(nodes) == int(graph.nodes.lengths[row])
        assert edges_of(graph, row) == reference.edges(events)
        newest = len(events) - 1
        for item, node in nodes.items():
            assert graph.first[node] == events.index(item)
            assert graph.age[node] == events[::-1].index(item)
            assert graph.count[node] == events.count(item)
        assert graph.first_node[row] == nodes[events[0]]
        assert graph.last_node[row] == nodes[events[newest]]
        want_alias += [nodes[item] for item in events]
    assert graph.alias.tolist() == want_alias


@settings(max_examples=300, deadline=None)
@given(sessions)
def test_distances_equal_a_breadth_first_search(many: list[list[int]]) -> None:
    graph = build(many)
    found = distances(graph, torch.arange(len(graph.items)))  # from every node, anchor or not
    anchors = Anchors.build(graph)
    for row, events in enumerate(many):
        nodes = nodes_of(graph, row)
        for item, node in nodes.items():
            want = reference.steps(events, item)
            assert {i: int(found[node, graph.nodes.index[n]]) for i, n in nodes.items()} == want
            assert not found[node, len(nodes) :].any()
        for side, items in zip(("into", "out"), reference.anchors(events), strict=True):
            want = {item: reference.steps(events, item) for item in items}
            assert anchors_of(graph, anchors, row, side) == want


@settings(max_examples=150, deadline=None)
@given(
    sessions,
    st.booleans(),
    st.sampled_from(rule("anchor_overlap").choices),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
def test_messages_equal_loops(
    many: list[list[int]], with_anchors: bool, overlap: str, self_weight: float, mean: bool
) -> None:
    graph = build(many)
    anchors = Anchors.build(graph) if with_anchors else None
    found = neighbourhoods(graph, anchors, overlap, self_weight, mean)
    assert found.isfinite().all()
    for row, events in enumerate(many):
        nodes = nodes_of(graph, row)
        place = {item: int(graph.nodes.index[node]) for item, node in nodes.items()}
        want = reference.message_weights(events, with_anchors, overlap, self_weight, mean)
        for side, weights in enumerate(want):
            expected = torch.zeros(found.shape[2:])
            for item, senders in weights.items():
                for sender, weight in senders.items():
                    expected[place[item], place[sender]] = weight
            torch.testing.assert_close(found[row, side], expected)


def test_long_sessions_with_many_repeats() -> None:
    """As long as sessions get, where shortest paths change stretches often."""
    many = torch.randint(1, 40, (30, 50), generator=torch.Generator().manual_seed(0)).tolist()
    graph = build(many, 50)
    found = distances(graph, torch.arange(len(graph.items)))
    for row, events in enumerate(many):
        nodes = nodes_of(graph, row)
        for item, node in nodes.items():
            want = reference.steps(events, item)
            assert {i: int(found[node, graph.nodes.index[n]]) for i, n in nodes.items()} == want
