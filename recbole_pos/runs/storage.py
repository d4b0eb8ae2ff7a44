"""Storage that all machines reach, for runs that must outlive a machine: a path or a URI (``s3://``)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.files import LOCK
from recbole_pos.reporter import repeat
from recbole_pos.values import shown

_UNFINISHED = ".part"  # end of the name of a file that is being written
_LOCAL = fs.LocalFileSystem()


def resolve_storage(storage: str, folder: Path, make: bool = True) -> str:
    """Return the place of a folder on a storage, by the folder's name, so that two do not collide.

    Args:
        storage: path or URI of the storage, as given.
        folder: folder of a search or a study.
        make: whether to create the place, which shows that the storage can be written.

    Raises:
        UsageError: if it cannot be created, or Arrow does not know such a URI.
    """
    if not storage:
        raise UsageError("--storage: empty; name a path or URI, or leave it out")
    place = f"{storage.rstrip('/')}/{folder.resolve().name}"
    if "://" not in place:
        place = os.path.abspath(place)
    try:
        system, path = filesystem(place)
        if make:
            system.create_dir(path)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--storage: cannot use {shown(storage)}: {reason[:200]}") from error
    return place


def filesystem(place: str) -> tuple[fs.FileSystem, str]:
    """Return the Arrow file system of a path or URI, and the path within it.

    Raises:
        OSError, ValueError: for a URI that Arrow does not know, or cannot reach.
    """
    return fs.FileSystem.from_uri(place) if "://" in place else (_LOCAL, place)


def names_in(place: str) -> list[str]:
    """Return the names of the entries of a folder, sorted; none if there is no such folder."""
    system, path = filesystem(place)
    entries = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(entry.base_name for entry in entries)


class Mirror:
    """A copy of a run's folder on a storage, which is kept up to date.

    The checkpoint is the last to be copied: with it, all of a run is there.

    Args:
        run: the folder on this machine.
        place: path or URI of the copy.
    """

    every = 1.0  # seconds between two checks for changed files

    def __init__(self, run: RunFolder, place: str) -> None:
        self.run, self.place = run, place
        self.system, self.path = filesystem(place)
        self.copied: dict[str, int] = {}  # file -> time in ns of the version that the copy has
        self.lock = threading.Lock()

    def has(self, file: Path) -> bool:
        """Return whether the copy has a file of the run, given by its path on this machine."""
        return file.name in names_in(self.place)

    def fetch(self) -> None:
        """Copy the files from the storage to this machine; each appears once all of it is there."""
        self.run.path.mkdir(parents=True, exist_ok=True)
        for name in self._in_order(names_in(self.place)):
            file = self.run.path / name
            unfinished = file.with_name(f"{name}{_UNFINISHED}")
            fs.copy_files(f"{self.path}/{name}", str(unfinished), self.system, _LOCAL)
            unfinished.replace(file)
            self.copied[name] = file.stat().st_mtime_ns

    def keep(self) -> None:
        """Copy changed files to the storage; each takes its place once all of it is there."""
        with self.lock:
            self.system.create_dir(self.path)
            files = [file.name for file in self.run.path.iterdir() if file.is_file()]
            for name in self._in_order(files):
                file, target = self.run.path / name, f"{self.path}/{name}"
                changed = file.stat().st_mtime_ns
                if self.copied.get(name) != changed:
                    fs.copy_files(str(file), f"{target}{_UNFINISHED}", _LOCAL, self.system)
                    self.system.move(f"{target}{_UNFINISHED}", target)
                    self.copied[name] = changed

    def _in_order(self, names: list[str]) -> list[str]:
        """Return the names of the files to copy: those that are whole, the checkpoint last."""
        whole = [n for n in names if not n.startswith(".") and not n.endswith(_UNFINISHED)]
        files = [name for name in whole if name != LOCK]
        return sorted(files, key=lambda name: name == self.run.checkpoint.name)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Copy files as they change, and all of them at the end; for use in a ``with`` block.

        Raises:
            OSError: if the last copy fails; earlier failures are tried again.
        """
        with repeat(self.every, self.keep):
            yield
        self.keep()
