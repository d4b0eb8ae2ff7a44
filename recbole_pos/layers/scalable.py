"""Scalable cross-entropy (SCE): a loss against the items that matter most to a position.

n random directions each have a bucket: the x positions and the y items with the largest products
with it. They are found exactly, by a running top-k over chunks, so that no [n, items] exists.

Reference:
    Mezentsev, Gusak, Oseledets, Frolov. "Scalable Cross-Entropy Loss for Sequential Recommendations
    with Large Item Catalogs." RecSys 2024.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbole_pos.layers.chunks import fixed_chunk_elements, iterate_chunks
from recbole_pos.layers.item_table import index_rows
from recbole_pos.layers.losses import EarlyGradients

GROUP = 16  # products of a group, which is skipped if its largest is below the threshold


def scalable_cross_entropy(
    states: Tensor,
    vectors: Tensor,
    targets: Tensor,
    *,
    n_buckets: int | None,
    bucket_size_x: int | None,
    bucket_size_y: int,
    mix_x: bool,
) -> Tensor:
    """Return scalable cross-entropy, SCE: softmax over the hardest items only.

    Random directions are drawn with torch's default generator. Around each one a bucket holds the
    positions and the items whose vectors point that way, and the loss of a position is computed
    against the items of its bucket (Mezentsev et al., RecSys 2024).

    Args:
        states: [m, d] states that predict.
        vectors: [items, d] item vectors; row 0 is padding.
        targets: [m] int64 item of each state.
        n_buckets: number of random directions; None for 2 sqrt(m), rounded up.
        bucket_size_x: positions in a bucket, at most m; None for 2 sqrt(m), rounded up.
        bucket_size_y: items in a bucket, at most all.
        mix_x: whether directions are random mixtures of ``states``, rather than random normal.

    Returns:
        Scalar mean over the positions that are in a bucket.
    """
    recommended = math.ceil(2 * math.sqrt(states.size(0)))
    n = n_buckets or recommended
    with torch.autocast(states.device.type, enabled=False):
        x = states.detach().to(vectors.dtype)
        width = len(x) if mix_x else x.size(1)
        # random normal directions, or random mixtures of the states
        buckets = torch.randn(n, width, dtype=x.dtype, device=x.device)
        if mix_x:
            buckets = buckets @ x
    return bucket_cross_entropy(
        states, vectors, targets, buckets, bucket_size_x or recommended, bucket_size_y
    )


def bucket_cross_entropy(
    states: Tensor, vectors: Tensor, targets: Tensor, buckets: Tensor, size_x: int, size_y: int
) -> Tensor:
    """Return the mean, over positions in a bucket, of their largest loss in any bucket.

    The loss of a position in a bucket is -log softmax of its target among the target and the
    bucket's other items.

    Args:
        states: [m, d] states that predict.
        vectors: [items, d] item vectors; row 0 is padding.
        targets: [m] int64 item of each state.
        buckets: [n_buckets, d] directions; a bucket takes the ``size_x`` positions and the
            ``size_y`` items of the largest products with its direction.
        size_x, size_y: positions and items of a bucket.

    Returns:
        Scalar.
    """
    with torch.autocast(states.device.type, enabled=False):
        states = states.to(vectors.dtype)
        positions = find_largest_products(buckets, states.detach(), size_x)
        items = find_largest_products(buckets, vectors.detach()[1:], size_y) + 1  # no padding
        # the rows of the item table that the gradient has, and the places of the items among them;
        # None for all rows
        rows, (target_index, item_index) = index_rows(vectors, targets, items)
        # computes the loss and its gradients in one pass
        return _BucketCrossEntropy.apply(
            states, vectors, targets, positions, items, rows, target_index, item_index
        )


def find_largest_products(buckets: Tensor, rows: Tensor, k: int) -> Tensor:
    """Find the k rows of a matrix with the largest products with each of n directions.

    Products are computed for a chunk of rows at a time. Within a chunk they are compared in groups
    of ``GROUP``: a group is skipped unless its maximum lies above the k-th best so far, which is
    rare after the first chunk.

    Args:
        buckets: [n, d] directions.
        rows: [num_rows, d] vectors among which to search.
        k: number of rows to find.

    Returns:
        [n, min(k, num_rows)] int64 indices of ``rows`` for each direction, in no order.
    """
    # A chunk has so many rows that its products, n for each, have ``fixed_chunk_elements`` numbers.
    # Column c of a chunk belongs to group c modulo num_groups, so the columns of group g are
    # g + offsets: with 3 groups, those of the first are 0, 3, 6, ...
    n, num_rows = len(buckets), len(rows)
    num_groups = max(1, fixed_chunk_elements(rows.device) // n // GROUP)  # of a chunk
    width = num_groups * GROUP
    offsets = torch.arange(0, width, num_groups, device=rows.device)

    top = _RunningTopK(n, k, rows)  # the k best rows of each direction so far
    buffer = rows.new_empty(n, min(width, num_rows))
    for start in range(0, num_rows, width):
        chunk = rows[start : start + width]
        products = torch.mm(buckets, chunk.t(), out=buffer[:, : len(chunk)])
        if top.best.size(1) < k:
            # fewer than k so far: all products are among the best
            top.merge(products, torch.arange(start, start + len(chunk), device=rows.device))
        elif len(chunk) < width:
            # the last chunk, which has no whole groups
            top.defer(top.select_above(products), start)
        else:
            # the groups whose maximum is above the k-th best, then their members above it;
            # ``defer`` keeps these, to be merged into the best later
            bucket, group, _ = top.select_above(products.view(n, GROUP, num_groups).amax(1))
            columns = group[:, None] + offsets
            top.defer(top.select_above(products, bucket[:, None], columns), start)
    return top.merge_deferred()


class _RunningTopK:
    """The k largest products of n buckets so far, and candidates that are not yet merged.

    Attributes:
        k: how many products to keep of each bucket.
        best, index: [n, up to k] the largest products so far, and the rows that they belong to.
        deferred: buckets, products and rows of candidates, [c] each, to be merged later.
        least: [n, 1] the smallest of ``best``; set by the first :meth:`merge`.
    """

    def __init__(self, n: int, k: int, like: Tensor) -> None:
        self.k = k
        self.best = like.new_empty(n, 0)
        self.index = torch.empty(n, 0, dtype=torch.int64, device=like.device)
        self.deferred: list[tuple[Tensor, Tensor, Tensor]] = []

    def select_above(
        self, products: Tensor, bucket: Tensor | None = None, column: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the products that are above the k-th best of their bucket so far (``least``).

        Only these may be among the k best in the end, so all others are left out of sorting.

        Args:
            products: [n, columns] of n buckets.
            bucket, column: [c, 1] and [c, g], to compare only ``products[bucket, column]``; None
                to compare all.

        Returns:
            Bucket, column and value of each of these candidates, [candidates] each.
        """
        # Not ``>``: every comparison with NaN is false, so ``not <=`` makes NaN a candidate, and it
        # shows in the loss instead of being passed over.
        if bucket is None or column is None:
            buckets, columns = (products <= self.least).logical_not_().nonzero(as_tuple=True)
        else:
            is_above = (products[bucket, column] <= self.least[bucket[:, 0]]).logical_not_()
            group, member = is_above.nonzero(as_tuple=True)
            buckets, columns = bucket[group, 0], column[group, member]
        return buckets, columns, products[buckets, columns]

    def defer(self, candidates: tuple[Tensor, Tensor, Tensor], start: int) -> None:
        """Keep candidates for later, and merge them all if they outnumber the best.

        Candidates are products that may be among the k best of their bucket. Merging sorts, which
        takes less time for many at once than for the few of each chunk.

        Args:
            candidates: [c] bucket of each candidate, its column in a chunk of products, and the
                product.
            start: row of the chunk's first column.
        """
        bucket, column, value = candidates
        self.deferred.append((bucket, value, column + start))
        if sum(len(bucket) for bucket, _, _ in self.deferred) > self.best.numel():
            self.merge_deferred()

    def merge_deferred(self) -> Tensor:
        """Merge all deferred candidates into the best, and return the rows of the best products.

        Returns:
            [n, k] int64 rows, in no order.
        """
        if self.deferred:
            # the candidates of all chunks: their buckets, products and rows, a tensor each
            bucket, value, index = map(torch.cat, zip(*self.deferred, strict=True))
            self.deferred = []

            # The candidates of each bucket become a row of a matrix, padded by products of -inf:
            # buckets 0, 0, 2 with the values 5, 6, 7 are [5, 6], [-inf, -inf] and [7, -inf].
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
        """Merge products into the k best of each bucket.

        The attributes that change are ``best``, the k products, ``index``, their rows, and
        ``least``, the smallest of them.

        Args:
            products: [n, c] products of the buckets.
            rows: [c] or [n, c] the row that each one belongs to.
        """
        rows = torch.cat([self.index, rows.expand_as(products)], 1)
        products = torch.cat([self.best, products], 1)
        self.best, column = products.topk(min(self.k, products.size(1)), 1, sorted=False)
        self.index = rows.gather(1, column)
        self.least = self.best.amin(1, keepdim=True)


