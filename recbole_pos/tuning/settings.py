"""The checked settings of a search, and the folder that keeps them for ``--resume``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from recbole_pos.config.arguments import SearchArguments, changed_settings, require_shares
from recbole_pos.config.plugins import find_modules
from recbole_pos.config.posconfig import EXTRA_KEYS, PosConfig, merge_options
from recbole_pos.config.presets import find_parts_by_scheme, list_positions
from recbole_pos.errors import UsageError
from recbole_pos.experiment import folder as folders
from recbole_pos.files import write_json
from recbole_pos.plain import to_plain
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.space import MOST_POINTS, Space, fit_space, read_space, space_file
from recbole_pos.runs.storage import names_in, resolve_storage
from recbole_pos.tuning.record import Record
from recbole_pos.values import check_choice, shown

SCHEDULERS = ("asha", "none")
# Arguments that may also be given with --resume, with their defaults.
RESUMED: dict[str, Any] = {
    "num_samples": 60,  # as in the kernel attention paper
    "max_concurrent": None,
    "storage": None,
    "cpus_per_trial": 1,
    "gpus_per_trial": 0,
    "nproc": 1,
}
PLACES = ("data_path", "plugins")  # options that may
_Count = Annotated[int, Field(ge=1)]


@dataclass(config=ConfigDict(strict=True))
class Settings:
    """The settings of a search, plain values except for its space.

    Attributes:
        base: options of all trials.
        mode: max or min.
        epochs: most epochs of a trial.
        num_samples: number of trials.
        overruled: options of the space that are not searched, since the user gave a value.
        identity: identity of the data; empty until they are prepared.
    """

    model: str
    dataset: str
    base: dict[str, Any]
    space: Space
    metric: str
    mode: Literal["max", "min"]
    epochs: _Count
    scheduler: str
    num_samples: _Count
    max_concurrent: _Count | None
    grace_epochs: _Count
    searcher: Literal["optuna", "random", "grid"]
    seed: Annotated[int, Field(ge=0)]
    storage: str | None
    cpus_per_trial: float
    gpus_per_trial: float
    nproc: _Count
    overruled: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)

    def options(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a trial, of which ``drawn`` are sampled."""
        return {**self.base, "model": self.model, "dataset": self.dataset, **drawn}

    def config(self, drawn: dict[str, Any] | None = None) -> PosConfig:
        """Return the configuration of a trial, or without ``drawn`` that which all trials share."""
        return PosConfig(None, None, None, self.options(drawn or {}), strict=False)

    @property
    def resources(self) -> Resources:
        """Resources of a trial."""
        return Resources(self.cpus_per_trial, self.gpus_per_trial, self.nproc, self.storage)


def _checked(make: Callable[[], Settings], num_samples: int | None, where: str = "--") -> Settings:
    """Return the settings that ``make`` makes, with at most as many trials as there are points.

    A field that pydantic refuses is a UsageError, which begins with ``where``. ``num_samples`` is
    the number of trials that the user gives; a grid has its own.
    """
    try:
        settings = make()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        found = f"{first['msg'][:200]}, found {shown(first['input'])}"
        raise UsageError(f"{where}{place}: {found}") from error
    require_shares(settings.max_concurrent, settings.cpus_per_trial, settings.gpus_per_trial)
    if settings.searcher == "random":
        points = settings.space.points() or settings.num_samples
        settings.num_samples = min(settings.num_samples, points)
    if settings.searcher == "grid":
        points = len(settings.space.grid())
        if points > MOST_POINTS:
            raise UsageError(
                f"--searcher: the grid has more than {MOST_POINTS:,} points; use random or optuna"
            )
        if num_samples not in (None, points):
            raise UsageError(
                f"--num_samples: the grid has {points} points and all are run; leave it out"
            )
        settings.num_samples = points
    return settings


