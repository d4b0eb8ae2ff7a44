"""Scalable cross-entropy: the loss of every position against the items that matter most to it.

Buckets are exact: the largest products of 500,000 items with a bucket are a running top-k with a
threshold, chunk by chunk, so [buckets, items] never exists. The gradient is made in the forward
pass, as for full cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recbole_pos.layers.chunks import chunk_elements, chunks
from recbole_pos.layers.losses import EarlyGradients
from recbole_pos.layers.row_gradients import index_rows

GROUP = 16  # products of a group, which is skipped if its largest is below the threshold


def scalable_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    n_buckets: int | None,
    bucket_size_x: int | None,
    bucket_size_y: int,
    mix_x: bool,
) -> Tensor:
    """Return cross-entropy within buckets of positions and items that point the same way.

    Mezentsev, Gusak, Oseledets and Frolov, "Scalable Cross-Entropy Loss for Sequential
    Recommendations with Large Item Catalogs", RecSys 2024. The directions are drawn from torch's
    default generator; sizes are cut to what exists.

    Args:
        hidden, weight, targets: see :func:`~recbole_pos.layers.losses.full_cross_entropy`.
        n_buckets: number of random directions; None for 2 sqrt(m), rounded up.
        bucket_size_x: positions a bucket takes; None for 2 sqrt(m), rounded up.
        bucket_size_y: items a bucket takes.
        mix_x: directions are random mixtures of ``hidden`` rather than random normal.
    """
    recommended = math.ceil(2 * math.sqrt(hidden.size(0)))
    n = n_buckets or recommended
    with torch.autocast(hidden.device.type, enabled=False):
        x = hidden.detach().to(weight.dtype)
        buckets = torch.randn(n, len(x) if mix_x else x.size(1), dtype=x.dtype, device=x.device)
        if mix_x:
            buckets = buckets @ x
    return bucket_cross_entropy(
        hidden, weight, targets, buckets, bucket_size_x or recommended, bucket_size_y
    )


def bucket_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, buckets: Tensor, size_x: int, size_y: int
) -> Tensor:
    """Return the mean, over positions in a bucket, of their largest loss in any bucket.

    The loss of a position in a bucket is -log softmax of its target among the target and the
    bucket's other items.

    Args:
        hidden, weight, targets: see :func:`scalable_cross_entropy`.
        buckets: [n_buckets, d] directions; a bucket takes the ``size_x`` positions and the
            ``size_y`` items of the largest products with its direction.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, candidates = hidden.to(weight.dtype), weight.detach()[1:]
        positions = largest_products(buckets, hidden.detach(), size_x)
        items = largest_products(buckets, candidates, size_y) + 1
        rows, (at_targets, at_items) = index_rows(weight, targets, items)
        return _BucketCrossEntropy.apply(
            hidden, weight, targets, positions, items, rows, at_targets, at_items
        )


