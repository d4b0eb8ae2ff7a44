"""Pictures of a run, written into its folder."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np

from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention import positional_weights
from recbole_pos.quick_start import load
from recbole_pos.report import RunFolder

matplotlib.use("Agg")  # files only: works without a display
from matplotlib import pyplot as plt  # noqa: E402


def plot_run(path: str | Path) -> list[Path]:
    """Draw what a run has to show: curves.png, and attention.png for positional attention.

    Args:
        path: a run folder.

    Returns:
        The files written.

    Raises:
        UsageError: if there is no finished epoch to draw.
    """
    folder = RunFolder(path)
    if not folder.metrics.is_file():
        raise UsageError(f"{folder.path} is not a run folder: it has no metrics.jsonl")
    history = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    if not history:
        raise UsageError(f"{folder.path} has no finished epoch yet")
    experiment = load(path)
    metric = experiment.config["valid_metric"].lower()
    files = [_curves(history, metric, folder.path / "curves.png")]
    weights = positional_weights(experiment.model)
    if weights:
        files.append(_attention(weights, folder.path / "attention.png"))
    return files


def _curves(history: list[dict], metric: str, file: Path) -> Path:
    """Training loss and validation metric per epoch; the best epoch is marked."""
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    left.plot([h["epoch"] for h in history], [h["loss"] for h in history], color="tab:gray")
    left.set(xlabel="epoch", ylabel="training loss (gray)")
    scored = [(h["epoch"], h["valid"][metric]) for h in history if h["valid"]]
    if scored:
        right = left.twinx()
        epochs, values = zip(*scored, strict=True)
        right.plot(epochs, values, color="tab:blue")
        best = int(np.argmax(values))
        right.plot(epochs[best], values[best], "o", color="tab:red")
        right.annotate(f"{values[best]:.4f}", (epochs[best], values[best]), xytext=(5, -12),
                       textcoords="offset points")  # fmt: skip
        right.set_ylabel(f"validation {metric} (blue)")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


def _attention(weights: list[np.ndarray], file: Path) -> Path:
    """One panel per layer and head; each row divided by its largest weight, as in Figure 3."""
    heads = weights[0].shape[0]
    size = (3.6 * len(weights) + 0.8, 3.4 * heads)
    figure, panels = plt.subplots(
        heads, len(weights), figsize=size, squeeze=False, layout="constrained"
    )
    for column, layer in enumerate(weights):
        for head, matrix in enumerate(layer):
            panel = panels[head, column]
            shown = matrix / matrix.max(-1, keepdims=True)
            image = panel.imshow(shown, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            name = f"layer {column + 1}" + (f", head {head + 1}" if heads > 1 else "")
            panel.set(title=name, xlabel="attends to position", ylabel="position")
    figure.colorbar(image, ax=panels, shrink=0.8, label="weight / largest of its row")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
