"""A search from beginning to end: check everything, prepare the data once, let Ray Tune run the
trials, evaluate the best one on test data."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import yaml
from ray import tune as ray_tune

from recbole_pos.config.arguments import SearchArguments, split_keywords
from recbole_pos.config.plugins import allow
from recbole_pos.conversion.frames import find_folder_beside, warn_if_temporary
from recbole_pos.data.location import read_dataset_name
from recbole_pos.data.targets import describe_split, make_warnings
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.folder import SEARCH, RunFolder, find_unused_path, find_versions
from recbole_pos.experiment.state import copy_run
from recbole_pos.files import lock_folder, write_json, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE
from recbole_pos.runs.cluster import connect, count_concurrent_runs, stop
from recbole_pos.runs.progress import format_options, live_view
from recbole_pos.runs.worker import MOST_LOSSES, QUIET
from recbole_pos.study.configs import digest_data_options, make_row_config
from recbole_pos.study.dispatcher import ActiveRuns
from recbole_pos.study.plan import Plan
from recbole_pos.study.scheduler import Job, Scheduler
from recbole_pos.study.study_folder import StudyFolder
from recbole_pos.tuning.plot import draw_pictures
from recbole_pos.tuning.record import Trial, read_trials, write_trials
from recbole_pos.tuning.search_plan import SearchFacts, check_arguments, extend_plan, plan_search
from recbole_pos.tuning.trials import BEST, TrialSearcher, name_trial_folder, quiet_tune, run_trial
from recbole_pos.values import use_plain_numbers

REDUCTION = 3  # of ASHA: one of three trials continues beyond each rung


@dataclass(repr=False)
class SearchResult:
    """The trials of a search, and the test metrics of the best trial.

    ``recbole_pos.load(result.run_dir)`` is the model of the best trial. ``source`` is the dataset,
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
        best = f"{self.best.number} ({valid}): {format_options(self.best.options)}"
        return f"best of {len(self.trials)} trials is {best}\ntest: {test or 'none'}\n{self.folder}"


def tune(
    model: str | type | None = None,
    dataset: str | os.PathLike[str] | None = None,
    space: str | Path | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    *,
    settings: SearchArguments | None = None,
    **keywords: Any,
) -> SearchResult:
    """Search for the best configuration by validation; test it once.

    Examples:
        >>> options = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> result = recbole_pos.tune("FPARec", "ml-100k", config_dict=options, num_samples=2)
        >>> sorted(trial.state for trial in result.trials), "ndcg@10" in result.test
        (['finished', 'finished'], True)

    Args:
        model: name or class of the model, as of :func:`recbole_pos.run`.
        dataset: the dataset, as of :func:`recbole_pos.run`.
        space: a yaml, .hyper or .test file; the model's own in ``properties/tune/`` when None.
        config_file_list: configuration of all trials.
        config_dict: options over these files; an option given here is the same in all trials,
            also if the space has it.
        settings: the other arguments together.
        keywords: options, as in ``config_dict``; or the other arguments by name, see
            :class:`~recbole_pos.config.arguments.SearchArguments`: ``num_samples``,
            ``max_concurrent``, ``metric``, ``grace_epochs``, ``searcher``, ``run_dir``,
            ``address``, ``cpus_per_trial``, ``gpus_per_trial`` and ``verbose`` mean the same as in
            the command; ``scheduler`` may also be a scheduler object of Ray's; ``seed`` is the
            searcher's; ``resume`` is the folder of a search to continue or, with more
            ``num_samples``, to extend.

    Raises:
        UsageError: if something given is wrong, before any trial starts.
        TrainingError: if every trial failed, or if some could not be trained because a process, a
            machine or the disk failed; then nothing was tested.
        KeyboardInterrupt: if it was interrupted; names the folder to resume.
    """
    began = time.perf_counter()
    args, options = split_keywords(settings or SearchArguments(), keywords)
    args = use_plain_numbers(args)
    config_dict = {**(config_dict or {}), **options}
    allow(config_dict.get("plugins"))
    check_arguments(args)
    reporter = Reporter(args.verbose)
    with ExitStack() as stack:
        name = read_dataset_name(dataset)
        overruled: list[str] = []  # options of the space that are given
        if args.resume is None:
            plan, overruled = plan_search(model, name, space, config_file_list, config_dict, args)
            facts = SearchFacts.from_arguments(args, plan)
            path = _choose_path(plan, args, dataset)
            folder = StudyFolder(path)
        else:
            folder = StudyFolder(args.resume)
            not_allowed: dict[str, Any] = {"model": model, "dataset": name, "space": space}
            not_allowed["config_file_list"] = config_file_list
            plan = extend_plan(folder, args, config_dict, not_allowed)
            facts = SearchFacts.read(folder, args, plan)
            stack.enter_context(lock_folder(folder.path, "searched"))
        scheduler = Scheduler(plan, folder)
        _prepare_data(scheduler)
        job = scheduler.next_job()
        if job is not None:
            _require_same_runs(scheduler, job)
            quiet_tune()
            stack.callback(stop, connect(args.address))
        runs = ActiveRuns(scheduler, args, reporter, set(plan.rows))
        num_slots = count_concurrent_runs(runs.resources) if job else 0
        if args.resume is None:  # only now, so that wrong arguments leave no folder behind
            RunFolder.create(path, plan.dataset, next(iter(plan.rows)))
            if folder.read_plan() is not None:
                raise UsageError(f"{folder.path} holds a study; choose another --run_dir")
            stack.enter_context(lock_folder(folder.path, "searched"))
        folder.write_plan(plan)
        write_json(folder.path / SEARCH, facts.model_dump())
        _print_settings(scheduler, overruled, facts, reporter)
        _train(runs, job, num_slots, facts, args.scheduler)
        _write_table(scheduler)
        best, test = _keep_best(scheduler)
        trials = read_trials(scheduler)
        seconds = time.perf_counter() - began
        result = SearchResult(folder.path, trials, trials[best], test, seconds, dataset)
        _report_result(scheduler, result, reporter)
        return result


