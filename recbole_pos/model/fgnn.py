"""FGNN: sessions as graphs, weighted attention over their edges, read out in a learned order.

Reference:
    Ruihong Qiu, Jingjing Li, Zi Huang, Hongzhi Yin. "Rethinking the Item Order in Session-based
    Recommendation with Graph Neural Networks." CIKM 2019.

With w_ij the number of transitions from item j to item i, and 1 from an item to itself if it never
follows itself:

    e_ij = LeakyReLU(a^T [W x_i || W x_j || w_ij])                 j with an edge to i
    x'_i = 1/h sum over heads of  sum_j softmax_j(e_ij) W x_j      ReLU between layers
    q*   = GRU-Set2Set(x')                                         order of the items, learned
    z    = W_out q*,    y = softmax(z . x_v)                       x_v the initial item vectors

Graphs are those of ``layers/graph.py``; in ``layers/graph.py`` ``WGAT`` is the first two
lines and ``GRUSet2Set`` the third. With ``anchors: True`` the anchors of PosRec that send, the
first and repeated items, have edges to all nodes, their distances the weights (Figures 5 and 6 of
the PosRec paper). Nodes attend to N_in only, so the last item is no anchor here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.graph import WGAT, Anchors, GRUSet2Set, SessionGraph, weigh_neighbours
from recbole_pos.model.posrec import GraphRecommender
from recbole_pos.values import Options


class FGNN(GraphRecommender):
    """Weighted graph attention with self-loops over a session's items, GRU-Set2Set readout
    (Qiu et al., "Rethinking the Item Order in Session-based Recommendation with Graph Neural
    Networks", CIKM 2019)."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        d, n_heads = config["hidden_size"], config["n_heads"]
        self.graph_layers = nn.ModuleList(WGAT(d, n_heads) for _ in range(config["graph_layers"]))
        self.readout = GRUSet2Set(d, config["readout_steps"])
        self.out = nn.Linear(2 * d, d, bias=False)
        self.init_weights()

    def states(self, items: Tensor, ctx: SequenceContext, positions: Tensor | None) -> Tensor:
        """Return the states z [b, d] that predict the next interaction of each session."""
        graph, anchors = self.build_graphs(items, ctx)
        weights = self.compute_weights(graph, anchors)
        x = self.embed_nodes(graph, ctx)
        for layer_index, layer in enumerate(self.graph_layers):
            x = layer(x.relu() if layer_index else x, weights, graph.nodes)
        return self.out(self.readout(x, graph.nodes))

    def compute_weights(self, graph: SessionGraph, anchors: Anchors | None) -> Tensor:
        """Return [b, n, n] weights w_ij of the edge to node i (row) from node j, 0 for no edge."""
        incoming = weigh_neighbours(graph, anchors, self.overlap, 0.0, mean=False)[:, 0]
        is_itself = torch.eye(incoming.size(1), dtype=torch.bool, device=incoming.device)
        weights = torch.where(is_itself & (incoming == 0), 1.0, incoming)
        return weights.to(self.item_embedding.weight)
