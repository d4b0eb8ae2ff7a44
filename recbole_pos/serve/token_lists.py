"""Lists of tokens, such as the tags of interactions, as short in memory as they are in a request.

A table of them has the width of the longest one in all rows: one list of 100,000 tokens among
10,000 short ones makes 8 GB. So lists become a table only for histories that are scored at once,
cut to what the model reads: for so few that it is small, and if that is one history, it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.windows import gather_index
from recbole_pos.errors import UsageError
from recbole_pos.layers.features import Features

LARGEST_TABLE = 1 << 23  # cells of a table, 64 MiB


class TokenLists:
    """The lists of n values.

    Args:
        ids: [m] int64 ids of tokens, list after list.
        lengths: [n] int64 number of tokens of each list.
        name: the field, for error messages.
    """

    def __init__(self, ids: np.ndarray, lengths: np.ndarray, name: str) -> None:
        self.ids, self.lengths, self.name = ids, lengths, name

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], name: str) -> TokenLists:
        """Return lists [n] of ids as one array."""
        ids = np.array([token_id for row in lists for token_id in row], dtype=np.int64)
        return cls(ids, np.array([len(row) for row in lists], dtype=np.int64), name)

    def __getitem__(self, index: Tensor) -> TokenLists:
        """Return the lists at ``index`` [k], in its order."""
        start = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[index.numpy()]
        ids = self.ids[gather_index(start[index.numpy()], lengths)]
        return TokenLists(ids, lengths, self.name)

    @property
    def width(self) -> int:
        """Number of columns of a table of the lists: that of the longest one, at least 1."""
        return int(self.lengths.max(initial=1))

    @property
    def fits(self) -> bool:
        """Whether a table of the lists is not too large."""
        return len(self.lengths) * self.width <= LARGEST_TABLE

    def pad(self) -> Tensor:
        """Return the ids [n, width] int64, padded with 0.

        Raises:
            UsageError: naming the field, if that is too large a table.
        """
        if not self.fits:
            limit = LARGEST_TABLE // len(self.lengths)
            raise UsageError(
                f"{self.name}: found a list of {self.width:,} tokens; expected at most {limit:,} "
                f"in each of {len(self.lengths):,} lists that are read at once; give fewer"
            )
        is_token = np.arange(self.width) < self.lengths[:, None]
        table = np.zeros(is_token.shape, dtype=np.int64)
        table[is_token] = self.ids
        return torch.from_numpy(table)


def fit_tables(features: Features) -> bool:
    """Return whether tables of all lists among features are not too large."""
    columns: list[Any] = [*features.events.values(), *features.users.values()]
    return all(column.fits for column in columns if isinstance(column, TokenLists))


def pad_lists(column: Tensor | TokenLists) -> Tensor:
    """Return the values of a field as a tensor; lists are padded."""
    return column.pad() if isinstance(column, TokenLists) else column
