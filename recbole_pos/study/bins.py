"""Targets in bins: by length of history, age of its newest event, popularity, whether cold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from recbole_pos.errors import UsageError

# Columns of targets with bins by edges -> name of their values.
KINDS = {"history": "history", "age": "age", "popularity": "popularity"}
COLD = "cold"
_SPANS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def masks(targets: pd.DataFrame, kind: str, edges: Sequence[float] = ()) -> dict[str, np.ndarray]:
    """Assign targets to the bins of one kind.

    Args:
        targets: targets of a :class:`~recbole_pos.study.ranks.RankTable`.
        kind: history (length), age (seconds from the newest event of the history to the target),
            popularity (training events of the item), or cold (whether it has none).
        edges: ascending; a value is in a bin if it is above one edge and not above the next. The
            kind cold has no edges.

    Returns:
        Name of the bin -> [targets] whether a target is in it.

    Raises:
        UsageError: if the runs have not recorded the column of the bins.
    """
    column = "popularity" if kind == COLD else kind
    if column not in targets.columns:
        raise UsageError(
            f"bins: the runs have no column {column}, so there are no bins by {kind}; found "
            f"{', '.join(targets.columns)}"
        )
    values = targets[column].to_numpy()
    if kind == COLD:
        return {"cold items": values == 0, "other items": values != 0}
    ends = [-np.inf, *edges, np.inf]
    names = labels(kind, edges)
    return {
        name: (values > low) & (values <= high)
        for name, low, high in zip(names, ends[:-1], ends[1:], strict=True)
    }


def labels(kind: str, edges: Sequence[float]) -> list[str]:
    """Return names of the bins between edges: ``history up to 5``, ``history 6 to 15``, ...

    Args:
        kind: one of ``KINDS``.
        edges: ascending.
    """
    if kind == "age":
        shown = [_span(edge) for edge in edges]
        between = [f"{low} to {high}" for low, high in zip(shown, shown[1:], strict=False)]
    else:
        shown = [f"{edge:,g}" for edge in edges]
        between = [
            f"{math.floor(low) + 1:,g} to {high:,g}" if math.floor(low) + 1 < high else f"{high:,g}"
            for low, high in zip(edges, edges[1:], strict=False)
        ]
    return [
        f"{KINDS[kind]} {name}" for name in (f"up to {shown[0]}", *between, f"over {shown[-1]}")
    ]


def all_masks(targets: pd.DataFrame, bins: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Return kind -> its bins, as :func:`masks` returns them, for every kind of a study.

    Args:
        targets: targets of a :class:`~recbole_pos.study.ranks.RankTable`.
        bins: kind -> edges, or cold -> True.
    """
    return {
        kind: masks(targets, kind, () if kind == COLD else edges)
        for kind, edges in bins.items()
        if edges
    }


def _span(seconds: float) -> str:
    """Return a duration in the largest unit that divides it, such as ``2 days``."""
    for name, length in _SPANS:
        if seconds >= length and seconds % length == 0:
            count = seconds / length
            return f"{count:,g} {name}{'s' if count != 1 else ''}"
    return f"{seconds:,g} seconds"
