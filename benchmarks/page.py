"""Parts of a page that a benchmark writes: what stands between its marks."""

from __future__ import annotations

from pathlib import Path


def replace_section(page: Path, mark: str, text: str) -> None:
    """Put text between the begin and end marks of a page."""
    begin, end = (f"<!-- {side} {mark} -->" for side in ("begin", "end"))
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    print(text)
