"""What a run leaves behind and what a person sees: run folder, epoch lines, result table."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from recbole_pos.errors import UsageError

SEARCH = "search.json"  # what the folder of a search has, and that of a run has not


class RunFolder:
    """The folder of one run: config.yaml, metrics.jsonl, checkpoint.pt, result.json."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.result = self.path / "result.json"

    @classmethod
    def create(cls, path: str | Path | None, dataset: str, model: str) -> RunFolder:
        """A new folder; saved/<dataset>/<model>/<time>/ when no path is given.

        Raises:
            UsageError: if the folder holds another run already.
        """
        if path is None:
            path = unused_path(dataset, model)
        folder = cls(path)
        if folder.checkpoint.exists() or folder.metrics.exists():
            raise UsageError(
                f"{folder.path} holds a run already; continue it with --resume {folder.path} or "
                "choose another --run_dir"
            )
        if (folder.path / SEARCH).exists():
            raise UsageError(f"{folder.path} holds a search; choose another --run_dir")
        make_folder(folder.path)
        return folder

    def require(self, option: str = "") -> RunFolder:
        """This folder, which must hold a trained run.

        Args:
            option: that named the folder, for the message.

        Raises:
            UsageError: if it does not.
        """
        if not self.config.is_file() or not self.checkpoint.is_file():
            raise UsageError(
                f"{option + ': ' if option else ''}{self.path} is not a run folder: no "
                f"{self.config.name} with {self.checkpoint.name}"
            )
        return self

    def write_config(self, plain: dict[str, Any]) -> None:
        """The complete configuration; ``--config_files config.yaml`` repeats the run."""
        write_whole(self.config, yaml.safe_dump(plain, sort_keys=True, allow_unicode=True))

    def write_metrics(self, history: Iterable[dict[str, Any]]) -> None:
        """Replace metrics.jsonl by the given epochs (a resumed run drops what came later)."""
        write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in history))

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append one epoch."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_result(self, result: dict[str, Any]) -> None:
        """The outcome, as json."""
        write_whole(self.result, json.dumps(result, indent=2) + "\n")


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


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically: all of it or nothing."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


class Screen:
    """Epoch lines and a batch bar; quiet when ``enabled`` is False, no bar without a terminal."""

    def __init__(self, enabled: bool) -> None:
        self.console = Console(quiet=not enabled, highlight=False)

    def line(self, text: str) -> None:
        """One line of text."""
        self.console.print(text, soft_wrap=True, markup=False)  # [a] is text here

    def batches(self, loader: Any, title: str) -> Iterator[Any]:
        """Iterate over a loader behind a progress bar that vanishes at the end."""
        if self.console.quiet or not self.console.is_terminal:
            yield from loader
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeRemainingColumn(), console=self.console, transient=True
        ) as progress:
            task = progress.add_task(title, total=len(loader))
            for batch in loader:
                yield batch
                progress.advance(task)

    def epoch(self, line: dict[str, Any], metric: str, best: bool) -> None:
        """One line about a finished epoch."""
        score = (line.get("valid") or {}).get(metric)
        scored = "" if score is None else f"  valid {metric} {score:.4f}{' *' if best else '  '}"
        self.line(
            f"epoch {line['epoch']:>3}  loss {line['loss']:.4f}{scored}  "
            f"{line['seconds']:.1f} s  {line['targets_per_second']:,.0f} targets/s"
        )

    def results(self, title: str, columns: dict[str, dict[str, float] | None]) -> None:
        """A table with one column per phase (or model) and one row per metric."""
        columns = {name: column for name, column in columns.items() if column}
        table = Table()
        table.add_column("metric")
        for name in columns:
            table.add_column(name, justify="right")
        for metric in dict.fromkeys(metric for column in columns.values() for metric in column):
            table.add_row(metric, *(f"{column[metric]:.4f}" for column in columns.values()))
        self.line(title)
        self.console.print(table)


def wide_console() -> Console:
    """Rich's, with room for a table where there is no terminal whose width it must fit."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    import numpy
    import pandas
    import recbole
    import scipy
    import torch

    import recbole_pos

    packages = (recbole_pos, recbole, torch, numpy, pandas, scipy)
    return {
        "python": platform.python_version(),
        **{package.__name__: str(package.__version__) for package in packages},
    }


def peak_rss_mb() -> float | None:
    """The most memory this process ever held, in MB; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
