"""Files of ``torch.save``, read by Python's own readers of zip files and pickles.

Nothing that a file names is called: an unpickler with ``find_class`` of its own makes plain values
and tensors, and who reads other files says what becomes of their classes. A tensor has the bytes
that are in its member, none else. The work is bounded by the size of the file: its members are not
compressed, and its values are counted.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from recbole_pos.errors import CheckpointError

# Bytes of the list of members; lists and the like in a pickle; seconds to look through it, where
# RecBole's ItemKNN on MovieLens-1M takes half as many.
_DIRECTORY, _LISTS, _SECONDS = 4 * 2**20, 2_000_000, 90
_DEPTH = 150  # of values within values
_DAMAGED = "is truncated or damaged"
_TOO_MUCH = "holds more than any checkpoint does, and was not read"
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}


class Refused(Exception):
    """What is wrong with a file."""


def read(path: str | Path, other: Callable[[str], Any]) -> Any:
    """Return the values of a file, on the CPU; its tensors have memory of their own.

    Args:
        path: the file.
        other: what stands for a class that is not one of tensors, given its name. It raises
            :class:`Refused` for one that must not be there.

    Raises:
        CheckpointError: if the file is missing, no archive, damaged, or was refused.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        with path.open("rb") as file:
            start, size = file.read(2), file.seek(0, os.SEEK_END)
            if start and not b"PK".startswith(start):
                raise Refused(
                    "is not a checkpoint of this package, and was not read; name the folder of a "
                    "run, or a .pt file in it"
                )
            _require_directory(file)
            with zipfile.ZipFile(file) as archive:
                folder = _folder(archive, size)
                pickled = archive.read(f"{folder}/data.pkl")
                _require_bounded(pickled)
                value = _Unpickler(pickled, archive, folder, other).load()
        _require_tree(value, max(size, 10**6))
        return value
    except (Refused, CheckpointError) as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # damaged bytes make readers stumble anywhere
        raise damaged(path, error) from error


def damaged(path: str | Path, error: Exception) -> CheckpointError:
    """For whatever a reader raises."""
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return CheckpointError(f"{path} {_DAMAGED}: {reason[:200]}")


