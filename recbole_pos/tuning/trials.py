"""The connection to Ray Tune: the function of a trial, and the searcher that has all trials.

A trial reports its best validation value so far, by which ASHA and TPE decide: the value of the
newest epoch would punish patience. A failed trial reports its failure and raises no error, since
Ray would repeat the trial; a trial whose process is lost is repeated, and resumes its run.
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
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.searchers import make_searcher
from recbole_pos.runs.worker import DONE, FAILED, LOST, MOST_LOSSES, QUIET, train_run
from recbole_pos.tuning.record import ENDED, Record, Trial, find_best_trial
from recbole_pos.tuning.settings import Settings
from recbole_pos.values import shown

BEST = "best"  # key of a report, the metric of a search: the best validation score so far
# key of a report: the fields of a trial that it changes, as JSON; Ray would flatten a mapping
CHANGES = "changes"


def run_trial(
    config: dict[str, Any],
    *,
    base: dict[str, Any],
    resources: Resources,
    packed: bytes,
    data: list[Any],
    runs: str,
) -> None:
    """Train a trial and report its validation metric after every epoch; it is never tested.

    An error of the trial becomes its last report, and the search continues. A lost process (its
    machine died, the system killed it) reports nothing: Ray starts the trial again elsewhere.

    Args:
        config: ``number`` and ``options`` of the trial, and ``starts``, how often it was started.
        base: options of all trials.
        resources, packed, data: as of :func:`train_run`.
        runs: folder with the runs of trials.
    """
    is_first = True

    def report(experiment: Any) -> None:
        """Report the newest validated epoch; does not return if the scheduler stops the trial."""
        nonlocal is_first
        trainer, progress = experiment.trainer, experiment.trainer.progress
        metric, epochs = trainer.valid_metric, [one for one in progress.history if one["valid"]]
        # the process before may have been lost before its last report
        curve = {
            line["epoch"] + 1: line["valid"][metric] for line in epochs[0 if is_first else -1 :]
        }
        is_first = False
        changes = {
            "curve": curve,
            "score": progress.best_score if math.isfinite(progress.best_score) else None,
            "best_epoch": None if progress.best_epoch is None else progress.best_epoch + 1,
            "best_valid": progress.best_result or {},
            "ended": trainer.finished,
            "seconds": round(progress.training_seconds + progress.evaluation_seconds, 3),
            "parameters": count_parameters(experiment.model),
            "node": ray.get_runtime_context().get_node_id()[:8],
        }
        line = epochs[-1]
        numbers = {"valid": line["valid"][metric], "epoch": line["epoch"] + 1, "loss": line["loss"]}
        tune.report({BEST: progress.best_score, **numbers, CHANGES: json.dumps(changes)})

    plain, run = {**base, **config["options"], **QUIET}, f"{runs}/{config['number']:05d}"
    outcome = train_run(plain, run, data, resources, packed, report=report)
    if outcome["status"] != DONE:
        end = {"state": outcome["status"], "reason": outcome["reason"]}
        tune.report({BEST: math.nan, CHANGES: json.dumps(end)})


class Trials(RaySearcher):
    """The trials of a search for Ray: suggests them, records what they report, and prints it.

    Ray gets the unfinished trials of earlier calls first. Each is in the record before Ray has it.

    Args:
        record: record of the trials.
        settings: settings of the search.
        reporter: where lines are printed.
        room: number of trials that the cluster can train at the same time.
    """

    def __init__(self, record: Record, settings: Settings, reporter: Reporter, room: int) -> None:
        super().__init__(metric=BEST, mode=settings.mode)
        # by default Ray lets only one trial of a custom searcher wait for a process, so that most
        # of a hundred machines would be idle for long
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, room))
        self.record, self.settings, self.reporter, self.room = record, settings, reporter, room
        name, space = settings.searcher, settings.space
        # not `searcher`: Ray would unwrap this object
        self.source = make_searcher(name, space, settings.mode, settings.seed)
        for trial in record.trials:
            self.source.recall(trial.number, trial.options)
        for trial in record.ended:
            self.source.tell(trial.number, None if trial.state == FAILED else trial.score)
        self.waiting = list(record.unfinished)
        self.active: dict[str, Trial] = {}  # Ray's id -> trial
        self.reports: dict[str, str] = {}  # Ray's id -> the last report
        self.began = time.time()

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles its searcher; nothing is read from that."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a search is resumed from its own record; called by Ray."""

    def suggest(self, trial_id: str) -> Any:
        """Return the configuration of the next trial, or ``FINISHED``; called by Ray."""
        if self.waiting:
            trial = self.waiting.pop(0)
            number, options, starts = trial.number, trial.options, trial.starts
        else:
            number, starts = len(self.record.trials), 0
            suggested = self.source.ask(number)
            if suggested is None:
                return self.FINISHED
            options = suggested
        begun = {"options": options, "starts": starts + 1, "state": "interrupted", "reason": ""}
        self.active[trial_id] = self.record.add(number, **begun)
        return {"number": number, "options": options, "starts": starts}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Record a report: a validated epoch, or a failure; called by Ray."""
        report = result.get(CHANGES)
        if report is not None and report != self.reports.get(trial_id):  # Ray repeats the last
            self.reports[trial_id] = report
            changes = {"host": result["hostname"], **json.loads(report)}
            self.record.add(self.active[trial_id].number, **changes)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record and print how a trial has ended, and tell the searcher; called by Ray.

        With an error its process was lost too often. The trial then counts as lost, but as failed
        if that happened in an earlier call as well.
        """
        if trial_id not in self.active:
            return
        if result and not error:  # of a trial that the scheduler stops, Ray has not reported it
            self.on_trial_result(trial_id, result)
        trial = self.active.pop(trial_id)
        end: dict[str, Any] = {"state": trial.state, "reason": trial.reason}
        if error:
            why = f"its process was lost {MOST_LOSSES + 1} times, perhaps for lack of memory"
            end = {"state": FAILED if trial.losses else LOST, "reason": why}
        elif trial.state == "interrupted":  # it has reported no failure
            end["state"] = "finished" if trial.ended else "stopped"
        losses = trial.losses + (end["state"] == LOST)
        self.record.add(trial.number, **end, losses=losses)
        self.source.tell(trial.number, None if trial.reason else trial.score)
        self.reporter.line(f"trial {trial.number:>3}  {trial.state:8}  {self._describe(trial)}")

    def _describe(self, trial: Trial) -> str:
        """Return how a trial has ended: why it failed, or its score."""
        if trial.reason:
            return trial.reason
        mark = "*" if trial is find_best_trial(self.record.trials, self.settings.mode) else " "
        score = math.nan if trial.score is None else trial.score
        return (
            f"{self.settings.metric} {score:.4f}{mark} epoch {trial.epochs:>3}  "
            f"{trial.seconds:>6.1f} s  {show_options(trial.options)}"
        )

    def lines(self) -> list[str]:
        """Return the lines of the progress: an overview, and one for each running trial."""
        total, states = self.settings.num_samples, [trial.state for trial in self.record.trials]
        counts = [f"{states.count(state)} {state}" for state in (*ENDED, LOST) if state in states]
        active = list(self.active.values())[: self.room]  # others wait for a process
        running = [f"{trial.number} (epoch {trial.epochs})" for trial in active[:8]]
        best = find_best_trial(self.record.trials, self.settings.mode)
        found = f", best {best.score:.4f} (trial {best.number})" if best else ""
        minutes, seconds = divmod(int(time.time() - self.began), 60)
        overview = (
            f"{minutes}:{seconds:02d}  ended {len(self.record.ended)} of {total} "
            f"({', '.join(counts) or 'none'}), running {', '.join(running) or 'none'}"
            f"{' ...' if len(active) > 8 else ''}{found}"
        )
        return [overview, *(f"  trial {t.number}: {show_options(t.options)}" for t in active)]


def show_options(options: dict[str, Any]) -> str:
    """Return options in one line, numbers to three digits."""
    return "  ".join(f"{name} {show_value(value)}" for name, value in options.items())


def show_value(value: Any) -> str:
    """Return the value of an option, a number to three digits."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) and len(value) < 100 else shown(value)


def trial_folder(trial: Any) -> str:
    """Return the name of a trial's folder within Ray's: one for each time it is begun."""
    starts = trial.config["starts"]
    return f"trial_{trial.config['number']:05d}" + (f"-{starts}" if starts else "")


def quiet_tune() -> None:
    """Silence Ray Tune and leave Ctrl-C to the command; to be called before Ray starts.

    Ray logs stacks of lost processes and full disks, which the search reports itself.
    """
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # verbose=0 alone leaves some tables
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)
