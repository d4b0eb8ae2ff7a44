"""Attention of a trained model: its weights, its positional kernel, and how far it looks back.

Figures 1 and 2 of the kernel attention paper (Nabiev and Frolov), Figure 3 of FPARec's, and
section 5.3 of TO-RoPE's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import MultiHeadAttention
from recbole_pos.layers.chunks import chunk_elements
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, replaces_attention
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.kernel import PositionalKernel
from recbole_pos.position.positional_attention import PositionalAttention
from recbole_pos.values import SECONDS

# --- weights and kernels ---


@torch.no_grad()
def compute_positional_weights(model: Any) -> list[np.ndarray]:
    """Return the attention weights [h, n, n] of every layer that attends by positions only.

    Each row sums to one; with ``positional_mask: after_softmax`` it may sum to less. See section
    4.7 and Figure 3 of the FPARec paper.
    """
    matrices = []
    for layer in model.modules():
        if isinstance(layer, PositionalAttention):
            weights = layer.weights(model.max_seq_length)
            if layer.normalised:
                weights = weights / weights.sum(-1, keepdim=True)
            matrices.append(weights.cpu().numpy())
    return matrices


@torch.no_grad()
def compute_kernel_factors(model: Any) -> dict[str, np.ndarray]:
    """Return the factors [n, n] of the positional kernel of every layer by name.

    ``U, layer 1`` is upper triangular, ``L, layer 1`` lower; ``L, all layers`` is shared by all.
    """
    kernels = [module for module in model.modules() if isinstance(module, PositionalKernel)]
    matrices: dict[str, np.ndarray] = {}
    for name in ("U", "L"):
        factors = [getattr(kernel, name) for kernel in kernels]
        labels = [f"layer {number}" for number in range(1, len(kernels) + 1)]
        if len(factors) > 1 and all(factor is factors[0] for factor in factors):
            factors, labels = factors[:1], ["all layers"]
        for label, factor in zip(labels, factors, strict=True):
            if factor is not None:
                matrix = factor.matrix(model.max_seq_length)
                matrix = matrix.t() if name == "U" else matrix
                matrices[f"{name}, {label}"] = matrix.cpu().numpy()
    return matrices


def find_attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """Return the causal attention of every block, in order."""
    modules = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    return [module for module in modules if module.causal]


def find_replacement(layer: MultiHeadAttention) -> tuple[str, AttentionPosition | None]:
    """Return name and module of the scheme that replaces a layer's attention, else '' and None."""
    for name, scheme in layer.position.parts().items():
        if replaces_attention(type(scheme)):
            return name, scheme
    return "", None


def weighs_content(layer: MultiHeadAttention) -> bool:
    """Return whether the attention weights of a layer depend on content."""
    return find_replacement(layer)[1] is None


@torch.no_grad()
def compute_layer_inputs(
    model: PosRecommender, layers: list[MultiHeadAttention], rows: Interaction
) -> tuple[list[Tensor], SequenceContext]:
    """Encode rows of RecBole; return the inputs [m, d] of every layer, and their context.

    The context has times if the rows have them.
    """
    with record_calls(layers) as calls:
        model.encode_rows(rows)
    return [x for x, _, _ in calls], calls[0][1]


@contextmanager
def record_calls(
    layers: Sequence[nn.Module],
) -> Iterator[list[tuple[Tensor, SequenceContext, Tensor]]]:
    """Yield a list to which calls of layers add input [m, d], context and output [m, d]."""
    calls: list[tuple[Tensor, SequenceContext, Tensor]] = []
    record = lambda _, args, out: calls.append((*args, out))  # noqa: E731
    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def compute_attention_weights(layer: MultiHeadAttention, x: Tensor, ctx: SequenceContext) -> Tensor:
    """Return the weights [b, h or 1, t, t] as a layer uses them, aligned at the start.

    Rows sum to one but in HSTU's blocks and in attention by positions, whose weights are not
    divided by their sum here.

    Args:
        layer: attention of a block.
        x: [m, d] inputs of the layer.
        ctx: their context.

    Raises:
        UsageError: if the scheme of the layer has no attention weights.
    """
    if weighs_content(layer):
        return layer.weights(x, ctx)
    name, scheme = find_replacement(layer)
    if not isinstance(scheme, PositionalAttention):
        raise UsageError(f"{name} mixes interactions without attention weights")
    # weights by position are aligned at the end: l interactions have the last l rows and columns
    index = torch.arange(ctx.width, device=x.device) + (ctx.width - ctx.lengths)[:, None]
    index = index.clamp(max=ctx.width - 1)  # [b, t]; padding gets weights that tril removes
    weights = scheme.weights(ctx.width)[:, index[:, :, None], index[:, None, :]]
    return weights.transpose(0, 1).tril()


