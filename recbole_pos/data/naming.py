"""Ids for names: 1 for the first that appears, 2 for the next other one; 0 stands for none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from recbole_pos.data.scratch import Scratch


def spelled_out(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose columns of categories are of the names themselves."""
    return table.astype(dict.fromkeys(table.select_dtypes("category"), object))


def stacked(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Return tables with the same columns, one below the other; categories stay such."""
    columns: dict[str, Any] = {}
    for name, first in tables[0].items():
        parts = [table[name] for table in tables]
        is_names = isinstance(first.dtype, pd.CategoricalDtype)
        columns[name] = union_categoricals(parts) if is_names else np.concatenate(parts)
    return pd.DataFrame(columns, copy=False)


def number(
    columns: list[pd.Series], scratch: Scratch | None = None
) -> tuple[np.ndarray, list[Any]]:
    """Number the names of columns that share ids, in the order of the columns and their lines.

    Args:
        columns: each [lines], of names (nan for none), as categories or not, or of arrays of names.
        scratch: where ids are kept; in memory if None.

    Returns:
        names by id, padding first; for each column its ids: [lines] int64, or arrays of them.
    """
    ids: dict[str, int] = {}
    numbered = [_numbered(column, ids, scratch) for column in columns]
    return np.array(["[PAD]", *ids]), numbered


def _numbered(column: pd.Series, ids: dict[str, int], scratch: Scratch | None) -> Any:
    lists = column.dtype == object and len(column) and isinstance(column.iloc[0], np.ndarray)
    codes, names = _codes(np.concatenate(column.to_list()).astype(object) if lists else column)
    appeared = pd.unique(codes)
    appeared = appeared[appeared >= 0]
    table = np.zeros(len(names) + 1, dtype=np.int64)  # the last for -1: no name
    table[appeared] = [ids.setdefault(name, len(ids) + 1) for name in names[appeared]]
    if scratch and not lists:
        found = scratch.empty(len(codes), np.int64)
        for rows in scratch.blocks(len(codes)):
            found[rows] = table[codes[rows]]
        return found
    found = table[codes]
    return np.split(found, np.cumsum(column.map(len))[:-1]) if lists else found


def _codes(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each cell, -1 for no name, and the names that they stand for."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy(), column.cat.categories.to_numpy()
    codes, names = pd.factorize(column)
    return codes, np.asarray(names, dtype=object)
