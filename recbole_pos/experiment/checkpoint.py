"""Checkpoints: the state of a training in one file of tensors and plain values, and its way back.

RecBole's trainer pickles its config into checkpoints, which today's torch rightly refuses to load.
A checkpoint here has all random states, so that a resumed run ends with the same bits. Tensors of a
file are compared with those of the trainer before they are used: fused Adam writes to a tensor of
another shape as if it had the shape of the parameter, and the process dies.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn

from recbole_pos.config.posconfig import to_plain_options
from recbole_pos.data.identity import describe_changes, find_changed_fields
from recbole_pos.errors import CheckpointError, PosError, UsageError
from recbole_pos.files import atomic_write
from recbole_pos.values import short, shown, to_plain

FORMAT = "recbole-pos/1"
SPARSE = "scipy.sparse.csr"  # kind of a mapping that stands for a sparse matrix
WRITING_SHARE = 0.05  # most of the training time that may go into writing checkpoints

Metrics = dict[str, float]


@dataclass
class Progress:
    """How far a training has come; a checkpoint holds it. Epochs count from 0.

    Attributes:
        next_epoch: the epoch to train next.
        stopped: whether early stopping or a callback has ended the training.
        steps_without_gain: validations since the best one.
        best_epoch, best_score, best_result: the best validated epoch, its value of
            ``valid_metric``, and all its metrics; None before the first validation.
        training_seconds, evaluation_seconds: time spent so far.
        trained_targets: number of targets trained so far, counted again in every epoch.
        history: the line of each epoch in metrics.jsonl.
    """

    next_epoch: int = 0
    stopped: bool = False
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

    Args:
        path: the file, which is replaced.
        state: entries by name, of tensors and plain values such as numbers, texts and lists.

    Raises:
        TypeError: for an object of any other class, which torch would have to pickle.
    """
    # ``atomic_write`` opens a temporary file, which gets the name ``path`` when the block has
    # ended. ``_to_stored`` raises the TypeError. FORMAT marks the file as one of this package.
    with atomic_write(path, text=False) as file:
        try:
            torch.save({"format": FORMAT, **_to_stored(state)}, file)
        except RuntimeError as error:
            # After Ctrl-C within a write, torch tries to end the file, and raises this error.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, without running any code that it may hold.

    torch's ``weights_only`` refuses a file with objects, whose loading could run code.

    Args:
        path: the file. It stays mapped: a tensor is read from disk when it is used.

    Returns:
        Its entries by name, such as ``weights`` and ``config``, see :func:`capture_state`.

    Raises:
        CheckpointError: if the file is missing, damaged, or was not written by this package.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects, which could run code when loaded; nothing in it was run. One "
            "of RecBole's that you trust: RecBole's load_data_and_model(file, trust=True)"
        ) from error
    except Exception as error:  # torch raises errors of many types for a damaged file
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is truncated or no checkpoint: {short(reason)}") from error
    # FORMAT is the mark that :func:`save` puts into the file.
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} was not written by this package (expected {FORMAT})")
    return state


def require_same_data(state: dict[str, Any], identity: dict[str, Any], path: str | Path) -> None:
    """Raise a CheckpointError if a checkpoint was trained on other data than those of now.

    Args:
        state: the checkpoint, with the digests of its data.
        identity: the same digests of the data of now, see ``Dataset.identity``.
        path: the file of the checkpoint, for the message.
    """
    # In words what differs, such as the split or some fields; None if nothing does.
    if changed := describe_changes(state, identity):
        raise CheckpointError(
            f"{path} was trained on other data or another split: {changed} have changed since; use "
            "those data, or train again. Most models answer given histories without data "
            "(`--histories`, in Python histories_only=True)"
        )


