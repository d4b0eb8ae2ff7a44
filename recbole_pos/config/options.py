"""The table of options, ``properties/options.yaml``: what each may be, and where it is read.

From a row come the checks of a value and their messages (``checks.py``), what a search may vary,
what starting from another run must not change, and what ``run --help`` lists. An option within a
mapping has a row of its own, with a dot in its name: ``eval_args.target``. An option without a row
belongs to a custom model or scheme, and has the type of its default.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from recbole_pos.yaml_files import read_option_rows

# What changing an option changes.
MODEL = "model"  # the function that is learned
TRAINING = "training"  # how it is learned or asked
SCHEDULE = "schedule"  # how long a run trains, and where; in a search the scheduler's
DATA = "data"  # interactions, split and metrics: the same in all trials of a search


@dataclass(frozen=True)
class Option:
    """A row of the table of options, whose fields are explained at the top of ``options.yaml``.

    Attributes:
        name: name of the option; ``eval_args.target`` is the key ``target`` of ``eval_args``.
        type: type of its values in words, such as ``int or list of int``.
        default: the plugin's default for every model, if there is one.
        range: smallest and largest number; ``above 0`` excludes the bound.
        choices: the names that it may have.
        length: number of elements that a list must have.
        nonempty: whether a list or mapping must have an element.
        role: what changing it changes: MODEL, TRAINING, SCHEDULE or DATA.
        only: conditions under which a run reads it, such as ``fusion: early``.
        synonyms: what other libraries and papers call it.
        refused: why it has no effect here, for an option of RecBole's that has none.
        text: what it is for.
    """

    name: str
    type: str = "any"
    default: Any = field(default=None, hash=False)
    range: tuple[Any, ...] = ()
    choices: tuple[str, ...] = ()
    length: int | None = None
    nonempty: bool = False
    role: str = MODEL
    only: str | tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()
    refused: str = ""
    text: str = ""

    @property
    def allowed(self) -> str:
        """The choices or the bounds in a few characters, such as ``0 to 1``; empty for neither."""
        if not self.range:
            return ", ".join(self.choices)
        return " to ".join(_format_bound(bound) for bound in self.range)

    @property
    def expected(self) -> str:
        """What a value must be, for a message: type, length, choices or bounds.

        A list of two floats from 0 to below 1 gives ``list of float (2 of them), 0 to below 1``. Of
        the type ``int or none``, whose values may be left empty, the message only has ``int``.
        """
        text = self.type.removesuffix(" or none")
        if "interval" in text:  # the type ``interval``, a text whose form the user may not know
            text += " such as [3,inf)"
        if self.length:
            text += f" ({self.length} of them)"
        if self.allowed:  # the choices or the bounds as a text, such as "0 to below 1"
            text += f", {self.allowed}"
        if self.nonempty:
            text += ", not empty"
        return text


def _format_bound(bound: int | float | str) -> str:
    """Return a bound as a message has it: 65,536, 1e+12, or "above 0"."""
    if isinstance(bound, int):
        return f"{bound:,}"
    return f"{bound:g}" if isinstance(bound, float) else bound


# Python's type of a default -> the type, in words of the table, of an option without a row.
_TYPES_OF_DEFAULTS: dict[type, str] = {
    **{bool: "bool", int: "int", float: "float", str: "str"},
    **{list: "list of any", dict: "mapping of any"},
}


def _read_row(name: str, row: dict[str, Any]) -> Option:
    """Return a row of the file as an Option, with tuples in place of lists, but for its default."""
    tuples = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Option(name, **{**row, **tuples, "default": row.get("default")})


OPTIONS = {name: _read_row(name, row) for name, row in read_option_rows().items()}
# Options of RecBole's that have no effect here are left out of a run's configuration.
REFUSED = {option.name for option in OPTIONS.values() if option.refused}


def find_option(name: str) -> Option:
    """Return the row of an option; for a custom option one without bounds or conditions."""
    return OPTIONS.get(name) or Option(name)


@functools.cache
def find_inner(name: str) -> dict[str, Option]:
    """Return the rows of the keys of an option whose value is a mapping, by key; empty for others.

    The row ``eval_args.target`` of the table of options describes the key ``target`` of
    ``eval_args``: ``find_inner("eval_args")`` gives ``{"target": row, ...}``.
    """
    prefix = f"{name}."
    inner = [row for row in OPTIONS.values() if row.name.startswith(prefix)]
    return {row.name.removeprefix(prefix): row for row in inner}


def find_synonyms(name: str) -> list[str]:
    """Return the options that other libraries call by a name."""
    name = name.lower().replace("-", "_")
    return [option.name for option in OPTIONS.values() if name in option.synonyms]


def make_custom_option(name: str, default: Any) -> Option:
    """Return a row for an option that only a custom model or position scheme has.

    Args:
        name: name of the option.
        default: its default, whose type the option has; any type if it is None.
    """
    return Option(name, _TYPES_OF_DEFAULTS.get(type(default), "any"))


def flatten_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of options in which the keys of mappings are options of their own, too.

    ``{"epochs": 3, "eval_args": {"target": "last"}}`` becomes ``{"epochs": 3, "eval_args":
    {"target": "last"}, "eval_args.target": "last", "eval_args.mode": None, ...}``. The table of
    options has a row for each key that a mapping may have; a missing key gets the default there.

    Args:
        options: option -> value.
    """
    flat = dict(options)
    for name, value in options.items():
        mapping = value or {}  # an option that may be a mapping may also be None
        # The rows of the table for the keys of this option, key -> row; none if it is no mapping.
        for key, row in find_inner(name).items():
            flat[f"{name}.{key}"] = mapping.get(key, row.default)
    return flat


