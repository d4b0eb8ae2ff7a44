"""Tables in markdown, html, LaTeX and on a terminal of any width, and the numbers in them.

A :class:`RenderedTable` is made of :class:`Cell` objects. The functions ``format_...`` return the
text of numbers, durations, counts and intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# Seconds in a unit, name of the unit, and the same for the next smaller unit.
_TIME_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))

# Character that LaTeX would read as a command, or not print as it is -> LaTeX that prints it.
_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"±": r"$\pm$", "<": "$<$", ">": "$>$", "†": r"$\dagger$", "‡": r"$\ddagger$"},
    }
)


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: main text.
        detail: further text, shown in smaller letters, in brackets or on a line of its own.
        bold: whether the main text is bold.
    """

    text: str = ""
    detail: str = ""
    bold: bool = False


@dataclass(frozen=True)
class RenderedTable:
    """A table as people read it.

    Attributes:
        title: heading above the table.
        columns: names of the columns.
        lines: cells, line by line.
        notes: sentences below the table.
        text_columns: indices of the columns of words, aligned left; the others have numbers.
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: tuple[int, ...] = (0,)

    @classmethod
    def from_columns(
        cls,
        title: str,
        columns: Mapping[str, Sequence[Cell]],
        notes: Iterable[str] = (),
        text_columns: tuple[int, ...] = (0,),
    ) -> RenderedTable:
        """Return a table made of columns.

        Args:
            title: heading above the table.
            columns: name -> cells of a column, from top to bottom; all have the same number.
            notes: sentences below the table.
            text_columns: indices of the columns of words; the others have numbers.
        """
        lines = tuple(zip(*columns.values(), strict=True))  # from columns to lines
        return cls(title, tuple(columns), lines, tuple(notes), text_columns)

    def markdown(self) -> str:
        """Return the table in markdown, with its title as a heading and its notes as a list.

        Columns of words are aligned left, columns of numbers right.
        """
        # The line below the names aligns the columns: "---:" to the right.
        rules = ["---" if i in self.text_columns else "---:" for i in range(len(self.columns))]
        cells = [[format_markdown_cell(cell) for cell in line] for line in self.lines]
        lines = [[_escape_markdown(name) for name in self.columns], rules, *cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(block for block in (f"## {self.title}", table, notes) if block)

    def latex(self) -> str:
        """Return the table in LaTeX, for the package booktabs.

        The best values are bold, and the notes of the table are in its caption. Columns of words
        are aligned left, columns of numbers right.
        """
        cells = [[_format_latex_cell(cell) for cell in line] for line in self.lines]
        frame = pd.DataFrame(cells, columns=[name.translate(_LATEX) for name in self.columns])
        sides = ["l" if i in self.text_columns else "r" for i in range(len(self.columns))]
        return frame.style.hide(axis="index").to_latex(
            column_format="".join(sides),
            caption=" ".join([f"{self.title}.", *self.notes]).translate(_LATEX),
            position_float="centering",
            hrules=True,  # the lines of booktabs
        )

    def _repr_html_(self) -> str:
        return PAGES.get_template("table.html.jinja").render(table=self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table in a width that fits the console, as rich asks for it.

        If not all columns fit, those on the right are left out, and a note names them. The first
        two columns always stay.

        Args:
            console: console that the table is printed on.
            options: rich's options, with the width in characters.
        """
        # Leave out columns from the right until the rest fits. Beside its text, a column takes a
        # border and two spaces, and the table one more border.
        widths = [self._compute_width(column) for column in range(len(self.columns))]
        num_shown = len(widths)
        while num_shown > 2 and sum(widths[:num_shown]) + 3 * num_shown + 1 > options.max_width:
            num_shown -= 1
        notes = [*self.notes]  # a copy, since the table itself stays as it is
        if omitted := self.columns[num_shown:]:
            names = join_names(omitted)
            notes.append(f"Left out for want of width: {names}; table.md has all columns.")

        table = Table(title=Text(self.title), caption=Text("\n".join(notes)))
        table.title_justify = table.caption_justify = "left"
        for column in range(num_shown):
            justify: Any = "left" if column in self.text_columns else "right"
            name, width = Text(self.columns[column]), widths[column]
            table.add_column(name, justify=justify, overflow="fold", min_width=width)
        # A cell has its text, and below it the detail in a weaker colour.
        for line in self.lines:
            table.add_row(*map(_make_rich_cell, line[:num_shown]))
        yield table

    def _compute_width(self, column: int) -> int:
        """Return the smallest width of a column, in characters, that breaks no word.

        Args:
            column: index of the column.
        """
        words = self.columns[column].split()  # of its name
        for line in self.lines:
            # Without an argument, split would also break no-break spaces, which join words.
            words += f"{line[column].text} {line[column].detail}".split(" ")
        return max(map(cell_len, words))  # cell_len is the width of a word on a terminal


