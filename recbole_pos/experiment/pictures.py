"""``recbole-pos inspect``: pictures of attention weights, and of why items are recommended.

The figures of the papers are drawn from the same weights by scripts in ``studies/``.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from recbole.data.interaction import Interaction
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import load
from recbole_pos.layers.forward import MultiHeadAttention
from recbole_pos.layers.hooks import replaces_attention
from recbole_pos.layers.large_products import chunk_elements
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.positional_attention import PositionalAttention
from recbole_pos.position.schemes import scheme_names

DPI = 120
TITLE, SMALL = 11, 8  # points
CHARACTER = 0.1  # inches of a wide letter of a title
LONGEST = 32  # characters of a name
ABREAST = 4  # heat maps in a row
MAX_NAMES = 50  # interactions whose items are named; more are numbered
MAX_NUMBERS = 400  # cells that show the change of rank


# --- attention weights of a trained model ---


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

    # Most schemes divide the weights of a query by their sum. Behind the end of a history, as in
    # the last row above, the sum is 0; and a sum of tiny weights may be rounded to 0. Divided by
    # the smallest positive number instead, these weights become 0.
    if not scheme.divides_by_sum:
        return weights
    smallest = torch.finfo(weights.dtype).tiny
    return weights / weights.sum(-1, keepdim=True).clamp_min(smallest)


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

    # A layer's weights for a batch are one tensor [b, h, t, t], which must not get too large:
    # ``chunk_elements`` says how many numbers it may have.
    layers = find_attention_layers(model)
    max_numbers = chunk_elements(torch.device(model.device))
    max_numbers_per_head = max_numbers // layers[0].n_heads
    start = 0
    while start < len(rows):
        # The first history of the batch is its longest one, so it decides t.
        longest = int(lengths[start])
        batch_size = max(1, max_numbers_per_head // longest**2)
        batch_rows = rows[start : start + batch_size]
        interaction, *_ = loader.collate_fn(batch_rows.tolist())  # RecBole's table of these rows

        # Let the model encode the histories. Each layer gets inputs x [m, d] of its own, and the
        # same packed histories.
        layer_inputs = compute_layer_inputs(model, layers, interaction.to(model.device))
        weights = []
        for layer, (x, packed) in zip(layers, layer_inputs, strict=True):
            weights.append(compute_attention_weights(layer, x, packed))
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
    # Torch calls the hook of a layer right before the layer, with the layer's arguments (inputs,
    # batch). So ``inputs`` gets them in the order of the layers.
    inputs: list[tuple[Tensor, SequenceBatch]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args)) for layer in layers
    ]
    try:
        # ``pack`` puts the histories one after the other; ``prepare`` adds what the model computes
        # once for a batch. In training, some models let histories read those of other users: only
        # interactions before a target. Without targets each history is encoded for itself.
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
    sizes = f"newest {newest} of up to {lengths.max()} interactions"
    return means, f"{sizes} of {len(rows):,} histories"


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


# --- pictures ---


def describe_run(experiment: Experiment) -> str:
    """Return text such as ``PosSASRec (rope, kernel) on ml-100k``, or ``Pop on ml-100k``."""
    # The option ``position`` names the position schemes; models of RecBole have none.
    config = experiment.config
    schemes = scheme_names(config["position"]) if config["position"] else []
    in_brackets = f" ({', '.join(schemes)})" if schemes else ""
    return f"{config['model']}{in_brackets} on {config['dataset']}"


def shorten(name: str, limit: int = LONGEST) -> str:
    """Return a name with an ellipsis in the place of its middle if it has too many characters.

    Args:
        name: the name.
        limit: number of characters of the result, at most: "recommendation" with 7 is "rec…ion".
    """
    if len(name) <= limit:
        return name
    head = limit // 2  # characters before the ellipsis, which is one itself
    return f"{name[:head]}…{name[len(name) - (limit - head - 1) :]}"


def write(figure: Figure, file: str | Path, *titles: str) -> Path:
    """Write a figure with a title to a file, and return its path.

    Args:
        figure: the figure.
        file: path to write to; its suffix is the format.
        titles: lines of the title. Too wide ones are broken, and empty ones left out.

    Raises:
        UsageError: if the file cannot be written.
    """
    title = figure.suptitle("", fontsize=TITLE, parse_math=False)  # names may have a dollar
    num_chars = int(figure.get_figwidth() / CHARACTER)  # CHARACTER: inches of a wide letter
    title.set_text("\n".join(textwrap.fill(line, num_chars) for line in titles if line))
    try:
        figure.savefig(file, dpi=DPI)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error
    return Path(file)


def choose_colors(matrices: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return colours for the heat maps of several matrices, on one scale.

    Returns:
        Arguments of matplotlib's ``imshow``. If no value is below 0: shades of blue from 0 to the
        largest value. Else blue for values below 0, white for 0 and red for values above, from
        -x to x, where x is the largest absolute value.
    """
    limit = max(float(np.abs(matrix).max()) for matrix in matrices) or 1.0  # 1 if all are 0
    if min(float(matrix.min()) for matrix in matrices) < 0:
        return {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    return {"cmap": "Blues", "vmin": 0.0, "vmax": limit}


def draw_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    titles: Sequence[str],
    axes: tuple[str, str],
    label: str,
    file: Path,
    columns: int | None = None,
    colors: dict[str, Any] | None = None,
) -> Path:
    """Draw square matrices over interactions, a panel each, on one scale.

    Args:
        panels: title and [n, n] matrix of each panel, the newest interaction last; ticks count
            back from it, which is 0.
        titles: lines of the title of the figure.
        axes: labels of columns and of rows, shown at outer panels only.
        label: label of the colours.
        file: path to write to, which is returned.
        columns: number of panels in a row; by default all, up to ``ABREAST``.
        colors: arguments of ``imshow``; by default those of :func:`choose_colors`.
    """
    # A grid of square panels, which share 12 inches, but have sides of 1.5 to 3.2 inches.
    columns = columns or min(len(panels), ABREAST)
    rows = math.ceil(len(panels) / columns)
    side = min(3.2, max(1.5, 12 / max(columns, rows)))

    # Beside the panels, 1.8 inches are for labels and colours. The title needs a width of 5.5
    # inches, and a height of 0.25 for each of its lines; 0.7 are for the labels below.
    width = max(side * columns + 1.8, 5.5)
    height = side * rows + 0.7 + 0.25 * len(titles)
    # panels are square: "compressed" packs them without gaps between them
    figure = Figure(figsize=(width, height), layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)

    # The last row may have more places than panels; those stay empty.
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)

    # Draw each matrix, with one scale of colours for all. Only panels at the left and at the bottom
    # have labels.
    style = colors or choose_colors([matrix for _, matrix in panels])
    font_size = 10 if side > 2.2 else SMALL  # points: SMALL for small panels
    image: Any = None
    for index, (panel, (name, matrix)) in enumerate(zip(grid.flat, panels, strict=False)):
        # On both axes the interactions are at 1 - n (the oldest) to 0 (the newest), in cells of
        # size 1. The outer edges of these cells are the left, right, bottom and top of the picture.
        first_edge, last_edge = 0.5 - len(matrix), 0.5
        extent = (first_edge, last_edge, last_edge, first_edge)
        image = panel.imshow(matrix, extent=extent, interpolation="nearest", **style)
        panel.set_title(name, fontsize=font_size)
        is_left = index % columns == 0
        is_bottom = index + columns >= len(panels)
        panel.tick_params(labelsize=font_size, labelleft=is_left, labelbottom=is_bottom)
        panel.set_xlabel(axes[0] if is_bottom else "", fontsize=font_size)
        panel.set_ylabel(axes[1] if is_left else "", fontsize=font_size)
        for axis in (panel.xaxis, panel.yaxis):  # whole numbers, about two an inch
            num_steps = max(2, int(2 * side))
            axis.set_major_locator(MaxNLocator(num_steps, integer=True, min_n_ticks=1))

    aspect = 20 * min(rows, 3)  # length by width: with more rows the bar is longer, but no wider
    figure.colorbar(image, ax=grid, shrink=0.8, label=label, aspect=aspect)
    return write(figure, file, *titles)


