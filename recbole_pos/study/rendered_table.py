"""Tables of a report in markdown, html and on a terminal of any width, and numbers in them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# seconds, name of a unit, seconds and name of the next smaller one
_SPANS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def _bound(text: str) -> str:
    """Return text in which no line breaks between a number and its unit or sign."""
    return re.sub(r"(?<=[±<]) |(?<=\d) (?=(min|[a-zA-Z])\b)", "\N{NO-BREAK SPACE}", text)


PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # names and reasons are the user's
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
PAGES.filters["bound"] = _bound


@dataclass(frozen=True)
class Cell:
    """A cell: main text, further text in smaller letters, whether it is the best of a column."""

    text: str = ""
    detail: str = ""
    bold: bool = False


@dataclass(frozen=True)
class RenderedTable:
    """A table for people; programs read the tidy frames.

    Attributes:
        title: title above the table.
        columns: names of the columns; the first column has names, the others numbers.
        lines: cells, line by line.
        notes: sentences below the table.
        words: places of further columns with words.
        spare: places of columns that a narrow terminal omits, the least needed first; others follow
            from the right, and a note names the omitted ones.
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    words: frozenset[int] = frozenset()
    spare: tuple[int, ...] = ()

    def is_text(self, column: int) -> bool:
        """Return whether a column has words, which are aligned left."""
        return column == 0 or column in self.words

    def markdown(self) -> str:
        """Return the table in markdown, with its title as a heading and its notes as a list."""
        marks = ("---" if self.is_text(place) else "---:" for place in range(len(self.columns)))
        cells = ([_marked(cell) for cell in line] for line in self.lines)
        lines = [map(_in_a_cell, self.columns), marks, *cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(part for part in (f"## {self.title}", table, notes) if part)

    def _repr_html_(self) -> str:
        return PAGES.get_template("table.html.jinja").render(table=self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table for the width of the console, in which no number is broken."""
        kept, width = list(range(len(self.columns))), options.max_width
        omittable = [*self.spare, *(place for place in kept[:0:-1] if place not in self.spare)]
        fold = sum(self._width(place, False) + 3 for place in kept) + 1 > width
        while omittable[:-1] and sum(self._width(place, fold) + 3 for place in kept) + 1 > width:
            kept.remove(omittable.pop(0))
        notes = [*self.notes]
        if omitted := [name for place, name in enumerate(self.columns) if place not in kept]:
            notes.append(
                f"Left out for want of width: {listed(omitted)}; table.md has all columns."
            )
        table = Table(title=Text(self.title), caption=Text("\n".join(notes)))
        table.title_justify = table.caption_justify = "left"
        for place in kept:
            if self.is_text(place):
                table.add_column(Text(self.columns[place]), overflow="fold")
            else:
                fixed = self._width(place, fold)
                table.add_column(Text(self.columns[place]), justify="right", width=fixed)
        for line in self.lines:
            table.add_row(*(_rich(line[place], fold) for place in kept))
        yield table

    def _width(self, column: int, fold: bool) -> int:
        """Return the least width of a column in which no word and no figure is broken.

        If ``fold``, deviations and intervals stand in a line of their own.
        """
        cells = [text for line in self.lines for text in (line[column].text, line[column].detail)]
        parts = self.columns[column].split()
        for cell in cells:
            parts += cell.split() if self.is_text(column) else _folded(cell, fold).splitlines()
        return max(map(cell_len, parts), default=0)


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").splitlines())


def _marked(cell: Cell) -> str:
    """Return a cell in markdown."""
    text, detail = map(_in_a_cell, (cell.text, cell.detail))
    text = f"**{text}**" if cell.bold and text else text
    return f"{text} ({detail})" if detail else text


def _folded(text: str, fold: bool) -> str:
    """Return a text; if ``fold``, with deviation and interval in a line of their own."""
    return text if not fold else text.replace(" ±", "\n±").replace(" [", "\n[")


def _rich(cell: Cell, fold: bool) -> Text:
    """Return a cell for a terminal."""
    text = Text(_folded(cell.text, fold), style="bold" if cell.bold else "")
    return text.append(f"\n{_folded(cell.detail, fold)}", style="dim") if cell.detail else text


def format_number(value: float, sign: bool = False) -> str:
    """Return a metric with four decimals, zero without a sign; empty for nan."""
    if math.isnan(value):
        return ""
    text = f"{value:+.4f}" if sign else f"{value:.4f}"
    return text.lstrip("+-") if float(text) == 0 else text


def format_mean(mean: float, deviation: float) -> str:
    """Return ``0.0425 ± 0.0020``, or only the mean of a single seed."""
    spread = format_number(deviation)
    return f"{format_number(mean)} ± {spread}" if spread else format_number(mean)


def format_interval(low: float, high: float) -> str:
    """Return ``[-0.0010, +0.0035]``; empty for nan."""
    ends = ", ".join(format_number(end, sign=True) for end in (low, high))
    return "" if math.isnan(low) else f"[{ends}]"


def span(seconds: float) -> str:
    """Return a duration in seconds as ``41 s``, ``3 min 20 s`` or ``2 h 5 min``; empty for nan."""
    if math.isnan(seconds):
        return ""
    for length, name, part, part_name in _SPANS:
        whole, rest = divmod(round(seconds / part), length // part)
        if whole:
            return f"{whole} {name} {rest} {part_name}" if rest else f"{whole} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def count(value: float) -> str:
    """Return a count as ``812``, ``45.1 k`` or ``1.20 M``; empty for nan."""
    if math.isnan(value):
        return ""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f}"


def listed(names: Iterable[str], most: int = 6) -> str:
    """Return ``a, b and c``; of more than ``most`` names the first, and the number of others."""
    names = list(names)
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
