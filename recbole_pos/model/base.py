"""What every recommender of the plugin shares: item embedding, loss, prediction, batch formats.

Shapes: m interactions of a packed batch, k targets, B rows of L interactions in RecBole's batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import SequentialRecommender
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.targets import LaterTargets
from recbole_pos.data.windows import SequenceBatch
from recbole_pos.errors import UsageError
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.features import Features
from recbole_pos.layers.hooks import require_result
from recbole_pos.layers.item_table import ItemTable
from recbole_pos.layers.losses import full_cross_entropy, weighted_cross_entropy
from recbole_pos.layers.sampled import SAMPLED, SampledLoss
from recbole_pos.layers.sce import scalable_cross_entropy
from recbole_pos.model.content import add_content
from recbole_pos.model.side_features import build_event_features, build_item_features, has_log
from recbole_pos.values import SECONDS, Options, shown

_NUM_PARTS = 8  # into which a batch is split by length to be encoded
Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_loss(config: Options, dataset: Dataset, candidates: Tensor | None) -> Loss:
    """Build the loss of ``loss_type`` for states [m, d], vectors [items, d] and targets [m].

    Args:
        config: options of the model.
        dataset: the training dataset, for the popularity of items.
        candidates: ids of the items that the loss chooses among; None for all.

    Raises:
        UsageError: for an unknown ``loss_type``.
    """
    kind = config["loss_type"]
    if kind == "CE":
        return full_cross_entropy
    if kind == "SCE":
        keys = ("n_buckets", "bucket_size_x", "bucket_size_y", "mix_x")
        return functools.partial(scalable_cross_entropy, **{key: config[key] for key in keys})
    if kind in SAMPLED:
        options = {f.name: config[f.name] for f in fields(SampledLoss) if f.name in config}
        counts = np.ones(dataset.item_num)
        if has_log(dataset):
            is_in_batch = "in_batch" in (kind, options.get("negative_sampler"))
            counts = dataset.target_counts if is_in_batch else dataset.popularity
        counts = counts if candidates is None else counts[candidates.numpy()]
        return SampledLoss(counts=torch.from_numpy(counts), **options)
    raise UsageError(f"loss_type: {shown(kind)} is not one of {', '.join(('CE', 'SCE', *SAMPLED))}")


class PosRecommender(SequentialRecommender):
    """Base of recommenders. A subclass defines :meth:`encode` and builds its layers.

    A subclass that is not causal sets ``causal = False`` and defines :meth:`states` instead. It
    trains on windows with one target, the interaction after the newest. Batches are packed windows
    (:class:`SequenceBatch`, every position may have a target) or RecBole's ``Interaction``, a
    right-padded history and one target a row.

    Args:
        config: RecBole configuration; keys read here are in ``properties/model/<name>.yaml``.
        dataset: the training dataset, for the number of items.
    """

    needs_time = False
    reads_request = False  # whether queries read the time of the request: request_time: target
    needs_events = False  # whether batches must have the places of their interactions in the log
    linked = False  # whether the training windows of a user must come in one batch
    causal = True  # whether every interaction has a state, made of none that is newer
    candidates: Tensor | None  # [c] ids that training chooses among; None for all
    candidate_rows: Tensor  # [items] row of each item among the candidates
    prepares: ClassVar[bool] = False  # whether ``prepare`` does something
    # options that the class refuses, and why
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("event_features", "user_features"),
        "its encode must call embed(items, ctx), and its class set refuses = {}",
    )

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the item vectors with their features and content, and the loss."""
        super().__init__(config, dataset)
        self.notices: list[str] = []  # to report before training, not when a run is loaded
        self.time_unit = SECONDS[config["timestamp_unit"]]
        self.TIME = config["TIME_FIELD"]
        self.TIME_SEQ = self.TIME + config["LIST_SUFFIX"]
        self.initializer_range = config["initializer_range"]
        self.later_targets: LaterTargets | None = None  # where a state has several targets
        num_targets = config["target_window"]
        if num_targets > 1 and has_log(dataset):
            self.later_targets = LaterTargets(dataset.split, [1 / num_targets] * num_targets)
        self.item_embedding = ItemTable(self.n_items, config["hidden_size"])
        self.register_buffer("candidates", None, persistent=False)
        self.content_source: Any = None  # files of content that a run needs to be loaded
        self.item_attributes: list[str] = []  # fields of items that schemes read
        add_content(self, config, dataset)
        self.loss = build_loss(config, dataset, self.candidates)
        # whether the loss of a target depends on the others of its batch
        is_in_batch = getattr(self.loss, "negative_sampler", None) == "in_batch"
        self.targets_meet = config["loss_type"] == "SCE" or is_in_batch
        if (item_features := build_item_features(config, dataset)) is not None:
            self.item_embedding.parts["features"] = item_features
        self.event_features = build_event_features(config, dataset)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply ``fn``, and move the tables of loss and targets so that no step copies them."""
        super()._apply(fn, recurse)
        for tables in (self.loss, self.later_targets):
            if isinstance(tables, (SampledLoss, LaterTargets)):
                tables.move(self.item_embedding.weight.device)
        return self

    def init_weights(self) -> None:
        """Initialise linear layers and embeddings; position schemes initialise themselves."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=self.initializer_range)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            if isinstance(module, ItemTable):
                module.write_start()

    def embed(self, items: Tensor, ctx: SequenceContext) -> Tensor:
        """Return the vectors [m, d] of items [m] of histories, with their ``event_features``."""
        vectors: Tensor = self.item_embedding(items)
        return vectors if self.event_features is None else self.event_features(vectors, ctx)

    def encode(self, items: Tensor, ctx: SequenceContext) -> Tensor:
        """Return the states [m, d] of packed item ids [m]; position t sees nothing after t."""
        raise NotImplementedError

    def states(self, items: Tensor, ctx: SequenceContext, positions: Tensor | None) -> Tensor:
        """Return the states [k, d] that predict the interaction after each of ``positions``.

        Positions are indices [k] of the packed items [m], or None for all m.
        """
        hidden = self._require_states(self.encode(items, ctx), items.size(0), "encode")
        return hidden if positions is None else hidden[positions]

    def _require_states(self, states: Any, num_states: int, method: str) -> Tensor:
        """Return the states [num_states, d] that a method of a custom model has computed."""
        table = self.item_embedding
        shape = (num_states, table.embedding_dim)
        return require_result(states, table.weight.dtype, shape, self, method)

    def query_states(self, items: Tensor, ctx: SequenceContext, positions: Tensor | None) -> Tensor:
        """Return the :meth:`states` [k, d]; their products with item vectors are the scores."""
        num_states = (items if positions is None else positions).size(0)
        return self._require_states(self.states(items, ctx, positions), num_states, "states")

    def item_vectors(self) -> Tensor:
        """Return the vectors [items, d] of all items, at the input and in scores."""
        return self.item_embedding.vectors()

    def training_candidates(self, vectors: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the item vectors [c, d] that training chooses among, and the targets' rows [k].

        Where content vectors score items without a training interaction, these are left out: the
        loss would teach that they are wrong answers.
        """
        if self.candidates is None:
            return vectors, targets
        return vectors[self.candidates], self.candidate_rows[targets]

    def add_items(self, vectors: np.ndarray) -> None:
        """Add items by their content vectors [k, c]; their ids follow the existing ones.

        Raises:
            UsageError: if the vectors are not of the run's size, or items have other features, too;
                some items may be added by then, so the caller drops or restores the model.
        """
        if self.item_attributes:
            raise UsageError(
                f"item_vectors: {', '.join(self.item_attributes)} of items is read by position, "
                "and new ones do not have it; add them to the data and train again"
            )
        self.item_embedding.extend(vectors)
        self.n_items += len(vectors)

    def shared_items(self) -> AbstractContextManager[Tensor]:
        """Compute :meth:`item_vectors` once, for inputs and scores in a ``with`` block."""
        return self.item_embedding.shared()

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch on the host, with what the model computes before a step ``prepared``."""
        return batch

    def pack_rows(self, rows: Interaction) -> SequenceBatch:
        """Return RecBole's rows as packed windows with one target each, prepared on the host."""
        items, lengths = rows[self.ITEM_SEQ], rows[self.ITEM_SEQ_LEN]
        is_real = torch.arange(items.size(1), device=items.device) < lengths[:, None]
        batch = SequenceBatch(
            items=items[is_real],
            lengths=lengths,
            targets=rows[self.POS_ITEM_ID],
            width=int(lengths.max()),
            positions=lengths.cumsum(0) - 1,
            times=rows[self.TIME_SEQ][is_real] if self.needs_time else None,
            at=rows[self.TIME] if self.reads_request else None,
            features=self._read_features(rows).map(lambda x: x[is_real]),
        )
        return self.prepare(batch)

    def window_loss(self, batch: SequenceBatch) -> Tensor:
        """Return the scalar loss of packed windows, by default cross-entropy (FPARec, eq. 11)."""
        if self.prepares and batch.prepared is None:
            batch = self.prepare(batch)
        ctx = SequenceContext.from_lengths(
            batch.lengths,
            self.max_seq_length,
            self.to_seconds(batch.times),
            batch.items,
            batch.prepared,
            batch.width,
            self.to_seconds(batch.at),
            batch.features,
        )
        with self.shared_items() as vectors:
            hidden = self.query_states(batch.items, ctx, batch.positions)
            if self.later_targets is None or batch.log_rows is None:
                return self.loss(hidden, *self.training_candidates(vectors, batch.targets))
            events = batch.log_rows if batch.positions is None else batch.log_rows[batch.positions]
            targets, target_weights = self.later_targets.find_next(events + 1)
            vectors, targets = self.training_candidates(vectors, targets)
            return self.average_losses(hidden, vectors, targets, target_weights)

    def average_losses(
        self, hidden: Tensor, vectors: Tensor, targets: Tensor, target_weights: Tensor
    ) -> Tensor:
        """Return the mean over states [k, d] of the weighted losses of their n targets.

        ``vectors`` of items are [items, d]. ``target_weights`` [k, n] are all equal, but 0 where
        ``targets`` [k, n] has none.
        """
        if self.loss is full_cross_entropy:  # computes the logits of a state once for its n targets
            return weighted_cross_entropy(hidden, vectors, targets, target_weights, None)
        state, column = target_weights.nonzero(as_tuple=True)
        mean = self.loss(hidden[state], vectors, targets[state, column])
        return mean * (target_weights.sum() / len(target_weights)).to(mean.dtype)

    def calculate_loss(self, interaction: Interaction) -> Tensor:
        """Return the loss of RecBole's rows, one target each."""
        if self.prepares:
            batch = self.pack_rows(interaction)
            return self.window_loss(batch.to(interaction[self.ITEM_SEQ].device))
        with self.shared_items() as vectors:
            states = self.compute_states(interaction)
            vectors, targets = self.training_candidates(vectors, interaction[self.POS_ITEM_ID])
            return self.loss(states, vectors, targets)

    def forward(
        self,
        item_seq: Tensor,
        item_seq_len: Tensor,
        times: Tensor | None = None,
        at: Tensor | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """Return the states [B, d] after right-padded histories; :meth:`after` takes packed ones.

        Items and times are [B, L], and features of interactions [B, L] or [B, L, s].
        """
        is_real = torch.arange(item_seq.size(1), device=item_seq.device) < item_seq_len[:, None]
        times = None if times is None else times[is_real]
        options: dict[str, Any] = {} if at is None else {"at": at}
        if features is not None:
            options["features"] = features.map(lambda x: x[is_real])
        return self.after(item_seq[is_real], item_seq_len, times, **options)

    def after(
        self,
        items: Tensor,
        lengths: Tensor,
        times: Tensor | None = None,
        at: Tensor | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """Return the states [B, d] that predict the interaction after each history.

        Args:
            items: [m] packed items of the histories, at most the newest L interactions of each.
            lengths: [B] number of interactions of each history.
            times: [m] in the unit of the time field; where :attr:`histories_need_time`.
            at: [B] times of the requests; for models with ``reads_request``.
            features: features of the interactions and users, for models with ``event_features``;
                absent fields count as missing.
        """
        times, at = self.to_seconds(times), self.to_seconds(at)
        ctx = SequenceContext.from_lengths(
            lengths, self.max_seq_length, times, items, at=at, features=features
        )
        return self.query_states(items, ctx, ctx.last)

    def encode_rows(self, rows: Interaction) -> Tensor:
        """Return the states [B, d] after RecBole's rows, to inspect the model.

        Times are passed on wherever rows have them, and no history reads another one.
        """
        options: dict[str, Any] = {"at": rows[self.TIME]} if self.reads_request else {}
        if self.event_features is not None:
            options["features"] = self._read_features(rows)
        times = rows[self.TIME_SEQ] if self.TIME_SEQ in rows else None
        return self.forward(rows[self.ITEM_SEQ], rows[self.ITEM_SEQ_LEN], times, **options)

    def _read_features(self, rows: Interaction) -> Features:
        """Return the features of RecBole's rows, for interactions [B, L] or [B, L, s]."""
        if self.event_features is None:
            return Features()
        suffix = self.ITEM_SEQ.removeprefix(self.ITEM_ID)
        return Features(
            {name: rows[name + suffix] for name in self.event_features.events},
            {name: rows[name] for name in self.event_features.users},
        )

    def to_seconds(self, times: Tensor | None) -> Tensor | None:
        """Return values of the time field in seconds, None for None."""
        return times if times is None or self.time_unit == 1 else times * self.time_unit

    def compute_states(self, interaction: Interaction) -> Tensor:
        """Return the states [B, d] that predict the target of each row.

        On a CPU rows are encoded in parts of similar length if most of a batch is padding.
        """
        lengths = interaction[self.ITEM_SEQ_LEN]
        if self.training or lengths.device.type != "cpu":  # to read lengths is to wait for a GPU
            return self.encode_rows(interaction)
        if 2 * int(lengths.sum()) >= len(lengths) * int(lengths.max()):
            return self.encode_rows(interaction)
        order = lengths.argsort(stable=True)
        parts = [interaction[rows] for rows in order.chunk(_NUM_PARTS)]
        states = torch.cat([self.encode_rows(part) for part in parts])
        return states[order.argsort()]

    def predict(self, interaction: Interaction) -> Tensor:
        """Return [B] score of each row's item after its history."""
        items = self.item_vectors()[interaction[self.ITEM_ID]]
        return (self.compute_states(interaction) * items).sum(-1)

    @property
    def histories_need_time(self) -> bool:
        """Whether histories that are given to :meth:`after` must have times."""
        return self.needs_time

    @property
    def scores_by_products(self) -> bool:
        """Whether scores are products of states and item vectors, as no subclass overrides them."""
        return type(self).full_sort_predict is PosRecommender.full_sort_predict

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return [B, items] score of every item after each row's history (FPARec, equation 10)."""
        return self.compute_states(interaction) @ self.item_vectors().t()
