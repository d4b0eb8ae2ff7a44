"""Positions that are counted in context: CAPE, and no positions at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, Dimensions


class NoPosition(AttentionPosition):
    """No position: order comes from the causal mask only (Kazemnejad et al., NoPE, 2023)."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()


class ContextualPosition(AttentionPosition):
    """Contextual positions that count dissimilar events (Yuan et al., CAPE, 2025).

    With the gate g_ij = 1 - sigmoid(q_i . k_j), key j has the position p_ij = g_ij + ... + g_ii for
    query i, clamped to the table, and B_ij = q_i . e[p_ij], where e[p] is interpolated linearly
    between the two neighbouring rows. The table is shared by the heads of a layer and starts at
    zero. The gates make [b, h, t, t] tensors unavoidable.

    Args:
        cape_positions: rows of the table; MAX_ITEM_LIST_LENGTH when empty.
    """

    options = ("cape_positions",)

    def __init__(self, dimensions: Dimensions, *, cape_positions: int | None) -> None:
        super().__init__()
        rows = dimensions.max_length if cape_positions is None else cape_positions
        self.weight = nn.Parameter(torch.zeros(rows, dimensions.head_size))

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # a position needs all its digits
            dtype = self.weight.dtype
            return self._bias(q.to(dtype), k.to(dtype), ctx).to(q.dtype)

    def _bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor:
        """Return B of the class docstring, [b, h, t, t], in the type of the table."""
        gate = (
            (-(q @ k.transpose(-1, -2))).sigmoid().tril()
        )  # 1 - sigmoid(q . k); the future counts 0
        position = gate.flip(-1).cumsum(-1).flip(-1)
        # a sum of t gates below one stays below t, so rows beyond t are never read
        rows = min(len(self.weight), ctx.block_width("end") + 1)
        position = position.clamp(max=rows - 1)
        lower = position.detach().floor()
        fraction = position - lower
        lower = lower.long()
        upper = (lower + 1).clamp_(max=rows - 1)
        logits = q @ self.weight[:rows].t()  # q_i . e[p] at whole p, [b, h, t, rows]
        return (1 - fraction) * logits.gather(-1, lower) + fraction * logits.gather(-1, upper)
