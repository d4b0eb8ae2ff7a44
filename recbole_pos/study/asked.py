"""From the arguments of `compare` to a plan and the folder of its runs."""

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
from recbole_pos.study.expand import list_fits, with_unread
from recbole_pos.study.plan import Plan
from recbole_pos.study.ranks import is_from_ranks
from recbole_pos.study.study_file import make_plan, read_plan
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.study.study_source import Source, parse_list
from recbole_pos.values import shown


def run_folders(what: Any) -> list[Path]:
    """Return the folders of runs that `compare` is given; empty if it is given anything else.

    Args:
        what: first argument of `compare`.

    Raises:
        UsageError: for a single run, or runs among other things.
    """
    several = what if isinstance(what, (list, tuple)) else [what]
    paths = [Path(item) for item in several if isinstance(item, (str, Path))]
    runs = [path for path in paths if (path / "config.yaml").is_file()]
    if runs and len(runs) < len(several):
        other = next(str(item) for item in several if Path(str(item)) not in runs)
        raise UsageError(f"compare: {other} is not the folder of a run, as {runs[0]} is")
    if len(runs) == 1:
        raise UsageError(f"compare: {runs[0]} is one run; name two folders of runs or more")
    return runs


def plan_and_folder(
    what: Any, dataset: str | None, base: dict[str, Any], args: CompareArguments
) -> tuple[Plan, StudyFolder]:
    """Return the plan of models, or of a study's file, mapping or folder.

    Args:
        what: a list of models; or a study as the path of its file or folder, or as a mapping.
        dataset: dataset of the models; for a study, instead of its own.
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
        names = [
            model if isinstance(model, str) else register_model(model).__name__ for model in what
        ]
        if not dataset:
            raise UsageError("no dataset (-d) given")
        seeds = changes.pop("seeds", 1)
        plan = plan_of_models(dataset, names, args.vary, seeds, base, **changes)
        return plan, StudyFolder.from_plan(plan, args.run_dir)
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
        changes |= {
            "dataset": dataset,
            "paper": None,
        }  # figures of the paper are of the other dataset
    if base or changes:
        content = {**plan.source.content, **changes}
        content["base"] = {**(content.get("base") or {}), **base}
        if base.get("config_files"):  # after those of the study, over which they win
            files = [*plan.config_files, *base["config_files"]]
            content["base"]["config_files"] = list(dict.fromkeys(reversed(files)))[::-1]
        if isinstance(plan.source.content.get("seeds"), list) and args.seeds is not None:
            content["seeds"] = _as_many(plan.seeds, args.seeds)
        plan = make_plan(replace(plan.source, content=content))
    return plan, folder or StudyFolder.from_plan(plan, args.run_dir)


def _as_many(seeds: tuple[int, ...], wanted: int) -> list[int] | int:
    """Return ``wanted`` seeds: the first of a study's own, then the numbers after the largest."""
    if wanted < 1:
        return wanted  # refused with the plan
    further = range(max(seeds) + 1, max(seeds) + 1 + wanted - len(seeds))
    return [*seeds[:wanted], *further]


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """Return the complete configuration of a row, from its options.

    Raises:
        UsageError: for an option that is wrong, or that a study sets itself.
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
    """Require that every metric of the tables follows from ranks, or is computed for every row.

    Args:
        plan: plan of the study.
        configs: row -> its complete configuration.

    Raises:
        UsageError: for a metric or a cutoff that is not computed.
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
    """Require that the folder of a study can take a plan.

    Args:
        plan: plan of the study.
        folder: its folder, which may be new.
        report: whether only a report is made, without training.

    Raises:
        UsageError: if the folder has a study of another dataset, or a report is requested with
            options that its runs do not have.
    """
    if not folder.begun:
        return
    planned = folder.read_plan()
    if planned.dataset != plan.dataset:
        raise UsageError(
            f"{folder.path} is a study of {planned.dataset}, not of {plan.dataset}; choose another "
            "--run_dir"
        )
    if not report:
        return
    earlier = {fit.name: fit.options for fit in list_fits(with_unread(planned, complete))}
    for fit in list_fits(plan):
        options, before = fit.options, earlier.get(fit.name, fit.options)
        keys = [key for key in {**before, **options} if before.get(key) != options.get(key)]
        if keys and keys != ["data_path"]:
            raise UsageError(
                f"--report: {fit.row} was trained with other options in {folder.path} "
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
    """Return a plan with a row for every model, or for every model and varied value.

    Args:
        dataset: name of the dataset.
        models: names of the models.
        vary: ``option=value,value,...``; values are yaml, ``position=[nope],[rope,kernel]``. Every
            combination of several is a row.
        seeds: number of seeds.
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
    """Return option and values of ``option=value,value,...``; raise a UsageError for other text."""
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
    """Return the words for a varied option in the name of a row.

    They are its value if that is a name or schemes and no other option varies, else name=value.
    """
    text = "+".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    plain = isinstance(value, str) or (isinstance(value, list) and value)
    return text if plain and not several else f"{name}={text}"
