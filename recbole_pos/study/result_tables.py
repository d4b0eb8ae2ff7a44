"""The tables of a study: metrics with their seeds, differences, bins, failures, searches.

They are made from :class:`Results`: as :class:`RenderedTable` objects (:func:`make_tables`), as the
text of ``table.md`` (:func:`render_markdown`), and as the lines of ``table.csv``
(:func:`tabulate`). A row of a study is one of the configurations that it compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from recbole_pos.data.protocol import WITHOUT_SEEN
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
from recbole_pos.study.results import (
    ALL,
    COLD_TARGETS,
    VALIDATION,
    Comparison,
    Results,
    concatenate,
)

# Names of metrics as papers write them, where they are not the upper case of RecBole's names.
_NAMES = {"hit": "HR", "recall": "Recall", "precision": "Precision", "itemcoverage": "Coverage"}
# How the noise between seeds of an interval was estimated, where a configuration has one seed ->
# note below the table. The first character of the note marks the interval.
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
    """Return the tables for one table of the plan: metrics, differences, and each kind of bins.

    Args:
        results: results of the study.
        comparison: the numbers of the table. Differences and bins may be missing from it.
    """
    # Bins are groups of test targets, for example by the length of the user's history.
    tables = [make_metrics_table(results, comparison)]
    if not comparison.differences.empty:
        tables.append(make_differences_table(comparison))
    unit = results.plan.unit
    return tables + [make_bins_table(comparison, kind, unit) for kind in comparison.bins]


def make_metrics_table(results: Results, comparison: Comparison) -> RenderedTable:
    """Return the main table of a comparison, one line per row (a configuration of the study).

    The columns are the number of seeds; the metrics, with their deviation over seeds and the values
    of the paper; the difference from the reference with its interval; and the costs of training.

    Args:
        results: results of the study.
        comparison: the numbers of one of its tables: means and differences.
    """
    table, differences = comparison.table, comparison.differences
    columns = {
        "configuration": [Cell(row) for row in table.rows],
        "seeds": [_make_seeds_cell(results, row) for row in table.rows],
    }

    # A column for each metric: those of the table, the first one in validation, and the recall of
    # cold targets (items without training interactions).
    titles = {metric: format_metric(metric) for metric in table.metrics}
    if table.validation:
        titles[VALIDATION] = f"{format_metric(results.plan.metrics[0])}, validation"
    for metric in comparison.means["metric"].unique():
        if metric.endswith(COLD_TARGETS):
            titles[metric] = format_metric(metric)
    for metric, title in titles.items():
        columns[title] = _make_metric_cells(results, comparison, metric)

    # A column of the differences from the reference, and columns of epochs, time and parameters.
    if not differences.empty:
        title = f"{format_metric(table.metrics[0])} - {table.reference}"
        columns[title] = [_make_difference_cell(differences, row) for row in table.rows]
    columns |= _make_cost_columns(results, table.rows)

    notes = [*describe_targets(results, table), *_explain_numbers(comparison, results.plan.unit)]
    return RenderedTable.from_columns(table.title, columns, notes)


def _explain_numbers(comparison: Comparison, unit: str) -> list[str]:
    """Return the notes below a main table on how its means and differences were computed.

    Args:
        comparison: the numbers of the table.
        unit: word for what the dataset has as users, ``user`` or ``session``.
    """
    means, differences = comparison.means, comparison.differences
    notes = ["Mean ± standard deviation over seeds; bold is the highest of a column."]

    # The number of targets is known of metrics that were computed from their ranks.
    from_ranks = means.dropna(subset=["targets"])
    if len(from_ranks):
        size = _describe_size(from_ranks.iloc[0], unit)
        notes.append(f"{size}; {unit}s are taken as independent.")

    if not differences.empty:
        notes.append(
            f"Differences are paired by target, with 95% intervals over {unit}s and seeds; "
            "* is below 0.05 after Holm's correction over the table."
        )
    notes += _select_seed_noise_notes(differences)  # on intervals marked by † or ‡

    is_cold = [metric.endswith(COLD_TARGETS) for metric in means["metric"]]
    if any(is_cold):
        num_targets = int(means.loc[is_cold, "targets"].max())
        notes.append(f"Cold targets: {num_targets:,}, whose items have no interaction in training.")
    return notes


def describe_targets(results: Results, table: TablePlan) -> list[str]:
    """Return sentences on what was predicted in a table, and among which items it was ranked.

    The first sentence is, for example, ``Protocol: split LS: valid_and_test, 943 test targets
    (target: all), ranked among all items, 12 of them items that their user has had before.`` Facts
    that are not known are left out. There may be two more sentences: on a sample of users for
    validation, and on targets whose user has another interaction at the same time.

    Args:
        results: results of the study, with the summary of its split.
        table: the table; only runs of its rows (configurations) are considered.
    """
    split = results.facts.split  # facts by name; empty if unknown
    runs = results.done[results.done["row"].isin(table.rows)]
    # The different candidates (items that are ranked) of the runs, in words, such as "all items".
    candidates = [text for text in runs.get("candidates", pd.Series(dtype=str)).unique() if text]

    # The first sentence.
    facts = []
    if split:
        ((kind, value),) = split["split"].items()  # one entry, such as {"LS": "valid_and_test"}
        facts.append(f"split {kind}: {value}")
        facts.append(f"{split['targets']['test']:,} test targets (target: {split['target']})")
    if candidates:
        facts.append(f"ranked among {join_names(candidates)}")
    if "repeated_targets" in split:
        num_repeated = split["repeated_targets"]["test"]  # targets that were seen before
        text = f"{num_repeated:,} of them items that their user has had before"
        # No model can find them if all runs rank only unseen items, which is WITHOUT_SEEN in words.
        if num_repeated and candidates == [WITHOUT_SEEN]:
            text += "; they are misses"
        facts.append(text)

    # The other sentences.
    sentences = [f"Protocol: {', '.join(facts)}."] if facts else []
    if "valid_users" in split:
        sentences.append(
            f"Validation is on a sample of {split['valid_users']:,} users, the same for all."
        )
    if num_tied := split.get("tied_targets", {}).get("test", 0):
        sentences.append(
            f"{num_tied:,} test targets have another item of their user at the same time; "
            "eval_args.ties decides their order."
        )
    return sentences


def _make_seeds_cell(results: Results, row: str) -> Cell:
    """Return a cell with the number of finished runs of a row (a configuration of the study).

    If runs are missing, the text is ``3 of 5``. The detail is the number of failed runs, if any.
    Results that were collected from single run folders have no plan, so no run is missing.

    Args:
        results: results of the study, with a line for each run.
        row: name of the row.
    """
    num_seeds = results.plan.count_runs(row)  # how many runs the plan asks for
    status = results.runs.loc[results.runs["row"] == row, "status"]  # of each run of the row
    num_done, num_failed = (status == DONE).sum(), (status == FAILED).sum()
    is_partial = results.is_planned and num_done < num_seeds
    text = f"{num_done} of {num_seeds}" if is_partial else f"{num_done}"
    return Cell(text, f"{num_failed} failed" if num_failed else "")


def _make_metric_cells(results: Results, comparison: Comparison, metric: str) -> list[Cell]:
    """Return the cells of a metric's column, one for each row (configuration) of the table.

    A cell has the mean and the deviation over seeds, and as detail the value of the paper, if the
    study gives it. The best mean is bold. The cell of a row without finished runs is empty.

    Args:
        results: results of the study, whose plan has the values of the paper.
        comparison: the numbers of the table.
        metric: name of the metric, such as ``ndcg@10``.
    """
    means = comparison.means[comparison.means["metric"] == metric].set_index("row")
    # The highest mean as text with four decimals; empty if there is nothing to compare it with.
    best = _format_best(means["mean"])
    cells = []
    for row in comparison.table.rows:
        paper_values = results.plan.paper.get(row, {})
        paper = f"paper {format_number(paper_values[metric])}" if metric in paper_values else ""
        text, is_best = "", False
        if row in means.index:
            mean, deviation = means.loc[row, ["mean", "deviation"]]
            text = format_mean(mean, deviation)
            # Compare as text: rows that look equally good are all bold.
            is_best = best != "" and format_number(mean) == best
        cells.append(Cell(text, paper, is_best))
    return cells


def _format_best(means: pd.Series) -> str:
    """Return the highest of several means as text; empty for fewer than two."""
    values = means.dropna()
    return format_number(float(values.max())) if len(values) > 1 else ""


def _make_difference_cell(differences: pd.DataFrame, row: str) -> Cell:
    """Return a cell with the difference of a row from the reference, and its 95% interval.

    A significant difference has a star. A sign after the interval (``†`` or ``‡``) says that the
    noise between seeds could not be estimated from the row's own seeds.

    Args:
        differences: one line per row, as :func:`.results.compute_differences` returns them.
        row: name of the row (a configuration). The cell of the reference itself is empty.
    """
    lines = differences[differences["row"] == row].to_dict("records")
    if not lines:  # the reference
        return Cell()

    line = lines[0]
    text = format_number(line["difference"], sign=True) + ("*" if line["star"] else "")
    interval = format_interval(line["low"], line["high"])
    # Notes of the table explain the marks, and begin with them: "† one seed ...".
    mark = SEED_NOISE_NOTES.get(line["seed_noise"], "")[:1] if interval else ""
    return Cell(text, interval + mark)


def _select_seed_noise_notes(differences: pd.DataFrame) -> list[str]:
    """Return the notes that explain the marks ``†`` and ``‡`` of a table's intervals."""
    # SEED_NOISE_NOTES: where the noise of an interval is from, if not from the row's own seeds ->
    # note, which begins with the mark.
    sources = set(differences["seed_noise"])
    return [note for source, note in SEED_NOISE_NOTES.items() if source in sources]


