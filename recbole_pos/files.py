"""Files that are complete or not there, and folders with one writer at a time."""

from __future__ import annotations

import errno
import glob
import hashlib
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

from recbole_pos.errors import StorageError, UsageError
from recbole_pos.values import short, shown

try:
    import fcntl
except ImportError:  # not on Windows, which goes without the lock
    fcntl = None  # type: ignore[assignment]

TEMPORARY = "recbole-pos-temporary-"  # prefix of the folders of :class:`TemporaryFolder`
LOCK = "lock"  # the file in a folder that its writer locks
MAX_BYTES = 2**24  # of a file of yaml or json
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # other errors: the file system has no locks
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


class _Raw(io.FileIO):
    """A file that keeps the error which stopped its writing, as torch.save raises another."""

    failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BaseException as error:  # Ctrl-C, too
            self.failure = error
            raise


@contextmanager
def atomic_write(path: str | Path, text: bool = True) -> Iterator[IO]:
    """Yield an open file, of text or bytes, that replaces ``path`` once it is on the disk.

    If anything fails, the former file stays; a new one has its permissions. A link is followed. A
    pipe, ``/dev/stdout`` or another special file is written directly. Errors are those of
    :func:`name_write_errors`.
    """
    path = Path(path)
    # os.path.exists is False for a name that is too long, where Path.exists raises an OSError
    is_special = os.path.exists(path) and not path.is_file()
    target = path.resolve() if os.path.islink(path) and not is_special else path
    unfinished = target
    if not is_special:
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    with name_write_errors(path):
        raw = _Raw(unfinished, "w")
    if not is_special:
        with suppress(OSError):  # there is no former file, or the file system has no permissions
            shutil.copymode(target, unfinished)

    buffered = io.BufferedWriter(raw)
    file = io.TextIOWrapper(buffered, encoding="utf-8", newline="") if text else buffered
    try:
        yield file
        with name_write_errors(path):
            file.flush()
            if not is_special:
                os.fsync(raw.fileno())
                file.close()
                os.replace(unfinished, target)
                _sync_folder(target.parent)
    except Exception as error:
        if raw.failure is None or isinstance(error, StorageError):
            raise
        with name_write_errors(path):
            raise raw.failure from None
    finally:
        with suppress(OSError):  # closing writes again what could not be written
            file.close()
        if not is_special:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of text, complete or not at all."""
    with atomic_write(path) as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write a file of json, complete or not at all; values that json lacks are written as text."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def read_capped(path: str | Path) -> bytes:
    """Return the content of a file of yaml or json; a UsageError refuses a large one.

    Parsers need many times the memory of a file, which may come from elsewhere.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{shown(str(path))}: more than {MAX_BYTES >> 20} MiB of text")
    return content


@contextmanager
def name_write_errors(path: str | Path) -> Iterator[None]:
    """Replace an OSError of a ``with`` block by an error that names the file it writes.

    Raises:
        UsageError: if ``path`` is a folder or too long, or its folder does not exist.
        StorageError: for any other OSError.
    """
    try:
        yield
    except (StorageError, BrokenPipeError):  # nothing reads the pipe of stdout any more
        raise
    except OSError as error:
        folder = os.path.dirname(os.path.abspath(path))
        text = f"cannot write {short(str(path))}: {error.strerror or error}"
        if not os.path.isdir(folder):
            text = f"cannot write {short(str(path))}: folder {folder} does not exist"
        if error.errno in _FULL and not str(path).startswith("/dev/"):
            text += f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB free)"
        is_wrong_path = (
            not os.path.isdir(folder) or os.path.isdir(path) or error.errno == errno.ENAMETOOLONG
        )
        raise (UsageError if is_wrong_path else StorageError)(text) from error


