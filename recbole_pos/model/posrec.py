"""PosRec and FGNN: sessions as graphs, read out with positions from both ends or in learned order;
and RecBole's STAMP, SASRec, SRGNN and GCSAN with PosRec's encodings or anchors.

References:
    Ruihong Qiu, Zi Huang, Tong Chen, Hongzhi Yin. "Exploiting Positional Information for
    Session-based Recommendation." ACM Transactions on Information Systems 2021 (PosRec).
    Ruihong Qiu, Jingjing Li, Zi Huang, Hongzhi Yin. "Rethinking the Item Order in Session-based
    Recommendation with Graph Neural Networks." CIKM 2019 (FGNN).

A session's graph changes with every interaction, so neither model is causal: each prefix of a
session is an example (``train_windows: prefix``). Shapes as in ``layers/graph.py``.

RecBole's classes are for Table 3 (encodings) and Figures 5 and 6 (anchors) of the first paper.
EncodedSTAMP and EncodedSASRec have another embedding at the input, which adds P to the items of a
session and to nothing else: with ``position: [nope]`` STAMP is RecBole's, with ``[lpe]`` SASRec is.
RecBole's STAMP starts with a small random vector for padding, which it never trains and adds up;
here it is zero, or scores would depend on the width of a batch.

AnchoredSRGNN and AnchoredGCSAN take the graphs of a batch, which RecBole makes in a loop
(``_get_slice``), from ``layers/graph.py``. Anchors join the edges with their distances as weights,
before both are divided by their sum as SR-GNN divides. With ``anchors: False`` the scores are
RecBole's, faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.model.sequential_recommender.gcsan import GCSAN
from recbole.model.sequential_recommender.sasrec import SASRec
from recbole.model.sequential_recommender.srgnn import SRGNN
from recbole.model.sequential_recommender.stamp import STAMP
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.forward import BlockOptions, TransformerEncoder
from recbole_pos.layers.gated_blocks import build_layer
from recbole_pos.layers.graph import (
    PGGNN,
    WGAT,
    Anchors,
    GRUSet2Set,
    SessionGraph,
    weigh_neighbours,
)
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.build import Compose, build_row_encodings
from recbole_pos.values import Options


class GraphRecommender(PosRecommender):
    """Base of models of graphs, which are the ``extras`` of a batch.

    The number of nodes depends on the values of a session, so the host makes the graphs of a batch
    while the device trains on the batch before.
    """

    causal = False
    refuses: ClassVar[Mapping[str, str]] = {
        "event_features": "a node of its graphs is an item, whatever interactions it stands for"
    }

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.has_anchors = config["anchors"]

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch whose ``extras`` are its graph and the anchors, computed if need be.

        Anchors are items that send messages to all others of the session; None if the model has
        none (``anchors: False``). In training the host calls this before the step.

        Args:
            batch: sessions; a batch that has ``extras`` already is returned as it is.
        """
        if batch.extras is not None:
            return batch
        graph = SessionGraph.build(batch)
        anchors = Anchors.build(graph) if self.has_anchors else None
        return replace(batch, extras=(graph, anchors))


