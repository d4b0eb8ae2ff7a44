"""Files that are complete or not there, and folders with one writer at a time."""

from __future__ import annotations

import errno
import glob
import hashlib
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
# Errors of a full disk, or of a user or process that may write no more.
_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


@contextmanager
def atomic_write(path: str | Path, text: bool = True) -> Iterator[IO]:
    """Open a file for a ``with`` block to write; it gets its name when the block has ended.

    So nobody ever sees half a file. The content goes to a hidden file beside it,
    ``.<name>.<random>.tmp``. If anything fails, that one is removed and the former file stays. A
    new file has the permissions of the former one. If ``path`` is a link, the file that it points
    to is replaced. A pipe, ``/dev/stdout`` or another special file cannot be replaced, and is
    written directly.

    Args:
        path: file to write.
        text: whether the file takes text (UTF-8), or bytes.

    Yields:
        The open file.

    Raises:
        UsageError: if ``path`` is a folder or too long, or its folder does not exist.
        StorageError: if the file cannot be written for another reason, such as a full disk.
    """
    path = Path(path)
    # A pipe or a device. (os.path.exists is used since Path.exists would raise an error for a name
    # that is too long. Such a name is refused below, where the file is opened.)
    if os.path.exists(path) and not path.is_file():
        with _open_to_write(path, text, path) as file:
            yield file
        return

    target = Path(os.path.realpath(path))  # of a link, the file that it points to
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with _open_to_write(unfinished, text, path) as file:
            with suppress(OSError):  # no former file, or the file system has no permissions
                shutil.copymode(target, unfinished)
            yield file
            with name_write_errors(path):
                file.flush()
                os.fsync(file.fileno())  # brings the content to the disk

        with name_write_errors(path):
            os.replace(unfinished, target)
            _sync_folder(target.parent)
    finally:
        with suppress(OSError):  # after a success it is gone, since it got its final name
            unfinished.unlink(missing_ok=True)


@contextmanager
def _open_to_write(file_path: Path, text: bool, name: Path) -> Iterator[IO]:
    """Open a file for a ``with`` block to write, and name it in errors of writing.

    Args:
        file_path: the file to open.
        text: whether the file takes text (UTF-8), or bytes.
        name: path that messages have for the file, which may still have a temporary one.

    Yields:
        The open file.

    Raises:
        UsageError, StorageError: if the file cannot be opened, or the disk is full.
    """
    options: dict[str, Any] = {"encoding": "utf-8", "newline": ""} if text else {}
    with name_write_errors(name):  # an OSError in its block becomes an error that says ``name``
        file: IO = open(file_path, "w" if text else "wb", **options)

    try:
        with _name_full_disk(name):  # other errors of the caller's block stay as they are
            yield file
        with name_write_errors(name):
            file.flush()  # so that all is written before the file is closed
    finally:
        with suppress(OSError):  # after an error, closing tries to write the rest, and may fail
            file.close()


@contextmanager
def _name_full_disk(name: Path) -> Iterator[None]:
    """Replace an error in a ``with`` block by one that names the file, if the disk is full.

    Args:
        name: path that messages have for the file.

    Raises:
        StorageError: if a full disk is the cause of the error. Any other error stays as it is.
    """
    try:
        yield
    except Exception as error:
        full_disk = _find_full_disk(error)
        if full_disk is None:
            raise
        with name_write_errors(name):  # makes a StorageError of it
            raise full_disk from None


def _find_full_disk(error: Exception) -> OSError | None:
    """Return the error of a full disk behind an error of writing; None if it has another cause.

    It is the error itself or its ``__context__``: some libraries, such as torch.save, raise an
    error of their own while they handle that of the disk, which Python then keeps there.

    Args:
        error: what was raised while a file was written.
    """
    for cause in (error, error.__context__):
        if isinstance(cause, OSError) and cause.errno in _FULL:  # numbers of such errors
            return cause
    return None


