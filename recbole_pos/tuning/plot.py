"""Pictures of a search: learning curves, parallel coordinates, importance of parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
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
from recbole_pos.runs.space import Parameter, Space
from recbole_pos.tuning.record import Trial, find_best_trial

FEWEST = 4  # least trials for importance
LABELS = 12  # most labels of values on an axis
# state of a trial -> marker at the end of its line, colour of both, and name in the legend
ENDS = {
    "finished": ("o", BLUE, "finished"),
    "stopped": ("|", GRAY, "stopped by the scheduler"),
    "failed": ("x", PINK, "failed"),
    "interrupted": (".", GRAY, "interrupted"),
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
    files = [_draw_curves(trials, metric, mode, what, folder / "curves.png")]
    scored = [trial for trial in trials if trial.score is not None and trial.state != "failed"]
    if scored:
        files.append(_draw_parallel(scored, space, metric, mode, what, folder / "parallel.png"))
    weights = importance(scored, space, mode)
    if weights:
        file = folder / "importance.png"
        files.append(_draw_importance(weights, len(scored), metric, what, file))
    return files


def _draw_curves(trials: list[Trial], metric: str, mode: str, what: str, file: Path) -> Path:
    """Draw validation by epoch, a line for each trial; its last marker shows how it ended."""
    figure = new_figure(8, 5)
    panel = figure.subplots()
    best = find_best_trial(trials, mode)
    for trial in trials:
        if not trial.curve:
            continue
        is_best = best is not None and trial.number == best.number
        marker, color, _ = ENDS[trial.state]
        color = VERMILION if is_best else color
        epochs, values = list(trial.curve), list(trial.curve.values())
        style: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.6}
        if is_best:
            style = {"linewidth": 2.2, "zorder": 3}
        panel.plot(epochs, values, color=color, **style)
        panel.plot(epochs[-1], values[-1], marker, color=color, markersize=7, zorder=4)
    lines = [f"{what}: {len(trials)} trials"]
    if best is not None:
        marker = ENDS[best.state][0]
        style = {"color": VERMILION, "linewidth": 2.2, "marker": marker, "markersize": 7}
        panel.plot([], [], label=f"trial {best.number}, the best ({best.state})", **style)
        lines.append(f"best: trial {best.number}, epoch {best.best_epoch}: {best.score:.4f}")
        if best.best_epoch in best.curve:
            at = best.best_epoch, best.curve[best.best_epoch]
            panel.plot(*at, "*", color=VERMILION, markersize=14, zorder=5)
    for state, (marker, color, name) in ENDS.items():
        count = sum(trial.state == state and trial is not best for trial in trials)
        if count:
            others = " others" if best is not None and best.state == state else ""
            label = f"{count}{others} {name}"
            panel.plot([], [], color=color, marker=marker, linewidth=0.9, label=label)
    panel.set(xlabel="epoch", ylabel=f"validation {metric}")
    set_whole_ticks(panel.xaxis)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    set_title(figure, lines[0], "; ".join(lines[1:] + [_direction(mode)]))
    return write(figure, file)


def _direction(mode: str) -> str:
    """Return which scores are better, in words."""
    return f"{'higher' if mode == 'max' else 'lower'} is better"


def _draw_parallel(
    scored: list[Trial], space: Space, metric: str, mode: str, what: str, file: Path
) -> Path:
    """Draw a line for each trial through its options to its score; gaps for missing options."""
    axes = [_Axis(parameter) for parameter in space.parameters]
    best = find_best_trial(scored, mode)
    sign = 1 if mode == "max" else -1
    scored = sorted(scored, key=lambda t: (t is best, sign * _score(t)))  # better ones on top
    scores = [_score(trial) for trial in scored]
    low, high = min(scores), max(scores)
    figure = new_figure(max(1.7 * (len(axes) + 1) + 1.5, 6), 5)
    panel = figure.subplots()
    norm = Normalize(low, high if high > low else low + 1e-9)  # a range must not be empty
    colors = colormaps["Blues"]
    for trial in scored:
        heights = [axis.height(trial.options) for axis in axes]
        height = float(norm(_score(trial)))
        shade = height if mode == "max" else 1 - height
        color = VERMILION if trial is best else colors(0.35 + 0.65 * shade)
        width = 2.5 if trial is best else 1.0
        panel.plot([*heights, height], color=color, marker=".", linewidth=width)
    style: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points"}
    style |= {"fontsize": SMALL, "va": "center", "parse_math": False}
    white = {"facecolor": "white", "alpha": 0.7, "pad": 0.5, "edgecolor": "none"}
    for place, axis in enumerate(axes):
        panel.axvline(place, color="black", linewidth=0.8, zorder=0)
        for height, label in axis.labels():
            panel.annotate(shorten(label, 20), (place, height), bbox=white, **style)
    panel.axvline(len(axes), color="black", linewidth=0.8, zorder=0)
    for height, value in ((0.0, low), (1.0, high)) if high > low else ((0.0, low),):
        panel.annotate(f"{value:.4f}", (len(axes), height), **style)
    names = [shorten(axis.parameter.name) + " (log)" * axis.log for axis in axes]
    panel.set_xticks(range(len(axes) + 1))
    panel.set_xticklabels(
        [*names, f"validation {metric}"], rotation=20, ha="right", parse_math=False
    )
    panel.set(yticks=[], xlim=(-0.2, len(axes) + 0.5), ylim=(-0.06, 1.06))
    for side in ("top", "left", "right", "bottom"):
        panel.spines[side].set_visible(False)
    subtitle = (
        f"a line per trial, darker where better ({_direction(mode)}); thick and orange: the best"
    )
    set_title(figure, f"{what}: options of {len(scored)} trials", subtitle)
    return write(figure, file)


def _score(trial: Trial) -> float:
    assert trial.score is not None  # only scored trials are drawn
    return trial.score


class _Axis:
    """An axis of parallel coordinates: values of a parameter at heights from 0 to 1."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter, self.log = parameter, parameter.kind == "loguniform"
        if parameter.kind == "choice":
            self.low, self.high = 0.0, float(max(len(parameter.values) - 1, 1))
        else:
            self.low, self.high = (self._scale(value) for value in parameter.ends())

    def _scale(self, value: Any) -> float:
        if self.parameter.kind == "choice":
            return float(self.parameter.values.index(value))
        return math.log(value) if self.log else float(value)

    def height(self, options: dict[str, Any]) -> float:
        """Return the height of a trial's option; nan if it has none, so that its line has a gap."""
        if self.parameter.name not in options:
            return math.nan
        if self.high == self.low:
            return 0.5
        return (self._scale(options[self.parameter.name]) - self.low) / (self.high - self.low)

    def labels(self) -> list[tuple[float, str]]:
        """Return heights and texts of at most ``LABELS`` values."""
        parameter = self.parameter
        values = parameter.values if parameter.kind == "choice" else parameter.ends()
        values = values[:: math.ceil(len(values) / LABELS)]
        return [(self.height({parameter.name: v}), _label(v)) for v in values]


