"""A table on a terminal of any width: columns are left out where it is narrow, no number broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from recbole_pos.study.rendered_table import Cell, RenderedTable, listed

_NAME = 16  # columns of a terminal that a name of several words has at least


@dataclass(frozen=True)
class Fitted:
    """A table that fits the console it is printed on.

    Attributes:
        shown: the table; columns are left out in the order of its ``spare``, then from the right,
            and named below.
        whole: where all columns are.
    """

    shown: RenderedTable
    whole: str = "table.md"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's hook."""
        yield self.table(options.max_width)

    def table(self, width: int) -> Table:
        """Return it for a terminal of so many columns."""
        shown = self.shown
        kept = list(range(len(shown.columns)))
        away = [*shown.spare, *(place for place in kept[:0:-1] if place not in shown.spare)]
        fold = sum(self._width(place, False) + 3 for place in kept) + 1 > width
        while away[:-1] and sum(self._width(place, fold) + 3 for place in kept) + 1 > width:
            kept.remove(away.pop(0))
        notes = [*shown.notes]
        if left := [name for place, name in enumerate(shown.columns) if place not in kept]:
            notes.append(
                f"Left out for want of width: {listed(left)}; {self.whole} has all columns."
            )
        table = Table(title=Text(shown.title), caption=Text("\n".join(notes)))
        table.title_justify = table.caption_justify = "left"
        for place in kept:
            side: Literal["left", "right"] = "left" if shown.is_text(place) else "right"
            fixed = None if shown.is_text(place) else self._width(place, fold)
            title = Text(shown.columns[place].replace(" (", "\n("))
            table.add_column(title, justify=side, width=fixed, overflow="fold")  # nothing is cut
        for line in shown.lines:
            table.add_row(*(_rich(line[place], fold) for place in kept))
        return table

    def _width(self, column: int, fold: bool) -> int:
        """Return what a column needs so that no word of it is broken."""
        title, lines = self.shown.columns[column], self.shown.lines
        texts = [text for line in lines for text in (line[column].text, line[column].detail)]
        if not self.shown.is_text(column):
            texts = [part for text in texts for part in _folded(text, fold).split("\n")]
            return _longest([*title.split(), *texts])
        words = [*title.split(), *" ".join(texts).split()]
        return max(min(_longest([title, *texts]), _NAME), _longest(words))


def _folded(text: str, fold: bool) -> str:
    """Return a deviation and an interval in a line of their own."""
    return text if not fold else text.replace(" ±", "\n±").replace(" [", "\n[")


def _longest(texts: list[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _rich(cell: Cell, fold: bool) -> Text:
    text = Text(_folded(cell.text, fold), style="bold" if cell.bold else "")
    return text.append(f"\n{_folded(cell.detail, fold)}", style="dim") if cell.detail else text
