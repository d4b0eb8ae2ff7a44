"""What a search found: one row per trial, the best of them, and the files that say so."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ray import tune

from recbole_pos.errors import TrainingError
from recbole_pos.files import write_text
from recbole_pos.tune.progress import own_report, state_of
from recbole_pos.tune.searchers import BEST
from recbole_pos.tune.trial import EARLIER, FAILURE, reason


@dataclass
class Trial:
    """One sample of a search.

    ``score`` is its best validation value, in epoch ``best_epoch`` of ``epochs``; ``curve`` has
    the value of every validated epoch; epochs count from 1. ``state`` is finished,
    stopped (by the scheduler), interrupted, or failed, then with a ``reason``.
    """

    number: int
    state: str
    reason: str
    score: float | None
    epochs: int
    best_epoch: int | None
    seconds: float
    parameters: int | None
    host: str
    node: str
    options: dict[str, Any]
    curve: dict[int, float] = field(repr=False)
    result: Any = field(default=None, repr=False)  # Ray's, with the last checkpoint


def collect(path: str, grid: Any = None) -> list[Trial]:
    """The trials of a search, in the order of their numbers.

    Ray's results name their trial only by its last report, which is empty in a trial lost before
    its first one, and that of another trial where Ray used a process again. So numbers and options
    come from the state of the search, and results are found by their trial's folder.

    Args:
        path: where Ray saved the state of the search.
        grid: what ``fit`` returned; as last saved when None, for a search that is not over.

    Raises:
        TrainingError: if no process of Ray's could even start one of them.
    """
    analysis = tune.ExperimentAnalysis(path)
    saved: Any = tune.ResultGrid(analysis) if grid is None else grid
    results = {_folder(r): r for r in saved}
    begun = [(trial, results[_folder(trial)]) for trial in analysis.trials if trial.config]
    # Ray does not save that it gave up a trial, or stopped it, where no process was left of it
    over = grid is not None and grid.num_errors + grid.num_terminated == len(grid)
    statuses = [_status(trial, r.error, over) for trial, r in begun]
    lost = [r for (_, r), s in zip(begun, statuses, strict=True) if s == "ERROR" and not r.config]
    if lost and len(lost) == len(begun):
        raise TrainingError(
            f"Ray could not start a process for any of {len(lost)} trials; is this package "
            f"installed where they run? {_lost(lost[0].error)}"
        )
    trials = [_trial(trial, r, s) for (trial, r), s in zip(begun, statuses, strict=True)]
    return sorted(trials, key=lambda trial: trial.number)


def _folder(of_trial: Any) -> str:
    return PurePosixPath(of_trial.path).name


def _status(trial: Any, error: Any, over: bool) -> str:
    """Ray's, of a search that is over if it is; empty for a trial that has not ended."""
    if trial.is_finished():
        return trial.status
    return ("ERROR" if error else "TERMINATED") if over else ""


def _trial(trial: Any, result: Any, status: str) -> Trial:
    number, curve, best_seen = trial.config["number"], {}, {}
    last, frame = own_report(result.metrics, number), result.metrics_dataframe
    if frame is not None and {"epoch", "valid", "config/number"} <= set(frame):
        frame = frame[frame["config/number"] == number]
        rows = frame[["epoch", "valid", BEST]].dropna()  # a failure has no epoch
        told = frame[EARLIER].dropna() if EARLIER in frame else ()
        earlier = {int(e): v for text in told for e, v in json.loads(text).items()}
        reported = {int(epoch): float(valid) for epoch, valid, _ in rows.to_numpy()}
        curve = dict(sorted({**earlier, **reported}.items()))
        best_seen = {int(epoch): float(best) for epoch, _, best in rows.to_numpy()}
    state = state_of(status, last) if status else "interrupted"
    why = (last.get(FAILURE) or _lost(result.error)) if state == "failed" else ""
    best_epoch = last.get("best_epoch")
    score = last.get(BEST)
    if score is None or not math.isfinite(score):
        score = best_seen[max(best_seen)] if best_seen else None
    return Trial(
        number=number,
        state=state,
        reason=why,
        score=score,
        epochs=max(curve, default=0),
        best_epoch=None if best_epoch is None else best_epoch + 1,
        seconds=float(last.get("seconds") or 0.0),
        parameters=last.get("parameters"),
        host=str(last.get("hostname", "")),
        node=str(last.get("node", "")),
        options=trial.config["options"],
        curve=curve,
        result=result,
    )


def _lost(error: BaseException | str | None) -> str:
    """Why Ray gave up a trial, of which it may have kept the text alone, or nothing."""
    if isinstance(error, BaseException):
        return reason(getattr(error, "cause", None) or error)
    return ((error or "").strip().splitlines() or ["its process was lost"])[-1]


def best_of(trials: list[Trial], mode: str) -> Trial | None:
    """The trial with the best score among those that did not fail."""
    sign = 1 if mode == "max" else -1
    usable = [(t.score, t) for t in trials if t.state != "failed" and t.score is not None]
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
        writer.writerow([*row, *values, t.host, t.node, t.reason])
    write_text(file, text.getvalue())


def write_json(content: dict[str, Any], file: Path) -> None:
    """All of the file or nothing."""
    write_text(file, json.dumps(content, indent=2) + "\n")
