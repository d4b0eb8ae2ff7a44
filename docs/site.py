"""Give mkdocs the pages beside docs/ (README.md as the start, results/, CHANGELOG.md) and generate
the reference: every command with its options, every option of the configuration.

In the repository links lead from file to file; here they are rewritten to where pages stand.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

import recbole_pos
from recbole_pos.cli.main import make_parser
from recbole_pos.config.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")
SECTIONS = {"model": "Model", "position": "Scheme", "loss": "Loss"}
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
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
    for name, text in (("commands", _commands()), ("options", _options()), ("api", _api())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for path in NOTEBOOKS:
        page, more = MarkdownExporter().from_filename(path, {"unique_key": path.stem})
        files.append(File.generated(config, _page(path), content=page))
        for name, content in (more["outputs"] or {}).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def _page(notebook: Path) -> str:
    return f"notebooks/{notebook.stem}.md"


def _commands() -> str:
    """Return a page with the help of every command."""
    os.environ["COLUMNS"] = "100"  # what argparse wraps its help at
    _, commands = make_parser()
    parts = [
        f"## {name}\n\n```text\n{parser.format_help().strip()}\n```\n"
        for name, parser in commands.items()
    ]
    return "\n".join(["# Commands\n\nWhat `recbole-pos COMMAND --help` prints.\n", *parts])


def _api() -> str:
    """Return a page with the signature and the docstring of every public name."""
    names = [name for name in recbole_pos.__all__ if not name.startswith("__")]
    parts = ["# API\n\nThe public names of `import recbole_pos`.\n"]
    for name in sorted(names, key=str.lower):
        options = "    options: {inherited_members: true}\n" if name == "Recommender" else ""
        parts.append(f"::: recbole_pos.{name}\n{options}")
    return "\n".join(parts)


def _options() -> str:
    """Return a page with every row of the table of options, then the defaults of each file."""
    table = "| option | default | type | may be | meaning |\n|---|---|---|---|---|\n"
    lines = []
    for row in OPTIONS.values():
        default = "" if row.default is None else row.default
        if not row.refused:
            lines.append(f"| `{row.name}` | {default} | {row.type} | {row.allowed} | {row.text} |")
    parts = ["# Options\n\nKeys of yaml files and `--key=value`. RecBole's sentences: see there.\n"]
    parts += [table + "\n".join(lines) + "\n"]
    for folder, title in SECTIONS.items():
        for file in sorted((ROOT / "properties" / folder).glob("*.yaml")):
            parts.append(f"## {title} `{file.stem}`\n\n```yaml\n{file.read_text('utf-8')}```\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    start = START | {f"examples/{path.name}": _page(path) for path in NOTEBOOKS}
    here = next((file for file, name in start.items() if name == page.file.src_uri), None)
    if here is None:
        if page.file.abs_src_path is None:  # generated above
            return markdown
        beside = Path(page.file.abs_src_path).is_relative_to(config["docs_dir"])
        here = f"docs/{page.file.src_uri}" if beside else page.file.src_uri
    folder = PurePosixPath(page.file.src_uri).parent.as_posix()

    def lead(match: re.Match) -> str:
        target = normpath(PurePosixPath(here).parent / match[2])
        target = start.get(target, target.removeprefix("docs/"))
        if target.endswith(".png"):  # the outputs of notebooks
            target = target.replace("examples/", "notebooks/")
        return f"{match[1]}{relpath(target, folder)}{match[3] or ''}{match[4]}"

    return LINK.sub(lead, markdown)