def _label(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def importance(scored: list[Trial], space: Space, mode: str) -> dict[str, float]:
    """Return the share of the variance of scores that each parameter explains, by Optuna's fANOVA.

    Hutter, Hoos and Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter Importance",
    2014: a random forest predicts the score, and its variance is divided among the parameters.
    Parameters under a condition are left out, since fANOVA needs values in every trial.

    Returns:
        Shares that add up to one, the largest first; empty with too few trials, or equal scores.
    """
    parameters = [p for p in space.parameters if all(p.name in t.options for t in scored)]
    if len(scored) < FEWEST or not parameters or np.ptp([t.score for t in scored]) == 0:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = optuna.study.StudyDirection[{"max": "MAXIMIZE", "min": "MINIMIZE"}[mode]]
    study = optuna.create_study(direction=direction)
    ranges = {parameter.name: _distribution(parameter) for parameter in parameters}
    for trial in scored:
        values = {p.name: _position(p, trial.options[p.name]) for p in parameters}
        optuna_trial = optuna.trial.create_trial(
            params=values, distributions=ranges, value=trial.score
        )
        study.add_trial(optuna_trial)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _position(parameter: Parameter, value: Any) -> Any:
    """Return a value as its Optuna distribution has it: choices, which may be lists, by number."""
    return parameter.values.index(value) if parameter.kind == "choice" else value


def _distribution(parameter: Parameter) -> Any:
    """Return the Optuna distribution of a parameter."""
    from optuna import distributions

    if parameter.kind == "choice":
        return distributions.CategoricalDistribution(list(range(len(parameter.values))))
    low, high = parameter.ends()
    if isinstance(low, int) and isinstance(high, int):
        return distributions.IntDistribution(low, high)
    return distributions.FloatDistribution(low, high, log=parameter.kind == "loguniform")


def _draw_importance(
    weights: dict[str, float], trials: int, metric: str, what: str, file: Path
) -> Path:
    """Draw a bar for the importance of each parameter."""
    figure = new_figure(7, 1.9 + 0.42 * len(weights))
    panel = figure.subplots()
    names = list(weights)[::-1]
    bars = panel.barh(range(len(names)), [weights[name] for name in names], color=BLUE)
    panel.set_yticks(range(len(names)))
    panel.set_yticklabels([shorten(name) for name in names], parse_math=False)
    panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    panel.set(xlabel=f"share of the spread of validation {metric}")
    panel.set_xlim(0, 1.12 * max(weights.values()))
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    set_title(figure, f"{what}: importance of options", f"fANOVA of {trials} trials")
    return write(figure, file)
