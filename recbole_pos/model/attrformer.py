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
from recbole_pos.layers.losses import dirichlet_prior, posterior_loss
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

    Two interactions are related by a field, such as the brand of their items. An interaction reads
    a related one, of its own user or another, by adding its state to its own. In training those of
    a batch read each other, so batches are of random windows (``length_pool: 1``). In prediction
    histories read the bank, training interactions of some users.

    Baselines of Table 6 are PosSASRec with another ``position``: [tisas] (TiSASRec), [difsr]
    (DIF-SR).

    Attributes:
        declared: the option ``relations``, by which interactions and users are related.
        lookup: finds the relations among interactions, given by their rows in the dataset's log.
        inference: the option ``inference_relations``, whom a prediction reads.
        bank_users: ids of the users of the bank with ``inference_relations: training_bank``.
        prior: distribution over items by how often each occurs in training.
    """

    needs_events = True
    refuses: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("event_features", "user_features"), "relations are what it reads of such"),
        "target_events": "in training it relates interactions that have a target only",
        "request_time": "users in a batch would learn when targets of others happen",
        "target_window": "its future_weights are of the next items",
    }

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build the layers, what relates interactions, and the loss.

        Two interactions are related by a field, such as the brand of their items. An interaction
        reads a related one by adding its state to its own.

        Args:
            config: options, ``properties/model/AttrFormer.yaml``.
            dataset: training part of a dataset, whose fields give the relations.

        Raises:
            UsageError: if options contradict each other, or a relation cannot be read.
        """
        # read first, since the base class calls ``build_layer``, which needs their number
        self.declared = read_relations(config["relations"], dataset)
        super().__init__(config, dataset)

        # whether consecutive windows of a user come in one batch, later ones reading earlier ones
        self.linked = config["chunking"]
        if self.linked:
            _require_chunks(config)

        # Which interactions read which: in training those of a batch each other; in prediction
        # histories read the bank, training interactions of some users.
        self.inference = config["inference_relations"]
        self.seed = config["seed"]
        self.relates_times = any(relation.origin == TIME for relation in self.declared)
        self.lookup = self._build_lookup(dataset, config)
        self._check_times(dataset, config)
        self.bank_users = self._sample_bank(config["bank_size"])

        # the loss: betas of the next items, which ``LaterTargets`` finds in the log, and a prior
        # over the items that the loss chooses among (``candidates``; None for all)
        betas, self.prior_weight = read_posterior(config)
        self.later_targets = LaterTargets(dataset.split, betas) if betas else None
        counts = torch.from_numpy(dataset.popularity)
        prior = dirichlet_prior(counts if self.candidates is None else counts[self.candidates])
        self.register_buffer("prior", prior.to(self.item_embedding.weight.dtype), persistent=False)

    def _build_lookup(self, dataset: Dataset, config: Options) -> RelationLookup:
        """Build what finds the relations among interactions, given by their rows in the log."""
        # With user_update: replace the states of related users take the place of a state. A user
        # without attributes is related to none, and keeps the state by a relation 1 to itself.
        replaces_states = config["user_update"] == "replace"
        return RelationLookup(
            self.declared,
            dataset,
            top_k=config["top_k"],
            cross_sequence=config["cross_sequence"],
            max_length=self.max_seq_length,
            seconds=self.time_unit,
            default_self_relation=1.0 if replaces_states else 0.0,
        )

    def _check_times(self, dataset: Dataset, config: Options) -> None:
        """Check times that relations read; a position scheme's are checked by the base class.

        Raises:
            UsageError: if times are related, but fall along a history, or are all the same.
        """
        # only the nearest interactions of a history are compared by time, so times must not fall
        if self.relates_times:
            require_order(dataset.log, "relations: time", "leave the time out of relations")
        if self.needs_time:  # a position scheme reads times
            return
        unit = config["timestamp_unit"]
        if self.relates_times:
            self.notices += check_clock(dataset.log, unit, "leave the time out of relations")
        elif self.lookup.cross_sequence == "time_respecting":
            instead = "set cross_sequence: random_order"
            self.notices += check_clock(dataset.log, unit, instead, compares_users=True)

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

        They must if a position scheme or a relation reads times, or if histories are related to
        training interactions of other users that happened earlier.
        """
        if self.needs_time:  # a position scheme reads times
            return True
        if self.relates_times and self.inference != "none":
            return True
        # Which interactions of the bank are earlier is decided by the real times. A prediction that
        # reads the users of its own batch (``batch``) finds none: histories from outside have no
        # training interactions.
        return self.inference == "training_bank" and self.lookup.cross_sequence == "time_respecting"

    def average_losses(
        self, states: Tensor, vectors: Tensor, targets: Tensor, target_weights: Tensor
    ) -> Tensor:
        """Return the posterior loss, the mean over states (AttrFormer, equation 17).

            w KL(prior || y) + sum_j beta_j CE(item_j, y)

        with y the softmax of the scores of a state, item_j the j-th next item, its weight beta_j
        and cross-entropy CE. The prior is how often each item occurs in training, and w is the
        option ``prior_weight``.

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
        """Describe the windows of a batch by rows of the log, and decide what other users may read.

        To read an interaction is to add its state to one's own. Overlapping windows have the same
        interaction several times, but it must be read once. So other users read it in the one
        window in which its next item is a target. If a window a, b, c has the targets b, c, d, and
        the next one b, c, d has only e, then c is read in the first window and d in the second.
        Without targets nothing is read by other users.

        Args:
            batch: windows of histories, with the log's row of each of their m interactions.

        Returns:
            The windows, and for each interaction whether other users may read it.
        """
        assert batch.log_rows is not None  # ``needs_events``
        events = batch.log_rows.cpu().numpy()
        is_source = np.zeros(len(events), dtype=bool)
        if batch.targets is not None:
            # a query, and so a target, comes after these of the m interactions; None for all
            has_target = slice(None) if batch.queries is None else batch.queries.cpu().numpy()
            is_source[has_target] = True
        return self.lookup.pack_windows(events, batch.lengths.cpu().numpy(), is_source, self.linked)

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
        """Encode the histories of a batch, and return the states of its queries.

        A query asks for the next item after an interaction. Which other interactions its history
        reads depends on where the batch comes from:

        0. It has its relations already (``extras``): those that they say.
        1. A history ends before a training interaction of its user: histories of the batch read
           each other, as in training.
        2. All end later: each reads the bank, training interactions of some users, and not the
           other histories.
        3. Histories are not of the dataset's log: as in case 2.

        Args:
            batch: histories with k queries.

        Returns:
            [k, d].
        """
        if batch.extras is not None:
            return super().encode(batch)

        last = batch.last.cpu().numpy()  # of each history, its newest interaction in the batch
        if batch.log_rows is not None:
            newest = batch.log_rows.cpu().numpy()[last]  # the same as rows of the log
            if self.lookup.is_followed_in_training(newest).any():
                return super().encode(self.prepare(batch))  # ``prepare`` adds the relations
            return self._encode_histories(newest, self.lookup)

        # case 3: interaction i of the batch becomes row num_events + i of a longer log
        times = None if batch.times is None else batch.times.cpu().numpy()
        items, lengths = batch.items.cpu().numpy(), batch.lengths.cpu().numpy()
        lookup = self.lookup.with_histories(items, lengths, times)
        return self._encode_histories(lookup.num_events + last, lookup)

    def _encode_histories(self, newest: np.ndarray, lookup: RelationLookup) -> Tensor:
        """Return the states [b, d] that predict what follows whole histories.

        Args:
            newest: [b] int64 row of the log with the newest interaction of each history.
            lookup: the dataset's log and its relations, with histories from outside appended.

        Returns:
            [b, d], in the order of ``newest``.
        """
        # A history is the rows ``start`` to ``end - 1`` of the log. It is whole if training linked
        # the windows of a user, else the newest window only. ``ranks`` say how many interactions of
        # the user are older than each one.
        end = newest + 1
        start = newest - lookup.ranks[newest]
        if not self.linked:
            start = np.maximum(start, end - self.max_seq_length)

        # Histories read the bank but not each other, so they can be encoded part by part, with
        # about ``MOST_EVENTS`` interactions in each: ``part`` 0, 0, 1 gives [0, 1] and [2].
        part = np.cumsum(end - start) // MOST_EVENTS
        parts = np.split(np.arange(len(end)), np.flatnonzero(np.diff(part)) + 1)

        bank = self._pack_bank(lookup.users[newest], lookup)
        states = []
        for histories in parts:
            packed = lookup.pack_histories(start[histories], end[histories], is_bank=False)
            # a query after the last interaction of each history
            queries = np.cumsum(end[histories] - start[histories]) - 1
            if bank is not None:
                packed = packed + bank  # the bank's interactions come last, without a query
            states.append(super().encode(self.gather(packed, torch.from_numpy(queries), lookup)))
        return torch.cat(states)

    def gather(
        self, rows: PackedSequences, queries: Tensor | None, lookup: RelationLookup
    ) -> SequenceBatch:
        """Read sequences from the log as a batch, with the relations among their interactions.

        Args:
            rows: the sequences; ``rows.events`` [m] are the rows of their interactions in the log.
            queries: [k] int64 index among the m interactions of the one that each query follows (a
                query asks for the next item); None for a query after each interaction.
            lookup: the log's items and times, and what finds relations (:meth:`_relate`).

        Returns:
            The batch on the model's device, whose ``extras`` are the relations.
        """
        device = self.item_embedding.weight.device
        relations = self._relate(rows, lookup, device)
        batch = SequenceBatch.from_lengths(
            torch.from_numpy(lookup.items[rows.events]),
            torch.from_numpy(rows.lengths),
            self.max_seq_length,
            times=torch.from_numpy(lookup.times[rows.events]),
            queries=queries,
        )
        return replace(batch.to(device), extras=relations)

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


