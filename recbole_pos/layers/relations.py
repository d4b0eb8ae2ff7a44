"""Relation-augmented heads, and position-to-position aggregation (AttrFormer, 3.1.2 and 3.1.3).

Shapes as in ``context.py``; M relations of items and behaviour, M' relation heads of size e'.

Equation 6 normalises the relation of each attribute, equation 7 reads as if it were their mixture.
Here it is each attribute's, or one of many large relations would leave little of the others. W^R is
linear, so the mixture need not be formed: with V_j the value of head j,

    ( sum_i W_ij Norm(R_i) ) V_j  =  sum_i W_ij (Norm(R_i) V_j)              equations 6 to 8

one sparse product for all heads, E M' e' multiplications, and a small dense one. The relations have
no gradient; W^R gets its own from the dense part. Heads have values V_j of their own, as "relation
dimension" (B.3) suggests.

Relations of heads leave out the interaction itself, whose value the residual and self-attention
carry; for users it is kept. Section 3.1.3 prints H' = Norm(R^U) H, which keeps little of the own
state: ``user_update: replace``. Added at weight 1 instead, the items of ten other users would stay
in every state; so the weight of the aggregate is learned, from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recbole_pos.layers.attention import BlockOptions, MultiHeadAttention, TransformerLayer
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition


@dataclass(frozen=True)
class SparseProduct:
    """A constant sparse matrix [rows, cols] that multiplies dense ones, [cols, d] to [rows, d].

    Entries are kept by rows and, for the gradient, by columns: those of row r begin at offset[r],
    each with its column in ``index`` and its value in ``weight``. ``embedding_bag`` sums the rows
    in a twentieth of the time of torch's own sparse product on a CPU.
    """

    index: Tensor
    offset: Tensor
    weight: Tensor
    back_index: Tensor
    back_offset: Tensor
    back_weight: Tensor

    @classmethod
    def build(
        cls,
        row: np.ndarray,
        col: np.ndarray,
        weight: np.ndarray,
        num_rows: int,
        num_cols: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> SparseProduct:
        """Build the matrix [num_rows, num_cols] from its entries [E], sorted by row."""

        def compute_offsets(index: np.ndarray, size: int) -> Tensor:
            """Return [size] the index of the first entry of each row (or column)."""
            counts = np.bincount(index, minlength=size)
            return torch.from_numpy(np.cumsum(counts) - counts).to(device)

        by_col = np.argsort(col, kind="stable")
        return cls(
            torch.from_numpy(col).to(device),
            compute_offsets(row, num_rows),
            torch.from_numpy(weight).to(device, dtype),
            torch.from_numpy(row[by_col]).to(device),
            compute_offsets(col, num_cols),
            torch.from_numpy(weight[by_col]).to(device, dtype),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [rows, d] with x [cols, d]."""
        return _Product.apply(x, self)


class _Product(torch.autograd.Function):
    """The product with a :class:`SparseProduct`, with a gradient to the dense factor only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: SparseProduct) -> Tensor:
        ctx.matrix = matrix
        return _sum_rows(matrix.index, matrix.offset, matrix.weight, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        matrix = ctx.matrix
        return _sum_rows(matrix.back_index, matrix.back_offset, matrix.back_weight, grad), None


def _sum_rows(index: Tensor, offset: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return the sums of weighted rows of x for entries as in :class:`SparseProduct`."""
    weight = weight.to(x.dtype)
    return F.embedding_bag(index, x.contiguous(), offset, mode="sum", per_sample_weights=weight)


@dataclass(frozen=True)
class BatchRelations:
    """The relations of one batch, in ``SequenceContext.relations``.

    Attributes:
        heads: multiplies [m, d] by [M m, m], the stacked normalised relations of items and
            behaviour; None without such relations.
        users: multiplies [m, d] by Norm(R^U) [m, m] from position to position, which relates
            interactions of one column of the block; None without the relation.
        edges: E, the number of entries in ``heads``.
    """

    heads: Callable[[Tensor], Tensor] | None
    users: Callable[[Tensor], Tensor] | None
    edges: int = 0