def _escape_markdown(text: str) -> str:
    """Return text for a cell of markdown: on one line, with column separators escaped."""
    return " ".join(text.replace("|", "\\|").splitlines())


def format_markdown_cell(cell: Cell) -> str:
    """Return a cell in markdown, such as ``0.0425``, ``**0.0425**`` or ``0.0425 (detail)``."""
    text, detail = _escape_markdown(cell.text), _escape_markdown(cell.detail)
    if cell.bold and text:
        text = f"**{text}**"
    return f"{text} ({detail})" if detail else text


def _format_latex_cell(cell: Cell) -> str:
    """Return a cell in LaTeX, such as ``{0.0425}`` or ``\\textbf{0.0425} {\\scriptsize detail}``.

    The braces around the text are for LaTeX, which reads a [ or * at the beginning of a line as an
    argument of the line break before it.
    """
    text, detail = cell.text.translate(_LATEX), cell.detail.translate(_LATEX)
    text = rf"\textbf{{{text}}}" if cell.bold else f"{{{text}}}"
    return rf"{text} {{\scriptsize {detail}}}" if detail else text


def _make_rich_cell(cell: Cell) -> Text:
    """Return a cell for a terminal, with its detail on a line of its own."""
    text = Text(cell.text, style="bold" if cell.bold else "")
    return text.append(f"\n{cell.detail}", "dim") if cell.detail else text


def format_number(value: float, sign: bool = False) -> str:
    """Return a metric with four decimals.

    Args:
        value: the metric, or a difference of metrics.
        sign: whether a positive value begins with a plus, as differences do.

    Returns:
        ``0.0425`` or ``+0.0042``. A value that is rounded to zero has no sign, and nan is empty.
    """
    if math.isnan(value):
        return ""
    text = f"{value:+.4f}" if sign else f"{value:.4f}"
    return text.lstrip("+-") if float(text) == 0 else text


def format_mean(mean: float, deviation: float) -> str:
    """Return ``0.0425 ± 0.0020``, or only the mean of a single seed."""
    if math.isnan(deviation):
        return format_number(mean)
    return f"{format_number(mean)} ± {format_number(deviation)}"


def format_interval(low: float, high: float) -> str:
    """Return ``[-0.0010, +0.0035]``; empty for nan."""
    if math.isnan(low):
        return ""
    return f"[{format_number(low, sign=True)}, {format_number(high, sign=True)}]"


def format_duration(seconds: float) -> str:
    """Return a duration as ``41 s``, ``3 min 20 s`` or ``2 h 5 min``; empty for nan.

    The two largest units are shown, and durations below ten seconds with one decimal, as ``4.2 s``.

    Args:
        seconds: the duration.
    """
    if math.isnan(seconds):
        return ""
    # From the largest unit to the smallest: (3_600, "h", 60, "min") stands for hours of 3,600
    # seconds and the next smaller unit, minutes of 60 seconds.
    for unit, name, smaller_unit, smaller_name in _TIME_UNITS:
        # Round to the smaller unit: 7,510 s are 125 min. Divide them by 60, the minutes of an hour:
        # 2 h and a remainder of 5 min. As rounding comes first, 59.7 s become 1 min, and not 60 s.
        num_smaller = round(seconds / smaller_unit)
        number, remainder = divmod(num_smaller, unit // smaller_unit)
        if number:
            return f"{number} {name}" + (f" {remainder} {smaller_name}" if remainder else "")
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_count(value: float) -> str:
    """Return a count in three digits, as ``812``, ``45.1 k`` or ``1.2 M``; empty for nan.

    Args:
        value: the count, which may be a median and need not be whole.
    """
    if math.isnan(value):
        return ""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if round(value / size, 3) >= 1:  # 999,700 is 1 M, and not 1e+03 k
            return f"{value / size:.3g} {suffix}"
    return f"{value:.0f}"


def join_names(values: Iterable[Any], limit: int = 6) -> str:
    """Return names or numbers in a sentence: ``a, b and c``; empty without any.

    Of more than ``limit`` names, the last ones are counted: ``a, b, c, d, e and 7 more``.

    Args:
        values: the names.
        limit: most names that are shown, the count included.
    """
    names = list(map(str, values))
    if len(names) > limit:  # the words "7 more" take the place of the last name
        names = [*names[: limit - 1], f"{len(names) - limit + 1} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def format_options(options: Mapping[str, Any]) -> str:
    """Return options in one line, as ``learning_rate: 0.001, n_heads: 2``."""
    return ", ".join(f"{name}: {value}" for name, value in options.items())


# Templates of pages, in this folder, and the functions that they call.
PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # names and reasons are the user's
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
PAGES.filters["join_names"] = join_names
