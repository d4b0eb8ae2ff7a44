"""The trials of a search: their table, and how Ray Tune runs them.

:class:`TrialTable` is their record, from which a search resumes. :class:`TrialSearch` samples
the trials and records how they end; :func:`run_trial` trains one in a process of Ray's.

A trial reports its best validation value so far, by which ASHA decides: by the value of the newest
epoch, it would stop trials that wait for patience. A failed trial reports its reason and raises no
error, since Ray would repeat it; a trial whose process is lost is repeated, and resumes its run.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import ray
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FixedTrial, create_trial
from ray import tune
from ray.tune.search.optuna import OptunaSearch

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.files import write_json, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE
from recbole_pos.runs.training_runs import MOST_LOSSES, Resources, train_run
from recbole_pos.study.rendered_table import format_duration, format_options
from recbole_pos.study.study_folder import read_json
from recbole_pos.tuning.search_plan import Search
from recbole_pos.tuning.space import Space

optuna.logging.set_verbosity(optuna.logging.WARNING)
BEST = "best"  # name in reports to Ray Tune of what it optimises: the best validation value so far
# States of a trial. A trial with one of the first two has a result; others are trained on resume.
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
LOST, UNFINISHED = "lost", "unfinished"


@dataclass
class Trial:
    """One trial of a search: a sampled configuration, and the result of its run.

    Attributes:
        number: number of the trial, from 0.
        options: the sampled options.
        state: finished, stopped (by the scheduler), failed, lost (its process, a machine or the
            disk failed), or unfinished.
        score: best validation value; None if there is none.
        epochs: number of trained epochs.
        seconds: seconds of training and validation.
        reason: why it failed or was lost, or empty.
    """

    number: int
    options: dict[str, Any]
    state: str = UNFINISHED
    score: float | None = None
    epochs: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def has_result(self) -> bool:
        """Whether the trial has ended with a validation value."""
        return self.state in (FINISHED, STOPPED) and self.score is not None


class TrialTable:
    """The trials of a search by number, and the files in which they are recorded.

    ``trials.json`` has all of them, and is read when the search is resumed. ``trials.csv`` has them
    as a table for people.

    Attributes:
        folder: folder of the search.
        search: the search, with its space, and the metric by which trials are compared.
        trials: the trials; their index is their number.
    """

    def __init__(self, folder: Path, search: Search) -> None:
        """Read the trials of earlier calls from ``trials.json``; none if there is no such file.

        Args:
            folder: folder of the search, which has the file.
            search: the search.
        """
        self.folder, self.search = folder, search
        recorded = read_json(folder / "trials.json").get("trials", [])
        self.trials = [Trial(**fields) for fields in recorded]

    @property
    def file(self) -> Path:
        """Path of the table for people."""
        return self.folder / "trials.csv"

    def find_run(self, number: int) -> RunFolder:
        """Return the run folder of a trial, which need not exist yet."""
        return RunFolder(self.folder / "runs" / f"{number:05d}")

    def find_test(self, number: int) -> RunFolder:
        """Return the folder of the run that tests a trial; there is none before the test."""
        return RunFolder(self.folder / "tests" / f"{number:05d}")

    def find_best(self) -> Trial | None:
        """Return the trial with the best validation value, the first of equal ones.

        Return None if no trial has a value.
        """
        scored = [trial for trial in self.trials if trial.has_result]
        # All of these have a score (``or 0`` only tells the type checker so). Of equal trials, max
        # and min return the first.
        select = max if self.search.mode == "max" else min
        return select(scored, key=lambda trial: trial.score or 0, default=None)

    def start(self, number: int, options: dict[str, Any]) -> Trial:
        """Return a new trial with a number, and record it as unfinished.

        A trial of an earlier call with that number, which is resumed now, is replaced.

        Args:
            number: number of the trial, from 0, at most one above the last.
            options: searched option -> the value sampled for it.
        """
        trial = Trial(number, options)
        self.trials[number : number + 1] = [trial]  # replaces the trial, or is added at the end
        self.write()
        return trial

    def write(self) -> None:
        """Write the trials into both files: ``trials.json`` for a resumed search, and a table.

        The table, ``trials.csv``, has a line for each trial and a column for each searched option,
        whose cell is empty if the option does not exist in the trial.
        """
        write_json(self.folder / "trials.json", {"trials": list(map(asdict, self.trials))})

        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        first = ["trial", "state", f"valid {self.search.metric}", "epochs", "seconds"]
        table.writerow([*first, *self.search.space.names, "reason"])
        for trial in self.trials:
            cells = [trial.number, trial.state, trial.score, trial.epochs, trial.seconds]
            cells += [str(trial.options.get(name, "")) for name in self.search.space.names]
            table.writerow([*cells, trial.reason])
        write_text(self.file, text.getvalue())


# --- training ---


def run_trial(
    config: dict[str, Any], *, resources: Resources, packed: bytes, data: list[Any]
) -> None:
    """Train a trial and report its validation value to Ray Tune after every epoch.

    Ray Tune calls this in a process of its own for each trial. A trial has no test data, so it is
    never tested. If it fails, the last report says why.

    Args:
        config: ``number`` of the trial; ``run_options``, all options of its run; ``path``, the
            folder of the run; and ``problem``, why the options do not go together, or empty.
        resources: CPUs and GPUs of the process.
        packed: custom models and schemes as bytes, see :func:`train_run`.
        data: a list of one: the reference with which ``ray.get`` finds the dataset in Ray's store.
            It is in a list since Ray would replace a reference itself by a copy of the data.
    """
    # BEST is the key of the value that Ray Tune optimises: the best validation value so far. A
    # trial that fails has none.
    options, problem = config["run_options"], config["problem"]
    failed = {BEST: math.nan, "epoch": 0}
    if problem:
        tune.report({**failed, "state": FAILED, "reason": problem})
        return

    # Train. train_run raises nothing: it returns the status, and the reason of a failure. A trial
    # is LOST if the disk or Ray failed, so that it can be trained again, and else FAILED.
    (reference,) = data
    shared = ray.get(reference)
    facts = train_run(options, config["path"], shared, resources, packed, report=_report_epoch)
    if facts["status"] != DONE:
        state = LOST if facts["lost"] else FAILED
        tune.report({**failed, "state": state, "reason": facts["reason"]})
        return

    # The last report has the final numbers.
    metric = str(options["valid_metric"]).lower()
    tune.report(
        {
            BEST: (facts["best_valid"] or {}).get(metric, math.nan),
            "epoch": facts["epochs"],
            "seconds": facts["seconds"]["training"] + facts["seconds"]["evaluation"],
            "state": FINISHED,
        }
    )


def _report_epoch(experiment: Any) -> None:
    """Report the newest validated epoch of a trial to Ray Tune.

    If its scheduler stops the trial, ``tune.report`` does not return, and training ends there.

    Args:
        experiment: the run in training, with its model, trainer and progress.
    """
    # The history has a line for each epoch, but not every epoch is validated. BEST is the key of
    # the value that Ray Tune optimises. Epochs are counted from 0 in the history.
    trainer, progress = experiment.trainer, experiment.trainer.progress
    newest = [epoch for epoch in progress.history if epoch["valid"]][-1]
    tune.report(
        {
            BEST: progress.best_score,
            "valid": newest["valid"][trainer.valid_metric],
            "loss": newest["loss"],
            "epoch": newest["epoch"] + 1,
            "seconds": progress.training_seconds + progress.evaluation_seconds,
            # The state of the trial if no report follows, since the scheduler stops it now.
            "state": FINISHED if trainer.is_finished else STOPPED,
        }
    )


def _make_sampler(search: Search, number: int) -> BaseSampler:
    """Return the sampler of one trial: TPE (Bergstra et al. 2011), or random sampling.

    Its random numbers depend only on the seed of the search and on the number of the trial. So a
    resumed search samples the options that it would have sampled without the stop.

    Args:
        search: the search, which has the seed, and ``optuna`` as its searcher for TPE.
        number: number of the trial.
    """
    # SeedSequence mixes the two numbers into one seed that is unlike those of other pairs.
    (seed,) = np.random.SeedSequence((search.facts.seed, number)).generate_state(1).tolist()
    if search.facts.searcher != "optuna":
        return RandomSampler(seed)
    # Trials in progress count with a bad score (constant liar), so that parallel trials differ.
    return TPESampler(seed=seed, constant_liar=True)


def _fill_study(study: optuna.Study, table: TrialTable) -> None:
    """Add the trials of earlier calls to an empty study of Optuna, and queue those to train first.

    Optuna trains queued trials, whose options are given, before it samples others.

    Args:
        study: Optuna's record of trials. It numbers them in the order in which they are added.
        table: our record of the trials, in the order of their numbers.
    """
    facts, space = table.search.facts, table.search.space  # the space has the options to try
    for trial in table.trials:
        if trial.has_result:
            study.add_trial(_make_optuna_trial(trial, space))
        else:
            study.enqueue_trial(space.encode(trial.options))

    # A grid has a trial for each point (combination of values): trial i tries point i. So queue the
    # points from the first without a trial on, up to ``num_samples`` points in all.
    if facts.searcher == "grid":
        for point in space.list_points()[len(table.trials) : facts.num_samples]:
            study.enqueue_trial(space.encode(point))


class TrialSearch(OptunaSearch):
    """Ray's OptunaSearch, which begins with the recorded trials and records further ones.

    OptunaSearch takes results of earlier trials only if the space has no conditions. So its study
    is made and filled here.

    Attributes:
        search: the search.
        table: the record of the trials.
        reporter: prints a line for each trial that ends.
        active: Ray's id of a trial in training -> the trial.
    """

    def __init__(self, table: TrialTable, reporter: Reporter) -> None:
        """Fill Optuna's study with the trials of earlier calls, for Ray's OptunaSearch to continue.

        A study is Optuna's record of trials, from which its sampler learns which options to try
        next. OptunaSearch, the base class, finds it by its storage and name.

        Args:
            table: the record of the trials; those without a result are the first to be trained.
            reporter: prints a line for each trial that ends.
        """
        self.search, self.table, self.reporter = table.search, table, reporter
        self.active: dict[str, Trial] = {}  # Ray's id of a trial in training -> the trial

        mode = self.search.mode  # max or min
        place: dict[str, Any] = {"storage": optuna.storages.InMemoryStorage(), "study_name": "s"}
        study = optuna.create_study(direction="maximize" if mode == "max" else "minimize", **place)
        _fill_study(study, table)

        # OptunaSearch calls _sample for each trial that Ray Tune trains, queued ones first. The
        # sampler is set there, since each trial has its own.
        super().__init__(self._sample, metric=BEST, mode=mode, **place)

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a search resumes from its table, not from Ray's pickle of this object."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a search resumes from its table."""

    def _sample(self, trial: optuna.Trial) -> dict[str, Any]:
        """Sample the options of a trial, and return them together with its number.

        Args:
            trial: Optuna's trial. If it was queued, as the points of a grid are, it has options
                already, which are returned.
        """
        # Optuna samples the options when the space asks for them, with the sampler that its study
        # has then. So the sampler of this trial can be set here.
        trial.study.sampler = _make_sampler(self.search, trial.number)
        return {"number": trial.number, "options": self.search.space.suggest(trial)}

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Sample the next trial, record it, and return what its process needs.

        Args:
            trial_id: Ray's id of the trial.

        Returns:
            What :func:`run_trial` gets: the ``number`` of the trial; ``run_options``, all options
            of its run; ``path``, the folder of the run; and ``problem``, which is empty. If the
            sampled options do not go together, ``problem`` says why, and there are no run_options.
        """
        # The base class asks Optuna for its next trial and passes it to ``_sample``, whose
        # result it returns: the number of the trial, and the options that Optuna has sampled.
        sampled = super().suggest(trial_id)
        assert sampled is not None  # Optuna can always sample another trial
        number, options = sampled["number"], sampled["options"]
        self.active[trial_id] = self.table.start(number, options)  # recorded as unfinished

        # The run has the sampled options, those of all trials, and defaults: a complete
        # configuration, of which ``plain`` is a dict that Ray can send to the process.
        run_options, problem = {}, ""
        try:
            run_options = self.search.make_config(options).plain
        except UsageError as error:
            problem = str(error)
        # The path is absolute, since Ray's processes run in other folders.
        path = str(self.table.find_run(number).path.resolve())
        return {"number": number, "run_options": run_options, "path": path, "problem": problem}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Note the number of epochs for the progress; Optuna only needs the last result."""
        self.active[trial_id].epochs = result["epoch"]

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record how a trial ended, print a line about it, and pass its result on to Optuna.

        Args:
            trial_id: Ray's id of the trial.
            result: its last report, see :func:`run_trial`; None if its process was lost too often.
            error: whether Ray counts the trial as failed, which is not needed here.
        """
        trial = self.active.pop(trial_id)  # it is in training no more

        # Record the last report.
        if result is None:
            reason = f"its process was lost {MOST_LOSSES + 1} times, perhaps for lack of memory"
            result = {BEST: math.nan, "epoch": 0, "state": LOST, "reason": reason}
        trial.state, trial.reason = result["state"], result.get("reason", "")
        # BEST is the key of the best validation value; NaN stands for none
        trial.score = None if math.isnan(result[BEST]) else result[BEST]
        trial.epochs, trial.seconds = result["epoch"], round(result.get("seconds", 0.0), 3)
        self.table.write()
        self.reporter.line(self._describe(trial))

        # Optuna learns from the values of ended trials. One without a value is given to it as
        # failed (None: no result), so that it learns nothing from that.
        has_score = trial.score is not None
        super().on_trial_complete(trial_id, result if has_score else None, error=not has_score)

    def _describe(self, trial: Trial) -> str:
        """Return a line about a trial that has ended.

        It has the number of ended trials, the outcome, and the options that were tried.

        Args:
            trial: the trial.

        Examples:
            ``[3 of 20] FPARec, trial 2: 9 epochs  valid ndcg@10 0.1230  41 s  n_heads 1``, or
            ``[4 of 20] FPARec, trial 3: failed: out of memory  n_heads 8``.
        """
        text = f"{trial.state}: {trial.reason}"  # of a trial that failed or was lost
        if trial.score is not None:
            prefix = "stopped after " if trial.state == STOPPED else ""
            text = f"{prefix}{trial.epochs} epochs  valid {self.search.metric} {trial.score:.4f}  "
            text += format_duration(trial.seconds)
        name = f"{self.search.config['model']}, trial {trial.number}"
        return f"[{self._count()}] {name}: {text}  {format_options(trial.options)}"

    def _count(self) -> str:
        """Return ``3 of 20``, the number of trials that have ended."""
        num_ended = sum(trial.state != UNFINISHED for trial in self.table.trials)
        return f"{num_ended} of {self.search.facts.num_samples}"

    def describe_progress(self) -> list[str]:
        """Return the lines of the progress display: an overview, and a line for each trial."""
        epochs = self.search.config["epochs"]
        active = list(self.active.values())  # a copy, since another thread calls this
        overview = f"{self.search.title}: {self._count()} trials ended, {len(active)} running"
        return [overview, *(f"  trial {t.number}: epoch {t.epochs} of {epochs}" for t in active)]


def _make_optuna_trial(trial: Trial, space: Space) -> optuna.trial.FrozenTrial:
    """Return a trial that has a result as a finished trial of Optuna's.

    Args:
        trial: the trial.
        space: the space that its options were sampled from.
    """
    # Optuna's trial has, for each option, the value as Optuna samples it (the index of a choice, or
    # a number) and the distribution that it was sampled from. A FixedTrial does not sample, but
    # returns the given values; ``suggest`` asks it for each, and so it notes the distributions.
    values = space.encode(trial.options)
    fixed = FixedTrial(values)
    space.suggest(fixed)
    return create_trial(value=trial.score, params=values, distributions=fixed.distributions)


def quiet_tune() -> None:
    """Silence Ray Tune, and leave Ctrl-C to the command; to be called before Ray starts.

    Ray would print stacks of lost processes and full disks, which the search reports itself.
    """
    # Ray reads these variables when it starts; values that the user has set stay.
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # verbose=0 alone leaves some tables
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)
