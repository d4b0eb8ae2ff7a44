"""Captures the state of a trainer for a checkpoint, and restores it.

Nothing of a file is used before all of it was compared with what this trainer would have written:
names, shapes, types, finite values. Fused Adam writes to a tensor of another shape as if it had
the shape of the parameter, and the process dies. The optimiser's state is restored; its options
follow from configuration and epoch.
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
    results = (source.result, source.ranks) if with_results else ()
    vectors = (source.vectors, source.vectors.with_suffix(".txt"))
    files = (source.config, source.metrics, source.known, *vectors, *source.old_best, *results)
    for file in files:
        if file.is_file():
            shutil.copy(file, target.path)
    with (
        source.checkpoint.open("rb") as original,
        atomic_write(target.checkpoint, text=False) as file,
    ):
        shutil.copyfileobj(original, file)


def find_difference(found: Any, like: dict[str, Tensor]) -> str | None:
    """Describe how tensors of a file differ from those they should be like, or return None.

    Names, shapes and types must be the same, and numbers finite where those of ``like`` are.
    """
    if not isinstance(found, dict):
        return f"expected tensors by name, found {type(found).__name__}"
    if odd := sorted(map(shown, like.keys() ^ found.keys())):
        return f"lacks, or has unknown, {', '.join(odd[:3])}"
    for name, own in like.items():
        value = found[name]
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (own.shape, own.dtype):
            kind = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            return f"{name}: expected {list(own.shape)} of {own.dtype}, found {kind}"
        if not value.isfinite().all() and own.isfinite().all():
            return f"{name} has numbers that are not finite"
    return None


def _require(found: Any, like: dict[str, Tensor], place: str, file: str | Path) -> None:
    """Raise a CheckpointError about the first difference, see :func:`find_difference`."""
    if wrong := find_difference(found, like):
        raise CheckpointError(f"{file} cannot be used with this model: {place}: {wrong}")


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
        "known": trainer.known,
        "progress": vars(progress),
        "weights": trainer.best_weights if is_best else extract_weights(trainer.model),
        "best_weights": trainer.best_weights,
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": checkpoint.random_state(),
        "loader": None if generator is None else generator.get_state(),
        "steps": trainer.steps,
        "average": None if trainer.average is None else trainer.average.weights,
    }


def restore(trainer: Any, file: str | Path, train_data: Any = None) -> None:
    """Restore the state that :func:`capture` returned, into a new trainer of its configuration.

    The sampler of ``train_data``, the loader that it will train with, is restored too.

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
        _require(state.get("average"), trainer.average.weights, "average", file)
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
    tiny = torch.zeros(1, requires_grad=True)
    tiny.grad = torch.ones(1)
    optimizer_class: Any = type(optimizer)
    twin = optimizer_class([tiny], lr=0.1)
    twin.step()
    numbers = [n for group in optimizer.state_dict()["param_groups"] for n in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not isinstance(moments, dict) or not moments.keys() <= set(numbers):
        raise CheckpointError(f"{file} cannot be used: its optimizer has other parameters")
    for number, parameter in zip(numbers, parameters, strict=True):
        like = {
            name: parameter if isinstance(kept, Tensor) and kept.dim() else torch.as_tensor(kept)
            for name, kept in twin.state[tiny].items()
        }
        if number in moments:
            _require(moments[number], like, f"optimizer.state.{number}", file)


def extract_weights(model: Any) -> dict[str, Any]:
    """Return the weights of a model, and what RecBole's models keep beside them, as plain values.

    The tensors are the model's own and change with it.
    """
    return {"state_dict": dict(model.state_dict()), "other": to_plain(_other(model))}


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
    known: Vocabulary | None = None,
) -> list[str]:
    """Load the best weights of a checkpoint, or the newest where none was validated yet.

    Args:
        model: the model that gets the weights.
        file: the checkpoint.
        identity: identity of the data at hand, which must be those of training; None to allow any.
        changeable: whether fields may have other values than in training.
        known: vocabulary that is read in place of data.

    Returns:
        The fields whose values have changed since training.
    """
    state = checkpoint.load(file, ("weights", "best_weights"))
    require_known(state, known, file)
    if identity is not None:
        same = {**identity, "fields": {}} if changeable else identity
        checkpoint.require_same_data(state, same, file)
    load_weights(model, state["best_weights"] or state["weights"], file)
    return [] if identity is None else find_changed_fields(state, identity)


def require_known(state: dict[str, Any], known: Vocabulary | None, file: str | Path) -> None:
    """Refuse a vocabulary, if any, that is not the one that weights were learned with."""
    if known is not None and state.get("known") not in (None, known.digest):
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
        other, own = from_plain(weights["other"]), _other(model)
        wrong = find_difference(weights["state_dict"], dict(model.state_dict()))
        for name in own.keys() | other.keys():
            kept = own[name]
            if kept is not None and getattr(other[name], "shape", 0) != getattr(kept, "shape", 0):
                wrong = f"{name} is of another shape"
    except Exception as error:  # whatever scipy stumbles over
        wrong = shown(str(error))
    if wrong:
        raise CheckpointError(f"{source} cannot be used with this model: {wrong}")
    model.load_state_dict(weights["state_dict"])
    model.load_other_parameter(other)


def _other(model: Any) -> dict[str, Any]:
    """Return the ``other_parameter`` of RecBole's models, without modules: state_dict has those."""
    other = model.other_parameter() or {}
    return {k: v for k, v in other.items() if not isinstance(v, torch.nn.Module)}
