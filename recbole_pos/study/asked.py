"""From what `compare` is asked to a plan, and to the folder that its runs are kept in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import CompareArguments
from recbole_pos.data.location import name_and_folder
from recbole_pos.errors import UsageError
from recbole_pos.model.models import register_model
from recbole_pos.study.configs import row_config
from recbole_pos.study.expand import fits, with_unread
from recbole_pos.study.plan import Plan
from recbole_pos.study.ranks import is_from_ranks
from recbole_pos.study.study_file import make_plan, read_plan
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.study.study_source import Source, parse_list
from recbole_pos.values import shown


def run_folders(what: Any) -> list[Path]:
    """Return folders of runs, if that is what was given.

    Raises:
        UsageError: for one run alone, or runs among other things.
    """
    several = what if isinstance(what, (list, tuple)) else [what]
    paths = [Path(one) for one in several if isinstance(one, (str, Path))]
    runs = [path for path in paths if (path / "config.yaml").is_file()]
    if runs and len(runs) < len(several):
        other = next(str(one) for one in several if Path(str(one)) not in runs)
        raise UsageError(f"compare: {other} is not the folder of a run, as {runs[0]} is")
    if len(runs) == 1:
        raise UsageError(f"compare: {runs[0]} is one run; name two folders of runs or more")
    return runs


def plan_and_folder(
    what: Any, dataset: str | None, base: dict[str, Any], args: CompareArguments
) -> tuple[Plan, StudyFolder]:
    """Return the plan of models, or of a study's file, mapping or folder.

    Args:
        what: which of these.
        dataset: dataset of the models; of a study, in the place of its own.
        base: options of all rows, which win over those of a study's base.
        args: the arguments of ``compare``.

    Raises:
        UsageError: for what is wrong with them.
    """
    folder = None
    changes: dict[str, Any] = {}
    if args.seeds is not None:
        changes["seeds"] = args.seeds
    if args.reference is not None:
        changes["reference"] = args.reference
    if dataset:
        dataset, place = name_and_folder(dataset, base.get("data_path") or "dataset/")
        base = base if place is None else {**base, "data_path": place}
    if isinstance(what, (list, tuple)):
        names = [one if isinstance(one, str) else register_model(one).__name__ for one in what]
        if not dataset:
            raise UsageError("no dataset (-d) given")
        seeds = changes.pop("seeds", 1)
        plan = plan_of_models(dataset, names, args.vary, seeds, base, **changes)
        return plan, StudyFolder.of(plan, args.run_dir)
    if args.vary:
        raise UsageError(
            "--vary: goes with models (-m); the configurations of a study are in its file"
        )
    if isinstance(what, dict):
        plan = make_plan(Source("study", what))
    elif Path(what).is_dir():
        folder = StudyFolder(what)
        plan = folder.read_plan()
    else:
        plan = read_plan(what)
    if dataset and dataset != plan.dataset:
        changes |= {"dataset": dataset, "paper": None}  # whose figures are of the other data
    if base or changes:
        content = {**plan.source.content, **changes}
        content["base"] = {**(content.get("base") or {}), **base}
        if base.get("config_files"):  # after those of the study, over which they win
            files = [*plan.config_files, *base["config_files"]]
            content["base"]["config_files"] = list(dict.fromkeys(reversed(files)))[::-1]
        if isinstance(plan.source.content.get("seeds"), list) and args.seeds is not None:
            content["seeds"] = _as_many(plan.seeds, args.seeds)
        plan = make_plan(replace(plan.source, content=content))
    return plan, folder or StudyFolder.of(plan, args.run_dir)


def _as_many(seeds: tuple[int, ...], wanted: int) -> list[int] | int:
    """Return the first of a study's own seeds, and further ones behind them."""
    if wanted < 1:
        return wanted  # refused with the plan
    more = range(max(seeds) + 1, max(seeds) + 1 + wanted - len(seeds))
    return [*seeds[:wanted], *more]


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """Return the whole configuration of a row.

    Raises:
        UsageError: for what is wrong with it.
    """
    config = row_config(options, strict=True)
    for key in ("init_from", "update_from"):
        if config.plain.get(key):
            raise UsageError(
                f"{key}: a configuration begins with fresh weights or another's: "
                "`attach: {to: ROW, schemes: [...]}`"
            )
    return {**config.plain, "data_path": config["data_path"]}


