"""The tables of a study: metrics with their seeds, differences, bins, failures, searches.

From :class:`Results` to :class:`RenderedTable` objects (:func:`make_tables`), to ``table.md``
(:func:`render_markdown`) and to the lines of ``table.csv`` (:func:`tabulate`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from recbole_pos.data.targets import WITHOUT_SEEN
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.plan import TablePlan
from recbole_pos.study.rendered_table import (
    Cell,
    RenderedTable,
    format_count,
    format_duration,
    format_interval,
    format_mean,
    format_number,
    join_names,
)
from recbole_pos.study.results import COLD_TARGETS, VALIDATION, Comparison, Results, concatenate
from recbole_pos.study.statistics import ALL

_NAMES = {"hit": "HR", "recall": "Recall", "precision": "Precision", "itemcoverage": "Coverage"}
# Source of an interval's noise between seeds -> note, whose first character marks the interval.
SEED_NOISE_NOTES = {
    "pooled": (
        "† one seed: the interval takes the noise between seeds of the study's other "
        "configurations, and is too narrow where its own is larger; no star."
    ),
    "unknown": (
        "‡ one seed, and no configuration has several: the noise between seeds is unknown, so "
        "the interval compares these trained models and is too narrow for the methods; no star."
    ),
}


def make_tables(results: Results) -> list[RenderedTable]:
    """Return all tables of a study, in the order of the report."""
    tables: list[RenderedTable | None] = []
    for comparison in results.comparisons:
        tables += make_comparison_tables(results, comparison)
    tables += [make_search_table(results), make_failures_table(results)]
    return [table for table in tables if table is not None]


def make_comparison_tables(results: Results, comparison: Comparison) -> list[RenderedTable]:
    """Return the tables for one table of the plan: metrics, differences, bins."""
    tables = [make_metrics_table(results, comparison)]
    if not comparison.differences.empty:
        tables.append(make_differences_table(comparison))
    unit = results.plan.unit
    return tables + [make_bins_table(comparison, kind, unit) for kind in comparison.bins]


def make_metrics_table(results: Results, comparison: Comparison) -> RenderedTable:
    """Return the main table: seeds, metrics, the paper's values, difference and cost of rows."""
    table, unit = comparison.table, results.plan.unit
    means, differences = comparison.means, comparison.differences
    columns = {
        "configuration": [Cell(row) for row in table.rows],
        "seeds": [_make_seeds_cell(results, row) for row in table.rows],
    }
    notes = describe_targets(results, table)
    notes.append("Mean ± standard deviation over seeds; bold is the highest of a column.")
    from_ranks = means.dropna(subset=["targets"])
    if len(from_ranks):
        size = _describe_size(from_ranks.iloc[0], unit)
        notes.append(f"{size}; {unit}s are taken as independent.")

    cold_metrics = [metric for metric in means["metric"].unique() if metric.endswith(COLD_TARGETS)]
    titles = {metric: format_metric(metric) for metric in table.metrics}
    if table.validation:
        titles[VALIDATION] = f"{format_metric(results.plan.metrics[0])}, validation"
    titles |= {metric: format_metric(metric) for metric in cold_metrics}
    for metric, title in titles.items():
        columns[title] = _make_metric_cells(results, comparison, metric)

    if not differences.empty:
        title = f"{format_metric(table.metrics[0])} - {table.reference}"
        columns[title] = [_make_difference_cell(differences, row) for row in table.rows]
        notes.append(
            f"Differences are paired by target, with 95% intervals over {unit}s and seeds; "
            "* is below 0.05 after Holm's correction over the table."
        )
    notes += _select_seed_noise_notes(differences)
    for metric in cold_metrics:
        num_targets = int(means.loc[means["metric"] == metric, "targets"].max())
        notes.append(f"Cold targets: {num_targets:,}, whose items have no interaction in training.")

    columns |= _make_cost_columns(results, table.rows)
    return _make_table(table.title, columns, notes)


def describe_targets(results: Results, table: TablePlan) -> list[str]:
    """Return sentences on what was predicted and ranked in a table; what is unknown is left out."""
    plan, split = results.plan, results.split
    runs = results.done[results.done["row"].isin(table.rows)]
    candidates = [text for text in runs.get("candidates", pd.Series(dtype=str)).unique() if text]
    facts = []
    if split:
        ((kind, value),) = split["split"].items()
        facts.append(f"split {kind}: {value}")
        facts.append(f"{split['targets']['test']:,} test targets (target: {split['target']})")
    if candidates:
        facts.append(f"ranked among {join_names(candidates)}")
    if "repeated_targets" in split:
        repeated = f"{split['repeated_targets']['test']:,}"
        outcome = "; they are misses" if candidates == [WITHOUT_SEEN] and repeated != "0" else ""
        facts.append(f"{repeated} of them items that their user has had before{outcome}")

    sentences = [f"Protocol: {', '.join(facts)}."] if facts else []
    if "valid_users" in split:
        sentences.append(
            f"Validation is on a sample of {split['valid_users']:,} users, the same for all."
        )
    if num_tied := split.get("tied_targets", {}).get("test", 0):
        order = "that of the file" if plan.ties == "file" else plan.ties
        sentences.append(
            f"{num_tied:,} test targets have another item of their user at the same time; their "
            f"order is {order}."
        )
    return sentences


