"""``recbole-pos inspect attention``: how far a model looks back, and its periods of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import FuncFormatter, NullFormatter
from torch import nn

from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.files import write_json
from recbole_pos.inspect.attention import (
    Measured,
    find_attention_layers,
    measure_attention,
    sample_histories,
)
from recbole_pos.inspect.pictures import BLUE, GRAY, SMALL, VERMILION, new_figure, write
from recbole_pos.inspect.trained import Report, describe_run, format_spans, open_run, require_finite
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.schemes import scheme_names
from recbole_pos.values import SECONDS

QUERIES = ("all", "last")
MEANING = {  # of the measures, in their order
    "distance": "sum_j a_ij (i - j), interactions",
    "entropy": "-sum_j a_ij ln a_ij, nats",
    "hours": "sum_j a_ij (t_i - t_j)",
}
RESCALED = "rows of this attention do not sum to one; measured is |a_ij| / sum_j |a_ij|"
UNIFORM = "uniform"
AXES = (
    "attention distance (interactions)",
    "attention entropy (nats)",
    "attention distance (hours)",
)
COLORS = {"all queries": BLUE, "last query": VERMILION}
HOURS = {"hour": 1.0, "day": 24.0, "week": 168.0, "month": 30.44 * 24, "year": 365.25 * 24}
MARKED = ("day", "week", "month", "year")
NEAR = 0.15  # share by which a period may differ from a calendar period that it is marked as


@dataclass(frozen=True)
class Periods:
    """Periods after which time angles of a scheme repeat (TO-RoPE), equal in a group of heads.

    Attributes:
        layer, heads: numbers of the layer and its heads, from 1.
        scheme: name of the scheme.
        all_heads: whether these are all heads of the layer.
        hours, hours_before_training: finite periods now and before training, shortest first.
        near: for each period, the name of the nearest calendar period, or ''.
        planes_without_time: number of planes that do not rotate with time.
    """

    layer: int
    scheme: str
    heads: tuple[int, ...]
    all_heads: bool
    hours: tuple[float, ...]
    hours_before_training: tuple[float, ...]
    near: tuple[str, ...]
    planes_without_time: int

    @property
    def learned(self) -> bool:
        """Whether training has changed any period."""
        return self.hours != self.hours_before_training

    @property
    def label(self) -> str:
        """``layer 1`` or ``layer 1, heads 1-2``."""
        if self.all_heads:
            return f"layer {self.layer}"
        plural = "s" if len(self.heads) > 1 else ""
        return f"layer {self.layer}, head{plural} {format_spans(self.heads)}"


@torch.no_grad()
def find_periods(model: nn.Module) -> list[Periods]:
    """Return the periods of every scheme that rotates query and key by time, layer by layer."""
    periods = []
    for number, layer in enumerate(find_attention_layers(model), 1):
        for name, scheme in layer.position.parts().items():
            seconds = scheme.time_periods()
            if seconds is not None:
                initial = seconds if scheme.fresh_periods is None else scheme.fresh_periods
                pairs = [x.double().cpu().numpy() for x in (seconds, initial)]
                hours = np.stack(pairs, -1) / SECONDS["hours"]
                periods += _group_heads(number, name, hours)
    return periods


def _group_heads(layer: int, scheme: str, hours: np.ndarray) -> list[Periods]:
    """Return periods of groups of heads with equal ``hours`` [h, planes, now and initial]."""
    heads_by_pairs: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for head, pairs in enumerate(hours.tolist(), 1):
        heads_by_pairs.setdefault(tuple(sorted(map(tuple, pairs))), []).append(head)
    is_all = len(heads_by_pairs) == 1
    groups = []
    for pairs, heads in heads_by_pairs.items():
        finite = [pair for pair in pairs if np.isfinite(pair[0])]
        current, initial = (tuple(pair[i] for pair in finite) for i in (0, 1))
        near = tuple(map(_find_calendar_period, current))
        num_still = len(pairs) - len(finite)
        group = Periods(layer, scheme, tuple(heads), is_all, current, initial, near, num_still)
        groups.append(group)
    return groups


def _find_calendar_period(hours: float) -> str:
    """Return which of day, week, month and year is within ``NEAR`` of a period, '' if none is."""
    return next((name for name in MARKED if abs(hours / HOURS[name] - 1) <= NEAR), "")


def inspect_attention(
    path: str | Path,
    users: int = 200,
    min_events: int = 20,
    seed: int = 0,
    data_path: str | Path | None = None,
) -> Report:
    """Measure the attention of a trained model.

    Writes attention.json and attention_distance.png into its run folder, and periods.png for
    schemes that rotate query and key by time.

    Args:
        path, data_path: see :func:`open_run`.
        users: most users to sample, from the test rows, or the validation rows if there are none.
        min_events: least number of interactions in their histories.
        seed: random seed of the sample.

    Raises:
        UsageError: if a number is too small, or there is nothing to measure.
        CheckpointError: if weights, or the attention they give, are not finite.
    """
    limits = (("users", users, 1), ("min_events", min_events, 1), ("seed", seed, 0))
    for name, value, minimum in limits:
        if value < minimum:
            raise UsageError(f"--{name}: {value} is below {minimum}")
    folder, experiment = open_run(path, data_path)
    model, config = experiment.model, experiment.config
    phase = _find_phase(experiment)
    loader = experiment.loaders[phase]
    rows, lengths, num_qualified = sample_histories(model, loader, users, min_events, seed)
    measured = measure_attention(model, loader, rows)
    require_finite(measured.layers, "attention")
    periods = find_periods(model)
    content = {
        "checkpoint": str(path),
        "model": config["model"],
        "dataset": config["dataset"],
        "position": scheme_names(config["position"]),
        "phase": phase,
        "seed": seed,
        "users": len(rows),
        "users_asked": users,
        "min_events": min_events,
        "users_with_min_events": num_qualified,
        "events_per_history": float(lengths.mean()),
        "measures": dict(islice(MEANING.items(), measured.uniform.shape[1])),
        "rows_rescaled": measured.is_rescaled,
        "layers": [
            {
                "layer": number,
                "mean": _name_measures(values.mean(-1)),
                "heads": [_name_measures(head) for head in np.moveaxis(values, -1, 0)],
            }
            for number, values in enumerate(measured.layers, 1)
        ],
        UNIFORM: _name_measures(measured.uniform),
        "periods": [{**asdict(group), "learned": group.learned} for group in periods],
    }
    file = folder.path / "attention.json"
    write_json(file, content)
    name = describe_run(experiment)
    num_users = f"{'all ' if len(rows) < users else ''}{len(rows):,}"
    limit = f"at least {min_events} interactions, {lengths.mean():.1f} on average"
    headline = f"{name}: {num_users} {phase} users with {limit}"
    files = [file, draw_measures(measured, headline, folder.path / "attention_distance.png")]
    if any(group.hours for group in periods):
        files.append(draw_periods(periods, name, folder.path / "periods.png"))
    return Report(headline, _make_parts(content, periods), files, content)


def _find_phase(experiment: Experiment) -> str:
    """Return the phase to measure; raise a UsageError if there is nothing to measure."""
    model = experiment.model
    if not isinstance(model, PosRecommender):
        raise UsageError(
            f"{experiment.config['model']} has RecBole's layers; only attention of the plugin can "
            "be inspected"
        )
    if not find_attention_layers(model):
        raise UsageError(f"{type(model).__name__} has no causal attention layers")
    for phase in ("test", "valid"):
        if experiment.loaders[phase]:
            return phase
    raise UsageError("this split holds nothing out, so there are no test or validation rows")


def _make_parts(content: dict[str, Any], periods: list[Periods]) -> list[str | pd.DataFrame]:
    """Return the tables of a report on the content of attention.json, and lines between them."""
    parts: list[str | pd.DataFrame] = [_make_measures_table(content)]
    parts += [f"{measure}: {meaning}" for measure, meaning in content["measures"].items()]
    if content["rows_rescaled"]:
        parts.append(RESCALED)
    for (layer, scheme), groups_of_layer in groupby(periods, lambda p: (p.layer, p.scheme)):
        groups = list(groups_of_layer)
        is_learned = any(group.learned for group in groups)
        origin = "learned" if is_learned else "fixed by the configuration"
        parts += [f"periods of {scheme}, layer {layer} ({origin})", _make_periods_table(groups)]
    return parts


def _name_measures(values: np.ndarray) -> dict[str, dict[str, float]]:
    """Return values [2, measures] as queries -> measure -> value."""
    return {
        queries: dict(zip(MEANING, row.tolist(), strict=False))
        for queries, row in zip(QUERIES, values, strict=True)
    }


def _make_measures_table(content: dict[str, Any]) -> pd.DataFrame:
    """Return a table of the measures: a row per head, a mean per layer, and equal attention."""
    rows: list[dict[str, Any]] = []

    def add_row(layer: Any, head: Any, measures: dict[str, dict[str, float]]) -> None:
        row = {"layer": layer, "head": head}
        for queries, suffix in zip(QUERIES, ("", ", last query"), strict=True):
            for name in content["measures"]:
                digits = 1 if name == "hours" else 3
                row[f"{name}{suffix}"] = f"{measures[queries][name]:.{digits}f}"
        rows.append(row)

    for layer in content["layers"]:
        if len(layer["heads"]) > 1:
            for number, measures in enumerate(layer["heads"], 1):
                add_row(layer["layer"], number, measures)
        add_row(layer["layer"], "mean", layer["mean"])
    add_row(UNIFORM, "", content[UNIFORM])
    return pd.DataFrame(rows)


def _make_periods_table(groups: list[Periods]) -> pd.DataFrame:
    """Return a table of the periods of one scheme in one layer, a row for each period."""
    rows = []
    for group in groups:
        heads = "all" if group.all_heads else format_spans(group.heads)
        columns = (group.hours, group.hours_before_training, group.near)
        for hours, hours_before, near in zip(*columns, strict=True):
            numbers = map(_format_number, (hours, hours / 24, hours_before))
            rows.append([heads, *numbers, f"a {near}" if near else ""])
        num_planes = group.planes_without_time
        if num_planes > 0:
            plural = "s" if num_planes > 1 else ""
            rows.append([heads, "-", "-", "-", f"({num_planes} plane{plural} without time)"])
    names = ["heads", "hours", "days", "started at", f"within {NEAR:.0%} of"]
    return pd.DataFrame(rows, columns=names)


def _format_number(value: float) -> str:
    """Return a number of hours or days with three digits or, from 1000 on, as a whole number."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"  # else 1e+03


