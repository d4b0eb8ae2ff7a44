"""Evaluation: best weights, masked histories, catalogues of any size, ranks of all targets.

RecBole's trainer evaluates rows of RecBole's form; only scoring and collecting are replaced. It
scores, sorts and marks whole rows: 512 rows of a million items take 2 GB for the scores alone. Here
the scores in memory are rows x :data:`~recbole_pos.layers.large_products.PART`.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from recbole.evaluator import Collector
from recbole.trainer.trainer import Trainer
from torch import Tensor

from recbole_pos.config.metrics import DATASET, EVENT, ITEMS, RANK
from recbole_pos.data.protocol import find_excluded_items, masks_history
from recbole_pos.data.splits import PHASES
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.distributed import current_shard, gather_rows
from recbole_pos.errors import UsageError
from recbole_pos.experiment.checkpoint import load_best, load_weights
from recbole_pos.layers import large_products
from recbole_pos.layers.hooks import require_scores
from recbole_pos.model.base import PosRecommender
from recbole_pos.reporter import Reporter, Task
from recbole_pos.values import SECONDS, Options

# Names of data that an evaluation collects, beside RANK, EVENT, ITEMS and DATASET. RecBole's TOPK
# says which of the best items of a row is its target: [rows, k + 1] of 0 and 1.
TOPK = "rec.topk"
BLOCK = 4_000_000  # interactions that :func:`find_repeats` looks at together
_FULL_ROWS = ("rec.meanrank", "rec.score", "data.label")  # data of metrics that need all scores
_ROWS = (TOPK, ITEMS, RANK, EVENT, "rec.meanrank", "rec.score")  # data with a row for each target


class EvaluatingTrainer(Trainer):
    """The part of a trainer that evaluates.

    RecBole's loop over batches, ``Trainer.evaluate``, calls :meth:`_full_sort_batch_eval` for the
    scores of each batch, and the ``eval_collector`` with these scores.

    Attributes:
        reporter: reporter of the run; a new one for each evaluation if None.
        best_weights: the weights to evaluate with, if they are in memory.
        loaded_from: of a loaded model, the checkpoint that has them.
        task: progress of the current evaluation.
    """

    reporter: Reporter | None
    best_weights: dict[str, Any] | None
    loaded_from: Path | None = None
    task = Task("evaluation")

    def evaluate(
        self,
        eval_data: Any,
        load_best_model: bool = True,
        model_file: str | None = None,
        show_progress: bool = False,
    ) -> dict[str, float] | None:
        """Return the metrics of a phase (validation or test); the arguments are RecBole's.

        Args:
            eval_data: loader of the phase.
            load_best_model: whether the best weights are loaded first, see ``_load_best_weights``.
            model_file: a checkpoint with the best weights, if they are not those of this trainer.
            show_progress: whether progress is shown, unless the trainer has a reporter.

        Returns:
            Metric -> value, such as ``ndcg@10``; None if the phase has no targets.
        """
        if not eval_data:
            return None
        if load_best_model:
            self._load_best_weights(model_file)

        # The collector, which RecBole's loop over batches calls, collects what metrics need. In the
        # test, the last phase, it also collects the rank of every target for the run folder.
        dataset = eval_data._dataset
        self.eval_collector.dataset = dataset
        self.eval_collector.keeps_ranks = dataset.phase == PHASES[-1]

        # Within ``shared_items``, a model of this package computes its item vectors only once, and
        # not for each batch.
        is_native = isinstance(self.model, PosRecommender)
        shared_items = self.model.shared_items() if is_native else nullcontext()
        reporter = self.reporter or Reporter(show_progress)
        task = reporter.task(f"evaluation ({dataset.phase})", len(eval_data), show_progress)
        # ``self.task`` is the progress that is shown, which each batch advances.
        with torch.inference_mode(), shared_items, task as self.task:
            metrics = super().evaluate(eval_data, load_best_model=False)
        return {metric: float(value) for metric, value in metrics.items()}  # GAUC is a numpy float

    def _load_best_weights(self, file: str | None) -> None:
        """Put the best weights into the model.

        They are in a file, if one is given, or else in memory. A loaded model that was not trained
        further has none in memory: then they are in the checkpoint that it was loaded from
        (``loaded_from``), or else in the one that this trainer writes (``saved_model_file``).

        Args:
            file: a checkpoint, or None.
        """
        if file is None and self.best_weights is not None:
            load_weights(self.model, self.best_weights)
        else:
            load_best(self.model, file or self.loaded_from or self.saved_model_file)

    @property
    def part_size(self) -> int | None:
        """Number of items scored at a time; None where whole rows (of all items) are scored.

        A large catalogue is scored in parts (of ``PART`` items) if the model scores by products
        with the vectors of items, and no metric, such as GAUC, needs all scores at once.
        """
        model, register = self.model, self.eval_collector.register
        scores_in_parts = (
            isinstance(model, PosRecommender)
            and model.scores_by_products
            and model.item_embedding.num_embeddings > large_products.PART
            # ``need`` is RecBole's: whether a metric needs data of this name.
            and not any(register.need(name) for name in _FULL_ROWS)
        )
        return large_products.PART if scores_in_parts else None

    def _full_sort_batch_eval(self, batched_data: tuple) -> tuple:
        """Score a batch of examples, in place of RecBole's method of this name.

        Args:
            batched_data: four values of RecBole's: the examples, an Interaction of b rows; None, in
                the place of seen items, which are found here; and the target of each example, as
                the number of its row ([b] from 0 on) and its item ([b] ids).

        Returns:
            The same four, with scores in place of None: [b, items], -inf for items that are not
            ranked, or :class:`RowScores` for a large catalogue (if ``part_size`` is not None).
        """
        self.task.advance()  # the progress that is shown
        interaction, _, target_rows, target_items = batched_data

        excluded = self._find_excluded(interaction)
        if self.part_size:  # a large catalogue: scores are computed later, part by part
            row_scores = self._make_row_scores(interaction, excluded)
            return interaction, row_scores, target_rows, target_items
        try:
            scores = self._score_all_items(interaction, excluded)
        except NotImplementedError:
            # The model can only score given pairs of a row and an item. RecBole's method asks it
            # for every pair. It reads what is excluded from the second of the four values.
            return super()._full_sort_batch_eval((interaction, excluded, target_rows, target_items))
        return interaction, scores, target_rows, target_items

    def _find_excluded(self, interaction: Any) -> tuple[Tensor, Tensor] | None:
        """Return which items are not ranked in a batch, since the user has seen them.

        Args:
            interaction: the examples, an Interaction of b rows. Its column TARGET_EVENT says which
                of all interactions is the target of a row; earlier ones of the user are seen.

        Returns:
            Rows [p] and items [p] of p pairs; None if the run does not exclude seen items.
        """
        if not masks_history(self.config):
            return None
        log = self.eval_collector.dataset.log  # all interactions
        return find_excluded_items(log, interaction[TARGET_EVENT])

    def _score_all_items(self, interaction: Any, excluded: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the scores [b, items] of a batch, -inf for items that are not ranked.

        Args:
            interaction: the examples, an Interaction of b rows.
            excluded: rows [p] and items [p] of p pairs that are not ranked; None for none.

        Raises:
            NotImplementedError: by a model that can only score given pairs of a row and an item.
        """
        found = self.model.full_sort_predict(interaction.to(self.device))
        # ``tot_item_num`` is RecBole's name for the number of items, padding included.
        scores = require_scores(found, len(interaction), self.tot_item_num, self.model)
        scores[:, 0] = -torch.inf  # padding is no item
        if excluded is not None:
            scores[excluded] = -torch.inf
        return scores

    def _make_row_scores(
        self, interaction: Any, excluded: tuple[Tensor, Tensor] | None
    ) -> RowScores:
        """Return the scores of a batch as an object that computes them for some items at a time.

        Args:
            interaction: the examples, an Interaction of b rows.
            excluded: rows [p] and items [p] of p pairs that are not ranked; None for none.
        """
        if excluded is not None:
            rows, items = excluded
            excluded = rows.to(self.device), items.to(self.device)

        # ``products`` multiplies states [b, d] by the vectors of some ids, of vectors [items, d].
        states = self.model.compute_states(interaction.to(self.device))
        vectors = self.model.item_vectors()
        score = functools.partial(large_products.products, states, vectors)
        ids = torch.arange(1, len(vectors), device=vectors.device)  # without 0, the padding
        return RowScores(score, ids, excluded)


