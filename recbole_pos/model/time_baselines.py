"""RecentPop and TALE: baselines that read the times of interactions and learn without gradients.

Both are made in their constructors, of the training interactions. In: a configuration and the
training part of a dataset. Out: scores of all items after each history.
"""

from __future__ import annotations

import numpy as np
import torch
from recbole.data.interaction import Interaction
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_matrix
from torch import Tensor

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.model.session_baselines import Untrained
from recbole_pos.values import SECONDS, Options

_SECONDS_PER_DAY = 86_400
_MAX_TALE_ITEMS = 40_000  # two matrices [items, items] of float64 take 26 GB then
_BLOCK_CELLS = 1 << 22  # items of histories that are counted at a time


class RecentPop(Untrained):
    """Popularity of the newest days: items by their training interactions in the last
    ``window_days`` before the newest training interaction.

    Equally popular items are ordered by their interactions in all of the training part.
    """

    refuses = {"MAX_ITEM_LIST_LENGTH": "it does not read the history"}

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Score all items by their training interactions of the last ``window_days``.

        Args:
            config: options of the model.
            dataset: training part of a dataset, with times.
        """
        super().__init__(config, dataset)
        rows = np.flatnonzero(dataset.part == TRAIN)
        times, items = dataset.log.times.numpy()[rows], dataset.log.items.numpy()[rows]
        seconds = (times.max() - times) * SECONDS[config["timestamp_unit"]]
        is_recent = seconds <= config["window_days"] * _SECONDS_PER_DAY
        num_recent = np.bincount(items[is_recent], minlength=self.n_items)

        # the rank of an item in [0, 1) decides between equal numbers of recent interactions
        by_popularity = np.argsort(dataset.popularity, kind="stable")
        rank = np.empty(self.n_items)
        rank[by_popularity] = np.arange(self.n_items) / self.n_items
        self.register_buffer("scores", torch.from_numpy(num_recent + rank), persistent=False)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return [B, items] scores, the same for every history."""
        return self.scores.repeat(len(interaction[self.ITEM_SEQ]), 1)


class TALE(Untrained):
    """A linear model of items with time decay (Park et al., "Temporal Linear Item-Item Model for
    Sequential Recommendation", WSDM 2025).

    Every training target t of a user is a row of two matrices: S has the items s before it with the
    weight max(exp(-(time_t - time_s) / tau_train), time_floor), and T a 1 for the target. Then
    B = (S'S + reg_weight I)^-1 S'T, and a history x scores the items by x B, where the item at
    position p from the end, 0 for the newest, has the weight exp(-p / tau_inf). Of an item that
    occurs several times the largest weight counts.

    Left out is the paper's trend-aware normalisation, which the published code does not have.
    Times are counted in days here. The published code adds 1 to every weight of S; the paper does
    not.
    """

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Solve for the matrix B [n_items, n_items] that scores items by the items of a history.

        Args:
            config: options, ``properties/model/TALE.yaml``.
            dataset: training part of a dataset, with times.

        Raises:
            UsageError: if the matrix would be too large.
        """
        super().__init__(config, dataset)
        if self.n_items > _MAX_TALE_ITEMS:
            raise UsageError(
                f"TALE: expected at most {_MAX_TALE_ITEMS:,} items, found {self.n_items - 1:,}: it "
                "inverts a matrix of all pairs of items; filter rare ones by "
                "item_inter_num_interval, or take TransitionGraph"
            )
        self.tau_inference = config["tau_inf"]
        weights = self._solve(config, dataset)
        self.register_buffer("weights", torch.from_numpy(weights).float(), persistent=False)

    def _solve(self, config: Options, dataset: Dataset) -> np.ndarray:
        """Return B = (S'S + reg_weight I)^-1 S'T, the weights between items (TALE, WSDM 2025).

        S and T have a row for each training target: S the items before it, with a weight that
        decays with the time between; T a 1 for the target. Of S and T only some rows exist at a
        time, whose products are added up.

        Args:
            config: options ``tau_train``, ``time_floor`` and ``reg_weight``.
            dataset: training part of a dataset, with times.

        Returns:
            [n_items, n_items] float64.
        """
        # the interactions before each target, from ``starts`` on: at most the newest L
        log = dataset.log
        items, times = log.items.numpy(), log.times.numpy()
        days_per_unit = SECONDS[config["timestamp_unit"]] / _SECONDS_PER_DAY
        targets = np.flatnonzero(dataset.split.find_targets(TRAIN))
        starts = np.maximum(log.offsets[log.users.numpy()[targets]], targets - self.max_seq_length)

        gram = np.zeros((self.n_items, self.n_items))  # S'S
        cross = np.zeros((self.n_items, self.n_items))  # S'T

        # cut the targets into blocks with about ``_BLOCK_CELLS`` interactions before them
        num_sources = np.cumsum(targets - starts)
        is_first = np.diff(num_sources // _BLOCK_CELLS, prepend=-1) != 0
        for block in np.split(np.arange(len(targets)), np.flatnonzero(is_first)[1:]):
            lengths = targets[block] - starts[block]
            source_rows = gather_index(starts[block], lengths)
            row = np.repeat(np.arange(len(block)), lengths)  # in S and T
            days = (times[targets[block]][row] - times[source_rows]) * days_per_unit
            decay = np.maximum(np.exp(-days / config["tau_train"]), config["time_floor"])

            shape = len(block), self.n_items
            sources = csr_matrix((decay, (row, items[source_rows])), shape)
            ones = np.ones(len(block))
            answers = csr_matrix((ones, (np.arange(len(block)), items[targets[block]])), shape)
            gram += (sources.T @ sources).toarray()
            cross += (sources.T @ answers).toarray()

        # ``cho_solve`` needs a positive definite matrix, which the regularisation makes of it
        gram[np.diag_indices_from(gram)] += config["reg_weight"]
        return cho_solve(cho_factor(gram, overwrite_a=True), cross, overwrite_b=True)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return [B, items] scores of all items after each history: x B.

        x has the weight exp(-p / tau_inf) for the item at position p from the end, 0 for the
        newest; of an item that occurs several times the largest one.

        Args:
            interaction: RecBole's batch, with histories [B, L] padded with 0 on the right.

        Returns:
            [B, items].
        """
        history, length = interaction[self.ITEM_SEQ], interaction[self.ITEM_SEQ_LEN]
        position = torch.arange(history.size(1), device=history.device)
        from_end = length[:, None] - 1 - position  # negative for padding, whose item is 0
        weight = torch.exp(-from_end.clamp(min=0) / self.tau_inference)
        query = weight.new_zeros(len(history), self.n_items)
        query.scatter_reduce_(1, history, weight, "amax")
        query[:, 0] = 0  # padding
        return query @ self.weights
