"""Scalable cross-entropy: the loss of every position against the items that matter most to it.

Shapes: m positions, n buckets of x positions and y items each. Buckets hold the exact largest
products with all items, a running top-k over chunks, so that no [n, items] exists. The forward pass
computes the gradients, as for full cross-entropy.

Reference:
    Mezentsev, Gusak, Oseledets, Frolov. "Scalable Cross-Entropy Loss for Sequential Recommendations
    with Large Item Catalogs." RecSys 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recbole_pos.layers.chunks import fixed_chunk_elements, iterate_chunks
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

    Directions are sampled with torch's default generator.

    Args:
        hidden, weight, targets: see :func:`~recbole_pos.layers.losses.full_cross_entropy`.
        n_buckets: number of random directions; None for 2 sqrt(m), rounded up.
        bucket_size_x: positions in a bucket, at most m; None for 2 sqrt(m), rounded up.
        bucket_size_y: items in a bucket, at most all.
        mix_x: whether directions are random mixtures of ``hidden``, rather than random normal.
    """
    recommended = math.ceil(2 * math.sqrt(hidden.size(0)))
    n = n_buckets or recommended
    with torch.autocast(hidden.device.type, enabled=False):
        x = hidden.detach().to(weight.dtype)
        width = len(x) if mix_x else x.size(1)
        buckets = torch.randn(n, width, dtype=x.dtype, device=x.device)
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
        hidden = hidden.to(weight.dtype)
        positions = find_largest_products(buckets, hidden.detach(), size_x)
        items = find_largest_products(buckets, weight.detach()[1:], size_y) + 1
        rows, (target_index, item_index) = index_rows(weight, targets, items)
        return _BucketCrossEntropy.apply(
            hidden, weight, targets, positions, items, rows, target_index, item_index
        )


