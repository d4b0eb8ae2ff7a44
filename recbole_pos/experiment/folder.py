"""The output folder of a run, and facts about the process: package versions and peak memory."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from recbole_pos.data.identity import Vocabulary
from recbole_pos.data.item_vectors import KEPT
from recbole_pos.errors import CheckpointError, UsageError, make_resume_command
from recbole_pos.files import (
    TEMPORARY,
    atomic_write,
    lock_folder,
    name_write_errors,
    remove_unfinished,
    write_text,
)
from recbole_pos.values import shown
from recbole_pos.version import __version__
from recbole_pos.yaml_files import read_yaml

SEARCH = "search.json"  # a file that only the folder of a search has


class RunFolder:
    """The folder of one run, which need not exist: its files, and how they are written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.result = self.path / "result.json"
        self.ranks = self.path / "test_ranks.parquet"
        self.known = self.path / "known.parquet"
        self.vectors = self.path / KEPT
        self.data = self.path / "dataset"  # of a model that was saved with its data

    @classmethod
    def create(cls, path: str | Path | None, dataset: str, model: str) -> RunFolder:
        """Create the folder of a new run, saved/<dataset>/<model>/<time>/ if ``path`` is None."""
        while path is None:
            unused = find_unused_path(dataset, model)
            with suppress(FileExistsError):  # another process has just created it
                make_folder(unused, exist_ok=False)
                path = unused
        if not str(path):
            raise UsageError("run_dir is empty; name a folder, or leave it out")
        folder = cls(path)
        folder.require_unused()
        make_folder(folder.path)
        return folder

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds a run of which an epoch was kept."""
        return self.checkpoint.exists() or self.metrics.exists()

    @property
    def is_only_begun(self) -> bool:
        """Whether the folder holds a run that was stopped before an epoch was kept."""
        # os.path returns False if the name is too long, where pathlib may raise
        has_epoch = os.path.exists(self.checkpoint) or os.path.exists(self.result)
        return os.path.isfile(self.config) and not has_epoch

    @property
    def is_kept(self) -> bool:
        """Whether the folder outlives the model in memory: it is not a temporary one."""
        return not any(part.startswith(TEMPORARY) for part in self.path.parts)

    @property
    def resume_command(self) -> str:
        """The command that resumes the run; it names the modules that its configuration names."""
        plugins: Any = None
        with suppress(UsageError):  # no configuration, or a damaged one
            plugins = self.read_config().get("plugins")
        return make_resume_command(self.path, plugins if isinstance(plugins, list) else None)

    @property
    def how_to_finish(self) -> str:
        """The command that finishes an unfinished run, as the end of a message."""
        return f"finish it with `{self.resume_command}`"

    def require_unused(self) -> None:
        """Raise a UsageError, which says how to continue, if the folder holds a run or a search."""
        is_search = (self.path / SEARCH).exists()
        if self.holds_run or is_search:
            command = make_resume_command(self.path, command="tune")
            raise UsageError(
                f"{self.path} holds a {'search' if is_search else 'run'} already; continue it with "
                f"`{command if is_search else self.resume_command}` or choose another --run_dir"
            )

    def require(self, option: str = "") -> RunFolder:
        """Return this folder; raise a UsageError about ``option`` if it holds no trained run."""
        prefix = f"{option}: " if option else ""
        if self.is_only_begun:
            raise UsageError(f"{prefix}{self.path} has no finished epoch yet; {self.how_to_finish}")
        if not (os.path.isfile(self.config) and os.path.isfile(self.checkpoint)):
            raise UsageError(
                f"{prefix}{self.path} is not a run folder: no "
                f"{self.config.name} with {self.checkpoint.name}"
            )
        return self

    def require_vectors(self) -> Path:
        """Return the file of content vectors; a UsageError if it or its item list is missing."""
        for file in (self.vectors, self.vectors.with_suffix(".txt")):
            if not file.is_file():
                raise UsageError(f"item_vectors: {file} is missing; copy it from the trained run")
        return self.vectors

    def clear(self) -> None:
        """Remove checkpoint, metrics and results, so that another run can begin there."""
        for file in (self.result, self.ranks, self.checkpoint, self.metrics):
            file.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for training in a ``with`` block, and remove unfinished files in it."""
        with lock_folder(self.path, "trained"):
            text = self.vectors.with_suffix(".txt")
            written = self.config, self.metrics, self.checkpoint, self.result
            remove_unfinished((*written, self.ranks, self.known, self.vectors, text))
            yield

    def write_config(self, plain: dict[str, Any]) -> None:
        """Write the complete configuration; ``--config_files config.yaml`` repeats the run."""
        write_text(self.config, yaml.safe_dump(plain, sort_keys=True, allow_unicode=True))

    def read_config(self) -> dict[str, Any]:
        """Read what :meth:`write_config` wrote; ``PosConfig`` checks its options."""
        return read_yaml(self.config)

    def write_metrics(self, history: Iterable[dict[str, Any]]) -> None:
        """Replace metrics.jsonl by the given epochs: a resumed run drops the epochs after them."""
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in history))

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append the line of one epoch to metrics.jsonl."""
        with name_write_errors(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_ranks(self, ranks: pd.DataFrame) -> None:
        """Write the ranks of the test targets, a table of ``evaluation.make_rank_table``."""
        with atomic_write(self.ranks, text=False) as file:
            ranks.to_parquet(file, index=False)

    def write_vocabulary(self, vocabulary: Vocabulary, user_field: str, item_field: str) -> None:
        """Write the names of users and items by id, and how many interactions each of them has."""
        with atomic_write(self.known, text=False) as file:
            vocabulary.to_table(user_field, item_field).to_parquet(file, index=False)

    def read_vocabulary(self, user_field: str, item_field: str) -> Vocabulary | None:
        """Read what :meth:`write_vocabulary` wrote; None if the folder has none."""
        if not self.known.is_file():
            return None
        try:
            return Vocabulary.from_table(pd.read_parquet(self.known), user_field, item_field)
        except Exception as error:  # the table's description of itself makes pandas raise anything
            raise CheckpointError(f"{self.known} is damaged: {shown(str(error))}") from error


def find_unused_path(dataset: str, model: str, prefix: str = "") -> Path:
    """Return the path saved/<dataset>/<model>/<prefix><time>, with a number if that exists."""
    first = Path("saved", dataset, model, f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}")
    path = first
    number = 0
    while os.path.lexists(path):
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def make_folder(path: Path, exist_ok: bool = True) -> None:
    """Create a folder and its parents; a UsageError if that is impossible.

    Raises:
        FileExistsError: if the folder exists, and ``exist_ok`` is false.
    """
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise UsageError(f"cannot create {path}: {error.strerror}") from error


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on, by name."""
    packages = ("recbole", "torch", "numpy", "pandas", "scipy")
    versions = {"python": platform.python_version(), "recbole_pos": __version__}
    return versions | {package: version(package) for package in packages}


def peak_rss_mb() -> float | None:
    """Return the largest memory of this process so far, in MB; None if the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return round(peak / unit, 1)
