"""A place that all machines reach, for what must outlive a machine: a path, or a URI (``s3://``)."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyarrow import fs

from recbole_pos.errors import CheckpointError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.checkpoint import is_old_best_file, old_best_files
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.values import shown

_UNFINISHED = ".part"  # end of the name of a file that is being written


def place_of(storage: str, folder: Path, make: bool = True) -> str:
    """The part of a storage that belongs to a folder, so that two of them do not meet.

    Args:
        storage: as given: a path or a URI.
        folder: of a search or a study.
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
    """Arrow's file system of a path or URI, and the path within it.

    Raises:
        OSError, ValueError: for a URI that Arrow does not know, or cannot reach.
    """
    return fs.FileSystem.from_uri(place) if "://" in place else (fs.LocalFileSystem(), place)


def is_taken(place: str) -> bool:
    """Whether something lies at a path or URI."""
    system, path = filesystem(place)
    return system.get_file_info(path).type != fs.FileType.NotFound


def fetch_checkpoint(place: str, folders: list[str], target: RunFolder) -> bool:
    """Copy the newest whole checkpoint of a trial; one that its process did not live to complete,
    or that was damaged since, is passed over.

    Args:
        place: path or URI of Ray's folder.
        folders: of the trial, within it, the newest last.
        target: a folder that is there.

    Returns:
        Whether there was one.
    """
    system, root = filesystem(place)
    for folder in reversed(folders):
        selector = fs.FileSelector(f"{root}/{folder}", allow_not_found=True)
        names = [one.base_name for one in system.get_file_info(selector)]
        names = sorted((n for n in names if n.startswith("checkpoint_")), reverse=True)
        for name in names:
            with tempfile.TemporaryDirectory(prefix="recbole-pos-fetch-") as near:
                fs.copy_files(f"{root}/{folder}/{name}", near, source_filesystem=system)
                with suppress(CheckpointError):
                    checkpoint.load(RunFolder(near).checkpoint)
                    copy_run(RunFolder(near), target)
                    return True
    return False


def copy_run(source: RunFolder, target: RunFolder) -> None:
    """Copy the files of a checkpoint that Ray keeps; its best weights become part of it."""
    for file in source.path.iterdir():
        if file.is_file() and not file.name.startswith(source.checkpoint.name):
            shutil.copy(file, target.path)
    if source.checkpoint.is_file():
        checkpoint.copy(source.checkpoint, target.checkpoint)


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
        self.own = [run.config, run.metrics, run.result, run.ranks]
        self.system, self.path = filesystem(place)
        self.known: dict[str, int] = {}  # file -> when it was changed, as the copy has it

    def has(self, file: Path) -> bool:
        """Whether the copy has a file of the run."""
        (found,) = self.system.get_file_info([f"{self.path}/{file.name}"])
        return bool(found.is_file)

    def fetch(self) -> None:
        """Bring the copy here, file by file, each whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there = self.system.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        names = [one.base_name for one in there if is_old_best_file(one.base_name, self.checkpoint)]
        best = [self.folder / name for name in names]
        for file in filter(self.has, [*self.own, *best, self.checkpoint]):
            unfinished = file.with_name(f"{file.name}{_UNFINISHED}")
            with self.system.open_input_stream(f"{self.path}/{file.name}") as source:
                with open(unfinished, "wb") as target:
                    shutil.copyfileobj(source, target)
            unfinished.replace(file)
            self.known[file.name] = file.stat().st_mtime_ns

    def keep(self) -> None:
        """Copy what has changed here; a file takes its place once all of it is there."""
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
        over = threading.Event()

        def follow() -> None:
            while not over.wait(self.every):
                with suppress(OSError):
                    self.keep()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            over.set()
            follower.join()
        self.keep()
