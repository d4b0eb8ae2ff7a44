"""Which items may be recommended, from the names and boosts that a request gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.layers.catalogue import Choice
from recbole_pos.values import is_number, is_whole, read_names, shown

LARGEST_BOOST = 1e30  # float32 ends soon after, and sums must stay finite


def make_choice(
    ids: Mapping[str, int],
    allowed: Iterable[str | int] | None,
    excluded: Iterable[str | int] | None,
    boosts: Mapping[str, float] | None,
    options: tuple[str, str],
) -> Choice:
    """Return the items that may be recommended and their boosts; unknown names are ignored.

    Args:
        ids: id of each item by name, from 1.
        allowed, excluded, boosts: see :meth:`Recommender.recommend`.
        options: names of ``allowed`` and ``excluded`` in messages.

    Raises:
        UsageError: if no item is left, or a boost is not a number.
    """
    is_allowed = torch.zeros(len(ids) + 1, dtype=torch.bool)
    is_allowed[1:] = allowed is None
    for key, given, allows in zip(options, (allowed, excluded), (True, False), strict=True):
        if given is None:
            continue
        known = [ids[name] for name in read_names(given, key) if name in ids]
        is_allowed[known] = allows
        if not is_allowed.any():
            reason = "none of the names is known" if allows else "all items are excluded"
            raise UsageError(f"{key}: no item is left to recommend: {reason}")
    items = is_allowed.nonzero()[:, 0]
    return Choice(items) if boosts is None else Choice(items, _read_boosts(boosts, ids)[items])


def require_k(k: int) -> int:
    """Return k as an int; raise a UsageError unless it is a whole number, at least 1."""
    if not (is_whole(k) and k >= 1):
        raise UsageError(f"k: expected a whole number, at least 1, found {shown(k)}")
    return int(k)


def _read_boosts(boosts: Mapping[str, float], ids: Mapping[str, int]) -> Tensor:
    """Return the boost of each item by id [items + 1]; boosts of unknown names go to id 0."""
    if not hasattr(boosts, "items"):
        raise UsageError(f"boosts: expected a mapping of items to numbers, found {shown(boosts)}")
    bonus = torch.zeros(len(ids) + 1)
    for name, boost in boosts.items():
        if not (is_number(boost) and abs(boost) < LARGEST_BOOST):
            raise UsageError(f"boosts: {shown(name)}: expected a number, found {shown(boost)}")
        bonus[ids.get(str(name), 0)] = float(boost)
    return bonus