def _choose_path(plan: Plan, args: SearchArguments, dataset: Any) -> str | Path:
    """Return the folder of a new search: the given one, beside temporary data, or in saved/."""
    if args.run_dir is not None:
        warn_if_temporary(dataset, args.run_dir)
        return args.run_dir
    path = find_folder_beside(dataset, f"tune-{time.time_ns()}")
    return path or find_unused_path(plan.dataset, next(iter(plan.rows)), "tune-")


def _prepare_data(scheduler: Scheduler) -> None:
    """Prepare the data, and a model without sampled options, so that wrong input fails now."""
    (row,) = scheduler.plan.rows
    config = make_row_config(scheduler.plan.make_first_options(row))
    if config["eval_step"] < 1:
        raise UsageError("eval_step: a search needs validation; expected at least 1")
    experiment = prepare(config)
    if not experiment.loaders["valid"]:
        raise UsageError(
            "tune: this split has no validation targets to choose by; see eval_args, for example "
            "--eval_args='{split: {LS: valid_and_test}}'"
        )
    scheduler.datasets[digest_data_options(config)] = experiment.dataset


def _require_same_runs(scheduler: Scheduler, job: Job) -> None:
    """Refuse to resume a search whose next trial would be another run now, as with other data."""
    earlier_digest = scheduler.earlier.get(job.fit.name, {}).get("run", job.digest)
    if job.fit.trial is not None and earlier_digest != job.digest:
        raise UsageError(
            "--resume: the data, or the code of the model, have changed since the search began; "
            "give the folder that has the data of then as --data_path, or start a new search"
        )


def _train(
    runs: ActiveRuns, job: Job | None, num_slots: int, facts: SearchFacts, scheduler: Any
) -> None:
    """Train the trials from a job on, ``num_slots`` at the same time, and test the best one."""
    try:
        if job is not None and job.fit.trial is not None:
            job = _run_trials(TrialSearcher(runs, job, num_slots), facts, scheduler)
        runs.train(job)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; {_write_table(runs.scheduler)} has the trials so far; the last "
            f"checkpoints of trials that have not ended are kept; {runs.explain_resume('tune')}"
        ) from None


