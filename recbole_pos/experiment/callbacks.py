"""Callbacks: what a user runs during a training, and the loggers of the option ``logger``.

A logger is a callback that writes epochs and test to TensorBoard or Weights & Biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from recbole_pos.config.checks import as_list
from recbole_pos.values import Options
from recbole_pos.version import __version__, find_commit


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
    """Call a method of every callback, and return whether one of them ends the training.

    Args:
        callbacks: the callbacks of a training, in the order in which they are called.
        hook: name of the method, such as ``on_epoch``.
        args: its arguments.
    """
    # All are called, also after one has answered True. A hook without an answer returns None.
    answers = [getattr(callback, hook)(*args) for callback in callbacks]
    return any(answers)


class MetricLogger(Callback):
    """Writes the metrics of epochs and test to a tracker of experiments.

    A subclass for one tracker, such as TensorBoard, overrides ``begin``, ``write`` and ``end``.
    """

    def begin(self, config: Any, folder: Path, tags: dict[str, str]) -> None:
        """Begin a run in the tracker."""

    def write(self, values: dict[str, float], epoch: int) -> None:
        """Write values by name, which belong to an epoch."""

    def end(self, is_finished: bool) -> None:
        """End the run, which may have been stopped before its end."""

    def on_start(self, experiment: Any) -> None:
        """Begin a run in the tracker, with tags that identify model, data and version.

        If the training is resumed, its earlier epochs are written to the tracker first.

        Args:
            experiment: configuration, data, model and trainer of the run.
        """
        # ``run`` is the folder of the run, and ``data`` a digest (a hash) of its interactions.
        # ``history`` has the line of metrics of each epoch that is trained already.
        config, folder = experiment.config, experiment.trainer.run.path
        data_digest = experiment.dataset.identity["data"]
        tags = {
            "model": config["model"],
            "dataset": config["dataset"],
            "dataset_checksum": data_digest[:16],
            "recbole_pos": __version__,
            "commit": find_commit(),
            "run_dir": str(folder),
        }
        self.begin(config, folder, tags)
        for epoch in experiment.trainer.progress.history:
            self.on_epoch(epoch)

    def on_epoch(self, epoch: dict[str, Any]) -> None:
        # Write the loss of the epoch and, if it was validated, its metrics to the tracker. In the
        # dict ``epoch``, "valid" is None without a validation, and "epoch" is the epoch's number.
        valid = {f"valid/{name}": value for name, value in (epoch["valid"] or {}).items()}
        self.write({"train/loss": epoch["loss"], **valid}, epoch["epoch"])

    def on_end(self, experiment: Any, result: Any) -> None:
        # Write the metrics of the test, at the best epoch, and end the run in the tracker. Without
        # a result the run was stopped before its end.
        if result is not None and result.test:
            test = {f"test/{name}": value for name, value in result.test.items()}
            self.write(test, result.best_epoch or 0)
        self.end(result is not None)


class TensorBoardLogger(MetricLogger):
    """Writes to ``tensorboard/`` of the run folder."""

    def begin(self, config: Any, folder: Path, tags: dict[str, str]) -> None:
        # Write into the folder of the run; tags become a text with a line for each.
        from torch.utils.tensorboard import SummaryWriter  # only where it is used: it takes seconds

        self.board = SummaryWriter(folder / "tensorboard")
        lines = [f"{name}: {text}" for name, text in tags.items()]
        self.board.add_text("run", "  \n".join(lines))  # two spaces break a line in markdown

    def write(self, values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, epoch)

    def end(self, is_finished: bool) -> None:
        self.board.close()


class WandbLogger(MetricLogger):
    """Writes to Weights & Biases, in the project of ``wandb_project``."""

    def begin(self, config: Any, folder: Path, tags: dict[str, str]) -> None:
        """Begin a run in the project of ``wandb_project``; tags are stored beside the options.

        Args:
            config: configuration of the run.
            folder: folder of the run, in which W&B writes its files.
            tags: texts by name that identify the run.
        """
        import wandb  # which not every user has installed

        self.run = wandb.init(
            project=config["wandb_project"],
            name=folder.name,
            dir=str(folder),
            config={**config.plain, **tags},  # plain: the options as they are given
        )

    def write(self, values: dict[str, float], epoch: int) -> None:
        self.run.log({**values, "epoch": epoch})

    def end(self, is_finished: bool) -> None:
        self.run.finish(exit_code=0 if is_finished else 1)


LOGGERS: dict[str, type[MetricLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}


def make_loggers(config: Options) -> list[Callback]:
    """Return the loggers that a configuration names in ``logger``."""
    # LOGGERS has the class of each logger by name; ``as_list`` takes one name or several.
    return [LOGGERS[name]() for name in as_list(config["logger"] or [])]
