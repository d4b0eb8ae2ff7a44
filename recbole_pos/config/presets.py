"""Config files for several models: options that all share, and options of some under ``for``.

    hidden_size: 50
    for:
      PosSASRec, SASRec: {n_heads: 1}        # if one of these models runs
      fparec: {positional_rank: 40}          # if position names this scheme

So a paper's baselines run with the settings of its own model, and no key is ever left unread: what
stands outside must be known to every model that the file is for, what stands under a name to that
model, or to those that take that scheme.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from recbole_pos.config.defaults import own_defaults
from recbole_pos.errors import UsageError
from recbole_pos.model.models import runnable
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import ROOT

FOR = "for"
# What decides which parts a run takes stands outside of them.
OUTSIDE = {"model", "dataset", "plugins", FOR}


def preset_or_file(name: str | Path) -> Path:
    """A config file as given or, if none exists, the preset of that name (fparec/ml-1m.yaml).

    Raises:
        UsageError: if there is neither, but a preset of almost that name.
    """
    presets = ROOT / "presets"
    if Path(name).exists():
        return Path(name)
    if (presets / name).is_file():
        return presets / name
    known = [str(file.relative_to(presets)) for file in sorted(presets.glob("*/*.yaml"))]
    if hint := suggest(str(name), known):
        raise UsageError(f"there is no config file and no preset {name}{hint}")
    return Path(name)


def parts_for(
    content: dict[str, Any], names: Collection[str], file: str | Path
) -> list[tuple[str, dict[str, Any]]]:
    """Return what of a config file a run takes, and where it stands: the shared part, then its own.

    Args:
        content: content of the file.
        names: the model that runs, and its position schemes.
        file: for messages.

    Raises:
        UsageError: for a name under ``for`` that is neither a model nor a scheme, anything but
            options under it, or an option that two of its parts give.
    """
    parts = [(str(file), {key: value for key, value in content.items() if key != FOR})]
    under = content.get(FOR)
    if not isinstance(under, (dict, type(None))):
        raise UsageError(
            f"{file}: {FOR}: expected options under names of models or schemes, found "
            f"{shown(under)}"
        )
    taken: dict[str, str] = {}
    for title, options in (under or {}).items():
        where = f"{file}, for {title}"
        listed = _names(title, where)
        if not isinstance(options, (dict, type(None))):
            raise UsageError(f"{where}: expected options, found {shown(options)}")
        options = options or {}
        outside = OUTSIDE if set(listed) <= set(runnable()) else {*OUTSIDE, "position"}
        if wrong := outside & set(options):
            raise UsageError(f"{where}: {', '.join(sorted(wrong))} cannot stand here")
        if not set(listed) & set(names):
            continue
        for key in options:
            if key in taken:
                raise UsageError(f"{where}: {key} is also given for {taken[key]}")
            taken[key] = title
        parts.append((where, options))
    return parts


def parts_by_scheme(content: dict[str, Any], model: str, file: str | Path) -> list[str]:
    """Where options of a config file stand that a model takes with some schemes alone."""
    titles = {title: _names(title, f"{file}, for {title}") for title in content.get(FOR) or {}}
    return [
        f"{file}, for {title}"
        for title, names in titles.items()
        if model not in names and set(names) & set(SCHEMES)
    ]


def positions(given: Any, model: str | None) -> list[str]:
    """The schemes that ``position`` names; those of the model's own yaml where it is not given."""
    if given is None and model is not None:
        given = own_defaults(model).get("position")
    given = [given] if isinstance(given, str) else given
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


def _names(title: Any, where: str) -> list[str]:
    """``A, B`` as names."""
    names = [name.strip() for name in str(title).split(",")]
    known = [*SCHEMES, *runnable()]
    for name in names:
        if name not in known:
            raise UsageError(
                f"{where}: {shown(name)} is neither a model nor a scheme{suggest(name, known)}; "
                "see `recbole-pos models` and `recbole-pos schemes`"
            )
    return names