def _run_trials(searcher: TrialSearcher, facts: SearchFacts, scheduler: Any) -> Job | None:
    """Train the trials that have not ended, and return the test of the best."""
    runs = searcher.runs
    tuner = _make_tuner(searcher, facts, scheduler)
    try:
        with live_view(runs.reporter, runs.describe_progress):
            tuner.fit()
    except Exception as error:  # Ray raises errors of callbacks as text with their stack
        problem = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        advice = runs.explain_resume("tune")
        raise TrainingError(f"the search stopped: {problem}; then {advice}") from error
    job = searcher.waiting or runs.scheduler.next_job()
    if runs.running or (job is not None and job.fit.trial is not None):
        raise KeyboardInterrupt  # Ray has caught it and returned early
    ended = read_trials(runs.scheduler)
    if lost := [trial for trial in ended if trial.is_lost]:
        raise TrainingError(
            f"{len(lost)} of {len(ended)} trials could not be trained; trial {lost[0].number}: "
            f"{lost[0].reason}. Nothing was tested; {_write_table(runs.scheduler)} has the reasons "
            f"of all; {runs.explain_resume('tune')}"
        )
    return job


def _make_tuner(searcher: TrialSearcher, facts: SearchFacts, scheduler: Any) -> ray_tune.Tuner:
    """Return Ray's tuner of the trials that have not ended; the scheduler may be one of Ray's."""
    runs = searcher.runs
    config = searcher.first.config
    resources = runs.resources
    trainable = ray_tune.with_resources(
        ray_tune.with_parameters(
            run_trial,
            resources=resources,
            packed=runs.code[config["model"]],
            data=[runs.share(config, includes_test=False)],
        ),
        {"CPU": resources.cpus, "GPU": resources.gpus},
    )
    objective: dict[str, Any] = {"metric": BEST, "mode": searcher.mode}
    if facts.scheduler == "asha":
        scheduler = _make_asha(searcher, facts.grace_epochs)
        objective = {}  # the scheduler has it
    return ray_tune.Tuner(
        trainable,
        tune_config=ray_tune.TuneConfig(
            **objective,
            search_alg=searcher,
            scheduler=None if facts.scheduler == "none" else scheduler,
            num_samples=-1,  # as many as the searcher has
            max_concurrent_trials=runs.args.max_concurrent,
            reuse_actors=True,  # a new process imports torch and RecBole first, for seconds
            trial_dirname_creator=name_trial_folder,
        ),
        run_config=ray_tune.RunConfig(
            name="trials",
            storage_path=str(runs.folder.path.resolve()),
            failure_config=ray_tune.FailureConfig(max_failures=MOST_LOSSES),
            verbose=0,
        ),
    )


def _make_asha(searcher: TrialSearcher, grace_epochs: int) -> Any:
    """Return an ASHA scheduler that knows the curves of the trials that ended in earlier calls."""
    epochs = searcher.first.config["epochs"]
    asha: Any = ray_tune.schedulers.AsyncHyperBandScheduler(
        time_attr="epoch",
        metric=BEST,
        mode=searcher.mode,
        max_t=epochs,
        grace_period=min(grace_epochs, epochs),
        reduction_factor=REDUCTION,
    )
    better = max if searcher.mode == "max" else min
    for trial in read_trials(searcher.runs.scheduler):
        ray_trial = SimpleNamespace(trial_id=f"earlier {trial.number}")
        asha.on_trial_add(None, ray_trial)
        best_so_far = itertools.accumulate(trial.curve.values(), better)
        for epoch, score in zip(trial.curve, best_so_far, strict=True):
            asha.on_trial_result(None, ray_trial, {"epoch": epoch + 1, BEST: score})
    return asha