def _make_cost_columns(results: Results, rows: Sequence[str]) -> dict[str, list[Cell]]:
    """Return columns with the median epochs, training time and number of parameters of each row.

    Args:
        results: results of the study.
        rows: names of the rows (configurations) of the table, in its order.

    Returns:
        Title of a column -> its cells. A cost that no finished run has is left out.
    """
    columns = {}
    # Name of the cost in the table of runs, title of the column, and how a value is written.
    for name, title, format_cost in (
        ("epochs", "epochs", lambda value: "" if math.isnan(value) else f"{value:g}"),
        ("seconds", "training", format_duration),
        ("parameters", "parameters", format_count),
    ):
        if name in results.runs.columns and not results.done[name].isna().all():
            # Over the finished runs of each row; ``reindex`` gives NaN to a row without any.
            medians = results.done.groupby("row")[name].median().reindex(rows)
            columns[title] = [Cell(format_cost(float(value))) for value in medians]
    return columns


def make_differences_table(comparison: Comparison) -> RenderedTable:
    """Return a table of the differences from the reference, with intervals and p-values.

    It has a line for each row (a configuration of the study) but the reference.

    Args:
        comparison: the numbers of one table of the study, of which ``differences`` are shown.
    """
    differences, table = comparison.differences, comparison.table
    lines = []
    for line in differences.to_dict("records"):
        # The text of this cell is the difference, its detail the interval.
        difference = _make_difference_cell(differences, line["row"])
        texts = (
            line["row"],
            f"{line['seeds']} and {line['reference_seeds']}",
            difference.text,
            difference.detail,
            _format_p(line["p"]),
            _format_p(line["p_holm"]),
            format_number(line["detectable"]),
        )
        lines.append(tuple(map(Cell, texts)))
    notes = (
        "p is the larger of two: a t-test with the noise of seeds and units in it, and random sign "
        "flips of units. Holm's correction is over this table; * is below 0.05.",
        "Minimum detectable difference: the true difference that 80% of such studies would find "
        "different from 0. Smaller ones may exist where none is significant.",
        *_select_seed_noise_notes(differences),
    )
    title = f"{table.title}: difference in {format_metric(table.metrics[0])} from {table.reference}"
    columns = ("configuration", "seeds of both", "difference", "95% CI", "p", "p after Holm")
    return RenderedTable(title, (*columns, "minimum detectable difference"), tuple(lines), notes)


