"""A search from beginning to end: check everything, prepare the data once, let Ray run the trials,
evaluate the best one on test data."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune

from recbole_pos.config.arguments import SearchArguments, divide
from recbole_pos.config.plugins import allow, pack
from recbole_pos.conversion.frames import beside
from recbole_pos.data.identity import describe_changes
from recbole_pos.data.location import dataset_name
from recbole_pos.data.targets import describe, describe_warnings
from recbole_pos.errors import StorageError, TrainingError, UsageError
from recbole_pos.experiment.build import Experiment, prepare
from recbole_pos.experiment.folder import RunFolder, versions
from recbole_pos.experiment.state import copy_run, load_best
from recbole_pos.files import only_writer, write_json
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import connect, describe_cluster, room_for, stop
from recbole_pos.runs.progress import live_view
from recbole_pos.runs.searchers import SEARCHERS
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.runs.storage import Mirror
from recbole_pos.runs.worker import FAILED, LOST, MOST_LOSSES, reason
from recbole_pos.tuning.plot import draw
from recbole_pos.tuning.record import (
    BEST,
    ENDED,
    Record,
    Trial,
    find_best_trial,
    write_trials,
)
from recbole_pos.tuning.settings import SearchFolder, Settings, read_settings, resumed_settings
from recbole_pos.tuning.trials import (
    Queue,
    Recorder,
    quiet_tune,
    run_trial,
    show_options,
    trial_folder,
)

REDUCTION = 3  # of ASHA: a third of the trials continues beyond each rung


@dataclass(repr=False)
class Found:
    """The result of a search: its trials, the best trial, and the test of that one only.

    ``recbole_pos.load(found.run_dir)`` is the model of the best trial. ``source`` is the dataset,
    whose temporary files are deleted with this object.
    """

    folder: Path
    trials: list[Trial]
    best: Trial
    test: dict[str, float] | None
    seconds: float
    source: Any = None

    @property
    def run_dir(self) -> Path:
        """The run of the best trial."""
        return self.folder / "best"

    def __repr__(self) -> str:
        valid = f"valid {self.best.score:.4f}" if self.best.score is not None else "no validation"
        test = ", ".join(f"{name} {value:.4f}" for name, value in (self.test or {}).items())
        best = f"{self.best.number} ({valid}): {show_options(self.best.options)}"
        return f"best of {len(self.trials)} trials is {best}\ntest: {test or 'none'}\n{self.folder}"


def search(
    model: str | type | None = None,
    dataset: str | os.PathLike[str] | None = None,
    space: str | Path | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    *,
    settings: SearchArguments | None = None,
    **given: Any,
) -> Found:
    """Search for the best configuration by validation; test it once.

    Examples:
        >>> given = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> found = recbole_pos.search("FPARec", "ml-100k", config_dict=given, num_samples=2)
        >>> sorted(trial.state for trial in found.trials), "ndcg@10" in found.test
        (['finished', 'finished'], True)

    Args:
        model: name or class of the model, as of :func:`recbole_pos.run`.
        dataset: the dataset, as of :func:`recbole_pos.run`.
        space: a yaml, .hyper or .test file; the model's own in ``properties/tune/`` when None.
        config_file_list: configuration of all trials.
        config_dict: options over these files; an option given here is the same in all trials,
            also if the space has it.
        settings: the other arguments together.
        given: options, as in ``config_dict``; or the other arguments by name, see
            :class:`~recbole_pos.config.arguments.SearchArguments`:
            ``num_samples``, how many trials (60; a grid runs all its points); ``max_concurrent``,
            how many at the same time; ``metric``, of validation; ``scheduler``, asha, none, or a
            scheduler object of Ray's; ``grace_epochs`` that ASHA leaves every trial; ``searcher``,
            optuna (TPE), random or grid; ``seed`` of the searcher (that of training is the option
            ``seed``); ``run_dir``; ``storage``, path or URI for the runs of trials, which all
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
    args, options = divide(settings or SearchArguments(), given)
    config_dict = {**(config_dict or {}), **options}
    data, dataset = dataset, dataset_name(dataset)
    if args.run_dir is None and args.resume is None:
        args = replace(args, run_dir=beside(data, f"tune-{time.time_ns()}"))
    allow(config_dict.get("plugins"))
    reporter, began = Reporter(args.verbose), time.perf_counter()
    with ExitStack() as held:
        folder = record = None
        if args.resume is None:
            search = read_settings(model, dataset, space, config_file_list, config_dict, args)
        else:
            folder = SearchFolder(args.resume)
            others = {"model": model, "dataset": dataset, "space": space}
            files = {"config_file_list": config_file_list}
            search = resumed_settings(folder, args, config_dict, **others, **files)
            held.enter_context(only_writer(folder.path, "searched"))
            record = folder.read_record(search)
        experiment = _prepare(search)
        if folder is None or record is None or len(record.ended) < search.total:
            shared = SharedData(experiment.dataset)
            quiet_tune()
            started = connect(args.address)
            try:
                room = room_for(search.resources)
                if folder is None or record is None:
                    folder = SearchFolder.create(args.run_dir, search)
                    held.enter_context(only_writer(folder.path, "searched"))
                    record = Record(folder.record)
                else:
                    folder.write(search)
                _print_head(reporter, search, folder, record, experiment, shared)
                recorder = Recorder(record, search.metric, search.mode, search.total, reporter)
                tuner = _tuner(search, folder, recorder, args.scheduler, shared, room)
                with live_view(reporter, recorder.lines):
                    _fit(tuner, search, folder, record)
            finally:
                stop(started)
        seconds = time.perf_counter() - began
        found = _finish(search, folder, experiment, record.trials, reporter, seconds)
        return replace(found, source=data)


