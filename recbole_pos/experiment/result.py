"""Facts about a run: before its first epoch, and its result."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from recbole_pos.data.identity import count_dataset
from recbole_pos.data.targets import make_warnings, warn_of_repeats
from recbole_pos.data.valid_users import add_sample
from recbole_pos.data.windows import describe_candidates, masks_history
from recbole_pos.errors import UsageError
from recbole_pos.experiment.device import describe_device
from recbole_pos.experiment.folder import SEARCH, RunFolder, find_versions, peak_rss_mb
from recbole_pos.values import shown

KNOWS_WHEN = (
    "request_time: target: the model knew the time of what it predicts, which makes metrics higher "
    "than those of models that do not"
)


@dataclass(repr=False)
class Result:
    """The result of a run; also the content of ``result.json``.

    Attributes:
        best_valid, test: values by RecBole's metric names (``ndcg@10``), of the best epoch.
        epochs, best_epoch: number of trained epochs, and the best of them, counted from 0.
        seconds: time of ``data``, ``training``, and ``evaluation`` (validation and test).
        candidates: which items were ranked: all, or only those not in the user's past; then a
            target that its user has had before is a miss, and ``split`` counts such targets.
        split: what was held out and left out, see :func:`recbole_pos.data.targets.make_split`.
        device: see :func:`~recbole_pos.experiment.device.describe_device`.
        request_time: ``target`` if states knew the time of what they predict: such metrics are not
            comparable to others.
        warnings: sentences on what in the data makes targets easier to predict.
    """

    model: str
    dataset: str
    run_dir: str
    best_valid: dict[str, float] | None
    test: dict[str, float] | None
    epochs: int
    best_epoch: int | None
    seconds: dict[str, float]
    targets_per_second: float
    parameters: int
    candidates: str
    valid_targets: int
    test_targets: int
    split: dict[str, Any]
    peak_rss_mb: float | None
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    request_time: str = "none"
    warnings: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in (self.test or {}).items())
        return (
            f"{self.model} on {self.dataset}, {self.epochs} epochs, test: {metrics}; {self.run_dir}"
        )


def read_result(folder: RunFolder) -> Result:
    """Return the result in ``result.json``; a UsageError if the file is missing or damaged."""
    try:
        return Result(**json.loads(folder.result.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        problem = f"{folder.result} cannot be read: {shown(str(error))}"
        raise UsageError(f"{problem}; `{folder.resume_command}` writes it again") from error


def is_unfinished(folder: RunFolder) -> bool:
    """Return whether a run was stopped before its end, the first time or after ``--resume``.

    Best trials of searches and .pth files of RecBole's functions count as finished.
    """
    if not folder.known.is_file() or (folder.path.parent / SEARCH).is_file():
        return False
    if not folder.result.is_file():
        return True
    if not folder.metrics.is_file():
        return False
    with open(folder.metrics, "rb") as lines:
        num_epochs = sum(1 for _ in lines)
    return num_epochs > read_result(folder).epochs


def make_start_facts(experiment: Any, folder: RunFolder) -> dict[str, Any]:
    """Return the facts that a run reports before its first epoch: data, model, device, folder."""
    config, dataset = experiment.config, experiment.dataset
    return {
        "model": config["model"],
        "dataset": config["dataset"],
        **count_dataset(dataset),
        "parameters": count_parameters(experiment.model),
        "device": describe_device(config),
        "run_dir": str(folder.path),
        "split": add_sample(dataset.split.summary, config),
    }


def count_parameters(model: Any) -> int:
    """Return the number of a model's trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def list_warnings(split: dict[str, Any], candidates: str, request_time: str) -> list[str]:
    """Return sentences on what makes the metrics of an evaluation too good, or not comparable.

    ``split`` is its summary, ``candidates`` which items are ranked, in words.
    """
    knows_when = [KNOWS_WHEN] if request_time == "target" else []
    return [*make_warnings(split), *warn_of_repeats(split, candidates), *knows_when]


def make_result(
    experiment: Any, folder: RunFolder, test: dict[str, float] | None, test_seconds: float
) -> Result:
    """Return the result of a trained run; ``test`` is None if the split has no test targets."""
    config, progress = experiment.config, experiment.trainer.progress
    split = add_sample(experiment.dataset.split.summary, config)
    training_seconds = max(progress.training_seconds, 1e-9)  # not 0, as it is a divisor
    num_targets = {
        phase: 0 if loader is None else loader.num_targets
        for phase, loader in experiment.loaders.items()
    }
    candidates = describe_candidates(masks_history(config), config["repeated_targets"])
    return Result(
        model=config["model"],
        dataset=config["dataset"],
        run_dir=str(folder.path),
        best_valid=progress.best_result,
        test=test,
        epochs=progress.next_epoch,
        best_epoch=progress.best_epoch,
        seconds={
            "data": round(experiment.data_seconds, 3),
            "training": round(progress.training_seconds, 3),
            "evaluation": round(progress.evaluation_seconds + test_seconds, 3),
        },
        targets_per_second=round(progress.trained_targets / training_seconds, 1),
        parameters=count_parameters(experiment.model),
        candidates=candidates,
        valid_targets=num_targets["valid"],
        test_targets=num_targets["test"],
        split=split,
        warnings=list_warnings(split, candidates, config["request_time"]),
        peak_rss_mb=peak_rss_mb(),
        seed=config["seed"],
        versions=find_versions(),
        device=describe_device(config),
        request_time=config["request_time"],
    )
