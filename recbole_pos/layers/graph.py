"""Sessions as graphs: a node for each item, an edge for every transition; and layers over them.

PosRec, section 4.3.1 (graph) and 4.3.2 (anchors, gated messages); FGNN (weighted attention,
Set2Set). Shapes as in ``sequence_batch.py``, with k nodes in the batch, packed session by session,
n nodes in the largest session, a anchors in the batch, and h heads that have all d columns each. As
in PosRec a transition of an item to itself is an edge like any other.

References:
    Ruihong Qiu et al. "Exploiting Positional Information for Session-based Recommendation."
    ACM Transactions on Information Systems 2021.
    Ruihong Qiu et al. "Rethinking the Item Order in Session-based Recommendation with Graph Neural
    Networks." CIKM 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from recbole_pos.layers.sequence_batch import SequenceBatch


@dataclass(frozen=True)
class SessionGraph:
    """Weighted directed graphs of b sessions. Built with :meth:`build`."""

    events: SequenceBatch  # the m interactions
    nodes: SequenceBatch  # the k nodes as if they were interactions, in order of their items
    first: Tensor  # [k] int64, interactions of the session before the node's first appearance
    age: Tensor  # [k] int64, interactions of the session after the node's last appearance
    count: Tensor  # [k] int64, appearances
    alias: Tensor  # [m] int64, the node of each interaction

    @classmethod
    def build(cls, batch: SequenceBatch) -> SessionGraph:
        """Build the graphs of a batch's sessions; every distinct item of a session is a node.

        The sessions 7, 4, 7 and 4, 9 have the nodes 4 and 7, and 4 and 9, numbered 0 to 3. Item 7
        is node 1: it has 0 interactions before its first one (``first``), 0 after its last one
        (``age``), and occurs twice (``count``). ``alias``, the node of each interaction, is
        1, 0, 1 and 2, 3.

        Args:
            batch: the sessions, with the items of their m interactions.

        Returns:
            The graphs, with all nodes of a session one after the other.
        """
        # The graph is copied to a GPU beside the batch. It takes items and lengths only, so that
        # times and fields are not copied twice.
        items = batch.items
        events = SequenceBatch(items, batch.lengths, batch.max_length, batch.width)

        # Sort the interactions by session (``row``) and item; those of one node keep their order,
        # the oldest first. Session and item make one number. In the example these are 7 4 7 14 19,
        # as there are items 0 to 9. Sorted they are
        #
        #     code  = 4 7 7 14 19
        #     order = 1 0 2  3  4    the interaction of each
        #     node  = 0 1 1  2  3    the node of each
        #     count = 1 2 1 1        interactions of each of the four nodes
        code, order = (events.row * (items.max() + 1) + items).sort(stable=True)
        _, node, count = torch.unique_consecutive(code, return_inverse=True, return_counts=True)
        alias = torch.empty_like(order).index_copy_(0, order, node)  # alias[order] = node

        # The interactions of a node are ``order[start]`` to ``order[end]``, the oldest first. In
        # the example node 1 has start 1 and end 2: its first interaction is 0, its last one 2.
        end = count.cumsum(0) - 1
        start = end - count + 1
        first, last = order[start], order[end]

        num_nodes = torch.bincount(events.row[first], minlength=events.batch_size)  # by session
        nodes = SequenceBatch.from_lengths(
            items[first], num_nodes, batch.max_length, features=batch.features
        )
        return cls(
            events, nodes, first=events.index[first], age=events.age[last], count=count, alias=alias
        )

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
        """Return how often node j (column) directly follows node i (row), [b, n, n].

        A node is a distinct item of a session; n is the number of nodes of the largest session. The
        nodes of a session are numbered from 0 in order of their items: a session of the items 4, 7,
        4, 7 has the nodes 0, 1, 0, 1, hence 2 transitions from node 0 to node 1, and 1 back.

        ``events`` describes the m interactions of the b sessions, ``nodes`` the k nodes of all
        sessions, both session by session. ``alias`` [m] says which of the k each interaction has.
        """
        b, n = self.nodes.batch_size, self.nodes.width
        session = self.events.row  # [m] the session of each interaction
        node = self.nodes.index[self.alias]  # [m] its node, as a number from 0 in the session

        # Each pair of successive interactions adds 1 to an entry of the result. A pair of two
        # sessions adds 0: its second interaction is the oldest of a session, with index 0.
        is_edge = (self.events.index[1:] > 0).to(torch.get_default_dtype())
        counts = is_edge.new_zeros(b, n, n)
        return counts.index_put_((session[1:], node[:-1], node[1:]), is_edge, accumulate=True)


@dataclass(frozen=True)
class Anchors:
    """Nodes that send messages to every node of their session. Built with :meth:`build`.

    Attributes:
        node: [a] int64 index of each anchor among the k nodes of the batch.
        into: [a] bool, whether it sends as if it stood before every node, as one of N_in.
        out: [a] bool, whether it sends as if it stood after every node, as one of N_out.
        distance: [a, n] int64 steps to each node of its session; 0 to itself and at padding.
    """

    node: Tensor
    into: Tensor
    out: Tensor
    distance: Tensor

    @classmethod
    def build(cls, graph: SessionGraph) -> Anchors:
        """Find the anchors of every session, the nodes that send to all others (PosRec, 4.3.2).

        A node is a distinct item of a session. It receives messages from nodes before it (N_in) and
        from nodes after it (N_out): those of the items next to it, and the anchors. These are

        - the first item of the session, in N_in, since it stands before all others
        - the last item, in N_out, since it stands after all others
        - an item that occurs several times, in both, since it may stand before and after another.

        Of the session 7, 4, 7, 5 the anchors are 7, in both N_in and N_out, and 5, in N_out.

        Args:
            graph: graphs of b sessions, with k nodes in all. ``count`` [k] says how often the item
                of each node occurs; ``first_node`` and ``last_node`` [b] are the nodes of the first
                and of the last item of each session.

        Returns:
            The anchors of all sessions.
        """
        # [k] of each node, whether it is in N_in and in N_out of the others
        is_repeated = graph.count > 1
        into = is_repeated.index_fill(0, graph.first_node, True)
        out = is_repeated.index_fill(0, graph.last_node, True)

        node = (into | out).nonzero().squeeze(1)
        return cls(node, into[node], out[node], count_distances(graph, node))


def count_distances(graph: SessionGraph, start: Tensor) -> Tensor:
    """Count the steps of the shortest paths from some nodes to all nodes of their session.

    A node is a distinct item, and successive items are one step apart, in both directions. In the
    session of the items 4, 7, 5, 4, 9 it is one step from 7 to 4 and to 5, and two to 9: back from
    7 to the first 4, which is the same node as the second 4, and on from there.

    At first 7 itself is at distance 0, and all others are far. Then two actions take turns until no
    distance falls any more: each interaction's distance is lowered by walking along the session
    from another one, and all interactions with the same item get the least distance among them:

        items               4    7    5    4    9
        at first          far    0  far  far  far
        walk from 7         1    0    1    2    3
        least of an item    1    0    1    1    3     both 4 are one step from 7
        walk                1    0    1    1    2     9 is one step from the second 4

    Args:
        graph: graphs of b sessions with k nodes in all (``nodes``), the largest session with t
            interactions and n nodes. The nodes of a session have the numbers 0, 1, ... in it.
        start: [a] int64 nodes from which to count, as indices among the k.

    Returns:
        [a, n] int64 number of steps to each node of the session; 0 at padding.
    """
    events, nodes, n = graph.events, graph.nodes, graph.nodes.width

    # The path of each start: the numbers of the nodes along its session, interaction by
    # interaction; such as 0, 2, 1, 0, 3 for the items 4, 7, 5, 4, 9. Padding is node n.
    number = nodes.index[graph.alias]  # of the node of each interaction of the batch
    path_of_session = events.pad(number, "start").masked_fill(events.padding, n)  # [b, t]
    session = nodes.row[start]
    path = path_of_session[session]  # [a, t]

    # The distance of each node from the start, [a, n + 1]: 0 for the start, and far for others,
    # which is longer than any path.
    distance = path.new_full((len(start), n + 1), 2 * events.width)
    distance.scatter_(1, nodes.index[start][:, None], 0)
    while True:
        walked = _walk(distance.gather(1, path))  # of each interaction, [a, t]
        # of each node the least: of its distance so far, and those of its interactions
        previous, distance = distance, distance.scatter_reduce(1, path, walked, "amin")
        if torch.equal(previous, distance):  # none has fallen
            return distance[:, :n].masked_fill(nodes.padding[session], 0)


def _walk(distance: Tensor) -> Tensor:
    """Lower the distance of each place in a row to that on a walk from any other place.

    The walk from place j to place i takes abs(i - j) steps, so the result at i is the least of
    distance_j + abs(i - j) over all j: 8 0 8 8 becomes 1 0 1 2.

    Args:
        distance: [..., t] int64 distances of t places.
    """
    place = torch.arange(distance.size(-1), device=distance.device)
    # walks from j <= i: the least of distance_j - j + i, where i is the same for all j
    from_before = (distance - place).cummin(-1).values.add_(place)
    # walks from j >= i: the least of distance_j + j - i, found from the last place backwards
    from_after = (distance + place).flip(-1).cummin(-1).values.flip(-1).sub_(place)
    return torch.minimum(from_before, from_after)


def weigh_neighbours(graph: SessionGraph, edges: Tensor, anchors: Anchors | None) -> Tensor:
    """Return weights of the messages a node receives, N'_in and N'_out (PosRec, equation 7).

    A node receives messages from nodes before it (N_in) and after it (N_out) in the session:

    - along edges, with the edge's weight. By an edge from i to j node j receives from i by N_in,
      and i from j by N_out.
    - from anchors, nodes that send to all other nodes of the session. The weight is the number of
      steps between the two, also where there is an edge (the paper, Qiu et al., TOIS 2021, leaves
      that open). An anchor sends by N_in if ``anchors.into`` is True, by N_out if ``anchors.out``
      is.

    Args:
        graph: graphs of b sessions, the largest with n nodes.
        edges: [b, n, n] weight of the edge from node i (row) to node j (column); 0 for no edge.
        anchors: their a anchors, or None for the edges only. ``node`` [a] are their indices among
            the nodes of all sessions, ``distance`` [a, n] the steps to each node of the session,
            and ``into`` and ``out`` [a] say by what they send.

    Returns:
        Weights [b, 2, n, n] to node i (row) from node j (column), by N_in and by N_out.
    """
    # what node i receives from node j by N_in is the edge from j to i, hence the transposition
    weights = torch.stack((edges.transpose(1, 2), edges), 1)
    if anchors is None:
        return weights

    # the session of each anchor, and its number among the nodes of the session, [a] both
    session, index = graph.nodes.row[anchors.node], graph.nodes.index[anchors.node]
    # the weights with which each anchor sends to the n nodes of its session, by N_in and by N_out
    by_edges = weights[session, :, :, index]  # [a, 2, n]

    # Distances replace them where the anchor sends (by N_in, by N_out), except at 0: padding, and
    # the anchor itself, which keeps its edge to itself.
    distance = anchors.distance[:, None].to(weights.dtype)  # [a, 1, n]
    sends = torch.stack((anchors.into, anchors.out), 1)[:, :, None]  # [a, 2, 1]
    weights[session, :, :, index] = torch.where(sends & (distance > 0), distance, by_edges)
    return weights


class PGGNN(nn.Module):
    """One layer: messages from in- and out-neighbours, then a GRU update (equations 7 and 8).

        m_t  = W_in sum_t' w_in[t, t'] x_t'  ||  W_out sum_t' w_out[t, t'] x_t'
        x'_t = GRU(x_t, m_t)                       m_t the input, x_t the state

    The weights decide whether anchors are among the neighbours, see ``weigh_neighbours``.
    """

    def __init__(self, hidden_size: int) -> None:
        """Create W_in and W_out, for messages from nodes before and after a node, and the GRU."""
        super().__init__()
        self.into = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        # its input are both messages side by side
        self.gru = nn.GRUCell(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor, weights: Tensor, nodes: SequenceBatch) -> Tensor:
        """Update the states of nodes by messages of their neighbours (PosRec, equations 7 and 8).

        Args:
            x: [k, d] states x_t of all nodes of the batch.
            weights: [b, 2, n, n] weights of the messages to node i (row) from node j (column), of
                neighbours before it (first) and after it (see :func:`weigh_neighbours`).
            nodes: the sessions that the nodes belong to.

        Returns:
            [k, d] states x'_t = GRU(x_t, m_t).
        """
        # Sum the states of neighbours first, and multiply by W afterwards, so that padding is never
        # multiplied. One product gives both sums: the weights of N_in stand above those of N_out.
        sums = weights.flatten(1, 2) @ nodes.pad(x, "start")  # [b, 2n, n] @ [b, n, d]
        sums_in, sums_out = (nodes.unpad(half, "start") for half in sums.chunk(2, 1))  # [k, d]
        message = torch.cat((self.into(sums_in), self.out(sums_out)), 1)
        return self.gru(message, x)


class WGAT(nn.Module):
    """One layer: every node attends to the nodes with an edge to it, by their weights too.

        e_ij  = LeakyReLU(a^T [W x_i || W x_j || w_ij])        for j with an edge to i of weight w
        x'_i  = 1/h sum over heads of  sum_j softmax_j(e_ij) W x_j + b

    a^T is applied in three parts, so that no [b, n, n, d] exists.

    Args:
        hidden_size: d.
        n_heads: h, each with its own W and a.
    """

    def __init__(self, hidden_size: int, n_heads: int) -> None:
        """Create the parameters W, a and b of a layer of weighted graph attention.

        The layer computes new vectors x'_i of nodes from the vectors x_j of their neighbours and
        the weights w_ij of the edges between them:

            e_ij  = LeakyReLU(a^T [W x_i || W x_j || w_ij])
            x'_i  = 1/h sum over heads of  sum_j softmax_j(e_ij) W x_j + b

        Args:
            hidden_size: d, the size of all vectors.
            n_heads: h, the number of heads, each with its own W and a.
        """
        super().__init__()
        self.n_heads = n_heads
        self.weight = nn.Parameter(torch.empty(n_heads, hidden_size, hidden_size))  # W
        self.attention = nn.Parameter(torch.empty(n_heads, 2 * hidden_size + 1))  # a
        self.bias = nn.Parameter(torch.zeros(hidden_size))  # b
        for head in self.weight.data:  # one by one, as the rule depends on the shape
            nn.init.xavier_uniform_(head)
        nn.init.xavier_uniform_(self.attention)

    def forward(self, x: Tensor, weights: Tensor, nodes: SequenceBatch) -> Tensor:
        """Update nodes by weighted graph attention (FGNN, Qiu et al., CIKM 2019).

            e_ij  = LeakyReLU(a^T [W x_i || W x_j || w_ij])        for j with an edge to i
            x'_i  = 1/h sum over heads of  sum_j softmax_j(e_ij) W x_j + b

        Args:
            x: [k, d] vectors x_i of all nodes of the batch.
            weights: [b, n, n] weight w_ij of the edge to node i (row) from node j (column), 0 for
                no edge. Every node, padding too, needs an edge to itself: a softmax over none is
                NaN.
            nodes: the sessions that the nodes belong to.

        Returns:
            [k, d] vectors x'_i.
        """
        # a^T [W x_i || W x_j || w_ij] is the sum of three parts: a_target W x_i + a_source W x_j +
        # a_edge w_ij. ``attention`` has the vector a of each of the h heads, [h, 2d + 1].
        d = x.size(1)
        a_target, a_source, a_edge = self.attention.split((d, d, 1), 1)

        # W x of each head h and node k. The letters d and e are the columns of x and of W x.
        projected = torch.einsum("hed,kd->hke", self.weight, x)  # [h, k, d]
        # a_target W x and a_source W x of each node and head; s stands for these two products.
        products = torch.einsum("hke,she->ksh", projected, torch.stack((a_target, a_source)))

        # ``pad`` makes a block [b, n, ...] of [k, ...], with the n nodes of a session in each row,
        # and zeros where a session has fewer.
        block = nodes.pad(products, align="start")  # [b, n, 2, h]
        target, source = block.permute(2, 3, 0, 1)  # [h, b, n] both

        # e_ij [h, b, n, n], with node i in the rows and node j in the columns
        logits = target[..., None] + source[:, :, None] + a_edge[:, :, None, None] * weights
        logits = nn.functional.leaky_relu(logits, 0.2)
        logits = logits.masked_fill(weights == 0, -torch.inf)

        # sum_j softmax_j(e_ij) W x_j, then the mean of the heads, [b, n, d]
        block = nodes.pad(projected.transpose(0, 1), align="start")  # W x as [b, n, h, d]
        mixed = (logits.softmax(-1) @ block.permute(2, 0, 1, 3)).mean(0)
        return nodes.unpad(mixed, align="start") + self.bias  # ``unpad`` is the inverse of ``pad``


class GRUSet2Set(nn.Module):
    """Summarise a set of nodes by repeated attention; each answer updates the next query.

        q_t   = GRU(q*_(t-1), q_(t-1))                         q_0 = q*_0 = 0
        r_t   = sum_i softmax_i(x_i . q_t) x_i
        q*_t  = q_t || r_t

    Set2Set (Vinyals et al., ICLR 2016) with a GRU for the LSTM.

    Args:
        hidden_size: d.
        steps: number of queries.
    """

    def __init__(self, hidden_size: int, steps: int) -> None:
        """Create the GRU cell, which makes the next query of the one before and its answer.

        Args:
            hidden_size: d, the size of queries and of answers.
            steps: number of queries.
        """
        super().__init__()
        self.steps = steps
        self.gru = nn.GRUCell(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor, nodes: SequenceBatch) -> Tensor:
        """Summarise the nodes of every session into one vector (Set2Set, Vinyals et al., 2016).

        A query q_t reads the nodes by attention. Its answer r_t, a weighted mean of their vectors,
        goes into the next query, and so on for ``steps`` queries:

            q_t   = GRU(q*_(t-1), q_(t-1))                         q_0 = q*_0 = 0
            r_t   = sum_i softmax_i(x_i . q_t) x_i
            q*_t  = q_t || r_t

        Args:
            x: [k, d] vectors x_i of all nodes of the batch.
            nodes: the sessions that the nodes belong to.

        Returns:
            [b, 2d] the last q*.
        """
        block = nodes.pad(x, "start")  # a row for each session, with zeros behind it: [b, n, d]
        query = x.new_zeros(nodes.batch_size, x.size(1))  # q_0, [b, d]
        summary = torch.cat((query, query), 1)  # q*_0, [b, 2d]
        for _ in range(self.steps):
            query = self.gru(summary, query)
            # x_i . q_t of each node, [b, n], then r_t, [b, d]
            logits = (block @ query[:, :, None]).squeeze(2).masked_fill(nodes.padding, -torch.inf)
            answer = (logits.softmax(1)[:, None] @ block).squeeze(1)
            summary = torch.cat((query, answer), 1)
        return summary
