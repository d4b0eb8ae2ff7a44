"""Scores of the whole catalogue, one part at a time, so that memory does not grow with its size.

Shapes: c items of a part, d the size of vectors; a row is a history for which items are ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recbole_pos.errors import UsageError

PART = 1 << 15  # items that are scored at once
GROUP = 64  # columns of a group in ``_select_in_groups``, which compares their maxima first

Scores = Callable[[Tensor], Tensor]
Parts = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Choice:
    """Which items are ranked, and what is added to their scores.

    Attributes:
        items: [n] int64 ids in ascending order.
        bonus: [n] numbers to add to the scores of ``items``, or None.
    """

    items: Tensor
    bonus: Tensor | None = None

    def find_columns(self, items: Tensor) -> Tensor:
        """Return the index of each id among the ranked ``items``; -1 if it is not ranked."""
        column = torch.searchsorted(self.items, items).clamp_(max=len(self.items) - 1)
        return torch.where(self.items[column] == items, column, -1)


def score_parts(
    scores: Scores, choice: Choice, barred: tuple[Tensor, Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids [c] and scores [rows, c] of the ranked items, part by part.

    Args:
        scores: function of ids [c] that returns the scores [rows, c].
        choice: the items to rank.
        barred: [p] rows and [p] ids of the pairs to exclude: their score becomes -inf.
    """
    no_ids = choice.items[:0]
    barred_rows, barred_items = (no_ids, no_ids) if barred is None else barred
    column = choice.find_columns(barred_items)
    for start in range(0, len(choice.items), PART):
        items = choice.items[start : start + PART]
        part_scores = scores(items)
        if choice.bonus is not None:
            part_scores = part_scores + choice.bonus[start : start + PART]
        in_part = (column >= start) & (column < start + len(items))
        part_scores[barred_rows[in_part], column[in_part] - start] = -torch.inf
        yield items, part_scores


def select_best(parts: Parts, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best items of every row, best first; of equal scores, the lower id first.

    Returns:
        Scores [rows, k'] and ids [rows, k'], with k' the smaller of k and the number of items;
        excluded items have the score -inf.
    """
    best = best_items = torch.empty(0)
    for part_index, (items, scores) in enumerate(parts):
        part_best, column = _select_in_groups(scores, min(k, len(items)))
        if part_index == 0:
            best, best_items = part_best, items[column]
            continue
        best = torch.cat((best, part_best), 1)
        best_items = torch.cat((best_items, items[column]), 1)
        best, column = _select(best, min(k, best.size(1)))
        best_items = best_items.gather(1, column)
    return best, best_items


def score_and_rank(
    scores: Scores, choice: Choice, ids: Tensor, barred: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the scores and ranks of some items of every row.

    Args:
        scores, choice, barred: see :func:`score_parts`.
        ids: [rows, k] items; an item that is not ranked, such as 0, has the score NaN.

    Returns:
        Scores [rows, k], and ranks [rows, k] in the order of :func:`select_best`, from 1.
    """
    column = choice.find_columns(ids)
    id_scores = torch.full(ids.shape, torch.nan)

    start = 0
    for items, part_scores in score_parts(scores, choice, barred):
        in_part = (column >= start) & (column < start + len(items))
        score = part_scores.gather(1, (column - start).clamp(0, len(items) - 1))
        id_scores = torch.where(in_part, score, id_scores.to(score))
        start += len(items)

    # a rank is one more than the number of items before
    ranks = torch.ones_like(ids)
    for items, part_scores in score_parts(scores, choice, barred):
        for k in range(ids.size(1)):
            score, item = id_scores[:, k, None], ids[:, k, None]
            # not ``>``, by which NaN would have the best rank
            is_before = ~(part_scores <= score) | ((part_scores == score) & (items < item))
            ranks[:, k] += is_before.sum(1)
    return id_scores, ranks


def products(states: Tensor, vectors: Tensor, items: Tensor) -> Tensor:
    """Return the products [b, c] of states [b, d] with the vectors of ascending item ids [c].

    ``vectors`` [items, d] are read in place, not copied, where the ids leave out few items.
    """
    start, end = int(items[0]), int(items[-1]) + 1
    if end - start == len(items):
        return states @ vectors[start:end].t()
    if end - start < 2 * len(items) and len(states) < vectors.size(1):
        return (states @ vectors[start:end].t())[:, items - start]
    return states @ vectors[items].t()


def require_scores(scores: Any, num_rows: int, num_items: int, model: Any) -> Tensor:
    """Return scores [rows, items] of all items, which RecBole's models may give as [rows * items].

    Raises:
        UsageError: if a custom model gives anything else; another order of numbers would be ranked
            as if they were scores.
    """
    if isinstance(scores, Tensor) and scores.is_floating_point():
        is_complete = scores.numel() == num_rows * num_items
        if is_complete and (scores.dim() == 1 or scores.size(0) == num_rows):
            return scores.reshape(num_rows, num_items)
    is_tensor = isinstance(scores, Tensor)
    found = f"{scores.dtype} {list(scores.shape)}" if is_tensor else type(scores).__name__
    raise UsageError(
        f"{type(model).__name__}.full_sort_predict: expected floating-point scores of all items "
        f"[{num_rows}, {num_items}], found {found}"
    )


def _select_in_groups(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores and their columns, [rows, k] each, faster on long rows."""
    num_groups = scores.size(1) // GROUP
    if num_groups < 4 * k or scores.is_cuda:
        return _select(scores, k)
    # The k highest are in the k groups with the highest maxima, or behind the last group. One more
    # group is selected, since ``_select`` compares one score more than k.
    end = num_groups * GROUP
    maxima = scores[:, :end].unflatten(1, (num_groups, GROUP)).amax(2)
    _, group = _select(maxima, min(k + 1, num_groups))
    column = (group.sort(1)[0][:, :, None] * GROUP + torch.arange(GROUP)).flatten(1)
    remainder = torch.arange(end, scores.size(1)).expand(len(scores), -1)
    column = torch.cat((column, remainder), 1)
    value, index = _select(scores.gather(1, column), k)
    return value, column.gather(1, index)


def _select(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores and their columns, [rows, k] each; ties in column order.

    ``topk`` leaves open which of several equal scores it returns, and in what order.
    """
    # one more than k: the score that is left out may equal the last one
    value, column = scores.topk(min(k + 1, scores.size(1)))
    equals_next = value[:, 1:] == value[:, :-1]
    value, column = value[:, :k], column[:, :k]
    if not equals_next.any():
        return value, column

    # rows where a score that is left out equals the lowest one selected
    is_cut = equals_next[:, k - 1 :].any(1) & (value[:, -1] > -torch.inf)
    row = is_cut.nonzero()[:, 0]
    if len(row):
        row_scores = scores[row]
        lowest = value[row, -1:]
        is_above = ~(row_scores <= lowest)  # not ``>``: topk puts NaN first, too
        is_equal = row_scores == lowest
        is_equal &= is_equal.cumsum(1, dtype=torch.int32) <= k - is_above.sum(1, keepdim=True)
        column[row] = (is_above | is_equal).nonzero()[:, 1].view(len(row), k)

    column = column.sort(1)[0]
    value, order = scores.gather(1, column).sort(dim=1, descending=True, stable=True)
    return value, column.gather(1, order)
