"""Writes the checkpoints of a training while it goes on.

After every epoch a copy of its state is taken, and a thread writes it beside the next epoch.
Writing is given a twentieth of the time: an epoch that ends sooner after the last write is kept in
memory, where a later one takes its place; it is written if the training is stopped. So ``kill -9``
costs an epoch, or twenty times what it takes to write one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.allocation import free_memory

SHARE = 0.05  # of the time, in which checkpoints are written


class CheckpointWriter:
    """Within ``with``, at the end of which the newest epoch is written.

    Args:
        file: the checkpoint; None to write nothing.
        capture: gives the state of the training, see ``state.capture``. Nobody ever changes what it
            has as ``best_weights``.
    """

    def __init__(self, file: Path | None, capture: Callable[[], dict[str, Any]]) -> None:
        self.file, self.capture = file, capture
        self._memory: dict[Any, Tensor] = {}  # of the copies: fresh memory would take longer
        self._waiting: dict[str, Any] | None = None  # a copy that is not written yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written = -1  # epochs of the checkpoint on the disk
        self._due = self._cost = 0.0  # when there may be another write; seconds spent for it so far

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._write_waiting()
        self._memory = {}
        if kind is None:  # else that is raised
            self.check()

    def keep(self) -> None:
        """Take a copy of the state after an epoch, and write it if it is time.

        Raises:
            StorageError: if the last write has failed.
        """
        if self.file is None:
            return
        waited = time.monotonic()
        self._join()
        self._due += (time.monotonic() - waited) / SHARE
        self.check()
        state = {**self.capture()}
        best, progress = state["best_weights"], state["progress"]
        if best is not None and progress["best_epoch"] == progress["next_epoch"] - 1:
            state["weights"] = best  # in memory, and in the file, once
        own = {key: value for key, value in _tensors(best).items() if value.device.type == "cpu"}
        more = [value.nbytes for key, value in _tensors(state).items() if key not in own]
        self._waiting = None  # before its memory is written to
        if self._memory or sum(more) <= free_memory() // 2:
            began = time.thread_time()
            self._waiting = _copied(state, own, self._memory)
            self._cost += time.thread_time() - began
        if time.monotonic() >= self._due:
            self._start() if self._waiting else self._write(state)
        self.check()

    def check(self) -> None:
        """Raise what went wrong in a write, so that a training does not go on without it."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Write the newest epoch, whether or not it is time.

        Raises:
            StorageError: if it cannot be written.
        """
        self._write_waiting()
        self.check()
        state = None if self.file is None else self.capture()
        if state and self._written != state["progress"]["next_epoch"]:
            self._write(state)
            self.check()

    def _write_waiting(self) -> None:
        self._join()
        if self._waiting is not None and self._error is None:
            self._start()
            self._join()

    def _start(self) -> None:
        """Let a thread write the copy that waits: an interrupt does not end it half-way."""
        self._thread = threading.Thread(
            target=self._write, args=(self._waiting,), name="checkpoint"
        )
        self._thread.start()
        self._waiting = None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, state: dict[str, Any]) -> None:
        assert self.file is not None
        began, worked = time.monotonic(), time.thread_time()
        try:
            checkpoint.save(self.file, state)
            self._written = state["progress"]["next_epoch"]
            for old in checkpoint.old_best_files(self.file):
                old.unlink(missing_ok=True)
        except BaseException as error:
            self._error = error
        self._due = began + (self._cost + time.thread_time() - worked) / SHARE
        self._cost = 0.0


def _copied(value: Any, done: dict[int, Tensor], memory: dict[Any, Tensor], place: Any = ()) -> Any:
    """A tree whose tensors are on the CPU, and change only with the next copy.

    Args:
        value: tensors and plain values.
        done: copies by what they are of; tensors that nobody changes are their own.
        memory: that of the last copy, by places, which is written to.
        place: of the value in the tree.
    """
    if isinstance(value, Tensor):
        if id(value) not in done:
            kept = memory.get(place)
            if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
                kept = memory[place] = torch.empty_like(value, device="cpu")
            done[id(value)] = kept.copy_(value.detach())
        return done[id(value)]
    if isinstance(value, dict):
        return {key: _copied(part, done, memory, (*place, key)) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = (_copied(part, done, memory, (*place, i)) for i, part in enumerate(value))
        return type(value)(parts)
    return value


def _tensors(value: Any) -> dict[int, Tensor]:
    """All tensors of a tree, by identity."""
    if isinstance(value, Tensor):
        return {id(value): value}
    inner = value.values() if isinstance(value, dict) else value
    parts = map(_tensors, inner) if isinstance(value, (dict, list, tuple)) else ()
    return {key: tensor for part in parts for key, tensor in part.items()}
