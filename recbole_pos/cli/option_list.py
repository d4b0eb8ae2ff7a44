"""``recbole-pos run -m MODEL --help``: the options that a model reads, from the yaml files.

The sentence on an option is the comment beside its default, ``key: value  # (type) sentence``, in
the plugin's yaml as in RecBole's; what it may be says the table of options.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recbole_pos.cli.listing import show
from recbole_pos.config.defaults import plugin_defaults
from recbole_pos.config.option import IGNORED, Option
from recbole_pos.config.options import rule
from recbole_pos.config.plugins import allow, import_plugins, require_spelling, take_model
from recbole_pos.errors import UsageError
from recbole_pos.model.models import OURS, runnable
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import ROOT, overall_defaults, read_yaml

_LINE = re.compile(r"^(\w+):(.*?)#\s*(?:\(.*?\))?\s*(.*)$")


def list_options(model: str, given: Mapping[str, Any]) -> None:
    """Print the options of a model, those of its own first, with defaults and sentences.

    Args:
        model: of the plugin or of RecBole.
        given: options; of them count ``position``, schemes instead of its own, and ``plugins``.

    Raises:
        UsageError: for an unknown model or scheme.
    """
    allow(given.get("plugins"))
    take_model(model, import_plugins(given.get("plugins"), "--plugins", lambda: False))
    if model not in runnable():
        require_spelling(given, "configuration")
        raise UsageError(f"unknown model {shown(model)}{suggest(model, runnable())}")
    seen: set[str] = set()
    for title, options, files in _sources(model, given.get("position")):
        told = {key: text for file in files for key, text in _sentences(file).items()}
        new = [key for key in options if key not in seen and rule(key).role != IGNORED]
        seen.update(new)
        if new:
            print(f"\n{title}")
            rows = [(k, _plain(options[k]), allowed(rule(k)), told.get(k, "")) for k in new]
            show(("option", "default", "may be", "what it is for"), rows)


def _sources(model: str, position: Any) -> list[tuple[str, dict[str, Any], list[Path]]]:
    """Titles, options and the files with their sentences; what wins comes first."""
    theirs = _recboles()
    general, data = theirs / "overall.yaml", theirs / "dataset" / "sample.yaml"
    ours = overall_defaults()
    found = [
        ("options of the plugin", ours, [ROOT / "overall.yaml"]),
        ("options of RecBole: training and evaluation", read_yaml(general), [general]),
        ("options of RecBole: data", read_yaml(data), [data]),
    ]
    own = theirs / "model" / f"{model}.yaml"
    if model not in OURS:
        options = read_yaml(own) if own.is_file() else {}
        return [(f"options of {model}", options, [own]), *found]
    options = plugin_defaults(model, position)
    own = ROOT / "model" / f"{model}.yaml"
    kept = read_yaml(own) if own.is_file() else {}
    options = {**kept, **{k: v for k, v in options.items() if k not in ours}}
    files = [*(ROOT / "position").glob("*.yaml"), *(ROOT / "loss").glob("*.yaml")]
    files += [ROOT / "base.yaml", own]
    return [(f"options of {model} and its position schemes", options, files), *found]


def _recboles() -> Path:
    """RecBole's yaml files; where they are is known without importing it."""
    spec = importlib.util.find_spec("recbole")
    assert spec is not None and spec.submodule_search_locations  # this package requires it
    return Path(spec.submodule_search_locations[0]) / "properties"


def _sentences(file: Path) -> dict[str, str]:
    """What the comments of a yaml file say of its keys."""
    if not file.is_file():
        return {}
    lines = map(_LINE.match, file.read_text(encoding="utf-8").splitlines())
    return {line[1]: line[3].strip() for line in lines if line}


def _plain(default: Any) -> str:
    if default is None:
        return "-"
    if isinstance(default, dict):
        return ", ".join(f"{key}: {_plain(value)}" for key, value in default.items())
    return f"[{', '.join(map(str, default))}]" if isinstance(default, list) else str(default)


def allowed(option: Option) -> str:
    """What an option may be, in a few characters."""
    if option.choices:
        return ", ".join(option.choices)
    if option.low is None or option.high is None:
        return ""
    low, high = (_number(value) for value in (option.low, option.high))
    return f"{low} to {high} {option.unit}".strip()


def _number(value: float) -> str:
    if value in (0, 1) or 1e-3 < abs(value) < 1e6:
        return f"{value:,}"
    return "above 0" if 0 < value < 1e-300 else f"{value:g}"
