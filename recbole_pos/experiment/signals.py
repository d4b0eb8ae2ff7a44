"""Signals of this process, such as Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handle_signals(handler: Callable[[int, Any], object], *numbers: int) -> Iterator[None]:
    """Let ``handler`` handle signals in a ``with`` block; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_handlers = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, former_handler in zip(numbers, former_handlers, strict=True):
            signal.signal(number, former_handler)
