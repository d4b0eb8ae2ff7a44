"""What is printed while something runs, for people and programs: lines, bars, tables, json.

Everything that reports takes a :class:`Reporter`, which knows where its output goes: a terminal, a
notebook's cell, a file or pipe, a program that reads json, or the logger ``recbole_pos``.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rich import progress
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from recbole_pos.files import name_write_errors

LOGGER = logging.getLogger("recbole_pos")
SECOND = 1.0  # seconds between two updates of a notebook's cell
WIDE = 200  # columns of output that is not a terminal


@dataclass
class Task:
    """A task that takes long, and how far it is.

    Attributes:
        title: what is done, as the progress bar says it.
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

    @property
    def speed(self) -> str:
        """Training targets per second as text; empty without targets."""
        seconds = time.monotonic() - self.began
        return f"{self.targets / max(seconds, 1e-9):,.0f} targets/s" if self.targets else ""

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
        return f"{text}, {self.speed}" if self.speed else text


class Reporter:
    """Lines about a run, with a progress bar on a terminal, and a line a minute elsewhere.

    In a notebook, one output changes instead. Lines go to the logger ``recbole_pos``, too, if an
    application has configured logging; they are not printed if that logger has its own handler.

    Attributes:
        every: seconds between two lines about the same task.
        console: prints text and tables, in a way that suits where the output goes; prints nothing
            if it is ``quiet``.
        shows_in_cell: whether texts replace each other in the output of a notebook's cell.
    """

    every = 60.0

    def __init__(self, enabled: bool = True, as_json: bool = False) -> None:
        """Find out where output goes: to a terminal, a notebook's cell, a pipe or file, or nowhere.

        Args:
            enabled: whether anything is printed.
            as_json: print one json object a line for programs (``start``, ``epoch`` and ``result``,
                each under ``event``), and no lines, bars or tables.
        """
        # An application that has given the logger ``recbole_pos`` a handler gets the lines there,
        # and nothing is printed.
        self._prints_json = enabled and as_json
        is_quiet = not enabled or as_json or bool(LOGGER.handlers)

        # A notebook has imported IPython, whose shell then has a kernel.
        ipython = sys.modules.get("IPython")
        is_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
        self.shows_in_cell = is_notebook and not is_quiet
        self._cell_output: Any = None  # the output of the cell, once there is one

        # Rich itself finds out whether this is a terminal, unless it is a notebook, whose
        # environment variables may claim a terminal that is not there.
        self.console = _Console(
            quiet=is_quiet,
            highlight=False,
            force_jupyter=False,
            force_terminal=False if is_notebook else None,
        )
        if not self.console.is_terminal:
            self.console.width = WIDE  # lines in a pipe or file are not broken at a screen's edge

    def warning(self, text: str) -> None:
        """Print a line that begins with ``warning:``, and log it at that level."""
        self.line(text, logging.WARNING)

    def line(
        self, content: RenderableType, level: int = logging.INFO, on_screen: bool = True
    ) -> None:
        """Send text or a table to the logger ``recbole_pos`` and to the screen.

        Args:
            content: the text, or a table of rich.
            level: its level for the logger; on the screen, ``warning:`` stands before a warning.
            on_screen: whether to print it as well.
        """
        if LOGGER.hasHandlers() and LOGGER.isEnabledFor(level):
            # Render to plain text. Without these arguments rich would write to a notebook's cell,
            # and add codes for colours if the variable FORCE_COLOR is set.
            plain = Console(
                file=io.StringIO(),
                width=WIDE,
                highlight=False,
                force_jupyter=False,
                force_terminal=False,
            )
            with plain.capture() as rendered:
                plain.print(content, soft_wrap=isinstance(content, str), markup=False)
            LOGGER.log(level, "%s", rendered.get().removesuffix("\n"))
        if on_screen:
            self._print(f"warning: {content}" if level == logging.WARNING else content)

    def _print(self, content: RenderableType) -> None:
        """Print text or a table; long text is wrapped by the terminal, and never cut off."""
        with name_write_errors("standard output"):
            # Without markup, in which rich would take the [a] of a text for the name of a style.
            self.console.print(content, soft_wrap=isinstance(content, str), markup=False)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Print one line with a json object, if output for programs was requested (``as_json``).

        Args:
            name: what has happened (``start``, ``epoch``, ``result``), which becomes its ``event``.
            content: its other keys.
        """
        if self._prints_json:
            with name_write_errors("standard output"):
                print(json.dumps({"event": name, **content}), flush=True)

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
        elif self.shows_in_cell:  # the text in a notebook's cell is replaced every SECOND
            with call_every(SECOND, lambda: self.update_cell(str(task))):
                yield task
        elif self.console.is_terminal:
            with self._show_bar(task):
                yield task
        else:  # a line every minute
            with call_every(self.every, lambda: self._print(str(task))):
                yield task

    @contextmanager
    def _show_bar(self, task: Task) -> Iterator[None]:
        """Show a progress bar of a task on the terminal while a ``with`` block runs.

        The bar has the number of steps and the time left if the number is known, else the time so
        far.
        """
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            *([progress.MofNCompleteColumn()] if task.total else []),
            progress.TimeRemainingColumn() if task.total else progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[speed]}"),
            console=self.console,
            transient=True,
        )
        row = bar.add_task(task.title, total=task.total, speed="")

        def update() -> None:
            bar.update(row, completed=task.done, speed=task.speed)

        with bar, call_every(0.1, update):
            yield

    def live(self, get_lines: Callable[[], list[str]]) -> AbstractContextManager:
        """Return a ``with`` block that shows the progress of several runs.

        A terminal and a notebook show an overview and a line for each run, as they change. A file
        or pipe gets only the overview, every minute (``self.every``).

        Args:
            get_lines: returns the overview as the first line, then a line for each active run. It
                is called from another thread.
        """
        if self.shows_in_cell:  # a notebook: replace the text in the output of its cell
            return call_every(SECOND, lambda: self.update_cell("\n".join(get_lines())))
        if self.console.is_terminal and not self.console.quiet:
            # rich's Live draws the text again and again in the same place
            return Live(
                get_renderable=lambda: Text("\n".join(get_lines())),
                console=self.console,
                transient=True,
            )
        # ``call_every`` calls a function every so many seconds, in another thread
        return call_every(self.every, lambda: self.line(get_lines()[0]))

    def update_cell(self, text: str) -> None:
        """Replace the text that a notebook's cell shows for this reporter; do nothing elsewhere.

        The first call adds an output to the cell, and later calls change it, so that progress takes
        one line.

        Args:
            text: the new text.
        """
        if not self.shows_in_cell:
            return
        from IPython.display import display  # installed wherever a notebook runs

        content = {"text/plain": text}
        if self._cell_output is None:
            self._cell_output = display(content, raw=True, display_id=True)
        else:
            self._cell_output.update(content, raw=True)

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
        self.line(text, on_screen=not self.shows_in_cell)  # the logger gets it in any case
        self.update_cell(text)
        self.write_json("epoch", {**line, "best": is_best})

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
        if not self.shows_in_cell:  # the result of a notebook's cell shows the metrics itself
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


class _Console(Console):
    """Rich's console, without its habit of ending the process silently at a closed pipe."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich has caught, and handles by calling this method."""
        raise  # noqa: PLE0704
