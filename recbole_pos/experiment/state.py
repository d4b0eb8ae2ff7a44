"""Capture the state of a trainer for a checkpoint, and restore it.

Tensors of a file are compared with those of the trainer before they are used: names, shapes, types,
finite values. Fused Adam writes to a tensor of another shape as if it had the shape of the
parameter, and the process dies. The optimiser's options follow from configuration and epoch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recbole_pos.config.posconfig import PosConfig, to_plain_options
from recbole_pos.data.identity import Vocabulary, find_changed_fields
from recbole_pos.errors import CheckpointError, PosError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.files import atomic_write
from recbole_pos.plain import from_plain, to_plain
from recbole_pos.values import shown

# What a checkpoint must hold to be resumed.
RESUMABLE = (
    *("config", "progress", "weights", "best_weights", "optimizer", "scaler", "random", "loader"),
    *("steps", "average", *checkpoint.IDENTITY),
)


def copy_run(
    source: RunFolder,
    target: RunFolder,
    with_results: bool = False,
    config: dict[str, Any] | None = None,
) -> None:
    """Copy the files of a training into another folder; ``with_results`` also those of its test.

    ``config`` replaces the configuration of the run.
    The checkpoint is copied last: until it is there, the target does not count as a trained run.
    """
    make_folder(target.path)
    files = [source.config, source.metrics, source.known]
    files += [source.vectors, source.vectors.with_suffix(".txt")]
    files += [source.result, source.ranks] if with_results else []
    for file in files:
        if file.is_file():
            shutil.copy(file, target.path)
    if config is not None:
        target.write_config(config)
    with (
        source.checkpoint.open("rb") as original,
        atomic_write(target.checkpoint, text=False) as copied,
    ):
        shutil.copyfileobj(original, copied)


def find_difference(tensors: Any, expected: dict[str, Tensor]) -> str | None:
    """Return how tensors of a file differ from the expected ones, in words; None if they fit.

    Names, shapes and types must be the same, and numbers finite where the expected ones are.
    """
    if not isinstance(tensors, dict):
        return f"expected tensors by name, found {type(tensors).__name__}"
    if unmatched := sorted(map(shown, expected.keys() ^ tensors.keys())):
        return f"lacks, or has unknown, {', '.join(unmatched[:3])}"
    for name, model_tensor in expected.items():
        tensor = tensors[name]
        description = f"{name}: expected {list(model_tensor.shape)} of {model_tensor.dtype}"
        if not isinstance(tensor, Tensor):
            return f"{description}, found {type(tensor).__name__}"
        if tensor.shape != model_tensor.shape or tensor.dtype != model_tensor.dtype:
            return f"{description}, found {list(tensor.shape)}"
        if not tensor.isfinite().all() and model_tensor.isfinite().all():
            return f"{name} has numbers that are not finite"
    return None


def _require_like(tensors: Any, expected: dict[str, Tensor], part: str, file: str | Path) -> None:
    """Raise a CheckpointError about the first difference, as :func:`find_difference` returns it."""
    if difference := find_difference(tensors, expected):
        raise CheckpointError(f"{file} cannot be used with this model: {part}: {difference}")


def capture(trainer: Any) -> dict[str, Any]:
    """Return the state of a trainer that a resumed run needs to end with the same bits.

    The tensors are the trainer's own and change with it, except the tensors of ``best_weights``. If
    the newest weights are the best, ``weights`` and ``best_weights`` are the same object.
    """
    generator = getattr(trainer.loader, "generator", None)
    progress = trainer.progress
    is_best = progress.best_epoch == progress.next_epoch - 1 and trainer.average is None
    return {
        "config": to_plain_options(trainer.config),
        **trainer.identity,
        "known": trainer.vocabulary_digest,
        "progress": vars(progress),
        "weights": trainer.best_weights if is_best else extract_weights(trainer.model),
        "best_weights": trainer.best_weights,
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": checkpoint.get_random_state(),
        "loader": None if generator is None else generator.get_state(),
        "steps": trainer.steps,
        "average": None if trainer.average is None else trainer.average.weights,
    }


def restore(trainer: Any, file: str | Path, train_data: Any = None) -> None:
    """Restore the state that :func:`capture` returned, in a new trainer of that configuration.

    The random state of ``train_data``, the loader that it will train with, is restored too.

    Raises:
        CheckpointError: if such a trainer would not have written the file, or it was trained on
            other data.
        UsageError: if the file is of another model.
    """
    state = checkpoint.load(file, RESUMABLE)
    try:
        _restore(trainer, state, file, train_data)
    except PosError:
        raise
    except Exception as error:  # a part that is of another kind raises something else everywhere
        raise CheckpointError(f"{file} cannot be used: {shown(str(error))}") from error


def _restore(trainer: Any, state: dict[str, Any], file: str | Path, train_data: Any) -> None:
    """Restore the state of a file in a trainer, see :func:`restore`."""
    if (model := state["config"]["model"]) != trainer.config["model"]:
        raise UsageError(f"{file} is of model {shown(model)}, not {trainer.config['model']}")
    if train_data is not None:
        checkpoint.require_same_data(state, train_data._dataset.identity, file)
    trainer.progress = checkpoint.Progress(**state["progress"])
    # the trainer writes to its tensors; those of the file stay mapped, and may share memory
    trainer.best_weights = checkpoint.copy_to_cpu(state["best_weights"])
    for weights in filter(None, (state["best_weights"], state["weights"])):  # checks both
        load_weights(trainer.model, weights, file)
    moments = checkpoint.copy_to_cpu(state["optimizer"]["state"])
    _require_moments(trainer.optimizer, moments, file)
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": moments})
    trainer.steps = state["steps"]
    if trainer.average is not None:
        _require_like(state["average"], trainer.average.weights, "average", file)
        for name, average in trainer.average.weights.items():
            average.copy_(state["average"][name])
    trainer.scaler.load_state_dict(state["scaler"])
    checkpoint.set_random_state(state["random"])
    if state["loader"] is not None and train_data is not None:
        train_data.generator.set_state(state["loader"])


def _require_moments(
    optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Any]], file: str | Path
) -> None:
    """Refuse moments of an optimiser that do not fit its parameters; some may have none."""
    indices = [i for group in optimizer.state_dict()["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        tensors = {name: moment for name, moment in moments.get(index, {}).items() if moment.dim()}
        expected = dict.fromkeys(tensors, parameter)
        _require_like(tensors, expected, f"optimizer.state.{index}", file)


def extract_weights(model: Any) -> dict[str, Any]:
    """Return ``state_dict`` of a model, and ``other``: its ``other_parameter`` as plain values.

    The tensors are the model's own and change with it.
    """
    other = to_plain(_get_other_parameters(model))
    return {"state_dict": dict(model.state_dict()), "other": other}


def make_config(
    state: dict[str, Any], file: str | Path, options: dict[str, Any] | None = None
) -> PosConfig:
    """Return the configuration in a checkpoint; ``options`` win over it."""
    plain = state.get("config") or {}
    if not {"model", "dataset"} <= plain.keys():
        raise CheckpointError(f"{file} names no model or no dataset")
    return PosConfig(config_dict={**plain, **(options or {})}, strict=False)


def load_best(
    model: Any,
    file: str | Path,
    identity: dict[str, Any] | None = None,
    allows_changed_fields: bool = False,
    vocabulary: Vocabulary | None = None,
) -> list[str]:
    """Load the best weights of a checkpoint, or the newest if no epoch was validated yet.

    A given ``identity`` of the data, or the ``vocabulary`` that replaces them, must be that of
    training; with ``allows_changed_fields``, fields may have other values. Returns these fields.
    """
    state = checkpoint.load(file, ("weights", "best_weights", *checkpoint.IDENTITY))
    require_vocabulary(state, vocabulary, file)
    if identity is not None:
        required = {**identity, "fields": {}} if allows_changed_fields else identity
        checkpoint.require_same_data(state, required, file)
    load_weights(model, state["best_weights"] or state["weights"], file)
    return [] if identity is None else find_changed_fields(state, identity)


def require_vocabulary(
    state: dict[str, Any], vocabulary: Vocabulary | None, file: str | Path
) -> None:
    """Raise a CheckpointError if a vocabulary is given that the weights were not trained with."""
    if vocabulary is not None and state.get("known") not in (None, vocabulary.digest):
        raise CheckpointError(
            f"{RunFolder(Path(file).parent).known} is not the one that was written with {file}: "
            "names or counts differ, so weights would be of other items; copy the run again"
        )


def load_weights(model: Any, weights: dict[str, Any], source: str | Path = "these weights") -> None:
    """Put weights in the form of :func:`extract_weights` into a model.

    Raises:
        CheckpointError: if they are of another architecture, or not finite; names ``source``.
    """
    try:
        difference = find_difference(weights["state_dict"], dict(model.state_dict()))
        other_parameters = from_plain(weights["other"])
        expected = _get_other_parameters(model)
        for name in expected.keys() | other_parameters.keys():
            if expected[name] is None:
                continue
            shape = getattr(other_parameters[name], "shape", 0)
            if shape != getattr(expected[name], "shape", 0):
                difference = f"{name} is of another shape"
    except Exception as error:  # a missing name, or whatever scipy raises
        difference = shown(str(error))
    if difference:
        raise CheckpointError(f"{source} cannot be used with this model: {difference}")
    model.load_state_dict(weights["state_dict"])
    model.load_other_parameter(other_parameters)


def _get_other_parameters(model: Any) -> dict[str, Any]:
    """Return RecBole's ``other_parameter`` of a model, without modules, which state_dict has."""
    others = model.other_parameter() or {}
    return {name: value for name, value in others.items() if not isinstance(value, nn.Module)}
