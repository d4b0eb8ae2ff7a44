"""Warnings before training, and why a loss stopped being finite."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recbole_pos.distributed import current_shard
from recbole_pos.layers.hooks import PositionScheme
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.models import ADDED
from recbole_pos.position.schemes import SCHEMES

_MIN_CHANGE = 1e-5  # relative change of states; rounding changes them less


def log_notices(model: nn.Module, trains_every_position: bool) -> None:
    """Log warnings about a model before it is trained, in the first process only.

    These are the model's own ``notices`` about its data and options, and a warning if custom code
    looks ahead: if states depend on later interactions, which are what the model is to predict.

    Args:
        model: the model.
        trains_every_position: whether every position of an input has a target; only then does
            looking ahead matter.
    """
    if current_shard().rank != 0:
        return
    notices = list(getattr(model, "notices", ()))
    if trains_every_position and isinstance(model, PosRecommender):
        notices += _find_looking_ahead(model)
    for notice in notices:
        logging.getLogger(__name__).warning(notice)


def _find_looking_ahead(model: PosRecommender) -> list[str]:
    """Return a warning, in a list, if a custom model looks ahead; else an empty list.

    A model looks ahead if its states depend on later interactions. Custom are models and position
    schemes (parts that encode positions) whose class is not of this package. A model is not tested
    if it says itself that it is not causal, or reads more of a batch than items and times.

    Args:
        model: the model, before it is trained; nothing of it is changed.
    """
    # The custom classes in the model; ``looks_ahead`` then encodes histories, and again with other
    # later interactions, and returns how much the earlier states differ.
    schemes = [module for module in model.modules() if isinstance(module, PositionScheme)]
    classes = {type(module) for module in (model, *schemes)}
    custom = [cls for cls in classes if not cls.__module__.startswith("recbole_pos.")]
    if not custom or not model.causal or model.needs_events:
        return []
    try:
        change = looks_ahead(model)
    except Exception:  # training will raise the same error, with a better message
        return []
    if change <= _MIN_CHANGE:
        return []
    names = sorted(cls.__name__ for cls in custom)
    return [
        f"{', '.join(names)}: looks ahead. When only later interactions change, the states of "
        f"earlier ones move by {change:.1g} of their size; trained at every position, the model "
        "sees what it is to predict. Make it causal (docs/add_a_scheme.md), or train it with "
        "augmentation: prefix; a model that must see all of a session sets causal = False"
    ]


def locate_in_custom_code(error: BaseException) -> str | None:
    """Find where in custom code an exception was raised, or passed through.

    Custom code is the modules of registered models and position schemes, and other modules in the
    same folders.

    Args:
        error: the exception, with its traceback.

    Returns:
        The innermost such place, as "mine.py, line 12"; None if there is none.
    """
    # Where custom code stands: the modules of registered classes, and the folders of their files.
    registrations = (*ADDED.added.values(), *SCHEMES.added.values())
    modules = {registration.cls.__module__ for registration in registrations}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    folders = {os.path.dirname(file) for file in files if file}

    # The traceback goes from the outermost call to the innermost; the last place found wins.
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if frame.f_globals.get("__name__") in modules or os.path.dirname(file) in folders:
            location = f"{os.path.basename(file)}, line {line}"
    return location


def looks_ahead(model: Any) -> float:
    """Measure how much states of a PosRecommender change with later interactions.

    Two short random histories are encoded twice, the second time with other items at other times in
    their newer halves. Neither weights nor random states are changed.

    Args:
        model: the model, in training or evaluation mode, in which it is left.

    Returns:
        The largest change of a state in the older halves, divided by the largest state. It is 0, up
        to rounding, for a causal model, and 0 for a model that samples in evaluation mode.
    """
    # Two histories of 12 and 9 interactions. ``is_later`` marks those in the newer halves.
    max_length = min(12, model.max_seq_length)
    device = model.item_embedding.weight.device
    lengths = torch.tensor([max_length, max(max_length - 3, 1)])
    generator = torch.Generator().manual_seed(0)
    items = torch.randint(1, model.n_items, (int(lengths.sum()),), generator=generator)
    hours = torch.rand(len(items), generator=generator, dtype=torch.float64).cumsum(0)
    batch = SequenceBatch.from_lengths(items, lengths, model.max_seq_length)
    is_later = batch.index >= (lengths // 2).clamp(min=1)[batch.row]

    def encode(items: Tensor, hours: Tensor) -> Tensor:
        """Return states [m, d] of m interactions, hours counted from some day in 2017."""
        moved = replace(batch, items=items, times=1.5e9 + 3600 * hours).to(device)
        return model.encode(moved).cpu()

    # Encode the histories twice, then with other items and 30 hours later in the newer halves.
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            states = encode(items, hours)
            repeated_states = encode(items, hours)
            other_items = torch.where(is_later, items % (model.n_items - 1) + 1, items)
            changed_states = encode(other_items, hours + 30 * is_later)
    finally:
        model.train(was_training)

    # States that differ without any change are random, so that nothing can be said.
    if not torch.equal(states, repeated_states):
        return 0.0
    # All states may be 0, where weights start at 0; then the divisor is the smallest number.
    largest = states.abs().max().clamp(min=torch.finfo(states.dtype).tiny)
    return float((states - changed_states)[~is_later].abs().max() / largest)


def explain_loss(batch: Any, model: nn.Module, learning_rate: float) -> str:
    """Explain why a loss is not finite: because of the data, of the weights, or of this step.

    Args:
        batch: the batch of that loss, a :class:`SequenceBatch` or RecBole's Interaction.
        model: the model, with its weights before the step.
        learning_rate: the learning rate, for the message.

    Returns:
        A sentence with the likely cause, and what to do.
    """
    # First the data: all tensors of the batch, by name. Then the weights. Else it was this step.
    columns = vars(batch) if isinstance(batch, SequenceBatch) else batch.interaction
    bad_columns = [
        name
        for name, column in columns.items()
        if isinstance(column, Tensor) and not column.double().isfinite().all()
    ]
    if bad_columns:
        return f"the data: {', '.join(bad_columns)} holds values that are not finite"
    bad_weights = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if bad_weights:
        return (
            f"an earlier step made {len(bad_weights)} weights not finite (first: {bad_weights[0]});"
            f" learning_rate {learning_rate} may be too high, or set clip_grad_norm: "
            "{max_norm: 1.0}"
        )
    return (
        "weights and data are finite, so the forward pass overflowed; lower learning_rate "
        f"(now {learning_rate}); on a GPU precision: fp32 may suffice"
    )
