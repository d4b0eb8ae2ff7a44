"""The trials of a search: the record of their events, from which it is resumed, and their table."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, FiniteFloat
from pydantic.dataclasses import dataclass

from recbole_pos.errors import StorageError, UsageError
from recbole_pos.files import write_text, writing
from recbole_pos.runs.worker import FAILED, LOST
from recbole_pos.values import escape_formula, shown

ENDED = ("finished", "stopped", FAILED)
# Errors that Python and pydantic raise for the content of a damaged file.
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(config=ConfigDict(validate_assignment=True))
class Trial:
    """One trial of a search: a sampled configuration, and what its training reported.

    Attributes:
        state: finished, stopped (by the scheduler), failed, lost (the last two with a reason), or
            interrupted.
        score: best validation value, in epoch ``best_epoch``; epochs count from 1.
        best_valid: all validation metrics of that epoch.
        host, node: machine that trained last, and its id in Ray.
        curve: epoch -> validation value.
        ended: whether the trial has reported its last epoch.
        starts: how often the trial was started.
        losses: how often the trial was given up because its process or machine was lost.
        test: metrics of its test, of which there are none without test data; None if not tested.
    """

    number: int
    options: dict[str, Any]
    state: Literal["finished", "stopped", "failed", "lost", "interrupted"] = "interrupted"
    reason: str = ""
    score: FiniteFloat | None = None
    best_epoch: int | None = None
    best_valid: dict[str, float] = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    parameters: int | None = None
    host: str = ""
    node: str = ""
    curve: dict[int, float] = field(default_factory=dict, repr=False)
    ended: bool = False
    starts: int = 0
    losses: int = 0
    test: dict[str, float] | None = None

    @property
    def key(self) -> str:
        """Name of the folder of the trial's run."""
        return f"{self.number:05d}"

    @property
    def epochs(self) -> int:
        """Number of trained epochs."""
        return max(self.curve, default=0)


class Record:
    """The trials of a search, and the file with a line for each of their events.

    ``--resume`` reads it. A line has the number of a trial and the fields that have changed. Lines
    are only appended, so that a killed search loses at most the line it was writing; no line has a
    path, so that a search can be moved.

    Args:
        file: path of the file, which is created with the first line.

    Raises:
        UsageError: if the file is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.size = file, 0
        self.trials: list[Trial] = []
        self.failure: StorageError | None = None  # error of ``add``, which Ray catches
        number = 0  # of the line, for messages
        try:
            content = file.read_bytes() if file.is_file() else b""
            self.size = content.rfind(b"\n") + 1  # a kill or a full disk cut off the rest
            for line in content[: self.size].splitlines():
                number += 1
                self._apply(**json.loads(line))
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from error
        except DAMAGED as error:
            problem = shown(f"{type(error).__name__}: {error}")
            raise UsageError(f"--resume: {file}, line {number}: damaged: {problem}") from error

    def add(self, trial: int, **changes: Any) -> Trial:
        """Append the changed fields of a trial to the file, apply them, and return the trial.

        Raises:
            StorageError: if the line cannot be written.
        """
        content = f"{json.dumps({'trial': trial, **changes})}\n".encode()
        try:
            with writing(self.file), open(self.file, "ab") as file:
                file.truncate(self.size)
                file.write(content)
        except StorageError as error:
            self.failure = error
            raise
        self.size += len(content)
        return self._apply(trial, **changes)

    def _apply(self, trial: int, **changes: Any) -> Trial:
        """Change fields of a trial, which begins with its first line; epochs join its curve."""
        if trial == len(self.trials):
            self.trials.append(Trial(trial, changes["options"]))
        if not 0 <= trial < len(self.trials):
            raise ValueError(f"trial {shown(trial)} has no beginning")
        changed = self.trials[trial]
        for name, value in changes.items():
            setattr(changed, name, {**changed.curve, **value} if name == "curve" else value)
        return changed

    @property
    def ended(self) -> list[Trial]:
        """Trials that have ended, which are not trained again."""
        return [trial for trial in self.trials if trial.state in ENDED]

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that have started and not ended, which a resumed search trains."""
        return [trial for trial in self.trials if trial.state not in ENDED]


def find_best_trial(trials: list[Trial], mode: str) -> Trial | None:
    """Return the trial with the best score of those that did not fail; None if there is none."""
    sign = 1 if mode == "max" else -1
    usable = [(t.score, t) for t in trials if t.state not in (FAILED, LOST) and t.score is not None]
    return max(usable, key=lambda pair: sign * pair[0], default=(None, None))[1]


def write_trials(trials: list[Trial], names: list[str], metric: str, file: Path) -> None:
    """Write trials.csv: a row for each trial, with an empty cell for an option it does not have.

    Args:
        trials: trials of the search.
        names: searched options, a column each.
        metric: name of the validation metric.
        file: path of the table.
    """
    head = ["trial", "state", f"valid {metric}", "best_epoch", "epochs", "seconds", "parameters"]
    rows = [[*head, *names, "host", "node", "reason"]]
    for t in trials:
        result = [t.number, t.state, t.score, t.best_epoch, t.epochs, t.seconds, t.parameters]
        options = [t.options.get(name, "") for name in names]
        rows.append([escape_formula(v) for v in (*result, *options, t.host, t.node, t.reason)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(file, text.getvalue())
