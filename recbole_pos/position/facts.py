"""What is told about a scheme before anything is imported.

A test compares it with the schemes themselves (``build.describe``).
"""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """One row.

    Attributes:
        place: where order enters.
        needs: what a scheme reads beside items.
        parameters: added to a model of n = 50, d = 64, 1 head, 2 layers.
    """

    place: str
    needs: str
    parameters: int


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
    "siren_rope": Facts("query, key", "time", 2_432),
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
    "parec": Facts("replaces attention", "order", 5_000),
    "fparec": Facts("replaces attention", "order", 8_000),
    "average": Facts("replaces attention", "order", 0),
    "linear_annealing": Facts("replaces attention", "order", 0),
    "exponential_annealing": Facts("replaces attention", "order", 0),
    "linear_attention": Facts("replaces attention", "order", 0),
    "token_mixing": Facts("replaces attention", "order", 10_000),
}
