"""A plan as fits: what is trained, in which order, how many, and when a run is the same run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from recbole_pos.errors import UnknownKey, UsageError
from recbole_pos.study.plan import Plan, Row
from recbole_pos.values import shown

Check = Callable[[dict[str, Any]], dict[str, Any]]
_DIGITS = 16


@dataclass(frozen=True)
class Fit:
    """One training, or one test of what another fit has trained.

    Attributes:
        row: its row.
        seed: its seed.
        stage: ``trial`` (of a search), ``final``, ``attach`` or ``retest``.
        trial: number of the trial, from 0; None for others.
        options: model, dataset, options and config_files, as far as the plan knows them. A trial of
            a space lacks what is drawn, a final fit after a search what validation chooses.
        after: names of fits that must have ended: all trials of the row, or the run attached to.
        repeats: whether the same run has been made as a trial, so that nothing is left to train:
            the configuration that a search has chosen, with a seed that it was tried with.
        again: whether it is a trial with a further seed than the first.
    """

    row: str
    seed: int
    stage: str
    trial: int | None
    options: dict[str, Any]
    after: tuple[str, ...] = ()
    repeats: bool = False
    again: bool = False

    @property
    def name(self) -> str:
        """Its name within the study."""
        trial = [] if self.trial is None else [f"trial {self.trial}"]
        seed = [f"seed {self.seed}"] if self.again or not trial else []
        return ", ".join([self.row, *trial, *seed])


def fits(plan: Plan) -> list[Fit]:
    """Everything that is trained, each after what it needs.

    Seeds go round: all rows have their first before any has its second, so that a study that is cut
    short has whole rounds.
    """
    order = [plan.rows[name] for name in plan.order()]
    found = [trial for row in order for trial in _trials(plan, row)]
    names = {row.name: tuple(fit.name for fit in found if fit.row == row.name) for row in order}
    for seed in plan.seeds:
        for row in order:
            options = {**plan.options(row.name), "seed": seed}
            after, stage = names[row.name], "final"
            if row.attach:
                after = (f"{row.attach.to}, seed {seed}",)
                stage = "retest" if row.attach.retest else "attach"
            repeats = row.search is not None and seed in plan.tried_with
            found.append(Fit(row.name, seed, stage, None, options, after, repeats))
    return found


def _trials(plan: Plan, row: Row) -> list[Fit]:
    """Return the fits of a row's search; none where it has none."""
    if row.search is None:
        return []
    options = plan.options(row.name)
    chosen = grid(row.search.grid) if row.search.grid else [{}] * row.search.trials
    return [
        Fit(row.name, seed, "trial", number, {**options, **values, "seed": seed}, again=place > 0)
        for number, values in enumerate(chosen)
        for place, seed in enumerate(plan.tried_with)
    ]


