"""The trials of a search: the record of their events, and their table."""

from __future__ import annotations

import csv
import io
import json
import math
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import fs

from recbole_pos.errors import CheckpointError, StorageError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.state import copy_run
from recbole_pos.files import write_text, writing
from recbole_pos.runs.storage import filesystem, names_in
from recbole_pos.runs.worker import FAILED, LOST
from recbole_pos.values import no_formula, shown

ENDED = ("finished", "stopped", FAILED)
TRIAL = "trial"  # key of the number of a trial in the record
BEST = "best"  # the metric of a search: the best validation score of a trial so far
EARLIER = "earlier"  # key of validation values by epoch, as JSON, in reports of a resumed trial
# Errors that Python raises for the content of a damaged file.
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
# Keys of a report that the record keeps.
REPORTED = (
    *("epoch", "valid", BEST, "best_epoch", "best_valid", "ended", "seconds", "parameters"),
    *("hostname", "node", EARLIER),
)


@dataclass
class Trial:
    """One trial of a search: a sampled configuration, and what its training reported.

    Attributes:
        state: finished, stopped (by the scheduler), failed, lost (the last two with a reason), or
            interrupted.
        score: best validation value, in epoch ``best_epoch``; epochs count from 1.
        best_valid: all validation metrics of that epoch.
        curve: epoch -> validation value.
        ended: whether the trial has reported its last epoch.
        starts: how often the trial was started.
        losses: how often the trial was given up because its process or machine was lost.
    """

    number: int
    options: dict[str, Any]
    state: str = "interrupted"
    reason: str = ""
    score: float | None = None
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

    @property
    def key(self) -> str:
        """Name of the folder of the trial's run."""
        return f"{self.number:05d}"

    @property
    def epochs(self) -> int:
        """Number of trained epochs."""
        return max(self.curve, default=0)

    def update(self, line: dict[str, Any]) -> None:
        """Apply a line of the record: a start, a report, or an end.

        Raises:
            DAMAGED: for a line without the keys, types or states of the record.
        """
        if "options" in line:
            self.starts += 1
            self.state, self.reason = "interrupted", ""
        if "epoch" in line:
            earlier = json.loads(line.get(EARLIER) or "{}")
            epochs = {**self.curve, **earlier, line["epoch"]: line["valid"]}
            self.curve = dict(sorted((int(epoch), float(v)) for epoch, v in epochs.items()))
            if math.isfinite(score := float(line[BEST])):
                self.score = score
            self.best_epoch = None if line["best_epoch"] is None else int(line["best_epoch"]) + 1
            self.best_valid = dict(line["best_valid"] or {})
            self.ended, self.seconds = bool(line["ended"]), float(line["seconds"])
            self.parameters = int(line["parameters"])
            self.host, self.node = str(line["hostname"]), str(line["node"])
        if "state" in line:
            self.state, self.reason = str(line["state"]), str(line["reason"])
            if self.state not in (*ENDED, LOST):
                raise ValueError(f"{shown(self.state)} is not a state")
            self.losses += self.state == LOST


class Record:
    """The trials of a search, and the file with a line for each of their events.

    ``--resume`` reads it. Lines are only appended, so that a killed search loses at most the line
    it was writing; no line has a path, so that a search can be moved.

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
                self._apply(json.loads(line))
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from error
        except DAMAGED as error:
            problem = shown(f"{type(error).__name__}: {error}")
            raise UsageError(f"--resume: {file}, line {number}: damaged: {problem}") from error

    def add(self, line: dict[str, Any]) -> Trial:
        """Append a line to the file, apply it, and return its trial.

        Raises:
            StorageError: if the line cannot be written.
        """
        content = f"{json.dumps(line)}\n".encode()
        try:
            with writing(self.file), open(self.file, "ab") as file:
                file.truncate(self.size)
                file.write(content)
        except StorageError as error:
            self.failure = error
            raise
        self.size += len(content)
        return self._apply(line)

    def _apply(self, line: dict[str, Any]) -> Trial:
        """Apply a line to its trial, which begins with its first line, and return the trial."""
        number = line[TRIAL]
        if number == len(self.trials):
            self.trials.append(Trial(number, dict(line["options"])))
        if not 0 <= number < len(self.trials):
            raise ValueError(f"trial {shown(number)} has no beginning")
        self.trials[number].update(line)
        return self.trials[number]

    @property
    def ended(self) -> list[Trial]:
        """Trials that have ended, which are not trained again."""
        return [trial for trial in self.trials if trial.state in ENDED]

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that have started and not ended, which a resumed search trains."""
        return [trial for trial in self.trials if trial.state not in ENDED]


