"""Files of ``torch.save``, read by Python's own readers of zip files and pickles.

Nothing that a file names is called: an unpickler with its own ``find_class`` makes plain values and
tensors, and the caller says what becomes of other classes. A tensor has the bytes of its member of
the archive only. The work is bounded by the size of the file: its members are not compressed, and
its values are counted.
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

# Limits: bytes of the list of members; containers in a pickle; seconds to scan it (RecBole's
# ItemKNN on MovieLens-1M takes half as many); depth of nested values.
_DIRECTORY, _LISTS, _SECONDS, _DEPTH = 4 * 2**20, 2_000_000, 90, 150
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
    """A file is refused; the message says why, as it follows the file's name."""


def read(path: str | Path, other: Callable[[str], Any]) -> Any:
    """Read a file of ``torch.save``, onto the CPU, without running anything that it names.

    Args:
        path: the file.
        other: returns a stand-in for a class that is not torch's, given ``module.name``; it raises
            :class:`Refused` for one that must not be there.

    Returns:
        The values of the file; tensors do not share memory with it.

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
                folder = _find_folder(archive, size)
                pickled = archive.read(f"{folder}/data.pkl")
                _require_bounded(pickled)
                value = _Unpickler(pickled, archive, folder, other).load()
        _require_tree(value, max(size, 10**6))
        return value
    except (Refused, CheckpointError) as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # damaged bytes make readers stumble anywhere
        raise describe_damage(path, error) from error


def describe_damage(path: str | Path, error: Exception) -> CheckpointError:
    """Return the error to raise for a file that a reader stumbled over: its name, the reason."""
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return CheckpointError(f"{path} {_DAMAGED}: {reason[:200]}")


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes every class of a file anew, so that a file cannot change shared ones.

    Args:
        pickled: content of the archive's ``data.pkl``.
        archive: the open archive, which has the tensors' storages.
        folder: the folder within the archive that all members are in.
        other: see :func:`read`.
    """

    def __init__(
        self, pickled: bytes, archive: zipfile.ZipFile, folder: str, other: Callable[[str], Any]
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self.archive, self.folder, self.other = archive, folder, other
        self.storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what makes tensors, mappings and storages; for any other class, a stand-in."""
        path = f"{module}.{name}"
        if path == "torch._utils._rebuild_tensor_v2":
            return lambda *parts: _make_tensor(*parts)
        if path == "collections.OrderedDict":
            return lambda: OrderedDict()
        if path in _STORAGES:
            return type("_Storage", (), {"dtype": _STORAGES[path]})
        return self.other(path)

    def persistent_load(self, reference: Any) -> Tensor:
        """Return the numbers [n] of a storage, read once from its member of the archive."""
        _, kind, key, *_ = reference
        if key not in self.storages:
            raw = np.frombuffer(self.archive.read(f"{self.folder}/data/{key}"), np.uint8)
            self.storages[key] = torch.from_numpy(raw.copy())
        numbers = self.storages[key]
        return numbers.view(kind.dtype) if len(numbers) else torch.empty(0, dtype=kind.dtype)


def _make_tensor(numbers: Tensor, offset: int, size: tuple, stride: tuple, *rest: Any) -> Tensor:
    """Return a tensor over the numbers of a storage, as ``torch._utils._rebuild_tensor_v2`` would.

    Args:
        numbers: [n] the storage.
        offset, size, stride: layout of the tensor in it.
        rest: requires_grad and backward hooks, which are ignored; more is refused.

    Raises:
        Refused: for more values than the storage has: stride 0 could make an endless tensor.
    """
    if rest[2:] or math.prod(size) > len(numbers):
        raise Refused(f"{_DAMAGED}: a tensor is not laid out as those of checkpoints are")
    # torch itself refuses a layout beyond the storage, as numpy's memory cannot grow
    return torch.empty(0, dtype=numbers.dtype).set_(
        numbers.untyped_storage(), offset, tuple(size), tuple(stride)
    )


def _require_directory(file: IO[bytes]) -> None:
    """Refuse an archive whose list of members is long or not at the end, where Python looks first.

    Raises:
        Refused: if it is.
    """
    # the last 98 bytes: end record of 64-bit archives (56), its locator (20), end record (22)
    file.seek(max(file.seek(0, os.SEEK_END) - 98, 0))
    tail = file.read()
    if tail[-22:-18] != b"PK\5\6":
        raise Refused(_DAMAGED)
    (size,) = struct.unpack("<L", tail[-10:-6])
    if tail[-42:-38] == b"PK\6\7":  # the locator: the size is in the 64-bit record
        (size,) = struct.unpack("<Q", tail[40:48])
    if size > _DIRECTORY:
        raise Refused(_TOO_MUCH)


def _find_folder(archive: zipfile.ZipFile, size: int) -> str:
    """Return the folder within an archive of ``size`` bytes that all its members are in.

    Raises:
        Refused: if the members are not as ``torch.save`` writes them.
    """
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
}  # opcodes that push one number or text


def _require_bounded(pickled: bytes) -> None:
    """Refuse a pickle that costs an unpickler far more time or memory than its size.

    Follows the opcodes without making any value. A memo number that skips others makes the memo as
    large as the number; tuples as keys are hashed without end if they share their parts.

    Raises:
        Refused: for such a memo, such keys, too many containers, or a scan of over ``_SECONDS``.
    """
    stack: list[bool] = []  # of each value on the unpickler's stack, whether it is a tuple
    marks: list[int] = []  # positions in the stack
    memo: dict[int, bool] = {}
    containers, deadline = 0, time.process_time() + _SECONDS
    argument: Any
    for step, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        name, popped = opcode.name, opcode.stack_before
        if not step % 2**20 and time.process_time() > deadline:
            raise Refused(_TOO_MUCH)
        if name in _NUMBERS:
            stack.append(False)
        elif name == "MARK":
            marks.append(len(stack))
        elif "PUT" in name or name == "MEMOIZE":
            number = len(memo) if name == "MEMOIZE" else int(argument)
            if number > len(memo):
                raise Refused(f"{_DAMAGED}: its memo has gaps")
            memo[number] = stack[-1]
        elif "GET" in name:
            stack.append(memo[int(argument)])
        else:
            containers += 1
            if containers > _LISTS:
                raise Refused(_TOO_MUCH)
            parts: list[bool] = []
            if pickletools.markobject in popped:
                at = marks.pop()
                parts, popped = stack[at:], popped[: popped.index(pickletools.markobject)]
                del stack[at:]
            at = len(stack) - len(popped)
            keys = stack[at + 1 : at + 2] if name == "SETITEM" else []
            keys += parts[::2] if name in ("SETITEMS", "DICT") else []
            keys += parts if name in ("ADDITEMS", "FROZENSET") else []
            if any(keys):
                raise Refused("has lists as keys, as no checkpoint has")
            del stack[at:]
            stack += ["TUPLE" in name or name == "DUP" for _ in opcode.stack_after]


def _require_tree(value: Any, most: int) -> None:
    """Refuse values that hold themselves, or are nested too deeply.

    Args:
        value: what the unpickler made.
        most: how many values the file can hold: each takes at least a byte.

    Raises:
        Refused: for more values, or a depth above ``_DEPTH``.
    """
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        most -= 1
        if most < 0 or depth > _DEPTH:
            raise Refused("holds lists that are nested in each other without end")
        inner = item.values() if isinstance(item, dict) else item
        if not isinstance(item, (dict, list, tuple)):  # a stand-in has parts, other values none
            inner = () if isinstance(item, type) else getattr(item, "parts", ())
        waiting += ((part, depth + 1) for part in inner)
