"""What is known of the trials of a search: the record of what happened to them, and its tables."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import fs

from recbole_pos.errors import StorageError, UsageError
from recbole_pos.files import write_text, writing
from recbole_pos.tune.searchers import BEST
from recbole_pos.tune.storage import filesystem
from recbole_pos.tune.trial import EARLIER, FAILURE
from recbole_pos.values import shown

ENDED = ("finished", "stopped", "failed")
TRIAL = "trial"  # key of the number of a trial in the record
LOST = "lost"  # the infrastructure failed, not the trial: it is no result, and is tried again
# What the content of a damaged file makes Python raise.
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
# What the record keeps of a report.
REPORTED = (
    *("epoch", "valid", BEST, "best_epoch", "best_valid", "ended", "seconds", "parameters"),
    *("hostname", "node", EARLIER),
)


@dataclass
class Trial:
    """One sample of a search.

    Attributes:
        folders: with its checkpoints, the newest last: one for each time it was begun.
        state: finished, stopped (by the scheduler), failed, lost (the last two with a reason), or
            interrupted.
        score: best validation value, in epoch ``best_epoch``; epochs count from 1.
        best_valid: all metrics of that epoch.
        curve: the value of every validated epoch.
        ended: whether its last report was that of its last epoch.
        losses: how often it was given up because its process or machine was lost.
    """

    number: int
    options: dict[str, Any]
    folders: list[str] = field(default_factory=list, repr=False)
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
    losses: int = 0

    @property
    def epochs(self) -> int:
        """How many epochs it trained."""
        return max(self.curve, default=0)

    def update(self, line: dict[str, Any]) -> None:
        """Take over a line of the record."""
        if "folder" in line:
            name = str(line["folder"])
            if Path(name).name != name:
                raise ValueError(f"{shown(name)} is not the name of a folder")
            self.folders.append(name)
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
    """The trials of a search, and the file that has a line for everything that happens to them.

    ``--resume`` goes by it alone: lines are only appended, so that a search that is killed loses at
    most the line it was writing, and no line has a path, so that a search can be moved.

    Args:
        file: made with the first line.

    Raises:
        UsageError: if the file is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.size = file, 0
        self.trials: list[Trial] = []
        self.failure: StorageError | None = None  # of add, which Ray has for itself
        number = 0  # of the line
        try:
            content = file.read_bytes() if file.is_file() else b""
            self.size = content.rfind(b"\n") + 1  # the rest was cut off by a kill or a full disk
            for line in content[: self.size].splitlines():
                number += 1
                self._take(json.loads(line))
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from error
        except DAMAGED as error:
            problem = shown(f"{type(error).__name__}: {error}")
            raise UsageError(f"--resume: {file}, line {number}: damaged: {problem}") from error

    def add(self, line: dict[str, Any]) -> Trial:
        """Append a line, and return its trial as it is now.

        Raises:
            StorageError: if it cannot be written.
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
        return self._take(line)

    def _take(self, line: dict[str, Any]) -> Trial:
        number = line[TRIAL]
        if number == len(self.trials):
            self.trials.append(Trial(number, dict(line["options"])))
        if not 0 <= number < len(self.trials):
            raise ValueError(f"trial {shown(number)} has no beginning")
        self.trials[number].update(line)
        return self.trials[number]

    @property
    def ended(self) -> list[Trial]:
        """Trials that are not trained again."""
        return [trial for trial in self.trials if trial.state in ENDED]

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that have begun and are trained when the search is resumed."""
        return [trial for trial in self.trials if trial.state not in ENDED]


def adopt(record: Record, place: str, table: Path) -> None:
    """Fill the record of a search of version 0.2.0, which kept none, from the files Ray left.

    Args:
        record: empty.
        place: path or URI of Ray's folder.
        table: trials.csv, which says how trials ended; it is there unless the search was killed.
    """
    rows: dict[str, dict[str, str]] = {}
    try:
        if table.is_file():
            with open(table, newline="", encoding="utf-8") as file:
                rows = {row["trial"]: row for row in csv.DictReader(file)}
        for number in itertools.count():
            lines = list(_read_ray(place, number))
            if not lines:
                return
            state = rows.get(str(number), {}).get("state", "")
            if lines[-1].get("ended") and state not in ENDED:
                state = "finished"
            if "state" not in lines[-1] and state in ENDED:
                why = rows.get(str(number), {}).get("reason", "")
                lines.append({TRIAL: number, "state": state, "reason": why})
            for line in lines:
                record.add(line)
    except DAMAGED as error:
        raise UsageError(f"--resume: {place}: damaged: {shown(str(error))}") from error


def _read_ray(place: str, number: int) -> Iterator[dict[str, Any]]:
    """The lines of the record that Ray's files of a trial stand for; none without such files."""
    system, root = filesystem(place)
    folder = f"trial_{number:05d}"
    texts = []
    for name in ("params.json", "result.json"):
        path = f"{root}/{folder}/{name}"
        if system.get_file_info(path).type != fs.FileType.File:
            texts.append("")
            continue
        with system.open_input_stream(path) as file:
            texts.append(file.read().decode())
    if not texts[0]:
        return
    yield {TRIAL: number, "options": json.loads(texts[0])["options"], "folder": folder}
    for text in texts[1].split("\n")[:-1]:
        report = json.loads(text)
        if report["config"]["number"] != number:  # of another trial in the same process
            continue
        if FAILURE in report:
            yield {TRIAL: number, "state": "failed", "reason": report[FAILURE]}
        elif "epoch" in report:
            yield {TRIAL: number, **{key: report[key] for key in REPORTED if key in report}}


def best_of(trials: list[Trial], mode: str) -> Trial | None:
    """The trial with the best score among those that did not fail."""
    sign = 1 if mode == "max" else -1
    usable = [
        (t.score, t) for t in trials if t.state not in ("failed", LOST) and t.score is not None
    ]
    return max(usable, key=lambda pair: sign * pair[0], default=(None, None))[1]


def write_trials(trials: list[Trial], names: list[str], metric: str, file: Path) -> None:
    """trials.csv: a row per trial, an empty cell where an option does not exist."""
    head = ["trial", "state", f"valid {metric}", "best_epoch", "epochs", "seconds", "parameters"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, *names, "host", "node", "reason"])
    for t in trials:
        values = [t.options.get(name, "") for name in names]
        row = [t.number, t.state, t.score, t.best_epoch, t.epochs, t.seconds, t.parameters]
        writer.writerow([_cell(value) for value in (*row, *values, t.host, t.node, t.reason)])
    write_text(file, text.getvalue())


def _cell(value: Any) -> Any:
    """As it is, but for text that a spreadsheet would run."""
    return f"'{value}" if str(value).startswith("=") else value


def write_json(content: dict[str, Any], file: Path) -> None:
    """All of the file or nothing."""
    write_text(file, json.dumps(content, indent=2) + "\n")