class RelationAttention(MultiHeadAttention):
    """Self-attention with relation-augmented heads beside its own.

    W^O of equation 9 is in two parts, ``dense`` for the self-attention heads and ``relation_dense``
    for the others: Concat(H^MSA, H^RAH) W^O = H^MSA W_1 + H^RAH W_2. Without relations this is the
    backbone's attention, weights and all.
    """

    def __init__(
        self,
        options: BlockOptions,
        position: AttentionPosition,
        num_relations: int,
        num_heads: int,
        head_size: int,
    ) -> None:
        """Create the self-attention, and value, mixture and output of the heads of relations."""
        super().__init__(options, position)
        self.num_relations, self.num_relation_heads = num_relations, num_heads
        if num_relations:
            d, size = options.hidden_size, num_heads * head_size
            self.relation_value = nn.Linear(d, size, bias=options.bias)
            # heads start as the mean of all relations
            fresh_mix = torch.full((num_relations, num_heads), 1 / num_relations)
            self.relation_mix = nn.Parameter(fresh_mix)
            self.relation_dense = nn.Linear(size, d, bias=False)

    def attention(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Return Concat(H^MSA, H^RAH) W^O [m, d] of inputs [m, d] (equation 9)."""
        out = super().attention(x, ctx)
        relations = ctx.relations
        if not self.num_relations or relations is None or relations.heads is None:
            return out
        return out + self.relation_dense(self.compute_heads(x, relations))

    def compute_heads(self, x: Tensor, relations: BatchRelations) -> Tensor:
        """Return H^RAH, [m, M' e'], of inputs [m, d] (equations 6 to 8)."""
        assert relations.heads is not None  # callers check it
        value = self.relation_value(x)  # [m, M' e']
        related = relations.heads(value)  # [M m, M' e'], Norm(R_i) V_j for each relation i, head j
        related = related.view(self.num_relations, x.size(0), self.num_relation_heads, -1)
        return torch.einsum("rmhe,rh->mhe", related, self.relation_mix).reshape(x.size(0), -1)


class RelationLayer(TransformerLayer):
    """One block of AttrFormer: relation-augmented attention, feed-forward, aggregation by users.

    Args:
        options, position: see :class:`TransformerLayer`.
        relations, heads, head_size: M, M' and e', the paper's relation dimension.
        aggregates: whether the layer aggregates from position to position.
        gated: whether the aggregate is added to the state with a learned weight; else it replaces
            the state, as in section 3.1.3.
    """

    multi_head_attention: RelationAttention
    user_gate: nn.Parameter | None

    def __init__(
        self,
        options: BlockOptions,
        position: AttentionPosition,
        *,
        relations: int,
        heads: int,
        head_size: int,
        aggregates: bool,
        gated: bool,
    ) -> None:
        """Build the block and, if the aggregate is gated, a scalar gate that is 0 when fresh."""
        super().__init__(options, position)
        self.multi_head_attention = RelationAttention(
            options, position, relations, heads, head_size
        )
        self.aggregates = aggregates
        # the gate is 0 when fresh, so that training starts at the backbone's states
        gate = nn.Parameter(torch.zeros(())) if aggregates and gated else None
        self.register_parameter("user_gate", gate)

    def forward(self, x: Tensor, ctx: SequenceContext, positions: Tensor | None = None) -> Tensor:
        """Apply the block to x [m, d]; return all states, or those at packed ``positions`` [k]."""
        if not self.aggregates or ctx.relations is None or ctx.relations.users is None:
            return super().forward(x, ctx, positions)
        x = super().forward(x, ctx)
        aggregate = ctx.relations.users(x)
        x = aggregate if self.user_gate is None else x + self.user_gate * aggregate
        return x if positions is None else x[positions]
