"""Session graphs, anchors and PosRec's layers with dictionaries and loops, session by session."""

from __future__ import annotations

import math
from collections import Counter, deque

import torch
from reference import layer_norm
from torch import Tensor

# repeats, one event, one item only, a circle, two events, self-transitions
SESSIONS = [[3, 5, 3, 7, 5, 3, 9], [2], [4, 4, 4], [1, 2, 3, 4, 5, 1], [8, 6], [6, 6, 8, 6, 1]]


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
    session: list[int],
    with_anchors: bool,
    overlap: str,
    self_weight: float,
    mean: bool,
    counted: bool = True,
) -> tuple[dict, dict]:
    """N'_in and N'_out: item -> {sender: weight}."""
    into: dict[int, dict[int, float]] = {item: {} for item in session}
    out: dict[int, dict[int, float]] = {item: {} for item in session}
    for (a, b), count in edges(session).items():
        weight = count if counted else 1
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


def matrix(side: dict, place: dict[int, int], n: int) -> Tensor:
    """[n, n] weights of N'_in or N'_out: to the place of an item (row) from that of a sender."""
    found = torch.zeros(n, n)
    for item, senders in side.items():
        for sender, weight in senders.items():
            found[place[item], place[sender]] = weight
    return found


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


def weighted_attention(x: dict[int, Tensor], into: dict, layer) -> dict[int, Tensor]:
    """One layer of FGNN: item -> what it attends to, in all heads."""
    new = {}
    for item, state in x.items():
        new[item] = layer.bias.clone()
        for weight, attention in zip(layer.weight, layer.attention, strict=True):
            logits = []
            for sender, edge in into[item].items():
                both = torch.cat((weight @ state, weight @ x[sender], torch.tensor([edge * 1.0])))
                logit = attention @ both
                logits.append(logit if logit > 0 else 0.2 * logit)
            share = torch.stack(logits).exp() / torch.stack(logits).exp().sum()
            for part, sender in zip(share, into[item], strict=True):
                new[item] = new[item] + part * (weight @ x[sender]) / len(layer.weight)
    return new


def set2set(rows: list[Tensor], readout) -> Tensor:
    """[2d] the last query of a GRU and the answer to it."""
    query, both = torch.zeros_like(rows[0]), torch.zeros(2 * len(rows[0]))
    for _ in range(readout.steps):
        query = gru(query, both, readout.gru)
        share = torch.stack([row @ query for row in rows]).exp()
        answer = sum(part * row for part, row in zip(share / share.sum(), rows, strict=True))
        both = torch.cat((query, answer))
    return both


def fgnn(model, session: list[int], with_anchors: bool, overlap: str) -> Tensor:
    """[d] z of one session."""
    into, _ = message_weights(session, with_anchors, overlap, 0.0, False)
    x = {item: model.item_embedding.weight[item] for item in session}
    for item in x:
        into[item] = {sender: weight for sender, weight in into[item].items() if weight}
        into[item].setdefault(item, 1)
    for number, layer in enumerate(model.graph_layers):
        x = {item: state.clamp(min=0) if number else state for item, state in x.items()}
        x = weighted_attention(x, into, layer)
    return model.out.weight @ set2set(list(x.values()), model.readout)


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
