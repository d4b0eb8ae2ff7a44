"""What a person sees while a search runs: a line for every trial that ends, and how it stands."""

from __future__ import annotations

import math
import time
from typing import Any

from ray.tune import Callback

from recbole_pos.screen import Screen
from recbole_pos.tune.searchers import BEST
from recbole_pos.tune.trial import FAILURE


def show_options(options: dict[str, Any]) -> str:
    """Options in one line, numbers to three digits."""
    return "  ".join(f"{name} {_short(value)}" for name, value in options.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def own_report(last: dict[str, Any] | None, number: int) -> dict[str, Any]:
    """The last report, or nothing where it is not that of trial ``number``: before its first one,
    a trial in a process that another trial used has the other's."""
    last = last or {}
    return last if (last.get("config") or {}).get("number") == number else {}


def _last(trial: Any) -> dict[str, Any]:
    return own_report(trial.last_result, trial.config["number"])


def state_of(status: str, last: dict[str, Any]) -> str:
    """finished, stopped (by the scheduler) or failed; empty for a trial that has not ended."""
    if status == "ERROR" or last.get(FAILURE):
        return "failed"
    if status != "TERMINATED":
        return ""
    return "finished" if last.get("ended") else "stopped"


class Progress(Callback):
    """Prints; holds plain values only, since Ray pickles it with the search.

    Args:
        metric: its name.
        mode: max or min.
        total: how many trials there will be.
        every: seconds between lines about the whole.
        verbose: whether to print.
    """

    def __init__(
        self, metric: str, mode: str, total: int, verbose: bool = True, every: float = 30.0
    ) -> None:
        self.metric, self.mode, self.total, self.every = metric, mode, total, every
        self.verbose = verbose
        self.began = self.told = time.time()

    def setup(self, *given: Any, **info: Any) -> None:
        """Ray's hook: a search starts or is resumed."""
        self.began = self.told = time.time()

    def _line(self, text: str) -> None:
        Screen(self.verbose).line(text)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: a trial ended by itself, or was stopped."""
        last = _last(trial)
        name, state = f"trial {trial.config['number']:>3}", state_of("TERMINATED", last)
        if state == "failed":
            self._line(f"{name}  failed: {last[FAILURE]}")
        else:
            best = self._best(trials)
            mark = "*" if best is trial else " "
            self._line(
                f"{name}  {state:8}  {self.metric} {last.get(BEST, math.nan):.4f}{mark} "
                f"epoch {last.get('epoch', 0):>3}  {last.get('seconds', 0):>6.1f} s  "
                f"{show_options(trial.config['options'])}"
            )

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: the process of a trial was lost too often."""
        self._line(
            f"trial {trial.config['number']:>3}  failed: its process was lost again and again"
        )

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray's hook: the process of a trial was lost; it will be taken up again."""
        epoch = _last(trial).get("epoch", 0)
        self._line(
            f"trial {trial.config['number']:>3}  lost its process or machine after epoch {epoch}; "
            "it is taken up from its last checkpoint"
        )

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Ray's hook, many times a second."""
        if time.time() - self.told < self.every:
            return
        self.told = time.time()
        states = [state_of(trial.status, _last(trial)) for trial in trials]
        ended = {s: states.count(s) for s in ("finished", "stopped", "failed") if s in states}
        running = [t for t in trials if t.status == "RUNNING"]
        epochs = [f"{t.config['number']} (epoch {_last(t).get('epoch', 0)})" for t in running]
        best = self._best(trials)
        told = (
            f", best {best.last_result[BEST]:.4f} (trial {best.config['number']})" if best else ""
        )
        counts = ", ".join(f"{n} {s}" for s, n in ended.items()) or "none"
        minutes, seconds = divmod(int(time.time() - self.began), 60)
        self._line(
            f"{minutes}:{seconds:02d}  ended {sum(ended.values())} of {self.total} ({counts}), "
            f"running {', '.join(epochs[:8]) or 'none'}{' ...' if len(epochs) > 8 else ''}{told}"
        )

    def _best(self, trials: list[Any]) -> Any:
        sign = 1 if self.mode == "max" else -1
        scored = [trial for trial in trials if math.isfinite(_last(trial).get(BEST, math.nan))]
        return max(scored, key=lambda trial: sign * _last(trial)[BEST], default=None)
