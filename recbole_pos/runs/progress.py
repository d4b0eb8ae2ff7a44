"""The progress that is shown while runs are trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rich.live import Live
from rich.text import Text

from recbole_pos.reporter import SECOND, Reporter, call_every
from recbole_pos.values import shown


def live_view(reporter: Reporter, get_lines: Callable[[], list[str]]) -> AbstractContextManager:
    """Return a ``with`` block that shows the progress of runs.

    A terminal and a notebook show all lines as they change; elsewhere the first line is printed
    every ``reporter.every`` seconds. ``get_lines`` returns an overview and a line for each active
    run; another thread calls it.
    """
    console = reporter.console
    if reporter.shows_in_cell:
        return call_every(SECOND, lambda: reporter.update_cell("\n".join(get_lines())))
    if console.is_terminal and not console.quiet:
        return Live(
            get_renderable=lambda: Text("\n".join(get_lines())), console=console, transient=True
        )
    return call_every(reporter.every, lambda: reporter.line(get_lines()[0]))


def format_options(options: dict[str, Any]) -> str:
    """Return options in one line, with real numbers to three digits."""
    return "  ".join(f"{name} {format_value(value)}" for name, value in options.items())


def format_value(value: Any) -> str:
    """Return the value of an option as text, a real number to three digits."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) and len(value) < 100 else shown(value)
