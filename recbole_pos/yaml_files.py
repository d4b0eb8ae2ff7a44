"""Reads yaml files, safely where a stranger may have written them.

The files under ``properties/`` are the only place of the plugin's defaults. Of users' files,
messages say the line of an error.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.files import read_capped
from recbole_pos.values import short, shown

_PACKAGE = Path(__file__).resolve().parent
# The folders ``properties`` and ``dataset``: in the installed package as ``_properties`` and
# ``_dataset`` (setup.cfg maps them there), or beside the package in a checkout.
ROOT, DATASETS = (
    _PACKAGE / f"_{name}" if (_PACKAGE / f"_{name}").is_dir() else _PACKAGE.parent / name
    for name in ("properties", "dataset")
)

_MAX_VALUES, _MAX_DEPTH = 100_000, 100  # of a user's text


class YamlLoader(yaml.SafeLoader):
    """Reads a user's yaml text: no code, no key twice (PyYAML would drop one), no endless text.

    A text may have ``_MAX_VALUES`` values in ``_MAX_DEPTH`` levels. An alias (``*name``) counts as
    all the values that it stands for, since a few lines of aliases within aliases can fill
    gigabytes when they are printed.

    Attributes:
        depth: number of nodes that have begun and not ended.
        sizes: node that has ended -> number of values in it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node of the text as SafeLoader does, unless it is too large or too deep.

        A node is a value, list or mapping. SafeLoader calls this method for each node, and within
        that call for the nodes in it.

        Args:
            parent: node that holds this one.
            index: key or position in ``parent``.

        Raises:
            yaml.MarkedYAMLError: with the line of the node that exceeds a limit.
        """
        event = self.peek_event()  # how the node begins: a value, list, mapping or alias
        if self.depth == _MAX_DEPTH:
            raise _exceeds_limits(event)
        self.depth += 1
        node = super().compose_node(parent, index)
        assert node is not None
        self.depth -= 1

        if not isinstance(event, yaml.AliasEvent):
            children = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in children for child in pair]  # keys and values
            self.sizes[node] = 1 + sum(self.sizes[child] for child in children)
        elif node not in self.sizes:  # an alias of a node that has not ended: it holds the alias
            raise _exceeds_limits(event)

        if self.sizes[node] > _MAX_VALUES:
            raise _exceeds_limits(event)
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Return the next mapping of the text as SafeLoader does, unless it has a key twice.

        Args:
            anchor: the name that the text gives to the mapping (``&name``); None for none.

        Raises:
            yaml.MarkedYAMLError: with the line of the second key.
        """
        node = super().compose_mapping_node(anchor)  # its ``value`` has (key, value) of nodes
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):  # other keys are refused later, by SafeLoader
                if key.value in names:
                    problem = f"key {shown(key.value)} is given twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                names.add(key.value)
        return node


def _exceeds_limits(event: yaml.Event) -> yaml.MarkedYAMLError:
    """Return the error to raise for a node that is too large or too deep, with its line.

    Args:
        event: the beginning of the node.
    """
    problem = (
        f"more than {_MAX_VALUES:,} values, those of aliases counted, or {_MAX_DEPTH} levels of "
        "nesting"
    )
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


_Libyaml = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may have been built without it


class PackagedLoader(_Libyaml):  # type: ignore[misc, valid-type]
    """Reads the files of this package and of RecBole, much faster than YamlLoader, with libyaml.

    Not for users' files: its messages are shorter, it takes a key twice, and deep nesting ends the
    process.
    """


for _loader in (YamlLoader, PackagedLoader):
    # A date such as 2020-01-31 stays text, as options take it.
    _loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in _loader.yaml_implicit_resolvers.items()
    }
    # 1e-3 is a number; PyYAML, which follows YAML 1.1, takes it for text.
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def parse_scalar(text: str) -> Any:
    """Return the value that a text on the command line stands for, read as yaml.

    ``1e-3`` is a float, ``[a, b]`` a list, ``~`` None. What yaml cannot read is a str, such as the
    interval ``[5,inf)``.
    """
    # The option for a separator of fields may be one of these characters, in which yaml sees the
    # beginning of a block, list, key, comment or tag.
    if text == " " or text.strip() in ("|", ">", "-", "?", "#", "!"):
        return text
    try:
        return yaml.load(text, Loader=YamlLoader)
    except (yaml.YAMLError, ValueError):
        return text


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a yaml file, ``{}`` if the file is empty.

    Files of this package are read by a faster parser; users' files by one with better messages.

    Raises:
        UsageError: naming the line, if the file cannot be read, is not yaml or holds no mapping.
    """
    # ROOT is the folder of the package's own yaml files
    loader = PackagedLoader if Path(path).is_relative_to(ROOT) else YamlLoader
    return _read_mapping(path, "config file", loader)[0]


class Properties(NamedTuple):
    """What a yaml file below ``properties/`` says of one model, position scheme or loss.

    Attributes:
        about: under ``class`` its class as ``module:Class``; of a position scheme also what it
            changes. Empty for a loss.
        defaults: option -> default.
        rows: option -> its row of the table of options, of the options that it alone has.
    """

    about: dict[str, Any]
    defaults: dict[str, Any]
    rows: dict[str, dict[str, Any]]


def list_property_files(folder: str) -> list[str]:
    """Return the names of the models, position schemes or losses that have a yaml file, sorted.

    Args:
        folder: the folder of ``properties/`` with the files: ``model``, ``position`` or ``loss``.
    """
    return sorted(file.stem for file in (ROOT / folder).glob("*.yaml"))


@functools.cache
def read_properties(folder: str, name: str) -> Properties:
    """Return what the yaml file of a model, position scheme or loss says of it.

    Besides ``about``, each key of the file is an option that the model reads. Its value is either
    the default, as of ``rope_base``, or a description with the default in it, as of
    ``rope_scale``: a mapping with ``type``, ``default`` and so on::

        about:
          class: package.module:Class
        rope_base: 10000.0
        rope_scale:
          type: float
          default: 1.0

    Options without a description here are described in ``options.yaml``, since several models read
    them. The file is read once; nobody may change the result.

    Args:
        folder: the folder of ``properties/`` with the file: ``model``, ``position`` or ``loss``.
        name: name of the file without ``.yaml``, and of the model, scheme or loss.

    Returns:
        For the example: about ``{"class": "package.module:Class"}``; defaults ``{"rope_base":
        10000.0, "rope_scale": 1.0}``; and as rows the descriptions, ``{"rope_scale": {"type":
        "float", "default": 1.0}}``.
    """
    defaults = read_yaml(ROOT / folder / f"{name}.yaml")
    about = defaults.pop("about", {})
    descriptions = {}
    for option, value in defaults.items():
        # A mapping with a type is a description. Any other mapping is the default of its option.
        if isinstance(value, dict) and "type" in value:
            descriptions[option] = value
            defaults[option] = value["default"]
    return Properties(about, defaults, descriptions)


@functools.cache
def _read_shared_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of options that several models read, ``properties/options.yaml``, by name."""
    return read_yaml(ROOT / "options.yaml")


