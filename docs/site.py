"""Gives mkdocs the pages that lie beside docs/: README.md as the start, results/ and CHANGELOG.md.

In the repository their links lead from file to file; here they are rewritten to where pages stand.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")
START = {"README.md": "index.md"}  # files of the repository that have another name as pages


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that are not under docs/."""
    names = ("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md")
    beside = [ROOT / name for name in (*names, "LICENSE")]
    kept = ("*.*", "*/*.html", "*/*.png", "tables/**/*.*")  # of reports, what pages link to
    results = [path for one in kept for path in sorted((ROOT / "results").glob(one))]
    for path in [*beside, *results]:
        source = path.relative_to(ROOT).as_posix()
        page = File.generated(config, START.get(source, source), abs_src_path=str(path))
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    here = next((file for file, name in START.items() if name == page.file.src_uri), None)
    if here is None:
        beside = Path(page.file.abs_src_path).is_relative_to(config["docs_dir"])
        here = f"docs/{page.file.src_uri}" if beside else page.file.src_uri
    folder = PurePosixPath(page.file.src_uri).parent.as_posix()

    def lead(match: re.Match) -> str:
        target = normpath(PurePosixPath(here).parent / match[2])
        target = START.get(target, target.removeprefix("docs/"))
        return f"{match[1]}{relpath(target, folder)}{match[3] or ''}{match[4]}"

    return LINK.sub(lead, markdown)