def adopt(record: Record, place: str, table: Path, runs: Path) -> None:
    """Fill the record of a search of version 0.2.0, which kept none, from the files Ray left.

    Args:
        record: the record, which is empty.
        place: path or URI of Ray's folder, with the checkpoints of trials.
        table: trials.csv with the states of trials; missing if the search was killed.
        runs: folder for the runs of trials, which get the last checkpoint of each.

    Raises:
        UsageError: if Ray's files are damaged.
    """
    system, root = filesystem(place)
    ends: dict[int, dict[str, str]] = {}

    def read(name: str) -> str:
        """Return the text of a file of the next trial; empty if there is none."""
        path = f"{root}/trial_{len(record.trials):05d}/{name}"
        if system.get_file_info(path).type != fs.FileType.File:
            return ""
        with system.open_input_stream(path) as file:
            return str(file.read().decode())

    try:
        if table.is_file():
            with open(table, newline="", encoding="utf-8") as rows:
                ends = {int(row[TRIAL]): row for row in csv.DictReader(rows)}
        while params := read("params.json"):
            reports = read("result.json").split("\n")[:-1]  # the rest was cut off
            trial = record.add(
                {TRIAL: len(record.trials), "options": json.loads(params)["options"]}
            )
            end = {"state": "", "reason": ""}
            for report in map(json.loads, reports):
                if (
                    report["config"]["number"] != trial.number
                ):  # of another trial in the same process
                    continue
                if "failure" in report:
                    end = {"state": FAILED, "reason": str(report["failure"])}
                elif "epoch" in report:
                    metrics = {key: report[key] for key in REPORTED if key in report}
                    record.add({TRIAL: trial.number, **metrics})
            row = ends.get(trial.number, {})
            if not end["state"] and row.get("state") in ENDED:
                end = {"state": row["state"], "reason": row.get("reason") or ""}
            elif not end["state"] and trial.ended:
                end["state"] = "finished"
            if end["state"]:
                record.add({TRIAL: trial.number, **end})
            _fetch_checkpoint(f"{place}/trial_{trial.key}", RunFolder(runs / trial.key))
    except DAMAGED as error:
        raise UsageError(f"--resume: {place}: damaged: {shown(str(error))}") from error


def _fetch_checkpoint(place: str, target: RunFolder) -> None:
    """Copy the newest complete checkpoint of a trial of 0.2.0, if any, to a run's folder."""
    system, root = filesystem(place)
    for name in reversed([name for name in names_in(place) if name.startswith("checkpoint_")]):
        with (
            tempfile.TemporaryDirectory(prefix="recbole-pos-fetch-") as near,
            suppress(CheckpointError),
        ):
            source = RunFolder(near)
            fs.copy_files(f"{root}/{name}", near, source_filesystem=system)
            checkpoint.load(source.checkpoint)
            copy_run(source, target)
            return


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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, *names, "host", "node", "reason"])
    for t in trials:
        values = [t.options.get(name, "") for name in names]
        row = [t.number, t.state, t.score, t.best_epoch, t.epochs, t.seconds, t.parameters]
        writer.writerow([no_formula(value) for value in (*row, *values, t.host, t.node, t.reason)])
    write_text(file, text.getvalue())