class PosRec(GraphRecommender):
    """Gated graph layers over a session's items, then a bidirectional transformer (Qiu et al.,
    "Exploiting Positional Information for Session-based Recommendation", TOIS 2021,
    section 4.3).

    The encodings of Figures 3 and 4 are ``position``, PosRec-ANC of Figures 5 and 6 is
    ``anchors: False``.

    =============== ===================================================================
    equation        code
    =============== ===================================================================
    5, 6            the schemes ``dpe`` and ``ldpe`` in ``position/additive.py``
    section 4.3.1   ``SessionGraph`` in ``layers/graph.py``
    7, weights w    ``weigh_neighbours`` in ``layers/graph.py``; anchors: ``Anchors``
    7, 8            ``PGGNN`` in ``layers/graph.py``
    9, 10           ``PosRec.encode``; the transformer is that of ``layers/forward.py``
    11, 12          ``layers/forward.py``, steps 6 and 7
    =============== ===================================================================
    """

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the layers: a graph network, position encodings, and a bidirectional transformer.

        Args:
            config: options, ``properties/model/PosRec.yaml``.
            dataset: training part of a dataset.
        """
        super().__init__(config, dataset)
        # sizes of the layers; ``causal=False``: an interaction also attends to newer ones
        options = BlockOptions.from_config(config, bias=True, output=True, causal=False)
        d, n_layers = options.hidden_size, config["n_layers"]

        # vectors for places in a session, which are added to those of items after the graph layers
        self.position_embedding = build_row_encodings(config, self.max_seq_length, d)
        # gated graph layers (PGGNN), in which the items of a session exchange messages
        self.graph_layers = nn.ModuleList(PGGNN(d) for _ in range(config["graph_layers"]))
        # the transformer; its attention has no position scheme of its own (``Compose({})``), since
        # positions are added to its input
        self.trm_encoder = TransformerEncoder(
            build_layer("transformer", options, Compose({})) for _ in range(n_layers)
        )
        self.dropout = Dropout(options.hidden_dropout_prob)
        # The state of a session is the weighted sum of three vectors: of its last item after the
        # graph layers, and of its last and its first item after the transformer. Their weights:
        self.mixture = [config[f"lambda_{i}"] for i in range(3)]
        self.init_weights()

    def encode(self, batch: SequenceBatch) -> Tensor:
        """Return the states s [b, d] that predict the next item of each session.

            X'  = GraphLayers(X)                                                  equations 7, 8
            H   = Transformer(X' + P)                                             equation 9
            s   = lambda_0 x'_last + lambda_1 H_last + lambda_2 H_first           equation 10

        (PosRec, Qiu et al., TOIS 2021, section 4.3). A session is a graph, whose nodes are its
        distinct items. X are their vectors, and P encodings of their positions in the session.
        Last and first are the nodes of the session's newest and oldest interaction.

        Args:
            batch: b sessions.

        Returns:
            [b, d].
        """
        # ``prepare`` builds the graphs, if the batch comes without. Anchors are nodes that send
        # messages to all others of the session; None if the model has none.
        graph, anchors = self.prepare(batch).extras
        nodes = graph.nodes  # the k nodes of all sessions, as a batch of their items

        # X': in each graph layer a node receives messages from anchors and from the nodes next to
        # it, the latter weighted by how often one item follows the other (``transitions``)
        x = self.embed(nodes)  # X, [k, d]
        weights = weigh_neighbours(graph, graph.transitions, anchors).to(x)
        for layer in self.graph_layers:
            x = layer(x, weights, nodes)

        # H, [k, d]
        encoded = self._add_positions(x, graph)
        hidden = self.trm_encoder(self.dropout(encoded), nodes)

        # s
        lambda_0, lambda_1, lambda_2 = self.mixture
        state = lambda_0 * x[graph.last_node] + lambda_1 * hidden[graph.last_node]
        return state + lambda_2 * hidden[graph.first_node]

    def _add_positions(self, x: Tensor, graph: SessionGraph) -> Tensor:
        """Add the encodings P of positions in the session to the vectors of nodes.

        A node is a distinct item of a session. Its encoding depends on three numbers: how many
        interactions of the session are before the item's first one (``graph.first``), how many are
        after its last one (``graph.age``), and how many there are in all. For the item 4 in the
        session 7, 4, 4, 5 they are 1, 1 and 4.

        Args:
            x: [k, d] vectors of the nodes of all sessions.
            graph: graphs of the sessions.

        Returns:
            [k, d].
        """
        length = graph.events.lengths[graph.nodes.row]  # [k] of the session of each node
        for scheme in cast("Iterable[PositionEncoding]", self.position_embedding):
            x = x + scheme.rows(graph.first, graph.age, length)
        return x


class FGNN(GraphRecommender):
    """Weighted graph attention with self-loops over a session's items, GRU-Set2Set readout
    (Qiu et al., "Rethinking the Item Order in Session-based Recommendation with Graph Neural
    Networks", CIKM 2019).

    With w_ij the number of transitions from item j to item i, and 1 from an item to itself if it
    never follows itself:

        e_ij = LeakyReLU(a^T [W x_i || W x_j || w_ij])                 j with an edge to i
        x'_i = 1/h sum over heads of  sum_j softmax_j(e_ij) W x_j      ReLU between layers
        q*   = GRU-Set2Set(x')                                         order of the items, learned
        s    = W_out q*,    z = s . x_v                                x_v the initial item vectors

    In ``layers/graph.py`` ``WGAT`` is the first two lines and ``GRUSet2Set`` the third. With
    ``anchors: True`` the anchors of PosRec that send, the first and repeated items, have edges to
    all nodes, their distances the weights (Figures 5 and 6 of the PosRec paper). Nodes attend to
    N_in only, so the last item is no anchor here.
    """

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the graph attention layers, the readout of sessions and the output layer.

        Args:
            config: options, ``properties/model/FGNN.yaml``.
            dataset: training part of a dataset.
        """
        super().__init__(config, dataset)
        d, n_heads = config["hidden_size"], config["n_heads"]
        self.graph_layers = nn.ModuleList(WGAT(d, n_heads) for _ in range(config["graph_layers"]))
        self.readout = GRUSet2Set(d, config["readout_steps"])
        self.out = nn.Linear(2 * d, d, bias=False)
        self.init_weights()

    def encode(self, batch: SequenceBatch) -> Tensor:
        """Return the states s = W_out q* that predict the next item of each session.

        A session is a graph. Its nodes are the distinct items; an edge goes from an item to one
        that follows it, and its weight counts how often. Layers of graph attention (``WGAT``)
        update the vectors of nodes, and a repeated attention (Set2Set, ``readout``) summarises
        those of a session as q* [b, 2d] (FGNN, Qiu et al., CIKM 2019).

        Args:
            batch: b sessions, with k nodes in all and at most n each.

        Returns:
            [b, d].
        """
        # ``prepare`` computes the graphs as ``extras``, if the batch comes without. Anchors are
        # items that have an edge to all others of the session; None if the model has none.
        graph, anchors = self.prepare(batch).extras
        x = self.embed(graph.nodes)  # [k, d]

        # The weights with which node i (row) receives from node j (column), [b, n, n] both: from
        # nodes before it, and from nodes after it, which are not read in FGNN.
        weights, _ = weigh_neighbours(graph, graph.transitions, anchors).unbind(1)

        # An edge from a node to itself counts how often the item follows itself. If it never does,
        # the edge gets the weight 1. So do rows of padding, of sessions with fewer than n nodes:
        # every row must have an edge, or its attention would be NaN.
        is_own_edge = torch.eye(weights.size(1), dtype=torch.bool, device=weights.device)
        weights = weights.masked_fill(is_own_edge & (weights == 0), 1).to(x)

        for number, layer in enumerate(self.graph_layers):
            # ReLU between layers, not before the first
            x = layer(x.relu() if number else x, weights, graph.nodes)
        return self.out(self.readout(x, graph.nodes))


# --- RecBole's models with encodings or anchors ---


class _Trimmed(SequentialRecommender):
    """Mixin for models of RecBole's whose states do not depend on the width: it trims padding."""

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        """Return the states [B, d] after histories [B, L]."""
        if item_seq.device.type == "cpu":  # a GPU would wait for the number in every step
            item_seq = item_seq[:, : int(item_seq_len.max())]
        return super().forward(item_seq, item_seq_len)


class EncodedEmbedding(nn.Embedding):
    """Item vectors x of items [n], and x + P of sessions [B, L] that are padded on the right.

    The weights are shared with the model's own embedding, ``plain``, but zero for padding.
    """

    def __init__(self, plain: nn.Embedding, schemes: nn.ModuleList) -> None:
        """Take over the weights of a model's embedding, and set the vector of padding to zero.

        Args:
            plain: the embedding; it has the same weights from now on.
            schemes: encodings of positions, which are added to the vectors.
        """
        super().__init__(plain.num_embeddings, plain.embedding_dim, 0, _weight=plain.weight.data)
        self.schemes = schemes
        with torch.no_grad():
            self.weight[0] = 0

    def forward(self, items: Tensor) -> Tensor:
        """Return the vectors of items, or those of sessions with the encodings of positions added.

        Args:
            items: [n] int64 items, whose vectors are returned as they are; or [B, L] sessions,
                padded with 0 on the right.

        Returns:
            [n, d], or [B, L, d] with zeros at padding.
        """
        x = super().forward(items)
        encodings: list[Any] = list(self.schemes)
        if items.dim() < 2 or not encodings:
            return x

        # how many interactions of the session are older, and how many newer than each one
        is_real = items > 0
        older = torch.arange(items.size(1), device=items.device).expand_as(items)
        newer = (is_real.sum(1, keepdim=True) - 1 - older).clamp(min=0)
        for scheme in encodings:
            x = x + scheme.rows(older, newer) * is_real[:, :, None]
        return x


class ZeroPositionEmbedding(nn.Module):
    """A position embedding that adds nothing, instead of the model's own."""

    def forward(self, positions: Tensor) -> float:
        """Return zero for all positions."""
        return 0.0


class _Encoded(_Trimmed):
    """Mixin that adds the encodings of the option ``position`` to the items of a session."""

    item_embedding: nn.Embedding

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build RecBole's model, then wrap its item vectors in a module that adds encodings.

        An encoding is a vector for the place of an interaction in its session.

        Args:
            config: options of the model; ``position`` names the encodings.
            dataset: training part of a dataset.
        """
        super().__init__(config, dataset)
        hidden_size = self.item_embedding.embedding_dim
        schemes = build_row_encodings(config, self.max_seq_length, hidden_size)
        self.item_embedding = EncodedEmbedding(self.item_embedding, schemes)


class EncodedSTAMP(_Encoded, STAMP):
    """RecBole's STAMP with encodings of positions added to the session's items (Qiu et al.,
    "Exploiting Positional Information for Session-based Recommendation", TOIS 2021, Table 3)."""


class EncodedSASRec(_Encoded, SASRec):
    """RecBole's SASRec with other encodings of positions than its own (Qiu et al.,
    "Exploiting Positional Information for Session-based Recommendation", TOIS 2021, Table 3)."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.position_embedding = ZeroPositionEmbedding()


class _Anchored(_Trimmed):
    """Mixin that makes the graphs of RecBole's graph models, in RecBole's form and with anchors."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.has_anchors = config["anchors"]

    def _get_slice(self, item_seq: Tensor) -> tuple[Tensor, ...]:
        """Build the graphs of sessions, in the form that RecBole's graph models read.

        The graph of a session has a node for each distinct item: the session 7, 4, 7 has the nodes
        4 and 7, which are its nodes 0 and 1.

        Args:
            item_seq: [B, L] items of the sessions, padded with 0 on the right.

        Returns:
            alias: [B, L] node of each interaction: 1, 0, 1 in the example; 0 at padding.
            weights: [B, n, 2n] with n the most nodes of a session, see ``_weigh_edges``.
            items: [B, n] item of each node: 4, 7 in the example; 0 at padding.
        """
        # the items of all sessions one after the other, m in all, without padding
        is_real = item_seq > 0
        items, lengths = item_seq[is_real], is_real.sum(1)
        graph = SessionGraph.build(SequenceBatch.from_lengths(items, lengths, self.max_seq_length))

        # ``graph`` numbers the nodes of all sessions from 0 to k - 1, and ``graph.alias`` [m] has
        # the number of each interaction's node. RecBole's numbers begin at 0 in each session.
        number_in_session = graph.nodes.index  # [k] of each node
        alias = torch.zeros_like(item_seq)
        alias[is_real] = number_in_session[graph.alias]
        # ``pad`` puts the items of the k nodes into a row for each session, with zeros behind them
        return alias, self._weigh_edges(graph), graph.nodes.pad(graph.nodes.items, "start")

    def _weigh_edges(self, graph: SessionGraph) -> Tensor:
        """Return the weights by which nodes receive the states of other nodes of their session.

        An item has an edge of weight 1 to each item that directly follows it. Anchors, such as the
        first item of a session, have edges to all other nodes, and their weight is the number of
        steps between the two items. A node i receives the states of other nodes j in two ways: by
        the edges from j to i, and by those from i to j. The weights of each way add up to 1.

        Args:
            graph: graphs of B sessions, the largest with n nodes.

        Returns:
            [B, n, 2n]. In row i, column j is for the edge from j to i, and column n + j for the
            edge from i to j; 0 if there is no such edge.
        """
        anchors = Anchors.build(graph) if self.has_anchors else None
        is_edge = graph.transitions.clamp(max=1)  # transitions count how often an item follows
        # [B, 2, n, n]: with a session b, [b, 0, i, j] is the weight of the edge from j to i, and
        # [b, 1, i, j] that of the edge from i to j
        weights = weigh_neighbours(graph, is_edge, anchors)

        total = weights.sum(-1, keepdim=True)  # 0 for a node without such edges
        weights = weights / total.clamp(min=torch.finfo().tiny)
        by_edges_to, by_edges_from = weights.to(self.item_embedding.weight).unbind(1)
        return torch.cat((by_edges_to, by_edges_from), 2)


class AnchoredSRGNN(_Anchored, SRGNN):
    """RecBole's SRGNN with anchors (Qiu et al., "Exploiting Positional Information for
    Session-based Recommendation", TOIS 2021, Figures 5 and 6)."""

    def _get_slice(self, item_seq: Tensor) -> tuple[Tensor, ...]:
        return *super()._get_slice(item_seq), item_seq > 0


class AnchoredGCSAN(_Anchored, GCSAN):
    """RecBole's GCSAN with anchors (Qiu et al., "Exploiting Positional Information for
    Session-based Recommendation", TOIS 2021, Figures 5 and 6)."""
