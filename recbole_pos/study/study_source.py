"""The source of a study: its content, and the lines of its parts, which messages name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import nearest, shown
from recbole_pos.yaml_files import read_with_lines

LIKE = "like"  # the key that names another study
_Path = tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """A study as it was written.

    Attributes:
        name: the file, or another word for where the study is from.
        content: values of the study.
        lines: path of a part (keys, and indices of lists) -> its file and line.
    """

    name: str
    content: dict[str, Any]
    lines: dict[_Path, str] = field(default_factory=dict)

    def locate(self, *path: Any) -> str:
        """Return file and line of the smallest part around ``path`` with a line, else the name."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return self.name

    def error(self, path: _Path, problem: str) -> UsageError:
        """Return a UsageError whose message begins with file and line of a part."""
        return UsageError(f"{self.locate(*path)}: {problem}")

    def require_choice(self, path: _Path, name: Any, rows: Collection[str]) -> None:
        """Raise a UsageError, with the line of ``path``, if ``name`` is not the name of a row."""
        if not isinstance(name, str) or name not in rows:
            raise self.error(
                path, f"there is no configuration {shown(name)}{nearest(str(name), rows)}"
            )


def read_source(path: str | Path, heirs: tuple[Path, ...] = ()) -> Source:
    """Return the study in a file, with the content that it inherits by its key ``like``.

    ``heirs`` are files that inherit from this one. A UsageError names the line of a mistake.
    """
    path = Path(path)
    source = Source(str(path), *read_with_lines(path, "study"))
    if LIKE not in source.content:
        return source
    name = source.content.pop(LIKE)
    parent_path = path.parent / str(name)
    if not isinstance(name, str) or not name or not parent_path.is_file():
        problem = f"expected the file of another study, found {shown(name)}"
        raise source.error((LIKE,), f"{LIKE}: {problem}")
    heirs = (*heirs, path.resolve())
    if parent_path.resolve() in heirs:
        raise source.error((LIKE,), f"{LIKE}: {shown(name)} goes round in a circle")
    parent = read_source(parent_path, heirs)
    return Source(source.name, _merge(source, parent), {**parent.lines, **source.lines})


def _merge(source: Source, parent: Source) -> dict[str, Any]:
    """Return the content of a study and its parent; base and rows are merged option by option."""
    content, inherited = source.content, parent.content
    merged = {**inherited, **content}
    if merged.get("dataset") != inherited.get("dataset") and "paper" not in content:
        merged.pop("paper", None)  # values of a paper are of one dataset
    merged["base"] = _merge_options(inherited.get("base"), content.get("base"))
    inherited_rows, rows = inherited.get("rows") or {}, content.get("rows")
    if isinstance(rows, (list, str)):  # the names of inherited rows
        names = [rows] if isinstance(rows, str) else rows
        for name in names:
            source.require_choice(("rows",), name, inherited_rows)
        merged["rows"] = {name: inherited_rows[name] for name in names}
        for key in {"reference", "tables", "paper"} - set(content):
            merged[key] = _restrict(merged.get(key), names)
    else:
        merged["rows"] = {
            name: _merge_options(inherited_rows.get(name), (rows or {}).get(name))
            for name in {**inherited_rows, **(rows or {})}
        }
    return {key: value for key, value in merged.items() if value is not None}


def _merge_options(inherited: Any, options: Any) -> Any:
    """Return options over inherited ones; None inherits all, and other values replace them."""
    if isinstance(inherited, dict) and isinstance(options, dict):
        return {**inherited, **options}
    return inherited if options is None else options


def _restrict(value: Any, names: list[str]) -> Any:
    """Return an inherited reference, paper or tables for the named rows; None if none is left.

    A table stays if it has all its rows and its reference.
    """
    if isinstance(value, dict):
        return {row: values for row, values in value.items() if row in names}
    if isinstance(value, list):
        tables = [
            table
            for table in value
            if {*table.get("rows", names), table.get("reference", names[0])} <= set(names)
        ]
        return tables or None
    return value if value in names else None
