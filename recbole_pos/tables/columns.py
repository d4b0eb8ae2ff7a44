"""A column of a table that is filled block by block, as blocks are read from a file.

In: blocks of names that Arrow has numbered, of numbers or of lists. Out: a column of pandas, whose
names are categories.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from recbole_pos.tables.storage import Storage

_MAX_UNMERGED_NAMES = 1 << 21  # names that a column keeps before merging, about 100 megabytes
_MISSING_CODE = -1  # in place of the code of a name


class Column:
    """A column that is filled block by block with names, with numbers, or with lists of these.

    Names are stored as codes, whole numbers that stand for them. The codes that Arrow has given to
    a block count the names of that block only. After some blocks their names are merged, so that
    equal names have the same code: a block of the names [red, blue] after one of [blue, owl] gets
    the codes [2, 0] in place of its own [0, 1].

    Attributes:
        kind: ``token`` (names), ``float`` (numbers), or lists of these: ``token_seq``,
            ``float_seq``.
        values: of names and numbers: [rows] int32 code of each name, or float64 number.
        lists: of lists: the list of each row, as an array.
        names: of names: those that are merged, by their codes.
        unmerged: of names: for each block with codes of its own, its rows, and its names by code.
    """

    def __init__(self, kind: str, num_rows: int, storage: Storage) -> None:
        """Make an empty column.

        Args:
            kind: what it holds, see above.
            num_rows: number of rows of the whole table.
            storage: gives the space for codes or numbers, in memory or on disk.
        """
        self.kind = kind
        self.lists: list[np.ndarray] = []
        self.names = pa.array([], pa.string())
        self.unmerged: list[tuple[slice, pa.Array]] = []
        if kind in ("token", "float"):
            self.values = storage.empty(num_rows, np.int32 if kind == "token" else np.float64)

    def write(self, first_row: int, block: Any) -> None:
        """Write the cells of the next block of rows into this column.

        Args:
            first_row: row of the table in which the block begins. A reader that fails in the middle
                of a file begins again at the first row of the file, which replaces what was written
                from there.
            block: the cells of the column. For lists it is a list of arrays; for numbers an array;
                for names a DictionaryArray of Arrow, which has the code of each cell in
                ``indices``, and the names by code in ``dictionary``.
        """
        rows = slice(first_row, first_row + len(block))
        if self.kind == "token":
            self._write_names(rows, block)
        elif self.kind == "float":
            self.values[rows] = block
        else:
            self.lists[first_row:] = block

    def _write_names(self, rows: slice, block: pa.DictionaryArray) -> None:
        """Write the codes of a block, and keep its names to be merged.

        Args:
            rows: rows of the block in the table.
            block: the names, as :meth:`write` describes them.
        """
        self.values[rows] = block.indices.fill_null(_MISSING_CODE).to_numpy()

        # Blocks that are written again, since a reader has failed, replace those of before.
        kept = [(earlier, names) for earlier, names in self.unmerged if earlier.stop <= rows.start]
        self.unmerged = [*kept, (rows, block.dictionary)]

        # Merge now and then, since the same names of many blocks take memory.
        if sum(len(names) for _, names in self.unmerged) > _MAX_UNMERGED_NAMES:
            self._merge_names()

    def _merge_names(self) -> None:
        """Give equal names in all blocks the same code, and rewrite the codes of their rows.

        Until now the codes of each block count the names of that block only (``unmerged``). For
        example, the codes [0, 1] of a block with the names [red, blue] become [2, 0] where earlier
        blocks had the names [blue, owl], since all names are [blue, owl, red] now.
        """
        # Arrow gives all names codes by their first appearance. First are those that were merged
        # before, whose codes do not change, then those of each block. ``codes`` has one for each
        # name of these lists, one list after the other.
        name_lists = [self.names, *(names for _, names in self.unmerged)]
        encoded = pa.chunked_array(name_lists).dictionary_encode().combine_chunks()
        codes = encoded.indices.to_numpy()

        first = len(self.names)
        for rows, names in self.unmerged:
            # new_codes[i] replaces the code i of this block. A missing name has the code -1, which
            # reads the last of these, and so stays -1.
            new_codes = np.append(codes[first : first + len(names)], np.int32(_MISSING_CODE))
            self.values[rows] = new_codes[self.values[rows]]
            first += len(names)
        self.names, self.unmerged = encoded.dictionary, []

    def finish(self, num_rows: int) -> Any:
        """Return the column of the finished table.

        Args:
            num_rows: number of rows; blank lines leave fewer than there was space for.

        Returns:
            A Series of arrays (token_seq, float_seq), float64 numbers (float) or categories of str
            (token).
        """
        if self.kind in ("token_seq", "float_seq"):
            return pd.Series(self.lists, dtype=object)
        if self.kind == "float":
            return self.values[:num_rows]
        self._merge_names()
        categories = pd.Index(self.names.to_pylist(), dtype=object)
        return pd.Categorical.from_codes(self.values[:num_rows], categories, validate=False)
