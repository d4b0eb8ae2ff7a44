"""Atomic files and the yaml beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import compute as pc

from recbole_pos.conversion.cells import INNER, Cells, format_numbers
from recbole_pos.files import atomic_write

_BATCH = 1 << 17  # rows
_SEQUENCE = (" ", "|", ";", " | ", INNER)  # what may stand between the names of a sequence
_ABOUT = """\
# Written by `recbole-pos convert`, read for every run with -d {name}; docs/data.md explains the
# options. What became of every row stands in convert.json.
"""
Table = Mapping[str, Cells | np.ndarray]


def choose_separator(tables: Mapping[str, Table]) -> str:
    """Return a separator of sequences that no name in them contains."""
    values = [
        cells.values
        for table in tables.values()
        for cells in table.values()
        if isinstance(cells, Cells) and cells.kind.endswith("_seq")
    ]
    for mark in _SEQUENCE[:-1]:
        if not any(pc.any(pc.match_substring(one, mark)).as_py() for one in values):
            return mark
    return INNER


def write_table(path: Path, table: Table, separator: str) -> None:
    """Write one atomic file, which appears only when it is complete.

    Args:
        path: path of the file.
        table: cells by field; arrays are times in seconds.
        separator: separator of sequences.
    """
    kinds = [c.kind if isinstance(c, Cells) else "float" for c in table.values()]
    header = "\t".join(f"{name}:{kind}" for name, kind in zip(table, kinds, strict=True))
    ready = [
        (_safe(c, separator), c.codes) if isinstance(c, Cells) else (None, c)
        for c in table.values()
    ]
    with atomic_write(path, text=False) as file:
        file.write(f"{header}\n".encode())
        for start in range(0, len(ready[0][1]), _BATCH):
            row: list[pa.Array | str] = []
            for values, codes in ready:
                part = codes[start : start + _BATCH]
                row += [
                    format_numbers(part) if values is None else values.take(pa.array(part)),
                    "\t",
                ]
            row[-1] = "\n"
            text = pc.binary_join_element_wise(*row, "")
            ends = np.frombuffer(text.buffers()[1], np.int32)
            file.write(memoryview(text.buffers()[2])[: ends[len(text)]])


def _safe(cells: Cells, separator: str) -> pa.Array:
    """Return values as text of a cell: on one line, in quotation marks where needed."""
    values = cells.values
    if cells.kind.endswith("_seq"):
        values = pc.replace_substring(values, INNER, separator)
    values = pc.replace_substring_regex(values, r"[\r\n\x00]+", " ")
    doubtful = pc.match_substring_regex(values, '["\t]')
    if not pc.any(doubtful).as_py():
        return values
    quoted = pc.binary_join_element_wise('"', pc.replace_substring(values, '"', '""'), '"', "")
    return pc.if_else(doubtful, quoted, values)


def format_yaml(name: str, options: Mapping[str, Any]) -> str:
    """Return the yaml that is read for every run on a dataset."""
    return _ABOUT.format(name=name) + yaml.safe_dump(
        dict(options), default_flow_style=None, sort_keys=False, allow_unicode=True, width=100
    )
