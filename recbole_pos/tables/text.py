"""The form of a text file of UTF-8: its lines, their ends, and whether it has quotation marks."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recbole_pos.errors import UsageError

SEPARATOR = "\t"  # between the cells of a line of an atomic file
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class TextForm:
    """What reading a text file needs to know of all its bytes.

    Attributes:
        num_skipped: lines up to the one that names the columns, itself included.
        num_lines: lines after these, of which some may be empty.
        num_blank: lines after these that are empty.
        num_open: lines whose last character is a tab, so that their last cell is empty.
        has_quotes: whether there is a quotation mark anywhere.
    """

    num_skipped: int
    num_lines: int
    num_blank: int
    num_open: int
    has_quotes: bool


def find_form(path: Path, num_skipped: int) -> TextForm | None:
    """Count the lines of a text file, to check later that DuckDB has read each of them as a row.

    DuckDB leaves out empty lines, and drops an empty cell too many at the end of a line: so these
    lines are counted, too. Only where a file has quotation marks need DuckDB look for them.

    Args:
        path: the file.
        num_skipped: number of lines of the header, which is not counted: empty lines, then the one
            that names the columns.

    Returns:
        The counts; None if another reader is needed, since the file has NUL bytes, or some of its
        lines but not all end in \\r\\n.
    """
    has_quotes = False
    num_ends = num_returns = 0  # how many lines have an end, and for how many it is \r\n
    totals = np.zeros(3, np.int64)  # all lines, empty ones, and those that end with a tab
    for block in _iterate_blocks(path):  # each has whole lines
        text = block.replace(b"\r\n", b"\n")
        if b"\0" in text or b"\r" in text:
            return None
        has_quotes |= b'"' in text
        num_ends += text.count(b"\n")
        num_returns += len(block) - len(text)
        totals += _count_lines(text)
    if num_returns not in (0, num_ends):
        return None

    num_lines, num_blank, num_open = totals.tolist()
    num_lines -= num_skipped
    num_blank -= num_skipped - 1  # all lines of the header but its last one are empty
    return TextForm(num_skipped, num_lines, num_blank, num_open, has_quotes)


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


def _iterate_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of whole lines."""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES) + file.readline():
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


def is_utf8(encoding: str) -> bool:
    """Return whether text of this encoding is UTF-8 as it is."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")
