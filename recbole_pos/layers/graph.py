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

        # A number for each pair of session and item. ``row`` [m] is the session of each
        # interaction, here 0 0 0 1 1. With 10 items, 0 to 9, the numbers are 7 4 7 14 19.
        session = events.row
        code = session * (items.max() + 1) + items

        # Interactions with the same number are one node. Sorting brings them together, the oldest
        # first, as it is stable:
        #
        #     sorted_code = 4 7 7 14 19
        #     order       = 1 0 2  3  4    the interaction of each, an index among all
        #     sorted_node = 0 1 1  2  3    the node of each
        #     count       = 1 2 1 1        interactions of each of the four nodes
        sorted_code, order = code.sort(stable=True)
        _, sorted_node, count = torch.unique_consecutive(
            sorted_code, return_inverse=True, return_counts=True
        )
        # the node of each interaction in the order of the batch: alias[order] = sorted_node
        alias = torch.empty_like(order).index_copy_(0, order, sorted_node)

        # The interactions of a node are ``order[start]`` to ``order[end]``, the oldest first. In
        # the example node 1 has start 1 and end 2: its oldest interaction is 0, its newest one 2.
        end = count.cumsum(0) - 1
        start = end - count + 1
        oldest, newest = order[start], order[end]

        num_nodes = torch.bincount(session[oldest], minlength=events.batch_size)  # by session
        nodes = SequenceBatch.from_lengths(
            items[oldest], num_nodes, batch.max_length, features=batch.features
        )
        # ``index`` and ``age`` [m] say how many interactions of the session are older and how many
        # are newer than each one
        first, age = events.index[oldest], events.age[newest]
        return cls(events, nodes, first=first, age=age, count=count, alias=alias)

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

        There are m interactions and k nodes in the b sessions, both session by session.
        """
        b, n = self.nodes.batch_size, self.nodes.width
        session = self.events.row  # [m] the session of each interaction
        # ``alias`` [m] is the node of each interaction, an index among all k, and ``nodes.index``
        # [k] the number of each node in its session
        node = self.nodes.index[self.alias]  # [m]

        # Each pair of successive interactions adds 1 to the result at its session and two nodes.
        # The end of a session and the beginning of the next one are no transition: they add 0.
        from_node, to_node = node[:-1], node[1:]
        is_transition = (session[:-1] == session[1:]).to(torch.get_default_dtype())
        counts = is_transition.new_zeros(b, n, n)
        entries = (session[1:], from_node, to_node)
        return counts.index_put_(entries, is_transition, accumulate=True)


@dataclass(frozen=True)
class Anchors:
    """Nodes that send messages to every node of their session. Built with :meth:`build`.

    Attributes:
        node: [a] int64 index of each anchor among the k nodes of the batch.
        is_before: [a] bool, whether it sends as if it stood before every node, as one of N_in.
        is_after: [a] bool, whether it sends as if it stood after every node, as one of N_out.
        distance: [a, n] int64 steps to each node of its session; 0 to itself and at padding.
    """

    node: Tensor
    is_before: Tensor
    is_after: Tensor
    distance: Tensor

    @classmethod
    def build(cls, graph: SessionGraph) -> Anchors:
        """Find the anchors of every session, the nodes that send to all others (PosRec, 4.3.2).

        A node is a distinct item of a session. It receives messages from two sets of nodes: those
        before it (N_in) and those after it (N_out). An anchor is in such a set of all other nodes:

        - the first item of the session stands before all others (``is_before``)
        - the last item stands after all others (``is_after``)
        - an item that occurs several times counts as both.

        Of the session 7, 4, 7, 5 the anchors are 7, as both, and 5, which stands after all others.

        Args:
            graph: graphs of b sessions, with k nodes in all. ``count`` [k] says how often the item
                of each node occurs; ``first_node`` and ``last_node`` [b] are the nodes of the first
                and of the last item of each session.

        Returns:
            The anchors of all sessions.
        """
        # of each node, [k]
        is_repeated = graph.count > 1
        is_before = is_repeated.index_fill(0, graph.first_node, True)
        is_after = is_repeated.index_fill(0, graph.last_node, True)

        node = (is_before | is_after).nonzero().squeeze(1)  # [a] the anchors, as indices of nodes
        # [a, n] steps from each anchor to each of the up to n nodes of its session
        distance = count_distances(graph, node)
        return cls(node, is_before[node], is_after[node], distance)


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

    # The nodes that a session visits, interaction by interaction: 0, 2, 1, 0, 3 in the example,
    # whose items 4, 5, 7, 9 are the nodes 0 to 3. Padding counts as a node n.
    number = nodes.index[graph.alias]  # [m] of each interaction of the batch
    path_of_session = events.pad(number, "start").masked_fill(events.padding, n)  # [b, t]
    session = nodes.row[start]  # [a] the session of each start
    path = path_of_session[session]  # [a, t]

    # The distance of each node from the start: 0 of itself, and of others a number that is higher
    # than any distance, in the example far, far, 0, far.
    distance = path.new_full((len(start), n + 1), 2 * events.width)  # [a, n + 1]
    distance.scatter_(1, nodes.index[start][:, None], 0)
    while True:
        # of each interaction that of its node, far, 0, far, far, far; and 1, 0, 1, 2, 3 by walking
        walked = _walk(distance.gather(1, path))  # [a, t]
        # of each node the least among its interactions, and its distance so far: 1, 1, 0, 3
        lowered = distance.scatter_reduce(1, path, walked, "amin")  # [a, n + 1]
        if torch.equal(lowered, distance):  # none has fallen
            return distance[:, :n].masked_fill(nodes.padding[session], 0)
        distance = lowered


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
      that open). An anchor sends by N_in where ``anchors.is_before`` is True, and by N_out where
      ``anchors.is_after`` is.

    Args:
        graph: graphs of b sessions, the largest with n nodes.
        edges: [b, n, n] weight of the edge from node i (row) to node j (column); 0 for no edge.
        anchors: their a anchors, or None for the edges only. ``node`` [a] are their indices among
            the nodes of all sessions, and ``distance`` [a, n] the steps to each node of the
            session.

    Returns:
        Weights [b, 2, n, n] to node i (row) from node j (column), by N_in and by N_out.
    """
    # By N_in node i (row) receives along the edge from j to i, which ``edges`` has in row j. By
    # N_out it receives along the edge from i to j, in row i.
    weights = torch.stack((edges.transpose(1, 2), edges), 1)  # [b, 2, n, n]
    if anchors is None:
        return weights

    # Weights from an anchor are in one column of both matrices of its session: column ``number``,
    # its number among the nodes there.
    session, number = graph.nodes.row[anchors.node], graph.nodes.index[anchors.node]  # [a] both
    by_edges = weights[session, :, :, number]  # [a, 2, n], such a column in each row

    # Distances replace them where the anchor sends (by N_in, by N_out), except at 0: padding, and
    # the anchor itself, which keeps its edge to itself.
    distance = anchors.distance[:, None].to(weights.dtype)  # [a, 1, n]
    sends = torch.stack((anchors.is_before, anchors.is_after), 1)[:, :, None]  # [a, 2, 1]
    weights[session, :, :, number] = torch.where(sends & (distance > 0), distance, by_edges)
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
        block = nodes.pad(x, "start")  # [b, n, d]: the nodes of each session, then zeros

        # The weighted sum of the states of each node's neighbours. One product gives both sums: the
        # n rows of weights of neighbours before the nodes are above those of neighbours after them.
        sums = weights.flatten(1, 2) @ block  # [b, 2n, n] @ [b, n, d]
        sum_in, sum_out = (nodes.unpad(half, "start") for half in sums.chunk(2, 1))  # [k, d] both

        # W_in and W_out come last: so they multiply the k nodes only, and no padding
        message = torch.cat((self.into(sum_in), self.out(sum_out)), 1)  # m_t, [k, 2d]
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

        # W x of each head and node: the sum over d, the columns of x; e are the columns of W x
        projected = torch.einsum("hed,kd->hke", self.weight, x)  # [h, k, d]
        # The scalar products of W x with a_target and with a_source, of each node and head. Both
        # vectors are stacked along a new dimension s of size 2.
        vectors = torch.stack((a_target, a_source))  # [2, h, d]
        products = torch.einsum("hke,she->ksh", projected, vectors)  # [k, 2, h]

        # ``pad`` makes a block [b, n, ...] of [k, ...], with the n nodes of a session in each row,
        # and zeros where a session has fewer.
        block = nodes.pad(products, align="start")  # [b, n, 2, h]
        target, source = block.permute(2, 3, 0, 1)  # [h, b, n] both

        # e_ij [h, b, n, n], with node i in the rows and node j in the columns
        by_target, by_source = target[:, :, :, None], source[:, :, None, :]
        logits = by_target + by_source + a_edge[:, :, None, None] * weights
        logits = nn.functional.leaky_relu(logits, 0.2)
        logits = logits.masked_fill(weights == 0, -torch.inf)

        # sum_j softmax_j(e_ij) W x_j of each head, then the mean of the heads
        values = nodes.pad(projected.transpose(0, 1), align="start")  # W x as [b, n, h, d]
        mixed = logits.softmax(-1) @ values.permute(2, 0, 1, 3)  # [h, b, n, d]
        mixed = mixed.mean(0)  # [b, n, d]
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
