"""Argparse for the commands: options made of settings objects, errors in one line."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NoReturn

from recbole_pos.config.arguments import Settings
from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, shown, suggest

_OPTION = re.compile(r"--|-[a-zA-Z]$")  # how options begin; -1 and -inf are numbers


def whole_number(text: str) -> int:
    """Read a whole number of the command line."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {shown(text)}, expected a whole number; give one such as 3"
        ) from None


def number(text: str) -> float:
    """Read a finite number of the command line."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_number(value):
        raise argparse.ArgumentTypeError(
            f"found {shown(text)}, expected a number; give one such as 0.5"
        )
    return value


# Argparse's messages, and ours: what was found, what was expected; what to do.
_PROBLEMS = {
    r"expected (one argument|at least one argument)": "found no value, expected one; give it after "
    "the option",
    r"ignored explicit argument (.*)": r"found \1, expected no value; leave it out",
    r"not allowed with argument (.*)": r"found together with \1, expected one of them; "
    "leave the other out",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, ``--option: found, expected; what to do``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._exclusive: dict[str, Any] = {}
        self.environment = False  # whether options that are not given are read from there

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong.

        Raises:
            UsageError: always.
        """
        if missing := re.match(r"the following arguments are required: (.*)", message):
            wanted = f"expected a value; see `{self.prog} --help`"
            raise UsageError(f"{missing[1]}: found nothing, {wanted}")
        name, _, problem = message.removeprefix("argument ").partition(": ")
        for pattern, ours in _PROBLEMS.items():
            problem = re.sub(f"^{pattern}$", ours, problem)
        if choice := re.match(r"invalid choice: '(.*)' \(", problem):
            subparsers = next(a for a in self._actions if isinstance(a.choices, dict))
            known = list(subparsers.choices or ())
            problem = (
                f"found {shown(choice[1])}, expected one of {', '.join(known)}"
                f"{suggest(choice[1], known)}; see `{self.prog} --help`"
            )
        raise UsageError(f"{name.rpartition('/')[2]}: {problem}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Argparse's hook; it takes ``--`` for the end of options, and would read ``[]``."""
        if action.option_strings and "--" in arg_strings:
            self.error(f"argument {action.option_strings[-1]}: expected one argument")
        return super()._get_values(action, arg_strings)

    def add_option(self, *names: str, group: str | None = None, **settings: Any) -> None:
        """Add an option; of those of one group a command line can have one.

        Args:
            names: as of ``add_argument``.
            group: its name.
            settings: as of ``add_argument``; numbers are read by the types above.
        """
        kinds = {int: whole_number, float: number}
        settings["type"] = kinds.get(settings.get("type"), settings.get("type"))  # type: ignore
        place: Any = self
        if group is not None:
            if group not in self._exclusive:
                self._exclusive[group] = self.add_mutually_exclusive_group()
            place = self._exclusive[group]
        place.add_argument(
            *names, **{key: value for key, value in settings.items() if value is not None}
        )

    def add_fields(self, kind: type) -> None:
        """Add an option for every field of a settings class."""
        for one in fields(kind):
            about = one.metadata
            option = {"dest": one.name, "help": about["text"], "default": one.default}
            if about["kind"] is bool:
                option["action"] = "store_false" if one.default else "store_true"
            elif about["kind"] is list:
                option |= {"nargs": "+", "action": "extend", "default": []}
                option["metavar"] = about["metavar"]
            else:
                option |= {"type": about["kind"], "metavar": about["metavar"]}
            name = about.get("flag", one.name)
            self.add_option(f"--{name}", group=about.get("group"), **option)

    @property
    def options(self) -> set[str]:
        """The names, without dashes, of the command's own options."""
        return {name.lstrip("-") for action in self._actions for name in action.option_strings}


Argument = Callable[[Parser], None]


def option(*names: str, **settings: Any) -> Argument:
    """Return what adds an option or argument to a command, as ``Parser.add_option`` does."""
    return lambda parser: parser.add_option(*names, **settings)


def read_environment(parser: Parser) -> None:
    """Take what the environment has, ``RECBOLE_POS_<NAME>``, for options that are not given.

    Raises:
        UsageError: for a value that the option does not take; names the variable.
    """
    for action in parser._actions:
        variable = f"RECBOLE_POS_{action.dest.upper()}"
        text = os.environ.get(variable, "")
        if not text:
            continue
        several = action.nargs in ("+", "*")
        read = action.type if callable(action.type) else str
        try:
            if action.nargs == 0:
                read = _FLAGS.__getitem__
            found = [read(word) for word in (shlex.split(text) if several else [text])]
        except KeyError:
            raise UsageError(f"{variable}: found {shown(text)}, expected true or false") from None
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"{variable}: {error}") from None
        action.default = found if several else found[0]
        if not action.option_strings:
            action.nargs, action.required = "*" if several else "?", False


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_settings(args: argparse.Namespace, kind: type[Settings]) -> Settings:
    """Return the settings that a command line gives."""
    values: dict[str, Any] = {one.name: getattr(args, one.name) for one in fields(kind)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return kind(**values)


def split_options(words: list[str], own: set[str]) -> tuple[list[str], list[str]]:
    """Split a command's own words from the options of the configuration among them.

    ``--key value`` is ``--key=value``: what follows the name of an option that is not the
    command's own is its value, unless it begins like another option.

    Args:
        words: words of the command line.
        own: names of the command's own options, without dashes.
    """
    mine, options = [], []
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        key, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key or key in own:
            mine.append(word)
            if key in own and not equals and word.startswith("--"):
                while waiting and not _OPTION.match(waiting[-1]):
                    mine.append(waiting.pop())  # its values, whatever they look like
            continue
        if not equals and waiting and not _OPTION.match(waiting[-1]):
            word = f"{word}={waiting.pop()}"
        options.append(word)
    return mine, options


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Return ``--key=value`` arguments as a dict, values read as yaml.

    ``--eval_args.split=...`` is that key of the mapping ``eval_args``.

    Raises:
        UsageError: for anything of another form, or a key given twice with different values.
    """
    from recbole_pos.yaml_files import parse_scalar

    given: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not (argument.startswith("--") and equals and key):
            raise UsageError(
                f"cannot read {shown(argument)}: options are given as --key=value or --key value"
            )
        value = parse_scalar(text, f"--{key}")
        place, (name, _, inner) = given, key.partition(".")
        if inner:
            place, name = given.setdefault(name, {}), inner
        if not isinstance(place, dict) or place.get(name, value) != value:
            other = shown(place[name] if isinstance(place, dict) else place)
            raise UsageError(f"--{key} is given twice, with {other} and {shown(value)}")
        place[name] = value
    return given


def config_files(given: list[str]) -> list[str]:
    """Return files one by one, or several in one argument as RecBole has them; a name may have
    spaces."""
    parts = ([group] if os.path.exists(group) else group.split() for group in given)
    return [file for part in parts for file in part]
