"""Atomic files and the yaml beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import compute as pc

from recbole_pos.conversion.cells import INNER, Cells, number_text
from recbole_pos.files import whole

_BATCH = 1 << 17  # rows
_SEQUENCE = (" ", "|", ";", " | ", INNER)  # what may stand between the names of a sequence
_ROLES = {"USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item", "TIME_FIELD": "time"}
_YAML = """\
# Written by `recbole-pos convert`, read for every run with -d {name}. What became of every line
# stands in convert.json.
field_separator: "\\t"  # (str) Separator of columns in the atomic files.
seq_separator: {separator}  # (str) Separator inside sequences.
{fields}
{time}
{parts}
load_col:  # (dict) The suffix of atomic files: (list) fields to load.
{loaded}
{small}
for:
  AttrFormer:
    relations:  # (list) Attributes that relate events.
{relations}
"""
_UNIT = "timestamp_unit: seconds  # (str) What the time field counts, since 1970 in UTC."
_GIVEN = "benchmark_filename: {}  # (list) Parts of the interactions, which were given.\n"
_ORDER = "# The time field only orders the events of a user: for schemes and models without time."
_FEW_ITEMS = """
# There are too few items for rankings of 20.
topk: [1, 3]  # (list) Cutoffs.
valid_metric: NDCG@3  # (str) Early stopping and the best checkpoint go by it.
"""
Table = Mapping[str, Cells | np.ndarray]


def sequence_separator(tables: Mapping[str, Table]) -> str:
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
    with whole(path, text=False) as file:
        file.write(f"{header}\n".encode())
        for start in range(0, len(ready[0][1]), _BATCH):
            row: list[pa.Array | str] = []
            for values, codes in ready:
                part = codes[start : start + _BATCH]
                row += [number_text(part) if values is None else values.take(pa.array(part)), "\t"]
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


def shop_yaml(
    name: str,
    fields: Mapping[str, str],
    origin: Mapping[str, str],
    loaded: Mapping[str, list[str]],
    separator: str,
    relations: list[str],
    small: bool,
    has_time: bool = True,
    parts: Sequence[str] = (),
) -> str:
    """Return the yaml that is read for every run on a dataset.

    Args:
        name: name of the dataset.
        fields: fields of user, item and time, by role.
        origin: columns that these fields were made of, by role.
        loaded: fields to load, by table.
        separator: separator of sequences.
        relations: entries of AttrFormer's option, in yaml.
        small: whether there are too few items for the usual cutoffs.
        has_time: whether the time field is a time, or only numbers the events of a user.
        parts: names of the files of interactions, where there are several.
    """
    return _YAML.format(
        name=name,
        separator=json.dumps(separator),
        fields="\n".join(
            f"{key}: {flow(fields[of])}  # (str) Field of the {of}: {' '.join(origin[of].split())}."
            for key, of in _ROLES.items()
        ),
        time=_UNIT if has_time else _ORDER,
        parts=_GIVEN.format(flow(list(parts))) if parts else "",
        loaded="\n".join(f"  {table}: {flow(names)}" for table, names in loaded.items()),
        small=_FEW_ITEMS if small else "",
        relations="\n".join(f"      - {entry}" for entry in relations),
    )


def flow(value: str | list[str]) -> str:
    """Return a name, or a list of names, on one line of yaml."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("\n...\n").removesuffix("\n")