def _make_seeds_cell(results: Results, row: str) -> Cell:
    """Return a cell with the number of a row's finished runs, and as detail of the failed ones."""
    num_seeds = results.plan.count_runs(row)
    status = results.runs.loc[results.runs["row"] == row, "status"]
    num_done, num_failed = (status == DONE).sum(), (status == FAILED).sum()
    is_partial = results.is_planned and num_done < num_seeds
    text = f"{num_done} of {num_seeds}" if is_partial else f"{num_done}"
    return Cell(text, f"{num_failed} failed" if num_failed else "")


def _make_metric_cells(results: Results, comparison: Comparison, metric: str) -> list[Cell]:
    """Return a cell for each row: the mean of a metric, and as detail the value of the paper."""
    means = comparison.means[comparison.means["metric"] == metric].set_index("row")
    best = _format_best(means["mean"])
    cells = []
    for row in comparison.table.rows:
        paper_values = results.plan.paper.get(row, {})
        paper = f"paper {format_number(paper_values[metric])}" if metric in paper_values else ""
        text, is_best = "", False
        if row in means.index:
            mean, deviation = means.loc[row, ["mean", "deviation"]]
            text = format_mean(mean, deviation)
            is_best = best != "" and format_number(mean) == best
        cells.append(Cell(text, paper, is_best))
    return cells


def _format_best(means: pd.Series) -> str:
    """Return the highest of several means as text; empty for fewer than two."""
    values = means.dropna()
    return format_number(float(values.max())) if len(values) > 1 else ""


def _make_difference_cell(differences: pd.DataFrame, row: str) -> Cell:
    """Return a cell with a row's difference, starred if significant, and its marked interval."""
    for line in differences[differences["row"] == row].to_dict("records"):
        text = format_number(line["difference"], sign=True) + ("*" if line["star"] else "")
        interval = format_interval(line["low"], line["high"])
        mark = SEED_NOISE_NOTES.get(line["seed_noise"], "")[:1] if interval else ""
        return Cell(text, interval + mark)
    return Cell()  # of the reference


def _select_seed_noise_notes(differences: pd.DataFrame) -> list[str]:
    """Return the notes that explain the marks of a table's intervals."""
    sources = set(differences["seed_noise"])
    return [note for source, note in SEED_NOISE_NOTES.items() if source in sources]


def _make_cost_columns(results: Results, rows: Sequence[str]) -> dict[str, list[Cell]]:
    """Return title -> a cell for each row with its median cost, for the costs that are known."""
    columns = {}
    for name, title, format_cost in (
        ("epochs", "epochs", lambda value: "" if math.isnan(value) else f"{value:g}"),
        ("seconds", "training", format_duration),
        ("parameters", "parameters", format_count),
    ):
        if name in results.runs.columns and not results.done[name].isna().all():
            medians = results.done.groupby("row")[name].median().reindex(rows)
            columns[title] = [Cell(format_cost(float(value))) for value in medians]
    return columns


def make_differences_table(comparison: Comparison) -> RenderedTable:
    """Return the differences from the reference with intervals and p-values."""
    differences, table = comparison.differences, comparison.table
    columns: dict[str, list[Cell]] = {}
    for line in differences.to_dict("records"):
        difference = _make_difference_cell(differences, line["row"])
        texts = {
            "configuration": line["row"],
            "seeds of both": f"{line['seeds']} and {line['reference_seeds']}",
            "difference": difference.text,
            "95% CI": difference.detail,
            "p": _format_p(line["p"]),
            "p after Holm": _format_p(line["p_holm"]),
            "minimum detectable difference": format_number(line["detectable"]),
        }
        for name, text in texts.items():
            columns.setdefault(name, []).append(Cell(text))
    notes = (
        "p is the larger of two: a t-test with the noise of seeds and units in it, and random sign "
        "flips of units. Holm's correction is over this table; * is below 0.05.",
        "Minimum detectable difference: the true difference that 80% of such studies would find "
        "different from 0. Smaller ones may exist where none is significant.",
        *_select_seed_noise_notes(differences),
    )
    title = f"{table.title}: difference in {format_metric(table.metrics[0])} from {table.reference}"
    return _make_table(title, columns, notes)


