"""The form of a text file of UTF-8: its lines, their ends, and whether it has quotation marks."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recbole_pos.errors import UsageError

_BLOCK_BYTES = 1 << 22
_NEWLINE = ord("\n")


@dataclass(frozen=True)
class TextForm:
    """What reading a text file needs to know of all its bytes.

    Attributes:
        num_skipped: lines up to the one that names the columns, itself included.
        num_lines: lines after these, of which some may be empty.
        num_blank: lines after these that are empty.
        num_open: lines whose last character is the separator, so that their last cell is empty.
        has_quotes: whether there is a quotation mark anywhere.
    """

    num_skipped: int
    num_lines: int
    num_blank: int
    num_open: int
    has_quotes: bool


def find_form(path: Path, num_skipped: int, separator: str) -> TextForm | None:
    """Count the lines of a text file, to check later that DuckDB has read all of them.

    Args:
        path: the file.
        num_skipped: number of lines up to the one that names the columns, itself included. Those
            before it are empty.
        separator: character between cells.

    Returns:
        The counts; None if another reader is needed, since the file has NUL bytes, some of its
        lines but not all end in \\r\\n, or the separator has more than one byte in UTF-8.
    """
    if not separator.isascii():
        return None
    open_end = separator.encode() + b"\n"  # end of a line whose last cell is empty
    num_lines = num_returns = num_ends = num_blank = num_open = 0
    has_quotes = False
    for block in _iterate_blocks(path):  # each has whole lines
        if b"\0" in block:
            return None
        has_quotes |= b'"' in block

        # ends of lines are \n from here on; num_returns of them were \r\n
        lines = block.replace(b"\r\n", b"\n")
        num_returns += len(block) - len(lines)
        if b"\r" in lines:
            return None
        num_ends += lines.count(b"\n")

        # the last line of a file may have no end: it gets one
        lines = lines if lines.endswith(b"\n") else lines + b"\n"
        num_lines += lines.count(b"\n")
        num_open += lines.count(open_end)
        # a line is empty if its end follows another end, or begins the block
        is_end = np.frombuffer(lines, np.uint8) == _NEWLINE
        num_blank += int(is_end[0]) + np.count_nonzero(is_end[1:] & is_end[:-1])

    if num_returns not in (0, num_ends):
        return None
    # without the header and the empty lines before it
    num_lines, num_blank = num_lines - num_skipped, num_blank - (num_skipped - 1)
    return TextForm(num_skipped, num_lines, num_blank, num_open, has_quotes)


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
