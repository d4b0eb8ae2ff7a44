"""AttrFormer: attributes as explicit relations between interactions, within and across sequences.

Reference:
    Gang Liu et al. "Learning Attribute as Explicit Relation for Sequential Recommendation."
    KDD 2025.

Where its equations are:

=============== ===================================================================
equation        code
=============== ===================================================================
1, 10, A.2      ``relate_categorical``, ``similarity`` in ``relations/tables.py``
2 to 5          ``MultiHeadAttention`` in ``layers/attention.py``
6, degrees      ``_normalise`` in ``relations/lookup.py``
6 to 8          ``RelationAttention.compute_heads`` in ``layers/relations.py``
9               ``RelationAttention.attention``, same file
top-K           ``top_relations`` in ``relations/search.py``
section 3.1.3   ``RelationLookup.build_relations`` (R^U), ``RelationLayer`` (its place)
section 3.2.2   ``RelationLookup.pack_histories``; ``linked`` in ``data/loaders.py``
11, 12          ``full_cross_entropy`` in ``layers/losses.py``
13 to 17        ``posterior_loss``, same file; ``LaterTargets`` in ``data/targets.py``
=============== ===================================================================

Baselines of Table 6 are PosSASRec with another ``position``: [tisas] (TiSASRec), [difsr] (DIF-SR).

Only ``RelationLookup.make_order`` decides what an interaction may read; ``relations/lookup.py``
explains why nothing of a user's future comes back to the user. The batch is the neighbourhood, so
batches are of random windows (``length_pool: 1``). Section 3.1.3 counts positions from the oldest
interaction of a window. Shapes as in ``layers/relations.py``, and B rows of RecBole's batches, k
targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import ClassVar

import numpy as np
import torch
from recbole.data.interaction import Interaction
from torch import Tensor, nn

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.interactions import check_clock, require_order
from recbole_pos.data.targets import LaterTargets
from recbole_pos.data.windows import TARGET_EVENT, SequenceBatch
from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import BlockOptions
from recbole_pos.layers.context import SequenceContext
from recbole_pos.layers.features import Features
from recbole_pos.layers.hooks import AttentionPosition
from recbole_pos.layers.losses import dirichlet_prior, posterior_loss
from recbole_pos.layers.relations import BatchRelations, RelationLayer
from recbole_pos.model.sasrec import PosSASRec
from recbole_pos.relations.declare import TIME, read_relations
from recbole_pos.relations.lookup import PackedSequences, RelationLookup
from recbole_pos.values import Options, is_number, shown

MOST_EVENTS = 1 << 16  # interactions of histories that are encoded at once


class AttrFormer(PosSASRec):
    """The backbone with relation-augmented heads, aggregation by users, and posterior targets
    (Liu et al., "Learning Attribute as Explicit Relation for Sequential Recommendation", KDD 2025).
    """

    needs_events = True
    prepares = True
    refuses: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("event_features", "user_features"), "relations are what it reads of such"),
        "target_events": "in training it relates interactions that have a target only",
        "request_time": "users in a batch would learn when targets of others happen",
        "target_window": "its future_weights are of the next items",
    }

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Read the relations, build the backbone with them, and estimate the prior of targets."""
        self.declared = read_relations(config["relations"], dataset)
        super().__init__(config, dataset)
        self.reads_request = False  # neighbours in a batch would learn when a target happens
        self.linked = config["chunking"]
        for key, required in (("augmentation", "all_positions"), ("train_windows", "chunk")):
            if self.linked and config[key] != required:
                raise UsageError(
                    f"chunking: links the windows of {key}: {required}; found "
                    f"{shown(config[key])}. Set chunking: False for it"
                )
        user_fields = [relation.field for relation in self.declared if relation.is_of_users]
        if user_fields and not any(layer.aggregates for layer in self.trm_encoder.layer):
            self.notices.append(
                f"relations: {', '.join(user_fields)} of users is read by no layer: user_layers is "
                f"{config['user_layers']}, counted from 1, and n_layers {config['n_layers']}"
            )
        self.inference = config["inference_relations"]
        self.seed = config["seed"]
        self.lookup = RelationLookup(
            self.declared,
            dataset,
            top_k=config["top_k"],
            cross_sequence=config["cross_sequence"],
            max_length=self.max_seq_length,
            seconds=self.time_unit,
            default_self_relation=float(config["user_update"] == "replace"),
        )
        self.notices += self.lookup.notices
        self._check_clock(config, dataset)
        self.bank_users = self._choose_bank_users(config["bank_size"])
        betas, self.prior_weight = read_posterior(config)
        # without a prior and with one target for a state the loss is that of the backbone
        is_plain = self.prior_weight == 0 and betas == [1.0]
        self.later_targets = None if is_plain else LaterTargets(dataset.split, betas)
        counts = torch.from_numpy(dataset.popularity)
        prior = dirichlet_prior(counts if self.candidates is None else counts[self.candidates])
        self.register_buffer("prior", prior.to(self.item_embedding.weight.dtype), persistent=False)

    @property
    def _device(self) -> torch.device:
        return self.item_embedding.weight.device

    @property
    def _relates_times(self) -> bool:
        return any(relation.table == TIME for relation in self.declared)

    @property
    def histories_need_time(self) -> bool:
        """Whether a scheme reads times, or those relations that :meth:`after` looks up."""
        if self.lookup.clock == "time_respecting" and self.inference == "training_bank":
            return True  # ``batch`` has no training interactions of users that are not in the log
        return self.needs_time or (self._relates_times and self.inference != "none")

    def _check_clock(self, config: Options, dataset: Dataset) -> None:
        """Check the timestamps if relations need them."""
        reads_time = self._relates_times
        if reads_time:  # of one sequence the interactions nearest in order are compared
            require_order(dataset.log, "relations: time", "leave the time out of relations")
        if self.needs_time:
            return
        if reads_time:
            instead = "leave the time out of relations"
        elif config["cross_sequence"] == "time_respecting":
            instead = "set cross_sequence: random_order"
        else:
            return
        unit = config["timestamp_unit"]
        self.notices += check_clock(dataset.log, unit, instead=instead, across=not reads_time)

    def _block(self, config: Options) -> Callable[[BlockOptions, AttentionPosition], nn.Module]:
        """Return the function that builds the next block, with relations by ``user_layers``."""
        num_user_relations = sum(relation.is_of_users for relation in self.declared)
        remainders = {"odd": (1,), "even": (0,), "all": (0, 1), "none": ()}[config["user_layers"]]
        layer_number = count(1)

        def build_layer(options: BlockOptions, position: AttentionPosition) -> RelationLayer:
            """Build the next block; each call is for one block, from the first to the last."""
            return RelationLayer(
                options,
                position,
                relations=len(self.declared) - num_user_relations,
                heads=config["relation_heads"],
                head_size=config["relation_size"],
                aggregates=num_user_relations > 0 and next(layer_number) % 2 in remainders,
                gated=config["user_update"] == "gated",
            )

        return build_layer

    def _choose_bank_users(self, size: int) -> np.ndarray:
        """Return ids of up to ``size`` users with training interactions, sampled by the seed."""
        users = np.flatnonzero(self.lookup.train_end > self.lookup.offsets[:-1])
        rng = np.random.default_rng(self.seed)
        return np.sort(rng.choice(users, min(size, len(users)), replace=False))

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """Return a batch on the host with its relations ``prepared``."""
        rows = self.pack_windows(batch)
        relations, _ = self._look_up(rows, self.lookup, batch.items.device)
        return replace(batch, prepared=relations)

    def pack_rows(self, interaction: Interaction) -> SequenceBatch:
        """Return RecBole's rows as packed windows with a target each, prepared on the host."""
        rows, last = self._pack_histories(interaction)
        batch = SequenceBatch(
            items=torch.from_numpy(self.lookup.items[rows.events]),
            lengths=torch.from_numpy(rows.lengths),
            targets=interaction[self.POS_ITEM_ID],
            width=int(rows.lengths.max()),
            positions=torch.from_numpy(last),
            times=torch.from_numpy(self.lookup.times[rows.events]) if self.needs_time else None,
            log_rows=torch.from_numpy(rows.events),
        )
        return self.prepare(batch)

    def pack_windows(self, batch: SequenceBatch) -> PackedSequences:
        """Return the rows of a training batch."""
        assert batch.log_rows is not None  # ``needs_events``
        events = batch.log_rows.cpu().numpy()
        # windows may overlap; an interaction is a source where it has a target
        is_source = np.ones(len(events), dtype=bool)
        if batch.positions is not None:
            is_source = np.isin(np.arange(len(events)), batch.positions.cpu().numpy())
        lengths = batch.lengths.cpu().numpy()
        return self.lookup.pack_windows(events, lengths, is_source, self.linked)

    def average_losses(
        self, hidden: Tensor, vectors: Tensor, targets: Tensor, target_weights: Tensor
    ) -> Tensor:
        """Return the mean of equation 17 over states [k, d] with targets and betas [k, n]."""
        return posterior_loss(
            hidden, vectors, targets, target_weights, self.prior, self.prior_weight
        )

    def encode_packed(
        self, rows: PackedSequences, positions: Tensor | None, lookup: RelationLookup | None = None
    ) -> Tensor:
        """Return the states [k, d] at ``positions`` of packed rows that read each other.

        Without positions they are [m, d]. ``lookup`` defaults to the model's own.
        """
        lookup = lookup or self.lookup
        relations, times = self._look_up(rows, lookup, self._device)
        lengths = torch.from_numpy(rows.lengths).to(self._device)
        items = torch.from_numpy(lookup.items[rows.events]).to(self._device)
        ctx = SequenceContext.from_lengths(
            lengths, self.max_seq_length, times, items, relations, int(rows.lengths.max())
        )
        return self.query_states(items, ctx, positions)

    def _look_up(
        self, rows: PackedSequences, lookup: RelationLookup, device: torch.device
    ) -> tuple[BatchRelations | None, Tensor]:
        """Return the relations of rows, None if they are off, and times [m] in seconds."""
        relations = None
        if self.training or self.inference != "none":
            # in training from torch's generator, whose state checkpoints keep
            seed = int(torch.randint(2**62, ())) if self.training else self.seed
            rng = np.random.default_rng(seed)
            relations = lookup.build_relations(rows, rng, device, self.item_embedding.weight.dtype)
        times = torch.from_numpy(lookup.times[rows.events]) * self.time_unit
        return relations, times.to(device)

    def _pack_histories(self, interaction: Interaction) -> tuple[PackedSequences, np.ndarray]:
        """Return RecBole's rows as packed windows, and indices [B] of their last interactions."""
        target = interaction[TARGET_EVENT].cpu().numpy()
        lengths = interaction[self.ITEM_SEQ_LEN].cpu().numpy()
        rows = self.lookup.pack_histories(target - lengths, target, is_bank=False)
        return rows, np.cumsum(lengths) - 1

    def encode_rows(self, rows: Interaction) -> Tensor:
        """Return the states [B, d] after RecBole's rows, to inspect the model.

        Interactions are related within their row only, so that states do not depend on the batch.
        """
        histories, last = self._pack_histories(rows)
        return self.encode_packed(histories, torch.from_numpy(last).to(self._device))

    def pack_prefixes(self, interaction: Interaction) -> tuple[PackedSequences, Tensor]:
        """Return RecBole's rows as in training, and the indices [B] of their last interactions.

        Other rows may read these last interactions only.
        """
        rows, last = self._pack_histories(interaction)
        is_source = np.zeros(len(rows.events), dtype=bool)
        is_source[last] = True
        rows = self.lookup.pack_windows(rows.events, rows.lengths, is_source, linked=False)
        return rows, torch.from_numpy(last).to(self._device)

    def compute_states(self, interaction: Interaction) -> Tensor:
        """Return the states [B, d] that predict each row's target.

        Rows of held-out targets do not read each other. ``inference_relations`` says whether they
        read the bank: training interactions only, all older than a held-out target of their user.
        Rows of training targets have no such guarantee, and read each other as in training.
        """
        target = interaction[TARGET_EVENT].cpu().numpy()
        if self.lookup.is_trained[target].any():
            return self.encode_packed(*self.pack_prefixes(interaction))
        return self._encode_histories(target - self.lookup.ranks[target], target, self.lookup)

    def after(
        self,
        items: Tensor,
        lengths: Tensor,
        times: Tensor | None = None,
        at: Tensor | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """Return the states [B, d] after histories, as for held-out targets; see the base class.

        Histories are whole: their chunks are linked here.
        """
        known_times = None if times is None else times.cpu().numpy()
        sizes = lengths.cpu().numpy()
        lookup = self.lookup.with_histories(items.cpu().numpy(), sizes, known_times)
        end = self.lookup.num_events + np.cumsum(sizes)
        return self._encode_histories(end - sizes, end, lookup)

    def after_users(self, users: np.ndarray) -> Tensor:
        """Return the states [B, d] after all interactions of users, given by their ids [B]."""
        offsets = self.lookup.offsets
        return self._encode_histories(offsets[users], offsets[users + 1], self.lookup)

    def _encode_histories(
        self, start: np.ndarray, target: np.ndarray, lookup: RelationLookup
    ) -> Tensor:
        """Return the states [B, d] after the histories start : target of the log, [B] each."""
        if not self.linked:
            start = np.maximum(start, target - self.max_seq_length)
        bank = self._pack_bank(target, lookup)
        states = []
        # rows do not read each other, so a batch of long histories is encoded part by part
        part = np.cumsum(target - start) // MOST_EVENTS
        for histories in np.split(np.arange(len(target)), np.flatnonzero(np.diff(part)) + 1):
            first, end = start[histories], target[histories]
            rows = lookup.pack_histories(first, end, is_bank=False)
            last = torch.from_numpy(np.cumsum(end - first) - 1).to(self._device)
            rows = rows if bank is None else rows + bank
            states.append(self.encode_packed(rows, last, lookup))
        return torch.cat(states)

    def _pack_bank(self, target: np.ndarray, lookup: RelationLookup) -> PackedSequences | None:
        """Return the packed training histories that those before ``target`` [b] read; None: none.

        They are of ``bank_users``, or of the batch's own users (``inference_relations: batch``).
        """
        if self.inference not in ("batch", "training_bank") or lookup.clock == "none":
            return None
        users = self.bank_users
        if self.inference == "batch":
            users = np.unique(lookup.users[target - 1])
            users = users[users < len(lookup.train_end)]  # given histories have no training rows
        return lookup.pack_bank(users)


def read_posterior(config: Options) -> tuple[list[float], float]:
    """Return the betas of equation 17 and the weight of its prior (section 3.2.3).

    Raises:
        UsageError: if the options are no such weights, or ``loss_type`` does not support them.
    """
    betas, prior_weight = config["future_weights"], config["prior_weight"]
    is_list = isinstance(betas, (list, tuple)) and len(betas) > 0
    is_falling = is_list and all(map(is_number, betas)) and list(betas) == sorted(betas)[::-1]
    if not is_falling or betas[0] <= 0 or betas[-1] < 0:
        raise UsageError(
            "future_weights: expected weights of the next items, the first above 0 and none above "
            f"the one before (section 3.2.3), such as [1.0, 0.25]; found {shown(betas)}"
        )
    is_plain = prior_weight == 0 and betas[0] == 1 and not any(betas[1:])
    if config["loss_type"] != "CE" and not is_plain:
        raise UsageError(
            f"loss_type: {config['loss_type']} cannot have posterior targets; set "
            "prior_weight: 0.0 and future_weights: [1.0], or loss_type: CE"
        )
    betas = [1.0] if is_plain else [float(beta) for beta in betas]
    return betas, float(prior_weight)
