"""Attention weights of a trained model: of positions alone, or of the histories it is given."""

from __future__ import annotations

import numpy as np
import torch
from recbole.data.interaction import Interaction
from torch import Tensor, nn

from recbole_pos.layers.attention import MultiHeadAttention
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, replaces_attention, weighs_pairs
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.positional_attention import PositionalAttention


@torch.no_grad()
def positional_weights(model: nn.Module) -> list[np.ndarray]:
    """Attention weights of every layer whose attention depends on positions alone.

    Section 4.7 and Figure 3 of the FPARec paper.

    Args:
        model: a trained model.

    Returns:
        One [h, n, n] array per such layer, in order; each row sums to one (with
        ``positional_mask: after_softmax``, to what the mask leaves). Empty for other models.
    """
    layers = [m for m in model.modules() if isinstance(m, PositionalAttention)]
    n = getattr(model, "max_seq_length", 0)
    matrices = []
    for layer in layers:
        weights = layer.weights(n)
        if layer.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        matrices.append(weights.cpu().numpy())
    return matrices


def attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """The causal attention of every block, in order; other blocks' too, if they subclass it."""
    return [m for m in model.modules() if isinstance(m, MultiHeadAttention) and m.causal]


def replacement(layer: MultiHeadAttention) -> AttentionPosition | None:
    """The scheme that stands in for the layer's attention, or None."""
    schemes = layer.position.parts().values()
    return next((s for s in schemes if replaces_attention(type(s))), None)


def weighs_content(layer: MultiHeadAttention) -> bool:
    """Whether ``layer.weights`` has them: of dot products, or of a scheme with ``pair_weights``."""
    scheme = replacement(layer)
    return scheme is None or weighs_pairs(type(scheme))


def has_weights(layer: MultiHeadAttention) -> bool:
    """Whether there are attention weights: by content, or of positions alone."""
    return weighs_content(layer) or isinstance(replacement(layer), PositionalAttention)


@torch.no_grad()
def layer_inputs(
    model: PosRecommender, layers: list[MultiHeadAttention], rows: Interaction
) -> tuple[list[Tensor], SequenceContext]:
    """What every layer is given when the model encodes the histories of RecBole's rows.

    Returns:
        [m, d] for each layer, and the context, with times wherever the rows have them.
    """
    seen: list[tuple[Tensor, SequenceContext]] = []
    hooks = [m.register_forward_pre_hook(lambda _, given: seen.append(given)) for m in layers]
    try:
        model.encode_rows(rows)
    finally:
        for hook in hooks:
            hook.remove()
    return [x for x, _ in seen], seen[0][1]


@torch.no_grad()
def attention_weights(layer: MultiHeadAttention, x: Tensor, ctx: SequenceContext) -> Tensor:
    """Weights of one layer that ``has_weights``: [b, h or 1, t, t] aligned at the start.

    As the layer makes them: rows of HSTU's blocks or of ``positional_mask: after_softmax`` do not
    sum to one, nor do those of weights by position, which are not divided by their sum here.

    Args:
        layer: of a model.
        x: [m, d] what the layer is given, see :func:`layer_inputs`.
        ctx: of the batch.
    """
    if weighs_content(layer):
        return layer.weights(x, ctx)
    # such weights stand at the end: a history of l events has the last l rows and columns
    at = torch.arange(ctx.width, device=x.device) + (ctx.width - ctx.lengths)[:, None]
    at = at.clamp(max=ctx.width - 1)  # [b, t]; what padding finds is not causal, hence tril
    scheme = replacement(layer)
    assert isinstance(scheme, PositionalAttention)  # or it has no weights
    weights = scheme.weights(ctx.width)[:, at[:, :, None], at[:, None, :]]
    return weights.transpose(0, 1).tril()
