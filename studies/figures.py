"""Finds figures in the words of this repository that stand in no table of results.

    python studies/figures.py [PAGE ...]

Tables are made again from runs; words are not, and would keep what no run says any more. So every
figure of three digits after the point or more must be that of a table, rounded to as many digits:

- under "Findings" of a page of results, of a table of this page, of the tables of studies that
  the page links to (results/tables/), or of a page that the paragraph links to;
- in results/README.md, of a table of any page (not the first column, which has the papers' own);
- anywhere else, where a paragraph links to pages of results, of a table of these.

Percents and times as many are not looked at.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FINDINGS = re.compile(r"^## Findings\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_PARAGRAPHS = re.compile(r"\n(?=- |\||\n)")
_FIGURE = re.compile(r"(?<![\d.])\d*\.\d{3,}(?!\d)")
_UNITS = re.compile(r"[+-](\d+)(?![\d.])")  # differences that a table has in units of 0.0001
_LINK = re.compile(r"\]\(([\w./@-]+\.md)[)#]")


def unfounded(page: Path) -> list[str]:
    """The figures of a page's words that no table has, as they are written."""
    known = [(words, set().union(*map(_tabled, pages))) for words, pages in _claims(page)]
    return [one for words, table in known for one in _FIGURE.findall(words) if not _in(one, table)]


def _claims(page: Path) -> Iterator[tuple[str, list[Path]]]:
    """Words with figures, and the pages whose tables must have them."""
    text = page.read_text(encoding="utf-8")
    results = page.parent.name == "results"
    if results and page.name == "README.md":
        everything = [one for one in page.parent.rglob("*.md") if one != page]
        for line in text.splitlines():
            if line.startswith("|"):
                yield line.split("|", 2)[-1], everything
        return
    findings = _FINDINGS.search(text)
    words = (findings[1] if findings else "") if results else text
    for paragraph in _PARAGRAPHS.split(words):
        linked = [(page.parent / name).resolve() for name in _LINK.findall(paragraph)]
        pages = [one for one in linked if one.parent.name == "results" and one.is_file()]
        if results or pages:
            pages = [*pages, page] if results else pages
            yield paragraph, [*pages, *(table for one in pages for table in _tables(one))]


def _tables(page: Path) -> list[Path]:
    """The pages of all tables of a study that a page of results links to."""
    linked = [(page.parent / name).resolve() for name in _LINK.findall(page.read_text("utf-8"))]
    return [one for one in linked if page.parent / "tables" in one.parents and one.is_file()]


def _tabled(page: Path) -> set[float]:
    """All figures in the tables of a page, without their signs."""
    lines = page.read_text(encoding="utf-8").splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    figures = {float(one) for one in _FIGURE.findall(table)}
    return figures | {int(one) / 1e4 for one in _UNITS.findall(table)}


def _in(figure: str, known: Iterable[float]) -> bool:
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2]) + 1e-9
    return any(abs(float(figure) - one) <= half for one in known)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Find figures that stand in no table.")
    parser.add_argument("pages", nargs="*", type=Path, help="README.md, docs/ and results/")
    given = parser.parse_args(arguments).pages
    everywhere = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "results").glob("*.md"),
    ]
    found = {page: missing for page in given or everywhere if (missing := unfounded(page))}
    for page, missing in found.items():
        print(f"{page}: no table has {', '.join(missing)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
