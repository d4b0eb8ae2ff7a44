"""Relations that AttrFormer can use of the fields that were written."""

from __future__ import annotations

import math

import numpy as np
from pyarrow import compute as pc

from recbole_pos.conversion.cells import INNER, Cells
from recbole_pos.conversion.writing import flow

_PAIRS = 20_000_000  # of values, at most; AttrFormer refuses 50 million
_HOUR, _DAY, _WEEK = 3600, 86400, 604800


def relations(tables: dict[str, dict[str, Cells]], seconds: np.ndarray | None) -> list[str]:
    """Entries of the option ``relations`` in yaml, of fields that tell some things from others.

    Args:
        tables: loaded fields of ``item``, ``user`` and ``inter``.
        seconds: [events] when; None if nobody knows.
    """
    entries = []
    for cells_of in tables.values():
        for name, cells in cells_of.items():
            if cells.different < 2 or cells.kind == "float_seq":
                continue
            if cells.kind == "float":
                if scale := _scale(cells):
                    entries.append(f"{{field: {flow(name)}, scales: [{scale:g}]}}")
            elif _pairs(cells) <= _PAIRS:
                entries.append(f"{{field: {flow(name)}}}")
    if seconds is not None:
        days = not (seconds % _DAY).any()
        scales = (_DAY, _WEEK) if days else (_HOUR, _DAY)
        entries.append(f"{{field: time, scales: [{scales[0]}, {scales[1]}]}}")
    entries.append("{field: position}")
    return entries


def _scale(cells: Cells) -> float | None:
    """How far numbers are akin, to one digit: a tenth of the middle half of them, and at least a
    step between two; None where there is nothing to compare."""
    if cells.different**2 > _PAIRS:
        return None
    numbers = cells.values.slice(1).cast("float64").to_numpy()
    values = np.unique(numbers[np.isfinite(numbers)])
    if len(values) < 2:
        return None
    low, high = np.quantile(numbers[cells.codes[cells.codes > 0] - 1], (0.25, 0.75))
    spread = max((high - low) / 10, float(np.median(np.diff(values))))
    return round(spread, -math.floor(math.log10(spread)))


def _pairs(cells: Cells) -> float:
    """At most so many pairs of different values have a name in common."""
    if cells.kind == "token":
        return cells.different
    names = pc.split_pattern(cells.values.slice(1), INNER).flatten()
    counts = pc.value_counts(names).field("counts").to_numpy().astype(float)
    return float(counts @ counts)
