"""Prepared data beside the files that they were made from: the second start reads no text.

One file for a dataset and the options that its preparation reads, in a folder of its own beside the
tables: arrays as Arrow IPC, which are mapped, and a signature. It is believed if this user has
written it (it is signed with a key in the user's folder of settings), its values are possible, and
it says the same of versions, options and the contents of the tables, all bytes of which are looked
at; times and sizes of files are not. Otherwise it is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import recbole
from recbole.utils.argument_list import dataset_arguments

from recbole_pos.data.prepared import capture, restore
from recbole_pos.values import Options
from recbole_pos.version import __version__

FORMAT = 3  # raised when the same files and options are prepared otherwise
FOLDER = ".recbole_pos"
LEAST_BYTES = 4 << 20  # of tables: smaller ones are read in less than a second
_KEY_BYTES = 32  # of the key, and of a signature
MOST = 4  # caches of a dataset
_ABANDONED = 3600  # seconds after which a file that is being written is not
# The options that preparing reads; a test holds that there are no others.
_LATER = {"MAX_ITEM_LIST_LENGTH", "ITEM_LIST_LENGTH_FIELD", "LIST_SUFFIX", "NEG_PREFIX"}
_OWN = {"column_types", "discretization", "encoding", "eval_args", "numerical_features"}
_OWN |= {"session_filter", "train_fraction", "rm_copies", "target_events"}
READ = sorted(_OWN | set(dataset_arguments) - _LATER)


class Cache:
    """The prepared data of one dataset under one set of options.

    Args:
        config: RecBole's.
        folder: folder of the dataset.
        files: its tables.
        key: key of this user.
    """

    def __init__(self, config: Options, folder: Path, files: Iterable[Path], key: bytes) -> None:
        self.files, self.key, self.folder = sorted(files), key, folder / FOLDER
        self.options = json.loads(json.dumps({n: config[n] for n in READ}, default=str))
        digest = hashlib.sha256(key + json.dumps(self.options, sort_keys=True).encode())
        self.path = self.folder / f"{digest.hexdigest()[:16]}.arrow"
        self.states: list[tuple[int, ...]] | None = None
        self.about: dict[str, Any] = {}

    @classmethod
    def open(cls, config: Options, folder: Path, files: Iterable[Path]) -> Cache | None:
        """Return None where ``cache`` is off, files are too small to be worth one, or no key is."""
        there = [file for file in files if file.is_file()]
        if config["cache"] is not True or sum(f.stat().st_size for f in there) < LEAST_BYTES:
            return None
        try:
            return cls(config, folder, there, load_key())
        except (OSError, RuntimeError):  # no home, or none to write into
            return None

    def load_into(self, dataset: Any) -> bool:
        """Give a dataset what was kept, and warn as its text did; False if nothing is believed."""
        try:
            states = self._states()
            self.about = {
                "versions": [FORMAT, __version__, recbole.__version__],
                "options": self.options,
                "files": {
                    file.name: _digest(file, hashlib.sha256()).hexdigest() for file in self.files
                },
            }
            self.states = states
            arrays, about = read_arrays(self.path, self.key)
            if about["of"] != self.about:
                return False
            warnings = list(map(str, about["warnings"]))
            restore(dataset, arrays, about["state"])
        except Exception:  # whatever it is; who reads the text tells of files that cannot be read
            return False
        with contextlib.suppress(OSError):
            os.utime(self.path)  # the oldest goes first
        for text in warnings:
            dataset.logger.warning(text)
        return True

    def save(self, dataset: Any, warnings: list[str]) -> None:
        """Keep what was prepared from the files that ``load_into`` looked at, if it can be written.

        Args:
            dataset: with its split.
            warnings: of reading it.
        """
        if self._states() != self.states:
            self._log("a file has changed while it was read")
            return
        try:
            arrays, state = capture(dataset)
            about = {"of": self.about, "state": state, "warnings": warnings}
            self.folder.mkdir(exist_ok=True)
            begun = self.folder / f"{self.path.stem}-{secrets.token_hex(4)}.part"
            try:
                write_arrays(begun, arrays, about, self.key)
                os.replace(begun, self.path)  # others see the old file or the new one
            finally:
                begun.unlink(missing_ok=True)
            self._tidy()
        except OSError as error:
            self._log(error.strerror or error)

    def _log(self, why: object) -> None:
        text = "prepared data of %s are not kept for the next start: %s"
        logging.getLogger().info(text, self.folder.parent, why)

    def _states(self) -> list[tuple[int, ...]]:
        stats = [file.stat() for file in self.files]
        return [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]

    def _tidy(self) -> None:
        """Remove what was begun and never ended, and all caches but those last used."""
        old = time.time() - _ABANDONED
        used = sorted(self.folder.glob("*.arr*"), key=lambda f: f.stat().st_mtime, reverse=True)
        begun = [file for file in self.folder.glob("*.part") if file.stat().st_mtime < old]
        for file in (*used[MOST:], *begun):
            file.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: dict[str, np.ndarray], about: Any, key: bytes) -> None:
    """Write arrays of numbers, bools or text of fixed length, and plain values, as Arrow IPC.

    A column has the bytes of an array in its one row. Behind it stands a signature with ``key``.
    """
    columns, layout = [], {}
    for name, array in arrays.items():
        data = pa.py_buffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        ends = pa.py_buffer(np.array([0, data.size], np.int64))
        columns.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, data]))
        layout[name] = (array.dtype.str, array.shape)
    table = pa.record_batch(columns, list(arrays)) if columns else pa.record_batch({})
    described = json.dumps({"arrays": layout, "about": about})
    table = table.replace_schema_metadata({"about": described})
    with open(path, "xb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_batch(table)
    signature = _digest(path, hmac.new(key, digestmod="sha256")).digest()
    with open(path, "ab") as file:
        file.write(signature)


def read_arrays(path: Path, key: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """Return what was written, mapped: processes share its pages until one writes into them.

    Raises:
        Exception: of any kind, if a byte has changed, another key was used, or who has the key has
            written something else.
    """
    content = np.memmap(path, dtype=np.uint8, mode="c")
    body, signature = content[:-_KEY_BYTES], content[-_KEY_BYTES:].tobytes()
    if not hmac.compare_digest(hmac.digest(key, body.data, "sha256"), signature):
        raise ValueError(f"{path} is damaged, or written by someone else")
    table = pa.ipc.open_file(pa.py_buffer(body)).get_batch(0)
    described = json.loads(table.schema.metadata[b"about"])
    arrays = {}
    for name, (dtype, shape) in described["arrays"].items():
        data = table[name].buffers()[2]
        place = data.address - content.ctypes.data
        arrays[name] = body[place : place + data.size].view(np.ndarray).view(dtype).reshape(shape)
        if arrays[name].dtype.kind not in "biufU":
            raise ValueError(f"{path} holds something else than numbers, bools and text")
    return arrays, described["about"]


@contextlib.contextmanager
def collect_warnings(logger: logging.Logger) -> Iterator[list[str]]:
    """Collect what is warned of within: a start that reads no text repeats it."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def load_key() -> bytes:
    """Return the key of this user, which the first process that needs it makes.

    Raises:
        OSError, RuntimeError: if none exists, and none can be made.
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


def _digest(path: Path, digest: Any) -> Any:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest
