"""Baselines: models that count (SPop, SessionKNN, TransitionGraph, RecentPop), TALE, BPR and FPMC.

Those that count, and TALE, a linear model, are made of the training interactions in their
constructors, without gradients.

RecBole's ItemKNN, BPR and FPMC look a session up as a user. A session of the test part has no
training interaction, so that its row is empty (ItemKNN) or still random (BPR, FPMC). In SessionKNN,
SessionBPR and SessionFPMC a session is what it has shown so far, as in Hidasi et al.,
"Session-based Recommendations with Recurrent Neural Networks" (ICLR 2016), and Li et al., "Neural
Attentive Session-based Recommendation" (CIKM 2017).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.model.init import xavier_normal_initialization
from recbole.model.loss import BPRLoss
from recbole.model.sequential_recommender.fpmc import FPMC
from recbole.utils import InputType
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_matrix, diags
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from recbole_pos.data.dataset import Dataset
from recbole_pos.data.interactions import EventLog
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.values import SECONDS, Options

_SECONDS_PER_DAY = 86_400
_MAX_TALE_ITEMS = 40_000  # two matrices [items, items] of float64 take 26 GB then
_BLOCK_CELLS = 1 << 22  # items of histories that are counted at a time
_KNOWS_LAST_ITEM = {"MAX_ITEM_LIST_LENGTH": "it knows the last item of a history only"}


class Untrained(SequentialRecommender):
    """Base of sequential models that count and learn nothing: one epoch without a gradient."""

    input_type = InputType.POINTWISE
    is_untrained = True  # what reads it: ``models.is_untrained``

    def __init__(self, config: Options, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.nothing = nn.Parameter(torch.zeros(1))  # an optimiser needs a parameter

    def calculate_loss(self, interaction: Interaction) -> Tensor:
        """Return a loss of zero, with which the trainer can run its one epoch."""
        return self.nothing.sum() * 0

    def predict(self, interaction: Interaction) -> Tensor:
        """Return [B] score of each row's item after its history."""
        items = interaction[self.ITEM_ID][:, None]
        return self.full_sort_predict(interaction).gather(1, items).squeeze(1)


class SPop(Untrained):
    """Session popularity: the items seen most often in the session, ties by overall popularity
    (Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016)."""

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Give each item a rank by its number of training interactions.

        The most popular of n items has the rank n - 1, the next one n - 2, and so on to 0. Scores
        use the ranks to decide between items that are equally often in a session.

        Args:
            config: options of the model.
            dataset: training part of a dataset; ``popularity`` [n_items] are the counts of items.
        """
        super().__init__(config, dataset)
        # pandas gives 1 to the most popular item, and of equal ones to the lower id
        rank = self.n_items - pd.Series(-dataset.popularity).rank(method="first").to_numpy()
        # not saved in checkpoints: the ranks are computed again from the same training data
        self.register_buffer("popularity", torch.from_numpy(rank), persistent=False)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return the scores of all items: by how often each is in the history, then by popularity.

        The score of an item is n_items * (number of times it is in the history) + its rank by
        popularity, from 0 for the least popular item to n_items - 1 for the most popular one. So
        ranks decide only between items that are equally often in the history.

        Args:
            interaction: RecBole's batch, with histories [B, L] padded with 0.

        Returns:
            [B, items].
        """
        history = interaction[self.ITEM_SEQ]
        # what each place of a history adds to the score of its item; nothing at padding
        added = (history > 0).to(self.popularity) * self.n_items  # [B, L]
        # start with the ranks (``popularity``), and add to an item as often as it occurs
        return self.popularity.repeat(len(history), 1).scatter_add_(1, history, added)


