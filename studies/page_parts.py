"""What the scripts that fill pages share: their option, tables in markdown, and pages to write."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, STUDIES = ROOT / "results", ROOT / "studies"


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the command line with the option ``--check``.

    Args:
        description: what the script does.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it differs")
    return parser


def make_table(head: Sequence[str], lines: Sequence[Sequence[str]], alignment: str) -> str:
    """Return a table in markdown.

    Args:
        head: texts of the header.
        lines: texts of the cells of each row.
        alignment: a letter for each column: ``l`` for words, which are aligned left, and ``r`` for
            numbers.
    """
    rule = "".join("---:|" if letter == "r" else "---|" for letter in alignment)
    first, *others = (f"| {' | '.join(line)} |\n" for line in [head, *lines])
    return f"{first}|{rule}\n{''.join(others)}"


def replace_tables(page: Path, mark: str, make: Callable[..., str | None]) -> str:
    """Return the text of a page with its tables made again.

    A table stands between ``<!-- begin MARK -->`` and ``<!-- end -->``, in lines of their own.

    Args:
        page: the page, in markdown.
        mark: regular expression of MARK.
        make: makes a table from the groups of the regular expression; None leaves the old one.
    """

    def replace(match: re.Match[str]) -> str:
        """Return the marks of a table, with the new table between them."""
        begin, *groups, end = match.groups()
        table = make(*groups)
        return match[0] if table is None else f"{begin}{table}{end}"

    pattern = rf"(<!-- begin {mark} -->\n).*?(<!-- end -->)"
    return re.sub(pattern, replace, page.read_text("utf-8"), flags=re.DOTALL)


def write_pages(texts: Mapping[Path, str], is_check: bool) -> int:
    """Write the pages whose text has changed, and print their names.

    Args:
        texts: page -> its new text.
        is_check: whether nothing is written.

    Returns:
        Exit status: 1 if a check finds that a page differs.
    """
    differs = False
    for page, text in texts.items():
        if page.is_file() and page.read_text("utf-8") == text:
            continue
        differs = True
        print(f"{page}: {'differs' if is_check else 'written'}")
        if not is_check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
    return int(is_check and differs)
