"""Where the parts of a study stand in its file, so that every message can name the line."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.values import nearest, short, shown, suggest
from recbole_pos.yaml_files import YamlLoader, read_text, yaml_problem

LIKE = "like"  # the key that names another study
_MERGED = ("base", "rows")  # keys that are taken over option by option
_OF_ROWS = ("reference", "tables", "paper")  # keys that name rows
_Path = tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """A study as it was written.

    Attributes:
        name: the file, or what else it came from.
        content: its values.
        lines: path of keys and places in lists -> line, from 1.
        like: the study that this one is like but for what its file says.
    """

    name: str
    content: dict[str, Any]
    lines: dict[_Path, int] = field(default_factory=dict)
    like: Source | None = None

    def where(self, *path: Any) -> str:
        """File and line of a part, or of the nearest part around it that has a line."""
        for end in range(len(path), 0, -1):
            source: Source | None = self
            while source is not None:
                if path[:end] in source.lines:
                    return f"{source.name}, line {source.lines[path[:end]]}"
                own = (path[0],) in source.lines and path[0] not in _MERGED
                source = None if own else source.like
        return self.name

    def error(self, path: _Path, problem: str) -> UsageError:
        """A message that begins with file and line."""
        return UsageError(f"{self.where(*path)}: {problem}")

    def require_known(
        self, path: _Path, given: dict[Any, Any], known: Collection[str], what: str
    ) -> None:
        """No key may stand in a mapping that means nothing there."""
        for key in given:
            if key not in known:
                hint = suggest(str(key), known) or f"; there are {', '.join(known)}"
                raise self.error((*path, key), f"unknown {what} {shown(key)}{hint}")

    def mapping(self, path: _Path, value: Any, example: str) -> dict[str, Any]:
        """A copy of a mapping with names for keys; empty where there is none."""
        if value is None:
            return {}
        name = path[-1]
        if not isinstance(value, dict):
            raise self.error(path, f"{name}: expected a mapping {example}, found {shown(value)}")
        for key in value:
            if not isinstance(key, str):
                problem = f"{name}: a name is text, found {shown(key)}; write it in quotes"
                raise self.error((*path, str(key)), problem)
        return dict(value)

    def text(self, path: _Path, value: Any) -> str:
        """A text; empty where there is none."""
        if isinstance(value, (dict, list)):
            raise self.error(path, f"{path[-1]}: expected text, found {shown(value)}")
        return "" if value is None else str(value).strip()

    def names(self, path: _Path, value: Any, what: str) -> tuple[str, ...]:
        """A list of different names; a single one may stand without brackets."""
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.error(path, f"{path[-1]}: expected a list of {what}, found {shown(value)}")
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise self.error(path, f"{path[-1]}: {twice[0]} is given twice")
        return tuple(names)

    def one_of(self, path: _Path, name: Any, rows: Collection[str]) -> str:
        """The name of a row that there is."""
        if not isinstance(name, str) or name not in rows:
            raise self.error(path, f"there is no row {shown(name)}{nearest(str(name), rows)}")
        return name


def read_source(path: str | Path) -> Source:
    """The file of a study, with what it takes from the one that it is like.

    Raises:
        UsageError: if one cannot be read, is no yaml or holds no mapping; names the line.
    """
    return _whole(Path(path), ())


def _whole(path: Path, above: tuple[Path, ...]) -> Source:
    source = _read(path)
    if LIKE not in source.content:
        return source
    name = source.text((LIKE,), source.content[LIKE])
    other = path.parent / name
    if not name or path.resolve() in above:
        problem = "expected the file of another study" if not name else "goes round in a circle"
        raise source.error((LIKE,), f"{LIKE}: {problem}; found {shown(name)}")
    if not other.is_file():
        problem = "is a folder" if other.is_dir() else "does not exist"
        raise source.error((LIKE,), f"{LIKE}: {other} {problem}; name the file of a study")
    like = _whole(other, (*above, path.resolve()))
    return Source(source.name, _merged(source, like), source.lines, like)


def _merged(source: Source, like: Source) -> dict[str, Any]:
    """The content of a study: keys of its own win, in base and rows option by option."""
    given = {key: value for key, value in source.content.items() if key != LIKE}
    found = {**like.content, **given}
    if given.get("dataset", found.get("dataset")) != like.content.get("dataset"):
        found["paper"] = given.get("paper")  # figures are of a dataset
    for key in _MERGED:
        if key in like.content:
            like.mapping((key,), like.content[key], "as of a study")
    found["base"] = _over(like.content.get("base"), given.get("base"))
    theirs, rows = like.content.get("rows") or {}, given.get("rows")
    if isinstance(rows, (list, str)):
        names = source.names(("rows",), rows, "rows")
        found["rows"] = {source.one_of(("rows",), name, theirs): theirs[name] for name in names}
        found |= {
            key: _of_rows(key, found[key], names)
            for key in _OF_ROWS
            if key not in given and key in found
        }
    elif rows is None or isinstance(rows, dict):
        found["rows"] = {
            name: _over(theirs.get(name), (rows or {}).get(name))
            for name in {**theirs, **(rows or {})}
        }
    return {key: value for key, value in found.items() if value is not None}


def _over(theirs: Any, mine: Any) -> Any:
    """Options over options; nothing of one's own leaves theirs."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return {**theirs, **mine}
    return theirs if mine is None else mine


def _of_rows(key: str, value: Any, names: tuple[str, ...]) -> Any:
    """What is left of a key of another study when some of its rows are; None for nothing."""
    if key == "reference":
        return value if value in names else None
    if key == "paper":
        kept = value if isinstance(value, dict) else {}
        return {row: figures for row, figures in kept.items() if row in names}
    tables = []
    for table in value if isinstance(value, list) else []:
        if not isinstance(table, dict) or not isinstance(table.get("rows", []), (list, str)):
            return value  # which is refused where it is read
        one = dict(table)
        if "rows" in one:
            rows = [one["rows"]] if isinstance(one["rows"], str) else one["rows"]
            one["rows"] = [row for row in rows if row in names]
        rows = one.get("rows", names)
        if rows and one.get("reference", rows[0]) in rows:
            tables.append(one)
    return tables or None


def _read(path: Path) -> Source:
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
    """Values with commas between them, each as yaml: ``[nope],[rope,kernel]``, ``1e-3,0.01``.

    Args:
        text: as written.
        where: of what they are the values, for messages.

    Raises:
        UsageError: if it is not yaml.
    """
    try:
        return yaml.load(f"[{text}]", Loader=YamlLoader)
    except (yaml.YAMLError, ValueError) as error:
        problem = short(getattr(error, "problem", None) or "it cannot be read")
        raise UsageError(f"{where}: {shown(text)} is no list of values ({problem})") from error
