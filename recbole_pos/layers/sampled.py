"""Losses against sampled items (negatives), which groups of positions share.

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
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbole_pos.layers.chunks import fixed_chunk_elements, iterate_chunks
from recbole_pos.layers.item_table import index_rows
from recbole_pos.layers.losses import MIN_ROWS, EarlyGradients

# Values of ``loss_type``: losses of the target against each negative, and all sampled losses.
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
        """Compute the probability q of each item to be sampled as a negative.

        A negative is a wrong item, with which the loss compares the item to predict, the target.
        ``negative_sampler: uniform`` gives every item the same q. ``popularity`` makes it
        proportional to the item's ``counts`` + 1. Under ``in_batch`` the negatives are the targets
        of the batch, so q is proportional to ``counts``, how often an item is a target.

        The attributes that are set are ``log_q`` [items], which corrects the logits of negatives,
        and ``cumulative`` [items], the running sum of the weights, from which items are sampled.
        """
        # the loss in_batch has no sampler of its own to choose
        if self.loss_type == "in_batch":
            self.negative_sampler = "in_batch"

        weights = self.counts.double()  # of each item, proportional to q
        if self.negative_sampler == "uniform":
            weights = torch.ones_like(weights)
        elif self.negative_sampler == "popularity":
            weights = weights + 1  # so that an item without interactions has a chance, too
        weights[0] = 0  # item 0 is padding
        total = weights.sum()

        # An item that is never a target has the weight 0 under in_batch. It is never a negative
        # either, so its q is not read; 1 instead of 0 keeps its logarithm finite.
        weights[1:].clamp_(min=1)
        self.log_q = (weights / total).log()
        self.cumulative = weights.cumsum(0)

    def move(self, device: torch.device) -> None:
        """Copy ``log_q`` and ``cumulative`` to a device, on which the loss works from now on."""
        self.log_q = self.log_q.to(device)
        self.cumulative = self.cumulative.to(device)

    def __call__(self, states: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
        """Sample negatives, and return the mean loss of the targets against them.

        With ``in_batch`` nothing is sampled: the negatives are the targets of the batch, each
        distinct item once, and it counts as often as it occurs.

        Args:
            states: [m, d] states that predict.
            vectors: [items, d] item vectors.
            targets: [m] int64 item of each state.

        Returns:
            Scalar.
        """
        if self.loss_type == "in_batch":
            distinct, repeats = targets.unique(return_counts=True)
            # every group of positions has the same negatives
            items = distinct.expand(_count_groups(targets, len(distinct)), -1)
            log_repeats = repeats.double().log()
            return self.compute(states, vectors, targets, items, log_repeats)
        return self.compute(states, vectors, targets, self.sample(targets))

    def sample(self, targets: Tensor) -> Tensor:
        """Sample negative items with replacement by ``negative_sampler``.

        Positions of a batch are split into groups, and all positions of a group share n negatives.

        Args:
            targets: [m] int64 item to predict at each position of the batch.

        Returns:
            [groups, n] int64 items: any with equal chance (``uniform``), targets of the batch
            (``in_batch``), or items by their number of training interactions (``popularity``).
        """
        device = targets.device
        shape = (_count_groups(targets, self.negatives), self.negatives)
        if self.negative_sampler == "uniform":
            return torch.randint(1, len(self.log_q), shape, device=device)
        if self.negative_sampler == "in_batch":
            return targets[torch.randint(len(targets), shape, device=device)]

        # a point on a line on which each item has a stretch as long as its weight, that ends at its
        # entry of ``cumulative``
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
        """Return the mean loss of targets against negatives that are given.

        With z_t the logit of the target and z_j those of n negatives, the loss of a position is

            binary     (-beta log sigma(z_t) - sum_j log sigma(-z_j) / (1 - q_t)) / (n + 1)
            softmax    -log( e^(z_t + a) / (e^(z_t + a) + sum_j e^(z_j + b_j)) )

        where BCE has beta = 1 and gBCE (Petrov and Macdonald, RecSys 2023) beta = 1 - t (1 - rate)
        with t = ``gbce_t`` and rate the share of other items that are sampled. q is the
        distribution that negatives are sampled from, a and b correct for it.

        Args:
            states: [m, d] states that predict.
            vectors: [items, d] item vectors.
            targets: [m] int64 item of each state.
            items: [groups, n] int64 negatives; position i is in group i modulo groups.
            log_repeats: [n] log of how often each item of a group counts; None if all count once.

        Returns:
            Scalar.
        """
        # ``target_terms`` [m] are 1 / (1 - q_t) if the loss is binary, else a of the softmax, whose
        # b are ``shifts`` [groups, n], None for zeros
        beta: float | None = None
        shifts: Tensor | None = None
        if self.loss_type in BINARY:
            # of ``log_q``, which has all items, padding and the target are no negatives
            rate = min(items.size(1) / max(len(self.log_q) - 2, 1), 1.0)
            beta = 1 - self.gbce_t * (1 - rate)
            # expm1(log q) is q - 1; ``TINY`` against a division by zero
            target_terms = -1 / torch.expm1(self.log_q[targets]).clamp(max=-TINY)
        else:
            target_terms, shifts = self._compute_shifts(targets, items, log_repeats)

        # the rows of the item table that the gradient has, and the places of the items among them
        distinct = items if log_repeats is None else items[0]  # with in_batch groups are equal
        rows, (target_index, item_index) = index_rows(vectors, targets, distinct)
        row_indices = rows, target_index, item_index.expand_as(items)

        # ``_SharedNegatives`` computes the loss, and its gradients at once,
        # in the type of the item vectors, even under automatic mixed precision
        with torch.autocast(states.device.type, enabled=False):
            states, target_terms = states.to(vectors.dtype), target_terms.to(vectors.dtype)
            shifts = None if shifts is None else shifts.to(vectors.dtype)
            return _SharedNegatives.apply(
                states, vectors, targets, items, target_terms, shifts, beta, *row_indices
            )

    def _compute_shifts(
        self, targets: Tensor, items: Tensor, log_repeats: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is added to the logits of a softmax because its negatives are sampled.

        Negatives are the items that a target is compared with. Those that are sampled often would
        count too much, which a term by their probability q corrects. ``logq_correction: standard``
        adds -log q to all logits (Yi et al., RecSys 2019). ``refined`` adds log n to the target's
        and -log q to those of negatives (Khrylchenko et al., RecSys 2025). ``none`` adds nothing.

        Args:
            targets: [m] int64 item of each position.
            items: [groups, n] int64 negatives.
            log_repeats: [n] log of how often each negative counts, which is added, too; None if
                all count once.

        Returns:
            [m] for the targets, and [groups, n] for the negatives, or None for nothing.
        """
        target_shift = torch.zeros_like(self.log_q[targets])
        if self.logq_correction == "none":
            repeats = None if log_repeats is None else log_repeats.expand(items.shape)
            return target_shift, repeats

        if self.logq_correction == "standard":
            target_shift = -self.log_q[targets]
        else:
            # with in_batch the negatives of a position are the targets of the m - 1 others
            n = items.size(1) if log_repeats is None else max(len(targets) - 1, 1)
            target_shift += math.log(n)

        shifts = -self.log_q[items]
        if log_repeats is not None:
            shifts = shifts + log_repeats
        return target_shift, shifts