def find_nearest_items(
    interactions: csr_matrix, k: int, shrink: float
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k items most similar to each item, by the sessions that have both.

    With c_ij the number of sessions that have both items, and c_i of those that have item i, the
    similarity is the cosine, less for rare items: c_ij / (sqrt(c_i) sqrt(c_j) + shrink).

    Args:
        interactions: [sessions, items], above zero where the item is in the session.
        k: number of similar items.
        shrink: number that lowers the similarity of rare items, which may be chance.

    Returns:
        Ids and similarities [items, k], 0 where there are fewer than k.
    """
    # c_ij, as lists of row, column and number
    num_items = interactions.shape[1]
    occurs = (interactions > 0).astype(np.float64)
    cooccurrence = (occurs.T @ occurs).tocoo()
    row, column = cooccurrence.row, cooccurrence.col

    norm = np.sqrt(np.asarray(occurs.sum(axis=0)).ravel())  # sqrt(c_i) of each item
    similarity = cooccurrence.data / (norm[row] * norm[column] + shrink)
    is_other = row != column  # an item is not similar to itself
    return _take_best(row[is_other], column[is_other], similarity[is_other], num_items, k)


def find_reachable_items(
    transitions: csr_matrix, k: int, hops: int, max_cells: int = 1 << 22
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k items that are nearest to each item in a graph of transitions.

    The nearest ones are reached by the fewest transitions and, of equally many, are the most
    probable in a random walk. An item that the walk can reach in h transitions, and not in fewer,
    has the score hops - h, plus the probability that the walk is there after h transitions.

    Let ``hops`` be 2, item 1 be followed once by 2 and three times by 3, and item 2 always by 4.
    From item 1 the items 3, 2 and 4 have the scores 1.75, 1.25 and 0.25: one transition leads to 3
    with the probability 0.75 and to 2 with 0.25, and two lead to 4 with 0.25.

    Args:
        transitions: [items, items] how often the second item follows the first.
        k: number of items.
        hops: most transitions.
        max_cells: cells of walks, [rows, items], that are in memory at a time; one row at least.

    Returns:
        Ids and scores [items, k], 0 where there are fewer than k.
    """
    # each row divided by its sum: the probability of each transition, [items, items]
    num_items = transitions.shape[0]
    totals = np.asarray(transitions.sum(axis=1)).ravel()
    probability = diags(1 / np.maximum(totals, 1)) @ transitions

    # a block of items, the sources, at a time
    block = max(max_cells // num_items, 1)
    best = []
    for sources in np.split(np.arange(num_items), range(block, num_items, block)):
        # all items that are reached: the index of the source, the item, and its score
        row, item, score = _score_reached_items(sources, probability, hops)
        # the k best items of each source and their scores, [sources, k] both
        best.append(_take_best(row, item, score, len(sources), k))

    items, scores = zip(*best, strict=True)
    return np.concatenate(items), np.concatenate(scores)


def _score_reached_items(
    sources: np.ndarray, probability: csr_matrix, hops: int
) -> tuple[np.ndarray, ...]:
    """Score the items that random walks reach: the sooner and the more probably, the higher.

    A walk starts at a source. Each hop takes it to another item, with the probability of that
    transition. An item that a walk can reach in h hops, and not in fewer, has the score hops - h,
    plus the probability that the walk is there after h hops.

    Let item 1 be followed by 2 with probability 0.25 and by 3 with 0.75, and 2 by 4 always. Of two
    hops from item 1 the first may reach 2 and 3, which get the scores 1.25 and 1.75. The second may
    reach 4, with the score 0.25.

    Args:
        sources: [n] int64 items at which the n walks start.
        probability: [items, items] probability of each transition.
        hops: most transitions.

    Returns:
        Number of the walk, item and score, [reached] each.
    """
    # [n, items] the probability that each walk is at each item: at first 1 at its source
    num_walks, num_items = len(sources), probability.shape[0]
    at_source = np.ones(num_walks), (np.arange(num_walks), sources)
    position = csr_matrix(at_source, (num_walks, num_items))
    was_reached = position > 0  # [n, items] bool, by the hops before this one

    parts = []
    for hop in range(1, hops + 1):
        position = position @ probability
        # the probabilities at items that no earlier hop has reached
        first_reached = (position - position.multiply(was_reached)).tocoo()
        first_reached.eliminate_zeros()
        parts.append((first_reached.row, first_reached.col, hops - hop + first_reached.data))
        was_reached = was_reached + (position > 0)
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def _take_best(
    row: np.ndarray, column: np.ndarray, score: np.ndarray, num_rows: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best scores of each row of a sparse matrix and their columns.

    A row is an item, its columns are other items, and a score says how near they are.

    Args:
        row, column, score: [E] row, column and score of each entry, in any order.
        num_rows: number of rows.
        k: number of scores to select.

    Returns:
        int64 columns and float32 scores, [num_rows, k] each, the best first and of equal ones the
        lower column. Both are 0 where a row has fewer than k entries.
    """
    order = np.lexsort((column, -score, row))
    row, column, score = row[order], column[order], score[order]

    # the place of each entry in its sorted row: the rows 0, 0, 2 begin at 0, 0, 2, so it is 0, 1, 0
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    is_best = rank < k

    columns = np.zeros((num_rows, k), dtype=np.int64)
    scores = np.zeros((num_rows, k), dtype=np.float32)
    columns[row[is_best], rank[is_best]] = column[is_best]
    scores[row[is_best], rank[is_best]] = score[is_best]
    return columns, scores


class SessionKNN(Untrained):
    """Item-KNN for sessions: the items most like the session's last item, by common sessions
    (Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016)."""

    refuses = _KNOWS_LAST_ITEM

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Find the k items nearest to each item, and their scores, from the training part.

        Args:
            config: options; ``k`` is the number of items.
            dataset: training part of a dataset.
        """
        super().__init__(config, dataset)
        items, similarities = self.find_neighbours(config, dataset)
        # counted again from the training data that a checkpoint belongs to
        self.register_buffer("neighbours", torch.from_numpy(items), persistent=False)
        self.register_buffer("similarity", torch.from_numpy(similarities), persistent=False)

    def find_neighbours(self, config: Options, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the items nearest to each item and their scores, [items, k] each.

        ``inter_matrix`` is RecBole's matrix [sessions, items] of the training interactions.
        """
        return find_nearest_items(dataset.inter_matrix("csr"), config["k"], config["shrink"])

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return the scores of all items after each history, by its last item only.

        The k items nearest to the last one have their similarities to it as scores, all others 0.
        ``neighbours`` and ``similarity`` [items, k] have these items and numbers for every item.

        Args:
            interaction: RecBole's batch, with histories padded with 0 on the right.

        Returns:
            [B, items].
        """
        last = _find_last_item(interaction[self.ITEM_SEQ], interaction[self.ITEM_SEQ_LEN])
        scores = self.similarity.new_zeros(len(last), self.n_items)  # [B, items]
        return scores.scatter_(1, self.neighbours[last], self.similarity[last])


class TransitionGraph(SessionKNN):
    """The items by the fewest training transitions from the last one, then by a random walk.

    After TGH-1 of Han et al., "An Embarrassingly Simple Graph Heuristic Reveals Shortcut-Solvable
    Benchmarks for Sequential Recommendation", arXiv 2605.07125, 2026, with the same graph. There
    items after equally many transitions are ranked by the similarity of their texts and, after one,
    by counts; and 7, 2 and 1 of ten places are for one, two and three transitions. The equation is
    that of :func:`find_reachable_items`.
    """

    def find_neighbours(self, config: Options, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Return the items reached from each item by the fewest transitions, and their scores.

        A transition is a pair of different items that follow each other in a training history. They
        are counted here; ``find_reachable_items`` walks from item to item.

        Args:
            config: options; ``k`` items are returned, of up to ``hops`` transitions.
            dataset: training part of a dataset.

        Returns:
            Ids and scores [items, k], 0 where there are fewer than k.
        """
        # The log is sorted by user and time, so a pair are two rows of a user one after the other,
        # the second of the training part.
        users, items = dataset.log.users.numpy(), dataset.log.items.numpy()
        is_followed = (users[1:] == users[:-1]) & (dataset.part[1:] == TRAIN)
        is_followed &= items[1:] != items[:-1]

        # how often each item (row) is followed by each other one; held-out pairs do not count. A
        # matrix is made of ones at (row, column), which are added up where pairs are equal.
        pairs = items[:-1][is_followed], items[1:][is_followed]
        transitions = csr_matrix((np.ones(len(pairs[0])), pairs), (self.n_items, self.n_items))
        return find_reachable_items(transitions, config["k"], config["hops"])


class RecentPop(Untrained):
    """Popularity of the newest days: items by their training interactions in the last
    ``window_days`` before the newest training interaction.

    Equally popular items are ordered by their interactions in all of the training part.
    """

    refuses = {"MAX_ITEM_LIST_LENGTH": "it does not read the history"}

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Score each item by its number of training interactions in the last ``window_days``.

        Of items with the same number, those with more interactions in all of training come first.

        Args:
            config: options of the model.
            dataset: training part of a dataset, with times.
        """
        super().__init__(config, dataset)
        # ``part`` says of each interaction of the log whether it is of training
        rows = np.flatnonzero(dataset.part == TRAIN)
        times, items = dataset.log.times.numpy()[rows], dataset.log.items.numpy()[rows]
        seconds = (times.max() - times) * SECONDS[config["timestamp_unit"]]
        is_recent = seconds <= config["window_days"] * _SECONDS_PER_DAY
        num_recent = np.bincount(items[is_recent], minlength=self.n_items)

        # 1 for the least popular item, 2 for the next one, and so on
        popularity_rank = pd.Series(dataset.popularity).rank(method="first").to_numpy()
        # less than 1, so that it only orders items with the same number of recent interactions
        tie_breaker = (popularity_rank - 1) / self.n_items
        self.register_buffer("scores", torch.from_numpy(num_recent + tie_breaker), persistent=False)

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

    Differences to the published code: times count in days; weights of S below ``time_floor`` are
    raised to it, where the code adds it to them, and adds 1 to every weight. As in that code there
    is no trend-aware normalisation, whose power it reads and does not use.
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

        S and T [targets, n_items] have a row for each training target: S the weights of the items
        before it, T a 1 for the target's item. They would be large, so they are built for a block
        of targets at a time, and the products S'S and S'T of all blocks are added up.

        Args:
            config: options ``tau_train``, ``time_floor`` and ``reg_weight``.
            dataset: training part of a dataset, with times. Its log is all interactions, user by
                user and oldest first, one row each.

        Returns:
            [n_items, n_items] float64.
        """
        log = dataset.log
        # [targets] rows of the training targets in the log
        target_rows = np.flatnonzero(dataset.split.find_targets(TRAIN))
        # [targets] row of the oldest interaction that counts before each target: the first one of
        # the user, or the L-th before the target if there are more (L is ``max_seq_length``)
        user_starts = log.offsets[log.users.numpy()[target_rows]]
        start_rows = np.maximum(user_starts, target_rows - self.max_seq_length)

        gram = np.zeros((self.n_items, self.n_items))  # S'S
        cross = np.zeros((self.n_items, self.n_items))  # S'T
        # targets that have about ``_BLOCK_CELLS`` interactions before them, at a time
        for block in _split_by_size(target_rows - start_rows, _BLOCK_CELLS):
            s, t = self._build_block(config, log, target_rows[block], start_rows[block])
            gram += (s.T @ s).toarray()
            cross += (s.T @ t).toarray()

        # reg_weight I makes the matrix positive definite, as ``cho_solve`` needs it
        gram[np.diag_indices_from(gram)] += config["reg_weight"]
        return cho_solve(cho_factor(gram, overwrite_a=True), cross, overwrite_b=True)

    def _build_block(
        self, config: Options, log: EventLog, targets: np.ndarray, starts: np.ndarray
    ) -> tuple[csr_matrix, csr_matrix]:
        """Return the rows of the matrices S and T for some training targets (TALE, WSDM 2025).

        Both matrices have a row for each target and a column for each item. The row of a target in
        T has a 1 at the target's item. Its row in S has, at the item of each interaction before it,
        the weight max(exp(-age / tau_train), time_floor), where age is the time from that
        interaction to the target in days.

        Args:
            config: options ``tau_train`` and ``time_floor``.
            log: all interactions, one row each.
            targets: [k] int64 rows of the targets in the log.
            starts: [k] int64 row of the oldest interaction before each target. All rows from there
                to the target's count.

        Returns:
            S and T, [k, n_items] both.
        """
        items, times = log.items.numpy(), log.times.numpy()
        # ``before`` are the rows in the log of the interactions before the first target, then of
        # those before the second, and so on; ``target`` says before which target each is. For
        # targets [5, 9] with the starts [3, 8] they are [3, 4, 8] and [0, 0, 1].
        lengths = targets - starts
        before = gather_index(starts, lengths)
        target = np.repeat(np.arange(len(targets)), lengths)

        days_per_unit = SECONDS[config["timestamp_unit"]] / _SECONDS_PER_DAY
        age = (times[targets][target] - times[before]) * days_per_unit
        weights = np.maximum(np.exp(-age / config["tau_train"]), config["time_floor"])

        # A matrix is made of values, their rows and their columns. Values of the same place, where
        # an item occurs several times before a target, are added up.
        shape = len(targets), self.n_items
        s = csr_matrix((weights, (target, items[before])), shape)
        t = csr_matrix((np.ones(len(targets)), (np.arange(len(targets)), items[targets])), shape)
        return s, t

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return the scores of all items after each history, x B with the items x of the history.

        x is zero but for the items of the history: the item at position p from the end, 0 for the
        newest, has the weight exp(-p / tau_inf). An item that occurs several times has the largest
        of its weights. B are the weights between items (``weights``).

        Args:
            interaction: RecBole's batch, with histories [rows, L] padded with 0 on the right.

        Returns:
            [rows, items].
        """
        history, length = interaction[self.ITEM_SEQ], interaction[self.ITEM_SEQ_LEN]
        position = torch.arange(history.size(1), device=history.device)
        from_end = length[:, None] - 1 - position  # negative for padding, whose item is 0
        weight = torch.exp(-from_end.clamp(min=0) / self.tau_inference)
        # Of an item's positions only the newest counts, whose weight is the largest.
        largest = weight.new_zeros(len(history), self.n_items)
        largest.scatter_reduce_(1, history, weight, "amax")
        weight *= weight == largest.gather(1, history)
        # Adds up the rows of B of the history's items, which are few; x @ B would read all rows.
        return embedding_bag(
            history, self.weights, per_sample_weights=weight, mode="sum", padding_idx=0
        )


def _split_by_size(sizes: np.ndarray, block_size: int) -> list[np.ndarray]:
    """Split the indices of elements into blocks of successive ones, by the sizes of the elements.

    The sizes of a block add up to about ``block_size``. The block of an element has as its number
    the sum of the sizes up to the element, divided by ``block_size`` and rounded down. For example,
    with the sizes [2, 1, 4, 3] and a ``block_size`` of 4, the sums are [2, 3, 7, 10], the numbers
    [0, 0, 1, 2], and the blocks [0, 1], [2] and [3].

    Args:
        sizes: [n] int64 size of each element.
        block_size: size of a block.

    Returns:
        The indices of each block.
    """
    block_number = np.cumsum(sizes) // block_size
    block_starts = np.flatnonzero(np.diff(block_number)) + 1
    return np.split(np.arange(len(sizes)), block_starts)


class SessionBPR(SequentialRecommender):
    """BPR-MF for sessions: a session is the mean vector of its items so far (Hidasi et al.,
    "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016)."""

    input_type = InputType.PAIRWISE

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Create the item vectors and the BPR loss.

        Args:
            config: options; ``embedding_size`` is the size of the vectors.
            dataset: training part of a dataset.
        """
        super().__init__(config, dataset)
        self.item_embedding = nn.Embedding(self.n_items, config["embedding_size"], padding_idx=0)
        self.loss = BPRLoss()
        self.apply(xavier_normal_initialization)

    def forward(self, item_seq: Tensor) -> Tensor:
        """Return the vectors [B, d] of sessions, each the mean of its items [B, L]."""
        return embedding_bag(item_seq, self.item_embedding.weight, mode="mean", padding_idx=0)

    def calculate_loss(self, interaction: Interaction) -> Tensor:
        """Return the BPR loss: the next item of each history should score above a random one.

        It is the mean over rows of -log sigmoid(score of the next item - score of the other one).
        A score is the product of the session's vector and that of the item.

        Args:
            interaction: RecBole's batch: histories, the next item of each, and a random item, the
                negative.
        """
        session = self.forward(interaction[self.ITEM_SEQ])
        positive = self.item_embedding(interaction[self.POS_ITEM_ID])
        negative = self.item_embedding(interaction[self.NEG_ITEM_ID])
        return self.loss((session * positive).sum(-1), (session * negative).sum(-1))

    def predict(self, interaction: Interaction) -> Tensor:
        """Return [B] score of each row's item after its history."""
        items = self.item_embedding(interaction[self.ITEM_ID])
        return (self.forward(interaction[self.ITEM_SEQ]) * items).sum(-1)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return [B, items] score of every item after each row's history."""
        return self.forward(interaction[self.ITEM_SEQ]) @ self.item_embedding.weight.t()


class SessionFPMC(FPMC):
    """FPMC without users: RecBole's, with the Markov chain from the last item only (Li et
    al., "Neural Attentive Session-based Recommendation", CIKM 2017)."""

    refuses = _KNOWS_LAST_ITEM

    def __init__(self, config: Options, dataset: Dataset) -> None:
        """Build RecBole's FPMC without its users, so that an item's score is by the last item only.

        Args:
            config: options of the model.
            dataset: training part of a dataset.
        """
        super().__init__(config, dataset)
        # RecBole's vectors of users, and those of items by which users are multiplied
        del self.UI_emb, self.IU_emb

    def forward(
        self, user: Tensor, item_seq: Tensor, item_seq_len: Tensor, next_item: Tensor
    ) -> Tensor:
        """Return [B] score of each row's next item; ``user`` is not read.

        The score is a product of two vectors: ``LI_emb`` has those of last items, ``IL_emb`` those
        of items that follow.
        """
        last = self.LI_emb(_find_last_item(item_seq, item_seq_len))
        return (last * self.IL_emb(next_item)).sum(-1)

    def full_sort_predict(self, interaction: Interaction) -> Tensor:
        """Return [B, items] score of every item after each row's last one.

        ``LI_emb`` has the vectors of last items, ``IL_emb`` those of items that follow.
        """
        last = _find_last_item(interaction[self.ITEM_SEQ], interaction[self.ITEM_SEQ_LEN])
        return self.LI_emb(last) @ self.IL_emb.weight.t()


def _find_last_item(item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
    """Return the last item [B] of each history [B, L]."""
    return item_seq.gather(1, item_seq_len[:, None] - 1).squeeze(1)
