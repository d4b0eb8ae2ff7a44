"""Sessions as graphs: one node per item of a session, an edge for every transition.

PosRec, section 4.3.1 (graph) and 4.3.2 (anchors). Shapes as in ``context.py``, with k nodes in the
batch, packed session by session, n nodes in the largest session, and a anchors in the batch. As in
the paper a transition of an item to itself is an edge like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from recbole_pos.layers.chunks import iterate_chunks
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.padded import PaddedContext


@dataclass(frozen=True)
class SessionGraph:
    """Weighted directed graphs of b sessions. Built with :meth:`build`."""

    events: SequenceContext  # of the m interactions
    nodes: SequenceContext  # of the k nodes; those of a session in order of their items
    items: Tensor  # [k] int64
    first: Tensor  # [k] int64, interactions of the session before the node's first appearance
    age: Tensor  # [k] int64, interactions of the session after the node's last appearance
    count: Tensor  # [k] int64, appearances
    alias: Tensor  # [m] int64, the node of each interaction

    @classmethod
    def build(cls, items: Tensor, events: SequenceContext) -> SessionGraph:
        """Build the graphs of packed item ids [m]; every distinct item of a session is a node."""
        if isinstance(events, PaddedContext):
            return cls._build_padded(items, events)
        code = events.row * (items.max() + 1) + items  # by session, then by item
        key, order = code.sort(stable=True)
        is_new = torch.ones_like(key, dtype=torch.bool)
        torch.ne(key[1:], key[:-1], out=is_new[1:])
        alias = torch.empty_like(order).index_copy_(0, order, is_new.cumsum(0) - 1)
        start = is_new.nonzero().squeeze(1)  # the first appearance of each node, in sorted order
        count = torch.diff(start, append=start.new_tensor([order.numel()]))
        first, last = order[start], order[start + count - 1]
        lengths = torch.bincount(events.row[first], minlength=events.batch_size)
        return cls(
            events=events,
            nodes=SequenceContext.from_lengths(lengths, events.max_length),
            items=items[first],
            first=events.index[first],
            age=events.age[last],
            count=count,
            alias=alias,
        )

    @classmethod
    def _build_padded(cls, items: Tensor, events: PaddedContext) -> SessionGraph:
        """Build graphs of items [b * t] in fixed shapes: b * t nodes, with padding at the end."""
        b, t = events.batch_size, events.width
        rows = items.view(b, t)
        is_real = ~events.padding
        are_real = is_real[:, :, None] & is_real[:, None]  # [b, t, t] pairs of interactions
        is_same_item = (rows[:, :, None] == rows[:, None]) & are_real
        index = torch.arange(t, device=items.device)  # of interactions, and of nodes
        first_same = is_same_item.long().argmax(2)  # [b, t] first interaction with the same item
        is_new = (first_same == index) & is_real
        node = (is_new.cumsum(1) - 1).clamp(min=0).gather(1, first_same)  # [b, t] of interactions
        is_of_node = (node[:, None] == index[:, None]) & is_real[:, None]  # [b, nodes, t]
        count = is_of_node.sum(2)
        first = torch.where(is_of_node, index, t).amin(2).masked_fill(count == 0, 0)
        last = torch.where(is_of_node, index, -1).amax(2).clamp(min=0)
        nodes = PaddedContext.from_rows(rows.gather(1, first), is_new.sum(1), events.max_length)
        assert nodes.items is not None
        age = (events.lengths[:, None] - 1 - last).masked_fill(count == 0, 0)
        alias = events.first[:, None] + node
        flat = (x.reshape(b * t) for x in (first, age, count, alias))
        return cls(events, nodes, nodes.items, *flat)

    @cached_property
    def first_node(self) -> Tensor:
        """[b] the node of each session's oldest interaction."""
        return self.alias[self.events.first]

    @cached_property
    def last_node(self) -> Tensor:
        """[b] the node of each session's newest interaction."""
        return self.alias[self.events.last]

    @cached_property
    def transitions(self) -> Tensor:
        """Return how often node j (column) directly follows node i, [b, n, n] for n nodes."""
        b, n = self.nodes.batch_size, self.nodes.width
        session = self.events.row
        node = self.nodes.index[self.alias]
        flat_index = (session[:-1] * n + node[:-1]) * n + node[1:]
        is_edge = self.events.follows[1:].to(torch.get_default_dtype())  # 0 between two sessions
        return is_edge.new_zeros(b * n * n).index_add_(0, flat_index, is_edge).view(b, n, n)


@dataclass(frozen=True)
class Anchors:
    """Nodes that send to every node of their session. Built with :meth:`build`."""

    node: Tensor  # [a] int64, of the k nodes
    into: Tensor  # [a] bool, in N_in of every node: the first item and repeated ones
    out: Tensor  # [a] bool, in N_out of every node: the last item and repeated ones
    distance: Tensor  # [a, n] int64, to the nodes of its session; 0 for itself and at padding

    @classmethod
    def build(cls, graph: SessionGraph) -> Anchors:
        """Return the anchors of every session: its first, last and repeated items."""
        is_repeated = graph.count > 1
        into = is_repeated.index_fill(0, graph.first_node, True)
        out = is_repeated.index_fill(0, graph.last_node, True)
        if isinstance(graph.events, PaddedContext):  # fixed shapes: some nodes send nothing
            node = torch.arange(into.size(0), device=into.device)
            return cls(node, into, out, _count_all_distances(graph))
        node = (into | out).nonzero().squeeze(1)
        return cls(node, into[node], out[node], count_distances(graph, node))