def _count_groups(targets: Tensor, n: int) -> int:
    """Return the number of groups of n positions; a large n has smaller groups to save memory.

    Groups have at most so many positions that the logits of one, positions times n, have the size
    of a chunk (``fixed_chunk_elements``), but not fewer than ``MIN_ROWS`` for that.
    """
    group_size = min(n, max(MIN_ROWS, fixed_chunk_elements(targets.device) // n))
    return math.ceil(len(targets) / group_size)


def _split(x: Tensor, num_groups: int, size: int) -> Tensor:
    """Split the positions of a batch into groups of equal size, filled with zeros.

    Position i goes to group i modulo num_groups: 0 1 2 3 4 in two groups of three are [0 2 4] and
    [1 3 zero].

    Args:
        x: [m, ...] values of the positions.
        num_groups, size: number of groups and of positions in a group, m or more in all.

    Returns:
        [num_groups, size, ...].
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
        """Return the mean loss of targets against sampled negatives, and keep its gradients.

        Groups of positions share n negatives. The loss is a softmax over the target and the
        negatives, or binary (target against each negative) if ``beta`` is a number. Gradients are
        computed here, while the logits of a chunk of groups exist.

        Args:
            states, vectors, targets, items: see :meth:`SampledLoss.compute`.
            target_terms: [m] added to the targets' logits or, with beta, the weights of negatives.
            shifts: [groups, n] added to the negatives' logits, or None.
            beta: factor of the target's term in a binary loss; None for a softmax.
            rows, target_index, item_index: the rows of the item table that the gradient has, and
                the places of targets and negatives among them.

        Returns:
            Scalar.
        """
        # put the positions into groups: state, target, its logit and its term, [groups, size, ...]
        m = len(states)
        num_groups, n = items.shape
        size = math.ceil(m / num_groups)
        target_vectors = F.embedding(targets, vectors)  # faster than vectors[targets]
        per_position = states, targets, (states * target_vectors).sum(1), target_terms
        grouped_states, target, logit, terms = (_split(x, num_groups, size) for x in per_position)

        # a position counts 1 / m, and 0 where a group is filled up
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
            # a negative that is the target of a position is left out for it
            z.masked_fill_(items[chunk, None] == target[chunk, :, None], -torch.inf)

            # the losses; z is overwritten with their gradient to it
            target_columns = logit[chunk], terms[chunk], mean_weight[chunk]
            if beta is None:
                losses, grad_logit[chunk] = _softmax_loss(z, *target_columns)
            else:
                losses, grad_logit[chunk] = _binary_loss(z, *target_columns, beta)
            total += losses.sum(dtype=torch.float64)

            # from the logits of negatives to the states and to the vectors of negatives
            torch.bmm(z, columns, out=grad_grouped[chunk])
            if grad_vectors is not None:
                negative_rows = item_index[chunk].flatten()
                products = z.mT @ grouped_states[chunk]
                grad_vectors.index_add_(0, negative_rows, products.flatten(0, 1))

        # back from groups to positions, and the gradients from the logits of targets
        grad_states = grad_grouped.transpose(0, 1).flatten(0, 1)[:m]
        scale = grad_logit.t().flatten()[:m, None]
        if grad_vectors is not None:
            grad_vectors.index_add_(0, target_index, scale * states)
        grad_states = grad_states.addcmul(scale, target_vectors)
        EarlyGradients.keep(ctx, grad_states, grad_vectors, rows, vectors.shape)
        return total.to(states.dtype)


def _softmax_loss(z: Tensor, logit: Tensor, shift: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax loss of each position against its negatives, and its gradient.

    Args:
        z: [c, g, n] logits of the n negatives of g positions in c groups. It is overwritten with
            the gradient of the losses to it.
        logit: [c, g] logit of the target of each position.
        shift: [c, g] what is added to it.
        weight: [c, g] factor of the loss of each position, 1 / m for a mean over m.

    Returns:
        The losses -weight log softmax of the target, and their gradients to ``logit``, [c, g] each.
    """
    # exponentials below 1, so that none overflows
    logit = logit + shift
    highest = torch.maximum(z.amax(2), logit)
    z.sub_(highest[..., None]).exp_()
    negatives = z.sum(2)
    total = negatives + (logit - highest).exp()

    # the gradient to a negative is its probability; to the target it is its probability less 1
    z.mul_((weight / total)[..., None])
    return (total.log() + highest - logit) * weight, -negatives / total * weight


def _binary_loss(
    z: Tensor, logit: Tensor, negative_weight: Tensor, weight: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Return the binary loss of each position against its n negatives, and its gradient.

    It is (-beta log sigma(logit) - negative_weight sum_j log sigma(-z_j)) / (n + 1) times weight.

    Args:
        z: [c, g, n] logits of the negatives of g positions in c groups. It is overwritten with the
            gradient of the losses to it.
        logit: [c, g] logit of the target of each position.
        negative_weight: [c, g] factor of the terms of negatives.
        weight: [c, g] factor of the loss of each position, 1 / m for a mean over m.
        beta: factor of the term of the target: 1 for BCE, less for gBCE.

    Returns:
        The losses, and their gradients to ``logit``, [c, g] each.
    """
    weight = weight / (z.size(2) + 1)
    negatives = F.logsigmoid(-z).sum(2) * negative_weight
    loss = -(beta * F.logsigmoid(logit) + negatives) * weight
    z.sigmoid_().mul_((weight * negative_weight)[..., None])
    return loss, -beta * torch.sigmoid(-logit) * weight