def draw_explanation(effects: pd.DataFrame, file: str | Path, title: str = "") -> Path:
    """Draw why items are recommended: a cell for each item and past interaction of the user.

    Its colour shows by how much the score of the item falls if the interaction is left out of the
    history. If there is room, a number shows by how many ranks the item falls; below 0, it rises.

    Args:
        effects: table that ``Recommender.explain`` returns: a row for each recommended item and
            past interaction.
        file: path to write to, such as ``because.png``; it is returned.
        title: title of the picture, such as whose history it is.

    Raises:
        UsageError: if the history has only one interaction, or the file cannot be written.
    """
    if effects["steps_back"].max() == 1:
        raise UsageError(
            "history: it has one known interaction only, without which nothing is left"
        )

    # ``items`` has a line for each item, in their order in ``effects``. ``tables`` has, by name of
    # a column of ``effects`` such as score_change, a table with a line for each item and a column
    # for each past interaction. These columns are sorted by steps_back, which counts from the
    # newest. They are reversed: matrices [items, past interactions] begin with the oldest.
    items = effects.drop_duplicates("item").set_index("item")
    tables = effects.pivot(index="item", columns="steps_back").loc[items.index]
    loss = -tables["score_change"].to_numpy()[:, ::-1]
    rank_change = tables["rank_change"].to_numpy(int)[:, ::-1]
    past = tables["past"].iloc[0].to_list()[::-1]
    num_items, length = loss.shape

    # 0.34 inches for each column and row, and room for labels and colours.
    size = min(3.5 + 0.34 * length, 17), 2.6 + 0.34 * num_items
    figure = Figure(figsize=size, layout="constrained")

    # A cell for each item and interaction, with names on both axes, cut by ``shorten``. More than
    # MAX_NAMES interactions have no room for names: matplotlib numbers some, 0 for the oldest.
    panel = figure.subplots()
    image = panel.imshow(loss, aspect="auto", interpolation="nearest", **choose_colors([loss]))
    labels = [f"{shorten(str(name))}  ({rank})" for name, rank in items["rank"].items()]
    panel.set_yticks(range(num_items), labels)
    panel.set(ylabel="item (rank)", xlabel="past interaction, the newest on the right")
    if length <= MAX_NAMES:
        panel.set_xticks(range(length), [shorten(str(name)) for name in past], rotation=90)
    panel.tick_params(labelsize=SMALL)
    for text in (*panel.get_xticklabels(), *panel.get_yticklabels()):
        text.set_parse_math(False)  # a dollar in a name does not start a formula

    caption = ""
    if loss.size <= MAX_NUMBERS:  # else cells are too small for numbers
        caption = "numbers: ranks it falls without the interaction"
        _write_rank_changes(panel, rank_change, loss)
    figure.colorbar(image, ax=panel, label="score lost without it")
    return write(figure, file, title, caption)


def _write_rank_changes(panel: Any, rank_change: np.ndarray, loss: np.ndarray) -> None:
    """Write numbers into a heat map: in each cell by how many ranks an item falls, but no zeros.

    Args:
        panel: the axes of matplotlib with the heat map of ``loss``.
        rank_change: [rows, columns] whole numbers to write.
        loss: [rows, columns] values that the colours show.
    """
    dark_loss = 0.6 * np.abs(loss).max()  # a larger loss has a cell too dark for black text
    for row, column in zip(*np.nonzero(rank_change), strict=True):
        color = "white" if abs(loss[row, column]) > dark_loss else "black"
        text = f"{rank_change[row, column]:+d}"
        panel.text(column, row, text, color=color, ha="center", va="center", fontsize=SMALL - 1)
