"""Json lines: an object a line, read in blocks by Arrow; a block with a broken line by Python."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow

from recbole_pos.conversion.source import Broken, Part, flat, opened, union
from recbole_pos.errors import UsageError

_BLOCK = 1 << 22  # bytes


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


def _fast(block: bytes, texts: dict[str, Any]) -> pa.Table | None:
    """The rows of a block; None if it has other than a readable object in every line."""
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
        try:
            row = json.loads(line)
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
