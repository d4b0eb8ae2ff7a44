"""Adapters between models and the trainer: which batches a model needs, and their loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from recbole.data.interaction import Interaction
from torch import Tensor, nn

from recbole_pos.data.windows import BatchRequirements
from recbole_pos.errors import UsageError
from recbole_pos.layers.item_table import LARGE, ItemTable
from recbole_pos.layers.losses import full_cross_entropy
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.models import CAUSAL_BUILTINS
from recbole_pos.values import Options


class RecBoleAdapter:
    """Adapter of a model of RecBole, which trains on rows by its own loss.

    Raises:
        UsageError: if ``compile`` is set and the loss cannot be compiled.
    """

    def __init__(self, config: Options, model: Any) -> None:
        self.config, self.model = config, model
        if config["compile"] and not self.can_compile():
            raise UsageError(
                f"compile: {config['model']} has no graph of fixed form; causal models of the "
                "plugin's own have, with augmentation: all_positions and loss_type: CE"
            )

    def can_compile(self) -> bool:
        """Return whether a step is one graph, which no value of a batch changes."""
        return False

    def requirements(self) -> BatchRequirements:
        """Return the form of batches that the model needs, by default RecBole's rows."""
        return BatchRequirements()

    def choose_loss(self, packed: bool) -> Callable[[Any], Tensor | tuple[Tensor, ...]]:
        """Return the loss as a function of a batch of rows or, if ``packed``, of windows."""
        return self.model.calculate_loss

    def find_kept_table(self) -> nn.Parameter | None:
        """Return the item table if its gradient is worth keeping (``kept_gradient``), else None."""
        return None


class NativeAdapter(RecBoleAdapter):
    """Adapter of a model of the plugin."""

    def requirements(self) -> BatchRequirements:
        """Return what batches the model needs, as its attributes say.

        A window is a part of a history, without padding, in which many items are targets. Windows
        have times, requests (when the next item is asked for) or rows of the log where the model
        reads them, and where it is ``linked`` the windows of a user come together in one batch. Two
        functions are called by the loader on the host, while the device trains on another batch:
        ``prepare`` computes what a model reads beside the batch, such as graphs, and ``pack`` makes
        batches of RecBole's rows.
        """
        model = self.model
        # a user's loss of rows may read fields that a packed batch does not have
        has_own_row_loss = type(model).calculate_loss is not PosRecommender.calculate_loss
        return BatchRequirements(
            windows=True,
            causal=model.causal,
            times=model.needs_time,
            seconds=model.time_unit,
            max_length=model.max_seq_length,
            requests=model.reads_request,
            log_rows=model.needs_events or model.later_targets is not None,
            linked=model.linked,
            prepare=model.prepare if model.prepares else None,
            pack=None if has_own_row_loss else self._pack_rows,
        )

    def _pack_rows(self, rows: Interaction) -> SequenceBatch:
        """Return RecBole's rows as a batch, prepared on the host."""
        return self.model.prepare(self.model.pack(rows))

    def can_compile(self) -> bool:
        model, config = self.model, self.config
        if config["augmentation"] != "all_positions" or config["loss_type"] != "CE":
            return False
        return model.causal and not model.needs_events and model.later_targets is None

    def choose_loss(self, packed: bool) -> Callable[[Any], Tensor]:
        """Return the loss of the model as a function of a batch.

        A user's class may define the loss of rows (``calculate_loss``), that of windows
        (``window_loss``), or none. Of several classes that define one the most derived decides.

        Args:
            packed: whether batches are windows, with many targets, and not rows with one each.

        Returns:
            A function of a batch that returns the scalar loss.

        Raises:
            UsageError: for windows if a user's class defines ``calculate_loss``, the loss of rows,
                and inherits ``window_loss``: training would not use what it defines.
        """
        if not packed:
            return self._row_loss
        # Python looks a method up in these classes in this order: the model's, then its bases. The
        # plugin's own base defines both, so the loop ends there at the latest.
        for cls in type(self.model).__mro__:
            if "window_loss" in vars(cls):
                break
            if "calculate_loss" in vars(cls):
                raise UsageError(
                    f"augmentation: {cls.__name__} defines calculate_loss, the loss of rows with "
                    "one target; set augmentation: prefix, or define window_loss, that of windows"
                )
        return self._window_loss

    def _row_loss(self, rows: Interaction | SequenceBatch) -> Tensor:
        """Return the loss of rows; for a device the loader has made windows of them."""
        if isinstance(rows, SequenceBatch):
            return self.model.window_loss(rows)
        return self.model.calculate_loss(rows)

    def find_kept_table(self) -> nn.Parameter | None:
        """Return the table of item vectors if its gradient should be kept from step to step.

        A new gradient of a large table must be allocated and zeroed in every step. Keeping one pays
        off on a CPU, if a step touches few rows of a large table.

        Returns:
            The weights [items, d], or None.
        """
        table: Any = self.model.item_embedding
        if not isinstance(table, ItemTable) or table.parts:  # more than a table of ids
            return None
        weight: Any = table.weight
        # ``LARGE`` is 32 MB: memory of smaller gradients is reused, which costs little
        is_large_on_cpu = weight.nbytes > LARGE and weight.device.type == "cpu"
        touches_few_rows = self.config["loss_type"] != "CE"  # cross-entropy touches all of them
        return weight if weight.requires_grad and is_large_on_cpu and touches_few_rows else None

    @functools.cached_property
    def _window_loss(self) -> Callable[[Any], Tensor]:
        """The loss of windows; with ``compile: True`` compiled for batches of any size."""
        loss = self.model.window_loss
        return torch.compile(loss, dynamic=True) if self.config["compile"] else loss


