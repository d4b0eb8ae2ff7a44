"""A search from beginning to end: check everything, prepare the data once, let Ray run the trials,
evaluate the best one on test data."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune

from recbole_pos.config.arguments import SearchArguments, arguments, changed
from recbole_pos.config.plugins import allow, pack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.identity import changes
from recbole_pos.data.targets import describe, warnings_about
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment import folder as folders
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.state import load_best
from recbole_pos.screen import Screen
from recbole_pos.tune.cluster import connect, describe_cluster, fill, stop
from recbole_pos.tune.data import SharedData
from recbole_pos.tune.outcome import (
    Trial,
    best_of,
    collect,
    write_json,
    write_trials,
)
from recbole_pos.tune.plot import draw
from recbole_pos.tune.progress import Progress, show_options
from recbole_pos.tune.recover import await_state, mend_checkpoints, mend_searcher, require_state
from recbole_pos.tune.searchers import BEST
from recbole_pos.tune.settings import SearchFolder, Settings, read_settings
from recbole_pos.tune.trial import run_trial, trial_config

# How often a trial is taken up again after its process or machine was lost. What a trial raises
# itself is not repeated: it would raise again.
MOST_LOSSES = 3
REDUCTION = 3  # of ASHA: a third of the trials goes on beyond each rung


@dataclass
class Found:
    """What a search found; ``test`` is that of ``best`` alone."""

    folder: Path
    trials: list[Trial]
    best: Trial
    test: dict[str, float] | None
    seconds: float


def search(
    model: str | type | None = None,
    dataset: str | None = None,
    space: str | Path | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    *,
    settings: SearchArguments | None = None,
    **given: Any,
) -> Found:
    """Search for the best configuration by validation; test it once.

    >>> given = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
    >>> found = recbole_pos.search("FPARec", "ml-100k", config_dict=given, num_samples=2)
    >>> sorted(trial.state for trial in found.trials), "ndcg@10" in found.test
    (['finished', 'finished'], True)

    Args:
        model, dataset, config_file_list, config_dict: as of :func:`recbole_pos.run`; options given
            here are the same in all trials, whatever the space says of them.
        space: a yaml, .hyper or .test file; the model's own in ``properties/tune/`` when None.
        settings: the other arguments together.
        given: or by name, see :class:`~recbole_pos.config.arguments.SearchArguments`:
            ``num_samples``, how many trials (60; a grid runs all its points); ``max_concurrent``,
            how many at the same time; ``metric``, of validation; ``scheduler``, asha, none, or a
            scheduler object of Ray's; ``grace_epochs`` that ASHA leaves every trial; ``searcher``,
            optuna (TPE), random or grid; ``seed`` of the searcher (that of training is the option
            ``seed``); ``run_dir``; ``storage``, path or URI for Ray's checkpoints, which all
            machines reach; ``resume``, the folder of an interrupted search, with which only
            ``address`` may be given; ``address`` of a Ray cluster, ``auto`` or HOST:PORT;
            ``cpus_per_trial`` and ``gpus_per_trial``, of which fractions share a GPU; ``nproc``
            processes that train one trial together, each of which takes as much; ``verbose``.

    Raises:
        UsageError: if something given is wrong, before any trial starts.
        TrainingError: if every trial failed.
        KeyboardInterrupt: if it was interrupted; names the folder to resume.
    """
    told = arguments(settings or SearchArguments(), given)
    allow((config_dict or {}).get("plugins"))
    if told.resume is not None:
        _require_nothing_else(told, model, dataset, space, config_file_list, config_dict)
        folder = SearchFolder(told.resume)
        search = folder.read()
    else:
        search = read_settings(model, dataset, space, config_file_list, config_dict, told)
        folder = None
    screen, began = Screen(told.verbose), time.perf_counter()
    with ExitStack() as held:
        if folder is not None:
            held.enter_context(folder.held())
        experiment = _prepare(search)
        shared = SharedData(experiment.dataset)
        started = connect(told.address)
        try:
            fill(search.room())
            if folder is None:
                folder = SearchFolder.create(told.run_dir, search)
                held.enter_context(folder.held())
            _headline(screen, search, folder, experiment, shared)
            tuner = _tuner(search, folder, told.scheduler, shared, told.verbose)
            trials = _fit(tuner, folder, search)
        finally:
            stop(started)
        return _finish(search, folder, experiment, trials, screen, time.perf_counter() - began)


def _require_nothing_else(told: SearchArguments, *what: Any) -> None:
    # the command line gives no files and no configuration as empty ones
    more = [name for name in changed(told) if name not in ("resume", "address", "verbose")]
    names = ("model", "dataset", "space", "config_file_list", "config_dict")
    more += [name for name, value in zip(names, what, strict=True) if value not in (None, [], {})]
    if more:
        raise UsageError(
            f"--resume takes everything from its folder; only --address may change, not "
            f"{', '.join(more)}"
        )


def _prepare(settings: Settings) -> Experiment:
    """The data, and a model of the configuration as it stands, so that wrong input shows now."""
    experiment = prepare(settings.config())
    if not experiment.loaders["valid"]:
        raise UsageError(
            "tune: this split has no validation targets to choose by; see eval_args, for example "
            "--eval_args='{split: {LS: valid_and_test}}'"
        )
    if changed := changes(settings.identity, experiment.dataset.identity):
        raise UsageError(
            f"--resume: {changed} have changed since the search began; start a new one"
        )
    settings.identity = experiment.dataset.identity
    return experiment


def _tuner(
    settings: Settings, folder: SearchFolder, scheduler: Any, shared: SharedData, verbose: bool
) -> tune.Tuner:
    bundle = {"CPU": settings.cpus_per_trial, "GPU": settings.gpus_per_trial}
    trainable = tune.with_resources(
        tune.with_parameters(
            run_trial,
            model=settings.model,
            dataset=settings.dataset,
            base=settings.base,
            resources={"num_cpus": settings.cpus_per_trial, "num_gpus": settings.gpus_per_trial},
            nproc=settings.nproc,
            packed=pack(settings.model),
            data=[ray.put(shared)],  # in a list, Ray passes the reference and not what it refers to
        ),
        tune.PlacementGroupFactory([bundle] * settings.nproc),
    )
    path = folder.ray_path(settings)
    if folder.begun and tune.Tuner.can_restore(path):
        require_state(path)
        mend_checkpoints(path)
        mend_searcher(path, settings.make_searcher())
        return tune.Tuner.restore(path, trainable)
    storage, name = path.rsplit("/", 1)
    return tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            metric=BEST,
            mode=settings.mode,
            search_alg=settings.make_searcher(),
            scheduler=_scheduler(settings, scheduler),
            num_samples=settings.total,
            max_concurrent_trials=settings.max_concurrent,
            reuse_actors=True,  # a new process imports torch and RecBole first, for seconds
            trial_dirname_creator=_folder_name,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=tune.FailureConfig(max_failures=MOST_LOSSES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            callbacks=[Progress(settings.metric, settings.mode, settings.total, verbose)],
            verbose=0,
        ),
    )


def _scheduler(settings: Settings, given: Any) -> Any:
    if settings.scheduler == "asha":
        return tune.schedulers.AsyncHyperBandScheduler(
            time_attr="epoch",
            max_t=settings.epochs,
            grace_period=min(settings.grace_epochs, settings.epochs),
            reduction_factor=REDUCTION,
        )
    return None if settings.scheduler == "none" else given


def _folder_name(trial: Any) -> str:
    return f"trial_{trial.config['number']:05d}"


def _fit(tuner: tune.Tuner, folder: SearchFolder, settings: Settings) -> list[Trial]:
    """All trials, ended; what there is of them is written if they have not."""
    path, names = folder.ray_path(settings), settings.space.names
    so_far = f"{folder.trials} has the trials so far"
    try:
        trials = collect(path, tuner.fit())
    except KeyboardInterrupt:
        try:
            await_state(path)
            write_trials(collect(path), names, settings.metric, folder.trials)
        except Exception as error:  # Ray may have saved nothing yet
            so_far = f"{folder.trials} could not be written ({type(error).__name__}: {error})"
        raise KeyboardInterrupt(_interrupted(folder, so_far)) from None
    if sum(trial.state != "interrupted" for trial in trials) < settings.total:
        write_trials(trials, names, settings.metric, folder.trials)
        raise KeyboardInterrupt(_interrupted(folder, so_far))
    return trials


def _interrupted(folder: SearchFolder, so_far: str) -> str:
    return (
        f"interrupted; {so_far}; the last checkpoints of trials that have not ended are kept; "
        f"continue with `recbole-pos tune --resume {folder.path}`"
    )


def _headline(
    screen: Screen, settings: Settings, folder: SearchFolder, experiment: Experiment, shared: Any
) -> None:
    screen.line(
        f"{settings.model} on {settings.dataset}: {settings.total} trials by {settings.searcher}, "
        f"scheduler {settings.scheduler}, best valid {settings.metric}; searching "
        f"{', '.join(settings.space.names)}; {folder.path}"
    )
    screen.line(
        f"{describe_cluster(settings)}; data shared by trials: {shared.nbytes / 1e6:.1f} MB"
    )
    if settings.overruled:
        screen.line(f"given, so not searched: {', '.join(settings.overruled)}")
    points = settings.space.points()
    if settings.searcher != "grid" and points is not None and points <= settings.total:
        screen.line(f"the space has {points} combinations; --searcher grid trains each once")
    if split := describe(experiment.dataset.split.summary):
        screen.line(split)
    for text in warnings_about(experiment.dataset.split.summary):
        screen.line(f"warning: {text}")


def _finish(
    settings: Settings,
    folder: SearchFolder,
    experiment: Experiment,
    trials: list[Trial],
    screen: Screen,
    seconds: float,
) -> Found:
    """Write the tables and pictures; test the best trial, unless an earlier call did."""
    names = settings.space.names
    write_trials(trials, names, settings.metric, folder.trials)
    best = best_of(trials, settings.mode)
    if best is None:
        first = trials[0]
        raise TrainingError(
            f"all {len(trials)} trials failed; the first one: {first.reason} "
            f"({show_options(first.options)}). {folder.trials} has the reasons of all"
        )
    config = trial_config(settings.model, settings.dataset, settings.base, best.options)
    kept = RunFolder(folder.best)
    _keep(best, kept)
    kept.write_config(config.plain)
    shutil.copy(kept.config, folder.best_yaml)
    test = folder.tested()
    if test is None:
        test = {"test": _test(config, experiment, kept)}
        test = {"trial": best.number, "model": settings.model, "dataset": settings.dataset, **test}
        write_json(test, folder.test)
    states = [trial.state for trial in trials]
    write_json(
        {
            "search": {
                **settings.to_plain(),
                "space": [asdict(p) for p in settings.space.parameters],
            },
            "trials": len(trials),
            "states": {state: states.count(state) for state in ("finished", "stopped", "failed")},
            "seconds": round(seconds, 1),
            "best": {
                "trial": best.number,
                "valid": best.score,
                "best_epoch": best.best_epoch,
                "options": best.options,
            },
            "failures": {trial.number: trial.reason for trial in trials if trial.state == "failed"},
            "versions": {**folders.versions(), "ray": ray.__version__},
        },
        folder.result,
    )
    what = f"{settings.model} on {settings.dataset}"
    pictures = draw(trials, settings.space, settings.metric, settings.mode, what, folder.path)
    screen.results(
        f"best of {len(trials)} trials is {best.number}: {show_options(best.options)}",
        {"valid": (best.result.metrics or {}).get("best_valid"), "test (once)": test["test"]},
    )
    for file in (folder.best_yaml, folder.trials, *pictures):
        screen.line(str(file))
    return Found(folder.path, trials, best, test["test"], seconds)


def _keep(best: Trial, kept: RunFolder) -> None:
    """The best trial's checkpoint as a run folder, for ``plot``, ``inspect`` and ``load``."""
    kept.path.mkdir(exist_ok=True)
    with best.result.checkpoint.as_directory() as saved:
        there = RunFolder(saved)
        shutil.copy(there.metrics, kept.metrics)
        checkpoint.copy(there.checkpoint, kept.checkpoint)


def _test(config: PosConfig, experiment: Experiment, kept: RunFolder) -> dict[str, float] | None:
    """The only reading of test data in a search."""
    tested = prepare(config, fresh=False, dataset=experiment.dataset.for_config(config))
    load_best(tested.model, kept.checkpoint, experiment.dataset.identity)
    result = tested.trainer.evaluate(tested.loaders["test"], load_best_model=False)
    return None if result is None else {name: float(value) for name, value in result.items()}
