"""The command line: ``recbole-pos run | tune | attach | recommend | models | ...``.

:func:`main` takes the words of a command line and returns an exit code. Every error of the user
becomes one line on stderr; ``--debug`` shows the traceback instead.
"""

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

_USUAL_FORMAT = warnings.formatwarning  # Python's own, for warnings that are not about a run


def main(argv: list[str] | None = None) -> int:
    """Run a command of ``recbole-pos``, and turn whatever ends it into an exit code and a message.

    Args:
        argv: words of the command line; those of this process when None.

    Returns:
        The exit code: 0, 1 (failed), 2 (wrong input), 130 (Ctrl-C), 141 (nothing reads stdout any
        more) or 143 (SIGTERM).
    """
    words = sys.argv[1:] if argv is None else list(argv)

    # Print warnings in one line, also those of libraries that use logging: Python's last resort is
    # the handler that prints them where nobody has configured logging.
    warnings.formatwarning = _format_warning  # type: ignore[assignment]
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))

    with _interrupt_on_sigterm() as terminated:
        try:
            _run_command(words)
            print(end="", flush=True)  # raises BrokenPipeError now, and not at exit
            return 0
        except KeyboardInterrupt as interrupt:
            print(str(interrupt) or "interrupted", file=sys.stderr)
            return 128 + signal.SIGTERM if terminated.is_set() else Interrupted.exit_code
        except BrokenPipeError:
            # Nothing reads stdout any more (`| head`). Python still writes the rest of it at exit,
            # which would fail again, so send that to nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
        except Exception as error:
            if "--debug" in words:
                raise
            return _report(error)


def _run_command(words: list[str]) -> None:
    """Parse a command line and run its command.

    Its words are arguments of the command, which argparse knows, and options of the configuration
    of a run, such as ``--n_heads 2``, which it does not know.

    Args:
        words: words of the command line, without the name of the program.

    Raises:
        UsageError: for a wrong argument, or an unknown one.
    """
    # Without a command it is a run: `recbole-pos -m FPARec ...`, as in RecBole's script.
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words = ["run", *words]
    parser, command_parsers = make_parser()
    command_parser = command_parsers.get(words[0]) if words else None

    # Take out the options of the configuration, which argparse does not know.
    options: list[str] = []
    if command_parser is not None and command_parser.get_default("configured"):
        own_words, options = split_options(words[1:], command_parser.options)
        words = [words[0], *own_words]
    args, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_unknown(unknown, command_parser or parser)

    # Import modules with custom models, for commands that have --plugins as an argument.
    if getattr(args, "plugins", None) is not None:
        from recbole_pos.config.plugins import import_named
        from recbole_pos.yaml_files import parse_scalar

        import_named(parse_scalar(args.plugins, "--plugins"))

    # Commands that take options of the configuration are called with them as well.
    if args.configured:
        args.command(args, parse_overrides(options))
    else:
        args.command(args)


def _refuse_unknown(unknown: list[str], parser: Parser) -> NoReturn:
    """Raise a UsageError for words of a command line that mean nothing to the command.

    Args:
        unknown: the words, one or more.
        parser: parser of the command; its option that is spelt most alike is suggested.

    Raises:
        UsageError: always.
    """
    hint = ""
    if unknown[0].startswith("-"):
        name = unknown[0].lstrip("-").partition("=")[0]
        # Names of one letter, such as -m, are similar to nothing.
        hint = suggest(f"--{name}", [f"--{known}" for known in parser.options if len(known) > 1])
    elif parser.get_default("configured"):
        hint = "; a list is one value, as in --topk='[5, 10]'"
    raise UsageError(f"no further arguments expected, found {' '.join(unknown)}{hint}")


def _report(error: Exception) -> int:
    """Print an error on stderr, in one line if it can be explained so.

    An error in the user's custom code is printed with its traceback. An unexpected error of this
    package or a library is printed in a line that says how to see the traceback.

    Args:
        error: the error that ended the command.

    Returns:
        The exit code: that of the error, 2 for a file that cannot be used, and otherwise 1.
    """
    code = 1
    if isinstance(error, PosError):
        text = str(error)
        code = error.exit_code
    elif _is_from_custom_code(error):
        traceback.print_exception(error)
        return code
    elif isinstance(error, OSError):
        text = error.strerror or shown(str(error))
        if error.filename is not None:  # the user named the path, so the input is wrong
            text = f"{shown(error.filename)}: {text}"
            code = UsageError.exit_code
    else:
        first_line = next(iter(str(error).splitlines()), "")  # a compiler's error has hundreds
        text = f"{type(error).__name__}: {first_line}\n(run again with --debug for the traceback)"
    print(f"error: {text}", file=sys.stderr)
    return code


def _is_from_custom_code(error: Exception) -> bool:
    """Return whether an error was raised in, or below, the user's own code, such as a model.

    The check imports torch, which takes seconds. If torch has not been imported yet, no model can
    have run, so the answer is no without the check.
    """
    if "torch" not in sys.modules:
        return False
    from recbole_pos.experiment.diagnosis import locate_in_custom_code

    return locate_in_custom_code(error) is not None


def _format_warning(message: Warning | str, category: type[Warning], *location: Any) -> str:
    """Return the text of a warning; Python calls this in place of ``warnings.formatwarning``.

    A warning of this package about a run is one line. Others also have their place in the code, as
    usual.

    Args:
        message: the warning.
        category: its class.
        location: file, line number and so on, as Python passes them.
    """
    if issubclass(category, RunWarning):
        return f"warning: {message}\n"
    return _USUAL_FORMAT(message, category, *location)


@contextmanager
def _interrupt_on_sigterm() -> Iterator[threading.Event]:
    """Let SIGTERM interrupt a ``with`` block as Ctrl-C does, so that it can save and clean up.

    Containers and schedulers send SIGTERM to end a process, which would die at once.

    Yields:
        An event that is set once SIGTERM has come.
    """
    terminated = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        terminated.set()
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # a shell has started this process so that it ignores Ctrl-C
            on_ctrl_c = signal.default_int_handler
        on_ctrl_c(signal.SIGINT, frame)

    with handle_signals(interrupt, signal.SIGTERM):
        yield terminated