def _print_settings(
    scheduler: Scheduler, overruled: list[str], facts: SearchFacts, reporter: Reporter
) -> None:
    """Print the settings of the search, and facts and warnings about its data."""
    plan = scheduler.plan
    (row_search,) = scheduler.searches.values()
    settings = plan.source.content["search"]
    reporter.line(
        f"{plan.title}: {settings['trials']} trials by {settings['searcher']}, scheduler "
        f"{facts.scheduler}, best valid {row_search.metric}; searching "
        f"{', '.join(row_search.searched.names)}; {scheduler.folder.path}"
    )
    trials = [fit.name for fit in scheduler.fits if fit.trial is not None]
    num_ended = sum(name in scheduler.status for name in trials)
    if num_ended:
        reporter.line(f"{num_ended} trials have ended before")
    if overruled:
        reporter.line(f"given, so not searched: {', '.join(overruled)}")
    (dataset,) = scheduler.datasets.values()
    if text := describe_split(dataset.split.summary):
        reporter.line(text)
    for text in make_warnings(dataset.split.summary):
        reporter.warning(text)


def _write_table(scheduler: Scheduler) -> Path:
    """Write trials.csv, the table of the trials so far, and return its path."""
    (row_search,) = scheduler.searches.values()
    file = scheduler.folder.path / "trials.csv"
    write_trials(read_trials(scheduler), row_search.searched.names, row_search.metric, file)
    return file


def _keep_best(scheduler: Scheduler) -> tuple[int, dict[str, float] | None]:
    """Write best/, best.yaml and test.json; return the best trial's number and test metrics."""
    folder = scheduler.folder
    final = scheduler.fits[-1]
    (row,) = scheduler.plan.rows
    number = scheduler.find_chosen()[row]
    if scheduler.status[final.name] != DONE or number is None:
        table = folder.path / "trials.csv"
        raise TrainingError(f"{scheduler.reasons[final.name]}. {table} has the reasons of all")
    digest = scheduler.digests[final.name]
    copy_run(folder.run(digest), RunFolder(folder.path / "best"), with_results=True)
    plain = scheduler.configs[digest].plain
    plain = {key: value for key, value in plain.items() if key not in QUIET}
    write_text(folder.path / "best.yaml", yaml.safe_dump(plain, allow_unicode=True))
    test = folder.read_fit(digest).get("test") or None  # there may be no test data
    content = {"trial": number, "model": row, "dataset": scheduler.plan.dataset, "test": test}
    earlier_tests = []  # of trials that were best in earlier calls
    for path in sorted(filter(Path.is_dir, folder.runs.iterdir())):
        facts = folder.read_fit(path.name)  # empty if a process was killed as it made the folder
        is_tested = facts.get("stage") == "final" and facts["status"] == DONE
        if is_tested and facts["digest"] != digest:
            earlier_tests.append({"options": facts["searched"], "test": facts["test"]})
    if earlier_tests:
        content["earlier"] = earlier_tests
    write_json(folder.path / "test.json", content)
    return number, test


def _report_result(scheduler: Scheduler, result: SearchResult, reporter: Reporter) -> None:
    """Write tune.json and the pictures, and print the result."""
    plan, folder = scheduler.plan, result.folder
    trials, best = result.trials, result.best
    (row_search,) = scheduler.searches.values()
    states = [trial.state for trial in trials]
    content: dict[str, Any] = {
        "search": plan.source.content,
        "trials": len(trials),
        "states": {state: states.count(state) for state in ("finished", "stopped", "failed")},
        "seconds": round(result.seconds, 1),
        "best": {
            "trial": best.number,
            "valid": best.score,
            "best_epoch": best.best_epoch,
            "options": best.options,
        },
        "failures": {trial.number: trial.reason for trial in trials if trial.state == "failed"},
        "versions": {**find_versions(), "ray": ray.__version__},
    }
    write_json(folder / "tune.json", content)
    searched, metric, mode = row_search.searched, row_search.metric, row_search.mode
    pictures = draw_pictures(trials, best, searched, metric, mode, plan.title, folder)
    reporter.show_results(
        f"best of {len(trials)} trials is {best.number}: {format_options(best.options)}",
        {"valid": best.best_valid, "test (once)": result.test},
    )
    for file in (folder / "best.yaml", folder / "trials.csv", *pictures):
        reporter.line(str(file))
