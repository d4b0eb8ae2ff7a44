"""Session graphs, anchors and PosRec's layers with dictionaries and loops, session by session."""

from __future__ import annotations

import math
from collections import Counter, deque

import torch
from torch import Tensor


def edges(session: list[int]) -> Counter:
    """(item, next item) -> how often."""
    return Counter(zip(session, session[1:], strict=False))


def steps(session: list[int], start: int) -> dict[int, int]:
    """Breadth first over edges without weight or direction: item -> distance from ``start``."""
    near: dict[int, set[int]] = {item: set() for item in session}
    for a, b in edges(session):
        near[a].add(b)
        near[b].add(a)
    found, queue = {start: 0}, deque([start])
    while queue:
        item = queue.popleft()
        for other in near[item] - found.keys():
            found[other] = found[item] + 1
            queue.append(other)
    return found


def anchors(session: list[int]) -> tuple[set[int], set[int]]:
    """Items in N_in, and in N_out, of every node."""
    repeated = {item for item, count in Counter(session).items() if count > 1}
    return repeated | {session[0]}, repeated | {session[-1]}


def message_weights(
    session: list[int], with_anchors: bool, overlap: str, self_weight: float, mean: bool
) -> tuple[dict, dict]:
    """N'_in and N'_out: item -> {sender: weight}."""
    into: dict[int, dict[int, float]] = {item: {} for item in session}
    out: dict[int, dict[int, float]] = {item: {} for item in session}
    for (a, b), weight in edges(session).items():
        into[b][a] = out[a][b] = weight
    for side, senders in zip((into, out), anchors(session), strict=True):
        for item in side if with_anchors else ():
            for anchor in senders:
                edge, distance = side[item].get(anchor, 0), steps(session, anchor)[item]
                if anchor == item:
                    weight = edge + self_weight
                elif not edge:
                    weight = distance
                else:
                    weight = {"distance": distance, "edge": edge, "sum": edge + distance}[overlap]
                side[item][anchor] = weight
        for found in side.values():
            total = sum(found.values())
            if mean and total:
                found.update({sender: weight / total for sender, weight in found.items()})
    return into, out


def gru(x: Tensor, message: Tensor, cell: torch.nn.GRUCell) -> Tensor:
    """One update, the state x by the input message (equation 8)."""
    d = x.numel()
    given = cell.weight_ih @ message + cell.bias_ih
    kept = cell.weight_hh @ x + cell.bias_hh
    new = torch.empty_like(x)
    for i in range(d):
        reset = 1 / (1 + torch.exp(-(given[i] + kept[i])))
        update = 1 / (1 + torch.exp(-(given[d + i] + kept[d + i])))
        candidate = torch.tanh(given[2 * d + i] + reset * kept[2 * d + i])
        new[i] = (1 - update) * candidate + update * x[i]
    return new


def graph_layer(x: dict[int, Tensor], weights: tuple[dict, dict], layer) -> dict[int, Tensor]:
    """Equations 7 and 8 for the nodes of one session."""
    new = {}
    for item, state in x.items():
        sums = []
        for side, linear in zip(weights, (layer.into, layer.out), strict=True):
            total = torch.zeros_like(state)
            for sender, weight in side[item].items():
                total = total + weight * (linear.weight @ x[sender])
            sums.append(total)
        new[item] = gru(state, torch.cat(sums), layer.gru)
    return new


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """Over the last dimension."""
    mean = x.mean()
    variance = ((x - mean) ** 2).mean()
    return (x - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias


def transformer(rows: list[Tensor], layer) -> list[Tensor]:
    """One post-norm block with one head over all rows, ReLU inside (equation 9)."""
    attention, feed = layer.multi_head_attention, layer.feed_forward
    q, k, v = ([linear(row) for row in rows] for linear in
               (attention.query, attention.key, attention.value))  # fmt: skip
    out = []
    for i, row in enumerate(rows):
        logits = torch.stack([q[i] @ k[j] / math.sqrt(len(row)) for j in range(len(rows))])
        weight = logits.exp() / logits.exp().sum()
        mixed = sum(weight[j] * v[j] for j in range(len(rows)))
        state = layer_norm(row + attention.dense(mixed), attention.LayerNorm)
        inner = feed.dense_2(feed.dense_1(state).clamp(min=0))
        out.append(layer_norm(state + inner, feed.LayerNorm))
    return out


def posrec(model, session: list[int], options: dict) -> Tensor:
    """[d] h of one session (equation 10), of a model with one head, post-norm and LDPE."""
    table, last = model.position_embedding[0].weight, len(session) - 1
    half = table.size(1) // 2
    x = {item: model.item_embedding.weight[item] for item in session}
    for layer in model.graph_layers:
        x = graph_layer(x, message_weights(session, **options), layer)
    items = list(x)
    rows = []
    for item in items:
        first = session.index(item)
        newest = last - session[::-1].index(item)
        rows.append(x[item] + torch.cat((table[first, :half], table[last - newest, half:])))
    for layer in model.trm_encoder.layer:
        rows = transformer(rows, layer)
    hidden = dict(zip(items, rows, strict=True))
    a, b, c = model.mixture
    return a * x[session[-1]] + b * hidden[session[-1]] + c * hidden[session[0]]
