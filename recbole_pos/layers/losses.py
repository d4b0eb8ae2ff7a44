"""Training losses over the item catalogue."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from recbole_pos.layers.chunks import chunk_elements

MIN_ROWS = 128  # positions of a chunk, however large the catalogue: fewer make thin products


class _FullCrossEntropy(torch.autograd.Function):
    """Linear layer and cross-entropy in one pass over chunks of positions.

    The gradient is made in the forward pass, while the probabilities of a chunk are at hand, so
    nothing of size [m, items] is kept or computed twice: three matrix products in all.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        m, items = hidden.size(0), weight.size(0)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        rows = max(MIN_ROWS, min(m, chunk_elements(hidden.device) // items))
        buffer = hidden.new_empty(min(rows, m), items)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight) if want_weight else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, m, rows):
            chunk = hidden[start : start + rows]
            target = targets[start : start + rows, None]
            probability = buffer[: chunk.size(0)]
            logits = torch.mm(chunk, weight.t(), out=probability)
            logits[:, 0] = -torch.inf  # item 0 is padding, not a candidate
            target_logit = logits.gather(1, target)
            highest = logits.amax(1, keepdim=True)
            torch.softmax(logits, 1, out=probability)
            # log-sum-exp from the largest probability, which is at least 1 / items: no underflow
            log_sum_exp = highest - probability.amax(1, keepdim=True).log()
            total += (log_sum_exp - target_logit).sum(dtype=torch.float64)
            if want_hidden or want_weight:
                probability.scatter_add_(1, target, torch.full_like(target_logit, -1.0))
            if want_hidden:
                torch.mm(probability, weight, out=grad_hidden[start : start + rows])
            if want_weight:
                grad_weight.addmm_(probability.t(), chunk / m)
        if want_hidden:
            grad_hidden.div_(m)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return (total / m).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        if not (grad.device.type == "cpu" and grad.item() == 1):  # spares a copy of the catalogue
            grads = [None if saved is None else saved * grad for saved in grads]
        return *grads, None


def full_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the target against all items (FPARec, equation 11).

    Args:
        hidden: [m, d] one vector per position that has a target.
        weight: [items, d] item embeddings; row 0 is padding and is never a candidate.
        targets: [m] int64 item of each position, in 1..items-1.

    Returns:
        Scalar mean of -log softmax(hidden @ weight[1:].T)[target].
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _FullCrossEntropy.apply(hidden.to(weight.dtype), weight, targets)
