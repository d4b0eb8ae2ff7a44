"""What is in a file of ``torch.save``, seen before torch reads it.

The work that a file can cause is bounded by its size: its members are stored as they are, none
twice or compressed; its values are counted, none of them made.
"""

from __future__ import annotations

import math
import os
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from recbole_pos.errors import CheckpointError
from recbole_pos.values import is_whole

# What a file may have at most: bytes of its list of members, bytes and steps of its pickle. The
# metrics of ten thousand epochs are 300,000 steps.
_DIRECTORY, _PICKLE, _STEPS = 4 * 2**20, 64 * 2**20, 2_000_000
_TOO_MUCH = "holds more than any checkpoint does, and was not read"
_DAMAGED = "is truncated or damaged"
_PICKLED = (
    "holds a pickled object, which could run code when loaded; it was refused and nothing in it "
    "was run. Checkpoints of this package hold tensors and plain values only; one of RecBole's own "
    "trainer loads with RecBole's load_data_and_model"
)
_OPCODES = frozenset(
    "PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS "
    "SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET BINUNICODE BININT BININT1 BININT2 "
    "LONG1 BINFLOAT NEWTRUE NEWFALSE NONE GLOBAL BINPERSID REDUCE".split()
)
_TENSOR, _ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_BITS = {"Double": 64, "Float": 32, "Half": 16, "BFloat16": 16, "Long": 64, "Int": 32, "Short": 16,
         "Char": 8, "Byte": 8, "Bool": 8, "ComplexFloat": 64, "ComplexDouble": 128}  # fmt: skip
