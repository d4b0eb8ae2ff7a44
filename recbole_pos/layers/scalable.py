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

from recbole_pos.layers.large_products import fixed_chunk_elements, iterate_chunks
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

    Each bucket has a random direction, a vector [d], drawn here with torch's default generator. The
    states and the item vectors with the largest products with it are in the bucket. The loss of a
    state is computed against the items of its bucket (Mezentsev et al., RecSys 2024).

    Args:
        states: [m, d] states, each of which predicts an item.
        vectors: [items, d] item vectors; row 0 is padding.
        targets: [m] int64 item of each state.
        n_buckets: number of buckets; None for 2 sqrt(m), rounded up.
        bucket_size_x: states in a bucket, at most m; None for 2 sqrt(m), rounded up.
        bucket_size_y: items in a bucket, at most all.
        mix_x: whether a direction is a sum of all states with random normal weights, rather than a
            random normal vector.

    Returns:
        Scalar mean over the states that are in a bucket.
    """
    m, d = states.shape
    recommended = math.ceil(2 * math.sqrt(m))
    n = n_buckets or recommended
    size_x = bucket_size_x or recommended

    # the directions, or the weights of the states in them
    width = m if mix_x else d
    directions = torch.randn(n, width, dtype=vectors.dtype, device=states.device)
    if mix_x:
        # automatic mixed precision would round the product to a shorter type
        with torch.autocast(states.device.type, enabled=False):
            directions = directions @ states.detach().to(vectors.dtype)  # [n, m] @ [m, d]
    return bucket_cross_entropy(states, vectors, targets, directions, size_x, bucket_size_y)


def bucket_cross_entropy(
    states: Tensor, vectors: Tensor, targets: Tensor, buckets: Tensor, size_x: int, size_y: int
) -> Tensor:
    """Return scalable cross-entropy for given directions: a softmax over few items, not over all.

    A state should be compared with the items that it takes for its target most easily: those with
    the largest products with it. They are approximated by buckets. A bucket has a direction, a
    vector [d]. States and items with large products with the same direction point to the same side,
    so their products with each other are large as well. The bucket has the ``size_x`` states and
    the ``size_y`` items with the largest products with its direction.

    The loss of a state in a bucket is -log softmax of the state's target among the target and the
    items of the bucket. Of a state in several buckets the largest loss counts, and a state in no
    bucket does not count.

    Args:
        states: [m, d] states, each of which predicts an item.
        vectors: [items, d] item vectors; row 0 is padding.
        targets: [m] int64 item of each state.
        buckets: [n, d] directions of n buckets.
        size_x, size_y: number of states and of items of a bucket.

    Returns:
        Scalar mean over the states that are in a bucket.
    """
    # without automatic mixed precision, which would round the products
    with torch.autocast(states.device.type, enabled=False):
        states = states.to(vectors.dtype)
        # the content of each bucket: indices of states [n, size_x] and of items [n, size_y]; item 0
        # is padding and in none, so the search begins at item 1
        positions = find_largest_products(buckets, states.detach(), size_x)
        items = find_largest_products(buckets, vectors.detach()[1:], size_y) + 1
        # An autograd function computes the losses described above and their mean. It takes some
        # buckets at a time, since the logits of all, [n, size_x, size_y], need much memory.
        return _BucketCrossEntropy.apply(states, vectors, targets, positions, items)


def find_largest_products(directions: Tensor, rows: Tensor, k: int) -> Tensor:
    """Find the k rows of a matrix with the largest products with each of n directions.

    Products are computed for a chunk of rows at a time, so that [n, num_rows] never exists.
    ``_RunningTopK`` keeps the k largest ones so far of each direction.

    Args:
        directions: [n, d] vectors.
        rows: [num_rows, d] vectors among which to search.
        k: number of rows to find.

    Returns:
        [n, min(k, num_rows)] int64 indices of ``rows`` for each direction, in no order.
    """
    # A chunk has ``width`` rows, so that its products [n, width] are about
    # ``fixed_chunk_elements`` numbers: a multiple of GROUP, as ``_find_above_in_groups`` needs it.
    n, num_rows = len(directions), len(rows)
    groups_per_chunk = max(1, fixed_chunk_elements(rows.device) // n // GROUP)
    width = groups_per_chunk * GROUP

    top = _RunningTopK(n, k, rows)
    buffer = rows.new_empty(n, min(width, num_rows))  # memory for the products of every chunk
    for start in range(0, num_rows, width):
        chunk = rows[start : start + width]
        products = torch.mm(directions, chunk.t(), out=buffer[:, : len(chunk)])
        num_found = top.best.size(1)  # of each direction, at most k
        if num_found < k:
            # any product may be among the k largest: compare all of them with those found so far
            top.merge(products, torch.arange(start, start + len(chunk), device=rows.device))
            continue

        # Only the few products above ``least`` [n, 1], the smallest of the k largest, can replace
        # one of these. Both functions find them; the faster one needs a whole chunk.
        find = _find_above_in_groups if len(chunk) == width else _find_above
        direction, column, value = find(products, top.least)
        # Keep them until there are many, which are compared faster. Until then ``least`` is too
        # low, which only lets through more products than needed.
        top.defer(direction, value, start + column)
    return top.merge_deferred()  # compare the last ones, and return the rows of the k largest


def _find_above_in_groups(products: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the products above a threshold, faster than ``_find_above`` where these are few.

    Each row is split into groups of ``GROUP`` products, each with a member from every stretch of
    columns: with 3 groups, group 0 has the columns 0, 3, 6, ..., group 1 has 1, 4, 7, ..., and
    group 2 has 2, 5, 8, ... Maxima of such groups are computed fast. First the largest product of
    each group is compared, then all products of the groups whose largest is above the threshold.

    Args:
        products: [n, width] products, with ``width`` a multiple of ``GROUP``.
        least: [n, 1] threshold of each row.

    Returns:
        Row, column and value, [found] each, of the products above the threshold of their row.
    """
    n, width = products.shape
    num_groups = width // GROUP
    # product [i, j, g] of this view is in column j * num_groups + g, so g is its group
    maxima = products.view(n, GROUP, num_groups).amax(1)  # [n, num_groups]
    row, group, _ = _find_above(maxima, least)  # [c] both: c groups have a product to find

    # the columns of these groups, such as 1, 4, 7, ..., and the products there, [c, GROUP] both
    columns = group[:, None] + torch.arange(0, width, num_groups, device=products.device)
    members = products[row[:, None], columns]

    # each found product is one of the c groups and one of its GROUP members, [found] both
    group_index, member, value = _find_above(members, least[row])
    return row[group_index], columns[group_index, member], value


