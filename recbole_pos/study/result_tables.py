"""The tables of a study: metrics with their seeds, differences, bins, failures, searches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from recbole_pos.study.rendered_table import (
    Cell,
    RenderedTable,
    count,
    interval,
    listed,
    number,
    span,
    with_deviation,
)
from recbole_pos.study.results import COLD, VALIDATION, Comparison, Results

STAR = "*"
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


def metrics_table(results: Results, found: Comparison) -> RenderedTable:
    """Return the main table: seeds, metrics, values of the paper, difference from the reference and
    cost of every row."""
    table, plan = found.table, results.plan
    main, reference = table.metrics[0], table.reference
    metrics = {metric: metric_name(metric) for metric in table.metrics}
    if table.validation:
        metrics[VALIDATION] = f"{metric_name(plan.metrics[0])}, validation"
    cold = [metric for metric in found.means["metric"].unique() if metric.endswith(COLD)]
    metrics |= {metric: metric_name(metric) for metric in cold}
    columns = ["configuration", "seeds", *metrics.values()]
    if not found.differences.empty:
        columns.append(f"{metric_name(main)} - {reference}")
    cost = _cost(results, table.rows)
    columns += [name for name, _ in cost]
    means = found.means.set_index(["row", "metric"])
    best = {metric: _best(found.means, metric) for metric in metrics}
    lines = []
    for row in table.rows:
        cells, figures = [Cell(row), _seeds(results, row)], plan.paper.get(row, {})
        for metric in metrics:
            mean, deviation = float("nan"), float("nan")
            if (row, metric) in means.index:
                mean, deviation = means.loc[(row, metric), ["mean", "deviation"]]
            paper = f"paper {number(figures[metric])}" if metric in figures else ""
            is_best = bool(number(mean)) and number(mean) == best[metric]
            cells.append(Cell(with_deviation(mean, deviation), paper, is_best))
        if not found.differences.empty:
            cells.append(_difference(found.differences, row))
        lines.append((*cells, *(Cell(texts[row]) for _, texts in cost)))
    notes = [*_comparison_notes(found, plan.unit), *_marks(found.differences)]
    for metric in cold:
        targets = int(found.means.loc[found.means["metric"] == metric, "targets"].max())
        notes.append(f"Cold targets: {targets:,}, whose items have no interaction in training.")
    spare = [*range(len(columns) - 1, len(columns) - 1 - len(cost), -1)]
    spare += [*range(len(metrics) + 1, 2, -1), 1]  # metrics but the main one, then seeds
    return RenderedTable(
        table.title, tuple(columns), tuple(lines), tuple(notes), spare=tuple(spare)
    )


def differences_table(found: Comparison) -> RenderedTable | None:
    """Return the differences from the reference with intervals and p-values; None without any."""
    pairs = found.differences
    if pairs.empty:
        return None
    lines = []
    for line in pairs.to_dict("records"):
        difference = _difference(pairs, line["row"])
        texts = [line["row"], f"{line['seeds']} and {line['reference_seeds']}", difference.text]
        texts += [interval(line["low"], line["high"]) + MARKS[line["seed_noise"]], _p(line["p"])]
        texts += [_p(line["p_holm"]), number(line["detectable"])]
        lines.append(tuple(map(Cell, texts)))
    columns = (
        *("configuration", "seeds of both", "difference", "95% CI", "p", "p after Holm"),
        "minimum detectable difference",
    )
    notes = (
        "p is the larger of two: a t-test with the noise of seeds and units in it, and random sign "
        "flips of units. Holm's correction is over this table; * is below 0.05.",
        "Minimum detectable difference: the true difference that 80% of such studies would find "
        "different from 0. Smaller ones may exist where none is significant.",
        *_marks(pairs),
    )
    main = metric_name(found.table.metrics[0])
    title = f"{found.table.title}: difference in {main} from {found.table.reference}"
    return RenderedTable(title, columns, tuple(lines), notes, spare=(1, 4, 6, 5))


def bins_table(found: Comparison, kind: str, unit: str = "user") -> RenderedTable:
    """Return the main metric of every row in each bin, with the difference from the reference.

    Args:
        found: numbers of the table.
        kind: kind of the bins.
        unit: name of an independent unit, such as user.
    """
    mean, pairs = found.bins[kind]
    columns, cells = ["configuration"], {row: [Cell(row)] for row in dict.fromkeys(mean["row"])}
    for name, part in mean.groupby("bin", sort=False):
        targets, units = part[["targets", "units"]].iloc[0]
        columns.append(f"{name} ({_amount(targets, units, unit, False)})")
        best = _best(part, found.table.metrics[0])
        pair = pairs[pairs["bin"] == name] if not pairs.empty else pairs
        for row, value in zip(part["row"], part["mean"], strict=True):
            beside, text = _difference(pair, row), number(value)
            detail = " ".join(filter(None, (beside.text, beside.detail)))
            cells[row].append(Cell(text, detail, bool(text) and text == best))
    main = metric_name(found.table.metrics[0])
    of = "of cold and of other items" if kind == "cold" else f"by {kind}"
    title = f"{found.table.title}: {main} {of}"
    note = f"Below each figure: the difference to {found.table.reference} with its 95% interval."
    return RenderedTable(
        title, tuple(columns), tuple(map(tuple, cells.values())), (note, *_marks(pairs))
    )


def failures_table(results: Results) -> RenderedTable | None:
    """Return the runs that failed, with their reasons; None if none did."""
    failed = results.failed
    if failed.empty:
        return None
    lines = []
    for line in failed.to_dict("records"):
        reason = line.get("reason")
        reason = reason if isinstance(reason, str) and reason else "no reason was written down"
        lines.append((Cell(str(line["row"])), Cell(str(line["seed"])), Cell(reason)))
    columns = ("configuration", "seed", "reason")
    return RenderedTable("Runs that failed", columns, tuple(lines), words=frozenset({2}))


def search_table(results: Results) -> RenderedTable | None:
    """Return the options that the search of each row chose; None where nothing was searched."""
    trials = results.searches
    if trials.empty:
        return None
    lines, metrics = [], list(dict.fromkeys(trials["metric"]))
    for row, part in trials.groupby("row", sort=False):
        chosen = part[part["chosen"].astype(bool)]
        text = str(chosen["options"].iloc[0]) if len(chosen) else "not yet"
        values = chosen["value"].dropna()
        value = number(float(values.iloc[0])) if len(values) else ""
        name = metric_name(str(part["metric"].iloc[0])) if len(metrics) > 1 else ""
        lines.append((Cell(str(row)), Cell(f"{len(part)}"), Cell(text), Cell(value, name)))
    metric = listed(map(metric_name, metrics))
    seeds = results.plan.search_seeds
    mean = f", the mean of {seeds} seeds" if seeds > 1 else ""
    note = f"Chosen by {metric} on validation only{mean}, before testing."
    columns = ("configuration", "trials", "chosen", f"{metric}, validation")
    return RenderedTable("Search", columns, tuple(lines), (note,), frozenset({2}))


def all_tables(results: Results, comparisons: Sequence[Comparison]) -> list[RenderedTable]:
    """Return all tables of a study, in the order of the report."""
    found: list[RenderedTable | None] = []
    for comparison in comparisons:
        found += [metrics_table(results, comparison), differences_table(comparison)]
        found += [bins_table(comparison, kind, results.plan.unit) for kind in comparison.bins]
    found += [search_table(results), failures_table(results)]
    return [table for table in found if table is not None]


def markdown(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Return the content of ``table.md``: all tables on one page."""
    parts = [f"# {results.plan.title}"]
    parts += [f"Warning: {text}." for text in results.warnings]
    if results.ties is not None:
        parts.append(results.ties.sentence(results.plan.dataset, results.plan.ties))
    parts += [table.markdown() for table in all_tables(results, comparisons)]
    return "\n\n".join(parts) + "\n"


