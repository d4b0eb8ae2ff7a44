"""Losses against some items: sampled ones, or those that matter most to a position (SCE).

Sampled: groups of positions share their negatives.

A batch of m positions is split into groups of n, each of which shares n sampled items: about m are
sampled in all, and the product of a group is [n, d] by [d, n]. Sharing keeps the expectation of a
position's gradient, but all positions of a group have the same noise.

A negative that is its position's target is left out. With z the products of a state, t its target,
q the distribution that negatives j come from and sums over those that are not t:

    BCE, gBCE          (-beta log sigma(z_t) - sum_j log sigma(-z_j) / (1 - q_t)) / (n + 1)
    sampled_softmax    -log( e^(z_t + a) / (e^(z_t + a) + sum_j e^(z_j + b_j)) )
    logq_correction    none      a = 0,         b_j = 0
                       standard  a = -log q_t,  b_j = -log q_j
                       refined   a = log n,     b_j = -log q_j

Division by 1 - q_t makes up for what is left out: the sum is n times the mean over other items.
Under ``refined`` sum_j e^z_j / (n q_j) is an unbiased estimate of the catalogue's sum without t,
and the loss one of cross-entropy. ``in_batch`` has every target of the batch as a negative; equal
targets are one negative, to whose b_j the log of their number is added. n is then m - 1.

Reference:
    BCE: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018, with one negative.
    gBCE: Petrov and Macdonald, "gSASRec: Reducing Overconfidence in Sequential Recommendation
    Trained with Negative Sampling", RecSys 2023.
    standard: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", RecSys 2019.
    refined: Khrylchenko et al., "Correcting the LogQ Correction", RecSys 2025 (arXiv 2507.09331).
    Its loss is that of the negatives only, weighted by 1 - P(t) without a gradient; where P(t) is
    estimated from the same negatives, its gradient is the one here, whose value is comparable. The
    authors count the negatives that are not t; n (1 - q_t) is the expectation of their number.

Scalable cross-entropy (SCE): n buckets of x positions and y items each hold the exact largest
products with all items, a running top-k over chunks, so that no [n, items] exists.
    Mezentsev, Gusak, Oseledets, Frolov. "Scalable Cross-Entropy Loss for Sequential Recommendations
    with Large Item Catalogs." RecSys 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recbole_pos.layers.chunks import fixed_chunk_elements, iterate_chunks
from recbole_pos.layers.item_table import index_rows
from recbole_pos.layers.losses import MIN_ROWS, EarlyGradients

GROUP = 16  # products of a group, which is skipped if its largest is below the threshold
BINARY = ("BCE", "gBCE")
SAMPLED = (*BINARY, "sampled_softmax", "in_batch")
TINY = 1e-9  # least 1 - q_t: a target that is all of q would divide by zero


@dataclass
class SampledLoss:
    """One of the losses above as a function of states, item vectors and targets.

    Items are sampled with torch's default generator, with replacement.

    Attributes:
        loss_type: one of ``SAMPLED``.
        counts: [items] training interactions of each item; with ``in_batch`` how often each is a
            target in an epoch.
        negatives: n, negatives of a position; not read by ``in_batch``.
        negative_sampler: ``uniform``; ``popularity``, by counts plus one, so that every item has a
            chance; or ``in_batch``, among the targets of the batch.
        logq_correction: ``none``, ``standard`` or ``refined``.
        gbce_t: calibration of gBCE; 0 makes it BCE.
        log_q: [items] log of q.
        cumulative: [items] float64 running sum of the sampling weights, to which q is proportional.
    """

    loss_type: str
    counts: Tensor
    negatives: int = 1
    negative_sampler: str = "uniform"
    logq_correction: str = "none"
    gbce_t: float = 0.0
    log_q: Tensor = field(init=False)
    cumulative: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Compute the sampling distribution, ``log_q`` and ``cumulative``, from the counts."""
        if self.loss_type == "in_batch":
            self.negative_sampler = "in_batch"
        counts = self.counts.double()
        weights = {
            "uniform": torch.ones_like(counts),
            "popularity": counts + 1,
            "in_batch": counts,
        }[self.negative_sampler]
        weights[0] = 0  # padding is not an item
        total = weights.sum()
        weights[1:].clamp_(min=1)  # log 0 is avoided; items that are no target are never negatives
        self.log_q = (weights / total).log()
        self.cumulative = weights.cumsum(0)

    def move(self, device: torch.device) -> None:
        """Move ``log_q`` and ``cumulative`` to a device."""
        self.log_q = self.log_q.to(device)
        self.cumulative = self.cumulative.to(device)

    def __call__(self, states: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
        """Sample negatives for targets [m] of states [m, d], and return the scalar mean loss."""
        if self.loss_type == "in_batch":
            distinct, repeats = targets.unique(return_counts=True)
            items = distinct.expand(_count_groups(targets, len(distinct)), -1)
            return self.compute(states, vectors, targets, items, repeats.double().log())
        return self.compute(states, vectors, targets, self.sample(targets))

    def sample(self, targets: Tensor) -> Tensor:
        """Sample the negatives [groups, n] int64 of a batch with targets [m]."""
        device = targets.device
        shape = (_count_groups(targets, self.negatives), self.negatives)
        if self.negative_sampler == "uniform":
            return torch.randint(1, len(self.log_q), shape, device=device)
        if self.negative_sampler == "in_batch":
            return targets[torch.randint(len(targets), shape, device=device)]
        point = torch.rand(shape, dtype=torch.float64, device=device) * self.cumulative[-1]
        items = torch.searchsorted(self.cumulative, point, right=True)
        return items.clamp_(max=len(self.log_q) - 1)

    def compute(
        self,
        states: Tensor,
        vectors: Tensor,
        targets: Tensor,
        items: Tensor,
        log_repeats: Tensor | None = None,
    ) -> Tensor:
        """Return the scalar mean loss against given negatives.

        Args:
            states, vectors, targets: see :func:`~recbole_pos.layers.losses.full_cross_entropy`.
            items: [groups, n] negatives; position i is in group i modulo groups.
            log_repeats: [n] log of how often each item of a group counts; None if all count once.
        """
        beta: float | None = None
        shifts: Tensor | None = None
        if self.loss_type in BINARY:
            rate = min(items.size(1) / max(len(self.log_q) - 2, 1), 1.0)
            beta = 1 - self.gbce_t * (1 - rate)
            target_terms = -1 / torch.expm1(self.log_q[targets]).clamp(max=-TINY)  # 1 / (1 - q_t)
        else:
            target_terms, shifts = self._compute_shifts(targets, items, log_repeats)

        distinct = items if log_repeats is None else items[0]  # in_batch repeats them
        rows, (target_index, item_index) = index_rows(vectors, targets, distinct)
        with torch.autocast(states.device.type, enabled=False):
            states, target_terms = states.to(vectors.dtype), target_terms.to(vectors.dtype)
            shifts = None if shifts is None else shifts.to(vectors.dtype)
            row_indices = rows, target_index, item_index.expand_as(items)
            return _SharedNegatives.apply(
                states, vectors, targets, items, target_terms, shifts, beta, *row_indices
            )

    def _compute_shifts(
        self, targets: Tensor, items: Tensor, log_repeats: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is added to logits of targets, [m], and of negatives, [groups, n] or None.

        ``log_repeats`` [n] is the log of how often each negative counts; None if all count once.
        """
        target_shift = torch.zeros_like(self.log_q[targets])
        if self.logq_correction == "none":
            repeats = None if log_repeats is None else log_repeats.expand(items.shape)
            return target_shift, repeats
        if self.logq_correction == "standard":
            target_shift = -self.log_q[targets]
        else:
            n = items.size(1) if log_repeats is None else max(len(targets) - 1, 1)
            target_shift += math.log(n)
        shifts = -self.log_q[items]
        if log_repeats is not None:
            shifts = shifts + log_repeats
        return target_shift, shifts


def _count_groups(targets: Tensor, n: int) -> int:
    """Return the number of groups of n positions; a large n has smaller groups to save memory."""
    group_size = min(n, max(MIN_ROWS, fixed_chunk_elements(targets.device) // n))
    return math.ceil(len(targets) / group_size)


def _split(x: Tensor, num_groups: int, size: int) -> Tensor:
    """Split x [m, ...] into groups of equal size, [num_groups, size, ...], filled with zeros.

    Position i goes to group i modulo num_groups: 0 1 2 3 4 in two groups of three are [0 2 4] and
    [1 3 zero].
    """
    filled = F.pad(x, (0, 0) * (x.dim() - 1) + (0, num_groups * size - len(x)))
    return filled.view(size, num_groups, *x.shape[1:]).transpose(0, 1).contiguous()


class _SharedNegatives(EarlyGradients):
    """The loss of all groups, in chunks, whose gradients are computed while their logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [m, d] states
        vectors: Tensor,  # [items, d] item vectors
        targets: Tensor,  # [m] items
        items: Tensor,  # [groups, n] negatives
        target_terms: Tensor,  # [m] shifts of targets' logits; with beta, weights of negatives
        shifts: Tensor | None,  # [groups, n] of the negatives' logits
        beta: float | None,  # weight of the target in a binary loss; None for a softmax
        rows: Tensor | None,  # this and the next two: results of ``index_rows``
        target_index: Tensor,
        item_index: Tensor,
    ) -> Tensor:
        """Return the scalar mean loss of targets against the negatives; keep its gradients."""
        m = len(states)
        num_groups, n = items.shape
        size = math.ceil(m / num_groups)
        target_vectors = F.embedding(targets, vectors)  # faster than vectors[targets]
        per_position = states, targets, (states * target_vectors).sum(1), target_terms
        grouped_states, target, logit, terms = (_split(x, num_groups, size) for x in per_position)

        # 1 / m, but 0 where a group is filled up
        mean_weight = _split(torch.full_like(states[:, 0], 1 / m), num_groups, size)
        grad_logit, grad_grouped = torch.empty_like(logit), torch.empty_like(grouped_states)
        grad_vectors: Tensor | None = None
        if ctx.needs_input_grad[1]:
            num_rows = len(vectors if rows is None else rows)
            grad_vectors = vectors.new_zeros(num_rows, vectors.size(1))

        total = torch.zeros((), dtype=torch.float64, device=states.device)
        for chunk in iterate_chunks(num_groups, size * n, states.device):
            columns = F.embedding(items[chunk], vectors)
            z = grouped_states[chunk] @ columns.mT  # [groups, size, n] logits of negatives
            if shifts is not None:
                z += shifts[chunk, None]
            z.masked_fill_(items[chunk, None] == target[chunk, :, None], -torch.inf)
            target_columns = logit[chunk], terms[chunk], mean_weight[chunk]
            if beta is None:
                losses, grad_logit[chunk] = _softmax_loss(z, *target_columns)
            else:
                losses, grad_logit[chunk] = _binary_loss(z, *target_columns, beta)
            total += losses.sum(dtype=torch.float64)
            torch.bmm(z, columns, out=grad_grouped[chunk])  # z now holds its gradient
            if grad_vectors is not None:
                negative_rows = item_index[chunk].flatten()
                products = z.mT @ grouped_states[chunk]
                grad_vectors.index_add_(0, negative_rows, products.flatten(0, 1))

        # back from groups to positions, and the part of the targets
        grad_states = grad_grouped.transpose(0, 1).flatten(0, 1)[:m]
        scale = grad_logit.t().flatten()[:m, None]
        if grad_vectors is not None:
            grad_vectors.index_add_(0, target_index, scale * states)
        grad_states = grad_states.addcmul(scale, target_vectors)
        EarlyGradients.keep(ctx, grad_states, grad_vectors, rows, vectors.shape)
        return total.to(states.dtype)


def _softmax_loss(z: Tensor, logit: Tensor, shift: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax losses times ``weight``, and gradients to targets' ``logit``, [c, g] each."""
    # z [c, g, n], the logits of negatives, is overwritten with its gradient
    logit = logit + shift
    highest = torch.maximum(z.amax(2), logit)
    z.sub_(highest[..., None]).exp_()
    negatives = z.sum(2)
    total = negatives + (logit - highest).exp()
    z.mul_((weight / total)[..., None])
    return (total.log() + highest - logit) * weight, -negatives / total * weight


def _binary_loss(
    z: Tensor, logit: Tensor, negative_weight: Tensor, weight: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Return binary losses times ``weight``, and gradients to targets' ``logit``, [c, g] each."""
    # z [c, g, n], the logits of negatives, is overwritten with its gradient
    weight = weight / (z.size(2) + 1)
    negatives = F.logsigmoid(-z).sum(2) * negative_weight
    loss = -(beta * F.logsigmoid(logit) + negatives) * weight
    z.sigmoid_().mul_((weight * negative_weight)[..., None])
    return loss, -beta * torch.sigmoid(-logit) * weight


# --- scalable cross-entropy ---


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
    """Return cross-entropy within buckets of positions and items that point the same way.

    Directions are sampled with torch's default generator.

    Args:
        states, vectors, targets: see :func:`~recbole_pos.layers.losses.full_cross_entropy`.
        n_buckets: number of random directions; None for 2 sqrt(m), rounded up.
        bucket_size_x: positions in a bucket, at most m; None for 2 sqrt(m), rounded up.
        bucket_size_y: items in a bucket, at most all.
        mix_x: whether directions are random mixtures of ``states``, rather than random normal.
    """
    recommended = math.ceil(2 * math.sqrt(states.size(0)))
    n = n_buckets or recommended
    with torch.autocast(states.device.type, enabled=False):
        x = states.detach().to(vectors.dtype)
        width = len(x) if mix_x else x.size(1)
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
        states, vectors, targets: see :func:`scalable_cross_entropy`.
        buckets: [n_buckets, d] directions; a bucket takes the ``size_x`` positions and the
            ``size_y`` items of the largest products with its direction.
    """
    with torch.autocast(states.device.type, enabled=False):
        states = states.to(vectors.dtype)
        positions = find_largest_products(buckets, states.detach(), size_x)
        items = find_largest_products(buckets, vectors.detach()[1:], size_y) + 1
        rows, (target_index, item_index) = index_rows(vectors, targets, items)
        return _BucketCrossEntropy.apply(
            states, vectors, targets, positions, items, rows, target_index, item_index
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
        """Return the products that are above the k-th best of their bucket so far.

        Args:
            products: [n, columns] of n buckets.
            bucket, column: [c, 1] and [c, g], to compare only ``products[bucket, column]``; None
                to compare all.

        Returns:
            Bucket, column and value of each of these candidates, [candidates] each.
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
        """Keep candidates for later, and merge them all if they outnumber the best.

        Their columns are counted from row ``start`` on.
        """
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

    states: Tensor
    vectors: Tensor
    targets: Tensor
    positions: Tensor
    items: Tensor

    def iterate_chunks(self) -> Iterator[slice]:
        """Yield slices of buckets, as many as the logits and vectors of a chunk allow."""
        n, x = self.positions.shape
        y, d = self.items.size(1), self.states.size(1)
        return iterate_chunks(n, max(x * y, x * d, y * d), self.states.device)

    def compute_logits(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return states [c, x, d], item vectors [c, y, d] and logits [c, x, y], -inf at targets."""
        positions, items = self.positions[chunk], self.items[chunk]
        chunk_states = F.embedding(positions, self.states)
        columns = F.embedding(items, self.vectors)
        logits = chunk_states @ columns.mT
        logits.masked_fill_(items[:, None] == self.targets[positions][..., None], -torch.inf)
        return chunk_states, columns, logits


class _BucketCrossEntropy(EarlyGradients):
    """Losses of all buckets, then gradients of the losses that are the largest of a position."""

    # The losses and the gradients both compute the logits: that is cheap beside choosing the items.

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [m, d] states
        vectors: Tensor,  # [items, d] item vectors
        targets: Tensor,  # [m] items
        positions: Tensor,  # [n, x] of each bucket
        items: Tensor,  # [n, y] of each bucket
        rows: Tensor | None,  # this and the next two: results of ``index_rows``
        target_index: Tensor,
        item_index: Tensor,
    ) -> Tensor:
        """Return the scalar mean of each position's largest loss in a bucket; keep gradients."""
        buckets = _Buckets(states, vectors, targets, positions, items)
        target_vectors = F.embedding(targets, vectors)  # faster than vectors[targets]
        target_logit = (states * target_vectors).sum(1)
        losses = target_logit[positions]
        for chunk in buckets.iterate_chunks():
            _, _, logits = buckets.compute_logits(chunk)
            losses[chunk] = logits.logsumexp(2) - losses[chunk]
        losses = losses.logaddexp(losses.new_zeros(()))  # adds the target to the denominator

        # the largest loss of each position, over its buckets
        largest = states.new_full((len(states),), -torch.inf)
        largest.scatter_reduce_(0, positions.flatten(), losses.flatten(), "amax")
        is_covered = largest != -torch.inf  # the position is in a bucket
        num_covered = is_covered.sum()

        # the gradients of these losses: of the targets, then of the other items
        needs_states, needs_vectors = ctx.needs_input_grad[:2]
        grad_states = grad_vectors = None
        if needs_states or needs_vectors:
            grad_logit = (torch.where(is_covered, torch.expm1(-largest), 0) / num_covered)[:, None]
            if needs_states:
                grad_states = grad_logit * target_vectors
            if needs_vectors:
                shape = len(vectors if rows is None else rows), vectors.size(1)
                grad_vectors = vectors.new_zeros(shape)
                grad_vectors.index_add_(0, target_index, grad_logit * states)
            share = _share_gradient(losses, largest, positions) / num_covered
            log_sum_exp = losses + target_logit[positions]
            _add_gradients(buckets, log_sum_exp, share, grad_states, grad_vectors, item_index)
        EarlyGradients.keep(ctx, grad_states, grad_vectors, rows, vectors.shape)
        return (largest[is_covered].sum(dtype=torch.float64) / num_covered).to(states.dtype)


def _share_gradient(losses: Tensor, largest: Tensor, positions: Tensor) -> Tensor:
    """Return how much of the gradient of a position's largest loss each loss in a bucket gets.

    It is 0 for losses [n, x] that are not the ``largest`` [m] of their position. Equal largest
    losses share the gradient, as in torch's amax.
    """
    is_largest = (losses == largest[positions]).to(losses.dtype)
    ties = torch.zeros_like(largest)
    ties.index_add_(0, positions.flatten(), is_largest.flatten())
    return is_largest / ties.clamp(min=1)[positions]


def _add_gradients(
    buckets: _Buckets,
    log_sum_exp: Tensor,
    share: Tensor,
    grad_states: Tensor | None,
    grad_vectors: Tensor | None,
    item_index: Tensor,
) -> None:
    """Add the gradients that come from the items of buckets to those of states and vectors.

    Args:
        buckets: positions and items of the buckets.
        log_sum_exp: [n, x] of the logits of each position in a bucket.
        share: [n, x] how much of the gradient of its position a loss gets.
        grad_states, grad_vectors: [m, d] and [rows, d], changed in place; None if not needed.
        item_index: [n, y] rows of the buckets' items in ``grad_vectors``.
    """
    for chunk in buckets.iterate_chunks():
        chunk_states, columns, logits = buckets.compute_logits(chunk)
        logits.sub_(log_sum_exp[chunk][..., None]).exp_().mul_(share[chunk][..., None])
        if grad_states is not None:
            position = buckets.positions[chunk].flatten()
            grad_states.index_add_(0, position, (logits @ columns).flatten(0, 1))
        if grad_vectors is not None:
            item_rows = item_index[chunk].flatten()
            grad_vectors.index_add_(0, item_rows, (logits.mT @ chunk_states).flatten(0, 1))
