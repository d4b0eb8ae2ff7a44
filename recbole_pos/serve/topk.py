"""The best items after a history, streamed over the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.values import is_number, shown

LARGEST = 1e30  # boost: float32 ends soon after, and sums must stay finite
CHUNK = 1 << 15  # items that are scored at once
GROUP = 64  # items of whose scores only the highest is compared at first


@dataclass(frozen=True)
class Choice:
    """Which items may be recommended, and what is added to their scores.

    Attributes:
        items: [n] int64 ids, rising.
        bonus: [n] what is added to the score of each, or None.
    """

    items: Tensor
    bonus: Tensor | None = None

    def column(self, items: Tensor) -> Tensor:
        """Where ids stand among ``items``; -1 for those that may not be recommended anyhow."""
        place = torch.searchsorted(self.items, items).clamp_(max=len(self.items) - 1)
        return torch.where(self.items[place] == items, place, -1)


def choose(
    ids: Mapping[str, int],
    allowed: Iterable[str] | None = None,
    excluded: Iterable[str] | None = None,
    boosts: Mapping[str, float] | None = None,
) -> Choice:
    """See :meth:`Recommender.choice`.

    Args:
        ids: from 1, of all items by name.
    """
    chosen = torch.zeros(len(ids) + 1, dtype=torch.bool)
    chosen[1:] = allowed is None
    for what, names, value in (("allowed", allowed, True), ("excluded", excluded, False)):
        if names is None:
            continue
        if isinstance(names, (str, bytes, Mapping)) or not isinstance(names, Iterable):
            raise UsageError(f"{what}: expected names of items, found {shown(names)}")
        chosen[[ids[name] for name in map(str, names) if name in ids]] = value
    if not chosen.any():
        raise UsageError("no item is left to recommend: none of those allowed is known")
    items = chosen.nonzero()[:, 0]
    if boosts is not None and not isinstance(boosts, Mapping):
        raise UsageError(f"boosts: expected numbers by item, found {shown(boosts)}")
    if not boosts:
        return Choice(items)
    for name, boost in boosts.items():
        if not (is_number(boost) and abs(boost) < LARGEST):
            raise UsageError(f"boosts: {shown(name)}: expected a number, found {shown(boost)}")
    known = {ids.get(str(name), 0): float(boost) for name, boost in boosts.items()}
    bonus = torch.zeros(len(chosen))
    bonus[list(known)] = torch.tensor(list(known.values()))
    return Choice(items, bonus[items])


def top_items(
    scores: Callable[[Tensor], Tensor],
    rows: int,
    choice: Choice,
    k: int,
    barred: tuple[Tensor, Tensor] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best items of every row, best first.

    Memory is rows x chunk, whatever the size of the catalogue.

    Args:
        scores: of ids [c] the scores [rows, c].
        rows: B.
        choice: among which items.
        k: how many.
        barred: [p] rows and [p] ids of pairs that are left out.

    Returns:
        scores [B, k'] and ids [B, k'] with k' = min(k, items to choose from); -inf where fewer are
        left.
    """
    k = min(k, len(choice.items))
    best, found = torch.empty(rows, 0), torch.empty(rows, 0, dtype=torch.int64)
    column = None if barred is None else choice.column(barred[1])
    for begin in range(0, len(choice.items), CHUNK):
        items = choice.items[begin : begin + CHUNK]
        part = scores(items)
        if choice.bonus is not None:
            part = part + choice.bonus[begin : begin + CHUNK]
        if column is not None and barred is not None:
            here = (column >= begin) & (column < begin + len(items))
            part[barred[0][here], column[here] - begin] = -torch.inf
        value, place = _largest(part, min(k, len(items)))
        best = torch.cat((best.to(value), value), 1)
        found = torch.cat((found.to(place), items[place]), 1)
        if begin:
            best, place = best.topk(min(k, best.size(1)))
            found = found.gather(1, place)
    return best.cpu().numpy(), found.cpu().numpy()


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of every row and their columns, as ``topk``, which is slow on long rows.

    They are in the k groups of columns with the highest maxima, or in the rest of the division.
    """
    groups = scores.size(1) // GROUP
    if groups < 4 * k or scores.is_cuda:
        return scores.topk(k)
    end = groups * GROUP
    found = scores[:, :end].unflatten(1, (groups, GROUP)).amax(2).topk(k)[1]
    column = (found[:, :, None] * GROUP + torch.arange(GROUP)).flatten(1)
    column = torch.cat((column, torch.arange(end, scores.size(1)).expand(len(scores), -1)), 1)
    value, place = scores.gather(1, column).topk(k)
    return value, column.gather(1, place)
