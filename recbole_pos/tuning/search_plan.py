"""From the arguments of a search to its plan: a study of one row, whose options are searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import SearchArguments, changed_settings, require_shares
from recbole_pos.config.posconfig import EXTRA_KEYS, PosConfig, merge_options
from recbole_pos.config.presets import find_parts_by_scheme
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import SEARCH
from recbole_pos.plain import to_plain
from recbole_pos.runs.space import MOST_POINTS, Space, read_space, space_file
from recbole_pos.study.configs import check_plan, row_config
from recbole_pos.study.plan import SEARCHERS, Plan
from recbole_pos.study.study_file import change_plan, make_plan
from recbole_pos.study.study_folder import Layout, StudyFolder, parse, read_bounded
from recbole_pos.study.study_source import Source
from recbole_pos.values import check_choice, is_whole, shown

SCHEDULERS = ("asha", "none")
_TRIALS = 60  # as in the kernel attention paper
# Arguments and options that may also be given with --resume.
_RESUMED = ("address", "num_samples", "max_concurrent", "cpus_per_trial", "gpus_per_trial")
_PLACES = ("data_path", "plugins")


class SearchFacts(Layout):
    """``search.json``: what decides the trials of a search, beside its plan.

    Attributes:
        scheduler: asha, none, or the name of a class of Ray's.
    """

    scheduler: str
    grace_epochs: int

    @classmethod
    def from_arguments(cls, args: SearchArguments) -> SearchFacts:
        """Return the facts of a new search."""
        name = args.scheduler
        name = name if isinstance(name, str) else type(name).__name__
        return cls(scheduler=name, grace_epochs=args.grace_epochs)

    @classmethod
    def read(cls, folder: StudyFolder, args: SearchArguments) -> SearchFacts:
        """Return the facts of a search that is resumed.

        Raises:
            UsageError: if the file is damaged, or if ``args`` have no scheduler object where the
                search had one, or one where it had a named scheduler.
        """
        file = folder.path / SEARCH
        kept = parse(cls, read_bounded(file), f"--resume: {file}")
        had_object = kept.scheduler not in SCHEDULERS
        has_object = not isinstance(args.scheduler, str)
        if had_object != has_object:
            raise UsageError(
                f"--resume: the scheduler of this search is {shown(kept.scheduler)}; an object of "
                "Ray's must be given again, recbole_pos.search(resume=..., scheduler=...), and no "
                "other"
            )
        return kept


def check_arguments(args: SearchArguments) -> None:
    """Raise a UsageError for an argument of a search that has another value than it may have."""
    require_shares(args.max_concurrent, args.cpus_per_trial, args.gpus_per_trial)
    check_choice("--searcher", args.searcher, SEARCHERS)
    if isinstance(args.scheduler, str):
        check_choice("--scheduler", args.scheduler, SCHEDULERS)
    for name, least in (("num_samples", 1), ("grace_epochs", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and not (is_whole(value) and value >= least):
            raise UsageError(f"--{name}: expected {least} or more, found {shown(value)}")


def plan_search(
    model: str | type | None,
    dataset: str | None,
    space: str | Path | None,
    config_file_list: list[str] | None,
    config_dict: dict[str, Any],
    args: SearchArguments,
) -> tuple[Plan, list[str]]:
    """Return the plan of a new search, and the options of the space that are not searched, since
    they are given.

    Args:
        model, dataset, space, config_file_list, config_dict: as of :func:`.tuning.search`.
        args: its other arguments.

    Raises:
        UsageError: naming the option, or the file and line, that is wrong.
    """
    for key in {"nproc", "storage"} & config_dict.keys():
        raise UsageError(
            f"--{key} is no longer an option of a search: a trial is one process, and all results "
            "are in --run_dir, which all machines must reach; leave it out"
        )
    given = {**config_dict, **({"valid_metric": args.metric} if args.metric else {})}
    user = PosConfig(model, dataset, config_file_list, given, strict=False)
    name = user["model"]
    searched = read_space(space_file(space, name))
    in_space = {*searched.names, *searched.fixed}
    user.require_read(in_space)
    options = user.external_config_dict
    overruled = [option for option in searched.names if option in options]
    base = to_plain({key: value for key, value in options.items() if key not in EXTRA_KEYS})
    for key in ("data_path", "item_vectors"):  # absolute: a search may be resumed from elsewhere
        if user.plain[key] and key not in in_space:
            base[key] = user.plain[key]
    base = merge_options(searched.fixed, base)
    searched = searched.without(options)
    if "position" in in_space:
        _require_no_parts(user)
    if not searched.parameters:
        raise UsageError(f"nothing is left to search: all of {', '.join(overruled)} are given")
    search = {
        "trials": _count_trials(searched, args.searcher, args.num_samples),
        "space": searched.content,
        "searcher": args.searcher,
        "seed": args.seed,
    }
    content = {
        "dataset": user["dataset"],
        "title": f"{name} on {user['dataset']}",
        "seeds": [base.pop("seed", user["seed"])],
        "base": base,
        "rows": {name: {"model": name}},
        "search": search,
    }
    lines: dict[tuple, str] = {("search", "space", p.name): p.where for p in searched.parameters}
    lines |= {("base", key): searched.lines[key] for key in searched.fixed}
    plan = make_plan(Source("search", content, lines))
    check_plan(plan, lambda options: row_config(options).plain)
    return plan, overruled


def _count_trials(space: Space, searcher: str, wanted: int | None) -> int:
    """Return the number of trials: the wanted ones, at most as many as the space has points; a grid
    has its own number."""
    if searcher == "random":
        trials = wanted or _TRIALS
        return min(trials, space.points() or trials)
    if searcher == "optuna":
        return wanted or _TRIALS
    points = len(space.grid())
    if points > MOST_POINTS:
        raise UsageError(
            f"--searcher: the grid has more than {MOST_POINTS:,} points; use random or optuna"
        )
    if wanted not in (None, points):
        raise UsageError(
            f"--num_samples: the grid has {points} points and all are run; leave it out"
        )
    return points


def _require_no_parts(config: PosConfig) -> None:
    """Refuse options of a config file for one scheme: trials take the file as it is for one."""
    for file, content in config.files:
        if parts := find_parts_by_scheme(content, config["model"], file):
            raise UsageError(
                f"{parts[0]}: a search that tries or sets position does not take options of "
                "one scheme from there; write them into the space, with `when: {position: ..}`"
            )


def extend_plan(
    folder: StudyFolder, args: SearchArguments, config_dict: dict[str, Any], **others: Any
) -> Plan:
    """Return the plan of a search to resume, with more trials or its data elsewhere.

    Args:
        folder: folder of the search.
        args: arguments of the call.
        config_dict: options of the configuration that the call gives.
        others: further arguments by name, which must be empty.

    Raises:
        UsageError: for an argument that may not change, fewer trials than there are, or a folder
            without a search.
    """
    unseen = ("resume", "verbose", "scheduler")
    refused = [name for name in changed_settings(args) if name not in (*_RESUMED, *unseen)]
    refused += ["scheduler"] if args.scheduler == "none" else []
    refused += [name for name, value in others.items() if value]
    refused += [name for name in config_dict if name not in _PLACES]
    if refused:
        raise UsageError(
            "--resume takes everything from its folder but "
            f"{', '.join(f'--{name}' for name in (*_RESUMED, *_PLACES))}; leave out "
            f"{', '.join(map(shown, refused))}"
        )
    plan = folder.read_plan()
    if plan is None or not (folder.path / SEARCH).is_file():
        raise UsageError(f"--resume: {folder.path} is not the folder of a search of this version")
    content = dict(plan.source.content["search"])
    if args.num_samples is not None:
        if args.num_samples < content["trials"]:
            raise UsageError(
                f"--num_samples: this search has {content['trials']} trials already; expected at "
                "least as many"
            )
        content["trials"] = args.num_samples
    return change_plan(plan, {"search": content}, config_dict)
