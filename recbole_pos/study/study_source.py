"""The source of a study: its content, and the lines of its parts, which messages name."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.values import nearest, short, shown
from recbole_pos.yaml_files import YamlLoader, read_text, yaml_problem

LIKE = "like"  # the key that names another study
_MERGED = ("base", "rows")  # keys that are taken over option by option
_OF_ROWS = ("reference", "tables", "paper")  # keys that name rows
_Path = tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """A study as it was written.

    Attributes:
        name: the file, or another word for where the study is from.
        content: values of the study.
        lines: path of keys and places in lists -> line, from 1.
        like: the study whose content this one takes over, except for what its own file gives.
    """

    name: str
    content: dict[str, Any]
    lines: dict[_Path, int] = field(default_factory=dict)
    like: Source | None = None

    def where(self, *path: Any) -> str:
        """Return file and line of a part, or of the smallest part around it with a line."""
        for end in range(len(path), 0, -1):
            source: Source | None = self
            while source is not None:
                if path[:end] in source.lines:
                    return f"{source.name}, line {source.lines[path[:end]]}"
                own = (path[0],) in source.lines and path[0] not in _MERGED
                source = None if own else source.like
        return self.name

    def error(self, path: _Path, problem: str) -> UsageError:
        """Return a UsageError whose message begins with file and line of a part."""
        return UsageError(f"{self.where(*path)}: {problem}")

    def require_choice(self, path: _Path, name: Any, rows: Collection[str]) -> str:
        """Return the name of a row; raise a UsageError, with the line of ``path``, for others."""
        if not isinstance(name, str) or name not in rows:
            raise self.error(
                path, f"there is no configuration {shown(name)}{nearest(str(name), rows)}"
            )
        return name


def read_source(path: str | Path) -> Source:
    """Return the study in a file, with the content it takes over from the study it is like.

    Raises:
        UsageError: naming the line, if a file cannot be read, is not yaml or has no mapping.
    """
    return _resolve(Path(path), ())


def _resolve(path: Path, above: tuple[Path, ...]) -> Source:
    """Return the study in a file, merged with the one it is like; ``above`` are files like it."""
    source = _read(path)
    if LIKE not in source.content:
        return source
    name = source.content[LIKE]
    other = path.parent / str(name)
    if not isinstance(name, str) or not name or not other.is_file():
        problem = f"expected the file of another study, found {shown(name)}"
        raise source.error((LIKE,), f"{LIKE}: {problem}")
    if other.resolve() in (*above, path.resolve()):
        raise source.error((LIKE,), f"{LIKE}: {shown(name)} goes round in a circle")
    like = _resolve(other, (*above, path.resolve()))
    return Source(source.name, _merged(source, like), source.lines, like)


def _merged(source: Source, like: Source) -> dict[str, Any]:
    """Return the content of a study over that of another: its own keys win, and the options of
    base and rows one by one."""
    own = {key: value for key, value in source.content.items() if key != LIKE}
    merged = {**like.content, **own}
    if merged.get("dataset") != like.content.get("dataset"):
        merged["paper"] = own.get("paper")  # values of a paper are of one dataset
    for key in _MERGED:
        if not isinstance(like.content.get(key) or {}, dict):
            raise like.error((key,), f"{key}: expected a mapping")
    merged["base"] = _over(like.content.get("base"), own.get("base"))
    inherited, rows = like.content.get("rows") or {}, own.get("rows")
    if isinstance(rows, (list, str)):
        names = [rows] if isinstance(rows, str) else rows
        merged["rows"] = {
            source.require_choice(("rows",), name, inherited): inherited[name] for name in names
        }
        for key in _OF_ROWS:
            if key not in own and key in merged:
                with suppress(AttributeError, TypeError):  # malformed values are refused later
                    merged[key] = _restrict_to_rows(key, merged[key], names)
    elif rows is None or isinstance(rows, dict):
        all_names = {**inherited, **(rows or {})}
        merged["rows"] = {n: _over(inherited.get(n), (rows or {}).get(n)) for n in all_names}
    return {key: value for key, value in merged.items() if value is not None}


def _over(inherited: Any, own: Any) -> Any:
    """Return inherited options with own ones, which win; None inherits all."""
    if isinstance(inherited, dict) and isinstance(own, dict):
        return {**inherited, **own}
    return inherited if own is None else own


def _restrict_to_rows(key: str, value: Any, names: list[str]) -> Any:
    """Return the inherited value of a key without references to rows that are not taken over.

    Args:
        key: reference, paper or tables.
        value: its value in the other study.
        names: rows that are taken over.

    Returns:
        The reduced value; None if nothing is left.
    """
    if key == "reference":
        return value if value in names else None
    if key == "paper":
        return {row: figures for row, figures in (value or {}).items() if row in names}
    tables = []
    for table in value or ():
        rows = table.get("rows", names)
        rows = [row for row in ([rows] if isinstance(rows, str) else rows) if row in names]
        if rows and table.get("reference", rows[0]) in rows:
            tables.append({**table, "rows": rows} if "rows" in table else table)
    return tables or None


def _read(path: Path) -> Source:
    """Return the content and lines of one file; an error names the line."""
    name = short(str(path))
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read study {name}: {reason}") from error
    loader = None
    try:
        loader = YamlLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"study {name} must hold `key: value` lines")
        lines: dict[_Path, int] = {}
        _add_lines(root, (), lines)
        return Source(str(path), loader.construct_document(root), lines)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name}, {yaml_problem(error)} (not valid yaml)") from error
    finally:
        if loader is not None:
            loader.dispose()


def _add_lines(node: yaml.Node, path: _Path, lines: dict[_Path, int]) -> None:
    """Add the lines of all parts of a node, which is at ``path``; refuse a key that is repeated."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a plain word", key.start_mark
                )
            here = (*path, key.value)
            if here in lines:
                problem = f"key {shown(key.value)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[here] = key.start_mark.line + 1
            _add_lines(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            here = (*path, place)
            lines[here] = value.start_mark.line + 1
            _add_lines(value, here, lines)


def parse_list(text: str, where: str) -> list[Any]:
    """Return values in yaml with commas between: ``[nope],[rope,kernel]``, ``1e-3,0.01``.

    Args:
        text: text of the values.
        where: name of the option, for messages.

    Raises:
        UsageError: if the text is not yaml.
    """
    try:
        return yaml.load(f"[{text}]", Loader=YamlLoader)
    except (yaml.YAMLError, ValueError) as error:
        problem = short(getattr(error, "problem", None) or "it cannot be read")
        raise UsageError(f"{where}: {shown(text)} is not a list of values ({problem})") from error
