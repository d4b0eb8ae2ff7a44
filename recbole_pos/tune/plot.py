"""Pictures of a search: learning curves, parallel coordinates, importance of parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recbole_pos.tune.outcome import Trial, best_of
from recbole_pos.tune.space import Parameter, Space

COLORS = "viridis"
FEWEST = 4  # trials that importance can be told from


def draw(trials: list[Trial], space: Space, metric: str, mode: str, folder: Path) -> list[Path]:
    """Write curves.png, parallel.png and, from four scored trials on, importance.png.

    Args:
        trials: of a search.
        space: what was searched.
        metric: name of the validation metric.
        mode: max or min.
        folder: where to.

    Returns:
        The files written.
    """
    files = [_curves(trials, metric, mode, folder / "curves.png")]
    scored = [trial for trial in trials if trial.score is not None and trial.state != "failed"]
    files.append(_parallel(scored, space, metric, mode, folder / "parallel.png"))
    weights = importance(scored, space, mode)
    if weights:
        files.append(_importance(weights, len(scored), metric, folder / "importance.png"))
    return files


def _curves(trials: list[Trial], metric: str, mode: str, file: Path) -> Path:
    """Validation by epoch; where a line ends the trial was finished (dot), stopped or failed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    best = best_of(trials, mode)
    ends = {"finished": ("o", "tab:blue"), "stopped": ("|", "tab:gray"), "failed": ("x", "tab:red")}
    shown = [trial for trial in trials if trial.curve]
    for trial in shown:
        marker, color = ends[trial.state]
        is_best = best is not None and trial.number == best.number
        color = "tab:orange" if is_best else color
        epochs, values = list(trial.curve), list(trial.curve.values())
        style = {"linewidth": 2.2, "zorder": 3} if is_best else {"linewidth": 0.9, "alpha": 0.6}
        panel.plot(epochs, values, color=color, **style)
        panel.plot(epochs[-1], values[-1], marker, color=color, markersize=7, zorder=4)
    names = {"finished": "finished", "stopped": "stopped by the scheduler", "failed": "failed"}
    for state, (marker, color) in ends.items():
        count = sum(trial.state == state for trial in trials)
        if count:
            panel.plot([], [], marker, color=color, label=f"{names[state]} ({count})")
    if best is not None:
        panel.plot([], [], color="tab:orange", linewidth=2.2, label=f"best: trial {best.number}")
    panel.set(xlabel="epoch", ylabel=f"validation {metric}")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=120)
    return file


def _parallel(scored: list[Trial], space: Space, metric: str, mode: str, file: Path) -> Path:
    """A line per trial through its options to its score; a gap where an option did not exist."""
    axes = [_Axis(parameter) for parameter in space.parameters]
    sign = 1 if mode == "max" else -1
    scored = sorted(scored, key=lambda trial: sign * trial.score)  # the best are drawn last
    scores = [trial.score for trial in scored]
    low, high = min(scores), max(scores)
    figure = Figure(figsize=(1.7 * (len(axes) + 1) + 1.5, 4.8), layout="constrained")
    panel = figure.subplots()
    norm = Normalize(low, high if high > low else low + 1e-9)
    from matplotlib import colormaps

    colors = colormaps[COLORS if mode == "max" else f"{COLORS}_r"]
    for rank, trial in enumerate(scored):
        heights = [axis.height(trial.options) for axis in axes]
        heights.append(float(norm(trial.score)))
        last = rank == len(scored) - 1
        panel.plot(
            range(len(heights)), heights, color=colors(norm(trial.score)), marker=".",
            linewidth=2.5 if last else 1.0, alpha=1.0 if last else 0.75,
        )  # fmt: skip
    for place, axis in enumerate(axes):
        panel.axvline(place, color="black", linewidth=0.8, zorder=0)
        for height, label in axis.labels():
            panel.annotate(label, (place, height), (4, 0), textcoords="offset points", fontsize=8,
                           va="center", bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.5,
                                              "edgecolor": "none"})  # fmt: skip
    panel.axvline(len(axes), color="black", linewidth=0.8, zorder=0)
    for height, value in ((0.0, low), (1.0, high)):
        panel.annotate(f"{value:.4f}", (len(axes), height), (4, 0), textcoords="offset points",
                       fontsize=8, va="center")  # fmt: skip
    names = [f"{axis.parameter.name}{' (log)' if axis.log else ''}" for axis in axes]
    panel.set_xticks(range(len(axes) + 1), [*names, f"valid {metric}"], rotation=20, ha="right")
    panel.set(yticks=[], xlim=(-0.2, len(axes) + 0.5), ylim=(-0.06, 1.06))
    for side in ("top", "left", "right", "bottom"):
        panel.spines[side].set_visible(False)
    panel.set_title("a line per trial; thick: the best", fontsize=10)
    figure.savefig(file, dpi=120)
    return file


class _Axis:
    """Heights from 0 to 1 for the values of a parameter."""

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
        if self.parameter.name not in options:
            return math.nan
        if self.high == self.low:
            return 0.5
        return (self._scale(options[self.parameter.name]) - self.low) / (self.high - self.low)

    def labels(self) -> list[tuple[float, str]]:
        parameter = self.parameter
        values = parameter.values if parameter.kind == "choice" else parameter.ends()
        return [(self.height({parameter.name: v}), _label(v)) for v in values]


def _label(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def importance(scored: list[Trial], space: Space, mode: str) -> dict[str, float]:
    """Share of the spread of scores that each parameter explains, by Optuna's fANOVA.

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
    study = optuna.create_study(direction={"max": "maximize", "min": "minimize"}[mode])
    ranges = {parameter.name: _distribution(parameter) for parameter in parameters}
    for trial in scored:
        values = {p.name: _position(p, trial.options[p.name]) for p in parameters}
        made = optuna.trial.create_trial(params=values, distributions=ranges, value=trial.score)
        study.add_trial(made)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _position(parameter: Parameter, value: Any) -> Any:
    return parameter.values.index(value) if parameter.kind == "choice" else value


def _distribution(parameter: Parameter) -> Any:
    from optuna import distributions

    if parameter.kind == "choice":
        return distributions.CategoricalDistribution(list(range(len(parameter.values))))
    low, high = parameter.ends()
    if isinstance(low, int) and isinstance(high, int):
        return distributions.IntDistribution(low, high)
    return distributions.FloatDistribution(low, high, log=parameter.kind == "loguniform")


def _importance(weights: dict[str, float], trials: int, metric: str, file: Path) -> Path:
    figure = Figure(figsize=(6.5, 1.3 + 0.42 * len(weights)), layout="constrained")
    panel = figure.subplots()
    names = list(weights)[::-1]
    bars = panel.barh(names, [weights[name] for name in names], color="tab:blue")
    panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    panel.set(xlabel=f"share of the spread of validation {metric} (fANOVA, {trials} trials)")
    panel.set_xlim(0, 1.12 * max(weights.values()))
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.savefig(file, dpi=120)
    return file