def read_settings(
    model: str | type | None,
    dataset: str | None,
    space: str | Path | None,
    config_file_list: list[str] | None,
    config_dict: dict[str, Any] | None,
    args: SearchArguments,
) -> Settings:
    """Return the checked settings of a new search.

    Args:
        model, dataset, space, config_file_list, config_dict: as of :func:`.tuning.search`.
        args: its other arguments.

    Raises:
        UsageError: naming the option, or the file and line, that is wrong.
    """
    scheduler = args.scheduler
    if isinstance(scheduler, str):
        check_choice("--scheduler", scheduler, SCHEDULERS)
    else:
        scheduler = type(scheduler).__name__
    given = {**(config_dict or {}), **({"valid_metric": args.metric} if args.metric else {})}
    user = PosConfig(model, dataset, config_file_list, given, strict=False)
    searched = read_space(space_file(space, user["model"]))
    user.require_read({*searched.names, *searched.fixed})
    fixed = user.external_config_dict
    overruled = [name for name in searched.names if name in fixed]
    base = to_plain({key: value for key, value in fixed.items() if key not in EXTRA_KEYS})
    for name in ("data_path", "item_vectors"):  # absolute: trials work in folders of their own
        if user.plain[name] and name not in {*searched.names, *searched.fixed}:
            base[name] = user.plain[name]
    base = merge_options(searched.fixed, base)
    searched = searched.without(fixed)
    if "position" in {*searched.names, *searched.fixed}:
        _require_no_parts(user)
    if not searched.parameters:
        raise UsageError(f"nothing is left to search: all of {', '.join(overruled)} are given")
    if modules := _collect_plugins(searched, user["model"], base):
        base["plugins"] = modules
    shared = {**base, "model": user["model"], "dataset": user["dataset"]}

    def build(drawn: dict[str, Any]) -> PosConfig:
        return PosConfig(None, None, None, {**shared, **drawn}, strict=False)

    config = fit_space(searched, build)
    if config["eval_step"] < 1:
        raise UsageError("eval_step: a search needs validation; expected at least 1")
    fields = {
        "model": user["model"],
        "dataset": user["dataset"],
        "base": base,
        "space": searched,
        "metric": config["valid_metric"].lower(),
        "mode": "max" if config["valid_metric_bigger"] else "min",
        "epochs": config["epochs"],
        "scheduler": scheduler,
        "overruled": overruled,
        **{name: getattr(args, name) for name in ("grace_epochs", "searcher", "seed")},
        **RESUMED,
        **_given(args),
    }
    return _checked(lambda: Settings(**fields), args.num_samples)


def _given(args: SearchArguments) -> dict[str, Any]:
    """Return the arguments of ``RESUMED`` that are given."""
    values = {name: getattr(args, name) for name in RESUMED}
    return {name: value for name, value in values.items() if value is not None}


def _require_no_parts(config: PosConfig) -> None:
    """Refuse options of a config file for one scheme: trials take the file as it is for one."""
    for file, content in config.files:
        if parts := find_parts_by_scheme(content, config["model"], file):
            raise UsageError(
                f"{parts[0]}: a search that tries or sets position does not take options of "
                "one scheme from there; write them into the space, with `when: {position: ..}`"
            )


def _collect_plugins(space: Space, model: str, base: dict[str, Any]) -> list[str]:
    """Return the modules to import for the model and the position schemes of all trials."""
    searched = [option.values for option in space.parameters if option.name == "position"]
    values = [base.get("position"), *itertools.chain(*searched)]
    schemes = [name for value in values for name in list_positions(value, None)]
    plugins = base.get("plugins") or []
    modules = [plugins] if isinstance(plugins, str) else plugins
    return list(dict.fromkeys([*modules, *find_modules(model, schemes)]))


