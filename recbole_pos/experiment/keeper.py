"""Keeps a training on the disk while it goes on.

After every epoch a copy of its state is taken, and a thread writes it beside the next epoch: to
``checkpoint.pt``, and the best weights, when they are not the newest any more, once to a file that
the checkpoint names. At the end all of it is one file again.

Writing is given a twentieth of the time. An epoch that ends sooner than that after the last write
is kept in memory, where a later one takes its place; it is written if the training is stopped. So
``kill -9`` costs an epoch, or twenty times what it takes to write one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.best_file import new_best_file, remove_others, token_of
from recbole_pos.experiment.snapshot import Snapshots

SHARE = 0.05  # of the time, in which checkpoints are written


class Keeper:
    """Writes the checkpoints of one training; within ``with``, at the end of which all is written.

    Args:
        file: the checkpoint; None to write nothing.
        state: gives that of the training, see ``state.capture``. Nobody ever changes what it has as
            ``best_weights``.
    """

    def __init__(self, file: Path | None, state: Callable[[], dict[str, Any]]) -> None:
        self.file, self.state = file, state
        self._snapshots = Snapshots()
        self._waiting: dict[str, Any] | None = None  # a copy that is not written yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._best: tuple[int, str] | None = None  # an epoch, and the file with its weights
        self._whole: int | None = None  # epochs of the state that is on the disk as one file
        self._due = 0.0  # when there may be another write
        self._cost = 0.0  # seconds that copies took since the last one

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            self._join()
            if self._error is None:
                self._start()
                self._join()
            if kind is None:  # else what stops the training is told
                self.check()
        finally:
            self._snapshots = Snapshots()  # gives its memory back

    def keep(self) -> None:
        """Take a copy of the state after an epoch, and write it if it is time.

        Raises:
            StorageError: if the last write has failed.
        """
        self.check()
        if self.file is None:
            return
        waited = time.monotonic()
        self._join()  # its copy is in the memory that the next one takes
        self._due += (time.monotonic() - waited) / SHARE
        self.check()
        state = self.state()
        best, epoch = state["best_weights"], state["progress"]["best_epoch"]
        if _best_is_newest(state):
            state = {**state, "weights": best}
        elif self._best is not None and self._best[0] == epoch:
            best, state = None, {**state, "best_weights": None}
        self._waiting = None  # before its memory is written to
        if self._snapshots.fits(state, best):
            began = time.thread_time()
            self._waiting = self._snapshots.take(state, best)
            self._cost += time.thread_time() - began
            if time.monotonic() >= self._due:
                self._start()
        elif time.monotonic() >= self._due:
            self._write(state)
            self.check()

    def check(self) -> None:
        """Raises what went wrong in a write, so that a training does not go on without it."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Wait until the newest epoch is on the disk.

        Raises:
            StorageError: if it cannot be written.
        """
        self._join()
        self.check()
        self._start()
        self._join()
        self.check()

    def finish(self) -> None:
        """Write the end of a training, as one file.

        Raises:
            StorageError: if that cannot be done.
        """
        self._join()
        self.check()
        if self.file is None:
            return
        state = self.state()
        if self._whole == state["progress"]["next_epoch"]:
            return
        self._waiting = None
        checkpoint.save(self.file, state)
        remove_others(self.file, None)

    def _start(self) -> None:
        """Let a thread write the copy that waits; the process does not end before it has."""
        if self._waiting is not None:
            thread = threading.Thread(target=self._write, args=(self._waiting,), name="checkpoint")
            thread.start()
            self._thread, self._waiting = thread, None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, state: dict[str, Any]) -> None:
        began, worked = time.monotonic(), time.thread_time()
        try:
            self._write_files(state)
        except BaseException as error:
            self._error = error
        cost, self._cost = self._cost + time.thread_time() - worked, 0.0
        self._due = began + cost / SHARE

    def _write_files(self, state: dict[str, Any]) -> None:
        assert self.file is not None
        best, epoch = state["best_weights"], state["progress"]["best_epoch"]
        if epoch is None or _best_is_newest(state):
            checkpoint.save(self.file, state)
            self._best, self._whole = None, state["progress"]["next_epoch"]
            remove_others(self.file, None)
            return
        if self._best is None or self._best[0] != epoch:
            file = new_best_file(self.file)
            checkpoint.save(file, {"token": token_of(file.name), "weights": best})
            self._best = epoch, file.name
        parts = {key: value for key, value in state.items() if key != "best_weights"}
        self._whole = None
        checkpoint.save(self.file, {**parts, "best_file": self._best[1]})
        remove_others(self.file, self._best[1])


def _best_is_newest(state: dict[str, Any]) -> bool:
    progress = state["progress"]
    return progress["best_epoch"] == progress["next_epoch"] - 1
