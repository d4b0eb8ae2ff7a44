"""Finds and reads yaml files; those under ``properties/`` are the only place of defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.values import short, shown

_PACKAGE = Path(__file__).resolve().parent
# Installed, they lie inside the package (setup.cfg maps them there); in a checkout, beside it.
ROOT, DATASETS = (
    _PACKAGE / f"_{name}" if (_PACKAGE / f"_{name}").is_dir() else _PACKAGE.parent / name
    for name in ("properties", "dataset")
)

# Bounds of a file, so that reading it and quoting it is bounded, too.
_DEEPEST, _MOST_VALUES, _LONGEST = 100, 100_000, 10_000_000
_PER_VALUE = 100  # characters of a text that count as one value
_LONGEST_NUMBER = 1000  # characters; Python reads longer ones in quadratic time, or not at all


class _Rules(yaml.constructor.SafeConstructor):
    """Rules of the package's yaml: plain values, 1e-3 is a float, no key is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                problem = f"key {shown(key.value)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


class YamlLoader(_Rules, yaml.SafeLoader):
    """Reads text within bounds, and shows where it is not yaml.

    An alias counts as all that it stands for: a few lines of aliases within aliases are gigabytes.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Compose the text, unless it has more values than a file may."""
        try:
            if (node := super().get_single_node()) is not None:
                _count_values(node, {})
            return node
        except RecursionError:
            raise yaml.YAMLError("values are nested too deeply") from None

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a value; one that is not what its tag says, as in ``!!bool x``, is not yaml."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError) as error:
            problem = f"it is not what its tag {shown(node.tag)} says"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int | None], depth: int = 0) -> int:
    """Return how many values a node has, those of aliases each time; refuse more than a file may.

    Nodes that were counted have their number in ``counts``, and None if they are around this one.
    """
    if node in counts:
        if (count := counts[node]) is None:
            raise _refusal("an alias stands within its own anchor", node)
        return count
    if depth > _DEEPEST:
        raise _refusal(f"values are nested more than {_DEEPEST} deep", node)
    counts[node] = None
    if isinstance(node, yaml.ScalarNode):
        if len(node.value) > _LONGEST_NUMBER and node.tag.endswith((":int", ":float")):
            raise _refusal(f"a number has {len(node.value):,} characters", node)
        count = 1 + len(node.value) // _PER_VALUE
    else:
        is_mapping = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if is_mapping else node.value
        count = 1 + sum(_count_values(part, counts, depth + 1) for part in parts)
    if count > _MOST_VALUES:
        problem = f"there are more than {_MOST_VALUES:,} values, those of aliases counted"
        raise _refusal(problem, node)
    counts[node] = count
    return count


def _refusal(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Libyaml = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may have been built without it


class PackagedLoader(_Rules, _Libyaml):  # type: ignore[misc, valid-type]
    """Reads the files of this package and of RecBole, which is much faster than in Python.

    Not for other files: it says less of what is wrong, and deep nesting ends the process.
    """


for _loader in (YamlLoader, PackagedLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


# Numbers between two, as in user_inter_num_interval: "[5,inf)", "(0,3];[7,9)".
_END = r"\s*[-+]?(?:inf|[\d.]+(?:e[-+]?\d+)?)\s*"
_INTERVALS = re.compile(rf"(?:[\[(]{_END},{_END}[\])];?)+", re.IGNORECASE)
# How values begin that are no plain text.
_BEGUN = {"[": "a list", "{": "a mapping", "'": "a text in quotes", '"': "a text in quotes"}


def parse_scalar(text: str, where: str) -> Any:
    """Read a value as yaml: 1e-3 is a float, [a, b] a list, ~ None, anything else a str.

    A list, mapping or quotation that is begun and not yaml is a UsageError about ``where``.
    """
    bare = text.strip()
    if bare in ("|", ">"):  # separators, and no block of lines
        return text
    try:
        return yaml.load(text, Loader=YamlLoader)
    except (yaml.YAMLError, ValueError) as error:
        begun = _BEGUN.get(bare[:1])
        if begun is None or _INTERVALS.fullmatch(bare):
            return text
        problem = short(getattr(error, "problem", None) or "it cannot be read")
        raise UsageError(
            f"{where}: {shown(text)} begins like {begun}, but is wrong ({problem}); close what it "
            "opens, or quote all of it if it is text"
        ) from error


def read_text(path: str | Path) -> str:
    """Return the text of a yaml file; a ValueError if it is not UTF-8, or too long."""
    with open(path, encoding="utf-8") as file:
        text = file.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise ValueError(f"the file has more than {_LONGEST:,} characters")
    return text


def read_with_lines(path: str | Path, what: str) -> tuple[dict[Any, Any], dict[tuple, str]]:
    """Return the mapping in a yaml file, and where its parts stand.

    Args:
        path: path of the file.
        what: what the file is, for messages: study, space file.

    Returns:
        The mapping; and path of keys and places in lists -> file and line.

    Raises:
        UsageError: naming the line, if the file cannot be read, is not yaml or holds no mapping.
    """
    name = short(str(path))
    try:
        loader = YamlLoader(read_text(path))
        try:
            root = loader.get_single_node()
            content = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except OSError as error:
        raise UsageError(f"cannot read {what} {name}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{name}, {yaml_problem(error)} (not valid yaml)") from error
    if not isinstance(content, dict):
        raise UsageError(f"{what} {name} must hold `key: value` lines")
    return content, {part: f"{path}, line {line}" for part, line in _find_lines(root)}


def _find_lines(node: yaml.Node, path: tuple = ()) -> Iterator[tuple[tuple, int]]:
    """Yield the path and the line of every key and every value of a list in a node."""
    parts: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        parts = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(place, value, value) for place, value in enumerate(node.value)]
    for name, key, value in parts:
        yield (*path, name), key.start_mark.line + 1
        yield from _find_lines(value, (*path, name))


def yaml_problem(error: Exception) -> str:
    """Return what an error of reading yaml says, on one line: ``line 3: key is given twice``."""
    mark = getattr(error, "problem_mark", None)
    line = f"line {mark.line + 1}: " if mark else ""
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return line + short(problem)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a yaml file; ``{}`` for an empty one."""
    name = short(str(path))
    loader = PackagedLoader if Path(path).is_relative_to(ROOT) else YamlLoader
    try:
        content = yaml.load(read_text(path), Loader=loader)
    except OSError as error:
        raise UsageError(f"cannot read config file {name}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"config file {name} is not valid yaml: {yaml_problem(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"config file {name} must hold `key: value` lines, found {type(content).__name__}"
        )
    return content


def overall_defaults() -> dict[str, Any]:
    """Return defaults of the plugin for every model, its own and RecBole's."""
    return read_yaml(ROOT / "overall.yaml")
