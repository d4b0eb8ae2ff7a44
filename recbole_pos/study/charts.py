"""Pictures of a study as inline svg: differences, cost, learning curves, bins."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from recbole_pos.errors import UsageError
from recbole_pos.study.rendered_table import count, span
from recbole_pos.study.result_tables import metric_name
from recbole_pos.study.results import Comparison, Results, compare
from recbole_pos.values import check_choice

# Okabe and Ito's colours without their yellow, which is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
_GRAY = "#595959"
_WIDTH = 4.4  # inches, about the width of a phone, so that text is not scaled down there
_LONGEST = 26  # most characters of a name
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",  # the same letters everywhere
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.parse_math": False,  # a dollar in a name starts no formula
}


@dataclass(frozen=True)
class Chart:
    """A chart of the report.

    Attributes:
        title: title above the picture, as text of the page.
        svg: the picture.
        alternative: alternative text, with all values.
        note: how to read the picture.
        figure: the figure of matplotlib that the picture is made from.
    """

    title: str
    svg: str
    alternative: str
    note: str
    figure: Figure


class _Figure(Figure):
    """A figure that a notebook shows whether or not pyplot is imported."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=120)
        return file.getvalue()


def assign_styles(rows: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return colour, marker and line style of every row, the same in all charts."""
    styles = {}
    for place, row in enumerate(rows):
        color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]
        dash = DASHES[place // len(COLORS) % len(DASHES)]
        styles[row] = {"color": color, "marker": marker, "ls": dash}
    return styles


def draw_differences(found: Comparison) -> Chart | None:
    """Draw the difference of each row from the reference with its interval; None without any."""
    pairs = found.differences
    if pairs.empty:
        return None
    figure, panel = _new(1.0 + 0.32 * len(pairs))
    for place, line in enumerate(pairs.to_dict("records")):
        color = COLORS[0] if line["star"] else _GRAY
        if not math.isnan(line["low"]):
            dash = "-" if line["seed_noise"] == "own" else ":"
            panel.plot([line["low"], line["high"]], [place] * 2, color=color, lw=2, ls=dash)
        face = color if line["star"] else "white"
        panel.plot(line["difference"], place, "o", color=color, mfc=face)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(pairs)), [_short(row) for row in pairs["row"]])
    panel.set_ylim(len(pairs) - 0.5, -0.5)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    main, reference = metric_name(found.table.metrics[0]), found.table.reference
    panel.set_xlabel(f"difference in {main} from {_short(reference)}")
    values = "; ".join(
        f"{line['row']} {line['difference']:+.4f}, {line['low']:+.4f} to {line['high']:+.4f}"
        for line in pairs.to_dict("records")
    )
    note = "Filled: significant after Holm's correction over the table."
    if (pairs["seed_noise"] != "own").any():
        note += " Dotted: a side has one seed."
    title = f"Difference from {reference}, 95% CI"
    return _chart(figure, title, f"Intervals of differences in {main}: {values}", note)


def draw_cost(results: Results, found: Comparison, column: str) -> Chart | None:
    """Draw the main metric against a cost; None for fewer than two configurations.

    Args:
        results: results of the study.
        found: numbers of one table.
        column: ``seconds`` or ``parameters``.
    """
    if column not in results.runs.columns:
        return None
    main = found.table.metrics[0]
    mean = found.means[found.means["metric"] == main].set_index("row")["mean"]
    cost = results.done.groupby("row")[column].median()
    points = pd.DataFrame({"mean": mean, "cost": cost}).dropna()
    points = points[points["cost"] > 0]
    if len(points) < 2:
        return None
    what, write = {
        "seconds": ("training time", span),
        "parameters": ("number of parameters", count),
    }[column]
    look, name = assign_styles(list(results.plan.rows)), metric_name(main)
    rows = [row for row in found.table.rows if row in points.index]
    figure, panel = _new_of_rows(len(rows))
    for row in rows:
        style = {**look[row], "ls": "none", "ms": 7, "label": _short(row)}
        panel.plot(points["cost"][row], points["mean"][row], **style)
    _set_cost_axis(panel, points["cost"].min(), points["cost"].max(), column)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    panel.set(xlabel=f"{what} (median over seeds)", ylabel=name)
    values = "; ".join(
        f"{row} {line['mean']:.4f} at {write(line['cost'])}" for row, line in points.iterrows()
    )
    return _chart(figure, f"{name} against {what}", f"{name} against {what}: {values}")


def _set_cost_axis(panel: Any, low: float, high: float, column: str) -> None:
    """Set limits and ticks of a cost axis: logarithmic if costs differ by a factor of 3.

    Args:
        panel: axes of the chart.
        low, high: range of the costs.
        column: ``seconds`` or ``parameters``.
    """
    if high < 3 * low:
        room = 0.1 * (high - low) or 0.1 * high
        panel.set_xlim(low - room, high + room)
        panel.xaxis.set_major_locator(MaxNLocator(3))
        return
    panel.set_xscale("log")
    panel.set_xlim(low / 1.5, high * 1.5)
    ticks, between = [10**power for power in range(12)], [3 * 10**power for power in range(12)]
    if column == "seconds":
        ticks = [1, 10, 60, 600, 3_600, 36_000, 360_000]
        between = [5, 20, 180, 1_800, 10_800, 86_400]
    panel.xaxis.set_major_locator(
        FixedLocator(sorted(ticks + between if high < 30 * low else ticks))
    )
    panel.xaxis.set_minor_locator(NullLocator())


def draw_curves(results: Results, rows: Sequence[str]) -> Chart | None:
    """Draw the validation metric by epoch, a line for each run of the rows; None without any."""
    curves = results.curves[results.curves["row"].isin(rows)].dropna(subset=["value"])
    if curves.empty:
        return None
    look = assign_styles(list(results.plan.rows))
    name = metric_name(results.curve_metric) or "score"
    drawn = [row for row in rows if row in set(curves["row"])]
    figure, panel = _new_of_rows(len(drawn))
    for row in drawn:
        style = {**look[row], "lw": 1.3, "ms": 3.5, "label": _short(row)}
        for _, line in curves[curves["row"] == row].groupby("seed"):
            line = line.sort_values("epoch")
            marks = {"markevery": max(len(line) // 6, 1)}
            panel.plot(line["epoch"], line["value"], **style, **marks)
            style["label"] = None  # only the first run of a row is in the legend
    panel.set(xlabel="epoch", ylabel=f"{name}, validation")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    best = curves.groupby("row", sort=False)["value"].max()
    values = "; ".join(f"{row} at best {value:.4f}" for row, value in best.items())
    return _chart(figure, f"Validation {name}, one line per run", f"Learning curves: {values}")


def draw_bins(results: Results, found: Comparison, kind: str) -> Chart:
    """Draw the main metric of every configuration in each bin of a kind."""
    mean, _ = found.bins[kind]
    bins, rows = (list(dict.fromkeys(mean[name])) for name in ("bin", "row"))
    look, name = assign_styles(list(results.plan.rows)), metric_name(found.table.metrics[0])
    figure, panel = _new_of_rows(len(rows))
    for place, row in enumerate(rows):
        values = mean[mean["row"] == row].set_index("bin").loc[bins, "mean"]
        shift = 0.5 * (place / max(len(rows) - 1, 1) - 0.5)
        style = {**look[row], "ls": "none", "ms": 6, "label": _short(row), "clip_on": False}
        panel.plot([number + shift for number in range(len(bins))], values, **style)
    prefix = f"{kind} " if kind in _AXES else ""
    panel.set_xticks(range(len(bins)), [label.removeprefix(prefix) for label in bins])
    panel.set_xlim(-0.5, len(bins) - 0.5)
    panel.set_ylim(bottom=0)
    for edge in range(1, len(bins)):
        panel.axvline(edge - 0.5, color=_GRAY, lw=0.5)
    panel.grid(axis="x", visible=False)
    panel.set_ylabel(name)
    if kind in _AXES:
        panel.set_xlabel(_AXES[kind])
    title = f"{name} by {_AXES.get(kind, 'whether the item is cold')}"
    values = "; ".join(
        f"{line['row']}, {line['bin']} {line['mean']:.4f}" for line in mean.to_dict("records")
    )
    return _chart(figure, title, f"{title}: {values}")


_AXES = {
    "history": "length of the history",
    "age": "age of the newest interaction",
    "popularity": "training interactions of the item",
}


def all_charts(results: Results, found: Comparison) -> list[Chart]:
    """Return all charts of one table that its results allow."""
    with matplotlib.rc_context(_STYLE):
        charts = [
            draw_differences(found),
            draw_cost(results, found, "seconds"),
            draw_cost(results, found, "parameters"),
            draw_curves(results, found.table.rows),
            *(draw_bins(results, found, kind) for kind in found.bins),
        ]
    return [chart for chart in charts if chart is not None]


def draw_results(results: Results | None, kind: str) -> Figure:
    """Draw one picture of the first table: see :meth:`recbole_pos.study.comparing.Compared.plot`.

    Raises:
        UsageError: for another kind, or if the results lack its values.
    """
    check_choice("kind", kind, ("differences", "seconds", "parameters", "curves"))
    if results is None:
        raise UsageError("plot: nothing was trained")
    found = compare(results, results.plan.tables[0], bins=False)
    with matplotlib.rc_context(_STYLE):
        if kind in ("seconds", "parameters"):
            chart = draw_cost(results, found, kind)
        else:
            is_curve = kind == "curves"
            chart = draw_curves(results, found.table.rows) if is_curve else draw_differences(found)
    if chart is None:
        raise UsageError(f"plot: {kind}: of these runs nothing is known to draw")
    return chart.figure


def _new(height: float) -> tuple[Figure, Any]:
    """Return a figure of a height in inches, and its axes."""
    figure = _Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _new_of_rows(rows: int) -> tuple[Figure, Any]:
    """Return a figure, with room for a legend of ``rows`` rows below, and its axes."""
    return _new(3.1 + 0.2 * math.ceil(rows / 2))


def _short(name: str) -> str:
    """Return a name of at most ``_LONGEST`` characters, with its middle left out."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[1 - half :]}"


def _chart(figure: Figure, title: str, alternative: str, note: str = "") -> Chart:
    """Return a figure as a chart, whose svg scales and has ids of its own on the page."""
    if any(panel.get_legend_handles_labels()[0] for panel in figure.axes):
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    FigureCanvasSVG(figure)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    prefix = "c" + hashlib.sha256(alternative.encode()).hexdigest()[:8]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return Chart(title, svg, alternative, note, figure)
