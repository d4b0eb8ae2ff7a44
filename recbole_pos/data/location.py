"""Atomic files: where they are, the types of their columns, and advice where there are none."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.values import Options, listed, shown, suggest

PARQUET = ".parquet"
KINDS = ("token", "token_seq", "float", "float_seq")  # of columns
# Options that name fields to embed beside the vectors of items, and the tables these stand in.
SIDE_FEATURES = {"item_features": "item", "user_features": "user", "event_features": "inter"}
# What pandas takes for a missing value, in every column.
MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
_ATOMIC = (".inter", ".item", ".user", ".yaml")
# Suffixes of raw tables; a folder with a file of one of _RAW is taken for a folder of tables.
_RAW = {".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".gz"}
_TABLES = _RAW | {".txt", ".dat", ".json", ".xlsx", ".zip"}


def atomic_file(folder: Path, name: str, suffix: str) -> Path:
    """Return the path of a table of a dataset: of parquet if it exists, else of text.

    Raises:
        UsageError: if both exist, or no file can have the name.
    """
    text, parquet = (folder / f"{name}.{suffix}{end}" for end in ("", PARQUET))
    try:
        if not parquet.exists():
            return text
        is_twice = text.exists()
    except OSError as error:
        raise UsageError(
            f"{shown(str(text))} cannot be read: {error.strerror}; see data_path, dataset and the "
            "options that name its files"
        ) from error
    if is_twice:
        raise UsageError(f"{text} and {parquet.name} are both there; remove or rename one of them")
    return parquet


def list_interaction_files(folder: Path, name: str, parts: Sequence[str] | None) -> list[Path]:
    """Return the files of interactions: one, or those of ``benchmark_filename``, in their order."""
    if not parts:
        return [atomic_file(folder, name, "inter")]
    files = [atomic_file(folder, name, f"{part}.inter") for part in parts]
    for file in files:
        if not file.is_file():
            raise UsageError(
                f"benchmark_filename: a part of dataset {name!r} is read from {shown(file.name)} "
                f"in the folder {folder}, and there is no such file"
            )
    return files


def dataset_name(dataset: Any) -> str | None:
    """Return the name or path of a dataset; of a :class:`recbole_pos.Dataset` its folder."""
    if dataset is None or isinstance(dataset, str):
        return dataset
    if isinstance(dataset, os.PathLike):
        return os.fspath(dataset)
    raise UsageError(
        f"dataset: expected a name or a Dataset, found {type(dataset).__name__}; a frame becomes "
        "one by recbole_pos.Dataset.from_frame(frame)"
    )


def name_and_folder(dataset: str, data_path: str | Path) -> tuple[str, str | None]:
    """Return the name of a dataset, and for a path also the folder that holds the dataset's.

    A path is one from here or from data_path, as shells complete it. The folder is None for a name,
    or a path that leads to no dataset.
    """
    if Path(dataset).name == dataset and dataset not in ("", ".", ".."):
        return dataset, None
    for place in (Path(data_path) / dataset, Path(dataset)):
        folder = place if place.name else place.resolve()
        name = folder.name
        parts = f"{glob.escape(name)}.*.inter*"  # files of benchmark_filename
        if name and (atomic_file(folder, name, "inter").exists() or any(folder.glob(parts))):
            return name, str(folder.parent)
    return dataset, None


def require_dataset(name: str, folder: Path, suffixes: list[str], config: Options) -> None:
    """Refuse a dataset that is not there, with advice; or a folder in place of one of its files.

    It was looked for in ``folder``; ``suffixes`` are those of files besides interactions.
    """
    is_name = Path(name).name == name
    parts = config["benchmark_filename"] if is_name and folder.is_dir() else None
    inter = list_interaction_files(folder, name, parts)
    if not (is_name and inter[0].exists()):
        raise UsageError(f"dataset {shown(name)} not found: {_advise(Path(name), folder)}")
    for path in (*inter, *(atomic_file(folder, name, suffix) for suffix in suffixes)):
        if path.is_dir():
            raise UsageError(f"{path} is a folder where a file is expected; remove or rename it")


def _advise(given: Path, folder: Path) -> str:
    """Return advice on what was typed for a dataset and not found in ``folder``."""
    if raw := _find_tables(given, folder):
        name = given.name.split(".")[0] or given.resolve().name
        return (
            "-d takes a dataset of atomic files. Make one first: type `recbole-pos convert "
            f"{shlex.quote(str(raw))} --name {shlex.quote(name)}` and then `-d {shlex.quote(name)}`"
        )
    if given.suffix in _ATOMIC and not given.is_dir():
        given, folder = given.parent, folder.parent
    for place in (folder, given):
        if (place / f"{place.name}.inter").is_file():
            return f"type `-d {place.name} --data_path={place.parent}`"
        if names := _list_datasets(place):
            return f"{place} holds the datasets {listed(names)}; type `-d NAME --data_path={place}`"
        for file in place.glob("*.inter"):
            return (
                f"{file} must lie in a folder of its name: move {file.stem}.* to "
                f"{place / file.stem}/ and type `-d {file.stem} --data_path={place}`"
            )
    place = given if len(given.parts) > 1 else folder  # a path was meant as one from here
    near = suggest(given.name, _list_datasets(place.parent))
    return (
        f"there is no {place / given.name}.inter{near}; set data_path (--data_path) to the folder "
        f"that holds {given.name}/. `recbole-pos convert orders.csv` makes a dataset of a csv"
    )


def _find_tables(given: Path, folder: Path) -> Path | None:
    """Return the path of a raw table, or of a folder of raw tables and no datasets; else None."""
    if given.suffix.lower() in _TABLES and not {*given.suffixes} & {*_ATOMIC}:
        return given
    for place in (given, folder) if given.name not in ("", "..") else ():
        files = [file for pattern in ("*", "*/*") for file in place.glob(pattern)]
        is_dataset = any(".inter" in file.suffixes for file in files)
        if not is_dataset and any(file.suffix.lower() in _RAW for file in files):
            return place
    return None


def _list_datasets(folder: Path) -> list[str]:
    names = {file.parent.name for file in folder.glob("*/*.inter*")}
    return sorted(name for name in names if atomic_file(folder / name, name, "inter").exists())
