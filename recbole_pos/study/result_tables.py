"""The tables of a study: metrics with their seeds, differences, bins, failures, searches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from recbole_pos.study.rendered_table import (
    Cell,
    RenderedTable,
    count,
    format_interval,
    format_mean,
    format_number,
    listed,
    span,
)
from recbole_pos.study.results import COLD, DONE, FAILED, VALIDATION, Comparison, Results
from recbole_pos.study.statistics import ALL

# Mark behind an interval, by the source of its noise between seeds.
MARKS = {"own": "", "pooled": "†", "unknown": "‡"}
_NAMES = {"hit": "HR", "recall": "Recall", "precision": "Precision", "itemcoverage": "Coverage"}
_MARKED = {
    "pooled": (
        "† one seed: the interval takes the noise between seeds of the study's other "
        "configurations, and is too narrow where its own is larger; no star."
    ),
    "unknown": (
        "‡ one seed, and no configuration has several: the noise between seeds is unknown, so "
        "the interval compares these trained models and is too narrow for the methods; no star."
    ),
}


def make_metrics_table(results: Results, found: Comparison) -> RenderedTable:
    """Return the main table: seeds, metrics, values of the paper, difference from the reference and
    cost of every row."""
    table, plan, rows = found.table, results.plan, found.table.rows
    names = {metric: metric_name(metric) for metric in table.metrics}
    if table.validation:
        names[VALIDATION] = f"{metric_name(plan.metrics[0])}, validation"
    cold = [metric for metric in found.means["metric"].unique() if metric.endswith(COLD)]
    names |= {metric: metric_name(metric) for metric in cold}
    columns = {"configuration": [Cell(row) for row in rows]}
    columns["seeds"] = [_seeds(results, row) for row in rows]
    for metric, name in names.items():
        columns[name] = list(_metric(results, found, metric))
    if not found.differences.empty:
        difference = f"{metric_name(table.metrics[0])} - {table.reference}"
        columns[difference] = [_difference(found.differences, row) for row in rows]
    cost = _cost(results, rows)
    columns |= cost
    notes = ["Mean ± standard deviation over seeds; bold is the highest of a column."]
    known = found.means.dropna(subset=["targets"])
    if len(known):
        size = _size(known.iloc[0], plan.unit)
        notes.append(f"{size}; {plan.unit}s are taken as independent.")
    if not found.differences.empty:
        notes.append(
            f"Differences are paired by target, with 95% intervals over {plan.unit}s and seeds; "
            "* is below 0.05 after Holm's correction over the table."
        )
    notes += _marks(found.differences)
    for metric in cold:
        targets = int(found.means.loc[found.means["metric"] == metric, "targets"].max())
        notes.append(f"Cold targets: {targets:,}, whose items have no interaction in training.")
    last = len(columns) - 1
    spare = [*range(last, last - len(cost), -1)]  # then metrics but the main one, then seeds
    return _table(table.title, columns, notes, spare=(*spare, *range(len(names) + 1, 2, -1), 1))


def make_differences_table(found: Comparison) -> RenderedTable | None:
    """Return the differences from the reference with intervals and p-values; None without any."""
    pairs, lines = found.differences, found.differences.to_dict("records")
    if not lines:
        return None
    texts = {
        "configuration": [line["row"] for line in lines],
        "seeds of both": [f"{line['seeds']} and {line['reference_seeds']}" for line in lines],
        "difference": [_difference(pairs, line["row"]).text for line in lines],
        "95% CI": [_difference(pairs, line["row"]).detail for line in lines],
        "p": [_p(line["p"]) for line in lines],
        "p after Holm": [_p(line["p_holm"]) for line in lines],
        "minimum detectable difference": [format_number(line["detectable"]) for line in lines],
    }
    notes = (
        "p is the larger of two: a t-test with the noise of seeds and units in it, and random sign "
        "flips of units. Holm's correction is over this table; * is below 0.05.",
        "Minimum detectable difference: the true difference that 80% of such studies would find "
        "different from 0. Smaller ones may exist where none is significant.",
        *_marks(pairs),
    )
    main = metric_name(found.table.metrics[0])
    title = f"{found.table.title}: difference in {main} from {found.table.reference}"
    columns = {name: [Cell(text) for text in column] for name, column in texts.items()}
    return _table(title, columns, notes, spare=(1, 4, 6, 5))


def make_bins_table(found: Comparison, kind: str, unit: str = "user") -> RenderedTable:
    """Return the main metric of every row in each bin, with the difference from the reference."""
    means, pairs = found.bins[kind]
    main = found.table.metrics[0]
    columns = {"configuration": [Cell(row) for row in means["row"].unique()]}
    for name, part in means.groupby("bin", sort=False):
        best = _best(part, main)
        pair = pairs[pairs["bin"] == name]
        cells = []
        for row, value in zip(part["row"], part["mean"], strict=True):
            beside, text = _difference(pair, row), format_number(value)
            detail = f"{beside.text} {beside.detail}".strip()
            cells.append(Cell(text, detail, bool(text) and text == best))
        columns[f"{name} ({_size(part.iloc[0], unit)})"] = cells
    of = "of cold and of other items" if kind == "cold" else f"by {kind}"
    note = f"Below each figure: the difference to {found.table.reference} with its 95% interval."
    title = f"{found.table.title}: {metric_name(main)} {of}"
    return _table(title, columns, [note, *_marks(pairs)])


def make_failures_table(results: Results) -> RenderedTable | None:
    """Return the runs that failed, with their reasons; None if none did."""
    failed = results.runs[results.runs["status"] == FAILED]
    if failed.empty:
        return None
    texts = {"configuration": failed["row"], "seed": failed["seed"], "reason": failed["reason"]}
    columns = {name: [Cell(str(text)) for text in column] for name, column in texts.items()}
    return _table("Runs that failed", columns, words=frozenset({2}))


def make_search_table(results: Results) -> RenderedTable | None:
    """Return the options that the search of each row chose; None where nothing was searched."""
    trials = results.searches
    if trials.empty:
        return None
    metrics = list(map(metric_name, trials["metric"].unique()))
    value_name = f"{listed(metrics)}, validation"
    names = ("configuration", "trials", "chosen", value_name)
    columns: dict[str, list[Cell]] = {name: [] for name in names}
    for row, part in trials.groupby("row", sort=False):
        chosen = part[part["chosen"].astype(bool)]
        value = format_number(chosen["value"].iloc[0]) if len(chosen) else ""
        metric = metric_name(part["metric"].iloc[0]) if len(metrics) > 1 else ""
        columns["configuration"].append(Cell(str(row)))
        columns["trials"].append(Cell(f"{len(part)}"))
        columns["chosen"].append(Cell(chosen["options"].iloc[0] if len(chosen) else "not yet"))
        columns[value_name].append(Cell(value, metric))
    seeds = results.plan.search_seeds
    mean = f", the mean of {seeds} seeds" if seeds > 1 else ""
    note = f"Chosen by {listed(metrics)} on validation only{mean}, before testing."
    return _table("Search", columns, [note], frozenset({2}))


def make_tables(results: Results, comparisons: Sequence[Comparison]) -> list[RenderedTable]:
    """Return all tables of a study, in the order of the report."""
    tables: list[RenderedTable | None] = []
    for found in comparisons:
        tables += make_comparison_tables(results, found)
    tables += [make_search_table(results), make_failures_table(results)]
    return [table for table in tables if table is not None]


def make_comparison_tables(results: Results, found: Comparison) -> list[RenderedTable]:
    """Return the tables for one table of the plan: metrics, differences, bins."""
    tables = [make_metrics_table(results, found), make_differences_table(found)]
    tables += [make_bins_table(found, kind, results.plan.unit) for kind in found.bins]
    return [table for table in tables if table is not None]


def render_markdown(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Return the content of ``table.md``: all tables on one page."""
    parts = [f"# {results.plan.title}"]
    parts += [f"Warning: {text}." for text in results.warnings]
    if results.ties is not None:
        parts.append(results.ties.sentence(results.plan.dataset, results.plan.ties))
    parts += [table.markdown() for table in make_tables(results, comparisons)]
    return "\n\n".join(parts) + "\n"


