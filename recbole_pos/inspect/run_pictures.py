"""``recbole-pos plot``: pictures of one run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.inspect.attention import (
    average_attention,
    compute_kernel_factors,
    compute_positional_weights,
)
from recbole_pos.inspect.encoding import compute_agreement, compute_session_vectors, find_encodings
from recbole_pos.inspect.pictures import (
    BLUE,
    GRAY,
    draw_maps,
    draw_triangles,
    new_figure,
    set_whole_ticks,
    write,
)
from recbole_pos.inspect.trained import describe_run, open_run, require_finite
from recbole_pos.model.base import PosRecommender

FEW = 30  # most epochs that are drawn with a mark each
HALF_A_LINE = "metrics.jsonl ends in half a line, which is left out"


def plot_run(path: str | Path, data_path: str | Path | None = None) -> list[Path]:
    """Write curves.png into a run folder, and attention.png, kernel.png and positions.png.

    The last three are written only if the model has attention weights, a kernel or encodings.

    Args:
        path: a run folder.
        data_path: see :func:`open_run`.

    Returns:
        The files written.

    Raises:
        UsageError: if there is no finished epoch to draw, or metrics.jsonl is damaged.
        CheckpointError: if the weights of the model are not finite.
    """
    folder = RunFolder(path).require()
    experiment = open_run(folder.path, data_path)[1]
    metric = experiment.config["valid_metric"].lower()
    epochs, note = read_metrics(folder.metrics, metric)
    name, model = describe_run(experiment), experiment.model
    is_max = experiment.config["valid_metric_bigger"]
    files = [draw_curves(epochs, metric, is_max, (name, note), folder.path / "curves.png")]
    files += _draw_model_attention(experiment, name, folder.path / "attention.png")
    factors = compute_kernel_factors(model)
    if factors:
        files.append(draw_kernel(factors, name, folder.path / "kernel.png"))
    encodings = find_encodings(model)
    if encodings:
        matrices = {
            scheme_name: compute_agreement(compute_session_vectors(scheme, scheme.max_length))
            for scheme_name, scheme in encodings.items()
        }
        require_finite(list(matrices.values()), "encodings of positions")
        titles = (f"{name}: positions", "exp(p_i . p_j / sqrt(d)), rows divided by their largest")
        picture = folder.path / "positions.png"
        files.append(draw_triangles(matrices, titles, "agreement / largest of its row", picture))
    return files


def _draw_model_attention(experiment: Experiment, name: str, file: Path) -> list[Path]:
    """Draw the attention of a model; return its file, or none if there are no weights to draw."""
    weights = compute_positional_weights(experiment.model)
    if weights:  # each row divided by its largest weight, as in FPARec's Figure 3
        require_finite(weights, "attention")
        tiny = np.finfo(weights[0].dtype).tiny
        scaled = [matrix / np.maximum(matrix.max(-1, keepdims=True), tiny) for matrix in weights]
        titles = (f"{name}: attention by position", "every row divided by its largest weight")
        return [draw_attention(scaled, titles, "weight / largest of its row", file)]
    loader = experiment.loaders["test"] or experiment.loaders["valid"]
    if isinstance(experiment.model, PosRecommender) and loader:
        weights, caption = average_attention(experiment.model, loader)
    if not weights:
        return []
    require_finite(weights, "attention")
    titles = (f"{name}: attention weights", caption)
    return [draw_attention(weights, titles, "weight, mean of histories", file)]


def draw_attention(
    weights: Sequence[np.ndarray], titles: Sequence[str], label: str, file: Path
) -> Path:
    """Draw attention weights [h, t, t] of each layer, a panel per head; return ``file``."""
    num_heads = max(len(layer) for layer in weights)
    panels = [
        (f"layer {number}" + (f", head {head + 1}" if num_heads > 1 else ""), layer[head])
        for head in range(num_heads)
        for number, layer in enumerate(weights, 1)
    ]
    axes = ("key interaction (0: newest)", "query interaction (0: newest)")
    columns = len(weights) if num_heads > 1 else None
    return draw_maps(panels, titles, axes, label, file, columns)


def draw_kernel(factors: dict[str, np.ndarray], title: str, file: Path) -> Path:
    """Draw the factors [n, n] of a kernel by name minus their initial identity; return ``file``."""
    panels = [
        (name.replace(",", " - I,", 1), matrix - np.eye(len(matrix)))
        for name, matrix in factors.items()
    ]
    names = " and ".join(dict.fromkeys(name.split(",")[0] for name in factors))
    titles = (f"{title}: positional kernel", f"{names} without the identity that they begin as")
    axes = ("column: interaction (0: newest)", "row: interaction (0: newest)")
    return draw_maps(panels, titles, axes, "weight - identity", file)


def draw_curves(
    epochs: Sequence[dict[str, Any]], metric: str, is_max: bool, titles: Sequence[str], file: Path
) -> Path:
    """Draw training loss and validation metric per epoch, the best epoch marked.

    Args:
        epochs: lines of metrics.jsonl.
        metric: name of the validation metric.
        is_max: whether higher is better.
        titles, file: lines of the title, and path to write to, which is returned.
    """
    scores = [(line["epoch"], line["valid"][metric]) for line in epochs if line["valid"]]
    figure = new_figure(7.5, 5.6 if scores else 3.6)
    panels = figure.subplots(1 + bool(scores), 1, sharex=True, squeeze=False)[:, 0]
    style = {"marker": "o", "markersize": 4} if len(epochs) <= FEW else {}
    losses = [(line["epoch"], line["loss"]) for line in epochs]
    panels[0].plot(*zip(*losses, strict=True), color=GRAY, **style)
    panels[0].set_ylabel("training loss")
    caption = "no epoch was validated"
    if scores:
        panels[1].plot(*zip(*scores, strict=True), color=BLUE, **style)
        choose = max if is_max else min
        best_score = choose(score for _, score in scores)
        # of epochs with equal scores the last, as in RecBole's early stopping
        best_epoch = max(epoch for epoch, score in scores if score == best_score)
        panels[1].plot(best_epoch, best_score, "o", color=BLUE, markersize=9)
        panels[1].set_ylabel(f"validation {metric}")
        better = "higher" if is_max else "lower"
        caption = f"best epoch {best_epoch} (dot): {metric} {best_score:.4f}, {better} is better"
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("epoch")
    first, last = epochs[0]["epoch"], epochs[-1]["epoch"]
    pad = max(0.04 * (last - first), 0.3)
    panels[-1].set_xlim(first - pad, last + pad)
    set_whole_ticks(panels[-1].xaxis)
    return write(figure, file, titles[0], caption, *titles[1:])


class _Line(BaseModel):
    """One line of metrics.jsonl."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    epoch: int
    loss: float
    valid: dict[str, float] | None


