"""Evaluation: best weights, masked histories, catalogues of any size, ranks of all targets.

RecBole's trainer evaluates rows of RecBole's form; only scoring and collecting are replaced. It
scores, sorts and marks whole rows: 512 rows of a million items take 2 GB for the scores alone. Here
the scores in memory are rows x :data:`~recbole_pos.layers.catalogue.PART`.
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
from recbole_pos.data.candidates import find_excluded_items, masks_history
from recbole_pos.data.splits import PHASES
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.distributed import current_shard, gather_rows
from recbole_pos.errors import UsageError
from recbole_pos.experiment.checkpoint import load_best
from recbole_pos.layers import catalogue
from recbole_pos.model.base import PosRecommender
from recbole_pos.reporter import Reporter, Task
from recbole_pos.values import SECONDS, Options

TOPK = "rec.topk"  # name in RecBole's collector
_FULL_ROWS = ("rec.meanrank", "rec.score", "data.label")  # data of metrics that need all scores


class EvaluatingTrainer(Trainer):
    """The part of a trainer that evaluates.

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
            load_best_model: whether the best weights are loaded first: those in ``model_file``; if
                None, those in memory; if there are none, those in the checkpoint of the run.
            model_file: a checkpoint.
            show_progress: whether a progress bar is shown, unless the trainer has a reporter.

        Returns:
            Metric -> value, such as ``ndcg@10``; None if the phase has no targets.
        """
        if not eval_data:
            return None

        # The weights to evaluate with. ``loaded_from`` is the checkpoint of a model that was
        # loaded, ``saved_model_file`` the one that a training writes.
        if load_best_model:
            if model_file is not None or self.best_weights is None:
                load_best(self.model, model_file or self.loaded_from or self.saved_model_file)
            else:
                self.load_weights(self.best_weights)

        # RecBole's loop over the batches calls back ``_full_sort_batch_eval`` and the collector,
        # which read the log and the dataset of this phase.
        dataset = eval_data._dataset
        phase = dataset.phase
        reporter = self.reporter or Reporter(show_progress)
        self.eval_log = dataset.log
        self.eval_collector.dataset = dataset
        self.eval_collector.keeps_ranks = phase == PHASES[-1]  # in the test only
        # A model of this package computes its item vectors once for all batches (shared_items).
        is_native = isinstance(self.model, PosRecommender)
        with (
            torch.inference_mode(),
            self.model.shared_items() if is_native else nullcontext(),
            reporter.task(f"evaluation ({phase})", len(eval_data), show_progress) as self.task,
        ):
            metrics = super().evaluate(eval_data, load_best_model=False)
        return {metric: float(value) for metric, value in metrics.items()}  # GAUC is a numpy float

    @property
    def part_size(self) -> int | None:
        """Number of items scored at a time; None where whole rows (of all items) are scored.

        A large catalogue is scored in parts (of ``PART`` items) if the model scores by products
        with the vectors of items, and no metric needs all scores at once (``takes_parts``).
        """
        model = self.model
        scores_in_parts = (
            isinstance(model, PosRecommender)
            and model.scores_by_products
            and model.item_embedding.num_embeddings > catalogue.PART
            and self.eval_collector.takes_parts
        )
        return catalogue.PART if scores_in_parts else None

    def _full_sort_batch_eval(self, batched_data: tuple) -> tuple:
        """Score a batch of examples; argument and return value are those of RecBole's method.

        Args:
            batched_data: the examples as an Interaction, None (RecBole's seen items, which are
                found here instead), and the targets: ``positive_u``, the numbers of their examples,
                one target each, and ``positive_i``, their items.

        Returns:
            The examples, their scores (-inf for items that are not ranked; :class:`RowScores` for
            a large catalogue), and the targets as they came.
        """
        # Seen items are not ranked if an option says so: ``excluded``, pairs of example and item.
        # The column TARGET_EVENT says which interaction of the log is the target of an example.
        self.task.advance()
        interaction, _, positive_u, positive_i = batched_data
        excluded: Any = None
        if masks_history(self.config):
            repeated_targets = self.config["repeated_targets"]
            excluded = find_excluded_items(
                self.eval_log, interaction[TARGET_EVENT], positive_i, repeated_targets
            )

        # A large catalogue is scored part by part, only when the collector asks for it.
        if self.part_size:
            if excluded is not None:
                excluded = tuple(index.to(self.device) for index in excluded)
            states = self.model.compute_states(interaction.to(self.device))
            vectors = self.model.item_vectors()
            items = torch.arange(1, len(vectors), device=vectors.device)  # 0 is padding
            # ``products`` of states, vectors and ids returns the scores of these items.
            score = functools.partial(catalogue.products, states, vectors)
            return interaction, RowScores(score, items, excluded), positive_u, positive_i

        # Else all items at once.
        try:
            found = self.model.full_sort_predict(interaction.to(self.device))
        except NotImplementedError:  # RecBole scores the pairs of rows and items by ``predict``
            return super()._full_sort_batch_eval((interaction, excluded, positive_u, positive_i))
        # ``require_scores`` checks that there is a score for each row and item; ``tot_item_num`` is
        # RecBole's name for the number of items, padding included.
        shape = len(interaction), self.tot_item_num
        row_scores = catalogue.require_scores(found, *shape, self.model)
        row_scores[:, 0] = -torch.inf  # padding is no item
        if excluded is not None:
            row_scores[excluded] = -torch.inf
        return interaction, row_scores, positive_u, positive_i


@dataclass(frozen=True)
class RowScores:
    """Scores of rows with one target each, of one part of the items at a time.

    Attributes:
        score: function of ids [c] that returns the scores [b, c].
        items: [n] ids of the items to rank, in ascending order.
        excluded: rows [p] and items [p] of p pairs that are not ranked; None for none.
    """

    score: catalogue.Scores
    items: Tensor
    excluded: tuple[Tensor, Tensor] | None = None

    def find_best(self, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and ids [b, k] of the best items; of equal scores, the lower id first."""
        # A Choice says which items are ranked. ``score_parts`` yields their ids and scores part by
        # part, and ``select_best`` keeps the k best.
        choice = catalogue.Choice(self.items)
        return catalogue.select_best(catalogue.score_parts(self.score, choice, self.excluded), k)

    def rank(self, targets: Tensor) -> Tensor:
        """Return the ranks [b] of targets ([b] ids) in the order of ``find_best``, from 0.

        A target with the score -inf is no candidate; its rank is the number of items.
        """
        # ``score_and_rank`` returns the score and the rank, from 1, of one item of each row, among
        # the items that a Choice names.
        ids, choice = targets[:, None], catalogue.Choice(self.items)
        score, rank = catalogue.score_and_rank(self.score, choice, ids, self.excluded)
        is_candidate = score[:, 0] > -torch.inf
        return torch.where(is_candidate, rank[:, 0] - 1, len(self.items))


