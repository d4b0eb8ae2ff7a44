"""The trials of a search, read from the folders of their runs, and their table."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recbole_pos.files import write_text
from recbole_pos.runs import DONE, FAILED
from recbole_pos.study.plan import Fit
from recbole_pos.study.scheduler import Scheduler
from recbole_pos.study.study_folder import read_curve
from recbole_pos.values import escape_formula


@dataclass
class Trial:
    """One trial of a search: a sampled configuration, and the result of its run.

    Attributes:
        state: finished, stopped (by the scheduler), failed, or interrupted.
        reason: why it failed, or empty.
        is_lost: whether it failed because a process, a machine or the disk failed.
        score: best validation value.
        best_epoch: the epoch of the best value; epochs count from 0, as in RecBole.
        best_valid: all validation metrics of the best epoch.
        seconds: seconds of training and validation.
        parameters: number of parameters of the model.
        curve: epoch -> validation value.
    """

    number: int
    options: dict[str, Any]
    state: str = "interrupted"
    reason: str = ""
    is_lost: bool = False
    score: float | None = None
    best_epoch: int | None = None
    best_valid: dict[str, float] = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    parameters: int | None = None
    curve: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def epochs(self) -> int:
        """Number of trained epochs."""
        return max(self.curve, default=-1) + 1


def read_trials(scheduler: Scheduler) -> list[Trial]:
    """Return the trials of a search that have begun, in the order of their numbers."""
    fits = [fit for fit in scheduler.fits if fit.trial is not None]
    return [trial for fit in fits if (trial := _read_trial(scheduler, fit)) is not None]


def _read_trial(scheduler: Scheduler, fit: Fit) -> Trial | None:
    """Return a trial with its curve; None if it has not begun."""
    digest = scheduler.digests.get(fit.name, "")
    facts = scheduler.folder.read_fit(digest)
    metric = scheduler.find_metric(fit.row)
    number = fit.trial or 0
    options = scheduler.describe(fit)["searched"]
    if not facts:  # options that do not go together have no run
        reason = scheduler.reasons.get(fit.name, "")
        return Trial(number, options, "failed", reason) if reason else None
    trial = Trial(number, options, reason=facts.get("reason", ""))
    if facts["status"] == FAILED:
        trial.state = "failed"
        trial.is_lost = bool(facts.get("lost"))
    elif facts["status"] == DONE:
        trial.state = "stopped" if facts.get("stopped") else "finished"
        trial.parameters = facts["parameters"]
        trial.best_valid = facts["best_valid"] or {}
        trial.score = trial.best_valid.get(metric)
        trial.best_epoch = facts["best_epoch"]
        seconds = facts["seconds"]
        trial.seconds = round(seconds["training"] + seconds["evaluation"], 3)
    trial.curve = read_curve(scheduler.folder.run(digest), metric)
    return trial


def write_trials(trials: list[Trial], names: list[str], metric: str, file: Path) -> None:
    """Write trials.csv: a row for each trial, with an empty cell for an option it does not have.

    ``names`` are those of the searched options, a column each; ``metric`` is that of validation.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = ["trial", "state", f"valid {metric}", "best_epoch", "epochs", "seconds", "parameters"]
    table.writerow([*columns, *names, "reason"])
    for trial in trials:
        cells = [trial.number, trial.state, trial.score, trial.best_epoch, trial.epochs]
        cells += [trial.seconds, trial.parameters]
        cells += [*(trial.options.get(name, "") for name in names), trial.reason]
        table.writerow(map(escape_formula, cells))
    write_text(file, text.getvalue())
