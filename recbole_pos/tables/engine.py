"""Reads text and parquet by DuckDB, in blocks of Arrow columns, in the order of the file.

Nothing is guessed: cells of text stay text, which the caller converts. The text of a query never
holds names or paths of users. Of a text the lines are counted before, so that it shows whether
DuckDB has read each of them as a row.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import numpy as np
import pyarrow as pa

from recbole_pos.errors import UsageError

_BLOCK_ROWS = 1 << 18  # rows that are handed on at a time, at least
# What reading a file by DuckDB may raise.
ENGINE_ERRORS = (duckdb.Error, pa.ArrowException, OSError)
SEPARATOR = "\t"  # between the cells of a line of an atomic file
BLOCK_BYTES = 1 << 22  # of text that are read at a time, at least


@dataclass(frozen=True)
class TextForm:
    """What reading a text file needs to know of all its bytes.

    Attributes:
        num_skipped: lines up to the one that names the columns, itself included.
        num_lines: lines after these, of which some may be empty.
        num_blank: lines after these that are empty.
        num_tab_ends: lines that end with a tab, so that their last cell is empty.
        has_quotes: whether there is a quotation mark anywhere.
    """

    num_skipped: int
    num_lines: int
    num_blank: int
    num_tab_ends: int
    has_quotes: bool


def find_form(path: Path, num_skipped: int) -> TextForm | None:
    """Count the lines of a text file, to check later that DuckDB has read each of them as a row.

    It counts all lines; empty lines, which DuckDB leaves out; and lines that end with a tab, and so
    with an empty cell. If this cell is one too many, DuckDB drops it without an error.

    Args:
        path: the file.
        num_skipped: number of lines of the header, which are skipped: empty lines, then the one
            that names the columns.

    Returns:
        The counts for :func:`read_text`; None if another reader is needed, since the file has NUL
        bytes, or some of its lines but not all end in \\r\\n.
    """
    has_quotes = False  # anywhere in the file; else DuckDB need not look for them
    num_ends = num_returns = 0  # how many lines have an end, and for how many it is \r\n
    totals = np.zeros(3, np.int64)  # all lines, empty ones, and those that end with a tab
    with open(path, "rb") as file:
        for block in read_blocks(file):
            text = block.replace(b"\r\n", b"\n")
            if b"\0" in text or b"\r" in text:
                return None
            has_quotes |= b'"' in text
            num_ends += text.count(b"\n")
            num_returns += len(block) - len(text)
            totals += _count_lines(text)
    if num_returns not in (0, num_ends):
        return None

    # Take off the lines of the header, which are empty but for the last one.
    num_lines, num_blank, num_tab_ends = totals.tolist()
    num_lines -= num_skipped
    num_blank -= num_skipped - 1
    return TextForm(num_skipped, num_lines, num_blank, num_tab_ends, has_quotes)


def _count_lines(text: bytes) -> tuple[int, int, int]:
    """Count all lines of a text, those that are empty, and those that end with a tab.

    Args:
        text: whole lines that end in \\n; the last one may have no end.
    """
    text = text if text.endswith(b"\n") else text + b"\n"
    # a line is empty if its end follows another end, or begins the text
    is_end = np.frombuffer(text, np.uint8) == ord("\n")
    num_blank = int(is_end[0]) + np.count_nonzero(is_end[1:] & is_end[:-1])
    return text.count(b"\n"), num_blank, text.count(SEPARATOR.encode() + b"\n")


def read_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of a stream in blocks of some megabytes, each of whole lines."""
    while block := stream.read(BLOCK_BYTES) + stream.readline():
        yield block


def iterate_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of every line of a file, without its line end.

    Raises:
        UsageError: naming the first line that is no UTF-8 or has a NUL byte.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            for number, data in enumerate(file, 1):  # noqa: B007
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in line:
                    raise UnicodeError("a NUL byte")
                yield number, line.removesuffix("\n").removesuffix("\r")
    except UnicodeError as error:
        reason = getattr(error, "reason", error)
        raise UsageError(
            f"{path}, line {number}: {reason}; the file is no UTF-8 text. Write it as UTF-8, or "
            "read it by `recbole-pos convert --encoding=...` (spreadsheets write cp1252 and utf-16)"
        ) from error


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
        form: what :func:`find_form` has counted in the file: lines to skip (``num_skipped``), lines
            after these (``num_lines``), how many of them are empty (``num_blank``) or end with a
            tab (``num_tab_ends``); and whether the file has quotation marks (``has_quotes``).
        memory_limit: bytes that DuckDB may use.

    Yields:
        The columns of a block of rows, as text; an empty cell is null.

    Raises:
        ValueError: if rows are not lines, as where a quotation mark is not closed; or if a line has
            one cell too many, and that is empty, which DuckDB drops without an error.
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

    num_rows = num_empty_ends = 0  # all rows, and those whose last cell is empty
    # a variable of its own keeps the connection open: DuckDB 1 closes it when nothing refers to it
    connection = connect(memory_limit)
    for block in _stream(connection.sql(query, params=parameters)):
        num_rows += len(block)
        num_empty_ends += block.columns[-1].null_count
        yield block.columns

    # Every line must be a row, except empty lines, which DuckDB skips. Every line that ends with a
    # tab must have an empty last cell. For example, a file has two columns and -> for a tab:
    #   a->     is the row (a, empty): it ends with a tab, and the last cell is empty.
    #   a->b->  has a cell too many. DuckDB drops it, and the last cell of the row (a, b) is not
    #           empty, although the line ends with a tab.
    are_all_rows = num_rows == form.num_lines - form.num_blank
    have_all_cells = num_empty_ends == form.num_tab_ends
    if not (are_all_rows and have_all_cells):
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
