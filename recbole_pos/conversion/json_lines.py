"""Json lines: an object a line, read in blocks by Arrow; a block with a broken line by Python."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow

from recbole_pos.conversion.source import Columns, Part, flatten_records, stack_columns
from recbole_pos.errors import UsageError

_BLOCK = 1 << 22  # bytes
_NESTED = 200  # most nested brackets; parsers recurse, and deeper text could overflow the stack
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def read_json(file: Path, opened: Callable[[Path], IO[bytes]]) -> Part:
    """Read a file of json lines, which ``opened`` opens and unpacks.

    Raises:
        UsageError: if it is one list instead of lines.
    """
    tables: list[tuple[Columns, int]] = []
    broken: list[tuple[int, str]] = []
    texts: dict[str, pa.DataType] = {}
    rows = 0
    with opened(file) as lines:
        while block := lines.read(_BLOCK) + lines.readline():
            if not tables:
                block = block.removeprefix(b"\xef\xbb\xbf")
                if block.lstrip().startswith(b"["):
                    raise UsageError(
                        f"{file} holds json lists, expected an object a line; write it again, as "
                        f"in `jq -c '.[]' {file.name} > {file.stem}-lines.jsonl` for one list"
                    )
            table = _read_fast(block, texts)
            if table is None:
                table, errors = _read_slowly(block)
                broken += [(rows + len(broken) + number, why) for number, why in errors]
            tables.append((flatten_records(table), table.num_rows))
            rows += table.num_rows
    return Part(file, stack_columns(tables), rows, broken)


def _read_fast(block: bytes, texts: dict[str, pa.DataType]) -> pa.Table | None:
    """Parse whole lines by Arrow; None if one is not an object that Arrow reads exactly.

    ``texts`` are columns to read as text, since Arrow takes them for times; it is extended.
    """
    marks = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(marks == ord("\n"))
    line = np.searchsorted(ends, np.flatnonzero(np.isin(marks, tuple(b"[{"))))
    if (line[_NESTED:] == line[:-_NESTED]).any():  # may be deep
        return None
    reading = arrow.ReadOptions(block_size=len(block) + 1)
    while True:
        schema = arrow.ParseOptions(explicit_schema=pa.schema(texts))
        try:
            table = arrow.read_json(io.BytesIO(block), reading, schema)
        except pa.ArrowException:
            return None
        times = {f.name: pa.string() for f in table.schema if pa.types.is_timestamp(f.type)}
        if not times:
            break
        texts |= times
    floats = [column for column in table.columns if pa.types.is_floating(column.type)]
    # a whole number of more than 64 bits, such as an id, is a float
    is_exact = all((pc.max(pc.abs(column)).as_py() or 0) < 2**53 for column in floats)
    lines = len(ends) + (not block.endswith(b"\n"))
    return table if is_exact and table.num_rows == lines else None


def _read_slowly(block: bytes) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Parse whole lines in Python; also return number from 0 and fault of those not an object."""
    rows: list[dict[str, Any]] = []
    broken: list[tuple[int, str]] = []
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n")):
        try:
            rows.append(_parse(line))
        except ValueError as error:
            broken.append((number, f"no json: {error}" if line.strip() else "empty line"))
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _array([row.get(name) for row in rows]) for name in names}), broken


def _parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line; ValueError if it is none, or no parser may be given it."""
    if line.count(b"[") + line.count(b"{") > _NESTED:
        marks = np.frombuffer(_STRING.sub(b"", line), np.uint8)
        steps = np.isin(marks, tuple(b"[{")).astype(np.int32) - np.isin(marks, tuple(b"]}"))
        if steps.cumsum().max(initial=0) > _NESTED:
            raise ValueError(f"more than {_NESTED} brackets within each other")
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not an object")
    if b"\\u" in line:  # raises for a lone surrogate, which is no character
        json.dumps(row, ensure_ascii=False).encode()
    return row


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # numbers and text under one name
        texts = (v if v is None or isinstance(v, str) else json.dumps(v) for v in values)
        return pa.array(texts, pa.string())