def _encode_batches(
    model: PosRecommender,
    layers: list[MultiHeadAttention],
    loader: Any,
    rows: np.ndarray,
) -> Iterator[tuple[list[Tensor], SequenceContext]]:
    """Yield inputs of layers and context in batches of ``rows`` [n] of a loader, longest first."""
    lengths = loader._dataset.inter_feat[model.ITEM_SEQ_LEN].numpy()[rows]
    num_heads = max(layer.n_heads for layer in layers)
    max_weights = chunk_elements(torch.device(model.device)) // num_heads
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        batch_size = max(1, max_weights // int(lengths[order[start]]) ** 2)
        batch = loader.collate_fn(rows[order[start : start + batch_size]].tolist())[0]
        yield compute_layer_inputs(model, layers, batch.to(model.device))
        start += batch_size


@torch.no_grad()
def average_attention(
    model: PosRecommender, loader: Any, newest: int = 30
) -> tuple[list[np.ndarray], str]:
    """Return the attention weights of every layer, averaged over the histories of a loader.

    Keys and queries are the ``newest`` interactions. Histories with fewer are left out; if all have
    fewer, the longest are taken.

    Returns:
        Weights [h, newest, newest] of each layer, none of those that attend by positions only; and
        a text that says which histories are averaged.
    """
    layers = [layer for layer in find_attention_layers(model) if weighs_content(layer)]
    if not layers:
        return [], ""
    lengths = loader._dataset.inter_feat[model.ITEM_SEQ_LEN].numpy()
    newest = min(newest, int(lengths.max()))
    rows = np.flatnonzero(lengths >= newest)
    totals: list[Any] = [0.0 for _ in layers]
    for inputs, ctx in _encode_batches(model, layers, loader, rows):
        # [b, newest] positions of the newest interactions from the start of each history
        index = ctx.lengths[:, None] - newest + torch.arange(newest, device=ctx.lengths.device)
        row = torch.arange(len(index), device=index.device)[:, None, None]
        for i, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
            weights = layer.weights(x, ctx).transpose(1, 2)  # [b, t, h, t]
            totals[i] += weights[row, index[:, :, None], :, index[:, None, :]].sum(0)
    means = [(total / len(rows)).permute(2, 0, 1).cpu().numpy() for total in totals]
    histories, longest = f"{len(rows):,} histories", lengths.max()
    if longest > newest:
        return means, f"newest {newest} of up to {longest} interactions of {histories}"
    return means, f"{histories} of {newest} interactions"


# --- distance, entropy and hours ---


@dataclass(frozen=True)
class Measured:
    """Means over histories of distance, entropy and hours; without times there are no hours.

    Attributes:
        layers: for each layer [2, measures, h]: first the means over all queries of a history, then
            the values of its last query, which predicts the next item.
        uniform: [2, measures] the same for attention that is equal over all interactions so far.
        is_rescaled: whether rows of the model's attention do not sum to one.
    """

    layers: list[np.ndarray]
    uniform: np.ndarray
    is_rescaled: bool


def sample_histories(
    model: PosRecommender, loader: Any, max_users: int, min_events: int, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Sample at most ``max_users`` users with at least ``min_events`` interactions from a loader.

    Of a user with several rows, the newest is taken, whose history is longest.

    Returns:
        Rows [users] of the loader, numbers of interactions [users] of their histories, and the
        number of users with enough interactions, sampled or not.

    Raises:
        UsageError: if no history is long enough.
    """
    table = loader._dataset.inter_feat
    user, length = table[model.USER_ID].numpy(), table[model.ITEM_SEQ_LEN].numpy()
    order = np.lexsort((np.arange(len(user)), length, user))
    is_newest = np.append(user[order][1:] != user[order][:-1], True)
    newest = order[is_newest]  # a row per user
    qualified = newest[length[newest] >= min_events]
    if not len(qualified):
        raise UsageError(
            f"--min_events {min_events}: no history has that many interactions, the longest has "
            f"{length.max()} (MAX_ITEM_LIST_LENGTH is {model.max_seq_length}); give a smaller "
            "--min_events"
        )
    num_users = min(max_users, len(qualified))
    rows = np.sort(np.random.default_rng(seed).choice(qualified, num_users, replace=False))
    return rows, length[rows], len(qualified)


@torch.no_grad()
def measure_attention(model: PosRecommender, loader: Any, rows: np.ndarray) -> Measured:
    """Measure attention of every layer and head, averaged over ``rows`` [users] of a loader.

    Raises:
        UsageError: if a scheme of the model has no attention weights.
    """
    layers = find_attention_layers(model)
    totals: list[Any] = [0.0 for _ in layers]
    uniform: Any = 0.0
    is_rescaled = False
    for inputs, ctx in _encode_batches(model, layers, loader, rows):
        for i, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
            weights = compute_attention_weights(layer, x, ctx)
            _, scheme = find_replacement(layer)
            if isinstance(scheme, PositionalAttention):
                is_rescaled |= not scheme.normalised
            else:
                is_rescaled |= not _rows_sum_to_one(weights, ctx)
            totals[i] += measure_weights(weights, ctx).sum(0)
        equal_weights = torch.ones(ctx.width, ctx.width, device=ctx.lengths.device).tril()
        uniform += measure_weights(equal_weights.expand(ctx.batch_size, 1, -1, -1), ctx).sum(0)
    means = [(total / len(rows)).cpu().numpy() for total in totals]
    return Measured(means, (uniform / len(rows))[..., 0].cpu().numpy(), is_rescaled)


def measure_weights(weights: Tensor, ctx: SequenceContext) -> Tensor:
    """Return distance, entropy and hours of attention weights, for each history.

    With a_ij the absolute weights, each row divided by its sum: distance sum_j a_ij (i - j) in
    interactions, entropy -sum_j a_ij ln a_ij in nats, hours sum_j a_ij (t_i - t_j) / 3600. A row of
    zeros measures zero.

    Args:
        weights: [b, h, t, t] aligned at the start, zero for later keys; of any sign and sum.
        ctx: context of the batch; hours need its times, in seconds.

    Returns:
        [b, 2, 3 (2 without times), h] float64: first the mean over all queries of a history, then
        the value of its last query.
    """
    a = weights.double().abs()
    a = a / a.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    total = a.sum(-1)  # 1, but 0 for a row of zeros
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


def _rows_sum_to_one(weights: Tensor, ctx: SequenceContext) -> bool:
    """Return whether the weights [b, h, t, t] of every query but padding are a distribution."""
    rows = ctx.unpad(weights.transpose(1, 2), "start")  # [m, h, t]
    return bool((rows >= 0).all() and ((rows.sum(-1) - 1).abs() < 1e-3).all())
