"""Plain, loop-level transcriptions of the formulas, for one sequence and one head at a time.

q, k, v: [t, e] rows of one sequence, oldest first; n: maximum length. Row and column numbers of
position matrices are those of a sequence padded on the left to length n, as the papers number them.
``times`` are those of keys and ``asked`` those of queries, in seconds: the same without
``request_time``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DAY = 86_400.0
PERIODS = {"day": DAY, "week": 7 * DAY}


@dataclass
class Sequence:
    """What a scheme may know of one sequence, for one of its heads."""

    n: int
    heads: int
    head: int
    times: list[float]
    asked: list[float]
    items: list[int]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def softmax(row: list[float]) -> list[float]:
    return [math.exp(x) / sum(math.exp(y) for y in row) for x in row]


def dot(a: Tensor, b: Tensor) -> float:
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def mix(weights: list[list[float]], v: Tensor) -> Tensor:
    """sum_j weights[i][j] v_j."""
    out = torch.zeros_like(v)
    for i, row in enumerate(weights):
        for j, weight in enumerate(row):
            out[i] += weight * v[j]
    return out


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: list[list[float]]) -> Tensor:
    """softmax(q k / sqrt(e) + bias) v over the past."""
    scale = math.sqrt(q.size(1))
    logits = [[dot(q[i], k[j]) / scale + bias[i][j] for j in range(i + 1)] for i in range(len(q))]
    return mix([softmax(row) for row in logits], v)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FPARec paper, equations 1 and 2, with the causal mask."""
    return biased_attention(q, k, v, [[0.0] * len(q)] * len(q))


def pointwise_attention(q: Tensor, k: Tensor, v: Tensor, bias: list[list[float]], n: int) -> Tensor:
    """HSTU, equation 2 with the causal mask, (SiLU(Q K^T + B) / n) V."""
    return mix(
        [[silu(dot(q[i], k[j]) + bias[i][j]) / n for j in range(i + 1)] for i in range(len(q))], v
    )


