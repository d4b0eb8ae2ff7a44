"""From a study's file, or the models of a command line, to a complete plan.

A file may inherit from another by its key ``like``. Errors name file and line of a mistake.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recbole_pos.config.checks import as_list
from recbole_pos.config.metrics import has_cutoff
from recbole_pos.config.sources import find_config_file
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.study.plan import Attach, Plan, Source, TablePlan, find_repeated, list_points
from recbole_pos.values import is_whole, listed, shown, suggest
from recbole_pos.yaml_files import parse_scalar, read_with_lines, read_yaml

# Options that a trained model may be tested again with.
_RETEST_OPTIONS = ("mask_history", "inference_relations", "eval_batch_size")
METRIC_NAMES = ("ndcg", "hit", "mrr")  # metrics of a study that names none
_KEYS = {key for layout in (Plan, TablePlan, Attach) for key in layout.model_fields}


def read_plan(path: str | Path) -> Plan:
    """Return the plan in a yaml file; a UsageError names file and line of a mistake."""
    return make_plan(read_source(path))


def read_source(path: str | Path, heirs: tuple[Path, ...] = ()) -> Source:
    """Return the study in a file, with the content that it inherits by its key ``like``.

    ``heirs`` are files that inherit from this one. A UsageError names the line of a mistake.
    """
    path = Path(path)
    source = Source(str(path), *read_with_lines(path, "study"))
    name = source.content.pop("like", None)
    if name is None:
        return source

    parent_path = path.parent / str(name)
    heirs = (*heirs, path.resolve())
    if not parent_path.is_file() or parent_path.resolve() in heirs:
        problem = f"like: expected the file of another study, found {shown(name)}"
        raise source.error(("like",), problem)
    parent = read_source(parent_path, heirs)
    return Source(source.name, _inherit(source, parent.content), {**parent.lines, **source.lines})


def _inherit(source: Source, inherited: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a study over an inherited one; base and rows merge by option.

    If ``rows`` is a list of names, only these inherited rows stay, and what is about others goes.
    """
    content = source.content
    merged = {**inherited, **content}
    if merged.get("dataset") != inherited.get("dataset") and "paper" not in content:
        merged.pop("paper", None)  # values of a paper are of one dataset
    merged["base"] = _merge_options(inherited.get("base"), content.get("base"))

    inherited_rows, rows = inherited.get("rows") or {}, content.get("rows") or {}
    if isinstance(rows, dict):
        merged["rows"] = {
            name: _merge_options(inherited_rows.get(name), rows.get(name))
            for name in {**inherited_rows, **rows}
        }
    else:
        names = as_list(rows)
        for name in names:
            source.require_choice(("rows",), name, inherited_rows)
        merged["rows"] = {name: inherited_rows[name] for name in names}
        for key in {"reference", "tables", "paper"} - set(content):
            merged[key] = _restrict(merged.get(key), names)
    return {key: value for key, value in merged.items() if value is not None}


def _merge_options(inherited: Any, options: Any) -> Any:
    """Return options over inherited ones; None inherits all, and other values replace them."""
    if isinstance(inherited, dict) and isinstance(options, dict):
        return {**inherited, **options}
    return inherited if options is None else options


def _restrict(value: Any, names: list[str]) -> Any:
    """Return an inherited paper, tables or reference for the named rows; None if none is left.

    A table stays if it has all its rows and its reference.
    """
    if isinstance(value, dict):  # the paper: row -> its values
        return {row: values for row, values in value.items() if row in names}
    if isinstance(value, list):
        tables = []
        for table in value:
            used = {*table.get("rows", names), table.get("reference", names[0])}
            if used <= set(names):
                tables.append(table)
        return tables or None
    return value if value in names else None


def make_plan(source: Source) -> Plan:
    """Return the complete plan of a study from its source; errors as of :func:`read_plan`."""
    plan = _validate(source)
    plan.source = source
    for name, row in plan.rows.items():
        _check_row(plan, name)
        if row.search is True:
            row.search = None if row.parent else plan.search

    if plan.split is not None:
        eval_args = plan.base.options.get("eval_args") or {}
        plan.base.options["eval_args"] = {**eval_args, "split": plan.split}

    plan.title = plan.title or f"{len(plan.rows)} rows on {plan.dataset}"
    plan.reference = plan.reference or next(iter(plan.rows))
    source.require_choice(("reference",), plan.reference, plan.rows)
    for name in plan.paper:
        source.require_choice(("paper", name), name, plan.rows)

    plan.tables = plan.tables or [TablePlan(title=plan.title)]
    for index, table in enumerate(plan.tables):
        _complete_table(plan, table, ("tables", index))
    plan.sort_rows()  # graphlib's CycleError if rows are made of each other
    _require_equal_trials(plan)
    return plan


