"""Arguments of the commands: settings classes, and the command line that is made of them.

A settings class has a field for each argument of a run, a search or another command beside its
configuration. :func:`recbole_pos.run` and :func:`recbole_pos.tune` take the fields by name, and
:class:`Parser` makes options of them, so that a default stands once.

Words of a command line that are no arguments of the command are options of the configuration, such
as ``--n_heads 2``. :func:`split_options` separates them, and :func:`parse_overrides` reads their
values as yaml.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from recbole_pos.errors import UsageError
from recbole_pos.values import shown, to_python
from recbole_pos.yaml_files import parse_scalar

_OPTION_START = re.compile(r"--|-[a-zA-Z]$")  # how a word begins that is an option; -1 is a number


def _arg(default: Any, text: str, metavar: str | None = None, **extra: Any) -> Any:
    """Return a dataclass field that describes one argument of a command.

    The command line is made from these fields: ``_arg(1, "processes (1)", "N")`` in a field
    ``nproc`` becomes the argument ``--nproc N`` with the default 1.

    Args:
        default: its default.
        text: its line of ``--help``.
        metavar: what ``--help`` calls its value.
        extra: ``flag``, another name of it on the command line; ``group``, name of a set of
            arguments of which only one can be given.
    """
    return field(default=default, metadata={"text": text, "metavar": metavar, **extra})


def find_kind(argument: Field) -> type:
    """Return the type of an argument's value, for the command line; ``list`` if it takes several.

    The annotation of the field is read as text, and the type with which it begins is taken: ``int |
    None`` gives int, and ``tuple[str, ...]`` list. Any other annotation gives str.

    Args:
        argument: a dataclass field that :func:`_arg` made.
    """
    for name, kind in (("bool", bool), ("int", int), ("float", float), ("tuple", list)):
        if str(argument.type).startswith(name):
            return kind
    return str


@dataclass(frozen=True)
class AttachArguments:
    """Arguments of :func:`recbole_pos.attach`; the texts below are those of ``--help``."""

    verbose: bool = _arg(True, "print no progress and no results", flag="quiet")
    run_dir: str | Path | None = _arg(None, "output folder (saved/<dataset>/<model>/<time>)")


@dataclass(frozen=True)
class RunArguments(AttachArguments):
    """Arguments of :func:`recbole_pos.run`."""

    resume: str | Path | None = _arg(None, "continue an interrupted run", "RUN_DIR")
    nproc: int = _arg(1, "processes that train together (1)", "N")


@dataclass(frozen=True)
class ClusterArguments:
    """Where the trainings of a search or of a study run, and how many side by side."""

    max_concurrent: int | None = _arg(None, "trainings side by side (as many as fit)", "N")
    address: str | None = _arg(None, "Ray cluster: auto or HOST:PORT (this machine)")
    cpus_per_trial: float = _arg(1, "cores of a training (1)", "N")
    gpus_per_trial: float | None = _arg(None, "GPUs of a training; 0.5 shares one (1 if any)", "N")
    verbose: bool = _arg(True, "print no progress and no results", flag="quiet")


@dataclass(frozen=True)
class CompareArguments(ClusterArguments):
    """Arguments of :func:`recbole_pos.compare`."""

    vary: tuple[str, ...] = _arg((), "a configuration per value: position=[nope],[rope]", "KEY=A,B")
    seeds: int | None = _arg(None, "seeds per configuration (1, or as the study says)", "N")
    reference: str | None = _arg(None, "configuration to compare with (the first)")
    rows: tuple[str, ...] = _arg((), "train only these configurations; all are shown", "NAME")
    run_dir: str | Path | None = _arg(None, "the study's folder (saved/<dataset>/studies/<title>)")
    report: bool = _arg(False, "tables and report of what is finished, and train nothing")
    latex: bool = _arg(False, "also write table.tex, and the figures as pdf")
    plan: bool = _arg(False, "only tell which difference how many seeds would detect")
    difference: float | None = _arg(None, "with --plan: how many seeds it takes", "NUMBER")
    known: tuple[str | Path, ...] = _arg((), "runs of --pack that are not trained again", "FOLDER")
    pack: str | Path | None = _arg(None, "write what is finished into a folder, to keep", "FOLDER")


@dataclass(frozen=True)
class SearchArguments(ClusterArguments):
    """Arguments of :func:`recbole_pos.tune`."""

    num_samples: int | None = _arg(None, "trials (60; all of a grid)", "N")
    scheduler: str = _arg("asha", "asha (stops weak trials early) or none")
    grace_epochs: int = _arg(5, "epochs of each trial before asha may stop it (5)", "N")
    searcher: str = _arg("optuna", "optuna (TPE), random or grid")
    seed: int = _arg(0, "of the search (0); that of training is `seed` in a configuration file")
    run_dir: str | Path | None = _arg(None, "output folder (saved/<dataset>/<model>/tune-<time>)")
    resume: str | Path | None = _arg(None, "continue a search; extend it by --num_samples", "DIR")


@dataclass(frozen=True)
class ConvertArguments:
    """Arguments of :func:`recbole_pos.convert`."""

    name: str | None = _arg(None, "of the dataset (that of the file)")
    # these two: files or, in Python, frames
    items: Any = _arg(None, "file with attributes of items", "FILE")
    users: Any = _arg(None, "file with attributes of users", "FILE")
    user: str | None = _arg(None, "column of who (by name)", "COLUMN")
    item: str | None = _arg(None, "column of what (by name)", "COLUMN")
    time: str | None = _arg(None, "column of when (by name); row_order: rows in order", "COLUMN")
    date_format: str | None = _arg(None, "of times: s, ms, us, ns or '%%d/%%m/%%Y %%H:%%M'", "FORM")
    timezone: str | None = _arg(None, "of times that name none (UTC), as America/New_York", "ZONE")
    then: str | None = _arg(None, "column that orders rows of the same time", "COLUMN")
    columns: Any = _arg((), "names of the columns of a text file without a header", "NAME,NAME")
    types: tuple | dict = _arg((), "token, token_seq, float, float_seq", "COLUMN=TYPE", flag="type")
    tables: tuple | dict = _arg((), "table: item, user or inter", "COLUMN=TABLE", flag="table")
    rename: tuple | dict = _arg((), "names of fields", "COLUMN=FIELD")
    drop: tuple[str, ...] = _arg((), "columns to leave out", "COLUMN")
    max_lost: float = _arg(0.1, "share of the rows of a table that may be unusable (0.1)", "SHARE")
    separator: str | None = _arg(None, "between cells of a text file (seen)")
    no_quotes: bool = _arg(False, "quotation marks mean nothing in a text file")
    encoding: str = _arg("utf-8", "of text files (utf-8)")
    decimal: str = _arg(".", "decimal separator of numbers in text (.)")
    missing: tuple[str, ...] = _arg((), "words for a missing cell beside NA, null etc.", "WORD")
    data_path: str | Path = _arg("dataset/", "folder that gets the dataset (dataset/)")
    overwrite: bool = _arg(False, "replace a dataset of this name")
    verbose: bool = _arg(True, "print no progress and no results", flag="quiet")


@dataclass(frozen=True)
class IndexArguments:
    """Whether recommendations are found by an approximate index of the items."""

    index: str | None = _arg(
        None, "faiss: find items by an approximate index, for a million items (score all)", "NAME"
    )
    index_recall: float = _arg(
        0.99, "share of the best items that the index must find (0.99)", "SHARE"
    )


@dataclass(frozen=True)
class PartArguments:
    """How :func:`recbole_pos.serve.parts.recommend_in_parts` writes its parts."""

    part_rows: int | None = _arg(None, "write a folder (--out) of resumable parts of N users", "N")
    workers: int = _arg(1, "processes on this machine that write parts (1)", "N", group="where")
    part: str | None = _arg(None, "write the I-th of N shares of the parts", "I/N", group="where")
    address: str | None = _arg(None, "Ray cluster that writes: auto or HOST:PORT", group="where")


@dataclass(frozen=True)
class ServeArguments(IndexArguments):
    """Arguments of :func:`recbole_pos.serve.http.serve`."""

    host: str = _arg("127.0.0.1", "address to listen on (127.0.0.1: this machine alone)")
    port: int = _arg(8080, "port to listen on (8080); 0 takes a free one")
    threads: int = _arg(1, "threads that compute (1)", "N")
    data_path: str | None = _arg(None, "folder of datasets (where the run found its own)", "DIR")
    item_vectors: str | None = _arg(None, "content vectors of further items", "FILE")
    histories_only: bool = _arg(False, "answer given histories only; reads no dataset if possible")


Settings = TypeVar("Settings", bound=Any)  # one of the dataclasses above


def split_keywords(default: Settings, keywords: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Split the keyword arguments of a call into fields of a settings object and everything else.

    Users give both in one call: ``recbole_pos.run(..., nproc=2, hidden_size=64)`` gives settings
    with ``nproc=2`` and the options ``{"hidden_size": 64}``.

    Args:
        default: a settings object, such as ``RunArguments()``.
        keywords: the keyword arguments.

    Returns:
        A copy of ``default`` with the keywords that are its fields.
        The other keywords, which are options of the configuration.
    """
    names = {field.name for field in fields(default)}
    # to_python: numbers of numpy become Python's, since settings are written as json
    settings = {name: to_python(value) for name, value in keywords.items() if name in names}
    options = {name: value for name, value in keywords.items() if name not in names}
    return replace(default, **settings), options


def list_changed(settings: Any) -> list[str]:
    """Return the names of the fields of a settings dataclass that differ from their defaults."""
    return [
        field.name for field in fields(settings) if getattr(settings, field.name) != field.default
    ]


# --- the command line ---


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
        for argument in fields(settings_class):
            about, kind = argument.metadata, find_kind(argument)
            settings = {"dest": argument.name, "help": about["text"], "default": argument.default}
            if kind is bool:  # a flag, which sets the opposite of the default
                settings["action"] = "store_false" if argument.default else "store_true"
            elif kind is list:  # words; if the option is given twice, those of both count
                words = {"nargs": "+", "action": "extend", "default": []}
                settings |= {**words, "metavar": about["metavar"]}
            else:  # one word, converted to an int, float or str
                settings |= {"type": kind, "metavar": about["metavar"]}
            # such as --quiet, which sets ``verbose`` to False
            name = f"--{about.get('flag', argument.name)}"
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
    for argument in fields(settings_class):
        value = getattr(args, argument.name, argument.default)
        values[argument.name] = tuple(value) if isinstance(value, list) else value
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
