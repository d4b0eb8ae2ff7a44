"""Checkpoints: plain tensors and values in one file, read without running its content.

RecBole's trainer pickles its config into checkpoints, which today's torch rightly refuses to load.
Here are tensors and plain values, with all random states, so that a resumed run ends with the same
bits. Nothing of a file is used before it was compared with :data:`SCHEMA` and, of weights and
optimiser, with those of the model at hand (``state.py``).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recbole_pos.data.identity import describe_changes
from recbole_pos.errors import CheckpointError
from recbole_pos.experiment import archive
from recbole_pos.files import whole
from recbole_pos.plain import to_plain
from recbole_pos.values import is_number, is_whole, shown

FORMAT = "recbole-pos/1"


@dataclass
class Progress:
    """Where a training stands; with weights, optimiser and random state it is the checkpoint."""

    next_epoch: int = 0
    stopped: bool = False  # by early stopping
    steps_without_gain: int = 0
    best_epoch: int | None = None
    best_score: float | None = None
    best_result: dict[str, float] | None = None
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    trained_targets: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def difference(found: Any, schema: Any, place: str) -> str | None:
    """Describe where a value first differs from what is expected; None if it does not.

    Args:
        found: a tree of plain values and tensors.
        schema: what is expected: a mapping with these keys, or ``{str: x}`` with any keys of a
            type; ``[x]``, a list of any length; ``(None, x)``, nothing or x; a type; a tensor of
            this shape and type, finite if this is; a predicate, whose docstring says what it wants.
        place: name of ``found``, such as ``optimizer.state``.
    """
    inner: list[tuple[Any, Any, Any]] = []
    match schema:
        case tuple():
            return None if found is None else difference(found, schema[1], place)
        case dict() if any(isinstance(key, type) for key in schema):
            ((kind, like),) = schema.items()
            fits = isinstance(found, dict) and all(type(key) is kind for key in found)
            wanted = f"a mapping with keys of type {kind.__name__}"
            inner = [(key, value, like) for key, value in found.items()] if fits else []
        case dict():
            fits, wanted = isinstance(found, dict), "a mapping"
            if fits and (odd := sorted(map(_name, schema.keys() ^ found.keys()))):
                return f"{place} lacks, or has unknown, {', '.join(odd[:3])}"
            inner = [(key, found[key], like) for key, like in schema.items()] if fits else []
        case list():
            fits, wanted = isinstance(found, (list, tuple)), "a list"
            inner = [(i, value, schema[0]) for i, value in enumerate(found)] if fits else []
        case Tensor():
            wanted = f"a tensor {list(schema.shape)} of finite {schema.dtype}"
            fits = isinstance(found, Tensor) and found.shape == schema.shape
            fits = fits and found.dtype == schema.dtype
            fits = fits and (bool(found.isfinite().all()) or not bool(schema.isfinite().all()))
        case type():
            fits, wanted = type(found) is schema, f"a value of type {schema.__name__}"
        case _:
            fits, wanted = schema(found), schema.__doc__
    if not fits:
        size = f"a tensor {list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else ""
        return f"{place}: expected {wanted}, found {size or ' '.join(shown(found).split())}"
    parts = (difference(value, like, f"{place}.{_name(key)}") for key, value, like in inner)
    return next(filter(None, parts), None)


def _name(key: Any) -> str:
    return key if isinstance(key, str) and len(key) < 100 and key.isprintable() else shown(key)


def is_count(found: Any) -> bool:
    """a whole number of at least 0"""
    return is_whole(found) and 0 <= found < 2**53


def _is_duration(found: Any) -> bool:
    """a number of at least 0"""
    return is_number(found) and found >= 0


def is_tensor(found: Any) -> bool:
    """a tensor"""
    return isinstance(found, Tensor)


def is_any(found: Any) -> bool:
    """anything"""
    return True


def _is_number(found: Any) -> bool:
    """a finite number"""
    return is_number(found)


def _is_plain(found: Any) -> bool:
    """plain values"""
    inner = found.values() if isinstance(found, dict) else found
    return isinstance(found, (bool, int, float, str, type(None))) or (
        isinstance(found, (dict, list, tuple)) and all(map(_is_plain, inner))
    )


def _is_random_state(found: Any) -> bool:
    """states of random number generators"""
    try:
        _, words, used, *_ = found["numpy"]
        if not (is_tensor(words) and words.shape == (624,) and is_count(used) and used <= 624):
            return False  # numpy would read beyond
        torch.Generator().set_state(found["torch"])
        np.random.RandomState().set_state(_numpy_state(found))
        random.Random().setstate(_python_state(found))
        return all(is_tensor(one) and one.dtype == torch.uint8 for one in found["cuda"])
    except (RuntimeError, ValueError, TypeError, LookupError, OverflowError):
        return False


def _is_loader_state(found: Any) -> bool:
    """the state of a random number generator"""
    try:
        torch.Generator().set_state(found)
    except (RuntimeError, TypeError):
        return False
    return True


_METRICS = (None, {str: _is_number})
_WEIGHTS = {"state_dict": {str: is_tensor}, "other": {str: is_any}}
_EPOCH = {
    "epoch": is_count,
    "loss": _is_number,
    "valid": _METRICS,
    "seconds": _is_duration,
    "targets_per_second": _is_duration,
}
# What every checkpoint of a run holds, whatever the model.
SCHEMA: dict[str, Any] = {
    "data": (None, str),
    "fields": (None, {str: str}),
    "known": (None, str),
    "config": {str: _is_plain},
    "progress": {
        "next_epoch": is_count,
        "stopped": bool,
        "steps_without_gain": is_count,
        "best_epoch": (None, is_count),
        "best_score": (None, _is_number),
        "best_result": _METRICS,
        "training_seconds": _is_duration,
        "evaluation_seconds": _is_duration,
        "trained_targets": is_count,
        "history": [_EPOCH],
    },
    "weights": _WEIGHTS,
    "best_weights": (None, _WEIGHTS),
    "optimizer": {"state": {int: {str: is_any}}, "param_groups": list},
    "scaler": {str: _is_number},
    "random": _is_random_state,
    "loader": (None, _is_loader_state),
    "steps": is_count,
    "average": (None, {str: is_tensor}),
}
_SINCE = (
    "data",
    "fields",
    "known",
    "steps",
    "average",
)  # parts that earlier versions did not write


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that at any moment either the old file or the new one is there.

    Args:
        path: the file.
        state: tensors and plain values; numpy arrays and scipy sparse matrices are converted.

    Raises:
        TypeError: for anything else, which would have to be pickled.
        UsageError: if its folder is not there.
        StorageError: if there is no room for it.
    """
    with whole(path, text=False) as file:
        torch.save({"format": FORMAT, **to_plain(state)}, file)


