"""From the arguments of a search to its plan: a study of one configuration that is searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import SearchArguments, list_changed, require_shares
from recbole_pos.config.posconfig import EXTRA_KEYS, STARTS, PosConfig, merge_options
from recbole_pos.config.presets import find_parts_by_scheme
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import SEARCH, RunFolder
from recbole_pos.files import digest_file
from recbole_pos.plain import to_plain
from recbole_pos.runs.space import MOST_POINTS, Space, find_space_file, parse_space, read_space
from recbole_pos.study.configs import check_plan, make_row_config
from recbole_pos.study.plan import SEARCHERS, Plan
from recbole_pos.study.study_file import change_plan, make_plan
from recbole_pos.study.study_folder import Layout, StudyFolder, parse, read_file
from recbole_pos.study.study_source import Source
from recbole_pos.values import check_choice, is_whole, shown

SCHEDULERS = ("asha", "none")
_TRIALS = 60  # as in the kernel attention paper
# What may also be given with --resume: arguments, and options of the configuration.
_RESUME_ARGUMENTS = ("address", "num_samples", "max_concurrent", "cpus_per_trial", "gpus_per_trial")
_RESUME_OPTIONS = ("data_path", "item_vectors", "init_from", "plugins")


class SearchFacts(Layout):
    """The content of ``search.json``: facts that decide the trials of a search, with its plan.

    Attributes:
        scheduler: asha, none, or the name of a class of Ray's.
        grace_epochs: epochs before ASHA may stop a trial.
        start: digest of the weights that trials start from; empty if they are initial ones.
    """

    scheduler: str
    grace_epochs: int
    start: str

    @classmethod
    def from_arguments(cls, args: SearchArguments, plan: Plan) -> SearchFacts:
        """Return the facts of a new search; a scheduler object has the name of its class."""
        scheduler = args.scheduler
        name = scheduler if isinstance(scheduler, str) else type(scheduler).__name__
        return cls(scheduler=name, grace_epochs=args.grace_epochs, start=_digest_start(plan))

    @classmethod
    def read(cls, folder: StudyFolder, args: SearchArguments, plan: Plan) -> SearchFacts:
        """Return the facts of a search that is resumed.

        A UsageError refuses other weights to start from, and another class of a scheduler object.
        """
        file = folder.path / SEARCH
        facts = parse(cls, read_file(file), f"--resume: {file}")
        given = cls.from_arguments(args, plan)
        if given.start and facts.start != given.start:
            raise UsageError(
                "--resume: the run that the trials start from has other weights than when the "
                "search began; give the folder that has the weights of then as --init_from, or "
                "start a new search"
            )
        names = {facts.scheduler, given.scheduler}
        if len(names) > 1 and not names <= set(SCHEDULERS):
            raise UsageError(
                f"--resume: the scheduler of this search is {shown(facts.scheduler)}; an object of "
                "Ray's must be given again, recbole_pos.tune(resume=..., scheduler=...), and no "
                "other"
            )
        return facts


def _digest_start(plan: Plan) -> str:
    """Return the digest of the weights that trials start from; empty if there are none."""
    path = next(filter(None, map(plan.base.options.get, STARTS)), None)
    file = RunFolder(path).checkpoint if path else None
    return digest_file(file) if file and file.is_file() else ""


def check_arguments(args: SearchArguments) -> None:
    """Raise a UsageError for an argument of a search that has a wrong value."""
    require_shares(args)
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
    """Return the plan of a new search.

    Args:
        model, dataset, space, config_file_list, config_dict: as of :func:`.tuning.tune`.
        args: the other arguments of the search.

    Returns:
        The plan, and the options of the space that are given and therefore not searched.

    Raises:
        UsageError: naming the option, or the file and line, that is wrong.
    """
    metric = {"valid_metric": args.metric} if args.metric else {}
    config = PosConfig(model, dataset, config_file_list, {**config_dict, **metric}, strict=False)
    name = config["model"]
    user_options = config.external_config_dict
    whole_space = read_space(find_space_file(space, name))
    in_space = {*whole_space.names, *whole_space.fixed}
    config.require_read(in_space)
    if "position" in in_space:
        _require_no_parts(config)
    searched = whole_space.without(user_options)
    overruled = [option for option in whole_space.names if option in user_options]
    if not searched.parameters:
        raise UsageError(f"nothing is left to search: all of {', '.join(overruled)} are given")
    base = _merge_shared_options(config, whole_space)
    seed = base.pop("seed", config["seed"])
    content = {
        "dataset": config["dataset"],
        "title": f"{name} on {config['dataset']}",
        "seeds": [seed],
        "base": base,
        "rows": {name: {"model": name}},
        "search": {
            "trials": _count_trials(searched, args.searcher, args.num_samples),
            "space": searched.content,
            "searcher": args.searcher,
            "seed": args.seed,
        },
    }
    lines: dict[tuple, str] = {("search", "space", p.name): p.location for p in searched.parameters}
    lines |= {("base", key): whole_space.lines[key] for key in whole_space.fixed}
    plan = make_plan(Source("search", content, lines))
    check_plan(plan, lambda options: make_row_config(options).plain)
    return plan, overruled


def _merge_shared_options(config: PosConfig, space: Space) -> dict[str, Any]:
    """Return the options of all trials: those that the space sets, with given ones above them."""
    user_options = config.external_config_dict
    options = to_plain({key: user_options[key] for key in user_options if key not in EXTRA_KEYS})
    for key in ("data_path", "item_vectors", *STARTS):  # absolute, for trials
        if config.plain[key] and key not in {*space.names, *space.fixed}:
            options[key] = config.plain[key]
    return merge_options(space.fixed, options)


def _count_trials(space: Space, searcher: str, num_samples: int | None) -> int:
    """Return the number of trials; a grid tries all points of the space, random at most all."""
    if searcher == "random":
        trials = num_samples or _TRIALS
        return min(trials, space.count_points() or trials)
    if searcher == "optuna":
        return num_samples or _TRIALS
    num_points = len(space.list_points())
    if num_points > MOST_POINTS:
        raise UsageError(
            f"--searcher: the grid has more than {MOST_POINTS:,} points; use random or optuna"
        )
    if num_samples not in (None, num_points):
        raise UsageError(
            f"--num_samples: the grid has {num_points} points and all are run; leave it out"
        )
    return num_points


def _require_no_parts(config: PosConfig) -> None:
    """Refuse config files with options for certain schemes, which would differ between trials."""
    for file, content in config.files:
        if parts := find_parts_by_scheme(content, config["model"], file):
            raise UsageError(
                f"{parts[0]}: a search that tries or sets position does not take options of "
                "one scheme from there; write them into the space, with `when: {position: ..}`"
            )


def extend_plan(
    folder: StudyFolder,
    args: SearchArguments,
    config_dict: dict[str, Any],
    not_allowed: dict[str, Any],
) -> Plan:
    """Return the plan of the search in a folder to resume, with more trials or its data elsewhere.

    Args:
        folder: folder of the search.
        args: arguments of the call.
        config_dict: options of the configuration that the call gives.
        not_allowed: further arguments by name, none of which may have a value.

    Raises:
        UsageError: for an argument that may not change, fewer trials than there are, or a folder
            without a search.
    """
    allowed = (*_RESUME_ARGUMENTS, "resume", "verbose", "scheduler")
    refused = [name for name in list_changed(args) if name not in allowed]
    if args.scheduler == "none":
        refused.append("scheduler")
    refused += [name for name, value in not_allowed.items() if value]
    refused += [name for name in config_dict if name not in _RESUME_OPTIONS]
    if refused:
        names = ", ".join(f"--{name}" for name in (*_RESUME_ARGUMENTS, *_RESUME_OPTIONS))
        raise UsageError(
            f"--resume takes everything from its folder but {names}; leave out "
            f"{', '.join(map(shown, refused))}"
        )
    plan = folder.read_plan()
    if plan is None or not (folder.path / SEARCH).is_file():
        raise UsageError(f"--resume: {folder.path} is not the folder of a search of this version")
    for name in ("item_vectors", "init_from"):
        if name in config_dict and name not in plan.base.options:
            raise UsageError(f"--{name}: this search has none; leave it out")
    search = dict(plan.source.content["search"])
    if args.num_samples is not None:
        if args.num_samples < search["trials"]:
            raise UsageError(
                f"--num_samples: this search has {search['trials']} trials already; expected at "
                "least as many"
            )
        space = parse_space(search["space"], {})
        search["trials"] = _count_trials(space, search["searcher"], args.num_samples)
    return change_plan(plan, {"search": search}, config_dict)
