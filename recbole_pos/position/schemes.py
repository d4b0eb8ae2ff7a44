"""The table of position schemes: what ``position`` may name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from recbole_pos.errors import UsageError
from recbole_pos.registry import (
    Defaults,
    Registration,
    Registry,
    find_importing_module,
    gather_defaults,
    import_path,
)
from recbole_pos.values import shown, suggest

if TYPE_CHECKING:
    from recbole_pos.layers.hooks import AttentionPosition, InputPosition


# A scheme is one class, one line here, and one yaml, properties/position/<name>.yaml.
SCHEMES = Registry(
    "scheme",
    {
        "nope": "recbole_pos.position.contextual:NoPosition",
        "learned": "recbole_pos.position.additive:LearnedPosition",
        "sinusoidal": "recbole_pos.position.additive:SinusoidalPosition",
        "spe": "recbole_pos.position.dual:SPE",
        "lpe": "recbole_pos.position.dual:LPE",
        "rspe": "recbole_pos.position.dual:RSPE",
        "lrpe": "recbole_pos.position.dual:LRPE",
        "aspe": "recbole_pos.position.dual:ASPE",
        "alpe": "recbole_pos.position.dual:ALPE",
        "spe2d": "recbole_pos.position.dual:SPE2D",
        "lpe2d": "recbole_pos.position.dual:LPE2D",
        "dpe": "recbole_pos.position.dual:DPE",
        "ldpe": "recbole_pos.position.dual:LDPE",
        "time_learned": "recbole_pos.position.time_buckets:TimeEmbedding",
        "rope": "recbole_pos.position.rotary:RotaryPosition",
        "time_rope": "recbole_pos.position.time_rotary:TimeRotaryPosition",
        "to_rope": "recbole_pos.position.time_rotary:TimeOrderRotaryPosition",
        "calendar_rope": "recbole_pos.position.time_rotary:CalendarRotaryPosition",
        "rote": "recbole_pos.position.time_rotary:MultiLevelRotaryPosition",
        "siren_rope": "recbole_pos.position.siren_rotary:SirenRotaryPosition",
        "semi_local": "recbole_pos.position.bias:SemiLocal",
        "alibi": "recbole_pos.position.bias:ALiBi",
        "t5": "recbole_pos.position.bias:T5Bias",
        "kerple": "recbole_pos.position.bias:KERPLE",
        "hstu": "recbole_pos.position.time_buckets:HSTUBias",
        "time_decay": "recbole_pos.position.time_decay:TimeDecay",
        "cape": "recbole_pos.position.contextual:ContextualPosition",
        "difsr": "recbole_pos.position.attribute_attention:DecoupledAttributes",
        "kernel": "recbole_pos.position.kernel:PositionalKernel",
        "tisas": "recbole_pos.position.attribute_attention:TimeIntervalAttention",
        "channels": "recbole_pos.position.channels:SeparateChannels",
        "fuxi_linear": "recbole_pos.position.fuxi_linear:FuXiLinear",
        "parec": "recbole_pos.position.positional_attention:PositionMatrix",
        "fparec": "recbole_pos.position.positional_attention:FactorizedPositionMatrix",
        "average": "recbole_pos.position.positional_attention:AverageAttention",
        "linear_annealing": "recbole_pos.position.positional_attention:LinearAnnealing",
        "exponential_annealing": "recbole_pos.position.positional_attention:ExponentialAnnealing",
        "linear_attention": "recbole_pos.position.mixing:LinearAttention",
        "token_mixing": "recbole_pos.position.mixing:TokenMixing",
    },
    "position",
)


class Facts(NamedTuple):
    """What ``recbole-pos schemes`` lists of a scheme without importing it.

    Attributes:
        place: where order enters.
        needs: what a scheme reads beside items.
        parameters: added to a model of n = 50, d = 64, 1 head, 2 layers.
    """

    place: str
    needs: str
    parameters: int


# a test compares them with the schemes themselves (``build.describe``)
FACTS: dict[str, Facts] = {
    "nope": Facts("none", "nothing", 0),
    "learned": Facts("input", "order", 3_200),
    "sinusoidal": Facts("input", "order", 0),
    "spe": Facts("input", "order", 0),
    "lpe": Facts("input", "order", 3_200),
    "rspe": Facts("input", "order", 0),
    "lrpe": Facts("input", "order", 3_200),
    "aspe": Facts("input", "order", 0),
    "alpe": Facts("input", "order", 6_400),
    "spe2d": Facts("input", "order", 0),
    "lpe2d": Facts("input", "order", 3_200),
    "dpe": Facts("input", "order", 0),
    "ldpe": Facts("input", "order", 3_200),
    "time_learned": Facts("input", "time", 8_192),
    "rope": Facts("query, key", "order", 0),
    "time_rope": Facts("query, key", "time", 0),
    "to_rope": Facts("query, key", "time", 0),
    "calendar_rope": Facts("query, key", "time", 0),
    "rote": Facts("query, key", "time", 0),
    "siren_rope": Facts("query, key", "time", 2_432),
    "semi_local": Facts("logits", "order", 0),
    "alibi": Facts("logits", "order", 0),
    "t5": Facts("logits", "order", 64),
    "kerple": Facts("logits", "order", 4),
    "hstu": Facts("logits", "time", 356),
    "time_decay": Facts("logits", "time", 6),
    "cape": Facts("logits", "order", 6_400),
    "difsr": Facts("logits", "order", 19_840),
    "kernel": Facts("key, value", "order", 1_375),
    "tisas": Facts("replaces attention", "time", 39_296),
    "channels": Facts("replaces attention", "time", 356),
    "fuxi_linear": Facts("replaces attention", "time", 3_206),
    "parec": Facts("replaces attention", "order", 5_000),
    "fparec": Facts("replaces attention", "order", 8_000),
    "average": Facts("replaces attention", "order", 0),
    "linear_annealing": Facts("replaces attention", "order", 0),
    "exponential_annealing": Facts("replaces attention", "order", 0),
    "linear_attention": Facts("replaces attention", "order", 0),
    "token_mixing": Facts("replaces attention", "order", 10_000),
}


def scheme_names(position: str | Iterable[str], key: str = "position") -> list[str]:
    """Return the value of the option ``key``, as a list of registered scheme names.

    Raises:
        UsageError: for an unknown name, or anything but names.
    """
    names = [position] if isinstance(position, str) else position
    if not isinstance(names, (list, tuple)):
        raise UsageError(f"{key}: expected a list such as [rope, kernel], found {shown(position)}")
    for name in names:
        if not isinstance(name, str) or name not in SCHEMES:
            has_bracket = isinstance(name, str) and any(mark in name for mark in "[],")
            hint = "; a list is written [rope, kernel], with both brackets" if has_bracket else ""
            raise UsageError(
                f"{key}: unknown scheme {shown(name)}{hint or suggest(str(name), SCHEMES)}; "
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
        defaults: a value for each of its ``options``, as a dict or a yaml file (in the working
            directory, or beside the module of the class); the attribute ``defaults`` of the class
            when None. A class that extends a scheme of the plugin's inherits its values.

    Returns:
        The class.

    Raises:
        UsageError: if the class is no scheme, fills no hook, or its options and defaults differ; if
            the name is taken.

    Example::

        recbole_pos.register_scheme("recency", Recency, defaults={"recency_start": 1.0})
        recbole_pos.run("PosSASRec", "ml-100k", config_dict={"position": ["recency"]})
    """
    _register(name, scheme, defaults, find_importing_module(sys._getframe(1)))
    return scheme


