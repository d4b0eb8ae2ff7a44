"""What became of a file: columns, rows, contradictions; on screen and as json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from recbole_pos.conversion.source import Source
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
    examples: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    loaded: bool = True


@dataclass
class Lines:
    """What became of the rows of a source: each is kept, or dropped for one reason.

    ``read`` and ``kept`` are numbers of rows; ``dropped`` is reason -> number and first rows.
    """

    source: str
    form: str
    read: int
    kept: int
    dropped: dict[str, dict[str, Any]]

    @classmethod
    def count(cls, source: Source, dropped: dict[str, np.ndarray]) -> Lines:
        """Count the rows of a source that were read, kept, and dropped (reason -> rows)."""
        reasons: dict[str, dict[str, Any]] = {}
        broken = [line for part in source.parts for line in part.describe_broken()]
        if broken:
            reasons["broken line"] = {"lines": len(broken), "first": broken[:MAX_LISTED]}
        for reason, rows in dropped.items():
            if len(rows):
                first = source.locate_rows(rows[:MAX_LISTED])
                reasons[reason] = {"lines": len(rows), "first": first}
        read = source.num_rows + len(broken)
        kept = read - sum(entry["lines"] for entry in reasons.values())
        return cls(str(source.path), source.form, read, kept, reasons)


@dataclass
class Report:
    """What became of the files of a dataset; ``asdict`` of it is convert.json.

    Attributes:
        lines: rows of interactions (``events``), and of items and users where there are files.
        times: form of times -> number of interactions.
        contradictions: field -> number of rows that differ from the first of an item or user, and
            the first of them.
        counts: numbers of interactions (``events``), users, items and copies of earlier
            interactions, and the first and last time (None if times are only an order).
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
        headers = ("column", "field", "type", "table", "different", "missing", "examples", "")
        reporter.line(_make_table(headers, map(_describe_column, self.columns)))
        for kind, lines in self.lines.items():
            reporter.line(f"{kind}: {lines.source} ({lines.form})")
            counts = [("read", f"{lines.read:,}", ""), ("kept", f"{lines.kept:,}", "")]
            for reason, dropped in lines.dropped.items():
                counts.append((f"dropped: {reason}", f"{dropped['lines']:,}", _list_first(dropped)))
            reporter.line(_make_table(("rows", "", "first"), counts))
        for field, entry in self.contradictions.items():
            reporter.line(
                f"{field}: {entry['lines']:,} rows differ from the first of the {entry['table']}, "
                f"which was taken: {_list_first(entry)}"
            )
        for note in self.notes:
            reporter.line(note)
        names = {"events": "interactions", "users": "users", "items": "items"}
        totals = ", ".join(f"{self.counts[key]:,} {name}" for key, name in names.items())
        first, last = self.counts["first"], self.counts["last"]
        period = f"{first} to {last} UTC; " if first else ""
        forms = ", ".join(f"{num_rows:,} {form}" for form, num_rows in self.times.items())
        reporter.line(f"{totals}, {period}times: {forms}")


def _describe_column(column: Column) -> tuple[str, ...]:
    """Return a column's row of the table on screen."""
    return (
        column.column,
        column.field or "(left out)",
        column.kind,
        column.table,
        f"{column.different:,}" if column.field else "",
        f"{column.missing:,}" if column.field else "",
        "  ".join(text if len(text) <= 24 else f"{text[:23]}…" for text in column.examples),
        "; ".join(column.notes),
    )


def _list_first(entry: dict[str, Any]) -> str:
    """Return the first rows of an entry, with ``...`` if there are more."""
    more = ", ..." if entry["lines"] > len(entry["first"]) else ""
    return ", ".join(entry["first"]) + more


def _make_table(headers: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table of plain text, whose cells are folded and not cut off."""
    table = Table()
    for name in headers:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
