"""Posterior targets: popularity as a prior, and several future items of decreasing weight.

AttrFormer, section 3.2.3. With q the softmax over items 1.. of a position's products, p the prior
and x_1, x_2, ... the items after the position,

    L = w KL(p || q) + sum_k beta_k CE(x_k, q)                                      equation 17

is linear in the log-sum-exp of the position and in its products:

    L = (w + sum_k beta_k) lse - w p.z - sum_k beta_k z[x_k] + w sum_j p_j log p_j,   z = E h

so the chunks of ``losses.py`` carry it at the cost of plain cross-entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from recbole_pos.layers.chunks import chunk_elements
from recbole_pos.layers.losses import MIN_ROWS


def dirichlet_prior(counts: Tensor) -> Tensor:
    """[items] expectation of Dir(c + 1) over items 1.. for training counts c (equation 14)."""
    alpha = counts.double() + 1
    alpha[0] = 0  # padding is no item
    return alpha / alpha.sum()


class _PosteriorLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        betas: Tensor,
        prior: Tensor,
        prior_weight: float,
    ) -> Tensor:
        m, items = hidden.size(0), weight.size(0)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        rows = max(MIN_ROWS, min(m, chunk_elements(hidden.device) // items))
        buffer = hidden.new_empty(min(rows, m), items)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight) if want_weight else None
        pull = prior_weight * prior
        scale = betas.sum(1, keepdim=True) + prior_weight
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, m, rows):
            chunk, part = hidden[start : start + rows], slice(start, start + rows)
            probability = buffer[: chunk.size(0)]
            logits = torch.mm(chunk, weight.t(), out=probability)
            linear = logits @ pull + (logits.gather(1, targets[part]) * betas[part]).sum(1)
            logits[:, 0] = -torch.inf  # item 0 is padding, not a candidate
            highest = logits.amax(1, keepdim=True)
            torch.softmax(logits, 1, out=probability)
            log_sum_exp = highest - probability.amax(1, keepdim=True).log()
            total += ((log_sum_exp * scale[part]).squeeze(1) - linear).sum(dtype=torch.float64)
            if want_hidden or want_weight:
                probability *= scale[part]
                probability -= pull
                probability.scatter_add_(1, targets[part], -betas[part])
            if want_hidden:
                torch.mm(probability, weight, out=grad_hidden[part])
            if want_weight:
                grad_weight.addmm_(probability.t(), chunk / m)
        if want_hidden:
            grad_hidden.div_(m)
        ctx.save_for_backward(grad_hidden, grad_weight)
        entropy = torch.xlogy(prior, prior).sum(dtype=torch.float64)
        return (total / m + prior_weight * entropy).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if saved is None else saved * grad for saved in ctx.saved_tensors]
        return *grads, None, None, None, None


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
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, betas, prior = (x.to(weight.dtype) for x in (hidden, betas, prior))
        return _PosteriorLoss.apply(hidden, weight, targets, betas, prior, prior_weight)
