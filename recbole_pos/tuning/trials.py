"""The connection to Ray Tune: the function of a trial, the queue of trials, and the callbacks.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.tune.search import Searcher as RaySearcher

from recbole_pos.experiment.result import parameters
from recbole_pos.reporter import Reporter
from recbole_pos.runs.cluster import Resources
from recbole_pos.runs.searchers import Searcher
from recbole_pos.runs.worker import DONE, FAILED, LOST, QUIET, reason, train_run
from recbole_pos.tuning.record import (
    BEST,
    EARLIER,
    ENDED,
    REPORTED,
    TRIAL,
    Record,
    Trial,
    find_best_trial,
)
from recbole_pos.values import shown

FAILURE = "failure"  # key of a last report that says why a trial failed
INFRASTRUCTURE = "infrastructure"  # key of the same report: whether the infrastructure failed
_FULL_DISK = ("Trial %s: Error stopping trial", "Saving experiment state to storage")


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
    plain, run = {**base, **config["options"], **QUIET}, f"{runs}/{config['number']:05d}"
    outcome = train_run(plain, run, data, resources, packed, report=_Report())
    if outcome["status"] != DONE:
        lost = outcome["status"] == LOST
        tune.report({BEST: math.nan, FAILURE: outcome["reason"], INFRASTRUCTURE: lost})


class _Report:
    """Reports the newest validated epoch of an experiment to Ray."""

    def __init__(self) -> None:
        self.reported = False

    def __call__(self, experiment: Any) -> None:
        """Report the newest epoch, and in a new process also the earlier ones; the call does not
        return if the scheduler stops the trial."""
        trainer, progress = experiment.trainer, experiment.trainer.progress
        *before, line = [line for line in progress.history if line["valid"]]
        metrics = {
            BEST: progress.best_score,
            "valid": line["valid"][trainer.valid_metric],
            "epoch": line["epoch"] + 1,
            "best_epoch": progress.best_epoch,
            "best_valid": progress.best_result,
            "loss": line["loss"],
            "ended": trainer.finished,
            "seconds": round(progress.training_seconds + progress.evaluation_seconds, 3),
            "parameters": parameters(experiment.model),
            "node": ray.get_runtime_context().get_node_id()[:8],
        }
        if (
            before and not self.reported
        ):  # the process before may have been lost before its last report
            earlier = {epoch["epoch"] + 1: epoch["valid"][trainer.valid_metric] for epoch in before}
            metrics[EARLIER] = json.dumps(earlier)
        self.reported = True
        tune.report(metrics)


class Queue(RaySearcher):
    """Gives Ray the unfinished trials of a resumed search, then those that the searcher suggests.

    Args:
        searcher: a new searcher.
        trials: trials of earlier calls, all of which the searcher takes over.
        mode: max or min.
        room: number of trials that the cluster can train at the same time.
    """

    def __init__(self, searcher: Searcher, trials: Sequence[Trial], mode: str, room: int) -> None:
        super().__init__(metric=BEST, mode=mode)
        # by default Ray lets only one trial of a custom searcher wait for a process, so that most
        # of a hundred machines would be idle for long
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, room))
        self.source, self.count = (
            searcher,
            len(trials),
        )  # not `searcher`: Ray would unwrap this object
        self.numbers: dict[str, int] = {}  # Ray's id of a trial -> its number
        for trial in trials:
            searcher.recall(trial.number, trial.options)
        for trial in trials:
            if trial.state in ENDED:
                searcher.tell(trial.number, None if trial.state == FAILED else trial.score)
        self.waiting: list[dict[str, Any]] = [
            {"number": trial.number, "options": trial.options, "starts": trial.starts}
            for trial in trials
            if trial.state not in ENDED
        ]

    def suggest(self, trial_id: str) -> Any:
        """Return the configuration of the next trial, or ``FINISHED``; called by Ray."""
        if self.waiting:
            config = self.waiting.pop(0)
        else:
            options = self.source.ask(self.count)
            if options is None:
                return self.FINISHED
            config = {"number": self.count, "options": options, "starts": 0}
            self.count += 1
        self.numbers[trial_id] = config["number"]
        return config

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the searcher the score of a trial that has ended; called by Ray."""
        if trial_id in self.numbers:
            self.source.tell(self.numbers[trial_id], None if error else (result or {}).get(BEST))

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a search is resumed from its own record; called by Ray."""


class Recorder(tune.Callback):
    """Writes events of trials to the record and prints them.

    Ray pickles its callbacks; nothing is read from that, so no state is pickled.

    Args:
        record: record of the trials.
        metric: name of the validation metric.
        mode: max or min.
        total: number of trials of the search.
        reporter: where lines are printed.
    """

    def __init__(
        self, record: Record, metric: str, mode: str, total: int, reporter: Reporter
    ) -> None:
        self.record, self.reporter = record, reporter
        self.metric, self.mode, self.total = metric, mode, total
        self.known: dict[str, Trial] = {}  # Ray's id -> trial
        self.running: list[Trial] = []
        self.began = time.time()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Note which trials are running; called by Ray many times a second."""
        self._record_new(trials)
        self.running = [self.known[t.trial_id] for t in trials if t.status == "RUNNING"]

    def _record_new(self, trials: list[Any]) -> None:
        """Record new trials in the order of their numbers, before anything happens to them."""
        for trial in trials:
            if trial.trial_id not in self.known:
                begun = {TRIAL: trial.config["number"], "options": trial.config["options"]}
                self.known[trial.trial_id] = self.record.add(begun)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Record a report: a validated epoch, or a failure; called by Ray."""
        self._record_new(trials)
        if FAILURE in result:
            self._end(trial, LOST if result[INFRASTRUCTURE] else FAILED, result[FAILURE])
        else:
            metrics = {key: result[key] for key in REPORTED if key in result}
            self.record.add({TRIAL: trial.config["number"], **metrics})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record that a trial has finished, or was stopped by the scheduler; called by Ray."""
        self._record_new(trials)
        known = self.known[trial.trial_id]
        if known.state == "interrupted":  # it has reported no failure
            self._end(trial, "finished" if known.ended else "stopped")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record that the process of a trial was lost too often; called by Ray.

        The trial counts as failed, not lost, if that happened in an earlier call as well.
        """
        self._record_new(trials)
        self._end(trial, FAILED if self.known[trial.trial_id].losses else LOST, _read_reason(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report that the process of a trial was lost and starts again; called by Ray."""
        self._record_new(trials)
        known = self.known[trial.trial_id]
        self.reporter.line(
            f"trial {known.number:>3}  lost its process or machine after epoch {known.epochs}; "
            "it resumes from its last checkpoint"
        )

    def _end(self, trial: Any, state: str, why: str = "") -> None:
        """Record and print how a trial ended."""
        ended = self.record.add({TRIAL: trial.config["number"], "state": state, "reason": why})
        if why:
            self.reporter.line(f"trial {ended.number:>3}  {state}: {why}")
            return
        mark = "*" if ended is find_best_trial(self.record.trials, self.mode) else " "
        score = math.nan if ended.score is None else ended.score
        self.reporter.line(
            f"trial {ended.number:>3}  {state:8}  {self.metric} {score:.4f}{mark} "
            f"epoch {ended.epochs:>3}  {ended.seconds:>6.1f} s  {show_options(ended.options)}"
        )

    def lines(self) -> list[str]:
        """Return the lines of the progress: an overview, and one for each running trial."""
        states = [trial.state for trial in self.record.trials]
        counts = [f"{states.count(state)} {state}" for state in (*ENDED, LOST) if state in states]
        running = [f"{trial.number} (epoch {trial.epochs})" for trial in self.running]
        best = find_best_trial(self.record.trials, self.mode)
        found = f", best {best.score:.4f} (trial {best.number})" if best else ""
        minutes, seconds = divmod(int(time.time() - self.began), 60)
        overview = (
            f"{minutes}:{seconds:02d}  ended {len(self.record.ended)} of {self.total} "
            f"({', '.join(counts) or 'none'}), running {', '.join(running[:8]) or 'none'}"
            f"{' ...' if len(running) > 8 else ''}{found}"
        )
        return [overview, *(f"  trial {t.number}: {show_options(t.options)}" for t in self.running)]


