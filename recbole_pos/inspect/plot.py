"""``recbole-pos plot``: pictures of a run, written into its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recbole_pos.experiment.folder import RunFolder
from recbole_pos.inspect.attention import positional_weights
from recbole_pos.inspect.encoding import agreement, encodings_in, session_vectors
from recbole_pos.inspect.heatmaps import draw_attention, draw_kernel, draw_triangles
from recbole_pos.inspect.kernel import attention_maps, kernel_factors
from recbole_pos.inspect.metrics import best_epoch, read_metrics
from recbole_pos.inspect.pictures import BLUE, GRAY, new_figure, set_title, whole_numbers, write
from recbole_pos.inspect.trained import name_of, open_run, require_finite
from recbole_pos.model.base import PosRecommender

FEW = 30  # epochs, of which each has a mark


def plot_run(path: str | Path, data_path: str | Path | None = None) -> list[Path]:
    """Draw what a run has to show: curves.png, attention.png for plugin models, kernel.png where it
    has one, positions.png where it adds encodings of positions to its input.

    Args:
        path: a run folder.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Returns:
        The files written.

    Raises:
        UsageError: if there is no finished epoch to draw, or metrics.jsonl is damaged.
        CheckpointError: if the weights of the model are no numbers.
    """
    folder = RunFolder(path).require()
    experiment = open_run(folder.path, data_path)[1]
    metric = experiment.config["valid_metric"].lower()
    history, note = read_metrics(folder.metrics, metric)
    name, model = name_of(experiment), experiment.model
    bigger = experiment.config["valid_metric_bigger"]
    files = [draw_curves(history, metric, bigger, (name, note), folder.path / "curves.png")]
    weights = positional_weights(model)
    loader = experiment.loaders["test"] or experiment.loaders["valid"]
    picture = folder.path / "attention.png"
    if weights:  # each row divided by its largest weight, as in FPARec's Figure 3
        require_finite(weights, "attention")
        floor = np.finfo(weights[0].dtype).tiny
        shown = [matrix / np.maximum(matrix.max(-1, keepdims=True), floor) for matrix in weights]
        titles = (f"{name}: attention by position", "every row divided by its largest weight")
        files.append(draw_attention(shown, titles, "weight / largest of its row", picture))
    elif isinstance(model, PosRecommender) and loader:
        maps = attention_maps(model, loader)
        if maps:
            require_finite(maps.weights, "attention")
            titles = (f"{name}: attention weights", maps.told)
            files.append(draw_attention(maps.weights, titles, "weight, mean of histories", picture))
    factors = kernel_factors(model)
    if factors:
        files.append(draw_kernel(factors, name, folder.path / "kernel.png"))
    if encodings := encodings_in(model):
        matrices = {
            kind: agreement(session_vectors(scheme, scheme.max_length))
            for kind, scheme in encodings.items()
        }
        require_finite(list(matrices.values()), "encodings of positions")
        titles = (f"{name}: positions", "exp(p_i . p_j / sqrt(d)), rows divided by their largest")
        picture = folder.path / "positions.png"
        files.append(draw_triangles(matrices, titles, "agreement / largest of its row", picture))
    return files


def draw_curves(
    history: Sequence[dict[str, Any]],
    metric: str,
    bigger: bool,
    titles: Sequence[str],
    file: Path,
) -> Path:
    """Training loss and validation metric per epoch; the best epoch is marked.

    Args:
        history: lines of metrics.jsonl.
        metric: name of the validation metric.
        bigger: whether more of it is better.
        titles: lines of the title.
        file: to write.
    """
    scores = [(line["epoch"], line["valid"][metric]) for line in history if line["valid"]]
    figure = new_figure(7.5, 5.6 if scores else 3.6)
    panels = figure.subplots(1 + bool(scores), 1, sharex=True, squeeze=False)[:, 0]
    style = {"marker": "o", "markersize": 4} if len(history) <= FEW else {}
    losses = [(line["epoch"], line["loss"]) for line in history]
    panels[0].plot(*zip(*losses, strict=True), color=GRAY, **style)
    panels[0].set_ylabel("training loss")
    told = "no epoch was validated"
    if scores:
        panels[1].plot(*zip(*scores, strict=True), color=BLUE, **style)
        best = best_epoch(scores, bigger)
        value = dict(scores)[best]
        panels[1].plot(best, value, "o", color=BLUE, markersize=9)
        panels[1].set_ylabel(f"validation {metric}")
        better = "higher" if bigger else "lower"
        told = f"best epoch {best} (dot): {metric} {value:.4f}, {better} is better"
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("epoch")
    first, last = history[0]["epoch"], history[-1]["epoch"]
    pad = max(0.04 * (last - first), 0.3)
    panels[-1].set_xlim(first - pad, last + pad)
    whole_numbers(panels[-1].xaxis)
    set_title(figure, titles[0], told, *titles[1:])
    return write(figure, file)
