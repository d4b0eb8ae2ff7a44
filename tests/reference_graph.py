"""Session graphs, anchors and PosRec's layers with dictionaries and loops, session by session."""

import math
from collections import Counter, deque

import torch
import torch.nn.functional as F
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
    session: list[int], with_anchors: bool, mean: bool = False, counted: bool = True
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
                if anchor != item:
                    side[item][anchor] = steps(session, anchor)[item]
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


def graph_layer(x: dict[int, Tensor], weights: tuple[dict, dict], layer) -> dict[int, Tensor]:
    """Equations 7 and 8 for the nodes of one session."""
    new = {}
    for item, state in x.items():
        sums = []
        for side, linear in zip(weights, (layer.into, layer.out), strict=True):
            terms = [weight * (linear.weight @ x[sender]) for sender, weight in side[item].items()]
            sums.append(sum(terms, torch.zeros_like(state)))
        new[item] = layer.gru(torch.cat(sums), state)
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
                logits.append(F.leaky_relu(attention @ both, 0.2))
            share = torch.stack(logits).softmax(0)
            for part, sender in zip(share, into[item], strict=True):
                new[item] = new[item] + part * (weight @ x[sender]) / len(layer.weight)
    return new


def set2set(rows: Tensor, readout) -> Tensor:
    """[2d] the last query of a GRU and the answer to it."""
    query, both = torch.zeros_like(rows[0]), torch.zeros(2 * rows.size(1))
    for _ in range(readout.steps):
        query = readout.gru(both, query)
        both = torch.cat((query, (rows @ query).softmax(0) @ rows))
    return both


def fgnn(model, session: list[int], with_anchors: bool) -> Tensor:
    """[d] z of one session."""
    into, _ = message_weights(session, with_anchors)
    x = {item: model.item_embedding.weight[item] for item in session}
    for item in x:
        into[item].setdefault(item, 1)
    for number, layer in enumerate(model.graph_layers):
        x = {item: state.clamp(min=0) if number else state for item, state in x.items()}
        x = weighted_attention(x, into, layer)
    return model.out.weight @ set2set(torch.stack(list(x.values())), model.readout)


def transformer(x: Tensor, layer) -> Tensor:
    """One post-norm block with one head over all rows, ReLU inside (equation 9)."""
    attention, feed = layer.multi_head_attention, layer.feed_forward
    weight = (attention.query(x) @ attention.key(x).T / math.sqrt(x.size(1))).softmax(1)
    x = attention.LayerNorm(x + attention.dense(weight @ attention.value(x)))
    return feed.LayerNorm(x + feed.dense_2(feed.dense_1(x).relu()))


def posrec(model, session: list[int], with_anchors: bool) -> Tensor:
    """[d] h of one session (equation 10), of a model with one head, post-norm, LDPE or LPE2D."""
    table, last = model.position_embedding[0].weight, len(session) - 1
    half = table.size(1) // 2
    x = {item: model.item_embedding.weight[item] for item in session}
    for layer in model.graph_layers:
        x = graph_layer(x, message_weights(session, with_anchors), layer)
    items = list(x)
    rows = []
    for item in items:
        first = session.index(item)
        newer = session[::-1].index(item)
        second = last if "length" in model.position_embedding[0].counts else newer
        rows.append(x[item] + torch.cat((table[first, :half], table[second, half:])))
    states = torch.stack(rows)
    for layer in model.trm_encoder.layer:
        states = transformer(states, layer)
    hidden = dict(zip(items, states, strict=True))
    a, b, c = model.mixture
    return a * x[session[-1]] + b * hidden[session[-1]] + c * hidden[session[0]]
