"""Session graphs: worked by hand, and against dictionaries and breadth-first search."""

from __future__ import annotations

import reference_graph as reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recbole_pos.config.options import find_option
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
# as long as sessions get, where shortest paths change stretches often
LONG = torch.randint(1, 40, (20, 50), generator=torch.Generator().manual_seed(0)).tolist()


def build(given_sessions: list[list[int]]) -> SessionGraph:
    lengths = torch.tensor([len(s) for s in given_sessions])
    items = torch.tensor([item for s in given_sessions for item in s])
    context = SequenceContext.from_lengths(lengths, max(N, *lengths.tolist()))
    return SessionGraph.build(items, context)


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
            distance = anchors.distance[number].tolist()
            found[int(graph.items[node])] = {i: distance[place[i]] for i in inside}
    return found


def test_messages_by_hand() -> None:
    """v1 v2 v1 v2 v3 v3: an edge of weight 2 from an anchor, a self-transition of the last item."""
    graph = build([[1, 2, 1, 2, 3, 3]])
    anchors = Anchors.build(graph)

    def weights(overlap: str, self_weight: float = 0.0, mean: bool = False) -> list:
        return neighbourhoods(graph, anchors, overlap, self_weight, mean)[0].tolist()

    # rows receive, columns send; every item is repeated, so all are anchors on both sides
    edges = neighbourhoods(graph, None, "distance", 0.0, False)[0].tolist()
    assert edges == [[[0, 1, 0], [2, 0, 0], [0, 1, 1]], [[0, 2, 0], [1, 0, 1], [0, 0, 1]]]
    assert weights("distance") == [[[0, 1, 2], [1, 0, 1], [2, 1, 1]]] * 2
    assert weights("edge")[0] == [[0, 1, 2], [2, 0, 1], [2, 1, 1]]
    assert weights("sum")[1] == [[0, 3, 2], [2, 0, 2], [2, 1, 1]]
    assert [row[i] for i, row in enumerate(weights("distance", 0.5)[0])] == [0.5, 0.5, 1.5]
    assert weights("distance", mean=True)[0][1:] == [[0.5, 0, 0.5], [0.5, 0.25, 0.25]]


@settings(max_examples=150, deadline=None)
@given(sessions)
@example(LONG)
@example([[3], [3] * 5, [4, 9, 2, 6], [1, 2, 3, 2, 4, 2, 3, 5]])
def test_graphs_and_distances_equal_dictionaries(many: list[list[int]]) -> None:
    graph, want_alias = build(many), []
    found = distances(graph, torch.arange(len(graph.items))).tolist()  # anchor or not
    anchors = Anchors.build(graph)
    for row, events in enumerate(many):
        nodes = nodes_of(graph, row)
        assert set(nodes) == set(events) and len(nodes) == int(graph.nodes.lengths[row])
        assert edges_of(graph, row) == reference.edges(events)
        place = {item: int(graph.nodes.index[node]) for item, node in nodes.items()}
        for item, node in nodes.items():
            assert graph.first[node] == events.index(item)
            assert graph.age[node] == events[::-1].index(item)
            assert graph.count[node] == events.count(item)
            assert {i: found[node][n] for i, n in place.items()} == reference.steps(events, item)
            assert not any(found[node][len(nodes) :])
        assert graph.first_node[row] == nodes[events[0]]
        assert graph.last_node[row] == nodes[events[-1]]
        want_alias += [nodes[item] for item in events]
        for side, items in zip(("into", "out"), reference.anchors(events), strict=True):
            want = {item: reference.steps(events, item) for item in items}
            assert anchors_of(graph, anchors, row, side) == want
    assert graph.alias.tolist() == want_alias


@settings(max_examples=100, deadline=None)
@given(
    sessions,
    st.booleans(),
    st.sampled_from(find_option("anchor_overlap").choices),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
@example([[3], [3] * 5], True, "distance", 0.0, True)
def test_messages_equal_loops(
    many: list[list[int]], with_anchors: bool, overlap: str, self_weight: float, mean: bool
) -> None:
    graph = build(many)
    anchors = Anchors.build(graph) if with_anchors else None
    found = neighbourhoods(graph, anchors, overlap, self_weight, mean)
    for row, events in enumerate(many):
        place = {i: int(graph.nodes.index[node]) for i, node in nodes_of(graph, row).items()}
        want = reference.message_weights(events, with_anchors, overlap, self_weight, mean)
        for side, weights in enumerate(want):
            expected = reference.matrix(weights, place, found.size(2))
            torch.testing.assert_close(found[row, side], expected)
