"""Item vectors: a table, parts that add features and content, and gradients of touched rows only.

A dense gradient of a million items is 256 MB, allocated and zeroed by everything that reads the
table in a step. In a :func:`kept_gradient` block one such matrix stays, and a step writes only the
rows that it touches. Optimisers read it as usual, with the same results to the bit.

Shapes: m items to look up, n items in all, padding included, d the size of vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LARGE = 32 * 2**20  # bytes of a table: smaller blocks stay in the process when they are freed

_kept: list[KeptGradient] = []  # those of all ``kept_gradient`` blocks that are open


class ItemTable(nn.Embedding):
    """Item vectors, read at the input (``table(items)``) and by scores (``vectors``).

    Without parts it is torch's embedding, with a gradient by rows under ``kept_gradient``.

    Attributes:
        parts: modules that add to the rows, by name and in this order. ``part(vectors, items)``
            returns the vectors of some items, or of all if ``items`` is None, with something added;
            ``part.extend(vectors)`` adds as many items as there are content vectors [k, c].
        start: ids [k] and the vectors [k, up to d] that their rows start with, or None.
    """

    def __init__(self, num_items: int, size: int) -> None:
        """Create the table, with a row for each item; item 0 is padding.

        The model may fill in ``parts`` and ``start`` afterwards.

        Args:
            num_items: number of items, padding included.
            size: d, size of an item vector.
        """
        super().__init__(num_items, size, padding_idx=0)
        # modules that add something to the rows, such as a layer that embeds the item's category
        self.parts = nn.ModuleDict()
        # vectors to begin with, such as trained ones: the numbers of some rows, and their values
        self.start: tuple[Tensor, Tensor] | None = None
        # [num_items, size] rows and parts added up, while a ``shared`` block is open, else None
        self._shared: Tensor | None = None

    @property
    def has_ids(self) -> bool:
        """Whether rows have numbers; in a table [n, 0] only ``parts`` make the vectors of items."""
        return self.weight.size(1) > 0

    @torch.no_grad()
    def write_start(self) -> None:
        """Write given vectors, ``start``, into the table, after its random initialisation.

        ``start`` are the numbers of some rows, and a vector for each, which may be shorter than a
        row: then the rest of the row stays random. It is None if nothing is given.
        """
        if self.start is not None:
            rows, vectors = self.start
            self.weight[rows, : vectors.size(1)] = vectors

    def extend(self, vectors: np.ndarray) -> None:
        """Add k new items after the last one of the table.

        The vector of an item is its row of the table, ``weight`` [n, d], plus what the modules in
        ``parts`` add, such as a layer that reads the item's content. New items get rows of zeros,
        as they are not trained, so that only the parts make their vectors.

        Args:
            vectors: [k, c] a content vector for each new item, such as the embedding of its text.
        """
        # The last part reads the content. It refuses vectors of another size, so it comes first,
        # before anything has changed.
        parts: list[Any] = list(self.parts.values())
        for part in reversed(parts):
            part.extend(vectors)
        self.num_embeddings += len(vectors)
        # a parameter cannot grow, so a longer one takes its place
        rows = nn.functional.pad(self.weight.detach(), (0, 0, 0, len(vectors)))
        self.weight = nn.Parameter(rows, self.weight.requires_grad)

    def forward(self, items: Tensor) -> Tensor:
        """Look up the vectors [..., d] of item ids [...].

        A vector is the item's row of the table, to which each module in ``parts`` adds something,
        such as embedded fields or content. In a :meth:`shared` block all this is computed already
        and only looked up.

        Args:
            items: [...] int64 ids.

        Returns:
            [..., d].
        """
        if self._shared is not None:
            return nn.functional.embedding(items, self._shared)
        if torch.compiler.is_compiling() or not takes_rows(self.weight):
            vectors = super().forward(items)
        else:  # in a ``kept_gradient`` block: with a gradient of the rows that are looked up only
            vectors = RowLookup.apply(self.weight, items, self.padding_idx)
        for part in self.parts.values():
            vectors = part(vectors, items)
        return vectors

    def vectors(self) -> Tensor:
        """Return the vectors [n, d] of all items, in the order of their ids.

        A vector is the item's row of the table, to which each module in ``parts`` adds something,
        such as embedded fields or content. In a :meth:`shared` block the vectors are computed
        already.

        Returns:
            [n, d], padding included.
        """
        if self._shared is not None:
            return self._shared
        vectors: Tensor = self.weight
        for part in self.parts.values():
            # None stands for all items
            vectors = part(vectors, None)
        return vectors

    @contextmanager
    def shared(self) -> Iterator[Tensor]:
        """Compute :meth:`vectors` once, for all lookups and scores in a ``with`` block.

        A vector is the item's row of the table, to which the modules in ``parts`` add features or
        content. In the block ``_shared`` has the vectors, and lookups read them there. Blocks may
        be nested: the end of an inner one brings back the vectors of the outer one.

        Yields:
            [n, d] vectors of all items.
        """
        # Without parts the vectors are the table itself, and there is nothing to compute. Lookups
        # read the table then, where their gradient may have only the rows that they touch.
        if not self.parts:
            yield self.vectors()
            return
        outer = self._shared
        self._shared = self.vectors()
        try:
            yield self._shared
        finally:
            self._shared = outer


# --- gradients that hold only the rows a step touches ---


class KeptGradient:
    """A gradient of a table that is allocated once and written again in every step.

    Torch adds the gradients of a step to ``weight.grad``, which is ``dense``. Between steps all of
    ``dense`` is zero. To make it so only the rows that a step has touched are written.

    Attributes:
        weight: [rows, d] the table.
        dense: [rows, d] the gradient.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        """Allocate the gradient of a table ``weight`` [rows, d], kept from step to step."""
        self.weight = weight
        self.dense = torch.zeros_like(weight, requires_grad=False)
        self._touched: list[Tensor] = []  # rows of the sparse gradients since ``clear``
        self._has_dense = False  # whether some gradient since ``clear`` was not sparse

    def note(self, grad: Tensor) -> None:
        """Note which rows a gradient has, so that ``clear`` can zero them.

        Torch calls it, as a hook of the table, with each gradient before it is added.
        """
        if grad.is_sparse:
            self._touched.append(grad._indices()[0])  # the numbers of its rows
        else:
            self._has_dense = True

    def clear(self) -> None:
        """Zero the kept gradient of the table ``weight`` before a step of training.

        ``dense`` [rows, d] is the gradient, allocated once. It is handed to torch as
        ``weight.grad``, to which torch adds the gradients of a step. Zeroing only the rows that
        these gradients have is faster than zeroing all. All rows are zeroed if one of the gradients
        was dense.
        """
        if self._has_dense:
            self.dense.zero_()
        else:
            # the rows of each sparse gradient since the last call, which ``note`` has collected
            for rows in self._touched:
                self.dense.index_fill_(0, rows, 0)
        self._touched, self._has_dense = [], False
        # an optimiser's ``zero_grad`` has set it to None
        self.weight.grad = self.dense