def read_metrics(file: Path, metric: str) -> tuple[list[dict[str, Any]], str]:
    """Read the epochs of a run's metrics.jsonl with loss and, where validated, ``metric``.

    Returns:
        Lines in the order of their epochs; and a note if the last line is left out as incomplete,
        which a killed process leaves, else ''.

    Raises:
        UsageError: if the file cannot be read, has no complete line, or a damaged one.
    """
    try:
        lines = file.read_bytes().split(b"\n") if file.exists() else []
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    epochs: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate_json(text).model_dump()
            if line["valid"] and metric not in line["valid"]:
                raise ValueError(f"valid: there is no {metric}")
            if epochs and line["epoch"] <= epochs[-1]["epoch"]:
                raise ValueError(f"epoch {line['epoch']} comes after {epochs[-1]['epoch']}")
        except ValueError as error:
            problem, is_json = str(error), True
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False, include_context=False)[0]
                problem = ": ".join([*map(str, first["loc"]), first["msg"]])
                is_json = first["type"] != "json_invalid"
            if epochs and number == len(lines) and not is_json:
                logging.getLogger(__name__).warning("%s: %s", file.parent, HALF_A_LINE)
                return epochs, HALF_A_LINE
            raise UsageError(
                f"{file}, line {number}: {problem}. `{RunFolder(file.parent).resume_command}` "
                "writes the file again from the checkpoint"
            ) from error
        epochs.append(line)
    if not epochs:
        raise UsageError(f"{file.parent} has no finished epoch yet: no line in {file.name}")
    return epochs, ""