class EveryPosition(RecBoleAdapter):
    """Adapter of a causal model of RecBole, which learns all positions of a window in one pass.

    RecBole runs the model once a target and reads the state after the newest interaction
    (``gather_indexes``). Earlier states of a causal model are the states of shorter histories. So
    for histories of up to L interactions this is the loss of RecBole's rows, term by term, except
    that RecBole counts padding as a candidate.
    """

    def requirements(self) -> BatchRequirements:
        """Return that the model needs windows, with a target after every interaction.

        Raises:
            UsageError: if every interaction is to be learned by another loss than cross-entropy.
        """
        config = self.config
        if config["augmentation"] == "all_positions" and config["loss_type"] != "CE":
            raise UsageError(
                f"loss_type: augmentation: all_positions learns by cross-entropy, CE; "
                f"{config['model']} by {config['loss_type']} needs augmentation: prefix or none"
            )
        return BatchRequirements(windows=True)

    def choose_loss(self, packed: bool) -> Callable[[Any], Tensor]:
        return self._window_loss if packed else self.model.calculate_loss

    def _window_loss(self, batch: SequenceBatch) -> Tensor:
        assert batch.targets is not None  # a training batch has targets
        states = compute_every_state(self.model, batch)
        return full_cross_entropy(states, self.model.item_embedding.weight, batch.targets)


def compute_every_state(model: Any, batch: SequenceBatch) -> Tensor:
    """Return the states after every interaction of a batch, by a causal model of RecBole.

    RecBole's models return the state after the newest interaction only, which they select by their
    method ``gather_indexes``. For this call another function replaces that method and returns the
    states at all queries, which ask for the item after an interaction.

    Args:
        model: one of ``CAUSAL_BUILTINS``.
        batch: windows with queries.

    Returns:
        [k, d] states of the queries.
    """
    items = batch.pad(batch.items, "start")  # padded on the right, as RecBole's histories

    # An attribute of the object hides the method of its class. RecBole's takes the output of the
    # last layer [b, t, d] and the index of the newest interaction; this one returns the states at
    # all queries.
    model.gather_indexes = lambda output, newest: batch.take_queries(batch.unpad(output, "start"))
    try:
        return model(items, batch.lengths)
    finally:
        del model.gather_indexes


class MaskedEvents(RecBoleAdapter):
    """Adapter of BERT4Rec, whose loss is computed for masked interactions only.

    RecBole gives every row ``mask_ratio * MAX_ITEM_LIST_LENGTH`` slots for masked interactions,
    scores all items at each and multiplies empty slots by zero: four in five on Amazon Beauty.
    """

    def choose_loss(self, packed: bool) -> Callable[[Any], Tensor]:
        return self._masked_loss if self.config["loss_type"] == "CE" else self.model.calculate_loss

    def _masked_loss(self, rows: Interaction) -> Tensor:
        """Return the cross-entropy at masked interactions, as ``BERT4Rec.calculate_loss`` does.

        A masked interaction has a placeholder for its item, which the model learns to fill in.

        Scores are computed there only, not at the empty slots that RecBole's rows have, too. As in
        RecBole, index 0 marks an empty slot, so that a masked first interaction is no target, and
        padding is a candidate.

        Args:
            rows: RecBole's batch of masked histories.

        Returns:
            Scalar, 0 if a batch has nothing masked.
        """
        # RecBole's names of fields: ``MASK_INDEX`` are the places of the masked interactions,
        # ``MASK_ITEM_SEQ`` the masked histories, ``POS_ITEMS`` the items that were masked
        model = self.model
        index = rows[model.MASK_INDEX]  # of masked interactions, [B, slots]
        is_target = index > 0
        # the history of each masked interaction
        row = torch.nonzero(is_target)[:, 0]
        states = model.forward(rows[model.MASK_ITEM_SEQ])[row, index[is_target]]  # [k, d]
        if not len(row):
            return states.sum()  # 0, with a gradient of zeros

        # The bias of an item is one more column of its vector, by which states have a 1. A row is
        # put in front, because the loss does not count row 0; so targets move on by one.
        items = model.item_embedding.weight[: model.n_items]
        weight = torch.cat((items, model.output_bias[:, None]), 1)
        weight = torch.cat((weight.new_zeros(1, weight.size(1)), weight))
        states = torch.cat((states, states.new_ones(len(states), 1)), 1)
        return full_cross_entropy(states, weight, rows[model.POS_ITEMS][is_target] + 1)


# Adapters of those of RecBole's models whose rows can be learned in a faster way.
ADAPTERS: dict[str, type[RecBoleAdapter]] = {
    **dict.fromkeys(CAUSAL_BUILTINS, EveryPosition),
    "BERT4Rec": MaskedEvents,
}


def make_adapter(config: Options, model: Any) -> RecBoleAdapter:
    """Return what the trainer needs to know of a model: its batches and its loss.

    Args:
        config: options of the run.
        model: a model of the plugin, of RecBole or of a user.

    Raises:
        UsageError: if ``compile`` is set and the loss of the model cannot be compiled.
    """
    if isinstance(model, PosRecommender):
        return NativeAdapter(config, model)
    # RecBole's own class, not a custom one of the same name; those in ``ADAPTERS`` have an adapter
    # that learns rows faster
    if type(model).__module__.startswith("recbole.model."):
        return ADAPTERS.get(type(model).__name__, RecBoleAdapter)(config, model)
    return RecBoleAdapter(config, model)
