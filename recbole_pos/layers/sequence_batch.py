"""The one batch type: histories of users, packed, with all that models and schemes read of them.

Shapes, here and in every layer: b histories in the batch, m real interactions in the batch (no
padding), k queries, t the length of the longest history, n the maximum length a model is built for,
d the hidden size, h heads of size e = d / h.

Interactions are *packed*: [m, ...] tensors hold the histories one after the other, so that no layer
computes on padding. A padded block exists only where interactions meet. Its *alignment* is a choice
of the layer:

- ``start``: every history begins at column 0 and padding follows it. Under a causal mask no real
  query can see that padding, so no further mask is needed.
- ``end``: every history ends at column t - 1, as in the papers of SASRec's line, so row i of a
  position matrix means the same distance to the newest interaction in all histories.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass, replace
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
        """Compute the value at its first reading, and keep it in the instance's ``__dict__``.

        Python looks into ``__dict__`` before it calls this method, so a second reading returns the
        value that was kept.

        Args:
            instance: the object whose attribute is read; None if it is read on the class.
            owner: the class.

        Returns:
            The value, or this descriptor if there is no instance.
        """
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


@dataclass(frozen=True)
class Features:
    """Values of fields in a batch of m interactions in b histories, by name of the field.

    Tokens are int64, 0 for none, lists padded with 0; numbers are float, NaN for none.

    Attributes:
        events: values [m] or [m, s] of the interactions.
        users: values [b] or [b, s] of the user of each history.
    """

    events: dict[str, Tensor] = field(default_factory=dict)
    users: dict[str, Tensor] = field(default_factory=dict)

    def map(
        self, events: Callable[[Tensor], Tensor], users: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Features:
        """Return the features with a function applied to each column.

        Args:
            events: function of the columns of interactions, such as a selection of some of them.
            users: function of the columns of users; by default these stay as they are.

        Returns:
            The changed columns, by the same names.
        """
        return Features(
            {name: events(column) for name, column in self.events.items()},
            {name: users(column) for name, column in self.users.items()},
        )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested data with a function applied to every tensor in it.

    Args:
        value: a tensor, or a dict, tuple or dataclass of such; anything else is returned as it is.
        change: the function, such as one that moves a tensor to a device.

    Returns:
        The same structure with changed tensors.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(inner, change) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tensors(inner, change) for inner in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {x.name: map_tensors(getattr(value, x.name), change) for x in fields(value)}
    return replace(value, **changed)


@dataclass(frozen=True)
class SequenceBatch:
    """Histories of b users, packed one after the other, and the queries that are asked of them.

    A query asks for the next item after one of the interactions. In training every interaction of
    a window may be a query, and ``targets`` are the answers; in prediction the newest one is.

    Attributes:
        items: [m] int64 item of each interaction.
        lengths: [b] int64 number of interactions of each history, at least 1.
        max_length: n.
        width: t, the largest of ``lengths``, known without asking the device.
        times: [m] float64 seconds since 1970, or None.
        at: [b] float64 seconds, when the item after each history is requested, or None.
        features: of the interactions and users.
        queries: [k] int64 index among the m interactions of the one that each query follows, or
            None for a query after each interaction (k = m).
        targets: [k] int64 item to predict for each query, or None.
        log_rows: [m] int64 row of each interaction in the dataset's log, or None.
        extras: what ``prepare`` of a model has computed of the batch on the host, as dataclasses
            and tuples of tensors; None before.
        start: [b] float64 seconds from which ``elapsed`` counts; None for the time of the oldest
            interaction of each history.
    """

    items: Tensor
    lengths: Tensor
    max_length: int
    width: int
    times: Tensor | None = None
    at: Tensor | None = None
    features: Features = field(default_factory=Features)
    queries: Tensor | None = None
    targets: Tensor | None = None
    log_rows: Tensor | None = None
    extras: Any = None
    start: Tensor | None = None

    any_alignment: ClassVar[Alignment] = "start"  # the cheaper one, where a layer accepts both

    @classmethod
    def from_lengths(
        cls, items: Tensor, lengths: Tensor, max_length: int, **columns: Any
    ) -> SequenceBatch:
        """Return a batch of histories without padding, given by their lengths.

        Args:
            items: [m] int64 items of all histories, one history after the other.
            lengths: [b] int64 number of interactions of each history.
            max_length: n, the maximum length that a model is built for.
            **columns: further attributes of the batch, such as ``times`` [m].

        Returns:
            The batch. Its ``width`` is the length of the longest history.
        """
        return cls(items, lengths, max_length, int(lengths.max()), **columns)

    def __len__(self) -> int:
        """Return k, the number of queries."""
        return self.num_queries

    @property
    def num_queries(self) -> int:
        """k; a symbol where a model is traced, of which ``len`` would make a number."""
        return (self.items if self.queries is None else self.queries).numel()

    def to(self, device: torch.device) -> SequenceBatch:
        """Return the batch on a device; from pinned memory it is copied asynchronously."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SequenceBatch:
        """Return the batch in pinned memory, from which a GPU copies asynchronously."""
        return map_tensors(self, Tensor.pin_memory)

    def take_queries(self, states: Tensor) -> Tensor:
        """Return the states [k, ...] of the queries among those of all interactions, [m, ...]."""
        return states if self.queries is None else states[self.queries]

    @property
    def batch_size(self) -> int:
        """b, the number of histories."""
        return self.lengths.size(0)

    @property
    def is_full(self) -> bool:
        """Whether all histories have the same length, so that a block holds no padding."""
        return self.items.numel() == self.batch_size * self.width

    @lazy_attribute
    def row(self) -> Tensor:
        """[m] int64, the history of each interaction: 0, 0, 1, 1, 1 for the lengths 2 and 3."""
        rows = torch.arange(self.batch_size, device=self.lengths.device)
        return rows.repeat_interleave(self.lengths, output_size=self.items.numel())

    @lazy_attribute
    def index(self) -> Tensor:
        """[m] int64, how many interactions of the history are older than each one.

        They are 0, 1, 0, 1, 2 for histories of the lengths 2 and 3, each with its oldest first.
        """
        position = torch.arange(self.items.numel(), device=self.lengths.device)
        return position - self.first[self.row]

    @lazy_attribute
    def first(self) -> Tensor:
        """[b] index of the oldest interaction of each history among all m interactions.

        They are 0 and 2 for histories of the lengths 2 and 3.
        """
        return self.lengths.cumsum(0) - self.lengths

    @lazy_attribute
    def last(self) -> Tensor:
        """[b] index of the newest interaction of each history among all m interactions.

        They are 1 and 4 for histories of the lengths 2 and 3.
        """
        return self.first + self.lengths - 1

    @lazy_attribute
    def age(self) -> Tensor:
        """[m] how many interactions of the history are newer than each one.

        They are 1, 0, 2, 1, 0 for histories of the lengths 2 and 3, each with its oldest first.
        """
        return self.lengths[self.row] - 1 - self.index

    @lazy_attribute
    def padding(self) -> Tensor:
        """[b, t] bool, True at padding of a block with a history in each row, padded at its end.

        For histories of the lengths 2 and 3 it is [[False, False, True], [False, False, False]].
        """
        return torch.arange(self.width, device=self.lengths.device) >= self.lengths[:, None]

    @lazy_attribute
    def elapsed(self) -> Tensor:
        """[m] float64, seconds from the start of the history to each interaction.

        The start is the time of the history's oldest interaction, or ``start`` [b] if it is given.
        Counting from the oldest one, no interaction depends on later ones, not even by rounding.
        """
        if self.times is None:
            raise ValueError("this batch carries no times: the model must set needs_time")
        # ``first`` [b] is the index of each history's oldest interaction, and ``row`` [m] the
        # history that each interaction belongs to
        start = self.times[self.first] if self.start is None else self.start
        return self.times - start[self.row]

    @lazy_attribute
    def request(self) -> SequenceBatch:
        """The batch in which each interaction has the time at which the item after it is requested.

        That is the time of the next interaction, and ``at`` for the newest one of a history. For
        example, a history has the times 3 and 8, and ``at`` is 9: here it has the times 8 and 9.
        ``elapsed``, the time since the first interaction, still counts from 3.

        Returns:
            The batch with the times of requests; this batch itself if it has no ``at``.
        """
        if self.at is None or self.times is None:
            return self
        # The histories of a batch stand one after another. ``roll`` gives each interaction the time
        # of the one behind it. For the newest of a history that would be a time of the next
        # history, so ``index_copy`` puts ``at`` there.
        request_times = self.times.roll(-1).index_copy(0, self.last, self.at)
        return replace(self, times=request_times, at=None, start=self.times[self.first])

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the value of ``compute``, which is called only the first time a ``key`` is asked.

        The value is kept with the batch, so that all layers share what they need, such as the
        buckets into which times are sorted.

        Args:
            key: name of the value, with all options that it depends on.
            compute: computes it from lengths, times and fixed numbers, not from parameters, whose
                gradient would be needed once more for every layer.
        """
        cache = self.__dict__.setdefault("_cached", {})
        if key not in cache:
            cache[key] = compute()
        return cache[key]

    def block_width(self, align: Alignment) -> int:
        """Return the number of columns of a padded block: t, or more in a subclass."""
        return self.width

    def column(self, align: Alignment) -> Tensor:
        """Return the column of every interaction in a block that has a history in each row.

        For histories of the lengths 2 and 3 they are 0, 1, 0, 1, 2 if padding follows the
        interactions of a history (``start``), and 1, 2, 0, 1, 2 if it precedes them (``end``).

        Args:
            align: ``start`` or ``end``.

        Returns:
            [m] int64.
        """
        if align == "start":
            return self.index  # as many columns precede it as interactions are older
        last_column = self.block_width(align) - 1
        return last_column - self.age  # as many columns follow it as interactions are newer

    def slots(self, align: Alignment, time_major: bool = False) -> Tensor:
        """Return the place of each interaction in a padded block with a history in each row.

        Places are numbered row by row. The histories [5] and [6, 7] make the block

            5 0
            6 7

        with the places 0 and 1 in the first row, 2 and 3 in the second: the three interactions have
        the places 0, 2, 3. With ``align="end"`` the first row is 0 5, and they have 1, 2, 3. With
        ``time_major`` the block is transposed, and they have 0, 1, 3.

        Args:
            align: whether padding follows the interactions (``start``) or precedes them (``end``).
            time_major: whether the block is [t, b] and not [b, t].

        Returns:
            [m] int64, for the m interactions, history after history.
        """

        def compute() -> Tensor:
            column = self.column(align)
            if time_major:
                return column * self.batch_size + self.row
            return self.row * self.block_width(align) + column

        # the first call computes them, and later calls get the same tensor
        return self.cached(("slots", align, time_major), compute)

    def pad(self, x: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        """Put packed values of interactions into a block with a row for each history.

        For histories of the lengths 1 and 2 the values 5, 6, 7 become the rows 5 0 and 6 7.

        Args:
            x: [m, ...] values, one history after the other.
            align: whether zeros follow a shorter history (``start``) or precede it (``end``).
            time_major: whether the block has a column for each history instead.

        Returns:
            [b, t, ...], or time-major [t, b, ...], with t the length of the longest history.
        """
        b, t = self.batch_size, self.width
        if self.is_full:  # no padding: the values are the block already
            block = x.reshape(b, t, *x.shape[1:])
            return block.transpose(0, 1).contiguous() if time_major else block

        # The places of the block are numbered row by row. ``slots`` [m] is the number of each
        # interaction's place: 0, 2, 3 in the example.
        slots = self.slots(align, time_major)
        block = x.new_zeros(b * t, *x.shape[1:])
        # ``contiguous`` makes the copy faster where x is a part of a larger tensor
        block.index_copy_(0, slots, x.contiguous())
        shape = (t, b) if time_major else (b, t)
        return block.view(*shape, *x.shape[1:])

    def unpad(self, block: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        """Take the values of the interactions out of a padded block: the inverse of :meth:`pad`.

        Args:
            block: [b, t, ...], or time-major [t, b, ...]: values of b histories, padded to the
                length t of the longest.
            align: whether padding follows the interactions (``start``) or precedes them (``end``).
            time_major: whether the block is [t, b, ...].

        Returns:
            [m, ...] values of the m interactions, one history after the other, without padding.
        """
        shape = (self.batch_size * self.width, *block.shape[2:])
        if self.is_full:  # all histories have t interactions, so there is no padding
            return (block.transpose(0, 1) if time_major else block).reshape(shape)
        # ``slots`` has the place of each interaction in the block, numbered row by row
        return block.reshape(shape).index_select(0, self.slots(align, time_major))


class PaddedBatch(SequenceBatch):
    """A :class:`SequenceBatch` of whole rows, m = b * t, padded on the right, to trace a model.

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
        features: Features | None = None,
    ) -> PaddedBatch:
        """Return a batch of padded histories, to predict the next item of each.

        Args:
            items: [b, t] int64 items of histories, oldest first, padded with 0 on the right.
            lengths: [b] int64 number of interactions of each history.
            max_length: n, the maximum length the model is built for.
            times: [b, t] seconds, or None.
            at: [b] seconds, when the next item is requested, or None.
            features: columns [b, t] or [b, t, s] of interactions and [b, ...] of users, or None.

        Returns:
            The batch. Its "interactions" are all b * t places, padding included, row after row.
            ``queries`` [b] are the places of the newest real interactions, after which the next
            items are predicted.
        """
        b, t = items.shape
        features = features or Features()

        # torch.export gives each size of each tensor a symbol. These checks tell it which sizes are
        # the same, and must come before the sizes are used.
        for column in (times, *features.events.values()):
            if column is not None:
                torch._check(column.size(0) == b)
                torch._check(column.size(1) == t)
        for column in (lengths, at, *features.users.values()):
            if column is not None:
                torch._check(column.size(0) == b)

        # history i begins at the place i * t, and has lengths[i] interactions
        newest = torch.arange(lengths.size(0), device=lengths.device) * t + lengths - 1
        return cls(
            items=items.reshape(b * t),
            lengths=lengths,
            max_length=max_length,
            width=t,
            times=None if times is None else times.reshape(b * t),
            at=at,
            # only the columns of interactions, [b, t, ...]; those of users stay as they are
            features=features.map(events=lambda x: x.reshape(b * t, *x.shape[2:])),
            queries=newest,
        )

    @property
    def is_full(self) -> bool:
        return False  # one graph serves full and padded batches

    @lazy_attribute
    def row(self) -> Tensor:
        rows = torch.arange(self.batch_size, device=self.lengths.device)[:, None]
        return rows.expand(self.batch_size, self.width).reshape(self.batch_size * self.width)

    @lazy_attribute
    def index(self) -> Tensor:
        columns = torch.arange(self.width, device=self.lengths.device)
        return columns.expand(self.batch_size, self.width).reshape(self.batch_size * self.width)

    @lazy_attribute
    def first(self) -> Tensor:
        return torch.arange(self.batch_size, device=self.lengths.device) * self.width

    @lazy_attribute
    def age(self) -> Tensor:
        """[m] how many interactions of the history are newer; 0 at padding."""
        return (self.lengths[self.row] - 1 - self.index).clamp(min=0)

    def block_width(self, align: Alignment) -> int:
        """Return t at the start, and n at the end, where position matrices are read whole."""
        return self.width if align == "start" else self.max_length

    def pad(self, x: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        """Put values of padded rows into a block, with zeros at padding.

        In x every history takes t places, its interactions first, then padding. A block that is
        aligned at the start has the same t columns. One that is aligned at the end has n columns,
        the maximum length, with the interactions last. With t = 3 and n = 4, a history of 2
        interactions has the values 5, 6, x, where x is any value. Its row is 5, 6, 0 at the start,
        and 0, 0, 5, 6 at the end.

        Args:
            x: [b * t, ...] values of the t places of each of b histories, history after history.
            align: whether padding follows the interactions (``start``) or precedes them (``end``).
            time_major: whether the block has a column for each history instead of a row.

        Returns:
            [b, t, ...] (``start``) or [b, n, ...] (``end``), or time-major [t or n, b, ...].
        """
        b, width = self.batch_size, self.block_width(align)  # width: t or n
        if align == "start":
            values, is_padding = x, self.padding  # [b * t, ...] and [b, t]
        else:
            values, is_padding = self._move_to_end(x)  # [b * n, ...] and [b, n]

        # zeros at padding; the mask gets the further dimensions of the block, with the size 1
        block = values.view(b, width, *x.shape[1:])
        mask = is_padding.view(b, width, *[1] * (x.dim() - 1))
        block = block.masked_fill(mask, 0)
        return block.transpose(0, 1).contiguous() if time_major else block

    def _move_to_end(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Move the values of each history from the start of t places to the end of n columns.

        For n = 4 a history of 2 interactions has 2 columns of padding first. Its columns 0, 1, 2, 3
        take the interactions -2, -1, 0, 1, where negative numbers mean padding.

        Args:
            x: [b * t, ...] values of the t places of each of b histories, history after history.

        Returns:
            [b * n, ...] values, any at padding; and [b, n] bool, whether a column is padding.
        """
        n = self.max_length
        num_padding = n - self.lengths[:, None]  # [b, 1]
        interaction = torch.arange(n, device=x.device) - num_padding  # [b, n]
        # Interaction 0 of a history is at its place ``first`` in x. Padding takes that value, too.
        place = self.first[:, None] + interaction.clamp(min=0)
        return x.index_select(0, place.view(-1)), interaction < 0

    def unpad(self, block: Tensor, align: Alignment, time_major: bool = False) -> Tensor:
        """Take values for the t places of each history out of a block: the inverse of :meth:`pad`.

        This batch has t places for each of b histories: its interactions, then padding. A block
        that is aligned at the start has the same places. One that is aligned at the end has n
        columns for each history, n being the maximum length, with the interactions last: its row
        0, 0, 5, 6 gives the values 5, 6, 6 for t = 3. Values at padding mean nothing.

        Args:
            block: [b, t, ...] (``start``) or [b, n, ...] (``end``), or time-major [t or n, b, ...].
            align: whether padding follows the interactions (``start``) or precedes them (``end``).
            time_major: whether the block has a column for each history instead of a row.

        Returns:
            [b * t, ...] values of all places, padding included, history after history.
        """
        if time_major:
            block = block.transpose(0, 1)
        width = self.block_width(align)  # t or n
        values = block.reshape(self.batch_size * width, *block.shape[2:])
        if align == "start":
            return values
        # ``slots`` [b * t] says which of the b * n values each place takes: those of its
        # interactions, and at padding that of the newest one
        return values.index_select(0, self.slots(align))
