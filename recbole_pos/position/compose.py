"""Several position schemes as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.dropout import Dropout
from recbole_pos.layers.hooks import (
    PROJECTIONS,
    AttentionPosition,
    InputPosition,
    Projected,
    replaces_attention,
    require_result,
)


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

    def rotate(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> tuple[Tensor, Tensor]:
        for scheme in self.parts().values():
            rotated = scheme.rotate(q, k, ctx)
            q, k = (require_result(x, q.dtype, q.shape, scheme, "rotate") for x in rotated)
        return q, k

    def mix_keys(self, k: Tensor, ctx: SequenceContext) -> Tensor:
        for scheme in self.parts().values():
            k = require_result(scheme.mix_keys(k, ctx), k.dtype, k.shape, scheme, "mix_keys")
        return k

    def mix_values(self, v: Tensor, ctx: SequenceContext) -> Tensor:
        for scheme in self.parts().values():
            v = require_result(scheme.mix_values(v, ctx), v.dtype, v.shape, scheme, "mix_values")
        return v

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor | None:
        shape = (*q.shape[:-1], k.size(-2))
        biases = [
            require_result(term, q.dtype, shape, scheme, "bias")
            for scheme in self.parts().values()
            if (term := scheme.bias(q, k, ctx)) is not None
        ]
        return sum(biases[1:], biases[0]) if biases else None

    def attend(
        self,
        query: Projected,
        key: Projected,
        value: Tensor,
        ctx: SequenceContext,
        dropout: Dropout,
    ) -> Tensor | None:
        """Return the output [m, h, e] of the scheme that replaces attention; None without one."""
        for scheme in self.parts().values():
            out = scheme.attend(query, key, value, ctx, dropout)
            must_replace = replaces_attention(type(scheme)) and scheme.projections != PROJECTIONS
            if out is not None or must_replace:
                return require_result(out, value.dtype, value.shape, scheme, "attend")
        return None


class ComposeInput(InputPosition):
    """Several input encodings, applied in the order given."""

    def __init__(self, schemes: Mapping[str, InputPosition]) -> None:
        super().__init__()
        self.schemes = nn.ModuleDict(schemes)

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        for scheme in self.schemes.values():
            x = add_positions(scheme, x, ctx)
        return x


def add_positions(scheme: nn.Module, x: Tensor, ctx: SequenceContext) -> Tensor:
    """Return item vectors x [m, d] with the positions of a scheme of the input, [m, d]."""
    return require_result(scheme(x, ctx), x.dtype, x.shape, scheme, "forward")


def find_shortest_period(model: nn.Module) -> float | None:
    """Return the shortest period in seconds of a model's time angles, None if it has none."""
    schemes = [module for module in model.modules() if isinstance(module, AttentionPosition)]
    periods = [scheme.time_periods() for scheme in schemes]
    return min((period.min().item() for period in periods if period is not None), default=None)
