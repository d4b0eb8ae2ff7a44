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

FIRST = 10  # rows that are named, of each reason


@dataclass
class Column:
    """What became of a column; without a ``field`` it is left out."""

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
    """What became of the rows of a source: each is kept, or dropped for one reason."""

    source: str
    form: str
    read: int
    kept: int
    dropped: dict[str, dict[str, Any]]

    @classmethod
    def count(cls, source: Source, dropped: dict[str, np.ndarray]) -> Lines:
        """Count the rows of a source: read, kept, dropped by reason, and broken."""
        reasons: dict[str, dict[str, Any]] = {}
        if broken := [line for part in source.parts for line in part.describe_broken()]:
            reasons["broken line"] = {"lines": len(broken), "first": broken[:FIRST]}
        for reason, rows in dropped.items():
            reasons[reason] = {"lines": len(rows), "first": source.places(rows[:FIRST])}
        read = source.rows + len(broken)
        kept = read - sum(dropped["lines"] for dropped in reasons.values())
        return cls(str(source.path), source.form, read, kept, reasons)


@dataclass
class Report:
    """What became of the files of a dataset; ``asdict`` of it is convert.json.

    Attributes:
        lines: of interactions, and of items and users where there are such files.
        times: number of interactions by the form of their times.
        contradictions: by field, how many rows differ from the first of an item or user, and where.
        counts: interactions (``events``), users, items, the first and last time (None if times are
            only an order), and exact copies of earlier interactions.
        command: what to type next.
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
        columns = [
            (
                column.column,
                column.field or "(left out)",
                column.kind,
                column.table,
                f"{column.different:,}" if column.field else "",
                f"{column.missing:,}" if column.field else "",
                "  ".join(text if len(text) <= 24 else f"{text[:23]}…" for text in column.examples),
                "; ".join(column.notes),
            )
            for column in self.columns
        ]
        heads = ("column", "field", "type", "table", "different", "missing", "examples", "")
        reporter.line(_make_table(heads, columns))
        for what, lines in self.lines.items():
            reporter.line(f"{what}: {lines.source} ({lines.form})")
            counts = [("read", f"{lines.read:,}", ""), ("kept", f"{lines.kept:,}", "")]
            for reason, dropped in lines.dropped.items():
                counts.append((f"dropped: {reason}", f"{dropped['lines']:,}", _list_first(dropped)))
            reporter.line(_make_table(("rows", "", "first"), counts))
        for name, rows in self.contradictions.items():
            reporter.line(
                f"{name}: {rows['lines']:,} rows differ from the first of the {rows['table']}, "
                f"which was taken: {_list_first(rows)}"
            )
        for note in self.notes:
            reporter.line(note)
        names = {"events": "interactions", "users": "users", "items": "items"}
        totals = ", ".join(f"{self.counts[key]:,} {name}" for key, name in names.items())
        first, last = self.counts["first"], self.counts["last"]
        period = f"{first} to {last} UTC; " if first else ""
        forms = ", ".join(f"{number:,} {form}" for form, number in self.times.items())
        reporter.line(f"{totals}, {period}times: {forms}")


def _list_first(lines: dict[str, Any]) -> str:
    more = ", ..." if lines["lines"] > len(lines["first"]) else ""
    return ", ".join(lines["first"]) + more


def _make_table(names: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table()
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