def get_random_state() -> dict[str, Any]:
    """Return the states of all random number generators that training uses.

    These are the generators of torch (of the CPU and of each GPU), of numpy, and of Python. The
    states are tensors and plain values, so that a checkpoint can hold them.
    """
    # numpy's state is a tuple, though its type says that it may be a mapping. ``words`` are the 624
    # integers of its generator, and ``gauss`` says whether a normal number is left, and which.
    numpy_state: Any = np.random.get_state()
    kind, words, position, *gauss = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(words.astype(np.int64)), position, *gauss),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put all random number generators into the states that :func:`get_random_state` returned.

    Args:
        state: ``torch``, ``cuda`` (a list, one for each GPU), ``numpy`` and ``python``.

    Raises:
        ValueError: if the state of numpy is damaged; numpy does not check it, and would read
            memory past its end.
    """
    kind, words, position, *gauss = state["numpy"]
    if words.shape != (624,) or not 0 <= position <= 624:
        raise ValueError("expected 624 words of numpy's generator")
    np.random.set_state((kind, words.numpy().astype(np.uint32), position, *gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        # The run may have seen more GPUs than there are here, whose states are left out.
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    # A checkpoint holds the second part as a list, where Python expects a tuple.
    version, words_of_python, next_gauss = state["python"]
    random.setstate((version, tuple(words_of_python), next_gauss))


class CheckpointWriter:
    """Writes the checkpoints of a training, in at most a twentieth of its time.

    The state after an epoch that ends too soon after the last write is kept in memory, where that
    of a later epoch replaces it; it is written if the training is stopped by an error or Ctrl-C.
    So ``kill -9`` loses an epoch or, if that is more, twenty times the time of a write.

    Args:
        file: the checkpoint; None to write nothing.
        capture: returns the state of the training, see :func:`capture_state`. Its ``best_weights``
            must not be changed later: they are not copied.
    """

    def __init__(self, file: Path | None, capture: Callable[[], dict[str, Any]]) -> None:
        self.file, self.capture = file, capture
        self._unwritten: dict[str, Any] | None = None  # state of the newest epoch
        self._next_write = 0.0  # time from which there may be another write

    def keep(self) -> None:
        """Take the state after an epoch, and write it now if a write is due, else later.

        The state stands in ``_unwritten`` until :meth:`flush` has written it, or until that of a
        later epoch replaces it. A write is due from the time ``_next_write`` on.
        """
        if self.file is None:
            return
        self._unwritten = None  # frees the memory of an earlier state before the next one is made
        state = self.capture()
        if time.monotonic() >= self._next_write:
            self._unwritten = state
            self.flush()
            return

        # To be written later, the state is copied: its tensors are the trainer's own, which
        # training goes on to change. Only its best weights are not changed, and need no copy.
        best_weights = state["best_weights"]
        self._unwritten = {
            name: part if part is best_weights else copy_to_cpu(part)
            for name, part in state.items()
        }

    def flush(self) -> None:
        """Write the newest state now, if it is not written yet.

        Until a write has ended, the state stays in memory, so that one that was interrupted is
        begun again by the next call.
        """
        if self._unwritten is None or self.file is None:
            return
        started = time.monotonic()
        save(self.file, self._unwritten)
        self._unwritten = None
        # After a write of 1 s the next one may come in 20 s: WRITING_SHARE is a twentieth.
        ended = time.monotonic()
        self._next_write = ended + (ended - started) / WRITING_SHARE


def copy_to_cpu(value: Any) -> Any:
    """Return a copy of nested lists, tuples and dicts of tensors, with all tensors on the CPU.

    Values of other types are put into the copy as they are. The copy shares no memory with the
    tensors, also if they are on the CPU already.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_cpu(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(copy_to_cpu, value))
    return value


# --- the state of a trainer ---


