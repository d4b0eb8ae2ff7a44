"""What happens while a search runs: written to its record, and printed for a person."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.tune import Callback

from recbole_pos.screen import Screen
from recbole_pos.tune.outcome import ENDED, LOST, REPORTED, TRIAL, Record, Trial, best_of
from recbole_pos.tune.trial import FAILURE, INFRASTRUCTURE, reason
from recbole_pos.values import shown


def show_options(options: dict[str, Any]) -> str:
    """Options in one line, numbers to three digits."""
    return "  ".join(f"{name} {_short(value)}" for name, value in options.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) and len(value) < 100 else shown(value)


class Progress(Callback):
    """Follows a search by Ray's hooks; holds plain values only, since Ray pickles it.

    Args:
        record: of the trials.
        metric: its name.
        mode: max or min.
        total: how many trials there will be.
        verbose: whether to print.
        every: seconds between lines about the whole.
    """

    def __init__(
        self,
        record: Record,
        metric: str,
        mode: str,
        total: int,
        verbose: bool = True,
        every: float = 30.0,
    ) -> None:
        self.record = record
        self.metric, self.mode, self.total, self.every = metric, mode, total, every
        self.verbose = verbose
        self.met: set[str] = set()
        self.began = self.printed = time.time()

    def _line(self, text: str) -> None:
        Screen(self.verbose).line(text)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Ray's hook, many times a second."""
        self._meet(trials)
        if time.time() - self.printed >= self.every:
            self.printed = time.time()
            self._line(self._overview(trials))

    def _meet(self, trials: list[Any]) -> None:
        """Record new trials in the order of their numbers, before anything happens to them."""
        for trial in trials:
            if trial.trial_id not in self.met:
                self.met.add(trial.trial_id)
                begun = {"options": trial.config["options"], "folder": trial_folder(trial)}
                self.record.add({TRIAL: trial.config["number"], **begun})

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Ray's hook: a trial has validated an epoch, or says why it failed."""
        self._meet(trials)
        if FAILURE in result:
            self._end(trial, LOST if result[INFRASTRUCTURE] else "failed", result[FAILURE])
        else:
            kept = {key: result[key] for key in REPORTED if key in result}
            self.record.add({TRIAL: trial.config["number"], **kept})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: a trial ended by itself, or was stopped."""
        self._meet(trials)
        known = self._known(trial)
        if known.state == "interrupted":  # has not said that it failed
            self._end(trial, "finished" if known.ended else "stopped")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: the process of a trial was lost too often; if in an earlier search as well,
        it is not the fault of the machine."""
        self._meet(trials)
        self._end(trial, "failed" if self._known(trial).losses else LOST, _why(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: the process of a trial was lost; it will be started again."""
        self._meet(trials)
        known = self._known(trial)
        self._line(
            f"trial {known.number:>3}  lost its process or machine after epoch {known.epochs}; "
            "it resumes from its last checkpoint"
        )

    def _known(self, trial: Any) -> Trial:
        return self.record.trials[trial.config["number"]]

    def _end(self, trial: Any, state: str, why: str = "") -> None:
        """Record and print how a trial ended."""
        ending = {"state": state, "reason": why}
        known = self.record.add({TRIAL: trial.config["number"], **ending})
        if why:
            self._line(f"trial {known.number:>3}  {state}: {why}")
            return
        mark = "*" if known is best_of(self.record.trials, self.mode) else " "
        score = math.nan if known.score is None else known.score
        self._line(
            f"trial {known.number:>3}  {state:8}  {self.metric} {score:.4f}{mark} "
            f"epoch {known.epochs:>3}  {known.seconds:>6.1f} s  {show_options(known.options)}"
        )

    def _overview(self, trials: list[Any]) -> str:
        states = [trial.state for trial in self.record.trials]
        counts = [f"{states.count(state)} {state}" for state in (*ENDED, LOST) if state in states]
        running = [self._known(trial) for trial in trials if trial.status == "RUNNING"]
        epochs = [f"{trial.number} (epoch {trial.epochs})" for trial in running]
        best = best_of(self.record.trials, self.mode)
        found = f", best {best.score:.4f} (trial {best.number})" if best else ""
        minutes, seconds = divmod(int(time.time() - self.began), 60)
        return (
            f"{minutes}:{seconds:02d}  ended {len(self.record.ended)} of {self.total} "
            f"({', '.join(counts) or 'none'}), running {', '.join(epochs[:8]) or 'none'}"
            f"{' ...' if len(epochs) > 8 else ''}{found}"
        )


def trial_folder(trial: Any) -> str:
    """The name of a trial's folder within Ray's: of its own for each time it is begun, since Ray
    counts checkpoints from 0 again."""
    earlier = len(trial.config.get("earlier", []))
    return f"trial_{trial.config['number']:05d}" + (f"-{earlier}" if earlier else "")


def _why(trial: Any) -> str:
    """Why Ray gave up a trial."""
    try:
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    except Exception:  # of a class that cannot be read back, or none was kept
        return "its process was lost"
    return reason(getattr(error, "cause", None) or error)
