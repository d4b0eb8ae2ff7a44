"""Checkpoints: plain tensors and values, written atomically, read without running their content.

Nothing in a file is used before it is held against what must stand there: :data:`LAYOUT`, and, for
weights and optimiser, what the model at hand would have written (``state.py``).

RecBole's trainer pickles its config into checkpoints, which today's torch rightly refuses to load.
Here are tensors and plain values, with all random states, so that a resumed run ends with the same
bits. While a training goes on the best weights may stand in another file (``best_file.py``), which
is read with the checkpoint: who loads one never sees that.
"""

from __future__ import annotations

import pickle
import random
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recbole_pos.data.identity import changes
from recbole_pos.errors import CheckpointError
from recbole_pos.experiment.best_file import best_files, token_of
from recbole_pos.experiment.expected import (
    Anything,
    Each,
    Many,
    Maybe,
    Number,
    Vector,
    difference,
)
from recbole_pos.files import whole
from recbole_pos.plain import to_plain

FORMAT = "recbole-pos/1"


@dataclass
class Progress:
    """Where a training stands; with weights, optimiser and random state it is the checkpoint."""

    next_epoch: int = 0
    stopped: bool = False  # early stopping said so
    steps_without_gain: int = 0
    best_epoch: int | None = None
    best_score: float | None = None
    best_result: dict[str, float] | None = None
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    trained_targets: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


