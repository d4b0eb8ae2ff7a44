"""The report of what became of every column and row, and the folder of the dataset."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import rich.table
import yaml
from pyarrow import compute as pc
from rich.text import Text

from recbole_pos.conversion.cells import INNER, Cells, format_numbers
from recbole_pos.conversion.reading import EMPTY_LINE, Source
from recbole_pos.data.atomic_files import PARQUET
from recbole_pos.errors import RunWarning
from recbole_pos.files import atomic_write, finish_replacement, replace_folder, write_text
from recbole_pos.reporter import Reporter
from recbole_pos.values import listed

REPORT = "convert.json"
TABLES = ("inter", "item", "user")  # RecBole's suffixes of files: interactions, items, users
_BATCH_ROWS = 1 << 17  # that are written at a time
_SEPARATORS = (" ", "|", ";", " | ")  # of the names of a sequence
_YAML_HEADER = """\
# Written by `recbole-pos convert`, read for every run with -d {name}; docs/data.md explains the
# options. What became of every row stands in convert.json.
"""
Table = Mapping[str, Cells | np.ndarray]  # field -> its cells, or times in seconds

MAX_LISTED = 10  # rows that are named for each reason


@dataclass
class Column:
    """What became of a column of a file.

    Attributes:
        column: name of the column in the file.
        file: name of the file.
        field: name in the dataset; empty if the column is left out.
        kind: type of the field, such as token.
        table: suffix of the file of the dataset that holds the field: inter, item or user.
        different: number of different values.
        missing: number of empty cells.
        notes: what the user should know about the column.
        loaded: whether a run loads the field by default.
    """

    column: str
    file: str
    field: str = ""
    kind: str = ""
    table: str = ""
    different: int = 0
    missing: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)
    loaded: bool = True


@dataclass
class Lines:
    """What became of the rows of a file, a folder or a frame: each is kept, or dropped.

    Attributes:
        source: path of the file or folder, or name of the frame.
        read: number of rows that were read, broken lines included.
        kept: number of rows that are in the dataset.
        dropped: reason -> ``lines``, the number of rows dropped for it, and ``first``, where the
            first of them stand, such as ``orders.csv:17``.
        lost: those reasons for which a row could not be used. The others are empty lines, and
            attributes of items and users without an interaction.
    """

    source: str
    read: int
    kept: int
    dropped: dict[str, dict[str, Any]]
    lost: list[str]

    @classmethod
    def count(cls, source: Source, dropped: dict[str, np.ndarray], unused: str = "") -> Lines:
        """Count what was read of a file, and what of it was dropped for each reason.

        Two things are dropped: a broken line, which is no row at all, such as one with too few
        cells; and a row that lacks what the dataset needs, such as a user. All others are kept.
        What is dropped counts as lost, except empty lines and rows that are not needed.

        Args:
            source: the rows that were read (``table``), and the broken lines, each with its place
                in the file and its fault (``broken_lines``).
            dropped: reason -> [n] numbers of the rows of ``source.table`` dropped for it.
            unused: one of these reasons, of rows that are right but not needed, such as "item
                without an interaction". Empty if there is none.
        """
        counts: Counter[str] = Counter()  # reason -> number of lines and rows
        places: dict[str, list[str]] = defaultdict(list)  # reason -> where the first ones stand

        # Broken lines have one reason, and their places say the fault. Empty ones have another.
        for place, fault in source.broken_lines:
            reason = EMPTY_LINE if fault == EMPTY_LINE else "broken line"
            counts[reason] += 1
            places[reason].append(f"{place} ({fault})")
        # Rows that are dropped; they may be empty lines, too, such as one with commas only.
        for reason, rows in dropped.items():
            if len(rows):
                counts[reason] += len(rows)
                places[reason] += source.locate_rows(rows[:MAX_LISTED])

        num_read = source.table.num_rows + len(source.broken_lines)
        by_reason = {
            reason: {"lines": count, "first": places[reason][:MAX_LISTED]}
            for reason, count in counts.items()
        }
        num_kept = num_read - counts.total()
        lost = [reason for reason in counts if reason not in (EMPTY_LINE, unused)]
        return cls(str(source.path), num_read, num_kept, by_reason, lost)

    @property
    def num_lost(self) -> int:
        """Number of rows that cannot be used."""
        return sum(self.dropped[reason]["lines"] for reason in self.lost)

    def describe_lost(self) -> str:
        """Return how many rows cannot be used, and for each reason their number and the first.

        For example ``2 of 100 rows of log.csv (no time: 2, first log.csv:7)``, for a warning.
        """
        reasons = []
        for reason in self.lost:
            entry = self.dropped[reason]
            reasons.append(f"{reason}: {entry['lines']:,}, first {entry['first'][0]}")
        name = Path(self.source).name
        return f"{self.num_lost:,} of {self.read:,} rows of {name} ({'; '.join(reasons)})"


@dataclass
class Report:
    """What became of the files of a dataset; ``asdict`` of it is convert.json.

    Attributes:
        lines: rows of interactions (``events``), and of items and users where there are files.
        times: form in which times are written, such as ``ISO dates``.
        counts: numbers of interactions (``events``), users and items, and the first and last time
            (None if times are only an order).
        command: the command that trains a model on the dataset.
    """

    name: str
    lines: dict[str, Lines] = dataclasses.field(default_factory=dict)
    columns: list[Column] = dataclasses.field(default_factory=list)
    times: str = ""
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""

    def show(self, reporter: Reporter) -> None:
        """Print what became of columns and rows, and the counts of the dataset.

        Args:
            reporter: prints lines and tables, unless it is switched off.
        """
        # A table with a row for each column of the files. Text() prints brackets in names as such.
        table = rich.table.Table("column", "field", "type", "table", "different", "missing", "")
        for column in self.columns:
            cells = [column.column, column.field, column.kind, column.table]
            cells += [f"{column.different:,}", f"{column.missing:,}"]
            if not column.field:
                cells = [column.column, "(left out)", "", "", "", ""]
            cells.append("; ".join(column.notes))
            table.add_row(*(Text(cell, overflow="fold") for cell in cells))
        reporter.line(table)

        # How many rows of each file are kept, and why others are not.
        for kind, lines in self.lines.items():
            reporter.line(f"{kind}: {lines.source}: {lines.kept:,} of {lines.read:,} rows kept")
            for reason, dropped in lines.dropped.items():
                count, first = dropped["lines"], ", ".join(dropped["first"])
                reporter.line(f"dropped: {reason}: {count:,} rows, first {first}")

        reporter.line(f"{describe_counts(self.counts)}; times: {self.times}")


def describe_counts(counts: Mapping[str, Any]) -> str:
    """Return the sizes of a dataset, and from when to when its interactions are, as a text.

    Args:
        counts: numbers of ``users``, ``items`` and interactions (``events``); ``first`` and
            ``last`` time, None if times are only an order.
    """
    text = f"{counts['users']:,} users, {counts['items']:,} items, "
    text += f"{counts['events']:,} interactions"
    return text + (f", {counts['first']} to {counts['last']} UTC" if counts["first"] else "")


def choose_separator(tables: Mapping[str, Table]) -> str:
    """Choose what to write between the names in a cell that holds several, such as tags.

    It is a text that no name contains. While a dataset is made, such names are joined by ``INNER``,
    a control character; it is replaced when the file is written.

    Args:
        tables: all tables of the dataset: field -> its cells.

    Returns:
        The first of a blank, |, ; and others that no name contains; ``INNER`` if all do.
    """
    # The different texts of each field that holds several names in a cell, as they will be written:
    # with a blank for a line end, so that a name with a line end contains a blank.
    columns = [column for table in tables.values() for column in table.values()]
    fields = [
        _replace_line_ends(column.values)
        for column in columns
        if isinstance(column, Cells) and column.kind.endswith("_seq")
    ]
    for separator in _SEPARATORS:
        if not any(pc.any(pc.match_substring(texts, separator)).as_py() for texts in fields):
            return separator
    return INNER


def write_table(path: Path, table: Table, separator: str) -> None:
    """Write a table as one of RecBole's atomic files, which appears only when it is complete.

    Such a file has cells separated by tabs, and a first line with field and type, such as
    ``user_id:token``.

    Args:
        path: path of the file.
        table: field -> cells, or an array of seconds.
        separator: what separates the names of a sequence.
    """
    # Make the text of each different value of a field once, so that rows look it up by its code.
    header, texts = [], {}
    for field, column in table.items():
        if isinstance(column, Cells):
            header.append(f"{field}:{column.kind}")
            texts[field] = _escape(column, separator)
        else:
            header.append(f"{field}:float")

    num_rows = len(next(iter(table.values())))  # all columns have as many
    with atomic_write(path, text=False) as file:
        file.write(("\t".join(header) + "\n").encode())
        for start in range(0, num_rows, _BATCH_ROWS):
            batch = slice(start, start + _BATCH_ROWS)
            columns = []
            for field, column in table.items():
                if isinstance(column, Cells):
                    columns.append(texts[field].take(pa.array(column.codes[batch])))
                else:
                    columns.append(format_numbers(column[batch]))
            file.write(_join_lines(pc.binary_join_element_wise(*columns, "\t")))
            file.write(b"\n")


def _join_lines(lines: pa.Array) -> pa.Buffer:
    """Return texts as one text, with line ends between them, in the memory of Arrow.

    Args:
        lines: [n] text.
    """
    # Arrow joins the texts of each list in an array of lists. So all lines become one list, which
    # goes from 0 to n, in an array of length 1.
    one_list = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    return pc.binary_join(one_list, "\n")[0].as_buffer()


def _replace_line_ends(values: pa.Array) -> pa.Array:
    """Return texts with blanks for line ends and NUL."""
    return pc.replace_substring_regex(values, r"[\r\n\x00]+", " ")


def _escape(cells: Cells, separator: str) -> pa.Array:
    """Return each different value of a column as it is written to a file.

    Line ends become blanks, since every line of the file is a row. A value with a quotation mark or
    a tab is put into quotation marks, and marks in it are doubled: ``5" disk`` becomes
    ``"5"" disk"``.

    Args:
        cells: the column. Its ``values`` are the different texts, and before them an empty one for
            missing cells. If a cell may hold several names, such as tags, they are joined by
            ``INNER``, a control character.
        separator: what is written in place of ``INNER``.

    Returns:
        [different texts + 1] text, one for each of ``values``.
    """
    values = _replace_line_ends(cells.values)
    if cells.kind.endswith("_seq"):
        values = pc.replace_substring(values, INNER, separator)
    needs_quotes = pc.match_substring_regex(values, '["\t]')
    if not pc.any(needs_quotes).as_py():
        return values
    # The last argument of the join is its separator, which is empty.
    quoted = pc.binary_join_element_wise('"', pc.replace_substring(values, '"', '""'), '"', "")
    return pc.if_else(needs_quotes, quoted, values)


def read_counts(folder: Path) -> dict[str, Any]:
    """Return the counts in the report of a dataset; none if it has no report that can be read.

    The report is REPORT, convert.json, which the conversion writes beside the data.
    """
    try:
        return dict(json.loads((folder / REPORT).read_text(encoding="utf-8"))["counts"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def warn_of_loss(folder: Path, num_interactions: int) -> None:
    """Warn if a dataset is about to be replaced by one with fewer interactions.

    The user may have converted only the new interactions, and would lose the old ones.

    Args:
        folder: folder of the dataset, with the report of its conversion.
        num_interactions: number of interactions of the new dataset.
    """
    num_replaced = read_counts(folder).get("events", 0)
    if num_interactions < num_replaced:
        warnings.warn(
            f"overwrite: {num_interactions:,} interactions replace {num_replaced:,} in {folder}; "
            "`update` and `recommend` need the whole history: convert old and new files together",
            RunWarning,
            stacklevel=4,  # the line of the user that calls convert
        )


def belongs_to_dataset(file: Path, name: str) -> bool:
    """Return whether a file was written for a dataset, so that overwriting the dataset replaces it.

    Of a dataset called ``shop`` these are shop.inter, shop.item and shop.user; parts of it such as
    shop.train.inter; the same files with the suffix of parquet; shop.yaml; and the report,
    convert.json, which is called so for every dataset. Other files in the folder stay.

    Args:
        file: a file in the folder of the dataset.
        name: name of the dataset.
    """
    kind = "|".join(TABLES)  # inter|item|user
    table = rf"((train|valid|test)\.)?({kind})({re.escape(PARQUET)})?"  # such as train.inter
    is_table_or_yaml = re.fullmatch(rf"{re.escape(name)}\.({table}|yaml)", file.name)
    return is_table_or_yaml is not None or file.name == REPORT


def list_dataset_files(folder: Path, name: str) -> list[str]:
    """Return the names of a dataset's tables and yaml in a folder; none if it has no dataset."""
    finish_replacement(folder)  # if a process was killed while it put a new folder in its place
    files = sorted(folder.iterdir()) if folder.is_dir() else ()
    names = [file.name for file in files if belongs_to_dataset(file, name)]
    return [name for name in names if name != REPORT]


