"""The folder of a dataset: atomic files, yaml and report."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import compute as pc

from recbole_pos.conversion.cells import INNER, Cells, format_numbers
from recbole_pos.conversion.report import Report
from recbole_pos.data.location import PARQUET
from recbole_pos.errors import RunWarning
from recbole_pos.files import LOCK, atomic_write, finish_replacement, replace_folder, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.values import listed

REPORT = "convert.json"
TABLES = ("inter", "item", "user")
HELD_OUT = ("valid", "test")  # parts of the interactions that the user may give
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
    texts = {f: _escape(cells, separator) for f, cells in table.items() if isinstance(cells, Cells)}
    header = [f"{field}:{getattr(column, 'kind', 'float')}" for field, column in table.items()]
    num_rows = max(len(column.codes) for column in table.values() if isinstance(column, Cells))
    with atomic_write(path, text=False) as file:
        file.write(("\t".join(header) + "\n").encode())
        for start in range(0, num_rows, _BATCH_ROWS):
            batch = slice(start, start + _BATCH_ROWS)
            columns = [
                texts[field].take(pa.array(column.codes[batch]))
                if isinstance(column, Cells)
                else format_numbers(column[batch])
                for field, column in table.items()
            ]
            rows = pc.binary_join_element_wise(*columns, "\t")
            all_rows = pa.ListArray.from_arrays(pa.array([0, len(rows)], pa.int32()), rows)
            file.write(pc.binary_join(all_rows, "\n")[0].as_buffer())
            file.write(b"\n")


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


def read_counts(folder: Path) -> dict[str, Any]:
    """Return the counts in the report of a dataset; none if it has no report that can be read."""
    try:
        return dict(json.loads((folder / REPORT).read_text(encoding="utf-8"))["counts"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def warn_of_loss(folder: Path, num_interactions: int) -> None:
    """Warn if a dataset had more than the ``num_interactions`` that replace it."""
    num_replaced = read_counts(folder).get("events", 0)
    if num_interactions < num_replaced:
        warnings.warn(
            f"overwrite: {num_interactions:,} interactions replace {num_replaced:,} in {folder}; "
            "`update` and `recommend` need the whole history: convert old and new files together",
            RunWarning,
            stacklevel=4,
        )


def belongs_to_dataset(file: Path, name: str) -> bool:
    """Return whether a file belongs to the dataset ``name``, so that overwriting it replaces it.

    Tables, yaml, report, cache and unfinished files do; other files in the folder stay.
    """
    suffixes = (*TABLES, *(f"{part}.inter" for part in ("train", *HELD_OUT)))
    tables = [f"{name}.{suffix}{end}" for suffix in suffixes for end in ("", PARQUET)]
    files = [*tables, f"{name}.yaml", REPORT]
    is_unfinished = file.name.endswith(".tmp") and file.name.startswith(
        tuple(f".{name}." for name in files)
    )
    return is_unfinished or file.name in (*files, LOCK)


def list_dataset_files(folder: Path, name: str) -> list[str]:
    """Return the names of a dataset's tables and yaml in a folder; none if it has no dataset."""
    finish_replacement(folder)
    files = sorted(folder.iterdir()) if folder.is_dir() else ()
    return [
        file.name
        for file in files
        if file.name.startswith(f"{name}.") and belongs_to_dataset(file, name)
    ]


def write_dataset(
    folder: Path,
    tables: Mapping[str, Table],
    options: Mapping[str, Any],
    report: Report,
    reporter: Reporter,
) -> None:
    """Write all files of a dataset; they replace the files of an earlier one."""
    name = report.name
    with replace_folder(folder, lambda file: not belongs_to_dataset(file, name)) as new_folder:
        write_text(new_folder / f"{name}.yaml", format_yaml(name, options))
        write_text(new_folder / REPORT, json.dumps(report.as_json(), indent=1) + "\n")
        for suffix, table in tables.items():
            with reporter.task(f"writing {folder / name}.{suffix}"):
                write_table(new_folder / f"{name}.{suffix}", table, options["seq_separator"])
    reporter.line(f"wrote {folder}: {listed([REPORT, *list_dataset_files(folder, name)])}")
