"""The output of a run: its folder, and on what it ran."""

from __future__ import annotations

import glob
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import yaml

from recbole_pos.data.item_vectors import KEPT
from recbole_pos.data.known import Known
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.files import (
    TEMPORARY,
    only_writer,
    remove_unfinished,
    whole,
    write_json,
    write_text,
    writing,
)
from recbole_pos.values import short, shown
from recbole_pos.version import __version__
from recbole_pos.yaml_files import read_yaml

SEARCH = "search.json"  # what the folder of a search has, and that of a run has not


class RunFolder:
    """The folder of one run: configuration, metrics, checkpoint, result, ranks of the test."""

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
        """Return a new folder; saved/<dataset>/<model>/<time>/ when no path is given.

        Raises:
            UsageError: if the folder holds another run already.
        """
        if path is None:
            path = unused_path(dataset, model)
        if not str(path):
            raise UsageError("run_dir is empty; name a folder, or leave it out")
        folder = cls(path)
        folder.require_unused()
        make_folder(folder.path)
        return folder

    def require_unused(self) -> None:
        """Nothing of a run or a search may be here.

        Raises:
            UsageError: if something is.
        """
        if self.holds_run:
            raise UsageError(
                f"{self.path} holds a run already; continue it with --resume {self.path} or "
                "choose another --run_dir"
            )
        if (self.path / SEARCH).exists():
            raise UsageError(f"{self.path} holds a search; choose another --run_dir")

    @property
    def holds_run(self) -> bool:
        """Whether a run has been here, unless it was stopped before an epoch was kept."""
        return self.checkpoint.exists() or self.metrics.exists()

    @property
    def is_kept(self) -> bool:
        """Whether it outlives the model in memory."""
        return not any(part.startswith(TEMPORARY) for part in self.path.parts)

    def clear(self) -> None:
        """Remove what a run has left, so that another can begin; can be repeated if killed."""
        best = self.path.glob(f"{glob.escape(self.checkpoint.name)}.best-*")
        for file in (self.result, self.ranks, *best, self.checkpoint, self.metrics):
            file.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this process, and no other, trains here.

        Raises:
            UsageError: if another process does.
        """
        with only_writer(self.path, "trained"):
            remove_unfinished((self.config, self.metrics, self.checkpoint, self.result))
            yield

    def require(self, option: str = "") -> RunFolder:
        """Return this folder, which must hold a trained run.

        Args:
            option: that named the folder, for the message.

        Raises:
            UsageError: if it does not.
        """
        where = f"{option}: " if option else ""
        if self.only_begun:
            raise UsageError(f"{where}{self.path} has no finished epoch yet; {self.how_to_finish}")
        if not (os.path.isfile(self.config) and os.path.isfile(self.checkpoint)):  # no OSError
            raise UsageError(
                f"{where}{self.path} is not a run folder: no "
                f"{self.config.name} with {self.checkpoint.name}"
            )
        return self

    @property
    def how_to_finish(self) -> str:
        """The command that ends an unfinished run, in a sentence."""
        return f"finish it with `recbole-pos run --resume {shlex.quote(str(self.path))}`"

    @property
    def only_begun(self) -> bool:
        """Whether a run was stopped here before an epoch was kept."""
        kept = (os.path.exists(file) for file in (self.checkpoint, self.result))  # no OSError
        return os.path.isfile(self.config) and not any(kept)

    def require_vectors(self) -> Path:
        """The file of content vectors.

        Raises:
            UsageError: if it, or that of their names, is not there.
        """
        for file in (self.vectors, self.vectors.with_suffix(".txt")):
            if not file.is_file():
                raise UsageError(
                    f"item_vectors: {file} is missing, without which the model cannot be loaded; "
                    "copy it from where the run was trained"
                )
        return self.vectors

    def write_config(self, plain: dict[str, Any]) -> None:
        """The complete configuration; ``--config_files config.yaml`` repeats the run."""
        write_text(self.config, yaml.safe_dump(plain, sort_keys=True, allow_unicode=True))

    def read_config(self) -> dict[str, Any]:
        """Return what :meth:`write_config` wrote; its options are checked by who makes a
        ``PosConfig``.

        Raises:
            UsageError: if it cannot be read, or lacks what was trained.
        """
        kept = read_yaml(self.config)
        for key in ("model", "dataset"):
            if not isinstance(kept.get(key), str):
                raise UsageError(
                    f"{self.config} is damaged: {key}: expected a name, found "
                    f"{shown(kept.get(key))}"
                )
        return kept

    def write_metrics(self, history: Iterable[dict[str, Any]]) -> None:
        """Replace metrics.jsonl by the given epochs (a resumed run drops what came later)."""
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in history))

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append one epoch."""
        with writing(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_ranks(self, ranks: Any) -> None:
        """Where the targets of the test stood, a DataFrame."""
        with whole(self.ranks, text=False) as file:
            ranks.to_parquet(file, index=False)

    def write_vocabulary(self, known: Known, user_field: str, item_field: str) -> None:
        """Names by id, interactions of users and training interactions of items.

        So they are found again in data that have grown, and histories are answered without data.
        """
        with whole(self.known, text=False) as file:
            known.to_table(user_field, item_field).to_parquet(file, index=False)

    def read_vocabulary(self, user_field: str, item_field: str) -> Known | None:
        """Return what :meth:`write_vocabulary` wrote; None in the folders of earlier versions.

        Raises:
            CheckpointError: if the file is damaged.
        """
        if not self.known.is_file():
            return None
        try:
            return Known.from_table(pd.read_parquet(self.known), user_field, item_field)
        except (OSError, ValueError, TypeError, LookupError, pa.ArrowException) as error:
            problem = short(" ".join(str(error).split()))
            raise CheckpointError(f"{self.known} is damaged: {problem}") from error

    def write_result(self, result: dict[str, Any]) -> None:
        """The outcome, as json."""
        write_json(self.result, result)


def unused_path(dataset: str, model: str, prefix: str = "") -> Path:
    """saved/<dataset>/<model>/<prefix><time>, with a number where that exists."""
    base = Path("saved") / dataset / model / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}"
    names = (base.with_name(f"{base.name}{f'-{i}' if i else ''}") for i in range(10**6))
    return next(name for name in names if not name.exists())


def make_folder(path: Path) -> None:
    """Create a folder and those above it, unless it is there.

    Raises:
        UsageError: if that cannot be done.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {path}: {error.strerror}") from error


def versions() -> dict[str, str]:
    """Return versions of what decides a result."""
    import numpy
    import pandas
    import recbole
    import scipy
    import torch

    packages = (recbole, torch, numpy, pandas, scipy)
    return {
        "python": platform.python_version(),
        "recbole_pos": __version__,
        **{package.__name__: str(package.__version__) for package in packages},
    }


def peak_rss_mb() -> float | None:
    """Return the most memory this process ever held, in MB; None where it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
