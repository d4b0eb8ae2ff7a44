"""Attention weights of a trained model, by position or of histories, and its positional kernel.

Figures 1 and 2 of the kernel attention paper (Nabiev and Frolov), Figure 3 of FPARec's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from torch import Tensor, nn

from recbole_pos.layers.attention import MultiHeadAttention
from recbole_pos.layers.chunks import chunk_elements
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, replaces_attention
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.kernel import PositionalKernel
from recbole_pos.position.positional_attention import PositionalAttention


@torch.no_grad()
def positional_weights(model: nn.Module) -> list[np.ndarray]:
    """Return the attention weights of every layer whose attention depends on positions only.

    Section 4.7 and Figure 3 of the FPARec paper.

    Args:
        model: a trained model.

    Returns:
        One [h, n, n] array per such layer, in order; each row sums to one (with
        ``positional_mask: after_softmax``, to what the mask leaves). Empty for other models.
    """
    layers = [module for module in model.modules() if isinstance(module, PositionalAttention)]
    n = getattr(model, "max_seq_length", 0)
    matrices = []
    for layer in layers:
        weights = layer.weights(n)
        if layer.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        matrices.append(weights.cpu().numpy())
    return matrices


def attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """Return the causal attention of every block, in order, subclasses included."""
    modules = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    return [module for module in modules if module.causal]


def find_replacement(layer: MultiHeadAttention) -> AttentionPosition | None:
    """Return the scheme that replaces the attention of a layer, or None."""
    schemes = layer.position.parts().values()
    return next((scheme for scheme in schemes if replaces_attention(type(scheme))), None)


def weighs_content(layer: MultiHeadAttention) -> bool:
    """Return whether the attention weights of a layer depend on content (``layer.weights``)."""
    return find_replacement(layer) is None


def has_weights(layer: MultiHeadAttention) -> bool:
    """Return whether a layer has attention weights, by content or by positions only."""
    return weighs_content(layer) or isinstance(find_replacement(layer), PositionalAttention)


@torch.no_grad()
def layer_inputs(
    model: PosRecommender, layers: list[MultiHeadAttention], rows: Interaction
) -> tuple[list[Tensor], SequenceContext]:
    """Return the inputs of every layer when the model encodes the histories of RecBole's rows.

    Returns:
        [m, d] inputs of each layer, and their context, with times wherever the rows have them.
    """
    seen: list[tuple[Tensor, SequenceContext]] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: seen.append(args)) for layer in layers]
    try:
        model.encode_rows(rows)
    finally:
        for hook in hooks:
            hook.remove()
    return [x for x, _ in seen], seen[0][1]


@torch.no_grad()
def attention_weights(layer: MultiHeadAttention, x: Tensor, ctx: SequenceContext) -> Tensor:
    """Return the weights of a layer that ``has_weights``, as the layer uses them.

    Rows of HSTU's blocks or of ``positional_mask: after_softmax`` do not sum to one, nor do weights
    by position, which are not divided by their sum here.

    Args:
        layer: layer of a model.
        x: [m, d] inputs of the layer, see :func:`layer_inputs`.
        ctx: context of the batch.

    Returns:
        [b, h or 1, t, t] aligned at the start.
    """
    if weighs_content(layer):
        return layer.weights(x, ctx)
    # weights by position are aligned at the end: l events have the last l rows and columns
    at = torch.arange(ctx.width, device=x.device) + (ctx.width - ctx.lengths)[:, None]
    at = at.clamp(max=ctx.width - 1)  # [b, t]; tril, as entries of padding are not causal
    scheme = find_replacement(layer)
    assert isinstance(scheme, PositionalAttention)  # or it has no weights
    weights = scheme.weights(ctx.width)[:, at[:, :, None], at[:, None, :]]
    return weights.transpose(0, 1).tril()


@torch.no_grad()
def kernel_factors(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the factors of the positional kernel of every layer by name, [n, n] each.

    ``U, layer 1`` is upper triangular, ``L, layer 1`` lower. A factor that all layers share is
    there once, as ``L, all layers``. Empty without a kernel.
    """
    kernels = [module for module in model.modules() if isinstance(module, PositionalKernel)]
    n = getattr(model, "max_seq_length", 0)
    matrices: dict[str, np.ndarray] = {}
    for name in ("U", "L"):
        factors = [getattr(kernel, name) for kernel in kernels]
        shared = len({id(factor) for factor in factors}) == 1 and len(factors) > 1
        for number, factor in enumerate(factors[:1] if shared else factors):
            if factor is None:
                continue
            matrix = factor.matrix(n)
            where = "all layers" if shared else f"layer {number + 1}"
            matrices[f"{name}, {where}"] = (matrix.t() if name == "U" else matrix).cpu().numpy()
    return matrices


