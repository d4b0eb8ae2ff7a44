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
# A scheme is one class, one line here, and one yaml, properties/position/<name>.yaml. A test
# compares its facts with the scheme itself (``build.describe``).
_SHIPPED: dict[str, tuple[str, str, str, int]] = {
    "nope": ("bias:NoPosition", "none", "nothing", 0),
    "learned": ("additive:LearnedPosition", "input", "order", 3_200),
    "sinusoidal": ("additive:SinusoidalPosition", "input", "order", 0),
    "spe": ("additive:SPE", "input", "order", 0),
    "lpe": ("additive:LPE", "input", "order", 3_200),
    "rspe": ("additive:RSPE", "input", "order", 0),
    "lrpe": ("additive:LRPE", "input", "order", 3_200),
    "aspe": ("additive:ASPE", "input", "order", 0),
    "alpe": ("additive:ALPE", "input", "order", 6_400),
    "spe2d": ("additive:SPE2D", "input", "order", 0),
    "lpe2d": ("additive:LPE2D", "input", "order", 3_200),
    "dpe": ("additive:DPE", "input", "order", 0),
    "ldpe": ("additive:LDPE", "input", "order", 3_200),
    "time_learned": ("time_intervals:TimeEmbedding", "input", "time", 8_192),
    "request_age": ("time_intervals:RequestAge", "input", "time", 131_072),
    "rope": ("rotary:RotaryPosition", "query, key", "order", 0),
    "time_rope": ("time_rotary:TimeRotaryPosition", "query, key", "time", 0),
    "to_rope": ("time_rotary:TimeOrderRotaryPosition", "query, key", "time", 0),
    "calendar_rope": ("time_rotary:CalendarRotaryPosition", "query, key", "time", 0),
    "rote": ("time_rotary:MultiLevelRotaryPosition", "query, key", "time", 0),
    "alibi": ("bias:ALiBi", "logits", "order", 0),
    "t5": ("bias:T5Bias", "logits", "order", 64),
    "kerple": ("bias:KERPLE", "logits", "order", 4),
    "hstu": ("time_intervals:HSTUBias", "logits", "time", 356),
    "time_decay": ("time_intervals:TimeDecay", "logits", "time", 6),
    "cape": ("bias:ContextualPosition", "logits", "order", 6_400),
    "difsr": ("attribute_attention:DecoupledAttributes", "logits", "order", 19_840),
    "kernel": ("kernel:PositionalKernel", "key, value", "order", 1_375),
    "tisas": ("attribute_attention:TimeIntervalAttention", REPLACES, "time", 39_296),
    "fuxi_linear": ("fuxi_linear:FuXiLinear", REPLACES, "time", 3_206),
    "parec": ("positional_attention:PositionMatrix", REPLACES, "order", 5_000),
    "fparec": ("positional_attention:FactorizedPositionMatrix", REPLACES, "order", 8_000),
    "average": ("positional_attention:AverageAttention", REPLACES, "order", 0),
    "linear_annealing": ("positional_attention:LinearAnnealing", REPLACES, "order", 0),
    "exponential_annealing": ("positional_attention:ExponentialAnnealing", REPLACES, "order", 0),
    "linear_attention": ("mixing:LinearAttention", REPLACES, "order", 0),
    "token_mixing": ("mixing:TokenMixing", REPLACES, "order", 10_000),
}
SCHEMES = Registry(
    "scheme",
    {name: f"recbole_pos.position.{facts[0]}" for name, facts in _SHIPPED.items()},
    "position",
)
FACTS = {name: Facts(*facts[1:]) for name, facts in _SHIPPED.items()}


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
    """Register a custom position scheme under a name that ``position`` may have.

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
    # _require_scheme raises a UsageError for what is no scheme; an option that the scheme reads is
    # a name in its attribute ``options``.
    options = _require_scheme(name, scheme).options
    # One of the plugin's own schemes under its own name is registered already. SCHEMES.paths maps
    # the names of the plugin's own schemes to texts such as "module:Class" (``import_path``).
    if SCHEMES.paths.get(name) == import_path(scheme) and defaults is None:
        return scheme

    def read_shipped(base: type) -> dict[str, Any]:
        """Return the defaults of a class of the plugin that are options of this one, else {}."""
        shipped_name = SCHEMES.find_name(base)
        if shipped_name is None or import_path(base) not in SCHEMES.paths.values():
            return {}
        shipped = SCHEMES.defaults(shipped_name)
        return {key: value for key, value in shipped.items() if key in options}

    # The value of each option: as given here, or else as in a class that this one extends.
    # ``own_options`` are options that no scheme of the plugin has.
    values, own_options = SCHEMES.gather_defaults(scheme, defaults, read_shipped)
    missing = set(options) - set(values)
    if missing:
        raise UsageError(
            f"scheme {shown(name)}: {', '.join(sorted(missing))} has no default; give one to "
            "register_scheme"
        )
    # A class that it extends may have further options, which this one does not read.
    values = {key: values[key] for key in options}
    own_options &= set(options)

    # Another process gets the scheme by importing the module that calls this function, if the call
    # is at the top level of a module; else None. _getframe(1) is the code of the caller.
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

    bases = (AttentionPosition, InputPosition)
    if not (isinstance(scheme, type) and issubclass(scheme, bases)):
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
