"""The version of this package; ``setup.cfg`` reads it from here as text."""

import subprocess
from pathlib import Path

__version__ = "0.3.0"


def find_commit() -> str:
    """Return the commit of the git checkout that this package runs from, to be kept with results.

    Returns:
        12 digits, with ``-dirty`` if files were changed since; "" if the package is installed, or
        git is missing or fails.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # else git would find a project that holds the environment
        return ""
    # --always: the commit itself where no tag names it
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
