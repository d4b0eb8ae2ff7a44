"""From ``position: [names]`` to modules: build the named schemes, and compose those of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.hooks import (
    PROJECTIONS,
    AttentionPosition,
    Dimensions,
    InputPosition,
    PositionScheme,
    Projected,
    add_positions,
    replaces_attention,
    require_result,
)
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.schemes import REPLACES, SCHEMES, Facts, scheme_names
from recbole_pos.values import Options, shown

# What each hook of attention changes.
HOOKS = {"rotate": "query, key", "mix_keys": "key", "mix_values": "value", "bias": "logits"}


@dataclass(frozen=True)
class Schemes:
    """The schemes of one model, and whether any of them needs times or reads their requests.

    ``assume_order`` are the names of those that need times which never fall along a history.
    """

    input: InputPosition
    attention: Callable[[], AttentionPosition]  # builds the scheme of the next layer
    needs_time: bool
    reads_request: bool
    assume_order: list[str]


def build_schemes(
    position: str | list[str],
    dimensions: Dimensions,
    options: Options,
    *,
    has_attention: bool = False,
) -> Schemes:
    """Build the named schemes of one model.

    Args:
        position: names in the registry; an empty list for no position at all.
        dimensions: sizes of the model.
        options: values of the schemes' options by name (RecBole's config, or a dict).
        has_attention: whether the model has layers of attention, for which it calls
            ``Schemes.attention``.

    Raises:
        UsageError: for an unknown name, a bad option, schemes that cannot share a layer, or a
            scheme inside attention for a model that has none.
    """
    names = scheme_names(position)
    classes: dict[str, type[PositionScheme]] = {name: SCHEMES[name] for name in names}
    if "nope" in classes and len(classes) > 1:
        raise UsageError(f"position: nope stands alone, found {', '.join(classes)}")
    ignored = [name for name, cls in classes.items() if _find_place(cls) not in ("input", "none")]
    if ignored and not has_attention:
        raise UsageError(
            f"position: found {', '.join(ignored)}, expected schemes at the input, since the model "
            "has no attention; leave it out, or pass has_attention=True to build_schemes in a "
            "model that calls schemes.attention in each layer"
        )

    def build_all(base: type[PositionScheme], layer: int = 0) -> dict[str, Any]:
        """Return name -> scheme of a layer, for the named schemes that subclass ``base``."""
        layer_dimensions = replace(dimensions, layer=layer)
        schemes = {}
        for name, cls in classes.items():
            if issubclass(cls, base):
                scheme_options = {key: options[key] for key in cls.options}
                schemes[name] = cls(layer_dimensions, **scheme_options)
        return schemes

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
    assume_order = [name for name, cls in classes.items() if cls.assumes_order]
    return Schemes(encoding, build_attention, needs_time, reads_request, assume_order)


def build_row_encodings(
    position: str | list[str], dimensions: Dimensions, options: Options
) -> nn.ModuleList:
    """Build the named schemes for a model that reads positions at the input only.

    Returns:
        Encodings with the method ``rows``; none of them for ``nope``.

    Raises:
        UsageError: see :func:`build_schemes`; also for a scheme without ``rows``.
    """

    def has_rows(name: str) -> bool:
        return issubclass(SCHEMES[name], InputPosition) and hasattr(SCHEMES[name], "rows")

    names = scheme_names(position)
    if rejected := [name for name in names if name != "nope" and not has_rows(name)]:
        raise UsageError(
            f"position: {shown(position)}: this model takes input encodings that depend on the "
            f"position alone ({', '.join(filter(has_rows, SCHEMES))}) or nope; found "
            f"{', '.join(rejected)}"
        )
    encoding = build_schemes(position, dimensions, options).input
    if isinstance(encoding, ComposeInput):
        return nn.ModuleList(encoding.schemes.values())
    return nn.ModuleList([encoding])


def describe(name: str) -> Facts:
    """Return the facts of a registered scheme, found by building it in a model of common size."""
    n_layers = 2
    cls: type[PositionScheme] = SCHEMES[name]
    dimensions = Dimensions(
        max_length=50, hidden_size=64, n_heads=1, initializer_range=0.02, n_layers=n_layers
    )
    schemes = build_schemes(name, dimensions, SCHEMES.defaults(name), has_attention=True)
    layers = [schemes.attention() for _ in range(n_layers)]
    distinct = {weight for module in (schemes.input, *layers) for weight in module.parameters()}
    place = _find_place(cls)
    needs = "nothing" if place == "none" else "order"
    if cls.needs_time:
        needs = "time"
    return Facts(place, needs, sum(weight.numel() for weight in distinct))


def _find_place(cls: type[PositionScheme]) -> str:
    """Return what a scheme changes: the input, parts of attention (``HOOKS``), or all of it."""
    if issubclass(cls, InputPosition):
        return "input"
    if issubclass(cls, AttentionPosition) and replaces_attention(cls):
        return REPLACES
    hooks = [hook for hook in HOOKS if getattr(cls, hook) is not getattr(AttentionPosition, hook)]
    return ", ".join(HOOKS[hook] for hook in hooks) or "none"


class Compose(AttentionPosition):
    """Several attention schemes as one: hooks run in the order given, biases add up.

    Args:
        schemes: the schemes by their registered names.

    Raises:
        UsageError: if more than one of the schemes replaces attention, or one that does is combined
            with a scheme whose hooks (rotate, mix, bias) it would ignore.
    """

    def __init__(self, schemes: Mapping[str, AttentionPosition]) -> None:
        """Keep the schemes, and take over the projections of one that replaces attention."""
        super().__init__()
        self.schemes = nn.ModuleDict(schemes)
        replacing = [name for name, scheme in schemes.items() if replaces_attention(type(scheme))]
        if replacing and len(schemes) > 1:
            raise UsageError(
                f"position: {replacing[0]} replaces attention and cannot share a layer with other "
                f"attention schemes (found {', '.join(schemes)})"
            )
        self.projections = schemes[replacing[0]].projections if replacing else PROJECTIONS

    def parts(self) -> dict[str, AttentionPosition]:
        return dict(cast("Iterable[tuple[str, AttentionPosition]]", self.schemes.items()))

    def share_with(self, first: Compose) -> None:
        shared = first.parts()
        for name, scheme in self.parts().items():
            scheme.share_with(shared[name])

    def rotate(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        for scheme in self.parts().values():
            rotated = scheme.rotate(q, k, batch)
            q, k = (require_result(x, q.dtype, q.shape, scheme, "rotate") for x in rotated)
        return q, k

    def mix_keys(self, k: Tensor, batch: SequenceBatch) -> Tensor:
        for scheme in self.parts().values():
            k = require_result(scheme.mix_keys(k, batch), k.dtype, k.shape, scheme, "mix_keys")
        return k

    def mix_values(self, v: Tensor, batch: SequenceBatch) -> Tensor:
        for scheme in self.parts().values():
            v = require_result(scheme.mix_values(v, batch), v.dtype, v.shape, scheme, "mix_values")
        return v

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor | None:
        shape = (*q.shape[:-1], k.size(-2))
        biases = [
            require_result(term, q.dtype, shape, scheme, "bias")
            for scheme in self.parts().values()
            if (term := scheme.bias(q, k, batch)) is not None
        ]
        return sum(biases[1:], biases[0]) if biases else None

    def attend(
        self,
        query: Projected,
        key: Projected,
        value: Tensor,
        batch: SequenceBatch,
        dropout: Dropout,
    ) -> Tensor | None:
        """Return the output [m, h, e] of the scheme that replaces attention; None without one."""
        for scheme in self.parts().values():
            out = scheme.attend(query, key, value, batch, dropout)
            must_replace = replaces_attention(type(scheme)) and scheme.projections != PROJECTIONS
            if out is not None or must_replace:
                return require_result(out, value.dtype, value.shape, scheme, "attend")
        return None


class ComposeInput(InputPosition):
    """Several input encodings, applied in the order given."""

    def __init__(self, schemes: Mapping[str, InputPosition]) -> None:
        super().__init__()
        self.schemes = nn.ModuleDict(schemes)

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        for scheme in self.schemes.values():
            x = add_positions(scheme, x, batch)
        return x


def find_shortest_period(model: nn.Module) -> float | None:
    """Return the shortest period in seconds of a model's time angles, None if it has none."""
    schemes = [module for module in model.modules() if isinstance(module, AttentionPosition)]
    periods = [scheme.time_periods() for scheme in schemes]
    return min((period.min().item() for period in periods if period is not None), default=None)
