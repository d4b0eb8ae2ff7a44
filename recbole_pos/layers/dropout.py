"""Dropout whose mask is cheap to draw on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        self.p = p
        # a byte below the threshold drops an element; above 0 at least one value of a byte does
        self.threshold = min(max(round(p * 256), int(p > 0)), 255)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with elements zeroed in training mode, x itself in evaluation mode."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        return x * self.draw_kept(x.shape).to(x.dtype).mul_(self.scale)

    @property
    def scale(self) -> float:
        """The factor of elements that are kept."""
        return 256 / (256 - self.threshold)

    def draw_kept(self, shape: Sequence[int]) -> Tensor:
        """Draw which elements of a tensor on CPU are kept, bool."""
        num_elements = math.prod(shape)  # a random byte for each
        words = torch.empty((num_elements + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        return words.view(torch.uint8)[:num_elements].view(shape) >= self.threshold

    def extra_repr(self) -> str:
        """Return the probability, as ``print(model)`` shows it."""
        return f"p={self.p}"
