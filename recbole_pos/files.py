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
    """A file that remembers what ended its writing: torch.save raises something else then."""

    failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BaseException as error:  # Ctrl-C, too
            self.failure = error
            raise


@contextmanager
def whole(path: str | Path, text: bool = True) -> Iterator[IO]:
    """Open a file to write that takes its place once all of it is on the disk.

    Until then, and if anything fails, what was there stays. A link is followed. What is no regular
    file (a pipe, ``/dev/stdout``) is written as it is. What cannot be written is an error of
    :func:`writing`.
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
                os.replace(place, target)
                _sync_folder(target.parent)
    except Exception as error:
        if raw.failure is None or isinstance(error, StorageError):
            raise
        if isinstance(raw.failure, OSError):
            raise _refusal(given, raw.failure) from error
        raise raw.failure from None
    finally:
        with suppress(OSError):  # what is buffered still would be written once more
            file.close()
        if not special:
            with suppress(OSError):
                place.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file of text."""
    with whole(path) as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write a whole file of json; what is no plain value stands there as text."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Let what the system refuses name a file, in a ``with`` block that writes it.

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
    """Return the error about a file that cannot be written."""
    folder, is_long = path.absolute().parent, error.errno == errno.ENAMETOOLONG
    if not is_long and not os.path.isdir(folder):
        return UsageError(f"cannot write {path}: folder {path.parent} does not exist")
    if is_long or os.path.isdir(path):
        reason = error.strerror if is_long else "it is a folder"
        return UsageError(f"cannot write {shown(str(path))}: {reason}")
    room = ""
    if error.errno in _FULL and (path.is_file() or not path.exists()):
        room = f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB free)"
    return StorageError(f"cannot write {path}: {error.strerror or error}{room}")


def _sync_folder(path: Path) -> None:
    """Write a folder to the disk, so that a new name in it survives a power cut."""
    with suppress(OSError):  # some systems refuse; the file itself is there
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def only_writer(folder: Path, doing: str) -> Iterator[None]:
    """Lock a folder for this process in a ``with`` block; the system unlocks it in any case.

    If another process holds the lock, a UsageError says who it is and what is done (``searched``).
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
def replacing(folder: str | Path, keep: Callable[[Path], bool] = lambda _: True) -> Iterator[Path]:
    """Make an empty folder to fill, which takes the place of another once it is complete.

    If anything fails, ``folder`` stays as it was. What a killed process has left is removed by the
    next one, which puts the former folder back if it was between two names.

    Args:
        folder: the folder to replace, which need not be there; of a link, what it leads to.
        keep: whether something in the former folder is in the new one, too; all of it by default.
    """
    folder = Path(folder)
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
                    if left.is_dir() and not left.is_symlink():
                        shutil.rmtree(left)
                    else:
                        left.unlink(missing_ok=True)
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


def _link(file: Path, to: Path) -> None:
    """Give a file, or all files of a folder, another name; copy where there are no links."""
    if file.is_dir() and not file.is_symlink():
        shutil.copytree(file, to, symlinks=True, copy_function=lambda a, b: _link(Path(a), Path(b)))
        return
    try:
        os.link(file, to, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, to, follow_symlinks=False)


def remove_unfinished(files: Iterable[Path]) -> None:
    """Remove what a killed process has left of these files; only their writer may call it."""
    for file in files:
        for left in file.parent.glob(f".{glob.escape(file.name)}*.tmp"):
            left.unlink(missing_ok=True)


class TemporaryFolder:
    """A folder that is removed with this object, at the latest with the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
