"""What is printed while something runs: lines, progress and tables.

Everything that reports takes a :class:`Reporter`, which knows where its output goes: a terminal, a
file, pipe or notebook, or the logger ``recbole_pos``.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from recbole_pos.files import name_write_errors

LOGGER = logging.getLogger("recbole_pos")
WIDE = 200  # columns of output that is not a terminal


@dataclass
class Task:
    """A task that takes long, and how far it is.

    Attributes:
        title: what is done.
        total: number of its steps; None if it is not known.
        done: number of steps that are done.
        targets: number of items that the model has learned to predict in these steps.
        began: time at which it began, from ``time.monotonic``.
    """

    title: str
    total: int | None = None
    done: int = 0
    targets: int = 0
    began: float = field(default_factory=time.monotonic)

    def advance(self, targets: int = 0) -> None:
        """Count one more step, in which the model has learned to predict so many items."""
        self.done += 1
        self.targets += targets

    def __str__(self) -> str:
        """Return title, seconds and, where known, steps done, time left and speed.

        For example ``epoch 3: 60 s, 50 of 200, about 180 s left, 12,000 targets/s``.
        """
        seconds = time.monotonic() - self.began
        text = f"{self.title}: {seconds:,.0f} s"
        if self.total:
            text += f", {self.done:,} of {self.total:,}"
            if self.done:
                text += f", about {seconds * (self.total / self.done - 1):,.0f} s left"
        if self.targets:
            text += f", {self.targets / max(seconds, 1e-9):,.0f} targets/s"
        return text


class Reporter:
    """Lines about a run: one that changes on a terminal, and one a minute elsewhere.

    Lines go to the logger ``recbole_pos``, too, if an application has configured logging; they are
    not printed if that logger has its own handler.

    Attributes:
        every: seconds between two lines about the same task.
        console: prints text and tables, in a way that suits where the output goes; prints nothing
            if it is ``quiet``.
    """

    every = 60.0

    def __init__(self, enabled: bool = True) -> None:
        """Find out where output goes: to a terminal, a pipe, file or notebook, or nowhere.

        Args:
            enabled: whether anything is printed.
        """
        # An application that has given the logger ``recbole_pos`` a handler gets the lines there,
        # and nothing is printed.
        is_quiet = not enabled or bool(LOGGER.handlers)

        # Rich's own test for a terminal would believe FORCE_COLOR, which kernels of notebooks set.
        self.console = Console(
            quiet=is_quiet,
            highlight=False,
            force_jupyter=False,
            force_terminal=sys.stdout.isatty(),
        )
        if not self.console.is_terminal:
            self.console.width = WIDE  # lines in a pipe or file are not broken at a screen's edge

    def warning(self, text: str) -> None:
        """Print a line that begins with ``warning:``, and log it at that level."""
        self.line(text, logging.WARNING)

    def line(self, content: RenderableType, level: int = logging.INFO) -> None:
        """Send text or a table to the logger ``recbole_pos`` and to the screen.

        Args:
            content: the text, or a table of rich.
            level: its level for the logger; on the screen, ``warning:`` stands before a warning.
        """
        if LOGGER.hasHandlers() and LOGGER.isEnabledFor(level):
            # Render to plain text. Without these arguments rich would write to a notebook's cell,
            # and add codes for colours if the variable FORCE_COLOR is set.
            file = io.StringIO()
            plain = Console(file=file, width=WIDE, force_jupyter=False, force_terminal=False)
            plain.print(content, soft_wrap=isinstance(content, str), markup=False)
            LOGGER.log(level, "%s", file.getvalue().removesuffix("\n"))
        self._print(f"warning: {content}" if level == logging.WARNING else content)

    def _print(self, content: RenderableType) -> None:
        """Print text or a table; long text is wrapped by the terminal, and never cut off."""
        with name_write_errors("standard output"):
            # Without markup, in which rich would take the [a] of a text for the name of a style.
            self.console.print(content, soft_wrap=isinstance(content, str), markup=False)

    @contextmanager
    def task(self, title: str, total: int | None = None, shown: bool = True) -> Iterator[Task]:
        """Yield a task, whose progress is shown until the ``with`` block ends.

        The block calls ``task.advance()`` after each step.

        Args:
            title: what is done.
            total: number of its steps, if it is known.
            shown: whether to show the progress.
        """
        task = Task(title, total)
        if not shown or self.console.quiet:
            yield task
        elif self.console.is_terminal:
            with self._show_status(lambda: str(task)):
                yield task
        else:  # a line every minute
            with call_every(self.every, lambda: self._print(str(task))):
                yield task

    def live(self, get_lines: Callable[[], list[str]]) -> AbstractContextManager[None]:
        """Return a ``with`` block that shows the progress of several runs.

        A terminal shows an overview and a line for each run, as they change. A file, pipe or
        notebook gets only the overview, every minute (``self.every``).

        Args:
            get_lines: returns the overview as the first line, then a line for each active run. It
                is called from another thread.
        """
        if self.console.is_terminal and not self.console.quiet:
            return self._show_status(lambda: "\n".join(get_lines()))
        # ``call_every`` calls a function every so many seconds, in another thread
        return call_every(self.every, lambda: self.line(get_lines()[0]))

    @contextmanager
    def _show_status(self, get_text: Callable[[], str]) -> Iterator[None]:
        """Show a text on the terminal, which changes in its place and vanishes with the block.

        Args:
            get_text: returns the text of the moment. It is called from another thread.
        """
        with self.console.status("") as status:
            # a Text and no str, in which rich would take the [a] of a text for the name of a style
            with call_every(0.1, lambda: status.update(Text(get_text()))):
                yield

    def show_epoch(self, line: dict[str, Any], metric: str, is_best: bool) -> None:
        """Print how an epoch went: loss, validation metric, seconds and speed.

        Args:
            line: figures of the epoch, a line of the run's metrics.jsonl. ``valid`` has the metrics
                of validation by name, if the epoch was validated.
            metric: name of the metric to print.
            is_best: whether its value is the best so far, which is marked with ``*``.
        """
        validation = ""
        score = (line.get("valid") or {}).get(metric)
        if score is not None:
            validation = f"  valid {metric} {score:.4f}{' *' if is_best else '  '}"
        text = (
            f"epoch {line['epoch']:>3}  loss {line['loss']:.4f}{validation}  "
            f"{line['seconds']:.1f} s  {line['targets_per_second']:,.0f} targets/s"
        )
        self.line(text)

    def show_results(self, title: str, columns: dict[str, dict[str, float] | None]) -> None:
        """Print a table of metrics with a row for each metric and a column for each phase or model.

        Args:
            title: text above the table.
            columns: name of a column (``valid``, ``test``) -> value by metric, None where there is
                none.
        """
        # A column for each phase or model that has metrics, and a row for each metric in it.
        scores = {name: values for name, values in columns.items() if values}
        table = Table("metric", *(Column(name, justify="right") for name in scores))
        metrics = dict.fromkeys(metric for values in scores.values() for metric in values)
        for metric in metrics:
            table.add_row(metric, *(f"{values[metric]:.4f}" for values in scores.values()))
        self.line(title)
        self.line(table)


@contextmanager
def call_every(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Call a function every so many seconds in another thread, while a ``with`` block runs.

    Errors of writing are ignored: the next call tries again, and the run itself reports a full disk
    when it writes.

    Args:
        seconds: time between two calls, and before the first.
        function: what to call; its result is not used.
    """
    stopped = threading.Event()

    # ``wait`` returns False after so many seconds, and True at once when the block has ended.
    def loop() -> None:
        while not stopped.wait(seconds):
            with suppress(OSError):
                function()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
