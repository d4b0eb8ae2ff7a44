"""AttrFormer's equations in plain loops, from the relations that are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recbole_pos.relations.search import Edges


def degrees(edges: Edges, m: int) -> list[float]:
    """The relations of one attribute that each event reads; at least one (section 3.1.2)."""
    total = [0.0] * m
    for reader, value in zip(edges.reader, edges.value, strict=True):
        total[reader] += value
    return [max(t, 1.0) for t in total]


def augmented_heads(heads: list[Edges], mix: Tensor, value: Tensor) -> Tensor:
    """Equations 6 to 8: value [m, M', e'] to H^RAH [m, M', e'], heads one by one."""
    m, n_heads, _ = value.shape
    out = torch.zeros_like(value)
    for attribute, edges in enumerate(heads):
        degree = degrees(edges, m)
        for i, j, r in zip(edges.reader, edges.source, edges.value, strict=True):
            scaled = r / math.sqrt(degree[i] * degree[j])
            for head in range(n_heads):  # the mixture of equation 8
                out[i, head] += mix[attribute, head] * scaled * value[j, head]
    return out


def smoothed(edges: Edges, own: list[float], unknown: float, x: Tensor) -> Tensor:
    """Section 3.1.3: Norm(R^U) Flatten(H), with what each user is to itself (0: no attribute)."""
    relation = {(i, i): value or unknown for i, value in enumerate(own)}
    relation |= {(i, j): r for i, j, r in zip(edges.reader, edges.source, edges.value, strict=True)}
    degree, out = [0.0] * len(x), torch.zeros_like(x)
    for (i, _), r in relation.items():
        degree[i] += r
    degree = [max(total, 1.0) for total in degree]
    for (i, j), r in relation.items():
        out[i] += r / math.sqrt(degree[i] * degree[j]) * x[j]
    return out


def posterior(
    hidden: Tensor,
    weight: Tensor,
    futures: list[list[int]],
    betas: list[float],
    counts: list[int],
    prior_weight: float,
) -> Tensor:
    """Equations 14, 16 and 17; ``futures`` holds the known items after each position."""
    items = range(1, len(weight))
    alpha = [counts[v] + 1 for v in items]
    prior = [a / sum(alpha) for a in alpha]
    total = hidden.new_zeros(())
    for h, future in zip(hidden, futures, strict=True):
        scores = [h @ weight[v] for v in items]
        partition = sum(torch.exp(s) for s in scores)
        q = [torch.exp(s) / partition for s in scores]
        kl = sum(p * (math.log(p) - torch.log(x)) for p, x in zip(prior, q, strict=True))
        total = total + prior_weight * kl
        for beta, item in zip(betas, future, strict=False):
            total = total - beta * torch.log(q[item - 1])
    return total / len(hidden)
