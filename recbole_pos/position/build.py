"""Build modules from ``position: [names]``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.hooks import (
    AttentionPosition,
    Dimensions,
    InputPosition,
    PositionScheme,
    replaces_attention,
)
from recbole_pos.position.bias import NoPosition
from recbole_pos.position.compose import Compose, ComposeInput
from recbole_pos.position.schemes import REPLACES, SCHEMES, Facts, scheme_names
from recbole_pos.values import Options, shown

# hooks of attention, and what each changes
HOOKS = {"rotate": "query, key", "mix_keys": "key", "mix_values": "value", "bias": "logits"}


@dataclass(frozen=True)
class Schemes:
    """The schemes of one model: an input encoding, and what builds the schemes of each layer."""

    input: InputPosition
    attention: Callable[[], AttentionPosition]
    needs_time: bool
    reads_request: bool


def build_schemes(position: str | list[str], dimensions: Dimensions, options: Options) -> Schemes:
    """Build the named schemes of one model.

    Args:
        position: names in the registry; an empty list for no position at all.
        options: where the schemes' options are looked up by name (RecBole's config, or a dict).

    Raises:
        UsageError: for an unknown name, a bad option, or schemes that cannot share a layer.
    """
    names = scheme_names(position)
    classes: dict[str, type[PositionScheme]] = {name: SCHEMES[name] for name in names}
    if "nope" in classes and len(classes) > 1:
        raise UsageError(f"position: nope stands alone, found {', '.join(classes)}")

    def build_all(base: type[PositionScheme], layer: int = 0) -> dict[str, Any]:
        sizes = replace(dimensions, layer=layer)
        return {
            name: cls(sizes, **{key: options[key] for key in cls.options})
            for name, cls in classes.items()
            if issubclass(cls, base)
        }

    layers: list[Compose] = []

    def build_attention() -> AttentionPosition:
        layers.append(Compose(build_all(AttentionPosition, len(layers))))
        if len(layers) > 1:
            layers[-1].share_with(layers[0])
        return layers[-1]

    inputs = build_all(InputPosition)
    encoding = next(iter(inputs.values())) if len(inputs) == 1 else ComposeInput(inputs)
    needs_time = any(cls.needs_time for cls in classes.values())
    reads_request = any(cls.reads_request for cls in classes.values())
    return Schemes(encoding, build_attention, needs_time, reads_request)


def build_row_encodings(
    position: str | list[str], dimensions: Dimensions, options: Options
) -> nn.ModuleList:
    """Build the named schemes for a model that reads positions at the input only.

    Returns:
        Encodings with rows by position (``rows``); ``nope`` has none.

    Raises:
        UsageError: see :func:`build_schemes`; and for a scheme without rows.
    """
    schemes = build_schemes(position, dimensions, options)
    inputs: list[nn.Module] = [schemes.input]
    if isinstance(schemes.input, ComposeInput):
        inputs = list(schemes.input.schemes.values())
    attention = schemes.attention().parts()
    rejected = [name for name, scheme in attention.items() if not isinstance(scheme, NoPosition)]
    rejected += [type(scheme).__name__ for scheme in inputs if not hasattr(scheme, "rows")]
    if rejected:
        raise UsageError(
            f"position: {shown(position)}: only encodings that are rows by position fit this "
            f"model, which {', '.join(rejected)} is not"
        )
    return nn.ModuleList(inputs)


def describe(name: str) -> Facts:
    """Describe a registered scheme, with its parameters counted in a model of common size."""
    n_layers = 2
    cls: type[PositionScheme] = SCHEMES[name]
    dimensions = Dimensions(
        max_length=50, hidden_size=64, n_heads=1, initializer_range=0.02, n_layers=n_layers
    )
    schemes = build_schemes(name, dimensions, SCHEMES.defaults(name))
    layers = [schemes.attention() for _ in range(n_layers)]
    distinct = {weight for module in (schemes.input, *layers) for weight in module.parameters()}
    place = _find_place(cls)
    needs = "time" if cls.needs_time else "nothing" if place == "none" else "order"
    return Facts(place, needs, sum(weight.numel() for weight in distinct))


def _find_place(cls: type[PositionScheme]) -> str:
    """Return where a scheme adds order: at the input, in hooks of attention, or instead of it."""
    if issubclass(cls, InputPosition):
        return "input"
    if issubclass(cls, AttentionPosition) and replaces_attention(cls):
        return REPLACES
    hooks = [hook for hook in HOOKS if getattr(cls, hook) is not getattr(AttentionPosition, hook)]
    return ", ".join(HOOKS[hook] for hook in hooks) or "none"
