"""AnchoredSRGNN and AnchoredGCSAN: RecBole's SRGNN and GCSAN with PosRec's anchors.

Reference:
    Ruihong Qiu, Zi Huang, Tong Chen, Hongzhi Yin. "Exploiting Positional Information for
    Session-based Recommendation." ACM Transactions on Information Systems 2021, Figures 5 and 6.

Both are RecBole's classes; only where RecBole makes the graphs of a batch in a loop
(``_get_slice``), they come from ``layers/graph.py``. Anchors join the edges with their distances as
weights, before both are divided by their sum as SR-GNN divides. With ``anchors: False`` the scores
are RecBole's, faster.
"""

from __future__ import annotations

import torch
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.model.sequential_recommender.gcsan import GCSAN
from recbole.model.sequential_recommender.srgnn import SRGNN
from torch import Tensor, nn

from recbole_pos.data.protocols import Dataset
from recbole_pos.layers.context import SequenceContext, trimmed
from recbole_pos.layers.graph import Anchors, SessionGraph, neighbourhoods
from recbole_pos.layers.padded import PaddedContext
from recbole_pos.model.encoded import trim_rows
from recbole_pos.values import Options


class _Anchored(SequentialRecommender):
    """Before a model of RecBole: graphs of its rows, in the form it takes them."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.anchors, self.overlap = config["anchors"], config["anchor_overlap"]
        self.self_weight = float(config["anchor_self_weight"])

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        """[B, L] histories to [B, d]."""
        return super().forward(trimmed(item_seq, item_seq_len, self.training), item_seq_len)

    pack_rows = trim_rows

    def _far(self, item_seq: Tensor) -> bool:
        """Whether a step would wait for sizes: graphs then have as many nodes as places."""
        return self.training and item_seq.device.type != "cpu"

    def _get_slice(self, item_seq: Tensor) -> tuple[Tensor, ...]:
        """[B, L] items to the node of each ([B, L]), [B, n, 2n] weights and [B, n] nodes.

        Nodes are those of sessions alone: RecBole has one more for padding, without an edge.
        """
        real = item_seq > 0
        events: SequenceContext
        if self._far(item_seq):
            events = PaddedContext.from_rows(item_seq, real.sum(1), self.max_seq_length)
            graph = SessionGraph.build(item_seq.reshape(-1), events)
        else:
            events = SequenceContext.from_lengths(real.sum(1), self.max_seq_length)
            graph = SessionGraph.build(item_seq[real], events)
        anchors = Anchors.build(graph) if self.anchors else None
        weights = neighbourhoods(
            graph, anchors, self.overlap, self.self_weight, mean=True, counted=False
        )
        into, out = weights.to(self.item_embedding.weight).unbind(1)
        alias = torch.zeros_like(item_seq)
        alias[events.row, events.index] = graph.nodes.index[graph.alias]
        return alias, torch.cat((into, out), 2), graph.nodes.pad(graph.items, "start")


class AnchoredSRGNN(_Anchored, SRGNN):
    """RecBole's SRGNN with anchors (Qiu et al., "Exploiting Positional Information for
    Session-based Recommendation", TOIS 2021, Figures 5 and 6)."""

    def _get_slice(self, item_seq: Tensor) -> tuple[Tensor, ...]:
        return *super()._get_slice(item_seq), item_seq > 0


class AnchoredGCSAN(_Anchored, GCSAN):
    """RecBole's GCSAN with anchors (Qiu et al., "Exploiting Positional Information for
    Session-based Recommendation", TOIS 2021, Figures 5 and 6)."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.reg_loss = _Norm()


class _Norm(nn.Module):
    """RecBole's ``EmbLoss`` of one table, which copies its zero to the device in every step."""

    def forward(self, table: Tensor) -> Tensor:
        """[1] norm of all vectors together, over their number."""
        return (torch.norm(table) / len(table)).view(1)
