"""Plain transcriptions of the formulas, for one sequence and one head at a time, pair by pair.

q, k, v: [t, e] rows of one sequence, oldest first; n: maximum length. Row and column numbers of
position matrices are those of a sequence padded on the left to length n, as the papers number them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DAY = 86_400.0
PERIODS = {"day": DAY, "week": 7 * DAY}


@dataclass(frozen=True)
class Head:
    """A head of one sequence: what a scheme may read beside q, k and v.

    ``times`` are those of keys and ``asked`` those of queries, in seconds: the same without
    ``request_time``.
    """

    n: int
    heads: int
    head: int
    times: list[float]
    asked: list[float]
    items: list[int]
    scheme: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def of(self, scheme: Any, options: dict[str, Any]) -> Head:
        return replace(self, scheme=scheme, options=options)


def lower(t: int, function: Callable[[int, int], Any], future: float = 0.0) -> Tensor:
    """[t, t] a function of query i and key j, where j is not in the future of i."""
    past = [[float(function(i, j)) for j in range(i + 1)] for i in range(t)]
    return torch.tensor([row + [future] * (t - len(row)) for row in past])


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k / sqrt(e) + bias) v over the past."""
    e = q.size(1)
    logits = lower(len(q), lambda i, j: q[i] @ k[j] / math.sqrt(e) + bias[i, j], -torch.inf)
    return logits.softmax(1) @ v


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FPARec paper, equations 1 and 2, with the causal mask."""
    return biased_attention(q, k, v, torch.zeros(len(q), len(q)))


def pointwise_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, n: int) -> Tensor:
    """HSTU, equation 2 with the causal mask, (SiLU(Q K^T + B) / n) V."""
    return lower(len(q), lambda i, j: F.silu(q[i] @ k[j] + bias[i, j]) / n) @ v


def turn(x: Tensor, angles: list[list[float]]) -> Tensor:
    """Every pair (i, i + e/2) of x [t, e] by its own angle (RoFormer, eq. 15; TO-RoPE, eq. 1)."""
    turned = torch.complex(*x.chunk(2, 1)) * torch.exp(1j * torch.tensor(angles))
    return torch.cat((turned.real, turned.imag), 1)


# Angles of the planes of a head for event n at a time, by scheme.


def rope_angles(s: Head, planes: int, n: int, t: float) -> list[float]:
    return [n * s.options["rope_base"] ** (-plane / planes) for plane in range(planes)]


def calendar_angles(s: Head, planes: int, n: int, t: float) -> list[float]:
    """2 pi n t / period, planes dealt out to the parts in turn."""
    periods = [PERIODS[part] for part in s.options["calendar_parts"]]
    number = [divmod(plane, len(periods)) for plane in range(planes)]
    return [2 * math.pi * (t - s.times[0]) / periods[part] * (k + 1) for k, part in number]


def bank(learned: Any, start: list[float]) -> list[float]:
    """Frequencies times scales, from the parameters of a bank; fixed ones from ``start``."""
    values = start
    if learned.learn == "free":
        values = [math.exp(x) for x in learned.log.tolist()]
    elif learned.learn == "ladder":
        values = [math.exp(learned.log_first.item())]
        for raw in learned.raw_step.tolist():
            values.append(values[-1] / math.exp(softplus(raw)))
    if learned.raw_scale is None:
        return values
    return [w * softplus(raw) for w, raw in zip(values, learned.raw_scale.tolist(), strict=True)]


def by_order(s: Head, learned: Any, planes: int, n: int) -> list[float]:
    scale, base = s.options["rope_scale"], s.options["rope_base"]
    return [w * n for w in bank(learned, [scale * base ** (-k / planes) for k in range(planes)])]


def by_time(s: Head, learned: Any, planes: int, t: float) -> list[float]:
    """TO-RoPE, section 3.2: base form, or periods log-spaced between two ends; time in days."""
    base, low, high = (s.options[f"time_{x}"] for x in ("base", "min_period", "max_period"))
    if base is not None:
        start = [s.options["time_scale"] * base ** (-k / planes) for k in range(planes)]
    else:
        power = [k / (planes - 1) if planes > 1 else 0.5 for k in range(planes)]
        start = [2 * math.pi / (low * (high / low) ** x) for x in power]
    return [w * (t - s.times[0]) / DAY for w in bank(learned, start)]


def to_rope_angles(s: Head, planes: int, n: int, t: float) -> list[float]:
    """TO-RoPE, equation 4 with the special cases of 4.1.2; each source has a whole bank."""
    scheme, options, fusion = s.scheme, s.options, s.options["fusion"]
    if fusion == "split_head" and s.head >= s.heads - int(s.heads * options["time_ratio"]):
        return by_time(s, scheme.clock, planes, t)
    if fusion == "split_head":
        return by_order(s, scheme.order, planes, n)
    if fusion == "split_dim":
        timed = int(planes * options["time_ratio"])
        order = by_order(s, scheme.order, planes - timed, n)
        return order + by_time(s, scheme.clock, timed, t)
    gate = torch.full((planes,), options["gate_value"])
    if options["gate"] != "fixed":
        gate = scheme.gate_logit.expand(s.heads, planes)[s.head].sigmoid()
    if options["gate"] == "hard":
        gate = (gate > 0.5).double()
    order, time = by_order(s, scheme.order, planes, n), by_time(s, scheme.clock, planes, t)
    if fusion == "effective":
        return [a + b for a, b in zip(order, time, strict=True)]
    return [(1 - g) * a + g * b for g, a, b in zip(gate.tolist(), order, time, strict=True)]


ANGLES: dict[str, Callable[..., list[float]]] = {
    "rope": rope_angles,
    "time_rope": lambda s, planes, n, t: by_time(s, s.scheme.bank, planes, t),
    "to_rope": to_rope_angles,
    "calendar_rope": calendar_angles,
}


def rote(x: Tensor, times: list[float], options: dict[str, Any]) -> Tensor:
    """The sum of x turned by years, by months and by days since 1970, each with its weight."""
    out, planes = torch.zeros_like(x), x.size(1) // 2
    levels = zip(options["rote_bases"], options["rote_weights"], (365.25, 30.4375, 1), strict=True)
    for base, weight, days in levels:
        turns = [[t / DAY / days * base ** (-p / planes) for p in range(planes)] for t in times]
        out += weight * turn(x, turns)
    return out


# Biases of query i and key j, by scheme.


def alibi_bias(s: Head, q: Tensor, k: Tensor, i: int, j: int) -> float:
    """ALiBi, section 3 and the authors' rule for other numbers of heads."""
    power = 2 ** math.floor(math.log2(s.heads))
    place = (s.head + 1) / power if s.head < power else (s.head - power + 0.5) / power
    return -(2.0 ** (-8.0 * place)) * (i - j)


