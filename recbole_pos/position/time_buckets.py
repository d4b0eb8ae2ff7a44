"""Learned tables over buckets of time: an input encoding, and HSTU's bias of distance and time.

Buckets grow geometrically, by e^0.301 = 1.35, from one second on, as in HSTU's public code. Shapes
as in ``layers/context.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbole_pos.layers.chunks import iterate_chunks
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import AttentionPosition, Dimensions, InputPosition
from recbole_pos.position.kernel import toeplitz_matrix

# ln of the growth from bucket to bucket: HSTU's number, which is about log10(2)
WIDTH = 0.301
LANES = 32  # copies of a table, which keys read in turn, see ``look_up_intervals``


def find_bucket(seconds: Tensor, num_buckets: int) -> Tensor:
    """Return min(floor(ln(max(1, seconds)) / 0.301), num_buckets - 1), int32 of the same shape.

    The first bucket takes spans below 1.35 s, also negative ones.
    """
    return seconds.clamp(min=1).log_().div_(WIDTH).clamp_(max=num_buckets - 1).to(torch.int32)


class TimeEmbedding(InputPosition):
    """Learned absolute times in buckets, x + P[bucket] (Wei et al., TO-RoPE, Table 4: time APE).

    Times count from older interactions, never from the newest one of the window: in training every
    interaction is a query, and seconds until the newest one would reveal when later interactions
    happen. With ``request_time: target`` R[bucket(t_{k+1} - t_k)] is added to interaction k, for
    the gap to the request that its state answers.

    Args:
        time_buckets: rows of P; the last one takes everything that is longer.
        time_from: ``first`` takes the seconds since the first interaction of the window,
            ``previous`` those since the interaction before (0 for the first).
    """

    options = ("time_buckets", "time_from")
    needs_time = True
    reads_request = True

    def __init__(self, dimensions: Dimensions, *, time_buckets: int, time_from: str) -> None:
        """Create the table [buckets, d] of times and, if requests have times, one of gaps."""
        super().__init__()
        self.time_from = time_from
        self.weight = nn.Parameter(torch.empty(time_buckets, dimensions.hidden_size))
        nn.init.normal_(self.weight, std=dimensions.initializer_range)
        self.request = None
        if dimensions.request_time:
            self.request = nn.Parameter(torch.empty_like(self.weight))
            nn.init.normal_(self.request, std=dimensions.initializer_range)

    def forward(self, x: Tensor, ctx: SequenceContext) -> Tensor:
        """Return item vectors x [m, d] with the vectors of their times added, [m, d]."""
        seconds = ctx.elapsed
        if self.time_from == "previous":
            seconds = seconds.diff(prepend=seconds[:1]).masked_fill(ctx.index == 0, 0)
        x = x + F.embedding(find_bucket(seconds, len(self.weight)), self.weight)
        if self.request is None:
            return x
        gap = ctx.request.elapsed - ctx.elapsed
        return x + F.embedding(find_bucket(gap, len(self.request)), self.request)


class HSTUBias(AttentionPosition):
    """Learned bias of distance and bucketed time (HSTU, Zhai et al. 2024).

    B_ij = w_pos[i - j] + w_time[bucket(t_i - t_j)], one table each per layer, the same for its
    heads, as RelativeBucketedTimeAndPositionBasedBias of the authors' code. Differences to it:

    - The time of query i is t_i; with ``request_time: target`` it is t_{i+1}, as in the code.
    - Tables start at zero, so a fresh model equals its backbone; the code's are normal(0, 0.02).
    - ``hstu_time_buckets`` counts all buckets (the code's 128 makes 129), and w_pos has no entries
      for the future, which the mask hides.

    Args:
        hstu_time_buckets: entries of w_time; the last one takes everything that is longer.
    """

    options = ("hstu_time_buckets",)
    needs_time = True
    reads_request = True

    def __init__(self, dimensions: Dimensions, *, hstu_time_buckets: int) -> None:
        super().__init__()
        self.distance = nn.Parameter(torch.zeros(dimensions.max_length))
        self.time = nn.Parameter(torch.zeros(hstu_time_buckets))

    def bias(self, q: Tensor, k: Tensor, ctx: SequenceContext) -> Tensor:
        bias = look_up_intervals(self.time, ctx) + toeplitz_matrix(self.distance, ctx.width)
        return bias.unsqueeze(1).to(q.dtype)


def bucket_pairs(ctx: SequenceContext, num_buckets: int) -> Tensor:
    """Return [b, t, t] int32 buckets of t_i - t_j, as indices into LANES tables end to end."""
    keys = torch.arange(ctx.width, dtype=torch.int32, device=ctx.lengths.device)
    table_start = keys % LANES * num_buckets  # key j reads table j modulo LANES
    return map_spans(ctx, lambda s: find_bucket(s, num_buckets).add_(table_start), torch.int32)


def map_spans(
    ctx: SequenceContext, function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Return an elementwise function of the float64 seconds t_i - t_j of all pairs, [b, t, t].

    t_i is the time of the request of query i, see ``SequenceContext.request``. The result is
    aligned at the start; entries of newer keys and of padding have no meaning.
    """
    query_times, key_times = pad_times(ctx)
    b, t = key_times.shape
    out = torch.empty(b, t, t, dtype=dtype, device=key_times.device)
    for rows in iterate_chunks(b, t**2, key_times.device):  # differences are float64
        out[rows] = function(query_times[rows, :, None] - key_times[rows, None])
    return out


def pad_times(ctx: SequenceContext) -> tuple[Tensor, Tensor]:
    """Return the times of queries' requests and of keys, seconds [b, t] aligned at the start."""
    times = ctx.pad(ctx.elapsed.detach(), "start")
    if ctx.request is ctx:
        return times, times
    return ctx.pad(ctx.request.elapsed.detach(), "start"), times


def look_up_intervals(table: Tensor, ctx: SequenceContext) -> Tensor:
    """Return table[bucket(t_i - t_j)], [b, t, t] aligned at the start, of a table [num_buckets]."""
    num_buckets = len(table)
    index = ctx.cached(("intervals", num_buckets), lambda: bucket_pairs(ctx, num_buckets))
    # Neighbours mostly share a bucket, and adding to one number again and again waits for memory.
    # With LANES tables in turn each number of the gradient is the sum of fewer.
    return table.repeat(LANES).index_select(0, index.flatten()).view(index.shape)
