"""``report.html``: a study in one file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recbole_pos.study.charts import all_charts
from recbole_pos.study.plan import Plan
from recbole_pos.study.rendered_table import listed, number, span
from recbole_pos.study.result_tables import (
    bins_table,
    differences_table,
    failures_table,
    metric_name,
    metrics_table,
    plural,
    search_table,
)
from recbole_pos.study.results import DONE, FAILED, Comparison, Results

_TEMPLATE = "report.html.jinja"


def html(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Return the page of a study's report.

    Args:
        results: results of the study, finished or not.
        comparisons: comparisons of the plan's tables; the first is what the page begins with.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names and reasons are the user's
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bound"] = _bound
    return environment.get_template(_TEMPLATE).render(
        plan=results.plan,
        findings=findings(results, comparisons[0]),
        protocol=protocol(results),
        parts=[_part(results, found) for found in comparisons],
        searched=search_table(results),
        failed=failures_table(results),
        commands=results.commands,
        facts=_facts(results),
    )


def _bound(text: str) -> str:
    """Return text in which no line breaks between a number and its unit or sign."""
    return re.sub(r"(?<=[±<]) |(?<=\d) (?=(min|[a-zA-Z])\b)", "\N{NO-BREAK SPACE}", text)


def _part(results: Results, found: Comparison) -> dict[str, list]:
    """Return the tables and charts for one table of the plan."""
    tables = [metrics_table(results, found), differences_table(found)]
    tables += [bins_table(found, kind, results.plan.unit) for kind in found.bins]
    charts = all_charts(results, found)
    return {"tables": [table for table in tables if table is not None], "charts": charts}


def findings(results: Results, found: Comparison) -> list[str]:
    """Return the findings of a table, in sentences."""
    main, table = metric_name(found.table.metrics[0]), found.table
    mine = found.means[found.means["metric"] == table.metrics[0]].dropna(subset=["mean"])
    if mine.empty:
        return ["No run has finished yet."]
    best = mine.loc[mine["mean"].idxmax()]
    seeds = f"{int(best['seeds'])} seed{'s' if best['seeds'] > 1 else ''}"
    message = [f"Highest {main}: {best['row']}, {number(best['mean'])} (mean of {seeds})."]
    fits = len(table.rows) * len(results.plan.seeds)
    mine = results.runs[results.runs["row"].isin(table.rows)]
    waiting = fits - int(mine["status"].isin((DONE, FAILED)).sum())
    if waiting > 0:
        message.append(f"{waiting} of {fits} runs are not finished; these figures are preliminary.")
    pairs = found.differences
    if pairs.empty:
        return message
    starred = pairs[pairs["star"]]
    clear = [
        f"{line['row']} ({number(line['difference'], sign=True)})"
        for line in starred.to_dict("records")
    ]
    if clear:
        message.append(
            f"{len(clear)} of {len(pairs)} configurations differ significantly from "
            f"{table.reference} (Holm-corrected): {listed(clear)}."
        )
    else:
        message.append(
            f"None of {len(pairs)} configurations differs significantly from {table.reference} "
            "(Holm-corrected)."
        )
    seen = pairs["detectable"].dropna()
    if len(seen) and len(clear) < len(pairs):
        smallest, largest = number(seen.min()), number(seen.max())
        reach = smallest if smallest == largest else f"{smallest} to {largest}, by configuration"
        message.append(
            f"Minimum detectable difference (80% power): {reach}; smaller ones may exist."
        )
    lonely = pairs[~((pairs["seeds"] > 1) & (pairs["reference_seeds"] > 1))]
    if len(lonely):
        message.append(
            f"No statement on {listed(lonely['row'])}: it needs two seeds on both sides."
        )
    return message


def protocol(results: Results) -> list[str]:
    """Return the protocol of the study, in sentences that follow from its plan."""
    plan, seeds = results.plan, len(results.plan.seeds)
    sentences = []
    if results.data:
        facts = [
            f"{value:,} {name}" if isinstance(value, int) else f"{name}: {value}"
            for name, value in _named(results.data).items()
        ]
        sentences.append(f"Data: {plan.dataset}, {', '.join(facts)}.")
    sentences.append(
        f"{len(plan.rows)} configurations, each trained with {seeds} seed{'s' * (seeds > 1)} "
        f"({listed(map(str, plan.seeds))})."
    )
    if plan.base or plan.config_files:
        options = [f"those of {listed(plan.config_files)}"] if plan.config_files else []
        for key, value in plan.base.items():
            unread = [row.name for row in plan.rows.values() if key in row.unread]
            but = f" (not read by {listed(unread)})" if unread else ""
            options += [f"{key} {value}{but}"] * (key != "data_path")
        sentences.append(
            f"Options of all configurations: {', '.join(options) or 'their defaults'}."
        )
    sentences.append(_search(plan))
    for row in plan.rows.values():
        if row.attach:
            how = f"tested with {', '.join(f'{key} {value}' for key, value in row.options.items())}"
            if row.attach.schemes:
                how = f"{listed(row.attach.schemes)} attached, then trained"
            sentences.append(
                f"{row.name} is made from the trained models of {row.attach.to}: {how}."
            )
    sentences += [f"Warning: {text}." for text in results.warnings]
    if results.ties is not None:
        sentences.append(results.ties.sentence(plan.dataset, plan.ties))
    references = dict.fromkeys(table.reference for table in plan.tables)
    sentences.append(
        f"Differences are from {listed(references)}, paired by target. Their 95% "
        f"confidence intervals cover {plural(plan.unit)} and seeds (components of variance)."
    )
    return sentences


def _search(plan: Plan) -> str:
    """Return the sentence on the tuning budget of the configurations."""
    searched = [row.search for row in plan.rows.values() if row.search]
    if not searched:
        return "Nothing was searched: every configuration has the options given in the study."
    without = [row.name for row in plan.rows.values() if not row.search and not row.attach]
    others = f" ({listed(without)}: none)" if without else ""
    same = all(search == searched[0] for search in searched)
    kind = "the same tuning budget" if same else "a search of its own"
    what = f"{kind}, {searched[0].trials} trials"
    seeds = f"seed {plan.seeds[0]}"
    if plan.search_seeds > 1:
        seeds = f"seeds {listed(map(str, plan.tried_with))} each"
    return (
        f"Every configuration had {what}{others} with {seeds}, and was chosen on validation only."
    )


def _named(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"interactions" if name == "events" else name: n for name, n in data.items()}


def _facts(results: Results) -> list[tuple[str, str]]:
    """Return names and values of the facts of the runs: versions, device, commit, training time."""
    facts = [(name, str(value)) for name, value in results.versions.items()]
    for column in ("device", "commit"):
        if column in results.runs.columns:
            values = results.done[column].dropna().astype(str).unique()
            facts += [(column, listed(values))] if len(values) else []
    if "seconds" in results.runs.columns and len(results.done):
        facts.append(("training, all runs", span(results.done["seconds"].sum())))
    return facts
