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

from recbole_pos.config.arguments import SearchArguments, split_keywords
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
from recbole_pos.runs.shared_data import SharedData
from recbole_pos.runs.storage import Mirror
from recbole_pos.runs.worker import FAILED, LOST, MOST_LOSSES, reason
from recbole_pos.tuning.plot import draw
from recbole_pos.tuning.record import ENDED, Record, Trial, find_best_trial, write_trials
from recbole_pos.tuning.settings import SearchFolder, Settings, read_settings, resumed_settings
from recbole_pos.tuning.trials import (
    BEST,
    Trials,
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
            :class:`~recbole_pos.config.arguments.SearchArguments`: ``num_samples``,
            ``max_concurrent``, ``metric``, ``grace_epochs``, ``searcher``, ``run_dir``,
            ``storage``, ``address``, ``cpus_per_trial``, ``gpus_per_trial``, ``nproc`` and
            ``verbose`` are those of the command; ``scheduler`` may also be a scheduler object of
            Ray's; ``seed`` is that of the searcher; ``resume`` names the folder of a search to
            continue, or with more ``num_samples`` to extend.

    Raises:
        UsageError: if something given is wrong, before any trial starts.
        TrainingError: if every trial failed, or if some could not be trained because a process, a
            machine or the storage failed; then nothing was tested.
        KeyboardInterrupt: if it was interrupted; names the folder to resume.
    """
    args, options = split_keywords(settings or SearchArguments(), given)
    config_dict = {**(config_dict or {}), **options}
    data, dataset = dataset, dataset_name(dataset)
    if args.run_dir is None and args.resume is None:
        args = replace(args, run_dir=beside(data, f"tune-{time.time_ns()}"))
    allow(config_dict.get("plugins"))
    reporter, began = Reporter(args.verbose), time.perf_counter()
    with ExitStack() as held:
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
        if args.resume is None or len(record.ended) < search.num_samples:
            quiet_tune()
            started = connect(args.address)
            try:
                room = room_for(search.resources)
                if args.resume is None:  # nothing is left behind by wrong arguments
                    folder = SearchFolder.create(args.run_dir, search)
                    held.enter_context(only_writer(folder.path, "searched"))
                    record = Record(folder.record)
                else:
                    folder.write(search)
                trials = Trials(record, search, reporter, room)
                _train(trials, folder, experiment, args.scheduler)
            finally:
                stop(started)
        best = _find_best(search, folder, record)
        _test(search, folder, experiment, record, best)
        found = Found(
            folder.path, record.trials, best, best.test or None, time.perf_counter() - began, data
        )
        _report(search, folder, found, reporter)
        return found


def _prepare(settings: Settings) -> Experiment:
    """Prepare the data, and a model without sampled options, so that wrong input fails now."""
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


def _train(trials: Trials, folder: SearchFolder, experiment: Experiment, scheduler: Any) -> None:
    """Train all trials that have not ended; if interrupted, write the table of those so far.

    ``scheduler`` is a scheduler object of Ray's, where the settings name none of ours.
    """
    record, settings = trials.record, trials.settings
    shared = SharedData(experiment.dataset)
    _print_head(trials, folder, experiment, shared)
    tuner = _tuner(trials, folder, shared, scheduler)
    resume = f"continue with `recbole-pos tune --resume {folder.path}`"
    try:
        with live_view(trials.reporter, trials.lines):
            tuner.fit()
        if any(trial.state == "interrupted" for trial in record.trials):
            raise KeyboardInterrupt  # Ray has caught it
    except KeyboardInterrupt:
        write_trials(record.trials, settings.space.names, settings.metric, folder.trials)
        raise KeyboardInterrupt(
            f"interrupted; {folder.trials} has the trials so far; the last checkpoints of trials "
            f"that have not ended are kept; {resume}"
        ) from None
    except Exception as error:  # Ray raises errors of callbacks as text with their stack
        problem = record.failure or (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise TrainingError(f"the search stopped: {problem}; then {resume}") from error


def _tuner(trials: Trials, folder: SearchFolder, shared: SharedData, scheduler: Any) -> tune.Tuner:
    """Return the Ray tuner of the trials that have not ended."""
    record, settings = trials.record, trials.settings
    bundle = {"CPU": settings.cpus_per_trial, "GPU": settings.gpus_per_trial}
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
    schedulers = {"asha": _asha(settings, record.ended), "none": None}
    has_metric = settings.scheduler == "asha"
    return tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            metric=None if has_metric else BEST,
            mode=None if has_metric else settings.mode,
            search_alg=trials,
            scheduler=schedulers.get(settings.scheduler, scheduler),
            num_samples=settings.num_samples - len(record.ended),
            max_concurrent_trials=settings.max_concurrent,
            reuse_actors=True,  # a new process imports torch and RecBole first, for seconds
            trial_dirname_creator=trial_folder,
        ),
        run_config=tune.RunConfig(
            name=folder.ray.name,
            storage_path=str(folder.path.resolve()),
            failure_config=tune.FailureConfig(max_failures=MOST_LOSSES),
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


def _print_head(
    trials: Trials, folder: SearchFolder, experiment: Experiment, shared: SharedData
) -> None:
    """Print the settings of the search, its resources, and facts and warnings about its data."""
    record, settings, reporter = trials.record, trials.settings, trials.reporter
    split = experiment.dataset.split.summary
    reporter.line(
        f"{settings.model} on {settings.dataset}: {settings.num_samples} trials by "
        f"{settings.searcher}, scheduler {settings.scheduler}, best valid {settings.metric}; "
        f"searching {', '.join(settings.space.names)}; {folder.path}"
    )
    size = f"data shared by trials: {shared.nbytes / 1e6:.1f} MB"
    reporter.line(f"{describe_cluster(settings.resources)}; {size}")
    if record.trials:
        ended = len(record.ended)
        reporter.line(f"{ended} trials have ended before; {len(record.unfinished)} resume")
    if settings.overruled:
        reporter.line(f"given, so not searched: {', '.join(settings.overruled)}")
    if text := describe(split):
        reporter.line(text)
    for text in describe_warnings(split):
        reporter.warning(text)


def _find_best(settings: Settings, folder: SearchFolder, record: Record) -> Trial:
    """Write the table of all trials and return the best, if all could be trained."""
    trials = record.trials
    write_trials(trials, settings.space.names, settings.metric, folder.trials)
    if lost := [trial for trial in trials if trial.state == LOST]:
        raise TrainingError(
            f"{len(lost)} of {settings.num_samples} trials could not be trained, "
            f"{len(record.ended)} have ended; trial {lost[0].number}: {lost[0].reason}. Nothing "
            f"was tested; {folder.trials} has the reasons of all; "
            f"`recbole-pos tune --resume {folder.path}` trains them"
        )
    best = find_best_trial(trials, settings.mode)
    if best is None:
        raise TrainingError(
            f"all {len(trials)} trials failed; the first one: {trials[0].reason} "
            f"({show_options(trials[0].options)}). {folder.trials} has the reasons of all"
        )
    return best


def _test(
    settings: Settings, folder: SearchFolder, experiment: Experiment, record: Record, best: Trial
) -> None:
    """Copy the run of the best trial, for ``plot``, ``inspect`` and ``load``, and test it once.

    Nothing else in a search reads test data.
    """
    config, best_run = settings.config(best.options), RunFolder(folder.best)
    if best.test is None or not best_run.checkpoint.is_file():
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
    if best.test is None:
        dataset = experiment.dataset.for_config(config)
        tested = prepare(config, fresh=False, dataset=dataset)
        load_best(tested.model, best_run.checkpoint, experiment.dataset.identity)
        metrics = tested.trainer.evaluate(tested.loaders["test"], load_best_model=False) or {}
        test = {name: float(value) for name, value in metrics.items()}
        record.add(best.number, test=test)
    about = {"model": settings.model, "dataset": settings.dataset}
    tests = {t.number: {"trial": t.number, **about, "test": t.test or None} for t in record.trials}
    earlier = [tests[t.number] for t in record.trials if t.test is not None and t is not best]
    write_json(folder.test, {**tests[best.number], **({"earlier": earlier} if earlier else {})})


def _report(settings: Settings, folder: SearchFolder, found: Found, reporter: Reporter) -> None:
    """Write tune.json and the pictures, and print the result."""
    trials, best = found.trials, found.best
    states: list[str] = [trial.state for trial in trials]
    content: dict[str, Any] = {
        "search": asdict(settings),
        "trials": len(trials),
        "states": {state: states.count(state) for state in ENDED},
        "seconds": round(found.seconds, 1),
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
        {"valid": best.best_valid, "test (once)": found.test},
    )
    for trial in trials:
        if trial.test is not None and trial is not best:
            reporter.line(f"trial {trial.number}, a best before, was tested too: {folder.test}")
    for file in (folder.best_yaml, folder.trials, *pictures):
        reporter.line(str(file))
