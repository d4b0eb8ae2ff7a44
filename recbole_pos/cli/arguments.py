"""Arguments of commands: made of the fields of settings objects, and read back into them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from recbole_pos.config.arguments import Arguments
from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_OPTION = re.compile(r"--|-[a-zA-Z]$")  # how options begin; -1 and -inf are numbers


def add_fields(parser: argparse.ArgumentParser, kind: type) -> None:
    """An option of the command line for every field."""
    groups: dict[str, Any] = {}
    for one in fields(kind):
        told = one.metadata
        place = parser
        if name := told.get("group"):
            if name not in groups:
                groups[name] = parser.add_mutually_exclusive_group()
            place = groups[name]
        option = {"dest": one.name, "help": told["text"], "default": one.default}
        if told["kind"] is bool:
            option["action"] = "store_false" if one.default else "store_true"
        else:
            option |= {"type": told["kind"], "metavar": told["metavar"]}
        if told["kind"] is list:
            option |= {"type": str, "nargs": "+", "action": "extend", "default": []}
        place.add_argument(f"--{told.get('flag', one.name)}", **option)


def read_fields(args: argparse.Namespace, kind: type[Arguments]) -> Arguments:
    """The settings object that the command line says."""
    values = {one.name: getattr(args, one.name) for one in fields(kind)}
    for one in fields(kind):
        if isinstance(values[one.name], list) and one.metadata["kind"] is not list:
            option = one.metadata.get("flag", one.name)  # argparse takes -- for the end of options
            raise UsageError(f"{option}: expected a value, found '--'")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return kind(**given)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The names, without dashes, of a command's own options."""
    return {name.lstrip("-") for action in parser._actions for name in action.option_strings}


def split_options(words: list[str], own: set[str]) -> tuple[list[str], list[str]]:
    """A command's own words, and the options of the configuration among them.

    ``--key value`` is ``--key=value``: what follows the name of an option that is not the
    command's own is its value, unless it begins like another option.

    Args:
        words: of the command line.
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
    """``--key=value`` arguments as a dict, values read as yaml.

    Raises:
        UsageError: for anything of another form, or a key given twice with different values.
    """
    from recbole_pos.yaml_files import parse_scalar

    found: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not (argument.startswith("--") and equals and key):
            raise UsageError(
                f"cannot read {shown(argument)}: options are given as --key=value or --key value"
            )
        value = parse_scalar(text, f"--{key}")
        if key in found and found[key] != value:
            raise UsageError(f"--{key} is given twice, with {shown(found[key])} and {shown(value)}")
        found[key] = value
    return found


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """The option ``plugins``, for a command that takes no others of the configuration."""
    parser.add_argument(
        "--plugins", metavar="[MODULE]", help="modules that bring models or schemes, as for run"
    )


def add_reading(parser: argparse.ArgumentParser) -> None:
    """What a command that reads a run takes beside the run."""
    parser.add_argument(
        "--data_path", metavar="DIR", help="folder of datasets (where the run found its own)"
    )
    add_plugins(parser)


def read_plugins(args: argparse.Namespace) -> None:
    """Import them, for a command that has the option.

    Raises:
        UsageError: if one is not there, or fails.
    """
    if getattr(args, "plugins", None) is not None:
        from recbole_pos.yaml_files import parse_scalar

        import_named(parse_scalar(args.plugins, "--plugins"))


def import_named(plugins: Any) -> None:
    """Import the modules of ``--plugins``, which may be those of the working directory.

    Raises:
        UsageError: if one is not there, or fails.
    """
    from recbole_pos.config.plugins import allow, import_plugins

    allow(plugins)
    import_plugins(plugins, "--plugins", lambda: False)


def config_files(given: list[str]) -> list[str]:
    """Files one by one, or several in one argument as RecBole has them; a name may have spaces."""
    parts = ([group] if os.path.exists(group) else group.split() for group in given)
    return [file for part in parts for file in part]
