"""What a position scheme is: a small object that fills some of the places where order enters.

A scheme sees tensors and a :class:`SequenceContext`, never a config or RecBole's Interaction.
The attention layer owns projections, causal mask, softmax and dropout, so a scheme that fills only
``rotate`` or ``bias`` works inside masked attention; one that mixes along the sequence or replaces
attention must itself be causal (``tests/test_schemes.py`` checks
every registered scheme by gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.dropout import Dropout

PROJECTIONS = ("query", "key", "value")
# A query or key, [m, h, e]: a Tensor, or None where ``projections`` of the scheme leaves it out.
Projected: TypeAlias = Any


@dataclass(frozen=True)
class Dimensions:
    """Sizes a scheme may need: n, d and h of ``layers/context.py``, and the std of fresh tables.

    ``layer`` counts from 0: the layer a scheme of attention is built for. ``attribute`` returns a
    field of items by its name, [items, s] int64 tokens with 0 for padding. ``request_time`` is
    whether contexts have the time of a request.
    """

    max_length: int
    hidden_size: int
    n_heads: int
    initializer_range: float
    n_layers: int = 1
    layer: int = 0
    request_time: bool = False
    attribute: Callable[[str], Tensor] | None = None

    @property
    def head_size(self) -> int:
        """e = d / h."""
        return self.hidden_size // self.n_heads


class PositionScheme(nn.Module):
    """Common base. A scheme is constructed as ``cls(dimensions, **options)``.

    Attributes:
        options: names of the yaml keys handed to the constructor; their defaults stand in
            ``properties/position/<name>.yaml`` and nowhere else.
        needs_time: whether ``ctx.times`` must be there.
        reads_request: whether queries read ``ctx.request``, the time at which they are asked.
    """

    options: ClassVar[tuple[str, ...]] = ()
    needs_time: ClassVar[bool] = False
    reads_request: ClassVar[bool] = False

    def __init__(self, dimensions: Dimensions | None = None) -> None:
        super().__init__()

    def share_with(self, first: Any) -> None:
        """Take over the parameters of the first layer's scheme that serve all layers.

        Called for every layer but the first, with the first layer's scheme of the same name.
        """


class InputPosition(PositionScheme):
    """The place before the first layer, once per model: x0 = x + P."""

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Return item vectors [m, d] with positions, [m, d]."""
        raise NotImplementedError


class AttentionPosition(PositionScheme):
    """The places inside attention, once per layer. Every hook is the identity by default.

    Attributes:
        projections: which of query, key and value the layer must compute. A scheme that replaces
            attention leaves out what it does not read; without ``value`` it gets the layer's input.
        fresh_periods: what ``time_periods`` gave before training, to compare with; None if unknown.
    """

    projections: tuple[str, ...] = PROJECTIONS
    fresh_periods: Tensor | None = None

    def parts(self) -> Mapping[str, Any]:
        """Return the schemes that this one is composed of, by name; itself if of one."""
        return {type(self).__name__: self}

    def rotate(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> tuple[Tensor, Tensor]:
        """Rotate packed query and key, [m, h, e] both, to the same shapes."""
        return q, k

    def time_periods(self) -> Tensor | None:
        """Return [h, e / 2] seconds after which the time angle of each plane repeats.

        Infinite where time does not turn a plane; None for schemes that rotate nothing by time.
        """
        return None

    def mix_keys(self, k: Tensor, ctx: SequenceContext) -> Tensor:
        """Mix keys along each sequence, K to U^T K; packed [m, h, e], to the same shape."""
        return k

    def mix_values(self, v: Tensor, ctx: SequenceContext) -> Tensor:
        """Mix values along each sequence, V to L V; packed [m, h, e], to the same shape."""
        return v

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor | None:
        """Return the term of the scaled logits, broadcastable to [b, h, t, t]; None for none.

        ``q`` and ``k`` are [b, h, t, e], rotated and mixed, aligned at the start, zero at padding.
        """
        return None

    def attend(
        self,
        query: Projected,
        key: Projected,
        value: Tensor,
        ctx: SequenceContext,
        dropout: Dropout,
    ) -> Tensor | None:
        """Replace dot-product attention: packed [m, h, e] each, to [m, h, e]. None keeps it."""
        return None


def replaces_attention(scheme: type[AttentionPosition]) -> bool:
    """Return whether a scheme stands in for dot-product attention as a whole."""
    return scheme.attend is not AttentionPosition.attend
