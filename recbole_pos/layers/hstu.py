"""HSTU's block: attention without a softmax, gated, and no feed-forward network.

Shapes as in ``context.py``.

Reference:
    Jiaqi Zhai et al. "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers
    for Generative Recommendations." ICML 2024, equations 1 to 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import (
    BlockOptions,
    MultiHeadAttention,
    TransformerLayer,
    select_rows,
)
from recbole_pos.layers.chunks import iterate_chunks
from recbole_pos.layers.context import SequenceContext, future_mask
from recbole_pos.layers.hooks import AttentionPosition, replaces_attention


class PointwiseAttention(MultiHeadAttention):
    """HSTU's attention sub-layer with the hooks of ``hooks.py`` (equations 1 to 3).

        U, V, Q, K = split(SiLU(f1(Norm(x))))
        A = SiLU(Q K^T + B) / n  under the causal mask
        y = f2(Norm(A V) * U) + x

    Logits are not scaled, and n is the maximum length, so that results do not depend on the batch.
    f1 is ``query``, ``key``, ``value`` and ``gate``; f2 is ``dense``. Dropout comes before f2, as
    in the authors' code. Differences to that code: ``attn_dropout`` applies to A, both norms learn
    scale and shift, ``bias`` is for f1 and f2, and sizes and fresh weights are the backbone's.

    Args:
        options: options of the block; ``inner_size`` and ``activation`` are not used.
        position: the scheme of this layer, which cannot replace attention.

    Raises:
        UsageError: if the scheme replaces attention, or for ``norm: post``.
    """

    def __init__(self, options: BlockOptions, position: AttentionPosition) -> None:
        """Build the sub-layer with its gate, after a check that options and scheme suit HSTU."""
        for name, scheme in position.parts().items():
            if replaces_attention(type(scheme)):
                raise UsageError(
                    f"block: hstu has an attention of its own, and {name} replaces attention; use "
                    "block: transformer or another position"
                )
        if options.norm != "pre":
            raise UsageError(f"norm: {options.norm} does not go with block: hstu; use norm: pre")
        super().__init__(options, position)
        d = options.hidden_size
        self.gate = nn.Linear(d, d, bias=options.bias)
        self.gate_norm = nn.LayerNorm(d, eps=options.layer_norm_eps)

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Apply the sub-layer with residual, [m, d] to [m, d]."""
        query, key, value, gate = self._project_gated(x)
        q, k, v, bias = self._apply_hooks(query, key, value, ctx)
        drops_weights = self.training and self.attn_dropout.p > 0
        if drops_weights or torch.compiler.is_compiling():  # a graph holds no loop over chunks
            out = self.attn_dropout(_compute_weights(q, k, bias, ctx.max_length)) @ v
        else:
            out = pointwise_attention(q, k, v, bias, ctx.max_length)
        out = self.gate_norm(ctx.unpad(out.transpose(1, 2), "start").reshape(x.shape))
        out = self.out_dropout(out * gate.reshape(x.shape))
        return x + (out if self.dense is None else self.dense(out))

    def _project_gated(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return Q, K, V and the gate U, [m, h, e] each, of inputs [m, d]."""
        product = self._project_jointly(self.LayerNorm(x), [*self.projections, self.gate])
        return F.silu(product).unbind(1)

    def weights(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Return A [b, h, t, t], aligned at the start; rows do not sum to 1, weights may be < 0."""
        query, key, value, _ = self._project_gated(x)
        q, k, _, bias = self._apply_hooks(query, key, value, ctx)
        return _compute_weights(q, k, bias, ctx.max_length)


class HSTULayer(TransformerLayer):
    """One block: pointwise attention without a feed-forward layer."""

    attention_class = PointwiseAttention
    feed_forward_class = nn.Identity


def _compute_weights(q: Tensor, k: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """Return A = SiLU(q k^T + bias) / n, [b, h, t, t], zero for the future (equation 2)."""
    logits = q @ k.transpose(-1, -2)
    logits = logits if bias is None else logits + bias
    return (F.silu(logits) / n).tril()


class _PointwiseAttention(torch.autograd.Function):
    """Pointwise attention in chunks of sequences, so that no [b, h, t, t] is kept for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, n: int) -> Tensor:
        """Return (SiLU(q k^T + bias) / n) v under the causal mask, [b, h, t, e] like q, k, v."""
        ctx.save_for_backward(q, k, v, bias)
        ctx.n = n
        out = torch.empty_like(v)
        for rows in iterate_chunks(len(q), q.size(1) * q.size(2) ** 2, q.device):
            weight = _compute_weights(q[rows], k[rows], select_rows(bias, rows), n)
            torch.matmul(weight, v[rows], out=out[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients to q, k and v, [b, h, t, e], and to a bias that needs one."""
        q, k, v, bias = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_bias = None
        if ctx.needs_input_grad[3]:
            dtype = torch.promote_types(bias.dtype, torch.float32)
            grad_bias = torch.zeros_like(bias, dtype=dtype)
        future = future_mask(q.size(2), q.device)
        for rows in iterate_chunks(len(q), q.size(1) * q.size(2) ** 2, q.device):
            logits = q[rows] @ k[rows].transpose(-1, -2)
            if bias is not None:
                logits += select_rows(bias, rows)
            sigmoid = logits.sigmoid()
            weight = (logits * sigmoid).masked_fill_(future, 0).div_(ctx.n)
            grad_v[rows] = weight.transpose(-1, -2) @ grad[rows]
            # silu'(s) = sigmoid(s) (1 + s (1 - sigmoid(s)))
            slope = (1 - sigmoid).mul_(logits).add_(1).mul_(sigmoid)
            slope.masked_fill_(future, 0).div_(ctx.n)
            grad_logits = (grad[rows] @ v[rows].transpose(-1, -2)).mul_(slope)
            grad_q[rows] = grad_logits @ k[rows]
            grad_k[rows] = grad_logits.transpose(-1, -2) @ q[rows]
            if grad_bias is not None:
                bias_rows = select_rows(grad_bias, rows)
                bias_rows += grad_logits.sum_to_size(bias_rows.shape)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_q, grad_k, grad_v, grad_bias, None


def pointwise_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """Return (SiLU(q k^T + bias) / n under the causal mask) v.

    Args:
        q, k, v: [b, h, t, e] each; the result has the same shape.
        bias: broadcastable to [b, h, t, t], or None.
        n: the divisor of the weights, the maximum length of the model.
    """
    if bias is not None:  # as [1 or b, 1 or h, t, t]
        bias = bias[(None,) * (4 - bias.dim())].to(v.dtype)
    with torch.autocast(q.device.type, enabled=False):
        return _PointwiseAttention.apply(q.to(v.dtype), k.to(v.dtype), v, bias, n)
