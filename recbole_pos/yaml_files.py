"""Reads yaml files within bounds; those under ``properties/`` are the only place of defaults."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.values import short, shown

_PACKAGE = Path(__file__).resolve().parent
# in the installed package (setup.cfg maps them there), or beside it in a checkout
ROOT, DATASETS = (
    _PACKAGE / f"_{name}" if (_PACKAGE / f"_{name}").is_dir() else _PACKAGE.parent / name
    for name in ("properties", "dataset")
)

# Bounds of a file, and so of the time and memory that reading and quoting it takes.
_MAX_CHARACTERS, _MAX_VALUES, _MAX_DEPTH = 10_000_000, 100_000, 100
_PER_VALUE = 100  # characters of a text that count as one value
_NO_SPACE = re.compile(r"[ -]*[\w.]+:[^\s/:]")  # the start of a line such as epochs:1
_MAX_DIGITS = 1000  # of a number; Python reads longer ones in quadratic time, or not at all


def _make_error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    """Return an error about a node, with its line."""
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class YamlLoader(yaml.SafeLoader):
    """Reads a user's text within bounds, with the place of what is not yaml or is given twice.

    An alias counts as all that it stands for: a few lines of aliases within aliases are gigabytes.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Return the node of the text, None if it is empty; refuse one beyond the bounds."""
        try:
            node = super().get_single_node()
            if node is not None:
                _count_values(node, {})
            return node
        except RecursionError:
            raise yaml.YAMLError("values are nested too deeply") from None

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node; refuse one that contradicts its tag, as in ``!!bool x``."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, OverflowError) as error:
            raise _make_error(f"it is not what its tag {shown(node.tag)} says", node) from error


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int | None], depth: int = 0) -> int:
    """Return the number of values in a node; refuse one beyond the bounds, or a key given twice.

    An alias counts as all that it stands for. ``counts`` is extended in place: node -> its number
    of values, None while it is being counted.
    """
    if node in counts:
        known_count = counts[node]
        if known_count is None:
            raise _make_error("an alias stands within its own anchor", node)
        return known_count
    if depth > _MAX_DEPTH:
        raise _make_error(f"values are nested more than {_MAX_DEPTH} deep", node)
    counts[node] = None
    if isinstance(node, yaml.ScalarNode):
        if len(node.value) > _MAX_DIGITS and node.tag.endswith((":int", ":float")):
            raise _make_error(f"a number has {len(node.value):,} characters", node)
        count = 1 + len(node.value) // _PER_VALUE
    else:
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
            _require_distinct([key for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        count = 1 + sum(_count_values(child, counts, depth + 1) for child in children)
    if count > _MAX_VALUES:
        problem = f"there are more than {_MAX_VALUES:,} values, those of aliases counted"
        raise _make_error(problem, node)
    counts[node] = count
    return count


def _require_distinct(keys: list[yaml.ScalarNode]) -> None:
    """Refuse the first key of a mapping that is given twice."""
    names = set()
    for key in keys:
        if key.value in names:
            raise _make_error(f"key {shown(key.value)} is given twice", key)
        names.add(key.value)


_Libyaml = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may have been built without it


class PackagedLoader(_Libyaml):  # type: ignore[misc, valid-type]
    """Reads the files of this package and of RecBole much faster, with libyaml.

    Not for other files: its messages are shorter, and deep nesting ends the process.
    """


for _loader in (YamlLoader, PackagedLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


# Intervals of numbers, as in user_inter_num_interval: "[5,inf)", "(0,3];[7,9)".
_END = r"\s*[-+]?(?:inf|[\d.]+(?:e[-+]?\d+)?)\s*"
_INTERVALS = re.compile(rf"(?:[\[(]{_END},{_END}[\])];?)+", re.IGNORECASE)
# First characters of values that are not plain text.
_OPENERS = {"[": "a list", "{": "a mapping", "'": "a text in quotes", '"': "a text in quotes"}


def parse_scalar(text: str, location: str) -> Any:
    """Read a value as yaml: 1e-3 is a float, [a, b] a list, ~ None, anything else a str.

    What begins like a list, mapping or quotation and is not one is a UsageError, which begins with
    ``location``.
    """
    bare = text.strip()
    # separators of fields, which yaml takes for the signs of a block, list, key, comment or tag
    if text == " " or bare in ("|", ">", "-", "?", "#", "!"):
        return text
    try:
        return yaml.load(text, Loader=YamlLoader)
    except (yaml.YAMLError, ValueError) as error:
        kind = _OPENERS.get(bare[:1])
        if kind is None or _INTERVALS.fullmatch(bare):
            return text
        problem = short(getattr(error, "problem", None) or "it cannot be read")
        raise UsageError(
            f"{location}: {shown(text)} begins like {kind}, but is wrong ({problem}); close what "
            "it opens, or quote all of it if it is text"
        ) from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a yaml file, ``{}`` if it is empty; raise a UsageError for another."""
    loader = PackagedLoader if Path(path).is_relative_to(ROOT) else YamlLoader
    return _read_mapping(path, "config file", loader)[0]