def draw_measures(measured: Measured, title: str, file: Path) -> Path:
    """Draw a panel per measure over the layers, write it to ``file`` and return its path."""
    n_heads = max(values.shape[-1] for values in measured.layers)
    # [layers, 2, measures, heads]; a layer whose heads are all the same may have one
    layers = [np.broadcast_to(layer, (*layer.shape[:-1], n_heads)) for layer in measured.layers]
    values = np.stack(layers)
    n_measures = values.shape[2]
    figure = new_figure(4.4 * n_measures, 4.4)
    layout: Any = figure.get_layout_engine()  # constrained
    layout.set(w_pad=0.12)
    panels = figure.subplots(1, n_measures, squeeze=False)[0]
    for index, panel in enumerate(panels):
        _draw_measure(panel, values[:, :, index], measured.uniform[:, index])
        panel.set_ylabel(AXES[index])
    handles_and_labels = panels[0].get_legend_handles_labels()
    figure.legend(*handles_and_labels, loc="outside lower center", ncols=4, frameon=False)
    marks = "small marks: heads; large ones: their mean" if n_heads > 1 else ""
    return write(figure, file, title, marks)


def _draw_measure(panel: Any, values: np.ndarray, uniform: np.ndarray) -> None:
    """Draw one measure [layers, 2, heads] and its values [2] for equal weights into a panel."""
    n_layers, _, n_heads = values.shape
    layers = np.arange(1, n_layers + 1)
    # of a single layer, heads are drawn side by side, to the right of their mean
    beside_mean = 1 + min(0.06, 0.4 / n_heads) * np.arange(1, n_heads + 1)
    for index, (label, color) in enumerate(COLORS.items()):
        by_head = values[:, index]  # [layers, heads]
        style: dict[str, Any] = {"color": color, "alpha": 0.5, "markersize": 4}
        if n_heads > 1 and n_layers > 1:
            panel.plot(layers, by_head, "-o", linewidth=0.8, **style)
        elif n_heads > 1:
            panel.plot(beside_mean, by_head[0], "o", **style)
        mean_style: dict[str, Any] = {"color": color, "linewidth": 2.5, "markersize": 8}
        panel.plot(layers, by_head.mean(-1), "-o", label=label, **mean_style)
        uniform_label = f"{label}, equal weights"
        panel.axhline(uniform[index], color=color, linestyle=":", label=uniform_label)
    highest = max(values.max(), uniform.max())
    panel.set(xlabel="layer", ylim=(0, (1.07 * highest) or 1))  # 1 if all values are 0
    panel.set(xlim=(0.5, n_layers + 0.5), xticks=layers[:: math.ceil(n_layers / 16)])
    panel.grid(axis="y", alpha=0.3)


