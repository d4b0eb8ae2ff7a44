"""The command line: ``recbole-pos run | tune | attach | recommend | models | ...``."""

from __future__ import annotations

import argparse
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

from recbole_pos.cli.arguments import options_of, read_plugins, split_options
from recbole_pos.cli.commands import add_commands
from recbole_pos.errors import Interrupted, PosError, RunWarning, UsageError
from recbole_pos.values import shown, suggest
from recbole_pos.version import __version__

EPILOG = """examples:
  recbole-pos run -m FPARec -d ml-100k
  recbole-pos run -m SASRec -d ml-100k --epochs 20 --learning_rate 5e-4
  recbole-pos run -m FPARec --help
  recbole-pos run --resume saved/ml-100k/FPARec/20260101-120000
  recbole-pos tune -m FPARec -d ml-100k --num_samples 20 --max_concurrent 2
  recbole-pos attach saved/ml-100k/PosSASRec/20260101-120000 kernel
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 (failed), 2 (wrong input), 130 (interrupted by
    Ctrl-C), 143 (by SIGTERM)."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words = ["run", *words]  # `recbole-pos -m FPARec ...` is a run, as in RecBole's script
    parser, commands = _parser()
    options: list[str] = []
    command = commands.get(words[0]) if words else None
    if command:
        if command.get_default("configured"):  # takes options of the configuration
            own, options = split_options(words[1:], options_of(command))
            words = [words[0], *own]
    args, rest = parser.parse_known_args(words)
    with _heeding_sigterm() as terminated, _warning_in_lines():
        try:
            if empty := [word[:-3] for word in words if word[:1] == "-" and word[-3:] == "=--"]:
                raise UsageError(f"{empty[0]}: expected a value, found --")  # argparse makes it []
            if rest:
                slip = rest[0].lstrip("-").partition("=")[0]
                known = [f"--{name}" for name in options_of(command or parser) if len(name) > 1]
                hint = suggest(f"--{slip}", known) if rest[0].startswith("-") else ""
                raise UsageError(f"no further arguments expected, found {' '.join(rest)}{hint}")
            _require_place()
            read_plugins(args)
            return args.command(args, options)
        except KeyboardInterrupt as interrupt:
            print(str(interrupt) or "interrupted", file=sys.stderr)
            return 128 + signal.SIGTERM if terminated.is_set() else Interrupted.exit_code
        except PosError as error:
            if args.debug:
                raise
            print(f"error: {_LONG.sub(_cut, str(error))}", file=sys.stderr)
            return error.exit_code
        except OSError as error:  # of a path that the user named, or of the machine
            if args.debug:
                raise
            print(f"error: {_refusal(error)}", file=sys.stderr)
            return UsageError.exit_code if error.filename is not None else 1
        except Exception as error:
            if args.debug:
                raise
            from recbole_pos.experiment.diagnosis import is_from_custom_code

            if is_from_custom_code(error):
                traceback.print_exception(error)
                return 1
            print(
                f"error: {type(error).__name__}: {error}\n"
                "(run again with --debug for the traceback)",
                file=sys.stderr,
            )
            return 1


def _require_place() -> None:
    """Libraries end the process where the working directory was removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            "the working directory is not there any more; change to one that is"
        ) from error


_LONG = re.compile(r"\S{300,}")  # a name or value that would fill the screen


def _cut(found: re.Match) -> str:
    return f"{found[0][:100]} ... ({len(found[0]):,} characters)"


def _refusal(error: OSError) -> str:
    """What the system refuses, in a line."""
    what = "" if error.filename is None else f"{shown(error.filename)}: "
    return f"{what}{error.strerror or shown(str(error))}"


def _formatted(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning as the command line has it: those of runs in a line, without a place in code."""
    if issubclass(category, RunWarning):
        return f"warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


_python_format = warnings.formatwarning


@contextmanager
def _warning_in_lines() -> Iterator[None]:
    warnings.formatwarning = _formatted
    try:
        yield
    finally:
        warnings.formatwarning = _python_format


@contextmanager
def _heeding_sigterm() -> Iterator[threading.Event]:
    """Within, SIGTERM, which containers send, ends everything as Ctrl-C does; set once it came."""
    terminated = threading.Event()

    def end(number: int, frame: Any) -> None:
        terminated.set()
        ctrl_c = signal.getsignal(signal.SIGINT)
        # a shell lets what it starts in the background ignore Ctrl-C, but not this
        (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(signal.SIGINT, frame)

    if threading.current_thread() is not threading.main_thread():  # nobody else may
        yield terminated
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    parser = argparse.ArgumentParser(
        prog="recbole-pos",
        description="Position-aware sequential recommendation for RecBole.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"recbole-pos {__version__}")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(commands, debug)
    return parser, commands.choices


if __name__ == "__main__":
    sys.exit(main())