def show_options(options: dict[str, Any]) -> str:
    """Return options in one line, numbers to three digits."""
    return "  ".join(f"{name} {_short(value)}" for name, value in options.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) and len(value) < 100 else shown(value)


def trial_folder(trial: Any) -> str:
    """Return the name of a trial's folder within Ray's: one for each time it is begun."""
    starts = trial.config["starts"]
    return f"trial_{trial.config['number']:05d}" + (f"-{starts}" if starts else "")


def _read_reason(trial: Any) -> str:
    """Return the reason in one line why Ray gave up a trial."""
    try:
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    except Exception:  # no error was kept, or it cannot be unpickled
        return "its process was lost"
    return reason(getattr(error, "cause", None) or error)


def quiet_tune() -> None:
    """Silence Ray Tune and leave Ctrl-C to the command; to be called before Ray starts."""
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # verbose=0 alone leaves some tables
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        noisy = logging.getLogger(f"ray.tune.execution.{name}")
        if _no_stacks not in noisy.filters:
            noisy.addFilter(_no_stacks)


def _no_stacks(record: logging.LogRecord) -> bool:
    """Drop log records with stacks of lost processes and full disks, which the search reports."""
    text = str(record.msg)
    error = record.exc_info[1] if record.exc_info else None
    is_full_disk = isinstance(error, OSError) and text.startswith(_FULL_DISK)
    return not (text.startswith("Trial task failed") or is_full_disk)
