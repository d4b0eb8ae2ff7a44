"""Masked dot-product attention with a bias: which of torch's kernels, or our own, computes it.

Shapes as in ``sequence_batch.py``. Fused kernels have neither a gradient to a bias that sequences
share, nor dropout that is cheap on a CPU; for these the weights are computed here, in chunks of
sequences, so that no more than one chunk of [h, t, t] weights exists at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recbole_pos.layers.large_products import chunk_elements, iterate_chunks
from recbole_pos.layers.sequence_batch import SequenceBatch


class Dropout(nn.Module):
    """Inverted dropout; on CPU one 64-bit random number decides about eight elements.

    ``torch.nn.Dropout`` draws a Bernoulli variable per element, 13-23% of a training step. Eight
    bytes of one draw serve eight elements instead, so on CPU the probability is rounded to a
    multiple of 1/256, at least one; the scale 1 / (1 - p) uses the rounded value, so the
    expectation is exact. A compiled graph cannot hold that draw and uses torch's dropout.

    Args:
        p: probability of zeroing an element, in [0, 1).
    """

    def __init__(self, p: float) -> None:
        """Compute the threshold below which a random byte, 0 to 255, drops an element.

        Args:
            p: probability with which an element is dropped; on a CPU it is rounded to 1/256.
        """
        super().__init__()
        self.p = p
        # p = 0.1 has the threshold 26: 26 of the 256 values of a byte drop an element
        threshold = round(p * 256)
        if p > 0:
            threshold = max(threshold, 1)  # else a small p would drop nothing
        self.threshold = min(threshold, 255)  # else a p near 1 would drop everything

    def forward(self, x: Tensor) -> Tensor:
        """Return x with random elements zeroed and the others scaled up, in training mode.

        In evaluation mode x itself is returned.
        """
        if not self.training or self.p == 0:
            return x
        # a GPU has its own fast dropout, and a compiled graph cannot hold the draw of bytes
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        # ``draw_kept`` draws a byte for each element, which says whether it is kept
        return x * self.draw_kept(x.shape).to(x.dtype).mul_(self.scale)

    @property
    def scale(self) -> float:
        """The factor of elements that are kept."""
        return 256 / (256 - self.threshold)

    def draw_kept(self, shape: Sequence[int]) -> Tensor:
        """Draw which elements of a tensor on CPU are kept, bool of this shape.

        Each element gets a random byte, and is dropped if that is below ``threshold``. A random
        integer of 64 bits has the bytes of eight elements, so few integers have to be drawn.
        """
        num_elements = math.prod(shape)
        integers = torch.empty((num_elements + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        return integers.view(torch.uint8)[:num_elements].view(shape) >= self.threshold


def future_mask(t: int, device: torch.device) -> Tensor:
    """Return which keys (columns) are newer than a query (row), [t, t] bool.

    For t = 3 it is True at row 0, columns 1 and 2, and at row 1, column 2.
    """
    return torch.ones(t, t, dtype=torch.bool, device=device).triu_(1)


def make_mask(batch: SequenceBatch, causal: bool) -> Tensor:
    """Return which keys (columns) attention hides from which queries (rows), True where hidden.

    Queries and keys stand in blocks with one history in a row: its interactions from the oldest to
    the newest, then padding. A causal mask hides all keys to the right of a query. Padding is to
    the right of every interaction, so the causal mask hides it, too. Without a causal mask, padding
    is all that is hidden.

    Args:
        batch: b histories, of which the longest has t interactions.
        causal: whether keys that are newer than the query are hidden.

    Returns:
        Bool: if causal [t, t], the same for all histories; else [b, 1, 1, t], where the keys of a
        history are hidden from all of its queries, in every head.
    """
    if causal:
        return future_mask(batch.width, batch.lengths.device)
    return batch.padding[:, None, None]


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    batch: SequenceBatch,
    causal: bool,
    dropout: Dropout,
) -> Tensor:
    """Return softmax(M + q k^T / sqrt(e) + bias) v, with dropout on the weights in training.

    The mask M is -inf at hidden keys, else 0. Torch's ``scaled_dot_product_attention`` computes the
    result. But in two cases it would keep all [b, h, t, t] weights for the gradient, so
    :func:`biased_attention` takes its place, which computes the weights of a few sequences at a
    time:

    - with dropout on a CPU, if the step is not compiled (``drops_on_cpu`` below)
    - without dropout, if all sequences share a bias with a gradient (``learns_shared_bias`` below)

    Args:
        q, k, v: [b, h, t, e] query, key and value of b sequences, padded at their end.
        bias: broadcastable to [b, h, t, t], or None.
        batch: the b sequences, from whose lengths M is made.
        causal: whether M hides the interactions that are newer than the query, or only padding.
        dropout: dropout on the weights.

    Returns:
        [b, h, t, e].
    """
    p = dropout.p if dropout.training else 0.0
    drops_on_cpu = p > 0 and q.device.type == "cpu" and not torch.compiler.is_compiling()
    if bias is None and not drops_on_cpu:
        # A causal M is made by torch's function itself (``is_causal``). It hides the padding, too,
        # which is to the right of all interactions. An M that is not causal hides the padding only,
        # so a batch without padding needs none.
        is_visible = None if causal or batch.is_full else ~make_mask(batch, causal)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=is_visible, dropout_p=p, is_causal=causal
        )

    # M + bias: -inf at the keys that ``make_mask`` hides
    bias = q.new_zeros(1, 1) if bias is None else bias
    bias = bias.masked_fill(make_mask(batch, causal), -torch.inf)

    num_biases = bias.size(0) if bias.dim() == 4 else 1  # 1: all sequences share it
    learns_shared_bias = bias.requires_grad and p == 0 and num_biases == 1
    if drops_on_cpu or learns_shared_bias:
        bias = bias.expand(num_biases, q.size(1), batch.width, batch.width)  # as a view
        return biased_attention(q, k, v, bias, dropout if drops_on_cpu else None)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)


class _BiasedAttention(torch.autograd.Function):
    """Attention in chunks of sequences, with a gradient to the bias and dropout on weights.

    Fused kernels have neither; without chunks several [b, h, t, t] would be kept. With * for
    products element by element the function is

        W = softmax(q k^T / sqrt(e) + bias)       weights
        D = W * kept                              weights that dropout keeps
        out = kept_scale D v

    ``backward`` has the formulas of the gradients.
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
        """Return kept_scale (softmax(q k^T / sqrt(e) + bias) * kept) v.

        Args:
            ctx: torch's context of the function.
            q, k, v: [b, h, t, e] each: b sequences, h heads of e columns, t interactions.
            bias: [1 or b, h, t, t], -inf where a key is hidden; 1 if all sequences share it.
            kept: [b, h, t, t] bool, which weights dropout keeps; None without dropout.
            kept_scale: factor of the weights that are kept.

        Returns:
            [b, h, t, e].
        """
        # contiguous, as products copy transposed views; detached, as torch uses the fused kernel
        # only for a mask that requires no gradient
        q, k, v = (x.detach().contiguous() for x in (q, k, v))
        bias = bias.detach()
        if kept is None:  # no dropout: torch's kernel computes the same
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scaled_q, out = q * q.size(-1) ** -0.5, torch.empty_like(v)
            weights_per_sequence = bias[0].numel()  # h * t * t
            # ``rows`` is a slice, such as 0:4 for the first four sequences. Their product is
            # written straight into ``out``, since ``out[rows]`` is a view.
            for rows in iterate_chunks(q.size(0), weights_per_sequence, q.device):
                weights = _compute_weights(scaled_q[rows], k[rows], select_rows(bias, rows))
                torch.matmul(weights * kept[rows], v[rows], out=out[rows])
            out.mul_(kept_scale)

        # weights are not saved, which saves memory: ``backward`` computes them again
        ctx.save_for_backward(q, k, v, bias, kept, out)
        ctx.kept_scale = kept_scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients to query, key, value and, if it is learned, to the bias.

        ``forward`` has computed W = softmax(q k^T / sqrt(e) + bias), the weights, then D = W * kept
        and out = kept_scale D v. Here * multiplies element by element, and without dropout D is W
        and kept_scale is 1. By the chain rule, from the output back to the input:

            grad_out      grad * kept_scale            to D v
            grad_v        D^T grad_out
            grad_weights  (grad_out v^T) * kept        to W
            mean          sum of grad * out over the e columns, one number for each query
            grad_logits   (grad_weights - mean) * W    to the argument of the softmax
            grad_q        (grad_logits k) * scale      with scale = 1 / sqrt(e)
            grad_k        grad_logits^T (q * scale)
            grad_bias     grad_logits, summed over the sequences if they share one bias

        The gradient of a softmax has ``mean`` as the sum of grad_weights * W over the keys. The sum
        above is the same number, and takes less time.

        A chunk of sequences is computed at a time, and W again for each, so that no [b, h, t, t] of
        the whole batch exists.

        Args:
            ctx: torch's context with what ``forward`` has saved: q, k, v and out [b, h, t, e]; the
                bias [1 or b, h, t, t]; ``kept``, bool [b, h, t, t], which weights dropout keeps,
                or None without dropout; and ``kept_scale``, the factor of those that are kept.
            grad: [b, h, t, e] gradient to ``out``.

        Returns:
            The gradients to q, k and v, [b, h, t, e] each; that to the bias, [1 or b, h, t, t], or
            None if it is not learned; and None for ``kept`` and ``kept_scale``.
        """
        q, k, v, bias, kept, out = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_bias = None
        if ctx.needs_input_grad[3]:
            dtype = torch.promote_types(bias.dtype, torch.float32)  # float32 or longer, for sums
            grad_bias = torch.zeros_like(bias, dtype=dtype)

        scale, grad = q.size(-1) ** -0.5, grad.contiguous()  # scale: 1 / sqrt(e)
        scaled_q = q * scale
        weights_per_sequence = bias[0].numel()  # h * t * t
        # ``rows`` is a slice, the sequences of a chunk. Products are written straight into the
        # gradients, since ``grad_v[rows]`` is a view.
        for rows in iterate_chunks(q.size(0), weights_per_sequence, q.device):
            weights = _compute_weights(scaled_q[rows], k[rows], select_rows(bias, rows))  # W
            is_kept = None if kept is None else kept[rows].to(weights.dtype)
            kept_weights = weights if is_kept is None else weights * is_kept  # D

            # to the values and to the weights, through the dropout
            grad_out = grad[rows] * ctx.kept_scale
            torch.matmul(kept_weights.mT, grad_out, out=grad_v[rows])
            grad_weights = grad_out @ v[rows].mT
            if is_kept is not None:
                grad_weights.mul_(is_kept)

            # to query, key and bias, through the softmax; in place, to save memory
            mean = (grad[rows] * out[rows]).sum(-1, keepdim=True)
            grad_logits = grad_weights.sub_(mean).mul_(weights)
            torch.matmul(grad_logits, k[rows], out=grad_q[rows]).mul_(scale)
            torch.matmul(grad_logits.mT, scaled_q[rows], out=grad_k[rows])
            if grad_bias is not None:
                is_shared = len(bias) == 1
                summed = grad_logits.sum(0, keepdim=True) if is_shared else grad_logits
                select_rows(grad_bias, rows).add_(summed)

        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_q, grad_k, grad_v, grad_bias, None, None


def _compute_weights(scaled_q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Return the attention weights softmax(q k^T / sqrt(e) + bias).

    Args:
        scaled_q: [c, h, t, e] queries, already divided by sqrt(e).
        k: [c, h, t, e] keys.
        bias: [1 or c, h, t, t], -inf where a key is hidden.

    Returns:
        [c, h, t, t], by a softmax in float32 or longer.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    return (scaled_q @ k.mT).add_(bias).softmax(-1, dtype=dtype).to(k.dtype)


def select_rows(bias: Tensor, rows: slice) -> Tensor:
    """Return the bias [1 or b, ...] of some sequences of the batch, which may share one."""
    return bias if len(bias) == 1 else bias[rows]


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: Dropout | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(e) + bias) v, with a gradient to the bias that saves memory.

    Torch's kernel would keep all [b, h, t, t] weights for that gradient. ``_BiasedAttention`` keeps
    those of a few sequences at a time, and computes them again in the backward pass.

    Args:
        q, k, v: [b, h, t, e] query, key and value.
        bias: [1 or b, h, t, t], shared by all sequences or one each, -inf where a key is hidden.
        dropout: dropout on the weights, on CPU; None for no dropout.

    Returns:
        [b, h, t, e].
    """
    weights_shape = (q.size(0), *bias.shape[1:])  # b, h, t, t
    if dropout is None:
        # torch's own attention if all weights fit into one chunk, which has ``chunk_elements``
        # numbers on this device; a compiled graph holds no loop over chunks
        if torch.compiler.is_compiling() or math.prod(weights_shape) <= chunk_elements(q.device):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        kept, kept_scale = None, 1.0
    else:
        # [b, h, t, t] bool, a random choice of the weights to keep, and the factor of those
        kept, kept_scale = dropout.draw_kept(weights_shape), dropout.scale

    # all in the type of the values, also under automatic mixed precision
    with torch.autocast(q.device.type, enabled=False):
        tensors = (x.to(v.dtype) for x in (q, k, v, bias))
        return _BiasedAttention.apply(*tensors, kept, kept_scale)
