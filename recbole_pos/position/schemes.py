"""The table of position schemes: what ``position`` may name."""

from __future__ import annotations

from collections.abc import Iterable

from recbole_pos.errors import UsageError
from recbole_pos.tables import Table
from recbole_pos.values import shown, suggest

# A scheme is one class, one line here, and one yaml, properties/position/<name>.yaml.
SCHEMES = Table(
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
        "alibi": "recbole_pos.position.bias:ALiBi",
        "t5": "recbole_pos.position.bias:T5Bias",
        "kerple": "recbole_pos.position.bias:KERPLE",
        "hstu": "recbole_pos.position.time_buckets:HSTUBias",
        "cape": "recbole_pos.position.contextual:ContextualPosition",
        "difsr": "recbole_pos.position.attribute_attention:DecoupledAttributes",
        "kernel": "recbole_pos.position.kernel:PositionalKernel",
        "tisas": "recbole_pos.position.attribute_attention:TimeIntervalAttention",
        "parec": "recbole_pos.position.positional_attention:PositionMatrix",
        "fparec": "recbole_pos.position.positional_attention:FactorizedPositionMatrix",
        "average": "recbole_pos.position.positional_attention:AverageAttention",
        "linear_annealing": "recbole_pos.position.positional_attention:LinearAnnealing",
        "exponential_annealing": "recbole_pos.position.positional_attention:ExponentialAnnealing",
        "linear_attention": "recbole_pos.position.mixing:LinearAttention",
        "token_mixing": "recbole_pos.position.mixing:TokenMixing",
    },
)


def scheme_names(position: str | Iterable[str], key: str = "position") -> list[str]:
    """The value of the option ``key`` as a list of registered scheme names.

    Raises:
        UsageError: for an unknown name, or anything but names.
    """
    names = [position] if isinstance(position, str) else position
    if not isinstance(names, (list, tuple)):
        raise UsageError(f"{key}: expected a list such as [rope, kernel], found {shown(position)}")
    for name in names:
        if not isinstance(name, str) or name not in SCHEMES:
            bracket = isinstance(name, str) and any(mark in name for mark in "[],")
            hint = "; a list is written [rope, kernel], with both brackets" if bracket else ""
            raise UsageError(
                f"{key}: unknown scheme {shown(name)}{hint or suggest(str(name), SCHEMES)}; "
                f"schemes are {', '.join(SCHEMES)}"
            )
        if names.count(name) > 1:
            raise UsageError(f"{key}: {name!r} is given twice")
    return list(names)
