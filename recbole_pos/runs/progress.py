"""What a person sees while runs are trained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.live import Live
from rich.text import Text

from recbole_pos.reporter import Reporter


@contextmanager
def live_view(reporter: Reporter, lines: Callable[[], list[str]]) -> Iterator[None]:
    """Show what runs: on a terminal all lines as they change, elsewhere the first now and then.

    Args:
        reporter: where it is shown.
        lines: an overview, and a line for each running run; called by another thread.
    """
    over = threading.Event()

    def report() -> None:
        while not over.wait(reporter.every):
            reporter.line(lines()[0])

    terminal = reporter.console.is_terminal and not reporter.console.quiet
    view = Live(
        get_renderable=lambda: Text("\n".join(lines())), console=reporter.console, transient=True
    )
    if not terminal:
        threading.Thread(target=report, daemon=True).start()
    try:
        with view if terminal else nullcontext():
            yield
    finally:
        over.set()