_COUNT, _SECONDS, _METRICS = Number(0, 2**53, whole=True), Number(0), Each(str, 0.0)
_MT19937 = Number(0, 624, whole=True)  # how much of its words is used; numpy would read beyond
_BYTES = Vector(torch.uint8)
_WEIGHTS = {"state_dict": Each(str, Anything()), "other": Each(str, Anything())}
_EPOCH = {
    "epoch": _COUNT,
    "loss": Number(),
    "valid": Maybe(_METRICS),
    "seconds": _SECONDS,
    "targets_per_second": Number(0),
}
# What every checkpoint of a run holds, whatever the model.
LAYOUT: dict[str, Any] = {
    "data": Maybe("digest"),
    "fields": Maybe(Each(str, "digest")),
    "config": Each(str, Anything()),
    "progress": {
        "next_epoch": _COUNT,
        "stopped": False,
        "steps_without_gain": _COUNT,
        "best_epoch": Maybe(_COUNT),
        "best_score": Maybe(Number()),
        "best_result": Maybe(_METRICS),
        "training_seconds": _SECONDS,
        "evaluation_seconds": _SECONDS,
        "trained_targets": _COUNT,
        "history": Many(_EPOCH),
    },
    "weights": _WEIGHTS,
    "best_weights": Maybe(_WEIGHTS),
    "optimizer": {
        "state": Each(int, Each(str, Anything())),
        "param_groups": Many(Each(str, Anything())),
    },
    "scaler": Each(str, Number()),
    "random": {
        "torch": _BYTES,
        "cuda": Many(_BYTES),
        "numpy": ("MT19937", Vector(torch.int64, 624), _MT19937, _COUNT, Number()),
        "python": (_COUNT, Many(_COUNT), Maybe(Number())),
    },
    "loader": Maybe(_BYTES),
}
_SINCE = ("data", "fields")  # parts that earlier versions did not write
# What a file of best weights holds; the checkpoint has its name as best_file, and no best_weights.
_BEST: dict[str, Any] = {"token": "", "weights": _WEIGHTS}


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
    """Read a checkpoint with ``weights_only=True``, onto the CPU.

    The best weights of a file that names another one are read from there.

    Raises:
        CheckpointError: if the file is missing, damaged, lacks one of ``required`` or has it in
            another form than ``LAYOUT``, holds a pickled object (nothing in it is run), or was not
            written by this package.
    """
    path = Path(path)
    written = path.stat().st_mtime_ns if path.is_file() else None
    state = _read(path)
    if (name := state.pop("best_file", None)) is not None and (
        not required or "best_weights" in required
    ):
        file = path.with_name(Path(name).name)
        if not file.is_file():
            if path.stat().st_mtime_ns != written:  # the training has gone on meanwhile
                return load(path, required)
            raise CheckpointError(
                f"{path} lacks its best weights, which are in {file.name} beside it while a "
                "training goes on: copy the whole folder"
            )
        best = _read(file)
        require(best, _BEST, file)
        if best["token"] != token_of(name):
            raise CheckpointError(f"{file} has best weights of another checkpoint than {path}")
        state["best_weights"] = best["weights"]
    if missing := [key for key in required if key not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    parts = {*required, *(key for key in _SINCE if key in state)}
    require(state, {key: LAYOUT[key] for key in LAYOUT if key in parts}, path)
    return state


def _read(path: Path) -> dict[str, Any]:
    require_archive(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds a pickled object, which could run code when loaded; it was refused and "
            "nothing in it was run. Checkpoints of this package hold tensors and plain values "
            "only; one of RecBole's own trainer loads with RecBole's load_data_and_model"
        ) from error
    except Exception as error:
        raise damaged(path, error) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by this package (expected {FORMAT})")
    if wrong := difference(state.get("best_file", ""), "", "best_file"):
        raise CheckpointError(f"{path} cannot be used: {wrong}")
    return state


def copy(source: Path, target: Path) -> None:
    """A checkpoint elsewhere, as one file; what is there is replaced at once.

    Raises:
        CheckpointError: if there is none, or it is damaged.
        StorageError: if it cannot be written.
    """
    if best_files(source):
        save(target, load(source))
        return
    with whole(target, text=False) as file, source.open("rb") as given:
        shutil.copyfileobj(given, file)


def require_archive(path: str | Path) -> None:
    """Refuse a file that ``torch.save`` of today would not have written, or not in this way.

    Raises:
        CheckpointError: if it is missing, no archive, or its checksums say it is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    if not zipfile.is_zipfile(path):  # every file torch.save writes today is a zip archive
        with path.open("rb") as file:
            start = file.read(2)
        if start and not b"PK".startswith(start):
            raise CheckpointError(
                f"{path} is not a checkpoint of this package, and was not read; name the folder of "
                "a run, or a .pt file in it"
            )
        raise CheckpointError(f"{path} is truncated or damaged")
    try:
        wrong = zipfile.ZipFile(path).testzip()  # torch does not look at checksums
    except Exception as error:
        raise damaged(path, error) from error
    if wrong:
        raise CheckpointError(f"{path} is truncated or damaged: {wrong} has a wrong checksum")


def damaged(path: str | Path, error: Exception) -> CheckpointError:
    """For whatever a reader raises: damaged bytes make it stumble anywhere."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(f"{path} is truncated or damaged: {reason}")


def require(state: dict[str, Any], expected: dict[str, Any], path: str | Path) -> None:
    """Refuse parts of a checkpoint that are not as expected.

    Args:
        state: of the checkpoint.
        expected: its parts by name, see ``expected.py``.
        path: the checkpoint's, for the message.

    Raises:
        CheckpointError: naming the first part that differs, such as optimizer.state.0.exp_avg.
    """
    for key, like in expected.items():
        if wrong := difference(state[key], like, key):
            raise CheckpointError(f"{path} cannot be used: {wrong}")


def require_same_data(state: dict[str, Any], data: dict[str, Any], path: str | Path) -> None:
    """Refuse weights that were trained on other data, or under another split.

    Args:
        state: of the checkpoint.
        data: ``identity`` of the dataset.
        path: the checkpoint's, for the message.

    Raises:
        CheckpointError: if they differ in events or split, or in a field that both have loaded.
    """
    if changed := changes(state, data):
        raise CheckpointError(
            f"{path} was trained on other data or another split: {changed} have changed since, so "
            "its weights do not fit"
        )


def random_state() -> dict[str, Any]:
    """The state of every random number generator training uses."""
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
    """Inverse of :func:`random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    np.random.set_state(_numpy_state(state))
    random.setstate(_python_state(state))


def try_random_state(state: dict[str, Any]) -> None:
    """Raises what a generator says of a state that is none; changes none that anybody uses."""
    torch.Generator().set_state(state["torch"])
    np.random.RandomState().set_state(_numpy_state(state))
    random.Random().setstate(_python_state(state))


def _numpy_state(state: dict[str, Any]) -> tuple:
    kind, keys, *rest = state["numpy"]
    return kind, keys.cpu().numpy().astype(np.uint32), *rest


def _python_state(state: dict[str, Any]) -> tuple:
    version, internal, gauss = state["python"]
    return version, tuple(internal), gauss
