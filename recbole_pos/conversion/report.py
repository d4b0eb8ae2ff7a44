"""What is told of a conversion: columns, lines, contradictions; on screen and as json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from recbole_pos.conversion.cells import Cells
from recbole_pos.conversion.source import Source
from recbole_pos.screen import Screen

FIRST = 10  # lines that are named, of each reason


@dataclass
class Column:
    """What became of a column.

    Attributes:
        column: its name in the file.
        file: which it stands in.
        field: its name in the dataset; empty if it is left out.
        kind: the type.
        table: inter, item or user.
        different: how many different values it has.
        missing: how many rows have none.
        examples: three values.
        notes: how it was read, and what to know.
        loaded: whether load_col has it.
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

    @classmethod
    def of(cls, column: str, source: Source, name: str, table: str, cells: Cells) -> Column:
        """Of cells that are written."""
        return cls(
            column,
            source.path.name,
            name,
            cells.kind,
            table,
            cells.different,
            int((cells.codes == 0).sum()),
            cells.examples(),
            list(cells.notes),
        )


@dataclass
class Lines:
    """What became of the lines of a source: each is kept, or dropped for one reason."""

    source: str
    form: str
    read: int
    kept: int
    dropped: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, source: Source, dropped: dict[str, np.ndarray]) -> Lines:
        """Counts of a source, ``dropped`` rows of it and those that are broken."""
        reasons: dict[str, dict[str, Any]] = {}
        broken = list(source.broken())
        for part, one in broken[:FIRST]:
            told = reasons.setdefault("broken line", {"lines": 0, "first": []})
            told["first"].append(f"{part.path.name}:{part.line_of(one)} ({one.why})")
        if broken:
            reasons["broken line"]["lines"] = sum(one.lines for _, one in broken)
        for reason, rows in dropped.items():
            first = source.places(rows[:FIRST])
            reasons[reason] = {"lines": len(rows), "first": first}
        kept = source.lines - sum(told["lines"] for told in reasons.values())
        return cls(str(source.path), source.form, source.lines, kept, reasons)


@dataclass
class Report:
    """All there is to tell; ``asdict`` of it is convert.json.

    Attributes:
        name: of the dataset.
        lines: of events, and of items and users where there are such files.
        columns: in the order of the files.
        times: how many events have which form of time.
        contradictions: by field, how many lines say something else than the first of an item or
            user, and where.
        notes: what else there is to know.
        counts: events, users, items, the first and last time (None if times only order), copies
            of earlier events, and users whose last event is one (``copied_targets``).
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
        """Plain values."""
        return asdict(self)

    def show_columns(self, screen: Screen) -> None:
        """The table of columns."""
        names = ("column", "field", "type", "table", "different", "missing", "examples", "")
        rows = (
            (
                column.column,
                column.field or "(left out)",
                column.kind,
                column.table,
                f"{column.different:,}" if column.field else "",
                f"{column.missing:,}" if column.field else "",
                "  ".join(_short(example) for example in column.examples),
                "; ".join(column.notes),
            )
            for column in self.columns
        )
        screen.table(_table(names, rows, right=(4, 5)))

    def show_lines(self, screen: Screen) -> None:
        """Lines read, kept and dropped, by file; contradictions and notes."""
        for what, told in self.lines.items():
            screen.line(f"{what}: {told.source} ({told.form})")
            rows = [("read", f"{told.read:,}", ""), ("kept", f"{told.kept:,}", "")]
            for reason, dropped in told.dropped.items():
                first = _first(dropped)
                rows.append((f"dropped: {reason}", f"{dropped['lines']:,}", first))
            screen.table(_table(("lines", "", "first"), rows, right=(1,)))
        for name, found in self.contradictions.items():
            screen.line(
                f"{name}: {found['lines']:,} lines say something else than the first of the "
                f"{found['table']}, which was taken: {_first(found)}"
            )
        for note in self.notes:
            screen.line(note)
        counts = self.counts
        between = f"{counts['first']} to {counts['last']} UTC; " if counts["first"] else ""
        screen.line(
            f"{counts['events']:,} events, {counts['users']:,} users, {counts['items']:,} items, "
            f"{between}times: "
            + ", ".join(f"{number:,} {form}" for form, number in self.times.items())
        )


def _first(told: dict[str, Any]) -> str:
    more = ", ..." if told["lines"] > len(told["first"]) else ""
    return ", ".join(told["first"]) + more


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"


def _table(names: Iterable[str], rows: Iterable[tuple[str, ...]], right: tuple[int, ...]) -> Table:
    table = Table()
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
