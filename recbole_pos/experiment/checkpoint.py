"""Checkpoints: tensors and plain values in one file, which ``torch.load`` reads as such.

RecBole's trainer pickles its config into checkpoints, which today's torch rightly refuses to load.
A checkpoint here holds tensors and plain values only, with all random states, so that a resumed run
ends with the same bits. Before a part of it is used, ``state.py`` compares it with the trainer.
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
from torch import Tensor

from recbole_pos.data.identity import describe_changes
from recbole_pos.errors import CheckpointError
from recbole_pos.files import atomic_write
from recbole_pos.plain import to_plain
from recbole_pos.values import short

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
    path = Path(path)
    state = _read_file(path)
    if missing := [name for name in required if name not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return state


def _read_file(path: Path) -> dict[str, Any]:
    """Return the parts of a file that this package wrote, by name; tensors are mapped, not read."""
    if not os.path.isfile(path):  # False if the name is too long, where pathlib may raise
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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
