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
        """Return what the data loader must put into the batches of one of the plugin's models.

        A batch has windows, which are parts of the histories of users, one after the other without
        padding. In training the targets, the items to predict, come with it: the item after each
        interaction of a window or, if the model is not ``causal``, after its newest one only.
        """
        model = self.model
        # Some models read related interactions (``needs_events``) or the next few items after an
        # interaction (``later_targets``). They look them up in the dataset, by row.
        reads_dataset = model.needs_events or model.later_targets is not None
        # With ``augmentation: prefix`` the loader makes batches as RecBole does, padded histories
        # with one target each, and ``pack`` makes windows of them. A user's class whose own loss
        # (``calculate_loss``) takes the padded histories gets these.
        has_own_loss = type(model).calculate_loss is not PosRecommender.calculate_loss
        return BatchRequirements(
            windows=True,
            causal=model.causal,
            max_length=model.max_seq_length,  # most interactions of a window
            linked=model.linked,  # whether all windows of a user must come in one batch
            times=model.needs_time,  # whether interactions need their times, in seconds
            seconds=model.time_unit,  # seconds in one unit of the times of the dataset
            requests=model.reads_request,  # whether the times of targets are needed, too
            log_rows=reads_dataset,  # whether interactions need their rows in the dataset
            # the method that computes, before a step, what else the model reads, such as graphs
            prepare=model.prepare if model.prepares else None,
            pack=None if has_own_loss else self._pack_rows,
        )

    def _pack_rows(self, rows: Interaction) -> SequenceBatch:
        """Return RecBole's rows as a batch, prepared on the host."""
        return self.model.prepare(self.model.pack(rows))

    def can_compile(self) -> bool:
        """Return whether torch can compile the loss.

        It can for a causal model with the loss CE that is trained at all positions of a window. It
        cannot if a step looks into the log of all interactions: for related interactions
        (``needs_events``), or for targets beyond the next item (``later_targets``).
        """
        model, config = self.model, self.config
        if config["augmentation"] != "all_positions" or config["loss_type"] != "CE":
            return False
        return model.causal and not model.needs_events and model.later_targets is None

    def choose_loss(self, packed: bool) -> Callable[[Any], Tensor]:
        """Return the loss of the model as a function of a batch.

        A batch of rows has one target for each history, and its loss is ``calculate_loss``; one of
        windows has many, and its loss is ``window_loss``. The plugin's base class has both. A
        user's class that redefines only the loss of rows cannot be trained on windows: what it
        defines would not be used.

        Args:
            packed: whether batches are windows.

        Returns:
            A function of a batch that returns the scalar loss.

        Raises:
            UsageError: for windows, if a class redefines ``calculate_loss``, and neither it nor a
                class that extends it redefines ``window_loss``.
        """
        if not packed:
            return self.model.calculate_loss
        # the model's class and those that it extends, the most derived first
        classes = type(self.model).__mro__
        row_class = next(cls for cls in classes if "calculate_loss" in vars(cls))
        window_class = next(cls for cls in classes if "window_loss" in vars(cls))
        if classes.index(row_class) < classes.index(window_class):
            raise UsageError(
                f"augmentation: {row_class.__name__} defines calculate_loss, the loss of rows with "
                "one target; set augmentation: prefix, or define window_loss, that of windows"
            )
        return self._window_loss

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
        """Declare that the model can learn from windows, by cross-entropy and by no other loss.

        A window is a part of a history in which every interaction has a target. The option
        ``augmentation: all_positions`` asks for windows, and with them only cross-entropy (CE) can
        be computed. With other values of it the model gets batches with one target for each
        history, and has all of RecBole's losses.

        Returns:
            What the data loader needs to know: that it may make windows, if the option asks for it.

        Raises:
            UsageError: if the option asks for windows, and ``loss_type`` is not CE.
        """
        model, loss = self.config["model"], self.config["loss_type"]
        if self.config["augmentation"] == "all_positions" and loss != "CE":
            raise UsageError(
                f"loss_type: expected CE for {model} with augmentation: all_positions, found "
                f"{loss}; set augmentation: prefix or none to train by it"
            )
        return BatchRequirements(windows=True)

    def choose_loss(self, packed: bool) -> Callable[[Any], Tensor]:
        return self._window_loss if packed else self.model.calculate_loss

    def _window_loss(self, batch: SequenceBatch) -> Tensor:
        """Return the cross-entropy of all targets of a batch among all items.

        Args:
            batch: windows, parts of histories in which many interactions have a target.
        """
        assert batch.targets is not None  # a training batch has targets
        states = compute_every_state(self.model, batch)
        return full_cross_entropy(states, self.model.item_embedding.weight, batch.targets)