def _sync_folder(path: Path) -> None:
    """Write a folder to the disk, so that a new name in it survives a power cut."""
    with suppress(OSError):  # some systems refuse; the file itself is there
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def lock_folder(folder: Path, action: str) -> Iterator[None]:
    """Lock a folder for this process in a ``with`` block; the lock ends with the process.

    Raises:
        UsageError: if another process holds the lock; ``action`` (``searched``) tells what it does.
    """
    if fcntl is None:
        yield
        return
    with name_write_errors(folder / LOCK):
        # unbuffered: closing would write again the line for which a full disk had no room
        file = (folder / LOCK).open("ab+", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                file.seek(0)
                holder = file.read().decode(errors="replace").strip() or "another process"
                raise UsageError(
                    f"{folder} is being {action} by {holder}; wait for it, or stop it first"
                ) from error
        with suppress(OSError):  # if the disk is full, messages cannot name this process
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


@contextmanager
def replace_folder(
    folder: str | Path, keep: Callable[[Path], bool] = lambda _: True
) -> Iterator[Path]:
    """Yield an empty folder to fill, which then replaces another in one step.

    If anything fails, ``folder`` stays as it was. The next call clears what a killed process has
    left. The step is two renames, and ``folder`` is absent between them: readers call
    :func:`finish_replacement` first.

    Args:
        folder: the folder to replace, which need not exist; if it is a link, its target.
        keep: returns whether a file or folder of the former folder is kept; all are by default.
    """
    folder = Path(folder)
    finish_replacement(folder)
    target = folder.resolve()
    unfinished, former = _name_replacements(target)
    with name_write_errors(folder):
        unfinished.mkdir(parents=True, exist_ok=True)
    with lock_folder(unfinished, "written"):
        try:
            with name_write_errors(folder):
                _remove([former, *(path for path in unfinished.iterdir() if path.name != LOCK)])
            yield unfinished
            with name_write_errors(folder):
                if target.exists():
                    shutil.copymode(target, unfinished)
                    for path in target.iterdir():
                        if keep(path) and not os.path.lexists(unfinished / path.name):
                            _link(path, unfinished / path.name)
                if target.exists():
                    os.replace(target, former)
                with suppress(FileNotFoundError):  # a reader has finished this replacement
                    os.replace(unfinished, target)
                _sync_folder(target.parent)
        except BaseException:
            if former.exists() and not target.exists():
                os.replace(former, target)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        (target / LOCK).unlink(missing_ok=True)
        shutil.rmtree(former, ignore_errors=True)


def finish_replacement(folder: str | Path) -> None:
    """Finish what a process began that was killed between the two renames of a replacement.

    The folder that it has filled gets the name ``folder``, or else the former one gets it back.
    Nothing happens if ``folder`` exists, or no replacement has begun.
    """
    with suppress(OSError, ValueError):  # another reader was faster; no folder has such a name
        target = Path(folder).resolve()
        unfinished, former = _name_replacements(target)
        if former.exists() and not target.exists():
            os.replace(unfinished if unfinished.exists() else former, target)


def _name_replacements(target: Path) -> tuple[Path, Path]:
    """Return the paths of the folders that will replace ``target``, and that it has replaced."""
    return target.parent / f".{target.name}.new", target.parent / f".{target.name}.old"


def _remove(paths: Iterable[Path]) -> None:
    """Remove files and folders that exist."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _link(source: Path, link: Path) -> None:
    """Hard-link a file, or all files of a folder; copy where the file system has no links."""
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(
            source, link, symlinks=True, copy_function=lambda a, b: _link(Path(a), Path(b))
        )
        return
    try:
        os.link(source, link, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, link, follow_symlinks=False)


def digest_file(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of the bytes of a file, in hexadecimal."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def remove_unfinished(files: Iterable[Path]) -> None:
    """Remove unfinished versions of files, which a killed process has left; for their writer."""
    for file in files:
        for unfinished in file.parent.glob(f".{glob.escape(file.name)}*.tmp"):
            unfinished.unlink(missing_ok=True)


class TemporaryFolder:
    """A folder that is removed with this object, at the latest with the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
