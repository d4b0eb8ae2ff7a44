"""Dropout whose mask is cheap to draw on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability must be in [0, 1), found {p}")
        self.p = p
        # a byte below the threshold drops an element; above 0 at least one value of a byte does
        self.threshold = min(max(round(p * 256), int(p > 0)), 255)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with elements zeroed in training mode, x itself in evaluation mode."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        return x * self.draw_mask(x)

    def draw_mask(self, x: Tensor) -> Tensor:
        """Draw a mask like x: 0 for dropped elements, 1 / (1 - p) for the others."""
        n_words = (x.numel() + 7) // 8  # a random byte for each element
        words = torch.empty(n_words, dtype=torch.int64).random_(-(2**63), None)
        keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.threshold
        return keep.to(x.dtype).mul_(256 / (256 - self.threshold))

    def extra_repr(self) -> str:
        """Return the probability, as ``print(model)`` shows it."""
        return f"p={self.p}"
