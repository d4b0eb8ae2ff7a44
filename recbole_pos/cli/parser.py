"""Argparse for the commands: options from settings classes, and errors in one line.

Words of a command line that are no arguments of the command are options of the configuration, such
as ``--n_heads 2``. :func:`split_options` separates them, and :func:`parse_overrides` reads their
values as yaml.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

from recbole_pos.config.arguments import Settings, find_kind
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_OPTION_START = re.compile(r"--|-[a-zA-Z]$")  # how a word begins that is an option; -1 is a number


@dataclass(frozen=True)
class Argument:
    """An argument of a command, as argparse's ``add_argument`` takes it.

    Attributes:
        names: its names, as ``-k`` or ``--out``; of a positional argument the one it is stored as.
        group: name of a group of arguments, of which only one may be given; None for no group.
        settings: further arguments of argparse's ``add_argument``.
    """

    names: tuple[str, ...]
    group: str | None
    settings: dict[str, Any]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the option, what is wrong, and where to read more."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        # name of a group -> group of argparse, which lets a command line have one of its arguments
        self._groups: dict[str, Any] = defaultdict(self.add_mutually_exclusive_group)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with what argparse found wrong, and where to read more."""
        raise UsageError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")

    def add(self, argument: Argument) -> None:
        """Add an argument to the command; of those with the same group, only one can be given."""
        container: Any = self if argument.group is None else self._groups[argument.group]
        container.add_argument(*argument.names, **argument.settings)

    def add_fields(self, settings_class: type) -> None:
        """Add an option for every field of a settings class.

        The field ``nproc: int = 1`` becomes the option ``--nproc N`` with the default 1. A field of
        type bool becomes a flag, and one of a tuple an option with one or more words.

        Args:
            settings_class: a dataclass, such as ``RunArguments``. The metadata of a field have the
                text of ``--help`` and what that calls the value (``metavar``). They may have
                another name for the option (``flag``), and the name of a group (``group``), of
                which a command line may have one option only.
        """
        for field in fields(settings_class):
            about, kind = field.metadata, find_kind(field)
            settings = {"dest": field.name, "help": about["text"], "default": field.default}
            if kind is bool:  # a flag, which sets the opposite of the default
                settings["action"] = "store_false" if field.default else "store_true"
            elif kind is list:  # words; if the option is given twice, those of both count
                words = {"nargs": "+", "action": "extend", "default": []}
                settings |= {**words, "metavar": about["metavar"]}
            else:  # one word, converted to an int, float or str
                settings |= {"type": kind, "metavar": about["metavar"]}
            # such as --quiet, which sets ``verbose`` to False
            name = f"--{about.get('flag', field.name)}"
            self.add(Argument((name,), about.get("group"), settings))

    @property
    def options(self) -> set[str]:
        """The names, without dashes, of the command's own options."""
        return {name.lstrip("-") for action in self._actions for name in action.option_strings}


def option(spec: str, text: str, group: str | None = None, **settings: Any) -> Argument:
    """Return an argument of a command, described as a line of usage shows it.

    ======================= ==========================================================
    spec                    argument
    ======================= ==========================================================
    ``--overwrite``         a flag: True if it is given
    ``-m --model NAME``     an option with one word, and two names
    ``-k N``                an option with a whole number
    ``--items ITEM...``     an option with one or more words
    ``RUN_DIR``             a word without an option, stored as ``run_dir``
    ``ITEM...``             one or more words without an option, stored as ``item``
    ======================= ==========================================================

    Args:
        spec: the argument, as in the table.
        text: its help.
        group: name of a group of arguments, of which a command line can have one.
        settings: further arguments of argparse's ``add_argument``; they win over ``spec``.
    """
    *names, last = spec.split()
    if last.startswith("-"):
        return Argument((*names, last), group, {"action": "store_true", "help": text, **settings})

    value = last.removesuffix("...")
    from_spec: dict[str, Any] = {"metavar": value, "help": text}
    if last.endswith("..."):
        from_spec["nargs"] = "+"
    if value == "N":
        from_spec["type"] = int
    if not names:  # argparse takes the name under which the words are stored in place of an option
        names = [settings.pop("dest", value.lower())]
    return Argument(tuple(names), group, {**from_spec, **settings})


