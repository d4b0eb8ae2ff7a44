"""``report.html``: a study in one file."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from recbole_pos.study.charts import draw_charts
from recbole_pos.study.plan import Plan, Search
from recbole_pos.study.rendered_table import PAGES, format_number, listed, span
from recbole_pos.study.result_tables import (
    make_comparison_tables,
    make_failures_table,
    make_search_table,
    metric_name,
)
from recbole_pos.study.results import DONE, FAILED, Comparison, Results


def render_report(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Return the page of a study's report, which begins with the findings of its first table."""
    return PAGES.get_template("report.html.jinja").render(
        plan=results.plan,
        findings=write_findings(results, comparisons[0]),
        protocol=describe_protocol(results),
        parts=[(make_comparison_tables(results, c), draw_charts(results, c)) for c in comparisons],
        searched=make_search_table(results),
        failed=make_failures_table(results),
        command=results.command,
        facts=_facts(results),
        study=_write_study(results.plan),
    )


def write_findings(results: Results, found: Comparison) -> list[str]:
    """Return the findings of a table, in sentences."""
    table, main = found.table, metric_name(found.table.metrics[0])
    means = found.means[found.means["metric"] == table.metrics[0]].dropna(subset=["mean"])
    if means.empty:
        return ["No run has finished yet."]
    best = means.loc[means["mean"].idxmax()]
    seeds = f"{int(best['seeds'])} seed{'s' if best['seeds'] > 1 else ''}"
    sentences = [f"Highest {main}: {best['row']}, {format_number(best['mean'])} (mean of {seeds})."]
    runs = len(table.rows) * len(results.plan.seeds)
    status = results.runs.loc[results.runs["row"].isin(table.rows), "status"]
    waiting = runs - int(status.isin((DONE, FAILED)).sum())
    if waiting > 0:
        sentences.append(
            f"{waiting} of {runs} runs are not finished; these figures are preliminary."
        )
    pairs = found.differences
    if pairs.empty:
        return sentences
    starred = pairs[pairs["star"]]
    clear = [
        f"{row} ({format_number(difference, sign=True)})"
        for row, difference in zip(starred["row"], starred["difference"], strict=True)
    ]
    count = f"{len(clear)} of {len(pairs)} configurations differ" if clear else ""
    count = count or f"None of {len(pairs)} configurations differs"
    which = f": {listed(clear)}" if clear else ""
    sentences.append(f"{count} significantly from {table.reference} (Holm-corrected){which}.")
    sizes = pairs["detectable"].dropna()
    if len(sizes) and len(clear) < len(pairs):
        smallest, largest = format_number(sizes.min()), format_number(sizes.max())
        reach = smallest if smallest == largest else f"{smallest} to {largest}, by configuration"
        sentences.append(
            f"Minimum detectable difference (80% power): {reach}; smaller ones may exist."
        )
    lonely = pairs[(pairs["seeds"] < 2) | (pairs["reference_seeds"] < 2)]
    if len(lonely):
        sentences.append(
            f"No statement on {listed(lonely['row'])}: it needs two seeds on both sides."
        )
    return sentences


def describe_protocol(results: Results) -> list[str]:
    """Return the protocol of the study, in sentences that follow from its plan."""
    plan, seeds = results.plan, len(results.plan.seeds)
    sentences = []
    if results.data:
        named = {"interactions" if key == "events" else key: v for key, v in results.data.items()}
        facts = [
            f"{v:,} {key}" if isinstance(v, int) else f"{key}: {v}" for key, v in named.items()
        ]
        sentences.append(f"Data: {plan.dataset}, {', '.join(facts)}.")
    sentences.append(
        f"{len(plan.rows)} configurations, each trained with {seeds} seed{'s' * (seeds > 1)} "
        f"({listed(map(str, plan.seeds))})."
    )
    sentences.append(_search(plan))
    sentences += [f"Warning: {text}." for text in results.warnings]
    if results.ties is not None:
        sentences.append(results.ties.sentence(plan.dataset, plan.ties))
    references = dict.fromkeys(table.reference for table in plan.tables)
    sentences.append(
        f"Differences are from {listed(references)}, paired by target. Their 95% "
        f"confidence intervals cover {plan.unit}s and seeds (components of variance)."
    )
    return sentences


def _write_study(plan: Plan) -> str:
    """Return a study as yaml, without the place of its data."""
    base = {k: v for k, v in (plan.source.content.get("base") or {}).items() if k != "data_path"}
    content = {**plan.source.content, "base": base}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _search(plan: Plan) -> str:
    """Return the sentence on the tuning budget of the configurations."""
    searched = [row.search for row in plan.rows.values() if isinstance(row.search, Search)]
    if not searched:
        return "Nothing was searched: every configuration has the options given in the study."
    without = [name for name, row in plan.rows.items() if not row.search and not row.parent]
    others = f" ({listed(without)}: none)" if without else ""
    same = all(search == searched[0] for search in searched)
    kind = "the same tuning budget" if same else "a search of its own"
    seeds = f"seed {plan.seeds[0]}"
    if plan.search_seeds > 1:
        seeds = f"seeds {listed(map(str, plan.tried_with))} each"
    return (
        f"Every configuration had {kind}, {searched[0].trials} trials{others} with {seeds}, and "
        "was chosen on validation only."
    )


def _facts(results: Results) -> dict[str, str]:
    """Return names and values of the facts of the runs: versions, device, commit, training time."""
    facts = dict(results.versions)
    for column in ("device", "commit"):
        if column in results.runs.columns:
            values = results.done[column].dropna().astype(str).unique()
            facts |= {column: listed(values)} if len(values) else {}
    if "seconds" in results.runs.columns and len(results.done):
        facts["training, all runs"] = span(results.done["seconds"].sum())
    return facts