class _Unpickler(pickle.Unpickler):
    """Whatever a file names is made for it, so that it changes nothing that others use."""

    def __init__(
        self, pickled: bytes, archive: zipfile.ZipFile, folder: str, other: Callable[[str], Any]
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self.archive, self.folder, self.other = archive, folder, other
        self.storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        named = f"{module}.{name}"
        if named == "torch._utils._rebuild_tensor_v2":
            return lambda *parts: _tensor(*parts)
        if named == "collections.OrderedDict":
            return lambda: OrderedDict()
        if named in _STORAGES:
            return type("_Storage", (), {"dtype": _STORAGES[named]})
        return self.other(named)

    def persistent_load(self, named: Any) -> Tensor:
        """Return the numbers of a storage."""
        _, kind, key, *_ = named
        if key not in self.storages:
            raw = np.frombuffer(self.archive.read(f"{self.folder}/data/{key}"), np.uint8)
            self.storages[key] = torch.from_numpy(raw.copy())
        numbers = self.storages[key]
        return numbers.view(kind.dtype) if len(numbers) else torch.empty(0, dtype=kind.dtype)


def _tensor(numbers: Tensor, offset: int, size: tuple, stride: tuple, *more: Any) -> Tensor:
    if more[2:] or math.prod(size) > len(numbers):  # of a few numbers, a tensor without end
        raise Refused(f"{_DAMAGED}: a tensor is not laid out as those of checkpoints are")
    # torch refuses what is beyond the storage, whose memory is numpy's and cannot grow
    return torch.empty(0, dtype=numbers.dtype).set_(
        numbers.untyped_storage(), offset, tuple(size), tuple(stride)
    )


def _require_directory(file: IO[bytes]) -> None:
    """The list of members is short, and at the end, where Python looks for it first."""
    file.seek(max(file.seek(0, os.SEEK_END) - 98, 0))
    tail = file.read()
    if tail[-22:-18] != b"PK\5\6":
        raise Refused(_DAMAGED)
    (size,) = struct.unpack("<L", tail[-10:-6])
    if tail[-42:-38] == b"PK\6\7":  # sizes of 64 bits
        (size,) = struct.unpack("<Q", tail[40:48])
    if size > _DIRECTORY:
        raise Refused(_TOO_MUCH)


def _folder(archive: zipfile.ZipFile, size: int) -> str:
    """Return what all members are in; they are as ``torch.save`` writes them."""
    members = archive.infolist()
    folder = members[0].filename.partition("/")[0] if members else ""
    if f"{folder}/constants.pkl" in archive.namelist():
        raise Refused("is a program (TorchScript) and no checkpoint")
    if any(m.compress_type != zipfile.ZIP_STORED for m in members):
        raise Refused("has compressed members, which no checkpoint has, and was not read")
    if sum(max(m.file_size, m.compress_size) for m in members) > size:
        raise Refused(f"{_DAMAGED}: its members overlap")
    return folder


_NUMBERS = {
    code.name
    for code in pickletools.opcodes
    if not code.stack_before and code.stack_after and code.stack_after[0].name != "mark"
    if "GET" not in code.name and not code.name.startswith("EMPTY")
}  # and texts: what pushes one value


def _require_bounded(pickled: bytes) -> None:
    """Refuse what takes an unpickler out of all proportion.

    Numbers in its memo that leave others out make that as large as they are; tuples as keys are
    hashed for ever if they share their parts.
    """
    stack: list[bool] = []  # whether it is a tuple, of all that is on the stack
    marks: list[int] = []
    memo: dict[int, bool] = {}
    lists, until = 0, time.process_time() + _SECONDS
    given: Any
    for step, (opcode, given, _) in enumerate(pickletools.genops(pickled)):
        name, before = opcode.name, opcode.stack_before
        if not step % 2**20 and time.process_time() > until:
            raise Refused(_TOO_MUCH)
        if name in _NUMBERS:
            stack.append(False)
        elif name == "MARK":
            marks.append(len(stack))
        elif "PUT" in name or name == "MEMOIZE":
            number = len(memo) if name == "MEMOIZE" else int(given)
            if number > len(memo):
                raise Refused(f"{_DAMAGED}: its memo has gaps")
            memo[number] = stack[-1]
        elif "GET" in name:
            stack.append(memo[int(given)])
        else:
            lists += 1
            if lists > _LISTS:
                raise Refused(_TOO_MUCH)
            parts: list[bool] = []
            if pickletools.markobject in before:
                at = marks.pop()
                parts, before = stack[at:], before[: before.index(pickletools.markobject)]
                del stack[at:]
            at = len(stack) - len(before)
            keys = stack[at + 1 : at + 2] if name == "SETITEM" else []
            keys += parts[::2] if name in ("SETITEMS", "DICT") else []
            keys += parts if name in ("ADDITEMS", "FROZENSET") else []
            if any(keys):
                raise Refused("has lists as keys, as no checkpoint has")
            del stack[at:]
            stack += ["TUPLE" in name or name == "DUP" for _ in opcode.stack_after]


def _require_tree(value: Any, most: int) -> None:
    """Lists in several places are a tree that never ends; of one in the file, a value is a byte."""
    waiting = [(value, 0)]
    while waiting:
        found, depth = waiting.pop()
        most -= 1
        if most < 0 or depth > _DEPTH:
            raise Refused("holds lists that are nested in each other without end")
        inner = found.values() if isinstance(found, dict) else found
        if not isinstance(found, (dict, list, tuple)):
            # of an object that stands for another
            inner = () if isinstance(found, type) else getattr(found, "parts", ())
        waiting += ((part, depth + 1) for part in inner)