def find_largest_products(buckets: Tensor, rows: Tensor, k: int) -> Tensor:
    """Return which rows have the k largest products with each bucket, in no order.

    Products of a chunk of rows are compared in groups. A group is skipped unless its maximum lies
    above the k-th best so far, which is rare after the first chunk.

    Returns:
        [n, min(k, num_rows)] int64 indices of ``rows`` [num_rows, d], for ``buckets`` [n, d].
    """
    n, num_rows = len(buckets), len(rows)
    num_groups = max(1, fixed_chunk_elements(rows.device) // n // GROUP)  # of a chunk
    width = num_groups * GROUP
    offsets = torch.arange(0, width, num_groups, device=rows.device)  # columns of the first group
    top = _RunningTopK(n, k, rows)
    buffer = rows.new_empty(n, min(width, num_rows))
    for start in range(0, num_rows, width):
        chunk = rows[start : start + width]
        products = torch.mm(buckets, chunk.t(), out=buffer[:, : len(chunk)])
        if top.best.size(1) < k:
            top.merge(products, torch.arange(start, start + len(chunk), device=rows.device))
        elif len(chunk) < width:
            top.defer(*top.select_above(products), start)
        else:
            bucket, group, _ = top.select_above(products.view(n, GROUP, num_groups).amax(1))
            columns = group[:, None] + offsets
            top.defer(*top.select_above(products, bucket[:, None], columns), start)
    return top.merge_deferred()


class _RunningTopK:
    """The k largest products of n buckets so far, and candidates that are not yet merged."""

    def __init__(self, n: int, k: int, like: Tensor) -> None:
        self.k = k
        self.best = like.new_empty(n, 0)
        self.index = torch.empty(n, 0, dtype=torch.int64, device=like.device)
        self.deferred: list[tuple[Tensor, Tensor, Tensor]] = []

    def select_above(
        self, products: Tensor, bucket: Tensor | None = None, column: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return bucket, column and value, [candidates] each, of products above the k-th best.

        Only ``products[bucket, column]`` of ``products`` [n, columns] are compared, if ``bucket``
        [c, 1] and ``column`` [c, g] are set.
        """
        # ``not <=`` instead of ``>``: NaN is a candidate, so that it ends up in the loss
        if bucket is None or column is None:
            buckets, columns = (products <= self.least).logical_not_().nonzero(as_tuple=True)
        else:
            is_above = (products[bucket, column] <= self.least[bucket[:, 0]]).logical_not_()
            group, member = is_above.nonzero(as_tuple=True)
            buckets, columns = bucket[group, 0], column[group, member]
        return buckets, columns, products[buckets, columns]

    def defer(self, bucket: Tensor, column: Tensor, value: Tensor, start: int) -> None:
        """Keep candidates, by column from row ``start`` on; merge if they outnumber the best."""
        self.deferred.append((bucket, value, column + start))
        if sum(len(bucket) for bucket, _, _ in self.deferred) > self.best.numel():
            self.merge_deferred()

    def merge_deferred(self) -> Tensor:
        """Merge all deferred candidates, and return the rows of the best products, [n, k]."""
        if self.deferred:
            bucket, value, index = map(torch.cat, zip(*self.deferred, strict=True))
            self.deferred = []
            # the candidates of each bucket as a row of a matrix, padded by products of -inf
            order = bucket.argsort(stable=True)
            bucket, value, index = bucket[order], value[order], index[order]
            counts = bucket.bincount(minlength=len(self.best))
            first = counts.cumsum(0) - counts
            column = torch.arange(len(bucket), device=bucket.device) - first[bucket]
            products = value.new_full((len(counts), int(counts.amax())), -torch.inf)
            products[bucket, column] = value
            rows = index.new_zeros(products.shape)
            rows[bucket, column] = index
            self.merge(products, rows)
        return self.index

    def merge(self, products: Tensor, rows: Tensor) -> None:
        """Merge products [n, c] of rows [c] or [n, c] into the best."""
        rows = torch.cat([self.index, rows.expand_as(products)], 1)
        products = torch.cat([self.best, products], 1)
        self.best, column = products.topk(min(self.k, products.size(1)), 1, sorted=False)
        self.index = rows.gather(1, column)
        self.least = self.best.amin(1, keepdim=True)


class _Buckets(NamedTuple):
    """Positions [n, x] and items [n, y] of buckets, with the tensors that give their logits."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    positions: Tensor
    items: Tensor

    def iterate_chunks(self) -> Iterator[slice]:
        """Yield slices of buckets, as many as the logits and vectors of a chunk allow."""
        n, x = self.positions.shape
        y, d = self.items.size(1), self.hidden.size(1)
        return iterate_chunks(n, max(x * y, x * d, y * d), self.hidden.device)

    def compute_logits(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return states [c, x, d], item vectors [c, y, d] and logits [c, x, y], -inf at targets."""
        positions, items = self.positions[chunk], self.items[chunk]
        states, columns = F.embedding(positions, self.hidden), F.embedding(items, self.weight)
        logits = states @ columns.mT
        logits.masked_fill_(items[:, None] == self.targets[positions][..., None], -torch.inf)
        return states, columns, logits


class _BucketCrossEntropy(EarlyGradients):
    """Losses of all buckets, then gradients of the losses that are the largest of a position."""

    # The losses and the gradients both compute the logits: that is cheap beside choosing the items.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [m, d] states
        weight: Tensor,  # [items, d] item vectors
        targets: Tensor,  # [m] items
        positions: Tensor,  # [n, x] of each bucket
        items: Tensor,  # [n, y] of each bucket
        rows: Tensor | None,  # this and the next two: results of ``index_rows``
        target_index: Tensor,
        item_index: Tensor,
    ) -> Tensor:
        """Return the scalar mean of each position's largest loss in a bucket; keep gradients."""
        buckets = _Buckets(hidden, weight, targets, positions, items)
        target_vectors = F.embedding(targets, weight)  # faster than weight[targets]
        target_logit = (hidden * target_vectors).sum(1)
        losses = target_logit[positions]
        for chunk in buckets.iterate_chunks():
            _, _, logits = buckets.compute_logits(chunk)
            losses[chunk] = logits.logsumexp(2) - losses[chunk]
        losses = losses.logaddexp(losses.new_zeros(()))  # adds the target to the denominator
        largest = hidden.new_full((len(hidden),), -torch.inf)
        largest.scatter_reduce_(0, positions.flatten(), losses.flatten(), "amax")
        is_covered = largest != -torch.inf  # the position is in a bucket
        num_covered = is_covered.sum()
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = grad_weight = None
        if needs_hidden or needs_weight:
            grad_logit = (torch.where(is_covered, torch.expm1(-largest), 0) / num_covered)[:, None]
            if needs_hidden:
                grad_hidden = grad_logit * target_vectors
            if needs_weight:
                shape = len(weight if rows is None else rows), weight.size(1)
                grad_weight = weight.new_zeros(shape)
                grad_weight.index_add_(0, target_index, grad_logit * hidden)
            share = _share_gradient(losses, largest, positions) / num_covered
            log_sum_exp = losses + target_logit[positions]
            _add_gradients(buckets, log_sum_exp, share, grad_hidden, grad_weight, item_index)
        EarlyGradients.keep(ctx, grad_hidden, grad_weight, rows, weight.shape)
        return (largest[is_covered].sum(dtype=torch.float64) / num_covered).to(hidden.dtype)


def _share_gradient(losses: Tensor, largest: Tensor, positions: Tensor) -> Tensor:
    """Return the share [n, x] of losses in the gradient of their positions' ``largest`` [m]."""
    # equal largest losses share the gradient, as torch's amax does
    is_largest = (losses == largest[positions]).to(losses.dtype)
    ties = torch.zeros_like(largest)
    ties.index_add_(0, positions.flatten(), is_largest.flatten())
    return is_largest / ties.clamp(min=1)[positions]


def _add_gradients(
    buckets: _Buckets,
    log_sum_exp: Tensor,
    share: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    item_index: Tensor,
) -> None:
    """Add, in place, the gradients that come from the buckets' items, weighted by share [n, x]."""
    for chunk in buckets.iterate_chunks():
        states, columns, logits = buckets.compute_logits(chunk)
        logits.sub_(log_sum_exp[chunk][..., None]).exp_().mul_(share[chunk][..., None])
        if grad_hidden is not None:
            position = buckets.positions[chunk].flatten()
            grad_hidden.index_add_(0, position, (logits @ columns).flatten(0, 1))
        if grad_weight is not None:
            item_rows = item_index[chunk].flatten()
            grad_weight.index_add_(0, item_rows, (logits.mT @ states).flatten(0, 1))
