"""Checkpoints: the state of a training in one file of tensors and plain values, and its way back.

RecBole's trainer pickles its config into checkpoints, which today's torch rightly refuses to load.
A checkpoint here has all random states, so that a resumed run ends with the same bits. Tensors of a
file are compared with those of the trainer before they are used: fused Adam writes to a tensor of
another shape as if it had the shape of the parameter, and the process dies.
"""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recbole_pos.config.posconfig import PosConfig, to_plain_options
from recbole_pos.data.identity import Vocabulary, describe_changes, find_changed_fields
from recbole_pos.errors import CheckpointError, PosError, UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.files import atomic_write
from recbole_pos.plain import from_plain, to_plain
from recbole_pos.values import short, shown

FORMAT = "recbole-pos/1"
IDENTITY = ("data", "fields")  # parts that say of the data what ``data/identity.py`` computes
WRITING_SHARE = 0.05  # most of the training time that may go into writing checkpoints

Metrics = dict[str, float]


@dataclass
class Progress:
    """Progress of a training; epochs count from 0. Part of a checkpoint."""

    next_epoch: int = 0
    stopped: bool = False  # by early stopping, or a callback
    steps_without_gain: int = 0
    best_epoch: int | None = None
    best_score: float | None = None
    best_result: Metrics | None = None
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    trained_targets: int = 0
    history: list[dict[str, int | float | Metrics | None]] = field(default_factory=list)


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that at any moment either the old file or the new one is complete.

    A value that would have to be pickled is a TypeError, see :func:`to_plain`.
    """
    with atomic_write(path, text=False) as file:
        torch.save({"format": FORMAT, **to_plain(state)}, file)


def load(path: str | Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """Read the parts of a checkpoint by name onto the CPU, without running anything in it.

    Raises:
        CheckpointError: if the file is missing, damaged, lacks a required part, or was not written
            by this package.
    """
    if not os.path.isfile(path):  # False if the name is too long, where pathlib may raise
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # not read yet
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects, which could run code when loaded, and not only tensors and "
            "plain values; nothing in it was run. If you trust its author, and RecBole's trainer "
            "wrote it, it loads with RecBole's load_data_and_model(file, trust=True)"
        ) from error
    except Exception as error:  # torch raises different ones
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is truncated or no checkpoint: {short(reason)}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by this package (expected {FORMAT})")
    if missing := [name for name in required if name not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return {name: part for name, part in state.items() if name != "format"}


def require_same_data(state: dict[str, Any], identity: dict[str, Any], path: str | Path) -> None:
    """Raise a CheckpointError if a checkpoint was trained on other data than ``identity``."""
    if changed := describe_changes(state, identity):
        raise CheckpointError(
            f"{path} was trained on other data or another split: {changed} have changed since, so "
            "its weights do not fit. Recommending, evaluating and updating take data that have "
            "grown by later interactions of each user; most models answer given histories without "
            "data (`--histories`, `serve --histories_only`, in Python histories_only=True); else "
            "train again"
        )


def get_random_state() -> dict[str, Any]:
    """Return the states of all random number generators that training uses, as plain values."""
    numpy_state: Any = np.random.get_state()  # a tuple, though its type says "or a mapping"
    kind, words, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(words.astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put all random number generators into the states of :func:`get_random_state`."""
    kind, words, position, *rest = state["numpy"]
    if words.shape != (624,) or not 0 <= position <= 624:  # numpy would read past the end
        raise ValueError("expected 624 words of numpy's generator")
    np.random.set_state((kind, words.numpy().astype(np.uint32), position, *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        # of the devices that are there: the run may have seen more
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


class CheckpointWriter:
    """Writes the checkpoints of a training, in at most a twentieth of its time.

    An epoch that ends too soon after the last write is kept in memory, where a later epoch replaces
    it; it is written if the training is stopped. So ``kill -9`` costs an epoch, or twenty times the
    time of a write.

    Args:
        file: the checkpoint; None to write nothing.
        capture: returns the state of the training, see ``state.capture``. Its ``best_weights`` must
            not be changed later: they are not copied.
    """

    def __init__(self, file: Path | None, capture: Callable[[], dict[str, Any]]) -> None:
        self.file, self.capture = file, capture
        self._unwritten: dict[str, Any] | None = None  # state of the newest epoch
        self._next_write = 0.0  # time from which there may be another write

    def keep(self) -> None:
        """Write the state after an epoch, or keep a copy of it in memory if it is too soon."""
        if self.file is None:
            return
        self._unwritten = None  # frees its memory before the next state is captured
        state = self._unwritten = self.capture()
        if time.monotonic() >= self._next_write:
            self.flush()
            return
        best_weights = state["best_weights"]  # never changed, so not copied
        self._unwritten = {
            name: part if part is best_weights else copy_to_cpu(part)
            for name, part in state.items()
        }

    def flush(self) -> None:
        """Write the newest state at once, unless it is written; also after an interrupted write."""
        if self._unwritten is None or self.file is None:
            return
        started = time.monotonic()
        save(self.file, self._unwritten)
        self._unwritten = None
        ended = time.monotonic()
        self._next_write = ended + (ended - started) / WRITING_SHARE


def copy_to_cpu(value: Any) -> Any:
    """Return a copy of a tree of lists, mappings and tensors, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_cpu(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(copy_to_cpu, value))
    return value


# --- the state of a trainer ---


# What a checkpoint must hold to be resumed.
RESUMABLE = (
    *("config", "progress", "weights", "best_weights", "optimizer", "scaler", "random", "loader"),
    *("steps", *IDENTITY),
)


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


def capture(trainer: Any) -> dict[str, Any]:
    """Return the state of a trainer that a resumed run needs to end with the same bits.

    The tensors are the trainer's own and change with it, except the tensors of ``best_weights``. If
    the newest weights are the best, ``weights`` and ``best_weights`` are the same object.
    """
    generator = getattr(trainer.loader, "generator", None)
    progress = trainer.progress
    is_best = progress.best_epoch == progress.next_epoch - 1
    return {
        "config": to_plain_options(trainer.config),
        **trainer.identity,
        "known": trainer.vocabulary_digest,
        "progress": vars(progress),
        "weights": trainer.best_weights if is_best else extract_weights(trainer.model),
        "best_weights": trainer.best_weights,
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": get_random_state(),
        "loader": None if generator is None else generator.get_state(),
        "steps": trainer.steps,
    }


def restore(trainer: Any, file: str | Path, train_data: Any = None) -> None:
    """Restore the state that :func:`capture` returned, in a new trainer of that configuration.

    The random state of ``train_data``, the loader that it will train with, is restored too.

    Raises:
        CheckpointError: if such a trainer would not have written the file, or it was trained on
            other data.
        UsageError: if the file is of another model.
    """
    state = load(file, RESUMABLE)
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
        require_same_data(state, train_data._dataset.identity, file)
    trainer.progress = Progress(**state["progress"])
    # the trainer writes to its tensors; those of the file stay mapped, and may share memory
    trainer.best_weights = copy_to_cpu(state["best_weights"])
    for weights in filter(None, (state["best_weights"], state["weights"])):  # checks both
        load_weights(trainer.model, weights, file)
    moments = copy_to_cpu(state["optimizer"]["state"])
    _require_moments(trainer.optimizer, moments, file)
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": moments})
    trainer.steps = state["steps"]
    trainer.scaler.load_state_dict(state["scaler"])
    set_random_state(state["random"])
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
        if difference := find_difference(tensors, dict.fromkeys(tensors, parameter)):
            raise CheckpointError(
                f"{file} cannot be used with this model: optimizer.state.{index}: {difference}"
            )


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
    state = load(file, ("weights", "best_weights", *IDENTITY))
    require_vocabulary(state, vocabulary, file)
    if identity is not None:
        required = {**identity, "fields": {}} if allows_changed_fields else identity
        require_same_data(state, required, file)
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
