"""Errors and warnings whose messages are for the user, and signals, such as Ctrl-C.

``recbole-pos`` prints only the message of a :class:`PosError`, and ends with its ``exit_code``.
"""

from __future__ import annotations

import copyreg
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def make_resume_command(
    folder: str | os.PathLike[str], plugins: Iterable[str] | None = None, command: str = "run"
) -> str:
    """Return the shell command that resumes a run, search or study from its output folder.

    For example ``recbole-pos run --resume saved/a --plugins='[my_models]'``.

    Args:
        folder: the output folder of the run, search or study.
        plugins: modules that register its models or position schemes, and must be named again.
        command: ``run``, ``tune`` (a search), or ``compare`` (a study, which needs no
            ``--resume``).
    """
    option = "" if command == "compare" else "--resume "
    text = f"recbole-pos {command} {option}{shlex.quote(str(folder))}"
    if plugins:
        text += " --plugins=" + shlex.quote(f"[{','.join(plugins)}]")
    return text


class PosError(Exception):
    """Base of every error raised on purpose; the command line prints only its message.

    Attributes:
        exit_code: exit status of the command that it ends.
    """

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle would call the class with ``args``, which are not always those of ``__init__``
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class UsageError(PosError, ValueError):
    """An option, field, file or name that the user gave is wrong; says which, and what to do."""

    exit_code = 2


class UnknownKey(UsageError):
    """An option that nothing reads.

    Attributes:
        key: name of the option.
    """

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class TrainingError(PosError, RuntimeError):
    """Training cannot continue, for example because the loss is NaN."""


class StorageError(PosError, OSError):
    """A file cannot be written: the disk is full, or there is no permission."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training; the message says how to resume from the last checkpoint."""

    exit_code = 130


class CheckpointError(PosError, RuntimeError):
    """A checkpoint is damaged, of another program, or holds what must not be loaded."""

    exit_code = 2


class RunWarning(UserWarning):
    """Something about a run or its data that is no error: rows left out, an unfinished run."""


@contextmanager
def handle_signals(handler: Callable[[int, Any], object], *numbers: int) -> Iterator[None]:
    """Let a function handle signals of the process, such as Ctrl-C, during a ``with`` block.

    Afterwards the former handlers are back. Outside the main thread, where Python allows no
    handlers, the block just runs.

    Args:
        handler: called with the number of the signal and the frame that it interrupts.
        numbers: the signals, such as ``signal.SIGTERM``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # ``signal.signal`` sets a handler and returns the one before.
    former_handlers = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, former_handler in zip(numbers, former_handlers, strict=True):
            signal.signal(number, former_handler)
