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

from recbole_pos.conversion.source import Broken, Part, flat, opened, union
from recbole_pos.errors import UsageError

_BLOCK = 1 << 22  # bytes
_NESTED = 200  # brackets
_OPEN, _CLOSE = tuple(b"[{"), tuple(b"]}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def read_json(file: Path) -> Part:
    """A file of json lines.

    Raises:
        UsageError: if it is one list instead of lines.
    """
    tables: list[tuple[dict[str, pa.ChunkedArray], int]] = []
    broken: list[Broken] = []
    texts: dict[str, Any] = {}
    rows = 0
    with opened(file) as lines:
        while block := lines.read(_BLOCK) + lines.readline():
            if not rows and not broken:
                block = block.removeprefix(b"\xef\xbb\xbf")
                if block.lstrip().startswith(b"["):
                    raise UsageError(
                        f"{file} is one json list; write an object a line, as in "
                        f"`jq -c '.[]' {file.name} > {file.stem}.jsonl`"
                    )
            table = _fast(block, texts)
            if table is None:
                table, found = _slow(block, rows + len(broken) + 1)
                broken += found
            tables.append((flat(table), table.num_rows))
            rows += table.num_rows
    return Part(file, union(tables), rows, broken)


def read_lists(text: pa.Array) -> pa.Array | None:
    """Return the lists that texts are in json; None if one is no list."""
    lines = pc.binary_join_element_wise('{"list":', pc.fill_null(text, "null"), "}", "")
    table = _fast("\n".join(lines.to_pylist()).encode(), {})
    if table is None or table.column_names != ["list"]:
        return None
    lists = table["list"].combine_chunks()
    if not pa.types.is_list(lists.type) or pa.types.is_nested(lists.type.value_type):
        return None
    return None if _beyond_floats(pa.table([lists.flatten()], ["list"])) else lists


def _is_deep(line: bytes) -> bool:
    """Whether more brackets are open at once than a parser may be given.

    It calls itself for each of them, and ends the process where the stack ends.
    """
    if line.count(b"[") + line.count(b"{") <= _NESTED:
        return False
    marks = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    step = np.isin(marks, _OPEN).astype(np.int32) - np.isin(marks, _CLOSE)
    return int(np.cumsum(step).max(initial=0)) > _NESTED


def _may_be_deep(block: bytes) -> bool:
    """Whether a line has so many brackets that each has to be looked at."""
    marks = np.frombuffer(block, np.uint8)
    opens = np.flatnonzero((marks == _OPEN[0]) | (marks == _OPEN[1]))
    line = np.searchsorted(np.flatnonzero(marks == 10), opens)
    return bool((line[_NESTED:] == line[:-_NESTED]).any())


def _fast(block: bytes, texts: dict[str, Any]) -> pa.Table | None:
    """The rows of a block; None if it has other than a readable object in every line."""
    if _may_be_deep(block):
        return None
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    for _ in range(2):
        options = arrow.ParseOptions(explicit_schema=pa.schema(texts)) if texts else None
        try:
            table = arrow.read_json(
                io.BytesIO(block), arrow.ReadOptions(block_size=len(block) + 1), options
            )
        except pa.ArrowException:
            return None
        # Arrow makes times of some texts; how they are written is for later, and for all blocks
        dates = {f.name: pa.string() for f in table.schema if pa.types.is_timestamp(f.type)}
        if not dates:
            return table if table.num_rows == lines and not _beyond_floats(table) else None
        texts.update(dates)
    return None


def _beyond_floats(table: pa.Table) -> bool:
    """Whether whole numbers may have become other ones, as ids that are too large for int64 do."""
    floats = (column for column in table.columns if pa.types.is_floating(column.type))
    return any((pc.max(pc.abs(column)).as_py() or 0) >= 2**53 for column in floats)


def _slow(block: bytes, first: int) -> tuple[pa.Table, list[Broken]]:
    """The rows of a block, and the lines of it that are none; ``first`` is the first's number."""
    rows: list[dict[str, Any]] = []
    broken: list[Broken] = []
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
        if _is_deep(line):
            broken.append(Broken(number, 1, f"more than {_NESTED} brackets within each other"))
            continue
        try:
            row = json.loads(line)
            if b"\\u" in line:  # half a pair of them is no character
                json.dumps(row, ensure_ascii=False).encode()
        except ValueError as error:
            why = "empty line" if not line.strip() else f"no json: {error}"
            broken.append(Broken(number, 1, why))
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken.append(Broken(number, 1, "no json object"))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _array([row.get(name) for row in rows]) for name in names}
    if not columns:
        return pa.table({}), broken
    return pa.table(columns), broken


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # numbers and text under one name
        return pa.array([_plain(value) for value in values], pa.string())


def _plain(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