def _prepare(settings: Settings) -> Experiment:
    """Prepare the data, and a model without sampled options, so that wrong input fails now.

    Raises:
        UsageError: if the data of a resumed search have changed, or have no validation targets.
    """
    experiment = prepare(settings.config())
    if changed := describe_changes(settings.identity, experiment.dataset.identity):
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
    recorder: Recorder,
    scheduler: Any,
    shared: SharedData,
    room: int,
) -> tune.Tuner:
    """Return the Ray tuner of the trials that have not ended yet.

    Args:
        settings: settings of the search.
        folder: folder of the search.
        recorder: records and prints what happens.
        scheduler: a scheduler object of Ray's, where the settings name none of ours.
        shared: the data.
        room: number of trials that the cluster can train at the same time.
    """
    bundle = {"CPU": settings.cpus_per_trial, "GPU": settings.gpus_per_trial}
    record = recorder.record
    trainable = tune.with_resources(
        tune.with_parameters(
            run_trial,
            base=settings.options({}),
            resources=settings.resources,
            packed=pack(settings.model),
            data=[ray.put(shared)],  # in a list: a bare reference would be replaced by its data
            runs=str(folder.runs.resolve()),
        ),
        tune.PlacementGroupFactory([bundle] * settings.nproc),
    )
    searcher = SEARCHERS[settings.searcher](settings.space, settings.mode, settings.seed)
    asha = _asha(settings, record.ended) if settings.scheduler == "asha" else None
    return tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            metric=None if asha else BEST,  # ASHA has its own
            mode=None if asha else settings.mode,
            search_alg=Queue(searcher, record.trials, settings.mode, room),
            scheduler=asha or (None if settings.scheduler == "none" else scheduler),
            num_samples=settings.total - len(record.ended),
            max_concurrent_trials=settings.max_concurrent,
            reuse_actors=True,  # a new process imports torch and RecBole first, for seconds
            trial_dirname_creator=trial_folder,
        ),
        run_config=tune.RunConfig(
            name=folder.ray.name,
            storage_path=str(folder.path.resolve()),
            failure_config=tune.FailureConfig(max_failures=MOST_LOSSES),
            callbacks=[recorder],
            verbose=0,
        ),
    )


