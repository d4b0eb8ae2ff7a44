"""Best weights in a file of their own, while training goes on: its name, and which are not needed.

A checkpoint of an epoch that was not the best names the file that has the best weights. Such a file
is written once, before the checkpoint that names it, and no two ever have the same name: whichever
of two checkpoints is there after a ``kill -9``, its best weights are there too.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

_MARK = ".best-"  # between the name of the checkpoint and a token that is in the file as well


def new_best_file(checkpoint: Path) -> Path:
    """A name that no file ever had: ``checkpoint.pt.best-`` and a token, beside the checkpoint."""
    return checkpoint.with_name(f"{checkpoint.name}{_MARK}{uuid.uuid4().hex[:12]}")


def token_of(name: str) -> str:
    """What a file of best weights holds, too, so that none is taken for another."""
    return name.rpartition(_MARK)[2]


def is_best_file(name: str, checkpoint: Path) -> bool:
    """Whether a file of this name has best weights of a checkpoint."""
    return re.fullmatch(re.escape(checkpoint.name + _MARK) + "[0-9a-f]{12}", name) is not None


def best_files(checkpoint: Path) -> list[Path]:
    """All that are there; the checkpoint names one of them or none."""
    return sorted(f for f in checkpoint.parent.iterdir() if is_best_file(f.name, checkpoint))


def remove_others(checkpoint: Path, named: str | None) -> None:
    """Remove those that the checkpoint, as it is on the disk, does not name."""
    for file in best_files(checkpoint):
        if file.name != named:
            file.unlink(missing_ok=True)