def find_unmet(name: str, config: Mapping[str, Any], kinds: Collection[str]) -> str | None:
    """Return why an option has no effect in a run: the first of its conditions that is not met.

    A row of the table of options may have conditions (``only``) under which the option is read at
    all: ``fusion: early``, or ``by custom models``. All must be met; of a condition with the word
    "or" between alternatives, one suffices.

    Args:
        name: name of the option.
        config: all options of the run, from :func:`flatten_options`, which adds the keys of
            mappings.
        kinds: the kinds of models to which the model belongs, such as "custom models".

    Returns:
        The condition in words that can follow "only" in a message, such as ``with fusion: early``,
        ``without time_base`` or ``by custom models``; None if all conditions are met.
    """
    only = find_option(name).only
    for condition in [only] if isinstance(only, str) else only:
        alternatives = condition.split(" or ")
        if not any(_is_met(alternative, config, kinds) for alternative in alternatives):
            # In words: "not time_base" becomes "with not time_base", and then "without time_base".
            text = condition if condition.startswith("by ") else f"with {condition}"
            return text.replace("with not ", "without ")
    return None


def _is_met(condition: str, config: Mapping[str, Any], kinds: Collection[str]) -> bool:
    """Return whether a run meets one condition under which an option has an effect.

    A condition has one of these forms:

    - ``fusion: early effective``: the option has one of these values, or a list that contains one.
    - ``time_base``: the option has a value other than empty, 0 and False.
    - ``not time_base``: it has none.
    - ``by custom models``: the model is of this kind.

    A condition on an option that the run does not have counts as met.

    Args:
        condition: the condition.
        config: option -> value, of the run.
        kinds: the kinds of models to which the model belongs, such as "custom models".
    """
    if condition.startswith("by "):
        return condition.removeprefix("by ") in kinds

    # Split "fusion: early effective" into the option and its values; "time_base" has no values.
    is_negated = condition.startswith("not ")
    key, _, values = condition.removeprefix("not ").partition(": ")
    if key not in config:
        return True
    value = config[key]
    if not values:
        return bool(value) != is_negated
    elements = value if isinstance(value, list) else [value]
    return any(str(element) in values.split() for element in elements)
