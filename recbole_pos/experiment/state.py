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

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from recbole_pos.config.posconfig import PosConfig, limit_workers, to_plain_options
from recbole_pos.data.identity import Known, changed_fields
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.checkpoint import Progress, find_difference, is_any
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.plain import from_plain, to_plain

# What a checkpoint must hold to be resumed.
RESUMABLE = "config progress weights best_weights optimizer scaler random loader".split()


def copy_run(source: RunFolder, target: RunFolder, with_results: bool = False) -> None:
    """Copy the files of a training into another folder.

    The checkpoint is copied last: until it is there, the target does not count as a trained run.

    Args:
        source: folder of a run with a checkpoint.
        target: folder to copy into, created if necessary.
        with_results: whether to copy the result and the ranks of the test too.
    """
    make_folder(target.path)
    results = (source.result, source.ranks) if with_results else ()
    vectors = (source.vectors, source.vectors.with_suffix(".txt"))
    for file in (source.config, source.metrics, source.known, *vectors, *results):
        if file.is_file():
            shutil.copy(file, target.path)
    checkpoint.copy(source.checkpoint, target.checkpoint)


def capture(trainer: Any) -> dict[str, Any]:
    """Return the state of a trainer that a resumed run needs to end with the same bits."""
    generator = getattr(trainer.loader, "generator", None)
    return {
        "config": to_plain_options(trainer.config),
        **trainer.identity,
        "known": trainer.known,
        "progress": vars(trainer.progress),
        "weights": extract_weights(trainer.model),
        "best_weights": trainer.best_weights,
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": checkpoint.random_state(),
        "loader": None if generator is None else generator.get_state(),
        "steps": trainer.steps,
        "average": None if trainer.average is None else trainer.average.weights,
    }


def restore(trainer: Any, file: str | Path, train_data: Any = None) -> None:
    """Restore the state that :func:`capture` returned; a refused file changes nothing.

    Args:
        trainer: a new trainer of the same configuration.
        file: the checkpoint.
        train_data: the loader that the trainer will train with; its sampler is restored, too.

    Raises:
        CheckpointError: if anything in the file is not what such a trainer would have written, or
            was learned from other data.
        UsageError: if the file is of another model.
    """
    state = checkpoint.load(file, RESUMABLE)
    parameters, moments = _number_parameters(trainer.optimizer), state["optimizer"]["state"]
    _require_restorable(trainer, state, parameters, file, train_data)
    if trainer.average is not None:
        for name, average in trainer.average.weights.items():
            average.copy_(state["average"][name])
    trainer.progress, trainer.steps = Progress(**state["progress"]), state.get("steps", 0)
    put_weights(trainer.model, state["weights"])
    trainer.best_weights = state["best_weights"]
    # options of the optimiser follow from the configuration and the epoch; its state does not
    moments = {
        number: {name: _copy_as(value, parameters[number]) for name, value in values.items()}
        for number, values in moments.items()
    }
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": moments})
    trainer.scaler.load_state_dict(state["scaler"])
    checkpoint.set_random_state(state["random"])
    if state["loader"] is not None and train_data is not None:
        train_data.generator.set_state(state["loader"].cpu())


def _require_restorable(
    trainer: Any,
    state: dict[str, Any],
    parameters: dict[int, Tensor],
    file: str | Path,
    train_data: Any,
) -> None:
    """Compare all parts of a checkpoint with what a trainer would have written; see restore.

    Args:
        trainer: the trainer that is to be restored.
        state: content of the checkpoint.
        parameters: parameters of the optimiser by number.
        file: the checkpoint, for messages.
        train_data: the loader of training; None to allow other data.

    Raises:
        CheckpointError, UsageError: naming the first part that differs.
    """
    model = state["config"].get("model")
    if model != trainer.config["model"]:
        raise UsageError(f"{file} is of model {model}, not {trainer.config['model']}")
    if train_data is not None:
        checkpoint.require_same_data(state, train_data._dataset.identity, file)
    weights, moments = _weights_schema(trainer.model), state["optimizer"]["state"]
    schema = {
        "weights": weights,
        "best_weights": (None, weights),
        "scaler": {key: is_any for key in trainer.scaler.state_dict()} or is_any,
    }
    checkpoint.require(state, schema, file)
    optimizer = _optimizer_schema(trainer.optimizer, {n: parameters.get(n) for n in moments})
    checkpoint.require({"optimizer": moments}, {"optimizer": optimizer}, file)
    _require_consistent(state["progress"], state["best_weights"], file)
    if trainer.average is not None:
        checkpoint.require(
            {"average": state.get("average")}, {"average": trainer.average.weights}, file
        )


