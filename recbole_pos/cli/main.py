"""The command line: ``recbole-pos run | tune | attach | recommend | models | ...``."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recbole_pos.cli.commands import make_parser
from recbole_pos.cli.parser import parse_overrides, split_options
from recbole_pos.errors import Interrupted, PosError, RunWarning, UsageError
from recbole_pos.experiment.environment import handle_signals
from recbole_pos.values import short, shown, suggest

_USUAL_FORMAT = warnings.formatwarning


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: words of the command line; those of this process when None.

    Returns:
        The exit code: 0, 1 (failed), 2 (wrong input), 130 (Ctrl-C) or 143 (SIGTERM).
    """
    words = sys.argv[1:] if argv is None else list(argv)
    warnings.formatwarning = _format_warning  # type: ignore[assignment]
    with _heeding_sigterm() as terminated:
        try:
            _run_command(words)
            return 0
        except KeyboardInterrupt as interrupt:
            print(str(interrupt) or "interrupted", file=sys.stderr)
            return 128 + signal.SIGTERM if terminated.is_set() else Interrupted.exit_code
        except Exception as error:
            if "--debug" in words:
                raise
            return _report(error)


def _run_command(words: list[str]) -> None:
    """Parse a command line, and run its command."""
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words = ["run", *words]  # `recbole-pos -m FPARec ...` is a run, as in RecBole's script
    parser, commands = make_parser()
    options: list[str] = []
    if command := commands.get(words[0]) if words else None:
        if command.get_default("configured"):
            own_words, options = split_options(words[1:], command.options)
            words = [words[0], *own_words]
        if command.get_default("environment"):
            command.read_environment()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        known = [f"--{name}" for name in (command or parser).options if len(name) > 1]
        hint = suggest(f"--{name}", known) if unknown[0].startswith("-") else ""
        raise UsageError(f"no further arguments expected, found {' '.join(unknown)}{hint}")
    try:  # libraries end the process where the working directory was removed
        os.getcwd()
    except OSError as error:
        message = "the working directory is not there any more; change to one that is"
        raise UsageError(message) from error
    if getattr(args, "plugins", None) is not None:
        from recbole_pos.config.plugins import import_named
        from recbole_pos.yaml_files import parse_scalar

        import_named(parse_scalar(args.plugins, "--plugins"))
    args.command(args, *([parse_overrides(options)] if args.configured else []))


def _report(error: Exception) -> int:
    """Print an error in a line, one of custom code with its traceback; return the exit code."""
    if isinstance(error, PosError):
        text, code = str(error), error.exit_code
    elif isinstance(error, OSError):  # of a path that the user named, or of the machine
        file = "" if error.filename is None else f"{shown(error.filename)}: "
        text = f"{file}{error.strerror or shown(str(error))}"
        code = UsageError.exit_code if file else 1
    else:
        from recbole_pos.experiment.diagnosis import is_from_custom_code

        if is_from_custom_code(error):
            traceback.print_exception(error)
            return 1
        first_line = next(iter(str(error).splitlines()), "")  # a compiler's error has hundreds
        text = f"{type(error).__name__}: {first_line}\n(run again with --debug for the traceback)"
        code = 1
    text = re.sub(r"\S{300,}", lambda match: short(match[0]), text)  # must not fill the screen
    print(f"error: {text}", file=sys.stderr)
    return code


def _format_warning(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """Return a warning about a run in one line, without its place in the code."""
    if issubclass(category, RunWarning):
        return f"warning: {message}\n"
    return _USUAL_FORMAT(message, category, *place)


@contextmanager
def _heeding_sigterm() -> Iterator[threading.Event]:
    """Let SIGTERM, which containers send, end the ``with`` block as Ctrl-C does; set if it came."""
    terminated = threading.Event()

    def end(number: int, frame: Any) -> None:
        terminated.set()
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # a shell lets background processes ignore Ctrl-C
            on_ctrl_c = signal.default_int_handler
        on_ctrl_c(signal.SIGINT, frame)

    with handle_signals(end, signal.SIGTERM):
        yield terminated


if __name__ == "__main__":
    sys.exit(main())
