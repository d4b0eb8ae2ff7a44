"""Reads text and parquet by DuckDB, in blocks of Arrow columns, in the order of the file.

Nothing is guessed: cells of text stay text, which the caller converts. The text of a query never
holds names or paths of users.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from recbole_pos.tables.text import SEPARATOR, TextForm

_BLOCK_ROWS = 1 << 18  # rows that are handed on at a time, at least
# What reading a file by DuckDB may raise.
ENGINE_ERRORS = (duckdb.Error, pa.ArrowException, OSError)


def connect(memory_limit: int) -> Any:
    """Return a connection to an empty database of DuckDB in memory, which loads no extension.

    Args:
        memory_limit: bytes that DuckDB may use; it gets 128 MiB at least.
    """
    return duckdb.connect(
        ":memory:",
        config={
            "threads": 1,  # rows keep their order, and several processes share the machine
            "memory_limit": f"{max(memory_limit, 128 << 20)}B",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,  # no name in a query is a variable of Python
        },
    )


def read_text(
    path: Path, num_columns: int, form: TextForm, memory_limit: int
) -> Iterator[list[pa.Array]]:
    """Yield the rows of a text file, whose cells are separated by tabs, many rows at a time.

    After the last row, their number is compared with the number of lines, which has been counted
    before. This shows that DuckDB has read every line as one row.

    Args:
        path: file of UTF-8.
        num_columns: number of cells of every row.
        form: what :func:`~recbole_pos.tables.text.find_form` has counted in the file: lines to skip
            (``num_skipped``), lines after these (``num_lines``), how many of them are empty
            (``num_blank``) or end with a tab (``num_open``); and whether the file has
            quotation marks (``has_quotes``).
        memory_limit: bytes that DuckDB may use.

    Yields:
        The columns of a block of rows, as text; an empty cell is null.

    Raises:
        ValueError: if rows are not lines, as where a quotation mark is not closed, or if a line has
            an empty cell too many at its end, which DuckDB does not report.
        duckdb.Error: if a line has more or fewer cells, or the text cannot be read otherwise.
    """
    quote = '"' if form.has_quotes else ""
    # The option new_line is not given: for lines that end in \r\n, DuckDB 2.0 stops at the first.
    query = f"""
        SELECT * FROM read_csv(
            $path, auto_detect = false, strict_mode = true, header = false, skip = $skipped,
            columns = {{{", ".join(f"c{i}: 'VARCHAR'" for i in range(num_columns))}}},
            delim = $separator, quote = $quote, escape = $quote, comment = '',
            allow_quoted_nulls = false
        )
    """
    parameters = {
        "path": glob.escape(str(path)),
        "skipped": form.num_skipped,
        "separator": SEPARATOR,
        "quote": quote,
    }

    # Count all rows, and the rows whose last cell is empty, as a line that ends with a tab
    # has it. If a line has an empty cell too many, as the cells a, b and an empty one in two
    # columns, DuckDB drops it, and the last cell is b. Then fewer rows are counted here than lines
    # with a tab at the end.
    num_rows = num_open = 0
    # a variable of its own keeps the connection open: DuckDB 1 closes it when nothing refers to it
    connection = connect(memory_limit)
    for block in _stream(connection.sql(query, params=parameters)):
        num_rows += len(block)
        num_open += block.columns[-1].null_count
        yield block.columns

    # DuckDB skips empty lines; every other line must be a row
    if (num_rows, num_open) != (form.num_lines - form.num_blank, form.num_open):
        raise ValueError(f"{path}: the rows that DuckDB has read are not the lines of the text")


class ParquetFile:
    """A file of parquet: the names of its columns, the number of its rows, and its blocks.

    Args:
        path: the file. Signs such as * in its name stand for themselves.
        memory_limit: bytes that DuckDB may use.

    Raises:
        duckdb.Error: if it cannot be read.
    """

    def __init__(self, path: Path, memory_limit: int) -> None:
        # ``_select`` puts what is selected in the place {} of the query, and runs it.
        self.connection = connect(memory_limit)
        self.parameters = {"path": glob.escape(str(path))}
        self.query = "SELECT {} FROM read_parquet($path, hive_partitioning = false)"
        self.columns: list[str] = self._select("*").columns
        self.num_rows: int = self._select("count(*)").fetchall()[0][0]

    def _select(self, selected: str) -> Any:
        return self.connection.sql(self.query.format(selected), params=self.parameters)

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield blocks of rows with some of the columns."""
        names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
        yield from _stream(self._select(names))


def _stream(relation: Any) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query's result, in larger blocks than DuckDB makes.

    Args:
        relation: the result, a ``DuckDBPyRelation``.

    Yields:
        Blocks of ``_BLOCK_ROWS`` rows or a few more; the last one may be smaller.
    """
    small: list[pa.RecordBatch] = []
    # DuckDB's own to_arrow_reader() comes with version 1.5, which needs a newer Python than 3.10.
    for batch in pa.RecordBatchReader.from_stream(relation):
        small.append(batch)
        if sum(map(len, small)) >= _BLOCK_ROWS:
            yield pa.concat_batches(small)
            small = []
    if small:
        yield pa.concat_batches(small)