@contextmanager
def kept_gradient(weight: nn.Parameter) -> Iterator[KeptGradient]:
    """Keep one dense gradient of a large table in a ``with`` block, instead of a new one each step.

    A step of training touches few rows of a large table, but a new gradient of all rows takes long
    to allocate and zero. In the block ``weight.grad`` is one dense matrix that stays. Lookups ask
    :func:`takes_rows`, and then have sparse gradients of the rows that they touch. Torch adds these
    to the matrix, and the hook ``note`` collects their rows, so that ``clear`` zeroes just these.

    After the block the table has no gradient.

    Args:
        weight: [rows, d] the table.

    Yields:
        The gradient; the training loop calls its ``clear`` before each step.
    """
    gradient = KeptGradient(weight)
    gradient.clear()  # sets ``weight.grad``
    hook = weight.register_hook(gradient.note)  # torch calls it with each gradient of the table
    _kept.append(gradient)  # ``takes_rows`` finds it there
    try:
        yield gradient
    finally:
        _kept.remove(gradient)
        hook.remove()
        weight.grad = None


def takes_rows(weight: Tensor) -> bool:
    """Return whether the gradient of a table may be sparse, because a dense one is kept for it.

    Torch adds a sparse gradient to the dense one, in ``weight.grad``. The list ``_kept`` has all
    dense gradients that are kept at present (:func:`kept_gradient`), each for one table.
    """
    return any(x.weight is weight and weight.grad is x.dense for x in _kept)


def index_rows(weight: Tensor, *ids: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """Return the distinct rows of a table among ``ids``, and the index of each id among them.

    A loss reads some rows of the table, and has a gradient to these only. Where the gradient may
    be sparse (``takes_rows``) the loss computes just these rows, and the indices say where the
    gradient of each id belongs. Where it must be dense a row has its own number as its index.

    Args:
        weight: [rows, d] the table.
        ids: int64 numbers of rows that a loss reads, tensors of any shape.

    Returns:
        The distinct rows in ascending order, and for each of ``ids`` a tensor of indices of the
        same shape. If the gradient must be dense: None for all rows, and ``ids`` themselves.
    """
    if not takes_rows(weight):
        return None, list(ids)
    # the ids [7, 2] and [2, 9] give the rows 2, 7, 9 and the indices [1, 0] and [0, 2]
    rows, index = torch.cat([x.flatten() for x in ids]).unique(return_inverse=True)
    pieces = index.split([x.numel() for x in ids])
    return rows, [piece.view(x.shape) for piece, x in zip(pieces, ids, strict=True)]


def make_row_gradient(rows: Tensor, values: Tensor, size: torch.Size) -> Tensor:
    """Return the gradient of a table that is 0 but for some rows, as a sparse tensor.

    Args:
        rows: [n] int64 numbers of these rows, ascending.
        values: [n, d] gradient of each.
        size: shape of the table.
    """
    return torch.sparse_coo_tensor(
        rows[None], values, size, is_coalesced=True, check_invariants=False
    )


class RowLookup(torch.autograd.Function):
    """Look up rows of a table, with a sparse gradient that is summed as torch's dense one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, items: Tensor, padding: int | None) -> Tensor:
        """Return rows [..., d] of the table ``weight`` [n, d]; row ``padding`` has no gradient."""
        ctx.save_for_backward(items)
        ctx.size, ctx.padding = weight.shape, padding
        return nn.functional.embedding(items, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients of the looked-up rows by item, into a sparse gradient of the table.

        Args:
            ctx: torch's context with the items that ``forward`` has looked up.
            grad: [..., d] gradient to the rows.

        Returns:
            [n, d] sparse, and None for each of the two other arguments of ``forward``.
        """
        (items,) = ctx.saved_tensors
        rows, index = items.unique(return_inverse=True)
        # -1, False: no row is padding here, and frequent items are not scaled down
        values = torch.ops.aten.embedding_dense_backward(grad, index, len(rows), -1, False)
        if ctx.padding is not None:
            values[rows == ctx.padding] = 0
        return make_row_gradient(rows, values, ctx.size), None, None
