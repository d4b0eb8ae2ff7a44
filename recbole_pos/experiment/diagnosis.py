"""Warnings before training, and why a loss stopped being finite."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import torch
from torch import Tensor, nn

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.distributed import current_shard
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import PositionScheme
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.models import ADDED
from recbole_pos.position.schemes import SCHEMES

_MIN_CHANGE = 1e-5  # relative change of states; that of sums in another order is below


def log_notices(model: nn.Module, every_position: bool) -> None:
    """Log a model's ``notices`` about its data and options, in the first process only.

    Args:
        model: the model before its first epoch.
        every_position: whether it is trained at every position of its input; then custom models and
            schemes are tested for looking ahead.
    """
    if current_shard().rank:
        return
    notices = list(getattr(model, "notices", ()))
    if every_position and isinstance(model, PosRecommender):
        notices += _find_looking_ahead(model)
    for notice in notices:
        logging.getLogger(__name__).warning(notice)


def _find_looking_ahead(model: PosRecommender) -> list[str]:
    """Return a warning if a custom model or scheme computes states from later interactions."""
    schemes = [module for module in model.modules() if isinstance(module, PositionScheme)]
    classes = {type(module) for module in (model, *schemes)}
    names = sorted(c.__name__ for c in classes if not c.__module__.startswith("recbole_pos."))
    if not names or not model.causal or model.needs_events:
        return []
    try:
        change = looks_ahead(model)
    except Exception:  # training raises the same error with more context
        return []
    if change <= _MIN_CHANGE:
        return []
    return [
        f"{', '.join(names)}: looks ahead. When only later interactions change, the states of "
        f"earlier ones move by {change:.1g} of their size; trained at every position, the model "
        "sees what it is to predict. Make it causal (docs/add_a_scheme.md), or train it with "
        "augmentation: prefix; a model that must see all of a session sets causal = False"
    ]


def is_from_custom_code(error: BaseException) -> bool:
    """Return whether an exception passed through code of a custom model or scheme.

    Its author needs the traceback, so such an error is not turned into a message.
    """
    custom = (*ADDED.added.values(), *SCHEMES.added.values())
    modules = {registration.cls.__module__ for registration in custom}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") in modules for frame in frames)


def looks_ahead(model: Any) -> float:
    """Measure how much states of a PosRecommender change with later interactions.

    Two short random histories are encoded, and again with other items at other times in their newer
    halves. Neither weights nor random states are changed.

    Args:
        model: a :class:`~recbole_pos.model.base.PosRecommender`; read without dropout.

    Returns:
        The largest difference between states of the older halves, as a part of the largest state;
        0 for a causal model, up to rounding, and for one that samples even in evaluation.
    """
    longest = min(12, model.max_seq_length)
    device = model.item_embedding.weight.device
    lengths = torch.tensor([longest, max(longest - 3, 1)])
    generator = torch.Generator().manual_seed(0)
    items = torch.randint(1, model.n_items, (int(lengths.sum()),), generator=generator)
    hours = torch.rand(len(items), generator=generator, dtype=torch.float64).cumsum(0)
    ctx = SequenceContext.from_lengths(lengths, model.max_seq_length)
    is_later = ctx.index >= (lengths // 2).clamp(min=1)[ctx.row]

    def encode(items: Tensor, hours: Tensor) -> Tensor:
        """Return states [m, d] of m interactions, hours counted from some day in 2017."""
        items, times = items.to(device), (1.5e9 + 3600 * hours).to(device)
        ctx = SequenceContext.from_lengths(lengths.to(device), model.max_seq_length, times, items)
        return model.encode(items, ctx).cpu()

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            states, repeated = encode(items, hours), encode(items, hours)
            other_items = torch.where(is_later, items % (model.n_items - 1) + 1, items)
            changed = encode(other_items, hours + 30 * is_later)
    finally:
        model.train(was_training)
    if not torch.equal(states, repeated):
        return 0.0
    return float((states - changed)[~is_later].abs().max() / states.abs().max())


def explain_loss(batch: Any, model: nn.Module, learning_rate: float) -> str:
    """Return the likely cause of a loss that is not finite.

    Args:
        batch: the batch of the loss, a :class:`SequenceBatch` or RecBole's Interaction.
        model: the model.
        learning_rate: the run's, for the advice.
    """
    columns = vars(batch) if isinstance(batch, SequenceBatch) else batch.interaction
    infinite = [
        name
        for name, column in columns.items()
        if isinstance(column, Tensor) and not column.double().isfinite().all()
    ]
    if infinite:
        return f"the data: {', '.join(infinite)} holds values that are not finite"
    infinite = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if infinite:
        return (
            f"an earlier step made {len(infinite)} weights not finite (first: {infinite[0]}); "
            f"learning_rate {learning_rate} may be too high, or set clip_grad_norm: "
            "{max_norm: 1.0}"
        )
    return (
        "weights and data are finite, so the forward pass overflowed; lower learning_rate "
        f"(now {learning_rate}) or set precision: fp32"
    )
