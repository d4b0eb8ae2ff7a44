"""What positional attention has learned (FPARec paper, section 4.7 and Figure 3)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from recbole_pos.position.positional_attention import PositionalAttention


@torch.no_grad()
def positional_weights(model: nn.Module) -> list[np.ndarray]:
    """Attention weights of every layer whose attention depends on positions alone.

    Args:
        model: a trained model.

    Returns:
        One [h, n, n] array per such layer, in order; each row sums to one (with
        ``positional_mask: after_softmax``, to what the mask leaves). Empty for other models.
    """
    layers = [m for m in model.modules() if isinstance(m, PositionalAttention)]
    n = getattr(model, "max_seq_length", 0)
    found = []
    for layer in layers:
        weights = layer.weights(n)
        if layer.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        found.append(weights.cpu().numpy())
    return found
