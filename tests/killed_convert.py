"""Convert again and again, killed at every step that touches the folder of the data.

Arguments: the file, and the folder of the data. It prints a line a step: what its next reader
finds, and what is there after the same command has run again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import recbole_pos.conversion.convert  # noqa: F401 - once for all processes
from recbole_pos.cli.main import main
from recbole_pos.data.location import locate_dataset

_STEPS = {"os.rename", "shutil.rmtree"}


def convert(arguments: list[str], folder: Path, steps: int | None = None) -> bool:
    """Convert in a process of its own, killed after so many steps; return whether it was."""
    if not (process := os.fork()):
        left = steps

        def count(event: str, details: tuple) -> None:
            nonlocal left
            if left is not None and event in _STEPS and str(folder) in str(details[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        os._exit(main(arguments))
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), status
    return os.WIFSIGNALED(status)


def contents(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def worker(file: str, folder: Path) -> None:
    command = ["convert", file, "--name=shop", f"--data_path={folder}", "--quiet", "--overwrite"]
    before = folder.with_name("before")
    shutil.copytree(folder, before)
    steps, killed = 0, True
    while killed:
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        killed = convert(command, folder, steps)
        locate_dataset("shop", folder)  # with which every reader begins
        after = contents(folder)
        convert(command, folder)
        kill = {"killed": killed, "after": after, "again": contents(folder)}
        print(json.dumps(kill))
        steps += 1


if __name__ == "__main__":
    worker(sys.argv[1], Path(sys.argv[2]))
