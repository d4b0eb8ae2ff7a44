"""Pictures of a study as inline svg: differences, cost, learning curves."""

from __future__ import annotations

import hashlib
import io
import math
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from recbole_pos.inspect.pictures import shorten
from recbole_pos.study.rendered_table import format_count, format_duration
from recbole_pos.study.result_tables import format_metric
from recbole_pos.study.results import Comparison, Results

# Okabe and Ito's colours without their yellow, which is faint on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", ":", "-.")
_GRAY = "#595959"
_WIDTH = 4.4  # inches, about the width of a phone, so that text is not scaled down there
_MAX_NAME = 26  # most characters of a name
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",  # the same letters everywhere
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.parse_math": False,  # a dollar in a name starts no formula
}
_LEGEND: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "frameon": False}
KINDS = ("differences", "seconds", "parameters", "curves")
# Column of runs -> name of a cost, function that formats a value, ticks of the axis.
_COSTS = {
    "seconds": ("training time", format_duration, [1, 10, 60, 600, 3_600, 36_000, 360_000]),
    "parameters": ("number of parameters", format_count, [10**power for power in range(12)]),
}


@dataclass(frozen=True)
class Chart:
    """A chart of the report.

    Attributes:
        kind: ``differences``, ``seconds``, ``parameters`` or ``curves``.
        title: title above the picture, as text of the page.
        alternative: alternative text, with all values.
        note: how to read the picture.
    """

    kind: str
    title: str
    figure: Figure
    alternative: str
    note: str = ""

    @property
    def svg(self) -> str:
        """The figure as svg without a fixed size; its ids do not occur in other charts."""
        FigureCanvasSVG(self.figure)
        file = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.title}):
            self.figure.savefig(file, format="svg", transparent=True)
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        prefix = "c" + hashlib.sha256(self.alternative.encode()).hexdigest()[:8]
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
        for name in ("width", "height"):
            svg = re.sub(rf'(<svg\b[^>]*?) {name}="[^"]*"', r"\1", svg, count=1)
        return svg


class _Figure(Figure):
    """A figure that a notebook shows whether or not pyplot is imported."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=120)
        return file.getvalue()


def draw_charts(results: Results, comparison: Comparison) -> list[Chart]:
    """Return all charts of one table that its results allow."""
    with matplotlib.rc_context(_STYLE):
        charts = [
            draw_differences(comparison),
            *(draw_cost(results, comparison, column) for column in _COSTS),
            draw_curves(results, comparison),
        ]
    return [chart for chart in charts if chart is not None]


def draw_differences(comparison: Comparison) -> Chart | None:
    """Draw the differences from the reference with their intervals; None if there are none."""
    lines = comparison.differences.to_dict("records")
    if not lines:
        return None
    figure, axes = _make_figure(1.0 + 0.32 * len(lines))
    for y, line in enumerate(lines):
        color = _COLORS[0] if line["star"] else _GRAY
        if not math.isnan(line["low"]):
            dash = "-" if line["seed_noise"] == "own" else ":"
            axes.plot([line["low"], line["high"]], [y, y], color=color, lw=2, ls=dash)
        axes.plot(line["difference"], y, "o", color=color, mfc=color if line["star"] else "white")
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(lines)), [shorten(line["row"], _MAX_NAME) for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    metric, reference = format_metric(comparison.table.metrics[0]), comparison.table.reference
    axes.set_xlabel(f"difference in {metric} from {shorten(reference, _MAX_NAME)}")
    values = "; ".join(
        f"{line['row']} {line['difference']:+.4f}, "
        + ("no CI" if math.isnan(line["low"]) else f"{line['low']:+.4f} to {line['high']:+.4f}")
        for line in lines
    )
    note = "Filled: significant after Holm's correction over the table."
    if any(line["seed_noise"] != "own" for line in lines):
        note += " Dotted: a side has one seed."
    title = f"Difference from {reference}, 95% CI"
    alternative = f"Intervals of differences in {metric}: {values}"
    return Chart("differences", title, figure, alternative, note)


def draw_cost(results: Results, comparison: Comparison, column: str) -> Chart | None:
    """Draw the main metric against a column of costs; None for fewer than two rows with both."""
    if column not in results.runs.columns:
        return None
    table, means = comparison.table, comparison.means
    mean = means[means["metric"] == table.metrics[0]].set_index("row")["mean"]
    cost = results.done.groupby("row")[column].median()
    points = pd.DataFrame({"mean": mean, "cost": cost}).dropna()
    points = points[points["cost"] > 0].reindex(table.rows).dropna()
    if len(points) < 2:
        return None
    cost_name, format_cost, ticks = _COSTS[column]
    metric = format_metric(table.metrics[0])
    figure, axes = _make_figure(_compute_height(len(points)))
    for row, point in points.iterrows():
        style = {**_make_style(results, row), "ls": "none", "ms": 7}
        axes.plot(point["cost"], point["mean"], **style)
    low, high = points["cost"].min(), points["cost"].max()
    if high < 3 * low:
        axes.margins(x=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(3))
    else:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.5, high * 1.5)
        ticks_between = [3 * tick for tick in ticks] if high < 30 * low else []
        axes.xaxis.set_major_locator(FixedLocator(sorted(ticks + ticks_between)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_cost(value)))
    axes.set(xlabel=f"{cost_name} (median over seeds)", ylabel=metric)
    figure.legend(**_LEGEND)
    values = "; ".join(
        f"{row} {point['mean']:.4f} at {format_cost(point['cost'])}"
        for row, point in points.iterrows()
    )
    title = f"{metric} against {cost_name}"
    return Chart(column, title, figure, f"{title}: {values}")


def draw_curves(results: Results, comparison: Comparison) -> Chart | None:
    """Draw the first metric in validation by epoch, a line for each run; None without epochs."""
    if results.curves.empty:
        return None
    rows = comparison.table.rows
    curves = results.curves[results.curves["row"].isin(rows)].dropna(subset=["value"])
    if curves.empty:
        return None
    metric = format_metric(results.plan.metrics[0])
    drawn_rows = [row for row in rows if row in set(curves["row"])]
    figure, axes = _make_figure(_compute_height(len(drawn_rows)))
    for row in drawn_rows:
        style = {**_make_style(results, row), "lw": 1.3, "ms": 3.5}
        for _, curve in curves[curves["row"] == row].groupby("seed"):
            curve = curve.sort_values("epoch")
            axes.plot(curve["epoch"], curve["value"], markevery=max(len(curve) // 6, 1), **style)
            style["label"] = None  # only the first run of a row is in the legend
    axes.set(xlabel="epoch", ylabel=f"{metric}, validation")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    figure.legend(**_LEGEND)
    best = curves.groupby("row", sort=False)["value"].max()
    values = "; ".join(f"{row} at best {value:.4f}" for row, value in best.items())
    title = f"Validation {metric}, one line per run"
    return Chart("curves", title, figure, f"Learning curves: {values}")


def _make_style(results: Results, row: Any) -> dict[str, Any]:
    """Return arguments of ``plot`` for a row, the same in all charts."""
    index = list(results.plan.rows).index(row)
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "ls": _DASHES[index // len(_COLORS) % len(_DASHES)],
        "label": shorten(row, _MAX_NAME),
    }


def _make_figure(height: float) -> tuple[Figure, Any]:
    """Return a figure of a height in inches, and its axes."""
    figure = _Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _compute_height(num_rows: int) -> float:
    """Return the height in inches of a figure with a legend for ``num_rows`` rows."""
    return 3.1 + 0.2 * math.ceil(num_rows / 2)