def read_posterior(config: Options) -> tuple[list[float], float]:
    """Read the options of the posterior loss (AttrFormer, Liu et al., KDD 2025, section 3.2.3).

    Args:
        config: options; ``future_weights`` are the betas of equation 17, ``prior_weight`` the
            factor of its prior, and ``loss_type`` must be CE unless they give plain cross-entropy.

    Returns:
        The betas, the weight of the next item first, and the weight of the prior. Without a prior
        and with one target the loss is the backbone's cross-entropy: there are no betas then.

    Raises:
        UsageError: if the options are no such weights, or ``loss_type`` does not support them.
    """
    betas, prior_weight = config["future_weights"], config["prior_weight"]
    if not betas or betas[0] == 0 or list(betas) != sorted(betas, reverse=True):
        raise UsageError(
            "future_weights: expected weights of the next items, the first above 0 and none above "
            f"the one before (section 3.2.3), such as [1.0, 0.25]; found {shown(betas)}"
        )
    # no prior, and the next item as the only target
    is_plain = prior_weight == 0 and betas[0] == 1 and not any(betas[1:])

    if config["loss_type"] != "CE" and not is_plain:
        raise UsageError(
            f"loss_type: {config['loss_type']} cannot have posterior targets; set "
            "prior_weight: 0.0 and future_weights: [1.0], or loss_type: CE"
        )
    return [] if is_plain else [float(beta) for beta in betas], float(prior_weight)


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
        """Return H_RAH, the outputs of the M' heads of relations (AttrFormer, equations 6 to 8).

            H_h = ( sum_r W^R_rh Norm(R_r) ) V_h  =  sum_r W^R_rh (Norm(R_r) V_h)

        for head h, with the M relations R_r [m, m] between interactions, their learned mixture W^R
        [M, M'] (``relation_mix``) and values V_h [m, e'], which each head has for itself
        (``relation_value``), as "relation dimension" in B.3 suggests. The right side is what is
        computed: one sparse product for all relations and heads, then their mixture.

        Each relation is normalised before they are mixed (equation 6). If the mixture were, as
        equation 7 can be read, a relation of large numbers would leave little of the others.

        Args:
            x: [m, d] inputs.
            multiply: product of the stacked normalised relations [M m, m] with a matrix [m, ...].

        Returns:
            [m, M' e'], the outputs of the heads side by side.
        """
        value = self.relation_value(x)  # [m, M' e']
        related = multiply(value)  # [M m, M' e'], Norm(R_r) V_h for each relation r and head h
        related = related.view(self.num_relations, x.size(0), self.num_relation_heads, -1)
        # [M, m, M', e'] and [M, M'] to [m, M', e']
        return torch.einsum("rmhe,rh->mhe", related, self.relation_mix).reshape(x.size(0), -1)


class RelationLayer(TransformerLayer):
    """One layer of AttrFormer: relation-augmented attention, feed-forward, aggregation by users.

    Relations of heads leave out the interaction itself, whose value the residual and self-attention
    carry; for users it is kept. Section 3.1.3 prints x' = Norm(R^U) x, which keeps little of the
    own state: ``user_update: replace``. Added at weight 1 instead, the items of ten other users
    would stay in every state; so the weight of the aggregate is learned, from 0.

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