def _asha(settings: Settings, ended: list[Trial]) -> Any:
    """Return an ASHA scheduler that knows the curves of the trials that ended in earlier calls."""
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
    """Train all trials; if interrupted, write the table of the trials so far.

    Raises:
        KeyboardInterrupt: with the command that resumes the search.
        TrainingError: if the search cannot go on.
    """
    names = settings.space.names
    resume = f"continue with `recbole-pos tune --resume {folder.path}`"
    try:
        tuner.fit()
        if any(trial.state == "interrupted" for trial in record.trials):
            raise KeyboardInterrupt  # Ray has caught it
    except KeyboardInterrupt:
        write_trials(record.trials, names, settings.metric, folder.trials)
        raise KeyboardInterrupt(
            f"interrupted; {folder.trials} has the trials so far; the last checkpoints of trials "
            f"that have not ended are kept; {resume}"
        ) from None
    except Exception as error:  # Ray raises errors of callbacks as text with their stack
        problem = record.failure or (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise TrainingError(f"the search stopped: {problem}; then {resume}") from error


def _print_head(
    reporter: Reporter,
    settings: Settings,
    folder: SearchFolder,
    record: Record,
    experiment: Experiment,
    shared: SharedData,
) -> None:
    """Print the settings of the search, its resources, and facts and warnings about its data."""
    reporter.line(
        f"{settings.model} on {settings.dataset}: {settings.total} trials by {settings.searcher}, "
        f"scheduler {settings.scheduler}, best valid {settings.metric}; searching "
        f"{', '.join(settings.space.names)}; {folder.path}"
    )
    reporter.line(
        f"{describe_cluster(settings.resources)}; data shared by trials: "
        f"{shared.nbytes / 1e6:.1f} MB"
    )
    if record.trials:
        reporter.line(
            f"{len(record.ended)} trials have ended before; {len(record.unfinished)} resume"
        )
    if settings.overruled:
        reporter.line(f"given, so not searched: {', '.join(settings.overruled)}")
    points = settings.space.points()
    if settings.searcher != "grid" and points is not None and points <= settings.total:
        reporter.line(f"the space has {points} combinations; --searcher grid trains each once")
    if split := describe(experiment.dataset.split.summary):
        reporter.line(split)
    for text in describe_warnings(experiment.dataset.split.summary):
        reporter.warning(text)


def _finish(
    settings: Settings,
    folder: SearchFolder,
    experiment: Experiment,
    trials: list[Trial],
    reporter: Reporter,
    seconds: float,
) -> Found:
    """Write the tables and pictures; test the best trial, unless an earlier call did.

    Raises:
        TrainingError: if all trials failed, or some could not be trained.
    """
    write_trials(trials, settings.space.names, settings.metric, folder.trials)
    if lost := [trial for trial in trials if trial.state == LOST]:
        ended = sum(trial.state in ENDED for trial in trials)
        raise TrainingError(
            f"{len(lost)} of {settings.total} trials could not be trained, {ended} have ended; "
            f"trial {lost[0].number}: {lost[0].reason}. Nothing was tested; {folder.trials} has "
            f"the reasons of all; `recbole-pos tune --resume {folder.path}` trains them"
        )
    best = find_best_trial(trials, settings.mode)
    if best is None:
        first = trials[0]
        raise TrainingError(
            f"all {len(trials)} trials failed; the first one: {first.reason} "
            f"({show_options(first.options)}). {folder.trials} has the reasons of all"
        )
    test = _test(settings, folder, experiment, best)
    states = [trial.state for trial in trials]
    content: dict[str, Any] = {
        "search": asdict(settings),
        "trials": len(trials),
        "states": {state: states.count(state) for state in ENDED},
        "seconds": round(seconds, 1),
        "best": {
            "trial": best.number,
            "valid": best.score,
            "best_epoch": best.best_epoch,
            "options": best.options,
        },
        "failures": {trial.number: trial.reason for trial in trials if trial.state == FAILED},
        "versions": {**versions(), "ray": ray.__version__},
    }
    content["search"]["space"] = content["search"]["space"]["parameters"]
    write_json(folder.result, content)
    what = f"{settings.model} on {settings.dataset}"
    pictures = draw(trials, settings.space, settings.metric, settings.mode, what, folder.path)
    reporter.results(
        f"best of {len(trials)} trials is {best.number}: {show_options(best.options)}",
        {"valid": best.best_valid, "test (once)": test["test"]},
    )
    for earlier in test.get("earlier", []):
        reporter.line(
            f"trial {earlier['trial']}, the best before, was tested as well: see {folder.test}"
        )
    for file in (folder.best_yaml, folder.trials, *pictures):
        reporter.line(str(file))
    return Found(folder.path, trials, best, test["test"], seconds)


def _test(
    settings: Settings, folder: SearchFolder, experiment: Experiment, best: Trial
) -> dict[str, Any]:
    """Copy the run of the best trial, for ``plot``, ``inspect`` and ``load``, and test it.

    Nothing else in a search reads test data.

    Returns:
        The content of ``test.json``, with the tests of trials that were the best before.

    Raises:
        StorageError: if the run of the trial cannot be read.
    """
    config, best_run, test = settings.config(best.options), RunFolder(folder.best), folder.tested()
    is_tested = test is not None and test["trial"] == best.number
    if not (is_tested and best_run.checkpoint.is_file()):
        run = RunFolder(folder.runs / best.key)
        try:
            if settings.storage is not None:
                Mirror(run, f"{settings.storage}/{best.key}").fetch()
            copy_run(run, best_run)
        except OSError as error:
            raise StorageError(
                f"{settings.storage or run.path}: the run of trial {best.number}, the best, cannot "
                f"be read: {reason(error)}; give the place where it is now as --storage"
            ) from error
    best_run.write_config(config.plain)
    shutil.copy(best_run.config, folder.best_yaml)
    if test is not None and is_tested:
        return test
    earlier = [*test.pop("earlier", []), test] if test else []
    tested = prepare(config, fresh=False, dataset=experiment.dataset.for_config(config))
    load_best(tested.model, best_run.checkpoint, experiment.dataset.identity)
    metrics = tested.trainer.evaluate(tested.loaders["test"], load_best_model=False)
    test = {"trial": best.number, "model": settings.model, "dataset": settings.dataset}
    test["test"] = None if metrics is None else {name: float(v) for name, v in metrics.items()}
    test |= {"earlier": earlier} if earlier else {}
    write_json(folder.test, test)
    return test
