"""A table on a terminal of any width: folded where it reads well, and no number broken."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from recbole_pos.study.shown import Cell, Shown, listed

_NAME = 16  # columns of a terminal that a name of several words has at least
# Deviations and intervals go to a line of their own; where that is too wide, ends of intervals too.
_FOLDS = (
    lambda text: text,
    lambda text: re.sub(r" (?=[±\[])", "\n", text),
    lambda text: re.sub(r" (?=[±\[])|(?<=,) (?=[^\[\]]*\])", "\n", text),
)


@dataclass(frozen=True)
class Fitted:
    """A table that fits the console it is printed on.

    Attributes:
        shown: the table. Where folding is not enough, columns are left out in the order of its
            ``spare``, and named below.
        whole: where all columns are.
    """

    shown: Shown
    whole: str = "table.md"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's hook."""
        yield self.table(options.max_width)

    def table(self, width: int) -> Table:
        """For a terminal of so many columns."""
        ways = list(self._ways())
        kept, fold = next((way for way in ways if self._width(*way) <= width), ways[-1])
        shown = self.shown
        notes = [*shown.notes]
        if left := [name for place, name in enumerate(shown.columns) if place not in kept]:
            notes.append(
                f"Left out for want of width: {listed(left)}; {self.whole} has all columns."
            )
        table = Table(title=Text(shown.title), caption=Text("\n".join(notes)))
        table.title_justify = table.caption_justify = "left"
        for place in kept:
            words = shown.is_text(place)
            side: Literal["left", "right"] = "left" if words else "right"
            fixed = None if words else self._column(place, fold)
            table.add_column(
                Text(shown.columns[place].replace(" (", "\n(")),
                justify=side,
                width=fixed,
                overflow="fold",  # nothing is cut off
            )
        for line in shown.lines:
            table.add_row(*(_rich(line[place], fold) for place in kept))
        return table

    def _ways(self) -> Iterator[tuple[list[int], int]]:
        """Columns that stay, and how they are folded: the better first."""
        places, spare = range(len(self.shown.columns)), self.shown.spare
        for count, fold in itertools.product(range(len(spare) + 1), (0, 1)):
            yield [place for place in places if place not in spare[:count]], fold
        left = [place for place in places if place not in spare]
        for count in range(len(left), 1, -1):
            yield left[:count], 2

    def _width(self, kept: list[int], fold: int) -> int:
        return sum(self._column(place, fold) + 3 for place in kept) + 1

    def _column(self, place: int, fold: int) -> int:
        """What a column needs so that no word of it is broken."""
        title, lines = self.shown.columns[place], self.shown.lines
        texts = [text for line in lines for text in (line[place].text, line[place].detail)]
        words = title.split()
        if not self.shown.is_text(place):
            return _longest([*words, *_FOLDS[fold]("\n".join(texts)).split("\n")])
        words += " ".join(texts).split()
        return max(min(_longest([title, *texts]), _NAME), _longest(words))


def _longest(texts: list[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _rich(cell: Cell, fold: int) -> Text:
    text = Text(_FOLDS[fold](cell.text), style="bold" if cell.bold else "")
    return text.append(f"\n{_FOLDS[fold](cell.detail)}", style="dim") if cell.detail else text
