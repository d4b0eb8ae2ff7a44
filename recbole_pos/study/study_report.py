"""``report.html``: a study in one file."""

from __future__ import annotations

import yaml

from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.charts import draw_charts
from recbole_pos.study.plan import Plan, list_points
from recbole_pos.study.rendered_table import PAGES, format_duration, format_number, join_names
from recbole_pos.study.result_tables import (
    format_metric,
    make_comparison_tables,
    make_failures_table,
    make_search_table,
)
from recbole_pos.study.results import Comparison, Results


def render_report(results: Results) -> str:
    """Return the page of a study's report, which begins with the findings of its first table."""
    return PAGES.get_template("report.html.jinja").render(
        plan=results.plan,
        findings=write_findings(results, results.comparisons[0]),
        protocol=describe_protocol(results),
        parts=[
            (make_comparison_tables(results, comparison), draw_charts(results, comparison))
            for comparison in results.comparisons
        ],
        searched=make_search_table(results),
        failed=make_failures_table(results),
        command=results.command,
        facts=_collect_facts(results),
        study=_dump_study(results.plan),
    )


def write_findings(results: Results, comparison: Comparison) -> list[str]:
    """Return sentences on a table: its best row, unfinished runs, and significant differences."""
    table, main = comparison.table, comparison.table.metrics[0]
    means = comparison.means[comparison.means["metric"] == main].dropna(subset=["mean"])
    if means.empty:
        return ["No run has finished yet."]
    best = means.loc[means["mean"].idxmax()]
    seeds = f"{int(best['seeds'])} seed{'s' if best['seeds'] > 1 else ''}"
    value = f"{best['row']}, {format_number(best['mean'])} (mean of {seeds})"
    findings = [f"Highest {format_metric(main)}: {value}."]
    num_runs = len(table.rows) * len(results.plan.seeds)
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
    """Return sentences on the significance of the differences in a table."""
    differences, reference = comparison.differences, comparison.table.reference
    num_rows = len(differences)
    sentences = []
    significant = [
        f"{line['row']} ({format_number(line['difference'], sign=True)})"
        for line in differences[differences["star"]].to_dict("records")
    ]
    suffix = f"significantly from {reference} (Holm-corrected)"
    if num_rows == 1:
        verb = "differs" if significant else "does not differ"
        sentences.append(f"{(significant or differences['row'].tolist())[0]} {verb} {suffix}.")
    elif significant:
        sentences.append(
            f"{len(significant)} of {num_rows} configurations differ {suffix}: "
            f"{join_names(significant)}."
        )
    else:
        sentences.append(f"None of {num_rows} configurations differs {suffix}.")
    detectable = differences["detectable"].dropna()
    if len(detectable) and len(significant) < num_rows:
        low, high = format_number(detectable.min()), format_number(detectable.max())
        sizes = low if low == high else f"{low} to {high}, by configuration"
        sentences.append(
            f"Minimum detectable difference (80% power): {sizes}; smaller ones may exist."
        )
    has_one_seed = (differences["seeds"] < 2) | (differences["reference_seeds"] < 2)
    if has_one_seed.any():
        rows = join_names(differences.loc[has_one_seed, "row"])
        sentences.append(f"No statement on {rows}: it needs two seeds on both sides.")
    return sentences


def describe_protocol(results: Results) -> list[str]:
    """Return sentences on the data, training, search, warnings and statistics of a study."""
    plan = results.plan
    num_rows, num_seeds = len(plan.rows), len(plan.seeds)
    sentences = []
    if results.data:
        facts = []
        for key, value in results.data.items():
            name = "interactions" if key == "events" else key
            facts.append(f"{value:,} {name}" if isinstance(value, int) else f"{name}: {value}")
        sentences.append(f"Data: {plan.dataset}, {', '.join(facts)}.")
    each = "each " if results.is_planned else ""
    sentences.append(
        f"{num_rows} configuration{'s' * (num_rows > 1)}, {each}trained with {num_seeds} "
        f"seed{'s' * (num_seeds > 1)} ({join_names(map(str, plan.seeds))})."
    )
    sentences.append(_describe_search(plan))
    sentences += [f"Warning: {text}." for text in results.warnings]
    references = dict.fromkeys(table.reference for table in plan.tables)
    sentences.append(
        f"Differences are from {join_names(references)}, paired by target. Their 95% "
        f"confidence intervals cover {plan.unit}s and seeds (components of variance)."
    )
    return sentences


def _describe_search(plan: Plan) -> str:
    """Return the sentence on the tuning budget of the configurations."""
    grids = [row.grid for row in plan.rows.values() if row.grid]
    if not grids:
        return "Nothing was searched: every configuration has the options given in the study."
    unsearched = [name for name, row in plan.rows.items() if not row.grid and not row.parent]
    exceptions = f" ({join_names(unsearched)}: none)" if unsearched else ""
    is_same_search = all(grid == grids[0] for grid in grids)
    budget = "the same tuning budget" if is_same_search else "a search of its own"
    num_trials = len(list_points(grids[0]))  # the same for all searches of a plan
    if plan.search_seeds == 1:
        seeds = f"seed {plan.seeds[0]}"
    else:
        seeds = f"seeds {join_names(map(str, plan.trial_seeds))} each"
    return (
        f"Every configuration had {budget}, {num_trials} trials{exceptions} with {seeds}, and was "
        "chosen on validation only."
    )


def _dump_study(plan: Plan) -> str:
    """Return a study as yaml, without its ``data_path``."""
    base = dict(plan.source.content.get("base") or {})
    base.pop("data_path", None)
    content = {**plan.source.content, "base": base}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _collect_facts(results: Results) -> dict[str, str]:
    """Return name -> text of the facts of the runs: versions, device, commit, training time."""
    facts = dict(results.versions)
    for column in ("device", "commit"):
        if column in results.runs.columns:
            values = results.done[column].dropna().astype(str).unique()
            if values := [value for value in values if value]:
                facts[column] = join_names(values)
    if "seconds" in results.runs.columns and len(results.done):
        facts["training, all runs"] = format_duration(results.done["seconds"].sum())
    return facts
