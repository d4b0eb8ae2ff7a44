"""What is printed while something runs, for people and programs: lines, bars, tables, json."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from recbole_pos.errors import StorageError, UsageError
from recbole_pos.files import writing
from recbole_pos.values import shown

LOGGER = logging.getLogger("recbole_pos")
SECOND = 1.0
WIDE = 200  # columns where there is no terminal whose width a table must fit


@dataclass
class Task:
    """Something long: how much of it is done.

    Attributes:
        title: what it is.
        total: how many steps it has; None if no one knows.
        targets: training targets so far, for a speed; 0 where there are none.
    """

    title: str
    total: int | None = None
    done: int = 0
    targets: int = 0
    began: float = field(default_factory=time.monotonic)

    def advance(self, targets: int = 0) -> None:
        """One step more."""
        self.done += 1
        self.targets += targets

    @property
    def speed(self) -> str:
        """Targets a second, or nothing."""
        seconds = time.monotonic() - self.began
        return f"{self.targets / max(seconds, 1e-9):,.0f} targets/s" if self.targets else ""

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        parts = [f"{seconds:,.0f} s"]
        if self.total:
            parts[0] += f", {self.done:,} of {self.total:,}"
            if self.done:
                parts.append(f"about {seconds * (self.total / self.done - 1):,.0f} s left")
        return f"{self.title}: {', '.join([*parts, self.speed] if self.speed else parts)}"


class Reporter:
    """Lines about a run; on a terminal a bar for what takes long, in a notebook one output that
    changes, elsewhere a line a minute.

    Lines go to the logger ``recbole_pos``, too, if an application has configured logging; they are
    not printed if that logger has a handler of its own.

    Args:
        enabled: whether anything is printed.
        as_json: print one json object a line instead, for programs: ``start``, ``epoch`` and
            ``result``, each under ``event``.
        log: a file to which the lines are added too, printed or not.

    Raises:
        UsageError: if the log cannot be opened; StorageError, later, if it or standard output
            cannot be written.
    """

    every = 60.0  # seconds between two lines about the same task

    def __init__(
        self, enabled: bool = True, as_json: bool = False, log: str | Path | None = None
    ) -> None:
        self.as_json = as_json
        quiet = not enabled or as_json or bool(LOGGER.handlers)
        in_cell = in_notebook()  # where variables may pretend a terminal that there is not
        self.console = _Console(
            quiet=quiet,
            highlight=False,
            force_jupyter=False,
            force_terminal=False if in_cell else None,
        )
        self.cell = _Cell() if in_cell and not quiet else None
        if not self.console.is_terminal:  # nothing is cut off in a file
            self.console.width = WIDE
        self._files: list[IO[str]] = [sys.stdout] if enabled and as_json else []
        self._logs: list[Console] = []
        self._path = log
        if log is not None:
            try:
                file = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open as long as this)
            except OSError as error:
                raise UsageError(
                    f"log: cannot write {shown(str(log))}: {error.strerror}"
                ) from error
            if as_json:
                self._files.append(file)
            else:
                self._logs.append(Console(file=file, highlight=False, width=WIDE))

    def line(self, text: str) -> None:
        """Print one line of text."""
        self._print(text)

    def warning(self, text: str) -> None:
        """Print what is easily overlooked."""
        self._log(text, logging.WARNING)
        self._write(f"warning: {text}", [self.console, *self._logs])

    def table(self, table: RenderableType) -> None:
        """Print a table."""
        self._print(table)

    def _print(self, what: RenderableType) -> None:
        self._log(what)
        self._write(what, [self.console, *self._logs])

    def _log(self, what: RenderableType, level: int = logging.INFO) -> None:
        if LOGGER.hasHandlers() and LOGGER.isEnabledFor(level):
            if not isinstance(what, str):
                plain = Console(file=io.StringIO(), width=WIDE)
                plain.print(what)
                what = plain.file.getvalue()  # type: ignore[attr-defined]
            LOGGER.log(level, "%s", what)

    def _write(self, what: RenderableType, consoles: Iterable[Console]) -> None:
        for console in consoles:
            with writing(self._name(console is not self.console)):
                if isinstance(what, str):
                    console.print(what, soft_wrap=True, markup=False)  # [a] is text here
                else:  # nothing is cut off in a file
                    console.print(what, width=None if console.is_terminal else WIDE)

    def _name(self, is_log: bool) -> str | Path:
        return self._path if is_log and self._path is not None else "standard output"

    def event(self, name: str, content: dict[str, Any]) -> None:
        """One json object, where json is wanted."""
        for file in self._files:
            with writing(self._name(file is not sys.stdout)):
                print(json.dumps({"event": name, **content}), file=file, flush=True)

    @contextmanager
    def task(self, title: str, total: int | None = None, shown: bool = True) -> Iterator[Task]:
        """While something runs: a bar that vanishes at the end, or a line a minute.

        Args:
            title: what runs.
            total: of how many steps; None if no one knows.
            shown: false to tell nothing after all.
        """
        task = Task(title, total)
        bar = self.console.is_terminal and not self.console.quiet
        consoles = [] if bar or self.cell or self.console.quiet else [self.console]
        if not shown:
            yield task
            return
        with ExitStack() as shows:
            if minutely := [*self._logs, *consoles]:
                shows.enter_context(repeat(self.every, lambda: self._write(str(task), minutely)))
            if self.cell:
                shows.enter_context(repeat(SECOND, lambda: self.change(str(task))))
            if bar:
                shows.enter_context(_Bar(self.console, task))
            yield task

    def change(self, text: str) -> None:
        """Show a text in the place of the one before, in a notebook."""
        if self.cell:
            self.cell.show(text)

    def epoch(self, line: dict[str, Any], metric: str, best: bool) -> None:
        """One line about a finished epoch."""
        score = (line.get("valid") or {}).get(metric)
        scored = "" if score is None else f"  valid {metric} {score:.4f}{' *' if best else '  '}"
        text = (
            f"epoch {line['epoch']:>3}  loss {line['loss']:.4f}{scored}  "
            f"{line['seconds']:.1f} s  {line['targets_per_second']:,.0f} targets/s"
        )
        if self.cell:
            self._log(text)
            self._write(text, self._logs)
            self.change(text)
        else:
            self.line(text)
        self.event("epoch", {**line, "best": best})

    def results(self, title: str, columns: dict[str, dict[str, float] | None]) -> None:
        """A table with one column per phase (or model) and one row per metric."""
        filled = {name: column for name, column in columns.items() if column}
        table = Table()
        table.add_column("metric")
        for name in filled:
            table.add_column(name, justify="right")
        for metric in dict.fromkeys(metric for column in filled.values() for metric in column):
            table.add_row(metric, *(f"{column[metric]:.4f}" for column in filled.values()))
        self.line(title)
        if not self.cell:  # where the model shows it
            self.table(table)


@contextmanager
def repeat(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Within, another thread calls a function now and then; what it cannot write it tries again."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(seconds):
            with suppress(StorageError, OSError):  # the next line of the run itself says so
                act()

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def in_notebook() -> bool:
    """Whether this is a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


class _Cell:
    """One output of a notebook's cell that changes."""

    handle: Any = None

    def show(self, text: str) -> None:
        """Print a text in the place of the one before."""
        from IPython.display import display  # installed wherever a notebook runs

        content = {"text/plain": text}
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


class _Console(Console):
    """Rich's, which would end the process, silently, where nothing reads any more."""

    def on_broken_pipe(self) -> None:
        """Rich's hook, within the handling of the error."""
        raise  # noqa: PLE0704


class _Bar(Progress):
    """A bar that reads a task whenever it draws itself, so that the task pays nothing for it."""

    def __init__(self, console: Console, task: Task) -> None:
        self.watched = task
        known = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        unknown = (BarColumn(), TimeElapsedColumn())
        super().__init__(
            TextColumn("{task.description}"),
            *(known if task.total else unknown),
            TextColumn("{task.fields[speed]}"),
            console=console,
            transient=True,
        )
        self.row = self.add_task(task.title, total=task.total, speed="")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Rich's hook, ten times a second."""
        if self.tasks:
            self.update(self.row, completed=self.watched.done, speed=self.watched.speed)
        yield from super().get_renderables()
