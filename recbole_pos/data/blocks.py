"""Columns of a file from the blocks in which it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from recbole_pos.errors import UsageError

_TOKENS_LIMIT = 1 << 33  # bytes of the array in which RecBole keeps the tokens of a column


def join_blocks(path: Path, name: str, parts: list[Any]) -> Any:
    """A column of a file of all its blocks.

    Args:
        path: of the file, for messages.
        name: of the column.
        parts: of one block each: arrays of numbers, dictionaries of names, or lists of arrays.

    Returns:
        [rows] float64; int32 codes with each name once; or arrays.

    Raises:
        UsageError: if the names are more than RecBole's arrays of text can hold.
    """
    if isinstance(parts[0], list):
        return pd.Series([value for part in parts for value in part], dtype=object)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    tokens = pa.chunked_array(parts).unify_dictionaries().combine_chunks()
    names = tokens.dictionary.to_pylist()
    longest = max(names, key=len, default="")
    if 4 * len(longest) * len(names) > _TOKENS_LIMIT:
        raise UsageError(
            f"{path}: {name} has {len(names):,} different tokens of up to "
            f"{len(longest):,} characters ({longest[:40]!r}...), more than can be kept: names "
            "are kept at the length of the longest. Shorten it, or leave the column out"
        )
    codes = tokens.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    kinds = pd.CategoricalDtype(pd.Index(names, dtype=object))
    return pd.Categorical.from_codes(codes, dtype=kinds, validate=False)