def _find_above(values: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value, [found] each, of the values [c, g] above ``least`` [c, 1]."""
    # Not ``>``: every comparison with NaN is false, so ``not <=`` finds NaN, too. Then it shows in
    # the loss instead of being passed over.
    row, column = (values <= least).logical_not_().nonzero(as_tuple=True)
    return row, column, values[row, column]


class _RunningTopK:
    """The k largest products of n directions so far, and others that are merged with them later.

    A product is that of a direction with a row of a matrix.

    Attributes:
        k: how many products to keep of each direction.
        best, index: [n, up to k] the largest products so far, and the rows that they belong to.
        least: [n, 1] the smallest of ``best``; set by the first :meth:`merge`.
        deferred: candidates, products that may be among the k largest: for each chunk their
            directions, values and rows, [c] each.
    """

    def __init__(self, n: int, k: int, like: Tensor) -> None:
        """Begin without any product.

        A product is the scalar product of a direction, one of n vectors, with a row of a matrix.

        Args:
            n: number of directions.
            k: how many products to keep of each direction, the largest.
            like: a tensor of the type and the device of the products.
        """
        self.k = k
        # the largest products so far of each direction, and the rows of the matrix they are from
        self.best = like.new_empty(n, 0)
        self.index = torch.empty(n, 0, dtype=torch.int64, device=like.device)
        # products to compare with these later: their directions, values and rows, [c] each, for
        # each chunk of the matrix
        self.deferred: list[tuple[Tensor, Tensor, Tensor]] = []

    def defer(self, direction: Tensor, value: Tensor, row: Tensor) -> None:
        """Keep candidates for later, and merge them all if they outnumber the best.

        A candidate is a product of a direction with a row that may be among the k largest of its
        direction. Merging sorts, which takes less time for many at once than for the few of each
        chunk.

        Args:
            direction: [c] number of each candidate's direction.
            value: [c] the products.
            row: [c] number of each candidate's row.
        """
        self.deferred.append((direction, value, row))
        if sum(len(values) for _, values, _ in self.deferred) > self.best.numel():
            self.merge_deferred()

    def merge_deferred(self) -> Tensor:
        """Compare all collected candidates with the k largest products of each of n directions.

        A candidate is a product of a direction with a row of the searched matrix. ``deferred`` is a
        list of many candidates at a time: their directions, values and rows, three tensors [c].
        :meth:`merge`, which does the comparison, takes a matrix of values with a row for each
        direction. So the candidates of each direction are put into a row, which is filled up with
        -inf. For example, the values 5, 6, 7 of the directions 0, 0, 2 of three become [5, 6],
        [-inf, -inf] and [7, -inf].

        Returns:
            [n, k] int64, the rows of the searched matrix that have the k largest products with each
            direction now, in no order.
        """
        if self.deferred:
            # join the tensors of the whole list, and sort the candidates by direction
            direction, value, row = map(torch.cat, zip(*self.deferred, strict=True))
            order = direction.argsort(stable=True)
            direction, value, row = direction[order], value[order], row[order]
            self.deferred = []

            # The column of a candidate counts from 0 in each direction. In the example ``counts``
            # is 2, 0, 1. The candidates of the three directions begin at the places 0, 2, 2
            # (``first``), so the candidates at the places 0, 1, 2 get the columns 0, 1, 0.
            counts = direction.bincount(minlength=len(self.best))
            first = counts.cumsum(0) - counts
            column = torch.arange(len(direction), device=direction.device) - first[direction]

            # the two matrices [n, largest count]
            products = value.new_full((len(counts), int(counts.amax())), -torch.inf)
            products[direction, column] = value
            rows = row.new_zeros(products.shape)
            rows[direction, column] = row
            self.merge(products, rows)
        return self.index

    def merge(self, products: Tensor, rows: Tensor) -> None:
        """Compare more products with the k largest so far of each of n directions, and keep k.

        A product is that of a direction with a row of the searched matrix. The attributes that
        change are ``best``, the k products, ``index``, their rows, and ``least``, the smallest of
        the k.

        Args:
            products: [n, c] further products of each direction.
            rows: [n, c] the row that each one is of; or [c], if all directions have the same rows.
        """
        all_rows = torch.cat([self.index, rows.expand_as(products)], 1)
        all_products = torch.cat([self.best, products], 1)
        k = min(self.k, all_products.size(1))  # at first there may be fewer than k
        self.best, column = all_products.topk(k, dim=1, sorted=False)
        self.index = all_rows.gather(1, column)
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
        grad_logit = (torch.where(is_covered, torch.expm1(-largest), 0) / num_covered)[:, None]
        grad_states = grad_logit * target_vectors
        grad_vectors, (target_index, item_index) = EarlyGradients.allocate(
            ctx, vectors, targets, items
        )
        if grad_vectors is not None:
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
            position = positions[chunk].flatten()
            grad_states.index_add_(0, position, (grad @ columns).flatten(0, 1))
            if grad_vectors is not None:
                item_rows = item_index[chunk].flatten()
                grad_vectors.index_add_(0, item_rows, (grad.mT @ chunk_states).flatten(0, 1))
        ctx.save_for_backward(grad_states, grad_vectors)
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
    # of each position (row) and item (column) of a bucket, whether the item is its target
    is_target = items[:, None, :] == targets[positions][:, :, None]  # [c, x, y]
    logits.masked_fill_(is_target, -torch.inf)
    return bucket_states, bucket_vectors, logits
