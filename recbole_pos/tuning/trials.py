"""Trials as Ray Tune sees them: what it runs, what it is given next, and what it reports.

What a trial reports, and ASHA and TPE go by, is its best validation value so far: that of its
newest epoch would punish patience. Its own failure is its last report, not an error of Ray's, which
would repeat it; a lost process is repeated, and finds its run where it stopped.
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
INFRASTRUCTURE = "infrastructure"  # key of the same report: whether the trial is not to blame
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
    """Train, report the validation metric after every epoch, never test.

    Whatever goes wrong in the trial itself becomes its last report, and the search goes on. A
    process that is lost (its machine died, the system killed it) reports nothing: Ray starts the
    trial again elsewhere.

    Args:
        config: ``number``, ``options``, and ``starts``: how often the trial was begun before.
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
    """Reports the newest validated epoch to Ray; does not return if the scheduler says stop."""

    def __init__(self) -> None:
        self.reported = False

    def __call__(self, experiment: Any) -> None:
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
        if before and not self.reported:  # a process may be lost between checkpoint and report
            earlier = {one["epoch"] + 1: one["valid"][trainer.valid_metric] for one in before}
            metrics[EARLIER] = json.dumps(earlier)
        self.reported = True
        tune.report(metrics)


class Queue(RaySearcher):
    """Gives Ray the trials that a search has left, then those that its searcher asks for.

    Args:
        searcher: new.
        trials: that have begun before: the searcher learns of all of them.
        mode: max or min.
        room: how many trials have room at once.
    """

    def __init__(self, searcher: Searcher, trials: Sequence[Trial], mode: str, room: int) -> None:
        super().__init__(metric=BEST, mode=mode)
        # with a searcher that is not its own Ray lets one trial at a time wait for a process, so
        # that on a hundred machines the first would be over before most machines had begun
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, room))
        self.source, self.count = searcher, len(trials)  # Ray unwraps what has a `searcher`
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
        """Ray's hook: the configuration of the next trial, or ``FINISHED``."""
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
        """Ray's hook: a trial ended."""
        if trial_id in self.numbers:
            self.source.tell(self.numbers[trial_id], None if error else (result or {}).get(BEST))

    def save(self, checkpoint_path: str) -> None:
        """Ray's hook: nothing, since a search is resumed from its own record."""


class Recorder(tune.Callback):
    """Writes what happens to the record, and shows it; Ray pickles it, of which nothing is read.

    Args:
        record: record of the trials.
        metric: its name.
        mode: max or min.
        total: how many trials there will be.
        reporter: where lines are printed.
    """

    def __init__(
        self, record: Record, metric: str, mode: str, total: int, reporter: Reporter
    ) -> None:
        self.record, self.reporter = record, reporter
        self.metric, self.mode, self.total = metric, mode, total
        self.known: dict[str, Trial] = {}  # by Ray's id
        self.running: list[Trial] = []
        self.began = time.time()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Ray's hook, many times a second."""
        self._meet(trials)
        self.running = [self.known[t.trial_id] for t in trials if t.status == "RUNNING"]

    def _meet(self, trials: list[Any]) -> None:
        """Record new trials in the order of their numbers, before anything happens to them."""
        for trial in trials:
            if trial.trial_id not in self.known:
                begun = {TRIAL: trial.config["number"], "options": trial.config["options"]}
                self.known[trial.trial_id] = self.record.add(begun)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Ray's hook: a trial has validated an epoch, or says why it failed."""
        self._meet(trials)
        if FAILURE in result:
            self._end(trial, LOST if result[INFRASTRUCTURE] else FAILED, result[FAILURE])
        else:
            kept = {key: result[key] for key in REPORTED if key in result}
            self.record.add({TRIAL: trial.config["number"], **kept})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: a trial ended by itself, or was stopped."""
        self._meet(trials)
        known = self.known[trial.trial_id]
        if known.state == "interrupted":  # has not reported a failure
            self._end(trial, "finished" if known.ended else "stopped")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: the process of a trial was lost too often; if in an earlier search as well,
        it is not the fault of the machine."""
        self._meet(trials)
        self._end(trial, FAILED if self.known[trial.trial_id].losses else LOST, _why(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: the process of a trial was lost; it will be started again."""
        self._meet(trials)
        known = self.known[trial.trial_id]
        self.reporter.line(
            f"trial {known.number:>3}  lost its process or machine after epoch {known.epochs}; "
            "it resumes from its last checkpoint"
        )

    def _end(self, trial: Any, state: str, why: str = "") -> None:
        """Record and print how a trial ended."""
        known = self.record.add({TRIAL: trial.config["number"], "state": state, "reason": why})
        if why:
            self.reporter.line(f"trial {known.number:>3}  {state}: {why}")
            return
        mark = "*" if known is find_best_trial(self.record.trials, self.mode) else " "
        score = math.nan if known.score is None else known.score
        self.reporter.line(
            f"trial {known.number:>3}  {state:8}  {self.metric} {score:.4f}{mark} "
            f"epoch {known.epochs:>3}  {known.seconds:>6.1f} s  {show_options(known.options)}"
        )

    def lines(self) -> list[str]:
        """Return an overview, and a line for each running trial."""
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


def _why(trial: Any) -> str:
    """Return why Ray gave up a trial."""
    try:
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    except Exception:  # of a class that cannot be read back, or none was kept
        return "its process was lost"
    return reason(getattr(error, "cause", None) or error)


def quiet_tune() -> None:
    """Let Ray Tune print nothing, and leave Ctrl-C to the command; before Ray starts."""
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # verbose=0 alone leaves some tables
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    for name in ("tune_controller", "experiment_state"):
        noisy = logging.getLogger(f"ray.tune.execution.{name}")
        if _no_stacks not in noisy.filters:
            noisy.addFilter(_no_stacks)


def _no_stacks(record: logging.LogRecord) -> bool:
    """Leave out stacks that tell a user nothing: of a lost process the search prints a line, of a
    full disk its error."""
    text = str(record.msg)
    error = record.exc_info[1] if record.exc_info else None
    full = isinstance(error, OSError) and text.startswith(_FULL_DISK)
    return not (text.startswith("Trial task failed") or full)
