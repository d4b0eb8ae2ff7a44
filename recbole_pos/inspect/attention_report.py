"""``recbole-pos inspect attention``: tables, attention.json and pictures of a trained model."""

from __future__ import annotations

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
from recbole_pos.inspect.periods import HOURS, MARKED, Periods, learned_periods, near, spans
from recbole_pos.inspect.pictures import (
    BLUE,
    GRAY,
    SMALL,
    VERMILION,
    new_figure,
    set_title,
    write,
)
from recbole_pos.inspect.trained import open_run, registered_name, require_finite
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
    """What was found: of whom, the content of attention.json, and files."""

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
    """Measure the attention of a trained model and write what is found into its run folder.

    Writes attention.json and attention_distance.png, and periods.png for schemes that turn query
    and key by time.

    Args:
        path: a run folder, or a checkpoint in one.
        users: how many to draw from the test targets (else those of validation).
        min_events: how long their histories must be at least.
        seed: seed of the draw.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Raises:
        UsageError: if there is nothing to measure.
        CheckpointError: if weights are no numbers, or lead to none.
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
    phase = next((p for p in ("test", "valid") if experiment.loaders[p]), None)
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
                "mean": _plain(values.mean(-1)),
                "heads": [_plain(head) for head in np.moveaxis(values, -1, 0)],
            }
            for number, values in enumerate(measured.layers, 1)
        ],
        UNIFORM: _plain(measured.uniform),
        "periods": [
            {
                "layer": group.layer,
                "scheme": group.scheme,
                "heads": list(group.heads),
                "hours": list(group.hours),
                "hours_before_training": list(group.started),
                "learned": group.learned,
                "near": [near(hours) for hours in group.hours],
                "planes_without_time": group.still,
            }
            for group in periods
        ],
    }
    file = folder.path / "attention.json"
    write_json(file, content)
    picture = folder.path / "attention_distance.png"
    fewer, name = len(sample.rows) < users, registered_name(experiment)
    headline = (
        f"{name}: {'all ' if fewer else ''}{len(sample.rows):,} {phase} users with at least "
        f"{min_events} events, {sample.lengths.mean():.1f} on average"
    )
    files = [file, draw_measures(measured, headline, picture)]
    if any(group.hours for group in periods):
        files.append(draw_periods(periods, name, folder.path / "periods.png"))
    return AttentionReport(headline, content, measured, periods, files)


def measures_table(report: AttentionReport) -> Table:
    """A row per head and one per layer; the last row is attention that is equal over all events."""
    layers, uniform = report.measured.layers, report.measured.uniform
    table = Table("layer", "head")
    for queries in ("", "\nlast query"):
        for name in MEASURES[: uniform.shape[1]]:
            table.add_column(name + queries, justify="right")
    single = all(values.shape[-1] == 1 for values in layers)
    for number, values in enumerate(layers, 1):
        heads = values.shape[-1]
        for head in range(heads if heads > 1 else 0):
            table.add_row(f"{number}", f"{head + 1}", *_cells(values[..., head]))
        mean = _cells(values.mean(-1))
        table.add_row(f"{number}", "mean" if heads > 1 else "-", *mean, style="bold")
        if number == len(layers) or not single:
            table.add_section()
    table.add_row(UNIFORM, "", *_cells(uniform), style="dim")
    return table


def periods_table(periods: list[Periods]) -> Table:
    """Return the periods of one layer (of a scheme): one row per plane that time turns."""
    first = periods[0]
    learned = any(group.learned for group in periods)
    origin = "learned" if learned else "fixed by the configuration"
    title = f"periods of {first.scheme}, layer {first.layer} ({origin})"
    table = Table(title=title, title_justify="left")
    columns = ["heads"] * (not first.all_heads) + ["hours", "days"] + ["started at"] * learned
    for column in columns:
        table.add_column(column, justify="left" if column == "heads" else "right")
    table.add_column("within 15% of")
    for group in periods:
        heads = [] if group.all_heads else [spans(group.heads)]
        for hours, started in zip(group.hours, group.started, strict=True):
            mark = f"a {near(hours)}" if near(hours) else ""
            begin = [_number(started)] * learned
            cells = (*heads, _number(hours), _number(hours / 24), *begin, mark)
            table.add_row(*cells, style="bold" if mark and learned else None)
        if group.still:
            what = f"({group.still} plane{'s' * (group.still > 1)} without time)"
            table.add_row(*heads, "-", "-", *["-"] * learned, what)
        table.add_section()
    return table


def draw_measures(measured: Measured, title: str, file: Path) -> Path:
    """Draw a panel per measure over the layers: small marks are heads, large ones their mean."""
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
            each, mean = values[:, which, number], values[:, which, number].mean(-1)
            style: dict[str, Any] = {"color": color, "alpha": 0.5, "markersize": 4}
            if heads > 1 and count > 1:
                panel.plot(x, each, "-o", linewidth=0.8, **style)
            elif heads > 1:
                panel.plot(aside, each[0], "o", **style)
            panel.plot(x, mean, "-o", color=color, linewidth=2.5, markersize=8, label=queries)
            label = f"{queries}, equal weights"
            panel.axhline(uniform[which, number], color=color, linestyle=":", label=label)
        top = max(values[:, :, number].max(), uniform[:, number].max())
        panel.set(xlabel="layer", ylabel=AXES[number], ylim=(0, 1.07 * top or 1))
        panel.set(xlim=(0.5, count + 0.5), xticks=x[:: -(-count // 16)])
        panel.grid(axis="y", alpha=0.3)
    set_title(figure, title, "small marks: heads; large ones: their mean" if heads > 1 else "")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return write(figure, file)


def draw_periods(periods: list[Periods], title: str, file: Path) -> Path:
    """Draw a row of marks per layer, or per group of equal heads, on a logarithmic axis.

    Args:
        periods: of :func:`learned_periods`; those without any period have no row.
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
            hours = [hour for hour in group.hours if bool(near(hour)) == marked]
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
    near_what = f"diamonds: within 15% of {', '.join(f'a {name}' for name in MARKED)}"
    set_title(figure, f"{title}: periods after which time angles repeat", f"{origin}; {near_what}")
    return write(figure, file)


def show(report: AttentionReport, console: Console) -> None:
    """Print all of it."""

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
        console.print(periods_table([p for p in report.periods if (p.layer, p.scheme) == key]))
    for file in report.files:
        line(str(file))


def _plain(values: np.ndarray) -> dict[str, dict[str, float]]:
    """Return [2, measures] by name."""
    return {
        queries: dict(zip(MEASURES, row.tolist(), strict=False))
        for queries, row in zip(QUERIES, values, strict=True)
    }


def _cells(values: np.ndarray) -> list[str]:
    """Return [2, measures] as text; hours can be many."""
    return [
        f"{value:,.1f}" if name == "hours" else f"{value:.3f}"
        for row in values
        for name, value in zip(MEASURES, row, strict=False)
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
