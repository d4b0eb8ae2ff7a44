"""Self-attention with hooks for positional and temporal information, and the blocks around it.

One equation covers all schemes; a scheme fills in some of its hooks (see ``hooks.py``):

    x0 = x + P                                       once per model   (InputPosition)
    o  = softmax( M + B( R q . U^T (R k) ) ) . L v   in every layer   (AttentionPosition)

The dot products are divided by sqrt(e), and B adds a bias to them; M is the mask. Shapes as in
``context.py``. Modules carry RecBole's parameter names (``query``, ``key``, ``value``, ``dense``,
``LayerNorm``), so weights of its SASRec load strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recbole_pos.layers.chunks import chunk_elements, iterate_chunks
from recbole_pos.layers.context import SequenceContext, future_mask
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.hooks import AttentionPosition, Projected
from recbole_pos.values import Options

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Sizes and switches of a transformer block.

    Attributes:
        hidden_size: d.
        inner_size: inner size of the feed-forward layer.
        n_heads: h, a divisor of d.
        hidden_dropout: dropout on sub-layer outputs.
        attn_dropout: dropout on attention weights. In dot-product attention any value above 0 rules
            out torch's fused kernel: on CPU attention is then slower, most for long windows.
        activation: name in ``ACTIVATIONS``.
        norm: ``pre`` normalises the input of a sub-layer, ``post`` the sum with the residual.
        bias: whether query, key and value have a bias.
        output: whether a linear layer (``dense``) follows the heads.
        layer_norm_eps: epsilon of the layer norms.
        causal: whether an interaction sees only itself and older ones, or all of its sequence.
    """

    hidden_size: int
    inner_size: int
    n_heads: int
    hidden_dropout: float
    attn_dropout: float
    activation: str
    norm: str
    bias: bool
    output: bool
    layer_norm_eps: float
    causal: bool = True

    @classmethod
    def from_config(cls, config: Options, **fixed: Any) -> BlockOptions:
        """Return the options: from ``config``, and from ``fixed`` where it has no key."""
        return cls(
            hidden_size=config["hidden_size"],
            inner_size=config["inner_size"],
            n_heads=config["n_heads"],
            hidden_dropout=config["hidden_dropout_prob"],
            attn_dropout=config["attn_dropout_prob"],
            activation=config["hidden_act"],
            norm=config["norm"],
            layer_norm_eps=config["layer_norm_eps"],
            **fixed,
        )