class _BucketCrossEntropy(EarlyGradients):
    """Losses of all buckets, then gradients of the losses that are the largest of a position."""

    # The losses and the gradients both compute the logits: that is cheap beside choosing the items.

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        vectors: Tensor,
        targets: Tensor,
        positions: Tensor,
        items: Tensor,
        rows: Tensor | None,
        target_index: Tensor,
        item_index: Tensor,
    ) -> Tensor:
        """Return the mean of the largest losses of positions, and keep its gradients.

        A bucket holds x positions and y items. The loss of a position in it is -log softmax of the
        position's target among the target and the items. Of several buckets the largest loss
        counts, and positions in no bucket do not count.

        Args:
            ctx: torch's context of the function.
            states: [m, d] state of each position.
            vectors: [items, d] item vectors.
            targets: [m] int64 item of each position.
            positions, items: [n, x] and [n, y] positions and items of each of n buckets.
            rows, target_index, item_index: the rows of the item table that the gradient has, and
                the places of targets and items among them (``index_rows``).

        Returns:
            Scalar.
        """
        target_vectors = F.embedding(targets, vectors)  # faster than vectors[targets]
        target_logit = (states * target_vectors).sum(1)
        # buckets are taken as many at a time as the logits and vectors of a chunk allow
        (n, x), y, d = positions.shape, items.size(1), states.size(1)
        chunks = list(iterate_chunks(n, max(x * y, x * d, y * d), states.device))

        # With z the logits, lse their log-sum-exp without the target and z_t that of the target,
        # the loss is log(1 + exp(lse - z_t)).
        losses = target_logit[positions]
        for chunk in chunks:
            _, _, logits = _compute_logits(states, vectors, targets, positions[chunk], items[chunk])
            losses[chunk] = logits.logsumexp(2) - losses[chunk]
        losses = losses.logaddexp(losses.new_zeros(()))

        # the largest loss of each position, over its buckets
        largest = states.new_full((len(states),), -torch.inf)
        largest.scatter_reduce_(0, positions.flatten(), losses.flatten(), "amax")
        is_covered = largest != -torch.inf  # the position is in a bucket
        num_covered = is_covered.sum()
        loss = (largest[is_covered].sum(dtype=torch.float64) / num_covered).to(states.dtype)

        # the gradients of these losses to the targets' logits, and from there on
        needs_states, needs_vectors = ctx.needs_input_grad[:2]
        grad_logit = (torch.where(is_covered, torch.expm1(-largest), 0) / num_covered)[:, None]
        grad_states = grad_logit * target_vectors if needs_states else None
        grad_vectors = None
        if needs_vectors:
            num_rows = len(vectors if rows is None else rows)
            grad_vectors = vectors.new_zeros(num_rows, d)
            grad_vectors.index_add_(0, target_index, grad_logit * states)

        # The gradient of a position's largest loss goes to the bucket that has it; buckets with
        # equally large ones share it, as in torch's amax.
        is_largest = (losses == largest[positions]).to(losses.dtype)
        num_largest = torch.zeros_like(largest)
        num_largest.index_add_(0, positions.flatten(), is_largest.flatten())
        share = is_largest / num_largest.clamp(min=1)[positions] / num_covered

        # The gradient to the logit of an item is its probability times that share.
        log_sum_exp = losses + target_logit[positions]
        for chunk in chunks:
            chunk_states, columns, logits = _compute_logits(
                states, vectors, targets, positions[chunk], items[chunk]
            )
            grad = logits.sub_(log_sum_exp[chunk][..., None]).exp_().mul_(share[chunk][..., None])
            if grad_states is not None:
                position = positions[chunk].flatten()
                grad_states.index_add_(0, position, (grad @ columns).flatten(0, 1))
            if grad_vectors is not None:
                item_rows = item_index[chunk].flatten()
                grad_vectors.index_add_(0, item_rows, (grad.mT @ chunk_states).flatten(0, 1))
        EarlyGradients.keep(ctx, grad_states, grad_vectors, rows, vectors.shape)
        return loss


def _compute_logits(
    states: Tensor, vectors: Tensor, targets: Tensor, positions: Tensor, items: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the products of positions and items that are in the same bucket.

    Args:
        states, vectors: [m, d] states of all positions and [items, d] vectors of all items.
        targets: [m] int64 item that each position predicts.
        positions, items: [c, x] and [c, y] positions and items of each of c buckets.

    Returns:
        States [c, x, d], item vectors [c, y, d] and logits [c, x, y]. A logit is -inf where the
        item is the target of the position: the caller computes the logits of targets itself.
    """
    bucket_states = F.embedding(positions, states)
    bucket_vectors = F.embedding(items, vectors)
    logits = bucket_states @ bucket_vectors.mT
    logits.masked_fill_(items[:, None] == targets[positions][..., None], -torch.inf)
    return bucket_states, bucket_vectors, logits
