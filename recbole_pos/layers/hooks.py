"""What a position scheme is: a small module that fills in some hooks of a model.

A scheme sees tensors and a :class:`SequenceBatch`, never a configuration or RecBole's
Interaction. The attention layer has projections, causal mask, softmax and dropout. A scheme that
mixes along the sequence or replaces attention must itself be causal (``tests/test_schemes.py``
checks every registered scheme by gradient). Shapes as in ``sequence_batch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.sequence_batch import SequenceBatch

# The linear layers at the input of attention.
PROJECTIONS = ("query", "key", "value")
# A query or key, [m, h, e]: a Tensor, or None where ``projections`` of the scheme leaves it out.
Projected: TypeAlias = Any


@dataclass(frozen=True)
class Dimensions:
    """What a scheme may read of its model.

    Attributes:
        max_length, hidden_size, n_heads: n, d and h.
        initializer_range: standard deviation of fresh tables.
        n_layers: number of layers.
        layer: the layer that a scheme of attention is built for, from 0.
        request_time: whether contexts have the time of a request.
        attribute: maps the name of an item field to its tokens, [items, s] int64, padded with 0.
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
    """Common base of schemes, which are constructed as ``cls(dimensions, **options)``.

    Attributes:
        options: names of the yaml keys handed to the constructor; their defaults stand in
            ``properties/position/<name>.yaml`` and nowhere else.
        needs_time: whether the scheme reads ``batch.times``.
        reads_request: whether queries read ``batch.request``, the times of their requests.
        assumes_order: whether times must not fall along a history, as they may from one given part
            to the next.
        reads_newest_time: whether all interactions of a history read the time of its newest one or
            of the request after that. Earlier states would know when later interactions come, so a
            model with such a scheme must learn only from the newest state of each history.
    """

    options: ClassVar[tuple[str, ...]] = ()
    needs_time: ClassVar[bool] = False
    reads_request: ClassVar[bool] = False
    assumes_order: ClassVar[bool] = False
    reads_newest_time: ClassVar[bool] = False

    def __init__(self, dimensions: Dimensions | None = None) -> None:
        super().__init__()

    def share_with(self, first: Any) -> None:
        """Take over parameters of the first layer, for position schemes whose layers share some.

        Such a scheme, a subclass, overrides this method. By default it does nothing, so that each
        layer has parameters of its own.

        Args:
            first: the same scheme as it was built for the first layer.
        """


