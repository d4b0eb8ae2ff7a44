"""Plain, loop-level transcriptions of the formulas, for one sequence at a time.

x: [t, d] rows of one sequence, oldest first; n: maximum length. Row and column numbers of position
matrices are those of a sequence padded on the left to length n, as the papers number them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FPARec paper, equations 1 and 2, with the causal mask; one head."""
    out = torch.zeros_like(v)
    for i in range(len(q)):
        sim = [math.exp(float(q[i] @ k[j]) / math.sqrt(q.size(1))) for j in range(i + 1)]
        for j in range(i + 1):
            out[i] += sim[j] / sum(sim) * v[j]
    return out


def positional_attention(weight: list[list[float]], v: Tensor, n: int) -> Tensor:
    """sum_j a_ij v_j / sum_j a_ij over real past events; ``weight`` is [n][n], unnormalised."""
    t = len(v)
    pad = n - t
    out = torch.zeros_like(v)
    for i in range(t):
        total = sum(weight[pad + i][pad + j] for j in range(i + 1))
        for j in range(i + 1):
            out[i] += weight[pad + i][pad + j] / total * v[j]
    return out


def masked_after_softmax(r: Tensor, v: Tensor, n: int, d: int) -> Tensor:
    """FPARec paper, equation 6 to the letter: Mask(softmax(R / sqrt(d))) V."""
    r, pad = r.detach(), n - len(v)
    out = torch.zeros_like(v)
    for i in range(len(v)):
        row = [math.exp(float(r[pad + i, j]) / math.sqrt(d)) for j in range(n)]
        for j in range(i + 1):
            out[i] += row[pad + j] / sum(row) * v[j]
    return out


def learned_weights(r: Tensor, d: int) -> list[list[float]]:
    """exp(R_ij / sqrt(d)), the softmax of equation 6 before it is normalised."""
    r, n = r.detach(), len(r)
    return [[math.exp(float(r[i, j]) / math.sqrt(d)) for j in range(n)] for i in range(n)]


def fixed_weights(name: str, n: int) -> list[list[float]]:
    """Equations 12 to 14; i and j count from 1."""
    pattern = {
        "average": lambda i, j: 1.0,
        "linear_annealing": lambda i, j: float(j),
        "exponential_annealing": lambda i, j: math.exp(j - i),
    }[name]
    return [[pattern(i, j) if i >= j else 0.0 for j in range(1, n + 1)] for i in range(1, n + 1)]


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, equations 8 and 9 in causal form, phi(x) = elu(x) + 1."""

    def phi(x: Tensor) -> Tensor:
        return torch.tensor(
            [float(e) + 1 if e > 0 else math.exp(float(e)) for e in x], dtype=x.dtype
        )

    out = torch.zeros_like(v)
    for i in range(len(q)):
        similarity = [float(phi(q[i]) @ phi(k[j])) for j in range(i + 1)]
        for j in range(i + 1):
            out[i] += similarity[j] / sum(similarity) * v[j]
    return out


def token_mixing(w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    """W2 gelu(W1 X) with both matrices lower triangular, channel by channel."""
    n, (t, d) = len(w1), x.shape
    pad = n - t
    out = torch.zeros_like(x)
    for c in range(d):
        hidden = []
        for i in range(t):
            z = sum(float(w1[pad + i, pad + j] * x[j, c]) for j in range(i + 1))
            hidden.append(z * 0.5 * (1 + math.erf(z / math.sqrt(2))))
        for i in range(t):
            out[i, c] = sum(float(w2[pad + i, pad + j]) * hidden[j] for j in range(i + 1))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Row by row."""
    rows = [(r - r.mean()) / torch.sqrt(((r - r.mean()) ** 2).mean() + eps) for r in x]
    return torch.stack(rows) * weight + bias


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """FPARec paper, equation 11: candidates are items 1.., item 0 is padding."""
    total = hidden.new_zeros(())
    for h, target in zip(hidden, targets, strict=True):
        scores = [h @ weight[v] for v in range(1, len(weight))]
        partition = sum(torch.exp(s) for s in scores)
        total = total - torch.log(torch.exp(h @ weight[int(target)]) / partition)
    return total / len(hidden)


def bucket_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, buckets: Tensor, size_x: int, size_y: int
) -> tuple[Tensor, list[int]]:
    """Mezentsev et al. 2024 for given directions; also which positions fell in a bucket."""
    losses: dict[int, list[Tensor]] = {}
    for bucket in buckets:
        by_position = [-(bucket @ h).item() for h in hidden]
        by_item = [-(bucket @ w).item() for w in weight]
        positions = sorted(range(len(hidden)), key=by_position.__getitem__)[:size_x]
        items = sorted(range(1, len(weight)), key=by_item.__getitem__)[:size_y]
        for i in positions:
            target = int(targets[i])
            others = [torch.exp(hidden[i] @ weight[v]) for v in items if v != target]
            own = torch.exp(hidden[i] @ weight[target])
            losses.setdefault(i, []).append(torch.log(sum(others, start=own)) - torch.log(own))
    largest = [max(found, key=Tensor.item) for found in losses.values()]
    return sum(largest) / len(largest), sorted(losses)


