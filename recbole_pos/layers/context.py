"""What a layer may know about a batch of sequences.

Shapes, here and in every layer: b sequences in the batch, m real interactions in the batch (no
padding), t the length of the longest sequence, n the maximum length a model is built for, d the
hidden size, h heads of size e = d / h.

Interactions are kept *packed*, as [m, ...] tensors holding the sequences one after the other, so
that no layer computes on padding. A padded block exists only where interactions meet. Its
*alignment* is a choice of the layer:

- ``start``: every sequence begins at column 0 and padding follows it. Under a causal mask no real
  query can see that padding, so no further mask is needed.
- ``end``: every sequence ends at column t - 1, as in the papers of SASRec's line, so row i of a
  position matrix means the same distance to the newest interaction in all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Alignment = Literal["start", "end"]


class lazy_attribute:  # noqa: N801  (as ``property`` is written)
    """``functools.cached_property`` without its lock, which torch.compile cannot trace."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


@dataclass(frozen=True)
class SequenceContext:
    """Lengths, positions and times of one packed batch. Built with :meth:`from_lengths`."""

    lengths: Tensor  # [b] int64, number of interactions of each sequence, at least 1
    row: Tensor  # [m] int64, the sequence an interaction belongs to
    index: Tensor  # [m] int64, 0 for the oldest interaction of its sequence
    width: int  # t
    max_length: int  # n
    times: Tensor | None = None  # [m] float64, seconds since 1970
    items: Tensor | None = None  # [m] int64 item of each interaction
    relations: Any = None  # what ``prepare`` of a model computed: BatchRelations, or graphs
    at: Tensor | None = None  # [b] float64, time of the request after the newest interaction
    features: Any = None  # Features of interactions and users, for models that read them

    any_alignment: ClassVar[Alignment] = "start"  # the cheaper one, where a layer accepts both

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor,
        max_length: int,
        times: Tensor | None = None,
        items: Tensor | None = None,
        relations: Any = None,
        width: int | None = None,
        at: Tensor | None = None,
        features: Any = None,
    ) -> SequenceContext:
        """Return the context of packed sequences.

        Args:
            lengths: from 1 to ``max_length``; for this and the other arguments see the class.
            items: with these and ``width`` no step waits for the GPU.
            width: the largest length, which is not verified; None to compute it.
        """
        width = int(lengths.max()) if width is None else width
        b = lengths.numel()
        m = None if items is None else len(items)
        row = torch.arange(b, device=lengths.device).repeat_interleave(lengths, output_size=m)
        first = lengths.cumsum(0) - lengths
        index = torch.arange(row.numel(), device=lengths.device) - first[row]
        return cls(lengths, row, index, width, max_length, times, items, relations, at, features)

    @property
    def batch_size(self) -> int:
        """b, the number of sequences."""
        return self.lengths.numel()

    @property
    def is_full(self) -> bool:
        """Whether all sequences have the same length, so that a block holds no padding."""
        return self.row.numel() == self.batch_size * self.width

    @lazy_attribute
    def first(self) -> Tensor:
        """[b] index of the oldest interaction of each sequence among the packed interactions."""
        return self.lengths.cumsum(0) - self.lengths

    @lazy_attribute
    def last(self) -> Tensor:
        """[b] index of the newest interaction of each sequence among the packed interactions."""
        return self.lengths.cumsum(0) - 1

    @lazy_attribute
    def follows(self) -> Tensor:
        """[m] boolean, whether the interaction packed before is of the same sequence."""
        return self.index > 0

    @lazy_attribute
    def age(self) -> Tensor:
        """[m] how many interactions of the sequence are newer: 0 for the newest."""
        return self.lengths[self.row] - 1 - self.index

    @lazy_attribute
    def padding(self) -> Tensor:
        """[b, t] boolean, True at the padding of a block aligned at the start."""
        return torch.arange(self.width, device=self.lengths.device) >= self.lengths[:, None]

    @lazy_attribute
    def elapsed(self) -> Tensor:
        """[m] float64, seconds since the oldest interaction of the sequence.

        If they counted from a later one, rounding would let later times change earlier numbers.
        """
        if self.times is None:
            raise ValueError("this batch carries no times: the model must set needs_time")
        return self.times - self.times[self.first][self.row]

    @lazy_attribute
    def request(self) -> SequenceContext:
        """The same interactions at the times of their requests, for queries (``request_time``).

        The state after interaction k answers the request at t_{k+1}, the time of the next
        interaction, and the state after the newest one answers the request at ``at``. ``elapsed``
        still counts from the oldest interaction. Without ``at`` the request is this context itself.
        """
        if self.at is None or self.times is None:
            return self
        request_times = self.times.roll(-1).index_copy(0, self.last, self.at)
        context = replace(self, times=request_times, at=None)
        context.__dict__["elapsed"] = request_times - self.times[self.first][self.row]
        return context

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the value of ``compute``, which is called once a batch for each ``key``.

        The value may depend on lengths, times and fixed numbers only, not on parameters.
        """
        cache = self.__dict__.setdefault("_cached", {})
        if key not in cache:
            cache[key] = compute()
        return cache[key]

    def block_width(self, align: Alignment) -> int:
        """Return the number of columns of a padded block: t, or more in a subclass."""
        return self.width

    def column(self, align: Alignment) -> Tensor:
        """Return [m] the column of every interaction in a padded block."""
        return self.index if align == "start" else self.block_width(align) - 1 - self.age

    def slots(self, align: Alignment, time_major: bool = False) -> Tensor:
        """Return [m] the index of each interaction in a flat [b, t] (time-major: [t, b]) block."""

        def compute() -> Tensor:
            column = self.column(align)
            if time_major:
                return column * self.batch_size + self.row
            return self.row * self.block_width(align) + column

        return self.cached(("slots", align, time_major), compute)

    def pad(self, x: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        """Pad packed [m, ...] with zeros to a block [b, t, ...] (time-major: [t, b, ...])."""
        b, t = self.batch_size, self.width
        if self.is_full:
            block = x.reshape(b, t, *x.shape[1:])
            return block.transpose(0, 1).contiguous() if time_major else block
        shape = (t, b) if time_major else (b, t)
        block = x.new_zeros(b * t, *x.shape[1:])
        return block.index_copy_(0, self.slots(align, time_major), x).view(*shape, *x.shape[1:])

    def unpad(self, block: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        """Pack the real interactions of a block as [m, ...], the inverse of :meth:`pad`."""
        if self.is_full and time_major:
            block = block.transpose(0, 1)
        flat = block.reshape(self.batch_size * self.width, *block.shape[2:])
        return flat if self.is_full else flat.index_select(0, self.slots(align, time_major))


def future_mask(t: int, device: torch.device) -> Tensor:
    """Return [t, t] boolean, True where the key (column) is newer than the query (row)."""
    return torch.ones(t, t, dtype=torch.bool, device=device).triu_(1)


class PaddedContext(SequenceContext):
    """A :class:`SequenceContext` of whole rows, m = b * t, padded on the right, to trace a model.

    The number of packed interactions depends on the data, which a traced graph of symbolic sizes
    cannot express. Here all columns of a [b, t] block count as interactions. Padding follows the
    interactions of its row, so that under a causal mask none of them sees it; blocks are zero
    there. But for rounding layers compute the same as with packed interactions.
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
        features: Any = None,
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