class InputPosition(PositionScheme):
    """Base of encodings before the first layer, once per model: x0 = x + P."""

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return item vectors x [m, d] with positions added, [m, d]."""
        raise NotImplementedError


class AttentionPosition(PositionScheme):
    """Base of schemes inside attention, once per layer. Every hook is the identity by default.

    Attributes:
        projections: which of query, key and value the layer must compute. A scheme that replaces
            attention leaves out what it does not read; without ``value`` it gets the layer's input.
    """

    projections: tuple[str, ...] = PROJECTIONS

    def parts(self) -> Mapping[str, Any]:
        """Return the schemes by name that this one is composed of; if not composed, only itself."""
        return {type(self).__name__: self}

    def rotate(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Rotate packed query and key to R q and R k, [m, h, e] both."""
        return q, k

    def time_periods(self) -> Tensor | None:
        """Return [h, e / 2] seconds after which the time angle of each plane repeats.

        Infinite where time does not turn a plane; None for schemes that rotate nothing by time.
        """
        return None

    def mix_keys(self, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Mix packed keys along each sequence, k to U^T k, [m, h, e]."""
        return k

    def mix_values(self, v: Tensor, batch: SequenceBatch) -> Tensor:
        """Mix packed values along each sequence, v to L v, [m, h, e]."""
        return v

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor | None:
        """Return the bias to add to the scaled logits, broadcastable to [b, h, t, t], or None.

        ``q`` and ``k`` are [b, h, t, e], rotated and mixed, aligned at the start, zero at padding.
        """
        return None

    def attend(
        self,
        query: Projected,
        key: Projected,
        value: Tensor,
        batch: SequenceBatch,
        dropout: Dropout,
    ) -> Tensor | None:
        """Compute the output of attention in place of softmax(q k^T / sqrt(e)) v.

        A position scheme (a subclass) may define it. By default it returns None, and the layer then
        computes the softmax. A scheme that reads only some of query, key and value says so in
        ``projections``, so that the layer does not compute the others.

        Args:
            query: [m, h, e] one vector for each head of the m interactions, history after history;
                None if it is not in ``projections``.
            key: the same, as ``query``.
            value: the same, as ``query``. If it is not in ``projections``, it is the input of the
                layer, [m, d], cut into h heads.
            batch: the histories.
            dropout: dropout on the weights of attention.

        Returns:
            [m, h, e], history after history, or None.
        """
        return None


def replaces_attention(scheme: type[AttentionPosition]) -> bool:
    """Return whether a scheme replaces dot-product attention."""
    return scheme.attend is not AttentionPosition.attend


def add_positions(scheme: nn.Module, x: Tensor, batch: SequenceBatch) -> Tensor:
    """Return x + P, item vectors x [m, d] with the positions of a scheme of the input."""
    return require_result(scheme(x, batch), x.dtype, x.shape, scheme, "forward")


def require_result(
    found: Any,
    dtype: torch.dtype | None,
    shape: Sequence[int],
    source: nn.Module,
    method: str,
    may_broadcast: bool = False,
) -> Tensor:
    """Check what a method of a user's own position scheme or model has returned, and return it.

    Args:
        found: the result.
        dtype: type to which a float64 result is cast: times are float64, and so is what is made of
            them. A result of another type stays as it is. None: nothing is cast.
        shape: the sizes that the result must have.
        source: the scheme or model.
        method: name of the method.
        may_broadcast: whether a shape is enough that can be broadcast to ``shape``, such as [5] or
            [1, 5] to [3, 5].

    Returns:
        The result, cast if it is float64.

    Raises:
        UsageError: if the result is no floating-point tensor, or of another shape.
    """
    if isinstance(found, Tensor) and found.is_floating_point():
        sizes = list(found.shape)
        fits = can_broadcast(sizes, shape) if may_broadcast else sizes == list(shape)
        if fits:
            return found if dtype is None or found.dtype != torch.float64 else found.to(dtype)

    # say what was returned instead
    is_tensor = isinstance(found, Tensor)
    description = f"{found.dtype} {list(found.shape)}" if is_tensor else type(found).__name__
    raise UsageError(
        f"{type(source).__name__}.{method}: expected a floating-point tensor {list(shape)}, found "
        f"{description}"
    )


def require_scores(scores: Any, num_rows: int, num_items: int, model: Any) -> Tensor:
    """Check the scores that a model has returned, and give them a row for each history.

    Some of RecBole's models return one dimension: the scores of all items for the first history,
    then those for the second one, and so on. This is made a matrix; a matrix stays as it is.

    Args:
        scores: what the model's method ``full_sort_predict`` has returned.
        num_rows, num_items: number of histories and of items, padding included.
        model: the model, for the message.

    Returns:
        Scores [num_rows, num_items], of the type in which the model has returned them.

    Raises:
        UsageError: if they are no floating-point tensor of one of these two shapes.
    """
    shape = num_rows, num_items
    if isinstance(scores, Tensor) and scores.shape == (num_rows * num_items,):
        scores = scores.view(*shape)
    # ``require_result`` raises the error; with a ``dtype`` it would cast scores, too
    return require_result(scores, None, shape, source=model, method="full_sort_predict")


def can_broadcast(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a tensor of some sizes can be broadcast to a shape, as [1, 5] to [2, 3, 5]."""
    pairs = zip(reversed(sizes), reversed(shape), strict=False)  # from the last dimension on
    return len(sizes) <= len(shape) and all(size in (full, 1) for size, full in pairs)
