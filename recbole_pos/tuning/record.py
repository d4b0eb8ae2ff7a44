"""The record of a search, ``trials.csv``: its trials with their options and results.

A resumed search takes its trials from there.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.files import write_text
from recbole_pos.tuning.space import Parameter, Space
from recbole_pos.values import escape_formula

# States of a trial. A trial with one of the first two has a result; others are trained on resume.
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
LOST, UNFINISHED = "lost", "unfinished"


@dataclass
class Trial:
    """One trial of a search: a sampled configuration, and the result of its run.

    Attributes:
        state: finished, stopped (by the scheduler), failed, lost (its process, a machine or the
            disk failed), or unfinished.
        score: best validation value.
        best_epoch: the epoch of the best value; epochs count from 0, as in RecBole.
        epochs: number of trained epochs.
        seconds: seconds of training and validation.
        parameters: number of parameters of the model.
        reason: why it failed or was lost, or empty.
        curve: epoch -> validation value; empty until the search has ended.
    """

    number: int
    options: dict[str, Any]
    state: str = UNFINISHED
    score: float | None = None
    best_epoch: int | None = None
    epochs: int = 0
    seconds: float = 0.0
    parameters: int | None = None
    reason: str = ""
    curve: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def has_result(self) -> bool:
        """Whether the trial has ended with a validation value."""
        return self.state in (FINISHED, STOPPED) and self.score is not None


class TrialTable:
    """The trials of a search by number, and the file in which they stand.

    Args:
        file: ``trials.csv``, which need not exist yet.
        space: space of the search, whose options have a column each.
        metric: name of the validation metric.
        mode: max or min, whichever is better.
    """

    def __init__(self, file: Path, space: Space, metric: str, mode: str) -> None:
        """Read the trials of earlier calls; a UsageError names the row that is damaged."""
        self.file, self.space, self.mode = file, space, mode
        first = ["trial", "state", f"valid {metric}", "best_epoch", "epochs", "seconds"]
        self.columns = [*first, "parameters", *space.names, "reason"]
        self.trials: list[Trial] = self._read() if file.is_file() else []

    def find_best(self) -> Trial | None:
        """Return the trial with the best validation value, the first of equals; None without."""
        scored = [trial for trial in self.trials if trial.has_result]
        sign = 1 if self.mode == "max" else -1
        return max(scored, key=lambda trial: sign * (trial.score or 0), default=None)

    def start(self, number: int, options: dict[str, Any]) -> Trial:
        """Return the trial of that number, as one that begins or resumes, and write the table."""
        trial = Trial(number, options)
        self.trials[number : number + 1] = [trial]
        self.write()
        return trial

    def write(self) -> None:
        """Write the table: a row for each trial; an option that it does not have is empty."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(self.columns)
        for trial in self.trials:
            cells = [trial.number, trial.state, trial.score, trial.best_epoch, trial.epochs]
            cells += [trial.seconds, trial.parameters]
            cells += [str(trial.options.get(name, "")) for name in self.space.names]
            table.writerow(map(escape_formula, [*cells, trial.reason]))
        write_text(self.file, text.getvalue())

    def _read(self) -> list[Trial]:
        """Return the trials of the file; a UsageError names a row that is damaged."""
        with self.file.open(newline="", encoding="utf-8") as opened:
            columns, *rows = list(csv.reader(opened)) or [[]]
        if columns != self.columns:
            raise UsageError(f"{self.file}: expected the columns {', '.join(self.columns)}")
        trials = []
        for number, row in enumerate(rows):
            try:
                trials.append(self._parse_row(number, dict(zip(columns, row, strict=True))))
            except (ValueError, IndexError) as error:
                problem = f"the row of trial {number} is damaged: {error}"
                raise UsageError(f"{self.file}: {problem}; restore the file") from error
        return trials

    def _parse_row(self, number: int, cells: dict[str, str]) -> Trial:
        """Return the trial of a row; a ValueError or IndexError if it is damaged."""
        score, best_epoch, parameters = (
            cells[name] for name in (self.columns[2], "best_epoch", "parameters")
        )
        options: dict[str, Any] = {}
        for parameter in self.space.parameters:
            if self.space.exists(parameter, options):
                options[parameter.name] = _parse_option(parameter, cells[parameter.name])
        return Trial(
            number,
            options,
            cells["state"],
            float(score) if score else None,
            int(best_epoch) if best_epoch else None,
            int(cells["epochs"]),
            float(cells["seconds"]),
            int(parameters) if parameters else None,
            cells["reason"],
        )


def _parse_option(parameter: Parameter, cell: str) -> Any:
    """Return the value of an option from its cell; an IndexError if it is no choice of it."""
    if parameter.kind == "choice":
        return [value for value in parameter.values if escape_formula(str(value)) == cell][0]
    value = float(cell)
    return value if parameter.codes is None else parameter.decode(round(parameter.encode(value)))
