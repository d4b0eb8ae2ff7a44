"""A batch of symbolic sizes, with which a model is traced for serving.

The number of packed interactions depends on the data, which a traced graph cannot express. Here all
columns of a [b, t] block count as interactions. Layers compute padding, too, but nothing reads it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from recbole_pos.layers.context import Alignment, SequenceContext, lazy_attribute
from recbole_pos.layers.features import Features


class PaddedContext(SequenceContext):
    """A :class:`SequenceContext` of whole rows, m = b * t, padded on the right.

    Padding follows the interactions of its row, so that under a causal mask none of them sees it;
    blocks are zero there. But for rounding layers compute the same as with packed interactions.
    """

    any_alignment: ClassVar[Alignment] = "end"

    @classmethod
    def from_rows(
        cls,
        items: Tensor,
        lengths: Tensor,
        max_length: int,
        times: Tensor | None = None,
        at: Tensor | None = None,
        features: Features | None = None,
    ) -> PaddedContext:
        """Return the context of rows: items and times [b, t], features [b, t] or [b, t, s]."""
        b, t = items.shape
        # checks come first, or a tracer gives equal sizes different symbols
        torch._check(lengths.size(0) == b)
        if times is not None:
            torch._check(times.size(0) == b)
            torch._check(times.size(1) == t)
            times = times.reshape(b * t)
        if at is not None:
            torch._check(at.size(0) == b)
        row = torch.arange(b, device=items.device)[:, None].expand(b, t).reshape(b * t)
        index = torch.arange(t, device=items.device).expand(b, t).reshape(b * t)
        if features is not None:
            for column in (*features.events.values(), *features.users.values()):
                torch._check(column.size(0) == b)
            for column in features.events.values():
                torch._check(column.size(1) == t)
            features = features.map(lambda x: x.reshape(b * t, *x.shape[2:]))
        items = items.reshape(b * t)
        return cls(lengths, row, index, t, max_length, times, items, None, at, features)

    @property
    def batch_size(self) -> int:
        return self.lengths.size(0)

    @property
    def is_full(self) -> bool:
        return False  # one graph serves full and padded batches

    @lazy_attribute
    def first(self) -> Tensor:
        return torch.arange(self.batch_size, device=self.lengths.device) * self.width

    @lazy_attribute
    def last(self) -> Tensor:
        return self.first + self.lengths - 1

    @lazy_attribute
    def age(self) -> Tensor:
        """[m] how many interactions of the sequence are newer; 0 at padding."""
        return (self.lengths[self.row] - 1 - self.index).clamp(min=0)

    @lazy_attribute
    def follows(self) -> Tensor:
        return (self.index > 0) & ~self.padding.reshape(-1)

    def block_width(self, align: Alignment) -> int:
        """Return t at the start, and n at the end, where position matrices are read whole."""
        return self.width if align == "start" else self.max_length

    def pad(self, x: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        """Copy rows [b * t, ...] to a block [b, t, ...] or [t, b, ...], with zeros at padding."""
        b, width, is_padding = self.batch_size, self.block_width(align), self.padding
        if align == "end":
            # index of the interaction in each column, negative for padding before the row
            index = torch.arange(width, device=x.device) - (width - self.lengths[:, None])
            is_padding = index < 0
            x = x.index_select(0, (self.first[:, None] + index.clamp(min=0)).view(-1))
        block = x.view(b, width, *x.shape[1:])
        block = block.masked_fill(is_padding.view(b, width, *(1 for _ in block.shape[2:])), 0)
        return block.transpose(0, 1).contiguous() if time_major else block

    def unpad(self, block: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        if time_major:
            block = block.transpose(0, 1)
        flat = block.reshape(self.batch_size * self.block_width(align), *block.shape[2:])
        return flat if align == "start" else flat.index_select(0, self.slots(align))