def extract_weights(model: Any) -> dict[str, Any]:
    """Return the weights of a model, and what RecBole's models keep beside them, as plain values.

    The tensors are the model's own and change with it.
    """
    return {
        "state_dict": dict(model.state_dict()),
        "other": to_plain(_other(model)),
    }


def config_in(state: dict[str, Any], file: str | Path) -> PosConfig:
    """Return the configuration in a checkpoint, for this machine.

    Raises:
        CheckpointError: if it names no model or dataset.
        UsageError: if it has options that this version refuses.
    """
    plain = state["config"]
    if missing := {"model", "dataset"} - set(plain):
        raise CheckpointError(
            f"{file} names no {' and no '.join(sorted(missing))}: an earlier version wrote it from "
            "RecBole's own functions; train again, or load its weights into a model by hand"
        )
    return PosConfig(None, None, None, {**plain, **limit_workers(plain)}, strict=False)


def load_best(
    model: Any,
    file: str | Path,
    identity: dict[str, Any] | None = None,
    changeable: bool = False,
    known: Known | None = None,
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

    Raises:
        CheckpointError: if the file is damaged, or of another model or other data.
    """
    state = checkpoint.load(file, ("weights", "best_weights"))
    require_known(state, known, file)
    if identity is not None:
        same = {**identity, "fields": {}} if changeable else identity
        checkpoint.require_same_data(state, same, file)
    load_weights(model, state["best_weights"] or state["weights"], file)
    return [] if identity is None else changed_fields(state, identity)


def require_known(state: dict[str, Any], known: Known | None, file: str | Path) -> None:
    """Refuse a vocabulary that is not the one that weights were learned with.

    Args:
        state: content of the checkpoint; of earlier versions, nothing can be compared.
        known: the vocabulary; None if there is none.
        file: the checkpoint, for the message.

    Raises:
        CheckpointError: if names, their order or counts differ.
    """
    if known is not None and state.get("known") not in (None, known.digest):
        raise CheckpointError(
            f"{RunFolder(Path(file).parent).known} is not the one that was written with {file}: "
            "names or counts differ, so weights would be of other items; copy the run again"
        )


def load_weights(model: Any, weights: dict[str, Any], source: str | Path = "these weights") -> None:
    """Put weights into a model.

    Args:
        model: the model that gets the weights.
        weights: weights as :func:`extract_weights` returns them.
        source: file of the weights, for the message.

    Raises:
        CheckpointError: if they are of another architecture, or not finite.
    """
    if wrong := find_difference(weights, _weights_schema(model), "weights"):
        raise CheckpointError(f"{source} cannot be used with this model: {wrong}")
    put_weights(model, weights)


def put_weights(model: Any, weights: dict[str, Any]) -> None:
    """Put weights into a model without checking them, see :func:`load_weights`."""
    model.load_state_dict(weights["state_dict"])
    model.load_other_parameter(from_plain(weights["other"]))


def _weights_schema(model: Any) -> dict[str, Any]:
    """Return the schema of a model's weights, see ``checkpoint.find_difference``."""
    other = {name: _other_schema(value) for name, value in _other(model).items()}
    return {"state_dict": dict(model.state_dict()), "other": other}


def _other(model: Any) -> dict[str, Any]:
    """Return the ``other_parameter`` of RecBole's models, without modules: state_dict has those."""
    other = model.other_parameter() or {}
    return {k: v for k, v in other.items() if not isinstance(v, torch.nn.Module)}


def _other_schema(own: Any) -> Any:
    """Return the schema of a tensor, sparse matrix or number that a model keeps beside its weights.

    Args:
        own: value in the model at hand; None if it is made by training, which allows any.
    """
    if own is None:
        return is_any
    if not scipy.sparse.issparse(own):
        plain = to_plain(own)
        return plain if isinstance(plain, Tensor) else type(plain)

    def fits(found: Any) -> bool:
        """a sparse matrix of finite numbers, of the shape and type that the model has"""
        try:
            matrix = from_plain(found)
            same = (matrix.shape, matrix.dtype) == (own.shape, own.dtype)
            return same and bool(np.isfinite(matrix.data).all())
        except Exception:  # whatever scipy and numpy stumble over
            return False

    return fits


def _number_parameters(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return an optimiser's parameters by the numbers that they have in its state."""
    numbers = (n for group in optimizer.state_dict()["param_groups"] for n in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return dict(zip(numbers, parameters, strict=True))


def _optimizer_schema(
    optimizer: torch.optim.Optimizer, parameters: dict[int, Tensor | None]
) -> dict[int, Any]:
    """Return the schema of the state that an optimiser keeps of its parameters.

    A step of a second optimiser of the same class shows its form. The step's gradient is -1, so
    state that is not negative after it has no sign: the optimiser takes its square root.

    Args:
        optimizer: the optimiser.
        parameters: parameters by number; None for a number that the optimiser does not have.
    """
    tiny = torch.zeros(1, requires_grad=True)
    tiny.grad = -torch.ones(1)
    optimizer_class: Any = type(optimizer)
    twin = optimizer_class([tiny], lr=0.1)
    twin.step()

    def make_schema(kept: Any, parameter: Tensor) -> Any:
        if not isinstance(kept, Tensor):
            return is_any
        like = torch.zeros_like(kept if kept.dim() == 0 else parameter, device="cpu")
        is_signed = bool((kept < 0).any())

        def fits(found: Any) -> bool:
            """a tensor like its parameter, finite and without a sign where none exists"""
            if find_difference(found, like, ""):
                return False
            return is_signed or not bool((found < 0).any())

        return fits

    return {
        number: {name: make_schema(kept, parameter) for name, kept in twin.state[tiny].items()}
        for number, parameter in parameters.items()
        if parameter is not None
    }


def _copy_as(value: Any, parameter: Tensor) -> Any:
    """Copy a value of the optimiser's state into the memory layout of its parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return copy.deepcopy(value)
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)


def _require_consistent(progress: dict[str, Any], best: Any, file: str | Path) -> None:
    """Refuse a checkpoint whose progress, history and best weights contradict each other.

    Args:
        progress: fields of :class:`~recbole_pos.experiment.checkpoint.Progress`.
        best: best weights; None before there are any.
        file: the checkpoint, for the message.

    Raises:
        CheckpointError: if they do.
    """
    done, best_epoch, history = (progress[k] for k in ("next_epoch", "best_epoch", "history"))
    epochs = [line["epoch"] for line in history]
    is_validated = best_epoch is not None and best_epoch < done and history[best_epoch]["valid"]
    has_scores = [progress[key] is not None for key in ("best_result", "best_score")]
    if (
        len(epochs) != done
        or epochs != list(range(done))
        or (best_epoch is None) != (best is None)
        or (best_epoch or 0) >= max(done, 1)
        or has_scores != [bool(is_validated)] * 2
    ):
        raise CheckpointError(
            f"{file} cannot be used: progress: {done} epochs, of which {best_epoch} was best, do "
            "not agree with its history, score and best weights"
        )
