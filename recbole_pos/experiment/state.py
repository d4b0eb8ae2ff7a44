"""How a checkpoint is taken from a trainer and given back to one.

Nothing of a file is used before all of it was compared with what this trainer would have written:
names, shapes, types, finite values. Fused Adam writes to a tensor of another shape as if it had
that of the parameter, and the process dies. Of the optimiser its state is taken up; its options
follow from configuration and epoch.
"""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from recbole_pos.config.posconfig import PosConfig, fitted, plain_of
from recbole_pos.data.identity import changed_fields
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.checkpoint import Maybe, Progress, Rule, difference, tensor
from recbole_pos.plain import from_plain, to_plain

# What a checkpoint must hold to be resumed.
RESUMABLE = "config progress weights best_weights optimizer scaler random loader".split()


def capture(trainer: Any) -> dict[str, Any]:
    """Everything a resumed run needs to end with the same bits."""
    generator = getattr(trainer.loader, "generator", None)
    return {
        "config": plain_of(trainer.config),
        **trainer.identity,
        "progress": vars(trainer.progress),
        "weights": weights_of(trainer.model),
        "best_weights": trainer.best_weights,
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": checkpoint.random_state(),
        "loader": None if generator is None else generator.get_state(),
    }


def restore(trainer: Any, file: str | Path, train_data: Any = None) -> None:
    """Inverse of :func:`capture`; a file that is refused leaves the trainer as it was.

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
    weights = _weights_like(trainer.model)
    expected = {
        "weights": weights,
        "best_weights": Maybe(weights),
        "optimizer": _optimizer_like(trainer.optimizer, state["optimizer"]),
        "scaler": trainer.scaler.state_dict() or (lambda _: ""),  # {}: it is switched off
    }
    checkpoint.require(state, expected, file)
    _require_story(state["progress"], state["best_weights"], file)
    try:
        checkpoint.try_random_state(state["random"])
        if state["loader"] is not None:
            torch.Generator().set_state(state["loader"])
    except (RuntimeError, ValueError, TypeError, LookupError, OverflowError) as error:
        raise CheckpointError(f"{file} cannot be used: random: {error}") from error

    trainer.progress = Progress(**state["progress"])
    put_weights(trainer.model, state["weights"])
    trainer.best_weights = state["best_weights"]
    # options of the optimiser follow from the configuration and the epoch; its state does not
    optimizer = trainer.optimizer.state_dict()
    parameters = _parameters(trainer.optimizer)
    optimizer["state"] = {
        number: {name: _laid_out(value, parameters[number]) for name, value in of.items()}
        for number, of in state["optimizer"]["state"].items()
    }
    trainer.optimizer.load_state_dict(optimizer)
    trainer.scaler.load_state_dict(state["scaler"])
    checkpoint.set_random_state(state["random"])
    if state["loader"] is not None and train_data is not None:
        train_data.generator.set_state(state["loader"].cpu())


def weights_of(model: Any) -> dict[str, Any]:
    """Everything a model predicts with."""
    return {
        "state_dict": dict(model.state_dict()),
        "other": to_plain(_other(model)),
    }


def config_in(state: dict[str, Any], file: str | Path) -> PosConfig:
    """The configuration that a checkpoint has kept, on this machine.

    Raises:
        CheckpointError: if it does not say what was trained.
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
) -> list[str]:
    """The best weights of a checkpoint, or the newest where none was validated yet.

    Args:
        model: which gets them.
        file: the checkpoint.
        identity: of the data at hand, which must be those it was trained on; any if None.
        changeable: whether their fields may have other values now.

    Returns:
        the fields that have.

    Raises:
        CheckpointError: if the file, its data or its weights are not as they must be.
    """
    state = checkpoint.load(file, ("weights", "best_weights"))
    if identity is not None:
        same = {**identity, "fields": {}} if changeable else identity
        checkpoint.require_same_data(state, same, file)
    load_weights(model, state["best_weights"] or state["weights"], file)
    return [] if identity is None else changed_fields(state, identity)


def load_weights(model: Any, weights: dict[str, Any], source: str | Path = "these weights") -> None:
    """Put weights into a model.

    Args:
        model: which gets them.
        weights: as of :func:`weights_of`.
        source: where they come from, for the message.

    Raises:
        CheckpointError: if they are of another architecture, or no numbers.
    """
    if wrong := difference(weights, _weights_like(model), "weights"):
        raise CheckpointError(f"{source} cannot be used with this model: {wrong}")
    put_weights(model, weights)