@dataclass(frozen=True)
class AttentionMaps:
    """Attention weights averaged over histories.

    Attributes:
        weights: [h, newest, newest] of each layer: row i is a query, the last row the newest event.
        histories: number of histories averaged.
        longest: number of events of the longest history.
    """

    weights: list[np.ndarray]
    histories: int
    longest: int

    @property
    def caption(self) -> str:
        """Text that says which histories are shown."""
        newest = self.weights[0].shape[-1]
        if self.longest > newest:
            return f"newest {newest} of up to {self.longest} events of {self.histories:,} histories"
        return f"{self.histories:,} histories of {newest} events"


@torch.no_grad()
def attention_maps(model: PosRecommender, loader: Any, newest: int = 30) -> AttentionMaps | None:
    """Average the attention weights of every layer that weighs content over histories.

    Args:
        model: a trained plugin model.
        loader: RecBole's loader of validation or test rows.
        newest: number of newest events to show. Histories with fewer are left out; if all have
            fewer, the longest are taken.

    Returns:
        None if attention is replaced, see :func:`positional_weights`.
    """
    layers = [layer for layer in attention_layers(model) if weighs_content(layer)]
    if not layers:
        return None
    lengths = loader._dataset.inter_feat[model.ITEM_SEQ_LEN].numpy()
    newest = min(newest, int(lengths.max()))
    chosen = np.flatnonzero(lengths >= newest)
    heads, room = max(layer.n_heads for layer in layers), chunk_elements(torch.device(model.device))
    totals: list[Any] = [0.0 for _ in layers]
    for part in weight_batches(lengths[chosen], heads, room):
        rows = loader.collate_fn(chosen[part].tolist())[0]
        inputs, ctx = layer_inputs(model, layers, rows.to(model.device))
        end = ctx.lengths[:, None] - newest + torch.arange(newest, device=ctx.lengths.device)
        row = torch.arange(len(end), device=end.device)[:, None, None]
        for number, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
            weights = layer.weights(x, ctx).transpose(1, 2)  # [b, t, h, t], from the start
            totals[number] += weights[row, end[:, :, None], :, end[:, None, :]].sum(0)
    means = [(total / len(chosen)).permute(2, 0, 1).cpu().numpy() for total in totals]
    return AttentionMaps(means, len(chosen), int(lengths[chosen].max()))


def weight_batches(lengths: np.ndarray, heads: int, elements: int) -> list[np.ndarray]:
    """Split histories into batches of similar length with at most ``elements`` weights in a layer.

    Args:
        lengths: [histories] numbers of events.
        heads: heads of a layer.
        elements: weights that a batch may have; a longer history is a batch of its own.

    Returns:
        Indices of the histories of each batch, the longest first.
    """
    order, parts, start = np.argsort(-lengths, kind="stable"), [], 0
    while start < len(order):
        size = max(1, elements // (heads * int(lengths[order[start]]) ** 2))
        parts.append(order[start : start + size])
        start += size
    return parts
