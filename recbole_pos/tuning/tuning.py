"""A search from beginning to end, the command ``recbole-pos tune``: :func:`tune`.

It checks everything, prepares the data once, lets Ray Tune run the trials, and evaluates the best
one on test data. It returns a :class:`SearchResult`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import tune as ray_tune
from ray.tune.schedulers import ASHAScheduler

from recbole_pos.config.arguments import SearchArguments, split_keywords
from recbole_pos.config.plugins import allow_plugins, pack
from recbole_pos.config.posconfig import PLUGINS
from recbole_pos.conversion.convert import find_folder_beside
from recbole_pos.data.loading import read_dataset_name
from recbole_pos.data.protocol import describe_split, make_warnings
from recbole_pos.errors import TrainingError, UsageError, make_resume_command
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.folder import (
    SEARCH,
    RunFolder,
    copy_run,
    find_unused_path,
    make_folder,
    read_result,
)
from recbole_pos.files import lock_folder, write_json, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE
from recbole_pos.runs.cluster import connect, list_machines, start_run, stop
from recbole_pos.runs.training_runs import (
    MOST_LOSSES,
    QUIET,
    Resources,
    SharedData,
    choose_resources,
    count_runs,
)
from recbole_pos.study.rendered_table import format_options
from recbole_pos.tuning.search_plan import Search, plan_search, resume_search
from recbole_pos.tuning.trials import (
    BEST,
    LOST,
    Trial,
    TrialSearch,
    TrialTable,
    quiet_tune,
    run_trial,
)


@dataclass(repr=False)
class SearchResult:
    """The trials of a search, and the test metrics of the best trial.

    ``recbole_pos.load(result.run_dir)`` is the model of the best trial.

    Attributes:
        folder: folder of the search.
        trials: all trials, by number.
        best: the trial with the best validation value.
        test: test metrics of the best trial by name; None if there is no test data.
        source: the dataset that ``tune`` was called with. It is held because its temporary files
            are deleted together with this object.
    """

    folder: Path
    trials: list[Trial]
    best: Trial
    test: dict[str, float] | None
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
    space: str | Path | Mapping[str, Any] | None = None,
    config_file_list: list[str] | None = None,
    config_dict: dict[str, Any] | None = None,
    *,
    settings: SearchArguments | None = None,
    **keywords: Any,
) -> SearchResult:
    """Search for the best configuration by validation; test it once.

    Trials, each with other values of the searched options, are trained at the same time by Ray
    Tune, without the test data. The best one by validation is then tested.

    Examples:
        >>> options = {"epochs": 1, "MAX_ITEM_LIST_LENGTH": 20}
        >>> result = recbole_pos.tune("FPARec", "ml-100k", config_dict=options, num_samples=2)
        >>> sorted(trial.state for trial in result.trials), "ndcg@10" in result.test
        (['finished', 'finished'], True)

    Args:
        model: name or class of the model, as of :func:`recbole_pos.run`.
        dataset: the dataset, as of :func:`recbole_pos.run`.
        space: a yaml file, or the mapping in it, such as ``{"n_layers": {"choice": [1, 2]}}``; the
            model's own in ``properties/tune/`` when None.
        config_file_list: configuration of all trials.
        config_dict: options over these files; an option given here is the same in all trials,
            also if the space has it.
        settings: the other arguments together.
        keywords: options, as in ``config_dict``; or the other arguments by name, see
            :class:`~recbole_pos.config.arguments.SearchArguments`: ``num_samples``,
            ``max_concurrent``, ``grace_epochs``, ``searcher``, ``run_dir``,
            ``address``, ``cpus_per_trial``, ``gpus_per_trial`` and ``verbose`` mean the same as in
            the command, as do ``scheduler`` (asha or none) and ``seed``, of the searcher;
            ``resume`` is the folder of a search to continue or, with more ``num_samples``, to
            extend.

    Raises:
        UsageError: if something given is wrong, before any trial starts.
        TrainingError: if every trial failed, or if some could not be trained because a process, a
            machine or the disk failed; then nothing was tested.
        KeyboardInterrupt: if it was interrupted; names the folder to resume.
    """
    args, options = split_keywords(settings or SearchArguments(), keywords)
    config_dict = {**(config_dict or {}), **options}
    allow_plugins(config_dict.get("plugins"))
    reporter = Reporter(args.verbose)
    with ExitStack() as stack:  # unlocks the folder and leaves the cluster in the end
        # A new search (space and options of all trials), or that of the folder to resume. The lock
        # refuses a second call in the same folder.
        name = read_dataset_name(dataset)
        if args.resume is None:
            search = plan_search(model, name, space, config_file_list, config_dict, args)
            # A temporary dataset has the folder beside its files, any other a new one in saved/.
            folder_beside = find_folder_beside(dataset, f"tune-{time.time_ns()}")
            unused = find_unused_path(search.config["dataset"], search.config["model"], "tune-")
            folder = Path(args.run_dir or folder_beside or unused)
        else:
            folder = Path(args.resume)
            subject: dict[str, Any] = {"model": model, "dataset": name, "space": space}
            subject["config_file_list"] = config_file_list
            search = resume_search(folder, args, config_dict, subject)
            stack.enter_context(lock_folder(folder, "searched"))

        # Read the data, and the trials of earlier calls.
        data = _prepare_data(search)  # refuses data without validation, or other data than before
        table = TrialTable(folder, search)

        # Connect to Ray, and leave it in the end. Find out what resources a trial has.
        quiet_tune()
        stack.callback(stop, connect(args.address))
        uses_gpu = search.config["use_gpu"]
        cpus, gpus = args.cpus_per_trial, args.gpus_per_trial
        resources = choose_resources(list_machines(), cpus, gpus, uses_gpu)
        runs = _Runs(search, table, data, args, resources)

        # Make the folder only now, so that wrong arguments leave no folder behind. SEARCH is the
        # name of the file of the facts, by which ``resume`` knows the folder of a search.
        if args.resume is None:
            RunFolder.create(folder, search.config["dataset"], search.config["model"])
            stack.enter_context(lock_folder(folder, "searched"))
        write_json(folder / SEARCH, asdict(search.facts))
        _print_settings(runs, reporter)

        # Train the trials, and test the best one.
        try:
            runs.train(reporter)
            best, tested = runs.test_best()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; {table.file} has the trials so far; the last checkpoints of trials "
                f"that have not ended are kept; {runs.advice}"
            ) from None

        # Write the files of the search, and print the results.
        test = _keep_best(runs, best, tested)
        reporter.show_results(
            f"best of {len(table.trials)} trials is {best.number}: {format_options(best.options)}",
            {"valid": read_result(tested).best_valid, "test (once)": test},
        )
        for file in (folder / "best.yaml", table.file):
            reporter.line(str(file))
        return SearchResult(folder, table.trials, best, test, dataset)


def _prepare_data(search: Search) -> Any:
    """Read the dataset of a search, and check that trials can be trained and validated on it.

    A model without sampled options is built as well, so that its errors come before the first
    trial.

    Args:
        search: the search. The hash of its inputs is noted in it.

    Returns:
        The dataset with its split.

    Raises:
        UsageError: if there is no validation to choose the best trial by.
    """
    # It reads and splits the data, and builds the model of the configuration without sampled
    # options. ``loaders`` has under "valid" what is validated on, if the split has that.
    experiment = prepare(search.config)
    if not experiment.loaders["valid"]:
        raise UsageError(
            "tune: this split has no validation targets to choose by; see eval_args, for example "
            "--eval_args='{split: {LS: valid_and_test}}'"
        )
    search.note_inputs(experiment.dataset.identity)  # a UsageError if a resumed search had others
    return experiment.dataset


@dataclass
class _Runs:
    """The runs of a search on Ray: its trials, and the test of the best one.

    Attributes:
        search: the search.
        table: the record of its trials, with the folder of the search.
        data: the dataset.
        args: arguments of the call.
        resources: CPUs and GPUs of each trial.
    """

    search: Search
    table: TrialTable
    data: Any
    args: SearchArguments
    resources: Resources

    @property
    def advice(self) -> str:
        """How to continue with unfinished trials, as the end of a message."""
        plugins = self.search.config.plain.get(PLUGINS)
        return f"continue with `{make_resume_command(self.table.folder, plugins, 'tune')}`"

    @property
    def num_left(self) -> int:
        """Number of trials that have no result yet."""
        return self.search.facts.num_samples - sum(t.has_result for t in self.table.trials)

    def train(self, reporter: Reporter) -> None:
        """Train the trials that have no result yet.

        The results are in the table of trials, ``trials.csv``, which is written after each trial.

        Args:
            reporter: prints the progress, and a line for each trial that ends.

        Raises:
            TrainingError: if Ray Tune stops with an error, or if trials are lost, since a process,
                a machine or the disk failed. The message says how to continue.
            KeyboardInterrupt: if the search was interrupted.
        """
        if not self.num_left:  # all trials have a result
            return

        # The searcher samples the options of trials and records how they end; ``active`` has those
        # in training. ``advice`` is a text on how to continue the search.
        make_folder(self.table.folder / "runs")
        searcher = TrialSearch(self.table, reporter)
        tuner = self._make_tuner(searcher)
        try:
            with reporter.live(searcher.describe_progress):
                tuner.fit()
        except Exception as error:
            # Ray raises errors of the searcher as text with their stack, whose last line says what
            # is wrong.
            problem = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise TrainingError(f"the search stopped: {problem}; then {self.advice}") from error

        # If trials are still active, Ray has caught Ctrl-C and returned early.
        if searcher.active:
            raise KeyboardInterrupt

        # A lost trial might have been the best, so nothing is tested before it has been trained.
        trials = self.table.trials
        if lost := [trial for trial in trials if trial.state == LOST]:
            raise TrainingError(
                f"{len(lost)} of {len(trials)} trials could not be trained; trial "
                f"{lost[0].number}: {lost[0].reason}. Nothing was tested; {self.table.file} has "
                f"the reasons of all; {self.advice}"
            )

    def _make_tuner(self, searcher: TrialSearch) -> ray_tune.Tuner:
        """Return Ray's tuner, which will train the trials that have no result yet.

        Args:
            searcher: samples the trials and records how they end.
        """
        # Ray reads this variable: how many trials may wait for their process at a time. By default
        # it is one for a searcher, so that most of a hundred machines would be idle for long. Here
        # it is as many as the machines of the cluster can train at the same time.
        num_slots = count_runs(list_machines(), self.resources)
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(num_slots)

        # ASHA compares trials after some numbers of epochs, and stops those that are not among the
        # best third. No trial is stopped before ``grace_epochs``.
        facts, epochs = self.search.facts, self.search.config["epochs"]
        scheduler = None
        if facts.scheduler == "asha":
            grace = min(facts.grace_epochs, epochs)
            scheduler = ASHAScheduler("epoch", max_t=epochs, grace_period=grace, reduction_factor=3)

        # What a trial runs: the function run_trial with these arguments. pack returns the code of a
        # custom model as bytes, and the data are put into Ray's store once for all trials.
        trainable = ray_tune.with_parameters(
            run_trial,
            resources=self.resources,
            packed=pack(self.search.config["model"]),
            data=[ray.put(SharedData(self.data))],
        )
        # A trial whose process or machine is lost starts again, up to MOST_LOSSES times.
        resources = {"CPU": self.resources.cpus, "GPU": self.resources.gpus}
        return ray_tune.Tuner(
            ray_tune.with_resources(trainable, resources),
            tune_config=ray_tune.TuneConfig(
                metric=BEST,
                mode=self.search.mode,
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=self.num_left,
                max_concurrent_trials=self.args.max_concurrent,
                reuse_actors=True,  # a new process imports torch and RecBole first, for seconds
                trial_dirname_creator=lambda trial: (
                    f"trial_{trial.config['number']:05d}-{trial.trial_id}"
                ),
            ),
            run_config=ray_tune.RunConfig(
                name="trials",
                storage_path=str(self.table.folder.resolve()),
                failure_config=ray_tune.FailureConfig(max_failures=MOST_LOSSES),
                verbose=0,
            ),
        )

    def test_best(self) -> tuple[Trial, RunFolder]:
        """Test the trial with the best validation value, unless an earlier call has tested it.

        The weights of the trial are tested in a run of its own, which has the test data. If the
        trial was stopped early, that run first trains it to its end.

        Returns:
            best: the trial.
            run: folder of the tested run.

        Raises:
            TrainingError: if all trials failed, or if the run fails.
        """
        best = self.table.find_best()
        if best is None:  # no trial has a validation value
            raise TrainingError(
                f"all trials failed; the first one: {self.table.trials[0].reason}. "
                f"{self.table.file} has the reasons of all"
            )
        run = self.table.find_test(
            best.number
        )  # the folder of the trial's test, which need not exist yet
        if run.result.is_file():
            return best, run

        # Test it in a task of Ray, which starts again if its process is lost. No trial was given
        # the test interactions; this run is.
        make_folder(run.path.parent)
        task = start_run(
            plain=self.search.make_config(best.options).plain,
            path=str(run.path.resolve()),
            data=SharedData(self.data, includes_test=True),
            resources=self.resources,
            packed=pack(self.search.config["model"]),  # the code of a custom model
            tested_run=str(self.table.find_run(best.number).path.resolve()),
        )
        # It returns the status, and the reason of a failure, in place of raising an error.
        facts = ray.get(task)
        if facts["status"] != DONE:
            raise TrainingError(
                f"trial {best.number} could not be tested: {facts['reason']}; {self.advice}"
            )
        return best, run


def _print_settings(runs: _Runs, reporter: Reporter) -> None:
    """Print what is searched, and facts and warnings about the data.

    Args:
        runs: the runs of the search.
        reporter: prints the lines.
    """
    # What is searched: ``facts`` says how, ``space`` has the options that are sampled.
    search, facts = runs.search, runs.search.facts
    reporter.line(
        f"{search.title}: {facts.num_samples} trials by {facts.searcher}, scheduler "
        f"{facts.scheduler}, best valid {search.metric}; searching "
        f"{', '.join(search.space.names)}; {runs.resources}; {runs.table.folder}"
    )

    summary = runs.data.split.summary  # counts of the split
    reporter.line(describe_split(summary))
    for text in make_warnings(summary):  # of copied interactions, for example
        reporter.warning(text)


def _keep_best(runs: _Runs, best: Trial, tested: RunFolder) -> dict[str, float] | None:
    """Write the best trial into the folder of the search: best/, best.yaml and test.json.

    ``best/`` is a copy of its run folder, ``best.yaml`` its configuration, and ``test.json`` has
    its test metrics.

    Args:
        runs: the runs of the search.
        best: the best trial.
        tested: folder of the run in which it was tested.

    Returns:
        Test metrics by name; None if there is no test data.
    """
    folder = runs.table.folder
    copy_run(tested, RunFolder(folder / "best"), with_results=True)

    # The configuration, without the options QUIET, which only switch off progress in trials.
    config = runs.search.make_config(best.options)
    options = {key: value for key, value in config.plain.items() if key not in QUIET}
    write_text(folder / "best.yaml", yaml.safe_dump(options, allow_unicode=True))

    test = read_result(tested).test or None
    facts = {"trial": best.number, "model": config["model"], "dataset": config["dataset"]}
    write_json(folder / "test.json", {**facts, "test": test})
    return test
