"""Descriptions of public datasets, such as where to get them and how many users they have.

Each stands under ``public`` in ``dataset/<name>/<name>.yaml``, beside the options of runs on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import DATASETS, read_yaml


@dataclass(frozen=True)
class PublicDataset:
    """A public dataset, as its yaml file describes it.

    Attributes:
        name: its name here, which is that of its folder.
        title: its full name.
        papers: papers that report metrics on it.
        source: address of the page to download it from.
        licence: conditions of its use.
        files: names of the raw files, as the source has them.
        recipe: name in ``recipes.RECIPES`` of the function that reads the files.
        counts: known numbers of users, items and interactions after the filters of its yaml.
        note: what else to know of it.
    """

    name: str
    title: str
    papers: list[str]
    source: str
    licence: str
    files: list[str]
    recipe: str
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def yaml(self) -> Path:
        """Path of the yaml file with the description and with the options of runs on it."""
        return DATASETS / self.name / f"{self.name}.yaml"


def read_public_datasets() -> dict[str, PublicDataset]:
    """Return name -> description of each public dataset that the package can build.

    They are the yaml files in the package's folder ``dataset/`` (``DATASETS``), one a dataset and
    named as it, that have a key ``public``.
    """
    datasets = {}
    for file in sorted(DATASETS.glob("*/*.yaml")):
        description: dict[str, Any] | None = read_yaml(file).get("public")
        if description:
            datasets[file.stem] = PublicDataset(file.stem, **description)
    return datasets


def find_public_dataset(name: str) -> PublicDataset:
    """Return the description of a public dataset: its source, its raw files, its counts and so on.

    Args:
        name: name of the dataset here, such as ``ml-1m``.

    Raises:
        UsageError: if there is none; the message suggests similar names, and lists all.
    """
    datasets = read_public_datasets()
    if name not in datasets:
        raise UsageError(
            f"data: no public log {shown(name)}{suggest(name, datasets)}; there are "
            f"{', '.join(datasets)}"
        )
    return datasets[name]