def write_dataset(
    folder: Path,
    tables: Mapping[str, Table],
    options: Mapping[str, Any],
    report: Report,
    reporter: Reporter,
) -> None:
    """Write all files of a dataset, which replace those of an earlier one once all are written.

    `replace_folder` gives a new folder to write into, and puts it in the place of the old one at
    the end. Files in the old one that are not of the dataset are kept.

    Args:
        folder: folder of the dataset; files of other kinds in it stay.
        tables: suffix of the file, such as ``inter`` -> the table to write.
        options: options of a run on the dataset, which become its yaml.
        report: what became of the rows and columns, which becomes convert.json.
        reporter: prints what is written.
    """
    # The yaml with the options, the report, and a file for each table. `replace_folder` is given a
    # function that says which files of the old folder stay.
    name = report.name
    with replace_folder(folder, lambda file: not belongs_to_dataset(file, name)) as new_folder:
        text = yaml.safe_dump(
            dict(options), default_flow_style=None, sort_keys=False, allow_unicode=True, width=100
        )
        write_text(new_folder / f"{name}.yaml", _YAML_HEADER.format(name=name) + text)
        write_text(new_folder / REPORT, json.dumps(dataclasses.asdict(report), indent=1) + "\n")
        for suffix, table in tables.items():
            with reporter.task(f"writing {folder / name}.{suffix}"):
                write_table(new_folder / f"{name}.{suffix}", table, options["seq_separator"])
    reporter.line(f"wrote {folder}: {listed([REPORT, *list_dataset_files(folder, name)])}")
