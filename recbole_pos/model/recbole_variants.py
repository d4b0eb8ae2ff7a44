"""RecBole's STAMP, SASRec, SRGNN and GCSAN with encodings of ``position`` or with PosRec's anchors.

Reference:
    Ruihong Qiu, Zi Huang, Tong Chen, Hongzhi Yin. "Exploiting Positional Information for
    Session-based Recommendation." ACM Transactions on Information Systems 2021, Table 3 (encodings)
    and Figures 5 and 6 (anchors).

All are RecBole's classes. EncodedSTAMP and EncodedSASRec have another embedding at the input, which
adds P to the items of a session and to nothing else: with ``position: [nope]`` STAMP is RecBole's,
with ``[lpe]`` SASRec is. RecBole's STAMP starts with a small random vector for padding, which it
never trains and adds up; here it is zero, or scores would depend on the width of a batch.

AnchoredSRGNN and AnchoredGCSAN take the graphs of a batch, which RecBole makes in a loop
(``_get_slice``), from ``layers/graph.py``. Anchors join the edges with their distances as weights,
before both are divided by their sum as SR-GNN divides. With ``anchors: False`` the scores are
RecBole's, faster.
"""

from __future__ import annotations

from typing import Any

import torch
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.model.sequential_recommender.gcsan import GCSAN
from recbole.model.sequential_recommender.sasrec import SASRec
from recbole.model.sequential_recommender.srgnn import SRGNN
from recbole.model.sequential_recommender.stamp import STAMP
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.layers.graph import Anchors, SessionGraph, weigh_neighbours
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.build import build_row_encodings
from recbole_pos.values import Options


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

        # ``graph.nodes`` are the nodes of all sessions, k in all. ``graph.alias`` [m] says which of
        # them each interaction has, and ``nodes.index`` [k] numbers them within their session.
        alias = torch.zeros_like(item_seq)
        alias[is_real] = graph.nodes.index[graph.alias]
        # ``pad`` puts the nodes into a row for each session, with zeros after the last one
        return alias, self._weigh_edges(graph), graph.nodes.pad(graph.nodes.items, "start")

    def _weigh_edges(self, graph: SessionGraph) -> Tensor:
        """Return the weights by which nodes receive the states of other nodes of their session.

        An item has an edge of weight 1 to each item that directly follows it. Anchors, such as the
        first item of a session, have edges to all other nodes, and their weight is the number of
        steps between the two items.

        Returns:
            [B, n, 2n]. Row i has the weights by which node i receives from each of the n nodes by
            edges to i, which add up to 1, then those by edges that come from i, which do too. All
            are 0 without such edges.
        """
        anchors = Anchors.build(graph) if self.has_anchors else None
        is_edge = graph.transitions.clamp(max=1)  # transitions count how often an item follows
        weights = weigh_neighbours(graph, is_edge, anchors)  # [B, 2, n, n]
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
