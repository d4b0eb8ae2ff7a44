"""Atomic files: where they are, the types of their columns, and advice where there are none."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.files import finish_replacement
from recbole_pos.values import listed, shown, suggest

PARQUET = ".parquet"
KINDS = ("token", "token_seq", "float", "float_seq")  # of columns
# Options that name fields to embed beside the vectors of items, and the tables these stand in.
SIDE_FEATURES = {"item_features": "item", "user_features": "user", "event_features": "inter"}
# What pandas takes for a missing value, in every column.
MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
# What no name of a user or item may match: line ends, NUL, and the name of RecBole's padding.
UNWRITABLE = "[\r\n\x00]|^\\[PAD\\]$"
_ATOMIC = (".inter", ".item", ".user", ".yaml")  # suffixes of the files of a dataset
_RAW = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".gz", ".txt", ".dat", ".xlsx")


def find_atomic_file(folder: Path, name: str, suffix: str) -> Path:
    """Return the path of a table of a dataset: the parquet file if it exists, else the text file.

    Raises:
        UsageError: if both exist.
    """
    text, parquet = (folder / f"{name}.{suffix}{end}" for end in ("", PARQUET))
    if not parquet.exists():
        return text
    if text.exists():
        raise UsageError(f"{text} and {parquet.name} are both there; remove or rename one of them")
    return parquet


def list_interaction_files(folder: Path, name: str, parts: Sequence[str] | None) -> list[Path]:
    """Return the files of interactions: one, or those of ``benchmark_filename`` in their order."""
    if not parts:
        return [find_atomic_file(folder, name, "inter")]
    files = [find_atomic_file(folder, name, f"{part}.inter") for part in parts]
    for file in files:
        if not file.is_file():
            raise UsageError(
                f"benchmark_filename: a part of dataset {name!r} is read from "
                f"{shown(file.name)} in the folder {folder}, and there is no such file"
            )
    return files


def read_dataset_name(dataset: Any) -> str | None:
    """Return the name or path of a dataset; for a :class:`recbole_pos.Dataset` its folder."""
    if dataset is None or isinstance(dataset, str):
        return dataset
    if isinstance(dataset, os.PathLike):
        return os.fspath(dataset)
    raise UsageError(
        f"dataset: expected a name or a Dataset, found {type(dataset).__name__}; a frame becomes "
        "one by recbole_pos.Dataset.from_frame(frame)"
    )


def locate_dataset(dataset: str, data_path: str | Path) -> tuple[str, str | None]:
    """Return the name of a dataset, and the folder that holds it if ``dataset`` is a path to it.

    The path starts in ``data_path`` or in the working directory. For a name, or a path without a
    dataset, the folder is None. Whoever reads a dataset locates it first, so that the replacement
    of its folder is finished here if a killed process has begun it.
    """
    for path in (Path(data_path) / dataset, Path(dataset)):
        finish_replacement(path)
    if Path(dataset).name == dataset and dataset not in ("", ".", ".."):
        return dataset, None
    for path in (Path(data_path) / dataset, Path(dataset)):
        folder = path if path.name else path.resolve()
        name = folder.name
        part_files = f"{glob.escape(name)}.*.inter*"  # of benchmark_filename
        if name and (
            find_atomic_file(folder, name, "inter").exists() or any(folder.glob(part_files))
        ):
            return name, str(folder.parent)
    return dataset, None


def require_dataset(name: str, folder: Path, parts: Sequence[str] | None) -> None:
    """Refuse a dataset that is not in ``folder``, with advice.

    ``parts`` are the names in ``benchmark_filename``.
    """
    is_name = Path(name).name == name
    parts = parts if is_name and folder.is_dir() else None
    if not (is_name and list_interaction_files(folder, name, parts)[0].exists()):
        raise UsageError(f"dataset {shown(name)} not found: {_advise(Path(name), folder)}")


def _advise(typed: Path, folder: Path) -> str:
    """Return advice on ``typed``, which named no dataset in ``folder``."""
    if typed.suffix.lower() in _RAW:
        name = shlex.quote(typed.name.split(".")[0])
        return (
            "-d takes a dataset of atomic files. Make one first: type `recbole-pos convert "
            f"{shlex.quote(str(typed))} --name {name}` and then `-d {name}`"
        )
    if typed.suffix in _ATOMIC:
        return f"type `-d {typed.parent.name} --data_path={typed.parent.parent}`"
    if names := _list_datasets(typed):
        return f"{typed} holds the datasets {listed(names)}; type `-d NAME --data_path={typed}`"
    path = typed if len(typed.parts) > 1 else folder  # a path starts in the working directory
    hint = suggest(typed.name, _list_datasets(path.parent))
    return (
        f"there is no {path / typed.name}.inter{hint}; set data_path (--data_path) to the folder "
        f"that holds {typed.name}/. `recbole-pos convert orders.csv` makes a dataset of a csv"
    )


def _list_datasets(folder: Path) -> list[str]:
    """Return the names of the datasets whose folders lie in ``folder``, sorted."""
    files = folder.glob("*/*.inter*")
    pairs = {(file.parent.name, file.name.removesuffix(PARQUET)) for file in files}
    return sorted(name for name, file_name in pairs if file_name == f"{name}.inter")