def tidy(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return the content of ``table.csv``: mean and difference from the reference, a line for each
    table, row, metric and bin."""
    parts = []
    for comparison in comparisons:
        bins = [(comparison.means.assign(bin="all targets"), comparison.differences)]
        for mean, pair in [*bins, *comparison.bins.values()]:
            keys = ["row", "metric", "bin"]
            both = mean
            if not pair.empty:
                both = mean.merge(
                    pair.drop(columns=["seeds", "targets", "units"]), on=keys, how="left"
                )
            parts.append(both.assign(table=comparison.table.title))
    not_empty = [part for part in parts if len(part)]  # a table without runs has no lines
    frame = pd.concat(not_empty or parts, ignore_index=True)
    first = ["table", "row", "metric", "bin"]
    return frame[[*first, *(name for name in frame if name not in first)]]


def metric_name(metric: str) -> str:
    """Return the name of a metric as papers write it: HR@10 for ``hit@10``."""
    name, at, cutoff = metric.partition("@")
    return _NAMES.get(name, name.upper()) + at + cutoff


def _best(frame: pd.DataFrame, metric: str) -> str:
    """Return the highest mean of a metric as text; empty for fewer than two rows."""
    values = frame.loc[frame["metric"] == metric, "mean"].dropna()
    return number(float(values.max())) if len(values) > 1 else ""


def _difference(pairs: pd.DataFrame, row: str) -> Cell:
    """Return the cell of a row's difference: star if significant, and interval with its mark."""
    found = pairs[pairs["row"] == row] if not pairs.empty else pairs
    if found.empty:
        return Cell()
    line = found.iloc[0]
    text = number(line["difference"], sign=True) + STAR * bool(line["star"])
    around = interval(line["low"], line["high"])
    return Cell(text, around + MARKS[line["seed_noise"]] if around else "")


def _seeds(results: Results, row: str) -> Cell:
    """Return the cell with the number of seeds of a row that are done, and of those that failed."""
    wanted = len(results.plan.seeds)
    runs = results.runs[results.runs["row"] == row]
    done, failed = ((runs["status"] == word).sum() for word in ("done", "failed"))
    text = f"{done}" if done == wanted else f"{done} of {wanted}"
    return Cell(text, f"{failed} failed" if failed else "")


def _cost(results: Results, rows: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the columns of cost that are known: name, and row -> median over seeds as text."""

    def epochs(value: float) -> str:
        return "" if math.isnan(value) else f"{value:g}"

    cost_columns = []
    for column, name, write in (
        ("epochs", "epochs", epochs),
        ("seconds", "training", span),
        ("parameters", "parameters", count),
    ):
        if column in results.runs.columns and not results.done[column].isna().all():
            median_by_row = results.done.groupby("row")[column].median()
            cost_columns.append(
                (name, {row: write(float(median_by_row.get(row, np.nan))) for row in rows})
            )
    return cost_columns


def _comparison_notes(found: Comparison, unit: str) -> list[str]:
    """Return the notes on deviations, number of targets, and differences of a table."""
    notes = ["Mean ± standard deviation over seeds; bold is the highest of a column."]
    known = found.means.dropna(subset=["targets"])
    if len(known):
        targets, units = (int(known[name].iloc[0]) for name in ("targets", "units"))
        notes.append(f"{_amount(targets, units, unit)}; {plural(unit)} are taken as independent.")
    if not found.differences.empty:
        notes.append(
            f"Differences are paired by target, with 95% intervals over {plural(unit)} and seeds; "
            "* is below 0.05 after Holm's correction over the table."
        )
    return notes


def plural(unit: str) -> str:
    """Return the plural of a unit: ``users`` for ``user`` and for its column ``user_id``."""
    return f"{unit.removesuffix('_id')}s"


def _amount(targets: int, units: int, unit: str, per_unit: bool = True) -> str:
    """Return the numbers of targets and units, in words: targets of a unit are not independent.

    Args:
        targets, units: the numbers.
        unit: name of a unit.
        per_unit: whether to say so where each unit has one target.
    """
    if targets == units:
        return f"{targets:,} targets" + f", one per {unit.removesuffix('_id')}" * per_unit
    return f"{targets:,} targets of {units:,} {plural(unit)}"


def _marks(pairs: pd.DataFrame) -> list[str]:
    """Return the notes on the marks of intervals in a table."""
    if pairs.empty:
        return []
    return [_MARKED[kind] for kind in _MARKED if (pairs["seed_noise"] == kind).any()]


def _p(value: float) -> str:
    if math.isnan(value):
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
