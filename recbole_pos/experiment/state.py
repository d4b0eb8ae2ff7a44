"""How a checkpoint is taken from a trainer and given back to one.

Nothing of a file is used before all of it was compared with what this trainer would have written:
names, shapes, types, finite values. Fused Adam writes to a tensor of another shape as if it had
that of the parameter, and the process dies. Of the optimiser its state is taken up; its options
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

from recbole_pos.config.posconfig import PosConfig, fitted, to_plain_options
from recbole_pos.data.identity import changed_fields
from recbole_pos.data.known import Known
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.checkpoint import Progress, difference, is_any
from recbole_pos.experiment.folder import RunFolder, make_folder
from recbole_pos.plain import from_plain, to_plain

# What a checkpoint must hold to be resumed.
RESUMABLE = "config progress weights best_weights optimizer scaler random loader".split()


def copy_run(source: RunFolder, target: RunFolder, tested: bool = False) -> None:
    """Copy what a training leaves, the checkpoint last; with its test if that is to be kept."""
    make_folder(target.path)
    results = (source.result, source.ranks) if tested else ()
    vectors = (source.vectors, source.vectors.with_suffix(".txt"))
    for file in (source.config, source.metrics, source.known, *vectors, *results):
        if file.is_file():
            shutil.copy(file, target.path)
    checkpoint.copy(source.checkpoint, target.checkpoint)


def capture(trainer: Any) -> dict[str, Any]:
    """Return everything a resumed run needs to end with the same bits."""
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
    """Take up what :func:`capture` gave; a file that is refused leaves the trainer as it was.

    Args:
        trainer: a new one, of the same configuration.
        file: the checkpoint.
        train_data: the loader it will train with.

    Raises:
        CheckpointError: if anything in the file is not what such a trainer would have written, or
            was learned from other data.
        UsageError: if it is of another model.
    """
    state = checkpoint.load(file, RESUMABLE)
    model = state["config"].get("model")
    if model != trainer.config["model"]:
        raise UsageError(f"{file} is of model {model}, not {trainer.config['model']}")
    if train_data is not None:
        checkpoint.require_same_data(state, train_data._dataset.identity, file)
    weights, parameters = _weights_schema(trainer.model), _parameters(trainer.optimizer)
    kept = state["optimizer"]["state"]
    schema = {
        "weights": weights,
        "best_weights": (None, weights),
        "scaler": {key: is_any for key in trainer.scaler.state_dict()} or is_any,
    }
    checkpoint.require(state, schema, file)
    optimizer = _optimizer_schema(trainer.optimizer, {n: parameters.get(n) for n in kept})
    checkpoint.require({"optimizer": kept}, {"optimizer": optimizer}, file)
    _require_story(state["progress"], state["best_weights"], file)
    if trainer.average is not None:
        checkpoint.require(
            {"average": state.get("average")}, {"average": trainer.average.weights}, file
        )
        for name, own in trainer.average.weights.items():
            own.copy_(state["average"][name])

    trainer.progress, trainer.steps = Progress(**state["progress"]), state.get("steps", 0)
    put_weights(trainer.model, state["weights"])
    trainer.best_weights = state["best_weights"]
    # options of the optimiser follow from the configuration and the epoch; its state does not
    moments = {
        number: {name: _laid_out(value, parameters[number]) for name, value in moments.items()}
        for number, moments in kept.items()
    }
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": moments})
    trainer.scaler.load_state_dict(state["scaler"])
    checkpoint.set_random_state(state["random"])
    if state["loader"] is not None and train_data is not None:
        train_data.generator.set_state(state["loader"].cpu())


def extract_weights(model: Any) -> dict[str, Any]:
    """Return everything a model predicts with."""
    return {
        "state_dict": dict(model.state_dict()),
        "other": to_plain(_other(model)),
    }


def config_in(state: dict[str, Any], file: str | Path) -> PosConfig:
    """Return the configuration that a checkpoint has kept, on this machine.

    Raises:
        CheckpointError: if it lacks what was trained.
        UsageError: if this package does not take it.
    """
    plain = state["config"]
    if missing := {"model", "dataset"} - set(plain):
        raise CheckpointError(
            f"{file} names no {' and no '.join(sorted(missing))}: an earlier version wrote it from "
            "RecBole's own functions; train again, or load its weights into a model by hand"
        )
    return PosConfig(None, None, None, {**plain, **fitted(plain)}, strict=False)


def load_best(
    model: Any,
    file: str | Path,
    identity: dict[str, Any] | None = None,
    changeable: bool = False,
    known: Known | None = None,
) -> list[str]:
    """Load the best weights of a checkpoint, or the newest where none was validated yet.

    Args:
        model: which gets them.
        file: the checkpoint.
        identity: identity of the data at hand, which must be those it was trained on; any if None.
        changeable: whether their fields may have other values now.
        known: names and counts that are read in place of data.

    Returns:
        the fields that have.

    Raises:
        CheckpointError: if the file, its data or its weights are not as they must be.
    """
    state = checkpoint.load(file, ("weights", "best_weights"))
    require_known(state, known, file)
    if identity is not None:
        same = {**identity, "fields": {}} if changeable else identity
        checkpoint.require_same_data(state, same, file)
    load_weights(model, state["best_weights"] or state["weights"], file)
    return [] if identity is None else changed_fields(state, identity)


def require_known(state: dict[str, Any], known: Known | None, file: str | Path) -> None:
    """Refuse names that are not those, or not in the order, that weights were learned with.

    Raises:
        CheckpointError: if they are not; earlier versions kept nothing that tells.
    """
    if known is not None and state.get("known") not in (None, known.digest):
        raise CheckpointError(
            f"{RunFolder(Path(file).parent).known} is not the one that was written with {file}: "
            "names or counts differ, so weights would be of other items; copy the run again"
        )


def load_weights(model: Any, weights: dict[str, Any], source: str | Path = "these weights") -> None:
    """Put weights into a model.

    Args:
        model: which gets them.
        weights: as of :func:`extract_weights`.
        source: where they come from, for the message.

    Raises:
        CheckpointError: if they are of another architecture, or not finite.
    """
    if wrong := difference(weights, _weights_schema(model), "weights"):
        raise CheckpointError(f"{source} cannot be used with this model: {wrong}")
    put_weights(model, weights)


def put_weights(model: Any, weights: dict[str, Any]) -> None:
    """As :func:`load_weights`, for weights that were checked."""
    model.load_state_dict(weights["state_dict"])
    model.load_other_parameter(from_plain(weights["other"]))


def _weights_schema(model: Any) -> dict[str, Any]:
    """Return what :func:`extract_weights` gives for such a model, see ``checkpoint.difference``."""
    other = {name: _other_schema(value) for name, value in _other(model).items()}
    return {"state_dict": dict(model.state_dict()), "other": other}


def _other(model: Any) -> dict[str, Any]:
    """Return what RecBole's models keep beside their state_dict; some list sub-modules, which it
    has."""
    other = model.other_parameter() or {}
    return {k: v for k, v in other.items() if not isinstance(v, torch.nn.Module)}


def _other_schema(own: Any) -> Any:
    """For a tensor, a sparse matrix or a number; None comes with training."""
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


def _parameters(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return parameters by the numbers that they have in its state."""
    numbers = (n for group in optimizer.state_dict()["param_groups"] for n in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return dict(zip(numbers, parameters, strict=True))


def _optimizer_schema(
    optimizer: torch.optim.Optimizer, parameters: dict[int, Tensor | None]
) -> dict[int, Any]:
    """Return what such an optimiser keeps of these parameters.

    That is seen by a step of another one of this kind. A gradient of -1 makes negative what has a
    sign: of the rest roots are taken.
    """
    tiny = torch.zeros(1, requires_grad=True)
    tiny.grad = -torch.ones(1)
    kind: Any = type(optimizer)
    twin = kind([tiny], lr=0.1)
    twin.step()

    def schema(kept: Any, parameter: Tensor) -> Any:
        if not isinstance(kept, Tensor):
            return is_any
        like = torch.zeros_like(kept if kept.dim() == 0 else parameter, device="cpu")
        signed = bool((kept < 0).any())

        def fits(found: Any) -> bool:
            """a tensor like its parameter, finite and without a sign where none exists"""
            return not difference(found, like, "") and (signed or not bool((found < 0).any()))

        return fits

    return {
        number: {name: schema(kept, parameter) for name, kept in twin.state[tiny].items()}
        for number, parameter in parameters.items()
        if parameter is not None
    }


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """A copy as the optimiser writes to it: in memory of its own, in the order of the parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return copy.deepcopy(value)
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)


def _require_story(progress: dict[str, Any], best: Any, file: str | Path) -> None:
    """Refuse numbers of a training that do not agree with each other."""
    done, best_epoch, history = (progress[k] for k in ("next_epoch", "best_epoch", "history"))
    epochs = [line["epoch"] for line in history]
    validated = best_epoch is not None and best_epoch < done and history[best_epoch]["valid"]
    scored = [progress[key] is not None for key in ("best_result", "best_score")]
    if (
        len(epochs) != done
        or epochs != list(range(done))
        or (best_epoch is None) != (best is None)
        or (best_epoch or 0) >= max(done, 1)
        or scored != [bool(validated)] * 2
    ):
        raise CheckpointError(
            f"{file} cannot be used: progress: {done} epochs, of which {best_epoch} was best, do "
            "not agree with its history, score and best weights"
        )
