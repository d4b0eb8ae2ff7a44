"""Pictures of a search: learning curves, and scores by option.

Not Optuna's own, which have a legend of all trials and cut off long names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from recbole_pos.inspect.pictures import (
    ABREAST,
    BLUE,
    GRAY,
    PINK,
    SMALL,
    VERMILION,
    new_figure,
    set_whole_ticks,
    shorten,
    write,
)
from recbole_pos.runs.progress import format_value
from recbole_pos.runs.space import Parameter, Space
from recbole_pos.tuning.record import Trial

MAX_LABELS = 12  # of values on an axis
# state of a trial -> marker at the end of its line, and colour of both
ENDS = {
    "finished": ("o", BLUE),
    "stopped": ("|", GRAY),
    "failed": ("x", PINK),
}


def draw_pictures(
    trials: list[Trial], best: Trial, space: Space, metric: str, mode: str, title: str, folder: Path
) -> list[Path]:
    """Draw curves.png and, if a trial has a score, options.png; return these files.

    Args:
        trials, best, space: trials of a search, the best of them, and the searched space.
        metric, mode: name of the validation metric; max or min.
        title: model and dataset, with which the titles begin.
        folder: folder of the pictures.
    """
    ordered = sorted(trials, key=lambda trial: trial is best)  # the best is drawn on top
    scored = [trial for trial in ordered if trial.has_result]
    better = f"{'higher' if mode == 'max' else 'lower'} is better"
    titles = (f"{title}: {len(trials)} trials", better)
    files = [_draw_curves(ordered, best, metric, titles, folder / "curves.png")]
    if scored:
        titles = (f"{title}: options of {len(scored)} trials", f"{better}; orange: the best")
        files.append(_draw_options(scored, best, space, metric, titles, folder / "options.png"))
    return files


def _draw_curves(
    trials: list[Trial], best: Trial, metric: str, titles: tuple[str, str], file: Path
) -> Path:
    """Draw validation by epoch, a line for each trial; its last marker shows how it ended."""
    figure = new_figure(8, 5)
    panel = figure.subplots()
    labels: set[str] = set()
    for trial in trials:
        if trial.curve:
            _draw_curve(panel, trial, trial is best, labels)
    panel.set(xlabel="epoch", ylabel=f"validation {metric}")
    set_whole_ticks(panel.xaxis)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return write(figure, file, *titles)


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


def _draw_options(
    trials: list[Trial], best: Trial, space: Space, metric: str, titles: tuple[str, str], file: Path
) -> Path:
    """Draw the scores of trials over their options, a panel for each option."""
    num_columns = min(len(space.parameters), ABREAST)
    num_rows = math.ceil(len(space.parameters) / num_columns)
    figure = new_figure(max(3.0 * num_columns, 5), 2.8 * num_rows + 0.6)
    panels = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(space.parameters) :]:
        panel.set_visible(False)
    for panel, parameter in zip(panels.flat, space.parameters, strict=False):
        _draw_option(panel, parameter, trials, best)
    for panel in panels[:, 0]:
        panel.set_ylabel(f"validation {metric}")
    return write(figure, file, *titles)


def _draw_option(panel: Any, parameter: Parameter, trials: list[Trial], best: Trial) -> None:
    """Draw the scores of the trials that have an option, over its values."""
    sampled = [trial for trial in trials if parameter.name in trial.options]
    codes = [parameter.encode(trial.options[parameter.name]) for trial in sampled]
    colors = [VERMILION if trial is best else BLUE for trial in sampled]
    panel.scatter(codes, [trial.score for trial in sampled], c=colors, s=25, alpha=0.7)
    panel.set_xlabel(shorten(parameter.name, 24), parse_math=False)
    if parameter.kind == "loguniform":
        panel.set_xscale("log")
    elif parameter.codes is not None:
        ticks = list(parameter.codes[:: math.ceil(len(parameter.codes) / MAX_LABELS)])
        labels = [shorten(format_value(parameter.decode(code)), 16) for code in ticks]
        style = {"rotation": 30, "ha": "right", "fontsize": SMALL, "parse_math": False}
        panel.set_xticks(ticks, labels, **style)
    panel.grid(alpha=0.3)
