"""PosRec: sessions as graphs, with anchors, read out by a transformer that knows both ends.

Reference:
    Ruihong Qiu, Zi Huang, Tong Chen, Hongzhi Yin. "Exploiting Positional Information for
    Session-based Recommendation." ACM Transactions on Information Systems 2021.

Where its equations are:

=============== ===================================================================
equation        code
=============== ===================================================================
5, 6            the schemes ``dpe`` and ``ldpe`` under ``position/``
section 4.3.1   ``SessionGraph`` in ``layers/graph.py``
7, weights w    ``weigh_neighbours`` in ``layers/graph.py``; anchors: ``Anchors``
7, 8            ``PGGNN`` in ``layers/graph.py``
9               ``PosRec.encode_nodes``; the transformer is that of ``layers/attention.py``
10              ``PosRec.states``
11              ``PosRecommender.full_sort_predict`` in ``model/base.py``
12              ``full_cross_entropy`` in ``layers/losses.py``
=============== ===================================================================

The model is not causal: a session's graph, and each node's distance to its end, change with every
interaction, so each prefix is an example (``train_windows: prefix``). The encodings of Figures 3
and 4 are ``position``, PosRec-ANC of Figures 5 and 6 is ``anchors: False``.

Shapes as in ``layers/graph.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, cast

from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.windows import SequenceBatch
from recbole_pos.layers.attention import BlockOptions, TransformerEncoder
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.graph import PGGNN, Anchors, SessionGraph, weigh_neighbours
from recbole_pos.layers.hooks import Dimensions
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.additive import PositionEncoding
from recbole_pos.position.build import build_row_encodings
from recbole_pos.position.compose import Compose
from recbole_pos.values import Options


class GraphRecommender(PosRecommender):
    """Base of PosRec and FGNN. A session's graph changes with every interaction, so none is causal.

    The number of nodes depends on the values of a session, so the host makes the graphs of a batch
    while the device trains on the batch before.
    """

    causal = False
    prepares = True
    refuses: ClassVar[Mapping[str, str]] = {
        "event_features": "a node of its graphs is an item, whatever interactions it stands for"
    }

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.anchors, self.overlap = config["anchors"], config["anchor_overlap"]

    def embed_nodes(self, graph: SessionGraph, ctx: SequenceContext) -> Tensor:
        """Return the vectors [k, d] of the nodes of a batch, with the features of their users."""
        return self.embed(graph.items, replace(graph.nodes, features=ctx.features))

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch on the host with its graphs ``prepared``."""
        ctx = SequenceContext.from_lengths(
            batch.lengths, self.max_seq_length, items=batch.items, width=batch.width
        )
        return replace(batch, prepared=self.build_graphs(batch.items, ctx))

    def build_graphs(
        self, items: Tensor, ctx: SequenceContext
    ) -> tuple[SessionGraph, Anchors | None]:
        """Return the graphs of packed item ids [m], and their anchors if the model has any.

        A prepared batch brings both in ``ctx.relations``.
        """
        if ctx.relations is not None:
            prepared: tuple[SessionGraph, Anchors | None] = ctx.relations
            return prepared
        graph = SessionGraph.build(items, ctx)
        return graph, Anchors.build(graph) if self.anchors else None


class PosRec(GraphRecommender):
    """Gated graph layers over a session's items, then a bidirectional transformer (Qiu et al.,
    "Exploiting Positional Information for Session-based Recommendation", TOIS 2021,
    section 4.3)."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the position encodings, the graph layers and the bidirectional transformer."""
        super().__init__(config, dataset)
        options = BlockOptions.from_config(config, bias=True, output=True, causal=False)
        d = options.hidden_size
        dimensions = Dimensions(
            max_length=self.max_seq_length,
            hidden_size=d,
            n_heads=options.n_heads,
            initializer_range=self.initializer_range,
            n_layers=config["n_layers"],
        )
        self.position_embedding = build_row_encodings(config["position"], dimensions, config)
        self.self_weight = float(config["anchor_self_weight"])
        self.averages_messages = config["messages"] == "mean"
        self.graph_layers = nn.ModuleList(PGGNN(d) for _ in range(config["graph_layers"]))
        self.trm_encoder = TransformerEncoder(options, config["n_layers"], lambda: Compose({}))
        self.dropout = Dropout(options.hidden_dropout)
        self.mixture = [config[f"lambda_{i}"] for i in range(3)]
        self.init_weights()

    def encode_nodes(
        self, items: Tensor, ctx: SequenceContext
    ) -> tuple[SessionGraph, Tensor, Tensor]:
        """Return the graphs of packed item ids [m], and the states of their nodes.

        The states are X' [k, d] after the graph layers (equations 7 and 8), and H [k, d] after the
        transformer (equation 9).
        """
        graph, anchors = self.build_graphs(items, ctx)
        x = self.embed_nodes(graph, ctx)
        weights = weigh_neighbours(
            graph, anchors, self.overlap, self.self_weight, mean=self.averages_messages
        ).to(x)
        for layer in self.graph_layers:
            x = layer(x, weights, graph.nodes)
        encoded = x
        length = ctx.lengths[graph.nodes.row]
        for scheme in cast("Iterable[PositionEncoding]", self.position_embedding):
            encoded = encoded + scheme.rows(graph.first, graph.age, length)
        return graph, x, self.trm_encoder(self.dropout(encoded), graph.nodes)

    def states(self, items: Tensor, ctx: SequenceContext, positions: Tensor | None) -> Tensor:
        """Return the states [b, d] that predict each session's next interaction (equation 10)."""
        graph, x, hidden = self.encode_nodes(items, ctx)
        readouts = (x[graph.last_node], hidden[graph.last_node], hidden[graph.first_node])
        return sum(weight * readout for weight, readout in zip(self.mixture, readouts, strict=True))