def _validate(source: Source) -> Plan:
    """Return the content of a study with checked types; a UsageError names the line."""
    try:
        return Plan.model_validate(source.content)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)[0]
        path = tuple(key for key in details["loc"] if key != "[key]")
        name = ": ".join(map(str, path))
        if details["type"] == "extra_forbidden":
            problem = f"unknown key {shown(path[-1])}{suggest(str(path[-1]), _KEYS)}"
        elif details["type"] == "missing":
            problem = f"{name}: it is missing"
        else:
            message = details["msg"].removeprefix("Value error, ")
            problem = f"{name}: {message}; found {shown(details['input'])}"
        raise source.error(path, problem) from error


def _check_row(plan: Plan, name: str) -> None:
    """Raise a UsageError for a row without a model, or with options that its parent decides."""
    row, path = plan.rows[name], ("rows", name)
    if row.predictions:
        if row.options or row.parent or row.config_files:
            problem = "predictions: another system made them; leave out all other keys but `of`"
            raise plan.source.error((*path, "predictions"), f"{name}: {problem}")
        row.search = None
        return
    if row.parent is None:
        if "model" not in {**row.options, **plan.base.options}:
            similar = [key for key in row.options if suggest(key, ["model"])]
            hint = f" (is {similar[0]!r} the model?)" if similar else ""
            raise plan.source.error(path, f"{name}: it has no model{hint}")
        return

    parent_key = "attach" if row.attach else "retest"
    plan.source.require_choice((*path, parent_key), row.parent, plan.rows)
    refused = {"model", "position", "retest", "config_files", "search"} - {parent_key}
    if not row.attach:
        refused |= set(row.options) - set(_RETEST_OPTIONS)
        if not row.options:
            problem = f"it is {row.parent} again: give it one of {', '.join(_RETEST_OPTIONS)}"
            raise plan.source.error(path, f"{name}: {problem}")
    for key in sorted(refused & {*row.options, *row.model_fields_set}):
        problem = f"{key}: it is made of the models of {row.parent}; leave it out"
        raise plan.source.error((*path, key), f"{name}: {problem}")


def _complete_table(plan: Plan, table: TablePlan, path: tuple[Any, ...]) -> None:
    """Fill in the keys that a table at ``path`` of the yaml leaves out, from the study."""
    for name in table.rows:
        plan.source.require_choice((*path, "rows"), name, plan.rows)
    table.rows = table.rows or tuple(plan.rows)
    table.title = table.title or ", ".join(table.rows)
    table.metrics = table.metrics or plan.metrics
    default_reference = plan.reference if plan.reference in table.rows else table.rows[0]
    table.reference = table.reference or default_reference
    plan.source.require_choice((*path, "reference"), table.reference, table.rows)


def _require_equal_trials(plan: Plan) -> None:
    """Require that all searched rows have the same number of trials."""
    num_trials = {name: len(list_points(row.grid)) for name, row in plan.rows.items() if row.grid}
    first = next(iter(num_trials), "")
    for name, number in num_trials.items():
        if number != num_trials[first]:
            raise plan.source.error(
                ("rows", name, "search"),
                f"{name} is searched with {number} trials and {first} with {num_trials[first]}; "
                "give all as many, or those that need none `search: false`",
            )


