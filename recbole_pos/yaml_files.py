"""Reads yaml files; those under ``properties/`` are the only place of defaults."""

from __future__ import annotations

import copy
import functools
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


class YamlLoader(yaml.SafeLoader):
    """Reads a user's text; refuses a key given twice, deep nesting, and aliases without end.

    An alias counts as all that it stands for: a few lines of aliases within aliases are gigabytes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0  # number of nodes that are begun and not ended
        self.sizes: dict[yaml.Node, int] = {}  # node that has ended -> number of values in it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node of the text, in which SafeLoader would take any size and depth."""
        event = self.peek_event()
        self.depth += 1
        node = super().compose_node(parent, index) if self.depth <= _MAX_DEPTH else None
        self.depth -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self.sizes[node] = 1 + sum(self.sizes[child] for child in _list_children(node))
        # an alias within its own anchor stands for a node that has not ended
        if self.sizes.get(node, _MAX_VALUES + 1) > _MAX_VALUES:
            _refuse(
                f"more than {_MAX_VALUES:,} values, those of aliases counted, or {_MAX_DEPTH} "
                "levels of nesting",
                event,
            )
        return node


def _list_children(node: yaml.Node) -> list[yaml.Node]:
    """Return the nodes directly within a node; refuse the first key of a mapping given twice."""
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if not isinstance(node, yaml.MappingNode):
        return []
    names = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in names:
            _refuse(f"key {shown(key.value)} is given twice", key)
        names.add(key.value if isinstance(key, yaml.ScalarNode) else None)
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
    # a date stays text, as options take it
    _loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in _loader.yaml_implicit_resolvers.items()
    }
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )
_HALF_OPEN = re.compile(r"\[[^\[\]{}]*\)")  # an interval of numbers: "[5,inf)", "[0,3);[7,9]"


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
        if not bare.startswith(("[", "{", "'", '"')) or _HALF_OPEN.match(bare):
            return text
        problem = short(getattr(error, "problem", None) or "it cannot be read")
        raise UsageError(
            f"{location}: {shown(text)} is no list, mapping or quoted text ({problem}); close what "
            "it opens, or quote all of it if it is text"
        ) from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a yaml file, ``{}`` if it is empty; raise a UsageError for another."""
    loader = PackagedLoader if Path(path).is_relative_to(ROOT) else YamlLoader
    return _read_mapping(path, "config file", loader)[0]


@functools.cache
def read_option_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of the table of options by name; nobody may change them."""
    return read_yaml(ROOT / "options.yaml")


def read_overall_defaults() -> dict[str, Any]:
    """Return the plugin's defaults for every model, RecBole's models included."""
    return {
        name: copy.deepcopy(row["default"])
        for name, row in read_option_rows().items()
        if "default" in row and "." not in name
    }


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
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError) as error:
        raise UsageError(f"{name}{_explain(error)} (not valid yaml)") from error
    if content is not None and not isinstance(content, dict):
        raise UsageError(
            f"{kind} {name} must hold `key: value` lines, with a space after the colon; found "
            f"{shown(content)}"
        )
    return content or {}, root


def _explain(error: Exception) -> str:
    """Return the line of an error of yaml and what is wrong there, to follow a file's name."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f": {short(' '.join(str(error).split()))}"
    problem = " ".join(str(error.problem).split())
    mark = error.problem_mark or error.context_mark
    if "could not find expected" in problem:  # it is found missing where the next line begins
        mark = error.context_mark or mark
    return f", line {mark.line + 1}: {short(problem)}"


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
