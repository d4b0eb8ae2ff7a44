"""A place that all machines reach, for what must outlive a machine: a path, or a URI (``s3://``)."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

from recbole_pos.errors import UsageError
from recbole_pos.experiment.checkpoint import is_old_best_file, old_best_files
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.reporter import repeat
from recbole_pos.values import shown

_UNFINISHED = ".part"  # end of the name of a file that is being written


def resolve_storage(storage: str, folder: Path, make: bool = True) -> str:
    """Return the part of a storage that belongs to a folder, so that two of them do not meet.

    Args:
        storage: as given: a path or a URI.
        folder: folder of a search or a study.
        make: whether to see that it can be written to.

    Raises:
        UsageError: if it cannot, or if nobody knows such a URI.
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
    """Return Arrow's file system of a path or URI, and the path within it.

    Raises:
        OSError, ValueError: for a URI that Arrow does not know, or cannot reach.
    """
    return fs.FileSystem.from_uri(place) if "://" in place else (fs.LocalFileSystem(), place)


def names_in(place: str) -> list[str]:
    """Return what lies in a folder, sorted; nothing where there is none."""
    system, path = filesystem(place)
    found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(one.base_name for one in found)


class Mirror:
    """What a run writes into its folder on this machine, and the copy on a storage.

    Args:
        run: here.
        place: path or URI of the copy.
    """

    every = 1.0  # seconds between two looks for what has changed

    def __init__(self, run: RunFolder, place: str) -> None:
        self.folder = run.path
        self.checkpoint = run.checkpoint
        self.own = [run.config, run.metrics, run.result, run.ranks, run.known]
        self.place = place
        self.system, self.path = filesystem(place)
        self.known: dict[str, int] = {}  # file -> when it was changed, as the copy has it
        self.lock = threading.Lock()

    def has(self, file: Path) -> bool:
        """Return whether the copy has a file of the run."""
        return file.name in names_in(self.place)

    def fetch(self) -> None:
        """Bring the copy here, file by file, each whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there = names_in(self.place)
        best = [self.folder / name for name in there if is_old_best_file(name, self.checkpoint)]
        for file in (*self.own, *best, self.checkpoint):
            if file.name not in there:
                continue
            unfinished = file.with_name(f"{file.name}{_UNFINISHED}")
            with self.system.open_input_stream(f"{self.path}/{file.name}") as source:
                with open(unfinished, "wb") as target:
                    shutil.copyfileobj(source, target)
            unfinished.replace(file)
            self.known[file.name] = file.stat().st_mtime_ns

    def keep(self) -> None:
        """Copy what has changed here; a file takes its place once all of it is there."""
        with self.lock:
            self.system.create_dir(self.path)
            files = [*self.own, *old_best_files(self.checkpoint), self.checkpoint]
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
        """While files change here, the copy follows; at the end it has all.

        Raises:
            OSError: if the end cannot be copied. What fails before is tried again.
        """
        with repeat(self.every, self.keep):
            yield
        self.keep()
