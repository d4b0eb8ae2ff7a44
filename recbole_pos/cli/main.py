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
from typing import Any

import recbole_pos.cli.commands  # noqa: F401 - registers the commands
from recbole_pos.config.arguments import Command, Parser, parse_overrides, split_options
from recbole_pos.errors import Interrupted, PosError, RunWarning, UsageError, handle_signals
from recbole_pos.values import shown
from recbole_pos.version import __version__

_GROUPS = {"inspect": "Look into a trained model."}  # first word of several commands -> its help
_USUAL_FORMAT = warnings.formatwarning  # Python's own, for warnings that are not about a run


def main(argv: list[str] | None = None) -> int:
    """Run a command of ``recbole-pos``, and turn whatever ends it into an exit code and a message.

    Args:
        argv: words of the command line; those of this process when None.

    Returns:
        The exit code: 0, 1 (failed), 2 (wrong input), 130 (Ctrl-C), 141 (nobody reads
        the output) or 143 (SIGTERM).
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
            # 143 if SIGTERM has caused it, and 130 after Ctrl-C.
            return 128 + signal.SIGTERM if terminated.is_set() else Interrupted.exit_code
        except BrokenPipeError:
            # Nothing reads the output any more (`| head`). Python still writes the rest of it at
            # exit, which would fail again, so send that to nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except Exception as error:
            if "--debug" in words:
                raise
            return _report(error)  # prints it, and returns its exit code


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line.

    Returns:
        The parser, with a subparser for each command; and these subparsers by the name of the
        command, or of a group of commands such as ``inspect``.
    """
    about = "Position-aware sequential recommendation: recbole-pos run -m FPARec -d ml-100k"
    parser = Parser(prog="recbole-pos", description=about)
    parser.add_argument("--version", action="version", version=f"recbole-pos {__version__}")
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND")
    groups = {"": commands}  # name of a group -> its subparsers; "" for commands without a group
    # ``by_name`` has all registered commands; _GROUPS has the help of each group.
    for name, command in Command.by_name.items():
        # A command such as "inspect attention" is in a group, which has a parser of its own.
        group, _, last_name = name.rpartition(" ")
        if group not in groups:
            group_parser = commands.add_parser(group, help=_GROUPS[group])  # group -> its help
            groups[group] = group_parser.add_subparsers(required=True, metavar="WHAT")

        # The help is the docstring of the function, and its first paragraph the summary.
        text = command.function.__doc__ or ""
        summary = text.partition("\n\n")[0]
        subparser: Parser = groups[group].add_parser(
            last_name, help=summary, description=text, add_help=command.add_help
        )
        subparser.add_argument("--debug", action="store_true", help="show tracebacks")
        for argument in command.arguments:
            if isinstance(argument, type):  # a settings class, of which every field is an argument
                subparser.add_fields(argument)
            else:
                subparser.add(argument)

        # What :func:`_run_command` finds among the parsed arguments: the function to call, its
        # parser, and whether it takes options of the configuration.
        subparser.set_defaults(
            command=command.function, parser=subparser, takes_options=command.takes_options
        )
    return parser, commands.choices


def _run_command(words: list[str]) -> None:
    """Parse a command line and run its command.

    Each command has arguments of its own, which argparse parses. Some commands, such as ``run``,
    also take options of the configuration, such as ``--n_heads 2``. Of these argparse knows
    nothing, so they are taken out before it parses the rest.

    Args:
        words: words of the command line, without the name of the program.

    Raises:
        UsageError: for a wrong argument, or an unknown one.
    """
    # The parser of the whole command line, and those of commands by the first word: the name of a
    # command, or of a group of commands such as inspect.
    parser, command_parsers = make_parser()
    command_parser = command_parsers.get(words[0], parser) if words else parser

    # Take out the options of the configuration: all but the command's own arguments.
    takes_options = command_parser.get_default("takes_options")
    options: list[str] = []
    if takes_options:
        own_words, options = split_options(words[1:], own_names=command_parser.options)
        words = [words[0], *own_words]
    args = parser.parse_args(words)

    # Import the modules with custom models that the argument --plugins names, if a command has it.
    if getattr(args, "plugins", None) is not None:
        from recbole_pos.config.plugins import import_named
        from recbole_pos.yaml_files import parse_scalar

        import_named(parse_scalar(args.plugins))

    # ``command`` is the function of the command.
    if takes_options:
        args.command(args, parse_overrides(options))
    else:
        args.command(args)


def _report(error: Exception) -> int:
    """Print an error on stderr, in one line if it can be explained so.

    An error in the user's custom code is printed with its traceback. An unexpected error of this
    package or a library is printed in a line that says how to see the traceback.

    Args:
        error: the error that ended the command.

    Returns:
        The exit code: that of the error, 2 for a file that cannot be used, and otherwise 1.
    """
    # Where torch has not been imported, no custom model can have run, and the function that looks
    # for custom code is not imported either, since that takes seconds.
    is_from_custom_code = False
    if "torch" in sys.modules and not isinstance(error, PosError):
        from recbole_pos.experiment.diagnosis import locate_in_custom_code

        is_from_custom_code = locate_in_custom_code(error) is not None

    code = 1
    if isinstance(error, PosError):
        text = str(error)
        code = error.exit_code
    elif is_from_custom_code:
        traceback.print_exception(error)  # its author needs to see where it was raised
        return code
    elif isinstance(error, OSError):
        text = error.strerror or shown(str(error))
        if error.filename is not None:  # the user named the path, so the input is wrong
            text = f"{shown(error.filename)}: {text}"
            code = UsageError.exit_code
    else:
        first_line = str(error).partition("\n")[0]  # a compiler's error has hundreds
        text = f"{type(error).__name__}: {first_line}\n(run again with --debug for the traceback)"
    print(f"error: {text}", file=sys.stderr)
    return code


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
    return _USUAL_FORMAT(message, category, *location)  # Python's own, kept before it is replaced


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

    # The former handler of SIGTERM is back after the block.
    with handle_signals(interrupt, signal.SIGTERM):
        yield terminated
