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
from recbole_pos.layers.hooks import AttentionPosition, replaces_attention, weighs_pairs
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.kernel import PositionalKernel
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
    """Return the scheme that stands in for the layer's attention, or None."""
    schemes = layer.position.parts().values()
    return next((s for s in schemes if replaces_attention(type(s))), None)


def weighs_content(layer: MultiHeadAttention) -> bool:
    """Return whether ``layer.weights`` has them: of dot products, or of a scheme with
    ``pair_weights``."""
    scheme = replacement(layer)
    return scheme is None or weighs_pairs(type(scheme))


def has_weights(layer: MultiHeadAttention) -> bool:
    """Return whether there are attention weights: by content, or of positions alone."""
    return weighs_content(layer) or isinstance(replacement(layer), PositionalAttention)


@torch.no_grad()
def layer_inputs(
    model: PosRecommender, layers: list[MultiHeadAttention], rows: Interaction
) -> tuple[list[Tensor], SequenceContext]:
    """Return what every layer is given when the model encodes the histories of RecBole's rows.

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
    """Return weights of one layer that ``has_weights``: [b, h or 1, t, t] aligned at the start.

    As the layer makes them: rows of HSTU's blocks or of ``positional_mask: after_softmax`` do not
    sum to one, nor do those of weights by position, which are not divided by their sum here.

    Args:
        layer: layer of a model.
        x: [m, d] what the layer is given, see :func:`layer_inputs`.
        ctx: context of the batch.
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


@torch.no_grad()
def kernel_factors(model: nn.Module) -> dict[str, np.ndarray]:
    """The factors of every layer, [n, n] each: ``U, layer 1`` upper triangular, ``L, ...`` lower.

    A factor that all layers share stands once, as ``L, all layers``. Empty without a kernel.
    """
    kernels = [m for m in model.modules() if isinstance(m, PositionalKernel)]
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
        sums: [h, newest] of each layer: what a row sums to with the events that are not shown.
        histories: how many were averaged.
        longest: how many events the longest of them has.
    """

    weights: list[np.ndarray]
    sums: list[np.ndarray]
    histories: int
    longest: int

    @property
    def caption(self) -> str:
        """Which histories are shown, and what rows sum to."""
        newest = self.weights[0].shape[-1]
        shown = [layer.sum(-1) for layer in self.weights]
        if self.longest > newest:
            text = f"newest {newest} of up to {self.longest} events of {self.histories:,} histories"
        else:
            text = f"{self.histories:,} histories of {newest} events"
        if not all(np.allclose(row, 1, atol=1e-3) for row in self.sums):
            return f"{text}; rows of this attention do not sum to one"
        if all(np.allclose(row, 1, atol=1e-3) for row in shown):
            return f"{text}; every row sums to one"
        rows = np.stack(shown)
        return (
            f"{text}; rows sum to {rows.min():.2f} to {rows.max():.2f}, the rest is on older events"
        )


@torch.no_grad()
def attention_maps(model: PosRecommender, loader: Any, newest: int = 30) -> AttentionMaps | None:
    """Attention weights of every layer that weighs content, averaged over histories.

    Args:
        model: a trained plugin model.
        loader: RecBole's loader of validation or test rows.
        newest: how many of the newest events to show; histories with fewer are left out, and if
            there are none the longest is taken.

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
    # [newest, newest + 1, h], the last column what a row sums to
    totals: list[Any] = [0.0 for _ in layers]
    for part in weight_batches(lengths[chosen], heads, room):
        rows = loader.collate_fn(chosen[part].tolist())[0]
        inputs, ctx = layer_inputs(model, layers, rows.to(model.device))
        end = ctx.lengths[:, None] - newest + torch.arange(newest, device=ctx.lengths.device)
        row = torch.arange(len(end), device=end.device)[:, None, None]
        for number, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
            weights = layer.weights(x, ctx).transpose(1, 2)  # [b, t, h, t], from the start
            cut = weights[row, end[:, :, None], :, end[:, None, :]]  # [b, newest, newest, h]
            whole = weights.sum(-1)[row[..., 0], end]  # [b, newest, h]
            totals[number] += torch.cat((cut.sum(0), whole.sum(0)[:, None]), 1)
    means = [(total / len(chosen)).permute(2, 0, 1).cpu().numpy() for total in totals]
    return AttentionMaps(
        [mean[..., :-1] for mean in means],
        [mean[..., -1] for mean in means],
        len(chosen),
        int(lengths[chosen].max()),
    )


def weight_batches(lengths: np.ndarray, heads: int, elements: int) -> list[np.ndarray]:
    """Histories of similar length together, as many as have ``elements`` weights in a layer."""
    order, parts, start = np.argsort(-lengths, kind="stable"), [], 0
    while start < len(order):
        size = max(1, elements // (heads * int(lengths[order[start]]) ** 2))
        parts.append(order[start : start + size])
        start += size
    return parts
