"""What the processes of a search read, and with how many threads they train."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def install_spy(file: str) -> Callable[[], None]:
    """A function that makes a process note every reading of files, test rows and epochs.

    While there is a file ``broken`` beside the notes, models of two layers find no room.
    """

    def spy() -> None:
        import os

        import torch

        import recbole_pos  # noqa: F401
        from recbole_pos.data import preparation
        from recbole_pos.data.loaders import TargetLoader
        from recbole_pos.experiment.trainer import PosTrainer

        def note(*words: Any) -> None:
            with open(file, "a") as stream:
                stream.write(" ".join(map(str, (os.getpid(), *words))) + "\n")

        read, collate = preparation.read_tables, TargetLoader.collate_fn
        epoch = PosTrainer._train_epoch

        def read_tables(config):
            note("file", 1)
            return read(config)

        def collate_fn(self, index):
            note(self._dataset.phase, len(index))
            return collate(self, index)

        def _train_epoch(self, *args, **kwargs):
            if os.path.exists(f"{file}.broken") and self.config["n_layers"] == 2:
                raise OSError(28, "No space left on device")
            note("threads", torch.get_num_threads())
            note("epoch", args[1])
            return epoch(self, *args, **kwargs)

        preparation.read_tables = read_tables
        TargetLoader.collate_fn = collate_fn
        PosTrainer._train_epoch = _train_epoch

    return spy


def notes(file: Path) -> list[tuple[int, str, int]]:
    """Process, what it did and how much, in the order of time."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(int(pid), what, int(count)) for pid, what, count in lines]