def put_weights(model: Any, weights: dict[str, Any]) -> None:
    """As :func:`load_weights`, for weights that were checked."""
    model.load_state_dict(weights["state_dict"])
    model.load_other_parameter(from_plain(weights["other"]))


def _weights_like(model: Any) -> dict[str, Any]:
    """What :func:`weights_of` gives for such a model, see ``checkpoint.difference``."""
    other = {name: _like(value) for name, value in _other(model).items()}
    return {"state_dict": dict(model.state_dict()), "other": other}


def _other(model: Any) -> dict[str, Any]:
    """What RecBole's models keep beside their state_dict; some list sub-modules, which it has."""
    other = model.other_parameter() or {}
    return {k: v for k, v in other.items() if not isinstance(v, torch.nn.Module)}


def _like(value: Any) -> Any:
    if value is None:  # it comes with training
        return lambda _: ""
    return _sparse(value) if scipy.sparse.issparse(value) else to_plain(value)


def _sparse(like: Any) -> Rule:
    def wanted(found: Any) -> str:
        try:
            matrix = from_plain(found)
            same = (matrix.shape, matrix.dtype) == (like.shape, like.dtype)
            fits = scipy.sparse.issparse(matrix) and same and np.isfinite(matrix.data).all()
        except Exception:  # whatever scipy and numpy stumble over
            fits = False
        return "" if fits else f"a sparse matrix {list(like.shape)} of finite {like.dtype}"

    return wanted


def _parameters(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Parameters by the numbers that they have in its state."""
    numbers = (n for group in optimizer.state_dict()["param_groups"] for n in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return dict(zip(numbers, parameters, strict=True))


def _optimizer_like(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """State for parameters that have been trained, and the parameters there are.

    What is kept of a parameter is seen by a step of another optimiser of this kind. A gradient of
    -1 makes negative what has a sign: of the rest roots are taken.
    """
    names = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in names}
    tiny = torch.zeros(1, requires_grad=True)
    tiny.grad = -torch.ones_like(tiny)
    twin = type(optimizer)([tiny], **options)
    twin.step()

    def rule(kept: Any, parameter: Tensor) -> Any:
        if not isinstance(kept, Tensor):
            return lambda _: ""
        like = torch.zeros_like(kept if kept.dim() == 0 else parameter, device="cpu")
        return tensor(like, 0 if bool((kept >= 0).all()) else -math.inf)

    return {
        "state": {
            number: {name: rule(kept, parameter) for name, kept in twin.state[tiny].items()}
            for number, parameter in _parameters(optimizer).items()
            if number in given["state"]
        },
        "param_groups": _groups(optimizer),
    }


def _groups(optimizer: torch.optim.Optimizer) -> Rule:
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]

    def wanted(found: Any) -> str:
        given = [group.get("params") for group in found]
        return "" if repr(given) == repr(numbers) else "the parameters of this model"

    return wanted


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """A copy as the optimiser writes to it: in memory of its own, in the order of the parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return copy.deepcopy(value)
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)


def _require_story(progress: dict[str, Any], best: Any, file: str | Path) -> None:
    """Numbers of a training that agree with each other."""
    done, best_epoch, history = (progress[k] for k in ("next_epoch", "best_epoch", "history"))
    wrong = ""
    if len(history) != done or any(line["epoch"] != i for i, line in enumerate(history)):
        wrong = f"progress.history: expected one line for each of {done} epochs, in order"
    elif (best_epoch is None) != (best is None):
        wrong = "best_weights and progress.best_epoch: expected both or neither"
    elif best_epoch is not None and not best_epoch < done:
        wrong = f"progress.best_epoch: {best_epoch} of {done} epochs"
    else:
        valid = None if best_epoch is None else history[best_epoch]["valid"]
        best_result = progress["best_result"]
        if (best_result and best_result.keys()) != (valid and valid.keys()):
            wrong = "progress.best_result: expected the metrics of the best epoch"
        elif (progress["best_score"] is None) != (valid is None):
            wrong = "progress.best_score: expected a score if the best epoch was validated"
    if wrong:
        raise CheckpointError(f"{file} cannot be used: {wrong}")