def resumed_settings(
    folder: SearchFolder, args: SearchArguments, config: dict[str, Any], **others: Any
) -> Settings:
    """Return the settings of a search to resume, with the changes that are allowed.

    Args:
        folder: folder of the search.
        args: arguments of the call.
        config: options of the configuration that the call gives.
        others: further arguments by name, which must be empty.

    Raises:
        UsageError: for an argument that may not change, or a folder without a search.
    """
    allowed = ("address", *RESUMED)
    unseen = ("resume", "verbose", "scheduler")
    refused = [name for name in changed_settings(args) if name not in (*allowed, *unseen)]
    refused += ["scheduler"] if args.scheduler == "none" else []
    refused += [name for name, value in others.items() if value]
    refused += [name for name in config if name not in PLACES]
    if refused:
        raise UsageError(
            "--resume takes everything from its folder but "
            f"{', '.join(f'--{name}' for name in (*allowed, *PLACES))}; leave out "
            f"{', '.join(map(shown, refused))}"
        )
    kept = folder.read()
    if (kept.scheduler in SCHEDULERS) != isinstance(args.scheduler, str):
        raise UsageError(
            f"--resume: the scheduler of this search is {shown(kept.scheduler)}; an object of "
            "Ray's must be given again, recbole_pos.search(resume=..., scheduler=...), and no other"
        )
    changes = {**_given(args), "base": {**kept.base, **config}}
    if args.storage is not None:
        name = (kept.storage or str(folder.path.resolve())).rsplit("/", 1)[-1]
        changes["storage"] = resolve_storage(args.storage, Path(name), make=False)
    settings = _checked(lambda: replace(kept, **changes), args.num_samples)
    settings.base["data_path"] = settings.config().plain["data_path"]
    return settings


class SearchFolder:
    """The folder of one search."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / folders.SEARCH
        self.trials = self.path / "trials.csv"
        self.result = self.path / "tune.json"
        self.test = self.path / "test.json"
        self.record = self.path / "trials.jsonl"
        self.best_yaml = self.path / "best.yaml"
        self.best = self.path / "best"
        self.runs = self.path / "runs"
        self.ray = self.path / "trials"  # where Ray keeps logs of trials

    @classmethod
    def create(cls, path: str | Path | None, settings: Settings) -> SearchFolder:
        """Create the folder of a new search and write its settings.

        Args:
            path: path of the folder; one by dataset, model and time if None.
            settings: settings of the search; their storage becomes the place of this search.

        Raises:
            UsageError: if the folder or the storage holds a search or a run, or cannot be created.
        """
        if path is None:
            path = folders.unused_path(settings.dataset, settings.model, "tune-")
        if settings.storage is not None:
            settings.storage = resolve_storage(settings.storage, Path(path))
            if names_in(settings.storage):
                raise UsageError(
                    f"--storage: {settings.storage} holds a search already, perhaps of another "
                    f"folder of this name; choose another --run_dir or --storage"
                )
        folders.RunFolder.create(path, settings.dataset, settings.model)  # unless one is there
        folder = cls(path)
        folder.write(settings)
        return folder

    def write(self, settings: Settings) -> None:
        """Write the settings, for ``--resume``."""
        folders.make_folder(self.runs)
        write_json(self.settings, asdict(settings))

    def read(self) -> Settings:
        """Return the settings of the search in this folder.

        Raises:
            UsageError: if the file is missing or damaged.
        """
        try:
            content = self.settings.read_bytes()
        except OSError as error:
            raise UsageError(
                f"--resume: {self.path} is not the folder of a search: no {self.settings.name}"
            ) from error
        where = f"--resume: {self.settings} is damaged, or of an earlier version: "
        return _checked(lambda: TypeAdapter(Settings).validate_json(content), None, where)

    def read_record(self, settings: Settings) -> Record:
        """Return the record of the trials so far.

        Raises:
            UsageError: if it cannot be read, has more trials than the settings, or the storage with
                the checkpoints is not there.
        """
        record = Record(self.record)
        if len(record.trials) > settings.num_samples:
            raise UsageError(
                f"--num_samples: this search has {len(record.trials)} trials already; expected at "
                "least as many"
            )
        has_checkpoints = any(trial.curve for trial in record.unfinished)
        if has_checkpoints and settings.storage is not None and not names_in(settings.storage):
            raise UsageError(
                f"--resume: the runs of trials are not at {settings.storage}; give the place where "
                f"{Path(settings.storage).name} is now as --storage"
            )
        return record