def _format_p(value: float) -> str:
    """Return a p-value; empty for nan."""
    if math.isnan(value):
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def make_bins_table(comparison: Comparison, kind: str, unit: str = "user") -> RenderedTable:
    """Return a table of the main metric in each bin (group of test targets), a column for each.

    It has a line for each row (configuration). A cell has the mean of the metric, and below it the
    difference from the reference with its interval.

    Args:
        comparison: the numbers of one table of the study.
        kind: what the targets are grouped by: ``history``, ``age``, ``popularity`` or ``cold``.
        unit: word for what the dataset has as users, ``user`` or ``session``.
    """
    # Two frames with a line for each bin and row; ``differences`` has none for the reference.
    means, differences = comparison.bins[kind]
    table, main = comparison.table, comparison.table.metrics[0]
    columns = {"configuration": [Cell(row) for row in means["row"].unique()]}
    for bin_name, bin_means in means.groupby("bin", sort=False):  # bins in their order
        # The highest mean as it is written, so that all means that look the same are bold. With a
        # single row nothing is bold, and it is the empty text.
        best = _format_best(bin_means["mean"])
        bin_differences = differences[differences["bin"] == bin_name]
        cells = []
        for row, mean in zip(bin_means["row"], bin_means["mean"], strict=True):
            text = format_number(mean)
            is_best = text != "" and text == best
            # ``_make_difference_cell`` makes a cell of its own, with the difference as its text and
            # the interval as its detail. In this table both stand below the mean, as the detail of
            # the mean's cell. Both are empty for the reference.
            difference = _make_difference_cell(bin_differences, row)
            detail = f"{difference.text} {difference.detail}".strip()
            cells.append(Cell(text, detail, is_best))
        # The title has the size of the bin, which is the same for all rows.
        columns[f"{bin_name} ({_describe_size(bin_means.iloc[0], unit)})"] = cells

    grouping = "of cold and of other items" if kind == "cold" else f"by {kind}"
    note = f"Below each figure: the difference to {table.reference} with its 95% interval."
    title = f"{table.title}: {format_metric(main)} {grouping}"
    notes = [note, *_select_seed_noise_notes(differences)]
    return RenderedTable.from_columns(title, columns, notes)


