"""Argparse for the commands: options made of settings objects, errors in one line."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NoReturn

from recbole_pos.config.arguments import Settings, find_kind
from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, shown, suggest

_OPTION = re.compile(r"--|-[a-zA-Z]$")  # how options begin; -1 and -inf are numbers
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def _number_type(kind: type, wanted: str) -> Callable[[str], Any]:
    """Make what reads a finite number of the command line."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if not is_number(value):
            raise argparse.ArgumentTypeError(f"found {shown(text)}, expected {wanted}")
        return value

    return read


_TYPES: dict[type, Callable[[str], Any]] = {
    int: _number_type(int, "a whole number such as 3"),
    float: _number_type(float, "a number such as 0.5"),
    str: str,
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the option, what is wrong, and where to read more."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._exclusive: dict[str, Any] = {}

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong, as a UsageError."""
        message = message.removeprefix("argument ")
        if choice := re.match(r"(.*): invalid choice: '(.*)' \(", message):
            known = [
                name for a in self._actions if isinstance(a.choices, dict) for name in a.choices
            ]
            hint = f"expected one of {', '.join(known)}{suggest(choice[2], known)}"
            message = f"{choice[1]}: found {shown(choice[2])}, {hint}"
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Argparse's hook; it takes ``--`` for the end of options, and would read ``[]``."""
        if action.option_strings and "--" in arg_strings:
            self.error(f"argument {action.option_strings[-1]}: expected one argument")
        return super()._get_values(action, arg_strings)

    def place(self, group: str | None) -> Any:
        """Return where to add an argument; of those of one group a command line can have one."""
        if group is None:
            return self
        if group not in self._exclusive:
            self._exclusive[group] = self.add_mutually_exclusive_group()
        return self._exclusive[group]

    def add_fields(self, kind: type) -> None:
        """Add an option for every field of a settings class."""
        for one in fields(kind):
            settings = {"dest": one.name, "help": one.metadata["text"], "default": one.default}
            of, metavar = find_kind(one), one.metadata["metavar"]
            if of is bool:
                settings["action"] = "store_false" if one.default else "store_true"
            elif of is list:
                settings |= {"nargs": "+", "action": "extend", "default": [], "metavar": metavar}
            else:
                settings |= {"type": _TYPES[of], "metavar": metavar}
            place = self.place(one.metadata.get("group"))
            place.add_argument(f"--{one.metadata.get('flag', one.name)}", **settings)

    def read_environment(self) -> None:
        """Take what the environment has, ``RECBOLE_POS_<NAME>``, for options that are not given.

        Raises:
            UsageError: for a value that the option does not take; names the variable.
        """
        for action in self._actions:
            variable = f"RECBOLE_POS_{action.dest.upper()}"
            text = os.environ.get(variable, "")
            if not text:
                continue
            several = action.nargs in ("+", "*")
            read: Any = _FLAGS.__getitem__ if action.nargs == 0 else action.type or str
            try:
                values = [read(word) for word in (shlex.split(text) if several else [text])]
            except KeyError:
                message = f"{variable}: found {shown(text)}, expected true or false"
                raise UsageError(message) from None
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise UsageError(f"{variable}: {error}") from None
            action.default = values if several else values[0]
            if not action.option_strings:
                action.nargs, action.required = "*" if several else "?", False

    @property
    def options(self) -> set[str]:
        """The names, without dashes, of the command's own options."""
        return {name.lstrip("-") for action in self._actions for name in action.option_strings}


Argument = Callable[[Parser], None]


def option(spec: str, text: str, group: str | None = None, **settings: Any) -> Argument:
    """Return what adds an argument to a command.

    Args:
        spec: the argument as usage shows it: ``RUN_DIR``, ``-m --model NAME``, ``--items ITEM...``
            (one or more), ``-k N`` (a whole number), ``--json`` (a flag).
        text: its help.
        group: name of a group of which a command line can have one.
        settings: others of ``add_argument``.
    """
    *names, last = spec.split()
    if last.startswith("-"):
        names.append(last)
        settings.setdefault("action", "store_true")
    else:
        settings.setdefault("metavar", last.removesuffix("..."))
        if last.endswith("..."):
            settings.setdefault("nargs", "+")
        if settings["metavar"] == "N":
            settings["type"] = _TYPES[int]
    names = names or [settings.pop("dest", last.removesuffix("...").lower())]

    def add(parser: Parser) -> None:
        parser.place(group).add_argument(*names, help=text, **settings)

    return add


def read_settings(args: argparse.Namespace, kind: type[Settings]) -> Settings:
    """Return the settings that a command line gives."""
    values: dict[str, Any] = {one.name: getattr(args, one.name) for one in fields(kind)}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return kind(**values)


def split_options(words: list[str], own: set[str]) -> tuple[list[str], list[str]]:
    """Split a command's own words from the options of the configuration among them.

    ``--key value`` is ``--key=value``: what follows the name of an option that is not among the
    command's ``own`` is its value, unless it begins like another option.
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

    ``--eval_args.split=...`` is that key of the mapping ``eval_args``. Anything of another form,
    and a key given twice with different values, is a UsageError.
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
    """Return the files, of which one argument may have several, as RecBole has them; names may
    have spaces."""
    parts = ([group] if os.path.exists(group) else group.split() for group in given)
    return [file for part in parts for file in part]