def t5_bucket(distance: int, buckets: int, farthest: int) -> int:
    """T5's buckets for a causal decoder."""
    exact = buckets // 2
    if distance < exact:
        return distance
    grown = math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact)
    return min(exact + int(grown), buckets - 1)


def t5_bias(s: Head, q: Tensor, k: Tensor, i: int, j: int) -> float:
    bucket = t5_bucket(i - j, s.options["t5_buckets"], s.options["t5_max_distance"])
    return s.scheme.weight[s.head, bucket]


def kerple_bias(s: Head, q: Tensor, k: Tensor, i: int, j: int) -> float:
    r1, raw = softplus(s.scheme.raw_r1[s.head].item()), s.scheme.raw_r2[s.head].item()
    if s.options["kerple_kind"] == "log":
        return -r1 * math.log(1 + softplus(raw) * (i - j))
    return -r1 * (i - j) ** (2 / (1 + math.exp(-raw)))


def log_bucket(seconds: float, buckets: int) -> int:
    """HSTU's public code: floor(ln(max(1, seconds)) / 0.301), the last bucket takes the rest."""
    return min(math.floor(math.log(max(1.0, seconds)) / 0.301), buckets - 1)


def hstu_bias(s: Head, q: Tensor, k: Tensor, i: int, j: int) -> float:
    """HSTU, relative bias of distance and time."""
    bucket = log_bucket(s.asked[i] - s.times[j], s.options["hstu_time_buckets"])
    return s.scheme.distance[i - j] + s.scheme.time[bucket]


