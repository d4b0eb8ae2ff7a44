"""From a study's yaml file, or the models of a command line, to a complete plan.

:func:`read_plan` reads a file, which may inherit from another by its key ``like``;
:func:`plan_models` makes a study of a list of models. Both return a :class:`Plan`, whose rows are
the configurations to compare. Errors name file and line of a mistake.
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
from recbole_pos.study.plan import Attach, Plan, Source, TablePlan, find_repeated
from recbole_pos.values import is_whole, listed, shown, suggest
from recbole_pos.yaml_files import parse_scalar, read_with_lines, read_yaml

# Options that a trained model may be tested again with.
_RETEST_OPTIONS = ("mask_history", "inference_relations", "eval_batch_size")
METRIC_NAMES = ("ndcg", "hit", "mrr")  # metrics of a study that names none
# All keys of a study, of its tables and of attached rows, to suggest one for a misspelt key.
_KEYS = {key for layout in (Plan, TablePlan, Attach) for key in layout.model_fields}


def read_plan(path: str | Path) -> Plan:
    """Return the plan in a yaml file; a UsageError names file and line of a mistake."""
    return make_plan(read_source(path))


def read_source(path: str | Path) -> Source:
    """Return the content of a study's yaml file, merged with the study that it inherits from.

    A file inherits from another by its key ``like``, and that one may inherit as well.

    Args:
        path: the file.

    Returns:
        The merged content, with the name of the file and the line of each value, for messages.

    Raises:
        UsageError: with the line of a mistake.
    """
    path = Path(path)
    # read_with_lines returns the content, and the file and line of each value. The word "study"
    # is what its messages call the file.
    source = Source(str(path), *read_with_lines(path, "study"))
    name = source.content.pop("like", None)
    if name is None:
        return source

    # Read the other study, whose path is relative to this file, and merge content and lines.
    parent_path = path.parent / str(name)
    if not parent_path.is_file():
        problem = f"like: expected the file of another study, found {shown(name)}"
        raise source.error(("like",), problem)
    parent = read_source(parent_path)
    return Source(source.name, _inherit(source, parent.content), {**parent.lines, **source.lines})


def _inherit(source: Source, inherited: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a study's file, with what it inherits from another study.

    The study's own keys win over inherited ones. Two keys are merged: the options in ``base`` (of
    all rows), and those of each row in ``rows`` (a configuration to compare). An example: base
    ``{epochs: 9}`` and the inherited base ``{epochs: 20, n_heads: 2}`` give ``{epochs: 9, n_heads:
    2}``. If ``rows`` is a list of names, only these inherited rows stay.

    Args:
        source: content of the study, with the lines of its file, for messages.
        inherited: content of the other study.
    """
    content, rows = source.content, source.content.get("rows") or {}
    if not isinstance(rows, dict):  # names of inherited rows
        names = as_list(rows)
        for name in names:  # a misspelt name is an error with its line
            source.require_choice(("rows",), name, inherited.get("rows") or {})
        inherited, rows = _select_rows(inherited, names), {}

    # ``paper`` has the values that a paper reports on the inherited dataset. They are not shown
    # beside results on another dataset.
    if "dataset" in content and content["dataset"] != inherited.get("dataset"):
        inherited = {**inherited, "paper": None}

    base = _merge_options(inherited.get("base"), content.get("base"))
    inherited_rows = inherited.get("rows") or {}
    merged_rows = {
        name: _merge_options(inherited_rows.get(name), rows.get(name))
        for name in {**inherited_rows, **rows}
    }
    merged = {**inherited, **content, "base": base, "rows": merged_rows}
    # None is a key without a value, or one of which nothing is left.
    return {key: value for key, value in merged.items() if value is not None}