def read_option_rows() -> dict[str, dict[str, Any]]:
    """Return name of an option -> its row, of the whole table of options."""
    rows = dict(_read_shared_rows())
    for folder in ("model", "loss", "position"):
        for name in list_property_files(folder):
            rows |= read_properties(folder, name).rows
    return rows


def read_overall_defaults() -> dict[str, Any]:
    """Return the defaults that this package has for every model, also for RecBole's, by option.

    They stand in ``options.yaml``, in a row for each option. A row with a dot in its name, such as
    ``eval_args.target``, is about the key ``target`` within the option ``eval_args``. It is left
    out, since the default of ``eval_args`` has that key already.
    """
    return {
        name: copy.deepcopy(row["default"])
        for name, row in _read_shared_rows().items()
        if "default" in row and "." not in name
    }


def find_recbole_properties() -> Path:
    """Return the folder of RecBole's yaml files, without importing RecBole, which takes long."""
    spec = importlib.util.find_spec("recbole")
    assert spec is not None and spec.submodule_search_locations  # this package requires it
    return Path(spec.submodule_search_locations[0]) / "properties"


def read_with_lines(path: str | Path, kind: str) -> tuple[dict[Any, Any], dict[tuple, str]]:
    """Return the mapping in a yaml file, and the line at which each of its values stands.

    Args:
        path: the file.
        kind: what it is, for messages (``study``).

    Returns:
        The mapping.
        The keys and list indices that lead to a value -> its place, for messages:
            ``("runs", 0)`` -> ``study.yaml, line 7`` for the first element of the list ``runs``.

    Raises:
        UsageError: naming the line, if the file cannot be read, is not yaml or holds no mapping.
    """
    # YamlLoader reads users' files. ``root`` is the tree of the text.
    content, root = _read_mapping(path, kind, YamlLoader)
    return content, {keys: f"{path}, line {line}" for keys, line in _find_lines(root)}


def _read_mapping(
    path: str | Path, kind: str, loader_class: Any
) -> tuple[dict[Any, Any], yaml.Node | None]:
    """Return the mapping in a yaml file, and the node of the yaml text that it was made of.

    Args:
        path: the file.
        kind: what it is, for messages (``config file``).
        loader_class: YamlLoader, or PackagedLoader for trusted files.

    Returns:
        The mapping, ``{}`` if the file is empty.
        Its node, which knows the lines; None if the file is empty.

    Raises:
        UsageError: if the file cannot be read, is not yaml or holds no mapping.
    """
    # Parse the text into a tree of nodes, which know their lines, and make values of the tree.
    # read_capped refuses large files; _explain returns what is wrong, with its line.
    name = short(str(path))
    try:
        text = read_capped(path).decode()
        loader = loader_class(text)
        root = loader.get_single_node()
        content = {} if root is None else loader.construct_document(root)
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
    """Return what is wrong in a yaml file, and in which line, as the rest of a message.

    The caller puts the name of the file before it: ``, line 3: found unknown escape character``.
    For an error without a line it is only ``: found ...``.

    Args:
        error: what was raised while the file was read.
    """
    if not isinstance(error, yaml.MarkedYAMLError):
        return f": {short(' '.join(str(error).split()))}"
    problem = " ".join(str(error.problem).split())  # on one line
    # PyYAML gives two places in the file (marks), of which one may be None: that of the problem,
    # and that of its context, where the key or value with the problem begins.
    mark = error.problem_mark or error.context_mark
    # If line 2 is `epochs 300` without a colon, PyYAML notices it in line 3: the problem is marked
    # there, but the context in line 2.
    if "could not find expected" in problem:
        mark = error.context_mark or mark
    return f", line {mark.line + 1}: {short(problem)}"


def _find_lines(node: yaml.Node | None, path: tuple = ()) -> Iterator[tuple[tuple, int]]:
    """Yield the place of each value in a yaml node, at whatever depth, and its line in the file.

    For the text ``runs: [a, b]`` in line 7: ``(("runs",), 7)``, ``(("runs", 0), 7)``,
    ``(("runs", 1), 7)``.

    Args:
        node: the node; nothing is yielded for None, the node of an empty file.
        path: keys and list indices that lead to ``node`` itself.
    """
    # a mapping has pairs of nodes, for key and value; the line is that of the key
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _find_lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _find_lines(value, (*path, index))
