"""What every recommender of the plugin shares: item vectors, loss, scores, and doors for batches.

A model defines :meth:`PosRecommender.encode`. The way from a batch to the loss is in
``layers/forward.py``. Doors make batches of what others hold: RecBole's rows (:meth:`pack`) and
given histories (:meth:`make_batch`). Shapes: m interactions and k queries of a batch, B rows of L
interactions in RecBole's batches, items and d the number and the size of item vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import SequentialRecommender
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.targets import LaterTargets
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.errors import UsageError
from recbole_pos.layers.forward import compute_loss, encode_queries, score_items
from recbole_pos.layers.item_table import ItemTable
from recbole_pos.layers.losses import full_cross_entropy, weighted_cross_entropy
from recbole_pos.layers.sampled import SAMPLED_LOSSES, SampledLoss
from recbole_pos.layers.scalable import scalable_cross_entropy
from recbole_pos.layers.sequence_batch import Features, SequenceBatch
from recbole_pos.model.side_information import (
    add_content,
    build_event_features,
    build_item_features,
)
from recbole_pos.values import SECONDS, Options, check_choice
from recbole_pos.yaml_files import list_property_files

_NUM_PARTS = 8  # into which rows are split by length to be encoded
Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_loss(config: Options, dataset: Dataset, candidates: Tensor | None) -> Loss:
    """Build the loss of ``loss_type`` for states [k, d], vectors [items, d] and targets [k].

    Args:
        config: options of the model.
        dataset: the training dataset, for the popularity of items.
        candidates: ids of the items that the loss chooses among; None for all.

    Returns:
        A function that returns the scalar mean loss.

    Raises:
        UsageError: for an unknown ``loss_type``, or one that has a yaml in ``properties/loss/`` and
            no branch here.
    """
    kind = config["loss_type"]
    check_choice("loss_type", kind, ("CE", *list_property_files("loss")))
    if kind == "CE":
        return full_cross_entropy
    if kind == "SCE":
        keys = ("n_buckets", "bucket_size_x", "bucket_size_y", "mix_x")
        return functools.partial(scalable_cross_entropy, **{key: config[key] for key in keys})

    if kind not in SAMPLED_LOSSES:
        raise UsageError(f"loss_type: {kind} has a yaml, but no branch in build_loss")

    # These losses compare a target with wrong items, the negatives. The probability of an item
    # to be a negative follows from its count.
    if not dataset.has_log:  # loaded for serving, without interactions: the loss is not used
        counts = np.ones(dataset.item_num)
    elif kind == "in_batch":  # negatives are the other targets of the batch
        counts = dataset.target_counts  # how often each item is a target
    else:  # negatives are sampled
        counts = dataset.popularity  # interactions of each item
    if candidates is not None:
        counts = counts[candidates.numpy()]

    # each of these losses has some of these options
    keys = ("negatives", "negative_sampler", "logq_correction", "gbce_t")
    options = {key: config[key] for key in keys if key in config}
    return SampledLoss(kind, torch.from_numpy(counts), **options)


class PosRecommender(SequentialRecommender):
    """Base of recommenders. A subclass builds its layers and defines :meth:`encode`.

    A subclass whose states are not causal sets ``causal = False``: it trains on windows with one
    query, after the newest interaction.

    Args:
        config: RecBole configuration; keys read here are in ``properties/model/<name>.yaml``.
        dataset: the training dataset, for the number of items.
    """

    needs_time = False
    reads_request = False  # whether queries read the time of the request: request_time: target
    needs_events = False  # whether batches must have ``log_rows``
    linked = False  # whether the training windows of a user must come in one batch
    causal = True  # whether every interaction has a state, made of none that is newer
    candidates: Tensor | None  # [c] ids that training chooses among; None for all
    candidate_rows: Tensor  # [items] row of each item among the candidates
    content_source: Any = None  # option item_vectors: files that a saved run needs
    # options that the class refuses, and why
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("event_features", "user_features"),
        "its encode must call embed(batch), and its class set refuses = {}",
    )

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build what all models share: the item vectors, what is added to them, and the loss.

        The layers between item vectors and loss are built by subclasses.

        Args:
            config: RecBole's configuration with the options of the model.
            dataset: training part of a dataset. A run that is loaded for serving has one without
                interactions (``has_log`` is False).
        """
        super().__init__(config, dataset)
        self.notices: list[str] = []  # warnings to show before training
        self.time_unit = SECONDS[config["timestamp_unit"]]  # seconds in one unit of the time field
        # RecBole's names of two columns of a batch: the time of the target, the times of a history
        self.TIME = config["TIME_FIELD"]
        self.TIME_SEQ = self.TIME + config["LIST_SUFFIX"]
        self.initializer_range = config["initializer_range"]
        # Fields of items that attention reads. A subclass adds their names, if it has any.
        self.item_attributes: set[str] = set()

        # sets ``item_embedding``, and ``candidates``, the items that the loss chooses among
        self._build_item_vectors(config, dataset)
        # adds fields of interactions and users, such as a price, to the input of the layers; None
        # if the options name no such field
        self.event_features = build_event_features(config, dataset)

        # The loss is a function of states, item vectors and targets.
        self.loss = build_loss(config, dataset, self.candidates)
        # Whether the loss compares a position's target with the targets of the other positions of
        # the batch. Then several processes that train, each with a part of the batch, must exchange
        # their targets.
        self.targets_meet = config["loss_type"] in ("SCE", "in_batch")
        # With ``target_window: n`` the next n items after a query are its targets, each with weight
        # 1/n. ``LaterTargets`` finds them among the dataset's interactions. None for n = 1.
        self.later_targets: LaterTargets | None = None
        num_targets = config["target_window"]
        if num_targets > 1 and dataset.has_log:
            self.later_targets = LaterTargets(dataset.split, [1 / num_targets] * num_targets)

    def _build_item_vectors(self, config: Options, dataset: Dataset) -> None:
        """Create a trained vector for each item, and what the options add to it.

        Two things may be added: content vectors, made of texts for example, and fields of items,
        such as a brand.

        Args:
            config: options of the model.
            dataset: training part of a dataset, with the fields.
        """
        self.item_embedding = ItemTable(self.n_items, config["hidden_size"])

        # Some uses of content vectors set ``candidates``, the items that the loss chooses among,
        # and ``content_source``, the files that a saved run needs again.
        self.register_buffer("candidates", None, persistent=False)
        add_content(self, config, dataset)

        if (item_features := build_item_features(config, dataset)) is not None:
            self.item_embedding.parts["features"] = item_features

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a function to all tensors of the model, as torch does to move or cast it.

        A ``SampledLoss`` and ``LaterTargets``, which finds the next items after a query, have
        tensors of the dataset, but are no modules of torch. They follow to the device of the item
        vectors here, so that no training step waits for a copy.

        Args:
            fn: function that torch applies to all tensors.
            recurse: whether it is applied to modules within this one, too.

        Returns:
            The model.
        """
        super()._apply(fn, recurse)
        device = self.item_embedding.weight.device
        if isinstance(self.loss, SampledLoss):  # other losses have no tensors
            self.loss.move(device)
        if self.later_targets is not None:
            self.later_targets.move(device)
        return self

    def init_weights(self) -> None:
        """Initialise linear layers and embeddings by a normal distribution, biases by zero.

        Its deviation is ``initializer_range``. Position schemes initialise themselves. Where item
        vectors start as content vectors (of texts, for example), ``write_start`` writes these last.
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=self.initializer_range)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            if isinstance(module, ItemTable):
                module.write_start()

    # --- from a batch to states: what a model defines ---

    def encode(self, batch: SequenceBatch) -> Tensor:
        """Return the states of a batch's queries, which are compared with item vectors.

        Every model defines it. A query asks for what follows one of the interactions, and its state
        must not depend on later ones.

        Args:
            batch: histories with k queries.

        Returns:
            [k, d].
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode")

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch with ``extras``, what a model computes of it before a training step.

        Graph models put graphs there, for example. By default a model has none, and the batch is
        returned as it is.

        Args:
            batch: histories, in the memory of the host, from which they are copied to a GPU later.
        """
        return batch

    @property
    def prepares(self) -> bool:
        """Whether the class computes ``extras`` of a batch."""
        return type(self).prepare is not PosRecommender.prepare

    def embed(self, batch: SequenceBatch) -> Tensor:
        """Return the input of the layers, a vector for each interaction of a batch.

        It is the vector of the item, to which ``event_features``, if there are any, adds the fields
        of the interaction, such as a price paid, and of the user, such as the age.

        Args:
            batch: histories with m interactions in all.

        Returns:
            [m, d].
        """
        vectors: Tensor = self.item_embedding(batch.items)
        return vectors if self.event_features is None else self.event_features(vectors, batch)

    # --- item vectors, at the input and in scores ---

    def item_vectors(self) -> Tensor:
        """Return the vectors [items, d] of all items, at the input and in scores."""
        return self.item_embedding.vectors()

    def shared_items(self) -> AbstractContextManager[Tensor]:
        """Compute :meth:`item_vectors` once, for inputs and scores in a ``with`` block."""
        return self.item_embedding.shared()

    def training_candidates(self, vectors: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the item vectors that the loss chooses among, and the targets as rows of them.

        The loss chooses among the items with the ids ``candidates``; among all items if it is None.
        With the candidates 0, 2, 5 it chooses among three vectors, and target 5 is row 2 of them.
        ``candidate_rows`` has this row for each id.

        Items without a training interaction are left out. They are never targets, so the loss would
        only lower their scores.

        Args:
            vectors: [items, d] vectors of all items.
            targets: [...] int64 ids of items.

        Returns:
            The vectors of c candidates [c, d], and the row of each target among them [...].
        """
        if self.candidates is None:
            return vectors, targets
        return vectors[self.candidates], self.candidate_rows[targets]

    def add_items(self, vectors: np.ndarray) -> None:
        """Add items that were not there in training; their ids follow the existing ones.

        Args:
            vectors: [k, c] content vectors of k items, made of their texts for example.

        Raises:
            UsageError: if attention reads fields of items (``item_attributes``), whose values for
                the new ones are not known; or, from ``extend``, if the vectors are not as long as
                those of training. Then the model stays as it was.
        """
        if self.item_attributes:
            names = ", ".join(sorted(self.item_attributes))
            raise UsageError(
                f"item_vectors: {names} of items is read by attention, and new ones do not have "
                "it; add them to the data and train again"
            )
        self.item_embedding.extend(vectors)
        self.n_items += len(vectors)

    # --- the loss ---

    def window_loss(self, batch: SequenceBatch) -> Tensor:
        """Return the scalar loss of a training batch: of all its targets, by default cross-entropy.

        Args:
            batch: windows, parts of histories, with a target for some or all interactions.
        """
        # ``extras`` are what some models compute of a batch, such as graphs. The data loader may
        # have computed them already.
        batch = self.prepare(batch) if batch.extras is None else batch
        # A batch keeps what is computed from it, such as masks of padding. A copy does so here, so
        # that this memory is free after the step, although the caller still has the batch.
        return compute_loss(self, replace(batch))

    def compare_with_later_targets(
        self, states: Tensor, vectors: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the loss of states against the next n items after each query, not only one.

        A query asks for what follows one of the interactions. ``later_targets`` finds the items in
        the dataset's log, which has the interactions of each user in their order.

        Args:
            states: [k, d] states of the queries.
            vectors: [items, d] vectors of all items.
            batch: the histories, with the row of each interaction in the log (``log_rows``).

        Returns:
            Scalar, by :meth:`average_losses`.
        """
        assert self.later_targets is not None and batch.log_rows is not None
        # rows of the log: of the interaction before each query, and of the one after it
        before = batch.take_queries(batch.log_rows)
        first_target = before + 1
        # the items of these rows and of those that follow, and their weights, [k, n] each
        targets, target_weights = self.later_targets.find_next(first_target)
        # the loss may choose among some items only; targets are then rows of their vectors
        vectors, targets = self.training_candidates(vectors, targets)
        return self.average_losses(states, vectors, targets, target_weights)

    def average_losses(
        self, states: Tensor, vectors: Tensor, targets: Tensor, target_weights: Tensor
    ) -> Tensor:
        """Return the mean loss of k states with n targets each.

            1/k  sum over states i and targets j of  target_weights[i, j] * loss(i, j)

        Subclasses may define it otherwise.

        Args:
            states: [k, d] states.
            vectors: [items, d] item vectors.
            targets: [k, n] int64 the next n items after each state.
            target_weights: [k, n] 1/n for each target, and 0 where a history has no further item.

        Returns:
            Scalar.
        """
        # cross-entropy computes the scores of a state once for its n targets
        if self.loss is full_cross_entropy:
            return weighted_cross_entropy(states, vectors, targets, target_weights, prior=None)

        # Other losses take one target a state. So each of the p pairs of a state i and a target j
        # that exists becomes a state of its own, and ``mean`` is the mean loss of the pairs.
        state, column = target_weights.nonzero(as_tuple=True)  # i and j, [p] both
        mean = self.loss(states[state], vectors, targets[state, column])

        # All pairs have the weight 1/n, so the formula is 1/k * 1/n * (sum of their losses). That
        # sum is p * mean, and p * 1/n is the sum of all weights.
        return mean * (target_weights.sum() / len(target_weights)).to(mean.dtype)

    # --- doors: batches of what others hold ---

    def pack(self, rows: Interaction) -> SequenceBatch:
        """Return RecBole's rows as a batch without padding.

        Padding is taken out, so that the m interactions of all histories stand one after the other.
        The batch has a query after each history, which asks for the next item.

        Args:
            rows: RecBole's batch of B rows, a table of columns. ``ITEM_SEQ`` [B, L] are the items
                of the histories, padded with 0 on the right, and ``ITEM_SEQ_LEN`` [B] their
                lengths. ``POS_ITEM_ID`` [B], the item to predict, is missing in prediction.

        Returns:
            The batch, with m interactions and B queries.
        """
        items, lengths = rows[self.ITEM_SEQ], rows[self.ITEM_SEQ_LEN]
        column = torch.arange(items.size(1), device=items.device)
        is_real = column < lengths[:, None]  # [B, L], False at padding

        # for models that read the log, a table of all interactions: the row of each in it
        log_rows = None
        if self.needs_events:
            # A history stands right before its target. For a target at row 9 of the log a history
            # of 3 begins at row 6, and has the rows 6, 7, 8.
            first_rows = rows[TARGET_EVENT] - lengths  # [B]
            log_rows = (first_rows[:, None] + column)[is_real]  # [m]

        # values of fields: [m] or [m, s] of each interaction, [B] or [B, s] of each user
        features = Features()
        if self.event_features is not None:
            # RecBole calls the column of a history by the field and a suffix: brand, brand_list
            suffix = self.ITEM_SEQ.removeprefix(self.ITEM_ID)
            features = Features(
                {field: rows[field + suffix][is_real] for field in self.event_features.events},
                {field: rows[field] for field in self.event_features.users},
            )

        times = rows[self.TIME_SEQ][is_real] if self.TIME_SEQ in rows else None  # [m]
        # [B] when the next item is requested, for models that read it: the time of the target
        at = rows[self.TIME] if self.reads_request else None
        batch = self.make_batch(items[is_real], lengths, times, at, features)
        targets = rows[self.POS_ITEM_ID] if self.POS_ITEM_ID in rows else None
        return replace(batch, targets=targets, log_rows=log_rows)

    def make_batch(
        self,
        items: Tensor,
        lengths: Tensor,
        times: Tensor | None = None,
        at: Tensor | None = None,
        features: Features | None = None,
    ) -> SequenceBatch:
        """Return histories as a batch with a query after each, which asks for the next item.

        Args:
            items: [m] items, one history after the other without padding, at most the newest L of
                each.
            lengths: [B] number of interactions of each history.
            times: [m] in the unit of the time field; where :attr:`histories_need_time`.
            at: [B] times of the requests; for models with ``reads_request``.
            features: features of the interactions and users, for models with ``event_features``;
                absent fields count as missing.

        Returns:
            The batch, with B queries.
        """
        return SequenceBatch.from_lengths(
            items,
            lengths,
            self.max_seq_length,
            times=self.to_seconds(times),
            at=self.to_seconds(at),
            features=features or Features(),
            queries=lengths.cumsum(0) - 1,
        )

    def to_seconds(self, times: Tensor | None) -> Tensor | None:
        """Return values of the time field in seconds, None for None."""
        return times if times is None or self.time_unit == 1 else times * self.time_unit

    @property
    def histories_need_time(self) -> bool:
        """Whether histories that are given to :meth:`make_batch` must have times."""
        return self.needs_time

    def forward(
        self,
        item_seq: Tensor,
        item_seq_len: Tensor,
        times: Tensor | None = None,
        at: Tensor | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """Return the states that predict what follows histories, which are padded on the right.

        The model itself works on a batch without padding: the interactions of all histories, m in
        number, one after the other.

        Args:
            item_seq: [B, L] items of the histories.
            item_seq_len: [B] number of interactions of each.
            times: [B, L] in the unit of the time field, or None.
            at: [B] times of the requests, or None.
            features: columns [B, L] or [B, L, s] of interactions and [B, ...] of users, or None.

        Returns:
            [B, d].
        """
        # [B, L], False at padding
        is_real = torch.arange(item_seq.size(1), device=item_seq.device) < item_seq_len[:, None]
        # [m] items and times, and [m] or [m, s] features of interactions; ``map`` changes no others
        times = None if times is None else times[is_real]
        features = None if features is None else features.map(lambda x: x[is_real])
        batch = self.make_batch(item_seq[is_real], item_seq_len, times, at, features)
        # calls ``encode``, and checks the shape of what it returns
        return encode_queries(self, batch)

    # --- RecBole's methods, which take its rows ---

    def calculate_loss(self, interaction: Interaction | SequenceBatch) -> Tensor:
        """Return the loss of RecBole's rows, one target each.

        Args:
            interaction: the rows; or a batch, if the data loader has packed them for a GPU already.
        """
        is_packed = isinstance(interaction, SequenceBatch)
        return self.window_loss(interaction if is_packed else self.pack(interaction))

    def compute_states(self, rows: Interaction) -> Tensor:
        """Return the states [B, d] that predict the target of each of RecBole's rows.

        Args:
            rows: histories [B, L] padded with 0 on the right, and their lengths.

        Returns:
            [B, d], in the order of the rows.
        """
        lengths = rows[self.ITEM_SEQ_LEN]
        # Rows may be encoded in parts if none depends on the others: in training dropout draws
        # numbers for all at once, and models with ``needs_events`` relate rows to each other.
        can_split = not self.training and not self.needs_events
        # Parts save time on a CPU if most cells [B, longest history] are padding. A GPU would have
        # to be waited for to know the lengths.
        is_split = can_split and lengths.device.type == "cpu"
        if not is_split or 2 * int(lengths.sum()) >= len(lengths) * int(lengths.max()):
            return encode_queries(self, self.pack(rows))

        # the shortest first, so that a part has histories of similar lengths and little padding
        order = lengths.argsort(stable=True)
        parts = [rows[part] for part in order.chunk(_NUM_PARTS)]
        states = torch.cat([encode_queries(self, self.pack(part)) for part in parts])
        return states[order.argsort()]  # back in the order of the rows

    def predict(self, interaction: Interaction) -> Tensor:
        """Return [B] score of each row's item after its history."""
        items = self.item_vectors()[interaction[self.ITEM_ID]]
        return (self.compute_states(interaction) * items).sum(-1)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return [B, items] score of every item after each row's history."""
        return score_items(self.compute_states(interaction), self.item_vectors())

    @property
    def scores_by_products(self) -> bool:
        """Whether scores are products of states and item vectors, as no subclass overrides them."""
        return type(self).full_sort_predict is PosRecommender.full_sort_predict