class MultiHeadAttention(nn.Module):
    """Multi-head attention sub-layer with residual, layer norm and one position scheme.

    The scheme also names the projections that the layer needs.
    """

    def __init__(self, options: BlockOptions, position: AttentionPosition) -> None:
        """Create the projections that the scheme needs, d to d, with layer norm and dropout."""
        super().__init__()
        d, bias = options.hidden_size, options.bias
        self.n_heads = options.n_heads
        self.head_size = d // options.n_heads
        names = position.projections
        self.query = nn.Linear(d, d, bias=bias) if "query" in names else None
        self.key = nn.Linear(d, d, bias=bias) if "key" in names else None
        self.value = nn.Linear(d, d, bias=bias) if "value" in names else None
        self.dense = nn.Linear(d, d, bias=bias) if options.output else None
        self.position = position
        self.LayerNorm = nn.LayerNorm(d, eps=options.layer_norm_eps)
        self.out_dropout = Dropout(options.hidden_dropout)
        self.attn_dropout = Dropout(options.attn_dropout)
        self.pre_norm = options.norm == "pre"
        self.causal = options.causal

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Apply the sub-layer with residual and layer norm, [m, d] to [m, d]."""
        out = self.attention(self.LayerNorm(x) if self.pre_norm else x, ctx)
        out = x + self.out_dropout(out)
        return out if self.pre_norm else self.LayerNorm(out)

    def attention(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Return the attention output [m, d] of inputs [m, d], before residual and post-norm."""
        query, key, value = self._project(x)
        out = self.position.attend(query, key, value, ctx, self.attn_dropout)
        if out is None:
            out = self._attend(query, key, value, ctx)
        out = out.reshape(x.shape)
        return out if self.dense is None else self.dense(out)

    @property
    def projections(self) -> list[nn.Linear]:
        """The layers that the scheme needs among query, key and value, in this order."""
        return [layer for layer in (self.query, self.key, self.value) if layer is not None]

    def _project(self, x: Tensor) -> tuple[Projected, Projected, Tensor]:
        """Project x [m, d] to query, key and value, [m, h, e] each.

        Without its layer a query or key is None, and the value is x itself.
        """
        layers = self.projections
        projected = iter(self._project_jointly(x, layers).unbind(1) if layers else ())
        query = None if self.query is None else next(projected)
        key = None if self.key is None else next(projected)
        if self.value is None:
            return query, key, x.view(x.size(0), self.n_heads, self.head_size)
        return query, key, next(projected)

    def _project_jointly(self, x: Tensor, layers: list[nn.Linear]) -> Tensor:
        """Apply several linear layers to x [m, d] in one matrix product: [m, layers, h, e]."""
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers]) if layers[0].bias is not None else None
        return F.linear(x, weight, bias).view(-1, len(layers), self.n_heads, self.head_size)

    def _apply_hooks(
        self, query: Tensor, key: Tensor, value: Tensor, ctx: SequenceContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return R q, U^T (R k) and L v, [b, h, t, e] each, and the unmasked bias, or None."""
        position = self.position
        query, key = position.rotate(query, key, ctx)
        key, value = position.mix_keys(key, ctx), position.mix_values(value, ctx)
        block = ctx.pad(torch.stack((query, key, value), 1), "start")  # [b, t, 3, h, e]
        q, k, v = block.transpose(1, 3).unbind(2)  # [b, h, t, e]
        return q, k, v, position.bias(q, k, ctx)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, ctx: SequenceContext) -> Tensor:
        """Return softmax(M + B(R q . U^T (R k) / sqrt(e))) . L v, [m, h, e]."""
        q, k, v, bias = self._apply_hooks(query, key, value, ctx)
        dropout = self.attn_dropout.p if self.training else 0.0
        # torch would keep several [b, h, t, t] under dropout, with a random number for each weight
        is_on_cpu = q.device.type == "cpu"
        drops_in_chunks = dropout > 0 and is_on_cpu and not torch.compiler.is_compiling()
        if bias is None and drops_in_chunks:
            bias = q.new_zeros(1, 1)
        attn_mask: Tensor | None = None
        if bias is not None:
            attn_mask = bias.masked_fill(self._make_mask(ctx), -torch.inf)
            num_biases = attn_mask.size(0) if attn_mask.dim() == 4 else 1
            learns_bias = attn_mask.requires_grad and dropout == 0 and num_biases == 1
            if learns_bias or drops_in_chunks:
                masked_bias = attn_mask.expand(num_biases, q.size(1), ctx.width, ctx.width)
                chunk_dropout = self.attn_dropout if drops_in_chunks else None
                out = biased_attention(q, k, v, masked_bias, chunk_dropout)
                return ctx.unpad(out.transpose(1, 2), "start")
        elif not (self.causal or ctx.is_full):
            attn_mask = ~self._make_mask(ctx)  # bool, True where a key is visible
        is_causal = self.causal and attn_mask is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal
        )
        return ctx.unpad(out.transpose(1, 2), "start")

    def _make_mask(self, ctx: SequenceContext) -> Tensor:
        """Return a boolean mask, True at hidden keys: [t, t] if causal, else [b, 1, 1, t]."""
        if self.causal:
            return future_mask(ctx.width, ctx.lengths.device)
        return ctx.padding[:, None, None]

    def weights(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Return the attention weights [b, h, t, t], aligned at the start, for inspection."""
        query, key, value = self._project(self.LayerNorm(x) if self.pre_norm else x)
        q, k, _, bias = self._apply_hooks(query, key, value, ctx)
        logits = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        logits = logits if bias is None else logits + bias
        return logits.masked_fill(self._make_mask(ctx), -torch.inf).softmax(-1)


class _BiasedAttention(torch.autograd.Function):
    """Attention in chunks of sequences, with a gradient to the bias and dropout on weights.

    Fused kernels have neither; without chunks several [b, h, t, t] would be kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        kept: Tensor | None,
        kept_scale: float,
    ) -> Tensor:
        """Return (softmax(q k^T / sqrt(e) + bias) * kept * kept_scale) v, [b, h, t, e]."""
        # contiguous, as products copy transposed views; detached, as torch uses the fused kernel
        # only for a mask that requires no gradient
        q, k, v = (x.detach().contiguous() for x in (q, k, v))
        bias, weights = bias.detach(), None
        if kept is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            out, scaled_q = torch.empty_like(v), q * q.size(-1) ** -0.5
            for rows in iterate_chunks(q.size(0), bias[0].numel(), q.device):
                weights = _compute_weights(scaled_q[rows], k[rows], select_rows(bias, rows))
                torch.matmul(weights * kept[rows], v[rows], out=out[rows])
            out.mul_(kept_scale)
        if weights is not None and len(weights) < len(q):
            weights = None  # those of several chunks are computed again
        ctx.save_for_backward(q, k, v, bias, kept, out, weights)
        ctx.kept_scale = kept_scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients to q, k and v, [b, h, t, e], and to a bias that needs one."""
        q, k, v, bias, kept, out, all_weights = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_bias = None
        if ctx.needs_input_grad[3]:
            dtype = torch.promote_types(bias.dtype, torch.float32)
            grad_bias = torch.zeros_like(bias, dtype=dtype)
        scale, grad = q.size(-1) ** -0.5, grad.contiguous()
        scaled_q = q * scale
        for rows in iterate_chunks(q.size(0), bias[0].numel(), q.device):
            weights = all_weights
            if weights is None:
                weights = _compute_weights(scaled_q[rows], k[rows], select_rows(bias, rows))
            # gradient of softmax: w * (dw - sum(w * dw)), where the sum is sum(grad_out * out)
            grad_out, used_weights, kept_weights = grad[rows], weights, None
            weighted_sum = (grad_out * out[rows]).sum(-1, keepdim=True)
            if kept is not None:
                kept_weights = kept[rows].to(weights.dtype)
                grad_out, used_weights = grad_out * ctx.kept_scale, weights * kept_weights
            torch.matmul(used_weights.mT, grad_out, out=grad_v[rows])
            grad_logits = grad_out @ v[rows].mT
            if kept_weights is not None:
                grad_logits *= kept_weights
            grad_logits -= weighted_sum
            grad_logits *= weights
            torch.matmul(grad_logits, k[rows], out=grad_q[rows])
            torch.matmul(grad_logits.mT, scaled_q[rows], out=grad_k[rows])
            if grad_bias is not None:
                is_shared = len(bias) == 1
                summed = grad_logits.sum(0, keepdim=True) if is_shared else grad_logits
                select_rows(grad_bias, rows).add_(summed)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_q.mul_(scale), grad_k, grad_v, grad_bias, None, None


def _compute_weights(scaled_q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(e) + bias), [b, h, t, t], of q that is divided by sqrt(e)."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    return (scaled_q @ k.mT).add_(bias).softmax(-1, dtype=dtype).to(k.dtype)


def select_rows(bias: Any, rows: slice) -> Any:
    """Return the bias [1 or b, ...] of some sequences of the batch, which may share it, or None."""
    return bias if bias is None or len(bias) == 1 else bias[rows]


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: Dropout | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(e) + bias) v, with a gradient to the bias that saves memory.

    Args:
        q, k, v: [b, h, t, e] each; the result has the same shape.
        bias: [1 or b, h, t, t], -inf where a key is hidden.
        dropout: dropout on the weights, on CPU.
    """
    num_weights = q.size(0) * bias[0].numel()
    if dropout is None and (  # a graph holds no loop
        torch.compiler.is_compiling() or num_weights <= chunk_elements(q.device)
    ):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    kept = None if dropout is None else dropout.draw_kept((q.size(0), *bias.shape[1:]))
    kept_scale = 1.0 if dropout is None else dropout.scale
    with torch.autocast(q.device.type, enabled=False):
        tensors = (x.to(v.dtype) for x in (q, k, v, bias))
        return _BiasedAttention.apply(*tensors, kept, kept_scale)


class FeedForward(nn.Module):
    """Position-wise feed-forward sub-layer with residual and layer norm (FPARec, equation 8)."""

    def __init__(self, options: BlockOptions) -> None:
        """Create the layers d to inner_size and back, with layer norm and dropout."""
        super().__init__()
        self.dense_1 = nn.Linear(options.hidden_size, options.inner_size)
        self.dense_2 = nn.Linear(options.inner_size, options.hidden_size)
        self.LayerNorm = nn.LayerNorm(options.hidden_size, eps=options.layer_norm_eps)
        self.dropout = Dropout(options.hidden_dropout)
        self.activation = ACTIVATIONS[options.activation]
        self.pre_norm = options.norm == "pre"

    def forward(self, x: Tensor) -> Tensor:
        """Apply the sub-layer with residual and layer norm, [m, d] to [m, d]."""
        hidden = self.LayerNorm(x) if self.pre_norm else x
        out = x + self.dropout(self.dense_2(self.activation(self.dense_1(hidden))))
        return out if self.pre_norm else self.LayerNorm(out)


class TransformerLayer(nn.Module):
    """One block: attention, then feed-forward; a subclass may replace the class of either."""

    attention_class: ClassVar[type[MultiHeadAttention]] = MultiHeadAttention
    feed_forward_class: ClassVar[type[nn.Module]] = FeedForward

    def __init__(self, options: BlockOptions, position: AttentionPosition) -> None:
        super().__init__()
        self.multi_head_attention = self.attention_class(options, position)
        self.feed_forward = self.feed_forward_class(options)

    def forward(self, x: Tensor, ctx: SequenceContext, positions: Tensor | None = None) -> Tensor:
        """Apply the block to x [m, d]; return all states, or those at packed ``positions`` [k]."""
        x = self.multi_head_attention(x, ctx)
        return self.feed_forward(x if positions is None else x[positions])


class TransformerEncoder(nn.Module):
    """A stack of blocks, each with a position scheme of its own.

    Args:
        options: options of the blocks.
        n_layers: number of blocks.
        position: builds the scheme of the next block; the first call is for the first block.
        block: builds a block, with the scheme in its ``multi_head_attention``.
    """

    def __init__(
        self,
        options: BlockOptions,
        n_layers: int,
        position: Callable[[], AttentionPosition],
        block: Callable[[BlockOptions, AttentionPosition], nn.Module] = TransformerLayer,
    ) -> None:
        """Build the blocks from first to last, each with the next scheme."""
        super().__init__()
        self.layer = nn.ModuleList(block(options, position()) for _ in range(n_layers))

    def forward(self, x: Tensor, ctx: SequenceContext, positions: Tensor | None = None) -> Tensor:
        """Apply all blocks to x [m, d]; return all states [m, d].

        With packed ``positions`` [k] the last block computes only these states, [k, d].
        """
        *first, last = self.layer
        for layer in first:
            x = layer(x, ctx)
        return last(x, ctx) if positions is None else last(x, ctx, positions)
