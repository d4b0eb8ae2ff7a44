"""What became of a file: columns, rows, contradictions; on screen and as json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from recbole_pos.conversion.reading import Source
from recbole_pos.conversion.text_files import EMPTY_LINE
from recbole_pos.reporter import Reporter

MAX_LISTED = 10  # rows that are named for each reason


@dataclass
class Column:
    """What became of a column of a file; without a ``field`` it is left out of the dataset.

    ``different`` is its number of different values, ``missing`` its number of empty cells.
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
    """What became of the rows of a source: each is kept, or dropped for one reason.

    ``read`` and ``kept`` are numbers of rows; ``dropped`` is reason -> number and first rows.
    ``lost`` are the reasons for which a row cannot be used. The other reasons are empty lines, and
    attributes of items and users without an interaction.
    """

    source: str
    form: str
    read: int
    kept: int
    dropped: dict[str, dict[str, Any]]
    lost: list[str]

    @classmethod
    def count(cls, source: Source, dropped: dict[str, np.ndarray], unused: str = "") -> Lines:
        """Count the rows of a source that were read, kept, and dropped.

        Args:
            source: the source, of which broken lines are dropped, too.
            dropped: reason -> rows.
            unused: the reason among these for which rows are left out that could be used.
        """
        faults: dict[str, list[str]] = {}
        for place, fault in source.broken_lines:
            reason = EMPTY_LINE if fault == EMPTY_LINE else "broken line"
            faults.setdefault(reason, []).append(f"{place} ({fault})")
        reasons: dict[str, dict[str, Any]] = {}
        for reason in dict.fromkeys((*faults, *dropped)):
            lines, rows = faults.get(reason, []), dropped.get(reason, np.empty(0, np.int64))
            places = lines[:MAX_LISTED] + source.locate_rows(rows[:MAX_LISTED])
            if places:
                number = len(lines) + len(rows)
                reasons[reason] = {"lines": number, "first": places[:MAX_LISTED]}
        read = source.table.num_rows + len(source.broken_lines)
        kept = read - sum(entry["lines"] for entry in reasons.values())
        lost = [reason for reason in reasons if reason not in (EMPTY_LINE, unused)]
        return cls(str(source.path), source.form, read, kept, reasons, lost)

    @property
    def num_lost(self) -> int:
        """Number of rows that cannot be used."""
        return sum(self.dropped[reason]["lines"] for reason in self.lost)

    def describe_lost(self) -> str:
        """Return how many rows cannot be used, and for each reason their number and the first."""
        entries = [(reason, self.dropped[reason]) for reason in self.lost]
        reasons = [f"{reason}: {e['lines']:,}, first {e['first'][0]}" for reason, e in entries]
        name = Path(self.source).name
        return f"{self.num_lost:,} of {self.read:,} rows of {name} ({'; '.join(reasons)})"


@dataclass
class Report:
    """What became of the files of a dataset; ``asdict`` of it is convert.json.

    Attributes:
        lines: rows of interactions (``events``), and of items and users where there are files.
        times: form of times -> number of interactions.
        contradictions: field -> number of rows that differ from the first of an item or user, and
            the first of them.
        counts: numbers of interactions (``events``), users and items, and the first and last time
            (None if times are only an order).
        command: the command that trains a model on the dataset.
    """

    name: str
    lines: dict[str, Lines] = dataclasses.field(default_factory=dict)
    columns: list[Column] = dataclasses.field(default_factory=list)
    times: dict[str, int] = dataclasses.field(default_factory=dict)
    contradictions: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, as ``convert.json`` has it."""
        return dataclasses.asdict(self)

    def show(self, reporter: Reporter) -> None:
        """Show the table of columns; rows read, kept and dropped; contradictions and notes."""
        table = Table("column", "field", "type", "table", "different", "missing", "")
        for column in self.columns:
            counts = (f"{column.different:,}", f"{column.missing:,}") if column.field else ("", "")
            field = column.field or "(left out)"
            cells = (column.column, field, column.kind, column.table, *counts)
            texts = (*cells, "; ".join(column.notes))
            table.add_row(*(Text(text, overflow="fold") for text in texts))
        reporter.line(table)
        for kind, lines in self.lines.items():
            reporter.line(f"{kind}: {lines.source}: {lines.kept:,} of {lines.read:,} rows kept")
            for reason, dropped in lines.dropped.items():
                count, first = dropped["lines"], ", ".join(dropped["first"])
                reporter.line(f"dropped: {reason}: {count:,} rows, first {first}")
        for field, entry in self.contradictions.items():
            reporter.line(
                f"{field}: {entry['lines']:,} rows differ from the first of the {entry['table']}, "
                f"which was taken, first {', '.join(entry['first'])}"
            )
        for note in self.notes:
            reporter.line(note)
        names = {"events": "interactions", "users": "users", "items": "items"}
        totals = ", ".join(f"{self.counts[key]:,} {name}" for key, name in names.items())
        first, last = self.counts["first"], self.counts["last"]
        period = f"{first} to {last} UTC; " if first else ""
        forms = ", ".join(f"{num_rows:,} {form}" for form, num_rows in self.times.items())
        reporter.line(f"{totals}, {period}times: {forms}")