def count_distances(graph: SessionGraph, start: Tensor) -> Tensor:
    """Count steps from nodes to all nodes of their session; edges have no weight or direction.

    A session is a walk through its graph, so a shortest path is made of stretches of the session,
    and changes from one to the next where an item occurs again. A sweep along the session and back
    relaxes all stretches of all paths; one sweep is needed for each repeated item, and one more.

    Returns:
        [a, n] int64 number of steps from the nodes ``start`` [a]; 0 at padding.
    """
    events, nodes, n = graph.events, graph.nodes, graph.nodes.width
    row, start_index = nodes.row[start], nodes.index[start]
    block = events.pad(nodes.index[graph.alias] - n, "start") + n  # [b, t], n at padding
    node = torch.cat((block, block.flip(1)), 1)[row]  # [a, 2t], along the session and back
    step = torch.arange(events.width, device=start.device)
    far = 2 * events.width  # longer than any path
    distance = torch.where(node == start_index[:, None], 0, far)
    num_repeated = torch.bincount(nodes.row[graph.count > 1], minlength=1).max()  # in a session
    for _ in range(int(num_repeated) + 1):
        paths = distance.view(len(start), 2, -1) - step
        paths = paths.cummin(2).values.add_(step).view_as(node)
        shortest = distance.new_full((len(start), n + 1), far)
        shortest.scatter_reduce_(1, node, paths, "amin")
        previous = distance
        distance = shortest.gather(1, node)
        if torch.equal(previous, distance):
            break
    return shortest[:, :n].masked_fill(nodes.padding[row], 0)


def _count_all_distances(graph: SessionGraph) -> Tensor:
    """Return ``count_distances`` from all nodes, [k, n]; each round doubles the steps of a path."""
    nodes, n = graph.nodes, graph.nodes.width
    edges = graph.transitions + graph.transitions.transpose(1, 2)
    is_same = torch.eye(n, dtype=torch.bool, device=edges.device)
    far = 2 * nodes.max_length  # longer than any path
    steps = torch.where(edges > 0, 1, far).masked_fill(is_same, 0)
    parts = []
    for rows in iterate_chunks(nodes.batch_size, n**3, edges.device):
        distance = steps[rows]
        for _ in range(math.ceil(math.log2(max(nodes.max_length - 1, 1)))):
            distance = (distance[:, :, :, None] + distance[:, None]).amin(2)
        parts.append(distance)
    steps = torch.cat(parts)
    is_padding = nodes.padding[:, None] | nodes.padding[:, :, None]
    return steps.masked_fill(is_padding, 0).view(-1, n)


def weigh_neighbours(
    graph: SessionGraph,
    anchors: Anchors | None,
    overlap: str,
    self_weight: float,
    mean: bool,
    counted: bool = True,
) -> Tensor:
    """Return weights of the messages a node receives, N'_in and N'_out (PosRec, equation 7).

    The paper adds anchors to the neighbours of every node, "the distance" being the weight between
    an anchor and other nodes. It leaves open an anchor that is a neighbour by an edge of weight w
    (at distance 1), and the anchor itself (at distance 0). By default an anchor counts once, with
    its distance, and sends nothing to itself. Messages are sums, as in equation 7.

    Args:
        graph: graphs of b sessions.
        anchors: their anchors, or None for the edges only.
        overlap: weight of an anchor that is a neighbour: its ``distance`` (1), its ``edge`` (w), or
            the ``sum`` of both (w + 1).
        self_weight: weight of an anchor's message to itself; 0 as its distance.
        mean: whether the weights a node receives are divided by their sum, in and out separately,
            as in SR-GNN.
        counted: whether an edge weighs its number of transitions; else 1, as in SR-GNN's code.

    Returns:
        Weights [b, 2, n, n] to node i (row) from node j (column), by N_in and by N_out.
    """
    edges = graph.transitions if counted else graph.transitions.clamp(max=1)
    weights = torch.stack((edges.transpose(1, 2), edges), 1)
    if anchors is not None:
        row, index = graph.nodes.row[anchors.node], graph.nodes.index[anchors.node]
        sending = weights.transpose(2, 3)  # [b, 2, from, to], a view
        edges = sending[row, :, index]  # [a, 2, n]
        is_anchor = torch.stack((anchors.into, anchors.out), 1)[:, :, None]
        distances = (anchors.distance[:, None] * is_anchor).to(weights.dtype)
        joined = _join(edges, distances, overlap)
        if self_weight:  # a self-transition is an edge to another appearance, not this message
            itself = torch.arange(index.size(0), device=index.device), slice(None), index
            joined[itself] = edges[itself] + self_weight * is_anchor[:, :, 0]
        sending[row, :, index] = joined  # in place in ``weights``
    if mean:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo().tiny)
    return weights


def _join(edges: Tensor, anchors: Tensor, overlap: str) -> Tensor:
    """Combine the weights [a, 2, n] of edges and of anchors, see ``weigh_neighbours``."""
    if overlap == "sum":
        return edges + anchors
    preferred, other = (anchors, edges) if overlap == "distance" else (edges, anchors)
    return torch.where(preferred > 0, preferred, other)
