"""Writes checkpoints in a thread while the training runs.

After every epoch a copy of its state is taken, and a thread writes it beside the next epoch.
Writing is given a twentieth of the time: an epoch that ends sooner after the last write is kept in
memory, where a later one takes its place; it is written if the training is stopped. So ``kill -9``
costs an epoch, or twenty times what it takes to write one.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.memory import free_memory

SHARE = 0.05  # fraction of the training time that may go into writing checkpoints


class CheckpointWriter:
    """Writer of a training's checkpoints, for use in a ``with`` block.

    At the end of the block the newest epoch is written, if it was not yet.

    Args:
        file: the checkpoint; None to write nothing.
        capture: returns the state of the training, see ``state.capture``. Its ``best_weights`` must
            not be changed later: they are not copied.
    """

    def __init__(self, file: Path | None, capture: Callable[[], dict[str, Any]]) -> None:
        self.file, self.capture = file, capture
        self._newest: dict[str, Any] | None = None  # a copy that is not written yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._due = 0.0  # when there may be another write

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            self.flush()
        except BaseException:
            if kind is None:  # otherwise the block's own error is raised
                raise

    def keep(self) -> None:
        """Take a copy of the state after an epoch, and write it if it is time.

        Raises:
            StorageError: if the last write has failed.
        """
        if self.file is None:
            return
        self._join()
        self._newest = None  # its memory is free for the next one
        state = {**self.capture()}
        best, progress = state["best_weights"], state["progress"]
        if best is not None and progress["best_epoch"] == progress["next_epoch"] - 1:
            state["weights"] = best  # in memory, and in the file, once
        tensors = _tensors({**state, "best_weights": None})
        if sum(tensor.nbytes for tensor in tensors.values()) > free_memory() // 2:
            self._write(state)  # without a copy, before the next epoch
            self.check()
            return
        fixed = {key: tensor for key, tensor in _tensors(best).items() if tensor.is_cpu}
        copies = {
            key: tensor.detach().to("cpu", copy=True)
            for key, tensor in tensors.items()
            if key not in fixed
        }
        # with these as its memo, deepcopy takes them for copies of the tensors
        self._newest = copy.deepcopy(state, {**fixed, **copies})
        if time.monotonic() >= self._due:
            self._start()

    def check(self) -> None:
        """Raise the error of an earlier write, so that training does not go on without it."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Write the newest epoch, whether or not it is time.

        Raises:
            StorageError: if it cannot be written.
        """
        self._join()
        if self._newest is not None:
            self._start()
            self._join()

    def _start(self) -> None:
        """Let a thread write the newest copy; an interrupt does not stop a thread half-way."""
        self._thread = threading.Thread(target=self._write, args=(self._newest,), name="checkpoint")
        self._newest = None
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, state: dict[str, Any]) -> None:
        """Write a state, keep an error for :meth:`check`, and set when the next write is due."""
        assert self.file is not None
        began = time.monotonic()
        try:
            checkpoint.save(self.file, state)
            for old in checkpoint.old_best_files(self.file):
                old.unlink(missing_ok=True)
        except BaseException as error:
            self._error = error
        self._due = time.monotonic() + (time.monotonic() - began) / SHARE


def _tensors(value: Any) -> dict[int, Tensor]:
    """Return all tensors in a tree of lists and mappings, by ``id``."""
    if isinstance(value, Tensor):
        return {id(value): value}
    inner = value.values() if isinstance(value, dict) else value
    parts = map(_tensors, inner) if isinstance(value, (dict, list, tuple)) else ()
    return {key: tensor for part in parts for key, tensor in part.items()}
