"""``recbole-pos inspect attention``: tables, attention.json and pictures of a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from recbole_pos.errors import UsageError
from recbole_pos.inspect.attention import attention_layers
from recbole_pos.inspect.distance import (
    MEASURES,
    QUERIES,
    Measured,
    measure_attention,
    sample_histories,
)
from recbole_pos.inspect.figures import draw_measures, draw_periods
from recbole_pos.inspect.periods import Periods, learned_periods, near, spans
from recbole_pos.inspect.trained import full_name, load_trained, require_finite
from recbole_pos.position.schemes import scheme_names

MEANING = {
    "distance": "sum_j a_ij (i - j), events",
    "entropy": "-sum_j a_ij ln a_ij, nats",
    "hours": "sum_j a_ij (t_i - t_j)",
}
RESCALED = "rows of this attention do not sum to one; measured is |a_ij| / sum_j |a_ij|"
UNIFORM = "uniform"


@dataclass(frozen=True)
class AttentionReport:
    """What was found; ``content`` is that of attention.json."""

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
        seed: of the draw.
        data_path: the folder that holds the folder of the dataset; where the run found it if None.

    Raises:
        UsageError: if there is nothing to measure.
        CheckpointError: if weights are no numbers, or lead to none.
    """
    for name, value, least in (
        ("users", users, 1),
        ("min_events", min_events, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise UsageError(f"--{name}: {value} is below {least}")
    folder, experiment = load_trained(path, data_path)
    model = experiment.model
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
        "checkpoint": str(path),
        "model": experiment.config["model"],
        "dataset": experiment.config["dataset"],
        "position": scheme_names(experiment.config["position"]),
        "phase": phase,
        "users": len(sample.rows),
        "users_asked": users,
        "users_with_min_events": sample.qualified,
        "min_events": min_events,
        "seed": seed,
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
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    picture = folder.path / "attention_distance.png"
    files = [file, draw_measures(measured, headline(content), picture)]
    if any(group.hours for group in periods):
        files.append(draw_periods(periods, _name(content), folder.path / "periods.png"))
    return AttentionReport(content, measured, periods, files)


def measures_table(report: AttentionReport) -> Table:
    """A row per head and one per layer; the last row is attention that is equal over all events."""
    layers, uniform = report.measured.layers, report.measured.uniform
    table = Table()
    table.add_column("layer")
    table.add_column("head")
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
    """The periods of one layer (of a scheme): one row per plane that time turns."""
    first = periods[0]
    learned = any(group.learned for group in periods)
    origin = "learned" if learned else "fixed by the configuration"
    title = f"periods of {first.scheme}, layer {first.layer} ({origin})"
    table = Table(title=title, title_justify="left")
    for column in () if first.all_heads else ("heads",):
        table.add_column(column)
    table.add_column("hours", justify="right")
    table.add_column("days", justify="right")
    for column in ("started at",) if learned else ():
        table.add_column(column, justify="right")
    table.add_column("within 15% of")
    for group in periods:
        heads = [] if group.all_heads else [spans(group.heads)]
        for hours, started in zip(group.hours, group.started, strict=True):
            mark = f"a {near(hours)}" if near(hours) else ""
            begin = [_number(started)] if learned else []
            cells = (*heads, _number(hours), _number(hours / 24), *begin, mark)
            table.add_row(*cells, style="bold" if mark and learned else None)
        if group.still:
            what = "planes" if group.still > 1 else "plane"
            begin = ["-"] if learned else []
            table.add_row(*heads, "-", "-", *begin, f"({group.still} {what} without time)")
        table.add_section()
    return table


def show(report: AttentionReport, console: Console) -> None:
    """Print all of it."""

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    line(headline(report.content))
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


def headline(content: dict[str, Any]) -> str:
    """What was measured, on whom."""
    fewer = content["users"] < content["users_asked"]
    return (
        f"{_name(content)}: {'all ' if fewer else ''}{content['users']:,} {content['phase']} users "
        f"with at least {content['min_events']} events, {content['events_per_history']:.1f} on "
        "average"
    )


def _name(content: dict[str, Any]) -> str:
    return full_name(content["model"], content["position"], content["dataset"])


def _plain(values: np.ndarray) -> dict[str, dict[str, float]]:
    """[2, measures] by name."""
    return {
        queries: dict(zip(MEASURES, row.tolist(), strict=False))
        for queries, row in zip(QUERIES, values, strict=True)
    }


def _cells(values: np.ndarray) -> list[str]:
    """[2, measures] as text; hours can be many."""
    return [
        f"{value:,.1f}" if name == "hours" else f"{value:.3f}"
        for row in values
        for name, value in zip(MEASURES, row, strict=False)
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