def tabulate(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return the content of ``table.csv``: mean and difference from the reference, a line for each
    table, row, metric and bin."""
    keys, parts = ["row", "metric", "bin"], []
    for found in comparisons:
        for means, pairs in [
            (found.means.assign(bin=ALL), found.differences),
            *found.bins.values(),
        ]:
            if not pairs.empty:
                pairs = pairs.drop(columns=["seeds", "targets", "units"])
                means = means.merge(pairs, on=keys, how="left")
            parts.append(means.assign(table=found.table.title))
    not_empty = [part for part in parts if len(part)]  # a table without runs has no lines
    frame = pd.concat(not_empty or parts, ignore_index=True)
    first = ["table", *keys]
    return frame[[*first, *(name for name in frame if name not in first)]]


def metric_name(metric: str) -> str:
    """Return the name of a metric as papers write it: HR@10 for ``hit@10``."""
    name, at, cutoff = metric.partition("@")
    return _NAMES.get(name, name.upper()) + at + cutoff


def _table(
    title: str,
    columns: dict[str, list[Cell]],
    notes: Sequence[str] = (),
    words: frozenset[int] = frozenset(),
    spare: tuple[int, ...] = (),
) -> RenderedTable:
    """Return a table from its columns by name."""
    lines = tuple(zip(*columns.values(), strict=True))
    return RenderedTable(title, tuple(columns), lines, tuple(notes), words, spare)


def _metric(results: Results, found: Comparison, metric: str) -> Iterator[Cell]:
    """Yield the cells of a metric: its mean, with the figure of the paper in smaller letters."""
    means, best = found.means[found.means["metric"] == metric], _best(found.means, metric)
    for row in found.table.rows:
        line, figures = means[means["row"] == row], results.plan.paper.get(row, {})
        paper = f"paper {format_number(figures[metric])}" if metric in figures else ""
        if line.empty:
            yield Cell("", paper)
            continue
        mean, deviation = line[["mean", "deviation"]].iloc[0]
        yield Cell(format_mean(mean, deviation), paper, format_number(mean) == best != "")


def _best(frame: pd.DataFrame, metric: str) -> str:
    """Return the highest mean of a metric as text; empty for fewer than two rows."""
    values = frame.loc[frame["metric"] == metric, "mean"].dropna()
    return format_number(float(values.max())) if len(values) > 1 else ""


def _difference(pairs: pd.DataFrame, row: str) -> Cell:
    """Return the cell of a row's difference: star if significant, and interval with its mark."""
    found = pairs[pairs["row"] == row]
    if found.empty:
        return Cell()
    line = found.iloc[0]
    around = format_interval(line["low"], line["high"])
    text = format_number(line["difference"], sign=True) + "*" * bool(line["star"])
    return Cell(text, around + MARKS[line["seed_noise"]] if around else "")


def _seeds(results: Results, row: str) -> Cell:
    """Return the cell with the number of seeds of a row that are done, and of those that failed."""
    wanted = len(results.plan.seeds)
    status = results.runs.loc[results.runs["row"] == row, "status"]
    done, failed = ((status == word).sum() for word in (DONE, FAILED))
    text = f"{done}" if done == wanted else f"{done} of {wanted}"
    return Cell(text, f"{failed} failed" if failed else "")


def _cost(results: Results, rows: Sequence[str]) -> dict[str, list[Cell]]:
    """Return the columns of cost that are known, with the median over seeds."""
    columns = {}
    for column, name, write in (
        ("epochs", "epochs", lambda value: "" if math.isnan(value) else f"{value:g}"),
        ("seconds", "training", span),
        ("parameters", "parameters", count),
    ):
        if column in results.runs.columns and not results.done[column].isna().all():
            medians = results.done.groupby("row")[column].median().reindex(rows)
            columns[name] = [Cell(write(float(value))) for value in medians]
    return columns


def _size(line: pd.Series, unit: str) -> str:
    """Return the numbers of targets and units, in words: targets of a unit are not independent."""
    targets, units = line["targets"], line["units"]
    each = "" if targets == units else f" of {units:,.0f} {unit}s"
    return f"{targets:,.0f} targets{each}"


def _marks(pairs: pd.DataFrame) -> list[str]:
    """Return the notes on the marks of intervals in a table."""
    found = set() if pairs.empty else set(pairs["seed_noise"])
    return [note for kind, note in _MARKED.items() if kind in found]


def _p(value: float) -> str:
    """Return a p-value; empty for nan."""
    return "" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"
