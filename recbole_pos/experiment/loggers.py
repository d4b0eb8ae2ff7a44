"""Training runs in TensorBoard, MLflow, Weights & Biases or a csv: the option ``logger``."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.experiment.callbacks import Callback
from recbole_pos.values import Options
from recbole_pos.version import __version__

_PLACES = ("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "tensorboard", "logger")


class MetricLogger(Callback):
    """What all loggers do: begin with options and tags, write the epochs, then the test.

    Attributes:
        config: of the run.
        folder: of the run.
    """

    def on_start(self, experiment: Any) -> None:
        """See :class:`Callback`."""
        self.config, self.folder = experiment.config, experiment.trainer.run
        self.begin(_tags(experiment))
        for line in experiment.trainer.progress.history:  # of a run that is resumed
            self.on_epoch(line)

    def on_epoch(self, epoch: dict[str, Any]) -> None:
        """See :class:`Callback`."""
        values = {f"valid/{name}": value for name, value in (epoch["valid"] or {}).items()}
        self.write({"train/loss": epoch["loss"], **values}, epoch["epoch"])

    def on_end(self, experiment: Any, result: Any) -> None:
        """See :class:`Callback`."""
        if result is not None and result.test:
            test = {f"test/{name}": value for name, value in result.test.items()}
            self.write(test, result.best_epoch or 0)
        self.end(result is not None)

    @abstractmethod
    def begin(self, tags: dict[str, str]) -> None:
        """Begin a run with tags."""

    @abstractmethod
    def write(self, values: dict[str, float], epoch: int) -> None:
        """Write numbers of an epoch."""

    @abstractmethod
    def end(self, is_finished: bool) -> None:
        """End the run."""


def _tags(experiment: Any) -> dict[str, str]:
    """What tells runs apart: dataset and its checksum, digest of the options, versions."""
    plain = {key: v for key, v in experiment.config.plain.items() if key not in _PLACES}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    return {
        "model": plain["model"],
        "dataset": plain["dataset"],
        "dataset_checksum": experiment.dataset.identity["data"][:16],
        "options_digest": digest.hexdigest()[:16],
        "recbole_pos": __version__,
        "run_dir": str(experiment.trainer.run.path),
    }


class TensorBoardLogger(MetricLogger):
    """Events in the folder ``tensorboard`` of the run."""

    def begin(self, tags: dict[str, str]) -> None:
        """See :class:`MetricLogger`."""
        module = _require("torch.utils.tensorboard", "tensorboard")
        self.board = module.SummaryWriter(self.folder.path / "tensorboard")
        self.board.add_text("run", "  \n".join(f"{name}: {text}" for name, text in tags.items()))

    def write(self, values: dict[str, float], epoch: int) -> None:
        """See :class:`MetricLogger`."""
        for name, value in values.items():
            self.board.add_scalar(name, value, epoch)

    def end(self, is_finished: bool) -> None:
        """See :class:`MetricLogger`."""
        self.board.close()


class CsvLogger(MetricLogger):
    """``metrics.csv`` in the folder of the run: a line an epoch and metric."""

    def begin(self, tags: dict[str, str]) -> None:
        """See :class:`MetricLogger`."""
        self.file = open(  # noqa: SIM115 (until the end of the run)
            self.folder.path / "metrics.csv", "w", encoding="utf-8", newline="", buffering=1
        )
        self.lines = csv.writer(self.file, lineterminator="\n")
        self.lines.writerow(("epoch", "metric", "value"))

    def write(self, values: dict[str, float], epoch: int) -> None:
        """See :class:`MetricLogger`."""
        self.lines.writerows((epoch, name, value) for name, value in values.items())

    def end(self, is_finished: bool) -> None:
        """See :class:`MetricLogger`."""
        self.file.close()


class MlflowLogger(MetricLogger):
    """A run in the experiment of the dataset's name, where ``MLFLOW_TRACKING_URI`` says."""

    def begin(self, tags: dict[str, str]) -> None:
        """See :class:`MetricLogger`."""
        self.client = client = _require("mlflow", "mlflow-skinny").MlflowClient()
        name = self.config["dataset"]
        found = client.get_experiment_by_name(name)
        number = found.experiment_id if found else client.create_experiment(name)
        run = client.create_run(number, run_name=self.folder.path.name, tags=tags)
        self.run_id = run.info.run_id
        for name, value in self.config.plain.items():
            client.log_param(self.run_id, name, str(value)[:500])

    def write(self, values: dict[str, float], epoch: int) -> None:
        """See :class:`MetricLogger`."""
        for name, value in values.items():  # whose names have no @ there
            self.client.log_metric(self.run_id, name.replace("@", "_at_"), value, step=epoch)

    def end(self, is_finished: bool) -> None:
        """See :class:`MetricLogger`."""
        self.client.set_terminated(self.run_id, "FINISHED" if is_finished else "FAILED")


class WandbLogger(MetricLogger):
    """A run in ``wandb_project``; offline where ``WANDB_MODE`` says so."""

    def begin(self, tags: dict[str, str]) -> None:
        """See :class:`MetricLogger`."""
        self.run = _require("wandb", "wandb").init(
            project=self.config["wandb_project"],
            name=self.folder.path.name,
            dir=str(self.folder.path),
            config={**self.config.plain, **tags},
        )

    def write(self, values: dict[str, float], epoch: int) -> None:
        """See :class:`MetricLogger`."""
        self.run.log({**values, "epoch": epoch})

    def end(self, is_finished: bool) -> None:
        """See :class:`MetricLogger`."""
        self.run.finish(exit_code=0 if is_finished else 1)


LOGGERS: dict[str, Callable[[], MetricLogger]] = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
    "csv": CsvLogger,
}


def make_loggers(config: Options) -> list[Callback]:
    """The loggers that a configuration names."""
    given = config["logger"] or []
    names = [given] if isinstance(given, str) else list(given)
    names += ["tensorboard"] if config["tensorboard"] else []
    return [LOGGERS[name]() for name in dict.fromkeys(names)]


def _require(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"logger: needs {package}: pip install {package}") from error
