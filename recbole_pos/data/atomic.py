"""Atomic files: text whose first line names the columns as name:type, a cell of each in every line.

A file is read once, in blocks of whole lines. Arrow reads a block. Where it finds anything unusual
(a cell too many, a number it does not know) the block is read again line by line in Python, which
either knows better (``+5``, ``True``, ``1e400``) or can tell in which line and cell the fault is.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv as arrow

from recbole_pos.data.blocks import join_blocks
from recbole_pos.data.kinds import KINDS, MISSING
from recbole_pos.errors import UsageError
from recbole_pos.values import Options, shown

_NONE = frozenset(MISSING)
_TRUTH = {"true": 1.0, "false": 0.0}  # columns that pandas wrote from bool
LARGEST = float(np.finfo(np.float32).max)  # of a number in a model
_BLOCK = 1 << 22  # bytes
_ARROW_LIMIT = (1 << 31) - 1  # bytes of a block


class AtomicFile:
    """One file; ``columns`` maps the names in its first line to their kinds.

    Args:
        path: of the file.
        config: RecBole's, for field_separator, seq_separator and encoding.

    Raises:
        UsageError: if the file cannot be opened or decoded, or its first line names no columns.
    """

    head = "its first line"  # what names its columns

    def __init__(self, path: str | Path, config: Options) -> None:
        self.path = Path(path)
        self.separator, self.inner = config["field_separator"], config["seq_separator"]
        self.encoding = config["encoding"] or "utf-8"  # RecBole's own Config has no default
        if len(self.separator) != 1 or self.separator in '"\r\n\0':
            raise UsageError(
                f"field_separator: {shown(self.separator)} must be one character, and neither a "
                'quotation mark nor the end of a line; a tab is "\\t" in a yaml file'
            )
        if self.inner == "":
            raise UsageError("seq_separator is empty: nothing stands between names or numbers")
        self._blocks = self._text()
        self._after_header: tuple[int, str] = (1, "")
        self.columns = self._header()

    def read(self, names: Iterable[str]) -> pd.DataFrame:
        """The named columns of every line; once, since it goes through the file.

        Returns:
            one row a line: categories of str (token, nan if missing), float64 (float, nan if
            missing), arrays (token_seq and float_seq, empty if missing).

        Raises:
            UsageError: for the first line that has not a cell for every column, whose quotes do not
                end, or in which a number is none; if there is no line of data.
        """
        kinds = {name: self.columns[name] for name in names}
        parts: dict[str, list[Any]] = {name: [] for name in kinds}
        rows = 0
        for first, text in self._data():
            if not text:
                continue
            try:
                block = self._fast(text, kinds)
            except (ValueError, pa.ArrowException):
                block = self._slow(first, text, kinds)
            for name, column in block.items():
                parts[name].append(column)
            rows += len(column)
        if not rows:
            raise UsageError(
                f"{self.path} has a first line with the names of its columns, but no line of data; "
                "fill it; a .user or .item file may also be removed"
            )
        columns = {name: join_blocks(self.path, name, parts.pop(name)) for name in kinds}
        pa.default_memory_pool().release_unused()  # of a large file, hundreds of megabytes
        return pd.DataFrame(columns, copy=False)

    def _fail(self, line: int, text: str) -> UsageError:
        return UsageError(f"{self.path}, line {line}: {text}")

    def _text(self) -> Iterator[tuple[int, str]]:
        """Whole lines, a block at a time, with the number of the first; line ends are ``\\n``."""
        decoder = self._decoder()
        first, pending = 1, []
        try:
            with open(self.path, "rb") as file:
                for raw in itertools.chain(iter(lambda: file.read(_BLOCK), b""), [b""]):
                    text = decoder.decode(raw, final=not raw)
                    cut = text.rfind("\n") + 1 if raw else len(text)
                    pending.append(text[:cut])
                    if cut or not raw:
                        block = self._checked(first, "".join(pending))
                        yield first, block
                        first += block.count("\n")
                        pending = []
                    pending.append(text[cut:])
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except UnicodeError as error:
            line, reason = first, str(error)
            if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)):
                before = error.object[: error.start]
                line += before.count(b"\n") if isinstance(before, bytes) else before.count("\n")
                reason = f"{error.reason} ({error.object[error.start : error.start + 1]!r})"
            raise self._fail(line, f"{reason}; {self._no_text()}") from error

    def _decoder(self) -> io.IncrementalNewlineDecoder:
        try:
            "".encode(self.encoding)  # refuses codecs that are not of text
            decoder = codecs.getincrementaldecoder(self.encoding)()
        except (LookupError, ValueError) as error:
            raise UsageError(
                f"encoding: {shown(self.encoding)} is not one that Python knows"
            ) from error
        return io.IncrementalNewlineDecoder(decoder, translate=True)

    def _checked(self, first: int, block: str) -> str:
        if first == 1:
            block = block.removeprefix("\ufeff")  # as Excel writes it
        if "\0" in block:
            line = first + block.count("\n", 0, block.index("\0"))
            raise self._fail(line, f"a NUL byte; {self._no_text()}")
        block.encode()  # utf-7 and the like can hold what is no character
        return block

    def _no_text(self) -> str:
        return (
            f"the file is no {self.encoding} text. Write it as UTF-8, or set encoding to the one "
            "it has (cp1252 and utf-16 are what spreadsheets write)"
        )

    def _header(self) -> dict[str, str]:
        for first, text in self._blocks:
            if not (body := text.lstrip()):
                continue
            start = text.rfind("\n", 0, len(text) - len(body)) + 1  # of the first line with text
            line, _, rest = text[start:].partition("\n")
            number = first + text.count("\n", 0, start)
            self._after_header = (number + 1, rest)
            return self._named(number, self._cells(number, line))
        raise UsageError(
            f"{self.path} is empty: its first line must name the columns as name:type, such as "
            "user_id:token"
        )

    def _named(self, line: int, cells: list[str]) -> dict[str, str]:
        columns: dict[str, str] = {}
        for place, cell in enumerate(cells, 1):
            name, colon, kind = cell.partition(":")
            if not name or kind not in KINDS:
                found = cell if len(cell) < 80 else f"{cell[:80]}..."
                raise self._fail(
                    line,
                    f"cell {place} of the first line is {shown(found)}, but must name a column as "
                    f"name:type, type being one of {', '.join(KINDS)}, as in "
                    f"'user_id:token'. Cells are separated by {shown(self.separator)} "
                    "(field_separator); a file without such a line needs one",
                )
            if name in columns:
                raise self._fail(
                    line, f"two columns are called {shown(name)}; rename one or remove it"
                )
            columns[name] = kind
        return columns

    def _data(self) -> Iterator[tuple[int, str]]:
        yield self._after_header
        self._after_header = (1, "")
        yield from self._blocks

    def _fast(self, text: str, kinds: dict[str, str]) -> dict[str, Any]:
        """Columns of a block.

        Raises:
            ValueError: if there is anything in it that only ``_slow`` can tell.
        """
        if len(self.columns) == 1:
            raise ValueError("a blank line and an empty cell are the same")
        if '"' in text:
            self._check_quotes(text)
        data = text.encode()
        if len(data) > _ARROW_LIMIT:
            raise ValueError("too long for Arrow")
        types = {"token": pa.dictionary(pa.int32(), pa.string()), "float": pa.float64()}
        table = arrow.read_csv(
            pa.py_buffer(data),
            arrow.ReadOptions(
                use_threads=False, block_size=len(data) + 1, column_names=list(self.columns)
            ),
            arrow.ParseOptions(delimiter=self.separator),
            arrow.ConvertOptions(
                column_types={name: types.get(kind, pa.string()) for name, kind in kinds.items()},
                include_columns=list(kinds),
                null_values=MISSING,
                strings_can_be_null=True,
            ),
        )
        columns: dict[str, Any] = {}
        for name, kind in kinds.items():
            column = table[name].combine_chunks()
            if kind == "float":
                numbers = column.to_numpy(zero_copy_only=False)
                if np.isnan(numbers).sum() > column.null_count:
                    raise ValueError("nan in a spelling that is not among those of MISSING")
                columns[name] = numbers
            elif kind == "token":
                columns[name] = column
            else:
                columns[name] = [self._list(cell or "", kind) for cell in column.to_pylist()]
        return columns

    def _slow(self, first: int, text: str, kinds: dict[str, str]) -> dict[str, Any]:
        """Columns of a block, or the error of its first wrong line."""
        columns: dict[str, Any] = {name: [] for name in kinds}
        places = [(place, name) for place, name in enumerate(self.columns) if name in kinds]
        for number, line in enumerate(text.split("\n"), first):
            if self.separator not in line and not line.strip():
                continue
            cells = self._cells(number, line)
            if len(cells) != len(self.columns):
                raise self._fail(number, self._wrong_count(cells))
            for place, name in places:
                try:
                    columns[name].append(self._value(cells[place], kinds[name]))
                except ValueError:
                    raise self._fail(
                        number,
                        f"{name} ({kinds[name]}) is {cells[place][:80]!r}, which is no number; "
                        "correct the cell or leave it empty",
                    ) from None
        for name, kind in kinds.items():
            if kind == "token":
                columns[name] = pa.array(columns[name], pa.string()).dictionary_encode()
            elif kind == "float":
                columns[name] = np.array(columns[name], dtype=np.float64)
        return columns

    def _wrong_count(self, cells: list[str]) -> str:
        have = f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"
        names = ", ".join(list(self.columns)[:8]) + (", ..." if len(self.columns) > 8 else "")
        more = len(cells) > len(self.columns)
        hint = "Fill in or cut the line" if not more else "Remove what is too much"
        if more and not any(cells[len(self.columns) :]):
            hint = f"Remove the {shown(self.separator)} at its end"
        return (
            f"has {have}, but the first line names {len(self.columns)} columns ({names}). Every "
            f"line must have a cell for each, separated by {shown(self.separator)}. {hint}; a "
            f"cell that "
            'holds the separator needs quotation marks ("...")'
        )

    def _cells(self, number: int, line: str) -> list[str]:
        if '"' not in line:
            return line.split(self.separator)
        longest = csv.field_size_limit(len(line) + 1)  # is one for the whole process
        try:
            return next(csv.reader([line], delimiter=self.separator, strict=True))
        except csv.Error as error:
            raise self._fail(
                number,
                "a cell starts with a quotation mark that its end does not close: double it "
                '(""") or remove it; a cell cannot hold a line break',
            ) from error
        finally:
            csv.field_size_limit(longest)

    def _check_quotes(self, text: str) -> None:
        """Refuse a quote that does not end where its cell does: Arrow takes it for any other."""
        cut = re.escape(self.separator)
        doubtful = rf'(?:^|{cut})"(?![^"\n]*(?:""[^"\n]*)*"(?:{cut}|$))'  # a few are all right
        for quote in re.finditer(doubtful, text, re.MULTILINE):
            line = text[text.rfind("\n", 0, quote.end()) + 1 :].partition("\n")[0]
            self._cells(0, line)

    def _value(self, cell: str, kind: str) -> Any:
        missing = cell in _NONE
        if kind == "token":
            return None if missing else cell
        if kind != "float":
            return self._list("" if missing else cell, kind)
        if missing:
            return float("nan")
        truth = _TRUTH.get(cell.lower())
        return float(cell) if truth is None else truth

    def _list(self, cell: str, kind: str) -> np.ndarray:
        parts = list(filter(None, cell.split(self.inner)))
        if kind == "token_seq":
            return np.array(parts)
        numbers = np.array(list(map(float, parts)))
        if not (np.abs(numbers) <= LARGEST).all():  # a mean has no meaning here
            raise ValueError("nan or inf")
        return numbers
