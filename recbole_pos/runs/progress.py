"""What a person sees while runs are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.live import Live
from rich.text import Text

from recbole_pos.reporter import SECOND, Reporter, repeat


@contextmanager
def live_view(reporter: Reporter, lines: Callable[[], list[str]]) -> Iterator[None]:
    """Show what runs: on a terminal and in a notebook all lines as they change, elsewhere the first
    now and then.

    Args:
        reporter: where it is shown.
        lines: an overview, and a line for each running run; called by another thread.
    """
    terminal = reporter.console.is_terminal and not reporter.console.quiet
    view: AbstractContextManager = Live(
        get_renderable=lambda: Text("\n".join(lines())), console=reporter.console, transient=True
    )
    if reporter.cell:
        view = repeat(SECOND, lambda: reporter.change("\n".join(lines())))
    elif not terminal:
        view = repeat(reporter.every, lambda: reporter.line(lines()[0]))
    with view:
        yield