def decay_bias(s: Head, q: Tensor, k: Tensor, i: int, j: int) -> float:
    a, reach = s.scheme.strength[s.head].item(), math.exp(s.scheme.log_reach[s.head].item())
    b = softplus(s.scheme.raw_power[s.head].item())
    d = min(max(s.asked[i] - s.times[j], 1e-9) / reach, 1e30)
    return a * (2 ** -(d**b) if s.options["decay_kind"] == "exponential_power" else (1 + d) ** -b)


def cape_bias(s: Head, q: Tensor, k: Tensor, i: int, j: int) -> float:
    """CAPE: gates of dissimilarity summed from j to i, position clamped, table interpolated."""
    table = s.scheme.weight
    p = sum(1 - torch.sigmoid(q[i] @ k[r]).item() for r in range(j, i + 1))
    p = min(p, len(table) - 1)
    below, above = math.floor(p), math.ceil(p)
    return (1 - (p - below)) * (q[i] @ table[below]) + (p - below) * (q[i] @ table[above])


def difsr_bias(s: Head, q: Tensor, k: Tensor, i: int, j: int) -> float:
    """DIF-SR: logits of positions, from the newest, and of every attribute, added up."""

    def vectors(event: int) -> list[Tensor]:
        found = [s.scheme.position[s.n - len(q) + event]]
        for number, table in enumerate(s.scheme.tables):
            tokens = getattr(s.scheme, f"tokens_{number}")[s.items[event]]
            known = table[tokens[tokens > 0]]
            found.append(known.mean(0) if len(known) else torch.zeros(table.size(1)))
        return found

    bias = 0.0
    for number, (left, right) in enumerate(zip(vectors(i), vectors(j), strict=True)):
        query = s.scheme.queries[number](left).chunk(s.heads)[s.head]
        key = s.scheme.keys[number](right).chunk(s.heads)[s.head]
        bias += query @ key / math.sqrt(len(key))
    return bias


BIASES: dict[str, Callable[..., float]] = {
    "alibi": alibi_bias,
    "t5": t5_bias,
    "kerple": kerple_bias,
    "hstu": hstu_bias,
    "time_decay": decay_bias,
    "cape": cape_bias,
    "difsr": difsr_bias,
}


