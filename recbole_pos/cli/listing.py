"""What there is, as a table or, where that would be cramped, name by name: models and schemes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recbole_pos.model import recbole_models
from recbole_pos.model.models import BASELINES, MODELS
from recbole_pos.position.build import describe
from recbole_pos.position.schemes import SCHEMES

NARROWEST, WIDEST = 40, 200  # columns of a page
ROOMY, ENOUGH = 50, 32  # columns of text that a table should have, and must have


def list_models() -> None:
    """Print what ``run -m`` takes."""
    ours = {name: summary(model) for name, model in {**MODELS, **BASELINES}.items()}
    theirs = {**recbole_models.SEQUENTIAL, **recbole_models.GENERAL}
    rows = [(name, "recbole-pos", text) for name, text in ours.items()]
    rows += [(name, "RecBole", text) for name, text in theirs.items()]
    show(("model", "from", "what it is"), rows)


def list_schemes() -> None:
    """Print what ``position`` may name."""
    rows = []
    for name, scheme in SCHEMES.items():
        found = describe(name)
        options = ", ".join(found.options) or "-"
        parameters = f"{found.parameters:,}"
        rows.append((name, found.place, found.needs, parameters, options, summary(scheme)))
    columns = ("scheme", "place", "needs", "parameters", "options", "what it is (source)")
    show(columns, rows, "parameters added to a model of n = 50, d = 64, 1 head, 2 layers")


def summary(described: type) -> str:
    """The first paragraph of a class's docstring, as plain text."""
    paragraph = (described.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(paragraph.replace("``", "").split())


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print rows in the width there is, nothing cut off.

    Args:
        columns: what the cells are; the first has names, the last has text.
        rows: a cell for each column.
        note: of the whole.
    """
    console = Console(highlight=False)
    console.width = width = min(max(console.width, NARROWEST), WIDEST)
    cells = list(zip(*[columns, *rows], strict=True))
    natural = [max(map(len, column)) for column in cells[:-1]]
    # names are kept whole; the columns between may break their lines between words
    narrow = [max(len(w) for cell in column for w in cell.split()) for column in cells[1:-1]]
    for widths, needed in ((natural, ROOMY), ([natural[0], *narrow], ENOUGH)):
        text = width - sum(widths) - 3 * len(columns) - 1  # frame and space around cells
        if text >= needed:
            console.print(_table(columns, rows, [*widths, text], note))
            return
    for line in _pages(columns, rows, width):
        console.print(line, markup=False, soft_wrap=True)
    for line in textwrap.wrap(note, width):
        console.print(line, markup=False, soft_wrap=True)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], note: str
) -> Table:
    table = Table(caption=note or None)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, max_width=width, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _pages(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Each name on a line of its own, what is said of it below."""
    lines = []
    for name, *between, text in rows:
        told = [f"{c}: {cell}" for c, cell in zip(columns[1:-1], between, strict=True)]
        indent = {"initial_indent": "  ", "subsequent_indent": "  "}
        lines.append(name)
        for part in (text, "; ".join(told)):
            lines += textwrap.wrap(part, width, **indent, break_on_hyphens=False)
    return lines
