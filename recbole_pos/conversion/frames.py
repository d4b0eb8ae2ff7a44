"""Datasets made of DataFrames: pandas, polars, pyarrow, relations of DuckDB, by Arrow."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from recbole_pos.conversion.convert import convert
from recbole_pos.conversion.writing import read_counts
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.files import TemporaryFolder
from recbole_pos.values import shown

_NAME = "data"


class Dataset(os.PathLike[str]):
    """A dataset to train on: a folder with its files, named by its path or made of frames.

    It stands wherever the name of a dataset does: in :func:`fit`, :func:`compare`, :func:`tune`,
    :func:`run`.

    Examples:
        >>> import pandas, recbole_pos
        >>> frame = pandas.DataFrame(
        ...     {"customer": ["ann", "bob", "ann"], "product": ["tent", "tent", "stove"]}
        ... )
        >>> frame["bought_at"] = pandas.to_datetime(["2024-03-02", "2024-03-04", "2024-03-05"])
        >>> data = recbole_pos.Dataset.from_frame(frame)
        >>> data.counts["users"], data.counts["items"], data.counts["events"]
        (2, 2, 3)

    Args:
        path: the folder, such as ``dataset/ml-100k``.

    Attributes:
        path: the folder.
        report: what became of every column and row, if the dataset was made here; else None.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or os.path.isfile(path):
            raise UsageError(
                f"path: found {shown(path)}, expected a folder; recbole_pos.convert makes one of a "
                "file, and Dataset.from_frame of a frame"
            )
        self.path = Path(path)
        self.report: Any = None
        self._source: tuple[Any, dict[str, Any]] | None = None  # frame and arguments
        self.home: TemporaryFolder | None = None  # temporary folder, removed with this object

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        path: str | os.PathLike[str] | None = None,
        **given: Any,
    ) -> Dataset:
        """Make a dataset of a frame, as :func:`convert` makes it of a file of the same columns.

        A frame is a pandas or polars DataFrame, a pyarrow Table, a relation of DuckDB, or any
        object with ``__arrow_c_stream__``. Rows are numbered from 0 in what is reported.

        Args:
            frame: interactions, one in each row.
            path: the folder to make, whose name is that of the dataset; None for a temporary one,
                which is removed with the last object that needs it.
            given: arguments of :func:`convert`: columns of ``user``, ``item`` and ``time``; frames
                or files of ``items``, ``users``, ``valid`` and ``test``; ``types``, ``drop`` etc.

        Raises:
            UsageError: as :func:`convert` raises it.
        """
        if wrong := {"data_path", "dry_run"} & given.keys():
            raise UsageError(f"{min(wrong)}: not of from_frame; path is the folder to make")
        home = TemporaryFolder() if path is None else None
        name = given.pop("name", _NAME)  # of a temporary dataset
        folder = home.path / name if home else Path(os.path.abspath(path or ""))
        dataset = cls(folder)
        dataset.home = home
        target = {"name": folder.name, "data_path": folder.parent, "verbose": False}
        dataset.report = convert(frame, **{**target, **given})
        dataset._source = frame, given
        return dataset

    def with_parts(self, valid: Any = None, test: Any = None) -> Dataset:
        """Return a dataset of the same frame, with interactions to validate and test with.

        Raises:
            UsageError: if this dataset is not made of a frame.
        """
        if self._source is None:
            raise UsageError(
                f"test: {self.path} is not made of a frame; Dataset.from_frame(frame, test=...) "
                "takes both, and files of parts are named by benchmark_filename"
            )
        frame, given = self._source
        given = {**given, "valid": valid, "test": test, "name": self.name}
        return type(self).from_frame(frame, **given)

    @property
    def name(self) -> str:
        """Name of the dataset and of its folder."""
        return self.path.name

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of interactions (``events``), users and items, first and last time, if known."""
        if self.report is not None:
            return dict(self.report.counts)
        return read_counts(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "home": None, "_source": None}  # files and frame stay here

    def __repr__(self) -> str:
        counts = self.counts
        if not counts:
            return f"Dataset {self.path}"
        names = {"users": "users", "items": "items", "events": "interactions"}
        text = ", ".join(f"{counts[key]:,} {name}" for key, name in names.items())
        text += f", {counts['first']} to {counts['last']} UTC" if counts["first"] else ""
        return f"Dataset {self.name}: {text}"


def find_folder_beside(dataset: Any, name: str) -> Path | None:
    """Return the folder ``name`` beside the files of a temporary dataset; None for others."""
    home = dataset.home if isinstance(dataset, Dataset) else None
    return None if home is None else home.path / name


def warn_if_temporary(dataset: Any, run_dir: str | Path) -> None:
    """Warn the caller's caller of a dataset that is gone when its run in ``run_dir`` is not."""
    if isinstance(dataset, Dataset) and dataset.home is not None:
        warnings.warn(
            f"run_dir: {run_dir} stays, but the dataset is temporary and removed at the end of "
            "this process, and then nothing can be resumed, evaluated or recommended to its "
            "users; give Dataset.from_frame(..., path=...) to keep it",
            RunWarning,
            stacklevel=3,
        )
