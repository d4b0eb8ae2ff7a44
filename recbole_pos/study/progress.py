"""What a person is told while a study trains."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.live import Live
from rich.text import Text

from recbole_pos.screen import Screen
from recbole_pos.study.plan import Plan
from recbole_pos.study.results import DONE, FAILED
from recbole_pos.study.shown import span
from recbole_pos.study.work import Job, Work


class StudyProgress:
    """A line for the study and one for each running fit; where no terminal is, a line a minute.

    Args:
        screen: where lines are printed.
        plan: of the study.
        work: what has ended, and what not.
    """

    def __init__(self, screen: Screen, plan: Plan, work: Work) -> None:
        self.screen, self.plan, self.work = screen, plan, work
        self.seconds: list[float] = []
        self.running: Mapping[Any, tuple[Job, float]] = {}

    @contextmanager
    def shown(self, running: Mapping[Any, tuple[Job, float]]) -> Iterator[None]:
        """While fits run.

        Args:
            running: task -> job and when it began, as it changes.
        """
        self.running = running
        over = threading.Event()
        terminal = self.screen.console.is_terminal and not self.screen.console.quiet
        live = Live(get_renderable=self._lines, console=self.screen.console, transient=True)
        teller = threading.Thread(target=self._tell, args=(over,), daemon=True)
        if not terminal:
            teller.start()
        try:
            with live if terminal else nullcontext():
                yield
        finally:
            over.set()

    def _tell(self, over: threading.Event) -> None:
        while not over.wait(self.screen.every):
            self.screen.line(str(self))

    def ended(self, job: Job, found: Mapping[str, Any], seconds: float) -> None:
        """A line about a fit that has ended."""
        if found["status"] == DONE:
            self.seconds.append(seconds)
            metric, best = self.plan.metrics[0], found.get("best_valid") or {}
            valid = f"  valid {metric} {best[metric]:.4f}" if metric in best else ""
            told = f"{found['epochs']} epochs{valid}  {span(seconds)}"
        else:
            told = f"failed: {found.get('reason', '')}"
        count = len(self.work.fits)
        self.screen.line(f"[{count - self.work.pending()} of {count}] {job.fit.name}: {told}")

    def __str__(self) -> str:
        count, left = len(self.work.fits), self.work.pending()
        failed = sum(status == FAILED for status in self.work.status.values())
        parts = [f"{count - left - failed} of {count} fits done", f"{len(self.running)} running"]
        parts += [f"{failed} failed"] if failed else []
        if self.seconds and left:
            each = statistics.mean(self.seconds)
            parts.append(f"about {span(each * left / max(len(self.running), 1))} left")
        return f"{self.plan.title}: {', '.join(parts)}"

    def _lines(self) -> Text:
        lines = [str(self)]
        for job, since in list(self.running.values()):
            parts = [span(time.monotonic() - since)]
            if not self.work.folder.storage:  # else it is on another machine
                epochs = _epochs(self.work.folder.run(job.digest).metrics)
                parts.insert(0, f"epoch {epochs} of {job.config['epochs']}")
            lines.append(f"  {job.fit.name}: {', '.join(parts)}")
        return Text("\n".join(lines))


def _epochs(file: Any) -> int:
    """How many epochs a run has finished."""
    try:
        with open(file, "rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0