def find_difference(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """Describe how tensors differ from the expected ones, in a few words; None if they fit.

    Names, shapes and types must be the same, and all numbers of a tensor finite, unless the
    expected tensor has some that are not.

    Args:
        tensors: those of a file, by name.
        expected: tensors of the model, by name.

    Returns:
        Such as "x.weight: expected [5, 2] of torch.float32, found [4, 2]"; None if they fit.
    """
    if unmatched := sorted(map(shown, expected.keys() ^ tensors.keys())):
        return f"lacks, or has unknown, {', '.join(unmatched[:3])}"
    for name, model_tensor in expected.items():
        tensor = tensors[name]
        description = f"{name}: expected {list(model_tensor.shape)} of {model_tensor.dtype}"
        if tensor.shape != model_tensor.shape or tensor.dtype != model_tensor.dtype:
            return f"{description}, found {list(tensor.shape)}"
        # A model may have -inf on purpose, as in a mask.
        if not tensor.isfinite().all() and model_tensor.isfinite().all():
            return f"{name} has numbers that are not finite"
    return None


def capture_state(trainer: Any) -> dict[str, Any]:
    """Return the state of a trainer that a resumed run needs to end with the same bits.

    The tensors are the trainer's own and change as it goes on, except those of ``best_weights``.
    After an epoch that is the best so far, ``weights`` and ``best_weights`` are the same object, so
    that the file holds them once.

    Args:
        trainer: the PosTrainer, after an epoch.

    Returns:
        The entries of a checkpoint, by name.
    """
    # Only RecBole's loaders have a generator; ours compute the order of batches from the epoch.
    # ``identity`` are digests (short hashes) of the data.
    # ``next_epoch`` has been raised already, so the epoch that just ended is the one before it.
    generator = getattr(trainer.loader, "generator", None)
    progress = trainer.progress
    is_best = progress.best_epoch == progress.next_epoch - 1
    return {
        "config": to_plain_options(trainer.config),
        **trainer.identity,
        "progress": vars(progress),
        "weights": trainer.best_weights if is_best else extract_weights(trainer.model),
        "best_weights": trainer.best_weights,
        "optimizer": trainer.optimizer.state_dict(),
        "random": get_random_state(),
        "loader": None if generator is None else generator.get_state(),
        "steps": trainer.steps,
    }


def restore(trainer: Any, file: str | Path, train_data: Any = None) -> None:
    """Put the state of a checkpoint into a new trainer, which then trains on as if never stopped.

    Args:
        trainer: the PosTrainer, of the same configuration. Its weights, optimiser and progress are
            replaced.
        file: the checkpoint.
        train_data: the loader that it will train with, whose random state is restored, too; None
            to restore no loader, and not to check that the data are the same.

    Raises:
        CheckpointError: if the content of the file does not fit the trainer, or the data of its
            training were others.
        UsageError: if the file is of another model.
    """
    state = load(file)
    try:
        model_name = state["config"]["model"]
        if model_name != trainer.config["model"]:
            raise UsageError(f"{file} is of model {model_name}, not {trainer.config['model']}")
        if train_data is not None:  # else the caller does not train on it
            require_same_data(state, train_data._dataset.identity, file)
        trainer.progress = Progress(**state["progress"])

        _restore_weights(trainer, state, file)
        _restore_optimizer(trainer.optimizer, state["optimizer"])
        trainer.steps = state["steps"]  # number of steps taken so far
        set_random_state(state["random"])
        if state["loader"] is not None and train_data is not None:
            train_data.generator.set_state(state["loader"])
    except PosError:  # base of the errors of this package, which say already what is wrong
        raise
    except Exception as error:  # an entry that is missing or of a wrong type raises any error
        raise CheckpointError(f"{file} cannot be used: {shown(str(error))}") from error


def _restore_weights(trainer: Any, state: dict[str, Any], file: str | Path) -> None:
    """Put the newest weights of a checkpoint into the model, and the best ones into the trainer.

    Args:
        trainer: the PosTrainer.
        state: the checkpoint. Its ``best_weights`` are None before the first validation.
        file: its file, for the message of the CheckpointError if weights do not fit the model.
    """
    # The best weights are loaded only to check that they fit the model: ``load_weights`` checks
    # what it loads. The newest weights replace them below.
    best_weights = state["best_weights"]
    if best_weights is not None:
        load_weights(trainer.model, best_weights, file)
    # The trainer gets a copy in memory. The tensors of ``state`` are still in the file, which is
    # mapped into memory (mmap) and read from disk when they are used.
    trainer.best_weights = copy_to_cpu(best_weights)

    load_weights(trainer.model, state["weights"], file)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put the moments of a checkpoint, such as Adam's means, into an optimiser.

    Its settings, such as the learning rate, stay those of the options.

    Args:
        optimizer: the optimiser of the model, with one group of parameters.
        saved: ``state_dict`` of the optimiser in the checkpoint. Its entry ``state`` maps the index
            of a parameter to its moments by name; a parameter without a gradient so far has none.

    Raises:
        ValueError: if a moment has another shape or type than its parameter, or is not finite.
    """
    moments = copy_to_cpu(saved["state"])
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        # A moment is like its parameter, except the number of steps, a scalar, which is left out.
        tensors = {name: moment for name, moment in moments.get(index, {}).items() if moment.dim()}
        like_parameter = dict.fromkeys(tensors, parameter)
        # ``find_difference`` compares names, shapes and types, and says in words what differs.
        if difference := find_difference(tensors, expected=like_parameter):
            raise ValueError(f"optimizer.state.{index}: {difference}")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})


def extract_weights(model: Any) -> dict[str, Any]:
    """Return all that a model has learned, in the form in which checkpoints keep it.

    Returns:
        ``state_dict``, the model's own tensors, which change with it; and ``other``, what models
        of RecBole keep outside of it (``other_parameter``), such as sparse matrices.
    """
    # Some entries of ``other_parameter`` are modules. They are left out, since ``state_dict`` has
    # their tensors already. ``_to_stored`` turns arrays and sparse matrices into tensors and dicts.
    others = model.other_parameter() or {}
    no_modules = {name: value for name, value in others.items() if not isinstance(value, nn.Module)}
    return {"state_dict": dict(model.state_dict()), "other": _to_stored(no_modules)}


def load_best(
    model: Any,
    file: str | Path,
    identity: dict[str, Any] | None = None,
    allows_changed_fields: bool = False,
) -> list[str]:
    """Load the best weights of a checkpoint into a model, or the newest if none was validated yet.

    Args:
        model: the model, changed in place.
        file: the checkpoint.
        identity: digests of the data, see ``Dataset.identity``, which must be those of the
            training; None if there are no data, so that nothing is checked.
        allows_changed_fields: whether attributes of users and items may have other values now.

    Returns:
        The fields that have other values now.

    Raises:
        CheckpointError: if the data or the architecture are others.
    """
    state = load(file)
    if identity is not None:
        # Without digests of fields only items, interactions and split are compared.
        required = {**identity, "fields": {}} if allows_changed_fields else identity
        require_same_data(state, required, file)
    load_weights(model, state["best_weights"] or state["weights"], file)
    # The fields whose digests differ between the training (``state``) and now.
    return [] if identity is None else find_changed_fields(state, identity)


def load_weights(model: Any, weights: dict[str, Any], source: str | Path = "these weights") -> None:
    """Put weights into a model, after checking that they fit.

    Args:
        model: the model, changed in place.
        weights: ``state_dict`` and ``other``, as of :func:`extract_weights`.
        source: where they are from, for the message.

    Raises:
        CheckpointError: if they are of another architecture, or not finite.
    """
    try:
        difference = find_difference(weights["state_dict"], dict(model.state_dict()))
        # What models of RecBole keep outside of ``state_dict``, such as sparse matrices. A file has
        # tensors and dicts in their place, of which ``_from_stored`` makes the matrices again.
        other = _from_stored(weights["other"])
    except Exception as error:  # a malformed checkpoint: entries are missing or of other types
        difference = shown(str(error))
    if difference:
        raise CheckpointError(f"{source} cannot be used with this model: {difference}")
    model.load_state_dict(weights["state_dict"])
    # RecBole's method, which sets the attributes of the model that ``other`` has by name.
    model.load_other_parameter(other)


# --- values as files hold them ---


def _to_stored(value: Any) -> Any:
    """Return a value in the form that checkpoints hold: tensors, plain values and collections.

    A numpy array becomes a tensor that shares its memory, and a sparse matrix a dict of tensors
    with ``kind: scipy.sparse.csr``, by which :func:`_from_stored` knows it. Lists, tuples and dicts
    are converted element by element.

    Raises:
        TypeError: if the value is, or holds, anything else.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {to_plain(key): _to_stored(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_stored(item) for item in value)
    if not scipy.sparse.issparse(value):
        return to_plain(value)  # a number, text or None; others raise the TypeError

    # The three arrays of a matrix in compressed rows, and its shape.
    csr = value.tocsr()
    arrays = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {"kind": SPARSE, **tensors, "shape": tuple(csr.shape)}


def _from_stored(value: Any) -> Any:
    """Return a value that :func:`_to_stored` has made, with its sparse matrices restored.

    A sparse matrix is stored as a dict of tensors with ``kind: scipy.sparse.csr``. What was a numpy
    array stays a tensor, since nothing tells it from other tensors any more.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_from_stored(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get("kind") == SPARSE:  # the text scipy.sparse.csr
        arrays = tuple(value[name].cpu().numpy() for name in ("data", "indices", "indptr"))
        matrix = scipy.sparse.csr_matrix(arrays, shape=value["shape"])
        # A damaged file may hold indices out of range, which scipy's functions in C do not check.
        matrix.check_format(full_check=True)
        return matrix
    return {key: _from_stored(item) for key, item in value.items()}
