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
    """Return the figures of a page's words that no table has, as they are written."""
    missing = []
    for words, pages in _list_claims(page):
        known = set().union(*map(_read_figures, pages))
        missing += [figure for figure in _FIGURE.findall(words) if not _is_known(figure, known)]
    return missing


def _list_claims(page: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield words with figures, and the pages whose tables must have them."""
    text = page.read_text(encoding="utf-8")
    is_result = page.parent.name == "results"
    if is_result and page.name == "README.md":
        other_pages = [other for other in page.parent.rglob("*.md") if other != page]
        for line in text.splitlines():
            if line.startswith("|"):
                yield line.split("|", 2)[-1], other_pages
        return
    if is_result:
        findings = _FINDINGS.search(text)
        text = findings[1] if findings else ""
    for paragraph in _PARAGRAPHS.split(text):
        pages = [
            linked for linked in _list_links(page, paragraph) if linked.parent.name == "results"
        ]
        if is_result:
            pages.append(page)
        if pages:
            yield (
                paragraph,
                [*pages, *(table for result in pages for table in _list_tables(result))],
            )


def _list_links(page: Path, text: str) -> list[Path]:
    """Return the pages that a text of a page links to."""
    linked = [(page.parent / name).resolve() for name in _LINK.findall(text)]
    return [other for other in linked if other.is_file()]


def _list_tables(page: Path) -> list[Path]:
    """Return the pages of all tables of a study that a page of results links to."""
    linked = _list_links(page, page.read_text("utf-8"))
    return [other for other in linked if page.parent / "tables" in other.parents]


def _read_figures(page: Path) -> set[float]:
    """Return all figures in the tables of a page, without their signs."""
    lines = page.read_text(encoding="utf-8").splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    figures = {float(figure) for figure in _FIGURE.findall(table)}
    return figures | {int(figure) / 1e4 for figure in _UNITS.findall(table)}


def _is_known(figure: str, known: Iterable[float]) -> bool:
    """Return whether a figure is one of the known ones, rounded to as many digits."""
    digits = len(figure.partition(".")[2])
    return any(abs(float(figure) - other) <= 0.5 * 10.0**-digits + 1e-9 for other in known)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a page has a figure without a table."""
    parser = argparse.ArgumentParser(description="Find figures that stand in no table.")
    parser.add_argument("pages", nargs="*", type=Path, help="README.md, docs/ and results/")
    pages = parser.parse_args(arguments).pages or [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "results").glob("*.md"),
    ]
    status = 0
    for page in pages:
        if missing := unfounded(page):
            print(f"{page}: no table has {', '.join(missing)}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
