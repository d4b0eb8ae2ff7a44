"""Atomic files: where they are, the types of their columns, and advice where there are none."""

from __future__ import annotations

import glob
import os
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


def find_atomic_file(folder: Path, name: str, suffix: str) -> Path:
    """Return the path of a table of a dataset: the parquet file if it exists, else the text file.

    The text file need not exist.

    Args:
        folder: folder of the dataset.
        name: name of the dataset.
        suffix: which table: inter, user, item, or such as train.inter.

    Raises:
        UsageError: if both exist.
    """
    # Both names, such as shop.item and shop.item.parquet (PARQUET is the ending ".parquet").
    text, parquet = (folder / f"{name}.{suffix}{end}" for end in ("", PARQUET))
    if not parquet.exists():
        return text
    if text.exists():
        raise UsageError(f"{text} and {parquet.name} are both there; remove or rename one of them")
    return parquet


def list_interaction_files(folder: Path, name: str, parts: Sequence[str] | None) -> list[Path]:
    """Return the files of a dataset's interactions.

    Args:
        folder: folder of the dataset.
        name: name of the dataset.
        parts: names of the parts of the split that have files of their own, such as [train, test]
            (the option ``benchmark_filename``); None or empty for one file, which need not exist.

    Raises:
        UsageError: if the file of a part does not exist.
    """
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
    """Return a dataset as users name it: a name, or the path of its folder.

    Args:
        dataset: a name, a path or a :class:`recbole_pos.Dataset`, which stands for its folder as
            a path does (``os.PathLike``); or None, which is returned.

    Raises:
        UsageError: if it is something else, such as a frame.
    """
    if dataset is None or isinstance(dataset, str):
        return dataset
    if isinstance(dataset, os.PathLike):
        return os.fspath(dataset)
    raise UsageError(
        f"dataset: expected a name or a Dataset, found {type(dataset).__name__}; a frame becomes "
        "one by recbole_pos.Dataset.from_frame(frame)"
    )


def locate_dataset(dataset: str, data_path: str | Path) -> tuple[str, str | None]:
    """Divide what a user gives as a dataset into its name and the folder that holds its folder.

    A name such as shop is returned as it is, with None. A path such as logs/shop gives ("shop",
    "logs") if it has the dataset shop, with the file logs/shop/shop.inter.

    If a process was killed while it replaced the folder of this dataset by a new one, the
    replacement is finished first: whoever reads a dataset begins here.

    Args:
        dataset: a name, or a path, which starts in ``data_path`` or in the working directory.
        data_path: the folder in which datasets are looked for by name.

    Returns:
        name: name of the dataset; ``dataset`` as it is if the path has no dataset.
        folder: the folder that holds it; None for a name, or if the path has no dataset.
    """
    candidates = (Path(data_path) / dataset, Path(dataset))
    for path in candidates:
        finish_replacement(path)
    is_name = Path(dataset).name == dataset and dataset not in ("", ".", "..")
    if is_name:
        return dataset, None

    for path in candidates:
        folder = path if path.name else path.resolve()  # the path . has no name by itself
        name = folder.name
        # The interactions are in one file, or in one for each part (``benchmark_filename``).
        has_file = find_atomic_file(folder, name, "inter").exists()
        if name and (has_file or any(folder.glob(f"{glob.escape(name)}.*.inter*"))):
            return name, str(folder.parent)
    return dataset, None


def require_dataset(name: str, folder: Path, parts: Sequence[str] | None) -> None:
    """Raise a UsageError, with advice, if the files of a dataset's interactions do not exist.

    Args:
        name: what :func:`locate_dataset` returned: the name of a dataset, such as shop; or the path
            that the user gave, such as logs/shop, if it has found no dataset there.
        folder: folder of the dataset of this name; not read for a path.
        parts: names of the parts of the split that have files of their own
            (``benchmark_filename``); None for one file.
    """
    is_path = Path(name).name != name
    if is_path:
        raise _explain_missing(name, Path(name))
    # ``list_interaction_files`` raises an error if a part has no file; a single file may be missing
    if not folder.is_dir() or not list_interaction_files(folder, name, parts)[0].exists():
        raise _explain_missing(name, folder)


def _explain_missing(dataset: str, folder: Path) -> UsageError:
    """Return an error for a dataset that does not exist, which names datasets that do.

    Args:
        dataset: what the user gave as the dataset: a name or a path.
        folder: the folder in which the dataset should be.
    """
    # The datasets in the folder that the user gave, if it is one that holds datasets; else those
    # beside the folder in which this one should be.
    found = _list_datasets(Path(dataset)) or _list_datasets(folder.parent)
    return UsageError(
        f"dataset {shown(dataset)} not found: there is no {folder / folder.name}.inter"
        f"{suggest(folder.name, found)}; -d takes the name or the folder of a dataset, and "
        f"--data_path the folder that holds its folder (found there: {listed(found) or 'none'})."
        " `recbole-pos convert FILE --name NAME` makes a dataset of a csv, json or parquet file"
    )


def _list_datasets(folder: Path) -> list[str]:
    """Return the names of the datasets whose folders lie in ``folder``, sorted."""
    files = folder.glob("*/*.inter*")
    pairs = {(file.parent.name, file.name.removesuffix(PARQUET)) for file in files}
    return sorted(name for name, file_name in pairs if file_name == f"{name}.inter")
