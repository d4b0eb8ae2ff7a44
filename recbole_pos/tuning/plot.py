"""The picture of a search: the learning curves of its trials.

Not Optuna's own, which has a legend of all trials and cuts off long names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_pos.inspect.pictures import (
    BLUE,
    GRAY,
    PINK,
    VERMILION,
    new_figure,
    set_whole_ticks,
    write,
)
from recbole_pos.tuning.record import Trial

# state of a trial -> marker at the end of its line, and colour of both
ENDS = {
    "finished": ("o", BLUE),
    "stopped": ("|", GRAY),
    "failed": ("x", PINK),
}


def draw_curves(
    trials: list[Trial], best: Trial, metric: str, mode: str, title: str, file: Path
) -> Path:
    """Draw validation by epoch, a line for each trial; its last marker shows how it ended.

    Args:
        trials, best: trials of a search, and the best of them.
        metric, mode: name of the validation metric; max or min.
        title: model and dataset, with which the title begins.
        file: the picture, which is returned.
    """
    better = f"{'higher' if mode == 'max' else 'lower'} is better"
    figure = new_figure(8, 5)
    panel = figure.subplots()
    labels: set[str] = set()
    for trial in sorted(trials, key=lambda trial: trial is best):  # the best is drawn on top
        if trial.curve:
            _draw_curve(panel, trial, trial is best, labels)
    panel.set(xlabel="epoch", ylabel=f"validation {metric}")
    set_whole_ticks(panel.xaxis)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return write(figure, file, f"{title}: {len(trials)} trials", better)


def _draw_curve(panel: Any, trial: Trial, is_best: bool, labels: set[str]) -> None:
    """Draw the curve of a trial; put its label into the legend and ``labels`` if it is new."""
    epochs = list(trial.curve)
    values = list(trial.curve.values())
    marker, color = ENDS[trial.state]
    label, width, alpha = trial.state, 0.9, 0.6
    if is_best:
        color, width, alpha = VERMILION, 2.2, 1.0
        label = f"trial {trial.number}, the best: {trial.score:.4f} in epoch {trial.best_epoch}"
    panel.plot(epochs, values, color=color, linewidth=width, alpha=alpha)
    (end,) = panel.plot(epochs[-1], values[-1], marker, color=color, markersize=7)
    if label not in labels:
        end.set_label(label)
        labels.add(label)
    if is_best and trial.best_epoch in trial.curve:
        best_value = trial.curve[trial.best_epoch]
        panel.plot(trial.best_epoch, best_value, "*", color=color, markersize=14)
