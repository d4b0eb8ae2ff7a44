"""The form of a text file: its lines, their ends, and whether it has quotation marks."""

from __future__ import annotations

import codecs
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError

_BLOCK_BYTES = 1 << 22
_BLANK_LINE = re.compile(rb"^\r?\n", re.MULTILINE)


@dataclass(frozen=True)
class TextForm:
    """What reading a text needs to know of all its bytes.

    Attributes:
        num_skipped: lines up to the one that names the columns, itself included.
        num_lines: lines after these, of which some may be empty.
        num_open: lines whose last character is the separator.
        has_quotes: whether there is a quotation mark anywhere.
    """

    num_skipped: int
    num_lines: int
    num_open: int
    has_quotes: bool


def find_form(path: Path, num_skipped: int, separator: str) -> TextForm | None:
    """Return the form of a file of UTF-8; None if it has NUL bytes or lines of several ends."""
    num_lines = num_returns = num_open = 0
    has_quotes, is_ended, mark = False, True, separator.encode()
    for block in _iterate_blocks(path):
        if b"\0" in block:
            return None
        num_lines += block.count(b"\n") + (not block.endswith(b"\n"))
        num_returns += block.count(b"\r")
        num_open += block.count(mark + b"\n") + block.endswith(mark)
        num_open += block.count(mark + b"\r\n") if num_returns else 0
        has_quotes |= b'"' in block
        is_ended = block.endswith(b"\n")
    if num_returns not in (0, num_lines if is_ended else num_lines - 1):
        return None
    return TextForm(num_skipped, num_lines - num_skipped, num_open, has_quotes)


def count_blank_lines(path: Path, num_skipped: int) -> int:
    """Return the number of empty lines after the first ``num_skipped`` ones, which are not empty.

    Only the last of these may follow empty lines.
    """
    num_blank = sum(len(_BLANK_LINE.findall(block)) for block in _iterate_blocks(path))
    return num_blank - (num_skipped - 1)


def _iterate_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of whole lines."""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES) + file.readline():
            yield block


def iterate_lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line, without its end.

    Raises:
        UsageError: naming the first line that cannot be decoded or has a NUL byte.
    """
    number = 0
    try:
        with open(path, encoding=encoding) as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                if "\0" in line:
                    raise _make_encoding_error(path, number, encoding, "a NUL byte")
                line = line.removeprefix("\ufeff") if number == 1 else line
                yield number, line.removesuffix("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeError as error:
        reason = str(getattr(error, "reason", error))
        line_number = _find_undecodable(path, encoding)
        raise _make_encoding_error(path, line_number, encoding, reason) from error


def _make_encoding_error(path: Path, line_number: int, encoding: str, reason: str) -> UsageError:
    return UsageError(
        f"{path}, line {line_number}: {reason}; the file is no {encoding} text. Write it as UTF-8, "
        "or set encoding to the one it has (cp1252 and utf-16 are what spreadsheets write)"
    )


def _find_undecodable(path: Path, encoding: str) -> int:
    """Return the number of the first line that cannot be decoded."""
    number = 1
    try:
        with open(path, encoding=encoding) as file:
            while file.readline():
                number += 1
    except UnicodeDecodeError as error:  # of a block, from its first byte on
        number += error.object[: error.start].count(b"\n")
    return number


def is_utf8(encoding: str) -> bool:
    """Return whether text of this encoding is UTF-8 as it is."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")


def write_as_utf8(path: Path, encoding: str) -> Any:
    """Return a temporary file with the text of a file in UTF-8, removed with the object.

    Raises:
        UnicodeError: if it cannot be decoded.
    """
    copy = tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="\n")  # noqa: SIM115
    with open(path, encoding=encoding) as file:
        shutil.copyfileobj(file, copy, _BLOCK_BYTES)
    copy.flush()
    return copy
