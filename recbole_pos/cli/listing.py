"""What there is, as a table or, where that would be cramped, name by name: models and schemes."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recbole_pos.errors import UsageError
from recbole_pos.model import recbole_models
from recbole_pos.model.models import BASELINES, MODELS, OURS, TABLES
from recbole_pos.position.facts import FACTS
from recbole_pos.position.schemes import SCHEMES

NARROWEST, WIDEST = 40, 200  # columns of a page
ROOMY, ENOUGH = 50, 32  # columns of text that a table should have, and must have


def list_models() -> None:
    """Print what ``run -m`` takes."""
    ours = {**dict.fromkeys([*MODELS, *BASELINES]), **dict.fromkeys(OURS)}
    theirs = {**recbole_models.SEQUENTIAL, **recbole_models.GENERAL}
    rows = [(name, _source(TABLES, name), _told(OURS, name)) for name in ours]
    rows += [(name, "RecBole", text) for name, text in theirs.items()]
    show(("model", "from", "what it is"), rows)


def list_schemes() -> None:
    """Print what ``position`` may name."""
    rows = []
    for name in SCHEMES:
        text = _told(SCHEMES, name)
        try:
            found = FACTS.get(name) or _facts(name)
            told = (", ".join(SCHEMES.defaults(name)) or "-", text)
            rows.append((name, found.place, found.needs, f"{found.parameters:,}", *told))
        except UsageError:  # another package's, which the text says
            rows.append((name, "-", "-", "-", "-", text))
    columns = ("scheme", "place", "needs", "parameters", "options", "what it is (source)")
    show(columns, rows, "parameters added to a model of n = 50, d = 64, 1 head, 2 layers")


def _source(tables: Sequence[Any], name: str) -> str:
    """The package, or the module, that a class is from."""
    return next(table.source(name) for table in tables if name in table)


def _told(table: Mapping[str, type], name: str) -> str:
    """What a class is; of one of another package's that cannot be had, why."""
    try:
        return summary(table, name)
    except UsageError as error:
        return str(error)


def _facts(name: str) -> Any:
    """Of a scheme that another package brought, which must be imported for it."""

    from recbole_pos.position.build import describe

    return describe(name)


def summary(table: Mapping[str, type], name: str) -> str:
    """The first paragraph of a class's docstring, as plain text.

    The plugin's own classes are read as text, since importing one costs seconds.
    """
    tables = getattr(table, "maps", [table])
    place = next((one.places[name] for one in tables if name in one.places), None)
    if place is None:
        return paragraph(table[name].__doc__)
    module, _, described = place.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None  # a module of this package
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return paragraph(next(ast.get_docstring(c) for c in classes if c.name == described))


def paragraph(text: str | None) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join((text or "").strip().split("\n\n")[0].replace("``", "").split())


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
    wrapper = textwrap.TextWrapper(
        width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    lines = []
    for name, *between, text in rows:
        told = [f"{c}: {cell}" for c, cell in zip(columns[1:-1], between, strict=True)]
        lines.append(name)
        for part in (text, "; ".join(told)):
            lines += wrapper.wrap(part)
    return lines