def require_metrics(plan: Plan, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """What tables show is made of the ranks of the test, or computed by every row.

    Args:
        plan: plan of the study.
        configs: row -> its whole configuration.

    Raises:
        UsageError: for a metric or a cutoff that nothing computes.
    """
    tables = [metric for table in plan.tables for metric in table.metrics]
    wanted = [one for one in dict.fromkeys([*plan.metrics, *tables]) if not is_from_ranks(one)]
    wanted += plan.metrics[:1] * any(table.validation for table in plan.tables)
    for row, config in configs.items():
        names = config["metrics"]
        names = [names] if isinstance(names, str) else names
        computed = [f"{name.lower()}@{cutoff}" for name in names for cutoff in config["topk"]]
        for metric in wanted:
            if metric not in computed:
                raise plan.source.error(
                    ("metrics",),
                    f"metrics: {metric} is not computed for {row}, whose metrics are "
                    f"{', '.join(names)} at {', '.join(map(str, config['topk']))}; give it in the "
                    "base, as in metrics: [NDCG, ItemCoverage], topk: [10, 20]",
                )


def require_same_study(plan: Plan, folder: StudyFolder, report: bool) -> None:
    """A folder is of one dataset; a report alone is of what is there.

    Raises:
        UsageError: if the folder has a study of other data, or a report is requested with other
            options than its runs have.
    """
    if not folder.begun:
        return
    kept = folder.read_plan()
    if kept.dataset != plan.dataset:
        raise UsageError(
            f"{folder.path} is a study of {kept.dataset}, not of {plan.dataset}; choose another "
            "--run_dir"
        )
    if not report:
        return
    earlier = {one.name: one.options for one in fits(with_unread(kept, complete))}
    for one in fits(plan):
        mine, before = one.options, earlier.get(one.name, one.options)
        keys = [key for key in {**before, **mine} if before.get(key) != mine.get(key)]
        if keys and keys != ["data_path"]:
            raise UsageError(
                f"--report: {one.row} was trained with other options in {folder.path} "
                f"({', '.join(keys)}); leave --report out to train it with these"
            )


def plan_of_models(
    dataset: str,
    models: Sequence[str],
    vary: Sequence[str] = (),
    seeds: int = 1,
    base: dict[str, Any] | None = None,
    **others: Any,
) -> Plan:
    """Return a plan with a row for every model, or for every model and value.

    Args:
        dataset: its name.
        models: names.
        vary: ``option=value,value,...``; values are yaml, ``position=[nope],[rope,kernel]``. Every
            combination of several is a row.
        seeds: how many.
        base: options of all rows, with config_files.
        others: further keys of a study's file: reference, metrics, bins, title.

    Raises:
        UsageError: for a value that cannot be read, or a name that is given twice.
    """
    if not models:
        raise UsageError("-m: name the models that are compared, as in -m FPARec,SASRec")
    varied = [_parse_vary(text) for text in vary]
    names = [name for name, _ in varied]
    if twice := next((name for name in [*names, *models] if [*names, *models].count(name) > 1), ""):
        raise UsageError(f"{twice} is given twice")
    rows = {}
    for model, *values in itertools.product(models, *(values for _, values in varied)):
        options = dict(zip(names, values, strict=True))
        words = [] if len(models) == 1 and options else [model]
        words += [_word(name, value, len(names) > 1) for name, value in options.items()]
        rows[" ".join(words)] = {"model": model, **options}
    what = f"{', '.join(models)}{' by ' if names else ''}{' and '.join(names)}"
    content = {"dataset": dataset, "title": f"{what} on {dataset}", "rows": rows, "seeds": seeds}
    content |= {"base": base or {}, **others}
    return make_plan(Source("command line", content))


def _parse_vary(text: str) -> tuple[str, list[Any]]:
    name, equals, written = text.partition("=")
    name = name.strip().removeprefix("--")
    if not equals or not name:
        raise UsageError(f"--vary: expected option=value,value,..., found {shown(text)}")
    values = parse_list(written, f"--vary: {name}")
    if len(values) < 2:
        raise UsageError(
            f"--vary: {name}: expected two values or more, with commas between; found "
            f"{shown(written)}"
        )
    if twice := [value for place, value in enumerate(values) if value in values[:place]]:
        raise UsageError(f"--vary: {name}: {shown(twice[0])} is given twice")
    return name, values


def _word(name: str, value: Any, several: bool) -> str:
    """Return a value in the name of a row: of schemes and names the value is enough."""
    text = "+".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    plain = isinstance(value, str) or (isinstance(value, list) and value)
    return text if plain and not several else f"{name}={text}"