def write_text(path: Path, text: str) -> None:
    """Write a file of text, complete or not at all."""
    with atomic_write(path) as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write a value to a json file, complete or not at all; what json lacks is written as text."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def read_capped(path: str | Path) -> bytes:
    """Return the content of a file of yaml or json, and refuse one of more than 16 MiB.

    Files may come from strangers, and parsers need many times the memory of a file.

    Args:
        path: the file.

    Raises:
        UsageError: if the file is larger.
        OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)  # one byte more tells a file that is too large
    if len(content) > MAX_BYTES:
        raise UsageError(f"{shown(str(path))}: more than {MAX_BYTES >> 20} MiB of text")
    return content


@contextmanager
def name_write_errors(path: str | Path) -> Iterator[None]:
    """Replace an OSError in a ``with`` block that writes a file by an error that names the file.

    Args:
        path: the file that the block writes, or a name for messages such as "standard output".

    Raises:
        UsageError: if ``path`` is a folder or too long, or its folder does not exist.
        StorageError: for any other OSError, such as a full disk.
    """
    try:
        yield
    except StorageError:  # it has the name of a file already
        raise
    except OSError as error:
        folder = os.path.dirname(os.path.abspath(path))
        has_folder = os.path.isdir(folder)
        if has_folder:
            reason = error.strerror or str(error)
        else:
            reason = f"folder {folder} does not exist"
        text = f"cannot write {short(str(path))}: {reason}"
        is_too_long = error.errno == errno.ENAMETOOLONG
        if not has_folder or os.path.isdir(path) or is_too_long:
            raise UsageError(text) from error
        raise StorageError(text) from error


def _sync_folder(path: Path) -> None:
    """Write a folder's list of files to the disk, so that a new name in it survives a power cut.

    Args:
        path: the folder, in which a file or folder has just been renamed.
    """
    with suppress(OSError):  # some systems refuse; the file itself is there
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def lock_folder(folder: Path, action: str) -> Iterator[None]:
    """Let no other process write to a folder during a ``with`` block, by a lock on the folder.

    The lock is one of the system on the file ``lock`` in the folder, so it also ends if the process
    is killed. The file says which process holds it. Windows and file systems without locks go
    without.

    Args:
        folder: an existing folder.
        action: what this process does to the folder (``written``), for the message to others.

    Raises:
        UsageError: if another process holds the lock.
    """
    if fcntl is None:  # Python's module for locks, which Windows lacks
        yield
        return

    # The file stays open, and so locked, while the block runs.
    with name_write_errors(folder / LOCK):
        # Unbuffered, since closing a buffered file on a full disk would fail a second time.
        file = (folder / LOCK).open("ab+", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:  # another process holds the lock
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "another process"
            raise UsageError(
                f"{folder} is being {action} by {holder}; wait for it, or stop it first"
            ) from error
        except OSError:  # the file system has no locks, so go on without
            pass

        with suppress(OSError):  # if the disk is full, messages cannot name this process
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


@contextmanager
def replace_folder(
    folder: str | Path, keep: Callable[[Path], bool] = lambda _: True
) -> Iterator[Path]:
    """Yield an empty folder to fill, which replaces another folder when the ``with`` block ends.

    What the former folder has beside the files that the block writes is kept, unless ``keep`` says
    otherwise: the new folder gets it as well, as links, before the two are exchanged.

    So nobody sees a folder with half its files. The folder to fill is called ``.<name>.new``, and
    lies beside the other one. At the end two renames exchange them: the former folder becomes
    ``.<name>.old``, which is then removed, and the new one gets its name. If anything fails, the
    former folder stays. If the process is killed, the next call clears what it has left. Between
    the two renames no folder has the name, so readers call :func:`finish_replacement` first.

    Args:
        folder: the folder to replace, which need not exist; if it is a link, its target is
            replaced.
        keep: returns whether a file or folder within the former folder is kept in the new one,
            unless that has one of the same name; all are by default.

    Raises:
        UsageError: if another process is replacing the folder, or it cannot be written there.
        StorageError: if the disk is full, as :func:`name_write_errors` says.
    """
    folder = Path(folder)
    finish_replacement(folder)
    target = folder.resolve()
    unfinished, former = _name_replacements(target)

    with name_write_errors(folder):
        unfinished.mkdir(parents=True, exist_ok=True)
    # ``lock_folder`` locks a file in the folder to fill. When that folder is renamed, the file
    # moves with it and stays locked, until the end of this block.
    with lock_folder(unfinished, "written"):
        try:
            # Clear what a killed process has left.
            left_over = [path for path in unfinished.iterdir() if path.name != LOCK]
            with name_write_errors(folder):
                _remove([former, *left_over])

            yield unfinished  # the block fills it

            # Link what is kept of the former folder into the new one, then exchange the two.
            with name_write_errors(folder):
                if target.exists():
                    shutil.copymode(target, unfinished)
                    _link_kept(target, unfinished, keep)
                    os.replace(target, former)
                # A reader may have finished this replacement already.
                with suppress(FileNotFoundError):
                    os.replace(unfinished, target)
                _sync_folder(target.parent)
        except BaseException:  # Ctrl-C, too: the former folder gets its name back
            if former.exists() and not target.exists():
                os.replace(former, target)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

        (target / LOCK).unlink(missing_ok=True)  # the file of the lock, which has moved with it
        shutil.rmtree(former, ignore_errors=True)


def _link_kept(former: Path, new: Path, keep: Callable[[Path], bool]) -> None:
    """Link the files and folders of a former folder into a new one, if they are kept.

    Args:
        former: the former folder, which stays as it is.
        new: the new folder. What it has under the same name wins.
        keep: returns whether a file or folder of the former folder is kept.
    """
    for path in former.iterdir():
        new_path = new / path.name
        if not keep(path) or os.path.lexists(new_path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new_path, symlinks=True, copy_function=_link_file)
        else:
            _link_file(path, new_path)


def finish_replacement(folder: str | Path) -> None:
    """Finish a :func:`replace_folder` whose process was killed between its two renames.

    At that moment no folder has the name ``folder``: the former one has been renamed to
    ``.<name>.old``, and the new one is still called ``.<name>.new``. The new one gets the name or,
    if it is missing, the former one gets it back. Nothing happens if ``folder`` exists, or was
    never replaced.
    """
    # OSError: another process has finished it first. ValueError: no folder can have such a name.
    with suppress(OSError, ValueError):
        target = Path(folder).resolve()
        # the paths .<name>.new and .<name>.old beside the folder
        unfinished, former = _name_replacements(target)
        if former.exists() and not target.exists():  # killed between the two renames
            os.replace(unfinished if unfinished.exists() else former, target)


def _name_replacements(target: Path) -> tuple[Path, Path]:
    """Return the hidden paths of the folder that will replace ``target``, and of the former one."""
    return target.parent / f".{target.name}.new", target.parent / f".{target.name}.old"


def _remove(paths: Iterable[Path]) -> None:
    """Remove files and folders that exist."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _link_file(file: Any, new_path: Any) -> None:
    """Give a file a second path (a hard link); copy it where the file system has no such links."""
    try:
        os.link(file, new_path, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, new_path, follow_symlinks=False)


def digest_file(path: Path) -> str:
    """Return the SHA-256 digest of the bytes of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def remove_unfinished(files: Iterable[Path]) -> None:
    """Remove the temporary files that a killed :func:`atomic_write` of these files has left.

    Only the one process that writes these files may call it: if another were writing one of them at
    the moment, its temporary file would be removed, too.

    Args:
        files: paths of the complete files.
    """
    for file in files:
        for unfinished in file.parent.glob(f".{glob.escape(file.name)}*.tmp"):
            unfinished.unlink(missing_ok=True)


class TemporaryFolder:
    """A new folder that is removed with this object, at the latest when the process ends.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
