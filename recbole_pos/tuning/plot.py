"""Pictures of a search: learning curves, parallel coordinates, importance of parameters.

Not Optuna's own, which have a legend of all trials and cut off long names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib import colormaps
from matplotlib.colors import Normalize

from recbole_pos.inspect.pictures import (
    BLUE,
    GRAY,
    PINK,
    SMALL,
    VERMILION,
    new_figure,
    set_title,
    set_whole_ticks,
    shorten,
    write,
)
from recbole_pos.runs.searchers import OptunaSearcher
from recbole_pos.runs.space import Parameter, Space
from recbole_pos.tuning.record import Trial, find_best_trial
from recbole_pos.tuning.trials import show_value

FEWEST = 4  # least trials for importance
LABELS = 12  # most labels of values on an axis
# state of a trial -> marker at the end of its line, and colour of both
ENDS = {
    "finished": ("o", BLUE),
    "stopped": ("|", GRAY),
    "failed": ("x", PINK),
    "interrupted": (".", GRAY),
}


def draw(
    trials: list[Trial], space: Space, metric: str, mode: str, what: str, folder: Path
) -> list[Path]:
    """Write curves.png, parallel.png and, from four scored trials on, importance.png.

    Args:
        trials: trials of a search.
        space: the searched space.
        metric: name of the validation metric.
        mode: max or min.
        what: model and data, for the titles.
        folder: folder of the pictures.

    Returns:
        The files written.
    """
    better = f"{'higher' if mode == 'max' else 'lower'} is better"
    scored = [trial for trial in trials if trial.score is not None and trial.state != "failed"]
    sign = 1 if mode == "max" else -1
    scored.sort(key=lambda trial: (sign * (trial.score or 0.0), -trial.number))  # the best is last
    titles = (f"{what}: {len(trials)} trials", better)
    files = [_draw_curves(trials, metric, mode, titles, folder / "curves.png")]
    if scored:
        titles = (
            f"{what}: options of {len(scored)} trials",
            f"a line per trial, darker where better ({better}); thick and orange: the best",
        )
        files.append(_draw_parallel(scored, space, metric, titles, folder / "parallel.png"))
    if shares := importance(scored, space, mode):
        titles = (f"{what}: importance of options", f"fANOVA of {len(scored)} trials")
        files.append(_draw_importance(shares, metric, titles, folder / "importance.png"))
    return files


def _draw_curves(
    trials: list[Trial], metric: str, mode: str, titles: tuple[str, str], file: Path
) -> Path:
    """Draw validation by epoch, a line for each trial; its last marker shows how it ended."""
    figure = new_figure(8, 5)
    panel = figure.subplots()
    best = find_best_trial(trials, mode)
    labelled = set[str]()
    for trial in sorted(trials, key=lambda trial: trial is best):  # the best on top
        if not trial.curve:
            continue
        epochs, values = list(trial.curve), list(trial.curve.values())
        marker, color = ENDS[trial.state]
        style: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.6}
        label = trial.state
        if trial is best:
            color, style = VERMILION, {"linewidth": 2.2}
            label = f"trial {trial.number}, the best: {trial.score:.4f} in epoch {trial.best_epoch}"
        panel.plot(epochs, values, color=color, **style)
        ends = panel.plot(epochs[-1], values[-1], marker, color=color, markersize=7)
        if label not in labelled:
            ends[0].set_label(label)
            labelled.add(label)
        if trial is best and trial.best_epoch in trial.curve:
            best_value = trial.curve[trial.best_epoch]
            panel.plot(trial.best_epoch, best_value, "*", color=color, markersize=14)
    panel.set(xlabel="epoch", ylabel=f"validation {metric}")
    set_whole_ticks(panel.xaxis)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    set_title(figure, *titles)
    return write(figure, file)


def _draw_parallel(
    scored: list[Trial], space: Space, metric: str, titles: tuple[str, str], file: Path
) -> Path:
    """Draw a line for each trial through its options to its score; gaps for missing options."""
    parameters = space.parameters
    right = len(parameters)  # where the axis of scores is
    figure = new_figure(max(1.7 * right + 3.2, 6), 5)
    panel = figure.subplots()
    scores = [trial.score or 0.0 for trial in scored]
    low, high = min(scores), max(scores)
    norm = Normalize(low, high if high > low else low + 1e-9)  # a range must not be empty
    shades = np.linspace(0.35, 1, len(scored))
    for trial, score, shade in zip(scored, scores, shades, strict=True):
        is_best = trial is scored[-1]
        heights = [_height(parameter, trial.options) for parameter in parameters]
        color, width = (VERMILION, 2.5) if is_best else (colormaps["Blues"](shade), 1.0)
        panel.plot([*heights, float(norm(score))], color=color, marker=".", linewidth=width)
    style: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
    style |= {"fontsize": SMALL, "parse_math": False}
    white = {"facecolor": "white", "alpha": 0.7, "pad": 0.5, "edgecolor": "none"}
    for place, parameter in enumerate(parameters):
        values = parameter.ends()
        for value in values[:: math.ceil(len(values) / LABELS)]:
            at = place, _height(parameter, {parameter.name: value})
            panel.annotate(shorten(show_value(value), 20), at, bbox=white, **style)
    for value in sorted({low, high}):
        panel.annotate(f"{value:.4f}", (right, float(norm(value))), **style)
    for place in range(right + 1):
        panel.axvline(place, color="black", linewidth=0.8, zorder=0)
    names = [shorten(p.name) + " (log)" * (p.kind == "loguniform") for p in parameters]
    names.append(f"validation {metric}")
    panel.set_xticks(range(right + 1), names, rotation=20, ha="right", parse_math=False)
    panel.set(yticks=[], xlim=(-0.2, right + 0.5), ylim=(-0.06, 1.06))
    panel.spines[:].set_visible(False)
    set_title(figure, *titles)
    return write(figure, file)


def _height(parameter: Parameter, options: dict[str, Any]) -> float:
    """Return the height of an option between the ends of its axis, from 0 to 1; nan without it."""
    if parameter.name not in options:
        return math.nan
    codes = [parameter.encode(value) for value in (options[parameter.name], *parameter.ends())]
    value, *ends = map(math.log, codes) if parameter.kind == "loguniform" else codes
    low, high = min(ends), max(ends)
    return 0.5 if high == low else (value - low) / (high - low)


def importance(scored: list[Trial], space: Space, mode: str) -> dict[str, float]:
    """Return the share of the variance of scores that each parameter explains, by Optuna's fANOVA.

    Hutter, Hoos and Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter Importance",
    2014: a random forest predicts the score, and its variance is divided among the parameters.
    Parameters under a condition are left out, since fANOVA needs values in every trial.

    Returns:
        Shares that add up to one, the largest first; empty with too few trials, or equal scores.
    """
    everywhere = [p for p in space.parameters if all(p.name in t.options for t in scored)]
    if len(scored) < FEWEST or not everywhere or len({t.score for t in scored}) == 1:
        return {}
    searcher = OptunaSearcher(space, mode, 0)
    for trial in sorted(scored, key=lambda trial: trial.number):
        searcher.recall(trial.number, trial.options)
        searcher.tell(trial.number, trial.score)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(searcher.study, evaluator=evaluator))


def _draw_importance(
    shares: dict[str, float], metric: str, titles: tuple[str, str], file: Path
) -> Path:
    """Draw a bar for the importance of each parameter."""
    figure = new_figure(7, 1.9 + 0.42 * len(shares))
    panel = figure.subplots()
    names = list(shares)[::-1]
    bars = panel.barh(range(len(names)), [shares[name] for name in names], color=BLUE)
    panel.set_yticks(range(len(names)), [shorten(name) for name in names], parse_math=False)
    panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    panel.set(xlabel=f"share of the spread of validation {metric}")
    panel.set_xlim(0, 1.12 * max(shares.values()))
    panel.spines[["top", "right"]].set_visible(False)
    set_title(figure, *titles)
    return write(figure, file)
