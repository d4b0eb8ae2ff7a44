"""Prepared data beside the files that they were made from: the second start reads no text.

One file for a dataset and the options that its preparation reads, in a folder of its own beside the
tables: arrays as Arrow IPC, which are mapped, and a signature. The file is used if this user has
written it (it is signed with a key in the user's folder of settings), its values are possible, and
versions, options and all bytes of the tables are the same; times and sizes of the tables do not
count. Otherwise the data are prepared again.
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
_ABANDONED = 3600  # seconds after which an unfinished file is taken for abandoned
# The options that preparing reads; a test holds that there are no others.
_LATER = {"MAX_ITEM_LIST_LENGTH", "ITEM_LIST_LENGTH_FIELD", "LIST_SUFFIX", "NEG_PREFIX"}
_OWN = {"column_types", "discretization", "encoding", "eval_args", "numerical_features"}
_OWN |= {"session_filter", "train_fraction", "rm_copies", "target_events"}
READ = sorted(_OWN | set(dataset_arguments) - _LATER)


class Cache:
    """The prepared data of one dataset under one set of options.

    Args:
        config: RecBole's configuration.
        folder: folder of the dataset.
        files: tables of the dataset.
        key: key of this user, which signs the file.
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
        """Return the cache of a dataset.

        None where ``cache`` is off, the files are too small to be worth one, or no key can be made.
        """
        existing = [file for file in files if file.is_file()]
        if config["cache"] is not True or sum(f.stat().st_size for f in existing) < LEAST_BYTES:
            return None
        try:
            return cls(config, folder, existing, load_key())
        except (OSError, RuntimeError):  # no home folder, or it cannot be written
            return None

    def load_into(self, dataset: Any) -> bool:
        """Restore a dataset from the file, and repeat the warnings of reading its tables.

        Returns:
            whether it was restored; False where the file is missing, of other data or damaged.
        """
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
        except Exception:  # of any kind; reading the tables then reports what is wrong with them
            return False
        with contextlib.suppress(OSError):
            os.utime(self.path)  # caches used longest ago are removed first
        for text in warnings:
            dataset.logger.warning(text)
        return True

    def save(self, dataset: Any, warnings: list[str]) -> None:
        """Write the data prepared from the tables whose digests ``load_into`` took.

        A failure is logged, not raised: the next start then prepares the data again.

        Args:
            dataset: the prepared dataset, with its split.
            warnings: texts of the warnings of reading its tables.
        """
        if self._states() != self.states:
            self._log("a file has changed while it was read")
            return
        try:
            arrays, state = capture(dataset)
            about = {"of": self.about, "state": state, "warnings": warnings}
            self.folder.mkdir(exist_ok=True)
            temporary = self.folder / f"{self.path.stem}-{secrets.token_hex(4)}.part"
            try:
                write_arrays(temporary, arrays, about, self.key)
                os.replace(temporary, self.path)  # others see the old file or the new one
            finally:
                temporary.unlink(missing_ok=True)
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
        """Remove abandoned temporary files, and all caches but the ``MOST`` used last."""
        old = time.time() - _ABANDONED
        used = sorted(self.folder.glob("*.arr*"), key=lambda f: f.stat().st_mtime, reverse=True)
        abandoned = [file for file in self.folder.glob("*.part") if file.stat().st_mtime < old]
        for file in (*used[MOST:], *abandoned):
            file.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: dict[str, np.ndarray], about: Any, key: bytes) -> None:
    """Write arrays of numbers, bools or text of fixed length, and plain values, as Arrow IPC.

    The file has one row; each column holds the bytes of one array. A signature follows.

    Args:
        path: file to write, which must not exist.
        arrays: arrays by name.
        about: values that json keeps.
        key: key of the signature.
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
    """Read a file of :func:`write_arrays`, mapped: processes share pages until one writes to them.

    Returns:
        arrays by name, and the plain values.

    Raises:
        Exception: of any kind, if a byte has changed, another key was used, or the file holds
            something else.
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
    """Collect the texts of warnings, for use in a ``with`` block.

    The cache keeps them, so that a start that reads no tables warns too.

    Yields:
        list that grows with each warning of the logger.
    """
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def load_key() -> bytes:
    """Return this user's key, which signs caches so that files of other users are not loaded.

    The first process that needs the key makes it.

    Raises:
        OSError, RuntimeError: if no key exists and none can be made, or its file is damaged.
    """
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = settings / "recbole-pos" / "cache.key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged")
    return key


def _digest(path: Path, digest: Any) -> Any:
    """Return a digest (of hashlib or hmac) updated with the bytes of a file."""
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest
