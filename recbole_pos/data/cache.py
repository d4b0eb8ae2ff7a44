"""Prepared data beside the files that they were made from: the second start reads no text.

A cache is one file of tensors, which are mapped, for a dataset and the options that its preparation
reads, with a small file, its seal: what the data were made from, signed by this user's key in the
folder of settings. A cache is used if the seal is this user's, and versions, options and all bytes
of the tables and of the cache are the same. Files whose inode, size and times are those of the last
comparison are not read for it. Otherwise the data are prepared again.
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
from typing import IO, Any

import numpy as np
import recbole
import torch
from recbole.data.interaction import Interaction
from recbole.utils import FeatureSource, FeatureType
from recbole.utils.argument_list import dataset_arguments

from recbole_pos.data.interactions import EventLog
from recbole_pos.data.loading import NameIds
from recbole_pos.data.parts import is_part, list_parts
from recbole_pos.data.targets import Split
from recbole_pos.files import digest_file
from recbole_pos.plain import to_plain
from recbole_pos.values import Options
from recbole_pos.version import __version__

FORMAT = 6  # raised when the same files and options are prepared otherwise
FOLDER = ".recbole_pos"
MIN_BYTES = 4 << 20  # of tables: smaller ones are read in less than a second
_KEY_BYTES = 32
_SETTLED = 2e9  # nanoseconds after which a change of a file changes its times, too
MAX_CACHES = 4  # caches of a dataset
_ABANDONED = 3600  # seconds after which an unfinished file is taken for abandoned
# The options that preparing reads; a test checks that there are no others.
_LATER = {"MAX_ITEM_LIST_LENGTH", "ITEM_LIST_LENGTH_FIELD", "LIST_SUFFIX", "NEG_PREFIX"}
_OWN = {"column_types", "discretization", "encoding", "eval_args", "numerical_features"}
_OWN |= {"session_filter", "train_fraction", "rm_copies", "target_events"}
READ = sorted(_OWN | set(dataset_arguments) - _LATER)
# Attributes of a dataset that are kept as they are.
_PLAIN = ("field2seqlen", "field2bucketnum", "feat_name_list", "identity")
_ARRAYS = ("user_counts", "missing")


class Cache:
    """The prepared data of one dataset, of ``files`` in a folder, under one set of options."""

    def __init__(self, config: Options, folder: Path, files: Iterable[Path], key: bytes) -> None:
        """Name the cache's file by a digest of the options that reading the data depends on."""
        self.files, self.key = sorted(files), key
        parts = list_parts(config) if is_part(config) else None  # each keeps its own caches
        self.folder = Path(folder, FOLDER, *(parts or ()))
        self.options = json.loads(json.dumps({name: config[name] for name in READ}, default=str))
        digest = hashlib.sha256(key + json.dumps(self.options, sort_keys=True).encode())
        self.path = self.folder / f"{digest.hexdigest()[:16]}.pt"
        self.seal = self.path.with_suffix(".json")
        self.table_states: list[list[int]] = []  # before they are read
        self.is_settled = False  # whether a later change of a table would change its state
        self.source: dict[str, Any] = {}  # what the data are made from

    @classmethod
    def open(cls, config: Options, folder: Path, files: Iterable[Path]) -> Cache | None:
        """Return the cache of a dataset; None if off, for small files, or without a key."""
        existing = [file for file in files if file.is_file()]
        num_bytes = sum(file.stat().st_size for file in existing)
        if config["cache"] is not True or num_bytes < MIN_BYTES:
            return None
        try:
            return cls(config, folder, existing, load_key())
        except (OSError, RuntimeError):  # no home folder, or it cannot be written
            return None

    def load_into(self, dataset: Any) -> bool:
        """Restore a dataset and the warnings of reading it; return whether the cache was good."""
        try:
            self.table_states, seal = _read_states(self.files), self._read_seal()
            newest = max(max(times) for _, _, *times in self.table_states)
            self.is_settled = time.time_ns() - newest > _SETTLED
            are_tables_unchanged = seal.get("tables") == self.table_states
            self.source = {
                "versions": [FORMAT, __version__, recbole.__version__],
                "options": self.options,
                "files": seal["source"]["files"] if are_tables_unchanged else self._digest_tables(),
            }
            if seal.get("source") != self.source:
                return False
            is_unchanged = are_tables_unchanged and seal["cache"] == _read_states([self.path])
            if not is_unchanged:  # a link to a device has no end
                if not self.path.is_file() or seal["digest"] != digest_file(self.path):
                    return False
            content = torch.load(self.path, mmap=True, weights_only=True)
            restore(dataset, content["state"])
        except Exception:  # of any kind; reading the tables then reports what is wrong with them
            return False
        with contextlib.suppress(OSError):
            if is_unchanged:
                os.utime(self.seal)  # caches used longest ago are removed first
            else:
                self._write_seal(seal["digest"])
        for message in content["warnings"]:
            dataset.logger.warning(message)
        return True

    def save(self, dataset: Any, warnings: list[str]) -> None:
        """Write the prepared data and the warnings of reading them; log a failure."""
        try:
            if _read_states(self.files) != self.table_states:
                raise OSError("a file has changed while it was read")
            self.folder.mkdir(parents=True, exist_ok=True)
            with _open_replacement(self.path) as file:
                torch.save({"state": capture(dataset), "warnings": warnings}, file)
            self._write_seal(digest_file(self.path))
            self._remove_old()
        except (OSError, RuntimeError) as error:  # torch raises the latter on a full disk
            message = "prepared data of %s are not kept for the next start: %s"
            logging.getLogger().info(message, self.files[0].parent, error)

    def _digest_tables(self) -> dict[str, str]:
        return {file.name: digest_file(file) for file in self.files}

    def _read_seal(self) -> dict[str, Any]:
        """Return what the cache was made from; empty if no whole seal of this user is there."""
        if not self.seal.exists():
            return {}
        try:
            content, signature = json.loads(self.seal.read_text())
            is_own = hmac.compare_digest(self._sign(content), signature)
        except (ValueError, TypeError, AttributeError):  # damaged, and replaced by the next one
            return {}
        return json.loads(content) if is_own else {}

    def _write_seal(self, digest: str) -> None:
        """Write and sign what the cache was made from, its digest and the states of the files."""
        seal = {
            "source": self.source,
            "digest": digest,
            "tables": self.table_states if self.is_settled else None,
            "cache": _read_states([self.path]),
        }
        content = json.dumps(seal)
        with _open_replacement(self.seal) as file:
            file.write(json.dumps([content, self._sign(content)]).encode())

    def _sign(self, content: str) -> str:
        return hmac.new(self.key, content.encode(), "sha256").hexdigest()

    def _remove_old(self) -> None:
        """Remove abandoned temporary files, and all caches but the ``MAX_CACHES`` used last."""
        newest_abandoned = time.time() - _ABANDONED
        seals = sorted(self.folder.glob("*.json"), key=os.path.getmtime, reverse=True)[:MAX_CACHES]
        recent = {seal.with_suffix(".pt") for seal in seals}
        for file in self.folder.iterdir():
            is_abandoned = file.suffix == ".part" and os.path.getmtime(file) < newest_abandoned
            is_cache = file.suffix in (".pt", ".json", ".arrow")
            if is_abandoned or (is_cache and file.with_suffix(".pt") not in recent):
                file.unlink(missing_ok=True)


