"""Finds and reads yaml files; those under ``properties/`` are the only place of defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_PACKAGE = Path(__file__).resolve().parent
# Installed, they lie inside the package (setup.cfg maps them there); in a checkout, beside it.
ROOT = next(
    (p for p in (_PACKAGE / "_properties", _PACKAGE.parent / "properties") if p.is_dir()),
    _PACKAGE / "_properties",
)
# The same of the descriptions of datasets.
DATASETS = next(
    (p for p in (_PACKAGE / "_dataset", _PACKAGE.parent / "dataset") if p.is_dir()),
    _PACKAGE / "_dataset",
)


class _Rules(yaml.constructor.SafeConstructor):
    """Of the package's yaml: plain values only, 1e-3 is a float, no key is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


class YamlLoader(_Rules, yaml.SafeLoader):
    """Reads text, and shows where it is not yaml."""


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


def parse_scalar(text: str, where: str) -> Any:
    """A command-line value as yaml: 1e-3 is a float, [a, b] a list, ~ None, anything else a str.

    Args:
        text: as written.
        where: of what it is the value, for messages: ``--key``, or a line of a file.

    Raises:
        UsageError: where a list, mapping or quotation is begun that is not yaml.
    """
    try:
        return yaml.load(text, Loader=YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if _INTERVALS.fullmatch(text.strip()):
            return text
        begun = next((what for mark, what in _BEGUN.items() if text.lstrip().startswith(mark)), "")
        if not begun:
            return text
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise UsageError(
            f"{where}: {shown(text)} begins like {begun}, but is none ({problem}); close what it "
            "opens, or quote all of it if it is text"
        ) from error


# Numbers between two, as in user_inter_num_interval: "[5,inf)", "(0,3];[7,9)".
_END = r"\s*[-+]?(?:inf|[\d.]+(?:e[-+]?\d+)?)\s*"
_INTERVALS = re.compile(rf"(?:[\[(]{_END},{_END}[\])];?)+", re.IGNORECASE)
# How values begin that are no plain text.
_BEGUN = {"[": "a list", "{": "a mapping", "'": "a text in quotes", '"': "a text in quotes"}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a yaml file; ``{}`` for an empty one.

    Raises:
        UsageError: if the file is missing, not yaml, or not a mapping.
    """
    loader = PackagedLoader if Path(path).is_relative_to(ROOT) else YamlLoader
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=loader)
    except OSError as error:
        raise UsageError(f"cannot read config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())  # PyYAML writes several lines
        raise UsageError(f"config file {path} is not valid yaml: {problem}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"config file {path} must hold `key: value` lines, found {type(content).__name__}"
        )
    return content


def overall_defaults() -> dict[str, Any]:
    """Defaults of the plugin for every model, its own and RecBole's."""
    return read_yaml(ROOT / "overall.yaml")
