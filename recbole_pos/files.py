"""Files that are whole or not there, and folders with one writer at a time."""

from __future__ import annotations

import errno
import glob
import io
import json
import os
import shutil
import socket
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from recbole_pos.errors import PosError, StorageError, UsageError
from recbole_pos.values import shown

try:
    import fcntl
except ImportError:  # not on Windows, which goes without the lock
    fcntl = None  # type: ignore[assignment]

TEMPORARY = "recbole-pos-temporary-"  # how names of folders begin that go with an object
LOCK = "lock"  # the file in a folder that its writer holds
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # else the file system has no locks, and we go without
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


class _Raw(io.FileIO):
    """A file that remembers what ended its writing: torch.save raises something of its own then.

    Not only a full disk: Ctrl-C is raised here, too, if it comes while torch writes.
    """

    failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BaseException as error:
            self.failure = error
            raise


@contextmanager
def whole(path: str | Path, text: bool = True) -> Iterator[IO]:
    """A file to write that takes its place once all of it is on the disk; until then, and if
    anything fails, what was there stays.

    A link is followed. What is no regular file (a pipe, ``/dev/stdout``) is written as it is.

    Raises:
        UsageError, StorageError: if it cannot be written, see :func:`writing`; whatever else is
            raised within goes on.
    """
    given = Path(path)
    special = os.path.exists(given) and not given.is_file()  # a name may be too long: no OSError
    target = given.resolve() if os.path.islink(given) and not special else given
    place = target if special else target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    with writing(given):
        raw = _Raw(place, "w")
    buffered = io.BufferedWriter(raw)
    file = io.TextIOWrapper(buffered, encoding="utf-8", newline="") if text else buffered
    try:
        yield file
        with writing(given):
            file.flush()
            if not special:
                os.fsync(raw.fileno())
            file.close()
            if not special:
                os.replace(place, target)
                _sync_folder(target.parent)
    except Exception as error:
        if isinstance(raw.failure, OSError) and not isinstance(error, StorageError):
            raise _refusal(given, raw.failure) from error
        if raw.failure is not None and not isinstance(raw.failure, OSError):
            raise raw.failure from None
        raise
    finally:
        with suppress(OSError):  # what is buffered still would be written once more
            file.close()
        if not special:
            with suppress(OSError):
                place.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A whole file of text."""
    with whole(path) as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write a whole file of json; what is no plain value stands there as text."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Within, what the system refuses names ``path``.

    Raises:
        UsageError: if there cannot be such a file: it is a folder, or is to be in none.
        StorageError: for any other OSError.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _refusal(Path(path), error) from error


def _refusal(path: Path, error: OSError) -> PosError:
    folder = path.absolute().parent
    if not os.path.isdir(folder) and error.errno != errno.ENAMETOOLONG:
        return UsageError(f"cannot write {path}: folder {path.parent} does not exist")
    if os.path.isdir(path):
        return UsageError(f"cannot write {path}: it is a folder")
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"cannot write {shown(str(path))}: {error.strerror}")
    room = ""
    if error.errno in _FULL and (path.is_file() or not path.exists()):
        room = f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB free)"
    return StorageError(f"cannot write {path}: {error.strerror or error}{room}")


def _sync_folder(path: Path) -> None:
    """So that a new name survives a power cut."""
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path, os.O_DIRECTORY)
        try:
            with suppress(OSError):  # some file systems refuse; the file itself is there
                os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def only_writer(folder: Path, doing: str) -> Iterator[None]:
    """While this process writes into a folder; the system lets go of it however the process ends.

    Args:
        folder: which must be there.
        doing: what is done to it, for the message: ``searched``.

    Raises:
        UsageError: if another process does.
    """
    if fcntl is None:
        yield
        return
    with writing(folder / LOCK):
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                file.seek(0)
                raise UsageError(
                    f"{folder} is being {doing} by {file.read().strip() or 'another process'}; "
                    "wait for it, or stop it first"
                ) from error
        with suppress(OSError):  # on a full disk the message above says less
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


@contextmanager
def replacing(folder: Path, keep: Callable[[Path], bool]) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of ``folder`` once all of it is on the disk.

    If anything fails, ``folder`` stays as it was. What a killed process has left is removed by the
    next one, which puts the former folder back if it was between two names.

    Args:
        folder: which need not be there; of a link, what it leads to.
        keep: whether something in the former folder is in the new one, too.

    Raises:
        UsageError, StorageError: if it cannot be written, or another process writes it.
    """
    target = folder.resolve()
    begun, former = (target.with_name(f".{target.name}.{end}") for end in ("new", "old"))
    made = [parent for parent in target.parents if not parent.exists()]
    with writing(folder):
        begun.mkdir(parents=True, exist_ok=True)
    with only_writer(begun, "written"):
        try:
            with writing(folder):
                if former.exists() and not target.exists():
                    os.replace(former, target)
                for left in (former, *(one for one in begun.iterdir() if one.name != LOCK)):
                    _remove(left)
            yield begun
            with writing(folder):
                if target.exists():
                    shutil.copymode(target, begun)
                    for one in target.iterdir():
                        if keep(one) and not os.path.lexists(begun / one.name):
                            _link(one, begun / one.name)
                    os.replace(target, former)
                os.replace(begun, target)
                _sync_folder(target.parent)
        except BaseException:
            if former.exists() and not target.exists():
                os.replace(former, target)
            shutil.rmtree(begun, ignore_errors=True)
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()
            raise
        (target / LOCK).unlink(missing_ok=True)
        shutil.rmtree(former, ignore_errors=True)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into that takes the place of ``path``, which is new or empty, at the end.

    As :func:`replacing`; what someone else has put there meanwhile stays.
    """
    with replacing(Path(path), keep=lambda _: True) as folder:
        yield folder


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(file: Path, to: Path) -> None:
    """The same file under another name, or a folder of such; a copy where there are no links."""
    if file.is_dir() and not file.is_symlink():
        shutil.copytree(file, to, symlinks=True, copy_function=lambda a, b: _link(Path(a), Path(b)))
        return
    try:
        os.link(file, to, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, to, follow_symlinks=False)


def remove_unfinished(files: Iterable[Path]) -> None:
    """Remove what a process has left that was killed while it wrote these files.

    For their one writer alone.
    """
    for file in files:
        for left in file.parent.glob(f".{glob.escape(file.name)}*.tmp"):
            left.unlink(missing_ok=True)


class TemporaryFolder:
    """A folder that is removed with this object, at the latest with the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
