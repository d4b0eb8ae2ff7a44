"""Json lines: an object a line, read in blocks by Arrow; a block with a broken line by Python."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow

from recbole_pos.conversion.source import Columns, ParseError, Part, flatten, open_unpacked, union
from recbole_pos.errors import UsageError

_BLOCK = 1 << 22  # bytes
_NESTED = 200  # most nested brackets; parsers recurse, and deeper text could overflow the stack
_OPEN, _CLOSE = tuple(b"[{"), tuple(b"]}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def read_json(file: Path) -> Part:
    """Read a file of json lines.

    Raises:
        UsageError: if it is one list instead of lines.
    """
    tables: list[tuple[Columns, int]] = []
    broken: list[ParseError] = []
    texts: dict[str, Any] = {}
    rows = 0
    with open_unpacked(file) as lines:
        while block := lines.read(_BLOCK) + lines.readline():
            if not tables:
                block = block.removeprefix(b"\xef\xbb\xbf")
                if block.lstrip().startswith(b"["):
                    lists = all(line.strip().endswith(b"]") for line in block.splitlines()[:2])
                    held = "a json list a line" if lists else "one json list"
                    raise UsageError(
                        f"{file} holds {held}, expected an object a line; write it again, for one "
                        f"list as in `jq -c '.[]' {file.name} > {file.stem}-lines.jsonl`"
                    )
            table = _read_fast(block, texts)
            if table is None:
                table, errors = _read_slowly(block, rows + len(broken) + 1)
                broken += errors
            tables.append((flatten(table), table.num_rows))
            rows += table.num_rows
    return Part(file, union(tables), rows, broken)


def read_lists(text: pa.Array) -> pa.Array | None:
    """Parse texts as json lists; None if one is not a list of plain values."""
    lines = pc.binary_join_element_wise('{"list":', pc.fill_null(text, "null"), "}", "")
    table = _read_fast("\n".join(lines.to_pylist()).encode(), {})
    if table is None or table.column_names != ["list"]:
        return None
    lists = table["list"].combine_chunks()
    if not pa.types.is_list(lists.type) or pa.types.is_nested(lists.type.value_type):
        return None
    return None if _has_large_floats(pa.table([lists.flatten()], ["list"])) else lists


def _read_fast(block: bytes, texts: dict[str, Any]) -> pa.Table | None:
    """Parse a block by Arrow; None if a line is not an object that Arrow reads exactly.

    Args:
        block: whole lines.
        texts: columns to read as text, since they look like times; extended for later blocks.
    """
    marks = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(marks == ord("\n"))
    line = np.searchsorted(ends, np.flatnonzero(np.isin(marks, _OPEN)))
    if (line[_NESTED:] == line[:-_NESTED]).any():
        return None
    lines = len(ends) + (not block.endswith(b"\n"))
    for _ in range(2):
        options = arrow.ParseOptions(explicit_schema=pa.schema(texts)) if texts else None
        try:
            table = arrow.read_json(
                io.BytesIO(block), arrow.ReadOptions(block_size=len(block) + 1), options
            )
        except pa.ArrowException:
            return None
        # Arrow parses some texts as times; read them as text, which times.py parses
        dates = {f.name: pa.string() for f in table.schema if pa.types.is_timestamp(f.type)}
        if not dates:
            return table if table.num_rows == lines and not _has_large_floats(table) else None
        texts.update(dates)
    return None


def _has_large_floats(table: pa.Table) -> bool:
    """Return whether a float is so large that it may be a rounded whole number, such as an id."""
    floats = (column for column in table.columns if pa.types.is_floating(column.type))
    return any((pc.max(pc.abs(column)).as_py() or 0) >= 2**53 for column in floats)


def _read_slowly(block: bytes, first: int) -> tuple[pa.Table, list[ParseError]]:
    """Parse a block line by line in Python.

    Args:
        block: whole lines.
        first: number of its first line.

    Returns:
        the rows, and errors of the lines that are no objects.
    """
    rows: list[dict[str, Any]] = []
    broken: list[ParseError] = []
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
        try:
            if _is_deep(line):
                raise ValueError(f"more than {_NESTED} brackets within each other")
            row = json.loads(line)
            if b"\\u" in line:  # raises for a lone surrogate, which is no character
                json.dumps(row, ensure_ascii=False).encode()
            if not isinstance(row, dict):
                raise ValueError("not an object")
            rows.append(row)
        except ValueError as error:
            why = f"no json: {error}" if line.strip() else "empty line"
            broken.append(ParseError(number, 1, why))
    columns = {
        name: _array([row.get(name) for row in rows])
        for name in dict.fromkeys(name for row in rows for name in row)
    }
    return pa.table(columns), broken


def _is_deep(line: bytes) -> bool:
    marks = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    step = np.isin(marks, _OPEN).astype(np.int32) - np.isin(marks, _CLOSE)
    return int(np.cumsum(step).max(initial=0)) > _NESTED


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # numbers and text under one name
        texts = (v if v is None or isinstance(v, str) else json.dumps(v) for v in values)
        return pa.array(texts, pa.string())