def turn(x: Tensor, angles: list[list[float]]) -> Tensor:
    """Every pair (i, i + e/2) of x [t, e] by its own angle (RoFormer, eq. 15; TO-RoPE, eq. 1)."""
    out, half = torch.zeros_like(x), x.size(1) // 2
    for p, row in enumerate(angles):
        for pair, angle in enumerate(row):
            a, b = float(x[p, pair]), float(x[p, pair + half])
            out[p, pair] = a * math.cos(angle) - b * math.sin(angle)
            out[p, pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


# Angles of the planes of a head for event n at a time, by scheme.


def rope_angles(position: Any, options: dict, planes: int, s: Sequence, n: int, t: float) -> list:
    return [n * options["rope_base"] ** (-2 * pair / (2 * planes)) for pair in range(planes)]


def calendar_angles(
    position: Any, options: dict, planes: int, s: Sequence, n: int, t: float
) -> list:
    """2 pi n t / period, planes dealt out to the parts in turn."""
    periods = [PERIODS[part] for part in options["calendar_parts"]]
    return [
        2 * math.pi * (t - s.times[0]) / periods[plane % len(periods)] * (plane // len(periods) + 1)
        for plane in range(planes)
    ]


def siren_angles(position: Any, options: dict, planes: int, s: Sequence, n: int, t: float) -> list:
    u = [math.log(1 + (t - s.times[0]) / DAY) / 10]
    for part in options["calendar_parts"]:
        turns = 2 * math.pi * (t % PERIODS[part]) / PERIODS[part]
        u += [math.sin(turns), math.cos(turns)]
    u = torch.tensor([*u, 1.0])
    found = []
    for plane in range(planes):
        angle = n * options["rope_base"] ** (-plane / planes)
        for unit in range(options["siren_width"]):
            wave = math.sin(options["siren_omega"] * dot(position.sine[unit], u))
            angle += position.sine_out[plane, unit].item() * wave
            angle += position.smooth_out[plane, unit].item() * gelu(dot(position.smooth[unit], u))
        found.append(angle)
    return found


def bank(learned: Any, start: list[float]) -> list[float]:
    """Frequencies times scales, from the parameters of a bank; fixed ones from ``start``."""
    values = start
    if learned.learn == "free":
        values = [math.exp(x) for x in learned.log.tolist()]
    elif learned.learn == "ladder":
        values = [math.exp(learned.log_first.item())]
        for raw in learned.raw_step.tolist():
            values.append(values[-1] / math.exp(softplus(raw)))
    if learned.raw_scale is not None:
        values = [
            w * softplus(raw) for w, raw in zip(values, learned.raw_scale.tolist(), strict=True)
        ]
    return values


def order_start(options: dict, planes: int) -> list[float]:
    return [options["rope_scale"] * options["rope_base"] ** (-k / planes) for k in range(planes)]


def time_start(options: dict, planes: int) -> list[float]:
    """TO-RoPE, section 3.2: base form, or periods log-spaced between two ends; time in days."""
    if options["time_base"] is not None:
        return [
            options["time_scale"] * options["time_base"] ** (-k / planes) for k in range(planes)
        ]
    low, high = options["time_min_period"], options["time_max_period"]
    power = [k / (planes - 1) if planes > 1 else 0.5 for k in range(planes)]
    return [2 * math.pi / (low * (high / low) ** x) for x in power]


def time_rope_angles(
    position: Any, options: dict, planes: int, s: Sequence, n: int, t: float
) -> list:
    days = (t - s.times[0]) / DAY
    return [w * days for w in bank(position.bank, time_start(options, planes))]


def to_rope_angles(
    position: Any, options: dict, planes: int, s: Sequence, n: int, t: float
) -> list:
    """TO-RoPE, equation 4 with the special cases of 4.1.2; each source has a whole bank."""
    days, fusion = (t - s.times[0]) / DAY, options["fusion"]

    def order(size: int) -> list[float]:
        return [w * n for w in bank(position.order, order_start(options, size))]

    def time(size: int) -> list[float]:
        return [w * days for w in bank(position.clock, time_start(options, size))]

    if fusion == "split_head":
        return time(planes) if s.head >= s.heads // 2 else order(planes)
    if fusion == "split_dim":
        by_time = int(planes * options["time_ratio"])
        return order(planes - by_time) + time(by_time)
    both = zip(order(planes), time(planes), strict=True)
    if fusion == "effective":
        return [a + b for a, b in both]
    gate = [options["gate_value"]] * planes
    if options["gate"] != "fixed":
        logits = position.gate_logit.expand(s.heads, planes)[s.head].tolist()
        gate = [1 / (1 + math.exp(-x)) for x in logits]
    if options["gate"] == "hard":
        gate = [float(g > 0.5) for g in gate]
    return [(1 - g) * a + g * b for g, (a, b) in zip(gate, both, strict=True)]


ANGLES: dict[str, Callable[..., list]] = {
    "rope": rope_angles,
    "time_rope": time_rope_angles,
    "to_rope": to_rope_angles,
    "calendar_rope": calendar_angles,
    "siren_rope": siren_angles,
}


# Biases of query i and key j, by scheme.


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


def log_bucket(seconds: float, buckets: int) -> int:
    """HSTU's public code: floor(ln(max(1, seconds)) / 0.301), the last bucket takes the rest."""
    return min(math.floor(math.log(max(1.0, seconds)) / 0.301), buckets - 1)


def alibi_bias(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    return -alibi_slope(s.head, s.heads) * (i - j)


def t5_bias(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    bucket = t5_bucket(i - j, options["t5_buckets"], options["t5_max_distance"])
    return position.weight[s.head, bucket].item()


def kerple_bias(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    r1, raw = softplus(position.raw_r1[s.head].item()), position.raw_r2[s.head].item()
    if options["kerple_kind"] == "log":
        return -r1 * math.log(1 + softplus(raw) * (i - j))
    return -r1 * (i - j) ** (2 / (1 + math.exp(-raw)))


def hstu_bias(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    """HSTU, relative bias of distance and time."""
    bucket = log_bucket(s.asked[i] - s.times[j], options["hstu_time_buckets"])
    return position.distance[i - j].item() + position.time[bucket].item()


def decay_bias(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    a, reach = position.strength[s.head].item(), math.exp(position.log_reach[s.head].item())
    b = softplus(position.raw_power[s.head].item())
    d = max(s.asked[i] - s.times[j], 1e-9) / reach
    if d > 1e30:
        return 0.0
    return a * (2 ** -(d**b) if options["decay_kind"] == "exponential_power" else (1 + d) ** -b)


def cape_bias(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    """CAPE: gates of dissimilarity summed from j to i, position clamped, table interpolated."""
    table = position.weight.detach()
    p = sum(1 - 1 / (1 + math.exp(-dot(q[i], k[r]))) for r in range(j, i + 1))
    p = min(p, len(table) - 1)
    lower, upper = math.floor(p), math.ceil(p)
    return (1 - (p - lower)) * dot(q[i], table[lower]) + (p - lower) * dot(q[i], table[upper])


def difsr_bias(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    """DIF-SR: logits of positions, from the newest, and of every attribute, added up."""

    def vectors(event: int) -> list[Tensor]:
        found = [position.position[s.n - len(q) + event]]
        for number, table in enumerate(position.tables):
            tokens = [t for t in getattr(position, f"tokens_{number}")[s.items[event]] if t > 0]
            total = sum((table[t] for t in tokens), torch.zeros(table.size(1)))
            found.append(total / max(len(tokens), 1))
        return found

    bias = 0.0
    for field, (left, right) in enumerate(zip(vectors(i), vectors(j), strict=True)):
        e = len(left) // s.heads
        part = slice(s.head * e, (s.head + 1) * e)
        query, key = position.queries[field](left)[part], position.keys[field](right)[part]
        bias += dot(query, key) / math.sqrt(e)
    return bias


def semi_local(position: Any, options: dict, q: Tensor, k: Tensor, s: Sequence, i: int, j: int):
    near = i - j <= options["semi_local_window"]
    return 0.0 if near or j < options["semi_local_prefix"] else -1e9


BIASES: dict[str, Callable[..., float]] = {
    "alibi": alibi_bias,
    "t5": t5_bias,
    "kerple": kerple_bias,
    "hstu": hstu_bias,
    "time_decay": decay_bias,
    "cape": cape_bias,
    "difsr": difsr_bias,
    "semi_local": semi_local,
}


def factor(kind: str, learned: Any, n: int) -> list[list[float]]:
    """[n][n] a lower-triangular factor of the kernel, from its parameters (equations 10, 11)."""
    if kind == "identity":
        return torch.eye(n).tolist()
    weight, out, at = learned.weight.tolist(), [[0.0] * n for _ in range(n)], 0
    for i in range(n):
        for j in range(i + 1):
            if kind == "full":
                out[i][j] = weight[at]
                at += 1
            elif i - j < len(weight):
                out[i][j] = weight[i - j]
    return out


def rote(x: Tensor, times: list[float], options: dict) -> Tensor:
    """The sum of x turned by years, by months and by days since 1970, each with its weight."""
    out, planes = torch.zeros_like(x), x.size(1) // 2
    levels = zip(options["rote_bases"], options["rote_weights"], (365.25, 30.4375, 1), strict=True)
    for base, weight, days in levels:
        turns = [[t / DAY / days * base ** (-p / planes) for p in range(planes)] for t in times]
        out += weight * turn(x, turns)
    return out


def fill_places(
    schemes: dict[str, Any], options: dict, q: Tensor, k: Tensor, v: Tensor, s: Sequence
) -> tuple[Tensor, Tensor, Tensor, list[list[float]]]:
    """R q, U^T (R k), L v and B of schemes by their names."""
    t, planes = len(q), q.size(1) // 2
    for name in schemes.keys() & ANGLES.keys():
        given = ANGLES[name], schemes[name], options, planes, s
        q, k = (
            turn(x, [given[0](*given[1:], n, at) for n, at in enumerate(times)])
            for x, times in ((q, s.asked), (k, s.times))
        )
    if "rote" in schemes:
        q, k = (rote(x, times, options) for x, times in ((q, s.asked), (k, s.times)))
    if "kernel" in schemes:
        up, low = (
            [row[-t:] for row in factor(options[f"kernel_{x.lower()}"], getattr(
                schemes["kernel"], x), s.n)[-t:]] for x in "UL"
        )  # fmt: skip
        k, v = mix(up, k), mix(low, v)
    bias = [[0.0] * t for _ in range(t)]
    for name in schemes.keys() & BIASES.keys():
        for i in range(t):
            for j in range(i + 1):
                bias[i][j] += BIASES[name](schemes[name], options, q, k, s, i, j)
    return q, k, v, bias


# What replaces attention, by scheme.


def positional(position: Any, options: dict, q: Tensor, k: Tensor, v: Tensor, s: Sequence, a: list):
    """sum_j a_ij v_j / sum_j a_ij over real past events; ``a`` is [n][n], unnormalised."""
    pad = s.n - len(v)
    rows = [a[pad + i][pad : pad + i + 1] for i in range(len(v))]
    return mix([[x / sum(row) for x in row] for row in rows], v)


def learned_positional(position: Any, options: dict, q, k, v, s: Sequence) -> Tensor:
    """FPARec paper, equation 6 (7: R = R1 R2^T), with the mask before or after the softmax."""
    r = (
        position.R[s.head]
        if hasattr(position, "R")
        else position.R1[s.head] @ position.R2[s.head].T
    )
    a = [[math.exp(x / math.sqrt(v.size(1))) for x in row] for row in r.tolist()]
    if options["positional_mask"] == "before_softmax":
        return positional(position, options, q, k, v, s, a)
    pad = s.n - len(v)
    return mix([[x / sum(row) for x in row[pad : pad + i + 1]] for i, row in enumerate(a[pad:])], v)


def fixed_positional(pattern: Callable[[int, int], float]) -> Callable[..., Tensor]:
    """FPARec paper, equations 12 to 14; i and j count from 1."""

    def attend(position: Any, options: dict, q, k, v, s: Sequence) -> Tensor:
        count = range(1, s.n + 1)
        a = [[pattern(i, j) if i >= j else 0.0 for j in count] for i in count]
        return positional(position, options, q, k, v, s, a)

    return attend


def linear_attention(position: Any, options: dict, q, k, v, s: Any = None) -> Tensor:
    """Katharopoulos et al. 2020, equations 8 and 9 in causal form, phi(x) = elu(x) + 1."""
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    rows = [[dot(q[i], k[j]) for j in range(i + 1)] for i in range(len(q))]
    return mix([[x / sum(row) for x in row] for row in rows], v)


def token_mixing(position: Any, options: dict, q, k, v, s: Sequence) -> Tensor:
    """W2 gelu(W1 X) with both matrices lower triangular."""
    t = len(v)
    lower = [
        [w[-t + i, -t : s.n - t + i + 1].tolist() for i in range(t)]
        for w in (position.W1, position.W2)
    ]
    hidden = mix(lower[0], v)
    hidden = torch.tensor([[gelu(x) for x in row] for row in hidden.tolist()])
    return mix(lower[1], hidden)


def tisas(position: Any, options: dict, q, k, v, s: Sequence) -> Tensor:
    """TiSASRec: r_ij in units of the shortest gap up to i; positions count from the newest."""
    e, t = v.size(1), len(v)
    part = slice(s.head * e, (s.head + 1) * e)
    r_key, r_value, p_key, p_value = (
        getattr(position, f"{a}_{b}").detach()[:, part]
        for a in ("time", "position")
        for b in ("key", "value")
    )
    out = torch.zeros_like(v)
    for i in range(t):
        gaps = [b - a for a, b in zip(s.times, s.times[1 : i + 1], strict=False) if b > a]
        unit, longest = min(gaps, default=1.0), options["tisas_intervals"]
        r = [min(math.floor((s.asked[i] - s.times[j]) / unit), longest) for j in range(i + 1)]
        keys = [k[j] + r_key[r[j]] + p_key[s.n - t + j] for j in range(i + 1)]
        for j, weight in enumerate(softmax([dot(q[i], key) / math.sqrt(e) for key in keys])):
            out[i] += weight * (v[j] + r_value[r[j]] + p_value[s.n - t + j])
    return out


def channels(position: Any, options: dict, q, k, v, s: Sequence) -> Tensor:
    """Content, order and time weigh a part of the value each."""
    content, order, _ = position.sizes
    buckets, out = options["hstu_time_buckets"], []
    for i in range(len(q)):
        past = range(i + 1)
        by_time = [position.time[log_bucket(s.asked[i] - s.times[j], buckets)].item() for j in past]
        logits = (
            [dot(q[i], k[j]) / math.sqrt(q.size(1)) for j in past],
            [position.distance[i - j].item() for j in past],
            by_time,
        )
        parts = v[: i + 1].split([content, order, v.size(1) - content - order], 1)
        out.append(
            torch.cat([torch.tensor(softmax(x)) @ p for x, p in zip(logits, parts, strict=True)])
        )
    return torch.stack(out)


def fuxi_linear(position: Any, options: dict, q, k, v, s: Sequence) -> Tensor:
    """Retention of content, products of learned rows, waves of time that fall; term by term."""
    content, order, columns = position.sizes
    rate = sum(softplus(x) for x in position.raw_decay.tolist()[: s.head + 1])
    alpha, beta = position.share.tolist()
    pairs, out = -(-columns // 2), torch.zeros_like(v)
    shortest, longest = (math.log(options[f"time_{end}_period"] * DAY) for end in ("min", "max"))
    step = (longest - shortest) / max(s.heads * pairs - 1, 1)
    if s.heads * pairs == 1:
        shortest = (shortest + longest) / 2
    for i in range(len(q)):
        for j in range(i + 1):
            for x in range(v.size(1)):
                value = v[j, x].item()
                if x < content:
                    query, key = ([silu(y) for y in z.tolist()] for z in (q[i], k[j]))
                    weight = sum(a * b for a, b in zip(query, key, strict=True))
                    weight *= math.exp(-rate * (i - j)) / math.sqrt(q.size(1))
                    out[i, x] += weight * silu(value)
                elif x < content + order:
                    p = position.positions
                    out[i, x] += alpha * dot(p[i], p[j]) * 2 / p.size(1) * value
                    out[i, x] += beta * value if i == j else 0.0
                else:
                    phase, pair = divmod(x - content - order, pairs)
                    period = math.exp(shortest + step * (s.head * pairs + pair))
                    a = 2 * math.pi * (s.asked[i] - s.times[j]) / period
                    out[i, x] += (
                        2.0 ** max(-a, -1e3) * (math.sin(a) if phase else math.cos(a)) * value
                    )
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
    "channels": channels,
    "fuxi_linear": fuxi_linear,
}


def attention(schemes: dict[str, Any], options: dict, q: Tensor, k: Tensor, v: Tensor, s: Sequence):
    """softmax(M + B(R q . U^T (R k))) . L v, or what takes its place; one head, [t, e]."""
    for name in schemes.keys() & REPLACED.keys():
        return REPLACED[name](schemes[name], options, q, k, v, s)
    return biased_attention(*fill_places(schemes, options, q, k, v, s))


def time_embedding(x: Tensor, times: list[float], table: Tensor, since: str) -> Tensor:
    """x + P[bucket] with the seconds since the first or the previous event."""
    out = []
    for i in range(len(x)):
        before = times[0] if since == "first" else times[max(i - 1, 0)]
        out.append(x[i] + table[log_bucket(times[i] - before, len(table))])
    return torch.stack(out)


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """Row by row; x [..., d]."""
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        + norm.bias
    )


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


def sampled_loss(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    negatives: list[list[int]],
    q: list[float],
    correction: str = "none",
    t: float = 0.0,
) -> Tensor:
    """The mean loss of positions, each with negatives of its own.

    ``refined`` is that of arXiv 2507.09331: of the negatives, with the weight 1 - P(t) that has no
    gradient; so its gradient is compared, not its value.
    """
    items = len(weight) - 1
    total = torch.zeros((), dtype=hidden.dtype)
    for h, target, ids in zip(hidden, targets.tolist(), negatives, strict=True):
        n, score = len(ids), h @ weight[target]
        others = [(h @ weight[j], q[j]) for j in ids if j != target]
        if kind in ("BCE", "gBCE"):
            alpha = n / (items - 1)
            beta = alpha * (t * (1 - 1 / alpha) + 1 / alpha)
            loss = -beta * torch.log(torch.sigmoid(score))
            for z, _ in others:
                loss = loss - torch.log(1 - torch.sigmoid(z)) / (1 - q[target])
            total = total + loss / (n + 1)
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
