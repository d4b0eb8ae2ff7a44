"""A trained model as an object: its facts, its metrics, and its folder."""

from __future__ import annotations

import html
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from recbole_pos.conversion.frames import Dataset
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment
from recbole_pos.experiment.evaluate import RankMetric, evaluate
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.result import Result, count_parameters, is_unfinished, read_result
from recbole_pos.experiment.run import Catalogue, load, load_without_data
from recbole_pos.experiment.state import copy_run
from recbole_pos.files import TemporaryFolder


class FittedModel:
    """The facts, metrics and folder of a trained :class:`~recbole_pos.Recommender`.

    Attributes:
        experiment: configuration, dataset, loaders, model, trainer together.
        folder: folder of the run; None for a model that RecBole's own functions have trained.
        source: what must stay as long as the model: its dataset, and folders that are temporary.
    """

    def __init__(
        self, experiment: Experiment, folder: RunFolder | None, source: Sequence[Any]
    ) -> None:
        self.experiment, self.folder, self.source = experiment, folder, source
        self.config, self.dataset = experiment.config, experiment.dataset

    @property
    def model(self) -> Any:
        """The torch module."""
        return self.experiment.model

    @property
    def loaders(self) -> dict[str, Any]:
        """Loaders of batches by phase: train, valid, test; empty where the data are not there."""
        return self.experiment.loaders

    @property
    def trainer(self) -> Any:
        """The trainer of the model; None where the data are not there."""
        return self.experiment.trainer

    @property
    def result(self) -> Result | None:
        """The result of the run; None if it is not finished."""
        folder = self.folder
        return None if folder is None or not folder.result.is_file() else read_result(folder)

    def evaluate(
        self,
        metrics: str | RankMetric | Sequence[str | RankMetric] | None = None,
        topk: int | Sequence[int] | None = None,
        part: str = "test",
        mask_history: bool | None = None,
    ) -> pd.DataFrame:
        """Compute metrics of the model; arguments as of :func:`recbole_pos.evaluate`.

        Returns:
            A row for each metric, in one column named like the part. ``attrs`` says what was
            measured: model, dataset, targets, split, candidates, seed, ...

        Raises:
            UsageError: as :func:`recbole_pos.evaluate` raises it.
        """
        folder = self._folder("evaluate")
        dataset = None if isinstance(self.dataset, Catalogue) else self.dataset
        scores = evaluate(folder.path, metrics, topk, part, mask_history, dataset=dataset)
        table = pd.DataFrame({part: pd.Series(scores, dtype=float)})
        table.index.name = "metric"
        table.attrs = {**self.about(), "part": part}
        return table

    def about(self) -> dict[str, Any]:
        """Return facts of the model and the protocol of its test: plain values by name."""
        config, dataset, result = self.config, self.dataset, self.result
        log = None if isinstance(dataset, Catalogue) else dataset.log
        facts = {
            "model": config["model"],
            "dataset": config["dataset"],
            "users": dataset.user_num - 1,
            "items": dataset.item_num - 1,
            "interactions": dataset.events if log is None else len(log),
            "parameters": count_parameters(self.model),
            "seed": config["seed"],
        }
        if result is not None:
            facts |= {
                "epochs": result.epochs,
                "best_epoch": result.best_epoch,
                "split": result.split.get("split"),
                "candidates": result.candidates,
                "test_targets": result.test_targets,
                "warnings": result.warnings,
            }
        return facts

    def save(self, path: str | Path, data: bool | None = None) -> Path:
        """Copy the run into a folder, for :func:`recbole_pos.load`, ``serve`` and the like.

        Args:
            path: the folder, which is made.
            data: whether to copy the dataset, too, which recommendations to its users need and
                those to histories do not; if None, only a temporary dataset is copied.

        Raises:
            UsageError: if the folder holds a run already, or there is nothing to copy.
        """
        target = RunFolder(path)
        target.require_unused()
        copy_run(self._folder("save"), target, with_results=True)
        data_path = Path(self.config["data_path"])
        if data is None:
            data = any(
                isinstance(owner, Dataset) and owner.home is not None for owner in self.source
            )
        if data:
            shutil.copytree(data_path, target.data / self.config["dataset"])
        return target.path

    def pack(self) -> dict[str, bytes]:
        """Return the contents of the files of the run by name, for pickle."""
        home = TemporaryFolder()
        copy_run(self._folder("pickle"), RunFolder(home.path), with_results=True)
        return {file.name: file.read_bytes() for file in home.path.iterdir()}

    def _folder(self, what: str) -> RunFolder:
        """Return the folder of the run; raise a UsageError, which names ``what``, without one."""
        if self.folder is None or not self.folder.checkpoint.is_file():
            raise UsageError(f"{what}: this model has no run folder; train it by recbole_pos.fit")
        return self.folder

    def __repr__(self) -> str:
        facts, result = self.about(), self.result
        counts = ", ".join(f"{facts[n]:,} {n}" for n in ("users", "items", "interactions"))
        lines = [f"{facts['model']} on {facts['dataset']}: {counts}"]
        if result is None:
            is_half = self.folder is not None and is_unfinished(self.folder)
            return f"{lines[0]}\ntraining: {'not finished' if is_half else 'unknown'}"
        split = ", ".join(f"{kind}: {value}" for kind, value in (facts["split"] or {}).items())
        lines += [
            f"training: {result.epochs} epochs, best {result.best_epoch}, seed {result.seed}",
            f"protocol: split {split}; {result.test_targets:,} test targets among "
            f"{result.candidates}",
        ]
        for part, metrics in (("valid", result.best_valid), ("test", result.test)):
            if metrics:
                lines.append(f"{part}: {', '.join(f'{m} {v:.4f}' for m, v in metrics.items())}")
        return "\n".join(lines + [f"warning: {text}" for text in result.warnings])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def find_run_folder(path: str | Path) -> RunFolder | None:
    """Return the folder of a run; None for a checkpoint outside of one."""
    folder = RunFolder(Path(path).parent if Path(path).is_file() else path)
    return folder if folder.config.is_file() else None


def unpack(kind: Any, files: dict[str, bytes], dataset: Any, *state: Any) -> Any:
    """Restore a pickled model: write its run into a temporary folder and load it from there."""
    home = TemporaryFolder()
    for name, content in files.items():
        (home.path / name).write_bytes(content)
    if dataset is None:
        experiment = load_without_data(home.path)
    else:
        experiment = load(home.path, dataset=dataset, grown=True)
    return kind(experiment, *state, RunFolder(home.path), [home])


def renamed(old: str, new: str) -> Callable[..., Any]:
    """Return a method that warns of its new name and calls it: for names of 0.2.0."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{old} is now {new}", DeprecationWarning, 2)
        return getattr(self, new)(*args, **kwargs)

    return call
