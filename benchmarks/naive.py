"""A naive all-positions transformer: what one writes first, kept as a fixed reference for speed.

Every window is padded to the full length; attention materialises scores and mask; logits are
computed at every position, padding included; dropout, Adam and cross-entropy are torch's defaults.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.data.windows import Windows


class NaiveLayer(nn.Module):
    """Pre-norm block with two heads."""

    def __init__(self, d: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.inner, self.outer = nn.Linear(d, inner), nn.Linear(inner, d)
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, n, d = x.shape
        h = self.norm_1(x)
        q, k, v = (
            p(h).view(b, n, self.heads, -1).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(2, 3) / math.sqrt(d // self.heads) + mask).softmax(-1)
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, n, d)))
        return x + self.dropout(self.outer(F.gelu(self.inner(self.norm_2(x)))))


class NaiveSASRec(nn.Module):
    """Item and position embeddings, two blocks, logits for every position."""

    def __init__(self, items: int, length: int, d: int = 64, dropout: float = 0.2) -> None:
        super().__init__()
        self.item, self.position = nn.Embedding(items, d, padding_idx=0), nn.Embedding(length, d)
        self.layers = nn.ModuleList(NaiveLayer(d, 2, 256, dropout) for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(d), nn.Dropout(dropout)

    def forward(self, items: Tensor) -> Tensor:
        n = items.size(1)
        future = torch.full((n, n), -1e9).triu(1)
        padding = (items == 0)[:, None, None, :] * -1e9
        x = self.dropout(self.item(items) + self.position.weight[:n])
        for layer in self.layers:
            x = layer(x, future + padding)
        return self.norm(x) @ self.item.weight.t()


def windows_as_rows(
    log_items: Tensor, windows: Windows, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets [windows, length], padded with 0 on the right."""
    items = log_items.numpy()
    column = np.arange(length)
    index = windows.start[:, None] + column
    is_real = index < windows.end[:, None]
    index = np.where(is_real, index, 0)
    return items[index] * is_real, items[np.minimum(index + 1, len(items) - 1)] * is_real


def train_batches(
    model: NaiveSASRec, rows: tuple[np.ndarray, np.ndarray], batch_size: int, batches: int
) -> int:
    """Train so many batches of an epoch, and return the number of real targets."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = np.random.default_rng(0).permutation(len(rows[0]))
    targets = 0
    for start in range(0, len(order), batch_size)[:batches]:
        indices = order[start : start + batch_size]
        x, y = (torch.from_numpy(array[indices]) for array in rows)
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        targets += int((y > 0).sum())
    return targets
