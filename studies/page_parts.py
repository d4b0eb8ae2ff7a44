"""What the scripts that fill pages of results share: tables in markdown, and pages to write."""

from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, STUDIES = ROOT / "results", ROOT / "studies"


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
