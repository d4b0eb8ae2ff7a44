"""Pictures of a run, written into its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention import positional_weights
from recbole_pos.inspect.kernel import attention_maps, kernel_factors
from recbole_pos.model.base import PosRecommender
from recbole_pos.quick_start import load
from recbole_pos.report import RunFolder


def plot_run(path: str | Path) -> list[Path]:
    """Draw what a run has to show: curves.png, attention.png for plugin models, kernel.png.

    Args:
        path: a run folder.

    Returns:
        The files written.

    Raises:
        UsageError: if there is no finished epoch to draw.
    """
    folder = RunFolder(path).require()
    lines = folder.metrics.read_text().splitlines() if folder.metrics.is_file() else []
    history = [json.loads(line) for line in lines]
    if not history:
        raise UsageError(f"{folder.path} has no finished epoch yet")
    experiment = load(path)
    metric = experiment.config["valid_metric"].lower()
    files = [_curves(history, metric, folder.path / "curves.png")]
    model = experiment.model
    weights = positional_weights(model)
    loader = experiment.loaders["test"] or experiment.loaders["valid"]
    if weights:  # each row divided by its largest weight, as in FPARec's Figure 3
        shown = [matrix / matrix.max(-1, keepdims=True) for matrix in weights]
        label = "weight / largest of its row"
        files.append(_attention(shown, label, folder.path / "attention.png"))
    elif isinstance(model, PosRecommender) and loader:
        shown = attention_maps(model, loader)
        label = "weight, mean over histories"
        if shown:
            files.append(_attention(shown, label, folder.path / "attention.png"))
    factors = kernel_factors(model)
    if factors:
        files.append(_kernel(factors, folder.path / "kernel.png"))
    return files


def _curves(history: list[dict], metric: str, file: Path) -> Path:
    """Training loss and validation metric per epoch; the best epoch is marked."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
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
    return file


def _attention(weights: list[np.ndarray], label: str, file: Path) -> Path:
    """One panel per layer and head of [h, t, t] weights; the last row is the newest event."""
    heads, top = weights[0].shape[0], max(layer.max() for layer in weights)
    size = (3.6 * len(weights) + 0.8, 3.4 * heads)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(heads, len(weights), squeeze=False)
    for column, layer in enumerate(weights):
        for head, matrix in enumerate(layer):
            panel = panels[head, column]
            image = panel.imshow(matrix, cmap="Blues", vmin=0, vmax=top, interpolation="nearest")
            name = f"layer {column + 1}" + (f", head {head + 1}" if heads > 1 else "")
            panel.set(title=name, xlabel="attends to position", ylabel="position")
    figure.colorbar(image, ax=panels, shrink=0.8, label=label)
    figure.savefig(file, dpi=120)
    return file


def _kernel(factors: dict[str, np.ndarray], file: Path) -> Path:
    """One panel per factor, as in the kernel paper's Figure 1; fresh ones are the identity."""
    figure = Figure(figsize=(3.6 * len(factors) + 0.8, 3.4), layout="constrained")
    panels = figure.subplots(1, len(factors), squeeze=False)
    top = max(np.abs(matrix).max() for matrix in factors.values())
    for panel, (name, matrix) in zip(panels[0], factors.items(), strict=True):
        image = panel.imshow(matrix, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
        panel.set(title=name, xlabel="position", ylabel="position (last: newest)")
    figure.colorbar(image, ax=panels, shrink=0.8, label="weight")
    figure.savefig(file, dpi=120)
    return file
