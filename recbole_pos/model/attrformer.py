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

MOST_EVENTS = 1 << 16  # interactions of histories that are encoded at once


class AttrFormer(PosSASRec):
    """The backbone with relation-augmented heads, aggregation by users, and posterior targets
    (Liu et al., "Learning Attribute as Explicit Relation for Sequential Recommendation", KDD 2025).

    An interaction reads related ones, of its own user or another: it adds their states to its own.
    In training those of a batch read each other, so batches are of random windows
    (``length_pool: 1``). In prediction histories read a bank of training interactions.

    Baselines of Table 6 are PosSASRec with another ``position``: [tisas] (TiSASRec), [difsr]
    (DIF-SR).
    """

    needs_events = True
    refuses: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("event_features", "user_features"), "relations are what it reads of such"),
        "target_events": "in training it relates interactions that have a target only",
        "request_time": "users in a batch would learn when targets of others happen",
        "target_window": "its future_weights are of the next items",
    }

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the layers, the lookup of related interactions, and the loss.

        The model is the base class's transformer, in which an interaction also reads related ones:
        it adds their states to its own. Interactions are related by fields, such as the brand of
        their items. In training those of a batch read each other. In prediction a history reads the
        *bank*, training interactions of some users.

        Args:
            config: options, ``properties/model/AttrFormer.yaml``.
            dataset: training part of a dataset, whose fields give the relations.

        Raises:
            UsageError: if options contradict each other, or a relation cannot be read.
        """
        # the fields of ``relations``, read first: the base class builds layers, which need to know
        # how many there are
        self.declared = read_relations(config["relations"], dataset)
        super().__init__(config, dataset)

        # A long history is cut into windows. Linked, all windows of a user come in one batch, and
        # later ones read earlier ones.
        self.linked = config["chunking"]
        if self.linked:
            _require_chunks(config)

        # Whose training interactions a prediction reads: those of ``bank_users`` (training_bank),
        # of the users in its batch (batch), or of no other users (own, none).
        self.inference = config["inference_relations"]
        self.seed = config["seed"]
        self.lookup = self._build_lookup(dataset, config)
        self.bank_users = self._sample_bank(config["bank_size"])

        # whether interactions are related by their times, which are checked if so
        self.relates_times = any(relation.origin == TIME for relation in self.declared)
        self._check_times(dataset, config)

        # The loss (equation 17) is cross-entropy with the next few items, which ``LaterTargets``
        # finds, weighted by ``betas``, plus ``prior_weight`` times the divergence from a prior over
        # items. There are no betas if the options ask for plain cross-entropy.
        betas, self.prior_weight = read_posterior(config)
        self.later_targets = LaterTargets(dataset.split, betas) if betas else None
        # The prior of an item grows with its number of training interactions (equation 14). It is
        # over the items that the loss chooses among: ``candidates``, their ids, or None for all.
        counts = torch.from_numpy(dataset.popularity)
        prior = dirichlet_prior(counts if self.candidates is None else counts[self.candidates])
        self.register_buffer("prior", prior.to(self.item_embedding.weight.dtype), persistent=False)

    def _build_lookup(self, dataset: Dataset, config: Options) -> RelationLookup:
        """Build the object that finds the interactions to which each one of a batch is related.

        Args:
            dataset: training part of a dataset, with all interactions.
            config: options; ``top_k`` is how many relations each interaction keeps by each field,
                and ``cross_sequence`` says which interactions of other users it may read.
        """
        # Layers may sum the states of related users. A user without attributes is related to none,
        # and would lose its own state where the sum takes the place of it (``replace``). So it is
        # related to itself then, with weight 1.
        sum_replaces_state = config["user_update"] == "replace"
        return RelationLookup(
            self.declared,  # the fields by which interactions and users are related
            dataset,
            top_k=config["top_k"],
            cross_sequence=config["cross_sequence"],
            max_length=self.max_seq_length,
            seconds=self.time_unit,  # seconds in one unit of the time field
            default_self_relation=1.0 if sum_replaces_state else 0.0,
        )

    def _check_times(self, dataset: Dataset, config: Options) -> None:
        """Check the times of a dataset, if interactions are related by them or ordered by them.

        Warnings, such as that times look like running numbers, are added to ``self.notices``, which
        training shows before it starts.

        Raises:
            UsageError: if the times are all the same, or those that relate interactions fall from
                one interaction of a user to the next.
        """
        # An interaction is compared with a fixed number of those right before it, which are the
        # nearest in time only if times never fall.
        instead = "leave the time out of relations"
        if self.relates_times:
            require_order(dataset.log, "relations: time", instead)

        # With time_respecting an interaction reads those of other users that happened before it.
        compares_users = self.lookup.cross_sequence == "time_respecting" and not self.relates_times
        if compares_users:
            instead = "set cross_sequence: random_order"
        # If a position scheme reads times (``needs_time``), the base class has checked them.
        if (self.relates_times or compares_users) and not self.needs_time:
            unit = config["timestamp_unit"]
            self.notices += check_clock(dataset.log, unit, instead, compares_users)

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
        their users.

        Args:
            config: options; ``user_layers`` (odd, even, all, none) says which layers also aggregate
                by the relations of users.
            options: sizes and switches of the layer.
            position: position scheme of the layer.
            number: number of the layer, from 1.

        Returns:
            The layer.
        """
        # A plain attention is built only for the random numbers that it draws: without it a seed
        # would give other weights than in earlier versions.
        MultiHeadAttention(options, position)
        num_user_relations = sum(relation.is_of_users for relation in self.declared)
        num_relations = len(self.declared) - num_user_relations  # M
        num_heads, head_size = config["relation_heads"], config["relation_size"]
        is_chosen = config["user_layers"] in ("all", "odd" if number % 2 else "even")
        return RelationLayer(
            RelationAttention(options, position, num_relations, num_heads, head_size),
            FeedForward(options),
            aggregates=num_user_relations > 0 and is_chosen,
            gated=config["user_update"] == "gated",
        )

    @property
    def histories_need_time(self) -> bool:
        """Whether histories from outside the dataset must come with times.

        To read an interaction is to add its state to one's own, if the two are related. The option
        ``inference_relations`` (``self.inference``) says what a prediction reads:

        - ``none``: nothing, so that relations need no times;
        - ``own`` or ``batch``: the history itself. (``batch`` adds training interactions of the
          users in the batch, but users from outside the dataset have none.)
        - ``training_bank``: also training interactions of some users of the dataset.
        """
        # a position scheme, which tells the model about order or time, reads times
        if self.needs_time:
            return True
        # interactions are related by their times
        if self.relates_times and self.inference != "none":
            return True
        # of other users only interactions are read that happened before those of the history
        return self.inference == "training_bank" and self.lookup.cross_sequence == "time_respecting"

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

        Returns:
            Scalar.
        """
        return posterior_loss(
            states, vectors, targets, target_weights, self.prior, self.prior_weight
        )

    # --- training: the rows of a batch read each other ---

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch with the relations among its interactions as ``extras``."""
        rows = self.locate(batch)
        return replace(batch, extras=self._relate(rows, self.lookup, batch.items.device))

    def locate(self, batch: SequenceBatch) -> PackedSequences:
        """Return the windows of a batch, and say which of their interactions other users may read.

        To read an interaction is to add its state to one's own. A window is a part of one user's
        history. Windows may overlap, so that an interaction is in two of them, but it must be read
        only once. So it is read in the window in which the item after it is a target, since each
        item is the target of one window only. For a history a, b, c, d, e in two windows:

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
            # ``take_queries`` takes the numbers of the interactions that are followed by a target
            number = torch.arange(len(log_rows), device=batch.items.device)
            is_read_by_others[batch.take_queries(number).cpu().numpy()] = True

        # with ``linked`` windows of a user that follow each other read each other, too
        lengths = batch.lengths.cpu().numpy()
        return self.lookup.pack_windows(log_rows, lengths, is_read_by_others, self.linked)

    def _relate(
        self, rows: PackedSequences, lookup: RelationLookup, device: torch.device
    ) -> BatchRelations:
        """Return the relations among the interactions of some sequences, as sparse matrices.

        A relation says how much of the state of one interaction is added to that of another, which
        reads it. Of other users an interaction reads earlier ones only, by an order that is random
        with ``cross_sequence: random_order``.

        Args:
            rows: the sequences, whose interactions are given by their rows in the log.
            lookup: the log and its relations.
            device: where the matrices are put.

        Returns:
            The relations; none at all when predicting with ``inference_relations: none``.
        """
        if not self.training and self.inference == "none":
            return BatchRelations(None, None)
        # Another order for each training batch, from torch's generator, whose state checkpoints
        # keep; the same order for all predictions.
        seed = int(torch.randint(2**62, ())) if self.training else self.seed
        rng = np.random.default_rng(seed)
        return lookup.build_relations(rows, rng, device, self.item_embedding.weight.dtype)

    # --- prediction: rows read the bank, and not each other ---

    def encode(self, batch: SequenceBatch) -> Tensor:
        """Return the states of the queries of a batch, which ask for the next item.

        A history reads related interactions: it adds their states to its own. In training these are
        interactions of the other histories in the batch. In prediction they are the bank, training
        interactions of some users, so that histories do not depend on each other.

        Args:
            batch: b histories with k queries. Those of the dataset have ``log_rows``, the rows of
                their interactions in the log, the table of all interactions.

        Returns:
            [k, d].
        """
        # ``prepare`` has added the relations (``extras``) already: apply the layers
        if batch.extras is not None:
            return super().encode(batch)

        # [b] the newest interaction of each history, as an index among all those of the batch
        newest = batch.last.cpu().numpy()
        if batch.log_rows is None:
            # Histories from outside the dataset: ``with_histories`` returns a lookup with a longer
            # log, in which interaction i of the batch is the row num_events + i.
            times = None if batch.times is None else batch.times.cpu().numpy()
            items, lengths = batch.items.cpu().numpy(), batch.lengths.cpu().numpy()
            lookup = self.lookup.with_histories(items, lengths, times)
            return self._encode_histories(lookup.num_events + newest, lookup)

        newest_rows = batch.log_rows.cpu().numpy()[newest]
        # If a training interaction follows some history, these are windows of training, which are
        # encoded as in training: ``prepare`` relates the histories to each other.
        if self.lookup.is_followed_in_training(newest_rows).any():
            return super().encode(self.prepare(batch))
        return self._encode_histories(newest_rows, self.lookup)

    def _encode_histories(self, newest: np.ndarray, lookup: RelationLookup) -> Tensor:
        """Return the states that predict what follows histories.

        Histories read the *bank*, training interactions of some users: they add states of related
        ones to their own. They do not read each other, and so are encoded in parts, which bounds
        the memory.

        Args:
            newest: [b] int64 row of the newest interaction of each history, in the log.
            lookup: the log (all interactions, user by user, oldest first) and its relations.
                ``lookup.ranks`` say how many interactions of the user are older than each one.

        Returns:
            [b, d], in the order of ``newest``.
        """
        # A history is the rows ``start`` to ``end - 1``: all interactions of the user so far if
        # training linked windows (``linked``), else the newest ``max_seq_length``.
        end = newest + 1
        start = newest - lookup.ranks[newest]
        if not self.linked:
            start = np.maximum(start, end - self.max_seq_length)

        # [b] number of the part that each history is in; a part has about ``MOST_EVENTS``
        part_number = np.cumsum(end - start) // MOST_EVENTS

        bank = self._pack_bank(lookup.users[newest], lookup)  # None if no other users are read
        states = []
        for number in np.unique(part_number):
            is_in_part = part_number == number
            first, after = start[is_in_part], end[is_in_part]
            sequences = lookup.pack_histories(first, after, is_bank=False)
            # a query after the last interaction of each history, as an index among all of this part
            queries = torch.from_numpy(np.cumsum(after - first) - 1)
            if bank is not None:
                sequences = sequences + bank  # the bank comes behind the histories, without a query
            # ``gather`` returns a batch with its relations; the base class applies the layers
            states.append(super().encode(self.gather(sequences, queries, lookup)))
        return torch.cat(states)

    def gather(
        self, sequences: PackedSequences, queries: Tensor | None, lookup: RelationLookup
    ) -> SequenceBatch:
        """Return a batch of parts of the log, with the relations among their interactions.

        Args:
            sequences: histories, given by rows of the log: ``events`` [m] are the rows of all
                interactions, history after history, and ``lengths`` [b] how many each has.
            queries: [k] int64, indices among the m interactions; the model predicts what follows
                each of these. None for all m.
            lookup: the log, whose columns ``items`` and ``times`` are read here, and what finds the
                relations, by which the state of one interaction is added to that of another.

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
        batch = self.make_batch(items, lengths)
        return replace(batch, log_rows=torch.from_numpy(rows))

    def _pack_bank(self, users: np.ndarray, lookup: RelationLookup) -> PackedSequences | None:
        """Return the bank: the newest training interactions of the users whom predictions read.

        To read an interaction is to add its state to one's own, if they are related. With
        ``inference_relations: training_bank`` these users are ``bank_users``, which are sampled
        once; with ``batch`` they are the users for whom items are predicted.

        Args:
            users: [b] int64 users for whom items are predicted.
            lookup: the log and its relations.

        Returns:
            The histories; None if predictions read no other users, by ``inference_relations`` or
            because training had ``cross_sequence: none``.
        """
        if self.inference not in ("batch", "training_bank") or lookup.cross_sequence == "none":
            return None
        if self.inference == "training_bank":
            return lookup.pack_bank(self.bank_users)
        # histories from outside the log have users with higher ids, and no training interactions
        num_log_users = len(lookup.train_end)
        users = np.unique(users)
        return lookup.pack_bank(users[users < num_log_users])


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

        Interactions are related with a given weight by each of M attributes, such as the brand of
        their items. A head mixes these weights by learned factors, ``relation_mix``.

        Args:
            options: sizes and switches of the layer.
            position: position scheme of the self-attention.
            num_relations: M, number of attributes by which interactions are related; 0 for none.
            num_heads, head_size: M' and e', number and size of the heads of relations.
        """
        super().__init__(options, position)
        self.num_relations, self.num_relation_heads = num_relations, num_heads
        if num_relations:
            d, size = options.hidden_size, num_heads * head_size
            self.relation_value = nn.Linear(d, size, bias=options.bias)
            # heads start as the mean of all relations
            fresh_mix = torch.full((num_relations, num_heads), 1 / num_relations)
            self.relation_mix = nn.Parameter(fresh_mix)
            self.relation_dense = nn.Linear(size, d, bias=False)

    def attention(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return Concat(H_MSA, H_RAH) W^O [m, d] of inputs [m, d] (equation 9).

        H_MSA are the heads of self-attention, which ``super().attention`` multiplies by their part
        of W^O, and H_RAH those of relations, which ``relation_dense`` multiplies by the other.
        """
        out = super().attention(x, batch)
        relations: BatchRelations = batch.extras
        if relations.heads is None:
            return out
        return out + self.relation_dense(self.compute_heads(x, relations.heads))

    def compute_heads(self, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs of the M' heads of relations (AttrFormer, equations 6 to 8).

        Relation r of M, such as the same brand, is a matrix R_r [m, m] of weights between the m
        interactions of a batch. Head h adds up the values of related interactions, and mixes the
        results of all relations by learned numbers:

            output_h = sum over r of  relation_mix[r, h] * (Norm(R_r) @ value_h)

        with Norm(R_r) the relation divided by its degrees (equation 6), so that one of large
        numbers leaves room for the others, and value_h [m, e'] a linear function of x, e' the size
        of a head.

        Args:
            x: [m, d] inputs.
            multiply: function that multiplies the matrix [M * m, m] of all Norm(R_r), one below the
                other, with a matrix [m, ...]: one sparse product for all relations and heads.

        Returns:
            [m, M' * e'], the outputs of the heads side by side.
        """
        m = x.size(0)
        value = self.relation_value(x)  # [m, M' * e'], value_h of all heads side by side
        related = multiply(value)  # [M * m, M' * e']
        related = related.view(self.num_relations, m, self.num_relation_heads, -1)
        # the sum over relations r, for each interaction m, head h and number e of its value
        output = torch.einsum("rmhe,rh->mhe", related, self.relation_mix)  # [m, M', e']
        return output.reshape(m, -1)


class RelationLayer(TransformerLayer):
    """One layer of AttrFormer: relation-augmented attention, feed-forward, aggregation by users.

    Relations of heads leave out the interaction itself, those by users keep it. Section 3.1.3 has
    x' = Norm(R^U) x, which keeps little of the own state: ``user_update: replace``. By default the
    aggregate Norm(R^U) x is added instead, with a learned weight that starts at 0.

    Attributes:
        aggregates: whether the layer aggregates by users.
        user_gate: learned weight of the aggregate; None if the aggregate replaces the state.
    """

    user_gate: nn.Parameter | None

    def __init__(
        self, attention: RelationAttention, feed_forward: FeedForward, aggregates: bool, gated: bool
    ) -> None:
        """Keep the parts of the layer, and create the gate.

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
