"""A plan as fits: the trainings of a study in their order, and the digests that identify runs."""

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
_DIGITS = 16  # of a digest


@dataclass(frozen=True)
class Fit:
    """One training, or one test of what another fit has trained.

    Attributes:
        row: name of its row.
        seed: seed of the training.
        stage: ``trial`` (of a search), ``final``, ``attach`` or ``retest``.
        trial: number of the trial, from 0; None for others.
        options: model, dataset, options and config_files, as far as the plan has them: without the
            samples of a trial, and without the choice of a search for a final fit.
        after: names of fits that must have ended: all trials of the row, or the fit attached to.
        repeats: whether a trial has trained the same run: the configuration that a search has
            chosen, with a seed of the trials.
        again: whether it is a trial with a seed after the first.
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
        """Name of the fit within the study."""
        trial = [] if self.trial is None else [f"trial {self.trial}"]
        seed = [f"seed {self.seed}"] if self.again or not trial else []
        return ", ".join([self.row, *trial, *seed])


def list_fits(plan: Plan) -> list[Fit]:
    """Return all fits of a plan, each after the fits it depends on.

    All rows have their first seed before any has its second, so that an interrupted study has all
    rows with the same seeds.
    """
    order = [plan.rows[name] for name in plan.order()]
    planned = [trial for row in order for trial in _trials(plan, row)]
    names = {row.name: tuple(fit.name for fit in planned if fit.row == row.name) for row in order}
    for seed in plan.seeds:
        for row in order:
            options = {**plan.options(row.name), "seed": seed}
            after, stage = names[row.name], "final"
            if row.attach:
                after = (f"{row.attach.to}, seed {seed}",)
                stage = "retest" if row.attach.retest else "attach"
            repeats = row.search is not None and seed in plan.tried_with
            planned.append(Fit(row.name, seed, stage, None, options, after, repeats))
    return planned


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
    """Return all combinations of values of options, the last option changing first."""
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def with_unread(plan: Plan, check: Check) -> Plan:
    """Return a plan whose base options go only to rows whose model reads them: Pop has no
    hidden_size. An option that no row reads stays, for :func:`check_plan` to refuse.

    Args:
        plan: the study.
        check: as of :func:`check_plan`.
    """
    reduced = plan
    for name in plan.order():
        while key := _find_unread(reduced, reduced.rows[name], check):
            row = reduced.rows[name]
            rows = {**reduced.rows, name: replace(row, unread=(*row.unread, key))}
            reduced = replace(reduced, rows=rows)
    trained = [row for row in reduced.rows.values() if not row.attach]
    unread_by_all = [key for key in plan.base if all(key in row.unread for row in trained)]
    rows = {
        name: replace(row, unread=tuple(key for key in row.unread if key not in unread_by_all))
        for name, row in reduced.rows.items()
    }
    return replace(reduced, rows=rows)


def _find_unread(plan: Plan, row: Row, check: Check) -> str:
    """Return an option of the base that the model of a row does not read; empty if it reads all."""
    try:
        check({**first_options(plan, row), "seed": plan.seeds[0]})
    except UnknownKey as error:
        return error.key if error.key in plan.base and error.key not in row.options else ""
    except UsageError:
        pass  # check_plan raises it, with file and line
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
    configs = {}
    for name in plan.order():
        row = plan.rows[name]
        options = first_options(plan, row)
        configs[name] = _checked(plan, row, options, check)
        for option, values in (row.search.grid or {}).items() if row.search else ():
            for value in values[1:]:
                _checked(plan, row, {**options, option: value}, check)
    return configs


def first_options(plan: Plan, row: Row) -> dict[str, Any]:
    """Return the options of a row with the first values of its grid, over the row attached to."""
    options = plan.options(row.name)
    if row.attach:
        return {**first_options(plan, plan.rows[row.attach.to]), **options}
    if row.search and row.search.grid:
        options |= {name: values[0] for name, values in row.search.grid.items()}
    return options


def _checked(plan: Plan, row: Row, options: dict[str, Any], check: Check) -> dict[str, Any]:
    """Return the checked options of a row; an error gets the line of the option that it names."""
    try:
        return check({**options, "seed": plan.seeds[0]})
    except UsageError as error:
        source, text = plan.source, str(error).removeprefix("configuration: ")
        lines = dict(row.search.lines) if row.search else {}
        lines |= {name: source.where("base", name) for name in plan.base}
        lines |= {name: source.where("rows", row.name, name) for name in row.options}
        lines.pop("model", None)  # a common word in messages, which need not mean the option
        named = (where for name, where in lines.items() if name in text)
        where = next(named, source.where("rows", row.name))
        raise UsageError(f"{where}: configuration {row.name}: {text}") from error


def digest(options: Mapping[str, Any], *others: Any) -> str:
    """Return a digest of options and further values, whatever the order of keys.

    1 and 1.0 are equal, and so are a tuple and a list; true is not 1.

    Raises:
        UsageError: naming the option of a value that is not plain.
    """
    plain = {name: _canonical(value, str(name)) for name, value in options.items()}
    rest = [_canonical(value, "digest") for value in others]
    text = json.dumps([plain, rest], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def asked_digest(plan: Plan, fit: Fit) -> str:
    """Return a digest of what a plan asks of a fit, to find out whether an earlier run is its.

    It covers the search, which decides later runs, but not the place of the data, nor which options
    of the base a row reads.
    """
    return digest(_asked(plan, plan.rows[fit.row]), fit.seed)


def _asked(plan: Plan, row: Row) -> dict[str, Any]:
    """Return what a plan asks of a row: options, files, search, and the row it is attached to."""
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
    """Return a value as json has it, equal for equal values; ``name`` is for messages."""
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
    """Return a table of the configurations that a study would train.

    Args:
        plan: the study.
        rows: names of rows to train; all if empty.

    Returns:
        A line per configuration: configuration, model, options (its own), search, trials, seeds,
        runs, after (the configuration that it is attached to).
    """
    lines = []
    counts = Counter(fit.row for fit in list_fits(plan) if not fit.repeats)
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
    """Return one line on the size of a study: configurations, seeds and runs of the given rows."""
    left = [fit for fit in list_fits(plan) if not fit.repeats and (not rows or fit.row in rows)]
    searched = sum(fit.stage == "trial" for fit in left)
    parts = f" ({searched} of a search, {len(left) - searched} after it)" if searched else ""
    seeds, count = len(plan.seeds), len(rows or plan.rows)
    return (
        f"{plan.title}: {count} configuration{'s' * (count > 1)}, {seeds} seed{'s' * (seeds > 1)}, "
        f"{len(left)} runs{parts} on {plan.dataset}; differences are from {plan.reference}"
    )


def _written(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
