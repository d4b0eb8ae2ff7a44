"""Item vectors: rows of a table, to which parts add what they compute of features and content.

Shapes: m items to look up, n items in all, padding included, d the size of vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.layers.row_gradients import RowLookup, takes_rows


class ItemPart(nn.Module):
    """Base of modules that add to item vectors."""

    def forward(self, vectors: Tensor, items: Tensor | None) -> Tensor:
        """Return the vectors [m, d] of items [m] with this part added.

        If ``items`` is None they are those of all items, in the order of their ids.
        """
        raise NotImplementedError

    def extend(self, vectors: np.ndarray) -> None:
        """Add as many items as there are content vectors [k, c], behind the others."""
        raise NotImplementedError


class ItemTable(nn.Embedding):
    """Item vectors, read at the input (``table(items)``) and by scores (``vectors``).

    Without parts it is torch's embedding, with a gradient by rows under ``kept_gradient``.

    Attributes:
        parts: modules that add to the rows, by name and in this order.
        has_ids: whether every id has a vector; else only parts make the vectors of items.
        start: ids [k] and the vectors [k, up to d] that their rows start with, or None.
    """

    def __init__(self, num_items: int, size: int) -> None:
        super().__init__(num_items, size, padding_idx=0)
        self.parts = nn.ModuleDict()
        self.has_ids = True
        self.start: tuple[Tensor, Tensor] | None = None
        self._shared: Tensor | None = None

    def drop_ids(self) -> None:
        """Remove the vectors of ids, so that only parts make the vectors of items."""
        self.has_ids = False
        self.weight = nn.Parameter(self.weight.new_empty(0, self.embedding_dim), False)

    @torch.no_grad()
    def write_start(self) -> None:
        """Write the vectors of ``start`` into the table, after its random initialisation."""
        if self.start is not None:
            rows, vectors = self.start
            self.weight[rows, : vectors.size(1)] = vectors

    def extend(self, vectors: np.ndarray) -> None:
        """Add an item for each of the content vectors [k, c]; the vectors of ids are zeros."""
        parts: Iterable[Any] = self.parts.values()
        for part in parts:
            part.extend(vectors)
        self.num_embeddings += len(vectors)
        if self.has_ids:
            rows = nn.functional.pad(self.weight.detach(), (0, 0, 0, len(vectors)))
            self.weight = nn.Parameter(rows, self.weight.requires_grad)

    def forward(self, items: Tensor) -> Tensor:
        """Return the vectors [..., d] of item ids [...]."""
        if self._shared is not None:
            return nn.functional.embedding(items, self._shared)
        if not self.has_ids:
            vectors = self.weight.new_zeros(*items.shape, self.embedding_dim)
        elif torch.compiler.is_compiling() or not takes_rows(self.weight):
            vectors = super().forward(items)
        else:
            vectors = RowLookup.apply(self.weight, items, self.padding_idx)
        for part in self.parts.values():
            vectors = part(vectors, items)
        return vectors

    def vectors(self) -> Tensor:
        """Return the vectors [n, d] of all items, in the order of their ids."""
        if self._shared is not None:
            return self._shared
        vectors: Tensor = self.weight
        if not self.has_ids:
            vectors = vectors.new_zeros(self.num_embeddings, self.embedding_dim)
        for part in self.parts.values():
            vectors = part(vectors, None)
        return vectors

    @contextmanager
    def shared(self) -> Iterator[Tensor]:
        """Compute :meth:`vectors` once, for all lookups and scores in a ``with`` block.

        Without parts nothing is computed, and lookups keep their gradient by rows.
        """
        if not self.parts:
            yield self.vectors()
            return
        outer = self._shared
        self._shared = self.vectors()
        try:
            yield self._shared
        finally:
            self._shared = outer