def compute_every_state(model: Any, batch: SequenceBatch) -> Tensor:
    """Return the states after every interaction of a batch, by a causal model of RecBole.

    RecBole's models return the state after the newest interaction only, which they select by their
    method ``gather_indexes``. For this call another function replaces that method. It returns the
    states after all interactions that have a target, the queries of the batch.

    Args:
        model: one of ``CAUSAL_BUILTINS``.
        batch: windows with k queries.

    Returns:
        [k, d] states of the queries.
    """
    # histories in RecBole's form, [b, t]: "start" means that they begin at column 0, with zeros
    # behind the shorter ones
    items = batch.pad(batch.items, "start")

    def gather_queries(output: Tensor, newest: Tensor) -> Tensor:
        """Take the states of queries out of the output [b, t, d]; ``newest`` is not read."""
        # ``unpad`` leaves out the states of padding, and ``take_queries`` selects those of queries
        return batch.take_queries(batch.unpad(output, "start"))

    # an attribute of the object hides the method of its class until it is deleted
    model.gather_indexes = gather_queries
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

        A masked interaction has a placeholder for its item, which the model learns to fill in: its
        state is compared with all items. Every row has S slots, each for the column of a masked
        interaction; most are empty, with column 0. RecBole scores all items for empty slots, too;
        here they are left out.

        Args:
            rows: RecBole's batch. ``MASK_ITEM_SEQ`` [B, L] are histories with masked interactions,
                ``MASK_INDEX`` [B, S] the columns of these, and ``POS_ITEMS`` [B, S] their items.

        Returns:
            Scalar, 0 if a batch has nothing masked.
        """
        model = self.model
        # A masked interaction in column 0 looks like an empty slot. RecBole ignores it, and so does
        # this.
        column = rows[model.MASK_INDEX]
        is_masked = column > 0  # [B, S]
        history, _ = torch.nonzero(is_masked, as_tuple=True)  # [k] row of each masked interaction
        states = model.forward(rows[model.MASK_ITEM_SEQ])[history, column[is_masked]]  # [k, d]
        targets = rows[model.POS_ITEMS][is_masked]  # [k]
        if not len(targets):
            return states.sum()  # 0, with a gradient of zeros

        items = model.item_embedding.weight[: model.n_items]
        return _biased_cross_entropy(states, items, model.output_bias, targets)


def _biased_cross_entropy(states: Tensor, vectors: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of targets among all items, padding (item 0) included.

    Item i has the score state . vectors[i] + bias[i].

    Args:
        states: [k, d] states.
        vectors: [items, d] item vectors.
        bias: [items] bias of each item.
        targets: [k] int64 item of each state.
    """
    # ``full_cross_entropy`` computes products only, so the bias becomes one more number of an item
    # vector, and is multiplied by a 1 in the state.
    states = torch.cat((states, states.new_ones(len(states), 1)), 1)  # [k, d + 1]
    vectors = torch.cat((vectors, bias[:, None]), 1)  # [items, d + 1]

    # It never scores row 0, so a row of zeros is put before all: item i becomes row i + 1.
    vectors = nn.functional.pad(vectors, (0, 0, 1, 0))  # [items + 1, d + 1]
    return full_cross_entropy(states, vectors, targets + 1)


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
    # ``ADAPTERS`` has faster ways to train some of RecBole's models, by the name of the class. A
    # user's class may have the same name, and is trained by the loss that it defines.
    if type(model).__module__.startswith("recbole.model."):
        return ADAPTERS.get(type(model).__name__, RecBoleAdapter)(config, model)
    return RecBoleAdapter(config, model)
