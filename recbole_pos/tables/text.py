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

    Counted are the lines after the header, which names the columns: all of them (``num_lines``),
    empty ones (``num_blank``), and those that end with a separator, so that their last cell is
    empty (``num_open``).

    Args:
        path: the file.
        num_skipped: number of lines up to the one that names the columns, itself included. Those
            before it are empty.
        separator: character between cells.

    Returns:
        The form of the file; None if another reader is needed, since it has NUL bytes, some of its
        lines but not all end in \\r\\n, or the separator has more than one byte in UTF-8.
    """
    if not separator.isascii():
        return None
    # counted in the whole file; num_returns are the lines that end in \r\n
    num_lines = num_returns = num_blank = num_open = 0
    has_quotes, is_ended = False, True  # is_ended: whether the last line has an end
    for block in _iterate_blocks(path):
        if b"\0" in block:
            return None
        has_quotes |= b'"' in block
        is_ended = block.endswith(b"\n")

        # A block has whole lines. Give the last line of the file an end, too, and replace \r\n by
        # \n, which makes the text shorter by a byte for each.
        ended = block if is_ended else block + b"\n"
        lines = ended.replace(b"\r\n", b"\n") if b"\r" in ended else ended
        num_returns += len(ended) - len(lines)
        if b"\r" in lines:
            return None

        # The last byte of each line is the one before its end. An empty line has none: there stands
        # the end of the line before it. As the first line has no line before it, the block gets a
        # further \n in front: "ab\n\nc,\n" becomes "\nab\n\nc,\n", and the last bytes are b, \n
        # and the separator.
        codes = np.frombuffer(b"\n" + lines, np.uint8)
        line_ends = np.flatnonzero(codes == _NEWLINE)[1:]  # without the one in front
        last_bytes = codes[line_ends - 1]
        num_lines += len(line_ends)
        num_blank += np.count_nonzero(last_bytes == _NEWLINE)
        num_open += np.count_nonzero(last_bytes == ord(separator))

    # Either no line ends in \r\n, or all do, where the last line of a file may have no end at all.
    num_ends = num_lines if is_ended else num_lines - 1
    if num_returns not in (0, num_ends):
        return None
    # Take the skipped lines off the counts: the header, and the empty lines before it.
    num_blank -= num_skipped - 1
    return TextForm(num_skipped, num_lines - num_skipped, num_blank, num_open, has_quotes)


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
