"""The registry of position schemes, whose names are the values of ``position``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from recbole_pos.errors import UsageError
from recbole_pos.registry import (
    Defaults,
    Registration,
    Registry,
    find_importing_module,
    import_path,
)
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import read_properties

if TYPE_CHECKING:
    from recbole_pos.layers.hooks import AttentionPosition, InputPosition


class Facts(NamedTuple):
    """What ``recbole-pos schemes`` lists of a scheme without importing it.

    Attributes:
        place: what a scheme changes: the input, parts of attention, or all of it.
        needs: what a scheme reads beside items.
        parameters: number that it adds to a model of n = 50, d = 64, 1 head, 2 layers.
    """

    place: str
    needs: str
    parameters: int


REPLACES = "replaces attention"
# A scheme is one class and one yaml file, properties/position/<name>.yaml.
SCHEMES = Registry("scheme", "position")


def read_facts(name: str) -> Facts:
    """Return what the yaml file of one of the plugin's position schemes says of it.

    The scheme is not imported. A test compares this with the scheme itself (``build.describe``).

    Args:
        name: name of the scheme.
    """
    about = read_properties("position", name).about
    return Facts(about["place"], about["needs"], about["parameters"])


def scheme_names(position: str | Iterable[str], key: str = "position") -> list[str]:
    """Check the value of an option that names position schemes, and return it as a list of names.

    Args:
        position: the value: the name of a scheme, or a list of names.
        key: name of the option, for messages.

    Returns:
        The names, a single one as a list, too.

    Raises:
        UsageError: for an unknown or repeated name, or a value that is not a list of names.
    """
    # SCHEMES has the class of each scheme by name, of the plugin and of users.
    names = [position] if isinstance(position, str) else position
    if not isinstance(names, (list, tuple)):
        raise UsageError(f"{key}: expected a list such as [rope, kernel], found {shown(position)}")
    for name in names:
        if not isinstance(name, str) or name not in SCHEMES:
            hint = suggest(str(name), SCHEMES)
            # the shell cuts a list without quotes into pieces such as "[rope,"
            if isinstance(name, str) and any(mark in name for mark in "[],"):
                hint = "; a list is written [rope, kernel], with both brackets"
            raise UsageError(
                f"{key}: unknown scheme {shown(name)}{hint}; "
                f"schemes are {', '.join(SCHEMES)}. One of your own: name the module that "
                "registers it, as in --plugins='[my_schemes]', or in Python call "
                "recbole_pos.register_scheme first"
            )
        if names.count(name) > 1:
            raise UsageError(f"{key}: {shown(name)} is given twice")
    return list(names)


def register_scheme(name: str, scheme: type, defaults: Defaults | None = None) -> type:
    """Register a custom position scheme, so that the option ``position`` may name it.

    Args:
        name: name of the scheme.
        scheme: an :class:`~recbole_pos.layers.hooks.InputPosition` or
            :class:`~recbole_pos.layers.hooks.AttentionPosition`.
        defaults: a value for each of its ``options``; the attribute ``defaults`` of the class when
            None. A class that extends a scheme of the plugin's inherits its values.

    Returns:
        The class.

    Raises:
        UsageError: if the class is not a scheme or overrides no method of one, an option has no
            default, or the name is taken.

    Example::

        recbole_pos.register_scheme("recency", Recency, defaults={"recency_start": 1.0})
        recbole_pos.run("PosSASRec", "ml-100k", config_dict={"position": ["recency"]})
    """
    options = _require_scheme(name, scheme).options  # names of the options that it reads
    # Nothing to do if the class comes with this package and has this name there.
    if SCHEMES.find_shipped_name(scheme) == name and defaults is None:
        return scheme

    # ``values`` has a default for each option: from ``defaults``, from the class, or from a class
    # that it extends. ``own_options`` are those options that no scheme of this package has.
    values, own_options = SCHEMES.gather_defaults(scheme, defaults)
    missing = set(options) - set(values)
    if missing:
        raise UsageError(
            f"scheme {shown(name)}: {', '.join(sorted(missing))} has no default; give one to "
            "register_scheme"
        )
    # leave out options that only a class that it extends reads
    values = {key: values[key] for key in options}
    own_options &= set(options)

    # Processes that are started later, such as Ray's, need the scheme, too. They get it by
    # importing the module that calls this function. ``sys._getframe(1)`` is the frame of that call,
    # and ``find_importing_module`` returns the name of its module, or None if importing the module
    # would not repeat the call, as in a function or a notebook.
    module = find_importing_module(sys._getframe(1))
    SCHEMES.add(name, Registration(scheme, defaults, values, own_options, module))
    return scheme


def _require_scheme(name: str, scheme: Any) -> type[AttentionPosition] | type[InputPosition]:
    """Check that what a user registers is a position scheme that does something; return the class.

    Args:
        name: the name to register it under, for messages.
        scheme: what the user has given.

    Raises:
        UsageError: if it is no class of a scheme, or a subclass of ``AttentionPosition`` that
            overrides none of the methods by which attention is changed.
    """
    from recbole_pos.layers.hooks import AttentionPosition, InputPosition

    if not (isinstance(scheme, type) and issubclass(scheme, AttentionPosition | InputPosition)):
        description = import_path(scheme) if isinstance(scheme, type) else shown(scheme)
        raise UsageError(
            f"scheme {shown(name)}: expected a class that extends recbole_pos.AttentionPosition "
            f"or recbole_pos.InputPosition, found {description}"
        )
    # The methods by which a scheme changes attention; those of the base class change nothing.
    hooks = ("rotate", "mix_keys", "mix_values", "bias", "attend")
    if issubclass(scheme, AttentionPosition) and all(
        getattr(scheme, hook) is getattr(AttentionPosition, hook) for hook in hooks
    ):
        raise UsageError(
            f"scheme {shown(name)}: {import_path(scheme)} does nothing: it defines no "
            f"{' and no '.join(hooks)}"
        )
    return scheme
