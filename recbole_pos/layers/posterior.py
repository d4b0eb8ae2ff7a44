"""Posterior targets: popularity as a prior, and several future items of decreasing weight.

AttrFormer, section 3.2.3. With q the softmax over items 1.. of a position's products, p the prior
and x_1, x_2, ... the items after the position,

    L = w KL(p || q) + sum_k beta_k CE(x_k, q)                                      equation 17

is linear in the log-sum-exp of the position and in its products:

    L = (w + sum_k beta_k) lse - w p.z - sum_k beta_k z[x_k] + w sum_j p_j log p_j,   z = E h

so :func:`~recbole_pos.layers.losses.weighted_cross_entropy` carries it at the cost of one target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recbole_pos.layers.losses import weighted_cross_entropy


def dirichlet_prior(counts: Tensor) -> Tensor:
    """[items] expectation of Dir(c + 1) over items 1.. for training counts c (equation 14)."""
    alpha = counts.double() + 1
    alpha[0] = 0  # padding is no item
    return alpha / alpha.sum()


def posterior_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    betas: Tensor,
    prior: Tensor,
    prior_weight: float,
) -> Tensor:
    """Mean over positions of equation 17.

    Args:
        hidden: [m, d] one vector per position.
        weight: [items, d] item embeddings; row 0 is padding and is never a candidate.
        targets: [m, n] int64 the items after each position, next one first.
        betas: [m, n] weight of each; 0 where there is no such item.
        prior: [items] p, 0 for item 0; see :func:`dirichlet_prior`.
        prior_weight: w, 1 in the paper and 0 for none.

    Returns:
        Scalar; with w = 0 and one target of weight 1, plain cross-entropy.
    """
    if prior_weight == 0:
        return weighted_cross_entropy(hidden, weight, targets, betas, None)
    entropy = torch.xlogy(prior, prior).sum(dtype=torch.float64)
    loss = weighted_cross_entropy(hidden, weight, targets, betas, prior_weight * prior)
    return loss + (prior_weight * entropy).to(loss.dtype)