_BYTES = {f"torch {name}Storage": bits // 8 for name, bits in _BITS.items()}


class _Refused(Exception):
    """What is wrong with a file."""


def require_archive(path: str | Path, plain: bool = True) -> None:
    """Refuse a file that ``torch.save`` would not have written.

    Args:
        path: the file.
        plain: whether it must hold plain values and tensors only, each list in one place.

    Raises:
        CheckpointError: if it is missing, no archive, damaged, or has in it what it must not.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        with path.open("rb") as file:
            start = file.read(2)
            if start and not b"PK".startswith(start):
                raise _Refused(
                    "is not a checkpoint of this package, and was not read; name the folder of a "
                    "run, or a .pt file in it"
                )
            _require_directory(file)
            with zipfile.ZipFile(file) as archive:
                folder, sizes = _members(archive, file.seek(0, os.SEEK_END))
                pickled = f"{folder}/data.pkl"
                if plain and sizes[pickled] > _PICKLE:
                    raise _Refused(_TOO_MUCH)
                if sizes[pickled] <= _PICKLE:  # RecBole's lists of neighbours would take minutes
                    _Values(archive.read(pickled), f"{folder}/data/", sizes, plain)
                if archive.testzip():  # torch does not look at checksums
                    raise _Refused(f"{_DAMAGED}: a checksum is wrong")
    except _Refused as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:
        raise damaged(path, error) from error


def damaged(path: str | Path, error: Exception) -> CheckpointError:
    """For whatever a reader raises: damaged bytes make it stumble anywhere."""
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return CheckpointError(f"{path} {_DAMAGED}: {reason[:200]}")


def _require_directory(file: IO[bytes]) -> None:
    """The list of members is short, and where Python's reader and torch's both look for it."""
    end = file.seek(0, os.SEEK_END) - 22
    file.seek(max(end - 76, 0))
    tail = file.read()
    if end < 0:
        raise _Refused(_DAMAGED)
    mark, size, offset, comment = struct.unpack("<4s8x2LH", tail[-22:])
    fits = mark == b"PK\5\6" and not comment
    if len(tail) == 98 and tail[-42:-38] == b"PK\6\7":  # sizes of 64 bits
        end -= 76
        (at,) = struct.unpack("<Q", tail[-34:-26])
        mark, *long = struct.unpack("<4s36x2Q", tail[:56])
        fits = fits and mark == b"PK\6\6" and at == end
        fits = fits and size in (long[0], 2**32 - 1) and offset in (long[1], 2**32 - 1)
        size, offset = long
    if not fits or offset + size != end:
        raise _Refused(_DAMAGED)
    if size > _DIRECTORY:
        raise _Refused(_TOO_MUCH)


def _members(archive: zipfile.ZipFile, length: int) -> tuple[str, dict[str, int]]:
    """The folder that all members are in, and their sizes by name."""
    members = archive.infolist()
    sizes = {member.filename: member.file_size for member in members}
    if any(name.endswith("/constants.pkl") for name in sizes):
        raise _Refused("is a program (TorchScript) and no checkpoint")
    if any(
        m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members
    ):
        raise _Refused("has compressed members, which no checkpoint has, and was not read")
    folder = members[0].filename.partition("/")[0] if members else ""
    if len(sizes) < len(members) or sum(sizes.values()) > length:
        raise _Refused(f"{_DAMAGED}: its members overlap")
    if (
        not all(name.startswith(f"{folder}/") for name in sizes)
        or f"{folder}/data.pkl" not in sizes
    ):
        raise _Refused(f"{_DAMAGED}: it has no data.pkl")
    return folder, sizes


class _Global(str):
    """The name of a class or function."""


@dataclass
class _Thing:
    """A list, mapping, tensor or object; of a storage, how many numbers it has."""

    shared: bool = False  # whether it may stand in several places
    numbers: int = -1


class _Values:
    """Follows a pickle to its end.

    A small file is a large tree if its lists stand in several places, and a tuple of such tuples is
    hashed for ever: the first is refused in a file of plain values (who reads others must count),
    tuples as keys in every file.
    """

    def __init__(self, data: bytes, folder: str, sizes: dict[str, int], plain: bool) -> None:
        self.folder, self.sizes, self.plain = folder, sizes, plain
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, Any] = {}
        given: Any
        for step, (opcode, given, _) in enumerate(pickletools.genops(data)):
            name = opcode.name
            if plain and step > _STEPS:
                raise _Refused(_TOO_MUCH)
            if plain and name not in _OPCODES:
                raise _Refused(_PICKLED)
            if name == "MARK":
                marks.append(len(stack))
            elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else int(given)] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                value = memo[int(given)]
                if plain and isinstance(value, (tuple, _Thing)) and not getattr(value, "shared", 0):
                    raise _Refused("holds a list in several places, as no checkpoint does")
                stack.append(value)
            else:
                parts: list[Any] = []
                before = opcode.stack_before
                if pickletools.markobject in before:
                    at = marks.pop()
                    parts, before = stack[at:], before[: before.index(pickletools.markobject)]
                    del stack[at:]
                below = [stack.pop() for _ in before][::-1]
                stack += self._after(opcode, given, below, parts)

    def _after(self, opcode: Any, given: Any, below: list[Any], parts: list[Any]) -> list[Any]:
        """What an opcode leaves instead of what it took from the stack."""
        match opcode.name:
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "EMPTY_TUPLE":
                return [tuple(parts or below)]
            case "NEWTRUE":
                return [True]
            case "SETITEM" | "SETITEMS":
                self._require_keys(below[1:2] + parts[::2])
                return below[:1]
            case "APPEND" | "APPENDS":
                return below[:1]
            case "ADDITEMS" | "FROZENSET":
                self._require_keys(parts)
            case "GLOBAL" | "STACK_GLOBAL":
                name = _Global(given if opcode.name == "GLOBAL" else " ".join(map(str, below)))
                if self.plain and name not in (_TENSOR, _ORDERED, *_BYTES):
                    raise _Refused(_PICKLED)
                return [name]
            case "BINPERSID":
                return [self._storage(below[0])]
            case "REDUCE":
                return [self._called(*below)]
            case _ if (
                not opcode.stack_before
                and opcode.stack_after
                and not opcode.name.startswith("EMPTY")
            ):
                return [given]
        return [_Thing() for _ in opcode.stack_after]

    def _require_keys(self, keys: list[Any]) -> None:
        if any(isinstance(key, tuple) for key in keys):
            raise _Refused("has lists as keys, as no checkpoint has")

    def _storage(self, named: Any) -> _Thing:
        """The numbers of a tensor, in a member of exactly their size: old torch believes it."""
        _, kind, key, _, numbers = named
        size = self.sizes[f"{self.folder}{key}"]
        if not is_whole(numbers) or numbers * _BYTES[kind] != size:
            raise _Refused(f"{_DAMAGED}: {numbers} numbers in {size} bytes")
        return _Thing(numbers=numbers)

    def _called(self, function: Any, args: Any) -> _Thing:
        if function == _ORDERED and args != ():
            raise _Refused(_PICKLED)
        if function == _TENSOR:
            storage, _, size, _, requires_gradient, *more = args
            if math.prod(size) > storage.numbers or self.plain and (requires_gradient or more[1:]):
                raise _Refused(f"{_DAMAGED}: a tensor is not laid out as those of checkpoints are")
            return _Thing(shared=True)
        if self.plain and function != _ORDERED:
            raise _Refused(_PICKLED)
        return _Thing()
