"""``recbole-pos inspect attention``: the attention weights of a trained model, and their picture.

The figures of the papers are drawn from these weights by scripts in ``studies/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recbole.data.interaction import Interaction
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import load
from recbole_pos.inspect.pictures import describe_run, draw_maps
from recbole_pos.layers.chunks import chunk_elements
from recbole_pos.layers.forward import MultiHeadAttention
from recbole_pos.layers.hooks import replaces_attention
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.positional_attention import PositionalAttention


def inspect_attention(path: str | Path, data_path: str | Path | None = None) -> Path:
    """Draw the attention weights of a trained model as attention.png in its run folder.

    A panel for each layer and head has the weights between the newest interactions, averaged over
    many histories: those before the test targets (the held-out items to predict), or before the
    validation targets if there are none of the test.

    Args:
        path: the run folder.
        data_path: the folder that holds the folder of the dataset; by default the run's.

    Returns:
        The path of the picture.

    Raises:
        UsageError: if the model has no attention weights, or the split holds nothing out.
        CheckpointError: if weights are not finite.
    """
    folder = RunFolder(path).require()
    experiment = load(folder.path, data_path=data_path)
    model = experiment.model
    find_attention_layers(model)  # refuses models without attention, whose rows we cannot read
    # A loader yields batches of held-out targets with the histories before them; None or empty if
    # the split has none.
    loader = experiment.loaders["test"] or experiment.loaders["valid"]
    if not loader:
        raise UsageError("this split holds nothing out, so there are no test or validation rows")
    weights, caption = average_attention(model, loader)
    title = f"{describe_run(experiment)}: attention weights"
    return draw_attention(weights, (title, caption), folder.path / "attention.png")


def find_attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """Return the causal attention layers of a model, the first one first.

    Causal means that no interaction of a history reads a later one. Only layers of this package
    count, since only their weights can be read.

    Raises:
        UsageError: if the model has no such layer.
    """
    layers = [x for x in model.modules() if isinstance(x, MultiHeadAttention) and x.causal]
    if not layers:
        raise UsageError(f"{type(model).__name__} has no causal attention layers of the plugin")
    return layers


@torch.no_grad()
def compute_attention_weights(layer: MultiHeadAttention, x: Tensor, batch: SequenceBatch) -> Tensor:
    """Return the attention weights of a layer for a batch of histories.

    Args:
        layer: the attention layer.
        x: [m, d] its inputs, the interactions of all histories one after the other.
        batch: the histories, which says how many interactions each has.

    Returns:
        [b, h, t, t] weights by history, head (one if the weights depend on positions only), query
        and key. Position 0 is the oldest interaction of each history. Weights of later keys are
        zero. The weights of a query sum to one, unless the model leaves out the softmax (HSTU) or
        changes weights after it (``positional_mask: after_softmax``).

    Raises:
        UsageError: if the layer mixes interactions without attention weights.
    """
    # The option ``position`` names one or several schemes, which tell the layer the positions of
    # interactions. A scheme may replace the attention: PositionalAttention by weights that depend
    # on positions only, which can be shown; others by sums without any weights.
    for name, scheme in layer.position.parts().items():
        if isinstance(scheme, PositionalAttention):
            return _align_positional_weights(scheme, batch)
        if replaces_attention(type(scheme)):
            raise UsageError(f"{name} mixes interactions without attention weights")
    return layer.weights(x, batch)  # no scheme replaces it


def _align_positional_weights(scheme: PositionalAttention, batch: SequenceBatch) -> Tensor:
    """Return the attention weights of a scheme that weighs interactions by their positions only.

    The scheme has one matrix of weights for all histories, by query (row) and key (column). The
    newest interaction of a history has its last row and column. So with t = 3, a history of 2
    interactions has the weights in the lower right corner. This function moves them to the upper
    left one, where row and column 0 are those of the oldest interaction:

        a 0 0       d 0 0
        b d 0  ->   e f 0
        c e f       0 0 0

    Args:
        scheme: the position scheme, which replaces a layer's attention, with h heads.
        batch: b histories of at most t interactions (``batch.width``).

    Returns:
        [b, h or 1, t, t] weights by history, head, query and key.
    """
    t = batch.width
    matrix = scheme.weights(t)  # [h or 1, t, t], 0 for keys that are later than the query
    weights = matrix.new_zeros(len(batch.lengths), *matrix.shape)
    for i, length in enumerate(batch.lengths.tolist()):
        weights[i, :, :length, :length] = matrix[:, t - length :, t - length :]

    # Most schemes (``divides_by_sum``) divide the weights of a query by their sum. The sum may be
    # so small that it is rounded to 0, as it is behind a history; nothing must be divided by 0.
    if not scheme.divides_by_sum:
        return weights
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


@torch.no_grad()
def iterate_attention(
    model: PosRecommender, loader: Any, rows: np.ndarray
) -> Iterator[tuple[list[Tensor], SequenceBatch]]:
    """Yield the attention weights of a model for histories of a loader, batch by batch.

    Args:
        model: the model.
        loader: RecBole's loader of validation or test rows, each of which is a history.
        rows: [n] numbers of the rows to read. They are read in another order, the longest histories
            first, so that histories of a batch are about equally long.

    Yields:
        The weights of every layer, [b, h, t, t] by history, head, query and key; and the histories
        of the batch, packed, that is one after the other without padding between them.
    """
    # the histories to read by length, the longest first; RecBole's table has a column of lengths
    lengths = loader._dataset.inter_feat[model.ITEM_SEQ_LEN].numpy()[rows]
    longest_first = np.argsort(-lengths, kind="stable")
    rows, lengths = rows[longest_first], lengths[longest_first]

    # A history has length^2 weights by layer and head. A batch takes as many histories as fit into
    # one tensor: ``chunk_elements`` says how many numbers that should have.
    layers = find_attention_layers(model)
    max_weights = chunk_elements(torch.device(model.device)) // layers[0].n_heads
    start = 0
    while start < len(rows):
        # The next history is the longest that is left, so that no other one needs more room. The
        # first value of RecBole's collate_fn is a table of the chosen rows.
        batch_size = max(1, max_weights // int(lengths[start]) ** 2)
        interaction = loader.collate_fn(rows[start : start + batch_size].tolist())[0]
        # the inputs of every layer while the model encodes the histories, and the packed histories
        inputs = compute_layer_inputs(model, layers, interaction.to(model.device))
        weights = [
            compute_attention_weights(layer, x, packed)
            for layer, (x, packed) in zip(layers, inputs, strict=True)
        ]
        _, packed = inputs[0]  # the same histories in every layer
        yield weights, packed
        start += batch_size


def compute_layer_inputs(
    model: PosRecommender, layers: Sequence[nn.Module], rows: Interaction
) -> list[tuple[Tensor, SequenceBatch]]:
    """Return what each of some layers gets as its input while a model encodes histories.

    The model runs once, and hooks of torch note the arguments with which each layer is called.

    Args:
        model: the model.
        layers: layers of it, in the order in which they are called.
        rows: histories as RecBole's loaders have them.

    Returns:
        For each layer its inputs [m, d], the interactions of all histories one after the other, and
        the batch of these histories.
    """
    # Torch calls the hook of a layer with its arguments, (inputs, batch), before the layer.
    inputs: list[tuple[Tensor, SequenceBatch]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args)) for layer in layers
    ]
    try:
        # Without targets no history of the batch reads another one (some models let them).
        # pack: the histories without padding; prepare adds what a model computes for a batch.
        batch = replace(model.pack(rows), targets=None)
        model.encode(model.prepare(batch))
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def average_attention(
    model: PosRecommender, loader: Any, newest: int = 30
) -> tuple[list[np.ndarray], str]:
    """Return the attention weights of every layer, averaged over the histories of a loader.

    Args:
        model: the model.
        loader: RecBole's loader of validation or test rows, each of which is a history.
        newest: number of newest interactions whose weights are taken. Histories with fewer are left
            out; if all have fewer, ``newest`` becomes the length of the longest.

    Returns:
        Weights [h, newest, newest] of each layer, and a text that says which histories are
        averaged.

    Raises:
        UsageError: if the model has no attention weights.
    """
    # the rows of histories that are long enough; RecBole's table has a column of lengths
    lengths = loader._dataset.inter_feat[model.ITEM_SEQ_LEN].numpy()
    newest = min(newest, int(lengths.max()))
    rows = np.flatnonzero(lengths >= newest)

    # Sum up the weights between the newest interactions of each history. A batch has weights
    # [b, h, t, t] of each layer. History i has its oldest interaction at position 0 and its newest
    # at ``length - 1``; positions from ``length`` to t - 1 are behind its end.
    totals: list[Any] = [0.0 for _ in find_attention_layers(model)]
    for weights, batch in iterate_attention(model, loader, rows):
        for i, length in enumerate(batch.lengths.tolist()):
            newest_ones = slice(length - newest, length)
            for layer, layer_weights in enumerate(weights):
                totals[layer] += layer_weights[i, :, newest_ones, newest_ones]
    means = [(total / len(rows)).cpu().numpy() for total in totals]

    histories, longest = f"{len(rows):,} histories", lengths.max()
    if longest > newest:
        return means, f"newest {newest} of up to {longest} interactions of {histories}"
    return means, f"{histories} of {newest} interactions"


def draw_attention(weights: Sequence[np.ndarray], titles: Sequence[str], file: Path) -> Path:
    """Draw the attention weights of a model as heat maps, a panel for each layer and head.

    Args:
        weights: [h, t, t] of each layer: by head, query and key, the newest interaction last.
        titles: lines of the title.
        file: path to write to, which is returned.
    """
    num_heads = len(weights[0])
    panels = [  # a row has one head of all layers
        (f"layer {number}, head {head + 1}", layer[head])
        for head in range(num_heads)
        for number, layer in enumerate(weights, 1)
    ]
    axes = ("key interaction (0: newest)", "query interaction (0: newest)")
    return draw_maps(panels, titles, axes, "weight, mean of histories", file, len(weights))
