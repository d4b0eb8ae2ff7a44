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
    """A public dataset.

    Attributes:
        papers: papers that report metrics on it.
        source: address of the page to download it from.
        files: names of the raw files, as the source has them.
        recipe: function of ``recipes.py`` that reads the files.
        counts: users, items and events after the filters of its yaml, where they are known.
        md5: checksums of raw files by name, where the source publishes them.
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
        """Path of the yaml file that describes the dataset and that runs on it read."""
        return DATASETS / self.name / f"{self.name}.yaml"


def public_logs() -> dict[str, PublicLog]:
    """Return all public datasets by name, from the ``public`` part of their yaml files."""
    logs = {}
    for file in sorted(DATASETS.glob("*/*.yaml")):
        entry: dict[str, Any] | None = read_yaml(file).get("public")
        if entry:
            logs[file.stem] = PublicLog(file.stem, **entry)
    return logs


def public_log(name: str) -> PublicLog:
    """Return the public dataset of a name."""
    logs = public_logs()
    if name not in logs:
        raise UsageError(
            f"data: no public log {shown(name)}{suggest(name, logs)}; there are {', '.join(logs)}"
        )
    return logs[name]
