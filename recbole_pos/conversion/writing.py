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

_BATCH_ROWS = 1 << 17
_SEPARATORS = (" ", "|", ";", " | ")  # of the names of a sequence
_YAML_HEADER = """\
# Written by `recbole-pos convert`, read for every run with -d {name}; docs/data.md explains the
# options. What became of every row stands in convert.json.
"""
Table = Mapping[str, Cells | np.ndarray]


def choose_separator(tables: Mapping[str, Table]) -> str:
    """Return a separator of sequences that no name in them contains."""
    values = [
        _replace_line_ends(cells.values)
        for table in tables.values()
        for cells in table.values()
        if isinstance(cells, Cells) and cells.kind.endswith("_seq")
    ]
    for separator in _SEPARATORS:
        if not any(pc.any(pc.match_substring(texts, separator)).as_py() for texts in values):
            return separator
    return INNER


def write_table(path: Path, table: Table, separator: str) -> None:
    """Write a table as one of RecBole's files, which appears only when it is complete.

    Args:
        path: path of the file.
        table: field -> cells, or an array of seconds.
        separator: what separates the names of a sequence.
    """
    header = []
    texts = {}
    num_rows = 0
    for field, column in table.items():
        if isinstance(column, Cells):
            header.append(f"{field}:{column.kind}")
            texts[field] = _escape(column, separator)
            num_rows = len(column.codes)
        else:
            header.append(f"{field}:float")
    with atomic_write(path, text=False) as file:
        file.write(("\t".join(header) + "\n").encode())
        for start in range(0, num_rows, _BATCH_ROWS):
            batch = slice(start, start + _BATCH_ROWS)
            row: list[pa.Array | str] = []  # cells and what follows them
            for field, column in table.items():
                if isinstance(column, Cells):
                    row += [texts[field].take(pa.array(column.codes[batch])), "\t"]
                else:
                    row += [format_numbers(column[batch]), "\t"]
            row[-1] = "\n"
            lines = pc.binary_join_element_wise(*row, "")
            _, offsets, data = lines.buffers()  # the text of all lines follows each other in data
            file.write(memoryview(data)[: np.frombuffer(offsets, np.int32)[len(lines)]])


def _replace_line_ends(values: pa.Array) -> pa.Array:
    """Return texts with blanks for line ends and NUL."""
    return pc.replace_substring_regex(values, r"[\r\n\x00]+", " ")


def _escape(cells: Cells, separator: str) -> pa.Array:
    """Return each value of cells as the text of a file, in quotation marks where needed."""
    values = _replace_line_ends(cells.values)
    if cells.kind.endswith("_seq"):
        values = pc.replace_substring(values, INNER, separator)
    needs_quotes = pc.match_substring_regex(values, '["\t]')
    if not pc.any(needs_quotes).as_py():
        return values
    quoted = pc.binary_join_element_wise('"', pc.replace_substring(values, '"', '""'), '"', "")
    return pc.if_else(needs_quotes, quoted, values)


def format_yaml(name: str, options: Mapping[str, Any]) -> str:
    """Return the text of the yaml file that is read for every run on a dataset."""
    return _YAML_HEADER.format(name=name) + yaml.safe_dump(
        dict(options), default_flow_style=None, sort_keys=False, allow_unicode=True, width=100
    )
