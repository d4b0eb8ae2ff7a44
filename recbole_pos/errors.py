"""Errors meant to be read by the person at the keyboard."""

from __future__ import annotations


class PosError(Exception):
    """Base of every error raised on purpose; the command line prints only its message."""

    exit_code = 1


class UsageError(PosError, ValueError):
    """Something the user gave (option, field, file, name) is wrong; says which, and what to do."""

    exit_code = 2


class TrainingError(PosError, RuntimeError):
    """Training cannot go on, for example because the loss is no longer a number."""


class CheckpointError(PosError, RuntimeError):
    """A checkpoint file is damaged, foreign, or holds something that must not be loaded."""

    exit_code = 2
