"""The command line: ``recbole-pos run | tune | attach | recommend | models | ...``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from recbole_pos.cli.commands import make_parser
from recbole_pos.cli.parser import Parser, parse_overrides, split_options
from recbole_pos.errors import Interrupted, PosError, RunWarning, UsageError, handle_signals
from recbole_pos.values import shown, suggest

_USUAL_FORMAT = warnings.formatwarning


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: words of the command line; those of this process when None.

    Returns:
        The exit code: 0, 1 (failed), 2 (wrong input), 130 (Ctrl-C), 141 (nothing reads stdout any
        more) or 143 (SIGTERM).
    """
    words = sys.argv[1:] if argv is None else list(argv)
    warnings.formatwarning = _format_warning  # type: ignore[assignment]
    if logging.lastResort is not None:  # prints warnings where nobody has configured logging
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))
    with _interrupt_on_sigterm() as terminated:
        try:
            _run_command(words)
            print(end="", flush=True)
            return 0
        except KeyboardInterrupt as interrupt:
            print(str(interrupt) or "interrupted", file=sys.stderr)
            return 128 + signal.SIGTERM if terminated.is_set() else Interrupted.exit_code
        except BrokenPipeError:  # nothing reads stdout any more (``| head``)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left at exit
            return 128 + signal.SIGPIPE
        except Exception as error:
            if "--debug" in words:
                raise
            return _report(error)


def _run_command(words: list[str]) -> None:
    """Parse a command line, and run its command; raise a UsageError for a wrong argument."""
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words = ["run", *words]  # `recbole-pos -m FPARec ...` is a run, as in RecBole's script
    parser, command_parsers = make_parser()
    command_parser = command_parsers.get(words[0]) if words else None
    options: list[str] = []
    if command_parser is not None and command_parser.get_default("configured"):
        own_words, options = split_options(words[1:], command_parser.options)
        words = [words[0], *own_words]
    args, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_unknown(unknown, command_parser or parser)
    if getattr(args, "plugins", None) is not None:
        from recbole_pos.config.plugins import import_named
        from recbole_pos.yaml_files import parse_scalar

        import_named(parse_scalar(args.plugins, "--plugins"))
    if args.configured:
        args.command(args, parse_overrides(options))
    else:
        args.command(args)


def _refuse_unknown(unknown: list[str], parser: Parser) -> NoReturn:
    """Raise a UsageError for words that the parser does not know; suggest a similar option."""
    hint = ""
    if unknown[0].startswith("-"):
        name = unknown[0].lstrip("-").partition("=")[0]
        hint = suggest(f"--{name}", [f"--{known}" for known in parser.options if len(known) > 1])
    elif parser.get_default("configured"):
        hint = "; a list is one value, as in --topk='[5, 10]'"
    raise UsageError(f"no further arguments expected, found {' '.join(unknown)}{hint}")


def _report(error: Exception) -> int:
    """Print an error in a line, one of custom code with its traceback; return the exit code."""
    code = 1
    if isinstance(error, PosError):
        text = str(error)
        code = error.exit_code
    elif _is_from_custom_code(error):
        traceback.print_exception(error)
        return code
    elif isinstance(error, OSError):
        text = error.strerror or shown(str(error))
        if error.filename is not None:  # a path that the user named
            text = f"{shown(error.filename)}: {text}"
            code = UsageError.exit_code
    else:
        first_line = next(iter(str(error).splitlines()), "")  # a compiler's error has hundreds
        text = f"{type(error).__name__}: {first_line}\n(run again with --debug for the traceback)"
    print(f"error: {text}", file=sys.stderr)
    return code


def _is_from_custom_code(error: Exception) -> bool:
    """Return whether an exception passed through custom code, none of which runs without torch."""
    if "torch" not in sys.modules:
        return False
    from recbole_pos.experiment.diagnosis import locate_in_custom_code

    return locate_in_custom_code(error) is not None


def _format_warning(message: Warning | str, category: type[Warning], *location: Any) -> str:
    """Return the text of a warning, for one about a run a line without its location in code."""
    if issubclass(category, RunWarning):
        return f"warning: {message}\n"
    return _USUAL_FORMAT(message, category, *location)


@contextmanager
def _interrupt_on_sigterm() -> Iterator[threading.Event]:
    """Let SIGTERM, which containers send, interrupt the block; yield an event that it sets."""
    terminated = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        terminated.set()
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # a shell lets background processes ignore Ctrl-C
            on_ctrl_c = signal.default_int_handler
        on_ctrl_c(signal.SIGINT, frame)

    with handle_signals(interrupt, signal.SIGTERM):
        yield terminated