def draw_periods(periods: Sequence[Periods], title: str, file: Path) -> Path:
    """Draw finite periods, a row per group of heads, write them to ``file`` and return its path."""
    periods = [group for group in periods if group.hours]
    figure = new_figure(9.5, 2.3 + 0.4 * len(periods))
    panel: Any = figure.subplots()
    has_schemes = len({group.scheme for group in periods}) > 1
    rows = range(len(periods), 0, -1)
    for row, group in zip(rows, periods, strict=True):
        if group.learned:
            initial = group.hours_before_training
            panel.plot(initial, [row] * len(initial), "|", color="black", markersize=9, alpha=0.4)
        is_near = np.array(group.near) != ""
        for is_shown, marker, color in ((~is_near, "o", GRAY), (is_near, "D", VERMILION)):
            hours = np.array(group.hours)[is_shown]
            panel.plot(hours, [row] * len(hours), marker, color=color, alpha=0.75, markersize=7)
        num_planes = group.planes_without_time
        if num_planes > 0:
            text = f"{num_planes} of {num_planes + len(group.hours)} planes without time"
            style: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center"}
            style |= {"textcoords": "offset points", "fontsize": SMALL}
            panel.annotate(text, (1, row), (6, 0), **style)
    for name, hour in HOURS.items():
        panel.axvline(hour, color=BLUE, alpha=0.5, linewidth=1, zorder=0)
        style = {"xycoords": ("data", "axes fraction"), "ha": "center"}
        panel.annotate(name, (hour, 1), (0, 4), textcoords="offset points", color=BLUE, **style)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda hours, _: f"{hours:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    labels = [f"{group.scheme}, {group.label}" if has_schemes else group.label for group in periods]
    panel.set_yticks(rows, labels)
    panel.set(ylim=(0.4, len(periods) + 0.6), xlabel="period (hours)")
    panel.grid(axis="x", alpha=0.2)
    is_learned = any(group.learned for group in periods)
    origin = "learned; strokes: before training" if is_learned else "fixed by the configuration"
    diamonds = f"diamonds: within {NEAR:.0%} of {', '.join(f'a {name}' for name in MARKED)}"
    full_title = f"{title}: periods after which time angles repeat"
    return write(figure, file, full_title, f"{origin}; {diamonds}")
