"""Columns that belong to items or users instead of events, and what contradicts them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recbole_pos.conversion.cells import Cells

_FEW = 0.1  # of the contradictions that chance would make
_PROBE = 1 << 20  # events that decide where a column goes


@dataclass(frozen=True)
class Settled:
    """A column with one cell for each of some things.

    Attributes:
        cells: [things] the first value that is not missing.
        contradicting: [events] bool, which say something else than that.
        again: how many events say anything of a thing that was told of before.
    """

    cells: Cells
    contradicting: np.ndarray
    again: int


def settle(cells: Cells, things: np.ndarray, number: int) -> Settled:
    """The first value of every thing.

    Args:
        cells: [events] a column.
        things: [events] of which thing, from 0.
        number: how many there are.
    """
    told = np.flatnonzero(cells.codes)
    codes, of = cells.codes[told], things[told]
    first = np.zeros(number, dtype=cells.codes.dtype)
    first[of[::-1]] = codes[::-1]  # of several the last one that is assigned stays: the first
    contradicting = np.zeros(len(cells.codes), dtype=bool)
    contradicting[told] = codes != first[of]
    again = len(told) - int(np.count_nonzero(first))
    return Settled(replace(cells, codes=first), contradicting, again)


def is_function(cells: Cells, things: np.ndarray, number: int) -> float | None:
    """Share of contradictions in those that chance would make, if they are few; else None.

    None, too, if no thing is told of twice: then nothing can contradict.
    """
    cells, things = replace(cells, codes=cells.codes[:_PROBE]), things[:_PROBE]
    settled = settle(cells, things, number)
    if not settled.again:
        return None
    counts = np.bincount(cells.codes)[1:]
    chance = 1 - float(((counts / counts.sum()) ** 2).sum())
    found = int(settled.contradicting.sum()) / settled.again
    if not found:
        return 0.0
    return found / chance if found <= _FEW * chance else None


def table_of(cells: Cells, item: np.ndarray, items: int, user: np.ndarray, users: int) -> str:
    """Where a column of the events belongs: item, user or inter.

    Args:
        cells: [events] the column.
        item, user: [events] which, from 0.
        items, users: how many there are.
    """
    by_item, by_user = is_function(cells, item, items), is_function(cells, user, users)
    if by_item is None and by_user is None:
        return "inter"
    if by_user is None or (by_item is not None and by_item <= by_user):
        return "item"
    return "user"
