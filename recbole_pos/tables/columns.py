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
        """Make an empty column, which is filled block by block, as rows are read from a file.

        Args:
            kind: what its cells are: ``token`` (a name), ``float`` (a number), ``token_seq`` or
                ``float_seq`` (a list of names or of numbers).
            num_rows: number of rows of the whole table.
            storage: gives the space for codes or numbers, in memory or on disk: ``empty`` returns
                an array [num_rows].
        """
        self.kind = kind
        # A column of lists has no ``values``, but an array for each row in ``lists``.
        self.lists: list[np.ndarray] = []
        # [rows] the numbers or, of names, a code for each: a number that stands for the name.
        if kind in ("token", "float"):
            self.values = storage.empty(num_rows, np.int32 if kind == "token" else np.float64)

        # A code is the index of its name in ``names``. Only the codes of new blocks are not: Arrow
        # gives them as indices of the names of their own block. ``unmerged`` has the rows and the
        # names of each such block, until its names are added to ``names`` (:meth:`_merge_names`).
        self.names = pa.array([], pa.string())
        self.unmerged: list[tuple[slice, pa.Array]] = []

    def write(self, first_row: int, block: Any) -> None:
        """Write the cells of the next block of rows into this column.

        Blocks follow each other. But if the reader of a file fails, another one begins again at the
        first row of the file: then what was written from there on is replaced.

        Args:
            first_row: row of the table in which the block begins.
            block: the cells of the column: for names (``token``) a DictionaryArray of Arrow, for
                numbers (``float``) an array, for lists a list of arrays.
        """
        rows = slice(first_row, first_row + len(block))
        if self.kind == "token":
            self._write_names(rows, block)
        elif self.kind == "float":
            self.values[rows] = block
        else:
            # A Python list has no space for all rows yet: it grows with each block. All that a
            # failed reader has added from this row on is replaced.
            self.lists[first_row:] = block

    def _write_names(self, rows: slice, block: pa.DictionaryArray) -> None:
        """Write a block of names into the column, as a code for each row.

        A block has its distinct names, and for each row the index of its name among them, the code.
        So the same name has another code in each block. ``unmerged`` keeps the rows and names of
        blocks until :meth:`_merge_names` gives the same name the same code everywhere.

        Args:
            rows: rows of the table that the block fills.
            block: the names as Arrow's DictionaryArray, with the codes in ``indices`` and the
                distinct names in ``dictionary``.
        """
        self.values[rows] = block.indices.fill_null(_MISSING_CODE).to_numpy()

        # If a reader has failed, another one begins again at the first row of its file, and this
        # block replaces an earlier one. So keep only the blocks that begin before this one.
        before = [entry for entry in self.unmerged if entry[0].start < rows.start]
        self.unmerged = [*before, (rows, block.dictionary)]

        # Each block has a copy of frequent names: merge them before they take much memory.
        if sum(len(names) for _, names in self.unmerged) > _MAX_UNMERGED_NAMES:
            self._merge_names()

    def _merge_names(self) -> None:
        """Give equal names in all blocks the same code, and rewrite the codes of their rows.

        ``names`` are the names that are merged already; their index is their code. ``unmerged`` has
        the rows of each further block, and its names. For example, ``names`` is [blue, owl], and a
        block has the names [red, blue] and rows with the codes [0, 1, 0]. Then ``names`` becomes
        [blue, owl, red], and the codes become [2, 0, 2].
        """
        # Arrow numbers the names of all lists by their first appearance, so those merged before
        # keep their codes. In the example, blue, owl, red, blue get the codes 0, 1, 2, 0.
        name_lists = [self.names, *(names for _, names in self.unmerged)]
        encoded = pa.chunked_array(name_lists).dictionary_encode().combine_chunks()
        all_codes = encoded.indices.to_numpy()

        start = len(self.names)  # where the names of the first block begin in all lists
        for rows, names in self.unmerged:
            # The new code of each name of the block. In the example they are [2, 0]: red, which has
            # the code 0 in the block, gets 2, and blue gets 0.
            new_codes = all_codes[start : start + len(names)]
            # A missing name has the code -1. As an index this takes the last entry: -1 again.
            new_codes = np.append(new_codes, np.int32(_MISSING_CODE))
            self.values[rows] = new_codes[self.values[rows]]
            start += len(names)
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