def read_overall_defaults() -> dict[str, Any]:
    """Return the plugin's defaults for every model, RecBole's models included."""
    return read_yaml(ROOT / "overall.yaml")


def find_recbole_properties() -> Path:
    """Return the folder of RecBole's yaml files, without importing RecBole."""
    spec = importlib.util.find_spec("recbole")
    assert spec is not None and spec.submodule_search_locations  # this package requires it
    return Path(spec.submodule_search_locations[0]) / "properties"


def read_with_lines(path: str | Path, kind: str) -> tuple[dict[Any, Any], dict[tuple, str]]:
    """Return the mapping in a yaml file of a ``kind``, and the place of each of its values.

    Places are ``("runs", 0)`` -> ``study.yaml, line 7`` for the first value of the list ``runs``.

    Raises:
        UsageError: naming the line, if the file cannot be read, is not yaml or holds no mapping.
    """
    content, root = _read_mapping(path, kind, YamlLoader)
    return content, {keys: f"{path}, line {line}" for keys, line in _find_lines(root)}


def _read_mapping(
    path: str | Path, kind: str, loader_class: Any
) -> tuple[dict[Any, Any], yaml.Node | None]:
    """Return the mapping in a yaml file of a ``kind``, and its node, None if the file is empty."""
    name = short(str(path))
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"the file has more than {_MAX_CHARACTERS:,} characters")
        loader = loader_class(text)
        try:
            root = loader.get_single_node()
            content = {} if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except OSError as error:
        raise UsageError(f"cannot read {kind} {name}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        number, problem = _explain(error, text.splitlines())
        raise UsageError(f"{name}, line {number}: {short(problem)} (not valid yaml)") from error
    except (yaml.YAMLError, ValueError) as error:  # UnicodeDecodeError, too
        problem = short(" ".join(str(error).split()))
        raise UsageError(f"{name}, {problem} (not valid yaml)") from error
    if content is None:
        return {}, root
    if not isinstance(content, dict):
        raise UsageError(
            f"{kind} {name} must hold `key: value` lines, with a space after the colon; found "
            f"{shown(content)}"
        )
    return content, root


def _explain(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[int, str]:
    """Return the number of the wrong line of a text, from 1, and what is wrong with it."""
    mark = error.problem_mark or error.context_mark
    problem = " ".join(str(error.problem).split())
    if r"'\t'" in problem:
        problem = "a tab; put spaces in its place"
    elif problem in ("could not find expected ':'", "mapping values are not allowed here"):
        last = (error.context_mark or mark).line
        for number in (last, last - 1):  # the text of a line goes on in the next
            line = "".join(lines[number : number + 1])
            if _NO_SPACE.match(line):
                return number + 1, f"{shown(line.strip())} lacks a space after the colon"
    return mark.line + 1, problem


def _find_lines(node: yaml.Node | None, path: tuple = ()) -> Iterator[tuple[tuple, int]]:
    """Yield the path (keys and indices of lists) and the line of each value in a node."""
    children: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for name, key, value in children:
        yield (*path, name), key.start_mark.line + 1
        yield from _find_lines(value, (*path, name))
