"""Tasks that kill their process; a module of its own, since processes import it within a second."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def square_but_die_once(folder: str, number: int) -> int:
    """The square; the first process that is asked for that of 2 dies."""
    marker = Path(folder, "died")
    if number == 2 and not marker.exists():
        marker.touch()
        die(folder, number)
    return number * number


def die(job: object, number: int) -> None:
    """End this process as a kill does."""
    os.kill(os.getpid(), signal.SIGKILL)
