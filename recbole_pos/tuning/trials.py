"""The trials of a search in Ray Tune: the function of a trial, OptunaSearch, and the Tuner.

A trial reports its best validation value so far, by which ASHA decides: by the value of the newest
epoch, it would stop trials that wait for patience. A failed trial reports its reason and raises no
error, since Ray would repeat it; a trial whose process is lost is repeated, and resumes its run.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import ray
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from ray import tune
from ray.tune.search.optuna import OptunaSearch

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder, count_parameters
from recbole_pos.reporter import Reporter
from recbole_pos.runs import DONE
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.progress import format_options
from recbole_pos.runs.worker import MOST_LOSSES, train_run
from recbole_pos.study.rendered_table import format_duration
from recbole_pos.tuning.record import (
    FAILED,
    FINISHED,
    LOST,
    STOPPED,
    UNFINISHED,
    Trial,
    TrialTable,
)
from recbole_pos.tuning.search_plan import Search

optuna.logging.set_verbosity(optuna.logging.WARNING)
BEST = "best"  # key of a report, the metric of a search: the best validation score so far


def run_trial(
    config: dict[str, Any], *, resources: Resources, packed: bytes, data: list[Any]
) -> None:
    """Train a trial and report its validation metric after every epoch; it is never tested.

    Args:
        config: ``number`` of the trial, ``plain``, the options of its run, ``path``, its folder,
            and ``problem``, why its options do not go together, or empty.
        resources, packed: as of :func:`train_run`.
        data: a list with Ray's reference of the shared data: Ray would load a bare reference.
    """

    def report(experiment: Any) -> None:
        """Report the newest validated epoch; does not return if the scheduler stops the trial."""
        trainer, progress = experiment.trainer, experiment.trainer.progress
        newest = next(epoch for epoch in reversed(progress.history) if epoch["valid"])
        tune.report(
            {
                BEST: progress.best_score,
                "valid": newest["valid"][trainer.valid_metric],
                "loss": newest["loss"],
                "epoch": newest["epoch"] + 1,
                "best_epoch": progress.best_epoch,
                "seconds": progress.training_seconds + progress.evaluation_seconds,
                "parameters": count_parameters(experiment.model),
                "state": FINISHED if trainer.is_finished else STOPPED,  # if it is the last report
            }
        )

    plain, problem = config["plain"], config["problem"]
    facts = {"status": "failed", "lost": False, "reason": problem}
    if not problem:
        shared = ray.get(data[0])
        facts = train_run(plain, config["path"], shared, resources, packed, report=report)
    if facts["status"] == DONE:
        last = {
            BEST: (facts["best_valid"] or {}).get(str(plain["valid_metric"]).lower(), math.nan),
            "epoch": facts["epochs"],
            "best_epoch": facts["best_epoch"],
            "seconds": facts["seconds"]["training"] + facts["seconds"]["evaluation"],
            "parameters": facts["parameters"],
            "state": FINISHED,
        }
    else:
        state = LOST if facts["lost"] else FAILED
        last = {BEST: math.nan, "epoch": 0, "state": state, "reason": facts["reason"]}
    tune.report(last)


def find_run(folder: Path, number: int) -> RunFolder:
    """Return the run folder of a trial in the folder of a search."""
    return RunFolder(folder / "runs" / f"{number:05d}")


class ResumableSampler(BaseSampler):
    """TPE (Bergstra et al. 2011) or random sampling, with random numbers of its own for each trial.

    They depend only on the seed and the number of the trial, so that a resumed search samples
    what it would have sampled without the stop. Trials in progress count with a bad score (constant
    liar), so that parallel trials differ.

    Args:
        seed: seed of the search.
        is_random: whether options are sampled at random; by TPE if False.
    """

    def __init__(self, seed: int, is_random: bool = False) -> None:
        self.seed, self.is_random = seed, is_random
        self.sampler: BaseSampler = RandomSampler(seed)

    def before_trial(self, study: optuna.Study, trial: Any) -> None:
        """Start the random numbers of a trial."""
        seed = int(np.random.SeedSequence((self.seed, trial.number)).generate_state(1)[0])
        if self.is_random:
            self.sampler = RandomSampler(seed)
        else:
            self.sampler = TPESampler(seed=seed, constant_liar=True)

    def infer_relative_search_space(self, study: optuna.Study, trial: Any) -> dict[str, Any]:
        """Return the options that the sampler samples together."""
        return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: Any, search_space: Any) -> dict[str, Any]:
        """Return values of the options that are sampled together."""
        return self.sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: Any, *parameter: Any) -> Any:
        """Return the value of one option, given by its name and distribution."""
        return self.sampler.sample_independent(study, trial, *parameter)


def create_study(mode: str, sampler: BaseSampler, **storage: Any) -> optuna.Study:
    """Return a new study whose values are better if higher (``mode`` max) or lower (min)."""
    direction = StudyDirection.MAXIMIZE if mode == "max" else StudyDirection.MINIMIZE
    return optuna.create_study(direction=direction, sampler=sampler, **storage)


class TrialSearch(OptunaSearch):
    """Ray's OptunaSearch, which begins with the recorded trials and records further ones.

    OptunaSearch takes results of earlier trials only without conditions, so its study is made and
    filled here.

    Args:
        search: the search.
        table: the record; its trials without a result are the first to be trained.
        folder: folder of the search.
        reporter: prints a line for each trial that ends.

    Attributes:
        active: Ray's id of a trial in training -> the trial.
    """

    def __init__(self, search: Search, table: TrialTable, folder: Path, reporter: Reporter) -> None:
        """Fill the study: with results, with trials to resume, and with the points of a grid."""
        self.search, self.table, self.folder, self.reporter = search, table, folder, reporter
        self.active: dict[str, Trial] = {}
        facts, space = search.facts, search.space
        sampler = ResumableSampler(facts.seed, is_random=facts.searcher != "optuna")
        shared: dict[str, Any] = {"storage": optuna.storages.InMemoryStorage(), "study_name": "s"}
        study = create_study(search.mode, sampler, **shared)
        for trial in table.trials:
            values = space.encode(trial.options)
            if trial.has_result:
                distributions = {name: space.distributions[name] for name in values}
                study.add_trial(
                    optuna.trial.create_trial(
                        value=trial.score, params=values, distributions=distributions
                    )
                )
            else:
                study.enqueue_trial(values)
        points = space.list_points() if facts.searcher == "grid" else []
        for point in points[len(table.trials) : facts.num_samples]:
            study.enqueue_trial(space.encode(point))
        super().__init__(self._sample, metric=BEST, mode=search.mode, sampler=sampler, **shared)

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a search resumes from its table, not from Ray's pickle of this object."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a search resumes from its table."""

    def _sample(self, trial: Any) -> dict[str, Any]:
        """Return number and options of an Optuna trial."""
        return {"number": trial.number, "options": self.search.space.suggest(trial)}

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Record the next trial, and return its configuration for :func:`run_trial`."""
        sampled = super().suggest(trial_id)
        assert sampled is not None  # as always
        trial = self.active[trial_id] = self.table.start(sampled["number"], sampled["options"])
        plain, problem = {}, ""
        try:
            plain = self.search.make_config(trial.options).plain
        except UsageError as error:
            problem = str(error)
        path = str(find_run(self.folder, trial.number).path.resolve())
        return {"number": trial.number, "plain": plain, "path": path, "problem": problem}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Note the number of epochs for the progress; Optuna only needs the last result."""
        self.active[trial_id].epochs = result["epoch"]

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record the last report of a trial; Optuna takes one without a score for failed."""
        trial = self.active.pop(trial_id)
        if result is None:
            reason = f"its process was lost {MOST_LOSSES + 1} times, perhaps for lack of memory"
            result = {BEST: math.nan, "epoch": 0, "state": LOST, "reason": reason}
        trial.state, trial.reason = result["state"], result.get("reason", "")
        trial.score = None if math.isnan(result[BEST]) else result[BEST]
        trial.best_epoch, trial.epochs = result.get("best_epoch"), result["epoch"]
        trial.seconds = round(result.get("seconds", 0.0), 3)
        trial.parameters = result.get("parameters")
        self.table.write()
        self.reporter.line(self._describe(trial))
        if trial.score is None:
            super().on_trial_complete(trial_id, None, error=True)
        else:
            super().on_trial_complete(trial_id, result)

    def _describe(self, trial: Trial) -> str:
        """Return ``[3 of 20] FPARec, trial 2: 9 epochs  valid ndcg@10 0.123  41 s  n_heads 1``."""
        text = f"{trial.state}: {trial.reason}"
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
        """Return the lines of the progress: an overview, and one for each active trial."""
        epochs = self.search.config["epochs"]
        active = list(self.active.values())  # a copy, since another thread calls this
        overview = f"{self.search.title}: {self._count()} trials ended, {len(active)} running"
        return [overview, *(f"  trial {t.number}: epoch {t.epochs} of {epochs}" for t in active)]


def quiet_tune() -> None:
    """Silence Ray Tune and leave Ctrl-C to the command; to be called before Ray starts.

    Ray logs stacks of lost processes and full disks, which the search reports itself.
    """
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # verbose=0 alone leaves some tables
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)
