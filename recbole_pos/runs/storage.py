"""Storage that all machines reach, for runs that must outlive a machine: a path or a URI (``s3://``)."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import OLD_BEST, RunFolder
from recbole_pos.reporter import repeat
from recbole_pos.values import shown

_UNFINISHED = ".part"  # end of the name of a file that is being written


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
    return fs.FileSystem.from_uri(place) if "://" in place else (fs.LocalFileSystem(), place)


def names_in(place: str) -> list[str]:
    """Return the names of the entries of a folder, sorted; none if there is no such folder."""
    system, path = filesystem(place)
    entries = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(entry.base_name for entry in entries)


class Mirror:
    """A copy of a run's folder on a storage, which is kept up to date.

    Args:
        run: the folder on this machine.
        place: path or URI of the copy.
    """

    every = 1.0  # seconds between two checks for changed files

    def __init__(self, run: RunFolder, place: str) -> None:
        self.folder = run.path
        self.checkpoint = run.checkpoint
        self.own = [run.config, run.metrics, run.result, run.ranks, run.known]
        self.place = place
        self.system, self.path = filesystem(place)
        self.known: dict[
            str, int
        ] = {}  # file -> modification time in ns of the version that the copy has
        self.lock = threading.Lock()

    def has(self, file: Path) -> bool:
        """Return whether the copy has a file of the run.

        Args:
            file: path of the file on this machine.
        """
        return file.name in names_in(self.place)

    def fetch(self) -> None:
        """Copy the files from the storage to this machine; each appears once all of it is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = names_in(self.place)
        best = [self.folder / name for name in stored if name.startswith(OLD_BEST)]
        for file in (*self.own, *best, self.checkpoint):
            if file.name not in stored:
                continue
            unfinished = file.with_name(f"{file.name}{_UNFINISHED}")
            with self.system.open_input_stream(f"{self.path}/{file.name}") as source:
                with open(unfinished, "wb") as target:
                    shutil.copyfileobj(source, target)
            unfinished.replace(file)
            self.known[file.name] = file.stat().st_mtime_ns

    def keep(self) -> None:
        """Copy changed files to the storage; each takes its place once all of it is there."""
        with self.lock:
            self.system.create_dir(self.path)
            files = [*self.own, *self.folder.glob(f"{OLD_BEST}*"), self.checkpoint]
            for file in filter(Path.is_file, files):
                changed = file.stat().st_mtime_ns
                if self.known.get(file.name) == changed:
                    continue
                target = f"{self.path}/{file.name}"
                with open(file, "rb") as source:
                    with self.system.open_output_stream(f"{target}{_UNFINISHED}") as stream:
                        shutil.copyfileobj(source, stream)
                self.system.move(f"{target}{_UNFINISHED}", target)
                self.known[file.name] = changed

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Copy files as they change, and all of them at the end; for use in a ``with`` block.

        Raises:
            OSError: if the last copy fails; earlier failures are tried again.
        """
        with repeat(self.every, self.keep):
            yield
        self.keep()
