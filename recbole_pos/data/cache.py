"""Prepared data beside the files that they were made from: the second start reads no text.

One file for a dataset and the options that its preparation reads, in a folder of its own beside the
atomic files. It is believed if this user has written it (it is signed with a key in the user's
folder of settings), its values are possible, and it says the same of versions, options and the
contents of the atomic files, all bytes of which are looked at; times and sizes of files are not.
Otherwise it is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import recbole
from recbole.utils.argument_list import dataset_arguments

from recbole_pos.data import array_file
from recbole_pos.values import Options
from recbole_pos.version import __version__

FORMAT = 2  # raised when the same files and options are prepared otherwise
FOLDER = ".recbole_pos"
LEAST_BYTES = 4 << 20  # of atomic files: smaller ones are read in less than a second
_KEY_BYTES = 32
MOST = 4  # caches of a dataset
_ABANDONED = 3600  # seconds after which a file that is being written is not
# The options that preparing reads; a test holds that there are no others.
_LATER = {"MAX_ITEM_LIST_LENGTH", "ITEM_LIST_LENGTH_FIELD", "LIST_SUFFIX", "NEG_PREFIX"}
_OWN = {"column_types", "discretization", "encoding", "eval_args", "numerical_features"}
_OWN |= {"session_filter", "train_fraction", "rm_copies"}
READ = sorted(_OWN | set(dataset_arguments) - _LATER)


class Cache:
    """The prepared data of one dataset under one set of options.

    Args:
        config: RecBole's.
        folder: of the dataset.
        files: its atomic files.
        key: of this user.
    """

    def __init__(self, config: Options, folder: Path, files: Iterable[Path], key: bytes) -> None:
        self.files, self.key = sorted(files), key
        self.folder = folder / FOLDER
        read = {name: config[name] for name in READ}
        self.options = json.loads(json.dumps(read, default=str))
        digest = hashlib.sha256(key + json.dumps(self.options, sort_keys=True).encode())
        self.path = self.folder / f"{digest.hexdigest()[:16]}.arrays"
        self.looked: list[tuple[int, ...]] | None = None
        self.about: dict[str, Any] = {}

    @classmethod
    def of(cls, config: Options, folder: Path, files: Iterable[Path]) -> Cache | None:
        """None where ``cache`` is off, the files are too small to be worth one, or no key is."""
        there = [file for file in files if file.is_file()]
        if config["cache"] is not True or sum(f.stat().st_size for f in there) < LEAST_BYTES:
            return None
        try:
            return cls(config, folder, there, _key())
        except (OSError, RuntimeError):  # no home, or none to write into
            return None

    def load(self) -> tuple[dict[str, np.ndarray], Any] | None:
        """Arrays and description as they were saved; None if there are none to be believed."""
        try:
            states = self._states()
            self.about = {
                "versions": [FORMAT, __version__, recbole.__version__],
                "options": self.options,
                "files": {file.name: _digest(file) for file in self.files},
            }
            self.looked = states
            arrays, about = array_file.read(self.path, self.key)
            if about["of"] != self.about:
                return None
            with contextlib.suppress(OSError):
                os.utime(self.path)  # the oldest goes first
            return arrays, about["is"]
        except Exception:  # whatever it is; who reads the text tells of files that cannot be read
            return None

    def save(self, arrays: dict[str, np.ndarray], about: Any) -> None:
        """Keep what was prepared from the files that ``load`` looked at, if they can be written."""
        if self._states() != self.looked:
            self._tell("a file has changed while it was read")
            return
        try:
            self.folder.mkdir(exist_ok=True)
            begun = self.folder / f"{self.path.stem}-{secrets.token_hex(4)}.part"
            try:
                with open(begun, "xb") as file:
                    array_file.write(file, arrays, {"of": self.about, "is": about}, self.key)
                os.replace(begun, self.path)  # others see the old file or the new one
            finally:
                begun.unlink(missing_ok=True)
            self._tidy()
        except OSError as error:
            self._tell(error.strerror or error)

    def _tell(self, why: object) -> None:
        text = "prepared data of %s are not kept for the next start: %s"
        logging.getLogger().info(text, self.folder.parent, why)

    def _states(self) -> list[tuple[int, ...]]:
        stats = [file.stat() for file in self.files]
        return [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]

    def _tidy(self) -> None:
        """Remove what was begun and never ended, and all caches but those last used."""
        old = time.time() - _ABANDONED
        used = sorted(self.folder.glob("*.arrays"), key=lambda f: f.stat().st_mtime, reverse=True)
        begun = [file for file in self.folder.glob("*.part") if file.stat().st_mtime < old]
        for file in (*used[MOST:], *begun):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def warnings_of(logger: logging.Logger) -> Iterator[list[str]]:
    """What is warned of within: a start that reads no text has the same to say."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def _key() -> bytes:
    """The key of this user, which the first process that needs it makes.

    Raises:
        OSError, RuntimeError: if there is none, and none can be made.
    """
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = settings / "recbole-pos" / "cache.key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            with open(os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(begun, path)
        finally:
            begun.unlink(missing_ok=True)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged")
    return key


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
