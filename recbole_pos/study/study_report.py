"""The report of a study: its tables and charts, printed, as one page, and as files.

:class:`Report` is what ``compare`` and ``score`` return. :func:`write_results` writes the files
from :class:`Results`, :func:`render_report` returns the page ``report.html``, and
:func:`draw_charts` the charts in it: differences, cost, learning curves. Charts are written into
the page as inline svg. A row of a study is one of the configurations it compares.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from recbole_pos.experiment.folder import make_folder
from recbole_pos.experiment.pictures import shorten
from recbole_pos.files import atomic_write, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.rendered_table import (
    PAGES,
    RenderedTable,
    format_count,
    format_duration,
    format_number,
    join_names,
)
from recbole_pos.study.result_tables import (
    format_metric,
    make_comparison_tables,
    make_failures_table,
    make_search_table,
    make_tables,
    render_markdown,
    tabulate,
)
from recbole_pos.study.results import ALL, Comparison, Results, concatenate
from recbole_pos.values import check_choice, escape_formula

# Okabe and Ito's colours without their yellow, which is faint on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", ":", "-.")
_GRAY = "#595959"
_WIDTH = 4.4  # inches, about the width of a phone, so that text is not scaled down there
_MAX_NAME = 26  # most characters of a row's name in a chart
# matplotlib's settings of all charts.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",  # the same letters everywhere
    "svg.hashsalt": "recbole-pos",  # so that the same study gives the same bytes
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.parse_math": False,  # a dollar in a name starts no formula
}
# Arguments of the legend of all charts.
_LEGEND: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "frameon": False}
# Column of runs -> name of a cost, function that formats a value.
_COSTS = {
    "seconds": ("training time", format_duration),
    "parameters": ("number of parameters", format_count),
}


@dataclass(frozen=True, repr=False)
class Report:
    """Results of a study for people and programs: what ``compare`` and ``score`` return.

    Attributes:
        results: results of the runs, of which all tables and charts are made.
    """

    results: Results

    @cached_property
    def tables(self) -> list[RenderedTable]:
        """The tables as people read them; the first is the text of this object."""
        return make_tables(self.results)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One line per configuration and metric: mean and standard deviation over seeds.

        Lines of the first metric also have the difference from the reference, if the runs have
        saved the ranks of their test targets.
        """
        # Only the lines over all targets (ALL), and not those of single groups of targets (bins).
        frame = tabulate(self.results.comparisons)
        return frame[frame["bin"] == ALL].drop(columns="bin").reset_index(drop=True)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """One line per configuration: difference from the reference, interval, p-value, star."""
        return concatenate([comparison.differences for comparison in self.results.comparisons])

    def plot(self, kind: str = "differences") -> Figure:
        """Draw one chart of the first table of the study.

        Args:
            kind: ``differences`` (from the reference, with 95% intervals); ``seconds`` or
                ``parameters`` (the first metric against training time or model size); or ``curves``
                (validation by epoch).

        Returns:
            The matplotlib figure.

        Raises:
            UsageError: for another kind, or for a kind that the results have no values for.
        """
        charts = draw_charts(self.results, self.results.comparisons[0])  # those that have values
        figures = {chart.kind: chart.figure for chart in charts}
        check_choice("kind", kind, tuple(figures))
        return figures[kind]

    def show(self, reporter: Reporter) -> None:
        """Print the tables in the width of the terminal, and warnings about the data and runs."""
        for table in self.tables:
            reporter.line(table)
            reporter.line("")
        for text in self.results.facts.warnings:
            reporter.warning(text)

    def write(self, folder: str | Path, latex: bool = False) -> list[Path]:
        """Write table.md, table.csv, runs.csv and report.html into a folder; return their paths.

        Args:
            folder: the folder, which is made if it does not exist.
            latex: whether files for a paper are written as well, see :func:`write_latex`.
        """
        files = write_results(self.results, Path(folder))
        if latex:
            files += write_latex(self.results, Path(folder))
        return files

    def __repr__(self) -> str:
        return self.tables[0].markdown()

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables)


