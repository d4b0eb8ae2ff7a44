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

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbole_pos.layers.large_products import fixed_chunk_elements, iterate_chunks
from recbole_pos.layers.losses import MIN_ROWS, EarlyGradients

BINARY = ("BCE", "gBCE")  # values of ``loss_type``: the target against each negative
SAMPLED_LOSSES = (*BINARY, "sampled_softmax", "in_batch")  # all that ``SampledLoss`` computes
TINY = 1e-9  # least 1 - q_t: a target that is all of q would divide by zero


@dataclass
class SampledLoss:
    """One of the losses above as a function of states, item vectors and targets.

    Items are sampled with torch's default generator, with replacement.

    Attributes:
        loss_type: one of ``SAMPLED_LOSSES``.
        counts: [items] training interactions of each item; with ``in_batch`` how often each is a
            target in an epoch.
        negatives: n, negatives of a position; not read by ``in_batch``.
        negative_sampler: ``uniform``; or ``popularity``, by counts plus one, so that every item has
            a chance; not read by ``in_batch``.
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

        A negative is a wrong item, with which the loss compares the item to predict, the target. q
        is proportional to a weight of the item:

            negative_sampler: uniform       1
            negative_sampler: popularity    counts + 1, the interactions of the item and one more
            loss in_batch                   counts, how often the item is a target: the negatives
                                            are the targets of the batch

        The attributes that are set are ``cumulative`` [items], the running sum of the weights, from
        which negatives are sampled, and ``log_q`` [items], which corrects their logits.
        """
        weights = self.counts.double()  # of each item, proportional to q
        if self.loss_type != "in_batch":
            is_uniform = self.negative_sampler == "uniform"
            # plus one, so that an item without interactions has a chance, too
            weights = torch.ones_like(weights) if is_uniform else weights + 1
        weights[0] = 0  # item 0 is padding
        total = weights.sum()
        self.cumulative = weights.cumsum(0)  # not read with in_batch, which samples nothing

        # With in_batch an item that is never a target has the weight 0. It is never a negative
        # either, so its q is not read; the weight 1 only keeps its logarithm finite.
        weights[1:].clamp_(min=1)
        self.log_q = (weights / total).log()

    def move(self, device: torch.device) -> None:
        """Copy ``log_q`` and ``cumulative`` to a device, on which the loss works from now on."""
        self.log_q = self.log_q.to(device)
        self.cumulative = self.cumulative.to(device)

    def __call__(self, states: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
        """Sample negatives, and return the mean loss of the targets against them.

        Positions are split into groups, and all positions of a group share n sampled negatives.

        With ``in_batch`` nothing is sampled: the targets of the batch are the negatives of all
        positions. Each distinct item is one negative, which counts as often as it occurs: the
        targets 5, 7, 5 are the negatives 5, counted twice, and 7.

        Args:
            states: [m, d] states that predict.
            vectors: [items, d] item vectors.
            targets: [m] int64 item of each state.

        Returns:
            Scalar.
        """
        if self.loss_type != "in_batch":
            return self.compute(states, vectors, targets, self.sample(targets))

        distinct, repeats = targets.unique(return_counts=True)  # [n] both
        # All groups have the same negatives here. Groups only keep the logits small that are
        # computed at a time, [positions of a group, n].
        num_groups = _count_groups(targets, len(distinct))
        items = distinct.expand(num_groups, -1)  # [groups, n]
        return self.compute(states, vectors, targets, items, log_repeats=repeats.double().log())

    def sample(self, targets: Tensor) -> Tensor:
        """Sample negative items with replacement by ``negative_sampler``.

        The m positions of a batch are split into groups, and all positions of a group share n
        negatives (``self.negatives``). A group has about n positions, so that about m items are
        sampled in all: 10 groups for 1,000 positions with 100 negatives.

        Args:
            targets: [m] int64 item to predict at each position of the batch.

        Returns:
            [groups, n] int64 items: any with equal chance (``uniform``), or by their number of
            training interactions (``popularity``).
        """
        device, num_items = targets.device, len(self.cumulative)  # padding, item 0, included
        shape = (_count_groups(targets, self.negatives), self.negatives)
        if self.negative_sampler == "uniform":
            return torch.randint(1, num_items, shape, device=device)

        # Sample by the inverse of the cumulative distribution: a random number below the sum of all
        # weights belongs to the first item whose ``cumulative`` is above it. With the weights 0, 3,
        # 1 of three items these are 0, 3, 4: numbers below 3 are item 1, others item 2.
        number = torch.rand(shape, dtype=torch.float64, device=device) * self.cumulative[-1]
        items = torch.searchsorted(self.cumulative, number, right=True)
        return items.clamp_(max=num_items - 1)  # rounding may make a number the sum itself

    def compute(
        self,
        states: Tensor,
        vectors: Tensor,
        targets: Tensor,
        items: Tensor,
        log_repeats: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of targets against negatives that are given.

        The logit z of an item is the product of a state and the item's vector: z_t is that of the
        target, z_j that of one of the n negatives. The loss of a position is

            BCE, gBCE    -(beta log sigma(z_t) + negative_weight sum_j log sigma(-z_j)) / (n + 1)
            others       -log( e^(z_t + target_shift) /
                             (e^(z_t + target_shift) + sum_j e^(z_j + negative_shift_j)) )

        Here only the numbers beside the logits are computed, which depend on the option
        ``loss_type``. ``_SharedNegatives`` computes logits, loss and gradients.

        Args:
            states: [m, d] state of each of m positions.
            vectors: [items, d] item vectors.
            targets: [m] int64 item of each state.
            items: [groups, n] int64 negatives of each group. The positions are dealt out to the
                groups in turn: with two groups 0, 2, 4, ... have the negatives of row 0.
            log_repeats: [n] log of how often each negative counts, for the loss ``in_batch``, where
                all groups have the same ones; None if all count once.

        Returns:
            Scalar.
        """
        # the two numbers of the loss that is computed; those of the other one stay None
        beta = negative_weight = target_shift = negative_shift = None
        if self.loss_type in BINARY:
            beta, negative_weight = self._weigh_binary(targets, items.size(1))
        else:
            target_shift, negative_shift = self._compute_shifts(targets, items, log_repeats)

        # all in the type of the item vectors, also under automatic mixed precision (autocast)
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(vectors.dtype)
            numbers = beta, negative_weight, target_shift, negative_shift
            return _SharedNegatives.apply(states, vectors, targets, items, *numbers)

    def _weigh_binary(self, targets: Tensor, n: int) -> tuple[float, Tensor]:
        """Return the two factors of a binary loss: beta and, for each target, 1 / (1 - q_t).

        BCE has beta = 1. gBCE (Petrov and Macdonald, RecSys 2023) has beta = 1 - gbce_t (1 - rate),
        with ``rate`` the share of the items that are sampled as negatives. q_t is the probability
        that target t is sampled as a negative, and ``log_q`` [items] is its logarithm. The loss
        leaves such a negative out, and 1 / (1 - q_t) makes up for it.

        Args:
            targets: [m] int64 item of each position.
            n: number of negatives that are sampled for a position.

        Returns:
            beta, and [m] factors of the negatives.
        """
        num_items = len(self.log_q)  # padding included
        num_candidates = max(num_items - 2, 1)  # all items but padding and the target
        rate = min(n / num_candidates, 1.0)
        beta = 1 - self.gbce_t * (1 - rate)
        one_minus_q = -torch.expm1(self.log_q[targets])  # precise for small q, too
        return beta, 1 / one_minus_q.clamp(min=TINY)

    def _compute_shifts(
        self, targets: Tensor, items: Tensor, log_repeats: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is added to the logits of a softmax because its negatives are sampled.

        Negatives are the items that a target is compared with. Those that are sampled often would
        count too much, which a term by their probability q corrects. ``log_q`` [items] holds the
        logarithms. The option ``logq_correction`` decides what is added:

                        to the target's logit    to the logit of negative j
            none        0                        r_j
            standard    -log q of the target     -log q_j + r_j      (Yi et al., RecSys 2019)
            refined     log N                    -log q_j + r_j      (Khrylchenko et al., 2025)

        r_j is ``log_repeats``, or 0 without it. N is the number of negatives of a position.

        Args:
            targets: [m] int64 item of each of m positions.
            items: [groups, n] int64 negatives of each group of positions.
            log_repeats: [n] log of how often each negative counts, or None if all count once. It is
                given for the loss ``in_batch``: there the negatives of a position are the targets
                of the m - 1 other positions, and equal targets are one negative.

        Returns:
            [m] for the targets, and [groups, n] for the negatives, or None where that is 0.
        """
        target_log_q = self.log_q[targets]
        if self.logq_correction == "none":
            repeats = None if log_repeats is None else log_repeats.expand(items.shape)
            return torch.zeros_like(target_log_q), repeats

        negative_shift = -self.log_q[items]
        num_negatives = items.size(1)
        if log_repeats is not None:  # the loss in_batch
            negative_shift = negative_shift + log_repeats
            num_negatives = max(len(targets) - 1, 1)

        if self.logq_correction == "standard":
            return -target_log_q, negative_shift
        return torch.full_like(target_log_q, math.log(num_negatives)), negative_shift


def _count_groups(targets: Tensor, num_negatives: int) -> int:
    """Return how many groups the positions of a batch are split into; a group shares negatives.

    A group has as many positions as negatives, so that about as many items are sampled as there are
    positions: 1,000 positions with 100 negatives each are split into 10 groups. With many negatives
    groups have fewer positions, as the logits of a group, positions times negatives, take memory.

    Args:
        targets: [m] an item for each position.
        num_negatives: number of negatives of a group.
    """
    most_logits = fixed_chunk_elements(targets.device)  # of a group; 2^20 on a CPU
    # but ``MIN_ROWS`` positions may be in a group in any case: fewer make matrix products slow
    most_positions = max(MIN_ROWS, most_logits // num_negatives)
    group_size = min(num_negatives, most_positions)
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
    # F.pad takes two widths for each dimension, the last dimension first; only the first is padded
    filled = F.pad(x, (0, 0) * (x.dim() - 1) + (0, num_groups * size - len(x)))
    return filled.view(size, num_groups, *x.shape[1:]).transpose(0, 1).contiguous()


class _SharedNegatives(EarlyGradients):
    """The loss of all groups, in chunks, whose gradients are computed while their logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        vectors: Tensor,
        targets: Tensor,
        items: Tensor,
        beta: float | None,
        negative_weight: Tensor | None,
        target_shift: Tensor | None,
        negative_shift: Tensor | None,
    ) -> Tensor:
        """Return the mean loss of targets against sampled negatives, and keep its gradients.

        Positions are split into groups, which share n negatives each. The loss is binary (the
        target against each negative) if ``beta`` is a number, else a softmax over the target and
        the negatives. Gradients are computed here, while the logits of a chunk of groups exist.

        Args:
            ctx: torch's context of the function.
            states: [m, d] state of each position.
            vectors: [items, d] item vectors, of the same type as ``states``.
            targets: [m] int64 item of each position.
            items: [groups, n] int64 negatives of each group.
            beta: weight of the target in a binary loss; None for a softmax.
            negative_weight: [m] weight of a position's negatives in a binary loss, else None.
            target_shift: [m] what is added to the targets' logits in a softmax, else None.
            negative_shift: [groups, n] what is added to those of negatives, or None.

        Returns:
            Scalar.
        """
        target_vectors = F.embedding(targets, vectors)  # faster than vectors[targets]
        target_logits = (states * target_vectors).sum(1)
        if target_shift is not None:
            target_logits = target_logits + target_shift.to(states.dtype)

        # put the positions into groups, [groups, size, ...]
        m = len(states)
        num_groups, n = items.shape
        size = math.ceil(m / num_groups)
        split = functools.partial(_split, num_groups=num_groups, size=size)
        states_of, target_of, logit_of = split(states), split(targets), split(target_logits)
        negative_weight_of = None if negative_weight is None else split(negative_weight.to(states))
        # a position counts 1 / m, and 0 where a group is filled up
        mean_weight = split(torch.full_like(states[:, 0], 1 / m))

        grad_logit, grad_states = torch.empty_like(logit_of), torch.empty_like(states_of)
        grad_vectors, (target_index, item_index) = EarlyGradients.allocate(
            ctx, vectors, targets, items
        )
        total = torch.zeros((), dtype=torch.float64, device=states.device)
        for chunk in iterate_chunks(num_groups, size * n, states.device):
            negatives = F.embedding(items[chunk], vectors)  # [groups, n, d]
            logits = states_of[chunk] @ negatives.mT  # [groups, size, n]
            if negative_shift is not None:
                logits += negative_shift[chunk, None].to(states.dtype)
            # a negative that is the target of a position is left out for it
            is_target = items[chunk, None] == target_of[chunk, :, None]
            logits.masked_fill_(is_target, -torch.inf)

            # the losses; the logits are overwritten with the gradient to them
            target_logit, weight = logit_of[chunk], mean_weight[chunk]
            if beta is None or negative_weight_of is None:
                losses, grad_logit[chunk] = _softmax_loss(logits, target_logit, weight)
            else:
                losses, grad_logit[chunk] = _binary_loss(
                    logits, target_logit, weight, beta, negative_weight_of[chunk]
                )
            total += losses.sum(dtype=torch.float64)
            grad_logits = logits

            # from the logits of negatives to the states and to the vectors of negatives
            torch.bmm(grad_logits, negatives, out=grad_states[chunk])
            if grad_vectors is not None:
                products = grad_logits.mT @ states_of[chunk]
                grad_vectors.index_add_(0, item_index[chunk].flatten(), products.flatten(0, 1))

        # back from groups to positions, [m, ...]: the inverse of ``_split``
        grad_states = grad_states.transpose(0, 1).flatten(0, 1)[:m]
        grad_target = grad_logit.t().flatten()[:m, None]
        # from the logits of targets to their vectors and to the states
        if grad_vectors is not None:
            grad_vectors.index_add_(0, target_index, grad_target * states)
        grad_states = grad_states.addcmul(grad_target, target_vectors)
        ctx.save_for_backward(grad_states, grad_vectors)
        return total.to(states.dtype)


def _softmax_loss(logits: Tensor, target_logit: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss -log softmax of each target against n negatives, and its gradient.

    With Z = e^target_logit + sum_j e^logits_j it is log Z - target_logit. Its gradient to logits_j
    is e^logits_j / Z, and that to target_logit is -(sum_j e^logits_j) / Z. All are multiplied by
    ``weight``.

    Args:
        logits: [c, g, n] those of the negatives of g positions in each of c groups; they are
            overwritten with the gradient to them.
        target_logit: [c, g] logit of the target of each position.
        weight: [c, g] factor of the loss of each position, 1 / m for a mean over m.

    Returns:
        The weighted losses, and their gradients to ``target_logit``, [c, g] each.
    """
    # all exponentials are divided by the highest, e^highest, so that none overflows
    highest = torch.maximum(logits.amax(2), target_logit)
    exponentials = logits.sub_(highest[..., None]).exp_()  # in the memory of the logits
    negative_sum = exponentials.sum(2)
    total = negative_sum + (target_logit - highest).exp()  # Z / e^highest
    loss = (total.log() + highest - target_logit) * weight

    # the gradients; that to the logits in their memory again, which the caller reads
    exponentials.mul_((weight / total)[..., None])
    grad_target_logit = -negative_sum / total * weight
    return loss, grad_target_logit


def _binary_loss(
    logits: Tensor, target_logit: Tensor, weight: Tensor, beta: float, negative_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the binary loss of each target against n negatives, and its gradient.

    With s the sigmoid and scale = weight / (n + 1) the loss is

        -(beta log s(target_logit) + negative_weight sum_j log s(-logits_j)) * scale

    The derivative of log s(x) is s(-x). So the gradient to logits_j is scale * negative_weight
    s(logits_j), and that to target_logit is -beta s(-target_logit) * scale.

    Args:
        logits: [c, g, n] those of the negatives of g positions in each of c groups; they are
            overwritten with the gradient to them.
        target_logit: [c, g] logit of the target of each position.
        weight: [c, g] factor of the loss of each position, 1 / m for a mean over m.
        beta: factor of the term of the target: 1 for BCE, less for gBCE.
        negative_weight: [c, g] factor of the terms of negatives.

    Returns:
        The weighted losses, and their gradients to ``target_logit``, [c, g] each.
    """
    n = logits.size(2)
    scale = weight / (n + 1)
    negative_terms = F.logsigmoid(-logits).sum(2) * negative_weight
    loss = -(beta * F.logsigmoid(target_logit) + negative_terms) * scale

    # the gradients; that to the logits in their memory, which the caller reads
    logits.sigmoid_().mul_((scale * negative_weight)[..., None])
    grad_target_logit = -beta * torch.sigmoid(-target_logit) * scale
    return loss, grad_target_logit