def capture(dataset: Any) -> dict[str, Any]:
    """Return a prepared dataset (filtered, numbered, sorted, split) as tensors and plain values."""
    split, tokens = dataset.split, dataset.field2id_token
    # fields that share names have them in one tensor, of characters, under the first of them
    first = {id(names): field for field, names in reversed(tokens.items())}
    state = {
        **{name: getattr(dataset, name) for name in (*_PLAIN, *_ARRAYS)},
        "log": split.log.fields,
        "offsets": split.log.offsets,
        "summary": split.summary,
        "part": split.part,
        "is_target": split.is_target,
        "tables": {name: getattr(dataset, name).interaction for name in dataset.feat_name_list[1:]},
        "types": {field: kind.value for field, kind in dataset.field2type.items()},
        "sources": {
            field: (isinstance(source, FeatureSource), getattr(source, "value", source))
            for field, source in dataset.field2source.items()
        },
        "alias": {name: list(fields) for name, fields in dataset.alias.items()},
        "rest": list(dataset._rest_fields),
        "names": {f: tokens[f].view(np.int32).reshape(len(tokens[f]), -1) for f in first.values()},
        "sharing": {field: first[id(names)] for field, names in tokens.items()},
    }
    plain: dict[str, Any] = to_plain(state)
    return plain


def restore(dataset: Any, state: dict[str, Any]) -> None:
    """Set the state of a dataset, before it has read its files, to one of :func:`capture`."""
    names: dict[str, np.ndarray] = {}  # field -> [ids] names
    ids: dict[str, NameIds] = {}
    for field, codes in state["names"].items():
        names[field] = codes.numpy().view(f"U{codes.shape[1]}").ravel()
        ids[field] = NameIds(names[field])
    fields = (dataset.uid_field, dataset.iid_field, dataset.time_field)
    log = EventLog(state["log"], state["offsets"].numpy(), *fields)
    split = Split(log, state["part"].numpy(), state["is_target"].numpy(), state["summary"])
    values = {
        **{name: state[name] for name in _PLAIN},
        **{name: {f: column.numpy() for f, column in state[name].items()} for name in _ARRAYS[1:]},
        "user_counts": state["user_counts"].numpy(),
        "field2type": {field: FeatureType(kind) for field, kind in state["types"].items()},
        "field2source": {
            field: FeatureSource(source) if is_enum else source
            for field, (is_enum, source) in state["sources"].items()
        },
        "alias": {name: np.array(fields) for name, fields in state["alias"].items()},
        "_rest_fields": np.array(state["rest"]),
        "field2id_token": {field: names[source] for field, source in state["sharing"].items()},
        "field2token_id": {field: ids[source] for field, source in state["sharing"].items()},
        "split": split,
        "user_feat": None,
        "item_feat": None,
        **{name: Interaction(columns) for name, columns in state["tables"].items()},
    }
    vars(dataset).update(values)


@contextlib.contextmanager
def collect_warnings(logger: logging.Logger) -> Iterator[list[str]]:
    """Collect the messages of warnings, which the cache keeps, for use in a ``with`` block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def load_key() -> bytes:
    """Return this user's key, which signs caches, made by the first process that needs it."""
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


@contextlib.contextmanager
def _open_replacement(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, which replaces ``path`` when it is complete, in a ``with`` block."""
    temporary = path.with_name(f"{path.stem}-{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_states(files: Iterable[Path]) -> list[list[int]]:
    """Return inode, size and times of change of files, one of which changes if a byte does."""
    stats = [file.stat() for file in files]
    return [[s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in stats]