def _format_p(value: float) -> str:
    """Return a p-value; empty for nan."""
    if math.isnan(value):
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def make_bins_table(comparison: Comparison, kind: str, unit: str = "user") -> RenderedTable:
    """Return the main metric of every row in each bin, with the difference from the reference."""
    means, differences = comparison.bins[kind]
    table, main = comparison.table, comparison.table.metrics[0]
    columns = {"configuration": [Cell(row) for row in means["row"].unique()]}
    for name, bin_means in means.groupby("bin", sort=False):
        best = _format_best(bin_means["mean"])
        bin_differences = differences[differences["bin"] == name]
        cells = []
        for row, mean in zip(bin_means["row"], bin_means["mean"], strict=True):
            text = format_number(mean)
            difference = _make_difference_cell(bin_differences, row)
            detail = f"{difference.text} {difference.detail}".strip()
            cells.append(Cell(text, detail, bool(text) and text == best))
        columns[f"{name} ({_describe_size(bin_means.iloc[0], unit)})"] = cells

    grouping = "of cold and of other items" if kind == "cold" else f"by {kind}"
    note = f"Below each figure: the difference to {table.reference} with its 95% interval."
    title = f"{table.title}: {format_metric(main)} {grouping}"
    return _make_table(title, columns, [note, *_select_seed_noise_notes(differences)])


def _describe_size(line: pd.Series, unit: str) -> str:
    """Return ``900 targets``, or ``900 targets of 300 users`` where users have several."""
    targets, units = line["targets"], line["units"]
    return f"{targets:,.0f} targets" + (f" of {units:,.0f} {unit}s" if targets != units else "")


def make_failures_table(results: Results) -> RenderedTable | None:
    """Return a table of the runs that failed, with their reasons; None if none failed."""
    failed = results.runs[results.runs["status"] == FAILED]
    if failed.empty:
        return None
    titles = {"row": "configuration", "seed": "seed", "reason": "reason"}
    columns = {title: [Cell(str(cell)) for cell in failed[key]] for key, title in titles.items()}
    return _make_table("Runs that failed", columns, text_columns=(0, 2))


def make_search_table(results: Results) -> RenderedTable | None:
    """Return a table of the options that each search chose; None if nothing was searched."""
    if results.searches.empty:
        return None
    metrics = [format_metric(metric) for metric in results.searches["metric"].unique()]
    value_title = f"{join_names(metrics)}, validation"
    columns: dict[str, list[Cell]] = {}
    for row, trials in results.searches.groupby("row", sort=False):
        options, value = "not yet", ""
        for trial in trials[trials["chosen"].astype(bool)].to_dict("records"):
            options, value = trial["options"], format_number(trial["value"])
        metric = format_metric(trials["metric"].iloc[0]) if len(metrics) > 1 else ""
        columns.setdefault("configuration", []).append(Cell(str(row)))
        columns.setdefault("trials", []).append(Cell(f"{len(trials)}"))
        columns.setdefault("chosen", []).append(Cell(options))
        columns.setdefault(value_title, []).append(Cell(value, metric))

    seeds = results.plan.search_seeds
    average = f", the mean of {seeds} seeds" if seeds > 1 else ""
    note = f"Chosen by {join_names(metrics)} on validation only{average}, before testing."
    return _make_table("Search", columns, [note], text_columns=(0, 2))


def _make_table(
    title: str,
    columns: dict[str, list[Cell]],
    notes: Sequence[str] = (),
    text_columns: tuple[int, ...] = (0,),
) -> RenderedTable:
    """Return a table from its columns by name."""
    lines = tuple(zip(*columns.values(), strict=True))
    return RenderedTable(title, tuple(columns), lines, tuple(notes), text_columns)


def format_metric(metric: str) -> str:
    """Return the name of a metric as papers write it: HR@10 for ``hit@10``."""
    name, at, cutoff = metric.partition("@")
    return _NAMES.get(name, name.upper()) + at + cutoff


def render_markdown(results: Results) -> str:
    """Return the content of ``table.md``: all tables on one page."""
    blocks = [f"# {results.plan.title}", *(f"Warning: {text}." for text in results.warnings)]
    blocks += [table.markdown() for table in make_tables(results)]
    return "\n\n".join(blocks) + "\n"


def tabulate(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return the content of ``table.csv``: mean and difference from the reference, a line for each
    table, row, metric and bin."""
    keys = ["row", "metric", "bin"]
    frames = []
    for comparison in comparisons:
        overall = comparison.means.assign(bin=ALL), comparison.differences
        for means, differences in [overall, *comparison.bins.values()]:
            if not differences.empty:
                differences = differences.drop(columns=["seeds", "targets", "units"])
                means = means.merge(differences, on=keys, how="left")
            frames.append(means.assign(table=comparison.table.title))
    frame = concatenate(frames)
    first_columns = ["table", *keys]
    return frame[[*first_columns, *(name for name in frame if name not in first_columns)]]