def write_results(results: Results, folder: Path) -> list[Path]:
    """Write table.md, table.csv, runs.csv and report.html into a folder; return their paths.

    ``table.md`` has the tables as people read them, ``table.csv`` the numbers in them,
    ``runs.csv`` a line for each run, and ``report.html`` tables and charts on one page.

    Args:
        results: results of the study.
        folder: the folder, which is made if it does not exist.
    """
    make_folder(folder)
    texts = {
        "table.md": render_markdown(results),
        "table.csv": _to_csv(tabulate(results.comparisons)),
        "runs.csv": _to_csv(results.runs),
        "report.html": render_report(results),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def write_latex(results: Results, folder: Path) -> list[Path]:
    """Write the tables of a study as table.tex, and its charts as pdf; return their paths.

    With several tables in a study, the name of a pdf ends with the number of its table.

    Args:
        results: results of the study.
        folder: the folder, which exists.
    """
    files = [folder / "table.tex"]
    tables = "\n".join(table.latex() for table in make_tables(results))
    write_text(files[0], f"% needs \\usepackage{{booktabs}}\n{tables}")

    # A comparison has the numbers of one table.
    for number, comparison in enumerate(results.comparisons, 1):
        suffix = f"-{number}" if len(results.comparisons) > 1 else ""
        for chart in draw_charts(results, comparison):
            path = folder / f"{chart.kind}{suffix}.pdf"
            # Without a date, the same results give the same bytes.
            with atomic_write(path, text=False) as file:
                chart.figure.savefig(file, format="pdf", metadata={"CreationDate": None})
            files.append(path)
    return files


def _to_csv(frame: pd.DataFrame) -> str:
    """Return a table as csv in which no cell begins as a formula of a spreadsheet does.

    Names of rows such as ``+ prior`` would be read as formulas.
    """
    return frame.apply(lambda column: column.map(escape_formula)).to_csv(index=False)


def render_report(results: Results) -> str:
    """Return the html page of a study's report.

    It begins with the findings of the first table and the protocol. Then come, for each table of
    the study, its tables and charts, and at the end searches, failed runs and the study itself.

    Args:
        results: results of the study.
    """
    plan = results.plan
    # The study as yaml, without the path of the data on this machine.
    base = plan.source.content.get("base") or {}
    base = {key: value for key, value in base.items() if key != "data_path"}
    content = {**plan.source.content, "base": base}
    study = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    # A comparison has the numbers of one table of the study. PAGES has the templates of jinja, of
    # which this one makes html of it all.
    return PAGES.get_template("report.html.jinja").render(
        results=results,
        plan=plan,
        findings=write_findings(results, results.comparisons[0]),
        parts=[
            (make_comparison_tables(results, comparison), draw_charts(results, comparison))
            for comparison in results.comparisons
        ],
        searched=make_search_table(results),
        failed=make_failures_table(results),
        facts=_collect_facts(results),
        study=study,
    )


def write_findings(results: Results, comparison: Comparison) -> list[str]:
    """Return sentences on what a table shows, to begin the report with.

    They name the row (configuration) with the highest main metric, the number of unfinished runs,
    and the significant differences from the reference.

    Args:
        results: results of the study.
        comparison: the numbers of one of its tables, whose rows are configurations.
    """
    table, main = comparison.table, comparison.table.metrics[0]
    means = comparison.means[comparison.means["metric"] == main].dropna(subset=["mean"])
    if means.empty:
        return ["No run has finished yet."]

    # The best row by the first metric.
    best = means.loc[means["mean"].idxmax()]
    seeds = f"{int(best['seeds'])} seed{'s' if best['seeds'] > 1 else ''}"
    value = f"{best['row']}, {format_number(best['mean'])} (mean of {seeds})"
    findings = [f"Highest {format_metric(main)}: {value}."]

    # How many runs are missing. Results of single run folders have no plan, so no run is missing.
    # ``count_runs`` is how many runs the plan has for a row. A failed run counts as finished.
    num_runs = sum(map(results.plan.count_runs, table.rows))
    status = results.runs.loc[results.runs["row"].isin(table.rows), "status"]
    num_unfinished = num_runs - int(status.isin((DONE, FAILED)).sum())
    if results.is_planned and num_unfinished > 0:
        findings.append(
            f"{num_unfinished} of {num_runs} runs are not finished; these figures are preliminary."
        )

    if not comparison.differences.empty:
        findings += _describe_differences(comparison)
    return findings


def _describe_differences(comparison: Comparison) -> list[str]:
    """Return sentences on which differences from the reference are significant.

    The first sentence names the rows (configurations) that differ significantly. If some do not, a
    second one says how small a difference could be found. A last one names rows with too few seeds.

    Args:
        comparison: the numbers of one table of the study, with one line per row but the reference.
    """
    differences, reference = comparison.differences, comparison.table.reference

    # Which rows differ significantly: the column ``star`` is true for them.
    significant = [
        f"{line['row']} ({format_number(line['difference'], sign=True)})"
        for line in differences[differences["star"]].to_dict("records")
    ]
    if significant:
        names = join_names(significant)
        sentences = [f"Significantly different from {reference} (Holm-corrected): {names}."]
    else:
        sentences = [f"No significant difference from {reference} (Holm-corrected)."]

    # How small a difference could be found, if some are not significant. Each line has its own
    # minimum detectable difference, which is NaN without a standard error.
    detectable = differences["detectable"].dropna()
    if len(detectable) and len(significant) < len(differences):
        low, high = format_number(detectable.min()), format_number(detectable.max())
        sizes = low if low == high else f"{low} to {high}, by configuration"
        sentences.append(
            f"Minimum detectable difference (80% power): {sizes}; smaller ones may exist."
        )

    # A significant difference needs two seeds on both sides.
    has_one_seed = (differences["seeds"] < 2) | (differences["reference_seeds"] < 2)
    if has_one_seed.any():
        rows = join_names(differences.loc[has_one_seed, "row"])
        sentences.append(f"No statement on {rows}: it needs two seeds on both sides.")
    return sentences


def _collect_facts(results: Results) -> dict[str, str]:
    """Return facts of the finished runs for the page: versions, device, commit and training time.

    Args:
        results: results of the study.

    Returns:
        Name -> text. If runs have different devices or commits, the text lists them.
    """
    facts = dict(results.facts.versions)
    # Results of other systems have no device, commit or time, so columns may be missing or empty.
    done = results.done.reindex(columns=["device", "commit", "seconds"])
    for column in ("device", "commit"):
        facts[column] = join_names(value for value in done[column].dropna().unique() if value)
    # Without any known time the sum is nan, whose text is empty, so that the fact is left out.
    facts["training, all runs"] = format_duration(done["seconds"].sum(min_count=1))
    return {name: text for name, text in facts.items() if text}


# --- charts ---


@dataclass(frozen=True)
class Chart:
    """A chart of the report.

    Attributes:
        kind: ``differences``, ``seconds``, ``parameters`` or ``curves``.
        title: title above the picture, as text of the page.
        figure: the picture.
        note: how to read the picture.
    """

    kind: str
    title: str
    figure: Figure
    note: str = ""

    @property
    def address(self) -> str:
        """The figure as the address of an image in a page: svg in base64 (a ``data:`` URL)."""
        file = io.BytesIO()  # without a date, so that the same study gives the same bytes
        with matplotlib.rc_context(_STYLE):  # fonts as outlines, for example
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


class _Figure(Figure):
    """A figure that a notebook shows whether or not pyplot is imported."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=120)
        return file.getvalue()


def draw_charts(results: Results, comparison: Comparison) -> list[Chart]:
    """Return all charts of one table; a chart that the results have no values for is left out.

    Args:
        results: results of the study.
        comparison: the numbers of one of its tables.
    """
    # The columns in _COSTS are training time and number of parameters.
    with matplotlib.rc_context(_STYLE):  # our style only here, not in the user's own charts
        charts = [
            draw_differences(comparison),
            *(draw_cost(results, comparison, column) for column in _COSTS),
            draw_curves(results, comparison),
        ]
    return [chart for chart in charts if chart is not None]


def draw_differences(comparison: Comparison) -> Chart | None:
    """Draw the differences of all rows (configurations) from the reference, with 95% intervals.

    Significant differences are filled and coloured, others white and gray. Intervals are dotted
    where a side has only one seed.

    Args:
        comparison: the numbers of one table of the study.

    Returns:
        The chart; None if the table has no differences.
    """
    lines = comparison.differences.to_dict("records")
    if not lines:
        return None

    # A point and an interval for each row, from top to bottom. Without an interval, ``low`` is nan.
    # ``seed_noise`` is "own" if both sides have several seeds. _COLORS[0] is blue, and names of
    # rows are shortened to _MAX_NAME characters.
    figure, axes = _make_figure(1.0 + 0.32 * len(lines))
    for y, line in enumerate(lines):
        color = _COLORS[0] if line["star"] else _GRAY
        if not math.isnan(line["low"]):
            dash = "-" if line["seed_noise"] == "own" else ":"
            axes.plot([line["low"], line["high"]], [y, y], color=color, lw=2, ls=dash)
        axes.plot(line["difference"], y, "o", color=color, mfc=color if line["star"] else "white")

    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(lines)), [shorten(line["row"], _MAX_NAME) for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)  # the first row on top
    axes.xaxis.set_major_locator(MaxNLocator(5))
    metric, reference = format_metric(comparison.table.metrics[0]), comparison.table.reference
    axes.set_xlabel(f"difference in {metric} from {shorten(reference, _MAX_NAME)}")

    note = "Filled: significant after Holm's correction over the table."
    if any(line["seed_noise"] != "own" for line in lines):
        note += " Dotted: a side has one seed."
    title = f"Difference from {reference}, 95% CI"
    return Chart("differences", title, figure, note)


def draw_cost(results: Results, comparison: Comparison, column: str) -> Chart | None:
    """Draw the main metric of all rows (configurations) against a cost.

    The metric is the mean over seeds, the cost the median over seeds. The cost axis is logarithmic
    if the largest cost is more than ten times the smallest.

    Args:
        results: results of the study.
        comparison: the numbers of one of its tables.
        column: the cost, ``seconds`` (of training) or ``parameters`` (their number).

    Returns:
        The chart; None for fewer than two rows that have both metric and cost.
    """
    if column not in results.runs.columns:
        return None

    # A point for each row that has both values; dropna leaves out rows that lack one of them. Then
    # reindex puts the rows into the order of the table, with NaN for those that were left out,
    # which the last dropna removes. A logarithmic axis has no place for a cost of 0.
    table, means = comparison.table, comparison.means
    mean = means[means["metric"] == table.metrics[0]].set_index("row")["mean"]
    cost = results.done.groupby("row")[column].median()
    points = pd.DataFrame({"mean": mean, "cost": cost}).dropna()
    points = points[points["cost"] > 0].reindex(table.rows).dropna()
    if len(points) < 2:
        return None

    cost_name, format_cost = _COSTS[column]  # for example "training time" and format_duration
    metric = format_metric(table.metrics[0])

    # Colour and marker of a row are the same in all charts; _LEGEND puts the legend below.
    figure, axes = _make_figure(_compute_height(len(points)))
    for row, point in points.iterrows():
        style = {**_make_style(results, row), "ls": "none", "ms": 7}  # a marker without a line
        axes.plot(point["cost"], point["mean"], **style)

    # The axis of the cost, with ticks such as "3 min 20 s" or "1.2 M".
    if points["cost"].max() > 10 * points["cost"].min():
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_cost(value)))
    axes.set(xlabel=f"{cost_name} (median over seeds)", ylabel=metric)
    figure.legend(**_LEGEND)

    return Chart(column, f"{metric} against {cost_name}", figure)


def draw_curves(results: Results, comparison: Comparison) -> Chart | None:
    """Draw the learning curves of a table: validation value by epoch, a line for each run.

    The value is that of the study's first metric. Runs of one row (a configuration) have one
    colour.

    Args:
        results: results of the study, with the values of all epochs.
        comparison: the numbers of one of its tables, which selects the rows.

    Returns:
        The chart; None if no epoch of these rows was validated.
    """
    if results.curves.empty:
        return None
    rows = comparison.table.rows
    curves = results.curves[results.curves["row"].isin(rows)].dropna(subset=["value"])
    if curves.empty:
        return None

    # A line for each run. Its colour and marker are those of its row in all charts, and _LEGEND
    # puts the legend below the chart.
    metric = format_metric(results.plan.metrics[0])
    drawn_rows = [row for row in rows if row in set(curves["row"])]
    figure, axes = _make_figure(_compute_height(len(drawn_rows)))
    for row in drawn_rows:
        style = {**_make_style(results, row), "lw": 1.3, "ms": 3.5}
        for _, curve in curves[curves["row"] == row].groupby("seed"):
            curve = curve.sort_values("epoch")
            # About six markers on a line, whatever its length.
            axes.plot(curve["epoch"], curve["value"], markevery=max(len(curve) // 6, 1), **style)
            style["label"] = None  # only the first run of a row is in the legend

    axes.set(xlabel="epoch", ylabel=f"{metric}, validation")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    figure.legend(**_LEGEND)

    return Chart("curves", f"Validation {metric}, one line per run", figure)


def _make_style(results: Results, row: Any) -> dict[str, Any]:
    """Return colour, marker, line style and label of a row (a configuration) in all charts.

    Args:
        results: results of the study, whose plan gives the order of the rows.
        row: name of the row.

    Returns:
        Arguments of matplotlib's ``plot``.
    """
    index = list(results.plan.rows).index(row)  # the same in all charts, whatever a table selects
    # There are as many markers as colours. When all are used up, start again with another dash.
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "ls": _DASHES[index // len(_COLORS) % len(_DASHES)],
        "label": shorten(row, _MAX_NAME),
    }


def _make_figure(height: float) -> tuple[Figure, Any]:
    """Return a figure of a height in inches, and its axes."""
    # _Figure is matplotlib's, and shows itself in notebooks. _WIDTH is about that of a phone.
    figure = _Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _compute_height(num_rows: int) -> float:
    """Return the height in inches of a figure with a legend for ``num_rows`` rows."""
    # 3.1 inches for the axes, and 0.2 for each line of the legend, which has two columns.
    return 3.1 + 0.2 * math.ceil(num_rows / 2)