def _describe_size(line: pd.Series, unit: str) -> str:
    """Return ``900 targets``, or ``900 targets of 300 users`` where users have several targets.

    Args:
        line: a line of means, with the number of ``targets`` and of ``units`` (users or sessions).
        unit: word for a unit, ``user`` or ``session``.
    """
    # With one target for each unit, the number of units says nothing new.
    targets, units = line["targets"], line["units"]
    return f"{targets:,.0f} targets" + (f" of {units:,.0f} {unit}s" if targets != units else "")


def make_failures_table(results: Results) -> RenderedTable | None:
    """Return a table of the runs that failed, with their reasons; None if no run failed.

    Args:
        results: results of the study, with a line for each run.
    """
    failed = results.runs[results.runs["status"] == FAILED]
    if failed.empty:
        return None
    # Column of the table of runs -> title. A row of a study is a configuration. Configurations and
    # reasons (text_columns, by index) are aligned left as words.
    titles = {"row": "configuration", "seed": "seed", "reason": "reason"}
    columns = {title: [Cell(str(cell)) for cell in failed[key]] for key, title in titles.items()}
    return RenderedTable.from_columns("Runs that failed", columns, text_columns=(0, 2))


def make_search_table(results: Results) -> RenderedTable | None:
    """Return a table of the options that each search of a study has chosen; None without a search.

    A search tries several combinations of options of a configuration, each in a trial. The table
    has a line for each search: ``SASRec | 12 | learning_rate: 0.001 | 0.0425`` says that the best
    of 12 trials had this learning rate and this validation value.

    Args:
        results: results of the study. Its ``searches`` have one line per trial, with the row (the
            configuration), the options, the validation value and its metric, and whether the trial
            was chosen.
    """
    if results.searches.empty:
        return None

    # Models may differ in the metric of their early stopping, by which their search chooses. If so,
    # each value has the name of its metric as detail.
    metrics = [format_metric(metric) for metric in results.searches["metric"].unique()]
    lines = []
    for row, trials in results.searches.groupby("row", sort=False):
        options, value = "not yet", ""  # shown until all trials have ended and one is chosen
        chosen = trials[trials["chosen"].astype(bool)]
        if not chosen.empty:  # one trial, since a search chooses one
            options, value = chosen["options"].iloc[0], format_number(chosen["value"].iloc[0])
        metric = format_metric(trials["metric"].iloc[0]) if len(metrics) > 1 else ""
        lines.append((Cell(str(row)), Cell(f"{len(trials)}"), Cell(options), Cell(value, metric)))

    columns = ("configuration", "trials", "chosen", f"{join_names(metrics)}, validation")
    seeds = results.plan.search_seeds
    average = f", the mean of {seeds} seeds" if seeds > 1 else ""
    # Configurations and options (text_columns, by index) are aligned left as words.
    note = f"Chosen by {join_names(metrics)} on validation only{average}, before testing."
    return RenderedTable("Search", columns, tuple(lines), (note,), text_columns=(0, 2))