def factor(kind: str, learned: Any, n: int) -> Tensor:
    """[n, n] a factor of the kernel, from its parameters (equations 10, 11)."""
    if kind == "identity":
        return torch.eye(n)
    weight = learned.weight
    if kind == "full":  # row by row
        return lower(n, lambda i, j: weight[i * (i + 1) // 2 + j])
    return lower(n, lambda i, j: weight[i - j] if i - j < len(weight) else 0.0)


def fill_places(
    schemes: dict[str, Any], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, s: Head
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """R q, U^T R k, L v and B of schemes by their names."""
    t, planes = len(q), q.size(1) // 2
    for name in schemes.keys() & ANGLES.keys():
        own = s.of(schemes[name], options)
        q, k = (
            turn(x, [ANGLES[name](own, planes, n, at) for n, at in enumerate(times)])
            for x, times in ((q, s.asked), (k, s.times))
        )
    if "rote" in schemes:
        q, k = rote(q, s.asked, options), rote(k, s.times, options)
    if kernel := schemes.get("kernel"):
        k = factor(options["kernel_u"], kernel.U, s.n)[-t:, -t:] @ k
        v = factor(options["kernel_l"], kernel.L, s.n)[-t:, -t:] @ v
    bias = torch.zeros(t, t)
    for name in schemes.keys() & BIASES.keys():
        own = s.of(schemes[name], options)
        bias += lower(t, lambda i, j, name=name, own=own: BIASES[name](own, q, k, i, j))
    return q, k, v, bias


# What replaces attention, by scheme.


def positional(v: Tensor, a: Tensor, whole: bool = False) -> Tensor:
    """sum_j a_ij v_j, divided by the sum of a_ij over the real past, or over the whole row."""
    a = a[-len(v) :]
    past = a[:, -len(v) :].tril()
    return past / (a if whole else past).sum(1, keepdim=True) @ v


def learned_positional(s: Head, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FPARec paper, equation 6 (7: R = R1 R2^T), with the mask before or after the softmax."""
    x = s.scheme
    r = x.R[s.head] if hasattr(x, "R") else x.R1[s.head] @ x.R2[s.head].T
    after = s.options["positional_mask"] == "after_softmax"
    return positional(v, (r / math.sqrt(v.size(1))).exp(), after)


def fixed_positional(pattern: Callable[[int, int], float]) -> Callable[..., Tensor]:
    """FPARec paper, equations 12 to 14; i and j count from 1."""
    return lambda s, q, k, v: positional(v, lower(s.n, lambda i, j: pattern(i + 1, j + 1)))


def linear_attention(s: Head | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, equations 8 and 9 in causal form, phi(x) = elu(x) + 1."""
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    return positional(v, lower(len(q), lambda i, j: q[i] @ k[j]))


def token_mixing(s: Head, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """W2 gelu(W1 X) with both matrices lower triangular."""
    t, pad = len(v), s.n - len(v)
    w1, w2 = (lower(t, lambda i, j, w=w: w[pad + i, pad + j]) for w in (s.scheme.W1, s.scheme.W2))
    return w2 @ F.gelu(w1 @ v)


def tisas(s: Head, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """TiSASRec: r_ij in units of the shortest gap up to i; positions count from the newest."""
    t, e = v.shape
    names = ("time_key", "time_value", "position_key", "position_value")
    tables = (getattr(s.scheme, name).chunk(s.heads, 1)[s.head] for name in names)
    r_key, r_value, p_key, p_value = tables
    p_key, p_value, out = p_key[s.n - t :], p_value[s.n - t :], []
    for i in range(t):
        gaps = [b - a for a, b in zip(s.times, s.times[1 : i + 1], strict=False) if b > a]
        unit, longest = min(gaps, default=1.0), s.options["tisas_intervals"]
        past = range(i + 1)
        r = [min(math.floor((s.asked[i] - s.times[j]) / unit), longest) for j in past]
        logits = (k[past] + r_key[r] + p_key[past]) @ q[i] / math.sqrt(e)
        out.append(logits.softmax(0) @ (v[past] + r_value[r] + p_value[past]))
    return torch.stack(out)


def fuxi_linear(s: Head, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention of content, products of learned rows, waves of time that fall; term by term."""
    columns, p, e = s.scheme.sizes[2], s.scheme.positions, q.size(1)
    rate = sum(softplus(x) for x in s.scheme.raw_decay.tolist()[: s.head + 1])
    alpha, beta = s.scheme.share.tolist()
    pairs, out = -(-columns // 2), torch.zeros_like(v)
    shortest, longest = (math.log(s.options[f"time_{x}_period"] * DAY) for x in ("min", "max"))
    step = (longest - shortest) / max(s.heads * pairs - 1, 1)
    if s.heads * pairs == 1:
        shortest = (shortest + longest) / 2

    def wave(column: int, seconds: float) -> float:
        phase, pair = divmod(column, pairs)
        angle = 2 * math.pi * seconds / math.exp(shortest + step * (s.head * pairs + pair))
        return 2.0 ** max(-angle, -1e3) * (math.sin(angle) if phase else math.cos(angle))

    for i in range(len(q)):
        for j in range(i + 1):
            content, order, time = v[j].split(s.scheme.sizes)
            kept = F.silu(q[i]) @ F.silu(k[j]) * math.exp(-rate * (i - j)) / math.sqrt(e)
            near = alpha * (p[i] @ p[j]) * 2 / p.size(1) + beta * (i == j)
            waves = torch.tensor([wave(x, s.asked[i] - s.times[j]) for x in range(columns)])
            out[i] += torch.cat((kept * F.silu(content), near * order, waves * time))
    return out


REPLACED: dict[str, Callable[..., Tensor]] = {
    "parec": learned_positional,
    "fparec": learned_positional,
    "average": fixed_positional(lambda i, j: 1.0),
    "linear_annealing": fixed_positional(lambda i, j: float(j)),
    "exponential_annealing": fixed_positional(lambda i, j: math.exp(j - i)),
    "linear_attention": linear_attention,
    "token_mixing": token_mixing,
    "tisas": tisas,
    "fuxi_linear": fuxi_linear,
}


def attention(
    schemes: dict[str, Any], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, s: Head
) -> Tensor:
    """softmax(M + B((R q) (U^T R k)^T)) L v, or what takes its place; one head, [t, e]."""
    for name in schemes.keys() & REPLACED.keys():
        return REPLACED[name](s.of(schemes[name], options), q, k, v)
    return biased_attention(*fill_places(schemes, options, q, k, v, s))


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """Row by row; x [..., d]."""
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def bucket_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, buckets: Tensor, size_x: int, size_y: int
) -> tuple[Tensor, list[int]]:
    """Mezentsev et al. 2024 for given directions; also which positions fell in a bucket."""
    losses: dict[int, list[Tensor]] = {}
    for bucket in buckets:
        positions = (hidden @ bucket).argsort(descending=True)[:size_x].tolist()
        items = (1 + (weight[1:] @ bucket).argsort(descending=True)[:size_y]).tolist()
        for i in positions:
            target = int(targets[i])
            others = [torch.exp(hidden[i] @ weight[v]) for v in items if v != target]
            own = torch.exp(hidden[i] @ weight[target])
            losses.setdefault(i, []).append(torch.log(sum(others, start=own)) - torch.log(own))
    largest = [max(found, key=Tensor.item) for found in losses.values()]
    return sum(largest) / len(largest), sorted(losses)


def sampled_loss(
    loss: Any, hidden: Tensor, weight: Tensor, targets: Tensor, negatives: list[list[int]]
) -> Tensor:
    """The mean of positions, each with negatives of its own, by the options of a SampledLoss.

    ``refined`` is that of arXiv 2507.09331: of the negatives, with the weight 1 - P(t) that has no
    gradient; so its gradient is compared, not its value.
    """
    kind, correction, t, q = loss.loss_type, loss.logq_correction, loss.gbce_t, loss.log_q.exp()
    items = len(weight) - 1
    total = torch.zeros((), dtype=hidden.dtype)
    for h, target, ids in zip(hidden, targets.tolist(), negatives, strict=True):
        n, score = len(ids), h @ weight[target]
        others = [(h @ weight[j], q[j]) for j in ids if j != target]
        if kind in ("BCE", "gBCE"):
            alpha = n / (items - 1)
            beta = alpha * (t * (1 - 1 / alpha) + 1 / alpha)
            negative = sum(torch.log(1 - torch.sigmoid(z)) for z, _ in others) / (1 - q[target])
            total = total - (beta * torch.log(torch.sigmoid(score)) + negative) / (n + 1)
        elif correction == "refined":
            negative = sum(torch.exp(z) / p for z, p in others)
            estimate = negative / (n if kind != "in_batch" else len(hidden) - 1)
            unsure = 1 - torch.exp(score) / (torch.exp(score) + estimate)
            total = total + unsure.detach() * -torch.log(torch.exp(score) / negative)
        else:
            own = q[target] if correction == "standard" else 1.0
            shifted = torch.exp(score) / own
            rest = sum(torch.exp(z) / (p if correction == "standard" else 1) for z, p in others)
            total = total - torch.log(shifted / (shifted + rest))
    return total / len(hidden)


def posterior(
    hidden: Tensor,
    weight: Tensor,
    futures: list[list[int]],
    betas: list[float],
    counts: list[int],
    prior_weight: float,
) -> Tensor:
    """Equations 14, 16 and 17; ``futures`` holds the known items after each position."""
    alpha = torch.tensor(counts[1:], dtype=hidden.dtype) + 1
    prior, log_q = alpha / alpha.sum(), (hidden @ weight[1:].T).log_softmax(1)
    total = prior_weight * (prior * (prior.log() - log_q)).sum()
    for row, future in zip(log_q, futures, strict=True):
        total = total - sum(beta * row[item - 1] for beta, item in zip(betas, future, strict=False))
    return total / len(hidden)
