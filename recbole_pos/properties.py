"""Finds and reads the yaml files under ``properties/``: the only place where defaults stand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from recbole_pos.errors import UsageError
from recbole_pos.registry import on_our_base
from recbole_pos.values import shown, suggest

_PACKAGE = Path(__file__).resolve().parent
# Installed, they lie inside the package (setup.cfg maps them there); in a checkout, beside it.
ROOT = next(
    (p for p in (_PACKAGE / "_properties", _PACKAGE.parent / "properties") if p.is_dir()),
    _PACKAGE / "_properties",
)


class YamlLoader(yaml.SafeLoader):
    """Safe yaml (plain values only) that reads 1e-3 as a float and takes no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


YamlLoader.add_implicit_resolver(
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
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=YamlLoader)
    except OSError as error:
        raise UsageError(f"cannot read config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"config file {path} is not valid yaml: {error}") from error
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


def plugin_defaults(
    model: str, position: str | Iterable[str] | None = None, loss_type: str | None = None
) -> dict[str, Any]:
    """Defaults of one plugin model: overall, its position schemes and loss, then its own yaml.

    A model whose yaml has no ``position`` takes no schemes.

    Args:
        model: name in the registry.
        position: scheme names that replace the model's own, or None.
        loss_type: replaces the model's own, or None.
    """
    own = read_yaml(ROOT / "model" / f"{model}.yaml")
    schemes: dict[str, Any] = {}
    if "position" in own:
        for name in scheme_names(own["position"] if position is None else position):
            schemes.update(read_yaml(ROOT / "position" / f"{name}.yaml"))
    sampled = on_our_base(model) and (loss_type or own["loss_type"]) == "SCE"
    loss = read_yaml(ROOT / "loss" / "SCE.yaml") if sampled else {}
    return {**overall_defaults(), **schemes, **loss, **own}


def with_time_field(config: dict[str, Any]) -> dict[str, Any] | None:
    """``load_col``, or where it is RecBole's default (user and item), also with the time field."""
    load_col = config.get("load_col")
    if load_col != {"inter": ["user_id", "item_id"]}:
        return load_col
    fields = ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")
    return {"inter": [config[field] for field in fields]}


def scheme_names(position: str | Iterable[str], key: str = "position") -> list[str]:
    """The value of the option ``key`` as a list of registered scheme names.

    Raises:
        UsageError: for an unknown name, or anything but names.
    """
    from recbole_pos.registry import SCHEMES

    names = [position] if isinstance(position, str) else position
    if not isinstance(names, (list, tuple)):
        raise UsageError(f"{key}: expected a list such as [rope, kernel], found {shown(position)}")
    for name in names:
        if not isinstance(name, str) or name not in SCHEMES:
            bracket = isinstance(name, str) and any(mark in name for mark in "[],")
            hint = "; a list is written [rope, kernel], with both brackets" if bracket else ""
            raise UsageError(
                f"{key}: unknown scheme {shown(name)}{hint or suggest(str(name), SCHEMES)}; "
                f"schemes are {', '.join(SCHEMES)}"
            )
        if names.count(name) > 1:
            raise UsageError(f"{key}: {name!r} is given twice")
    return list(names)
