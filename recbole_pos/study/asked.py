"""From what `compare` is asked to a plan, and to the folder that its runs are kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import CompareArguments
from recbole_pos.data.location import name_and_folder
from recbole_pos.errors import UsageError
from recbole_pos.study.command import plan_of_models
from recbole_pos.study.configs import row_config
from recbole_pos.study.expand import fits, with_unread
from recbole_pos.study.plan import Plan
from recbole_pos.study.ranks import is_from_ranks
from recbole_pos.study.reading import make_plan, read_plan
from recbole_pos.study.source import Source
from recbole_pos.study.study_folder import StudyFolder


def run_folders(what: Any) -> list[Path]:
    """Folders of runs, if that is what was given.

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
    what: Any, dataset: str | None, base: dict[str, Any], told: CompareArguments
) -> tuple[Plan, StudyFolder]:
    """The plan of models, or of a study's file, mapping or folder.

    Args:
        what: which of these.
        dataset: of the models; of a study, in the place of its own.
        base: options of all rows, which win over those of a study's base.
        told: the arguments of ``compare``.

    Raises:
        UsageError: for what is wrong with them.
    """
    folder = None
    changes: dict[str, Any] = {}
    if told.seeds is not None:
        changes["seeds"] = told.seeds
    if told.reference is not None:
        changes["reference"] = told.reference
    if dataset:
        dataset, place = name_and_folder(dataset, base.get("data_path") or "dataset/")
        base = base if place is None else {**base, "data_path": place}
    if isinstance(what, (list, tuple)):
        names = [one if isinstance(one, str) else _registered(one) for one in what]
        if not dataset:
            raise UsageError("no dataset (-d) given")
        seeds = changes.pop("seeds", 1)
        plan = plan_of_models(dataset, names, told.vary, seeds, base, **changes)
        return plan, StudyFolder.of(plan, told.run_dir)
    if told.vary:
        raise UsageError("--vary: goes with models (-m); the rows of a study are in its file")
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
        if isinstance(plan.source.content.get("seeds"), list) and told.seeds is not None:
            content["seeds"] = _as_many(plan.seeds, told.seeds)
        plan = make_plan(replace(plan.source, content=content))
    return plan, folder or StudyFolder.of(plan, told.run_dir)


def _as_many(seeds: tuple[int, ...], wanted: int) -> list[int] | int:
    """The first of a study's own seeds, and further ones behind them."""
    if wanted < 1:
        return wanted  # refused with the plan
    more = range(max(seeds) + 1, max(seeds) + 1 + wanted - len(seeds))
    return [*seeds[:wanted], *more]


def _registered(model: type) -> str:
    """The name of a class, after it was made known."""
    from recbole_pos.model.models import register_model

    return register_model(model).__name__


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """The whole configuration of a row.

    Raises:
        UsageError: for what is wrong with it.
    """
    config = row_config(options, strict=True)
    for key in ("init_from", "update_from"):
        if config.plain.get(key):
            raise UsageError(
                f"{key}: a row of a study begins with fresh weights, or with those of another row: "
                "`attach: {to: ROW, schemes: [...]}`"
            )
    return {**config.plain, "data_path": config["data_path"]}


def require_metrics(plan: Plan, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """What tables show is made of the ranks of the test, or computed by every row.

    Args:
        plan: of the study.
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
                    f"metrics: {metric} is not computed for row {row}, whose metrics are "
                    f"{', '.join(names)} at {', '.join(map(str, config['topk']))}; give it in the "
                    "base, as in metrics: [NDCG, ItemCoverage], topk: [10, 20]",
                )


def require_same_study(plan: Plan, folder: StudyFolder, report: bool) -> None:
    """A folder is of one dataset; a report alone is of what is there.

    Raises:
        UsageError: if the folder has a study of other data, or a report is asked for with other
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
    theirs = {one.name: _without_place(one.options) for one in fits(with_unread(kept, complete))}
    for one in fits(plan):
        mine = _without_place(one.options)
        if mine != theirs.get(one.name, mine):
            before = theirs[one.name]
            keys = [key for key in {**before, **mine} if before.get(key) != mine.get(key)]
            raise UsageError(
                f"--report: {one.row} was trained with other options in {folder.path} "
                f"({', '.join(keys)}); leave --report out to train it with these"
            )


def _without_place(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "data_path"}