def grid(values: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return all combinations, the last option changing first."""
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def with_unread(plan: Plan, check: Check) -> Plan:
    """Return the plan, each option of its base for the rows whose model reads it: Pop has no
    hidden_size. What no row reads stays, for :func:`check_plan` to refuse."""
    found = plan
    for name in plan.order():
        while key := _unread(found, found.rows[name], check):
            row = found.rows[name]
            rows = {**found.rows, name: replace(row, unread=(*row.unread, key))}
            found = replace(found, rows=rows)
    trained = [row for row in found.rows.values() if not row.attach]
    unread_by_all = [key for key in plan.base if all(key in row.unread for row in trained)]
    rows = {
        name: replace(row, unread=tuple(key for key in row.unread if key not in unread_by_all))
        for name, row in found.rows.items()
    }
    return replace(found, rows=rows)


def _unread(plan: Plan, row: Row, check: Check) -> str:
    """Return an option of the base that a row does not read; empty if it reads all."""
    try:
        check({**first_options(plan, row), "seed": plan.seeds[0]})
    except UnknownKey as error:
        return error.key if error.key in plan.base and error.key not in row.options else ""
    except UsageError:
        pass  # check_plan tells it
    return ""


def check_plan(plan: Plan, check: Check) -> dict[str, dict[str, Any]]:
    """Check every row, and every value of a grid, against the models; nothing is trained.

    Args:
        plan: the study.
        check: completes the options of a row (see :func:`first_options`), or raises UsageError.

    Returns:
        Row -> what ``check`` returned for it, with the first values of a grid.

    Raises:
        UsageError: naming file and line of the option, or of the row.
    """
    found = {}
    for name in plan.order():
        row = plan.rows[name]
        options = first_options(plan, row)
        found[name] = _checked(plan, row, options, check)
        for option, values in (row.search.grid or {}).items() if row.search else ():
            for value in values[1:]:
                _checked(plan, row, {**options, option: value}, check)
    return found


def first_options(plan: Plan, row: Row) -> dict[str, Any]:
    """Those of a row, with the first values of a grid; of one that is attached over the other's."""
    options = plan.options(row.name)
    if row.attach:
        return {**first_options(plan, plan.rows[row.attach.to]), **options}
    if row.search and row.search.grid:
        options |= {name: values[0] for name, values in row.search.grid.items()}
    return options


def _checked(plan: Plan, row: Row, options: dict[str, Any], check: Check) -> dict[str, Any]:
    try:
        return check({**options, "seed": plan.seeds[0]})
    except UsageError as error:
        source, text = plan.source, str(error).removeprefix("configuration: ")
        lines = dict(row.search.lines) if row.search else {}
        lines |= {name: source.where("base", name) for name in plan.base}
        lines |= {name: source.where("rows", row.name, name) for name in row.options}
        lines.pop("model", None)  # half of all messages have the word
        named = (where for name, where in lines.items() if name in text)
        where = next(named, source.where("rows", row.name))
        raise UsageError(f"{where}: configuration {row.name}: {text}") from error


def digest(options: Mapping[str, Any], *others: Any) -> str:
    """Return a name for what decides a run: equal for equal values, in whatever order keys stand.

    1 and 1.0 are the same, and so are a tuple and a list; true is not 1.

    Raises:
        UsageError: for a value that is not plain; names the option.
    """
    plain = {name: _canonical(value, str(name)) for name, value in options.items()}
    rest = [_canonical(value, "digest") for value in others]
    text = json.dumps([plain, rest], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def asked_digest(plan: Plan, one: Fit) -> str:
    """A name for what a plan asks of a fit; a run that was made for another one is not one of it.

    What a search tries counts, since it decides the runs after it; where the data lie does not, nor
    which options of the base a row reads.
    """
    return digest(_asked(plan, plan.rows[one.row]), one.seed)


def _asked(plan: Plan, row: Row) -> dict[str, Any]:
    decided: dict[str, Any] = {
        "dataset": plan.dataset,
        "base": {key: value for key, value in plan.base.items() if key != "data_path"},
        "row": row.options,
        "config_files": [*plan.config_files, *row.config_files],
        "ties": str(plan.ties),
    }
    if row.attach:
        decided["to"] = _asked(plan, plan.rows[row.attach.to])
        decided["schemes"] = list(row.attach.schemes)
    if row.search:
        tried = row.search.space if row.search.grid is None else row.search.grid
        decided["search"] = [tried, row.search.trials, list(plan.tried_with)]
    return decided


def _canonical(value: Any, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return int(value) if value.is_integer() else value
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(key): _canonical(part, f"{name}.{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(part, name) for part in value]
    raise UsageError(f"{name}: {shown(value)} is not a plain value, so it cannot identify a run")


def dry_run(plan: Plan, rows: Collection[str] = ()) -> pd.DataFrame:
    """Return what would be run.

    Args:
        plan: the study.
        rows: those that would be trained; all if empty.

    Returns:
        A line per configuration: configuration, model, options (its own), search, trials, seeds,
        runs, after (the configuration that it is attached to).
    """
    lines = []
    counts = Counter(fit.row for fit in fits(plan) if not fit.repeats)
    for name in rows or plan.rows:
        row = plan.rows[name]
        options = {key: value for key, value in row.options.items() if key != "model"}
        if row.config_files:
            options["config_files"] = list(row.config_files)
        model = row.options.get("model") or plan.base.get("model", "")
        if row.attach:
            model = f"{' + '.join(row.attach.schemes)} attached"
            model = "tested again" if row.attach.retest else model
        lines.append(
            {
                "configuration": name,
                "model": model,
                "options": ", ".join(f"{key}: {_written(v)}" for key, v in options.items()),
                "search": str(row.search) if row.search else "",
                "trials": row.search.trials if row.search else 0,
                "seeds": len(plan.seeds),
                "runs": counts[name],
                "after": row.attach.to if row.attach else "",
            }
        )
    return pd.DataFrame(lines)


def dry_run_sentence(plan: Plan, rows: Collection[str] = ()) -> str:
    """Return how much it is, in a line."""
    left = [fit for fit in fits(plan) if not fit.repeats and (not rows or fit.row in rows)]
    searched = sum(fit.stage == "trial" for fit in left)
    parts = f" ({searched} of a search, {len(left) - searched} after it)" if searched else ""
    seeds, count = len(plan.seeds), len(rows or plan.rows)
    return (
        f"{plan.title}: {count} configuration{'s' * (count > 1)}, {seeds} seed{'s' * (seeds > 1)}, "
        f"{len(left)} runs{parts} on {plan.dataset}; differences are from {plan.reference}"
    )


def _written(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
