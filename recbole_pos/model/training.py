"""What a model learns from, and its loss: the plugin's own, and an adapter for RecBole's each.

An adapter answers two questions of the trainer, what batches must be like and what the loss of one
is, so that neither asks for a model's name or the kind of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recbole_pos.data.batch import SequenceBatch
from recbole_pos.data.needs import Needs
from recbole_pos.data.shapes import fixed_shapes
from recbole_pos.errors import UsageError
from recbole_pos.layers.row_gradients import LARGE, ItemTable
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.every_position import every_position_loss
from recbole_pos.model.masked_events import masked_event_loss
from recbole_pos.model.models import CAUSAL_BUILTINS
from recbole_pos.values import Options


class Rows:
    """Any model of RecBole: rows, by its own loss.

    Raises:
        UsageError: if the loss must be compiled and cannot be.
    """

    def __init__(self, config: Options, model: Any) -> None:
        self.config, self.model = config, model
        if config["compile"] and not self.compiles():
            raise UsageError(
                f"compile: {config['model']} has no graph of fixed form; causal models of the "
                "plugin's own have, with augmentation: all_positions and loss_type: CE"
            )
        if config["batch_shapes"] == "fixed" and not self.compiles():
            raise UsageError(
                f"batch_shapes: fixed is for what compile can have a graph of, and not for "
                f"{config['model']}: causal models of the plugin's own, with augmentation: "
                "all_positions and loss_type: CE. Take auto or exact"
            )

    def compiles(self) -> bool:
        """Whether a step is one graph: nothing in it depends on what the values of a batch are."""
        return False

    def needs(self) -> Needs:
        """What batches must be like."""
        return Needs(pack=getattr(self.model, "pack_rows", None))

    def loss(self, packed: bool) -> Callable[[Any], Tensor | tuple[Tensor, ...]]:
        """The loss as a function of a batch of rows or, if ``packed``, of windows."""
        return self.model.calculate_loss

    def table(self) -> nn.Parameter | None:
        """The item table whose gradient is worth keeping: large, and a step touches few rows."""
        return None


class Own(Rows):
    """A model of the plugin."""

    def needs(self) -> Needs:
        model = self.model
        return Needs(
            windows=True,
            causal=model.causal,
            times=model.needs_time,
            requests=model.reads_request,
            events=model.needs_events,
            linked=model.linked,
            prepare=model.prepare if model.prepares else None,
            pack=model.pack_rows if self._packs() else None,
        )

    def _packs(self) -> bool:
        """Whether the loss of rows is that of windows made of them: no class of another package
        has said otherwise."""
        says = ("calculate_loss", "window_loss", "states_of", "forward", "after")
        said_by = {getattr(type(self.model), name).__module__ for name in says}
        return all(module.startswith("recbole_pos.") for module in said_by)

    def compiles(self) -> bool:
        model, config = self.model, self.config
        packed = config["augmentation"] == "all_positions" and config["loss_type"] == "CE"
        return packed and model.causal and not model.needs_events

    def loss(self, packed: bool) -> Callable[[Any], Tensor]:
        return self._window_loss if packed else self._row_loss

    def _row_loss(self, rows: Any) -> Tensor:
        packed = isinstance(rows, SequenceBatch)  # for a device, by the loader
        loss: Tensor = (self.model.window_loss if packed else self.model.calculate_loss)(rows)
        return loss

    def table(self) -> nn.Parameter | None:
        embedding = self.model.item_embedding
        own = isinstance(embedding, ItemTable) and embedding.weight.requires_grad
        large = own and embedding.weight.nbytes > LARGE and embedding.weight.device.type == "cpu"
        return embedding.weight if large and self.model.targets_meet else None

    @functools.cached_property
    def _window_loss(self) -> Callable[[Any], Tensor]:
        """Compiled for all sizes of batches at once, as a function of them; on a GPU, if they are
        few, recorded once for each and replayed."""
        loss = self.model.window_loss
        if not self.config["compile"]:
            return loss
        if self.config["device"].type != "cuda" or not fixed_shapes(self.config):
            return torch.compile(loss, dynamic=True)
        compiled = torch.compile(loss, dynamic=True, mode="reduce-overhead")

        def replayed(batch: SequenceBatch) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()  # what the last step gave may be overwritten
            value: Tensor = compiled(batch)
            return value

        return replayed


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
