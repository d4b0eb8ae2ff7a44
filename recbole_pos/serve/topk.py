"""The best items after a history, of those that may be recommended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers.catalogue import Choice, Scores, best_of, score_parts
from recbole_pos.values import is_number, shown

LARGEST = 1e30  # boost: float32 ends soon after, and sums must stay finite


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
    scores: Scores, choice: Choice, k: int, barred: tuple[Tensor, Tensor] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The k best items of every row, best first; see :mod:`recbole_pos.layers.catalogue`.

    Args:
        scores: of ids [c] the scores [rows, c].
        choice: among which items.
        k: how many.
        barred: [p] rows and [p] ids of pairs that are left out.

    Returns:
        scores [rows, k'] and ids [rows, k'] with k' = min(k, items to choose from); -inf where
        fewer are left.
    """
    best, found = best_of(score_parts(scores, choice, barred), k)
    return best.cpu().numpy(), found.cpu().numpy()