def kernel_attention(q: Tensor, k: Tensor, v: Tensor, u: Tensor, low: Tensor) -> Tensor:
    """Kernel attention paper, equations 9 to 11; u and low are the last t rows and columns."""
    out = torch.zeros_like(v)
    t, e = q.shape
    z = [sum(u[s, j] * k[s] for s in range(j + 1)) for j in range(t)]  # eq. 10
    y = [sum(low[j, s] * v[s] for s in range(j + 1)) for j in range(t)]  # eq. 11
    for i in range(t):
        sim = [math.exp(float(q[i] @ z[j]) / math.sqrt(e)) for j in range(i + 1)]
        for j in range(i + 1):
            out[i] += sim[j] / sum(sim) * y[j]
    return out


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: list[list[float]]) -> Tensor:
    """softmax(q k / sqrt(e) + bias) v over the past; one head."""
    out = torch.zeros_like(v)
    for i in range(len(q)):
        sim = [
            math.exp(float(q[i] @ k[j]) / math.sqrt(q.size(1)) + bias[i][j]) for j in range(i + 1)
        ]
        for j in range(i + 1):
            out[i] += sim[j] / sum(sim) * v[j]
    return out


def rotate(x: Tensor, base: float) -> Tensor:
    """RoFormer, equation 15, with the pairs (i, i + e/2)."""
    t, e = x.shape
    out = torch.zeros_like(x)
    for p in range(t):
        for pair in range(e // 2):
            angle = p * base ** (-2 * pair / e)
            a, b = float(x[p, pair]), float(x[p, pair + e // 2])
            out[p, pair] = a * math.cos(angle) - b * math.sin(angle)
            out[p, pair + e // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def turn(x: Tensor, angles: list[list[float]]) -> Tensor:
    """Every pair (i, i + e/2) of x [t, e] by its own angle (TO-RoPE paper, equation 1)."""
    out = torch.zeros_like(x)
    half = x.size(1) // 2
    for p, row in enumerate(angles):
        for pair, angle in enumerate(row):
            a, b = float(x[p, pair]), float(x[p, pair + half])
            out[p, pair] = a * math.cos(angle) - b * math.sin(angle)
            out[p, pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def alibi_slope(head: int, heads: int) -> float:
    """ALiBi, section 3 and the authors' rule for other numbers of heads; heads count from 0."""
    lower = 1
    while lower * 2 <= heads:
        lower *= 2
    if head < lower:
        return 2.0 ** (-8.0 * (head + 1) / lower)
    return 2.0 ** (-8.0 * (2 * (head - lower) + 1) / (2 * lower))


def t5_bucket(distance: int, buckets: int, farthest: int) -> int:
    """T5's buckets for a causal decoder."""
    exact = buckets // 2
    if distance < exact:
        return distance
    grown = math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact)
    return min(exact + int(grown), buckets - 1)


def cape_bias(q: Tensor, k: Tensor, table: Tensor) -> list[list[float]]:
    """CAPE: gates of dissimilarity summed from j to i, position clamped, table interpolated."""
    bias = []
    for i in range(len(q)):
        row = []
        for j in range(i + 1):
            gates = [1 - 1 / (1 + math.exp(-float(q[i] @ k[s]))) for s in range(j, i + 1)]
            p = min(sum(gates), len(table) - 1)
            lower, upper = math.floor(p), math.ceil(p)
            row.append(
                float(q[i] @ ((1 - (p - lower)) * table[lower] + (p - lower) * table[upper]))
            )
        bias.append(row)
    return bias


def log_bucket(seconds: float, buckets: int) -> int:
    """HSTU's public code: floor(ln(max(1, seconds)) / 0.301), the last bucket takes the rest."""
    return min(math.floor(math.log(max(1.0, seconds)) / 0.301), buckets - 1)


def time_embedding(x: Tensor, times: list[float], table: Tensor, since: str) -> Tensor:
    """x + P[bucket] with the seconds since the first or the previous event."""
    out = []
    for i in range(len(x)):
        before = times[0] if since == "first" else times[max(i - 1, 0)]
        out.append(x[i] + table[log_bucket(times[i] - before, len(table))])
    return torch.stack(out)


def hstu_bias(times: list[float], by_distance: Tensor, by_time: Tensor) -> list[list[float]]:
    """HSTU, relative bias of distance and time, with the query's own time."""
    by_distance, by_time = by_distance.tolist(), by_time.tolist()
    return [
        [
            by_distance[i - j] + by_time[log_bucket(times[i] - times[j], len(by_time))]
            for j in range(i + 1)
        ]
        for i in range(len(times))
    ]


def silu(x: float) -> float:
    """x sigmoid(x)."""
    return x / (1 + math.exp(-x))


def pointwise_attention(q: Tensor, k: Tensor, v: Tensor, bias: list[list[float]], n: int) -> Tensor:
    """HSTU, equation 2 with the causal mask, (SiLU(Q K^T + B) / n) V; one head."""
    out = torch.zeros_like(v)
    for i in range(len(q)):
        for j in range(i + 1):
            out[i] += silu(float(q[i] @ k[j]) + bias[i][j]) / n * v[j]
    return out
