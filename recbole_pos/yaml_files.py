"""Reads yaml files; those under ``properties/`` are the only place of defaults."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.files import read_capped
from recbole_pos.values import short, shown

_PACKAGE = Path(__file__).resolve().parent
# in the installed package (setup.cfg maps them there), or beside it in a checkout
ROOT, DATASETS = (
    _PACKAGE / f"_{name}" if (_PACKAGE / f"_{name}").is_dir() else _PACKAGE.parent / name
    for name in ("properties", "dataset")
)

_MAX_VALUES, _MAX_DEPTH = 100_000, 100  # of a file
_NO_SPACE = re.compile(r"[ -]*[\w.]+:[^\s/:]")  # the start of a line such as epochs:1
# What constructors of yaml raise for a value that is not of its type, as in ``!!bool x``.
_WRONG_VALUE = (ValueError, LookupError, AttributeError, OverflowError)


class YamlLoader(yaml.SafeLoader):
    """Reads a user's text; refuses a key given twice, deep nesting, and aliases without end.

    An alias counts as all that it stands for: a few lines of aliases within aliases are gigabytes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0  # number of nodes that are begun and not ended
        self.sizes: dict[yaml.Node, int] = {}  # node -> number of values in it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node of the text, in which SafeLoader would take any size and depth."""
        event = self.peek_event()
        if self.depth == _MAX_DEPTH:
            _refuse(f"values are nested more than {_MAX_DEPTH} deep", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self.sizes:
                _refuse("an alias stands within its own anchor", event)
        else:
            self.sizes[node] = 1 + sum(self.sizes[child] for child in _list_children(node))
        if self.sizes[node] > _MAX_VALUES:
            _refuse(f"there are more than {_MAX_VALUES:,} values, those of aliases counted", event)
        return node


def _list_children(node: yaml.Node | None) -> list[yaml.Node]:
    """Return the nodes directly within a node; refuse the first key of a mapping given twice."""
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if not isinstance(node, yaml.MappingNode):
        return []
    names = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in names:
                _refuse(f"key {shown(key.value)} is given twice", key)
            names.add(key.value)
    return [child for pair in node.value for child in pair]


def _refuse(problem: str, place: yaml.Node | yaml.Event) -> NoReturn:
    """Raise an error with the line of a node or event."""
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


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
    except (yaml.YAMLError, *_WRONG_VALUE) as error:
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
        text = read_capped(path).decode()
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
    except (yaml.YAMLError, *_WRONG_VALUE) as error:  # UnicodeDecodeError is a ValueError
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
