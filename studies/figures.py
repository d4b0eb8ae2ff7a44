"""Finds figures in the words of results/*.md that stand in no table.

    python studies/figures.py [PAGE ...]

Under "What holds" every figure must be that of a table of the page, or of a page to which the same
paragraph links, rounded to as many digits as it has: tables are made again from runs, words are
not, and would keep what no run says any more. Figures of fewer than three digits after the point
(percents, times as many) are not looked at.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
_WORDS = re.compile(r"^## What holds\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_FIGURE = re.compile(r"(?<![\d.])\d*\.\d{3,}(?!\d)")
_UNITS = re.compile(r"[+-](\d+)(?![\d.])")  # differences that a table has in units of 0.0001
_LINK = re.compile(r"\]\(([\w.-]+\.md)[)#]")


def unfounded(page: Path) -> list[str]:
    """The figures of a page's words that no table has, as they are written."""
    text = page.read_text(encoding="utf-8")
    words = _WORDS.search(text)
    found = []
    for paragraph in re.split(r"\n(?=- |\n)", words[1]) if words else []:
        links = (page.parent / name for name in _LINK.findall(paragraph))
        linked = [other.read_text(encoding="utf-8") for other in links if other.is_file()]
        known = set().union(*map(_tabled, [text, *linked]))
        found += [one for one in _FIGURE.findall(paragraph) if not _is_in(one, known)]
    return found


def _tabled(text: str) -> set[float]:
    """All figures in the tables of a page, without their signs."""
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    figures = {float(one) for one in _FIGURE.findall(table)}
    return figures | {int(one) / 1e4 for one in _UNITS.findall(table)}


def _is_in(figure: str, known: Iterable[float]) -> bool:
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2]) + 1e-9
    return any(abs(float(figure) - one) <= half for one in known)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Find figures that stand in no table.")
    parser.add_argument("pages", nargs="*", type=Path, help="all of results/ by default")
    given = parser.parse_args(arguments)
    pages = given.pages or sorted(RESULTS.glob("*.md"))
    found = {page: missing for page in pages if (missing := unfounded(page))}
    for page, missing in found.items():
        print(f"{page.name}: no table has {', '.join(missing)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
