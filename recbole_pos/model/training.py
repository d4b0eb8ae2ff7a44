"""What a model trains on, rows or windows, and the loss that goes with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from recbole_pos.data.dataset import PosSequentialDataset
from recbole_pos.data.loaders import WindowLoader
from recbole_pos.errors import UsageError
from recbole_pos.model.every_position import every_position_loss
from recbole_pos.model.masked_events import masked_event_loss
from recbole_pos.model.models import CAUSAL_BUILTINS, trains_all_positions


def training_loader(config: Any, model: Any, rows: Any) -> Any:
    """Packed windows under ``augmentation: all_positions``, else the rows as they are.

    Args:
        config: RecBole configuration.
        model: the model to train.
        rows: RecBole's loader of training rows.

    Raises:
        UsageError: if the model cannot learn from windows, or not from these.
    """
    name, augmentation, dataset = config["model"], config["augmentation"], rows._dataset
    choices = ["prefix", "none"] + ["all_positions"] * trains_all_positions(name)
    if augmentation not in choices:
        raise UsageError(
            f"augmentation: {name} can train with {' or '.join(choices)}, found {augmentation!r}"
        )
    if augmentation != "all_positions" or not isinstance(dataset, PosSequentialDataset):
        return rows
    if name in CAUSAL_BUILTINS and config["loss_type"] != "CE":
        raise UsageError(
            f"loss_type: augmentation: all_positions learns by cross-entropy, CE; {name} by "
            f"{config['loss_type']} needs augmentation: prefix or none"
        )
    if not getattr(model, "causal", True) and config["train_windows"] != "prefix":
        raise UsageError(
            f"train_windows: {name} is not causal, so a window has one target, after its newest "
            f"event: prefix; found {config['train_windows']!r}"
        )
    return WindowLoader(
        dataset,
        batch_size=config["train_batch_size"],
        pool=config["length_pool"],
        seed=config["seed"],
        shuffle=config["shuffle"],
        needs_time=getattr(model, "needs_time", False),
        needs_events=getattr(model, "needs_events", False),
        linked=getattr(model, "linked", False),
    )


def loss_function(config: Any, model: Any, loader: Any) -> Callable[[Any], Any]:
    """The model's own, but over windows that of RecBole's models at every position.

    That of BERT4Rec is RecBole's in value, without what it multiplies by zero.
    """
    if isinstance(loader, WindowLoader) and config["model"] in CAUSAL_BUILTINS:
        return functools.partial(every_position_loss, model)
    if config["model"] == "BERT4Rec" and config["loss_type"] == "CE":
        return functools.partial(masked_event_loss, model)
    return model.calculate_loss