def change_plan(plan: Plan, changes: dict[str, Any], base: dict[str, Any]) -> Plan:
    """Return a plan with other keys and other options of its base.

    Args:
        changes: keys of a study, over those of the plan. A number of seeds selects the first of the
            study's list of seeds; further seeds follow its largest.
        base: options over those of its base; its config_files are read after those of the base, and
            what they set is no longer taken from it.

    A RunWarning names options of the base that configurations set themselves.
    """
    for key in base.keys() - {"config_files"}:
        if setting := [name for name, row in plan.rows.items() if key in row.options]:
            message = f"{key}: {listed(setting)} of the study set it, so it is not changed there"
            warnings.warn(message, RunWarning, stacklevel=2)

    if "dataset" in changes:  # the paper's values are of the plan's dataset
        changes = {"paper": None, **changes}
    content = {**plan.source.content, **changes}
    content["base"] = {**(content.get("base") or {}), **base}
    if base.get("config_files"):
        files = [*plan.base.config_files, *base["config_files"]]
        # a file that is given twice is read only at its last place
        content["base"]["config_files"] = list(dict.fromkeys(reversed(files)))[::-1]
        for key in _read_files(base["config_files"]).keys() - base.keys():
            content["base"].pop(key, None)

    seeds, num_seeds = plan.source.content.get("seeds"), changes.get("seeds")
    if isinstance(seeds, list) and is_whole(num_seeds) and num_seeds > 0:
        further = range(max(seeds) + 1, max(seeds) + 1 + num_seeds)
        content["seeds"] = [*seeds, *further][:num_seeds]
    return make_plan(replace(plan.source, content=content))


def _read_files(files: Iterable[str]) -> dict[str, Any]:
    """Return the options of configuration files; later files win."""
    options: dict[str, Any] = {}
    for file in files:
        options |= read_yaml(find_config_file(file))
    return options


def plan_models(
    dataset: str,
    models: Sequence[str],
    vary: Sequence[str] = (),
    seeds: int = 1,
    base: dict[str, Any] | None = None,
    **keys: Any,
) -> Plan:
    """Return a plan with a row for every model, or for every model and varied value.

    Args:
        vary: ``option=value,value,...``; values are yaml, ``position=[nope],[rope,kernel]``. Every
            combination of several is a row.
        seeds: number of seeds.
        base: options of all rows, with config_files.
        keys: further keys of a study's file: reference, metrics, bins, title.

    Raises:
        UsageError: for a value that cannot be read, or a name that is given twice.
    """
    base = base or {}
    varied = dict(_parse_vary(text) for text in vary)
    if repeated := find_repeated([*base, *(_parse_vary(text)[0] for text in vary), *models]):
        raise UsageError(f"{repeated[0]} is given twice")

    rows = {}
    for model, *values in itertools.product(models, *varied.values()):
        options = dict(zip(varied, values, strict=True))
        words = [] if len(models) == 1 and options else [model]
        for name, value in options.items():
            words.append(_describe_option(name, value, with_name=len(varied) > 1))
        rows[" ".join(words)] = {"model": model, **options}

    by_options = f" by {' and '.join(varied)}" if varied else ""
    title = f"{', '.join(models)}{by_options} on {dataset}"
    content = {"dataset": dataset, "title": title, "rows": rows, "seeds": seeds}
    given = _read_files(base.get("config_files", ())) | base
    if given.keys() & {"metrics", "topk"} and (metrics := _list_metrics(given)):
        content["metrics"] = metrics
    return make_plan(Source("command line", {**content, "base": base, **keys}))


def _list_metrics(options: Mapping[str, Any]) -> list[str]:
    """Return the metrics that options of runs name, such as ``hit@5``; ``valid_metric`` first."""
    names = [str(name).lower() for name in as_list(options.get("metrics") or METRIC_NAMES)]
    cutoffs = as_list(options.get("topk") or [10])
    metrics = [f"{name}@{k}" for k in cutoffs for name in names if has_cutoff(name)]
    return sorted(metrics, key=lambda metric: metric != str(options.get("valid_metric")).lower())


def _parse_vary(text: str) -> tuple[str, list[Any]]:
    """Return option and values of ``option=value,value,...``; raise a UsageError for other text."""
    name, _, values_text = text.partition("=")
    name = name.strip().removeprefix("--")
    values = parse_scalar(f"[{values_text}]", f"--vary: {name}")
    is_list = isinstance(values, list) and len(values) > 1
    if not name or not is_list or find_repeated(values):
        raise UsageError(
            f"--vary: {name}: expected option=value,value,..., two different values or more; found "
            f"{shown(text)}"
        )
    return name, values


def _describe_option(name: str, value: Any, with_name: bool) -> str:
    """Return ``name=value``, or only a value that has words if ``with_name`` is false."""
    if isinstance(value, list):
        text = "+".join(map(str, value)) or "none"
    else:
        text = str(value)
    has_words = isinstance(value, str) or (isinstance(value, list) and value)
    return text if has_words and not with_name else f"{name}={text}"
