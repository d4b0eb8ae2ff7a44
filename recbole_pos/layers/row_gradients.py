"""Gradients of a large table that hold only the rows a step touches.

A dense gradient of a million items is 256 MB, allocated and zeroed by everything that reads the
table in a step. In a :func:`kept_gradient` block one such matrix stays, and a step writes only the
rows that it touches. Optimisers read it as usual, with the same results to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LARGE = 32 * 2**20  # bytes of a table: smaller blocks stay in the process when they are freed

_kept: list[KeptGradient] = []


class KeptGradient:
    """The dense ``grad`` of a table, kept from step to step and zero between them.

    Args:
        weight: [rows, d] the table.
        clears_all: whether to zero all rows, not only the touched ones. Gradient clipping needs it,
            which makes all rows NaN if one is.
    """

    def __init__(self, weight: nn.Parameter, clears_all: bool) -> None:
        self.weight, self.clears_all = weight, clears_all
        self.dense = torch.zeros_like(weight, requires_grad=False)
        self._touched: list[Tensor] = []
        self._has_dense = False  # whether some gradient since ``clear`` was dense

    def note(self, grad: Tensor) -> None:
        """Note the rows of a gradient before it is added; called by a hook of the table."""
        if grad.is_sparse:
            self._touched.append(grad._indices()[0])
        else:
            self._has_dense = True

    def clear(self) -> None:
        """Zero the gradient, as an optimiser's ``zero_grad`` does for other parameters."""
        if self.clears_all or self._has_dense:
            self.dense.zero_()
        else:
            for rows in self._touched:
                self.dense.index_fill_(0, rows, 0)
        self._touched, self._has_dense = [], False
        self.weight.grad = self.dense


@contextmanager
def kept_gradient(weight: nn.Parameter, clears_all: bool = False) -> Iterator[KeptGradient]:
    """Keep the dense gradient of a table in a ``with`` block, and yield it to clear between steps.

    In the block lookups give gradients by rows; afterwards the table has no gradient. For the
    arguments see :class:`KeptGradient`.
    """
    gradient = KeptGradient(weight, clears_all)
    hook = weight.register_hook(gradient.note)
    gradient.clear()
    _kept.append(gradient)
    try:
        yield gradient
    finally:
        _kept.remove(gradient)
        hook.remove()
        weight.grad = None


def takes_rows(weight: Tensor) -> bool:
    """Return whether the gradient of a table may be sparse, because a dense one is kept for it."""
    return any(x.weight is weight and weight.grad is x.dense for x in _kept)


def index_rows(weight: Tensor, *ids: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """Return the rows that the gradient of a table has, and the indices of ``ids`` among them.

    Args:
        weight: [rows, d] the table.
        ids: int64 rows that a step touches, tensors of any shape.

    Returns:
        The distinct rows in ascending order, and for each of ``ids`` a tensor of indices of the
        same shape. If the gradient must have all rows: None and ``ids``.
    """
    if not takes_rows(weight):
        return None, list(ids)
    rows, index = torch.cat([x.flatten() for x in ids]).unique(return_inverse=True)
    pieces = index.split([x.numel() for x in ids])
    return rows, [piece.view(x.shape) for piece, x in zip(pieces, ids, strict=True)]


def make_row_gradient(rows: Tensor, values: Tensor, size: torch.Size) -> Tensor:
    """Return the sparse gradient of a table of shape ``size``, [n, d] at ascending rows [n]."""
    return torch.sparse_coo_tensor(
        rows[None], values, size, is_coalesced=True, check_invariants=False
    )


class RowLookup(torch.autograd.Function):
    """Look up rows of a table, with a sparse gradient that is summed as torch's dense one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, items: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(items)
        ctx.size, ctx.padding = weight.shape, padding
        return nn.functional.embedding(items, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (items,) = ctx.saved_tensors
        rows, index = items.unique(return_inverse=True)
        values = torch.ops.aten.embedding_dense_backward(grad, index, len(rows), -1, False)
        if ctx.padding is not None:
            values[rows == ctx.padding] = 0
        return make_row_gradient(rows, values, ctx.size), None, None
