"""Encodings that rotate query and key, so that their product depends on how far apart they are."""

from __future__ import annotations

import torch
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, Dimensions
from recbole_pos.position.frequencies import base_form


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_(i + e/2)) of vectors x [..., e] by angles [..., e / 2].

    RoFormer pairs neighbours (x_2i, x_(2i+1)) instead: the same up to a fixed order of the columns
    of the projections.
    """
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def count_planes(dimensions: Dimensions, scheme: str) -> int:
    """Return e / 2, the number of planes (pairs) of a head; raise UsageError if e is odd."""
    if dimensions.head_size % 2:
        raise UsageError(
            f"{scheme} rotates pairs and needs heads of even size; hidden_size "
            f"{dimensions.hidden_size} over {dimensions.n_heads} heads gives {dimensions.head_size}"
        )
    return dimensions.head_size // 2


class RotaryPosition(AttentionPosition):
    """Rotary positions, (R_i q_i) . (R_j k_j) (Su et al., RoFormer, 2021).

    The pair number l of a head turns by position * base^(-2l/e).

    Args:
        rope_base: the base.
    """

    options = ("rope_base",)
    cos: Tensor
    sin: Tensor

    def __init__(self, dimensions: Dimensions, *, rope_base: float) -> None:
        super().__init__()
        frequency = base_form(count_planes(dimensions, "rope"), rope_base, 1.0)
        angle = torch.arange(dimensions.max_length, dtype=torch.float64)[:, None] * frequency
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, table.to(torch.get_default_dtype()), persistent=False)

    def rotate(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[ctx.index, None], self.sin[ctx.index, None]
        return rotate_pairs(q, cos, sin).to(q.dtype), rotate_pairs(k, cos, sin).to(k.dtype)
