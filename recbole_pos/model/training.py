"""What a model learns from, and its loss: the plugin's own, and an adapter for RecBole's each.

An adapter answers two questions of the trainer, what batches must be like and what the loss of one
is, so that neither asks for a model's name or the kind of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from recbole_pos.data.loaders import Needs
from recbole_pos.errors import UsageError
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.every_position import every_position_loss
from recbole_pos.model.masked_events import masked_event_loss
from recbole_pos.model.models import CAUSAL_BUILTINS
from recbole_pos.values import Options


class Rows:
    """Any model of RecBole: rows, by its own loss."""

    def __init__(self, config: Options, model: Any) -> None:
        self.config, self.model = config, model

    def needs(self) -> Needs:
        """What batches must be like."""
        return Needs()

    def loss(self, packed: bool) -> Callable[[Any], Tensor | tuple[Tensor, ...]]:
        """The loss as a function of a batch of rows or, if ``packed``, of windows."""
        return self.model.calculate_loss


class Own(Rows):
    """A model of the plugin."""

    def needs(self) -> Needs:
        model = self.model
        return Needs(True, model.causal, model.needs_time, model.needs_events, model.linked)

    def loss(self, packed: bool) -> Callable[[Any], Tensor]:
        return self.model.window_loss if packed else self.model.calculate_loss


class EveryPosition(Rows):
    """A causal model of RecBole: of windows it learns every position in one pass."""

    def needs(self) -> Needs:
        config = self.config
        if config["augmentation"] == "all_positions" and config["loss_type"] != "CE":
            raise UsageError(
                f"loss_type: augmentation: all_positions learns by cross-entropy, CE; "
                f"{config['model']} by {config['loss_type']} needs augmentation: prefix or none"
            )
        return Needs(windows=True)

    def loss(self, packed: bool) -> Callable[[Any], Tensor]:
        if not packed:
            return self.model.calculate_loss
        return lambda batch: every_position_loss(self.model, batch)


class MaskedEvents(Rows):
    """BERT4Rec: RecBole's loss in value, without what it multiplies by zero."""

    def loss(self, packed: bool) -> Callable[[Any], Tensor]:
        if self.config["loss_type"] != "CE":
            return self.model.calculate_loss
        return lambda rows: masked_event_loss(self.model, rows)


ADAPTERS: dict[str, type[Rows]] = {
    **dict.fromkeys(CAUSAL_BUILTINS, EveryPosition),
    "BERT4Rec": MaskedEvents,
}


def adapter(config: Options, model: Any) -> Rows:
    """Of a model, by its class."""
    if isinstance(model, PosRecommender):
        return Own(config, model)
    recboles = type(model).__module__.startswith("recbole.model.")  # and not one of that name
    return (ADAPTERS.get(type(model).__name__, Rows) if recboles else Rows)(config, model)
