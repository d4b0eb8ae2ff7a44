"""How a checkpoint is taken from a trainer and given back to one.

Nothing of a file is used before all of it was compared with what this trainer would have written:
names, shapes, strides, types, finite values (``expected.py``). Fused Adam writes to a tensor of
another shape as if it had that of the parameter, and the process dies. Of the optimiser its state
is taken up; its options follow from configuration and epoch.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import scipy.sparse
import torch
from torch import Tensor

from recbole_pos.config.posconfig import PosConfig, fitted, plain_of
from recbole_pos.data.identity import changed_fields
from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.checkpoint import Progress
from recbole_pos.experiment.expected import Anything, AtLeast, Including, Maybe, Sparse, difference
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
    weights = expected_weights(trainer.model)
    expected = {
        "weights": weights,
        "best_weights": Maybe(weights),
        "optimizer": _expected_optimizer(trainer.optimizer, state["optimizer"]),
        "scaler": trainer.scaler.state_dict() or Anything(),  # {}: it is switched off
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
    groups = trainer.optimizer.state_dict()["param_groups"]
    kept = {  # copies: tensors that share memory in the file must not when they are written to
        number: {name: copy.deepcopy(value) for name, value in of.items()}
        for number, of in state["optimizer"]["state"].items()
    }
    trainer.optimizer.load_state_dict({"state": kept, "param_groups": groups})
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
    if wrong := difference(weights, expected_weights(model), "weights"):
        raise CheckpointError(f"{source} cannot be used with this model: {wrong}")
    put_weights(model, weights)


def put_weights(model: Any, weights: dict[str, Any]) -> None:
    """As :func:`load_weights`, for weights that were checked."""
    model.load_state_dict(weights["state_dict"])
    model.load_other_parameter(from_plain(weights["other"]))


def expected_weights(model: Any) -> dict[str, Any]:
    """What :func:`weights_of` gives for such a model, see ``expected.py``."""
    other = {name: _like(value) for name, value in _other(model).items()}
    return {"state_dict": dict(model.state_dict()), "other": other}


def _other(model: Any) -> dict[str, Any]:
    """What RecBole's models keep beside their state_dict; some list sub-modules, which it has."""
    other = model.other_parameter() or {}
    return {k: v for k, v in other.items() if not isinstance(v, torch.nn.Module)}


def _like(value: Any) -> Any:
    if value is None:  # it comes with training
        return Anything()
    if scipy.sparse.issparse(value):
        return Sparse(value.shape, to_plain(value)["data"].dtype)
    return to_plain(value)


def _expected_optimizer(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """State for parameters that have been trained, and the parameters there are."""
    groups = optimizer.state_dict()["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: _expected_state(optimizer, parameter)
        for number, parameter in zip(numbers, parameters, strict=True)
        if number in given["state"]
    }
    trained = [Including({"params": group["params"]}) for group in groups]
    return {"state": state, "param_groups": trained}


def _expected_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """What such an optimiser keeps of a parameter; seen by a step of one of its kind.

    A gradient of -1 makes negative what has a sign: the rest must be at least 0, since roots are
    taken of it.
    """
    names = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in names}
    tiny = torch.zeros(1, dtype=parameter.dtype, requires_grad=True)
    tiny.grad = -torch.ones_like(tiny)
    twin = type(optimizer)([tiny], **options)
    twin.step()
    kept: dict[str, Any] = {}
    for name, value in twin.state[tiny].items():
        if not isinstance(value, Tensor):
            kept[name] = Anything()
            continue
        example = torch.zeros_like(value if value.dim() == 0 else parameter, device="cpu")
        kept[name] = AtLeast(example, 0) if bool((value >= 0).all()) else example
    return kept


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
