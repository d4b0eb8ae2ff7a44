"""Warnings before training, and why a loss stopped being finite."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.protocols import Dataset
from recbole_pos.distributed import current_shard
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.hooks import PositionScheme
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.models import ADDED
from recbole_pos.position.schemes import SCHEMES

_CLEARLY = 1e-5  # relative change of states; that of sums in another order is below
_SHORT = 10  # events a user; the datasets on which the preset was chosen have 9


def tell_notices(model: nn.Module, every_position: bool) -> None:
    """Log a model's ``notices`` about its data and options, in the first process only.

    Args:
        model: the model before its first epoch.
        every_position: whether it is trained at every position of its input; then custom models and
            schemes are tested for looking ahead.
    """
    if current_shard().rank == 0:
        ahead = _look_ahead(model) if every_position else ()
        for notice in (*getattr(model, "notices", ()), *ahead):
            logging.getLogger(__name__).warning(notice)


def suggest_settings(config: Any, dataset: Dataset) -> str | None:
    """Return advice on settings for a dataset of short histories; None where there is none.

    Args:
        config: configuration of the run.
        dataset: the dataset before the split.
    """
    if config["embedding_scale"] is not False:  # None where the model does not read it
        return None
    mean = len(dataset.log) / max(int(np.count_nonzero(np.diff(dataset.log.offsets))), 1)
    if mean >= _SHORT:
        return None
    return (
        f"short histories, {mean:.1f} events a user: PosSASRec was better on logs of 9 with "
        "`--config_files sasrec/sparse.yaml` than by default (docs/choosing.md)"
    )


def _look_ahead(model: Any) -> list[str]:
    """Return a warning in a list, if a custom model or scheme makes states from later events."""
    schemes = [module for module in model.modules() if isinstance(module, PositionScheme)]
    classes = {type(module) for module in (model, *schemes)}
    names = sorted(c.__name__ for c in classes if not c.__module__.startswith("recbole_pos."))
    is_causal = isinstance(model, PosRecommender) and model.causal and not model.needs_events
    if not names or not is_causal:
        return []
    try:
        moved = looks_ahead(model)
    except Exception:  # training raises the same error with more context
        return []
    if not moved > _CLEARLY:
        return []
    return [
        f"{', '.join(names)}: looks ahead. When later events alone are changed, the states of "
        f"earlier ones move by {moved:.1g} of their size; trained at every position, the model is "
        "shown what it is to predict, and will be worth nothing where no one shows it. Make it "
        "causal (docs/add_a_scheme.md), or train it with augmentation: prefix; a model that must "
        "see all of a session sets causal = False"
    ]


def is_from_custom_code(error: BaseException) -> bool:
    """Return whether an exception passed through code of a custom model or scheme.

    Its author needs the traceback, so such an error is not turned into a message.
    """
    modules = ADDED.modules() | SCHEMES.modules()
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") in modules for frame in frames)


def looks_ahead(model: Any, events: int = 12) -> float:
    """Measure how far later events move the states of a PosRecommender.

    Two short random histories are encoded, and again with other items at other times in their newer
    halves. Neither weights nor random states are changed.

    Args:
        model: a :class:`~recbole_pos.model.base.PosRecommender`; read without dropout.
        events: number of events of the longer history.

    Returns:
        The largest difference between states of the older halves, as a part of the largest state;
        0 of a causal model, up to rounding, and of one that draws at random without training.
    """
    longest = min(events, model.max_seq_length)
    device = model.item_embedding.weight.device
    lengths = torch.tensor([longest, max(longest - 3, 1)])
    generator = torch.Generator().manual_seed(0)
    items = torch.randint(1, model.n_items, (int(lengths.sum()),), generator=generator)
    hours = torch.rand(len(items), generator=generator, dtype=torch.float64).cumsum(0)
    ctx = SequenceContext.from_lengths(lengths, model.max_seq_length)
    later = ctx.index >= (lengths // 2).clamp(min=1)[ctx.row]

    def encode(items: Tensor, hours: Tensor) -> Tensor:
        """Return states [m, d] of m events, hours counted from some day in 2017."""
        times = (1.5e9 + 3600 * hours).to(device)
        packed = (lengths.to(device), model.max_seq_length, times, items.to(device))
        return model.encode(packed[-1], SequenceContext.from_lengths(*packed)).cpu()

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            first, again = encode(items, hours), encode(items, hours)
            changed = torch.where(later, items % (model.n_items - 1) + 1, items)
            second = encode(changed, hours + 30 * later)
    finally:
        model.train(was_training)
    if not torch.equal(first, again):
        return 0.0
    moved = (first - second)[~later].abs().max() / first.abs().max()
    return float(moved)


def explain_loss(batch: Any, model: nn.Module, learning_rate: float) -> str:
    """Return the likely cause of a loss that is not a number.

    Args:
        batch: the batch that had the loss, packed or RecBole's.
        model: the model after the step before.
        learning_rate: learning rate of the run.
    """
    columns = vars(batch) if isinstance(batch, SequenceBatch) else batch.interaction
    bad_fields = [
        name
        for name, column in columns.items()
        if isinstance(column, Tensor) and not column.double().isfinite().all()
    ]
    if bad_fields:
        return f"the data: {', '.join(bad_fields)} holds values that are not finite"
    bad_weights = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if bad_weights:
        return (
            f"an earlier step made {len(bad_weights)} weights not finite (first: "
            f"{bad_weights[0]}); learning_rate {learning_rate} may be too high, "
            "or set clip_grad_norm: {max_norm: 1.0}"
        )
    return (
        "weights and data are finite, so the forward pass overflowed; lower learning_rate "
        f"(now {learning_rate}) or set precision: fp32"
    )