@dataclass(frozen=True)
class Command:
    """A command of the command line, whose help is the docstring of its function.

    Attributes:
        by_name: all commands by name, as ``run`` or, in a group, ``inspect attention``.
        function: what runs the command; it gets the parsed arguments.
        arguments: arguments, and settings classes, of which every field is an argument.
        takes_options: whether the function takes options of the configuration (``--key value``), as
            its second argument.
        add_help: whether argparse adds ``--help``; False for a command that has its own.
    """

    by_name: ClassVar[dict[str, Command]] = {}
    function: Callable
    arguments: tuple[Argument | type, ...]
    takes_options: bool = False
    add_help: bool = True

    @classmethod
    def register(cls, name: str, *arguments: Argument | type, **settings: bool) -> Callable:
        """Return a decorator that registers a function as a command, whose help is its docstring.

        The function is kept in ``Command.by_name``, and is not changed.

        Args:
            name: name of the command, as ``run`` or, in a group, ``inspect attention``.
            arguments: arguments, and settings classes, of which every field is an argument.
            settings: ``takes_options`` and ``add_help``, see the class.
        """

        def decorate(function: Callable) -> Callable:
            cls.by_name[name] = cls(function, arguments, **settings)
            return function

        return decorate


def read_settings(args: argparse.Namespace, settings_class: type[Settings]) -> Settings:
    """Return those of a command's parsed arguments that are fields of a settings class.

    Functions such as ``run`` take these as one object. argparse collects several words in a list;
    the settings, which must not change, have a tuple. A field that is no argument of the command
    has its default.

    Args:
        args: the parsed arguments.
        settings_class: a dataclass, such as ``RunArguments``.
    """
    values: dict[str, Any] = {}
    for field in fields(settings_class):
        value = getattr(args, field.name, field.default)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return settings_class(**values)


def split_options(words: list[str], own_names: set[str]) -> tuple[list[str], list[str]]:
    """Split the words after a command into its own words, and options of the configuration.

    For ``-m SASRec --n_heads 2 --verbose`` the own words are ``-m SASRec --verbose``, and the
    option is ``--n_heads=2``: the word after an unknown option is its value, unless it begins like
    another option.

    Args:
        words: words of the command line after the name of the command.
        own_names: names of the command's own options, without dashes.

    Returns:
        The command's own words, and the options as ``--key=value``.
    """
    own_words: list[str] = []
    options: list[str] = []
    takes_value = False  # whether the next word may be the value of the option before it
    for word in words:
        # _OPTION_START matches --key and -k, but not a negative number.
        if takes_value and not _OPTION_START.match(word):
            options[-1] += f"={word}"
            takes_value = False
            continue

        # A word that is no option is an argument of the command, or a value of its last option.
        key, equals, _ = word.removeprefix("--").partition("=")
        is_option = word.startswith("--") and key
        if is_option and key not in own_names:
            options.append(word)
            takes_value = not equals
        else:
            own_words.append(word)
            takes_value = False
    return own_words, options


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Return options of a run's configuration, given as ``--key=value``, as a dict.

    Values are read as yaml. A dot leads into a mapping: ``--topk=[5,10]`` and
    ``--eval_args.target=last`` give ``{"topk": [5, 10], "eval_args": {"target": "last"}}``. Of an
    option that is given twice, the later value counts.

    Args:
        arguments: the options, as :func:`split_options` returns them.

    Raises:
        UsageError: for an argument of another form.
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
        value = parse_scalar(text)
        name, _, inner_name = key.partition(".")
        if inner_name:
            overrides.setdefault(name, {})[inner_name] = value
        else:
            overrides[name] = value
    return overrides
