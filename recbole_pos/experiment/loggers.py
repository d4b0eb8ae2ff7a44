"""Training runs in TensorBoard, MLflow, Weights & Biases or a csv: the option ``logger``."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
from collections.abc import Callable
from typing import Any

from recbole_pos.errors import UsageError
from recbole_pos.experiment.callbacks import Callback
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.values import Options
from recbole_pos.version import __version__

_PLACES = ("data_path", "gpu_id", "use_gpu", "worker", "show_progress", "tensorboard", "logger")
# To write numbers of an epoch, and to end a run: whether it is finished.
Writer = tuple[Callable[[dict[str, float], int], Any], Callable[[bool], Any]]


class MetricLogger(Callback):
    """Writes what a run is, its epochs and its test into a place of the user's.

    Args:
        begin: begins a run there, from its configuration, folder and tags.
    """

    def __init__(self, begin: Callable[[Any, RunFolder, dict[str, str]], Writer]) -> None:
        self.begin = begin

    def on_start(self, experiment: Any) -> None:
        config, folder = experiment.config, experiment.trainer.run
        plain = {key: value for key, value in config.plain.items() if key not in _PLACES}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
        tags = {
            "model": config["model"],
            "dataset": config["dataset"],
            "dataset_checksum": experiment.dataset.identity["data"][:16],
            "options_digest": digest.hexdigest()[:16],
            "recbole_pos": __version__,
            "run_dir": str(folder.path),
        }
        self.write, self.end = self.begin(config, folder, tags)
        for line in experiment.trainer.progress.history:  # of a run that is resumed
            self.on_epoch(line)

    def on_epoch(self, epoch: dict[str, Any]) -> None:
        values = {f"valid/{name}": value for name, value in (epoch["valid"] or {}).items()}
        self.write({"train/loss": epoch["loss"], **values}, epoch["epoch"])

    def on_end(self, experiment: Any, result: Any) -> None:
        if result is not None and result.test:
            test = {f"test/{name}": value for name, value in result.test.items()}
            self.write(test, result.best_epoch or 0)
        self.end(result is not None)


def _tensorboard(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    board = _require("torch.utils.tensorboard", "tensorboard").SummaryWriter(
        folder.path / "tensorboard"
    )
    board.add_text("run", "  \n".join(f"{name}: {text}" for name, text in tags.items()))

    def write(values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, epoch)

    return write, lambda is_finished: board.close()


def _csv(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    file = open(  # noqa: SIM115 (until the end of the run)
        folder.path / "metrics.csv", "w", encoding="utf-8", newline="", buffering=1
    )
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(("epoch", "metric", "value"))

    def write(values: dict[str, float], epoch: int) -> None:
        lines.writerows((epoch, name, value) for name, value in values.items())

    return write, lambda is_finished: file.close()


def _mlflow(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    client, name = _require("mlflow", "mlflow-skinny").MlflowClient(), config["dataset"]
    found = client.get_experiment_by_name(name)
    number = found.experiment_id if found else client.create_experiment(name)
    run = client.create_run(number, run_name=folder.path.name, tags=tags).info.run_id
    for key, value in config.plain.items():
        client.log_param(run, key, str(value)[:500])

    def write(values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():  # whose names have no @ there
            client.log_metric(run, name.replace("@", "_at_"), value, step=epoch)

    def end(is_finished: bool) -> None:
        client.set_terminated(run, "FINISHED" if is_finished else "FAILED")

    return write, end


def _wandb(config: Any, folder: RunFolder, tags: dict[str, str]) -> Writer:
    place = {"project": config["wandb_project"], "name": folder.path.name, "dir": str(folder.path)}
    run = _require("wandb", "wandb").init(**place, config={**config.plain, **tags})

    def write(values: dict[str, float], epoch: int) -> None:
        run.log({**values, "epoch": epoch})

    return write, lambda is_finished: run.finish(exit_code=0 if is_finished else 1)


LOGGERS = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb, "csv": _csv}


def make_loggers(config: Options) -> list[Callback]:
    """Return the loggers that a configuration names."""
    given = config["logger"] or []
    names = [given] if isinstance(given, str) else list(given)
    names += ["tensorboard"] if config["tensorboard"] else []
    return [MetricLogger(LOGGERS[name]) for name in dict.fromkeys(names)]


def _require(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"logger: needs {package}: pip install {package}") from error
