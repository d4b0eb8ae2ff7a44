"""Scores of the whole catalogue, a part at a time: memory is rows x part, whatever its size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PART = 1 << 15  # items that are scored at once
GROUP = 64  # columns of a group in ``_largest``, which first compares the maxima of groups

Scores = Callable[[Tensor], Tensor]
Parts = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Choice:
    """Which items are ranked, and what is added to their scores.

    Attributes:
        items: [n] int64 ids, rising.
        bonus: [n] added to the scores of ``items``, or None.
    """

    items: Tensor
    bonus: Tensor | None = None

    def column(self, items: Tensor) -> Tensor:
        """Return the column of each id among the ranked ``items``; -1 for an id not ranked."""
        place = torch.searchsorted(self.items, items).clamp_(max=len(self.items) - 1)
        return torch.where(self.items[place] == items, place, -1)


def score_parts(
    scores: Scores, choice: Choice, barred: tuple[Tensor, Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids [c] and scores [rows, c] of the ranked items, part by part.

    Args:
        scores: function of ids [c] that returns the scores [rows, c].
        choice: the items to rank.
        barred: [p] rows and [p] ids of the pairs to exclude: their score becomes -inf.
    """
    column = None if barred is None else choice.column(barred[1])
    for begin in range(0, len(choice.items), PART):
        items = choice.items[begin : begin + PART]
        part = scores(items)
        if choice.bonus is not None:
            part = part + choice.bonus[begin : begin + PART]
        if column is not None and barred is not None:
            in_part = (column >= begin) & (column < begin + len(items))
            part[barred[0][in_part], column[in_part] - begin] = -torch.inf
        yield items, part


def select_best(parts: Parts, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of every row, best first; of equal scores, the lower id first.

    Returns:
        scores [rows, k'] and ids [rows, k'], with k' the smaller of k and the number of items; -inf
        where fewer are left.
    """
    best = best_items = torch.empty(0)
    for number, (items, part) in enumerate(parts):
        value, place = _largest(part, min(k, len(items)))
        if not number:
            best, best_items = value, items[place]
            continue
        best, best_items = torch.cat((best, value), 1), torch.cat((best_items, items[place]), 1)
        best, place = _highest(best, min(k, best.size(1)))
        best_items = best_items.gather(1, place)
    return best, best_items


def scores_and_ranks(
    scores: Scores, choice: Choice, ids: Tensor, barred: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the scores and ranks of some items of every row.

    Args:
        scores, choice, barred: see :func:`score_parts`.
        ids: [rows, k] items; an item that is not ranked, such as 0, has the score NaN.

    Returns:
        [rows, k] scores, and [rows, k] ranks in the order of :func:`select_best`, from 1.
    """
    column, begin = choice.column(ids), 0
    own = torch.full(ids.shape, torch.nan)
    for items, part in score_parts(scores, choice, barred):
        in_part = (column >= begin) & (column < begin + len(items))
        score = part.gather(1, (column - begin).clamp(0, len(items) - 1))
        own, begin = torch.where(in_part, score, own.to(score)), begin + len(items)
    rank = torch.ones_like(ids)
    for items, part in score_parts(scores, choice, barred):
        for k, (score, item) in enumerate(zip(own.T[..., None], ids.T[..., None], strict=True)):
            rank[:, k] += ((part > score) | ((part == score) & (items < item))).sum(1)
    return own, rank


def products(states: Tensor, vectors: Tensor, items: Tensor) -> Tensor:
    """Return the products [b, c] of states [b, d] with the vectors of rising item ids [c].

    Where the ids leave few items out, vectors are read in place instead of copied.
    """
    begin, end = int(items[0]), int(items[-1]) + 1
    if end - begin == len(items):
        return states @ vectors[begin:end].t()
    if end - begin < 2 * len(items) and len(states) < vectors.size(1):
        return (states @ vectors[begin:end].t())[:, items - begin]
    return states @ vectors[items].t()


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the same as ``_highest``, faster on long rows, where ``topk`` is slow.

    The k highest are in the k groups of columns with the highest maxima, or in the rest of the
    division. One group more is taken, since ``_highest`` asks for one more, and ``topk`` is slower
    where rows have fewer than 64 times as many columns.
    """
    groups = scores.size(1) // GROUP
    if groups < 4 * k or scores.is_cuda:
        return _highest(scores, k)
    end = groups * GROUP
    maxima = scores[:, :end].unflatten(1, (groups, GROUP)).amax(2)
    chosen = _highest(maxima, min(k + 1, groups))[1].sort(1)[0]
    column = (chosen[:, :, None] * GROUP + torch.arange(GROUP)).flatten(1)
    column = torch.cat((column, torch.arange(end, scores.size(1)).expand(len(scores), -1)), 1)
    value, place = _highest(scores.gather(1, column), k)
    return value, column.gather(1, place)


def _highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of every row and their columns; of equal ones, the first column first.

    ``topk`` leaves open which of several equal ones it takes, and in what order.
    """
    value, column = scores.topk(min(k + 1, scores.size(1)))
    equal = value[:, 1:] == value[:, :-1]
    value, column = value[:, :k], column[:, :k]
    if not equal.any():
        return value, column
    is_cut = equal[:, k - 1 :].any(1) & (value[:, -1] > -torch.inf)  # one left out is as high
    if len(row := is_cut.nonzero()[:, 0]):
        cut, last = scores[row], value[row, -1:]
        above, same = ~(cut <= last), cut == last  # ``not <=``: topk puts NaN first, too
        same &= same.cumsum(1) <= k - above.sum(1, keepdim=True)
        column[row] = (above | same).nonzero()[:, 1].view(len(row), k)
    column = column.sort(1)[0]
    value, order = scores.gather(1, column).sort(dim=1, descending=True, stable=True)
    return value, column.gather(1, order)
