"""How far attention looks back, and over how many events (TO-RoPE paper, section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention_weights import (
    attention_layers,
    attention_weights,
    find_replacement,
    has_weights,
    layer_inputs,
    weight_batches,
)
from recbole_pos.layers.attention import MultiHeadAttention
from recbole_pos.layers.chunks import chunk_elements
from recbole_pos.layers.context import SequenceContext
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.positional_attention import PositionalAttention
from recbole_pos.values import SECONDS

MEASURES = ("distance", "entropy", "hours")
QUERIES = ("all", "last")


@dataclass(frozen=True)
class Sample:
    """Histories to measure: rows of a loader, one per user.

    Attributes:
        loader: RecBole's loader of validation or test rows.
        rows: [users] indices of rows of the loader.
        lengths: [users] numbers of events of the histories.
        qualified: number of users with enough events.
    """

    loader: Any
    rows: np.ndarray
    lengths: np.ndarray
    qualified: int


@dataclass(frozen=True)
class Measured:
    """Means over histories. Without times there are no hours, only the first two measures.

    Attributes:
        layers: for each layer [2, measures, h]: means over all queries of a history, and the last
            query alone, which is the one that predicts; measures in the order of ``MEASURES``.
        uniform: [2, measures] the same for attention that is equal over all events so far.
        rescaled: whether rows of the model's attention do not sum to one.
    """

    layers: list[np.ndarray]
    uniform: np.ndarray
    rescaled: bool


def sample_histories(
    model: PosRecommender, loader: Any, users: int, min_events: int, seed: int
) -> Sample:
    """Sample users with at least ``min_events`` events, without replacement.

    A user with several rows counts with the newest, whose history is longest.

    Args:
        model: names the fields of rows.
        loader: RecBole's loader of validation or test rows.
        users: number of users; all if there are fewer.
        min_events: least number of events of a history.
        seed: random seed of the sample.

    Raises:
        UsageError: if no history is long enough.
    """
    table = loader._dataset.inter_feat
    user, length = table[model.USER_ID].numpy(), table[model.ITEM_SEQ_LEN].numpy()
    order = np.lexsort((np.arange(len(user)), length, user))
    newest = order[np.append(user[order][1:] != user[order][:-1], True)]  # a row per user
    enough = newest[length[newest] >= min_events]
    if not len(enough):
        raise UsageError(
            f"--min_events {min_events}: no history has that many events, the longest has "
            f"{length.max()} (MAX_ITEM_LIST_LENGTH is {model.max_seq_length}); give a smaller "
            "--min_events"
        )
    size = min(users, len(enough))
    rows = np.sort(np.random.default_rng(seed).choice(enough, size, replace=False))
    return Sample(loader, rows, length[rows], len(enough))


@torch.no_grad()
def measure_attention(model: PosRecommender, sample: Sample) -> Measured:
    """Measure attention distance and entropy of every layer and head, averaged over histories.

    Batches are cut so that the weights of a layer fit a chunk, however many users there are.

    Raises:
        UsageError: if a scheme of the model has no attention weights.
    """
    layers = attention_layers(model)
    for layer in layers:
        if not has_weights(layer):
            raise UsageError(f"{scheme_name(layer)} mixes events without attention weights")
    totals: list[Any] = [0.0 for _ in layers]
    uniform: Any = 0.0
    rescaled = False
    heads = max(layer.n_heads for layer in layers)
    for part in weight_batches(sample.lengths, heads, chunk_elements(torch.device(model.device))):
        rows = sample.loader.collate_fn(sample.rows[part].tolist())[0].to(model.device)
        inputs, ctx = layer_inputs(model, layers, rows)
        for number, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
            weights = attention_weights(layer, x, ctx)
            scheme = find_replacement(layer)
            if isinstance(scheme, PositionalAttention):
                rescaled |= not scheme.normalised
            else:
                rescaled |= not _rows_sum_to_one(weights, ctx)
            totals[number] += measure(weights, ctx).sum(0)
        equal = torch.ones(ctx.width, ctx.width, device=ctx.lengths.device).tril()
        uniform += measure(equal.expand(ctx.batch_size, 1, -1, -1), ctx).sum(0)
    count = len(sample.rows)
    means = [(total / count).cpu().numpy() for total in totals]
    return Measured(means, (uniform / count)[..., 0].cpu().numpy(), rescaled)


def measure(weights: Tensor, ctx: SequenceContext) -> Tensor:
    """Return distance, entropy and hours of attention weights, for each history.

    With a_ij the absolute weights, each row divided by its sum: distance sum_j a_ij (i - j) in
    events, entropy -sum_j a_ij ln a_ij in nats, hours sum_j a_ij (t_i - t_j) / 3600. A row of zeros
    attends to nothing and measures zero.

    Args:
        weights: [b, h, t, t] aligned at the start, zero for the future; of any sign and sum.
        ctx: context of the batch; hours need its times, in seconds.

    Returns:
        [b, 2, 3, h] float64 (2 instead of 3 without times): means over the queries of a history,
        and the last query.
    """
    a = weights.double().abs()
    a = a / a.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    total = a.sum(-1)  # one, or zero for a row of zeros
    index = torch.arange(ctx.width, dtype=a.dtype, device=a.device)
    measures = [total * index - a @ index, torch.special.entr(a).sum(-1)]
    if ctx.times is not None:
        hours = ctx.pad(ctx.elapsed.to(a.dtype) / SECONDS["hours"], "start")  # [b, t]
        measures.append(total * hours[:, None] - (a @ hours[:, None, :, None]).squeeze(-1))
    by_query = torch.stack(measures, 1)  # [b, measures, h, t]
    last = (ctx.lengths - 1)[:, None, None, None].expand(*by_query.shape[:3], 1)
    padding = index >= ctx.lengths[:, None, None, None]
    mean = by_query.masked_fill(padding, 0).sum(-1) / ctx.lengths[:, None, None]
    return torch.stack((mean, by_query.gather(-1, last).squeeze(-1)), 1)


def scheme_name(layer: MultiHeadAttention) -> str:
    """Return the name of the scheme that replaces a layer's attention."""
    replacement = find_replacement(layer)
    parts = layer.position.parts().items()
    return next(name for name, scheme in parts if scheme is replacement)


def _rows_sum_to_one(weights: Tensor, ctx: SequenceContext) -> bool:
    """Return whether the rows of all events in weights [b, h, t, t] are distributions."""
    real = ctx.unpad(weights.transpose(1, 2), "start")  # [m, h, t]
    return bool((real >= 0).all() and ((real.sum(-1) - 1).abs() < 1e-3).all())
