"""The registry of position schemes, whose names are the values of ``position``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from recbole_pos.errors import UsageError
from recbole_pos.registry import (
    Defaults,
    Registration,
    Registry,
    find_importing_module,
    import_path,
)
from recbole_pos.values import shown, suggest

if TYPE_CHECKING:
    from recbole_pos.layers.hooks import PositionScheme

# A scheme is one class and one yaml file, properties/position/<name>.yaml.
SCHEMES = Registry("scheme", "position")


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
            raise UsageError(
                f"{key}: unknown scheme {shown(name)}{suggest(str(name), SCHEMES)}; "
                f"schemes are {', '.join(SCHEMES)}. One of your own: name the module that "
                "registers it, as in --plugins='[my_schemes]', or in Python call "
                "recbole_pos.register_scheme first"
            )
        if names.count(name) > 1:
            raise UsageError(f"{key}: {shown(name)} is given twice")
    return list(names)


def register_scheme(
    name: str, scheme: type[PositionScheme], defaults: Defaults | None = None
) -> type[PositionScheme]:
    """Register a custom position scheme, so that the option ``position`` may name it.

    Args:
        name: name of the scheme.
        scheme: a subclass of :class:`~recbole_pos.layers.hooks.InputPosition` or
            :class:`~recbole_pos.layers.hooks.AttentionPosition`, whose attribute ``options`` names
            the options that it reads.
        defaults: option -> default. None takes the attribute ``defaults`` of the class. Options
            that the class inherits from a scheme of this package have defaults already.

    Returns:
        The class.

    Raises:
        UsageError: if the class is not a scheme or overrides no method of one, an option has no
            default, or the name is taken.

    Example::

        recbole_pos.register_scheme("recency", Recency, defaults={"recency_start": 1.0})
        recbole_pos.run("PosSASRec", "ml-100k", config_dict={"position": ["recency"]})
    """
    _require_scheme(name, scheme)
    # A scheme of this package, under its own name and with its own defaults, is there already.
    if defaults is None and name == SCHEMES.find_shipped_name(scheme):
        return scheme
    option_defaults, new_options = _find_defaults(name, scheme, defaults)

    # Other processes, such as Ray's, register the scheme by importing the module of the caller,
    # which ``sys._getframe(1)`` finds. None if that import would not repeat the call: it is in a
    # function or a notebook.
    module = find_importing_module(sys._getframe(1))
    SCHEMES.add(name, Registration(scheme, defaults, option_defaults, new_options, module))
    return scheme


def _find_defaults(
    name: str, scheme: type[PositionScheme], given: Defaults | None
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the defaults of the options that a custom position scheme reads.

    Args:
        name: name of the scheme, for messages.
        scheme: the class, whose attribute ``options`` names the options.
        given: the defaults that it is registered with, or None.

    Returns:
        The default of each option, and the names of those that no scheme of this package has.

    Raises:
        UsageError: if an option has no default.
    """
    # also of options that only a class which it extends reads
    defaults, new_options = SCHEMES.gather_defaults(scheme, given)
    missing = [option for option in scheme.options if option not in defaults]
    if missing:
        raise UsageError(
            f"scheme {shown(name)}: {', '.join(missing)} has no default; give one to "
            "register_scheme"
        )
    read_defaults = {option: defaults[option] for option in scheme.options}
    return read_defaults, new_options.intersection(scheme.options)


def _require_scheme(name: str, scheme: object) -> None:
    """Raise a UsageError unless an object is the class of a position scheme that does something.

    Args:
        name: the name to register it under, for messages.
        scheme: what a user has given as a scheme.
    """
    from recbole_pos.layers.hooks import AttentionPosition, InputPosition  # they import torch

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
