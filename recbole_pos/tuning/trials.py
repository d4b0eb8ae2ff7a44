"""The trials of a search in Ray Tune: the function of a trial, and the searcher that has them all.

A trial reports its best validation value so far, by which ASHA decides: by the value of the newest
epoch, it would stop trials that wait for patience. A failed trial reports its failure and raises no
error, since Ray would repeat it; a trial whose process is lost is repeated, and resumes its run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher as RaySearcher

from recbole_pos.experiment.result import count_parameters
from recbole_pos.runs import DONE, FAILED
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.worker import MOST_LOSSES, train_run
from recbole_pos.study.dispatcher import ActiveRuns
from recbole_pos.study.scheduler import Job

BEST = "best"  # key of a report, the metric of a search: the best validation score so far
FACTS = "facts"  # key of a report: the facts of the run, as JSON; Ray would flatten a mapping


def run_trial(
    config: dict[str, Any], *, resources: Resources, packed: bytes, data: list[Any]
) -> None:
    """Train a trial and report its validation metric after every epoch; it is never tested.

    Args:
        config: ``plain``, the options of the run, and ``path``, its folder.
        resources, packed: as of :func:`train_run`.
        data: a list with Ray's reference of the shared data: Ray would load a bare reference.
    """

    def report(experiment: Any) -> None:
        """Report the newest validated epoch; does not return if the scheduler stops the trial."""
        trainer = experiment.trainer
        progress = trainer.progress
        seconds = {"training": progress.training_seconds, "evaluation": progress.evaluation_seconds}
        facts = {
            "status": DONE,
            "stopped": not trainer.is_finished,  # if it is the last report
            "best_valid": progress.best_result,
            "best_epoch": progress.best_epoch,
            "epochs": progress.next_epoch,
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "parameters": count_parameters(experiment.model),
        }
        newest = next(epoch for epoch in reversed(progress.history) if epoch["valid"])
        numbers = {"epoch": newest["epoch"] + 1, "loss": newest["loss"]}
        numbers["valid"] = newest["valid"][trainer.valid_metric]
        tune.report({BEST: progress.best_score, **numbers, FACTS: json.dumps(facts)})

    plain = config["plain"]
    shared = ray.get(data[0])
    facts = train_run(plain, config["path"], shared, resources, packed, report=report)
    score = math.nan
    if facts["status"] == DONE:
        facts["stopped"] = False
        best_valid = facts["best_valid"] or {}
        score = best_valid.get(str(plain["valid_metric"]).lower(), math.nan)
    tune.report({BEST: score, "epoch": facts.get("epochs", 0), FACTS: json.dumps(facts)})


class TrialSearcher(RaySearcher):
    """The trials of a search for Ray, which requests the next one and reports how each has ended.

    Args:
        runs: the runs in training.
        first: the first trial to train.
        num_slots: number of trials that the cluster can train at the same time.

    Attributes:
        waiting: the next job; after the trials, the test of the best one.
        reports: Ray's id of a trial -> facts of its last report, as JSON.
    """

    def __init__(self, runs: ActiveRuns, first: Job, num_slots: int) -> None:
        """Start before the first trial, and let Ray request a trial for every free slot."""
        search = runs.scheduler.searches[first.fit.row]
        super().__init__(metric=BEST, mode=search.mode)
        # by default one trial of a custom searcher waits for a process at a time, so that most of
        # a hundred machines would be idle for long
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, num_slots))
        self.runs, self.first = runs, first
        self.waiting: Job | None = first
        self.reports: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a search does not resume from Ray's pickle of its searcher."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a search resumes from the folders of its runs."""

    def suggest(self, trial_id: str) -> Any:
        """Return the configuration of the next trial, None while there is none, or ``FINISHED``."""
        while job := (self.waiting or self.runs.scheduler.next_job()):
            if job.fit.trial is None:  # the test of the best, once all trials have ended
                self.waiting = job
                return self.FINISHED
            self.waiting = None
            if self.runs.note_begin(job):
                self.runs.running[trial_id] = job, time.monotonic()
                path = str(self.runs.folder.run(job.digest).path.resolve())
                return {"number": job.fit.trial, "plain": job.config.plain, "path": path}
        return None if self.runs.running else self.FINISHED

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Keep the last report of a trial."""
        if FACTS in result:
            self.reports[trial_id] = result[FACTS]

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record how a trial has ended."""
        if trial_id not in self.runs.running:
            return
        self.on_trial_result(trial_id, result or {})
        if error or trial_id not in self.reports:
            reason = f"its process was lost {MOST_LOSSES + 1} times, perhaps for lack of memory"
            self.runs.end(trial_id, {"status": FAILED, "lost": True, "reason": reason})
        else:
            self.runs.end(trial_id, json.loads(self.reports[trial_id]))


def name_trial_folder(trial: Any) -> str:
    """Return the name of the folder in which Ray keeps its files of a trial."""
    return f"trial_{trial.config['number']:05d}-{trial.trial_id}"


def quiet_tune() -> None:
    """Silence Ray Tune and leave Ctrl-C to the command; to be called before Ray starts.

    Ray logs stacks of lost processes and full disks, which the search reports itself.
    """
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # verbose=0 alone leaves some tables
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)