def _merge_options(inherited: Any, options: Any) -> Any:
    """Return inherited options with other options over them.

    Args:
        inherited: what the inherited study has at this key, usually a mapping.
        options: what the study itself has. None, a key without a value, inherits everything; a
            value that is not a mapping replaces what is inherited, and is checked later.
    """
    if isinstance(inherited, dict) and isinstance(options, dict):
        return {**inherited, **options}
    return inherited if options is None else options


def _select_rows(content: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the content of a study with only some of its rows (configurations to compare).

    Three other keys name rows, too: ``paper`` (row -> values to show beside it), ``tables`` and
    ``reference`` (the row that others are compared to). What they say of rows that do not stay is
    left out. Where nothing is left, the value is None.

    Args:
        content: content of the study, with ``rows`` (name -> options) and perhaps these keys.
        names: names of the rows that stay, in their new order.
    """
    rows = {name: content["rows"][name] for name in names}
    paper = {row: values for row, values in (content.get("paper") or {}).items() if row in rows}
    # A table stays if all rows that it names, and its reference, stay. One that names none has all
    # rows of the study.
    tables = []
    for table in content.get("tables") or []:
        named = {*table.get("rows", ()), table.get("reference")} - {None}
        if named <= set(names):
            tables.append(table)

    reference = content["reference"] if content.get("reference") in names else None
    selected = {"rows": rows, "paper": paper or None, "tables": tables or None}
    return {**content, **selected, "reference": reference}


def make_plan(source: Source) -> Plan:
    """Return the complete plan of a study: keys that it leaves out are filled in.

    Args:
        source: content of the study, with the lines of its file.

    Raises:
        UsageError: with file and line, if a key, a type or a name of a row is wrong.
    """
    plan = _validate(source)  # checks the types of all keys
    plan.source = source  # for messages with file and line, and to write the study again

    # The rows are the configurations that the study compares. Some may start from the trained
    # models of others; if they do so in a circle, sort_rows raises graphlib's CycleError.
    for name in plan.rows:
        _check_row(plan, name)
        _complete_search(plan, name)
    plan.sort_rows()
    _require_equal_trials(plan)  # all searched rows try the same number of combinations of options

    # The title; the reference, which other rows are compared with, by default the first row; and
    # the names of rows in ``paper``, which has the values that a paper reports for them.
    plan.title = plan.title or f"{len(plan.rows)} rows on {plan.dataset}"
    plan.reference = plan.reference or next(iter(plan.rows))
    source.require_choice(("reference",), plan.reference, plan.rows)
    for name in plan.paper:
        source.require_choice(("paper", name), name, plan.rows)

    # The tables, by default one of all rows.
    plan.tables = plan.tables or [TablePlan(title=plan.title)]
    for index, table in enumerate(plan.tables):
        _complete_table(plan, table, ("tables", index))  # its rows, title, metrics, reference
    return plan


def _validate(source: Source) -> Plan:
    """Return the content of a study as a plan, with the types of its keys checked.

    Args:
        source: content of the study's file, with the line of each value.

    Raises:
        UsageError: for the first mistake that pydantic finds, with its file and line.
    """
    try:
        return Plan.model_validate(source.content)
    except ValidationError as error:
        # pydantic gives the kind of the mistake, the path of keys that leads to it, and the value.
        details = error.errors(include_url=False, include_context=False)[0]
        # pydantic adds "[key]" to the path if the key of a mapping is wrong.
        path = tuple(key for key in details["loc"] if key != "[key]")
        name = ": ".join(map(str, path))
        if details["type"] == "extra_forbidden":
            # _KEYS are all keys of a study, of which the most similar is suggested.
            problem = f"unknown key {shown(path[-1])}{suggest(str(path[-1]), _KEYS)}"
        elif details["type"] == "missing":
            problem = f"{name}: it is missing"
        else:
            message = details["msg"].removeprefix("Value error, ")
            problem = f"{name}: {message}; found {shown(details['input'])}"
        raise source.error(path, problem) from error


def _check_row(plan: Plan, name: str) -> None:
    """Check that a row (a configuration) has a model, and only the keys of its kind.

    There are four kinds of rows:

    - ``predictions``: another system has made lists of items;
    - ``attach``: position schemes are added to the trained models of another row, its parent;
    - ``retest``: the trained models of its parent are only tested again, with other options;
    - any other row has a model of its own, which the row or the study's base names.

    Args:
        plan: the study.
        name: name of the row.

    Raises:
        UsageError: with the line of a key that the row must not have, or of a parent that does not
            exist; or if the row has no model.
    """
    row, path = plan.rows[name], ("rows", name)  # the path finds the line in the file
    given = set(row.model_fields_set)  # pydantic's name: all keys that the file gives for the row
    wrong: set[str] = set()  # keys that the row must not have
    problem = ""  # why not; it follows the name of the row and the key

    if row.predictions:
        wrong = given - {"predictions"}
        problem = "another system made the predictions; leave out all other keys"
    elif row.attach:
        plan.source.require_choice((*path, "attach"), row.parent, plan.rows)
        wrong = given & {"model", "position", "retest", "config_files", "search"}
        problem = f"it is that of {row.parent}; leave it out"  # the model is that of the parent
    elif row.retest:
        plan.source.require_choice((*path, "retest"), row.parent, plan.rows)
        wrong = given - {"retest", *_RETEST_OPTIONS}
        problem = f"{row.parent} is tested again with {' or '.join(_RETEST_OPTIONS)} only"
    elif "model" not in {**row.options, **plan.base.options}:
        raise plan.source.error(path, f"{name}: it has no model")

    if wrong:
        key = min(wrong)
        raise plan.source.error((*path, key), f"{name}: {key}: {problem}")


def _complete_search(plan: Plan, name: str) -> None:
    """Give a row (a configuration) the grid of the study, if it does not say what it searches.

    A grid (option -> values) is what a search tries: every combination of the values. A row may
    have a grid of its own, or ``search: false``, which is None in the plan. The default is True.

    Args:
        plan: the study, which may have a grid for all rows; None if it has none.
        name: name of the row.
    """
    row = plan.rows[name]
    if row.search is True:
        # A row with predictions of another system, or with the trained models of another row (its
        # parent), trains no model from scratch, so it searches nothing.
        row.search = None if row.parent or row.predictions else plan.search


def _complete_table(plan: Plan, table: TablePlan, path: tuple[Any, ...]) -> None:
    """Fill in the keys that a table leaves out: rows, title, metrics and reference.

    Args:
        plan: the study, from which the keys are taken.
        table: the table, which is changed.
        path: keys and list indices of the table in the yaml file, for messages.

    Raises:
        UsageError: if the table names a row (a configuration) that does not exist.
    """
    for name in table.rows:
        plan.source.require_choice((*path, "rows"), name, plan.rows)
    table.rows = table.rows or tuple(plan.rows)
    table.title = table.title or ", ".join(table.rows)
    table.metrics = table.metrics or plan.metrics
    # The reference of the study, if the table has that row; else the table's first row.
    default_reference = plan.reference if plan.reference in table.rows else table.rows[0]
    table.reference = table.reference or default_reference
    plan.source.require_choice((*path, "reference"), table.reference, table.rows)


def _require_equal_trials(plan: Plan) -> None:
    """Require that all searched rows (configurations) have the same number of trials.

    A row with more trials would have an advantage over the others.

    Args:
        plan: the study.

    Raises:
        UsageError: naming two rows with different numbers.
    """
    for (name, number), (other, other_number) in itertools.pairwise(plan.num_trials.items()):
        if number != other_number:
            raise plan.source.error(
                ("rows", other, "search"),
                f"{other} is searched with {other_number} trials and {name} with {number}; give "
                "all as many, or those that need none `search: false`",
            )


def change_plan(plan: Plan, changes: dict[str, Any], new_base: dict[str, Any]) -> Plan:
    """Return the plan of a study with some of its keys changed, and with new options of all rows.

    A row is a configuration of the study, and its key ``base`` has the options of all rows. An
    option may be set in several places. The last of these wins:

    1. the configuration files of the study's base, and then the options in that base;
    2. the configuration files in ``new_base``, and then the options there;
    3. the row itself. A RunWarning tells the user if it sets one of the new options.

    Args:
        plan: the study.
        changes: keys of a study file with their new values. A number of seeds selects the first of
            the study's list of seeds; if it has fewer, the seeds after its largest are added.
        new_base: new options of all rows, and under ``config_files`` a list of new files.

    Raises:
        UsageError: if the changed study is wrong, as for :func:`read_plan`.
    """
    for key in new_base.keys() - {"config_files"}:
        setting = [name for name, row in plan.rows.items() if key in row.options]
        if setting:
            message = f"{key}: {listed(setting)} of the study set it, so it is not changed there"
            warnings.warn(message, RunWarning, stacklevel=2)

    # Change the content as the study's file has it, and make the plan from it again.
    content = _change_content(plan.source.content, changes, new_base)
    return make_plan(replace(plan.source, content=content))


def _change_content(
    written: Mapping[str, Any], changes: Mapping[str, Any], new_base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a study's file with some keys changed.

    A new value replaces that of the file, but for three keys:

    - ``base``, the options of all rows (configurations): new options are added to the former ones.
    - ``paper``, results that a paper reports: a new dataset removes them.
    - ``seeds``, a number or a list: a new number keeps so many of the file's list. With [7, 9] in
      the file 1 gives [7], and 3 gives [7, 9, 10].

    Args:
        written: the content as the file has it.
        changes: keys with their new values.
        new_base: new options for ``base``.
    """
    content = {**written, **changes, "base": _change_base(written.get("base") or {}, new_base)}
    if "dataset" in changes:
        content["paper"] = None

    seeds, new_seeds = written.get("seeds"), changes.get("seeds")
    if isinstance(seeds, list) and is_whole(new_seeds) and new_seeds > 0:
        content["seeds"] = _take_seeds(seeds, new_seeds)
    return content


def _change_base(former: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of all configurations of a study, changed by new options and files.

    An example, if new.yaml sets ``epochs: 5``: the former ``{epochs: 20, n_heads: 2, config_files:
    [old.yaml]}`` and the new ``{n_heads: 4, config_files: [new.yaml]}`` give ``{n_heads: 4,
    config_files: [old.yaml, new.yaml]}``. Then runs have 5 epochs and 4 heads.

    Args:
        former: the former options, and under ``config_files`` perhaps a configuration file or a
            list of them.
        new: the new options, and under ``config_files`` perhaps a list of further files.
    """
    new_files = new.get("config_files") or []
    if not new_files:
        return {**former, **new}

    # Later files win over earlier ones, so new files come last. One that the study names already is
    # moved there.
    former_files = as_list(former.get("config_files") or [])
    files = [file for file in former_files if file not in new_files] + new_files

    # An option wins over all files. So a former option that a new file sets is taken out.
    set_by_new_files = _read_files(new_files)
    kept = {key: value for key, value in former.items() if key not in set_by_new_files}
    return {**kept, **new, "config_files": files}


def _take_seeds(seeds: list[int], number: int) -> list[int]:
    """Return the first seeds of a list, which is extended by the seeds after its largest.

    Of [7, 9], three seeds are [7, 9, 10]. The runs with 7 and 9 that are finished still count.
    """
    further = range(max(seeds) + 1, max(seeds) + 1 + number)
    return [*seeds, *further][:number]


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
    """Return a plan with one row (configuration) for every model, and for every varied value.

    Args:
        dataset: name of the dataset.
        models: names of the models.
        vary: options to vary, each as ``option=value,value,...``. The values are yaml, as in
            ``position=[nope],[rope,kernel]``. With several options, every combination is a row:
            one model with ``n_heads=1,2`` and ``n_layers=1,2`` gives four rows.
        seeds: number of seeds.
        base: options of all rows, with config_files.
        keys: further keys of a study's file: reference, metrics, bins, title.

    Raises:
        UsageError: for a value that cannot be read, or a name that is given twice.
    """
    base = base or {}
    varied = dict(_parse_vary(text) for text in vary)  # option -> list of its values
    # A model or an option that is given twice would give two rows of one name, or lose a value.
    if repeated := find_repeated([*base, *(_parse_vary(text)[0] for text in vary), *models]):
        raise UsageError(f"{repeated[0]} is given twice")

    # A row for every combination, named by the model and the varied values.
    rows = {}
    for model, *values in itertools.product(models, *varied.values()):
        options = dict(zip(varied, values, strict=True))
        # Of a single model, the varied values are enough as a name.
        words = [] if len(models) == 1 and options else [model]
        for name, value in options.items():
            words.append(_describe_option(name, value, with_name=len(varied) > 1))
        rows[" ".join(words)] = {"model": model, **options}

    by_options = f" by {' and '.join(varied)}" if varied else ""
    title = f"{', '.join(models)}{by_options} on {dataset}"
    content = {"dataset": dataset, "title": title, "rows": rows, "seeds": seeds}

    # The tables show the metrics of the runs, if the options or the files name some.
    given = _read_files(base.get("config_files", ())) | base
    if given.keys() & {"metrics", "topk"} and (metrics := _list_metrics(given)):
        content["metrics"] = metrics
    return make_plan(Source("command line", {**content, "base": base, **keys}))


def _list_metrics(options: Mapping[str, Any]) -> list[str]:
    """Return the metrics that options of runs name, with the metric of early stopping first.

    ``metrics: [NDCG, Hit]`` and ``topk: [5, 10]`` give ``ndcg@5``, ``hit@5``, ``ndcg@10`` and
    ``hit@10``. Metrics without a cutoff are left out.

    Args:
        options: options of runs, in RecBole's spelling.
    """
    # By default METRIC_NAMES at the cutoff 10. has_cutoff tells whether a metric takes a cutoff.
    names = [str(name).lower() for name in as_list(options.get("metrics") or METRIC_NAMES)]
    cutoffs = as_list(options.get("topk") or [10])
    metrics = [f"{name}@{k}" for k in cutoffs for name in names if has_cutoff(name)]
    # False sorts before True, and the others keep their order.
    return sorted(metrics, key=lambda metric: metric != str(options.get("valid_metric")).lower())


def _parse_vary(text: str) -> tuple[str, list[Any]]:
    """Return the option and the values of a text such as ``n_heads=1,2``.

    Args:
        text: argument of ``--vary``.

    Raises:
        UsageError: if the text has another form, or fewer than two different values.
    """
    name, _, values_text = text.partition("=")
    # A leading ``--`` is forgiven. The values are read as a yaml list, so that numbers are numbers.
    name = name.strip().removeprefix("--")
    values = parse_scalar(f"[{values_text}]")
    is_list = isinstance(values, list) and len(values) > 1
    if not name or not is_list or find_repeated(values):
        raise UsageError(
            f"--vary: {name}: expected option=value,value,..., two different values or more; found "
            f"{shown(text)}"
        )
    return name, values


def _describe_option(name: str, value: Any, with_name: bool) -> str:
    """Return a varied option as part of the name of a row (a configuration).

    Args:
        name: name of the option.
        value: its value. The items of a list are joined: ``rope+kernel``.
        with_name: False if only this option is varied, so that the value may be enough. A number
            and an empty list get the name in any case: ``n_heads=2``, ``position=none``.
    """
    if isinstance(value, list):
        text, says_enough = "+".join(map(str, value)) or "none", bool(value)
    else:
        text, says_enough = str(value), isinstance(value, str)
    return text if says_enough and not with_name else f"{name}={text}"
