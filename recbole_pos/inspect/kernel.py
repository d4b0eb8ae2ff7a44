"""What a positional kernel has learned, and where attention looks.

Figures 1 and 2 of the kernel attention paper (Nabiev and Frolov).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from recbole_pos.inspect.attention import attention_layers, layer_inputs, weighs_content
from recbole_pos.inspect.distance import weight_batches
from recbole_pos.layers.chunks import chunk_elements
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.kernel import PositionalKernel


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
    def told(self) -> str:
        """What is shown of the histories, and what its rows sum to."""
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
        None if attention is replaced, see ``positional_weights`` in ``inspect/attention.py``.
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
