"""``recbole-pos inspect attention``: tables, attention.json and pictures of a trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.console import Console
from rich.table import Table

from recbole_pos.errors import UsageError
from recbole_pos.files import write_json
from recbole_pos.inspect.attention_weights import attention_layers
from recbole_pos.inspect.distance import (
    MEASURES,
    QUERIES,
    Measured,
    measure_attention,
    sample_histories,
)
from recbole_pos.inspect.periods import (
    HOURS,
    MARKED,
    NEAR,
    Periods,
    find_calendar_period,
    format_spans,
    learned_periods,
)
from recbole_pos.inspect.pictures import (
    BLUE,
    GRAY,
    SMALL,
    VERMILION,
    new_figure,
    set_title,
    write,
)
from recbole_pos.inspect.trained import describe_run, open_run, require_finite
from recbole_pos.model.base import PosRecommender
from recbole_pos.position.schemes import scheme_names

MEANING = {
    "distance": "sum_j a_ij (i - j), events",
    "entropy": "-sum_j a_ij ln a_ij, nats",
    "hours": "sum_j a_ij (t_i - t_j)",
}
RESCALED = "rows of this attention do not sum to one; measured is |a_ij| / sum_j |a_ij|"
UNIFORM = "uniform"
AXES = ("attention distance (events)", "attention entropy (nats)", "attention distance (hours)")
COLORS = {"all queries": BLUE, "last query": VERMILION}


@dataclass(frozen=True)
class AttentionReport:
    """The result of :func:`inspect_attention`.

    Attributes:
        headline: the model, and which users it was measured on.
        content: the content of attention.json.
        measured: distance, entropy and hours.
        periods: of the model's time angles.
        files: the files written.
    """

    headline: str
    content: dict[str, Any]
    measured: Measured
    periods: list[Periods]
    files: list[Path]


def inspect_attention(
    path: str | Path,
    users: int = 200,
    min_events: int = 20,
    seed: int = 0,
    data_path: str | Path | None = None,
) -> AttentionReport:
    """Measure the attention of a trained model and write the results into its run folder.

    Writes attention.json and attention_distance.png, and periods.png for schemes that turn query
    and key by time.

    Args:
        path: a run folder, or a checkpoint in one.
        users: number of users to sample, from the test targets or else those of validation.
        min_events: least number of events in their histories.
        seed: random seed of the sample.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Raises:
        UsageError: if there is nothing to measure.
        CheckpointError: if weights, or the attention they give, are not finite.
    """
    limits = (("users", users, 1), ("min_events", min_events, 1), ("seed", seed, 0))
    for name, value, least in limits:
        if value < least:
            raise UsageError(f"--{name}: {value} is below {least}")
    folder, experiment = open_run(path, data_path)
    model, config = experiment.model, experiment.config
    if not isinstance(model, PosRecommender):
        raise UsageError(
            f"{config['model']} has RecBole's layers; only attention of the plugin's own can be "
            "inspected"
        )
    if not attention_layers(model):
        raise UsageError(f"{type(model).__name__} has no causal attention layers")
    phase = next((name for name in ("test", "valid") if experiment.loaders[name]), None)
    if phase is None:
        raise UsageError("this split holds nothing out, so there are no test or validation rows")
    sample = sample_histories(model, experiment.loaders[phase], users, min_events, seed)
    measured = measure_attention(model, sample)
    require_finite(measured.layers, "attention")
    periods = learned_periods(model)
    content = {
        **{"checkpoint": str(path), "model": config["model"], "dataset": config["dataset"]},
        **{"position": scheme_names(config["position"]), "phase": phase, "seed": seed},
        **{"users": len(sample.rows), "users_asked": users, "min_events": min_events},
        "users_with_min_events": sample.qualified,
        "events_per_history": float(sample.lengths.mean()),
        "measures": {name: MEANING[name] for name in MEASURES[: measured.uniform.shape[1]]},
        "rows_rescaled": measured.rescaled,
        "layers": [
            {
                "layer": number,
                "mean": _name_measures(values.mean(-1)),
                "heads": [_name_measures(head) for head in np.moveaxis(values, -1, 0)],
            }
            for number, values in enumerate(measured.layers, 1)
        ],
        UNIFORM: _name_measures(measured.uniform),
        "periods": [
            {
                "layer": group.layer,
                "scheme": group.scheme,
                "heads": list(group.heads),
                "hours": list(group.hours),
                "hours_before_training": list(group.started),
                "learned": group.learned,
                "near": [find_calendar_period(hours) for hours in group.hours],
                "planes_without_time": group.still,
            }
            for group in periods
        ],
    }
    file = folder.path / "attention.json"
    write_json(file, content)
    picture = folder.path / "attention_distance.png"
    fewer, name = len(sample.rows) < users, describe_run(experiment)
    headline = (
        f"{name}: {'all ' if fewer else ''}{len(sample.rows):,} {phase} users with at least "
        f"{min_events} events, {sample.lengths.mean():.1f} on average"
    )
    files = [file, draw_measures(measured, headline, picture)]
    if any(group.hours for group in periods):
        files.append(draw_periods(periods, name, folder.path / "periods.png"))
    return AttentionReport(headline, content, measured, periods, files)


def measures_table(report: AttentionReport) -> Table:
    """Return a table of the measures: a row per head, a mean per layer, and equal attention."""
    layers, uniform = report.measured.layers, report.measured.uniform
    table = Table("layer", "head")
    for queries in ("", "\nlast query"):
        for name in MEASURES[: uniform.shape[1]]:
            table.add_column(name + queries, justify="right")
    has_one_head = all(values.shape[-1] == 1 for values in layers)
    for number, values in enumerate(layers, 1):
        heads = values.shape[-1]
        for head in range(heads if heads > 1 else 0):
            table.add_row(f"{number}", f"{head + 1}", *_format_measures(values[..., head]))
        mean = _format_measures(values.mean(-1))
        table.add_row(f"{number}", "mean" if heads > 1 else "-", *mean, style="bold")
        if number == len(layers) or not has_one_head:
            table.add_section()
    table.add_row(UNIFORM, "", *_format_measures(uniform), style="dim")
    return table


def periods_table(periods: list[Periods]) -> Table:
    """Return a table of the periods of one scheme in one layer.

    It has a row for each plane that rotates with time; a period within ``NEAR`` of a calendar
    period names it.

    Args:
        periods: groups of heads with equal periods, of the same layer and scheme.
    """
    first = periods[0]
    is_learned = any(group.learned for group in periods)
    origin = "learned" if is_learned else "fixed by the configuration"
    title = f"periods of {first.scheme}, layer {first.layer} ({origin})"
    table = Table(title=title, title_justify="left")
    columns = [] if first.all_heads else ["heads"]
    columns += ["hours", "days", *(["started at"] if is_learned else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "heads" else "right")
    table.add_column(f"within {NEAR:.0%} of")
    for group in periods:
        heads = [] if group.all_heads else [format_spans(group.heads)]
        for hours, started in zip(group.hours, group.started, strict=True):
            name = find_calendar_period(hours)
            mark = f"a {name}" if name else ""
            start = [_format_number(started)] if is_learned else []
            cells = (*heads, _format_number(hours), _format_number(hours / 24), *start, mark)
            table.add_row(*cells, style="bold" if mark and is_learned else None)
        if group.still:
            plural = "s" if group.still > 1 else ""
            still = f"({group.still} plane{plural} without time)"
            table.add_row(*heads, "-", "-", *(["-"] if is_learned else []), still)
        table.add_section()
    return table


def draw_measures(measured: Measured, title: str, file: Path) -> Path:
    """Draw a panel per measure over the layers: small marks are heads, large ones their mean.

    Args:
        measured: the measures of each layer.
        title: title of the picture.
        file: to write; returned.
    """
    uniform = measured.uniform
    heads = max(values.shape[-1] for values in measured.layers)
    # [layers, 2, measures, heads]; a layer whose heads are all the same may have one
    values = np.stack([np.broadcast_to(v, (*v.shape[:-1], heads)) for v in measured.layers])
    count, measures = len(values), uniform.shape[1]
    figure = new_figure(4.4 * measures, 4.4)
    layout: Any = figure.get_layout_engine()  # constrained
    layout.set(w_pad=0.12)
    panels = figure.subplots(1, measures, squeeze=False)[0]
    x = np.arange(1, count + 1)
    # beside the mean where there is one layer and so no line
    aside = 1 + min(0.06, 0.4 / heads) * np.arange(1, heads + 1)
    for number, panel in enumerate(panels):
        for which, (queries, color) in enumerate(COLORS.items()):
            by_head, mean = values[:, which, number], values[:, which, number].mean(-1)
            style: dict[str, Any] = {"color": color, "alpha": 0.5, "markersize": 4}
            if heads > 1 and count > 1:
                panel.plot(x, by_head, "-o", linewidth=0.8, **style)
            elif heads > 1:
                panel.plot(aside, by_head[0], "o", **style)
            panel.plot(x, mean, "-o", color=color, linewidth=2.5, markersize=8, label=queries)
            label = f"{queries}, equal weights"
            panel.axhline(uniform[which, number], color=color, linestyle=":", label=label)
        top = max(values[:, :, number].max(), uniform[:, number].max())
        panel.set(xlabel="layer", ylabel=AXES[number], ylim=(0, 1.07 * top or 1))
        panel.set(xlim=(0.5, count + 0.5), xticks=x[:: math.ceil(count / 16)])
        panel.grid(axis="y", alpha=0.3)
    set_title(figure, title, "small marks: heads; large ones: their mean" if heads > 1 else "")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return write(figure, file)


def draw_periods(periods: list[Periods], title: str, file: Path) -> Path:
    """Draw a row of marks per layer, or per group of equal heads, on a logarithmic axis.

    Args:
        periods: as of :func:`learned_periods`; groups without a finite period have no row.
        title: title of the picture.
        file: to write.
    """
    periods = [group for group in periods if group.hours]
    figure = new_figure(9.5, 2.3 + 0.4 * len(periods))
    panel: Any = figure.subplots()
    several = len({group.scheme for group in periods}) > 1
    rows = range(len(periods), 0, -1)
    for row, group in zip(rows, periods, strict=True):
        if group.learned:
            style: dict[str, Any] = {"color": "black", "markersize": 9, "alpha": 0.4}
            panel.plot(group.started, [row] * len(group.started), "|", **style)
        for marked, shape, color in ((False, "o", GRAY), (True, "D", VERMILION)):
            hours = [hour for hour in group.hours if bool(find_calendar_period(hour)) == marked]
            panel.plot(hours, [row] * len(hours), shape, color=color, alpha=0.75, markersize=7)
        if group.still:
            text = f"{group.still} of {group.still + len(group.hours)} planes without time"
            place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center"}
            panel.annotate(
                text, (1, row), (6, 0), textcoords="offset points", fontsize=SMALL, **place
            )
    for name, period in HOURS.items():
        panel.axvline(period, color=BLUE, alpha=0.5, linewidth=1, zorder=0)
        place = {"xycoords": ("data", "axes fraction"), "ha": "center"}
        panel.annotate(name, (period, 1), (0, 4), textcoords="offset points", color=BLUE, **place)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda hours, _: f"{hours:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(rows, [f"{p.scheme}, {p.label}" if several else p.label for p in periods])
    panel.set(ylim=(0.4, len(periods) + 0.6), xlabel="period (hours)")
    panel.grid(axis="x", alpha=0.2)
    learned = any(group.learned for group in periods)
    origin = "learned; strokes: before training" if learned else "fixed by the configuration"
    diamonds = f"diamonds: within {NEAR:.0%} of {', '.join(f'a {name}' for name in MARKED)}"
    set_title(figure, f"{title}: periods after which time angles repeat", f"{origin}; {diamonds}")
    return write(figure, file)


def show(report: AttentionReport, console: Console) -> None:
    """Print the tables of a report and the files it wrote."""

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    line(report.headline)
    console.print(measures_table(report))
    for name, meaning in report.content["measures"].items():
        line(f"{name}: {meaning}")
    if report.measured.rescaled:
        line(RESCALED)
    keys = dict.fromkeys((group.layer, group.scheme) for group in report.periods)
    for key in keys:
        of_key = [group for group in report.periods if (group.layer, group.scheme) == key]
        console.print(periods_table(of_key))
    for file in report.files:
        line(str(file))


def _name_measures(values: np.ndarray) -> dict[str, dict[str, float]]:
    """Return measures [2, measures] as a mapping by queries and measure."""
    return {
        queries: dict(zip(MEASURES, row.tolist(), strict=False))
        for queries, row in zip(QUERIES, values, strict=True)
    }


def _format_measures(values: np.ndarray) -> list[str]:
    """Return measures [2, measures] as the cells of a row, hours with fewer digits."""
    return [
        f"{value:,.1f}" if name == "hours" else f"{value:.3f}"
        for row in values
        for name, value in zip(MEASURES, row, strict=False)
    ]


def _format_number(value: float) -> str:
    """Return a number of hours or days with three digits or, from 1000 on, as a whole number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