@dataclass(frozen=True)
class RowScores:
    """Scores of rows with one target each, of one part of the items at a time.

    Attributes:
        score: function of ids [c] that returns the scores [b, c].
        items: [n] ids of the items to rank, in ascending order.
        excluded: rows [p] and items [p] of p pairs that are not ranked; None for none.
    """

    score: large_products.Scores
    items: Tensor
    excluded: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_matrix(cls, scores: Tensor) -> RowScores:
        """Return the scores of a matrix [b, items], whose column 0 is padding, in this form."""
        items = torch.arange(1, scores.size(1), device=scores.device)
        # ``score`` is asked for ids that follow each other, so it returns a slice of columns.
        return cls(lambda ids: scores[:, ids[0] : ids[-1] + 1], items)

    def find_best(self, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and ids [b, k] of the best items; of equal scores, the lower id first."""
        # A Choice says which items are ranked. ``score_parts`` yields their ids and scores part by
        # part, and ``select_best`` keeps the k best.
        choice = large_products.Choice(self.items)
        parts = large_products.score_parts(self.score, choice, self.excluded)
        return large_products.select_best(parts, k)

    def rank(self, targets: Tensor) -> Tensor:
        """Return the ranks [b] of targets ([b] ids) in the order of ``find_best``, from 0.

        A target with the score -inf is no candidate; its rank is the number of items.
        """
        # ``score_and_rank`` returns the score and the rank, from 1, of one item of each row, among
        # the items that a Choice names.
        ids, choice = targets[:, None], large_products.Choice(self.items)
        score, rank = large_products.score_and_rank(self.score, choice, ids, self.excluded)
        is_candidate = score[:, 0] > -torch.inf
        return torch.where(is_candidate, rank[:, 0] - 1, len(self.items))


class TargetCollector(Collector):
    """RecBole's collector, with one order of equal scores, for rows with one target each.

    RecBole's ``topk`` leaves open which of equal scores it returns. Here the lower id is first, as
    in recommendations, whatever the cutoffs. It is also faster: RecBole marks the targets in a
    matrix [rows, items] and sums its rows; here an item is a hit if it is the target.

    Attributes:
        needs_items: whether a metric needs the best items of each row (ITEMS).
        needs_topk: whether a metric needs to know which of these are the target (TOPK).
        needs_ranks: whether a metric of one's own needs the rank of each target (RANK).
        keeps_ranks: whether ranks are collected even if no metric needs them.
        dataset: the dataset of the current phase.
        last: RecBole's DataStruct of the last evaluation; None before.
    """

    def __init__(self, config: Options) -> None:
        """Find out which data the metrics of a configuration need.

        This class collects hits among the best items (TOPK), the best items (ITEMS) and the ranks
        of targets (RANK) itself. Other data are left to RecBole's collector, its base class.

        Args:
            config: configuration of the run, with its metrics.
        """
        # RecBole's ``register`` has an attribute for each kind of data, named TOPK and so on: True
        # if a metric needs it. ``register.need(name)`` returns that attribute.
        super().__init__(config)
        self.needs_topk = self.register.need(TOPK)
        self.needs_items = self.register.need(ITEMS)
        self.needs_ranks = self.register.need(RANK)

        # RecBole's collector must not collect TOPK and ITEMS as well, so the register says from now
        # on that no metric needs them. RecBole has no RANK.
        setattr(self.register, TOPK, False)
        setattr(self.register, ITEMS, False)

        # The trainer sets these two before each evaluation: whether ranks are collected even if no
        # metric needs them (in the test), and the dataset of the phase.
        self.keeps_ranks = False
        self.dataset: Any = None
        self.last: Any = None  # what the last evaluation has collected

    def eval_batch_collect(
        self,
        scores_tensor: Tensor | RowScores,
        interaction: Any,
        positive_u: Tensor,
        positive_i: Tensor,
    ) -> None:
        """Collect what metrics need of a batch: hits among the best items, and ranks of targets.

        They are appended to RecBole's store ``data_struct`` under these names:

        - TOPK and ITEMS, the hits and the best items, if a metric needs them (``needs_topk``,
          ``needs_items``);
        - RANK and EVENT, the ranks and which interactions the targets are, if a metric needs ranks
          (``needs_ranks``), and always in the test (``keeps_ranks``), which writes them to a file;
        - other data of RecBole's metrics, such as the mean rank, which RecBole's method appends.

        Args:
            scores_tensor: [rows, items], -inf for items that are not ranked; or RowScores, which
                compute the scores of some items at a time when they are asked for.
            interaction: the rows, as RecBole's Interaction.
            positive_u: [rows] number of the row of each target, in ascending order.
            positive_i: [rows] item of each target.
        """
        # RecBole's method appends the other data, which need a matrix: scores are RowScores only
        # if no metric needs these data. It leaves TOPK and ITEMS to this method.
        if isinstance(scores_tensor, RowScores):
            scores = scores_tensor
        else:
            super().eval_batch_collect(scores_tensor, interaction, positive_u, positive_i)
            scores = RowScores.from_matrix(scores_tensor)

        targets = positive_i.to(scores.items.device)
        if self.needs_topk or self.needs_items:
            self._collect_best(scores, targets)
        if self.needs_ranks or self.keeps_ranks:
            self.data_struct.update_tensor(RANK, scores.rank(targets))
            self.data_struct.update_tensor(EVENT, interaction[TARGET_EVENT])

    def _collect_best(self, scores: RowScores, targets: Tensor) -> None:
        """Collect the k best items of each row, and which of them are its target.

        k is the largest cutoff of the metrics. ``data_struct`` gets them under the names ITEMS
        ([rows, k] ids) and TOPK ([rows, k + 1] of 0 and 1).

        Args:
            scores: scores of the rows.
            targets: [rows] item that is the target of each row.
        """
        best_scores, best = scores.find_best(max(self.topk))  # [rows, k] each
        if best_scores.isnan().any():  # torch sorts NaN above all numbers
            raise UsageError(
                f"{self.config['model']}: its scores are not numbers (NaN), so nothing can be "
                "ranked; train it again with a lower learning_rate"
            )
        if self.needs_items:
            self.data_struct.update_tensor(ITEMS, best)
        if self.needs_topk:
            # A list may end with excluded items, whose score is -inf, where fewer than k are left;
            # a target among them is no hit. RecBole wants the number of targets in a last column.
            hits = (best == targets[:, None]) & (best_scores > -torch.inf)
            num_targets = torch.ones_like(hits[:, :1])
            self.data_struct.update_tensor(TOPK, torch.cat((hits, num_targets), 1).long())

    def get_data_struct(self) -> Any:
        """Return what has been collected in an evaluation, and empty the store for the next one.

        RecBole's trainer calls this after the last batch, and gives the result to the metrics.

        Returns:
            A copy of ``data_struct``, RecBole's store of data by name. If several processes
            evaluate, it has the rows of all of them.
        """
        # RecBole's method copies the store and empties it, except of data that RecBole does not
        # have: RANK (ranks of the targets) and EVENT (which interactions they are).
        collected = super().get_data_struct()
        for name in (RANK, EVENT):
            if name in self.data_struct:
                del self.data_struct[name]

        # Each of several processes has evaluated some of the targets. Join the rows of all of them.
        # _ROWS names the data that have a row for each target.
        if not current_shard().is_alone:
            own_rows = {name: collected.get(name) for name in _ROWS if name in collected}
            for name, rows in gather_rows(own_rows).items():
                collected.set(name, rows)

        # Metrics of the user's (those that need ranks) may read attributes of items.
        if self.needs_ranks:
            collected.set(DATASET, self.dataset)
        self.last = collected  # ``collect_test_ranks`` reads it
        return collected


def collect_test_ranks(collector: TargetCollector) -> pd.DataFrame:
    """Return the rank of every target in a collector's last test, as :func:`make_rank_table`."""
    # ``last`` is what the test has collected: under EVENT which interactions of the log the targets
    # are, and under RANK their ranks, from 0.
    targets = collector.last.get(EVENT).cpu().numpy()
    ranks = collector.last.get(RANK).cpu().numpy()
    return make_rank_table(collector.dataset, targets, ranks, collector.config["timestamp_unit"])


def make_rank_table(
    dataset: Any, targets: np.ndarray, ranks: np.ndarray, time_unit: str
) -> pd.DataFrame:
    """Make the table of ``test_ranks.parquet``, a row for each target in the order of the dataset.

    Args:
        dataset: the dataset of the phase.
        targets: [targets] indices of the targets in its log.
        ranks: [targets] their ranks, 0 for the first.
        time_unit: unit of the time field, such as seconds.

    Returns:
        Columns ``user`` and ``item``, as in the files; ``rank``; ``history``, number of earlier
        interactions of the user; ``age``, seconds since the newest of them; ``popularity``, number
        of training interactions of the item; ``repeats`` and ``habit``, see :func:`find_repeats`.
    """
    # The targets of several processes come in any order.
    order = np.argsort(targets, kind="stable")
    targets = targets[order]

    # The log, all interactions, is sorted by user and time. A target has a history, so the
    # interaction before it in the log is the newest of the same user. ``log.ranks`` has for each
    # interaction the number of earlier ones of its user.
    log = dataset.log
    users, items = log.users.numpy()[targets], log.items.numpy()[targets]
    times, unit = log.times.numpy(), SECONDS[time_unit]
    repeats, habit = find_repeats(log.users.numpy(), log.items.numpy(), times, targets, unit)
    columns = {
        "user": dataset.field2id_token[dataset.uid_field][users].astype(str),
        "item": dataset.field2id_token[dataset.iid_field][items].astype(str),
        "rank": ranks[order],
        "history": log.ranks[targets],
        "age": (times[targets] - times[targets - 1]) * unit,
        "popularity": dataset.popularity[items],
        "repeats": repeats,
        "habit": habit,
    }
    return pd.DataFrame(columns)


def find_repeats(
    users: np.ndarray, items: np.ndarray, times: np.ndarray, targets: np.ndarray, unit: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return how often users have had the target before, and whether at that time of the day.

    If a user had an item at 8:10, 9:50 and 20:00 and has it again at 9:30, repeats is 3, and habit
    is 66.7: 8:10 and 9:50 are in the same hour of the day as 9:30, or in one next to it.

    Args:
        users, items, times: [n] of each interaction of the log, sorted by user and time.
        targets: [targets] which interactions are targets.
        unit: seconds that a time counts.

    Returns:
        repeats: [targets] number of earlier interactions of the user with the item.
        habit: [targets] percentage of these in the same hour of the day, the one before, or the one
            after; NaN where there are none.
    """
    # A pair is a number for a user with an item. Keep only interactions whose pair is a target's.
    # The log is gone through in blocks, so that a large one needs little memory.
    num_items = int(items.max()) + 1
    pairs = pd.Index(users[targets].astype(np.int64) * num_items + items[targets]).unique()
    rows, numbers = [], []
    for start in range(0, len(users), BLOCK):
        block = slice(start, start + BLOCK)
        number = pairs.get_indexer(users[block].astype(np.int64) * num_items + items[block])
        rows.append(start + np.flatnonzero(number >= 0))  # -1 is no target's
        numbers.append(number[number >= 0])
    kept, pair = np.concatenate(rows), np.concatenate(numbers)
    target_pair = pair[np.searchsorted(kept, targets)]  # targets are kept, too

    repeats = _count_earlier(pair, kept, target_pair, targets)
    # Each pair has 24 groups, one for each hour of the day.
    hour, target_hour = (
        (times[which] * unit // 3600).astype(np.int64) % 24 for which in (kept, targets)
    )
    groups = pair * 24 + hour
    near = np.zeros_like(repeats)
    for shift in (-1, 0, 1):
        wanted = target_pair * 24 + (target_hour + shift) % 24
        near += _count_earlier(groups, kept, wanted, targets)
    return repeats, 100 * near / np.where(repeats > 0, repeats, np.nan)


def _count_earlier(
    groups: np.ndarray, rows: np.ndarray, wanted: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """Return how many interactions of a group come before each target in the log.

    Args:
        groups: [n] group of each interaction, a number from 0 on.
        rows: [n] its place in the log.
        wanted: [targets] the group to count in.
        targets: [targets] place of each target in the log.
    """
    # Keys sort by group, and within a group by the place in the log.
    size = int(targets.max(initial=0)) + int(rows.max(initial=0)) + 1
    keys = np.sort(groups * size + rows)
    begins = wanted * size
    return np.searchsorted(keys, begins + targets) - np.searchsorted(keys, begins)
