"""Errors meant to be read by the person at the keyboard."""

from __future__ import annotations


class PosError(Exception):
    """Base of every error raised on purpose; the command line prints only its message."""

    exit_code = 1


class UsageError(PosError, ValueError):
    """Something the user gave (option, field, file, name) is wrong; says which, and what to do."""

    exit_code = 2


class UnknownKey(UsageError):
    """An option that nothing reads here; carries its name."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class TrainingError(PosError, RuntimeError):
    """Training cannot go on, for example because the loss is no longer a number."""


class StorageError(PosError, OSError):
    """A file cannot be written: no room, no permission, no folder."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training; carries the run folder whose checkpoint can be resumed."""

    exit_code = 130

    def __init__(self, run_dir: str) -> None:
        super().__init__(
            f"interrupted; {run_dir} holds the last finished epoch, continue with "
            f"`recbole-pos run --resume {run_dir}`"
        )


class CheckpointError(PosError, RuntimeError):
    """A checkpoint file is damaged, foreign, or holds something that must not be loaded."""

    exit_code = 2


class RunWarning(UserWarning):
    """A trained model is used whose run is unfinished, or whose dataset is not there."""