class TargetCollector(Collector):
    """RecBole's collector, with one order of equal scores, for rows with one target each.

    RecBole's ``topk`` leaves open which of equal scores it returns. Here the lower id is first, as
    in recommendations, whatever the cutoffs. It is also faster: RecBole marks the targets in a
    matrix [rows, items] and sums its rows; here an item is a hit if it is the target.

    Attributes:
        keeps_ranks: whether the rank of every target is collected, too, as metrics of one's own
            need it in any case.
        dataset: the dataset of the current phase.
        last: RecBole's DataStruct of the last evaluation; None before.
    """

    def __init__(self, config: Options) -> None:
        """Ask RecBole's register which data the metrics of the configuration need.

        TOPK are the hits among the best items, ITEMS the best items, and RANK the ranks of targets.

        Args:
            config: configuration of the run.
        """
        super().__init__(config)
        self.needs_topk = self.register.need(TOPK)
        self.needs_items = self.register.need(ITEMS)
        self.needs_ranks = self.register.need(RANK)
        # TOPK and ITEMS are RecBole's own names: it would collect them itself, so they are switched
        # off, as this class collects them. RANK is a name of this package, which RecBole's
        # collector passes over, so there is nothing to switch off.
        setattr(self.register, TOPK, False)
        setattr(self.register, ITEMS, False)
        self.keeps_ranks = False  # set by the trainer, for the test
        self.dataset: Any = None  # of the current phase, set by the trainer
        self.last: Any = None  # what the last evaluation has collected

    @property
    def takes_parts(self) -> bool:
        """Whether scores of a part of the items at a time suffice for all metrics."""
        # _FULL_ROWS names the data of metrics, such as GAUC, that need the scores of all items of a
        # row at once; ``need`` tells whether a metric of the run asks for such data.
        needs_full_rows = any(map(self.register.need, _FULL_ROWS))
        return not needs_full_rows and (self.needs_topk or self.needs_items or self.needs_ranks)

    def eval_batch_collect(
        self,
        scores_tensor: Tensor | RowScores,
        interaction: Any,
        positive_u: Tensor,
        positive_i: Tensor,
    ) -> None:
        """Collect what metrics need of a batch: hits among the best items, and ranks of targets.

        They go into RecBole's ``data_struct`` under the names TOPK (hits), ITEMS (the best items),
        RANK, and EVENT (which interactions the targets are).

        Args:
            scores_tensor: [rows, items], -inf for items that are not ranked; or RowScores, which
                compute the scores of some items at a time when they are asked for.
            interaction: the rows, as RecBole's Interaction.
            positive_u: [rows] number of the row of each target, in ascending order.
            positive_i: [rows] item of each target.
        """
        # From whole rows of scores, RecBole collects what its other metrics need. The rows are then
        # wrapped as RowScores, so that the code below is the same for both kinds of scores.
        scores = scores_tensor
        if not isinstance(scores, RowScores):
            super().eval_batch_collect(scores, interaction, positive_u, positive_i)
            whole_rows = scores
            items = torch.arange(1, whole_rows.size(1), device=whole_rows.device)
            # Ids that scores are asked for follow each other, so they are a slice.
            scores = RowScores(lambda ids: whole_rows[:, ids[0] : ids[-1] + 1], items)

        # The best items of each row, and which of them are its target.
        targets = positive_i.to(scores.items.device)
        if self.needs_topk or self.needs_items:
            best_scores, best = scores.find_best(max(self.topk))
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

        # The rank of each target, and where the target stands in the dataset's interactions.
        if self.keeps_ranks or self.needs_ranks:
            self.data_struct.update_tensor(RANK, scores.rank(targets))
            self.data_struct.update_tensor(EVENT, interaction[TARGET_EVENT])

    def get_data_struct(self) -> Any:
        """Return what has been collected in an evaluation, and make ready for the next one.

        RecBole clears its own data after an evaluation. The ranks of the targets (RANK) and which
        interactions these are (EVENT), which it does not know, are cleared here.

        Returns:
            RecBole's DataStruct; of several processes, with the data of all of them.
        """
        self.last = super().get_data_struct()
        if not current_shard().is_alone:
            # Names with "rec." hold a row for each target; each process has those of its own.
            collected = self.last._data_dict.items()
            rows = {name: value for name, value in collected if name.startswith("rec.")}
            for name, value in gather_rows(rows).items():
                self.last.set(name, value)
        for name in (RANK, EVENT):  # ``self.last`` is a copy, which keeps them
            if name in self.data_struct:
                del self.data_struct[name]
        if self.needs_ranks:  # metrics of one's own may read targets and attributes of items
            self.last.set(DATASET, self.dataset)
        return self.last


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
        of training interactions of the item.
    """
    # The targets of several processes come in any order.
    order = np.argsort(targets, kind="stable")
    targets = targets[order]

    # The log, all interactions, is sorted by user and time. A target has a history, so the
    # interaction before it in the log is the newest of the same user. ``log.ranks`` has for each
    # interaction the number of earlier ones of its user.
    log = dataset.log
    users, items = log.users.numpy()[targets], log.items.numpy()[targets]
    times = log.times.numpy()
    seconds_per_unit = SECONDS[time_unit]
    seconds_since_newest = (times[targets] - times[targets - 1]) * seconds_per_unit
    columns = {
        "user": dataset.field2id_token[dataset.uid_field][users].astype(str),
        "item": dataset.field2id_token[dataset.iid_field][items].astype(str),
        "rank": ranks[order],
        "history": log.ranks[targets],
        "age": seconds_since_newest,
        "popularity": dataset.popularity[items],
    }
    return pd.DataFrame(columns)
