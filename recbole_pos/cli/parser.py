"""Argparse for the commands: options from settings classes, errors in one line.

Words of a command line that are no arguments of the command are options of the configuration:
:func:`split_options` separates them, and :func:`parse_overrides` reads their values as yaml.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from recbole_pos.config.arguments import Settings, find_kind
from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, shown

_OPTION = re.compile(r"--|-[a-zA-Z]$")  # the start of an option; -1 and -inf are numbers


def _make_number_reader(kind: type, expected: str) -> Callable[[str], Any]:
    """Return a function that converts a word to a finite number of ``kind``, int or float.

    Its error, argparse's, says what was ``expected``.
    """

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if not is_number(value):
            raise argparse.ArgumentTypeError(f"found {shown(text)}, expected {expected}")
        return value

    return read


_TYPES: dict[type, Callable[[str], Any]] = {
    int: _make_number_reader(int, "a whole number such as 3"),
    float: _make_number_reader(float, "a number such as 0.5"),
    str: str,
}


@dataclass(frozen=True)
class Argument:
    """An argument of a command: names, group of arguments of which one may be given, and settings.

    The settings are the arguments of argparse's ``add_argument``.
    """

    names: tuple[str, ...]
    group: str | None
    settings: dict[str, Any]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the option, what is wrong, and where to read more."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._exclusive: dict[str, Any] = {}  # name -> group of which one can be given

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with what argparse found wrong."""
        raise UsageError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")

    def add(self, argument: Argument) -> None:
        """Add an argument; of those with the same group, one can be given."""
        group = argument.group
        if group is not None and group not in self._exclusive:
            self._exclusive[group] = self.add_mutually_exclusive_group()
        container: Any = self if group is None else self._exclusive[group]
        container.add_argument(*argument.names, **argument.settings)

    def add_fields(self, settings_class: type) -> None:
        """Add an option for every field of a settings class."""
        for field in fields(settings_class):
            settings = {
                "dest": field.name,
                "help": field.metadata["text"],
                "default": field.default,
            }
            kind = find_kind(field)
            metavar = field.metadata["metavar"]
            if kind is bool:
                settings["action"] = "store_false" if field.default else "store_true"
            elif kind is list:
                settings |= {"nargs": "+", "action": "extend", "default": [], "metavar": metavar}
            else:
                settings |= {"type": _TYPES[kind], "metavar": metavar}
            name = f"--{field.metadata.get('flag', field.name)}"
            self.add(Argument((name,), field.metadata.get("group"), settings))

    @property
    def options(self) -> set[str]:
        """The names, without dashes, of the command's own options."""
        return {name.lstrip("-") for action in self._actions for name in action.option_strings}


def option(spec: str, text: str, group: str | None = None, **settings: Any) -> Argument:
    """Return an argument of a command.

    Args:
        spec: the argument as usage shows it: ``RUN_DIR``, ``-m --model NAME``, ``--items ITEM...``
            (one or more), ``-k N`` (a whole number), ``--json`` (a flag).
        text: its help.
        group: name of a group of arguments, of which a command line can have one.
        settings: further arguments of ``add_argument``.
    """
    *names, value = spec.split()
    if value.startswith("-"):  # a flag, which takes no value
        names.append(value)
        settings.setdefault("action", "store_true")
    else:
        settings.setdefault("metavar", value.removesuffix("..."))
        if value.endswith("..."):
            settings.setdefault("nargs", "+")
        if settings["metavar"] == "N":
            settings["type"] = _TYPES[int]
    if not names:  # a positional argument
        names = [settings.pop("dest", value.removesuffix("...").lower())]
    return Argument(tuple(names), group, {**settings, "help": text})


def read_settings(args: argparse.Namespace, settings_class: type[Settings]) -> Settings:
    """Return the settings among parsed arguments, with lists as tuples."""
    values: dict[str, Any] = {}
    for field in fields(settings_class):
        value = getattr(args, field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return settings_class(**values)


def split_options(words: list[str], own_names: set[str]) -> tuple[list[str], list[str]]:
    """Split the words after a command into its own words, and options of the configuration.

    ``--key value`` becomes ``--key=value``: the word after an option that is not in ``own_names``
    is its value, unless it begins like another option.
    """
    own_words, options = [], []
    remaining = list(reversed(words))
    while remaining:
        word = remaining.pop()
        key, equals, _ = word.removeprefix("--").partition("=")
        is_option = word.startswith("--") and key
        if is_option and key not in own_names:
            if not equals and remaining and not _OPTION.match(remaining[-1]):
                word = f"{word}={remaining.pop()}"
            options.append(word)
            continue
        own_words.append(word)
        if is_option and not equals:
            while remaining and not _OPTION.match(remaining[-1]):
                own_words.append(remaining.pop())  # a value of the option
    return own_words, options


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Return ``--key=value`` arguments as a dict, values read as yaml.

    ``--eval_args.split=...`` is the key ``split`` of the mapping ``eval_args``.

    Raises:
        UsageError: for an argument of another form, or a key given twice with different values.
    """
    from recbole_pos.yaml_files import parse_scalar

    overrides: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not (argument.startswith("--") and equals and key):
            raise UsageError(
                f"cannot read {shown(argument)}: this command has no such flag, and options of the "
                "configuration are given as --key=value or --key value"
            )
        value = parse_scalar(text, f"--{key}")
        name, _, inner_name = key.partition(".")
        mapping = overrides
        if inner_name:
            mapping = overrides.setdefault(name, {})
            name = inner_name
        if not isinstance(mapping, dict) or mapping.get(name, value) != value:
            earlier = mapping[name] if isinstance(mapping, dict) else mapping
            raise UsageError(f"--{key} is given twice, with {shown(earlier)} and {shown(value)}")
        mapping[name] = value
    return overrides


def list_config_files(arguments: list[str]) -> list[str]:
    """Return the files of ``--config_files``; as in RecBole, an argument may name several."""
    files: list[str] = []
    for argument in arguments:
        if os.path.exists(argument):  # a name may have spaces
            files.append(argument)
        else:
            files += argument.split()
    return files
