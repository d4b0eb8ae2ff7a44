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

from recbole_pos.tables.text import TextForm, count_blank_lines

_BLOCK_ROWS = 1 << 18
ENGINE_ERRORS = (duckdb.Error, pa.ArrowException, OSError)


class IrregularText(ValueError):
    """DuckDB has joined lines of a text, or left out something."""


def connect(memory_limit: int) -> Any:
    """Return a connection to an empty database in memory, which loads no extension."""
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
    path: Path, num_columns: int, separator: str, form: TextForm, memory_limit: int
) -> Iterator[list[pa.Array]]:
    """Yield blocks of rows of a text, as columns of text; an empty cell is null.

    Args:
        path: file of UTF-8.
        num_columns: cells of every row.
        separator: character between cells.
        form: the :class:`~recbole_pos.tables.text.TextForm` of the file.
        memory_limit: bytes that DuckDB may use.

    Raises:
        IrregularText: if rows are not lines, as where a quotation mark is not closed, or if a line
            has an empty cell too many at its end, which DuckDB does not report.
        duckdb.Error: if a line has more or fewer cells, or the text cannot be read otherwise.
    """
    quote = '"' if form.has_quotes else ""
    # without new_line, which DuckDB 2.0 takes for an end of the file where lines end in \r\n
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
        "separator": separator,
        "quote": quote,
    }
    num_rows = num_open = 0
    connection = connect(memory_limit)  # which DuckDB 1 closes with its last reference
    for block in _stream(connection.sql(query, params=parameters)):
        num_rows += len(block)
        num_open += block.columns[-1].null_count
        yield block.columns
    num_blank = form.num_lines - num_rows
    if num_blank and num_blank != count_blank_lines(path, form.num_skipped):
        raise IrregularText(f"{num_rows} rows of {form.num_lines} lines")
    if num_open != form.num_open:
        raise IrregularText(f"{num_open} empty last cells, {form.num_open} lines without an end")


class ParquetFile:
    """A file of parquet: the names of its columns, the number of its rows, and its blocks.

    Raises:
        duckdb.Error: if it cannot be read.
    """

    def __init__(self, path: Path, memory_limit: int) -> None:
        self.connection = connect(memory_limit)
        self.parameters = {"path": glob.escape(str(path))}
        source = "read_parquet($path, hive_partitioning = false)"
        self.query = f"SELECT {{}} FROM {source}"
        self.columns: list[str] = self._select("*").columns
        self.num_rows: int = self._select("count(*)").fetchall()[0][0]

    def _select(self, selected: str) -> Any:
        return self.connection.sql(self.query.format(selected), params=self.parameters)

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield blocks of rows with some of the columns."""
        names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
        yield from _stream(self._select(names))


def _stream(relation: Any) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a result in blocks, which are larger than those that DuckDB makes."""
    small: list[pa.RecordBatch] = []
    # not relation.to_arrow_reader(), which DuckDB has since 1.5, and Python 3.10 has 1.4 at most
    for batch in pa.RecordBatchReader.from_stream(relation):
        small.append(batch)
        if sum(map(len, small)) >= _BLOCK_ROWS:
            yield pa.concat_batches(small)
            small = []
    if small:
        yield pa.concat_batches(small)
