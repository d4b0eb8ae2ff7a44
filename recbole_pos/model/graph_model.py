"""The base of models that learn from the graphs of sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.protocols import Dataset
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.graph import Anchors, SessionGraph
from recbole_pos.model.base import PosRecommender
from recbole_pos.values import Options


class GraphRecommender(PosRecommender):
    """Base of PosRec and FGNN. A session's graph changes with every event, so none is causal.

    The number of nodes depends on the values of a session, so on a device the graphs of a batch
    come with it: the host makes them while the device trains on the batch before.
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
        """Return a batch on the host with its graphs."""
        ctx = SequenceContext.from_lengths(
            batch.lengths, self.max_seq_length, items=batch.items, width=batch.width
        )
        return replace(batch, prepared=self.graphs(batch.items, ctx))

    def graphs(self, items: Tensor, ctx: SequenceContext) -> tuple[SessionGraph, Anchors | None]:
        """Return the graphs of packed item ids [m] and their anchors, None without.

        A prepared batch brings both in ``ctx.relations``.
        """
        if ctx.relations is not None:
            prepared: tuple[SessionGraph, Anchors | None] = ctx.relations
            return prepared
        graph = SessionGraph.build(items, ctx)
        return graph, Anchors.build(graph) if self.anchors else None
