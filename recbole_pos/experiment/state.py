"""Capture the state of a trainer for a checkpoint, and restore it.

Nothing of a file is used before it was compared with what this trainer would have written: names,
shapes, types, finite values. Fused Adam writes to a tensor of another shape as if it had the shape
of the parameter, and the process dies. The optimiser's options follow from configuration and epoch.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recbole_pos.config.posconfig import PosConfig, limit_workers, to_plain_options
from recbole_pos.data.identity import Vocabulary, find_changed_fields
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.files import atomic_write
from recbole_pos.plain import from_plain, to_plain
from recbole_pos.values import shown

# What a checkpoint must hold to be resumed.
RESUMABLE = "config progress weights best_weights optimizer scaler random loader".split()


def copy_run(source: RunFolder, target: RunFolder, with_results: bool = False) -> None:
    """Copy a training into another folder, ``with_results`` of its test too.

    The checkpoint is copied last: until it is there, the target does not count as a trained run.
    """
    make_folder(target.path)
    files = [source.config, source.metrics, source.known, *source.old_best]
    files += [source.vectors, source.vectors.with_suffix(".txt")]
    files += [source.result, source.ranks] if with_results else []
    for file in files:
        if file.is_file():
            shutil.copy(file, target.path)
    with (
        source.checkpoint.open("rb") as original,
        atomic_write(target.checkpoint, text=False) as copied,
    ):
        shutil.copyfileobj(original, copied)


def find_difference(tensors: Any, expected: dict[str, Tensor]) -> str | None:
    """Describe how tensors of a file differ from those that it should have, or return None.

    Names, shapes and types must be the same, and numbers finite where the expected ones are.
    """
    if not isinstance(tensors, dict):
        return f"expected tensors by name, found {type(tensors).__name__}"
    if unmatched := sorted(map(shown, expected.keys() ^ tensors.keys())):
        return f"lacks, or has unknown, {', '.join(unmatched[:3])}"
    for name, like in expected.items():
        tensor = tensors[name]
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (
            like.shape,
            like.dtype,
        ):
            kind = f"{list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            return f"{name}: expected {list(like.shape)} of {like.dtype}, found {kind}"
        if not tensor.isfinite().all() and like.isfinite().all():
            return f"{name} has numbers that are not finite"
    return None


def _require_like(tensors: Any, expected: dict[str, Tensor], part: str, file: str | Path) -> None:
    """Raise a CheckpointError about the first difference, see :func:`find_difference`."""
    if difference := find_difference(tensors, expected):
        raise CheckpointError(f"{file} cannot be used with this model: {part}: {difference}")


def capture(trainer: Any) -> dict[str, Any]:
    """Return the state of a trainer that a resumed run needs to end with the same bits.

    The tensors are the trainer's own and change with it, except those of ``best_weights``. If these
    are the newest weights, they are the file's ``weights`` too.
    """
    generator, progress = getattr(trainer.loader, "generator", None), trainer.progress
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
    """Restore the state that :func:`capture` returned.

    Args:
        trainer: a new trainer of the configuration in the file.
        file: the checkpoint.
        train_data: the loader that it will train with, whose sampler is restored too.

    Raises:
        CheckpointError: if anything in the file is not what such a trainer would have written, or
            was learned from other data.
        UsageError: if the file is of another model.
    """
    state = checkpoint.load(file, RESUMABLE)
    if (model := state["config"].get("model")) != trainer.config["model"]:
        raise UsageError(f"{file} is of model {shown(model)}, not {trainer.config['model']}")
    if train_data is not None:
        checkpoint.require_same_data(state, train_data._dataset.identity, file)
    trainer.progress = checkpoint.make_progress(state["progress"], file)
    trainer.best_weights = copy.deepcopy(state["best_weights"])  # no part of the file, as it is
    for weights in filter(None, (state["best_weights"], state["weights"])):
        load_weights(trainer.model, weights, file)
    moments = copy.deepcopy(state["optimizer"].get("state"))
    _require_moments(trainer.optimizer, moments, file)
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": moments})
    trainer.steps = state.get("steps", 0)
    if trainer.average is not None:
        _require_like(state.get("average"), trainer.average.weights, "average", file)
        for name, average in trainer.average.weights.items():
            average.copy_(state["average"][name])
    try:
        trainer.scaler.load_state_dict(state["scaler"])
        checkpoint.set_random_state(state["random"])
        if state["loader"] is not None and train_data is not None:
            train_data.generator.set_state(state["loader"])
    except Exception as error:  # whatever torch, numpy and Python stumble over
        raise CheckpointError(f"{file} cannot be used: {shown(str(error))}") from error


def _require_moments(optimizer: torch.optim.Optimizer, moments: Any, file: str | Path) -> None:
    """Refuse moments that are not as an optimiser keeps them; some parameters may have none."""
    # a step of another optimiser of this class shows what it keeps: numbers, or tensors like the
    # parameter
    example = torch.zeros(1, requires_grad=True)
    example.grad = torch.ones(1)
    optimizer_class: Any = type(optimizer)
    other = optimizer_class([example], lr=0.1)
    other.step()
    indices = [i for group in optimizer.state_dict()["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not isinstance(moments, dict) or not moments.keys() <= set(indices):
        raise CheckpointError(f"{file} cannot be used: its optimizer has other parameters")
    for index, parameter in zip(indices, parameters, strict=True):
        if index not in moments:
            continue
        expected = {
            name: parameter if isinstance(value, Tensor) and value.dim() else torch.as_tensor(value)
            for name, value in other.state[example].items()
        }
        _require_like(moments[index], expected, f"optimizer.state.{index}", file)


def extract_weights(model: Any) -> dict[str, Any]:
    """Return the weights of a model, and what RecBole's models keep beside them, as plain values.

    The tensors are the model's own and change with it.
    """
    others = to_plain(_get_other_parameters(model))
    return {"state_dict": dict(model.state_dict()), "other": others}


def make_config(
    state: dict[str, Any], file: str | Path, options: dict[str, Any] | None = None
) -> PosConfig:
    """Return the configuration in a checkpoint, for this machine and with other options."""
    plain = state.get("config") or {}
    if not {"model", "dataset"} <= plain.keys():
        raise CheckpointError(f"{file} names no model or no dataset")
    plain = {**plain, **limit_workers(plain), **(options or {})}
    return PosConfig(None, None, None, plain, strict=False)


def load_best(
    model: Any,
    file: str | Path,
    identity: dict[str, Any] | None = None,
    changeable: bool = False,
    vocabulary: Vocabulary | None = None,
) -> list[str]:
    """Load the best weights of a checkpoint, or the newest where none was validated yet.

    Args:
        model: the model that gets the weights.
        file: the checkpoint.
        identity: identity of the data at hand, which must be those of training; None to allow any.
        changeable: whether fields may have other values than in training.
        vocabulary: vocabulary that is read in place of data.

    Returns:
        The fields whose values have changed since training.
    """
    state = checkpoint.load(file, ("weights", "best_weights"))
    require_vocabulary(state, vocabulary, file)
    if identity is not None:
        required = {**identity, "fields": {}} if changeable else identity
        checkpoint.require_same_data(state, required, file)
    load_weights(model, state["best_weights"] or state["weights"], file)
    return [] if identity is None else find_changed_fields(state, identity)


def require_vocabulary(
    state: dict[str, Any], vocabulary: Vocabulary | None, file: str | Path
) -> None:
    """Refuse a vocabulary, if any, that is not the one that weights were learned with."""
    if vocabulary is not None and state.get("known") not in (None, vocabulary.digest):
        raise CheckpointError(
            f"{RunFolder(Path(file).parent).known} is not the one that was written with {file}: "
            "names or counts differ, so weights would be of other items; copy the run again"
        )


def load_weights(model: Any, weights: dict[str, Any], source: str | Path = "these weights") -> None:
    """Put weights, as :func:`extract_weights` returns them, into a model.

    Raises:
        CheckpointError: if they are of another architecture, or not finite.
    """
    try:
        difference = find_difference(weights["state_dict"], dict(model.state_dict()))
        others, expected = from_plain(weights["other"]), _get_other_parameters(model)
        for name in expected.keys() | others.keys():
            like = expected[name]
            if like is not None and getattr(others[name], "shape", 0) != getattr(like, "shape", 0):
                difference = f"{name} is of another shape"
    except Exception as error:  # whatever scipy stumbles over
        difference = shown(str(error))
    if difference:
        raise CheckpointError(f"{source} cannot be used with this model: {difference}")
    model.load_state_dict(weights["state_dict"])
    model.load_other_parameter(others)


def _get_other_parameters(model: Any) -> dict[str, Any]:
    """Return the ``other_parameter`` of RecBole's models, without modules: state_dict has those."""
    others = model.other_parameter() or {}
    return {k: v for k, v in others.items() if not isinstance(v, torch.nn.Module)}
