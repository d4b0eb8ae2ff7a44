"""Attention with a learned bias that all sequences of a batch share, without [b, h, t, t].

Biases of distance alone (T5, KERPLE) are such. CAPE's gates need [b, h, t, t] by definition, and
HSTU's bias [b, t, t], since times differ between sequences; its buckets are computed once a batch
for all layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbole_pos.layers.chunks import chunk_elements


class _BiasedAttention(torch.autograd.Function):
    """Fused attention forward; backward in chunks of sequences, since fused kernels have no
    gradient to a bias and torch would keep the weights of the whole batch for it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        # detached: torch takes the fused kernel only for a mask that wants no gradient
        q, k, v, bias = (x.detach() for x in (q, k, v, bias))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        ctx.save_for_backward(q, k, v, bias, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, bias, out = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        grad_bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
        scale = q.size(-1) ** -0.5
        rows = max(1, chunk_elements(q.device) // bias.numel())
        for start in range(0, q.size(0), rows):
            part = slice(start, start + rows)
            query, dout = q[part] * scale, grad[part]
            weight = (query @ k[part].transpose(-1, -2)).add_(bias).softmax(-1)
            grads[2][part] = weight.transpose(-1, -2) @ dout
            dlogits = dout @ v[part].transpose(-1, -2)
            dlogits -= (dout * out[part]).sum(-1, keepdim=True)
            dlogits *= weight
            grads[0][part] = (dlogits @ k[part]) * scale
            grads[1][part] = dlogits.transpose(-1, -2) @ query
            grad_bias += dlogits.sum(0, keepdim=True)
        return *grads, grad_bias.to(bias.dtype)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(e) + bias) v.

    Args:
        q, k, v: [b, h, t, e].
        bias: [1, h, t, t], -inf where a query must not look; it gets a gradient.

    Returns:
        [b, h, t, e].
    """
    whole = torch.compiler.is_compiling()  # one graph for any number of sequences
    if whole or q.size(0) * bias.numel() <= chunk_elements(q.device):  # torch's own is faster
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    with torch.autocast(q.device.type, enabled=False):
        return _BiasedAttention.apply(*(x.to(v.dtype) for x in (q, k, v, bias)))
