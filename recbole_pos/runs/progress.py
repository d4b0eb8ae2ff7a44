"""What a person sees while runs are trained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.live import Live
from rich.text import Text

from recbole_pos.screen import Screen


@contextmanager
def live_view(screen: Screen, lines: Callable[[], list[str]]) -> Iterator[None]:
    """Show what runs: on a terminal all lines as they change, elsewhere the first now and then.

    Args:
        screen: where it is shown.
        lines: an overview, and a line for each running run; called by another thread.
    """
    over = threading.Event()

    def report() -> None:
        while not over.wait(screen.every):
            screen.line(lines()[0])

    terminal = screen.console.is_terminal and not screen.console.quiet
    view = Live(
        get_renderable=lambda: Text("\n".join(lines())), console=screen.console, transient=True
    )
    if not terminal:
        threading.Thread(target=report, daemon=True).start()
    try:
        with view if terminal else nullcontext():
            yield
    finally:
        over.set()
