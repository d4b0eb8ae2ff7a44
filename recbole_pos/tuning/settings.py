"""The checked settings of a search, and the folder that keeps them for ``--resume``."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from recbole_pos.config.arguments import SearchArguments, changed_settings, require_shares
from recbole_pos.config.plugins import find_modules
from recbole_pos.config.posconfig import EXTRA_KEYS, PosConfig, merge_options
from recbole_pos.config.presets import find_parts_by_scheme, list_positions
from recbole_pos.errors import PosError, UsageError
from recbole_pos.experiment import folder as folders
from recbole_pos.files import write_json
from recbole_pos.plain import to_plain
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.searchers import SEARCHERS
from recbole_pos.runs.space import MOST_POINTS, Space
from recbole_pos.runs.space_files import fit_space, read_space, space_file
from recbole_pos.runs.storage import names_in, resolve_storage
from recbole_pos.tuning.record import DAMAGED, Record, adopt
from recbole_pos.values import check_choice, is_whole, shown

SCHEDULERS = ("asha", "none")
SAMPLES = 60  # trials by default, as in the kernel attention paper

# Resources of a trial, which may change when a search is resumed elsewhere, with their defaults.
TAKES: dict[str, Any] = {"cpus_per_trial": 1, "gpus_per_trial": 0, "nproc": 1}
# Arguments that become settings unchanged.
ASKED = ("max_concurrent", "grace_epochs", "searcher", "seed", "storage")
# Arguments allowed with --resume: places of the search and its data, resources, number of trials.
RESUMED = ("resume", "address", "storage", "max_concurrent", *TAKES, "num_samples", "verbose")
PLACES = ("data_path", "plugins")


@dataclass
class Settings:
    """The settings of a search, plain values except for its space.

    Attributes:
        base: options of all trials.
        overruled: options of the space that are not searched, since the user gave a value.
        total: number of trials.
        mode: max or min.
        epochs: most epochs of a trial.
        identity: identity of the data; empty until they are prepared.
    """

    model: str
    dataset: str
    base: dict[str, Any]
    space: Space
    total: Annotated[int, Field(ge=1)]
    max_concurrent: int | None
    metric: str
    mode: Literal["max", "min"]
    scheduler: str
    grace_epochs: int
    searcher: Literal["optuna", "random", "grid"]
    seed: int
    epochs: Annotated[int, Field(ge=1)]
    storage: str | None
    cpus_per_trial: float
    gpus_per_trial: float
    nproc: int
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
    if isinstance(args.scheduler, str):
        check_choice("--scheduler", args.scheduler, SCHEDULERS)
    check_choice("--searcher", args.searcher, tuple(SEARCHERS))
    given = {**(config_dict or {}), **({"valid_metric": args.metric} if args.metric else {})}
    config_of_user = PosConfig(model, dataset, config_file_list, given, strict=False)
    searched = read_space(space_file(space, config_of_user["model"]))
    config_of_user.require_read({*searched.names, *searched.fixed})
    fixed = {**config_of_user.external_config_dict}
    overruled = [name for name in searched.names if name in fixed]
    fixed_by_space = searched.fixed
    searched = searched.without(fixed)
    if "position" in {
        *searched.names,
        *searched.fixed,
    }:  # trials take a file as it is for one position
        for file, content in config_of_user.files:
            if parts := find_parts_by_scheme(content, config_of_user["model"], file):
                raise UsageError(
                    f"{parts[0]}: a search that tries or sets position does not take options of "
                    "one scheme from there; write them into the space, with `when: {position: ..}`"
                )
    if not searched.parameters:
        raise UsageError(f"nothing is left to search: all of {', '.join(overruled)} are given")
    base = to_plain({k: v for k, v in fixed.items() if k not in EXTRA_KEYS})
    for name in ("data_path", "item_vectors"):  # absolute: trials work in folders of their own
        if config_of_user.plain[name] and name not in {*searched.names, *searched.fixed}:
            base[name] = config_of_user.plain[name]
    base = merge_options(fixed_by_space, base)
    if modules := _collect_plugins(searched, config_of_user["model"], base):
        base["plugins"] = modules
    shared = {**base, "model": config_of_user["model"], "dataset": config_of_user["dataset"]}

    def build(drawn: dict[str, Any]) -> PosConfig:
        return PosConfig(None, None, None, {**shared, **drawn}, strict=False)

    config = fit_space(searched, build)
    if config["eval_step"] < 1:
        raise UsageError("eval_step: a search needs validation; expected at least 1")
    settings = Settings(
        model=config_of_user["model"],
        dataset=config_of_user["dataset"],
        base=base,
        space=searched,
        total=args.num_samples or SAMPLES,
        metric=config["valid_metric"].lower(),
        mode="max" if config["valid_metric_bigger"] else "min",
        scheduler=args.scheduler
        if isinstance(args.scheduler, str)
        else type(args.scheduler).__name__,
        epochs=config["epochs"],
        overruled=overruled,
        **{name: getattr(args, name) for name in ASKED},
        **TAKES,
    )
    _set_resources(settings, args)
    _require_numbers(settings, args.num_samples)
    _set_total(settings, args.num_samples)
    return settings


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
    refused = [name for name in changed_settings(args) if name not in (*RESUMED, "scheduler")]
    refused += ["scheduler"] if args.scheduler == "none" else []
    refused += [
        name for name, value in others.items() if value
    ]  # the command line passes empty values
    refused += [name for name in config if name not in PLACES]
    if refused:
        allowed = ", ".join(f"--{name}" for name in (*RESUMED[1:-1], *PLACES))
        raise UsageError(
            f"--resume takes everything from its folder but {allowed}; leave out "
            f"{', '.join(map(shown, refused))}"
        )
    settings = folder.read()
    if (settings.scheduler in SCHEDULERS) != isinstance(args.scheduler, str):
        raise UsageError(
            f"--resume: the scheduler of this search is {shown(settings.scheduler)}; an object of "
            "Ray's must be given again, recbole_pos.search(resume=..., scheduler=...), and no other"
        )
    _set_resources(settings, args)
    _require_numbers(settings, args.num_samples)
    if args.num_samples is not None:
        _set_total(settings, args.num_samples)
    settings.base.update(config)
    if args.storage is not None:
        name = (settings.storage or str(folder.path.resolve())).rsplit("/", 1)[-1]
        settings.storage = resolve_storage(args.storage, Path(name), make=False)
    settings.base["data_path"] = settings.config().plain["data_path"]
    return settings


def _set_resources(settings: Settings, args: SearchArguments) -> None:
    """Set the resources and the number of parallel trials that the arguments give."""
    for name in ("max_concurrent", *TAKES):
        if getattr(args, name) is not None:
            setattr(settings, name, getattr(args, name))


def _set_total(settings: Settings, num_samples: int | None) -> None:
    """Set the number of trials: as given, at most the points of the space, all points of a grid.

    Raises:
        UsageError: for a grid of too many points, or another number of samples than its points.
    """
    settings.total = num_samples or settings.total
    if settings.searcher == "random":
        settings.total = min(settings.total, settings.space.points() or settings.total)
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
        settings.total = points


def _collect_plugins(space: Space, model: str, base: dict[str, Any]) -> list[str]:
    """Return the modules to import for the model and the position schemes of all trials.

    Args:
        space: the searched space, which may search ``position``.
        model: name of the model.
        base: options of all trials; their ``plugins`` come first.
    """
    searched = [option.values for option in space.parameters if option.name == "position"]
    values = [base.get("position"), *itertools.chain(*searched)]
    schemes = [name for value in values for name in list_positions(value, None)]
    plugins = base.get("plugins") or []
    modules = [plugins] if isinstance(plugins, str) else plugins
    return list(dict.fromkeys([*modules, *find_modules(model, schemes)]))


def _require_numbers(settings: Settings, num_samples: int | None) -> None:
    """Raise a UsageError for a number that is not whole, or out of its range."""
    whole = {"num_samples": num_samples, "nproc": settings.nproc}
    for name, value in {**whole, "grace_epochs": settings.grace_epochs}.items():
        if value is not None and not (is_whole(value) and value >= 1):
            raise UsageError(
                f"--{name}: expected a whole number of at least 1, found {shown(value)}"
            )
    if not (is_whole(settings.seed) and settings.seed >= 0):
        raise UsageError(
            f"--seed: expected a whole number of at least 0, found {shown(settings.seed)}"
        )
    require_shares(settings.max_concurrent, settings.cpus_per_trial, settings.gpus_per_trial)


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

    @property
    def begun(self) -> bool:
        """Whether the folder has a search."""
        return self.settings.is_file()

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
        if not str(path):
            raise UsageError("--run_dir: empty; name a folder, or leave it out")
        folder = cls(path)
        try:
            if folder.begun or folder.ray.exists():
                raise UsageError(
                    f"{folder.path} holds a search already; continue it with --resume "
                    f"{folder.path} or choose another --run_dir"
                )
            if any((folder.path / name).exists() for name in ("config.yaml", "result.json")):
                raise UsageError(f"{folder.path} holds a run already; choose another --run_dir")
            if settings.storage is not None:
                settings.storage = resolve_storage(settings.storage, folder.path)
                if names_in(settings.storage):
                    raise UsageError(
                        f"--storage: {settings.storage} holds a search already, of another folder "
                        f"with the name {folder.path.name}; choose another --run_dir or --storage"
                    )
            folder.path.mkdir(parents=True, exist_ok=True)
        except PosError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--run_dir: {reason}: {shown(str(folder.path))}") from error
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
            settings = TypeAdapter(Settings).validate_json(self.settings.read_bytes(), strict=True)
        except OSError as error:
            raise UsageError(
                f"--resume: {self.path} is not the folder of a search: no {self.settings.name}"
            ) from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise UsageError(
                f"--resume: {self.settings} is damaged: {shown(place)}: {first['msg'][:200]}"
            ) from error
        _require_numbers(settings, None)
        return settings

    def read_record(self, settings: Settings) -> Record:
        """Return the record of the trials so far.

        Raises:
            UsageError: if it cannot be read, has more trials than the settings, or the storage with
                the checkpoints is not there.
        """
        record = Record(self.record)
        if not record.trials:
            place = f"{settings.storage or self.path.resolve()}/{self.ray.name}"
            adopt(record, place, self.trials, self.runs)
        if len(record.trials) > settings.total:
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

    def tested(self) -> dict[str, Any] | None:
        """Return the test of an earlier call, or None, so that no trial is tested twice.

        Raises:
            UsageError: if the file is damaged.
        """
        if not self.test.is_file():
            return None
        try:
            content = json.loads(self.test.read_text(encoding="utf-8"))
            return {**content, "trial": int(content["trial"]), "test": content["test"]}
        except DAMAGED as error:
            raise UsageError(f"--resume: {self.test} is damaged: {shown(str(error))}") from error
