"""A search from beginning to end: check everything, prepare the data once, let Ray run the trials,
evaluate the best one on test data."""

from __future__ import annotations

import itertools
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune

from recbole_pos.config.arguments import SearchArguments, arguments
from recbole_pos.config.plugins import allow, pack
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.identity import changes
from recbole_pos.data.targets import describe, warnings_about
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment import folder as folders
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.state import load_best
from recbole_pos.screen import Screen
from recbole_pos.tune.cluster import connect, describe_cluster, fill, stop
from recbole_pos.tune.data import SharedData
from recbole_pos.tune.outcome import ENDED, LOST, Record, Trial, best_of, write_json, write_trials
from recbole_pos.tune.plot import draw
from recbole_pos.tune.progress import Progress, show_options, trial_folder
from recbole_pos.tune.searchers import BEST, SEARCHERS, NumberedSearcher
from recbole_pos.tune.settings import SearchFolder, Settings, read_settings, resumed_settings
from recbole_pos.tune.storage import fetch_checkpoint
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
            machines reach; ``resume``, the folder of an interrupted search, or of a finished one
            that more ``num_samples`` extend, with which only these, ``address``, ``storage``,
            ``max_concurrent``, what a trial takes, and ``data_path`` and ``plugins`` in
            ``config_dict`` may be given; ``address`` of a Ray cluster, ``auto`` or HOST:PORT;
            ``cpus_per_trial`` and ``gpus_per_trial``, of which fractions share a GPU; ``nproc``
            processes that train one trial together, each of which takes as much; ``verbose``.

    Raises:
        UsageError: if something given is wrong, before any trial starts.
        TrainingError: if every trial failed, or if some could not be trained because a process, a
            machine or the storage failed; then nothing was tested.
        KeyboardInterrupt: if it was interrupted; names the folder to resume.
    """
    args = arguments(settings or SearchArguments(), given)
    allow((config_dict or {}).get("plugins"))
    screen, began = Screen(args.verbose), time.perf_counter()
    with ExitStack() as held:
        folder = record = None
        if args.resume is None:
            search = read_settings(model, dataset, space, config_file_list, config_dict, args)
        else:
            folder = SearchFolder(args.resume)
            others = {"model": model, "dataset": dataset, "space": space}
            files = {"config_file_list": config_file_list}
            search = resumed_settings(folder, args, config_dict or {}, **others, **files)
            held.enter_context(folder.held())
            record = folder.read_record(search)
        experiment = _prepare(search)
        if folder is None or record is None or len(record.ended) < search.total:
            shared = SharedData(experiment.dataset)
            started = connect(args.address)
            try:
                fill(search.room())
                if folder is None or record is None:
                    folder = SearchFolder.create(args.run_dir, search)
                    held.enter_context(folder.held())
                    record = Record(folder.record)
                else:
                    folder.write(search)
                _headline(screen, search, folder, record, experiment, shared)
                tuner = _tuner(search, folder, record, args.scheduler, shared, args.verbose)
                _fit(tuner, search, folder, record)
            finally:
                stop(started)
        seconds = time.perf_counter() - began
        return _finish(search, folder, experiment, record.trials, screen, seconds)


def _prepare(settings: Settings) -> Experiment:
    """The data, and a model of the configuration as it stands, so that wrong input shows now."""
    experiment = prepare(settings.config())
    if changed := changes(settings.identity, experiment.dataset.identity):
        raise UsageError(
            f"--resume: {changed} have changed since the search began; give the folder that has "
            "the data of then as --data_path, or start a new search"
        )
    if not experiment.loaders["valid"]:
        raise UsageError(
            "tune: this split has no validation targets to choose by; see eval_args, for example "
            "--eval_args='{split: {LS: valid_and_test}}'"
        )
    settings.identity = experiment.dataset.identity
    return experiment


def _tuner(
    settings: Settings,
    folder: SearchFolder,
    record: Record,
    scheduler: Any,
    shared: SharedData,
    verbose: bool,
) -> tune.Tuner:
    """For the trials that have not ended yet."""
    bundle = {"CPU": settings.cpus_per_trial, "GPU": settings.gpus_per_trial}
    path = folder.ray_path(settings)
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
            place=path,
        ),
        tune.PlacementGroupFactory([bundle] * settings.nproc),
    )
    storage, name = path.rsplit("/", 1)
    asha = _asha(settings, record.ended) if settings.scheduler == "asha" else None
    return tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            metric=None if asha else BEST,  # which ASHA knows already
            mode=None if asha else settings.mode,
            search_alg=_searcher(settings, record.trials),
            scheduler=asha or (None if settings.scheduler == "none" else scheduler),
            num_samples=settings.total - len(record.ended),
            max_concurrent_trials=settings.max_concurrent,
            reuse_actors=True,  # a new process imports torch and RecBole first, for seconds
            trial_dirname_creator=trial_folder,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=tune.FailureConfig(max_failures=MOST_LOSSES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            callbacks=[Progress(record, settings.metric, settings.mode, settings.total, verbose)],
            verbose=0,
        ),
    )


def _searcher(settings: Settings, trials: list[Trial]) -> NumberedSearcher:
    """A searcher that knows what it asked for before, and gives what has not ended again."""
    searcher = SEARCHERS[settings.searcher](settings.space, settings.mode, settings.seed)
    for trial in trials:
        searcher.recall(str(trial.number), trial.options)
    for trial in trials:
        if trial.state in ENDED:
            failed = trial.state == "failed"
            searcher.on_trial_complete(str(trial.number), {BEST: trial.score}, error=failed)
        else:
            config = {"number": trial.number, "options": trial.options, "earlier": trial.folders}
            searcher.waiting.append(config)
    return searcher


def _asha(settings: Settings, ended: list[Trial]) -> Any:
    """ASHA, which compares new trials with how earlier ones stood."""
    asha = tune.schedulers.AsyncHyperBandScheduler(
        time_attr="epoch",
        metric=BEST,
        mode=settings.mode,
        max_t=settings.epochs,
        grace_period=min(settings.grace_epochs, settings.epochs),
        reduction_factor=REDUCTION,
    )
    best = max if settings.mode == "max" else min
    for trial in ended:
        earlier: Any = SimpleNamespace(trial_id=f"earlier {trial.number}")
        asha.on_trial_add(None, earlier)  # type: ignore[arg-type]
        values = itertools.accumulate(trial.curve.values(), best)
        for epoch, value in zip(trial.curve, values, strict=True):
            asha.on_trial_result(None, earlier, {"epoch": epoch, BEST: value})  # type: ignore[arg-type]
    return asha


def _fit(tuner: tune.Tuner, settings: Settings, folder: SearchFolder, record: Record) -> None:
    """Train all trials, or write down what there is of them."""
    names = settings.space.names
    resume = f"continue with `recbole-pos tune --resume {folder.path}`"
    try:
        tuner.fit()
        if sum(trial.state == "interrupted" for trial in record.trials):
            raise KeyboardInterrupt  # which Ray took for itself
    except KeyboardInterrupt:
        write_trials(record.trials, names, settings.metric, folder.trials)
        raise KeyboardInterrupt(
            f"interrupted; {folder.trials} has the trials so far; the last checkpoints of trials "
            f"that have not ended are kept; {resume}"
        ) from None
    except Exception as error:  # Ray has whatever is raised within as text, with its stack
        problem = record.failure or (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise TrainingError(f"the search stopped: {problem}; then {resume}") from error


def _headline(
    screen: Screen,
    settings: Settings,
    folder: SearchFolder,
    record: Record,
    experiment: Experiment,
    shared: SharedData,
) -> None:
    screen.line(
        f"{settings.model} on {settings.dataset}: {settings.total} trials by {settings.searcher}, "
        f"scheduler {settings.scheduler}, best valid {settings.metric}; searching "
        f"{', '.join(settings.space.names)}; {folder.path}"
    )
    screen.line(
        f"{describe_cluster(settings)}; data shared by trials: {shared.nbytes / 1e6:.1f} MB"
    )
    if record.trials:
        screen.line(
            f"{len(record.ended)} trials have ended before; {len(record.unfinished)} resume"
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
    if lost := [trial for trial in trials if trial.state == LOST]:
        ended = sum(trial.state in ENDED for trial in trials)
        raise TrainingError(
            f"{len(lost)} of {settings.total} trials could not be trained, {ended} have ended; "
            f"trial {lost[0].number}: {lost[0].reason}. Nothing was tested; {folder.trials} has "
            f"the reasons of all; `recbole-pos tune --resume {folder.path}` trains them"
        )
    best = best_of(trials, settings.mode)
    if best is None:
        first = trials[0]
        raise TrainingError(
            f"all {len(trials)} trials failed; the first one: {first.reason} "
            f"({show_options(first.options)}). {folder.trials} has the reasons of all"
        )
    config = trial_config(settings.model, settings.dataset, settings.base, best.options)
    kept, test = RunFolder(folder.best), folder.tested()
    if test is None or test["trial"] != best.number or not kept.checkpoint.is_file():
        _keep(best, folder.ray_path(settings), kept)
    kept.write_config(config.plain)
    shutil.copy(kept.config, folder.best_yaml)
    if test is None or test["trial"] != best.number:
        earlier = [*test.pop("earlier", []), test] if test else []
        test = {"trial": best.number, "model": settings.model, "dataset": settings.dataset}
        test["test"] = _test(config, experiment, kept)
        test |= {"earlier": earlier} if earlier else {}
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
        {"valid": best.best_valid, "test (once)": test["test"]},
    )
    for one in test.get("earlier", []):
        screen.line(f"trial {one['trial']}, the best before, was tested as well: see {folder.test}")
    for file in (folder.best_yaml, folder.trials, *pictures):
        screen.line(str(file))
    return Found(folder.path, trials, best, test["test"], seconds)


def _keep(best: Trial, place: str, kept: RunFolder) -> None:
    """The best trial's checkpoint as a run folder, for ``plot``, ``inspect`` and ``load``."""
    kept.path.mkdir(exist_ok=True)
    if not fetch_checkpoint(place, best.folders, kept):
        raise UsageError(
            f"{place} has no whole checkpoint of trial {best.number}, the best; give the place "
            f"where {Path(place).parent.name}/{Path(place).name} is now as --storage"
        )


def _test(config: PosConfig, experiment: Experiment, kept: RunFolder) -> dict[str, float] | None:
    """The only reading of test data in a search."""
    tested = prepare(config, fresh=False, dataset=experiment.dataset.for_config(config))
    load_best(tested.model, kept.checkpoint, experiment.dataset.identity)
    result = tested.trainer.evaluate(tested.loaders["test"], load_best_model=False)
    return None if result is None else {name: float(value) for name, value in result.items()}
