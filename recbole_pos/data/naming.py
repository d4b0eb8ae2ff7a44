"""Ids for names: 1 for the first name that appears, 2 for the second, ...; 0 for no name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from recbole_pos.data.scratch import Scratch


def spell_out(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the names themselves in the columns of categories."""
    return table.astype(dict.fromkeys(table.select_dtypes("category"), object))


def stack_tables(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Return tables with the same columns, one below the other; categories stay such."""
    columns: dict[str, Any] = {}
    for name, first in tables[0].items():
        parts = [table[name] for table in tables]
        is_names = isinstance(first.dtype, pd.CategoricalDtype)
        columns[name] = union_categoricals(parts) if is_names else np.concatenate(parts)
    return pd.DataFrame(columns, copy=False)


def number_names(
    columns: list[pd.Series], scratch: Scratch | None = None
) -> tuple[np.ndarray, list[Any]]:
    """Number the names of columns that share ids, in the order of the columns and their lines.

    Args:
        columns: each [lines] names (nan for none), as categories or objects, or arrays of names.
        scratch: disk space for the ids; in memory if None.

    Returns:
        names by id, padding first; for each column its ids, [lines] int64 or arrays of int64.
    """
    ids: dict[str, int] = {}
    numbered = [_number_column(column, ids, scratch) for column in columns]
    return np.array(["[PAD]", *ids]), numbered


def _number_column(column: pd.Series, ids: dict[str, int], scratch: Scratch | None) -> Any:
    """Return the ids of one column, and add its new names to ``ids``."""
    is_lists = column.dtype == object and len(column) and isinstance(column.iloc[0], np.ndarray)
    codes, names = _codes(np.concatenate(column.to_list()).astype(object) if is_lists else column)
    appeared = pd.unique(codes)
    appeared = appeared[appeared >= 0]
    id_of_code = np.zeros(len(names) + 1, dtype=np.int64)  # the last one for code -1: no name
    id_of_code[appeared] = [ids.setdefault(name, len(ids) + 1) for name in names[appeared]]
    if scratch and not is_lists:
        numbers = scratch.empty(len(codes), np.int64)
        for rows in scratch.blocks(len(codes)):
            numbers[rows] = id_of_code[codes[rows]]
        return numbers
    numbers = id_of_code[codes]
    return np.split(numbers, np.cumsum(column.map(len))[:-1]) if is_lists else numbers


def _codes(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return [cells] a code of each cell, -1 for no name, and the names by code."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy(), column.cat.categories.to_numpy()
    codes, names = pd.factorize(column)
    return codes, np.asarray(names, dtype=object)
