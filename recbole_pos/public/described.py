"""Descriptions of public logs: the ``public`` part of ``dataset/<name>/<name>.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import DATASETS, read_yaml


@dataclass(frozen=True)
class PublicLog:
    """A log that anyone can get.

    Attributes:
        name: name of the dataset.
        title: what it is.
        papers: that report figures on it.
        source: address of the page that has it.
        licence: in short.
        files: the raw files, as the source names them.
        recipe: how they are read, see ``recipes.py``.
        counts: users, items and events after the filters of its yaml, where they are known.
        md5: of raw files whose source publishes it, by name.
        note: what else to know.
    """

    name: str
    title: str
    papers: list[str]
    source: str
    licence: str
    files: list[str]
    recipe: str
    counts: dict[str, int] = field(default_factory=dict)
    md5: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def yaml(self) -> Path:
        """The file that describes it, and that a run on it reads."""
        return DATASETS / self.name / f"{self.name}.yaml"


def public_logs() -> dict[str, PublicLog]:
    """Return all of them, by name."""
    found = {}
    for file in sorted(DATASETS.glob("*/*.yaml")):
        entry: dict[str, Any] | None = read_yaml(file).get("public")
        if entry:
            found[file.stem] = PublicLog(file.stem, **entry)
    return found


def public_log(name: str) -> PublicLog:
    """Return one of them.

    Raises:
        UsageError: if there is not one of this name.
    """
    known = public_logs()
    if name not in known:
        raise UsageError(
            f"data: no public log {shown(name)}{suggest(name, known)}; there are {', '.join(known)}"
        )
    return known[name]
