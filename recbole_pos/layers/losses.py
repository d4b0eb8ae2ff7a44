"""Training losses over the item catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbole_pos.layers.chunks import chunk_elements
from recbole_pos.layers.row_gradients import row_gradient

MIN_ROWS = 128  # positions of a chunk, however large the catalogue: fewer make thin products

# On GPUs, from torch 2.8 on, products of a shorter type give float32 without a copy of the factors.
_MIXED = "dtype_out" in torch.ops.aten.mm.overloads()


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    betas: Tensor | None,
    prior: Tensor | None,
    factor_type: torch.dtype | None,
    needs_gradient: Sequence[bool] = (True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute a linear layer and cross-entropy with any targets, in chunks of positions.

    The gradient is made in the forward pass, while the probabilities of a chunk are at hand, so
    nothing of size [m, items] is kept or computed twice: three matrix products in all. Inputs are
    those of :func:`weighted_cross_entropy`; ``factor_type`` is the type that factors of products
    are rounded to, None for that of the weights, which everything else has.

    Returns:
        The scalar loss and its gradients to ``hidden`` and ``weight``, None where not needed.
    """
    m, items = hidden.size(0), weight.size(0)
    has_one_target = betas is None and prior is None
    needs_hidden, needs_weight = needs_gradient
    rows = max(MIN_ROWS, min(m, chunk_elements(hidden.device) // items))
    buffer = hidden.new_empty(min(rows, m), items)
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_weight = torch.zeros_like(weight) if needs_weight else None
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    rounded, table = (x if factor_type is None else x.to(factor_type) for x in (hidden, weight))
    for start in range(0, m, rows):
        part = slice(start, start + rows)
        chunk, target = rounded[part], targets[part]
        beta = hidden.new_ones(target.shape) if betas is None else betas[part]
        probability = buffer[: chunk.size(0)]
        logits = product(chunk, table.t(), out=probability)
        linear = (logits.gather(1, target) * beta).sum(1, keepdim=True)
        scale = beta.sum(1, keepdim=True)
        if prior is not None:
            linear += logits @ prior[:, None]
            scale += prior.sum()
        logits[:, 0] = -torch.inf  # item 0 is padding, not a candidate
        highest = logits.amax(1, keepdim=True)
        torch.softmax(logits, 1, out=probability)
        # log-sum-exp from the largest probability, which is at least 1 / items: no underflow
        log_sum_exp = highest - probability.amax(1, keepdim=True).log()
        total += (scale * log_sum_exp - linear).sum(dtype=torch.float64)
        if needs_hidden or needs_weight:
            if not has_one_target:
                probability *= scale
            if prior is not None:
                probability -= prior
            probability.scatter_add_(1, target, -beta)
        if factor_type is not None:
            probability = probability.to(factor_type)
        if grad_hidden is not None:
            product(probability, table, out=grad_hidden[part])
        if grad_weight is not None:  # rounded factors are divided at the end: float16 underflows
            scaled = chunk / m if factor_type is None else chunk
            add_product(grad_weight, probability.t(), scaled)
    if grad_hidden is not None:
        grad_hidden.div_(m)
    if grad_weight is not None and factor_type is not None:
        grad_weight.div_(m)
    return (total / m).to(hidden.dtype), grad_hidden, grad_weight


class EarlyGradients(torch.autograd.Function):
    """Base of losses whose gradients are made in the forward pass and kept for the backward one.

    The first two inputs are states and item vectors; ``forward`` calls :meth:`keep`.
    """

    @staticmethod
    def keep(
        ctx: Any,
        hidden: Tensor | None,
        weight: Tensor | None,
        rows: Tensor | None = None,
        size: torch.Size | None = None,
    ) -> None:
        """Save the gradients to the states and to the item vectors for ``backward``.

        With ``rows``, ascending ids, ``weight`` has these of the ``size`` of the item vectors only.
        """
        ctx.save_for_backward(hidden, weight)
        ctx.rows, ctx.size = rows, size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        if not is_one(grad):  # spares a copy of the catalogue
            grads = [None if saved is None else saved * grad for saved in grads]
        hidden, weight = grads
        if weight is not None and ctx.rows is not None:
            weight = row_gradient(ctx.rows, weight, ctx.size)
        return hidden, weight, *[None] * (len(ctx.needs_input_grad) - 2)


class _CatalogueLoss(EarlyGradients):
    """:func:`_loss_and_gradients` as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        betas: Tensor | None,
        prior: Tensor | None,
        factor_type: torch.dtype | None,
    ) -> Tensor:
        loss, *grads = _loss_and_gradients(
            hidden, weight, targets, betas, prior, factor_type, ctx.needs_input_grad[:2]
        )
        EarlyGradients.keep(ctx, grads[0], grads[1])
        return loss


# ``_loss_and_gradients`` as one operation of a compiled graph, which would unroll the loop over
# chunks, and compile it again for each number of chunks.
_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor targets, Tensor? betas, Tensor? prior, "
    "ScalarType? factor_type) -> (Tensor, Tensor, Tensor)"
)
_compiled_loss = torch.library.custom_op(
    "recbole_pos::catalogue_loss", _loss_and_gradients, mutates_args=(), schema=_SCHEMA
)


@_compiled_loss.register_fake
def _make_fake_outputs(hidden: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return hidden.new_empty(()), torch.empty_like(hidden), torch.empty_like(weight)


def _save_gradients(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *(saved * grad for saved in ctx.saved_tensors), None, None, None, None


_compiled_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


def is_one(grad: Tensor) -> bool:
    """Return whether a scalar is known to be 1: on the CPU only, where reading it is free."""
    is_readable = grad.device.type == "cpu" and not torch.compiler.is_compiling()
    return is_readable and grad.item() == 1


def full_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of targets against all items (FPARec, equation 11).

    Args:
        hidden: [m, d] one vector per position that has a target.
        weight: [items, d] item embeddings; row 0 is padding and is never a candidate.
        targets: [m] int64 item of each position, in 1..items-1.

    Returns:
        Scalar mean of -log softmax(hidden @ weight[1:].T)[target].
    """
    return weighted_cross_entropy(hidden, weight, targets[:, None], None, None)


def weighted_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, betas: Tensor | None, prior: Tensor | None
) -> Tensor:
    """Return the mean cross-entropy of positions with several targets, and with every item.

    Of a position, with z the products of a position with items 1.. and lse their log-sum-exp,

        (sum_k beta_k + sum_j prior_j) lse - sum_k beta_k z[x_k] - sum_j prior_j z_j

    Under autocast products have factors of its type; they are summed in that of the weights.

    Args:
        hidden, weight: see :func:`full_cross_entropy`.
        targets: [m, n] int64 items of each position.
        betas: [m, n] weight of each target, 0 for none; None for 1, and n is then 1.
        prior: [items] weight of each item at every position, 0 for item 0; None for none.
    """
    factor_type = autocast_type(hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.to(weight.dtype)
        betas, prior = (x if x is None else x.to(weight.dtype) for x in (betas, prior))
        if torch.compiler.is_compiling():
            return _compiled_loss(hidden, weight, targets, betas, prior, factor_type)[0]
        return _CatalogueLoss.apply(hidden, weight, targets, betas, prior, factor_type)


def autocast_type(device: torch.device) -> torch.dtype | None:
    """Return the type that autocast rounds factors of products to; None where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write a @ b, of the type of ``out`` or a shorter one, into ``out``, summed in its type."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda and _MIXED and out.dtype == torch.float32:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)  # TF32 holds bfloat16 exactly


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to ``total``, summed in its type; see :func:`product`."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    return total.add_(product(a, b, torch.empty_like(total)))


def dirichlet_prior(counts: Tensor) -> Tensor:
    """Return [items] the expectation of Dir(c + 1) for training counts c (equation 14)."""
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
    """Return the posterior loss, the mean over positions of AttrFormer's equation 17.

    Args:
        hidden, weight: see :func:`full_cross_entropy`.
        targets: [m, n] int64 the items after each position, next one first.
        betas: [m, n] weight of each target; 0 where there is no such item.
        prior: [items] p, 0 for item 0; see :func:`dirichlet_prior`.
        prior_weight: 1 in the paper; 0 for no prior.
    """
    if prior_weight == 0:
        return weighted_cross_entropy(hidden, weight, targets, betas, None)
    entropy = torch.xlogy(prior, prior).sum(dtype=torch.float64)
    loss = weighted_cross_entropy(hidden, weight, targets, betas, prior_weight * prior)
    return loss + (prior_weight * entropy).to(loss.dtype)
