"""Training losses over the item catalogue.

Shapes: m positions with n targets each, states [m, d], item vectors [items, d]; item 0 is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbole_pos.errors import UsageError
from recbole_pos.layers.item_table import index_rows, make_row_gradient
from recbole_pos.layers.large_products import chunk_elements
from recbole_pos.values import Options, shown

MIN_ROWS = 128  # positions of a chunk, however large the catalogue: fewer make slow products

# On GPUs torch 2.8 and later multiplies shorter types to float32 without a copy of the factors.
_CAN_SUM_LONGER = "dtype_out" in torch.ops.aten.mm.overloads()


@torch.library.custom_op(
    "recbole_pos::catalogue_loss",
    mutates_args=(),
    schema="(Tensor states, Tensor vectors, Tensor targets, Tensor? betas, Tensor? prior, "
    "ScalarType? factor_type) -> (Tensor, Tensor, Tensor)",
)
def _compute_loss_and_gradients(
    states: Tensor,
    vectors: Tensor,
    targets: Tensor,
    betas: Tensor | None,
    prior: Tensor | None,
    factor_type: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute cross-entropy with several targets a position, and its gradients, in one pass.

    With z = states @ vectors.T and lse their log-sum-exp without item 0, the loss of a position is

        (sum_k beta_k + sum_j prior_j) lse - sum_k beta_k z[x_k] - sum_j prior_j z_j

    and its gradient to z_j is

        (sum_k beta_k + sum_i prior_i) softmax(z)_j - sum_k beta_k [x_k = j] - prior_j

    Gradients are computed while the probabilities of a chunk of positions exist: three matrix
    products in all, and nothing of size [m, items] is kept or computed twice. For torch it is one
    operation, so that a compiled graph does not hold the chunks one by one.

    Args:
        states: [m, d] state of each position.
        vectors: [items, d] item vectors; item 0 is padding.
        targets: [m, n] int64 items x_k of each position.
        betas: [m, n] weight of each target; None if all are 1.
        prior: [items] weight of each item as a further target of every position; None for none.
        factor_type: type to which the factors of matrix products are rounded (under automatic mixed
            precision); None for their own.

    Returns:
        The scalar mean loss of the m positions, its gradient to states [m, d] and that to item
        vectors [items, d].
    """
    # positions of a chunk: as many as its logits may be on the device, and ``MIN_ROWS`` at least
    m, num_items = states.size(0), vectors.size(0)
    chunk_size = max(MIN_ROWS, min(m, chunk_elements(states.device) // num_items))
    buffer = states.new_empty(min(chunk_size, m), num_items)  # logits of a chunk
    grad_states, grad_vectors = torch.empty_like(states), torch.zeros_like(vectors)

    total = torch.zeros((), dtype=torch.float64, device=states.device)
    rounded_states = states if factor_type is None else states.to(factor_type)
    rounded_vectors = vectors if factor_type is None else vectors.to(factor_type)

    for start in range(0, m, chunk_size):
        # the loss of each position of the chunk; its logits are overwritten by probabilities
        rows = slice(start, start + chunk_size)
        chunk_states, target = rounded_states[rows], targets[rows]
        beta = states.new_ones(target.shape) if betas is None else betas[rows]
        logits = write_product(chunk_states, rounded_vectors.t(), out=buffer[: len(chunk_states)])
        losses, weight_sum = _compute_losses(logits, target, beta, prior)
        total += losses.sum(dtype=torch.float64)

        # gradient to the logits: probabilities times all weights, less each item's own weight
        grad_logits = logits
        if betas is not None or prior is not None:  # otherwise all weights together are 1
            grad_logits *= weight_sum
        if prior is not None:
            grad_logits -= prior
        grad_logits.scatter_add_(1, target, -beta)

        # from there to states and item vectors
        if factor_type is None:
            write_product(grad_logits, vectors, out=grad_states[rows])
            grad_vectors.addmm_(grad_logits.t(), chunk_states / m)
        else:
            grad_logits = grad_logits.to(factor_type)
            write_product(grad_logits, rounded_vectors, out=grad_states[rows])
            # rounded factors are not divided by m before the end: float16 would underflow
            product = torch.empty_like(grad_vectors)
            grad_vectors += write_product(grad_logits.t(), chunk_states, out=product)

    # the loss is a mean over m positions
    grad_states.div_(m)
    if factor_type is not None:
        grad_vectors.div_(m)
    return (total / m).to(states.dtype), grad_states, grad_vectors


@_compute_loss_and_gradients.register_fake
def _make_fake_outputs(states: Tensor, vectors: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the outputs' shapes and types, which tracing needs."""
    return states.new_empty(()), torch.empty_like(states), torch.empty_like(vectors)


def _scale(gradients: Sequence[Tensor | None], grad: Tensor) -> Sequence[Tensor | None]:
    """Return gradients of a loss times ``grad``, the scalar gradient to the loss itself.

    Scaling copies them. On a CPU it is cheap to read ``grad``, which is mostly 1, and that needs
    no copy.
    """
    is_readable = grad.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_readable and grad.item() == 1:
        return gradients
    return [None if gradient is None else gradient * grad for gradient in gradients]


def _save_gradients(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the gradients that a loss has computed together with its value, for the backward pass.

    Torch calls it after the operation.

    Args:
        ctx: torch's context of the operation, which keeps tensors for the backward pass.
        inputs: arguments of the operation, not read here.
        output: the loss, and its gradients to states and to item vectors.
    """
    _, grad_states, grad_vectors = output
    ctx.save_for_backward(grad_states, grad_vectors)
    # The operation returns both gradients, but nothing is computed of them. So the backward pass
    # shall get None for them, and not two matrices of zeros.
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    """Return the saved gradients times ``grad``, and None for each other input."""
    return (*_scale(ctx.saved_tensors, grad), None, None, None, None)


_compute_loss_and_gradients.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _compute_losses(
    logits: Tensor, target: Tensor, beta: Tensor, prior: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each position, and overwrite its logits by probabilities.

    Each item j has the cross-entropy lse - z_j, with z the logits and lse the logarithm of the sum
    of all e^z_j. Every target and every item of the prior counts with its weight, which is in all

        (sum_k beta_k + sum_j prior_j) lse - sum_k beta_k z[x_k] - sum_j prior_j z_j

    Args:
        logits: [rows, items] products z of states and item vectors. They are overwritten by their
            softmax, which the gradient needs. Item 0, padding, is left out of lse and gets
            probability 0.
        target: [rows, n] targets x_k of each position.
        beta: [rows, n] weight beta_k of each target.
        prior: [items] weight prior_j of each item at every position, 0 for item 0; or None.

    Returns:
        The loss, and the sum of all weights, of each position, [rows, 1] both.
    """
    # sum_k beta_k z[x_k] + sum_j prior_j z_j, which is subtracted, and the sum of all weights
    weighted_logits = (logits.gather(1, target) * beta).sum(1, keepdim=True)
    weight_sum = beta.sum(1, keepdim=True)
    if prior is not None:
        weighted_logits += logits @ prior[:, None]
        weight_sum += prior.sum()

    logits[:, 0] = -torch.inf  # item 0 is padding, not a candidate
    highest_logit = logits.amax(1, keepdim=True)
    probabilities = torch.softmax(logits, 1, out=logits)

    # Any logit z_j has the probability p_j = exp(z_j - lse), hence lse = z_j - log p_j. Here j is
    # the item with the highest of both, where rounding matters least.
    highest_probability = probabilities.amax(1, keepdim=True)
    log_sum_exp = highest_logit - highest_probability.log()
    return weight_sum * log_sum_exp - weighted_logits, weight_sum


class EarlyGradients(torch.autograd.Function):
    """Base of losses whose ``forward`` computes the gradients to states and item vectors, too.

    The first two arguments of ``forward`` are states [m, d] and item vectors [items, d]. It calls
    ``allocate``, and saves the two gradients with ``ctx.save_for_backward``. That to item vectors
    is None if it is not needed.
    """

    @staticmethod
    def allocate(ctx: Any, vectors: Tensor, *ids: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Allocate the gradient to item vectors: zeros, to which ``forward`` adds.

        It has a row for each item, or only for the items ``ids``, if :func:`index_rows` finds that
        training takes such a gradient. For the ids [7, 2] and [2, 9] these are the items 2, 7, 9;
        the rows to add to are [1, 0] and [0, 2].

        For ``backward`` the context keeps ``rows``, the items 2, 7, 9 or None for all, and
        ``size``, the shape of the table.

        Args:
            ctx: torch's context of the function.
            vectors: [items, d] item vectors.
            ids: int64 items whose vectors ``forward`` reads, tensors of any shape.

        Returns:
            [rows, d] zeros, or None if item vectors need no gradient; and for each of ``ids`` the
            rows of its items, a tensor of the same shape.
        """
        ctx.rows, indices = index_rows(vectors, *ids)
        ctx.size = vectors.shape
        if not ctx.needs_input_grad[1]:  # of argument 1 of ``forward``, the item vectors
            return None, indices
        num_rows = len(vectors if ctx.rows is None else ctx.rows)
        return vectors.new_zeros(num_rows, vectors.size(1)), indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients to states and item vectors, times the gradient of the loss.

        Args:
            ctx: torch's context with what ``forward`` has saved.
            grad: scalar gradient to the loss.

        Returns:
            To states [m, d], and to item vectors [items, d], sparse if only some rows have a
            gradient; None for each further argument of ``forward``.
        """
        grad_states, grad_vectors = _scale(ctx.saved_tensors, grad)
        if grad_vectors is not None and ctx.rows is not None:  # as a sparse tensor of all items
            grad_vectors = make_row_gradient(ctx.rows, grad_vectors, ctx.size)
        other_grads = [None] * (len(ctx.needs_input_grad) - 2)
        return grad_states, grad_vectors, *other_grads


def full_cross_entropy(states: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -log softmax(states @ vectors[1:].T)[target] (FPARec, equation 11).

    Args:
        states: [m, d] one vector per position that has a target.
        vectors: [items, d] item embeddings; row 0 is padding and is never a candidate.
        targets: [m] int64 item of each position, in 1..items-1.
    """
    # one target a position, with the weight 1
    return weighted_cross_entropy(states, vectors, targets[:, None], betas=None, prior=None)


def weighted_cross_entropy(
    states: Tensor, vectors: Tensor, targets: Tensor, betas: Tensor | None, prior: Tensor | None
) -> Tensor:
    """Return the mean cross-entropy of positions that have several targets, each with a weight.

    The loss of a position is

        sum_k beta_k CE(x_k) + sum_j prior_j CE(j)        with CE(j) = -log softmax(z)_j

    The first sum is over the targets x_k of the position. The second one is over all items j, and
    pulls the probabilities of every position towards the prior, such as the items' popularity. z
    are the products of the position's state and all item vectors but that of padding.

    Args:
        states: [m, d] state of each position.
        vectors: [items, d] item vectors; row 0 is padding.
        targets: [m, n] int64 items of each position.
        betas: [m, n] weight of each target, 0 for no target; None if n is 1 and all weights are 1.
        prior: [items] weight of each item in the second sum, 0 for item 0; None for no second sum.

    Returns:
        Scalar.
    """
    device_type = states.device.type
    is_mixed = torch.is_autocast_enabled(device_type)
    factor_type = torch.get_autocast_dtype(device_type) if is_mixed else None

    # Under automatic mixed precision the factors of matrix products are rounded to ``factor_type``,
    # such as bfloat16. Torch's autocast would round the products as well, so it is switched off.
    with torch.autocast(device_type, enabled=False):
        states = states.to(vectors.dtype)
        betas, prior = (x if x is None else x.to(vectors.dtype) for x in (betas, prior))
        # It also returns the gradients. ``_save_gradients`` has kept them for the backward pass.
        loss, *_ = _compute_loss_and_gradients(states, vectors, targets, betas, prior, factor_type)
    return loss


def write_product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Write the product of two matrices into a third, and return it.

    Under automatic mixed precision the factors have a shorter type than the result, such as
    bfloat16 and float32.

    Args:
        left, right: [a, b] and [b, c], both of the type of ``out`` or of a shorter one.
        out: [a, c], in whose type products are summed.
    """
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    # on a GPU some versions of torch multiply shorter types into float32 (``_CAN_SUM_LONGER``)
    if left.is_cuda and _CAN_SUM_LONGER and out.dtype == torch.float32:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    # otherwise both factors are copied in the type of the result
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def dirichlet_prior(counts: Tensor) -> Tensor:
    """Return the prior probability of each item, p_i = (c_i + 1) / sum_j (c_j + 1), p_0 = 0.

    That is the expectation of a Dirichlet distribution with the parameters c + 1 (AttrFormer, Liu
    et al., KDD 2025, equation 14).

    Args:
        counts: [items] c, how often each item occurs in training; item 0 is padding.
    """
    alpha = counts.double() + 1
    alpha[0] = 0  # padding is not an item
    return alpha / alpha.sum()


def posterior_loss(
    states: Tensor,
    vectors: Tensor,
    targets: Tensor,
    betas: Tensor,
    prior: Tensor,
    prior_weight: float,
) -> Tensor:
    """Return the posterior loss of AttrFormer (Liu et al., KDD 2025, equation 17), a scalar mean.

    It is the cross-entropy with the next items, weighted by betas, plus ``prior_weight`` KL(p || q)
    with the prior p over items and the probabilities q that a state predicts.

    Args:
        states: [m, d] state of each position.
        vectors: [items, d] item vectors; item 0 is padding.
        targets: [m, n] int64 items after each position, the next one first.
        betas: [m, n] weight of each target; 0 where there is no such item.
        prior: [items] p, 0 for item 0; see :func:`dirichlet_prior`.
        prior_weight: factor of the prior: 1 in the paper, 0 for no prior.

    Returns:
        Scalar.
    """
    if prior_weight == 0:
        return weighted_cross_entropy(states, vectors, targets, betas, prior=None)
    # KL divergence is sum p log p, which is constant, plus the cross-entropy with p
    entropy = torch.xlogy(prior, prior).sum(dtype=torch.float64)
    loss = weighted_cross_entropy(states, vectors, targets, betas, prior_weight * prior)
    return loss + (prior_weight * entropy).to(loss.dtype)


def read_posterior(config: Options) -> tuple[list[float], float]:
    """Read and check the options of the posterior loss (AttrFormer, Liu et al., KDD 2025).

    The posterior loss is a cross-entropy whose targets are the next items after a position, each
    with a weight beta, and all items by a prior (equation 17).

    Args:
        config: options. ``future_weights`` are the betas, the one of the next item first, such as
            [1.0, 0.25]; ``prior_weight`` is the factor of the prior. With [1.0] and 0 the next item
            is the only target: then any ``loss_type`` will do, otherwise it must be CE.

    Returns:
        The betas, and the factor of the prior. If the next item is the only target, the betas are
        an empty list: the model computes its usual loss.

    Raises:
        UsageError: if the options are no such weights, or ``loss_type`` does not support them.
    """
    betas, prior_weight = config["future_weights"], config["prior_weight"]
    is_descending = list(betas) == sorted(betas, reverse=True)
    if not betas or betas[0] == 0 or not is_descending:
        raise UsageError(
            "future_weights: expected weights of the next items, the first above 0 and none above "
            f"the one before (section 3.2.3), such as [1.0, 0.25]; found {shown(betas)}"
        )
    is_only_target = betas[0] == 1 and not any(betas[1:])  # the next item, with the weight 1
    if is_only_target and prior_weight == 0:
        return [], 0.0

    if config["loss_type"] != "CE":
        raise UsageError(
            f"loss_type: {config['loss_type']} cannot have posterior targets; set "
            "prior_weight: 0.0 and future_weights: [1.0], or loss_type: CE"
        )
    return [float(beta) for beta in betas], float(prior_weight)