def _register(name: str, scheme: type, given: Defaults | None, module: str | None) -> None:
    """Check and add a scheme.

    Args:
        name, scheme: see :func:`register_scheme`.
        given: defaults as given there.
        module: the module whose import registers the scheme again, in another process.

    Raises:
        UsageError: see :func:`register_scheme`.
    """
    options = _require_scheme(name, scheme).options
    place = import_path(scheme)
    if SCHEMES.places.get(name) == place and given is None:
        return
    if not (isinstance(options, tuple) and all(isinstance(key, str) for key in options)):
        raise UsageError(
            f"scheme {shown(name)}: {place}.options: expected names of options such as "
            f"('recency_start',), found {shown(options)}"
        )
    defaults, own = gather_defaults(scheme, given, _make_reader(options), SCHEMES.given)
    for keys, wrong in (
        (set(options) - set(defaults), "has no default; give one to register_scheme"),
        (set(defaults) - set(options), f"has a default, but is not among {place}.options"),
    ):
        if keys:
            raise UsageError(f"scheme {shown(name)}: {', '.join(sorted(keys))} {wrong}")
    try:
        inspect.signature(scheme).bind(None, **defaults)
    except TypeError as error:
        built = ", ".join(["dimensions", *(f"{key}=..." for key in options)])
        raise UsageError(
            f"scheme {shown(name)} is built as {scheme.__name__}({built}), which its "
            f"constructor does not take: {error}"
        ) from error
    SCHEMES.add(name, Registration(scheme, given, defaults, own, module))


def _make_reader(options: tuple[str, ...]) -> Any:
    """Return a function that reads a shipped scheme's defaults of ``options``; {} for others."""

    def read_defaults(scheme: type) -> dict[str, Any]:
        is_shipped = import_path(scheme) in SCHEMES.places.values()
        name = SCHEMES.registered_name(scheme) if is_shipped else None
        defaults = SCHEMES.defaults(name) if name else {}
        return {key: value for key, value in defaults.items() if key in options}

    return read_defaults


def _require_scheme(name: str, scheme: Any) -> type[AttentionPosition] | type[InputPosition]:
    """Return the class, checked.

    Raises:
        UsageError: if it is no scheme, or fills no hook; if torch reserves the name.
    """
    from torch import nn

    from recbole_pos.layers.hooks import AttentionPosition, InputPosition

    bases = (AttentionPosition, InputPosition)
    if not (isinstance(scheme, type) and issubclass(scheme, bases)):
        description = import_path(scheme) if isinstance(scheme, type) else shown(scheme)
        raise UsageError(
            f"scheme {shown(name)}: expected a class that extends recbole_pos.AttentionPosition "
            f"or recbole_pos.InputPosition, found {description}"
        )
    hooks = ("rotate", "mix_keys", "mix_values", "bias", "attend")
    for base, methods in ((InputPosition, ("forward",)), (AttentionPosition, hooks)):
        if issubclass(scheme, base) and all(
            getattr(scheme, method) is getattr(base, method) for method in methods
        ):
            raise UsageError(
                f"scheme {shown(name)}: {import_path(scheme)} does nothing: it defines no "
                f"{' and no '.join(methods)}"
            )
    if hasattr(nn.ModuleDict(), str(name)):  # ``Compose`` keeps schemes by name
        raise UsageError(
            f"scheme {shown(name)}: torch has this name for itself; choose another one"
        )
    return scheme
