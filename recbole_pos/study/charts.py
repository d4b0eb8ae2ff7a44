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

from recbole_pos.study.rendered_table import count, span
from recbole_pos.study.result_tables import metric_name
from recbole_pos.study.results import Comparison, Results

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
KINDS = ("differences", "seconds", "parameters", "curves")
# column -> name of a cost, how it is written, ticks of its axis
_COSTS = {
    "seconds": ("training time", span, [1, 10, 60, 600, 3_600, 36_000, 360_000]),
    "parameters": ("number of parameters", count, [10**power for power in range(12)]),
}


@dataclass(frozen=True)
class Chart:
    """A chart of the report.

    Attributes:
        kind: ``differences``, ``seconds``, ``parameters`` or ``curves``.
        title: title above the picture, as text of the page.
        figure: the figure of matplotlib.
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
        """The picture, which scales and has ids of its own on the page."""
        FigureCanvasSVG(self.figure)
        file = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.title}):
            self.figure.savefig(file, format="svg", transparent=True)
        svg = file.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
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


def draw_charts(results: Results, found: Comparison) -> list[Chart]:
    """Return all charts of one table that its results allow."""
    with matplotlib.rc_context(_STYLE):
        charts = [
            draw_differences(found),
            *(draw_cost(results, found, column) for column in _COSTS),
            draw_curves(results, found),
        ]
    return [chart for chart in charts if chart is not None]


def draw_differences(found: Comparison) -> Chart | None:
    """Draw the difference of each row from the reference with its interval; None without any."""
    pairs = found.differences.to_dict("records")
    if not pairs:
        return None
    figure, panel = _new(1.0 + 0.32 * len(pairs))
    for place, line in enumerate(pairs):
        color = COLORS[0] if line["star"] else _GRAY
        if not math.isnan(line["low"]):
            dash = "-" if line["seed_noise"] == "own" else ":"
            panel.plot([line["low"], line["high"]], [place] * 2, color=color, lw=2, ls=dash)
        face = color if line["star"] else "white"
        panel.plot(line["difference"], place, "o", color=color, mfc=face)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(pairs)), [_short(line["row"]) for line in pairs])
    panel.set_ylim(len(pairs) - 0.5, -0.5)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    main, reference = metric_name(found.table.metrics[0]), found.table.reference
    panel.set_xlabel(f"difference in {main} from {_short(reference)}")
    values = "; ".join(
        f"{line['row']} {line['difference']:+.4f}, {line['low']:+.4f} to {line['high']:+.4f}"
        for line in pairs
    )
    note = "Filled: significant after Holm's correction over the table."
    if any(line["seed_noise"] != "own" for line in pairs):
        note += " Dotted: a side has one seed."
    alternative = f"Intervals of differences in {main}: {values}"
    return Chart("differences", f"Difference from {reference}, 95% CI", figure, alternative, note)


def draw_cost(results: Results, found: Comparison, column: str) -> Chart | None:
    """Draw the main metric against a column of costs; None for fewer than two configurations."""
    if column not in results.runs.columns:
        return None
    main = found.table.metrics[0]
    mean = found.means[found.means["metric"] == main].set_index("row")["mean"]
    cost = results.done.groupby("row")[column].median()
    points = pd.DataFrame({"mean": mean, "cost": cost}).dropna()
    points = points[points["cost"] > 0].reindex(found.table.rows).dropna()
    if len(points) < 2:
        return None
    what, write, ticks = _COSTS[column]
    look, name = _styles(results), metric_name(main)
    figure, panel = _new(_height(len(points)))
    for row, line in points.iterrows():
        panel.plot(line["cost"], line["mean"], **{**look[row], "ls": "none", "ms": 7})
    low, high = points["cost"].min(), points["cost"].max()
    if high < 3 * low:
        panel.margins(x=0.1)
        panel.xaxis.set_major_locator(MaxNLocator(3))
    else:
        panel.set_xscale("log")
        panel.set_xlim(low / 1.5, high * 1.5)
        between = [3 * tick for tick in ticks] if high < 30 * low else []
        panel.xaxis.set_major_locator(FixedLocator(sorted(ticks + between)))
        panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    panel.set(xlabel=f"{what} (median over seeds)", ylabel=name)
    _add_legend(figure)
    values = "; ".join(
        f"{row} {line['mean']:.4f} at {write(line['cost'])}" for row, line in points.iterrows()
    )
    return Chart(column, f"{name} against {what}", figure, f"{name} against {what}: {values}")


def draw_curves(results: Results, found: Comparison) -> Chart | None:
    """Draw the first metric in validation by epoch, a line for each run; None without any."""
    if results.curves.empty:
        return None
    curves = results.curves[results.curves["row"].isin(found.table.rows)].dropna(subset=["value"])
    if curves.empty:
        return None
    look, name = _styles(results), metric_name(results.plan.metrics[0])
    drawn = [row for row in found.table.rows if row in set(curves["row"])]
    figure, panel = _new(_height(len(drawn)))
    for row in drawn:
        style = {**look[row], "lw": 1.3, "ms": 3.5}
        for _, line in curves[curves["row"] == row].groupby("seed"):
            line = line.sort_values("epoch")
            style["markevery"] = max(len(line) // 6, 1)
            panel.plot(line["epoch"], line["value"], **style)
            style["label"] = None  # only the first run of a row is in the legend
    panel.set(xlabel="epoch", ylabel=f"{name}, validation")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _add_legend(figure)
    best = curves.groupby("row", sort=False)["value"].max()
    values = "; ".join(f"{row} at best {value:.4f}" for row, value in best.items())
    return Chart(
        "curves", f"Validation {name}, one line per run", figure, f"Learning curves: {values}"
    )


def _styles(results: Results) -> dict[str, dict[str, Any]]:
    """Return colour, marker, line style and label of every row, the same in all charts."""
    return {
        row: {
            "color": COLORS[place % len(COLORS)],
            "marker": MARKERS[place % len(MARKERS)],
            "ls": DASHES[place // len(COLORS) % len(DASHES)],
            "label": _short(row),
        }
        for place, row in enumerate(results.plan.rows)
    }


def _new(height: float) -> tuple[Figure, Any]:
    """Return a figure of a height in inches, and its axes."""
    figure = _Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _height(rows: int) -> float:
    """Return the height of a figure with room for a legend of ``rows`` rows below."""
    return 3.1 + 0.2 * math.ceil(rows / 2)


def _add_legend(figure: Figure) -> None:
    """Add the names of the rows below the axes."""
    figure.legend(loc="outside lower center", ncols=2, frameon=False)


def _short(name: str) -> str:
    """Return a name of at most ``_LONGEST`` characters, with its middle left out."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[1 - half :]}"
