"""Lists of tokens, such as the tags of interactions, as short in memory as they are in a request.

A table of them has the width of the longest one in all rows: one list of 100,000 tokens among
10,000 short ones makes 8 GB. So lists become a table only for histories that are scored at once,
cut to what the model reads, and a history with a very long list is scored by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.windows import gather_index
from recbole_pos.layers.features import Features

LARGEST_TABLE = 1 << 23  # cells of a table of several histories, 64 MiB


class TokenLists:
    """The lists of n values.

    Args:
        ids: [m] int64 ids of tokens, list after list.
        lengths: [n] int64 number of tokens of each list.
    """

    def __init__(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        self.ids, self.lengths = ids, lengths

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> TokenLists:
        """Return lists [n] of ids as one array."""
        ids = np.array([token_id for row in lists for token_id in row], dtype=np.int64)
        return cls(ids, np.array([len(row) for row in lists], dtype=np.int64))

    def __getitem__(self, index: Tensor) -> TokenLists:
        """Return the lists at ``index`` [k], in its order."""
        start = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[index.numpy()]
        return TokenLists(self.ids[gather_index(start[index.numpy()], lengths)], lengths)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a table of the lists, which is as wide as the longest, at least 1."""
        return len(self.lengths), int(self.lengths.max(initial=1))

    def pad(self) -> Tensor:
        """Return the ids as a table [n, width] int64, padded with 0."""
        table = np.zeros(self.shape, dtype=np.int64)
        is_token = np.arange(table.shape[1]) < self.lengths[:, None]
        table[is_token] = self.ids
        return torch.from_numpy(table)


def fit_tables(features: Features) -> bool:
    """Return whether tables of all lists among features are not too large."""
    columns = [*features.events.values(), *features.users.values()]
    shapes = [column.shape for column in columns if isinstance(column, TokenLists)]
    return all(rows * width <= LARGEST_TABLE for rows, width in shapes)


def pad_lists(column: Tensor | TokenLists) -> Tensor:
    """Return the values of a field as a tensor; lists are padded."""
    return column.pad() if isinstance(column, TokenLists) else column
