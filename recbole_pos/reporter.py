"""What is printed while something runs, for people and programs: lines, bars, tables, json."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rich import progress
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from recbole_pos.files import name_write_errors

LOGGER = logging.getLogger("recbole_pos")
SECOND = 1.0
WIDE = 200  # columns of output that is not a terminal


@dataclass
class Task:
    """A long task, and its progress: steps in all (if known) and done, and training targets."""

    title: str
    total: int | None = None
    done: int = 0
    targets: int = 0
    began: float = field(default_factory=time.monotonic)

    def advance(self, targets: int = 0) -> None:
        """Count one more step, and its number of training targets."""
        self.done += 1
        self.targets += targets

    @property
    def speed(self) -> str:
        """Training targets per second as text; empty without targets."""
        seconds = time.monotonic() - self.began
        return f"{self.targets / max(seconds, 1e-9):,.0f} targets/s" if self.targets else ""

    def __str__(self) -> str:
        """Return title, seconds and, where known, steps done, time left and speed."""
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

    Args:
        enabled: whether anything is printed.
        as_json: print one json object a line instead, for programs: ``start``, ``epoch`` and
            ``result``, each under ``event``.
    """

    every = 60.0  # seconds between two lines about the same task

    def __init__(self, enabled: bool = True, as_json: bool = False) -> None:
        is_quiet = not enabled or as_json or bool(LOGGER.handlers)
        is_notebook = _is_notebook()
        self.shows_in_cell = is_notebook and not is_quiet
        self._cell_output: Any = None
        self.console = _Console(
            quiet=is_quiet,
            highlight=False,
            force_jupyter=False,
            # environment variables of a notebook may claim a terminal that is not there
            force_terminal=False if is_notebook else None,
        )
        if not self.console.is_terminal:
            self.console.width = WIDE
        self._prints_json = enabled and as_json

    def warning(self, text: str) -> None:
        """Print a line marked as a warning."""
        self.line(text, logging.WARNING)

    def line(
        self, content: RenderableType, level: int = logging.INFO, on_screen: bool = True
    ) -> None:
        """Send a line of text, or a table, to the logger and the screen."""
        if LOGGER.hasHandlers() and LOGGER.isEnabledFor(level):
            # by itself rich writes to the cell of a notebook, and styles if FORCE_COLOR is set
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
        """Print text or a table; text is never cut off."""
        with name_write_errors("standard output"):
            # without markup, since [a] in a text is only text
            self.console.print(content, soft_wrap=isinstance(content, str), markup=False)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Print a json object, if json was requested."""
        if self._prints_json:
            with name_write_errors("standard output"):
                print(json.dumps({"event": name, **content}), flush=True)

    @contextmanager
    def task(self, title: str, total: int | None = None, shown: bool = True) -> Iterator[Task]:
        """Yield a task of ``total`` steps, if known; in a ``with`` block, show its progress."""
        task = Task(title, total)
        with ExitStack() as stack:
            if shown:
                self._show(task, stack)
            yield task

    def _show(self, task: Task, stack: ExitStack) -> None:
        """Show a task as a bar, in the cell, or as a line a minute, until the stack is closed."""
        if self.shows_in_cell:
            stack.enter_context(call_every(SECOND, lambda: self.update_cell(str(task))))
        elif self.console.is_terminal and not self.console.quiet:
            self._show_bar(task, stack)
        elif not self.console.quiet:
            stack.enter_context(call_every(self.every, lambda: self._print(str(task))))

    def _show_bar(self, task: Task, stack: ExitStack) -> None:
        """Show a progress bar of a task on the terminal, until the stack is closed."""
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
        stack.enter_context(bar)
        stack.enter_context(
            call_every(0.1, lambda: bar.update(row, completed=task.done, speed=task.speed))
        )

    def live(self, get_lines: Callable[[], list[str]]) -> AbstractContextManager:
        """Return a ``with`` block that shows the progress of several runs.

        A terminal and a notebook show all lines as they change; elsewhere the first line is printed
        every ``every`` seconds. ``get_lines`` returns an overview and a line for each active run;
        another thread calls it.
        """
        if self.shows_in_cell:
            return call_every(SECOND, lambda: self.update_cell("\n".join(get_lines())))
        if self.console.is_terminal and not self.console.quiet:
            return Live(
                get_renderable=lambda: Text("\n".join(get_lines())),
                console=self.console,
                transient=True,
            )
        return call_every(self.every, lambda: self.line(get_lines()[0]))

    def update_cell(self, text: str) -> None:
        """Replace the text that a notebook's cell shows; do nothing elsewhere."""
        if not self.shows_in_cell:
            return
        from IPython.display import display  # installed wherever a notebook runs

        content = {"text/plain": text}
        if self._cell_output is None:
            self._cell_output = display(content, raw=True, display_id=True)
        else:
            self._cell_output.update(content, raw=True)

    def show_epoch(self, line: dict[str, Any], metric: str, is_best: bool) -> None:
        """Print an epoch's line of metrics.jsonl with a validation metric, marked if it is best."""
        validation = ""
        score = (line.get("valid") or {}).get(metric)
        if score is not None:
            validation = f"  valid {metric} {score:.4f}{' *' if is_best else '  '}"
        text = (
            f"epoch {line['epoch']:>3}  loss {line['loss']:.4f}{validation}  "
            f"{line['seconds']:.1f} s  {line['targets_per_second']:,.0f} targets/s"
        )
        self.line(text, on_screen=not self.shows_in_cell)
        self.update_cell(text)
        self.write_json("epoch", {**line, "best": is_best})

    def show_results(self, title: str, columns: dict[str, dict[str, float] | None]) -> None:
        """Print a table with a column for each phase (or model) and a row for each metric."""
        scores = {name: metrics for name, metrics in columns.items() if metrics}
        table = Table("metric", *(Column(name, justify="right") for name in scores))
        for metric in dict.fromkeys(metric for metrics in scores.values() for metric in metrics):
            table.add_row(metric, *(f"{metrics[metric]:.4f}" for metrics in scores.values()))
        self.line(title)
        if not self.shows_in_cell:  # the result of a notebook's cell shows the metrics itself
            self.line(table)


@contextmanager
def call_every(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Call a function every ``seconds`` in another thread while the ``with`` block runs.

    Errors of writing are ignored: the next call tries again, and the run itself reports a full disk
    when it writes.
    """
    stopped = threading.Event()

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
    """Rich's console, which would silently end the process at a closed pipe."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught."""
        raise  # noqa: PLE0704


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
