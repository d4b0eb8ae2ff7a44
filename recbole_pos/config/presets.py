"""Config files for several models: options for all, and options for some under ``for``.

    hidden_size: 50
    for:
      PosSASRec, SASRec: {n_heads: 1}        # if one of these models runs
      fparec: {positional_rank: 40}          # if position names this scheme

So a paper's baselines run with the settings of its own model, and no key is ever left unread: what
stands outside must be known to every model that the file is for, what stands under a name to that
model, or to those that take that scheme.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from recbole_pos.config.defaults import own_defaults
from recbole_pos.errors import UsageError
from recbole_pos.model.models import list_runnable
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import ROOT

FOR = "for"
# Keys that decide which parts a run takes, and so stand outside of them.
_OUTSIDE = {"model", "dataset", "plugins", FOR}


def find_config_file(name: str | Path) -> Path:
    """Return the path of a config file or, if none exists, of a preset (fparec/ml-1m.yaml).

    If there is neither, a UsageError names presets of a similar name.
    """
    folder = ROOT / "presets"
    if os.path.exists(name):  # False for a name that no file can have, where Path raises
        return Path(name)
    if os.path.isfile(folder / name):
        return folder / name
    presets = [str(file.relative_to(folder)) for file in sorted(folder.glob("*/*.yaml"))]
    if hint := suggest(str(name), presets):
        raise UsageError(f"there is no config file and no preset {name}{hint}")
    return Path(name)  # which the reader refuses


def select_parts(
    content: dict[str, Any], names: Collection[str], file: str | Path
) -> list[tuple[str, dict[str, Any]]]:
    """Return the parts of a config file that a run takes: the shared one, then those under ``for``.

    ``names`` are the model that runs and its schemes. A part is (location, options), and the
    location is for messages.
    """
    parts = [(str(file), {key: value for key, value in content.items() if key != FOR})]
    title_by_option: dict[str, str] = {}
    for title, title_names, options in _split_by_title(content, file):
        location = f"{file}, for {title}"
        if not isinstance(options, dict):
            raise UsageError(f"{location}: expected options, found {shown(options)}")
        misplaced = _OUTSIDE & options.keys()
        if "position" in options and not set(title_names) <= set(list_runnable()):
            misplaced.add("position")  # under the name of a scheme
        if misplaced:
            raise UsageError(f"{location}: {', '.join(sorted(misplaced))} cannot stand here")
        if set(title_names) & set(names):
            for key in options.keys() & title_by_option.keys():
                raise UsageError(f"{location}: {key} is also given for {title_by_option[key]}")
            title_by_option |= dict.fromkeys(options, title)
            parts.append((location, options))
    return parts


def find_parts_by_scheme(content: dict[str, Any], model: str, file: str | Path) -> list[str]:
    """Return the parts of a config file for schemes and not for the model, as "FILE, for TITLE"."""
    return [
        f"{file}, for {title}"
        for title, names, _ in _split_by_title(content, file)
        if model not in names and set(names) & set(SCHEMES)
    ]


def list_positions(position: Any, model: str | None) -> list[str]:
    """Return the schemes that ``position`` names or, if it is None, the model's own schemes."""
    if position is None and model is not None:
        position = own_defaults(model).get("position")
    if isinstance(position, str):
        return [position]
    if not isinstance(position, (list, tuple)):
        return []
    return [name for name in position if isinstance(name, str)]


def _split_by_title(content: dict[str, Any], file: str | Path) -> list[tuple[str, list[str], Any]]:
    """Return (title, models and schemes in it, options) of each part under ``for``."""
    by_title = content.get(FOR) or {}
    if not isinstance(by_title, dict):
        raise UsageError(
            f"{file}: {FOR}: expected options under names of models or schemes, found "
            f"{shown(by_title)}"
        )
    allowed = [*SCHEMES, *list_runnable()]
    parts = []
    for title, options in by_title.items():
        names = [name.strip() for name in str(title).split(",")]
        for name in names:
            if name not in allowed:
                raise UsageError(
                    f"{file}, for {title}: {shown(name)} is neither a model nor a scheme"
                    f"{suggest(name, allowed)}; see `recbole-pos models` and `recbole-pos schemes`"
                )
        parts.append((title, names, {} if options is None else options))
    return parts
