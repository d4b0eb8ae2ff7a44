"""What RecBole's evaluator is given: which of the best items are targets."""

from __future__ import annotations

from typing import Any

import torch
from recbole.evaluator import Collector
from torch import Tensor

from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.experiment.ranks import EVENT, RANK, placed, ranks
from recbole_pos.experiment.streamed import StreamedScores
from recbole_pos.values import Options

TOPK, ITEMS = "rec.topk", "rec.items"
_WHOLE = ("rec.meanrank", "rec.score", "data.label")  # need every score


class TargetCollector(Collector):
    """RecBole's collector, faster where every row has one target, as rows of the plugin do.

    RecBole marks the targets in a matrix [rows, items] and sums its rows, a third of the time of
    an evaluation on 12,000 items. Here an item is a hit if it is the target. What the evaluator is
    given is the same, bit by bit.
    """

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        self.needs_topk = self.register.need(TOPK)
        self.needs_items = self.register.need(ITEMS)
        self.ranking = False  # whether the rank of every target is kept, too
        self.last: Any = None  # what the evaluator got last

    @property
    def takes_streamed(self) -> bool:
        """Whether all metrics follow from the best items."""
        return not any(map(self.register.need, _WHOLE)) and (self.needs_topk or self.needs_items)

    def eval_batch_collect(
        self,
        scores_tensor: Tensor | StreamedScores,
        interaction: Any,
        positive_u: Tensor,
        positive_i: Tensor,
    ) -> None:
        """See RecBole; ``scores_tensor`` is [rows, items]."""
        if isinstance(scores_tensor, StreamedScores):
            self._collect_streamed(scores_tensor, interaction, in_order(positive_u, positive_i))
            return
        single = len(positive_u) == len(scores_tensor) == len(positive_u.unique())
        setattr(self.register, TOPK, self.needs_topk and not single)
        super().eval_batch_collect(scores_tensor, interaction, positive_u, positive_i)
        if not single:
            return
        best, target = None, in_order(positive_u, positive_i).to(scores_tensor.device)
        if self.needs_topk:
            best = scores_tensor.topk(max(self.topk), dim=-1).indices
            self._collect_hits(best, target)
        if self.ranking and TARGET_EVENT in interaction:
            self._collect_ranks(ranks(scores_tensor, target, best), interaction)

    def _collect_streamed(self, scores: StreamedScores, interaction: Any, target: Tensor) -> None:
        best, target = scores.best(max(self.topk)), target.to(scores.states.device)
        if self.needs_items:
            self.data_struct.update_tensor(ITEMS, best)
        if self.needs_topk:
            self._collect_hits(best, target)
        if self.ranking:
            self._collect_ranks(placed(scores.higher(target), target, best), interaction)

    def _collect_hits(self, best: Tensor, target: Tensor) -> None:
        hits = best == target[:, None]
        count = torch.ones_like(hits[:, :1])
        self.data_struct.update_tensor(TOPK, torch.cat((hits, count), 1).long())

    def _collect_ranks(self, rank: Tensor, interaction: Any) -> None:
        self.data_struct.update_tensor(RANK, rank)
        self.data_struct.update_tensor(EVENT, interaction[TARGET_EVENT])

    def get_data_struct(self) -> Any:
        """RecBole's; what ranks there are leave with it."""
        self.last = super().get_data_struct()
        for name in (RANK, EVENT):
            if name in self.data_struct:
                del self.data_struct[name]
        return self.last


def in_order(positive_u: Tensor, positive_i: Tensor) -> Tensor:
    """[rows] the target of each row, of which each has one."""
    return positive_i[positive_u.argsort()]