def format_metric(metric: str) -> str:
    """Return the name of a metric as papers write it: HR@10 for ``hit@10``."""
    # _NAMES has the names that differ from upper case, such as HR of hit. A metric without a
    # cutoff has no "@".
    name, at, cutoff = metric.partition("@")
    return _NAMES.get(name, name.upper()) + at + cutoff


def render_markdown(results: Results) -> str:
    """Return the content of ``table.md``: all tables on one page."""
    blocks = [f"# {results.plan.title}", *(f"Warning: {text}." for text in results.facts.warnings)]
    blocks += [table.markdown() for table in make_tables(results)]
    return "\n\n".join(blocks) + "\n"


def tabulate(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return the content of ``table.csv``: means and differences from the reference.

    Args:
        comparisons: the numbers of all tables of the study.

    Returns:
        One line per table, row (configuration), metric and bin (group of test targets); metrics
        over all targets have the bin ``all targets``. The columns are these four, those of the
        means (mean, deviation, seeds and so on), and those of the differences (difference, low,
        high, p and so on). The latter are empty in lines of the reference, and of all metrics but a
        table's first.
    """
    keys = ["row", "metric", "bin"]
    frames = []
    for comparison in comparisons:
        # Pairs of means and differences: over all targets, and in the bins of each kind, for
        # example by the length of the history. All these frames have the columns ``keys``.
        overall = comparison.means.assign(bin=ALL), comparison.differences
        for means, differences in [overall, *comparison.bins.values()]:
            # Put the differences beside the means. Both have the same counts, so keep those once.
            if not differences.empty:
                differences = differences.drop(columns=["seeds", "targets", "units"])
                means = means.merge(differences, on=keys, how="left")
            frames.append(means.assign(table=comparison.table.title))
    frame = concatenate(frames)
    first_columns = ["table", *keys]
    return frame[[*first_columns, *(name for name in frame if name not in first_columns)]]