def largest_products(buckets: Tensor, rows: Tensor, k: int) -> Tensor:
    """Return which rows have the largest products with each bucket, exactly.

    Rows are taken in chunks. The k-th best so far is a threshold, and of a chunk only groups of
    products whose maximum lies above it are looked at: few after the first chunk. Candidates
    wait until there are as many of them as of the best.

    Returns:
        [n, min(k, rows)] int64 indices of ``rows`` [rows, d], for ``buckets`` [n, d].
    """
    n, total = len(buckets), len(rows)
    groups = max(1, chunk_elements(rows.device) // n // GROUP)  # of a chunk
    width = groups * GROUP
    member = torch.arange(0, width, groups, device=rows.device)  # a group has a stride
    largest = _Largest(n, k, rows)
    buffer = rows.new_empty(n, min(width, total))
    for start in range(0, total, width):
        chunk = rows[start : start + width]
        products = torch.mm(buckets, chunk.t(), out=buffer[:, : len(chunk)])
        if largest.best.size(1) < k:
            largest.merge(products, torch.arange(start, start + len(chunk), device=rows.device))
        elif len(chunk) < width:
            largest.defer(*largest.select_above(products), start)
        else:
            bucket, group, _ = largest.select_above(products.view(n, GROUP, groups).amax(1))
            columns = group[:, None] + member
            largest.defer(*largest.select_above(products, bucket[:, None], columns), start)
    return largest.merge_waiting()


class _Largest:
    """The k largest products of each of n buckets so far, and candidates that wait to be merged."""

    def __init__(self, n: int, k: int, like: Tensor) -> None:
        self.k = k
        self.best = like.new_empty(n, 0)
        self.index = torch.empty(n, 0, dtype=torch.int64, device=like.device)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def select_above(
        self, products: Tensor, bucket: Tensor | None = None, column: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return bucket, column and value [candidates] of the products above the threshold.

        Args:
            products: [n, columns].
            bucket, column: [c, 1] and [c, g] places to look at; None for all.
        """
        if bucket is None or column is None:
            rows, columns = _not_below(products, self.least).nonzero(as_tuple=True)
        else:
            value, least = products[bucket, column], self.least[bucket[:, 0]]
            which, member = _not_below(value, least).nonzero(as_tuple=True)
            rows, columns = bucket[which, 0], column[which, member]
        return rows, columns, products[rows, columns]

    def defer(self, bucket: Tensor, column: Tensor, value: Tensor, start: int) -> None:
        """Keep candidates (see ``select_above``) of the rows from ``start`` on, to merge later."""
        self.waiting.append((bucket, value, column + start))
        if sum(len(bucket) for bucket, _, _ in self.waiting) > self.best.numel():
            self.merge_waiting()

    def merge_waiting(self) -> Tensor:
        """Merge all waiting candidates into the best, and return these: [n, k] rows."""
        if self.waiting:
            bucket, value, where = map(torch.cat, zip(*self.waiting, strict=True))
            self.waiting = []
            # the candidates of each bucket as a row of a matrix, padded by products of -inf
            order = bucket.argsort(stable=True)
            bucket, value, where = bucket[order], value[order], where[order]
            count = bucket.bincount(minlength=len(self.best))
            first = count.cumsum(0) - count
            place = torch.arange(len(bucket), device=bucket.device) - first[bucket]
            products = value.new_full((len(count), int(count.amax())), -torch.inf)
            products[bucket, place] = value
            rows = where.new_zeros(products.shape)
            rows[bucket, place] = where
            self.merge(products, rows)
        return self.index

    def merge(self, products: Tensor, where: Tensor) -> None:
        """Merge products [n, c] of the rows at [c] or [n, c] into the largest."""
        where = torch.cat([self.index, where.expand_as(products)], 1)
        products = torch.cat([self.best, products], 1)
        self.best, kept = products.topk(min(self.k, products.size(1)), 1, sorted=False)
        self.index = where.gather(1, kept)
        self.least = self.best.amin(1, keepdim=True)


def _not_below(products: Tensor, least: Tensor) -> Tensor:
    """Return where products are above ``least`` or NaN, so that NaN ends up in the loss."""
    return (products <= least).logical_not_()


class _BucketCrossEntropy(EarlyGradients):
    """Losses of all buckets, then the gradient of those that are their position's largest.

    Both passes make the logits, [buckets, size_x, size_y], chunk by chunk: cheap beside choosing
    the items, and nothing of that size is kept. ``rows``, ``at_targets`` and ``at_items`` are those
    of ``index_rows``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        positions: Tensor,
        items: Tensor,
        rows: Tensor | None,
        at_targets: Tensor,
        at_items: Tensor,
    ) -> Tensor:
        target_logit = (hidden * weight[targets]).sum(1)
        losses = target_logit[positions]
        for part in _chunks(positions, items, hidden.size(1)):
            _, _, logits = _bucket_logits(hidden, weight, targets, positions[part], items[part])
            losses[part] = logits.logsumexp(2) - losses[part]
        losses = losses.logaddexp(losses.new_zeros(()))
        largest = hidden.new_full((len(hidden),), -torch.inf)
        largest.scatter_reduce_(0, positions.flatten(), losses.flatten(), "amax")
        covered = largest != -torch.inf
        count = covered.sum()
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = grad_weight = None
        if needs_hidden or needs_weight:
            # equal largest losses share the gradient, as torch's amax does
            chosen = (losses == largest[positions]).to(losses.dtype)
            ties = torch.zeros_like(largest).index_add_(0, positions.flatten(), chosen.flatten())
            share = chosen / ties.clamp(min=1)[positions] / count
            grad_logit = (torch.where(covered, torch.expm1(-largest), 0) / count)[:, None]
            if needs_hidden:
                grad_hidden = grad_logit * weight[targets]
            if needs_weight:
                grad_weight = weight.new_zeros(
                    len(weight if rows is None else rows), weight.size(1)
                )
                grad_weight.index_add_(0, at_targets, grad_logit * hidden)
            for part in _chunks(positions, items, hidden.size(1)):
                at = positions[part]
                states, columns, logits = _bucket_logits(hidden, weight, targets, at, items[part])
                log_sum_exp = losses[part] + target_logit[at]
                logits.sub_(log_sum_exp[..., None]).exp_().mul_(share[part][..., None])
                if grad_hidden is not None:
                    grad_hidden.index_add_(0, at.flatten(), (logits @ columns).flatten(0, 1))
                if grad_weight is not None:
                    into = at_items[part].flatten()
                    grad_weight.index_add_(0, into, (logits.mT @ states).flatten(0, 1))
        EarlyGradients.keep(ctx, grad_hidden, grad_weight, rows, weight.shape)
        return (largest[covered].sum(dtype=torch.float64) / count).to(hidden.dtype)


def _chunks(positions: Tensor, items: Tensor, d: int) -> Iterator[slice]:
    """Yield slices of buckets by their logits and vectors, see ``chunks``."""
    n, x, y = *positions.shape, items.size(1)
    return chunks(n, max(x * y, x * d, y * d), positions.device)


def _bucket_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, positions: Tensor, items: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, item vectors and logits of c buckets.

    Returns:
        [c, x, d], [c, y, d] and [c, x, y], which is -inf at the target of a position.
    """
    rows, columns = hidden[positions], weight[items]
    logits = rows @ columns.mT
    logits.masked_fill_(items[:, None] == targets[positions][..., None], -torch.inf)
    return rows, columns, logits
