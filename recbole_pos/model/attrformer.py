"""AttrFormer: attributes as explicit relations between interactions, within and across sequences.

Reference:
    Gang Liu et al. "Learning Attribute as Explicit Relation for Sequential Recommendation."
    KDD 2025.

Where its equations are:

=============== ===================================================================
equation        code
=============== ===================================================================
1, 10, A.2      ``relate_categorical``, ``similarity`` in ``relations/tables.py``
2 to 5          ``MultiHeadAttention`` in ``layers/forward.py``
6, degrees      ``normalise`` in ``relations/sparse.py``
6 to 8          ``RelationAttention.compute_heads``
9               ``RelationAttention.attention``
top-K           ``top_relations`` in ``relations/search.py``
section 3.1.3   ``RelationLookup.build_relations`` (R^U), ``RelationLayer`` (its place)
section 3.2.2   ``RelationLookup.pack_histories``; ``linked`` in ``data/loaders.py``
11, 12          ``full_cross_entropy`` in ``layers/losses.py``
13 to 17        ``posterior_loss``, same file; ``LaterTargets`` in ``data/targets.py``
=============== ===================================================================

Only ``RelationLookup.make_order`` decides what an interaction may read; ``relations/lookup.py``
explains why nothing of a user's future comes back to the user. Shapes as in
``layers/sequence_batch.py``; M relations of items and behaviour, M' relation heads of size e'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.interactions import check_clock, require_order
from recbole_pos.data.targets import LaterTargets
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.forward import (
    BlockOptions,
    FeedForward,
    MultiHeadAttention,
    TransformerLayer,
)
from recbole_pos.layers.hooks import AttentionPosition
from recbole_pos.layers.losses import dirichlet_prior, posterior_loss, read_posterior
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.model.sasrec import PosSASRec
from recbole_pos.relations.lookup import BatchRelations, RelationLookup
from recbole_pos.relations.search import PackedSequences
from recbole_pos.relations.tables import TIME, read_relations
from recbole_pos.values import Options, shown


class AttrFormer(PosSASRec):
    """The backbone with relation-augmented heads, aggregation by users, and posterior targets
    (Liu et al., "Learning Attribute as Explicit Relation for Sequential Recommendation", KDD 2025).

    An interaction reads related ones, of its own user or another: it adds their states to its own.
    In training those of a batch read each other, so batches are of random windows
    (``length_pool: 1``). In prediction histories read a bank of training interactions.

    Baselines of Table 6 are PosSASRec with the ``position`` [tisas] (TiSASRec) or [difsr] (DIF-SR).
    """

    needs_events = True
    refuses: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("event_features", "user_features"), "relations are what it reads of such"),
        "target_events": "in training it relates interactions that have a target only",
        "request_time": "users in a batch would learn when targets of others happen",
        "target_window": "its future_weights are of the next items",
    }

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build a transformer in which interactions are related by fields.

        Two interactions, of one user or of two, are related if they have the same or a similar
        value of a field, such as the brand of their items. Every layer adds to the state of an
        interaction those of related ones.

        Args:
            config: options, ``properties/model/AttrFormer.yaml``.
            dataset: training part of a dataset, which has the fields.

        Raises:
            UsageError: if options contradict each other, or a field cannot be read.
        """
        # the fields; read before the base class builds the layers, which have weights for each
        self.declared = read_relations(config["relations"], dataset)
        super().__init__(config, dataset)
        # fields that an item needs; ``add_items`` refuses new items, which have none
        self.item_attributes.update(r.field for r in self.declared if r.origin == "item")

        # whether the parts of a long history come in one batch, and are related to each other
        self.linked = config["chunking"]
        if self.linked:
            _require_chunks(config)

        self.lookup = self._build_lookup(dataset, config)  # finds the related interactions
        self.relates_times = any(relation.origin == TIME for relation in self.declared)
        self._check_times(dataset, config)

        # In predictions, histories are related to interactions of some other users. The option says
        # which: for example those in the batch, or ``bank_users``, who are sampled by the seed.
        self.inference, self.seed = config["inference_relations"], config["seed"]
        self.bank_users = self._sample_bank(config["bank_size"])

        self._prepare_loss(dataset, config)

    def _prepare_loss(self, dataset: Dataset, config: Options) -> None:
        """Set ``later_targets``, ``prior`` and ``prior_weight``, which the loss reads.

        The loss compares the scores with the next few items, weighted by ``betas``, and with the
        prior, the popularity of all items, weighted by ``prior_weight``. Without ``betas`` it is
        cross-entropy with the next item only.
        """
        betas, self.prior_weight = read_posterior(config)
        self.later_targets = LaterTargets(dataset.split, betas) if betas else None
        self.register_buffer("prior", self._make_prior(dataset), persistent=False)

    def _make_prior(self, dataset: Dataset) -> Tensor:
        """Return the prior probability of each item in the loss, by its popularity.

            prior_i = (count_i + 1) / sum over items j of (count_j + 1)

        with count_i the number of training interactions with item i (``popularity``); the prior of
        padding, item 0, is 0 (Liu et al., KDD 2025, equation 14).

        Returns:
            [items], or [candidates] if the loss chooses among some items only, the ``candidates``.
        """
        counts = torch.from_numpy(dataset.popularity)
        prior = dirichlet_prior(counts if self.candidates is None else counts[self.candidates])
        return prior.to(self.item_embedding.weight.dtype)

    def _build_lookup(self, dataset: Dataset, config: Options) -> RelationLookup:
        """Build the object that finds related interactions in each batch.

        Two interactions are related by each field, such as the brand of their items or the age of
        their users, in which they have equal or similar values.

        Args:
            dataset: training part of a dataset, with all interactions.
            config: options; ``top_k`` is how many relations each interaction keeps by each field,
                and ``cross_sequence`` says which interactions of other users it may be related to.
        """
        # With ``replace``, the sum of related states takes the place of an interaction's state. If
        # its user has no fields, the sum would be 0: the state itself is put in, with weight 1.
        own_weight = 1.0 if config["user_update"] == "replace" else 0.0
        return RelationLookup(
            self.declared,  # the fields
            dataset,
            top_k=config["top_k"],
            cross_sequence=config["cross_sequence"],
            max_length=self.max_seq_length,
            seconds=self.time_unit,  # seconds in one unit of the time field
            default_self_relation=own_weight,
        )

    def _check_times(self, dataset: Dataset, config: Options) -> None:
        """Refuse times of a dataset that the relations cannot use, and add warnings to ``notices``.

        Relations read times in two cases. With ``relates_times`` interactions of a user are related
        if they are near in time. With ``cross_sequence: time_respecting`` interactions are related
        to earlier ones of other users.
        """
        log, unit = dataset.log, config["timestamp_unit"]
        # with ``needs_time`` position schemes read times, too: the base class has checked the clock
        checks_clock = not self.needs_time
        if self.relates_times:
            advice = "leave the time out of relations"  # in messages
            require_order(log, "relations: time", advice)  # the times of a user must never fall
            if checks_clock:
                self.notices += check_clock(log, unit, advice)
        elif self.lookup.cross_sequence == "time_respecting" and checks_clock:
            # only users are compared, so all interactions of one user may have the same time
            advice = "set cross_sequence: random_order"
            self.notices += check_clock(log, unit, advice, compares_users=True)

    def _sample_bank(self, bank_size: int) -> np.ndarray:
        """Sample up to ``bank_size`` users with training interactions by the run's seed, sorted."""
        # the training interactions of user u are the rows offsets[u] to train_end[u] - 1 of the log
        users = np.flatnonzero(self.lookup.train_end > self.lookup.offsets[:-1])
        rng = np.random.default_rng(self.seed)
        return np.sort(rng.choice(users, min(bank_size, len(users)), replace=False))

    def build_layer(
        self, config: Options, options: BlockOptions, position: AttentionPosition, number: int
    ) -> RelationLayer:
        """Build one layer, in which interactions are related by the fields of the model.

        Fields of items or interactions, such as the brand, relate interactions in heads of
        attention. Fields of users, such as the age, do so at the end of some layers: these
        *aggregate*, which is to sum the states of interactions of related users.

        Args:
            config: options; ``user_layers`` (odd, even, all, none) says which layers aggregate, and
                ``user_update`` whether the sum is added with a learned weight (gated).
            options: sizes and switches of the layer.
            position: position scheme of the layer.
            number: number of the layer, from 1.
        """
        # This object is not used. To build it draws as many random numbers as an earlier version of
        # the model did, so that the same seed still gives the same weights.
        MultiHeadAttention(options, position)

        num_user_relations = sum(relation.is_of_users for relation in self.declared)
        num_relations = len(self.declared) - num_user_relations  # M
        num_heads, head_size = config["relation_heads"], config["relation_size"]
        attention = RelationAttention(options, position, num_relations, num_heads, head_size)

        parity = "odd" if number % 2 else "even"
        is_chosen = config["user_layers"] in ("all", parity)
        aggregates = is_chosen and num_user_relations > 0
        gated = config["user_update"] == "gated"
        return RelationLayer(attention, FeedForward(options), aggregates, gated)

    @property
    def histories_need_time(self) -> bool:
        """Whether histories from outside the dataset must come with times.

        There are three reasons for it:

        - A position scheme of the transformer reads times (``needs_time``).
        - The interactions of a history are related to each other by their times
          (``relates_times``), unless predictions have no relations (``inference: none``).
        - The history is related to interactions of other users, the ``training_bank``, and only to
          those that happened before its own (``time_respecting``).
        """
        has_time_relations = self.relates_times and self.inference != "none"
        is_time_respecting = self.lookup.cross_sequence == "time_respecting"
        compares_users = self.inference == "training_bank" and is_time_respecting
        return self.needs_time or has_time_relations or compares_users

    def average_losses(
        self, states: Tensor, vectors: Tensor, targets: Tensor, target_weights: Tensor
    ) -> Tensor:
        """Return the posterior loss, the mean over states (AttrFormer, equation 17).

            prior_weight KL(prior || y) + sum_j beta_j CE(item_j, y)

        with y the softmax of the scores of a state, item_j the j-th next item, its weight beta_j
        and cross-entropy CE. The prior is how often each item occurs in training.

        Args:
            states: [k, d] states, which predict the next item.
            vectors: [items, d] item vectors.
            targets: [k, n] int64 the next n items of each state.
            target_weights: [k, n] their weights beta, 0 where there is no such item.
        """
        return posterior_loss(
            states, vectors, targets, target_weights, self.prior, self.prior_weight
        )

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch with the relations among its interactions as ``extras``."""
        rows = self.locate(batch)
        return replace(batch, extras=self._relate(rows, self.lookup, batch.items.device))

    def locate(self, batch: SequenceBatch) -> PackedSequences:
        """Return the windows of a batch, and say which of their interactions other users may read.

        To read an interaction is to add its state to one's own. Windows are parts of histories, and
        those of one user may overlap. Other users read an interaction in one window only: where the
        item after it is a target (to be predicted). Each item is the target of one window. For
        example, the history a, b, c, d, e has two windows:

            window      targets     read by other users
            a, b, c     b, c, d     a, b, c
            b, c, d     e           d

        Args:
            batch: windows with m interactions in all. ``batch.log_rows`` [m] are their rows in the
                log, the table of all interactions. ``batch.queries`` are the indices of those that
                a target follows, None for all. Without targets other users read nothing.

        Returns:
            The windows, with [m] bool for whether other users may read an interaction.
        """
        assert batch.log_rows is not None  # since the class sets ``needs_events``
        log_rows, lengths = batch.log_rows.cpu().numpy(), batch.lengths.cpu().numpy()
        is_read_by_others = np.zeros(len(log_rows), dtype=bool)
        if batch.targets is not None:
            has_target = slice(None) if batch.queries is None else batch.queries.cpu().numpy()
            is_read_by_others[has_target] = True

        # ``linked``: whether windows of a user that follow each other also read each other
        return self.lookup.pack_windows(log_rows, lengths, is_read_by_others, self.linked)

    def _relate(
        self, sequences: PackedSequences, lookup: RelationLookup, device: torch.device
    ) -> BatchRelations:
        """Find which interactions of a batch are related, and how strongly.

        Every layer adds to the state of an interaction those of related ones, times the strength.
        An interaction may be related to older ones of its user, and to those of other users that
        come before it in an order of all of the batch. The order may be random (option
        ``cross_sequence: random_order``), and is sampled here.

        Args:
            sequences: the histories of the batch, by rows of the log.
            lookup: the log (all interactions of the dataset), and the search in it.
            device: where the result is put.

        Returns:
            The strengths as sparse matrices with a column for each of the m interactions: those by
            fields of items and interactions (``heads``), and by fields of users (``users``).
        """
        if not self.training and self.inference == "none":  # predictions without any relation
            return BatchRelations(heads=None, users=None)

        # Every batch of training has another random order. Its seed is from torch's generator, the
        # state of which is saved, so that a resumed run repeats it. Predictions have a fixed seed.
        seed = int(torch.randint(2**62, ())) if self.training else self.seed
        rng = np.random.default_rng(seed)
        return lookup.build_relations(sequences, rng, device, self.item_embedding.weight.dtype)

    def encode(self, batch: SequenceBatch) -> Tensor:
        """Return the states [k, d] of a batch's k queries, by which the next items are predicted.

        Every layer adds to the state of an interaction those of related ones, such as of the same
        brand. In training these are interactions of the same batch. In prediction they are older
        ones of the same history, and the *bank*: the newest training interactions of some users.

        Args:
            batch: histories with k queries. ``extras`` are the relations among their interactions
                in training, and None in prediction. ``log_rows`` are their rows in the log, the
                table of all interactions; None for histories from outside the dataset.
        """
        if batch.extras is not None:  # training
            return super().encode(batch)

        # index of the newest interaction of each history: 1 and 4 for the lengths 2 and 3
        newest = batch.last.cpu().numpy()
        if batch.log_rows is None:
            # The search needs rows of a log. So the histories are appended to a copy of the log,
            # in which interaction i of the batch is the row ``num_events`` + i.
            items, lengths = batch.items.cpu().numpy(), batch.lengths.cpu().numpy()
            times = None if batch.times is None else batch.times.cpu().numpy()
            lookup = self.lookup.with_histories(items, lengths, times)
            return self._encode_histories(lookup.num_events + newest, lookup)

        # If the item to predict is that of a training interaction, the bank may have it and would
        # give it away. Then the batch is encoded without a bank, as in training.
        newest_rows = batch.log_rows.cpu().numpy()[newest]
        if self.lookup.is_followed_in_training(newest_rows).any():
            return super().encode(self.prepare(batch))
        return self._encode_histories(newest_rows, self.lookup)

    def _encode_histories(self, newest: np.ndarray, lookup: RelationLookup) -> Tensor:
        """Return the states [b, d] of b histories, by which the items after them are predicted.

        Layers add to the state of an interaction the states of related ones, such as of the same
        brand. Here these are older ones of the same history, and the *bank*, training interactions
        of some users. One history is not related to another.

        Args:
            newest: [b] int64 row of the newest interaction of each history, in the log.
            lookup: the log (all interactions, user by user, oldest first), and what finds related
                ones. ``lookup.ranks`` say how many interactions of the user are older.
        """
        # A history is the rows ``start`` to ``end - 1``, from the user's oldest interaction on. If
        # training has not related the parts of a long one, only its newest part is read.
        end = newest + 1
        start = newest - lookup.ranks[newest]
        if not self.linked:
            start = np.maximum(start, end - self.max_seq_length)
        sequences = lookup.pack_histories(start, end, is_bank=False)

        # predict after the last interaction of each history: 1 and 4 for the lengths 2 and 3
        lengths = end - start
        queries = torch.from_numpy(np.cumsum(lengths) - 1)

        # append the bank after the histories, so that these indices stay the same
        bank = self._pack_bank(lookup.users[newest], lookup)
        if bank is not None:
            sequences = sequences + bank
        return super().encode(self.gather(sequences, queries, lookup))

    def gather(
        self, sequences: PackedSequences, queries: Tensor | None, lookup: RelationLookup
    ) -> SequenceBatch:
        """Return a batch of histories, with the relations among their interactions.

        Two interactions are related if, for example, their items have the same brand. Layers then
        add the state of one to that of the other.

        Args:
            sequences: the histories, given by rows of the log: ``events`` [m] are the rows of all
                interactions, history after history, and ``lengths`` [b] how many each has.
            queries: [k] int64, indices among the m interactions; the model predicts what follows
                each of these. None for all m.
            lookup: the log, whose columns ``items`` and ``times`` are read here, and what finds the
                related interactions.

        Returns:
            The batch on the model's device, with the relations as ``extras``.
        """
        device = self.item_embedding.weight.device
        batch = SequenceBatch.from_lengths(
            torch.from_numpy(lookup.items[sequences.events]),
            torch.from_numpy(sequences.lengths),
            self.max_seq_length,
            times=torch.from_numpy(lookup.times[sequences.events]),
            queries=queries,
        )
        return replace(batch.to(device), extras=self._relate(sequences, lookup, device))

    def find_histories(self, users: np.ndarray) -> SequenceBatch:
        """Return all interactions of users, given by their ids [b], as a batch to predict from."""
        # the interactions of user u are the rows offsets[u] to offsets[u + 1] - 1 of the log
        start, end = self.lookup.offsets[users], self.lookup.offsets[users + 1]
        rows = gather_index(start, end - start)
        items, lengths = torch.from_numpy(self.lookup.items[rows]), torch.from_numpy(end - start)
        return replace(self.make_batch(items, lengths), log_rows=torch.from_numpy(rows))

    def _pack_bank(self, users: np.ndarray, lookup: RelationLookup) -> PackedSequences | None:
        """Return the training interactions of other users that predictions read, the bank.

        A prediction for a user adds the states of related interactions to those of the user's own.
        The option ``inference_relations`` says whose interactions these are:

        - ``training_bank``: those of ``bank_users``, the same for every prediction;
        - ``batch``: those of the users for whom items are predicted in the same batch;
        - ``own``: the user's own older ones only, which need no bank;
        - ``none``: none at all.

        Args:
            users: [b] int64 users for whom items are predicted, as one batch.
            lookup: the log, the table of all interactions.

        Returns:
            The newest training interactions of each of these users; None if there is no bank.
        """
        # a model that has not read other users in training does not in prediction
        if self.inference in ("own", "none") or lookup.cross_sequence == "none":
            return None
        if self.inference == "training_bank":
            return lookup.pack_bank(self.bank_users)
        # users who are not in the dataset have higher ids, and no training interactions
        return lookup.pack_bank(np.unique(users[users < len(lookup.train_end)]))


def _require_chunks(config: Options) -> None:
    """Raise a UsageError unless ``augmentation`` is all_positions and ``train_windows`` chunk."""
    required = {"augmentation": "all_positions", "train_windows": "chunk"}
    for option, value in required.items():
        found = config[option]
        if found != value:
            raise UsageError(
                f"chunking: needs {option}: {value}; found {shown(found)}; or set chunking: False"
            )


class RelationAttention(MultiHeadAttention):
    """Self-attention with relation-augmented heads beside its own.

    W^O of equation 9 is in two parts, ``dense`` for the self-attention heads and ``relation_dense``
    for the others: Concat(H_MSA, H_RAH) W^O = H_MSA W_1 + H_RAH W_2. Without relations this is the
    backbone's attention, weights and all.
    """

    def __init__(
        self,
        options: BlockOptions,
        position: AttentionPosition,
        num_relations: int,
        num_heads: int,
        head_size: int,
    ) -> None:
        """Create self-attention and, beside it, heads that sum the values of related interactions.

        There are M relations, such as the same brand. Each gives every two interactions a weight,
        0 if they are not related. A head adds up these M weights, each times a factor that is
        learned (``relation_mix``) and is 1 / M at first.

        Args:
            options: sizes and switches of the layer.
            position: position scheme of the self-attention.
            num_relations: M; with 0 there is self-attention only.
            num_heads, head_size: number of the heads of relations, and size of the values of each.
        """
        super().__init__(options, position)
        self.num_relations, self.num_relation_heads = num_relations, num_heads
        if num_relations:
            d, size = options.hidden_size, num_heads * head_size
            self.relation_value = nn.Linear(d, size, bias=options.bias)
            # [M, heads]: each head starts with the mean of all relations
            fresh_mix = torch.full((num_relations, num_heads), 1 / num_relations)
            self.relation_mix = nn.Parameter(fresh_mix)
            self.relation_dense = nn.Linear(size, d, bias=False)

    def attention(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the outputs [m, d] of attention, to which heads of relations add theirs.

        The paper concatenates the outputs of the heads of self-attention, H_1, and of relations,
        H_2, and multiplies them by one matrix (equation 9). With its two parts W_1 and W_2 this is
        H_1 W_1 + H_2 W_2: ``super().attention`` returns the first, ``relation_dense`` is W_2.

        Args:
            x: [m, d] inputs.
            batch: the histories. Its relations say which of the m interactions are related; their
                ``heads`` are None if none are.
        """
        out = super().attention(x, batch)
        relations: BatchRelations = batch.extras
        if relations.heads is None:
            return out
        return out + self.relation_dense(self.compute_heads(x, relations.heads))

    def compute_heads(self, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs of all heads of relations (AttrFormer, equations 6 to 8).

        Relation r, such as the same brand, is a matrix R_r [m, m]: weights between the m
        interactions of a batch, normalised. For each relation head h sums the values of related
        interactions; it adds up these sums, weighted by learned numbers:

            output_h = sum over r of  relation_mix[r, h] * (R_r @ value_h)

        with value_h [m, size] a linear function of x.

        Args:
            x: [m, d] inputs.
            multiply: function of a matrix [m, ...], which returns its products with all R_r, one
                below the other: [relations * m, ...].

        Returns:
            [m, heads * size], the outputs of the heads side by side.
        """
        m = x.size(0)
        value = self.relation_value(x)  # value_h of all heads side by side, [m, heads * size]
        related = multiply(value)  # [relations * m, heads * size]
        related = related.view(self.num_relations, m, self.num_relation_heads, -1)
        # r: relation, m: interaction, h: head, e: one of the numbers of value_h
        output = torch.einsum("rmhe,rh->mhe", related, self.relation_mix)
        return output.reshape(m, -1)


class RelationLayer(TransformerLayer):
    """One layer of AttrFormer: relation-augmented attention, feed-forward, aggregation by users.

    Relations of heads leave out the interaction itself, those by users keep it. By section 3.1.3
    the aggregate Norm(R^U) x replaces the state, so that little of that is left; by default it is
    added instead, with a learned weight that starts at 0.
    """

    user_gate: nn.Parameter | None  # weight of the aggregate; None if that replaces the state

    def __init__(
        self, attention: RelationAttention, feed_forward: FeedForward, aggregates: bool, gated: bool
    ) -> None:
        """Keep the two sub-layers, and create the gate of the aggregation that may follow them.

        The aggregate of an interaction is the sum of the states of interactions of related users.
        There are three cases:

        - ``aggregates`` is False: the layer ends after the two sub-layers.
        - Both are True: to a state its aggregate is added, times a learned weight, the gate.
        - ``aggregates`` is True and ``gated`` False: the aggregate takes the place of the state.

        Args:
            attention: self-attention with heads of relations beside it.
            feed_forward: the network that follows.
            aggregates: whether aggregates are computed.
            gated: whether they are added to the states. It is not read without ``aggregates``.
        """
        super().__init__(attention, feed_forward)
        self.aggregates = aggregates
        # the gate is 0 at first, so that training begins as if nothing were aggregated
        gate = nn.Parameter(torch.zeros(())) if aggregates and gated else None
        self.register_parameter("user_gate", gate)

    def forward(self, x: Tensor, batch: SequenceBatch, queries: Tensor | None = None) -> Tensor:
        """Apply attention and feed-forward network, then aggregate the states of related users.

        Users are related if they share attributes, such as their age. The aggregate is the sum of
        states weighted by these relations. It is added to a state with a learned weight, or
        replaces it. A layer without ``aggregates`` ends before that.

        Args:
            x: [m, d] states of all interactions.
            batch: the histories, with their relations as ``extras``.
            queries: [k] int64 indices of the states to return; None for all.

        Returns:
            [m or k, d].
        """
        relations: BatchRelations = batch.extras
        if not self.aggregates or relations.users is None:
            return super().forward(x, batch, queries)
        x = super().forward(x, batch)
        aggregate = relations.users(x)  # Norm(R^U) x
        x = aggregate if self.user_gate is None else x + self.user_gate * aggregate
        return x if queries is None else x[queries]
