"""Checkpoints: plain tensors and values, written atomically, read without running their content."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch

from recbole_pos.data.identity import changes
from recbole_pos.errors import CheckpointError

FORMAT = "recbole-pos/1"
_SPARSE = "scipy.sparse.csr"


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that at any moment either the old file or the new one is there.

    Args:
        path: the file.
        state: tensors and plain values; numpy arrays and scipy sparse matrices are converted.

    Raises:
        TypeError: for anything else, which would have to be pickled.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **to_plain(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself must survive a power cut
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: str | Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """Read a checkpoint with ``weights_only=True``, onto the CPU.

    Raises:
        CheckpointError: if the file is missing, damaged, lacks one of ``required``, holds a pickled
            object (nothing in it is run), or was not written by this package.
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
        damaged = zipfile.ZipFile(path).testzip()  # torch does not look at checksums
        if damaged:
            raise CheckpointError(f"{path} is truncated or damaged: {damaged} has a wrong checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds a pickled object, which could run code when loaded; it was refused and "
            "nothing in it was run. Checkpoints of this package hold tensors and plain values only"
        ) from error
    except CheckpointError:
        raise
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is truncated or damaged: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by this package (expected {FORMAT})")
    missing = [key for key in required if key not in state]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return state


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


def to_plain(value: Any) -> Any:
    """Tensors and plain values that ``weights_only=True`` accepts, recursively."""
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {to_plain(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(v) for v in value)
    if scipy.sparse.issparse(value):
        csr = value.tocsr()
        return {
            "kind": _SPARSE,
            "data": torch.from_numpy(csr.data),
            "indices": torch.from_numpy(csr.indices),
            "indptr": torch.from_numpy(csr.indptr),
            "shape": tuple(csr.shape),
        }
    raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint")


def from_plain(value: Any) -> Any:
    """Inverse of :func:`to_plain` for the values models keep beside their weights."""
    if isinstance(value, dict):
        if value.get("kind") == _SPARSE:
            parts = tuple(value[k].cpu().numpy() for k in ("data", "indices", "indptr"))
            return scipy.sparse.csr_matrix(parts, shape=value["shape"])
        return {k: from_plain(v) for k, v in value.items()}
    return value


def random_state() -> dict[str, Any]:
    """The state of every random number generator training uses."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
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
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
