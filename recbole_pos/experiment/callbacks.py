"""Callbacks: what a user runs during a training, and the loggers of the option ``logger``.

A logger is a callback that writes epochs and test to csv, TensorBoard, MLflow or Weights & Biases.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd
from torch import Tensor

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.files import write_text
from recbole_pos.values import Options
from recbole_pos.version import __version__, find_commit

# Options that do not change a result, which the digest of the options leaves out.
_NEUTRAL = ("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "tensorboard", "logger")


class Callback:
    """Follow a training run; a subclass overrides the hooks that it needs.

    Examples:
        >>> class Patience(recbole_pos.Callback):
        ...     def on_epoch(self, epoch):
        ...         return epoch["loss"] < 6.5  # stop
        >>> trained = recbole_pos.fit("FPARec", "ml-100k", epochs=2, callbacks=[Patience()])
    """

    def on_start(self, experiment: Any) -> None:
        """Act before the first epoch: configuration, dataset, model and trainer are there."""

    def on_step(self, step: int, loss: Tensor) -> None:
        """Act after a step, counted from 1 in all epochs; reading ``loss`` waits for the device."""

    def on_validation(self, epoch: int, metrics: dict[str, float]) -> bool | None:
        """Act after a validation; return True to end the training after this epoch."""

    def on_epoch(self, epoch: dict[str, Any]) -> bool | None:
        """Act after an epoch, with its line of metrics.jsonl; return True to end the training."""

    def on_end(self, experiment: Any, result: Any) -> None:
        """Act after the test, with the best weights; ``result`` is None if the run was stopped."""


def call(callbacks: Sequence[Callback], hook: str, *args: Any) -> bool:
    """Call the method ``hook`` of every callback; return whether one of them ends the training."""
    answers = [getattr(callback, hook)(*args) for callback in callbacks]
    return any(answers)


class Writer(NamedTuple):
    """How a run is logged: ``write(metrics, epoch)``, and at its end ``end(is_finished)``."""

    write: Callable[[dict[str, float], int], Any]
    end: Callable[[bool], Any]


class MetricLogger(Callback):
    """A callback that logs the metrics of epochs and test to a tracker of experiments.

    ``begin`` begins a run there, given configuration, folder and tags, and returns its writer.
    """

    def __init__(self, begin: Callable[[Any, RunFolder, dict[str, str]], Writer]) -> None:
        self.begin = begin

    def on_start(self, experiment: Any) -> None:
        """Begin a run in the tracker, with tags that identify data, options and version."""
        config, folder = experiment.config, experiment.trainer.run
        options = {key: value for key, value in config.plain.items() if key not in _NEUTRAL}
        digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
        tags = {
            "model": config["model"],
            "dataset": config["dataset"],
            "dataset_checksum": experiment.dataset.identity["data"][:16],
            "options_digest": digest.hexdigest()[:16],
            "recbole_pos": __version__,
            "commit": find_commit(),
            "run_dir": str(folder.path),
        }
        self.write, self.end = self.begin(config, folder, tags)
        for epoch in experiment.trainer.progress.history:  # not empty if the run is resumed
            self.on_epoch(epoch)

    def on_epoch(self, epoch: dict[str, Any]) -> None:
        valid = {f"valid/{name}": value for name, value in (epoch["valid"] or {}).items()}
        self.write({"train/loss": epoch["loss"], **valid}, epoch["epoch"])

    def on_end(self, experiment: Any, result: Any) -> None:
        if result is not None and result.test:
            test = {f"test/{name}": value for name, value in result.test.items()}
            self.write(test, result.best_epoch or 0)
        self.end(result is not None)


def _begin_csv(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    """Begin ``metrics.csv`` in the run folder: a row for each epoch, with the tags."""
    rows: dict[int, dict[str, float]] = {}

    def write(values: dict[str, float], epoch: int) -> None:
        rows.setdefault(epoch, {"epoch": epoch}).update(values)
        table = pd.DataFrame(list(rows.values())).assign(**tags)
        write_text(folder.path / "metrics.csv", table.to_csv(index=False))

    return Writer(write, lambda is_finished: None)


def _begin_tensorboard(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    """Begin a run of TensorBoard in ``tensorboard/`` of the run folder."""
    board = _require("torch.utils.tensorboard", "tensorboard").SummaryWriter(
        folder.path / "tensorboard"
    )
    board.add_text("run", "  \n".join(f"{name}: {text}" for name, text in tags.items()))

    def write(values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, epoch)

    return Writer(write, lambda is_finished: board.close())


def _begin_mlflow(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    """Begin a run of MLflow, in the experiment of the dataset."""
    client = _require("mlflow", "mlflow-skinny").MlflowClient()
    title = config["dataset"]
    experiment = client.get_experiment_by_name(title)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(title)
    run_id = client.create_run(experiment_id, run_name=folder.path.name, tags=tags).info.run_id
    for key, value in config.plain.items():
        client.log_param(run_id, key, str(value)[:500])

    def write(values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():  # MLflow allows no @ in names
            client.log_metric(run_id, name.replace("@", "_at_"), value, step=epoch)

    def end(is_finished: bool) -> None:
        client.set_terminated(run_id, "FINISHED" if is_finished else "FAILED")

    return Writer(write, end)


def _begin_wandb(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    """Begin a run of Weights & Biases, in the project of ``wandb_project``."""
    run = _require("wandb", "wandb").init(
        project=config["wandb_project"],
        name=folder.path.name,
        dir=str(folder.path),
        config={**config.plain, **tags},
    )

    def write(values: dict[str, float], epoch: int) -> None:
        run.log({**values, "epoch": epoch})

    return Writer(write, lambda is_finished: run.finish(exit_code=0 if is_finished else 1))


LOGGERS = {
    "csv": _begin_csv,
    "tensorboard": _begin_tensorboard,
    "mlflow": _begin_mlflow,
    "wandb": _begin_wandb,
}


def make_loggers(config: Options) -> list[Callback]:
    """Return the loggers that a configuration names in ``logger`` and ``tensorboard``."""
    value = config["logger"] or []
    names = [value] if isinstance(value, str) else list(value)
    if config["tensorboard"]:
        names.append("tensorboard")
    return [MetricLogger(LOGGERS[name]) for name in dict.fromkeys(names)]


def _require(module: str, package: str) -> Any:
    """Import and return the module of a tracker; a UsageError names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"logger: needs {package}: pip install {package}") from error
