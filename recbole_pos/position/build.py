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
    """The schemes of one model: one input encoding, and a factory called once per layer.

    What the schemes of different layers share is the first layer's (``share_with``).
    """

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

    classes = {name: SCHEMES[name] for name in scheme_names(position)}

    def make(place: type[PositionScheme]) -> dict[str, Any]:
        return {
            name: cls(dimensions, **{key: options[key] for key in cls.options})
            for name, cls in classes.items()
            if issubclass(cls, place)
        }

    layers: list[Compose] = []

    def attention() -> AttentionPosition:
        layers.append(Compose(make(AttentionPosition)))
        if len(layers) > 1:
            layers[-1].share_with(layers[0])
        return layers[-1]

    inputs = make(InputPosition)
    first = next(iter(inputs.values())) if len(inputs) == 1 else ComposeInput(inputs)
    return Schemes(first, attention, any(c.needs_time for c in classes.values()))
