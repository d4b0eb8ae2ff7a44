"""``report.html``: a study on one page that needs nothing else, to be forwarded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recbole_pos.study.charts import Chart, all_charts
from recbole_pos.study.findings import findings
from recbole_pos.study.plan import Plan, Row
from recbole_pos.study.results import Comparison, Results
from recbole_pos.study.shown import Shown, listed, span
from recbole_pos.study.tables import (
    bins_table,
    differences_table,
    failures_table,
    metrics_table,
    plural,
    search_table,
)

_TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class _Part:
    """One table of the plan with all that belongs to it."""

    tables: list[Shown]
    charts: list[Chart]


def html(results: Results, comparisons: Sequence[Comparison]) -> str:
    """The page.

    Args:
        results: of the study, finished or not.
        comparisons: of the plan's tables; the first is what the page begins with.
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
    """A figure whose line does not end before its unit or within its sign."""
    return re.sub(r"(?<=[±<]) |(?<=\d) (?=(min|[a-zA-Z])\b)", "\N{NO-BREAK SPACE}", text)


def _part(results: Results, found: Comparison) -> _Part:
    tables = [metrics_table(results, found), differences_table(found)]
    tables += [bins_table(found, kind, results.plan.unit) for kind in found.bins]
    return _Part([table for table in tables if table is not None], all_charts(results, found))


def protocol(results: Results) -> list[str]:
    """How the study was made, in sentences that follow from its plan."""
    plan = results.plan
    said = [_data(results)] if results.data else []
    seeds = len(plan.seeds)
    said.append(
        f"{len(plan.rows)} rows, each to be trained with {seeds} seed{'s' if seeds > 1 else ''} "
        f"({listed(map(str, plan.seeds))})."
    )
    if plan.base or plan.config_files:
        files = [f"those of {listed(plan.config_files)}"] if plan.config_files else []
        told = [
            f"{key} {value}{_but(plan, key)}"
            for key, value in plan.base.items()
            if key != "data_path"
        ]
        said.append(f"Options of all rows: {', '.join([*files, *told]) or 'their defaults'}.")
    said.append(_search(plan))
    attached = [row for row in plan.rows.values() if row.attach]
    said += [
        f"{row.name} is made from the trained models of {row.attach.to}: {_attached(row)}."
        for row in attached
        if row.attach
    ]
    said += [f"Warning: {text}." for text in results.warnings]
    if results.ties is not None:
        said.append(results.ties.sentence(plan.dataset, plan.ties))
    references = dict.fromkeys(table.reference for table in plan.tables)
    said.append(
        f"Differences are to {listed(references)}, paired by target. Their 95% intervals have the "
        f"noise between {plural(plan.unit)} and between seeds in them (components of variance)."
    )
    return said


def _attached(row: Row) -> str:
    if row.attach and row.attach.schemes:
        return f"{listed(row.attach.schemes)} attached, then trained"
    return f"tested with {', '.join(f'{key} {value}' for key, value in row.options.items())}"


def _but(plan: Plan, key: str) -> str:
    """The rows whose model does not read an option of all."""
    rows = [row.name for row in plan.rows.values() if key in row.unread]
    return f" (not read by {listed(rows)})" if rows else ""


def _data(results: Results) -> str:
    facts = [
        f"{value:,} {name}" if isinstance(value, int) else f"{name}: {value}"
        for name, value in results.data.items()
    ]
    return f"Data: {results.plan.dataset}, {', '.join(facts)}."


def _tried_with(plan: Plan) -> str:
    if plan.search_seeds == 1:
        return f"seed {plan.seeds[0]}"
    return f"seeds {listed(map(str, plan.tried_with))} each"


def _search(plan: Plan) -> str:
    searched = [row for row in plan.rows.values() if row.search]
    if not searched:
        return "Nothing was searched: every row has the configuration that the study gives it."
    trials = searched[0].search.trials if searched[0].search else 0
    without = [row.name for row in plan.rows.values() if not row.search and not row.attach]
    others = f" ({listed(without)}: none)" if without else ""
    same = all(row.search == searched[0].search for row in searched)
    what = f"{'the same search' if same else 'a search of its own'}, {trials} trials"
    return (
        f"Every row had {what}{others} with {_tried_with(plan)}, and was chosen by validation "
        "alone."
    )


def _facts(results: Results) -> list[tuple[str, str]]:
    found = [(name, str(value)) for name, value in results.versions.items()]
    for column in ("device", "commit"):
        if column in results.runs.columns:
            known = results.done[column].dropna().astype(str).unique()
            found += [(column, listed(known))] if len(known) else []
    if "seconds" in results.runs.columns and len(results.done):
        hours = results.done["seconds"].sum() / 3600
        found.append(("training, all runs", span(3600 * hours)))
    return found
