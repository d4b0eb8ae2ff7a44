"""Gated residual blocks: a gate on the input decides how much of a sub-layer's output is added.

Shapes as in ``context.py``.

References:
    Fedor Borisyuk et al. "From Features to Transformers: Redefining Ranking for Scalable Impact."
    2025 (LiGR).
    Daria Tikhonovich et al. "eSASRec: Enhancing Transformer-based Recommendations in a Modular
    Fashion." RecSys 2025, which puts these blocks into SASRec.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import BlockOptions, MultiHeadAttention, TransformerLayer
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.hooks import AttentionPosition


class GatedAttention(MultiHeadAttention):
    """x + sigmoid(W x) * Attention(Norm(x)), with the hooks of ``hooks.py`` (LiGR)."""

    def __init__(self, options: BlockOptions, position: AttentionPosition) -> None:
        if options.norm != "pre":
            raise UsageError(f"norm: {options.norm} does not go with block: ligr; use norm: pre")
        super().__init__(options, position)
        self.gate = nn.Linear(options.hidden_size, options.hidden_size)

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Apply the gated sub-layer, [m, d] to [m, d]."""
        out = self.out_dropout(self.attention(self.LayerNorm(x), ctx))
        return x + self.gate(x).sigmoid() * out


class GatedFeedForward(nn.Module):
    """x + sigmoid(W x) * W3 (SiLU(W1 n) * W2 n) with n = Norm(x); SwiGLU (Shazeer 2020)."""

    def __init__(self, options: BlockOptions) -> None:
        """Create W1 and W2 as one layer [2 inner, d], W3 [d, inner] and the gate's W [d, d]."""
        super().__init__()
        d, inner = options.hidden_size, options.inner_size
        self.dense_1 = nn.Linear(d, 2 * inner, bias=False)  # W1 and W2
        self.dense_2 = nn.Linear(inner, d, bias=False)
        self.gate = nn.Linear(d, d)
        self.LayerNorm = nn.LayerNorm(d, eps=options.layer_norm_eps)
        self.dropout = Dropout(options.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated sub-layer, [m, d] to [m, d]."""
        active, linear = self.dense_1(self.LayerNorm(x)).chunk(2, -1)
        out = self.dropout(self.dense_2(F.silu(active) * linear))
        return x + self.gate(x).sigmoid() * out


class LiGRLayer(TransformerLayer):
    """One block: gated attention, then a gated feed-forward layer; ``activation`` is not used."""

    attention_class = GatedAttention
    feed_forward_class = GatedFeedForward