def load(path: str | Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """Read a checkpoint, onto the CPU; nothing in it is run.

    Raises:
        CheckpointError: if the file is missing, damaged, lacks one of ``required`` or has it in
            another form than :data:`SCHEMA`, or was not written by this package.
    """
    path = Path(path)
    state = _read(path)
    # earlier versions kept best weights that were not the newest in a second file meanwhile
    if (name := state.pop("best_file", None)) is not None and "best_weights" in (
        required or ["best_weights"]
    ):
        file = path.with_name(Path(str(name)).name)
        if not file.is_file():
            raise CheckpointError(
                f"{path} lacks its best weights, which are in {_name(file.name)} beside it: copy "
                "the whole folder"
            )
        best = _read(file)
        if best.get("token") != str(name).rpartition("-")[2]:
            raise CheckpointError(f"{file} has best weights of another checkpoint than {path}")
        state["best_weights"] = best.get("weights")
    if missing := [key for key in required if key not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    parts = {*required, *(key for key in _SINCE if key in state)}
    require(state, {key: like for key, like in SCHEMA.items() if key in parts}, path)
    return state


def old_best_files(path: Path) -> list[Path]:
    """List the files of best weights that an earlier version may have left beside a checkpoint."""
    return sorted(file for file in path.parent.iterdir() if is_old_best_file(file.name, path))


def is_old_best_file(name: str, path: Path) -> bool:
    """Tell whether a file of this name is one of them."""
    return name.startswith(f"{path.name}.best-")


def _read(path: Path) -> dict[str, Any]:
    state = archive.read(path, _refuse)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by this package (expected {FORMAT})")
    return state


def _refuse(name: str) -> None:
    raise archive.Refused(
        "holds a pickled object, which could run code when loaded; it was refused and nothing in "
        "it was run. Checkpoints of this package hold tensors and plain values only; one of "
        "RecBole's own trainer loads with RecBole's load_data_and_model"
    )


def copy(source: Path, target: Path) -> None:
    """Copy a checkpoint, as one file; what is there is replaced at once.

    Raises:
        CheckpointError: if none exists, or it is damaged.
        StorageError: if it cannot be written.
    """
    if old_best_files(source):
        save(target, load(source))
        return
    with whole(target, text=False) as file, source.open("rb") as given:
        shutil.copyfileobj(given, file)


def require(state: dict[str, Any], schema: dict[str, Any], path: str | Path) -> None:
    """Refuse parts of a checkpoint that are not as expected.

    Args:
        state: state of the checkpoint.
        schema: its parts by name, see :func:`difference`.
        path: the checkpoint's, for the message.

    Raises:
        CheckpointError: naming the first part that differs, such as optimizer.state.0.exp_avg.
    """
    for key, like in schema.items():
        if wrong := difference(state[key], like, key):
            raise CheckpointError(f"{path} cannot be used: {wrong}")


def require_same_data(state: dict[str, Any], data: dict[str, Any], path: str | Path) -> None:
    """Refuse weights that were trained on other data, or under another split.

    Args:
        state: state of the checkpoint.
        data: ``identity`` of the dataset.
        path: the checkpoint's, for the message.

    Raises:
        CheckpointError: if they differ in events or split, or in a field that both have loaded.
    """
    if changed := describe_changes(state, data):
        raise CheckpointError(
            f"{path} was trained on other data or another split: {changed} have changed since, so "
            "its weights do not fit"
        )


def random_state() -> dict[str, Any]:
    """Return the state of every random number generator training uses."""
    numpy: Any = np.random.get_state()  # five values, or by other types a mapping
    kind, keys, position, has_gauss, cached = numpy
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "python": (version, internal, gauss),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put all generators into the state of :func:`random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    np.random.set_state(_numpy_state(state))
    random.setstate(_python_state(state))


def _numpy_state(state: dict[str, Any]) -> tuple:
    kind, keys, *rest = state["numpy"]
    return kind, keys.cpu().numpy().astype(np.uint32), *rest


def _python_state(state: dict[str, Any]) -> tuple:
    version, internal, gauss = state["python"]
    return version, tuple(internal), gauss
