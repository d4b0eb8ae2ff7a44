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
        """Build a transformer in which interactions read related ones, of any user.

        Two interactions are related if they have the same or a similar value of a field, such as
        the brand of their items. Every layer then adds the state of one to that of the other.

        Args:
            config: options, ``properties/model/AttrFormer.yaml``.
            dataset: training part of a dataset, which has the fields.

        Raises:
            UsageError: if options contradict each other, or a field cannot be read.
        """
        # before the base class builds the layers, since these have weights for each field
        self.declared = read_relations(config["relations"], dataset)
        super().__init__(config, dataset)
        # Later items would lack these fields, so that ``add_items`` refuses them.
        self.item_attributes.update(r.field for r in self.declared if r.origin == "item")
        # A long history is cut into parts. If these are linked, they come in one batch, and
        # interactions are related to those in earlier parts, too.
        self.linked = config["chunking"]
        if self.linked:
            _require_chunks(config)

        # what finds the related interactions of a batch; for some relations it needs their times
        self.lookup = self._build_lookup(dataset, config)
        self.relates_times = any(relation.origin == TIME for relation in self.declared)
        self._check_times(dataset, config)

        # Predictions: of which users the related interactions are, ``batch`` for all users in the
        # batch, or ``training_bank`` for the same users, sampled by the seed, in every batch.
        self.inference, self.seed = config["inference_relations"], config["seed"]
        self.bank_users = self._sample_bank(config["bank_size"])

        # The loss has as targets the next few items, weighted by ``betas``, and a prior over all
        # items, weighted by ``prior_weight``. Plain cross-entropy has the next item only: no betas.
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
        # A user whose fields are all missing is related to nobody, so the sum of related states is
        # 0. Where this sum takes the place of the user's own state (``user_update: replace``), that
        # state is put into it, with weight 1, so that it is not lost.
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
        """Refuse times of a dataset that the model cannot use, and add warnings to ``notices``.

        The model reads times for two reasons, or not at all:

        - ``relates_times``: it relates interactions of a user that are near in time.
        - ``cross_sequence: time_respecting``: it relates them to earlier ones of other users.
        """
        log, unit = dataset.log, config["timestamp_unit"]
        advice = "leave the time out of relations"  # in messages
        if self.relates_times:
            # it looks for near interactions among those right before, so times must never fall
            require_order(log, "relations: time", advice)
        if self.needs_time:
            return  # a position scheme reads times, too, and the base class has checked the rest

        if self.relates_times:
            self.notices += check_clock(log, unit, advice)
        elif self.lookup.cross_sequence == "time_respecting":
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
        """Build one layer, with heads for the relations of items and interactions.

        A relation connects interactions by a field, such as the brand of their items, or the age of
        their users. Those by fields of users have no heads: a layer that *aggregates* sums the
        states of interactions of related users.

        Args:
            config: options; ``user_layers`` (odd, even, all, none) says which layers aggregate, and
                ``user_update`` whether the sum is added with a learned weight (gated).
            options: sizes and switches of the layer.
            position: position scheme of the layer.
            number: number of the layer, from 1.
        """
        # Not used: it draws random numbers, so that a seed gives the weights of earlier versions.
        MultiHeadAttention(options, position)
        num_user_relations = sum(relation.is_of_users for relation in self.declared)
        num_relations = len(self.declared) - num_user_relations  # M
        num_heads, head_size = config["relation_heads"], config["relation_size"]
        parity = "odd" if number % 2 else "even"
        is_chosen = config["user_layers"] in ("all", parity)
        return RelationLayer(
            RelationAttention(options, position, num_relations, num_heads, head_size),
            FeedForward(options),
            aggregates=num_user_relations > 0 and is_chosen,
            gated=config["user_update"] == "gated",
        )

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

        To read an interaction is to add its state to one's own. A window is a part of one user's
        history. Windows may overlap, so that an interaction is in two of them, but others must read
        it only once: in the window in which the item after it is a target (an item to predict),
        since each item is the target of one window only. With the history a, b, c, d, e these are:

            window      targets     read by other users
            a, b, c     b, c, d     a, b, c
            b, c, d     e           d

        Args:
            batch: windows with m interactions in all. ``batch.log_rows`` [m] are their rows in the
                log, the table of all interactions. Without targets nothing is read by other users.

        Returns:
            The windows, with [m] bool for whether other users may read an interaction.
        """
        assert batch.log_rows is not None  # since the class sets ``needs_events``
        log_rows = batch.log_rows.cpu().numpy()
        is_read_by_others = np.zeros(len(log_rows), dtype=bool)
        if batch.targets is not None:
            # of the numbers 0 to m - 1 those of the interactions that a target follows
            numbers = torch.arange(len(log_rows), device=batch.items.device)
            has_target = batch.take_queries(numbers).cpu().numpy()
            is_read_by_others[has_target] = True

        # ``linked``: whether windows of a user that follow each other also read each other
        lengths = batch.lengths.cpu().numpy()
        return self.lookup.pack_windows(log_rows, lengths, is_read_by_others, self.linked)

    def _relate(
        self, sequences: PackedSequences, lookup: RelationLookup, device: torch.device
    ) -> BatchRelations:
        """Find which interactions of a batch are related, and how strongly.

        Every layer adds to the state of an interaction those of related ones, times the strength.
        Related are only interactions that come before it, so that no state knows what follows. With
        ``cross_sequence: random_order`` it is random which ones of other users come before it.

        Args:
            sequences: the histories of the batch, by rows of the log.
            lookup: the log (all interactions of the dataset), and the search in it.
            device: where the result is put.

        Returns:
            The strengths, as sparse matrices [m, m] for the m interactions of the batch: one for
            fields of items and interactions (``heads``), one for fields of users (``users``).
        """
        if not self.training and self.inference == "none":  # predictions without any relation
            return BatchRelations(heads=None, users=None)
        # The random order is another one in each training step. Its seed is from torch's generator,
        # which is saved with a run, so that a resumed run has the same. Predictions share one.
        seed = int(torch.randint(2**62, ())) if self.training else self.seed
        rng = np.random.default_rng(seed)  # samples the order
        return lookup.build_relations(sequences, rng, device, self.item_embedding.weight.dtype)

    def encode(self, batch: SequenceBatch) -> Tensor:
        """Return the states of a batch's queries, by which the items after histories are predicted.

        Every layer adds to the state of an interaction those of related ones, such as of the same
        brand. In training these are interactions of the same batch. In prediction they are older
        ones of the same history, and the *bank*: the newest training interactions of some users.

        Args:
            batch: histories with k queries. ``log_rows`` are the rows of their interactions in the
                log (all interactions of the dataset); None for histories from outside the dataset.
                ``extras`` are the relations, if they have been found already, as in training.

        Returns:
            [k, d].
        """
        if batch.extras is not None:
            return super().encode(batch)

        # the newest interaction of each history, as an index among all those of the batch
        newest = batch.last.cpu().numpy()
        if batch.log_rows is None:
            # predict from a longer log, where interaction i of the batch is the row num_events + i
            times = None if batch.times is None else batch.times.cpu().numpy()
            items, lengths = batch.items.cpu().numpy(), batch.lengths.cpu().numpy()
            lookup = self.lookup.with_histories(items, lengths, times)
            return self._encode_histories(lookup.num_events + newest, lookup)

        # If the item to predict is itself a training interaction, it may be in the bank, and its
        # history must not read it there. Then the whole batch is related as in training.
        newest_rows = batch.log_rows.cpu().numpy()[newest]
        if self.lookup.is_followed_in_training(newest_rows).any():
            return super().encode(self.prepare(batch))
        return self._encode_histories(newest_rows, self.lookup)

    def _encode_histories(self, newest: np.ndarray, lookup: RelationLookup) -> Tensor:
        """Return the states of histories, by which the items after them are predicted.

        Layers add to the state of an interaction the states of related ones, such as of the same
        brand. Here these are older ones of the same history, and the *bank*, training interactions
        of some users. One history is not related to another.

        Args:
            newest: [b] int64 row of the newest interaction of each history, in the log.
            lookup: the log (all interactions, user by user, oldest first), and what finds related
                ones. ``lookup.ranks`` say how many interactions of the user are older.

        Returns:
            [b, d], in the order of ``newest``.
        """
        # A history is the rows ``start`` to ``end - 1``: the newest ``max_seq_length`` interactions
        # or, if an interaction also read those in earlier windows in training (``linked``), all.
        end = newest + 1
        start = newest - lookup.ranks[newest]
        if not self.linked:
            start = np.maximum(start, end - self.max_seq_length)

        sequences = lookup.pack_histories(start, end, is_bank=False)
        # predict after the last interaction of each history, an index among all of the batch
        queries = torch.from_numpy(np.cumsum(end - start) - 1)
        bank = self._pack_bank(lookup.users[newest], lookup)
        if bank is not None:
            sequences = sequences + bank  # the bank behind the histories
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
    """Raise a UsageError for options under which windows of a user cannot be linked (chunking)."""
    for key, required in (("augmentation", "all_positions"), ("train_windows", "chunk")):
        if config[key] != required:
            raise UsageError(
                f"chunking: links the windows of {key}: {required}; found {shown(config[key])}. "
                "Set chunking: False for it"
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

    Relations of heads leave out the interaction itself, those by users keep it. Section 3.1.3 has
    x' = Norm(R^U) x, which keeps little of the own state: ``user_update: replace``. By default the
    aggregate Norm(R^U) x is added instead, with a learned weight that starts at 0.
    """

    user_gate: nn.Parameter | None  # weight of the aggregate; None if that replaces the state

    def __init__(
        self, attention: RelationAttention, feed_forward: FeedForward, aggregates: bool, gated: bool
    ) -> None:
        """Keep the two sub-layers, and create the weight with which related users are added.

        Args:
            attention: self-attention with heads of relations beside it.
            feed_forward: the network that follows.
            aggregates: whether states are aggregated over related users at the end.
            gated: whether the aggregate is added with a learned weight; else it replaces states.
        """
        super().__init__(attention, feed_forward)
        self.aggregates = aggregates
        # the gate is 0 when fresh, so that training starts at the backbone's states
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
