"""Everything that defines a search, checked, and the folder that keeps it for ``--resume``."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import ray

from recbole_pos.config.arguments import SearchArguments, require_shares
from recbole_pos.config.plugins import modules_of
from recbole_pos.config.posconfig import EXTRA_KEYS, PosConfig, merge_options
from recbole_pos.config.presets import parts_by_scheme, positions
from recbole_pos.errors import UsageError
from recbole_pos.experiment import folder as folders
from recbole_pos.files import only_writer
from recbole_pos.plain import to_plain
from recbole_pos.tune.check import check_fixed, check_space
from recbole_pos.tune.files import read_space, space_file
from recbole_pos.tune.outcome import write_json
from recbole_pos.tune.searchers import SEARCHERS
from recbole_pos.tune.space import Space
from recbole_pos.tune.storage import is_taken, place_of
from recbole_pos.tune.trial import trial_config
from recbole_pos.values import suggest

SCHEDULERS = ("asha", "none")
SAMPLES = 60  # as the kernel attention paper
_RAY = "trials"  # name of Ray's folder


# What a search keeps of its arguments as it is.
ASKED = (
    *("max_concurrent", "grace_epochs", "searcher", "seed", "storage", "nproc"),
    *("cpus_per_trial", "gpus_per_trial"),
)


@dataclass
class Settings:
    """A search, as plain values but for its space.

    Attributes:
        base: options that are the same in all trials.
        overruled: searched options that the command line gives a value instead.
        total: number of trials.
        mode: max or min.
        epochs: most epochs of a trial.
        identity: of the data, once prepared; empty before.
    """

    model: str
    dataset: str
    base: dict[str, Any]
    space: Space
    total: int
    max_concurrent: int | None
    metric: str
    mode: str
    scheduler: str
    grace_epochs: int
    searcher: str
    seed: int
    epochs: int
    storage: str | None
    cpus_per_trial: float
    gpus_per_trial: float
    nproc: int
    overruled: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)

    def config(self, options: dict[str, Any] | None = None) -> PosConfig:
        """The configuration, with options of a trial."""
        return trial_config(self.model, self.dataset, self.base, options or {})

    def make_searcher(self) -> Any:
        """A new searcher."""
        return SEARCHERS[self.searcher](self.space, self.mode, self.seed)

    def room(self) -> int:
        """How many trials the machines of the cluster can run side by side.

        Raises:
            UsageError: if none of them can ever run one; Ray would wait for a machine that can.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        takes = {"CPU": self.cpus_per_trial, "GPU": self.gpus_per_trial}
        for key, wanted in takes.items():
            most = max((node.get(key, 0) for node in nodes), default=0)
            if wanted > most:
                raise UsageError(
                    f"--{key.lower()}s_per_trial: {wanted:g} is more than the {most:g} {key}s of "
                    "any machine in the cluster"
                )
        processes = sum(
            min(int(node.get(key, 0) / wanted + 1e-9) for key, wanted in takes.items() if wanted)
            for node in nodes
        )
        if processes < self.nproc:
            raise UsageError(
                f"--nproc: a trial of {self.nproc} processes does not fit: there is room for "
                f"{processes}"
            )
        return processes // self.nproc

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a file."""
        return {**asdict(self), "space": self.space.to_plain()}


def read_settings(
    model: str | type | None,
    dataset: str | None,
    space: str | Path | None,
    config_file_list: list[str] | None,
    config_dict: dict[str, Any] | None,
    told: SearchArguments,
) -> Settings:
    """Settings of what a user gave.

    Raises:
        UsageError: naming the option, or the file and line, that is wrong.
    """
    for name, value, known in (
        ("scheduler", told.scheduler, SCHEDULERS),
        ("searcher", told.searcher, SEARCHERS),
    ):
        if isinstance(value, str) and value not in known:
            raise UsageError(
                f"--{name}: {value!r} is not one of {', '.join(known)}{suggest(value, known)}"
            )
    given = {**(config_dict or {}), **({"valid_metric": told.metric} if told.metric else {})}
    first = PosConfig(model, dataset, config_file_list, given, strict=False)
    found = read_space(space_file(space, first["model"]))
    first.require_read({*found.names, *found.fixed})
    fixed = {**first.external_config_dict}
    overruled = [name for name in found.names if name in fixed]
    of_space = found.fixed
    found = found.without(fixed)
    if "position" in {*found.names, *found.fixed}:  # trials take a file as it is for one position
        for file, content in first.files:
            if parts := parts_by_scheme(content, first["model"], file):
                raise UsageError(
                    f"{parts[0]}: a search that tries or sets position does not take options of "
                    "one scheme from there; write them into the space, with `when: {position: ..}`"
                )
    if not found.parameters:
        raise UsageError(f"nothing is left to search: all of {', '.join(overruled)} are given")
    base = to_plain({k: v for k, v in fixed.items() if k not in EXTRA_KEYS})
    base["data_path"] = first.plain["data_path"]  # absolute: trials work in folders of their own
    base = merge_options(of_space, base)
    if modules := _plugins(found, first["model"], base):
        base["plugins"] = modules
    build = functools.partial(trial_config, first["model"], first["dataset"], base)
    config = check_fixed(found, build)
    found.context = config.plain
    check_space(found, build)
    if config["eval_step"] < 1:
        raise UsageError("eval_step: a search needs validation; expected at least 1")
    found.context = {k: v for k, v in config.plain.items() if _is_named(found, k)}
    settings = Settings(
        model=first["model"],
        dataset=first["dataset"],
        base=base,
        space=found,
        total=told.num_samples or SAMPLES,
        metric=config["valid_metric"].lower(),
        mode="max" if config["valid_metric_bigger"] else "min",
        scheduler=told.scheduler
        if isinstance(told.scheduler, str)
        else type(told.scheduler).__name__,
        epochs=config["epochs"],
        overruled=overruled,
        **{name: getattr(told, name) for name in ASKED},
    )
    _require_numbers(settings, told.num_samples)
    if told.searcher == "random":
        settings.total = min(settings.total, found.points() or settings.total)
    if told.searcher == "grid":
        points = len(found.grid())
        if told.num_samples not in (None, points):
            raise UsageError(
                f"--num_samples: the grid has {points} points and all are run; leave it out, or "
                "use --searcher random"
            )
        settings.total = points
    return settings


def _plugins(space: Space, model: str, base: dict[str, Any]) -> list[str]:
    """Modules that must be imported to know the model and any scheme of any trial."""
    searched = [p.values for p in space.parameters if p.name == "position"]
    values = [base.get("position"), *itertools.chain(*searched)]
    schemes = [name for value in values for name in positions(value, None)]
    given = base.get("plugins") or []
    given = [given] if isinstance(given, str) else given
    return list(dict.fromkeys([*given, *modules_of(model, schemes)]))


def _is_named(space: Space, key: str) -> bool:
    return any(key in parameter.when for parameter in space.parameters)


def _require_numbers(settings: Settings, num_samples: int | None) -> None:
    whole = {"num_samples": num_samples, "nproc": settings.nproc}
    for name, value in {**whole, "grace_epochs": settings.grace_epochs}.items():
        if value is not None and (isinstance(value, bool) or value < 1):
            raise UsageError(f"--{name}: expected a whole number of at least 1, found {value}")
    require_shares(settings.max_concurrent, settings.cpus_per_trial, settings.gpus_per_trial)


class SearchFolder:
    """The folder of one search."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / folders.SEARCH
        self.trials = self.path / "trials.csv"
        self.result = self.path / "tune.json"
        self.test = self.path / "test.json"
        self.best_yaml = self.path / "best.yaml"
        self.best = self.path / "best"
        self.begun = self.settings.is_file()  # by an earlier call

    @classmethod
    def create(cls, path: str | Path | None, settings: Settings) -> SearchFolder:
        """A new folder with the settings in it.

        Raises:
            UsageError: if it holds a search already.
        """
        if path is None:
            path = folders.unused_path(settings.dataset, settings.model, "tune-")
        folder = cls(path)
        if folder.begun or (folder.path / _RAY).exists():
            raise UsageError(
                f"{folder.path} holds a search already; continue it with --resume {folder.path} "
                "or choose another --run_dir"
            )
        if any((folder.path / name).exists() for name in ("config.yaml", "result.json")):
            raise UsageError(f"{folder.path} holds a run already; choose another --run_dir")
        folders.make_folder(folder.path)
        if settings.storage:
            settings.storage = place_of(settings.storage, folder.path)
            if is_taken(f"{settings.storage}/{_RAY}"):
                raise UsageError(
                    f"--storage: {settings.storage} holds a search already, of another folder with "
                    f"the name {folder.path.name}; choose another --run_dir or --storage"
                )
        write_json(settings.to_plain(), folder.settings)
        return folder

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this process searches here; the system lets go of it however the process ends.

        Raises:
            UsageError: if another process does.
        """
        with only_writer(self.path, "searched"):
            yield

    def read(self) -> Settings:
        """The settings of the search in this folder.

        Raises:
            UsageError: if there are none.
        """
        try:
            plain = json.loads(self.settings.read_text(encoding="utf-8"))
            known = {f.name for f in fields(Settings)}
            plain = {key: value for key, value in plain.items() if key in known}
            return Settings(**{**plain, "space": Space.from_plain(plain["space"])})
        except OSError as error:
            raise UsageError(
                f"--resume: {self.path} is not the folder of a search: no {self.settings.name}"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"--resume: {self.settings} is damaged: {error}") from error

    def ray_path(self, settings: Settings) -> str:
        """Where Ray keeps trials, their checkpoints and the state of the search."""
        return f"{settings.storage or self.path.resolve()}/{_RAY}"

    def tested(self) -> dict[str, Any] | None:
        """What an earlier call found on test data; it is not read twice."""
        return json.loads(self.test.read_text()) if self.test.is_file() else None
