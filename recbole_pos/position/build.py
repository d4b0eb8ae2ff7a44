"""From ``position: [names]`` to modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recbole_pos.position.base import (
    AttentionPosition,
    Compose,
    ComposeInput,
    Dimensions,
    InputPosition,
    PositionScheme,
)


@dataclass(frozen=True)
class Schemes:
    """The schemes of one model: one input encoding, and a factory called once per layer."""

    input: InputPosition
    attention: Callable[[], AttentionPosition]
    needs_time: bool


def build_schemes(
    position: str | list[str], dimensions: Dimensions, options: Mapping[str, Any]
) -> Schemes:
    """Build the named schemes.

    Args:
        position: names in the registry; an empty list for no position at all.
        dimensions: sizes of the model.
        options: where the schemes' options are looked up by name (RecBole's config, or a dict).

    Raises:
        UsageError: for an unknown name, a bad option, or schemes that cannot share a layer.
    """
    from recbole_pos.properties import scheme_names
    from recbole_pos.registry import SCHEMES

    classes = [SCHEMES[name] for name in scheme_names(position)]
    inputs = [c for c in classes if issubclass(c, InputPosition)]
    inside = [c for c in classes if issubclass(c, AttentionPosition)]

    def make(cls: type[PositionScheme]) -> Any:
        return cls(dimensions, **{name: options[name] for name in cls.options})

    def attention() -> AttentionPosition:
        return make(inside[0]) if len(inside) == 1 else Compose([make(c) for c in inside])

    first = make(inputs[0]) if len(inputs) == 1 else ComposeInput([make(c) for c in inputs])
    return Schemes(first, attention, any(c.needs_time for c in classes))
